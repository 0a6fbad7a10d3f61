"""What the counterparts of JAX's own tests of `jax.checkpoint` share: ways to wrap a function, and what is counted.

Where JAX wraps a function in `jax.remat`, here the whole of it is one region (`whole`); where JAX gives a policy, here
a plan saves the results of the same primitives (`saving`), or the policy is the user's own, round or inside.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxprs import equations

import jaxsub
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import trace

policies = jax.checkpoint_policies
make = functools.partial(jaxsub.sublinear, cache=False, progress=False)
predicted = functools.partial(make, verify=False)
plain = functools.partial(make, planner="plain", verify=False)
whole = functools.partial(make, mirror=lambda node: int(node.can_recompute))


def saving(*primitives):
    """One region round everything, which saves the results of some primitives."""

    def wrap(f):
        @functools.wraps(f)
        def call(*args):
            program = trace(f, args, {})
            graph = program.graph
            saved = tuple(v for node in graph.nodes if node.primitive in primitives for v in node.outputs)
            segment = Segment(0, len(graph.nodes), saved)
            return jaxsub.sublinear(f, plan=Plan(program.fingerprint, Budget(), len(graph.nodes), (segment,)))(*args)

        return call

    return wrap


FAST = {"xla_backend_optimization_level": 0}
everywhere = pytest.mark.parametrize("wrap", [whole, predicted], ids=["whole", "predicted"])


def executed(jaxpr):
    """The primitives of a jaxpr and of all that it calls, each time it does."""
    return (eqn.primitive.name for eqn in equations(jaxpr))


def backward(f, *args):
    """How often the backward pass of a function executes each primitive."""
    y, pullback = jax.vjp(f, *args)
    names = list(executed(jax.make_jaxpr(pullback)(jax.tree.map(jnp.ones_like, y))))
    return {name: names.count(name) for name in ("sin", "cos", "dot_general", "exp")}


def stored(f, *args):
    """The shapes of what the backward pass of a function reads beside the arguments."""
    traced = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]))(*args)
    jaxpr = compat.open_jaxpr(traced)
    return [v.aval.shape for v in jaxpr.outvars if compat.is_var(v) and v not in set(jaxpr.invars)]


def stores_as_much(f, policy, *args):
    """Whether under a policy of the user's a planned function stores what the plain one stores."""
    found, wanted = (stored(jax.checkpoint(g, policy=policy), *args) for g in (plain(f), f))
    assert found == wanted
    return len(found)


def same(got, wanted, rtol=1e-5):
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=1e-6)


def check_derivatives(f, wanted, x, modes=("fwd", "rev")):
    """First and second derivatives of a function are another's."""

    def derivatives(f):
        loss = lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x))))  # noqa: E731
        twice = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) * x))
        tangents = lambda x: jax.jvp(jax.grad(loss), (x,), (x,)) if "fwd" in modes else x  # noqa: E731
        run = jax.jit(lambda x: (jax.value_and_grad(loss)(x), twice(x), tangents(x)), compiler_options=FAST)
        return run(x)

    same(derivatives(f), derivatives(wanted), rtol=1e-4)


def sines(x):
    return lax.sin(lax.sin(x))
