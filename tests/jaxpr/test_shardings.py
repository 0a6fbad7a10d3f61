"""Programs spread over a mesh: budgets are bytes of one device, on devices that are there and on those that are not."""

import os
import textwrap

import chex
import jax
import jax.numpy as jnp
import models
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import quickly
from six_layers import ROOT, in_a_process

import jaxsub
from jaxsub.core.chain import Chain, Crossing, Item, Option, Stage
from jaxsub.core.errors import UnsupportedError
from jaxsub.devices import aot
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.shardings import all_shardings, data_share, gathered_bytes, given_shardings, scaled, sharding_of

MESH = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
SPLIT, WHOLE = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())
SHAPE = jax.ShapeDtypeStruct((64, 16), "float32")


def lying(sharding):
    return jax.ShapeDtypeStruct(SHAPE.shape, SHAPE.dtype, sharding=sharding)


def chain(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_what_is_not_known_lies_whole():
    """One argument that is spread is enough: the others lie whole on every device; without any there is no mesh."""
    assert all_shardings([lying(SPLIT), SHAPE, 3.0]) == (SPLIT, WHOLE, WHOLE)
    assert all_shardings([SHAPE, 3.0]) == ()
    assert all_shardings([SHAPE, lying(SPLIT)], [SPLIT, None]) == (SPLIT, SPLIT)


def test_two_meshes_are_refused():
    """Arguments on two meshes are refused, and both are shown."""
    other = NamedSharding(AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2), P("a"))
    with pytest.raises(UnsupportedError, match=r"2 meshes: .*'d': 8.*'a': 2.*Put them on one"):
        all_shardings([lying(SPLIT), lying(other)])


def test_trees_of_shardings_stand_for_trees_of_arguments():
    """A sharding stands for all below it, None for what is not known; constants and keywords are not spoken of."""
    args = ({"w": SHAPE, "b": [SHAPE, SHAPE]}, SHAPE)
    assert given_shardings(({"w": SPLIT, "b": None}, WHOLE), args, 1, 2) == [None, None, None, SPLIT, WHOLE, None, None]
    assert given_shardings(SPLIT, args, 0, 0) == [SPLIT] * 4
    without = ({"w": SHAPE, "b": None}, SHAPE)  # as Equinox's partitioned models are, and layers without a bias
    for given in SPLIT, (SPLIT, SPLIT), ({"w": SPLIT, "b": None}, SPLIT):
        assert given_shardings(given, without, 0, 0) == [SPLIT] * 2


def test_nothing_is_known_inside_jit_with_automatic_axes():
    """A tracer does not say where it will lie, and a mesh of one device spreads nothing."""
    seen = []
    jax.eval_shape(lambda x: seen.append(sharding_of(x)), lying(SPLIT))
    assert seen == [None]
    assert sharding_of(lying(NamedSharding(AbstractMesh((1,), ("d",)), P("d")))) is None


def test_activations_follow_the_data():
    """Without a compile one device is taken to hold its share of the largest argument that is no parameter."""
    assert data_share([SHAPE, SHAPE], (WHOLE, SPLIT), [0]) == 0.125
    assert data_share([SHAPE, SHAPE], (SPLIT, WHOLE), [0]) == 1.0
    assert data_share([SHAPE, SHAPE], (), [0]) == 1.0


def test_every_byte_is_scaled_and_no_flop():
    """A chain's share has all of its bytes scaled, rounded up, and its FLOPs as they were."""
    whole = Chain(
        (Stage(0, 1, forward_flops=5.0, transient_bytes=81, keep_bytes=8), Stage(1, 2, transient_bytes=16)),
        (Item(0, 1, (Option((0,), 80, 160, 3.0),)),),
        (Crossing(0, 1, 16, 24),),
    )
    share = scaled(whole, 0.125)
    assert (share.stages[0].transient_bytes, share.stages[0].keep_bytes, share.stages[0].forward_flops) == (11, 1, 5.0)
    assert (share.stages[1].transient_bytes, share.crossings[0]) == (2, Crossing(0, 1, 2, 3))
    assert share.items[0].options == (Option((0,), 10, 20, 3.0),)


def test_too_few_devices():
    """Shapes over more devices than are there are refused, with the target that would do."""
    with pytest.raises(UnsupportedError, match=r"8 devices, and \d of `cpu` are present.*target=\"h100:8\""):
        jaxsub.measure(chain, jnp.ones((16, 16)), lying(SPLIT))


def on_eight_devices(code, timeout=600):
    """Run code on eight CPU devices, warnings being errors."""
    start = """
    import models
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    auto = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    whole, split, columns = (NamedSharding(auto, P(*spec)) for spec in ((), ("d",), (None, "d")))
    """
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": os.environ["PATH"], **quickly(8)}
    in_a_process(textwrap.dedent(start) + textwrap.dedent(code), timeout, **env)


CHAIN = """
def chain(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

w, x = jnp.eye(32) * .9 + .01, jnp.linspace(0, 1, 4096 * 32).reshape(4096, 32)
wanted = jax.jit(jax.grad(chain))(w, x)
one = jaxsub.measure(chain, w, x).temp_bytes
"""


def test_a_budget_is_bytes_of_one_device():
    """Arrays and `in_shardings` say the same; the step under jit allocates per device what the plan promised."""
    code = """
    wx = jax.device_put(w, whole), jax.device_put(x, split)
    plain = jaxsub.measure(chain, *wx)
    assert plain.temp_bytes < one / 4 and plain.argument_bytes < 4 * (w.size + x.size / 7)
    budget = plain.temp_bytes // 2
    f = jaxsub.sublinear(chain, budget=budget, cache=False, chunks=False)
    plan = f.plan(*wx)
    assert 0 < plan.measurement.temp_bytes <= budget and plan.n_regions > 0, plan
    g = jaxsub.sublinear(chain, budget=budget, cache=False, in_shardings=(whole, split), chunks=False)
    step = jaxsub.jit(jax.value_and_grad(g), in_shardings=(whole, split), out_shardings=whole)
    compiled = step.lower(w, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == plan.measurement.temp_bytes, plan
    assert jnp.abs(compiled(*wx)[1] - wanted).max() < 1e-6
    assert g.plan(w, x).segments == plan.segments
    """
    on_eight_devices(CHAIN + textwrap.dedent(code))


def test_gathered_weights_are_predicted():
    """Without a compile too: where weights are split as the data is, a device holds whole those that it reads."""
    code = """
    def deep(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w) + x
        return jnp.mean(x**2)

    wx = [jax.ShapeDtypeStruct((256, 256), "float32", sharding=split)] * 8, lying(2048)
    measured = jaxsub.measure(deep, *wx).temp_bytes
    assert measured > 8 * 256 * 256 * 4
    for share in (1.0, 0.4):
        plan = jaxsub.plan(deep, *wx, budget=share, verify=False, cache=False)
        f = jaxsub.sublinear(deep, plan=plan, in_shardings=(split, split))
        found = jaxsub.measure(f, *wx).temp_bytes
        assert abs(plan.prediction.temp_bytes / found - 1) < 0.2, (plan.prediction, found)
    assert plan.n_regions > 0 and found < 0.5 * measured
    """
    lying = "lying = lambda n: jax.ShapeDtypeStruct((n, 256), 'float32', sharding=split)\n"
    on_eight_devices(lying + textwrap.dedent(code))


def test_a_loop_gathers_a_slice_a_step():
    """Of weights that a loop reads step by step one slice is gathered at once, unless the steps are what is split."""
    code = """
    def deep(ws, x):
        layer = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w) + x, None)
        return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)

    for place in (columns, split):
        ws = jax.ShapeDtypeStruct((8, 256, 256), "float32", sharding=place)
        x = jax.ShapeDtypeStruct((512, 256), "float32", sharding=split)
        plan = jaxsub.plan(deep, ws, x, planner="plain", verify=False, cache=False)
        found = jaxsub.measure(deep, ws, x).temp_bytes
        assert abs(plan.prediction.temp_bytes / found - 1) < 0.2, (place, plan.prediction, found)
    """
    on_eight_devices(code)


def test_what_is_gathered_is_what_is_split_as_the_data_is():
    """Of a weight that is split along two axes a device gathers its part; tensor parallelism gathers nothing."""
    mesh = AbstractMesh((2, 4), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    both, data, other = (NamedSharding(mesh, P(*spec)) for spec in (("d", "t"), ("d",), (None, "t")))
    assert gathered_bytes([SHAPE] * 4, (both, data, other, data), [0, 1, 2]) == (1024, 4096, 0, 0)
    assert gathered_bytes([SHAPE] * 2, (data, other), [0]) == ()
    assert gathered_bytes([SHAPE] * 2, (data, data), [0, 1]) == ()
    assert gathered_bytes([SHAPE] * 2, (), [0]) == ()


def test_explicit_axes_say_where_values_lie():
    """With explicit axes a trace knows it, so that the same plan is made inside jit; gradients keep their types."""
    code = """
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        wx = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("d")))
        plain = jaxsub.measure(chain, *wx).temp_bytes
        assert plain < one / 4
        f = jaxsub.sublinear(chain, budget=plain // 2, cache=False)
        found = jax.jit(jax.grad(f))(*wx)
        assert jnp.abs(jnp.asarray(found) - wanted).max() < 1e-6
        assert jax.typeof(found) == jax.typeof(jax.jit(jax.grad(chain))(*wx))
        plan = f.plan(*wx)
        assert (plan.n_regions > 0 or plan.slices) and plan.measurement.temp_bytes <= plain // 2
    """
    on_eight_devices(CHAIN + textwrap.dedent(code))


GPT = dict(layers=3, batch=16, length=32, width=64, heads=4, vocab=64)


def layouts(mesh):
    """How a GPT is spread: its parameters, by a function of each, and its batch."""
    split = lambda a: NamedSharding(mesh, P("d") if a.ndim == 2 else P())  # noqa: E731
    columns = lambda a: NamedSharding(mesh, P(None, "d") if a.ndim == 2 else P())  # noqa: E731
    whole = lambda a: NamedSharding(mesh, P())  # noqa: E731
    data = NamedSharding(mesh, P("d"))
    return {"data": (whole, data), "fsdp": (split, data), "tensor": (columns, NamedSharding(mesh, P()))}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["data", "fsdp", "tensor"])
def test_gpt_on_eight_devices(kind):
    """A GPT in half of its memory per device; gradients equal; with FSDP, regions gather weights again."""
    code = f"""
    from test_shardings import GPT, layouts
    loss, init = models.gpt(**GPT)
    params, tokens = init(jax.random.key(0))
    of_params, batch = layouts(auto)[{kind!r}]
    lie = jax.tree.map(of_params, params), batch
    put = jax.device_put((params, tokens), lie)
    budget = jaxsub.measure(loss, *put).temp_bytes // 2

    def compiled(f):
        step = jaxsub.jit(jax.grad(f), in_shardings=lie, out_shardings=lie[0])
        return step.lower(params, tokens).compile()

    plain = compiled(loss)
    planned = compiled(jaxsub.sublinear(loss, budget=budget, in_shardings=lie, cache=False))
    assert planned.memory_analysis().temp_size_in_bytes <= budget < plain.memory_analysis().temp_size_in_bytes
    for a, b in zip(jax.tree.leaves(planned(*put)), jax.tree.leaves(plain(*put)), strict=True):
        assert jnp.abs(a - b).max() < 1e-6
    gathers = [c.as_text().count(" all-gather(") for c in (planned, plain)]
    assert {kind != "fsdp"} or gathers[0] > gathers[1], gathers
    """
    on_eight_devices(code, timeout=1500)


def _lack():
    try:
        aot.require_packages()
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(bool(_lack()), reason=_lack() or "installed")
@pytest.mark.parametrize("kind", ["data", "fsdp", "tensor"])
def test_gpt_on_eight_h100s_that_are_not_there(kind):
    """The same GPT planned for eight H100s: the compiler confirms half of its memory per device."""
    target, loss, args = on_h100s(kind, **GPT)
    plain = jaxsub.measure(loss, *args, target=target)
    found = jaxsub.plan(loss, *args, budget=plain.temp_bytes // 2, target=target, cache=False, progress=False)
    assert found.n_regions > 0
    assert found.measurement.temp_bytes <= plain.temp_bytes // 2
    n_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(args))
    assert (found.measurement.argument_bytes < n_bytes / 2) == (kind != "data")


def on_h100s(kind, **sizes):
    """Eight H100s that are not there, a GPT's loss, and the shapes of its arguments as they lie on them."""
    target = get_target("h100:8")
    loss, init = models.gpt(**sizes)
    of_params, batch = layouts(target.mesh((8,), ("d",)))[kind]
    params, tokens = jax.eval_shape(init, jax.random.key(0))
    lie = jax.tree.map(of_params, params), batch
    place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
    return target, loss, jax.tree.map(place, (params, tokens), lie)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(bool(_lack()), reason=_lack() or "installed")
def test_weights_gathered_for_eight_h100s_are_not_kept():
    """FSDP of a GPT that is nearly all weights: plainly a device holds all of them gathered, planned not half."""
    target, loss, args = on_h100s("fsdp", **GPT | dict(layers=6, batch=8, length=16, width=128))
    weights = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(args[0]) if a.ndim == 2)
    assert jaxsub.measure(loss, *args, target=target).temp_bytes > 0.9 * weights
    found = jaxsub.plan(loss, *args, budget=weights // 2, target=target, cache=False, progress=False)
    assert found.measurement.temp_bytes <= weights // 2


def test_a_step_with_shard_map_is_measured():
    """Inside shard_map a function cannot be compiled alone; jaxsub.jit confirms its plans on the whole step."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jax.lax.pmean(jnp.mean(x**2), "d")

    def step_of(f):
        spread = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
        return lambda ws, x: jax.tree.map(lambda w, g: w - g, ws, jax.grad(spread)(ws, x))

    args = [jnp.eye(32) * 0.9] * 12, jnp.ones((512, 32))
    step = jaxsub.jit(step_of(jaxsub.sublinear(loss)), memory=0.7, cache=False, progress=False)
    report = step.report(*args)
    assert report.step_bytes <= report.memory_bytes < report.plain_bytes
    chex.assert_trees_all_close(step(*args), jax.jit(step_of(loss))(*args), rtol=1e-6)
