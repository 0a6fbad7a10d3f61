"""Equations are told apart by what they compute, derivative rules of their own included."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxsub
from jaxsub.core.decisions import Slices
from jaxsub.emission.folding import with_slices
from jaxsub.jaxpr.trace import trace


def jvp_loss(rule):
    """A loss with a function whose tangents a rule makes."""

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), rule(*primals) * tangents[0]))
    return lambda x: jnp.sum(f(x) ** 2)


def vjp_loss(rule):
    """A loss with a function whose forward pass saves what a rule makes."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), rule(x)), lambda saved, ct: (ct * saved,))
    return lambda x: jnp.sum(f(x) ** 2)


def looped(make):
    """The same in the body of a loop, an element's losses added up at its end."""

    def made(rule):
        inner = make(rule)
        return lambda x: jnp.sum(jax.lax.fori_loop(0, 3, lambda _, y: jax.vmap(inner)(y), x))

    return made


def simple(x):
    """The derivative of a sine."""
    return jnp.cos(x)


def costly(x):
    """One that makes ten arrays."""
    return sum(jnp.tanh(x * i) for i in range(10))


@pytest.mark.parametrize("make", [jvp_loss, vjp_loss, looped(jvp_loss), looped(vjp_loss)])
@pytest.mark.parametrize("is_sliced", [False, True])
def test_programs_with_other_derivative_rules_differ(make, is_sliced):
    """A plan, and what was measured of it, is no other program's: a rule decides what the gradient needs."""

    def program(rule):
        traced = trace(make(rule), [jnp.ones(8)], {})
        return with_slices(traced, [Slices(0, len(traced.eqns), 0, 0, 2)]) if is_sliced else traced

    one, same, other = (program(rule).fingerprint for rule in (simple, simple, costly))
    assert one == same
    assert one != other


NAMES = jax.checkpoint_policies.save_only_these_names


@pytest.mark.parametrize("checkpoint", [jax.checkpoint, jaxsub.policies.checkpoint])
@pytest.mark.parametrize("policy", [
    NAMES,
    lambda name: jax.checkpoint_policies.save_from_both_policies(NAMES(name), jax.checkpoint_policies.dots_saveable),
    lambda name: jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name], names_which_can_be_offloaded=[], offload_src="device",
        offload_dst="pinned_host"),
    lambda name: lambda primitive, *_, **params: params.get("name") == name,
    lambda name: functools.partial(lambda wanted, primitive, *_, **params: params.get("name") == wanted, name),
])  # fmt: skip
def test_programs_with_other_policies_differ(policy, checkpoint):
    """A region's policy is a function, and decides what the gradient needs."""

    def traced(name):
        @functools.partial(checkpoint, policy=policy(name))
        def f(x):
            return jnp.sin(checkpoint_name(jnp.tanh(checkpoint_name(jnp.sin(x), "first")), "second"))

        return trace(lambda x: jnp.sum(f(x)), [jnp.ones(8)], {}).fingerprint

    assert traced("first") == traced("first")
    assert traced("first") != traced("second")


def test_a_plan_in_the_cache_is_for_the_rules_it_was_made_with(tmp_path):
    """The second function differs in its backward pass alone, and needs more."""
    x = jnp.ones((512, 256))
    rules = simple, lambda x: jnp.cumsum(jnp.cumsum(jnp.cos(x), 0) @ jnp.ones((256, 256)), 0)
    few, many = (jaxsub.plan(vjp_loss(rule), x, budget="1GiB", cache=tmp_path, progress=False) for rule in rules)
    assert many.measurement.temp_bytes > few.measurement.temp_bytes


POLICY_OF_A_SET = """
import jax, jax.numpy as jnp
from jaxsub.jaxpr.trace import trace
policy = lambda primitive, *_, **params: primitive.name in {"sin", "cos", "tanh", "exp", "log"}
print(trace(lambda x: jnp.sum(jax.checkpoint(jnp.sin, policy=policy)(x)), [jnp.ones(8)], {}).fingerprint)
"""


def test_a_policy_is_the_same_in_every_process():
    """A set has another order in each, also in the code of a function."""
    found = [
        subprocess.run([sys.executable, "-c", POLICY_OF_A_SET], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                       capture_output=True, check=True).stdout
        for seed in "123"
    ]  # fmt: skip
    assert len(set(found)) == 1
