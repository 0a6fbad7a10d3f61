"""A step as flat equations: where a scan may run twice."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsub.step.flat_step import FlatStep, run_twice

WEIGHTS = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def scaled_by(total):
    """A step that scales what a scan stacks by a total; its equations, the scan's place and the total."""

    def step(weights, x, y):
        _, stacked = lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.cos(c @ w)), x, weights)
        return weights - stacked * total(stacked, y)

    flat = FlatStep.of(jax.make_jaxpr(step)(WEIGHTS, X, X), [False] * 3)
    place = next(i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "scan")
    sums = [eqn.outvars[0] for eqn in flat.eqns if eqn.primitive.name == "reduce_sum"]
    return flat, place, sums


def test_a_scan_runs_twice_for_a_total_of_what_it_stacks():
    """First for the total, then for all else."""
    flat, place, sums = scaled_by(lambda stacked, y: jnp.sum(stacked))
    twice, second = run_twice(flat, place, flat.stacked(place), sums)
    scans = [eqn for eqn in twice.eqns if eqn.primitive.name == "scan"]
    assert scans == [flat.eqns[place], second]


def test_a_scan_does_not_run_twice_for_a_total_of_something_else():
    """A norm of other gradients, as where each network is clipped by itself: one run is for nothing."""
    flat, place, sums = scaled_by(lambda stacked, y: jnp.sum(jnp.sin(y)))
    assert run_twice(flat, place, flat.stacked(place), sums) is None
