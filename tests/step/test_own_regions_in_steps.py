"""Steps whose functions have `jax.checkpoint` regions of their own: planned anew where that recomputes less."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from layers import scanned, unrolled

import jaxsub
from jaxsub.core.step_plan import StepPlan

DEPTH, WIDTH, ROWS = 4, 64, 1024
OPTIMIZER = optax.adam(1e-3)
DONATED = {"donate_argnums": (0, 1), "progress": False, "fuse_updates": False}


def layer(x, p):
    return x + jnp.tanh(jax.nn.gelu(x @ p["up"]) @ p["down"])


FORMS = {"unrolled": unrolled, "in a scan": scanned}


def step_of(loss):
    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments():
    params = {"up": jnp.ones((DEPTH, WIDTH, 4 * WIDTH)) / 64, "down": jnp.ones((DEPTH, 4 * WIDTH, WIDTH)) / 64}
    return params, OPTIMIZER.init(params), jnp.cos(jnp.arange(ROWS * WIDTH, dtype=jnp.float32)).reshape(ROWS, WIDTH)


@functools.cache
def needed(form, f):
    """What the step takes of the device as it stands."""
    step = jaxsub.jit(step_of(FORMS[form](f)), donate_argnums=(0, 1))
    memory = step.lower(*arguments()).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return used - memory.alias_size_in_bytes


WRAPPED = jax.checkpoint(layer)


def sized(form, memory, **options):
    loss = jaxsub.sublinear(FORMS[form](WRAPPED), progress=False, **options)
    step = jaxsub.jit(step_of(loss), memory=memory, **DONATED)
    return step, step.report(*arguments())


@pytest.mark.parametrize("form", FORMS)
def test_what_there_is_room_for_is_not_recomputed(form):
    """As they stand the regions recompute each layer whatever memory there is."""
    _, report = sized(form, needed(form, layer))
    assert report.extra == 0
    assert report.step_bytes <= report.memory_bytes
    assert report.plain_bytes == needed(form, WRAPPED)
    assert report.sites[0].plan.opened_regions == (DEPTH if form == "unrolled" else 1)


@pytest.mark.parametrize("form", FORMS)
def test_half_way_less_is_recomputed_than_the_regions_do(form):
    now, plain = needed(form, WRAPPED), needed(form, layer)
    step, report = sized(form, (now + plain) // 2)
    assert 0 < report.extra < 0.8
    assert report.step_bytes <= report.memory_bytes
    found, wanted = step(*arguments()), jax.jit(step_of(FORMS[form](layer)))(*arguments())
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_fraction_is_of_what_the_step_takes_as_it_is():
    _, report = sized("unrolled", 1.0)
    assert report.step_bytes <= report.memory_bytes == report.plain_bytes == needed("unrolled", WRAPPED)
    assert report.extra < 1


def test_regions_stay_where_only_they_fit():
    memory = needed("unrolled", WRAPPED)
    _, report = sized("unrolled", memory, planner="plain", chunks=False)
    assert (report.sites[0].plan.opened_regions, report.step_bytes) == (0, memory)
    with pytest.raises(jaxsub.InfeasibleBudgetError) as refusal:
        sized("unrolled", memory // 2, planner="plain", chunks=False)
    assert refusal.value.least_bytes <= memory


def test_a_refusal_names_equations_of_what_was_planned():
    """The least plan opens the regions: it has more stages than the function as it was written has equations."""

    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x @ w) @ w.T

    def loss(ws, x):
        return (functools.reduce(block, ws, x) ** 2).mean()

    def step(ws, x):
        gradients = jax.grad(jaxsub.sublinear(loss, chunks=False))(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)

    args = [jnp.ones((64, 256))] * 6, jnp.ones((1024, 64))
    with pytest.raises(jaxsub.InfeasibleBudgetError, match=r"loss: The peak is near `\w+` at test_own_regions"):
        jaxsub.jit(step, memory="2MiB", progress=False, donate_argnums=0).report(*args)


def test_what_was_found_is_found_again(tmp_path):
    """From the cache, and from a file: nothing is searched."""
    memory = needed("unrolled", layer)
    step, report = sized("unrolled", memory)
    again, second = sized("unrolled", memory)
    assert second.sites == report.sites
    step.plan(*arguments()).save(tmp_path / "plan.json")
    loss = jaxsub.sublinear(FORMS["unrolled"](WRAPPED), progress=False)
    loaded = jaxsub.jit(step_of(loss), plan=StepPlan.load(tmp_path / "plan.json"), **DONATED)
    assert loaded.report(*arguments()).step_bytes == report.step_bytes == again.report(*arguments()).step_bytes


def test_the_largest_batch_is_found_without_them():
    """What needs least may run in slices, which the function without its regions is followed for."""
    params, state, _ = arguments()
    step = step_of(jaxsub.sublinear(unrolled(WRAPPED), progress=False))

    def with_batch(n):
        return step, (params, state, jax.ShapeDtypeStruct((n, WIDTH), "float32"))

    options = {"memory": needed("unrolled", layer), "multiple_of": 512}
    found = jaxsub.max_batch(with_batch, **options, donate_argnums=(0, 1), progress=False)
    assert found.planned > found.plain >= ROWS
    assert found.report.step_bytes <= found.memory_bytes


@pytest.mark.parametrize("form", FORMS)
def test_regions_inside_shard_map_are_planned_where_their_axes_are_known(form):
    """A function in `jax.shard_map` with regions that use its axis, in a step in a memory: the update is the plain."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    region = jax.checkpoint(lambda x, p: layer(x, p) - jax.lax.pmean(x, "d") / 2)
    params, _, x = arguments()

    def step_with(wrap):
        inside = wrap(lambda params, x: jax.lax.pmean(FORMS[form](region)(params, x), "d"))
        spec = jax.sharding.PartitionSpec
        mapped = jax.shard_map(inside, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())
        return lambda params, x: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(mapped)(params, x))

    plain = jaxsub.jit(step_with(lambda f: f))
    planned = step_with(functools.partial(jaxsub.sublinear, cache=False, progress=False))
    step = jaxsub.jit(planned, memory=1.0, cache=False, progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This function uses named axes")
        chex.assert_trees_all_close(step(params, x), plain(params, x), rtol=1e-5, atol=1e-6)
