"""How long things take: by a target's figures, measured on this machine, and what plans make of it."""

import functools
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from jax import lax

import jaxsub
from jaxsub.core.chain import Chain, Crossing, Item, Option, Stage
from jaxsub.core.disk_cache import Store
from jaxsub.core.errors import InfeasibleBudgetError, PlannerError, UnsupportedError
from jaxsub.core.simulate import predict
from jaxsub.costs import roofline as seconds
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.cuts import find_cuts
from jaxsub.planners import get
from jaxsub.show.text import format_seconds

H100 = get_target("h100")
WIDE = jax.ShapeDtypeStruct((4096, 4096), "float32")
LAUNCH = seconds.KERNEL_SECONDS


def spent(fun, *shapes, target=H100):
    closed = jax.make_jaxpr(fun)(*shapes)
    return seconds.eqns_seconds(closed.eqns, closed.jaxpr.invars, closed.jaxpr.outvars, target)


def test_large_products_are_bound_by_arithmetic_and_small_ones_by_memory():
    """A product of 4096 takes its FLOPs at tensor-core rate; one with a vector reads its matrix once."""
    assert spent(lambda a: a @ a, WIDE) == pytest.approx(LAUNCH + 2 * 4096**3 / 494.7e12)
    vector = jax.ShapeDtypeStruct((4096,), "float32")
    assert spent(lambda a, x: a @ x, WIDE, vector) == pytest.approx(LAUNCH + (4096**2 + 2 * 4096) * 4 / 3.35e12)


def test_a_dtype_has_its_rate():
    """bf16 products take half of what f32 ones take, and f64 ones are not done in tf32."""
    half = spent(lambda a: a @ a, jax.ShapeDtypeStruct((4096, 4096), "bfloat16")) - LAUNCH
    assert spent(lambda a: a @ a, WIDE) == pytest.approx(LAUNCH + 2 * half, rel=1e-3)
    with jax.enable_x64(True):
        double = spent(lambda a: a @ a, jax.ShapeDtypeStruct((4096, 4096), "float64"))
    assert double == pytest.approx(LAUNCH + 2 * 4096**3 / 66.9e12)


def test_what_is_fused_costs_one_pass_over_memory():
    """Ten elementwise operations take as long as one: what is read and what is written."""
    once = spent(jnp.sin, WIDE)

    def ten(x):
        for _ in range(10):
            x = jnp.sin(x) + 1
        return x

    assert spent(ten, WIDE) == once == pytest.approx(LAUNCH + 2 * 4 * 4096**2 / 3.35e12)


def test_a_part_of_an_array_is_read_without_the_rest():
    """Rows, a slice, or one layer's weights behind a custom rule cost two passes over what is made of them."""
    stack, at = jax.ShapeDtypeStruct((64, 1024, 1024), "float32"), jax.ShapeDtypeStruct((), "int32")
    two_passes = pytest.approx(LAUNCH + 2 * 4 * 1024**2 / 3.35e12, rel=0.01)
    layer = jax.custom_jvp(lambda ws, i: lax.dynamic_index_in_dim(ws, i, keepdims=False))
    layer.defjvp(lambda primals, tangents: (layer(*primals), layer(tangents[0], primals[1])))
    assert spent(lambda ws, i: lax.dynamic_slice(ws, (i, 0, 0), (1, 1024, 1024)), stack, at) == two_passes
    assert spent(lambda ws: jnp.sin(ws[3]), stack) == two_passes
    assert spent(lambda ws, i: lax.scan(lambda c, _: (c + layer(ws, i), None), ws[0], None, 8)[0], stack, at) < (
        8 * 3 * two_passes.expected
    )
    rows = jax.ShapeDtypeStruct((128,), "int32")
    table = jax.ShapeDtypeStruct((128_000, 1024), "float32")
    assert spent(lambda t, i: t[i], table, rows) - LAUNCH < 0.01 * 4 * 128_000 * 1024 / 3.35e12


def test_an_update_in_place_moves_the_part_that_changes():
    """A row written into an array costs two passes over the row."""
    stack, row = jax.ShapeDtypeStruct((64, 1024, 1024), "float32"), jax.ShapeDtypeStruct((1, 1024, 1024), "float32")
    written = spent(lambda ws, w: lax.dynamic_update_slice(ws, w, (3, 0, 0)), stack, row)
    assert written == pytest.approx(LAUNCH + 2 * 4 * 1024**2 / 3.35e12, rel=0.01)


def test_loops_count_their_length_and_branches_the_longest():
    """A scan of 12 steps takes 12 bodies; a conditional its dearest branch."""
    stack = jax.ShapeDtypeStruct((12, 256, 256), "float32")
    x = jax.ShapeDtypeStruct((256, 256), "float32")
    body = spent(lambda x, w: x @ w, x, x)
    assert spent(lambda x, ws: lax.scan(lambda x, w: (x @ w, None), x, ws)[0], x, stack) == pytest.approx(
        12 * body, rel=0.01
    )
    either = spent(lambda p, x: lax.cond(p, lambda x: x @ x @ x, lambda x: x @ x, x), True, x)
    assert either == pytest.approx(2 * spent(lambda x: x @ x, x) + LAUNCH, rel=0.01)  # and what chooses


def test_each_kernel_of_a_gpu_takes_its_time_however_little_it_does():
    """Steps of next to no work take two launches each on a GPU; on a CPU nothing is launched."""
    x, w = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")

    def layers(n):
        return lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, n)[0]

    def kernels(n):
        closed = jax.make_jaxpr(layers(n))(x, w)
        return seconds.count_kernels(closed.eqns, closed.jaxpr.invars, closed.jaxpr.outvars)

    assert (kernels(5), kernels(10)) == (10, 20)
    tiny = spent(layers(10), x, w) - spent(layers(5), x, w)
    assert 10 * LAUNCH < tiny < 11 * LAUNCH
    on_cpu = [spent(layers(n), x, w, target=get_target("cpu")) for n in (5, 10)]
    assert on_cpu[1] == pytest.approx(2 * on_cpu[0])


def chain_by_hand(seconds_origin="roofline"):
    """Six stages; the even ones have most FLOPs, the odd ones take longest to run again."""
    stages = tuple(
        Stage(s, s + 1, 0, forward_flops=10.0 if s % 2 == 0 else 1.0, tail_flops=10.0 if s % 2 == 0 else 1.0,
              transient_bytes=1, keep_bytes=4, keep_transient_bytes=1, forward_seconds=1.0 if s % 2 == 0 else 5.0,
              backward_seconds=2.0, tail_seconds=1.0 if s % 2 == 0 else 5.0)
        for s in range(6)
    )  # fmt: skip
    crossings = tuple(Crossing(s, s + 1, 1, 0) for s in range(5))
    items = tuple(
        Item(s, s + 1, (Option((), 0, 1, st.tail_flops, st.tail_seconds),)) for s, st in enumerate(stages[:-1])
    )
    return Chain(stages, items, crossings, seconds_origin=seconds_origin)


def test_plans_minimise_what_they_are_asked_to():
    """Where FLOPs and seconds disagree, the plan by seconds takes less time and the plan by FLOPs fewer FLOPs."""
    chain = chain_by_hand()
    budget = predict(chain, chain.plain()).temp_bytes - 8
    chains = chain, seconds.by_seconds(chain)
    by_flops, by_seconds = (get("optimal")(c, budget).prediction for c in chains)
    assert (by_flops.extra_flops, by_flops.extra_seconds, by_flops.minimises) == (2.0, 10.0, "flops")
    assert (by_seconds.extra_seconds, by_seconds.minimises) == (2.0, "seconds")
    assert by_seconds.extra_flops / by_seconds.forward_flops == pytest.approx(2.0 / 18.0)
    assert by_flops.step_seconds == by_seconds.step_seconds == 6 * 2.0 + 18.0


def test_a_chain_without_seconds_says_so():
    """No seconds are made up: a chain by hand predicts none, and cannot be weighed by them."""
    chain = Chain((Stage(0, 1),), (), ())
    assert predict(chain, chain.plain()).extra_seconds is None
    with pytest.raises(PlannerError, match="seconds cannot be minimised"):
        seconds.by_seconds(chain)


@pytest.mark.parametrize("name", ["mlp", "gpt", "dropout", "scan", "cond"])
def test_every_stage_and_option_has_seconds(name):
    """By roofline each stage takes time, and an option that saves more takes no longer to recompute."""
    loss, args = zoo.BY_NAME[name].toy()
    program = trace(loss, args, {}, argnums=0)
    chain = Pricer(program, H100, profile="roofline").chain(find_cuts(program.graph))
    assert chain.seconds_origin == "roofline"
    assert all(s.forward_seconds > 0 and s.backward_seconds >= 0 for s in chain.stages)
    for item in chain.items:
        again = [o.recompute_seconds for o in item.options if not o.loops]
        assert again == [] or again[-1] == 0 <= again[0]
        assert max(again, default=0) <= 1.1 * sum(s.forward_seconds for s in chain.stages[item.start : item.stop])


@functools.cache
def two_chains(name):
    """A toy's prices for a GPU, its chain by FLOPs, and the same by time."""
    loss, args = zoo.BY_NAME[name].toy()
    program = trace(loss, args, {}, argnums=0)
    pricer, cuts = Pricer(program, H100), find_cuts(program.graph)
    return pricer, pricer.chain(cuts), Pricer(program, H100, profile="roofline").chain(cuts)


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("name", ["gpt", "scan", "unet"])
def test_only_the_regions_of_a_plan_are_timed(name, share):
    """By FLOPs options are not timed before they are chosen, and a plan says the same seconds as if all were."""
    pricer, chain, by_time = two_chains(name)
    assert not any(o.recompute_seconds for item in chain.items for o in item.options)
    assert not any(stage.forward_seconds for stage in chain.stages)

    def timed(stage_or_option, flops):
        names = [f.name for f in fields(flops) if f.name.endswith("_flops")]
        return replace(stage_or_option, **{name: getattr(flops, name) for name in names})

    whole = replace(
        by_time,
        minimises="flops",
        stages=tuple(map(timed, by_time.stages, chain.stages)),
        items=tuple(
            replace(item, options=tuple(map(timed, item.options, beside.options)))
            for item, beside in zip(by_time.items, chain.items, strict=True)
        ),
    )
    budget = int(share * predict(chain, chain.plain()).temp_bytes)
    untimed = []
    for planner in ("optimal", "chen", "recursive(1)"):
        try:
            wanted = get(planner)(whole, budget).prediction
        except InfeasibleBudgetError as refused:
            wanted = get(planner)(whole, budget := refused.least_bytes).prediction
        plan = get(planner)(chain, budget)
        untimed += plan.prediction.untimed
        got = pricer.timed(plan).prediction
        assert (got.extra_seconds, got.step_seconds) == pytest.approx((wanted.extra_seconds, wanted.step_seconds))
        assert replace(got, extra_seconds=wanted.extra_seconds, step_seconds=wanted.step_seconds) == wanted
    assert untimed


def test_stages_are_timed_once_on_the_device(tmp_path, monkeypatch):
    """profile=True times each distinct stage, remembers it on disk, and the plan says where its seconds come from."""
    loss, args = zoo.BY_NAME["mlp"].toy()
    asked = []
    original = seconds.profile
    monkeypatch.setattr("jaxsub.costs.roofline.profile", lambda *a: asked.append(a[1:3]) or original(*a))
    options = dict(budget=450_000, verify=False, profile=True, cache=tmp_path, progress=False, chunks=False)
    plan = jaxsub.plan(loss, *args, **options)
    assert 0 < len(asked) < 12  # of the 12 layers most are alike
    assert plan.prediction.seconds_origin == "profiled"
    assert plan.prediction.minimises == "seconds"
    assert 0 < plan.prediction.extra_seconds < plan.prediction.step_seconds
    assert jaxsub.plan(loss, *args, **options) == plan
    assert len(asked) == len(set(asked)), "nothing is timed twice"
    assert "(profiled)" in str(plan)
    assert "of one forward pass in time" in str(plan)
    assert jaxsub.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", ["integers", "dropout", "auxiliary"])
def test_anything_that_runs_can_be_timed(name):
    """Integers, typed keys and auxiliary outputs are no obstacle."""
    loss, args = zoo.BY_NAME[name].toy()
    program = trace(loss, args, {}, argnums=0)
    forward, backward = seconds.profile(program, 0, len(program.eqns), get_target("cpu"))
    assert forward > 0
    assert np.isfinite(backward)


def test_a_device_that_is_not_there_cannot_be_timed():
    """profile=True for an absent GPU is refused with what to do; its published figures can be minimised."""
    loss, args = zoo.BY_NAME["mlp"].toy()
    options = dict(budget=450_000, verify=False, target="h100", cache=False, progress=False)
    with pytest.raises(UnsupportedError, match=r'`h100` is absent.*profile="roofline"'):
        jaxsub.plan(loss, *args, profile=True, **options)
    quick = jaxsub.plan(loss, *args, profile="roofline", **options).prediction
    few = jaxsub.plan(loss, *args, **options).prediction
    assert 0 < quick.extra_seconds <= few.extra_seconds
    assert (quick.seconds_origin, quick.minimises, few.minimises) == ("roofline", "seconds", "flops")
    with pytest.raises(ValueError, match="profile is True, False or \"roofline\", got 'fast'"):
        jaxsub.plan(loss, *args, profile="fast", **options)


def test_a_cpus_figures_are_called_a_guess():
    """What is printed of seconds on a CPU says that its figures are nominal."""
    loss, args = zoo.BY_NAME["mlp"].toy()
    plan = jaxsub.plan(loss, *args, budget=0.6, verify=False, cache=False, target="cpu", progress=False)
    assert "(roofline, nominal)" in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 80
    assert [format_seconds(s) for s in (2.5, 0.0123, 4e-6, 7.4e-8, 0.0)] == ["2.5 s", "12.3 ms", "4 us", "74 ns", "0 s"]


def test_stores_may_hold_other_things(tmp_path, monkeypatch):
    """A time in the cache is taken; what is no time there is measured anew."""
    loss, args = zoo.BY_NAME["mlp"].toy()
    program = trace(loss, args, {}, argnums=0)
    monkeypatch.setattr("jaxsub.costs.roofline.profile", lambda *a: (2.0, 3.0))
    store = Store(tmp_path)
    clock = seconds.Clock(program, get_target("cpu"), True, store, lambda label: None)
    assert clock._profiled("a", (0, 1)) == (2.0, 3.0)
    monkeypatch.setattr("jaxsub.costs.roofline.profile", lambda *a: (4.0, 5.0))
    assert clock._profiled("a", (0, 1)) == (2.0, 3.0)
    for key in list(store._texts):
        store.put(key, "no times")
    assert clock._profiled("a", (0, 1)) == (4.0, 5.0)
    for key in list(store._texts):
        store.put(key, (-1.0, 5.0))
    assert clock._profiled("a", (0, 1)) == (4.0, 5.0)
