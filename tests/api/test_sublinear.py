"""The public calls: values and gradients under every planner and budget, what is done only once, bad input."""

import functools
import re
from collections.abc import Iterator

import chex
import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
import zoo

import jaxsub
from jaxsub.api import sublinear as api
from jaxsub.core.budget import Budget
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import Program, trace
from jaxsub.search.verify import cut_choices

PLANNERS = ("auto", "chen", "cheap", "recursive(1)", "revolve", "barriers")
SHARES = (None, 0.5, 0.2)
TOLERANCE = 2e-6  # of the largest entry: a few roundings of f32; the compiler fuses the two programs differently
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # a third of the time; fusion and buffers are as always
predicted = functools.partial(jaxsub.sublinear, verify=False, cache=False, progress=False)
measured = functools.partial(jaxsub.sublinear, progress=False)


def small(layers=6, batch=64, width=16):
    """A chain of tanh layers whose activations outweigh its weights, and its arguments."""
    weights, x = zoo.weights_and_input(jax.random.key(0), layers, batch, width)

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss, (weights, x)


def assert_as_plain(got, wanted):
    """The same tree, shapes and dtypes, and arrays within `TOLERANCE` of their largest entry."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            assert jnp.abs(a - b).max() <= TOLERANCE * jnp.abs(b).max()
        else:
            assert jnp.array_equal(a, b)


# Gradients


@functools.cache
def priced(name: str) -> tuple[Program, Pricer]:
    """A toy, traced and priced once for all planners and budgets."""
    loss, args = zoo.BY_NAME[name].toy()
    program = trace(loss, args, {})
    return program, Pricer(program, get_target(None))


@functools.cache
def plain_gradient(name: str):
    """Value and gradient of a toy without any plan."""
    model = zoo.BY_NAME[name]
    loss, args = model.toy()
    return jax.jit(model.value_and_grad(loss), compiler_options=FAST_COMPILE)(*args)


@functools.cache
def planned_gradient(name: str, segments, barriers):
    """Value and gradient of a toy under a plan; plans that differ in their figures only are run once."""
    model, (program, _) = zoo.BY_NAME[name], priced(name)
    loss, args = model.toy()
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), segments, barriers)
    return jax.jit(model.value_and_grad(jaxsub.sublinear(loss, plan=plan)), compiler_options=FAST_COMPILE)(*args)


def plans_of(name: str, planner: str) -> Iterator[Plan]:
    """A planner's plan at each share of what a toy needs; where it refuses, at the least it says would do."""
    _, pricer = priced(name)
    chain, make = pricer.chain(cut_choices(pricer.program)[0]), jaxsub.planners.get(planner)
    plain = jaxsub.planners.get("plain")(chain, None).prediction.temp_bytes
    for share in SHARES:
        budget = None if share is None else int(share * plain)
        try:
            plan = make(chain, budget)
        except InfeasibleBudgetError as refused:
            least = refused.least_bytes
            plan = make(chain, least)
        else:
            least = None
        assert least is None or budget < plan.prediction.temp_bytes <= least
        yield plan


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("model", zoo.TOYS, ids=str)
def test_values_and_gradients_are_the_plain_ones(model, planner):
    """Whatever is saved and recomputed, values, auxiliary outputs and gradients stay."""
    for plan in plans_of(model.name, planner):
        assert_as_plain(planned_gradient(model.name, plan.segments, plan.barriers), plain_gradient(model.name))


def test_the_planners_do_not_all_agree():
    """The test above runs plans that differ: with regions and without, nested and not."""
    plans = {(p.segments, p.barriers) for planner in PLANNERS for p in plans_of("relu", planner)}
    assert len(plans) >= 5
    assert {bool(segments) for segments, _ in plans} == {True, False}
    assert any(s.children for segments, _ in plans for s in segments)


@pytest.mark.parametrize("name", ["integers", "dropout", "scan"])
def test_measured_plans_keep_to_their_budget(name):
    """With a budget in bytes the compiler confirms it, and the gradient is the plain one."""
    model = zoo.BY_NAME[name]
    loss, args = model.toy()
    budget = int(0.8 * jaxsub.measure(loss, *args).temp_bytes)
    try:
        f = measured(loss, budget=budget)
        plan = f.plan(*args)
    except InfeasibleBudgetError as refused:
        budget = refused.least_bytes
        f = measured(loss, budget=budget)
        plan = f.plan(*args)
    assert plan.measurement.temp_bytes <= budget
    assert jaxsub.measure(f, *args).temp_bytes <= budget
    assert_as_plain(jax.jit(model.value_and_grad(f), compiler_options=FAST_COMPILE)(*args), plain_gradient(name))


@pytest.mark.parametrize("name", ["chain", "mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_what_can_be_had_by_hand_is_not_refused(name):
    """A budget that jax.checkpoint round each block meets is met."""
    model = zoo.BY_NAME[name]
    loss, args = model.toy()
    by_hand = jaxsub.measure(model.toy(wrap=jax.checkpoint)[0], *args).temp_bytes
    assert jaxsub.plan(loss, *args, budget=by_hand, progress=False).measurement.temp_bytes <= by_hand


# The second call


def test_a_second_call_traces_and_plans_nothing(monkeypatch):
    """The function's own code runs once for each shape, and a plan is made once."""
    loss, args = small()
    traced = predicted(chex.assert_max_traces(loss, n=1))
    plans = []
    monkeypatch.setattr(api, "make_plan", lambda *a: plans.append(1) or real(*a))
    real = _make_plan
    step = jax.jit(jax.grad(traced))
    for _ in range(2):
        traced(*args)
        jax.grad(traced)(*args)
        step(*args)
        traced.plan(*args)
    assert len(plans) == 1
    with pytest.raises(AssertionError, match="traced > 1 times"):
        traced(args[0], args[1][:8])


_make_plan = api.make_plan


def test_a_second_call_compiles_nothing():
    """JAX reports no trace, lowering or compile the second time, whether inside jit or outside."""
    loss, args = small()
    f = measured(loss, budget=0.9)
    step = jax.jit(jax.value_and_grad(f))

    def calls():
        return jax.block_until_ready((f(*args), jax.grad(f)(*args), step(*args)))

    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    try:
        calls()
        assert any("compile" in event for event in events)
        events.clear()
        calls()
        assert [event for event in events if "/jax/core/compile" in event] == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_a_plan_is_kept_between_functions(tmp_path):
    """What was measured for one function is on disk for the next: nothing is compiled for it."""
    loss, args = small()
    one = measured(loss, budget=0.9, cache=tmp_path).plan(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxsub.search.verify.measure_compiled", None)
        assert measured(loss, budget=0.9, cache=tmp_path).plan(*args) == one


def test_shapes_and_settings_get_their_own_trace():
    """Another shape, dtype or precision is another program."""
    loss, (ws, x) = small(2)
    f = predicted(loss)
    kinds = [f.plan(ws, x), f.plan(ws, x[:8]), f.plan(jax.tree.map(lambda w: w.astype(jnp.bfloat16), ws), x)]
    with jax.default_matmul_precision("highest"):
        kinds.append(f.plan(ws, x))
    assert len({plan.fingerprint for plan in kinds}) == 4


# Bad input


@pytest.mark.parametrize("budget", [0, -1, float("nan"), "8 bananas", True, 1.5, 0.0, "0GiB", [1]], ids=repr)
def test_a_budget_that_is_none(budget):
    """What is no budget is refused before anything is traced, and the message says what forms there are."""
    with pytest.raises(jaxsub.BudgetError, match=r'"8GiB"'):
        jaxsub.sublinear(lambda x: x, budget=budget)
    with pytest.raises(ValueError, match="fraction"):
        jaxsub.plan(lambda x: x, 1.0, budget=budget)


@pytest.mark.parametrize("chunks", [False, "auto"])
def test_the_least_budget_named_in_a_refusal_works(chunks):
    """A budget of one byte is refused with figures, and the least one named is met."""
    loss, args = small()
    with pytest.raises(InfeasibleBudgetError, match="Pass budget=") as refused:
        measured(loss, budget=1, chunks=chunks)(*args)
    assert refused.value.requested_bytes == 1
    assert str(refused.value.least_bytes) in str(refused.value)
    shares = [int(held.partition("%")[0]) for held in refused.value.holders]
    assert shares == sorted(shares, reverse=True)
    assert 50 <= sum(shares) <= 102  # rounded
    held = r"float32\[.*\] test_sublinear.py:\d+" if chunks is False else r"test_sublinear.py:\d+ \(loss\)` works with"
    assert re.search(rf"\d+% \([\d.]+ \w+\) .*{held}", str(refused.value))
    f = measured(loss, budget=refused.value.least_bytes, chunks=chunks)
    assert f.plan(*args).measurement.temp_bytes <= refused.value.least_bytes
    assert_as_plain(jax.jit(jax.grad(f))(*args), jax.jit(jax.grad(loss))(*args))


def test_a_while_loop_runs_forward():
    """A function without a reverse mode runs, forward differentiation too; its gradient is refused by JAX."""

    def f(w):
        return jnp.sum(jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, w))[1])

    w = jnp.eye(3)
    g = predicted(f)
    chex.assert_trees_all_close(jax.jvp(g, (w,), (w,)), jax.jvp(f, (w,), (w,)), rtol=1e-6)
    assert measured(f, budget=0.5).plan(w).planner == "plain"
    with pytest.raises(ValueError, match="while_loop"):
        jax.grad(g)(w)


def test_no_arrays_come_back():
    """A function that returns nothing, or nothing that depends on its arguments, is called like any other."""
    assert predicted(lambda w: None)(1.0) is None
    assert predicted(lambda w: ())(1.0) == ()
    assert predicted(lambda w: {"a": 2})(1.0) == {"a": 2}
    assert jax.grad(predicted(lambda w: 3.0))(1.0) == 0


def test_integer_arguments_named_by_argnums():
    """Where argnums= names an argument with nothing to differentiate the user is told so; another one works."""

    def f(n, w):
        return jnp.sum(jnp.tanh(w) * n)

    with pytest.raises(jaxsub.UnsupportedError, match="argnums="):
        predicted(f, argnums=0)(3, jnp.ones(2))
    chex.assert_trees_all_close(
        jax.grad(predicted(f, argnums=1), argnums=1)(3, jnp.ones(2)), jax.grad(f, 1)(3, jnp.ones(2))
    )


def test_what_is_no_array():
    """All arguments that are not arrays are named at once."""
    with pytest.raises(jaxsub.UnsupportedError, match="arg1 is a str, mode is a str"):
        predicted(lambda w, a, mode: w)(1.0, "a", mode="b")
    with pytest.raises(TypeError, match="budget by name"):
        jaxsub.sublinear("8GiB")


def test_unknown_planner():
    """A misspelt planner is refused at once, with the nearest name."""
    with pytest.raises(jaxsub.PlannerError, match="revolve"):
        jaxsub.sublinear(lambda x: x, planner="revolv")


def test_a_plan_of_another_function():
    """A plan is refused on another function, with both fingerprints; on its own it loads from a file."""
    loss, args = small()
    plan = jaxsub.plan(loss, *args, verify=False)
    with pytest.raises(jaxsub.PlanMismatchError, match=plan.fingerprint) as refused:
        jaxsub.sublinear(lambda ws, x: loss(ws, x) + 1, plan=plan)(*args)
    assert refused.value.function_fingerprint in str(refused.value)
    assert refused.value.plan_fingerprint == plan.fingerprint != refused.value.function_fingerprint


def test_a_plan_from_a_file(tmp_path):
    """A saved plan is taken as it is."""
    loss, args = small()
    plan = jaxsub.plan(loss, *args, verify=False)
    plan.save(str(tmp_path / "plan.json"))
    f = jaxsub.sublinear(loss, plan=tmp_path / "plan.json")
    assert f.plan(*args) == plan
    assert_as_plain(jax.jit(jax.grad(f))(*args), jax.jit(jax.grad(loss))(*args))


def test_an_error_in_the_function_points_to_its_line():
    """The traceback of an error in the user's function holds the user's function."""

    def broken(w):
        return jnp.ones((2, 3)) @ w

    with pytest.raises(TypeError) as raised:
        predicted(broken)(jnp.ones((2, 2)))
    assert any(entry.name == "broken" for entry in raised.traceback)


def test_mirror_counts():
    """The paper's m(v) as a function of nodes: cheap results are recomputed, matrix products are kept."""
    loss, args = small()
    f = jaxsub.sublinear(loss, mirror=lambda node: 0 if node.primitive == "dot_general" else 1)
    assert set(f.plan(*args).mirror_counts) == {0, 1}
    assert_as_plain(jax.jit(jax.grad(f))(*args), jax.jit(jax.grad(loss))(*args))
    with pytest.raises(ValueError, match="counts"):
        jaxsub.sublinear(loss, mirror=[1, 0])(*args)
