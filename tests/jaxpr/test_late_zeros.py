"""Sums over segments in plans for a CPU: the same numbers, their zeros made where they are used."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import random

import jaxsub
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.devices.targets import get_target
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.trace import trace
from jaxsub.search.verify import measured

NODES, EDGES, WIDTH, LAYERS = 1024, 1024, 64, 6


def loss(weights, x, senders, receivers):
    """A graph network: messages along edges, summed up where they arrive."""
    for w in weights:
        messages = jnp.tanh(x[senders] @ w)
        x = x + jnp.sin(jax.ops.segment_sum(messages, receivers, NODES))
    return jnp.sum(x**2)


def arguments():
    k = random.split(random.key(0), 4)
    weights = list(random.normal(k[0], (LAYERS, WIDTH, WIDTH)) / 8)
    ends = [random.randint(k, (EDGES,), 0, NODES) for k in k[1:3]]
    return weights, random.normal(k[3], (NODES, WIDTH)), *ends


@pytest.mark.parametrize("is_number", [True, False])
def test_sums_and_gradients_are_those_of_jax(is_number):
    """Also where what is summed up holds a NaN."""
    weights, x, *ends = arguments()
    x = x if is_number else x.at[3].set(jnp.nan)
    planned = jaxsub.sublinear(loss, planner="chen", progress=False, cache=False)
    ours, theirs = (jaxsub.jit(jax.value_and_grad(f))(weights, x, *ends) for f in (planned, loss))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_zeros_are_not_live_from_the_start():
    """Of layers that are each recomputed before their gradient, no layer's zeros are live while others' are used."""
    args = arguments()
    traced = trace(loss, args, {})
    n = (len(traced.eqns) - 2) // LAYERS
    segments = tuple(Segment(n * i, n * (i + 1)) for i in range(LAYERS))
    plan = Plan(traced.fingerprint, Budget(), len(traced.eqns), segments)
    unknown, cpu = (replace(traced, platform=name) for name in ("", "cpu"))
    needed = [measured(program, emit(program, plan), get_target(None)).temp_bytes for program in (unknown, cpu)]
    print(f"{needed[0] / 2**20:.2f} MiB with zeros made at the start, {needed[1] / 2**20:.2f} with late ones")
    assert needed[1] < needed[0] - (LAYERS - 2) * NODES * WIDTH * 4
