"""The curves that all pictures draw: live bytes over time, before and after, and when each region runs.

Time is in forward passes of the program: its forward pass is one, a backward pass counts as two, and recompute is
added, so that a plan's curve ends as much later as it costs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from jaxsub.core.budget import format_bytes
from jaxsub.core.figures import recomputed_share as recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.steps import Steps
from jaxsub.core.timeline import BACKWARD_FORWARDS, Span, StageTimeline, family

if TYPE_CHECKING:
    from jaxsub.api.explain import Group, Residuals

OWN = ("its own transients", "cotangents on their way")
FAR = 1.5
"""A level more than so many times as high as all curves would flatten them: it is told and not drawn."""

CHEAP = 0.01
"""What takes less than this share of a forward pass is cheap."""

MOST_MARKS = 96
"""A loop of more steps is drawn with several of them in one mark."""

LEAST_SHARE = 1e-3
"""Every step is drawn at least this share of a forward pass wide, so that none is lost."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Live bytes during each step, which starts and ends at these times, in forward passes; and when the backward pass
    starts.
    """

    times: tuple[float, ...]
    live_bytes: tuple[int, ...]
    turn: float

    @property
    def end(self) -> float:
        """When the last step ends."""
        return self.times[-1]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that stand at once."""
        return max(self.live_bytes, default=0)

    def sampled(self, n: int, until: float) -> tuple[int, ...]:
        """The most bytes in each of `n` equal bins of the time up to `until`."""
        bins = [0] * n
        for start, stop, size in zip(self.times, self.times[1:], self.live_bytes, strict=False):
            first = min(n - 1, int(start / until * n)) if until else 0
            last = min(n - 1, int(stop / until * n - 1e-9)) if until else 0
            for i in range(first, last + 1):
                bins[i] = max(bins[i], size)
        return tuple(bins)


def curve_of(timeline: StageTimeline | None) -> Curve | None:
    """The curve of a timeline; `None` where there is none."""
    if timeline is None or not timeline.steps:
        return None
    forward = max(timeline.forward_flops, 1.0)
    widths = [max(s.flops / forward, LEAST_SHARE) for s in timeline.steps]
    times = tuple(accumulate(widths, initial=0.0))
    turn = next((i for i, s in enumerate(timeline.steps) if s.phase != "forward"), 0)
    return Curve(times, timeline.live_bytes, times[turn])


def curves(plan: Plan) -> tuple[Curve | None, Curve | None]:
    """The curves before and after a plan."""
    return curve_of(plan.plain_timeline), curve_of(plan.timeline)


def whole_in_slices(plan: Plan) -> Steps | None:
    """One slice, opened, where the whole function runs in slices: outside of them nothing changes over time."""
    return next((s for s in plan.steps if s.kind == "slices" and s.timeline is not None and plan.n_nodes == 1), None)


@dataclass(frozen=True, slots=True)
class Bar:
    """A region under the curve, in so many others; times are in forward passes, without a timeline they are nodes."""

    depth: int
    start: float
    stop: float
    phase: str


def bars(plan: Plan) -> tuple[Bar, ...]:
    """When each region runs, and each step of the loops; without a timeline, which nodes a region covers."""
    curve = curve_of(plan.timeline)
    if curve is None or plan.timeline is None:
        return tuple(_node_bars(plan.segments, 0))
    times = curve.times
    regions = (bar for s in plan.timeline.spans for bar in _span_bars(plan.timeline, s, times))
    return (
        *regions,
        *(bar for steps in plan.steps for bar in _step_bars(plan.timeline, steps, times)),
    )


def _span_bars(timeline: StageTimeline, span: Span, times: Sequence[float]) -> Iterator[Bar]:
    """When a region runs; what the backward pass of one without others inside recomputes comes first."""
    start, stop = times[span.start], times[span.stop]
    turn, flops = start, sum(s.flops for s in timeline.steps[span.start : span.stop])
    is_nest = any(s.phase == "recompute" for s in timeline.steps[span.start : span.stop])
    if span.phase == "backward" and not is_nest and flops:
        turn += (stop - start) * min(1.0, span.extra_flops / flops)
        yield Bar(span.depth, start, turn, "recompute")
    yield Bar(span.depth, turn, stop, span.phase)


def phase_bars(timeline: StageTimeline) -> tuple[Bar, ...]:
    """The phases of what is no region itself, such as one step of a loop."""
    times = getattr(curve_of(timeline), "times", ())
    return tuple(
        Bar(0, start, stop, step.phase) for start, stop, step in zip(times, times[1:], timeline.steps, strict=False)
    )


def steps_a_mark(n: int) -> int:
    """How many of a loop's steps one mark in a picture is."""
    return -(-n // MOST_MARKS)


def marks_words(plan: Plan) -> str:
    """What the marks of a picture are, where they are not regions or not single steps."""
    loops = [steps.length for steps in plan.steps if steps.kind == "loop" and steps.length > 1]
    if not loops or plan.timeline is None:
        return ""
    many = max(map(steps_a_mark, loops))
    return f"each mark is {f'{many} steps' if many > 1 else 'a step'} of a loop" + (
        " or a region" if plan.segments else ""
    )


def _step_bars(timeline: StageTimeline, steps: Steps, times: Sequence[float]) -> Iterator[Bar]:
    """The steps of a loop: forward, and in the backward pass what each recomputes and its own backward pass."""
    stage = next((s for s, (a, b) in enumerate(pairwise(timeline.stage_nodes)) if a <= steps.node < b), None)
    if steps.kind != "loop" or steps.length < 2 or stage is None:
        return
    depth = max((s.depth + 1 for s in timeline.spans if s.first_stage <= stage < s.stop_stage), default=0)
    n = -(-steps.length // steps_a_mark(steps.length))
    again = steps.recomputed_share / (steps.recomputed_share + BACKWARD_FORWARDS)
    for start, stop, step in zip(times, times[1:], timeline.steps, strict=False):
        if not step.start <= stage < step.stop:
            continue
        edges = [start + (stop - start) * i / n for i in range(n + 1)]
        for a, b in pairwise(edges):
            turn = a + (b - a) * again if step.phase == "backward" else a
            if turn > a:
                yield Bar(depth, a, turn, "recompute")
            yield Bar(depth, turn, b, step.phase)


def _node_bars(segments: Sequence[object], depth: int) -> list[Bar]:
    found: list[Bar] = []
    for segment in segments:
        found.append(Bar(depth, float(segment.start), float(segment.stop), "forward"))  # type: ignore[attr-defined]
        found += _node_bars(segment.children, depth + 1)  # type: ignore[attr-defined]
    return found


@dataclass(frozen=True, slots=True)
class Level:
    """A height that is marked beside the curves: `budget`, `measured`, or `plain`, measured without the plan."""

    kind: str
    n_bytes: int
    words: str


def budget_bytes(plan: Plan) -> int | None:
    """A plan's budget in bytes: of a fraction what the plain program is measured, or else predicted, to need."""
    plain = plan.plain_measurement or plan.plain_prediction
    if plan.budget.fraction is not None and plain is not None:
        return int(plan.budget.fraction * plain.temp_bytes)
    return plan.budget.n_bytes


def levels(plan: Plan) -> tuple[Level, ...]:
    """What is marked beside a plan's curves: its budget, and what the compiler measured."""
    found = []
    for kind, words, measured in (("plain", "measured without", plan.plain_measurement),
                                  ("measured", "measured", plan.measurement)):  # fmt: skip
        if measured is not None:
            found.append(Level(kind, measured.temp_bytes, f"{words}, {format_bytes(measured.temp_bytes)}"))
    n_bytes = budget_bytes(plan)
    if n_bytes is not None:
        share = "" if plan.budget.fraction is None else f" ({plan.budget})"
        found.append(Level("budget", n_bytes, f"budget, {format_bytes(n_bytes)}{share}"))
    return tuple(found)


def top_of(curves: Sequence[Curve | None], found: Sequence[Level]) -> int:
    """The most bytes that are drawn: a level far above all curves is not."""
    top = max([c.peak_bytes for c in curves if c is not None] + [1])
    return max([top] + [level.n_bytes for level in found if level.n_bytes <= FAR * top])


@dataclass(frozen=True, slots=True)
class Row:
    """Alike things in one row: what they are, how many, and their bytes together."""

    label: str
    count: int
    n_bytes: int


def merged(rows: Iterable[tuple[str, int]]) -> tuple[Row, ...]:
    """Labels and bytes, alike ones of one size together, largest first.

    Example:
        >>> merged([("b_0: sin x.py:1", 8), ("b_1: sin x.py:1", 8), ("cos", 9)])[0]
        Row(label='b_*: sin x.py:1', count=2, n_bytes=16)
    """
    found: dict[tuple[str, int], list[str]] = {}
    for label, n_bytes in rows:
        found.setdefault((family(label), n_bytes), []).append(label)
    together = (Row(labels[0] if len(set(labels)) == 1 else name, len(labels), n_bytes * len(labels))
                for (name, n_bytes), labels in found.items())  # fmt: skip
    return tuple(sorted(together, key=lambda row: -row.n_bytes))


def saved_rows(steps: Steps) -> tuple[Row, ...]:
    """What each step of a loop, or each slice, saves."""
    return merged(pair for h in steps.saved for pair in [(h.label, h.n_bytes)] * h.count)


def residual_rows(found: Residuals) -> tuple[Row, ...]:
    """Residuals, alike ones together: what alike layers make, and alike arguments of trees of parameters."""
    return merged((str(r), r.n_bytes) for r in found)


def alike(groups: Iterable[Group]) -> tuple[Row, ...]:
    """Groups of residuals by module, alike modules together, largest first."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(family(f"{group.label}: "), []).append(group)
    rows = (Row(name[:-2] if len(some) > 1 else some[0].label, sum(g.count for g in some), sum(g.n_bytes for g in some))
            for name, some in found.items())  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.n_bytes, row.label)))


def steps_at(timeline: StageTimeline, step: int, opened: Sequence[Steps]) -> tuple[Row, ...]:
    """What the steps of a loop save, of what a step of a timeline has for transients; empty elsewhere."""
    found = timeline.steps[step]
    nodes = range(timeline.stage_nodes[found.start], timeline.stage_nodes[found.stop])
    rows: list[Row] = []
    for steps in opened:
        if steps.kind != "loop" or steps.node not in nodes or not 0 < steps.stored_bytes <= found.transient_bytes:
            continue
        if steps.stored_bytes == steps.saved_bytes * steps.length:
            rows += [Row(r.label, r.count * steps.length, r.n_bytes * steps.length) for r in saved_rows(steps)]
        else:
            rows.append(Row(f"{steps.label}, saved by its steps", 1, steps.stored_bytes))
    return tuple(rows) if sum(row.n_bytes for row in rows) <= found.transient_bytes else ()


def live_at(timeline: StageTimeline, step: int, opened: Sequence[Steps] = ()) -> tuple[Row, ...]:
    """List what is live at a step, equal values together: stored values, largest first, then the step's transients."""
    found, bare, inside = timeline.steps[step], timeline.alive(step), steps_at(timeline, step, opened)
    stored = merged((p.label or region_label(timeline, p.first_stage, p.stop_stage), p.n_bytes) for p in bare)
    rest = found.transient_bytes - sum(row.n_bytes for row in inside)
    own = (Row(label, 1, n) for label, n in zip(OWN, (rest, found.cotangent_bytes), strict=True) if n)
    return (*sorted((*stored, *inside), key=lambda row: -row.n_bytes), *own)


@dataclass(frozen=True, slots=True)
class Saver:
    """What one outermost region saves, and for what price.

    Attributes:
        label: Where it is, in words.
        count: How many regions are alike.
        saved_bytes: How much less is stored of its stages from the forward to the backward pass, all of them together.
        extra: Recompute of all of them together, in forward passes of the program.
        depth: How deep regions are nested in it.
    """

    label: str
    count: int
    saved_bytes: int
    extra: float
    depth: int


def savers(plan: Plan) -> tuple[Saver, ...]:
    """The outermost regions by how much they save, largest first; alike ones together."""
    timeline, plain = plan.timeline, plan.plain_timeline
    if timeline is None or plain is None:
        return ()
    forward = max(plan.prediction.forward_flops if plan.prediction is not None else 0.0, 1.0)
    found: dict[str, list[Saver]] = {}
    for span in timeline.spans:
        if span.depth or span.phase != "backward":
            continue
        stages = range(span.first_stage, span.stop_stage)
        inside = [s for s in timeline.spans if s.phase == "backward" and s.first_stage in stages]
        extra = sum(s.extra_flops for s in inside) / forward
        less = plain.stored_bytes(stages.start, stages.stop) - timeline.stored_bytes(stages.start, stages.stop)
        label = region_label(timeline, stages.start, stages.stop)
        own = Saver(label, 1, less, extra, 1 + max(s.depth for s in inside))
        found.setdefault(family(label), []).append(own)
    rows = (
        Saver(name if len({s.label for s in alike}) > 1 else alike[0].label, len(alike),
              sum(s.saved_bytes for s in alike), sum(s.extra for s in alike), max(s.depth for s in alike))
        for name, alike in found.items()
    )  # fmt: skip
    return tuple(sorted(rows, key=lambda s: (-s.saved_bytes, s.label)))


def is_cheap(extra: float) -> bool:
    """Whether what is recomputed is next to nothing of a forward pass: elementwise chains, however many equations."""
    return extra < CHEAP


def region_label(timeline: StageTimeline, start: int, stop: int) -> str:
    """A run of stages in words: its first stage's label and its last's."""
    if not timeline.stage_labels:
        return f"stages {start} to {stop - 1}" if stop - start > 1 else f"stage {start}"
    first, last = timeline.stage_labels[start], timeline.stage_labels[stop - 1]
    return first if first == last else f"{first} … {last}"


def recomputed(plan: Plan) -> tuple[tuple[int, int, str], ...]:
    """List the recomputed equations: (times, equations, stage in words), most often first."""
    timeline, counts = plan.timeline, plan.mirror_counts
    rows: dict[tuple[int, str], int] = {}
    nodes = timeline.stage_nodes if timeline is not None else (0, plan.n_nodes)
    for stage, (start, stop) in enumerate(pairwise(nodes)):
        label = family(region_label(timeline, stage, stage + 1)) if timeline is not None else "all equations"
        for times in counts[start:stop]:
            if times:
                rows[times, label] = rows.get((times, label), 0) + 1
    return tuple(sorted(((times, n, label) for (times, label), n in rows.items()), key=lambda r: (-r[0], -r[1], r[2])))
