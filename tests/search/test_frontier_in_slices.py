"""Frontiers with runs in slices: points below what one stage needs at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import mixing_layers, tanh_layers
from test_slicing import HEAD, X, Y, classify

import jaxsub
from jaxsub.search.slicing import ChunksError

ARGS = (HEAD, X, Y)


DEEP = [jnp.eye(64)] * 12, jnp.ones((8192, 64))


@pytest.mark.parametrize(("fun", "args"), [(classify, ARGS), (tanh_layers, DEEP)], ids=["head", "whole function"])
def test_a_frontier_goes_below_the_floor(fun, args):
    """Points in slices need, compiled, less than half of the least without them; the last is the plain program."""
    whole = jaxsub.frontier(fun, *args, chunks=False, verify=True, cache=False).points
    found = jaxsub.frontier(fun, *args, verify=True, cache=False).points
    assert not any(point.plan.slices for point in whole)
    assert found[0].plan.slices
    assert found[0].name == "in slices"
    assert 2 * found[0].plan.measurement.temp_bytes < whole[0].plan.measurement.temp_bytes
    for point in found:
        assert point.plan.measurement.temp_bytes <= 1.1 * point.temp_bytes, point
    assert found[-1].extra == 0
    assert not found[-1].plan.slices


@pytest.mark.parametrize(("fun", "args"), [(classify, ARGS), (tanh_layers, DEEP)], ids=["head", "whole function"])
def test_memory_rises_and_recompute_falls_along_slices_too(fun, args):
    """With `chunks=True` no point is better than another in both."""
    found = jaxsub.frontier(fun, *args, chunks=True, points=20, cache=False).points
    memory, extra = [point.temp_bytes for point in found], [point.extra for point in found]
    assert memory == sorted(set(memory))
    assert extra == sorted(set(extra), reverse=True)


def test_whole_functions_in_slices_recompute_inside_of_them():
    """Below what its slices need, a slice of a whole function is planned itself."""
    args = [jnp.eye(64)] * 8, jnp.ones((4, 64, 1024))
    points = jaxsub.frontier(mixing_layers, *args, verify=True, points=12, cache=False).points
    inside = [p for p in points if any(run.inside.segments for run in p.plan.slices)]
    assert inside
    for point in inside:
        assert point.extra > 0
        assert point.plan.measurement.temp_bytes <= 1.1 * point.temp_bytes
    got, want = (jax.grad(f)(*args) for f in (jaxsub.sublinear(mixing_layers, plan=inside[0].plan), mixing_layers))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_a_plan_in_slices_of_a_frontier_can_be_used():
    """A point's plan gives the plain gradient, and says by name what runs in slices."""
    plan = jaxsub.frontier(classify, *ARGS, cache=False).plans[0]
    assert "in slices" in str(plan)
    got, want = (jax.grad(f)(*ARGS) for f in (jaxsub.sublinear(classify, plan=plan), classify))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_asked_for_by_name_holds_along_the_whole_frontier():
    """Counts by name are those of every point; a wrapped function's own `chunks=` are its frontier's."""
    found = jaxsub.frontier(classify, *ARGS, chunks={"head": 4}, cache=False)
    assert {run.count for plan in found.plans for run in plan.slices} == {4}
    assert all(plan.slices for plan in found.plans)
    assert jaxsub.sublinear(classify, chunks={"head": 4}, cache=False).frontier(*ARGS) == found
    assert not any(p.slices for p in jaxsub.sublinear(classify, chunks=False, cache=False).frontier(*ARGS).plans)


def test_what_is_asked_for_in_vain_is_refused():
    """A scope that is not there, and a word that is none."""
    with pytest.raises(ChunksError, match="chunks= names 'tail'"):
        jaxsub.frontier(classify, *ARGS, chunks={"tail": 4}, cache=False)
    with pytest.raises(ValueError, match='chunks is "auto", True, False or'):
        jaxsub.frontier(classify, *ARGS, chunks="never", cache=False)
