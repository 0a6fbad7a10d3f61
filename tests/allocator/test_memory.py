"""The gradient graph and the allocator on graphs worked out by hand, and on random ones."""

import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from allocation_machine import replay
from hypothesis import given
from hypothesis import strategies as st

from jaxsub.allocator import (
    LEAST_NEEDS,
    STRATEGIES,
    Schedule,
    allocate,
    forward_graph,
    gradient_graph,
    timeline,
)
from jaxsub.core.graph import Graph, graph_of

LAYERS = {**LEAST_NEEDS, "softmax": "output", "pool": "both"}
TWO_LAYERS = graph_of(
    [("dot_general", [0], [8]), ("logistic", [1], [8]), ("dot_general", [2], [8]), ("softmax", [3], [8])],
    n_inputs=1,
    outputs=[4],
    input_bytes=[8],
)


def chain(n: int, primitive: str = "sin", size: int = 1) -> Graph:
    """A chain of n operations whose gradients read their inputs."""
    return graph_of([(primitive, [v], [size]) for v in range(n)], 1, [n], input_bytes=[size])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random programs: several inputs and outputs, values used often or never, operations of several kinds."""
    n_inputs, nodes = draw(st.integers(1, 3)), []
    size = st.sampled_from([0, 4, 8, 8, 8, 100, 1000])
    n_values = n_inputs
    for _ in range(draw(st.integers(1, 14))):
        primitive = draw(st.sampled_from(["tanh", "mul", "dot_general", "add", "sin", "opaque"]))
        inputs = draw(st.lists(st.integers(max(0, n_values - 6), n_values - 1), min_size=0, max_size=3))
        sizes = draw(st.lists(size, min_size=1, max_size=2))
        nodes.append((primitive, inputs, sizes))
        n_values += len(sizes)
    outputs = draw(st.lists(st.integers(0, n_values - 1), min_size=1, max_size=3))
    return graph_of(nodes, n_inputs, outputs, input_bytes=draw(st.lists(size, min_size=n_inputs, max_size=n_inputs)))


def counts_for(graph: Graph, most: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, most), min_size=len(graph.nodes), max_size=len(graph.nodes))


def execute(schedule: Schedule, counts: list[int]) -> dict[int, int]:
    """Execute a schedule abstractly: everything read is there; how often each node ran.

    A node's k-th copy reads the k-th copies of its inputs, or the last there are; gradients read the last copies.
    """
    graph, times = schedule.graph, dict.fromkeys(range(len(schedule.graph.nodes)), 0)
    there = set(range(schedule.n_given))
    for step in schedule.steps:
        assert there.issuperset(step.reads)
        for r in step.reads:
            b = schedule.buffers[r]
            producer = graph.values[b.value].producer
            if not b.is_cotangent and producer is not None:
                last = counts[producer]
                assert b.copy == (last if step.role == "gradient" else min(step.copy, last))
        if step.role != "gradient":
            assert {schedule.buffers[r].value for r in step.reads} == set(graph.nodes[step.node].inputs)
            assert step.copy <= counts[step.node]
            times[step.node] += 1
        there |= set(step.writes)
    assert there.issuperset(schedule.results)
    assert len(there) == len(schedule.buffers)
    return times


def test_figure_1():
    """The paper's two-layer net: none 8, inplace 6, sharing 4 arrays, and the storage shared that Fig. 1 shares."""
    schedule = gradient_graph(TWO_LAYERS, needs=LAYERS)
    assert [(s.role, s.node) for s in schedule.steps] == [*(("forward", v) for v in range(4)),
                                                          *(("gradient", v) for v in (3, 2, 1, 0))]  # fmt: skip
    assert [allocate(schedule, s).total_bytes for s in STRATEGIES] == [64, 48, 32]
    fullc, sigmoid, fullc2, softmax, d_softmax, d_fullc2, d_sigmoid, d_fullc = allocate(schedule).tags[2:]
    assert fullc == sigmoid == d_sigmoid  # in place, "which is then reused by its backward operation"
    assert d_softmax == d_fullc == fullc2  # "shared with the gradient by the first fully connected layer"
    assert len({sigmoid, d_softmax, softmax, d_fullc2}) == 4


def test_figure_1_needs_minimum_dependencies():
    """If the sigmoid's gradient also read the first layer's output, Fig. 1 would not be possible (§3)."""
    schedule = gradient_graph(TWO_LAYERS, needs={**LAYERS, "logistic": "both"})
    plan = allocate(schedule)
    assert plan.tags[2] != plan.tags[3]
    assert plan.total_bytes == 40


def test_figure_2():
    """The paper's tags: C not in place while B lives, E in B's recycled place, G in place of E; three in all."""
    b, c, f, e, g = 1, 2, 3, 4, 5
    nodes = [
        ("logistic", [0], [8]),
        ("logistic", [b], [8]),
        ("pool", [b], [8]),
        ("pool", [c], [8]),
        ("mul", [e, f], [8]),
    ]
    schedule = forward_graph(graph_of(nodes, 1, [g]))
    plan = allocate(schedule)
    assert plan.tags == (None, 0, 1, 2, 0, 0)
    assert plan.offsets == (None, 0, 8, 16, 0, 0)
    assert [allocate(schedule, s).total_bytes for s in STRATEGIES] == [40, 32, 24]
    assert timeline(schedule).live_bytes == (8, 16, 24, 24, 16)


def test_prediction_needs_two_arrays():
    """A forward pass of any depth runs in two arrays, in one where it may write over its input (§3)."""
    assert allocate(forward_graph(chain(100, "dot_general"))).total_bytes == 2
    assert allocate(forward_graph(chain(100, "sin"))).total_bytes == 1
    assert allocate(forward_graph(chain(100)), "none").total_bytes == 100


def test_shared_weight_gradients_are_added_in_place():
    """Contributions to one weight's gradient lie in a single place in place, each in its own without (§5.3)."""
    n, w = 10, 1
    graph = graph_of(
        [("dot_general", [v if v else 0, w], [1]) for v in (0, *range(2, n + 1))], 2, [n + 1], input_bytes=[0, 50]
    )
    schedule = gradient_graph(graph, needs=LEAST_NEEDS)
    weights = [b.index for b in schedule.buffers if b.is_cotangent and b.value == w]
    assert len(weights) == n
    assert len({allocate(schedule, "none").tags[b] for b in weights}) == n
    assert len({allocate(schedule, "inplace").tags[b] for b in weights}) == 1


def test_unequal_sizes_by_hand():
    """The smallest free place that holds a value is taken, else the largest grown; the far too large is left alone."""
    nodes = [("dot_general", [v], [size]) for v, size in enumerate([40, 30, 40, 35, 1, 1])]
    plan = allocate(forward_graph(graph_of(nodes, 1, [6])))
    assert plan.tags == (None, 0, 1, 0, 1, 2, 3)
    assert plan.offsets == (None, 0, 40, 0, 40, 75, 76)
    assert plan.total_bytes == 77


def test_no_mirror_counts_is_the_normal_gradient():
    """With every m(v) = 0 Algorithm 2 gives the forward pass and the gradients in reverse order."""
    schedule = gradient_graph(chain(4))
    assert [(s.role, s.node) for s in schedule.steps] == [*(("forward", v) for v in range(4)),
                                                          *(("gradient", v) for v in (3, 2, 1, 0))]  # fmt: skip


def test_one_level_of_segments_by_hand():
    """Each segment is recomputed just before its own gradients (Fig. 3)."""
    schedule = gradient_graph(chain(6), [1, 1, 0, 1, 1, 0], needs=LEAST_NEEDS)
    names = ["".join(("FMG"[("forward", "mirror", "gradient").index(s.role)], str(s.node))) for s in schedule.steps]
    assert names[6:] == ["M3", "M4", "G5", "G4", "G3", "M0", "M1", "G2", "G1", "G0"]


def test_two_levels_of_segments_by_hand():
    """Inside a recomputed segment, segments with m(v) = 2 are recomputed from its first copies."""
    counts = [2, 2, 1, 2, 2, 1, 0]
    schedule = gradient_graph(chain(7), counts, needs=LEAST_NEEDS)
    names = [f"{s.role[0]}{s.node}.{s.copy}" for s in schedule.steps[7:]]
    assert names == ["m0.1", "m1.1", "m2.1", "m3.1", "m4.1", "m5.1", "g6.0", "m3.2", "m4.2", "g5.0", "g4.0", "g3.0",
                     "m0.2", "m1.2", "g2.0", "g1.0", "g0.0"]  # fmt: skip
    assert list(execute(schedule, counts).values()) == [1 + m for m in counts]


@given(st.data(), graphs())
def test_every_read_is_there_and_nothing_runs_in_vain(data, graph):
    """On any graph with any m each node runs as often as gradients ask for its copies, and its inputs are there."""
    counts = data.draw(counts_for(graph))
    schedule = gradient_graph(graph, counts)
    grown = {s.node for s in schedule.steps if s.role == "gradient"}
    read = {v for n in grown for v in (*graph.nodes[n].inputs, *graph.nodes[n].outputs)}

    @cache
    def is_asked(node: int, copy: int) -> bool:
        made = graph.nodes[node].outputs
        if copy == 0 or (copy == counts[node] and read.intersection(made)):
            return True
        users = {u for v in made for u in graph.values[v].consumers}
        return any(min(k, counts[node]) == copy and is_asked(u, k) for u in users for k in range(1, counts[u] + 1))

    expected = {n.index: sum(is_asked(n.index, k) for k in range(counts[n.index] + 1)) for n in graph.nodes}
    assert execute(schedule, counts) == expected


@given(st.data(), graphs(), st.sampled_from([None, LEAST_NEEDS]))
def test_no_two_live_values_overlap(data, graph, needs):
    """On any graph every strategy's allocation survives a replay, and each strategy saves on the one before."""
    for schedule in (gradient_graph(graph, data.draw(counts_for(graph)), needs=needs), forward_graph(graph)):
        plans = [allocate(schedule, strategy) for strategy in STRATEGIES]
        for plan in plans:
            replay(schedule, plan)
        none, inplace, sharing = (plan.total_bytes for plan in plans)
        assert timeline(schedule).peak_bytes <= sharing <= inplace <= none
        assert none == sum(b.n_bytes for b in schedule.buffers[schedule.n_given :])


@given(graphs())
def test_fewer_needs_never_live_longer(graph):
    """Declaring what gradients need in minimum manner never raises the live bytes of any step."""
    least, most = (timeline(gradient_graph(graph, needs=needs)).live_bytes for needs in (LEAST_NEEDS, None))
    assert len(least) == len(most)
    assert all(a <= b for a, b in zip(least, most, strict=True))


def test_replay_refuses_wrong_allocations():
    """Values moved over live ones, outside the memory, or in place where not allowed are found, each by name."""
    schedule = gradient_graph(chain(5, "dot_general", 8), needs=LEAST_NEEDS)
    good = allocate(schedule)
    replay(schedule, good)
    offsets = list(good.offsets)
    for index, offset, message in [
        (3, offsets[2], r"step 1 writes %2 uint8\[8\] over %1 uint8\[8\]"),
        (3, offsets[2] + 4, "over %1"),
        (3, good.total_bytes, "outside the allocation"),
        (3, None, "outside the allocation"),
    ]:
        wrong = replace(good, offsets=(*offsets[:index], offset, *offsets[index + 1 :]))
        with pytest.raises(AssertionError, match=message):
            replay(schedule, wrong)


@pytest.mark.parametrize(("primitive", "offset"), [("dot_general", 0), ("sin", 4)])
def test_replay_refuses_writes_over_what_is_being_read(primitive, offset):
    """A write over an input's last use is in place only for elementwise operations, and only at the same offset."""
    schedule = forward_graph(chain(2, primitive, 8))
    plan = replace(allocate(schedule, "none"), offsets=(None, 0, offset))
    with pytest.raises(AssertionError, match=r"step 1 writes %2 .* over %1"):
        replay(schedule, plan)
    elementwise = forward_graph(chain(2, "sin", 8))
    replay(elementwise, replace(plan, offsets=(None, 0, 0)))


def test_replay_refuses_reads_of_what_is_gone():
    """A step that is left out, or in place where the input is read again, is found."""
    schedule = gradient_graph(chain(3), needs=LEAST_NEEDS)
    plan = allocate(schedule)
    with pytest.raises(AssertionError, match=r"step 0 reads %1 uint8\[1\], which is not there"):
        replay(replace(schedule, steps=schedule.steps[1:]), plan)
    same = replace(plan, offsets=(None, None, *(0 for _ in plan.offsets[2:])))
    with pytest.raises(AssertionError, match=r"over %1 .*reads %1 uint8\[1\], which is not there"):
        replay(schedule, same)


def test_timeline_by_hand():
    """A chain of four lives highest at its first gradient, where the intermediates and two cotangents stand."""
    schedule = gradient_graph(chain(4, "dot_general", 10), needs=LEAST_NEEDS)
    line = timeline(schedule)
    # values 1 2 3 4, then d3; d2 d3 while 3 dies; ...; the output 4 stays
    assert line.live_bytes == (10, 20, 30, 40, 50, 50, 40, 30)
    assert (line.peak_bytes, line.peak_step) == (50, 4)
    assert [schedule.label(b).split(" uint8")[0] for b in line.alive] == ["%1", "%2", "%3", "%4", "cotangent of %3"]


def test_labels_tell_copies_apart():
    """A mirrored copy says that it is recomputed."""
    schedule = gradient_graph(chain(2), [1, 0])
    assert [schedule.label(b.index) for b in schedule.buffers if b.value == 1] == [
        "%1 uint8[1]", "%1 uint8[1], recomputed", "cotangent of %1 uint8[1]"]  # fmt: skip


def test_square_root_of_memory():
    """Segments of sqrt(n) run a chain of n in about 2 sqrt(n) arrays, the plain gradient in n (§4.3)."""
    for root in (8, 16, 32):
        n = root * root
        counts = [0 if v % root == root - 1 else 1 for v in range(n)]
        plan = allocate(gradient_graph(chain(n, "dot_general"), counts, needs=LEAST_NEEDS))
        plain = allocate(gradient_graph(chain(n, "dot_general"), needs=LEAST_NEEDS))
        assert plain.total_bytes >= n
        assert plan.total_bytes <= 2 * root + 3


def test_logarithm_of_memory():
    """Halving recursively, m(v) the depth of v, takes log2(n) arrays and n log2(n) executions (§4.4, k = 1)."""
    peaks = []
    for k in range(4, 10):
        n = 2**k
        depth = [k - 1 - ((v & -v).bit_length() - 1) for v in range(1, n)]
        counts = [*depth, 0]
        schedule = gradient_graph(chain(n, "dot_general"), counts, needs=LEAST_NEEDS)
        replay(schedule, plan := allocate(schedule))
        peaks.append(plan.total_bytes)
        times = execute(schedule, counts)
        assert sum(times.values()) <= n * k
        assert all(times[v] <= 1 + counts[v] for v in times)
    assert max(np.diff(peaks)) <= 2


def test_undifferentiated_values_get_no_cotangent():
    """No gradient runs through what needs none, and an undifferentiated operand is all that some gradients read."""
    graph = graph_of([("sin", [1], [8]), ("select_n", [2, 0], [8])], 2, [3], input_bytes=[8, 8])
    values = tuple(replace(v, is_differentiated=v.index in (0, 3)) for v in graph.values)
    schedule = gradient_graph(replace(graph, values=values), needs=LEAST_NEEDS)
    (gradient,) = [s for s in schedule.steps if s.role == "gradient"]
    assert [(schedule.buffers[r].value, schedule.buffers[r].is_cotangent) for r in gradient.reads] == [
        (2, False),
        (3, True),
    ]
    assert [schedule.buffers[w].value for w in gradient.writes] == [0]
    aux = replace(graph, values=tuple(replace(v, is_differentiated=False) for v in graph.values))
    assert gradient_graph(aux) == forward_graph(aux)


def test_bad_mirror_counts_are_refused():
    """Counts that are too few, negative, or repeat what must happen once are refused, all faults at once."""
    graph = chain(3)
    with pytest.raises(ValueError, match="for each of 3 nodes, got 2"):
        gradient_graph(graph, [0, 1])
    once = replace(graph, nodes=(replace(graph.nodes[0], can_recompute=False, source="a.py:3"), *graph.nodes[1:]))
    with pytest.raises(
        ValueError, match=r"m\(1\) = -2 is below 0; m\(0\) = 1 repeats `sin`, which must happen once a.py:3"
    ):
        gradient_graph(once, [1, -2, 0])
    with pytest.raises(ValueError, match="none, inplace, sharing, got 'best'"):
        allocate(forward_graph(graph), "best")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_work_is_linear_in_the_graph(strategy):
    """Twice the nodes take twice the calls, for the schedule and the allocation alike."""

    def calls(n: int) -> int:
        count = 0

        def profile(*_: object) -> None:
            nonlocal count
            count += 1

        graph, counts = chain(n), [int(v % 8 != 7) for v in range(n)]
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            allocate(gradient_graph(graph, counts, needs=LEAST_NEEDS), strategy)
        finally:
            sys.setprofile(before)
        return count

    assert calls(800) <= 2.1 * calls(400)
