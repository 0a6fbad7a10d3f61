"""Grouped convolutions in plans for a CPU: the same numbers as JAX's gradient, in a small part of its memory."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax, random
from jaxprs import equations

import jaxsub
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.trace import trace

LAYOUTS = {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW")}
CASES = {
    "depthwise": (64, 1, 1, "NHWC", 1),
    "strided, two for each": (40, 1, 2, "NHWC", 2),
    "groups of four": (96, 4, 1, "NCHW", 1),
    "last block is smaller": (72, 1, 1, "NHWC", 1),
}


def convolved(w, x, stride, layout, groups):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=LAYOUTS[layout],
                                    feature_group_count=groups)  # fmt: skip


def arguments(channels, width, stride, layout, makes, side=6):
    """Weights and images, and the function of both."""
    groups = channels // width
    spec = {"H": 3, "W": 3, "I": width, "O": channels * makes}
    w = random.normal(random.key(0), [spec[c] for c in LAYOUTS[layout][1]])
    x = random.normal(random.key(1), [{"N": 2, "C": channels}.get(c, side) for c in LAYOUTS[layout][0]])
    return lambda w, x: jnp.sum(jnp.sin(convolved(w, jnp.tanh(x), stride, layout, groups))), w, x


def planned(fun, *args):
    """The function with everything but its last equation in a region, compiled for a CPU."""
    program = replace(trace(fun, args, {}, argnums=(0, 1)), platform="cpu")
    run = emit(program, Plan(program.fingerprint, Budget(), len(program.eqns), (Segment(0, len(program.eqns) - 1),)))
    return lambda *args: run(*args)[0]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_jax(case):
    """Of weights and images, in reverse and forward mode, to second order and under vmap."""
    fun, w, x = arguments(*CASES[case])

    def figures(f):
        both = jax.grad(f, (0, 1))
        second = jax.grad(lambda w: jnp.sum(both(w, x)[0] ** 2))(w)
        pushed = jax.jvp(f, (w, x), (jnp.cos(w), jnp.cos(x)))
        each = jax.vmap(jax.grad(f), (None, 0))(w, jnp.stack([x, -x]))
        return both(w, x), jax.grad(f)(w, x), second, pushed, each

    ours, theirs = (jax.jit(figures, static_argnums=0)(f) for f in (planned(fun, w, x), fun))
    chex.assert_trees_all_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_a_plan_for_a_gpu_keeps_the_rule_of_jax():
    """Its compiler has kernels for groups."""
    fun, w, x = arguments(*CASES["depthwise"])
    plan = jaxsub.plan(fun, w, x, planner="chen", target="h100", progress=False)
    there = jax.make_jaxpr(jax.grad(jaxsub.sublinear(fun, plan=plan, target="h100", progress=False)))(w, x)
    here = jax.make_jaxpr(jax.grad(planned(fun, w, x)))(w, x)
    counts = [sum(eqn.primitive.name == "conv_general_dilated" for eqn in equations(jaxpr)) for jaxpr in (there, here)]
    assert counts[0] < counts[1]


@pytest.mark.parametrize("count", [1, 2])
def test_no_weights_gradient_is_made_for_all_pairs_of_channels(count):
    """A depthwise layer whose dense kernel is larger than all else, whole and in slices of the batch."""
    fun, w, x = arguments(512, 1, 1, "NHWC", 1)
    chunks = {0: count} if count > 1 else False
    plan = jaxsub.plan(fun, w, x, budget="6MiB", chunks=chunks, progress=False, cache=False)
    plain = jaxsub.measure(fun, w, x).temp_bytes
    print(f"{plain / 2**20:.1f} MiB plainly, {plan.measurement.temp_bytes / 2**20:.1f} under a plan")
    assert plain >= 2 * 3 * 3 * 512 * 512 * 4
    assert plan.measurement.temp_bytes < 3 * 3 * 512 * 512 * 4 / 2
    ours = jaxsub.jit(jax.grad(jaxsub.sublinear(fun, plan=plan, progress=False)))(w, x)
    chex.assert_trees_all_close(ours, jax.grad(fun)(w, x), rtol=1e-4, atol=1e-4)
