"""The timeline tells what `predict` tells, step by step."""

import random
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import zoo
from hypothesis import given
from hypothesis import strategies as st

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Crossing, Option, Run, Stage
from jaxsub.core.graph import graph_of
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.simulate import predict
from jaxsub.core.timeline import name_pieces, stage_timeline


def a_chain(rng: random.Random, n: int) -> Chain:
    """A chain with random figures and crossings, long skips among them."""
    figures = ("forward_bytes", "transient_bytes", "keep_bytes", "keep_transient_bytes")
    stages = tuple(
        Stage(s, s + 1, forward_flops=1.0 + rng.randrange(9), tail_flops=float(rng.randrange(3)),
              **{name: rng.randrange(20) for name in figures})
        for s in range(n)
    )  # fmt: skip
    ends = {tuple(sorted(rng.sample(range(n + 1), 2))) for _ in range(2 * n)}
    return Chain(stages, (), tuple(Crossing(a, b, rng.randrange(9), rng.randrange(9)) for a, b in sorted(ends)))


def some_runs(rng: random.Random, start: int, stop: int, depth: int = 0) -> tuple[Run, ...]:
    """Runs of every sort over some stages, nested up to four deep."""
    runs, at = [], start
    while at < stop:
        end, sort = rng.randint(at + 1, stop), rng.randrange(3)
        option = Option((), rng.randrange(5), rng.randrange(20), float(rng.randrange(9)))
        children = some_runs(rng, at, end, depth + 1) if sort == 2 and depth < 4 else ()
        runs.append(Run(at, end, option if sort == 1 and not children else None, children))
        at = end
    return tuple(runs)


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_the_timeline_agrees_with_the_prediction(rng, n):
    """Its peak is the predicted peak to the byte, and its time three forward passes and the recompute."""
    chain = a_chain(rng, n)
    runs = some_runs(rng, 0, n)
    timeline, predicted = stage_timeline(chain, runs), predict(chain, runs)
    assert max(timeline.live_bytes) == predicted.temp_bytes
    assert sum(s.flops for s in timeline.steps) == pytest.approx(3 * chain.forward_flops + predicted.extra_flops)


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_what_is_alive_adds_up(rng, n):
    """At every step the pieces that are alive and the step's own bytes are all that stands."""
    timeline = stage_timeline(a_chain(rng, n), some_runs(rng, 0, n))
    for i, (step, live) in enumerate(zip(timeline.steps, timeline.live_bytes, strict=True)):
        own = step.transient_bytes + step.cotangent_bytes
        assert live == own + sum(p.n_bytes for p in timeline.alive(i))
    assert timeline.live_bytes[timeline.peak_step] == max(timeline.live_bytes)


def test_regions_run_forward_again_and_backward():
    """A nest runs forward and backward, and its content is recomputed in between."""
    stages = tuple(Stage(s, s + 1, transient_bytes=1) for s in range(4))
    chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 0) for s in range(3)))
    nest = chain.nest(0, 3, [chain.recompute(0), chain.recompute(1), Run(2, 3)])
    spans = stage_timeline(chain, (nest, Run(3, 4))).spans
    assert [(s.depth, s.phase, s.first_stage) for s in spans] == [
        (0, "forward", 0), (0, "backward", 0), (1, "recompute", 0), (1, "recompute", 1), (1, "backward", 1),
        (1, "backward", 0),
    ]  # fmt: skip


def test_pieces_are_named_by_what_made_them():
    """What crosses a cut is named with its shape, what the compiler keeps by the stage it is kept of."""
    graph = graph_of([("matmul", [0], [8]), ("tanh", [1], [8]), ("matmul", [2], [8])], 1, [3])
    stages = (Stage(0, 2, keep_bytes=8, first_value=1), Stage(2, 3, first_value=3))
    chain = Chain(stages, (), (Crossing(0, 1, 8, 8),))
    named = name_pieces(stage_timeline(chain, chain.plain()), graph)
    assert [p.label for p in named.pieces] == ["tanh uint8[8]", "matmul, kept by the compiler"]
    saved = (Run(0, 1, Option((0,), 8, 8)), Run(1, 2))
    assert [p.label for p in name_pieces(stage_timeline(chain, saved), graph).pieces] == [
        "tanh uint8[8]",
        "matmul uint8[8]",
    ]


def test_a_plan_keeps_its_timeline_in_json():
    """A plan that is saved and loaded has the timelines that it had."""
    rng = random.Random(1)
    chain = a_chain(rng, 5)
    plan = plan_from_runs(chain, some_runs(rng, 0, 5), budget=Budget(), planner="p")
    assert Plan.from_json(plan.to_json()) == plan
    assert asdict(plan)["timeline"]["steps"]


@pytest.mark.parametrize("name", ["chain", "branches", "long_skips"])
def test_planned_functions_have_a_named_timeline(name):
    """A plan of a function says what is stored with the function's own source lines, before and after."""
    loss, args = zoo.BY_NAME[name].toy()
    plan = jaxsub.plan(loss, *args, verify=False)
    for timeline, prediction in ((plan.timeline, plan.prediction), (plan.plain_timeline, plan.plain_prediction)):
        found = SimpleNamespace(peak=max(timeline.live_bytes), labels=[p.label for p in timeline.pieces])
        assert found.peak == prediction.temp_bytes
        assert found.labels
        assert all(".py:" in label for label in found.labels)
