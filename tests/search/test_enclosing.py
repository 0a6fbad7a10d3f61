"""Sublinear functions inside one another: the outermost plans for all of it."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jaxprs import regions

import jaxsub

WEIGHTS = [0.9 * jnp.eye(64) for _ in range(6)]
X = jnp.sin(jnp.arange(1024.0 * 64).reshape(1024, 64))
OPTIONS: Any = {"chunks": False, "progress": False}


def block(w: jax.Array, x: jax.Array) -> jax.Array:
    """One layer, whose three values in between are recomputed or saved."""
    for _ in range(3):
        x = jnp.tanh(jnp.sin(x @ w))
    return x


def loss_of(layer: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """A loss that calls a layer for each weight."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(w, x)
        return jnp.mean(x**2)

    return loss


def planned(loss: Callable[..., Any], budget: Any) -> jaxsub.Plan:
    """The plan of a loss."""
    return jaxsub.plan(loss, WEIGHTS, X, budget=budget, **OPTIONS)


@pytest.mark.parametrize("inner", [0.6, None, 1.0])
def test_the_outer_budget_plans_what_is_inside(inner):
    """The plan is the one that the loss has with plain layers, and so is the gradient."""
    nested = loss_of(jaxsub.sublinear(block, budget=inner, **OPTIONS))
    found, expected = planned(nested, 0.45), planned(loss_of(block), 0.45)
    assert found.segments == expected.segments
    assert found.fingerprint == expected.fingerprint
    assert found.measurement.temp_bytes == expected.measurement.temp_bytes
    wrapped = jaxsub.sublinear(nested, budget=0.45, **OPTIONS)
    chex.assert_trees_all_close(jax.grad(wrapped)(WEIGHTS, X), jax.grad(loss_of(block))(WEIGHTS, X), rtol=1e-5)


def test_the_users_own_counts_stay_inside():
    """A layer whose values the user counted keeps its region, whatever is planned around it."""
    counted = jaxsub.sublinear(block, mirror=lambda node: 1, **OPTIONS)
    nested = jaxsub.sublinear(loss_of(counted), budget=1.0, **OPTIONS)
    assert len(list(regions(jax.make_jaxpr(nested)(WEIGHTS, X).jaxpr))) == len(WEIGHTS)
    chex.assert_trees_all_close(jax.grad(nested)(WEIGHTS, X), jax.grad(loss_of(block))(WEIGHTS, X), rtol=1e-5)


def test_what_the_outer_plan_cannot_see_plans_for_itself():
    """A `jax.shard_map` is one equation to a plan: a function inside keeps its own, unless both are inside."""
    inner = jaxsub.sublinear(loss_of(block), budget=0.45, verify=False, **OPTIONS)
    spec = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def mapped(f):
        return jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec)

    def regions_of(f):
        return len(list(regions(jax.make_jaxpr(f)(WEIGHTS, X).jaxpr)))

    def twice(f):
        return jaxsub.sublinear(lambda weights, x: f(weights, x) * 2.0, budget=1.0, verify=False, **OPTIONS)

    assert regions_of(inner) > 0
    assert regions_of(twice(mapped(inner))) == regions_of(inner)
    assert regions_of(mapped(twice(inner))) == regions_of(twice(inner)) == 0


def test_alone_a_function_plans_for_itself_as_before():
    """What was called inside of another keeps its own budget outside of it, before and after."""
    small = jaxsub.sublinear(lambda w, x: jnp.mean(block(w, x) ** 2), budget=0.7, **OPTIONS)
    before = small.plan(WEIGHTS[0], X)
    jax.grad(jaxsub.sublinear(lambda w, x: small(w, x) + 1.0, budget=0.9, **OPTIONS))(WEIGHTS[0], X)
    assert small.plan(WEIGHTS[0], X).segments == before.segments


def test_three_deep_and_in_a_step():
    """A step plans the outermost; a refusal names what the functions inside do, not a call of them."""
    layer = jaxsub.sublinear(block, budget=0.7, **OPTIONS)

    @functools.partial(jaxsub.sublinear, budget=0.7, **OPTIONS)
    def two(pair, x):
        return layer(pair[1], layer(pair[0], x))

    def loss(weights, x):
        for i in range(0, len(weights), 2):
            x = two(weights[i : i + 2], x)
        return jnp.mean(x**2)

    outer = jaxsub.sublinear(loss, **OPTIONS)

    def updated(weights, x):
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(outer)(weights, x))

    step = jaxsub.jit(updated, memory=0.4, progress=False)
    report = step.report(WEIGHTS, X)
    assert len(report.sites) == 1
    assert report.step_bytes <= report.memory_bytes
    with pytest.raises(jaxsub.InfeasibleBudgetError) as caught:
        planned(loss, "10KiB")
    assert "custom_jvp" not in str(caught.value)
    assert "checkpoint" not in str(caught.value)
