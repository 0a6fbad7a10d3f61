"""Runs in slices on several devices: along what each of them holds, budgets are bytes of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxpr.test_shardings import on_eight_devices

from jaxsub.core.decisions import Slices, Split
from jaxsub.jaxpr.trace import trace
from jaxsub.search.slicing import ChunksError, asked

AUTO = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
HEAD = """
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

def loss(params, x, y):
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    logits = x @ params["head"]
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]).mean()

put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
params = {"layers": [put(jnp.eye(32))] * 3, "head": put(jax.random.normal(jax.random.key(0), (32, 8192)))}
args = params, put(jax.random.normal(jax.random.key(1), (2048, 32)), "d"), put(jnp.arange(2048), "d")
"""


BLOCKS = """
import re
from six_layers import same

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
constrain = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("d")))

def loss(blocks, x, y, kept=lambda x: x):
    for up, down in blocks:
        x = kept(x + kept(jnp.tanh(x @ up)) @ down)
    return jnp.mean((x - y) ** 2)

def arguments(rows, *spec):
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[0] ** .5
    blocks = [(put(normal(32, 1024), *spec), put(normal(1024, 32), *spec)) for _ in range(3)]
    return blocks, put(normal(rows, 32), "d"), put(normal(rows, 32), "d")
"""


def shaped(mesh, *shape_and_spec, dtype=jnp.float32):
    """A shape with a sharding."""
    shape, spec = shape_and_spec
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def mlp(w, x):
    """Rows and hidden units are independent."""
    with jax.named_scope("mlp"):
        return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_head_on_eight_devices_takes_slices_of_what_each_holds(kind):
    """Rows split over devices stay split: no gathers, a fraction of the bytes of a device, plain values, gradients."""
    on_eight_devices(
        HEAD.replace("Auto", kind)
        + """
plan = jaxsub.plan(loss, *args, budget="4MiB", cache=False)
assert [run.parts for run in plan.slices] == [8], plan.slices
smaller = jaxsub.sublinear(loss, plan=plan)
plain, sliced = (jax.jit(jax.value_and_grad(f)).lower(*args).compile() for f in (loss, smaller))
assert plain.memory_analysis().temp_size_in_bytes > 4 * 2**22 * 0.9
assert sliced.memory_analysis().temp_size_in_bytes <= 2**22
assert "all-gather" not in sliced.as_text()
for a, b in zip(jax.tree.leaves(plain(*args)), jax.tree.leaves(sliced(*args))):
    assert jnp.abs(a - b).max() <= 3e-5 * max(1e-3, float(jnp.abs(a).max()))
with jax.set_mesh(mesh):
    again = jaxsub.plan(loss, *args, budget="4MiB", cache=False)
    found = jax.jit(jax.value_and_grad(jaxsub.sublinear(loss, plan=again))).lower(*args).compile()
assert found.memory_analysis().temp_size_in_bytes == sliced.memory_analysis().temp_size_in_bytes
"""
    )


def test_what_knows_how_it_is_sharded_runs_in_slices_of_what_each_device_holds():
    """A scan on a mesh with explicit axes, `jax.make_mesh`'s own kind, its hidden units split over other devices.

    In it are a derivative rule, a branch, a table and a call that no slice divides, products that say how their results
    are sharded; around it dropout, which JAX draws on automatic axes. Types of results stay.
    """
    on_eight_devices(
        """
from six_layers import same

mesh = jax.make_mesh((4, 2), ("d", "m"))
put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) / shape[-2] ** 0.5
weights = {"up": put(normal(0, 4, 64, 256), None, None, "m"), "down": put(normal(1, 4, 256, 64), None, "m")}
weights["scale"] = put(jnp.linspace(0.5, 1, 4 * 64).reshape(4, 64))
data = put(normal(2, 32, 64, 64), "d"), put(normal(3, 32, 64, 64), "d")

@jax.custom_vjp
def bent(x):
    return jnp.tanh(x)

bent.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),))
running = jax.jit(lambda scale: jnp.cumsum(jnp.where(scale > 0, scale, 0.1 * scale)) / 10)

def layer(x, w):
    h = x * running(w["scale"]) + jnp.sin(jnp.arange(64.0)[:, None] * jnp.linspace(0, 1, 64))
    h = bent(jax.nn.silu(jnp.einsum("btd,dh->bth", h, w["up"])))
    x = x + jnp.einsum("bth,hd->btd", h, w["down"], out_sharding=P("d"))
    return jax.lax.cond(w["scale"][0] > 0, lambda x: x * 1.0, lambda x: x * 0.5, jax.nn.relu(x) + x), None

def loss(weights, x, y, key):
    kept = jax.sharding.reshard(jax.random.bernoulli(key, 0.9, x.shape, out_sharding=P("d")), P("d"))
    x, _ = jax.lax.scan(layer, jnp.where(kept, x / 0.9, 0), weights)
    return jnp.mean((jax.sharding.reshard(x, P("d", None, None)) - y) ** 2)

with jax.set_mesh(mesh):
    args = weights, *data, jax.random.key(3)
    plain = jaxsub.jit(jax.value_and_grad(loss)).lower(*args).compile()
    needed = plain.memory_analysis().temp_size_in_bytes
    for budget, chunks in ((needed // 8, "auto"), (needed, {0: 8})):
        plan = jaxsub.plan(loss, *args, budget=budget, chunks=chunks, cache=False)
        assert plan.slices
        sliced = jaxsub.sublinear(loss, plan=plan)
        found = jaxsub.jit(jax.value_and_grad(sliced)).lower(*args).compile()
        assert found.memory_analysis().temp_size_in_bytes <= budget
        same(found(*args), plain(*args), rtol=1e-4, atol=1e-6)
        types = [jax.tree.map(lambda x: x.sharding.spec, f(*args)) for f in (found, plain)]
        assert types[0] == types[1], types
    assert [run.parts for run in plan.slices] == [4], plan.slices
    assert found.memory_analysis().temp_size_in_bytes < needed / 3
    along = lambda f: jax.jvp(jax.grad(lambda w: f(w, *args[1:])), (weights,), (weights,))[1]
    same(along(sliced), along(loss), rtol=1e-3, atol=1e-6)
"""
    )


def test_frontiers_and_explanations_count_what_one_device_holds():
    """With slices and without they are predicted as they are measured; listed are the arrays of all devices."""
    on_eight_devices(
        HEAD
        + """
found = jaxsub.frontier(loss, *args, chunks=True, verify=True, cache=False)
assert any(point.plan.slices for point in found.points)
for point in found.points:
    needed = point.plan.measurement.temp_bytes
    assert needed / 2.2 < point.temp_bytes < 2.2 * needed, (point.name, point.temp_bytes, needed)
explained = jaxsub.explain(loss, *args)
plain = found.points[0].plan.plain_measurement.temp_bytes
assert plain / 1.2 < explained.frontier.points[-1].temp_bytes < 1.2 * plain
assert "on all devices together" in str(explained)
assert "devices" not in str(jaxsub.explain(loss, *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)))
"""
    )


def test_keys_are_folded_under_the_users_mesh():
    """Under `jax.set_mesh` a typed key's mesh has a kind of device: plans are made on that mesh, and are the same."""
    on_eight_devices(
        HEAD
        + """
import contextlib

def dropped(params, x, y, key):
    for i, w in enumerate(params["layers"]):
        x = jnp.tanh(x @ w)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape), x / 0.9, 0)
    return jnp.mean(x**2)

args = *args, put(jax.random.key(7))
plans = []
for around in contextlib.nullcontext(), jax.set_mesh(mesh):
    with around:
        plans.append(jaxsub.plan(dropped, *args, budget=0.3, cache=False))
assert plans[0].slices == plans[1].slices and plans[0].measurement.temp_bytes == plans[1].measurement.temp_bytes
"""
    )


def test_what_jax_says_of_automatic_axes_keeps_no_batch_whole():
    """A vmapped look-up, as Equinox's embeddings are, comes with a sharding that leaves all dimensions open."""
    on_eight_devices(
        HEAD
        + """
from six_layers import same

def looked_up(table, tokens):
    x = jax.vmap(jax.vmap(lambda token: table[token]))(tokens)
    return jnp.mean(jnp.tanh(x) ** 2)

table = put(jax.random.normal(jax.random.key(0), (256, 64)))
tokens = put(jax.random.randint(jax.random.key(1), (32, 64), 0, 256), "d")
plan = jaxsub.plan(looked_up, table, tokens, chunks={0: 4}, cache=False)
assert [run.count for run in plan.slices] == [4]
sliced = jaxsub.sublinear(looked_up, plan=plan)
same(*(jax.jit(jax.value_and_grad(f))(table, tokens) for f in (sliced, looked_up)))
"""
    )


def test_predictions_are_of_what_a_device_holds_where_weights_are_most_of_the_arguments():
    """What is in no slice is split over the devices as the data is, though most of the arguments' bytes are not."""
    on_eight_devices(
        HEAD
        + """
plan = jaxsub.plan(loss, *args, chunks={0: 4}, verify=True, cache=False)
predicted, needed = plan.prediction.temp_bytes, plan.measurement.temp_bytes
print(f"{predicted / 2**20:.1f} MiB predicted, {needed / 2**20:.1f} needed")
assert needed / 2 < predicted < 2 * needed, (predicted, needed)
"""
    )


@pytest.mark.parametrize(("spec", "kept"), [((), "lambda x: x"), (("d",), "lambda x: x"), (("d",), "constrain")])
def test_a_whole_function_on_eight_devices_meets_the_budget_of_one(spec, kept):
    """Weights on all devices, or split over them as the rows: a fraction of the bytes; no device gathers any rows."""
    on_eight_devices(
        BLOCKS
        + f"""
args = arguments(4096, *{spec})
run = functools.partial(loss, kept={kept})
plan = jaxsub.plan(run, *args, budget="2MiB", cache=False, progress=False)
assert [(one.label, one.parts) for one in plan.slices] == [("whole function", 8)], plan.slices
put = dict(out_shardings=(None, jax.tree.map(lambda a: a.sharding, args[0])))
plain = jax.jit(jax.value_and_grad(run), **put).lower(*args).compile()
sliced = jaxsub.jit(jax.value_and_grad(jaxsub.sublinear(run, plan=plan)), **put).lower(*args).compile()
assert plain.memory_analysis().temp_size_in_bytes > 4 * 2**21
assert sliced.memory_analysis().temp_size_in_bytes == plan.measurement.temp_bytes <= 2**21
moved = re.findall(r"(f32.*?) (all-gather|all-to-all|collective-permute)[(]", sliced.as_text())
gathered = [shape.split("=")[-1].split("{{")[0].strip() for shape, _ in moved]
assert set(gathered) == (set() if not {spec} else {{"f32[32,1024]", "f32[1024,32]"}}), gathered
assert not re.search("all-to-all|collective-permute", sliced.as_text())
same(sliced(*args), plain(*args), rtol=1e-4, atol=1e-6)
"""
    )


@pytest.mark.parametrize(
    ("kind", "put", "named"),
    [(AxisType.Auto, jax.lax.with_sharding_constraint, "sharding_constraint"),
     (AxisType.Explicit, jax.sharding.reshard, "reshard")],
)  # fmt: skip
def test_rows_that_a_function_splits_in_another_way_are_not_sliced(kind, put, named):
    """A constraint that splits the axis over other devices than its arguments is named, with its line."""
    mesh = AbstractMesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)

    def between(w, x, names):
        return jnp.mean(jnp.tanh(put(x @ w, NamedSharding(mesh, P(names)))) ** 2)

    args = shaped(mesh, (32, 8192), ()), shaped(mesh, (2048, 32), ("a",))
    for names, parts in (("a", 4), (("a",), 4), (None, 4)):
        assert asked(trace(partial(between, names=names), args, {}), {0: 8})[0].parts == parts
    with pytest.raises(ChunksError, match=rf"`{named}` at .*other devices than the arguments are.*leave it"):
        asked(trace(partial(between, names=("a", "b")), args, {}), {0: 8})


def test_an_axis_that_no_device_splits_is_sliced_as_on_one():
    """Hidden units of weights that every device holds whole: slices keep the rows split."""
    program = trace(mlp, (shaped(AUTO, (32, 8192), ()), shaped(AUTO, (2048, 32), ("d",))), {})
    (rows,) = asked(program, {0: 8})
    assert (rows.parts, rows.count, rows.length) == (8, 8, 2048)
    program = trace(mlp, (shaped(AUTO, (32, 8192), ()), shaped(AUTO, (2048, 32), ())), {})
    assert asked(program, {0: 8})[0].parts == 1


def test_slices_divide_what_each_device_holds():
    """A count that does not divide the units of a device is refused, with both figures."""
    program = trace(mlp, (shaped(AUTO, (32, 8192), ()), shaped(AUTO, (2048, 32), ("d",))), {})
    with pytest.raises(ChunksError, match=r"split over 8 devices.*must divide the 256 units that each of them holds"):
        asked(program, {0: 6})
    assert Slices(0, 1, 0, 0, 6, 2048, split=Split((("d", 8),), ("d",))).faults() == [
        "split: 6 slices of 2048 units on 8 devices"
    ]


def test_rows_that_know_their_number_and_draw_random_bits_keep_them():
    """A slice is made of the share of each device: its rows' numbers are those, and its dropout that of the rows."""
    on_eight_devices(
        BLOCKS
        + """
def numbered(blocks, x, y, key):
    x = x + 1e-3 * jnp.arange(len(x), dtype=x.dtype)[:, None]
    return loss(blocks, x, y, lambda x: jnp.where(jax.random.bernoulli(key, .9, x.shape), x / .9, 0))

args = (*arguments(4096), jax.random.key(3))
plan = jaxsub.plan(numbered, *args, budget="1.5MiB", cache=False, progress=False)
assert [(one.label, one.parts) for one in plan.slices] == [("whole function", 8)], plan.slices
sliced = jaxsub.jit(jax.value_and_grad(jaxsub.sublinear(numbered, plan=plan)))
same(sliced(*args), jax.jit(jax.value_and_grad(numbered))(*args), rtol=1e-4, atol=1e-6)
assert plan.measurement.temp_bytes < 4096 * 1024 * 4 / 8
"""
    )


@pytest.mark.parametrize("loss", ["unrolled", "scanned"])
def test_slices_vary_over_the_axes_of_shard_map_as_their_rows_do(loss):
    """Each device's loss runs in slices where JAX checks what varies; gradients of the same weights are summed once."""
    on_eight_devices(f"""
from six_layers import same

mesh = jax.make_mesh((8,), ("d",))

def unrolled(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()

def scanned(ws, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).mean()

def compiled(loss):
    def local(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return jax.lax.psum(value, "d"), grads

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=(P(), P("d")), out_specs=P())
        return jaxsub.jit(mapped).lower(ws, x).compile()

put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
ws = put(jax.random.normal(jax.random.key(0), (6, 32, 32)) / 6)
x = put(jax.random.normal(jax.random.key(1), (8192, 32)), "d")
plain, sliced = compiled({loss}), compiled(jaxsub.sublinear({loss}, chunks={{0: 4}}, verify=False, cache=False))
same(sliced(ws, x), plain(ws, x), rtol=1e-5, atol=1e-7)
assert sliced.memory_analysis().temp_size_in_bytes < 0.5 * plain.memory_analysis().temp_size_in_bytes
""")
