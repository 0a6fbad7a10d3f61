"""The table of planners: names, objects, planners of one's own, and the best of all."""

import random
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from layers import tanh_layers
from machine import random_chain, uniform

import jaxsub
from jaxsub import planners
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Prediction, Run
from jaxsub.core.errors import InfeasibleBudgetError, PlannerError
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan, Segment, plan_from_runs
from jaxsub.core.simulate import predict
from jaxsub.planners import Auto, Barriers, Optimal, Plain, Recursive, Revolve, get, names, optimal, register
from jaxsub.planners import select as fit
from jaxsub.planners.memo import Memo, solved
from jaxsub.planners.optimal import solve
from jaxsub.planners.select import expected_compile_seconds, is_better


class EveryOther:
    """Recompute every other stage."""

    def __call__(self, chain: Chain, budget_bytes: int | None) -> Plan:
        """Plan a chain."""
        runs = [chain.recompute(s) if s % 2 else Run(s, s + 1) for s in range(len(chain.stages))]
        return plan_from_runs(chain, runs, budget=Budget(budget_bytes), planner="every_other")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", range(10))
def test_every_planner_plans_every_chain(name, seed):
    """Each name plans a random chain without a budget, and its own peak as a budget works."""
    chain = random_chain(random.Random(seed).randint, 1 + seed)
    plan = get(name)(chain, None)
    assert plan.fingerprint == chain.fingerprint
    again = get(name)(chain, plan.prediction.temp_bytes)
    assert again.prediction.temp_bytes <= plan.prediction.temp_bytes
    assert again.prediction.extra_flops <= plan.prediction.extra_flops


@pytest.mark.parametrize(
    ("name", "planner"),
    [("recursive(2)", Recursive(2)), (" revolve( 3, 4 ) ", Revolve(3, 4)), ("optimal(800)", Optimal(800)),
     ("auto", Auto()), ("plain", Plain()), ("barriers()", Barriers())],
)  # fmt: skip
def test_names_with_numbers(name, planner):
    """A name may carry the numbers that its planner is made with."""
    assert get(name) == planner


@pytest.mark.parametrize(
    ("name", "words"),
    [("optimum", "did you mean 'optimal'"), ("Chen", "did you mean 'chen'"), ("", "there are auto, barriers, cheap"),
     ("recursive(x)", "there is no planner"), ("recursive(0)", "at least 1"), ("cheap(1)", r"does not take \(1\)"),
     (7, "a planner is a name or an object"), (Optimal, "a planner is a name or an object")],
)  # fmt: skip
def test_unknown_planners_are_refused_in_words(name, words):
    """What is no planner is named, with the nearest that is one."""
    with pytest.raises(PlannerError, match=words):
        get(name)


def test_a_planner_of_ones_own(monkeypatch):
    """Five lines make a planner; it is passed as it is, or by the name it is given."""
    monkeypatch.setattr(planners, "_TABLE", dict(planners._TABLE))
    own = EveryOther()
    assert get(own) is own
    register("every_other", own)
    assert get("every_other") is own
    assert get("every_other")(uniform(4), None).n_regions == 2


def test_a_planner_that_returns_no_plan_is_refused():
    """The error says what a planner returns."""
    with pytest.raises(PlannerError, match=r"a planner returns a jaxsub.Plan, as .*plan_from_runs.*; got None"):
        Memo(lambda chain, budget_bytes: None)(uniform(4), None)


@pytest.mark.parametrize(("name", "planner"), [("a b", EveryOther()), ("ok", 3), ("ok", EveryOther)])
def test_bad_registrations_are_refused(name, planner):
    """A name that could not be asked for, or a planner that cannot be called, is refused."""
    with pytest.raises(PlannerError):
        register(name, planner)


@pytest.mark.parametrize("seed", range(20))
def test_auto_is_the_best_of_all(seed):
    """At every budget no planner that fits has fewer FLOPs than `auto`."""
    chain = random_chain(random.Random(seed).randint, 8)
    plain_bytes = predict(chain, chain.plain()).temp_bytes
    for budget_bytes in (plain_bytes, 2 * plain_bytes // 3, plain_bytes // 3):
        found = []
        for name in set(names()) - {"auto"}:
            try:
                found.append(get(name)(chain, budget_bytes).prediction.extra_flops)
            except InfeasibleBudgetError:
                continue
        if found:
            assert Auto()(chain, budget_bytes).prediction.extra_flops == min(found)
        else:
            with pytest.raises(InfeasibleBudgetError):
                Auto()(chain, budget_bytes)


def answer(planner, chain: Chain, budget_bytes: int | None) -> Plan | int:
    """The plan, or the least bytes that a refusal names."""
    try:
        return planner(chain, budget_bytes)
    except InfeasibleBudgetError as refusal:
        return refusal.least_bytes


@pytest.mark.parametrize("name", names())
def test_a_memo_changes_no_plan(name):
    """Asked for one budget after another, on one chain and then another, a memo answers as its planner."""
    memo, planner = Memo(get(name)), get(name)
    for seed in (1, 2, 1):
        chain = random_chain(random.Random(seed).randint, 7)
        plain_bytes = predict(chain, chain.plain()).temp_bytes
        for budget_bytes in (plain_bytes, None, 2 * plain_bytes // 3, 10**6, 1):
            assert answer(memo, chain, budget_bytes) == answer(planner, chain, budget_bytes)


@pytest.mark.parametrize("name", ["chen", "recursive", "revolve"])
def test_candidates_are_priced_once(monkeypatch, name):
    """However many budgets are asked for."""
    priced = []
    monkeypatch.setattr(fit, "predict", lambda *args: priced.append(args) or predict(*args))
    answer = solved(get(name), uniform(30))
    answer(30)
    once = len(priced)
    assert answer(29).prediction.temp_bytes <= 29
    assert len(priced) == once > 3


def test_a_chain_is_solved_once_for_all_budgets(monkeypatch):
    """Tables that one budget has filled serve the next; another chain is solved anew, and so is an equal one not."""
    solutions = []
    monkeypatch.setattr(optimal, "solve", lambda chain, *rest: solutions.append(chain) or solve(chain, *rest))
    memo = Memo(Auto())
    for n in (6, 6, 7):
        for budget_bytes in (9, 8, None):
            memo(uniform(n), budget_bytes)
    assert [len(chain.stages) for chain in solutions] == [6, 7]


def test_a_function_is_solved_once(monkeypatch):
    """On the way from a call to its plan a chain is asked for several plans; it is solved anew when a price changes."""
    solutions = []
    monkeypatch.setattr(optimal, "solve", lambda chain, *rest: solutions.append(chain) or solve(chain, *rest))
    ws, x = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 12, jax.ShapeDtypeStruct((256, 8), jnp.float32)
    assert jaxsub.plan(tanh_layers, ws, x, budget=0.6, cache=False, progress=False).n_regions
    assert solutions
    assert all(chain != before for before, chain in pairwise(solutions))


def test_plain_has_no_barriers_and_barriers_has_all():
    """The two that recompute nothing differ in barriers alone."""
    chain = uniform(5)
    assert Plain()(chain).barriers == ()
    assert Barriers()(chain).barriers == (1, 2, 3, 4)
    assert Plain()(chain).segments == Barriers()(chain).segments == ()


def measured(n_regions: int, again: float, temp_bytes: int) -> Plan:
    """A plan over 100 nodes of a program whose forward pass takes 100 FLOPs."""
    segments = tuple(Segment(10 * i, 10 * i + 10) for i in range(n_regions))
    return Plan("f", Budget(), 100, segments, prediction=Prediction(temp_bytes, again, 100.0, 0, "by hand"),
                measurement=Measurement(temp_bytes, 0, 0, 0, None, 1.0, "cpu"))  # fmt: skip


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((5, 10.0, 7), (5, 11.0, 7)),  # less work
        ((5, 10.0, 6), (5, 10.0, 7)),  # less memory for the same work
        ((4, 11.0, 7), (8, 10.0, 7)),  # within half a percent of 300, fewer regions
        ((8, 10.0, 7), (4, 12.0, 7)),  # not within half a percent
        ((8, 10.0, 7), (7, 11.0, 7)),  # not clearly fewer
        ((8, 10.0, 6), (4, 11.0, 7)),  # fewer, but a budget of 6 would find less work
    ],
)
def test_of_plans_that_fit_the_better_is_kept(better, worse):
    """Less work first; within a percent, clearly fewer regions that need no more memory; then less memory."""
    assert is_better(measured(*better), measured(*worse))
    assert not is_better(measured(*worse), measured(*better))


def test_recursion_is_expected_to_compile_long():
    """The more is recomputed, the longer a plan is expected to compile; the plain one takes what it took."""
    assert expected_compile_seconds(measured(0, 0, 1), 4.0) == 4.0
    assert 4.0 < expected_compile_seconds(measured(5, 0, 1), 4.0) < expected_compile_seconds(measured(10, 0, 1), 4.0)
    deep = Plan.from_mirror_counts([5] * 1024, fingerprint="f")  # the average of halving 1024 layers
    assert 20 <= expected_compile_seconds(deep, 4.0) <= 60
