"""Planning's work grows with the number of equations, not with its square: counted, not timed.

Work is what Python executes in jaxsub, bytecode by bytecode, and how many entries of a program's own tuples are looked
at, slices among them. At n, 2n and 4n layers linear work grows by d and then by 2d, quadratic work by d and by 4d.
"""

import functools
import pickle
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.allocator import LEAST_NEEDS, allocate, forward_graph, gradient_graph
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Crossing, Stage
from jaxsub.core.decisions import Segment
from jaxsub.core.graph import Graph, graph_of
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.cuts import find_crossings, find_cuts, kind_of, spans_of
from jaxsub.planners.recursive import recursive_runs
from jaxsub.search.verify import cut_choices, finish

HERE = str(Path(jaxsub.__file__).parent)
LAYERS = (8, 16, 32)
MOST_GROWTH = 2.3
"""Of the second step over the first: 2 where work is linear, 4 where it is quadratic."""


class Watched(tuple):
    """A tuple that counts what is looked at in it."""

    seen = 0

    def __getitem__(self, at):
        found = tuple.__getitem__(self, at)
        Watched.seen += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self):
        Watched.seen += len(self)
        return tuple.__iter__(self)


def work(run):
    """How much `run()` executes in jaxsub, and looks at in watched tuples."""
    executed = 0

    def count(frame, event, arg):
        nonlocal executed
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return count

    Watched.seen = 0
    before = sys.gettrace()
    sys.settrace(count)
    try:
        run()
    finally:
        sys.settrace(before)
    return executed + Watched.seen


def growth(prepare, sizes=LAYERS):
    """How much more the second doubling of a size adds to the work than the first."""
    runs = [prepare(size) for size in sizes]
    runs[0]()  # what is imported or remembered at a first use is nobody's size
    one, two, four = (work(run) for run in runs)
    assert two > one
    return (four - two) / (two - one)


def loss(ws, x):
    """Layers of two equations, and every fourth result read once more at the end."""
    kept = []
    for i, w in enumerate(ws):
        x = jnp.tanh(x @ w)
        kept += [x] if i % 4 == 0 else []
    return jnp.sum(x) + sum(jnp.sum(k) for k in kept)


def shapes(layers):
    """Arguments of so many layers."""
    return [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * layers, jax.ShapeDtypeStruct((3, 4), jnp.float32)


def watched(program):
    """A program whose tuples are watched, and nothing known of its graph yet."""
    graph = program.graph
    graph = Graph(Watched(graph.nodes), Watched(graph.values), graph.inputs, graph.outputs, graph.fingerprint)
    changes = dict(graph=graph, eqns=Watched(program.eqns), signatures=Watched(program.signatures))
    return replace(program, **changes)


def traced(layers):
    return watched(trace(loss, shapes(layers), {}))


def tracing(layers):
    return lambda: trace(loss, shapes(layers), {})


def cutting(layers):
    program = traced(layers)
    return lambda: [find_crossings(program.graph, cuts) for cuts in cut_choices(program)]


def kinds(layers):
    program, every = traced(layers), 4
    starts = range(0, len(program.eqns) - every, every)
    return lambda: [kind_of(program.graph, program.signatures, a, a + every) for a in starts]


def pricing(layers):
    program = traced(layers)
    cuts = cut_choices(program)[0]
    return lambda: Pricer(program, get_target(None)).chain(cuts, sizes=())


def alternating(program, nested):
    """A region over every second run of eight equations, a barrier before each, nests of three where asked for."""
    starts = range(0, len(program.eqns) - 8, 8)
    inner = (lambda a: (Segment(a + 1, a + 5, (), (Segment(a + 2, a + 4),)),)) if nested else (lambda a: ())
    segments = tuple(Segment(a, a + 8, (), inner(a)) for a in starts[::2])
    return Plan(program.fingerprint, Budget(), len(program.eqns), segments, tuple(starts[1:]))


def emission(nested):
    def prepare(layers):
        program = traced(layers)
        plan = alternating(program, nested)
        return lambda: emit(program, plan)

    return prepare


def tracing_what_is_emitted(layers):
    program = traced(layers)
    run = emit(program, alternating(program, nested=True))
    return lambda: jax.make_jaxpr(run)(*program.avals())


def words(layers):
    program = traced(layers)
    chain = Pricer(program, get_target(None)).chain(cut_choices(program)[0], sizes=())
    runs = [chain.recompute(s) for s in range(len(chain.stages))]
    plan = plan_from_runs(chain, runs, budget=Budget(), planner="by hand")
    return lambda: Plan.from_json(finish(program, plan, Budget()).to_json())


def allocating(layers):
    graph = traced(layers).graph
    counts = [int(i % 4 != 0) for i in range(len(graph.nodes))]
    return lambda: (allocate(forward_graph(graph)), allocate(gradient_graph(graph, counts, needs=LEAST_NEEDS)))


PHASES = {
    "tracing": tracing,
    "cutting": cutting,
    "kinds": kinds,
    "pricing": pricing,
    "emission": emission(nested=False),
    "emission_of_nests": emission(nested=True),
    "tracing_what_is_emitted": tracing_what_is_emitted,
    "words": words,
    "allocating": allocating,
}


@pytest.mark.parametrize("phase", PHASES)
def test_work_is_linear(phase):
    """Twice the equations are twice the work, in every phase."""
    assert growth(PHASES[phase]) <= MOST_GROWTH


@pytest.mark.parametrize(
    "wrong",
    [
        lambda graph: [graph.nodes[i:] for i in range(len(graph.nodes))],
        lambda graph: [Graph.__post_init__(graph) for _ in graph.nodes],
    ],
    ids=["slices", "walks"],
)
def test_the_count_can_tell(wrong):
    """A slice to the end for each equation, or a walk, is found to be quadratic."""
    assert growth(lambda layers: functools.partial(wrong, traced(layers).graph)) > 3.5


N_MANY = 50_000


def test_many_equations_are_cut_at_once():
    """A graph of 50,000 equations is cut into few stages, and what crosses them is found."""
    nodes = [("matmul" if v % 2 else "tanh", [v], [8 + v % 2]) for v in range(N_MANY)]
    graph = graph_of(nodes, 1, [N_MANY])
    cuts = find_cuts(graph)
    assert TUNING.most_stages < len(cuts) - 1 <= TUNING.longest_chain
    assert len(find_crossings(graph, cuts)) == len(cuts) - 1
    fewer = graph_of(nodes[: TUNING.stage_equations], 1, [TUNING.stage_equations])
    assert len(find_cuts(fewer)) - 1 <= TUNING.most_stages


def test_regions_of_merged_stages_stay_small():
    """Where stages were merged, or every run of few may be one, regions of several hold few equations."""
    few = TUNING.few_stages
    for n, sizes in ((few, {1, 2, 3, 4, 5}), (few + 1, {1, 2, 8}), (TUNING.most_stages - 1, {1, 2, 8}),
                     (TUNING.most_stages, {1, 2})):  # fmt: skip
        cuts = range(0, 100 * n + 1, 100)
        assert {b - a for a, b in spans_of(cuts, [], (2, 8))} == sizes


@pytest.mark.parametrize(("layers", "is_left_out"), [(40, False), (300, True)])
def test_stages_of_very_many_equations_are_cut(layers, is_left_out):
    """A dense network has few places where few values cross: with many layers, ways with those alone are left out."""

    def dense(weights, x):
        features = [x]
        for w in weights:
            features.append(jnp.tanh(sum(features[-8:]) @ w))
        return jnp.sum(sum(features))

    square = jax.ShapeDtypeStruct((4, 4), "float32")
    program = trace(dense, ([square] * layers, square), {})
    longest = [max(b - a for a, b in pairwise(cuts)) for cuts in cut_choices(program)]
    assert min(longest) < 400
    assert longest[0] < 400 or not is_left_out
    assert len(longest) == 2 - is_left_out


def test_deep_nests_of_many_equations_are_stored():
    """JSON and pickle hold a plan of 50,000 equations with regions fifteen deep; so does what it prints."""
    ruler = [min((i & -i).bit_length(), 15) for i in range(1, N_MANY + 1)]
    plan = Plan.from_mirror_counts(ruler, fingerprint="f" * 24)
    assert plan.n_regions > 1000
    assert Plan.from_json(plan.to_json()) == plan == pickle.loads(pickle.dumps(plan))
    assert str(N_MANY) in str(plan)
    assert len(plan.to_html()) < 200_000


def test_the_recursion_nests_no_deeper_than_its_logarithm():
    """On the most stages there are, every planner's nests stay far from Python's limit."""
    stages = tuple(Stage(s, s + 1, transient_bytes=1, made_bytes=1) for s in range(256))
    chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 0) for s in range(255)))
    plan = plan_from_runs(chain, recursive_runs(chain, 1), budget=Budget(), planner="recursive")
    assert max(plan.mirror_counts) <= 8
