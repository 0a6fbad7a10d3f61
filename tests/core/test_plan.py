"""Budgets as they are written, segments that hold together, mirror counts and JSON there and back, plans in words."""

import json
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsub.allocator import LEAST_NEEDS, allocate, gradient_graph
from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.chain import Chain, Crossing, Option, Prediction, Run, Stage
from jaxsub.core.errors import BudgetError, PlannerError
from jaxsub.core.graph import graph_of
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan, Segment, plan_from_runs, walk
from jaxsub.core.simulate import predict
from jaxsub.core.steps import Holding
from jaxsub.show.text import describe

FORMS = (
    'Pass bytes as "8GiB", "512MB" or an int; a float in (0, 1] or "50%", the fraction of what the function needs now; '
    "or None."
)


@pytest.mark.parametrize(
    ("given", "n_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MB", 512 * 10**6),
        (" 1.5 kib ", 1536),
        (".5KB", 500),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("100", 100),
        ("1e3B", 1000),
        (7, 7),
        (np.int64(7), 7),
        (jnp.int32(7), 7),
        ("1e9", 10**9),
    ],
)
def test_a_budget_in_bytes(given, n_bytes):
    """Text with a unit, in any case and with blanks, and integers of any make are bytes."""
    assert Budget.parse(given) == Budget(n_bytes=n_bytes)


@pytest.mark.parametrize(
    "given", [0.25, np.float32(0.25), np.array(0.25), jnp.bfloat16(0.25), Fraction(1, 4), "0.25", "25%", " 2.5e1 %"]
)
def test_a_budget_as_a_fraction(given):
    """A float of any make in (0, 1], or one that is written out, is a fraction of what the function needs now."""
    assert Budget.parse(given) == Budget(fraction=0.25)
    assert Budget.parse("1.0") == Budget.parse("100%") == Budget(fraction=1.0)
    assert Budget.parse(1.0) == Budget(fraction=1.0)


def test_a_budget_that_is_one():
    """No budget is the paper's default, and a budget stays itself."""
    assert Budget.parse(None) == Budget()
    assert Budget.parse(Budget(n_bytes=3)) == Budget(n_bytes=3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "A budget must be positive, got 0 bytes."),
        (-5, "A budget must be positive, got -5 bytes."),
        ("0GiB", "A budget must be positive and finite, got '0GiB'."),
        ("1e999", "A budget must be positive and finite, got '1e999'."),
        ("8 bananas", "Cannot read the budget '8 bananas'."),
        ("-5GiB", "A budget must be positive and finite, got '-5GiB'."),
        ("-5", "A budget must be positive and finite, got '-5'."),
        ("\u00b2", "Cannot read the budget '\u00b2'."),
        ("150%", "A float budget is a fraction in (0, 1], got '150%'."),
        ("1.5", "A float budget is a fraction in (0, 1], got '1.5'."),
        ("1e-1000%", "A float budget is a fraction in (0, 1], got '1e-1000%'."),
        ("", "Cannot read the budget ''."),
        ("nan", "Cannot read the budget 'nan'."),
        (True, "A budget cannot be a bool, got True."),
        (0.0, "A float budget is a fraction in (0, 1], got 0.0."),
        (-0.5, "A float budget is a fraction in (0, 1], got -0.5."),
        (1.5, "A float budget is a fraction in (0, 1], got 1.5."),
        (2e9, "A float budget is a fraction in (0, 1], got 2000000000.0. For bytes pass int(2000000000.0)."),
        (float("nan"), "A float budget is a fraction in (0, 1], got nan."),
        (float("inf"), "A float budget is a fraction in (0, 1], got inf."),
        (["8GiB"], "Cannot read the budget ['8GiB'] of type list."),
        (1j, "Cannot read the budget 1j of type complex."),
    ],
)
def test_a_budget_that_is_none(given, words):
    """What is no budget is refused in these words, and then the forms that there are."""
    with pytest.raises(BudgetError) as caught:
        Budget.parse(given)
    assert str(caught.value) == f"{words} {FORMS}"
    assert isinstance(caught.value, ValueError)


@given(st.integers(1, 2**60))
def test_a_shown_budget_can_be_passed_back(n_bytes):
    """What a budget prints reads as the same budget to three digits."""
    again = Budget.parse(str(Budget(n_bytes=n_bytes))).n_bytes
    assert again == pytest.approx(n_bytes, rel=0.006)


def test_budgets_in_words():
    """A budget says what it is."""
    assert [str(b) for b in (Budget(n_bytes=2**20), Budget(fraction=0.25), Budget())] == [
        "1.00 MiB", "25% of plain", "none given"]  # fmt: skip
    assert [format_bytes(n) for n in (0, 1023, 1536, 20 * 2**30)] == ["0 B", "1023 B", "1.50 KiB", "20.0 GiB"]


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ((Segment(2, 2),), "segment 2:2 does not fit in 0:9"),
        ((Segment(3, 2),), "segment 3:2 does not fit"),
        ((Segment(0, 10),), "segment 0:10 does not fit in 0:9"),
        ((Segment(-1, 3),), "segment -1:3 does not fit in 0:9"),
        ((Segment(0, 4), Segment(3, 6)), "segment 3:6 does not fit in 4:9"),
        ((Segment(4, 6), Segment(0, 3)), "segment 0:3 does not fit in 6:9"),
        ((Segment(2, 5, (), (Segment(2, 6),)),), "segment 2:6 does not fit in 2:5"),
        ((Segment(2, 5, (), (Segment(1, 3),)),), "segment 1:3 does not fit in 2:5"),
        ((Segment(0, 8, (), (Segment(0, 4), Segment(3, 8))), Segment(7, 9)), "segment 3:8 .* segment 7:9"),
    ],
)
def test_segments_that_do_not_hold_together(segments, words):
    """Segments that are empty, reach out, overlap or stand out of order are refused, all of them at once."""
    with pytest.raises(ValueError, match=words):
        Plan("f", Budget(), 9, segments)


def test_segments_may_touch_and_nest():
    """Segments that touch, and children that fill their parent, hold together."""
    inner = Segment(0, 4, (), (Segment(0, 4),))
    assert Plan("f", Budget(), 9, (inner, Segment(4, 9))).n_regions == 3


@pytest.mark.parametrize("barriers", [(3, 2), (2, 2)])
def test_barriers_that_are_not_in_order(barriers):
    """Barriers out of order or repeated are refused."""
    with pytest.raises(ValueError, match="the barriers are not in order"):
        Plan("f", Budget(), 9, barriers=barriers)


def test_mirror_counts_by_hand():
    """m(v) is the number of segments that contain v, less those that v ends."""
    nested = Segment(0, 7, (), (Segment(0, 3), Segment(3, 6)))
    assert Plan("f", Budget(), 9, (nested,)).mirror_counts == (2, 2, 1, 2, 2, 1, 0, 0, 0)
    assert Plan("f", Budget(), 3, (Segment(1, 2),)).mirror_counts == (0, 0, 0)


def test_mirror_counts_in_a_graph():
    """What a segment saves, and what is read behind its end, is executed no more; in a nest once by the outer one."""
    reads = [[0], [1], [1, 2], [3], [2, 4], [5]]  # value 2, of node 1, crosses the end of the inner segment
    graph = graph_of([("sin", values, [8]) for values in reads], 1, [6])
    nested = Plan("f", Budget(), 6, (Segment(0, 6, (), (Segment(0, 3), Segment(3, 5))),))
    assert nested.mirror_counts == (2, 2, 1, 2, 1, 0)
    assert nested.mirror_counts_in(graph) == (2, 1, 1, 2, 1, 0)
    assert Plan("f", Budget(), 6, (Segment(0, 5, (1,)),)).mirror_counts_in(graph) == (0, 1, 1, 1, 0, 0)


def test_two_states_cross_each_segment():
    """Of a recurrent network with two states segments of sqrt(n) steps take some sqrt(n) arrays, as of a chain."""
    for root in (8, 16):
        n, ops = root * root, []
        for v in range(0, 2 * n, 2):  # each step makes a state of both, then the other of the new one and itself
            ops += [("dot_general", [v, v + 1], [1]), ("dot_general", [v + 1, v + 2], [1])]
        graph = graph_of(ops, 2, [2 * n, 2 * n + 1], input_bytes=[1, 1])
        plan = Plan("f", Budget(), 2 * n, tuple(Segment(at, at + 2 * root) for at in range(0, 2 * n, 2 * root)))
        taken, without = (
            allocate(gradient_graph(graph, counts, needs=LEAST_NEEDS)).total_bytes
            for counts in (plan.mirror_counts_in(graph), plan.mirror_counts)
        )
        assert taken <= 4 * root + 8
        assert without > n


def test_segments_from_mirror_counts_by_hand():
    """Runs of m >= 1 and their next node are segments with a barrier in front and behind; runs of m >= 2 nest."""
    plan = Plan.from_mirror_counts([2, 2, 1, 2, 2, 1, 0, 0, 1, 0], fingerprint="f", budget=Budget(n_bytes=5))
    nested = Segment(0, 7, (), (Segment(0, 3), Segment(3, 6)))
    assert plan.segments == (nested, Segment(8, 10))
    assert plan.barriers == (0, 3, 7, 8)
    assert (plan.fingerprint, plan.n_nodes, plan.planner, plan.budget.n_bytes) == ("f", 10, "mirror", 5)


@given(st.lists(st.integers(0, 4), max_size=30))
def test_mirror_counts_there_and_back(counts):
    """Any m comes back as it was, but that the last node of all closes its segment and so has m(v) = 0."""
    back = Plan.from_mirror_counts(counts, fingerprint="f").mirror_counts
    assert list(back) == [*counts[:-1], 0][: len(counts)]
    assert Plan.from_mirror_counts(back, fingerprint="f").mirror_counts == back


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([0, -1], r"m\(1\) = -1"),
        ([0.5], r"m\(0\) = 0.5"),
        ([True], r"m\(0\) = True"),
        ([0, None], r"m\(1\) = None"),
        ([-1, 0, 1.5], "-1, .* = 1.5"),
    ],
)
def test_mirror_counts_that_are_none(counts, words):
    """Counts below 0 and what is no integer are refused, each by its node."""
    with pytest.raises(ValueError, match=f"integers of at least 0, got .*{words}"):
        Plan.from_mirror_counts(counts, fingerprint="f")


PREDICTION = Prediction(temp_bytes=3 * 2**30, extra_flops=5e11, forward_flops=1e12, peak_at=3, origin="compiled")
MEASUREMENT = Measurement(3 * 2**30, 10, 20, 0, 4.5e12, 1.25, "cpu")
FULL = Plan(
    fingerprint="f",
    budget=Budget(n_bytes=4 * 2**30),
    n_nodes=9,
    segments=(Segment(0, 3, (7, 8)), Segment(3, 9, (), (Segment(3, 5), Segment(5, 8)))),
    barriers=(0, 3, 5),
    planner="optimal",
    prediction=PREDICTION,
    plain_prediction=replace(PREDICTION, temp_bytes=12 * 2**30, extra_flops=0.0),
    measurement=MEASUREMENT,
    plain_measurement=replace(MEASUREMENT, temp_bytes=12 * 2**30, flops=None),
    is_optimal=True,
    lower_bound=4e11,
    holdings=(Holding("attention f32[8,16] (model.py:48)", 2**20, 12),),
)


@pytest.mark.parametrize("plan", [FULL, Plan("f", Budget(), 0), Plan("f", Budget(fraction=0.5), 3, barriers=(1,))])
def test_json_there_and_back(plan, tmp_path):
    """A plan comes back from JSON, and from a file, equal to what it was, and hashes alike."""
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(str(tmp_path / "plan.json"))
    again = Plan.load(str(tmp_path / "plan.json"))
    assert again == plan
    assert hash(again) == hash(plan)


@given(st.lists(st.integers(0, 4), max_size=30))
def test_json_of_any_nesting(counts):
    """Segments come back from JSON however deep they nest."""
    plan = Plan.from_mirror_counts(counts, fingerprint="f")
    assert Plan.from_json(plan.to_json()) == plan


def test_json_of_another_kind_says_which():
    with pytest.raises(ValueError, match=r"this is a jaxsub step plan, and no jaxsub plan; make a new one with jaxsub"):
        Plan.from_json(json.dumps({"jaxsub_step_plan": 4}))


def test_a_plan_is_compared_with_a_plan_alone(tmp_path):
    """Or with one that was saved; anything else is named."""
    FULL.save(str(tmp_path / "p.json"))
    assert not FULL.diff(tmp_path / "p.json")
    for other in (3, None):
        with pytest.raises(TypeError, match=f"this is {other}, and no jaxsub plan; make a new one with jaxsub.plan"):
            FULL.diff(other)


def test_steps_that_a_plan_does_not_have_are_not_drawn():
    for inside in (0, -1, "loop"):
        with pytest.raises(IndexError, match=f"inside={inside!r} is none of the 0 loops and runs in slices"):
            FULL.plot(inside=inside)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "3", json.dumps({"jaxsub_plan": 0}), FULL.to_json().replace(': 4,\n "f', ': 3,\n "f')]
)
def test_json_that_is_no_plan(text):
    """JSON that is no plan, or one of another version, is refused with what to do."""
    with pytest.raises(ValueError, match=r"no jaxsub plan of version 4; make a new one with jaxsub\.plan"):
        Plan.from_json(text)
    with pytest.raises(ValueError, match="no JSON"):
        Plan.from_json("a plan")


def test_json_of_faulty_segments_is_refused():
    """Segments that do not hold together are refused from JSON as they are from Python."""
    with pytest.raises(ValueError, match="segment 0:99 does not fit"):
        Plan.from_json(FULL.to_json().replace('"stop": 3', '"stop": 99'))


def test_a_plan_in_words():
    """A plan says what it keeps, recomputes and costs, predicted and measured apart."""
    assert str(FULL).splitlines() == [
        "jaxsub plan by `optimal`, budget: 4.00 GiB",
        "predicted  peak 12.0 GiB -> 3.00 GiB (4.0x less)",
        "measured   peak 12.0 GiB -> 3.00 GiB (4.0x less)",
        "extra      50.0% of one forward pass in FLOPs",
        "bound      at most 10.0% of a forward pass above the least possible",
        "recompute  7 of 9 equations, at most 2 times; 4 regions, 3 barriers",
        "keep         12 x  1.00 MiB  attention f32[8,16] (model.py:48)",
    ]
    unverified = replace(FULL, measurement=None, plain_measurement=None)
    assert "           not verified by a compile" in str(unverified).splitlines()
    both = replace(FULL, plain_measurement=replace(MEASUREMENT, flops=3e12))
    assert "50.0% of one forward pass in FLOPs; 1.500x the FLOPs in all" in str(both)


def many_nodes(n_nodes: int, **changes: object) -> Plan:
    """A plan over so many nodes, with a region every 50 and a barrier every 10 of them."""
    segments = tuple(Segment(at, min(at + 50, n_nodes)) for at in range(0, n_nodes, 50))
    barriers = tuple(range(0, n_nodes, 10))
    return replace(FULL, n_nodes=n_nodes, segments=segments, barriers=barriers, **changes)


HOLDINGS = st.builds(Holding, st.text("abc %[]", max_size=200), st.integers(0, 2**45), st.integers(1, 9999))


@given(st.lists(HOLDINGS, max_size=12), st.integers(0, 2**45), st.floats(0, 0.999), st.integers(1, 9999))
def test_plans_are_80_columns_wide(holdings, temp_bytes, share, n_nodes):
    """Whatever a plan holds, no line of its description is wider than 80 columns, and the rest is counted."""
    prediction = replace(PREDICTION, temp_bytes=temp_bytes, extra_flops=share * 1e12)
    plan = many_nodes(n_nodes, prediction=prediction, plain_measurement=MEASUREMENT, holdings=tuple(holdings))
    lines = describe(plan).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("keep ") for line in lines) == min(len(holdings), 8)
    assert ("smaller values" in lines[-1]) == (len(holdings) > 8)


def test_long_holdings_are_cut_and_the_smallest_counted():
    """The eight largest are named, cut at 80 columns, and the rest counted as often as they are kept."""
    holdings = tuple(Holding("x" * 200, 2**20, n) for n in range(1, 11))
    lines = describe(replace(FULL, holdings=holdings)).splitlines()
    assert [len(line) for line in lines if line.startswith("keep ")] == [80] * 8
    assert lines[-1].split() == ["and", "19", "smaller", "values"]


WIDE = {
    "a whole forward pass, measured": replace(
        FULL, prediction=replace(PREDICTION, extra_flops=1e12), plain_measurement=MEASUREMENT
    ),
    "many nodes": many_nodes(200_000),
    "a long name": replace(FULL, planner="a planner whose name its author did not want to be short " * 2),
}


@pytest.mark.parametrize("plan", WIDE.values(), ids=WIDE.keys())
def test_wide_plans_are_80_columns_wide(plan):
    """Large figures and long names do not make a description wider than 80 columns."""
    assert max(map(len, describe(plan).splitlines())) <= 80


@pytest.mark.parametrize("given", [np.True_, np.array([1, 2])])
def test_numpy_values_that_are_no_budget(given):
    """NumPy's bool and arrays are no budgets, and are refused as such."""
    with pytest.raises(BudgetError):
        Budget.parse(given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"barriers": (-1, 99)},
        {"segments": (Segment(0, 4, (), (Segment(1, 3, (1,), offloaded=(1,)),)),)},
    ],
    ids=["barriers outside", "saved in host memory by a nested segment"],
)
def test_plans_that_cannot_be_emitted(wrong):
    """Barriers outside the program, and values that a nested segment saves in host memory, are refused."""
    with pytest.raises(ValueError, match="plan"):
        Plan("f", Budget(), 9, **wrong)


def test_the_gap_is_a_share_of_a_forward_pass():
    """The gap is what a plan recomputes above the certified bound; without a bound there is none."""
    assert FULL.gap == pytest.approx(0.1)
    assert replace(FULL, lower_bound=None).gap is None
    assert replace(FULL, prediction=None).gap is None


CHAIN = Chain(
    stages=tuple(Stage(3 * s, 3 * s + 3, first_value=2 + 3 * s, transient_bytes=2, keep_bytes=5, keep_transient_bytes=6)
                 for s in range(6)),
    items=(),
    crossings=tuple(Crossing(s, s + 1, 1, 1) for s in range(5)),
    fingerprint="a chain",
)  # fmt: skip


def test_runs_become_segments_and_barriers():
    """Regions, nests and unwrapped runs become segments over nodes, with a barrier in front of each but the first."""
    region = Run(0, 1, Option((0, 2), 4, 6))
    nest = CHAIN.nest(1, 4, [CHAIN.recompute(1), CHAIN.nest(2, 4)])
    runs = (region, nest, Run(4, 6))
    plan = plan_from_runs(CHAIN, runs, budget=Budget(n_bytes=99), planner="p", is_optimal=True, lower_bound=1.0)
    assert plan.segments == (Segment(0, 3, (2, 4)), Segment(3, 12, (), (Segment(3, 6), Segment(6, 12))))
    assert plan.barriers == (3, 6, 9, 12, 15)
    assert plan.prediction == predict(CHAIN, runs)
    assert plan.plain_prediction == predict(CHAIN, CHAIN.plain())
    assert (plan.fingerprint, plan.n_nodes, plan.is_optimal, plan.lower_bound) == ("a chain", 18, True, 1.0)
    assert [s.start for s in walk(plan.segments)] == [0, 3, 3, 6]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ((Run(0, 5),), "the runs end at stage 5, not 6"),
        ((Run(0, 3), Run(4, 6)), "run 4:6 does not follow on stage 3"),
        (
            (CHAIN.nest(0, 6, [Run(0, 6, Option((1,), 1, offloaded=(1,)))]),),
            "run 0:6 saves values off the device inside a nest",
        ),
        ((Run(0, 6, Option(), (Run(0, 6),)),), "run 0:6 is both a region with an option and a nest"),
    ],
)
def test_runs_that_do_not_hold_together(runs, words):
    """Runs that leave a stage out, save values off the device inside a nest or are two things at once are refused."""
    with pytest.raises(PlannerError, match=words):
        plan_from_runs(CHAIN, runs, budget=Budget(), planner="p")


def test_values_are_saved_inside_nests_where_jax_saves_them():
    """A region inside a nest saves what its option says; a chain priced with `jax_remat3` refuses it."""
    runs = (CHAIN.nest(0, 5, [Run(0, 5, Option((1,), 1))]), Run(5, 6))
    plan = plan_from_runs(CHAIN, runs, budget=Budget(), planner="p")
    assert [s.saved for s in walk(plan.segments)] == [(), (CHAIN.stages[0].first_value + 1,)]
    with pytest.raises(PlannerError, match="run 0:5 saves values inside a nest"):
        plan_from_runs(replace(CHAIN, saves_in_nests=False), runs, budget=Budget(), planner="p")
