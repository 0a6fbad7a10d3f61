"""Which tangents reach a result, and that a region with a loop of unknown length gets no others."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxprs import equations, plan_of

import jaxsub
from jaxsub.core.decisions import Segment
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.tangents import reaching
from jaxsub.jaxpr.trace import trace

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
stop = lax.stop_gradient


def stacked(x):
    """What a scan stacks."""
    return lax.scan(lambda c, row: (jnp.sin(c + row), c[0]), x[0], x)[1]


def repeated(x, y):
    """A loop whose length only its input says; no gradient flows through it."""
    return lax.fori_loop(0, jnp.int32(2), lambda i, c: jnp.tanh(c) + stop(y), stop(x))


def counted(x, y):
    """A loop that counts how often a sum of what it reads fits."""
    return lax.while_loop(lambda n: n * jnp.sum(y * y) < 3.0, lambda n: n + 1, 0) * x


def in_branch(x, y):
    return lax.cond(jnp.sum(x) > 9.0, lambda x, y: x, lambda x, y: x * repeated(x, y), x, y)


def in_loop(x, y):
    return lax.scan(lambda c, _: (jnp.sin(c) * repeated(x, y), None), x, None, length=3)[0]


def in_call(x, y):
    return jax.checkpoint(lambda x, y: x * repeated(x, y))(x, y)


ENDS = (lambda x, y: x * repeated(x, y), counted, in_branch, in_loop, in_call)
NAMES = ("loop", "counter", "branch", "steps", "region")


def n_backward(jaxpr):
    """How many scans run from their last step to their first: the backward passes of scans."""
    return sum(bool(eqn.params.get("reverse")) for eqn in equations(jaxpr))


@pytest.mark.parametrize("end", ENDS, ids=NAMES)
@pytest.mark.parametrize("is_nested", [False, True], ids=["region", "nest"])
def test_a_region_with_a_while_is_given_no_tangents_that_end_in_it(end, is_nested):
    """Gradients are the plain ones, and the scan that only such a region reads has no backward pass."""
    program = trace(lambda x: jnp.sum(end(x[0], stacked(x))), (X,), {})
    start = next(n.index for n in program.graph.nodes if n.primitive == "scan") + 1
    run = emit(
        program, plan_of(program, Segment(start, len(program.eqns), (), (Segment(start, start + 2),) * is_nested))
    )
    gradient = jax.make_jaxpr(jax.grad(lambda x: run(*program.consts, x)[0]))(X)
    alone = jax.make_jaxpr(jax.grad(lambda x, y: jnp.sum(end(x, y))))(X[0], stacked(X))
    plain = jnp.zeros((4, 4)).at[0].set(jax.core.eval_jaxpr(alone.jaxpr, alone.consts, X[0], stacked(X))[0])
    chex.assert_trees_all_close(jax.core.eval_jaxpr(gradient.jaxpr, gradient.consts, X)[0], plain, rtol=1e-6)
    assert n_backward(gradient) == n_backward(alone)


@pytest.mark.parametrize("n", [1, 3])
def test_tangents_that_go_on_are_kept(n):
    """Forward derivatives through a loop of unknown length are the plain ones: only what ends in it is stopped."""

    def fun(x):
        grown = lax.fori_loop(0, jnp.int32(n), lambda i, c: (jnp.sin(c[1]) * x, c[0] + stop(x)), (x, x * x))
        return jnp.sum(grown[0] * jnp.cos(x))

    program = trace(fun, (X,), {})
    run = emit(program, plan_of(program, Segment(0, len(program.eqns))))
    tangent = jnp.cos(3 * X)
    got, wanted = (jax.jvp(f, (X,), (tangent,)) for f in (lambda x: run(*program.consts, x)[0], fun))
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)


@jax.custom_jvp
def exact(t):
    """What refuses a tangent."""
    return t


@exact.defjvp
def _refuse(primals, tangents):
    raise RuntimeError("`exact` cannot be differentiated")


def solved(x, end):
    """A differential equation whose time, a float that its loop carries, is read by what refuses a tangent.

    Steps are short: with longer ones it is chaos, which no rounding leaves alone.
    """

    def step(carry, _):
        t, y = carry
        y = lax.cond(t < end, lambda y: y + 0.01 * jnp.sin(y @ y.T) @ y * exact(t), lambda y: y, y)
        return (t + 0.1, y), None

    return jnp.sum(lax.scan(step, (0.0, x), None, length=16)[0][1] ** 2)


def test_what_a_loop_carries_beside_what_is_differentiated_has_no_tangent():
    """Such a loop is planned like any other: a step recomputes."""
    x = jnp.linspace(-1.0, 1.0, 48 * 8).reshape(48, 8)
    plain = jaxsub.measure(solved, x, 1.0).temp_bytes
    plan = jaxsub.plan(solved, x, 1.0, budget=0.4, chunks=False, progress=False)
    assert plan.measurement.temp_bytes <= 0.4 * plain
    assert plan.loops
    small = jaxsub.jit(jax.grad(jaxsub.sublinear(solved, plan=plan)))(x, 1.0)
    plainly = jax.grad(solved)(x, 1.0)
    chex.assert_trees_all_close(small, plainly, rtol=1e-5, atol=1e-5 * float(jnp.abs(plainly).max()))


def shifted(x, y, z):
    """What a step is given reaches the result two steps later."""
    return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[2], c[1] * y, stop(z)), (0, x, x, z))[1]


def scanned(x, y, z):
    """Only the last carry is read; the rows of one input end in what is stacked."""
    return lax.scan(lambda c, row: (jnp.sin(c), row * c), x[0], (y * stop(z)))[0]


def branched(x, y, z):
    return lax.cond(x[0, 0] > 0, lambda x, y, z: x, lambda x, y, z: jnp.round(z) + y, x, y, z)


@pytest.mark.parametrize(
    ("fun", "wanted"),
    [
        (shifted, [True, True, False]),
        (scanned, [True, False, False]),
        (branched, [True, True, False]),
        (lambda x, y, z: jax.jit(shifted, inline=False)(z, x, y), [True, False, True]),
        (lambda x, y, z: jax.checkpoint(branched)(z, x, y), [True, False, True]),
        (lambda x, y, z: jnp.argmax(x) * y, [False, True, False]),
        (lambda x, y, z: jax.nn.relu(x) + stop(y), [True, False, False]),
    ],
    ids=["while", "scan", "cond", "call", "region", "integers", "rule"],
)
def test_tangents_are_followed_through_loops_and_branches(fun, wanted):
    """An input reaches a result if a tangent does, through as many steps of a loop as it takes."""
    jaxpr = jax.make_jaxpr(fun)(X, X, X)
    found = reaching(jaxpr.eqns, jaxpr.jaxpr.outvars)
    assert [v in found for v in jaxpr.jaxpr.invars] == wanted
