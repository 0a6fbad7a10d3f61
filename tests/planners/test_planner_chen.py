"""The paper's planners on chains written by hand: Algorithm 3, the search over B, and dropping what is cheap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsub.core.chain import Chain, Crossing, Item, Option, Run, Stage
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.graph import graph_of
from jaxsub.core.plan import Plan, walk
from jaxsub.core.simulate import predict
from jaxsub.planners.cheap import Cheap, cheap_runs
from jaxsub.planners.chen import Chen, greedy_mirror_counts, greedy_plan


def uniform(n: int) -> Chain:
    """A chain of n stages like tanh(x @ w): one unit crosses each cut, two are made."""
    stage = {"forward_bytes": 1, "transient_bytes": 3, "keep_transient_bytes": 2, "made_bytes": 2}
    stages = tuple(Stage(s, s + 1, **stage) for s in range(n))
    return Chain(stages, (), tuple(Crossing(s, s + 1, 1, 1) for s in range(n - 1)))


@st.composite
def chains(draw: st.DrawFn, most: int = 12) -> Chain:
    """Chains of uneven stages with skips over several cuts."""
    n, sizes = draw(st.integers(1, most)), st.integers(0, 50)
    stages = []
    for s in range(n):
        forward, transient, keep, made = (draw(sizes) for _ in range(4))
        flops = draw(st.integers(1, 9))
        tail = draw(st.integers(0, flops))
        stages.append(
            Stage(2 * s, 2 * s + 2, s, flops, tail, forward, transient + keep, keep, transient + keep, 0, made)
        )
    ends = st.tuples(st.integers(0, n), st.integers(0, n)).filter(lambda e: e[0] < e[1])
    skips = draw(st.lists(st.tuples(ends, sizes, st.booleans()), max_size=2 * n))
    return Chain(tuple(stages), (), tuple(Crossing(a, b, size, size * flows) for (a, b), size, flows in skips))


HAND = Chain(
    stages=tuple(
        Stage(s, s + 1, made_bytes=made, transient_bytes=made) for s, made in enumerate([4, 2, 6, 1, 1, 3, 5])
    ),
    items=(),
    crossings=(*(Crossing(s, s + 1, s + 1, 0) for s in range(6)), Crossing(0, 4, 100, 0)),
)


@pytest.mark.parametrize(
    ("budget", "cuts", "x", "y"),
    [
        (0, [1, 2, 3, 4, 5, 6], (1 + 100) + 2 + 3 + 4 + 5 + 6, 6),
        (4, [2, 3, 6], (2 + 100) + 3 + 6, 6),
        (5, [2, 3], (2 + 100) + 3, 6),
        (6, [3], 3 + 100, 12),
        (22, [], 0, 0),
    ],
)
def test_algorithm_3_by_hand(budget, cuts, x, y):
    """Stages that make 4 2 6 1 1 3 5 split where that exceeds B, never at the end; a skip counts where it is made."""
    runs, got_x, got_y = greedy_plan(HAND, budget)
    ends = [0, *cuts]
    wrapped = [run for run in runs if run.children or run.option]
    assert [(run.start, run.stop) for run in wrapped] == list(zip(ends, cuts, strict=False))
    assert [(run.start, run.stop) for run in runs[len(wrapped) :]] == [(s, s + 1) for s in range(ends[-1], 7)]
    assert (got_x, got_y) == (x, y)


def test_segments_of_several_stages_nest_and_single_ones_recompute():
    """Several stages make a nest, a single one a region that saves nothing, and the last segment is unwrapped."""
    runs, _, _ = greedy_plan(HAND, 4)
    assert runs[0] == HAND.nest(0, 2)
    assert runs[1] == HAND.recompute(2)
    assert runs[2] == HAND.nest(3, 6)
    assert runs[3:] == (Run(6, 7),)


def test_algorithm_3_on_nodes_by_hand():
    """Nodes split only where they are candidates; x counts what they make, y the largest segment that ended."""
    graph = graph_of([("tanh", [v], [size]) for v, size in enumerate([4, 2, 6, 1, 1, 3, 5])], 1, [7])
    assert greedy_mirror_counts(graph, range(7), 5) == ((1, 0, 0, 1, 1, 1, 0), 2 + 6 + 5, 10)
    assert greedy_mirror_counts(graph, [0, 3], 5) == ((1, 1, 1, 0, 1, 1, 1), 1, 13)
    assert greedy_mirror_counts(graph, range(7), 0) == ((0,) * 7, 22, 6)
    assert greedy_mirror_counts(graph, [], 0) == ((1,) * 7, 0, 0)


def test_mirror_counts_and_stages_agree():
    """On a chain of one node a stage, Algorithm 3 on nodes and on stages recompute the same nodes."""
    graph = graph_of([("tanh", [v], [size]) for v, size in enumerate([4, 2, 6, 1, 1, 3, 5])], 1, [7])
    counts, _, _ = greedy_mirror_counts(graph, range(6), 5)
    runs, _, _ = greedy_plan(HAND, 5)
    stops = {run.stop - 1 for run in runs if run.children or run.option}
    assert {v for v in range(6) if counts[v] == 0} == stops


@given(chains(), st.none() | st.integers(0, 800))
def test_runs_are_valid_and_hold_the_budget(chain, budget):
    """On any chain the plan covers every node, fits its budget, or says the least that fits, which then works."""
    refusal = None
    try:
        plan = Chen()(chain, budget)
    except InfeasibleBudgetError as error:
        refusal, plan = error, Chen()(chain, error.least_bytes)
    if refusal:
        assert refusal.requested_bytes == budget < plan.prediction.temp_bytes == refusal.least_bytes
    assert refusal or budget is None or plan.prediction.temp_bytes <= budget
    assert plan.n_nodes == chain.stages[-1].stop
    assert plan.prediction.extra_flops <= chain.forward_flops
    assert all(not segment.children and not segment.saved for segment in walk(plan.segments))


@given(chains(), st.integers(0, 800), st.integers(0, 800))
def test_more_budget_never_means_more_recompute(chain, one, other):
    """Of two budgets that can be met the larger one recomputes no more."""
    small, large = sorted((one, other))
    try:
        little = Chen()(chain, small)
    except InfeasibleBudgetError:
        return
    assert Chen()(chain, large).prediction.extra_flops <= little.prediction.extra_flops


@given(chains())
def test_plain_where_it_fits(chain):
    """A budget of all that the stages need unwrapped recomputes nothing."""
    plain = predict(chain, chain.plain()).temp_bytes
    assert Chen()(chain, plain).prediction.extra_flops == 0


def test_square_root_law():
    """From 16 to 1024 equal stages the predicted peak grows with slope at most .55 in log-log, plain with slope 1."""
    lengths = [16, 32, 64, 128, 256, 512, 1024]
    plans = [Chen()(uniform(n)) for n in lengths]
    peaks = [plan.prediction.temp_bytes for plan in plans]
    plain = [plan.plain_prediction.temp_bytes for plan in plans]
    assert np.polyfit(np.log(lengths), np.log(peaks), 1)[0] <= 0.55
    assert math.log(peaks[-1] / peaks[-2], 2) <= 0.55
    assert 0.95 <= np.polyfit(np.log(lengths), np.log(plain), 1)[0] <= 1.0
    assert all(peak <= 2 * math.sqrt(n) + 4 for peak, n in zip(peaks, lengths, strict=True))


def test_the_search_beats_its_first_two_runs():
    """On 62 equal stages sqrt(x y) finds less than B = 0, and the grid around it less than that."""
    chain = uniform(62)
    _, x, y = greedy_plan(chain, 0)
    first, second = (predict(chain, greedy_plan(chain, b)[0]).temp_bytes for b in (0, math.sqrt(x * y)))
    assert Chen()(chain).prediction.temp_bytes < second < first / 3


def test_grid_is_a_parameter():
    """A finer grid is never worse where the coarse one is part of it, and one point is refused."""
    chain = uniform(200)
    assert Chen(n_grid=31)(chain).prediction.temp_bytes <= Chen(n_grid=6)(chain).prediction.temp_bytes
    with pytest.raises(ValueError, match="at least 2 points, got n_grid=1"):
        Chen(n_grid=1)


def test_a_chain_of_one_stage_is_plain():
    """One stage is the last segment: there is nothing to wrap."""
    assert Chen()(uniform(1)).segments == ()


def test_budget_below_the_least_says_both():
    """The error carries what was asked and the least, and says them with units and the next step."""
    with pytest.raises(InfeasibleBudgetError, match=r"Budget `5 B` .* `17 B`\. Pass budget=17 or more") as caught:
        Chen()(uniform(64), 5)
    assert (caught.value.requested_bytes, caught.value.least_bytes) == (5, 17)


CONV_BN_RELU = (Option((), 0, 9, 10.0), Option((0,), 4, 8, 0.2), Option((0, 1, 2), 12, 8, 0.2), Option((1,), 3, 8, 4.0))


def stack(n: int) -> Chain:
    """A chain of n conv-bn-relu stages with options and two-stage items beside them."""
    sizes = {"transient_bytes": 9, "keep_bytes": 8, "keep_transient_bytes": 9}
    stages = tuple(Stage(3 * s, 3 * s + 3, first_value=1 + 3 * s, **sizes) for s in range(n))
    items = [Item(s, s + 1, CONV_BN_RELU) for s in range(n)] + [Item(s, s + 2, (Option(),)) for s in range(n - 1)]
    return Chain(stages, tuple(items), tuple(Crossing(s, s + 1, 4, 4) for s in range(n - 1)))


def test_cheap_saves_the_costly_output_of_each_stage():
    """Of each stage but the last the convolution's output is saved, and nothing that buys no recompute."""
    plan = Cheap()(stack(3))
    assert [(s.start, s.stop, s.saved) for s in plan.segments] == [(0, 3, (1,)), (3, 6, (4,))]
    assert plan.prediction.extra_flops == pytest.approx(0.4)
    assert plan.prediction.temp_bytes < plan.plain_prediction.temp_bytes


def test_cheap_refuses_what_does_not_fit():
    """A budget below its one plan is refused with that plan's bytes, which then work."""
    chain = stack(4)
    with pytest.raises(InfeasibleBudgetError, match="least predicted peak of the plans of `cheap`") as caught:
        Cheap()(chain, 10)
    least = caught.value.least_bytes
    assert Cheap()(chain, least).prediction.temp_bytes == least
    with pytest.raises(InfeasibleBudgetError):
        Cheap()(chain, least - 1)


def test_cheap_leaves_stages_without_options():
    """A stage of which no options are known stays unwrapped."""
    assert cheap_runs(uniform(3)) == uniform(3).plain()


def test_plans_are_named():
    """Each plan carries its planner's name and the chain's fingerprint."""
    plans: list[Plan] = [Chen()(uniform(4)), Cheap()(stack(2))]
    assert [(p.planner, p.fingerprint) for p in plans] == [("chen", "by hand"), ("cheap", "by hand")]
