"""Refusals: what they name, that it is met, and that they are remembered."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from layers import scanned, unrolled

import jaxsub
from jaxsub.core.budget import format_bytes
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import recomputed_share
from jaxsub.search import pipeline
from jaxsub.search.verify import Verifier


def test_where_nothing_helps_the_least_is_the_function_as_it_is():
    """One layer's gradient cannot be made smaller by recomputation: no larger plan is named as the least."""

    def layer(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    plain = jaxsub.measure(layer, *args).temp_bytes
    with pytest.raises(
        InfeasibleBudgetError, match=r"below what the function needs with nothing recomputed, and no plan"
    ) as refused:
        jaxsub.plan(layer, *args, budget=plain // 3, chunks=False, progress=False)
    assert refused.value.least_bytes == plain
    assert recomputed_share(jaxsub.plan(layer, *args, budget=plain, chunks=False, progress=False)) < 0.03


def test_a_refusal_is_remembered(tmp_path, monkeypatch):
    """The second time it is told without any compile, in the same words."""

    def layer(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    said = []
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError) as refused:
            jaxsub.plan(layer, *args, budget=1000, cache=tmp_path, chunks=False, progress=False)
        said.append((str(refused.value), refused.value.least_bytes, refused.value.holders))
        monkeypatch.setattr(Verifier, "_compile", None)
    assert said[0] == said[1]


def block(x, p):
    return x + jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"])


def coupled(layer):
    """Rows are coupled in each layer, so that nothing runs in slices."""
    return unrolled(lambda x, p: layer(x, p) - x.mean(0))


def slope(layer):
    energy = coupled(layer)
    return lambda params, x: (jax.grad(energy, 1)(params, x) ** 2).mean()


BLOCKS = {"up": jax.ShapeDtypeStruct((4, 32, 128), "float32"), "down": jax.ShapeDtypeStruct((4, 128, 32), "float32")}
ROWS = jax.ShapeDtypeStruct((512, 32), "float32")
REFUSED = {
    "regions": coupled(block),
    "slices": scanned(block),
    "own regions": coupled(jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)),
    "inner gradients": slope(block),
}


@pytest.mark.parametrize(("kind", "is_on_disk"), [*((kind, True) for kind in REFUSED), ("regions", False)])
def test_the_least_that_a_refusal_names_is_planned_already(kind, is_on_disk, tmp_path, monkeypatch):
    """Its plan comes with the refusal, and is found where that budget is asked for: nothing is compiled again."""
    loss = REFUSED[kind]
    asked = dict(cache=tmp_path if is_on_disk else False, progress=False)
    with pytest.raises(InfeasibleBudgetError) as refused:
        jaxsub.plan(loss, BLOCKS, ROWS, budget=10_000, **asked)
    least, plan = refused.value.least_bytes, refused.value.plan
    again = jaxsub.sublinear(loss, plan=plan, progress=False)
    assert jaxsub.measure(again, BLOCKS, ROWS).temp_bytes == least
    monkeypatch.setattr(Verifier, "_compile", None)
    found = jaxsub.plan(loss, BLOCKS, ROWS, budget=least, **asked)
    assert found.measurement.temp_bytes == least
    assert (found.slices, found.opened_regions, found.clones) == (plan.slices, plan.opened_regions, plan.clones)


def test_a_budget_above_a_least_that_is_known_is_never_refused(tmp_path, monkeypatch, capsys):
    """Whatever the search finds for it."""
    asked = dict(cache=tmp_path, progress=True)
    with pytest.raises(InfeasibleBudgetError) as refused:
        jaxsub.plan(REFUSED["regions"], BLOCKS, ROWS, budget=10_000, **asked)
    least = refused.value.least_bytes

    def refuse(program, settings, target, store):
        n_bytes = settings.budget.n_bytes or int(settings.budget.fraction * 4 * least)
        raise InfeasibleBudgetError("no", requested_bytes=n_bytes, least_bytes=2 * least)

    monkeypatch.setattr(pipeline, "_planned", refuse)
    for budget in (int(1.3 * least), 0.5):
        plan = jaxsub.plan(REFUSED["regions"], BLOCKS, ROWS, budget=budget, **asked)
        assert plan.measurement.temp_bytes == least
    with pytest.raises(InfeasibleBudgetError, match="no"):
        jaxsub.plan(REFUSED["regions"], BLOCKS, ROWS, budget=least - 1, **asked)


def test_a_budget_that_was_refused_is_met_once_a_lower_least_is_known(tmp_path, monkeypatch):
    """Another budget's refusal may name less: what was refused before is not refused again."""
    asked = dict(cache=tmp_path, progress=False)
    search = pipeline._planned

    def refuse(program, settings, target, store):
        raise InfeasibleBudgetError("no", requested_bytes=settings.budget.n_bytes, least_bytes=2**40)

    monkeypatch.setattr(pipeline, "_planned", refuse)
    with pytest.raises(InfeasibleBudgetError, match="no"):
        jaxsub.plan(REFUSED["regions"], BLOCKS, ROWS, budget="3MiB", **asked)
    monkeypatch.setattr(pipeline, "_planned", search)
    with pytest.raises(InfeasibleBudgetError) as refused:
        jaxsub.plan(REFUSED["regions"], BLOCKS, ROWS, budget=10_000, **asked)
    assert refused.value.least_bytes < 3 * 2**20
    monkeypatch.setattr(pipeline, "_planned", refuse)
    plan = jaxsub.plan(REFUSED["regions"], BLOCKS, ROWS, budget="3MiB", **asked)
    assert plan.measurement.temp_bytes == refused.value.least_bytes


def test_what_is_never_cut_is_named():
    """Where a backward pass of the user's own holds the peak, the refusal says that it is not cut, with its line."""

    @jax.custom_vjp
    def kernel(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        hidden = [jnp.sin(x @ w * i) for i in range(8)]
        return sum(hidden), (hidden, x, w)

    def backward(kept, c):
        hidden, x, w = kept
        c = c * sum(hidden)
        return c @ w.T, x.T @ c

    kernel.defvjp(forward, backward)

    def loss(ws, x):
        for w in ws:
            x = kernel(jnp.tanh(x @ w), w)
        return jnp.sum(x**2)

    ws, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4, jax.ShapeDtypeStruct((256, 64), jnp.float32)
    words = (
        r"`custom_vjp_call` at test_refusals.py:\d+ .* has a backward pass of its own: what it saves for it is not cut"
    )
    with pytest.raises(InfeasibleBudgetError, match=words):
        jaxsub.plan(loss, ws, x, budget="64KiB", chunks=False, progress=False, cache=False)


def test_a_refusal_names_regions_and_maps_that_are_never_cut():
    def layers(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    ws, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((1024, 64), jnp.float32)

    refused_before = jaxsub.plan(jax.checkpoint(layers), ws, x, budget=0.6, chunks=False, progress=False, cache=False)
    assert refused_before.opened_regions == 1

    def slope(ws, x):
        return jnp.sum(jax.grad(jax.checkpoint(layers), 1)(ws, x) ** 2)

    words = r"`(checkpoint|remat2?)` .*is a jax.checkpoint region that stays as it is"
    with pytest.raises(InfeasibleBudgetError, match=words) as refused:
        jaxsub.plan(slope, ws, x, budget=0.6, planner="optimal", chunks=False, progress=False, cache=False)
    (holder,) = refused.value.holders
    assert holder.startswith("100%")

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(layers, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec(),
                           check_vma=False)  # fmt: skip
    words = r"`shard_map` .*is one equation to a plan: put sublinear round"
    with pytest.raises(InfeasibleBudgetError, match=words) as refused:
        jaxsub.plan(mapped, ws, x, budget=0.6, chunks=False, progress=False, cache=False)
    (holder,) = refused.value.holders
    assert f"({format_bytes(refused.value.least_bytes)})" in holder


def test_what_one_budget_was_found_to_need_no_other_is_refused(tmp_path):
    """A loop whose larger budget finds a plan in slices that needs less than the least plans of a smaller one."""

    def loss(ws, x):
        def body(carry, w):
            x, n = carry
            return (jax.lax.cond(n % 2 == 0, lambda x: jnp.sin(x @ w), lambda x: jnp.tanh(x @ w), x), n + 1), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(body), (x, 0), ws)[0][0] ** 2)

    args = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8, jax.random.normal(jax.random.key(1), (512, 64))
    found = jaxsub.plan(loss, *args, budget=0.25, progress=False, cache=tmp_path)
    for n_bytes in (found.measurement.temp_bytes, found.measurement.temp_bytes + 2000):
        plan = jaxsub.plan(loss, *args, budget=n_bytes, progress=False, cache=tmp_path)
        assert plan.measurement.temp_bytes <= n_bytes
    for _ in range(2):  # a refusal that is kept says so too
        with pytest.raises(InfeasibleBudgetError, match="Pass budget=") as refused:
            jaxsub.plan(loss, *args, budget=100, progress=False, cache=tmp_path)
        assert refused.value.least_bytes <= found.measurement.temp_bytes
        assert refused.value.plan.measurement.temp_bytes == refused.value.least_bytes
