"""The curves that all pictures draw: live bytes over time, before and after, and when each region runs.

Time is in forward passes of the program: one is its forward pass, a backward pass counts as two, and what is executed
again comes on top, so that a plan's curve ends as much later as it costs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jaxsub.core.plan import Plan
from jaxsub.core.timeline import StageTimeline

LEAST_SHARE = 1e-3
"""Every step is drawn at least this share of a forward pass wide, so that none is lost."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Live bytes over time: a step function.

    Attributes:
        times: Where each step starts, and where the last ends, in forward passes.
        live_bytes: The bytes that stand during each step.
        turn: When the backward pass starts.
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
    turn = next((i for i, s in enumerate(timeline.steps) if s.phase == "backward"), 0)
    return Curve(times, timeline.live_bytes, times[turn])


def curves(plan: Plan) -> tuple[Curve | None, Curve | None]:
    """The curves before and after a plan."""
    return curve_of(plan.plain_timeline), curve_of(plan.timeline)


@dataclass(frozen=True, slots=True)
class Bar:
    """A region drawn under the curve.

    Attributes:
        depth: How many regions it stands in.
        start: When it starts, in forward passes; for a plan without a timeline a node.
        stop: When it stops.
        phase: `forward`, `again` or `backward`.
    """

    depth: int
    start: float
    stop: float
    phase: str


def bars(plan: Plan) -> tuple[Bar, ...]:
    """When each region runs; without a timeline, which nodes it covers."""
    curve = curve_of(plan.timeline)
    if curve is None or plan.timeline is None:
        return tuple(_node_bars(plan.segments, 0))
    times = curve.times
    return tuple(Bar(s.depth, times[s.start], times[s.stop], s.phase) for s in plan.timeline.spans)


def _node_bars(segments: Sequence[object], depth: int) -> list[Bar]:
    found: list[Bar] = []
    for segment in segments:
        found.append(Bar(depth, float(segment.start), float(segment.stop), "forward"))  # type: ignore[attr-defined]
        found += _node_bars(segment.children, depth + 1)  # type: ignore[attr-defined]
    return found


@dataclass(frozen=True, slots=True)
class Saver:
    """What one outermost region saves, and for what price.

    Attributes:
        label: Where it is, in words.
        count: How many regions are alike.
        saved_bytes: How much less is stored of its stages from the forward to the backward pass, all of them together.
        extra: What it executes again, all of them together, in forward passes of the program.
        depth: How deep regions are nested in it.
    """

    label: str
    count: int
    saved_bytes: int
    extra: float
    depth: int


def savers(plan: Plan) -> tuple[Saver, ...]:
    """The outermost regions by how much they save, largest first; equal ones together."""
    timeline, plain = plan.timeline, plan.plain_timeline
    if timeline is None or plain is None:
        return ()
    forward = max(plan.prediction.forward_flops if plan.prediction is not None else 0.0, 1.0)
    found: dict[str, Saver] = {}
    for span in timeline.spans:
        if span.depth or span.phase != "backward":
            continue
        stages = range(span.first_stage, span.stop_stage)
        inside = [s for s in timeline.spans if s.phase == "backward" and s.first_stage in stages]
        extra = sum(s.extra_flops for s in inside) / forward
        less = plain.stored_bytes(stages.start, stages.stop) - timeline.stored_bytes(stages.start, stages.stop)
        label = region_label(timeline, stages.start, stages.stop)
        old = found.get(label, Saver(label, 0, 0, 0.0, 0))
        depth = max(old.depth, 1 + max(s.depth for s in inside))
        found[label] = Saver(label, old.count + 1, old.saved_bytes + less, old.extra + extra, depth)
    return tuple(sorted(found.values(), key=lambda s: (-s.saved_bytes, s.label)))


def region_label(timeline: StageTimeline, start: int, stop: int) -> str:
    """A run of stages in words: its first stage's label and its last's."""
    if not timeline.stage_labels:
        return f"stages {start} to {stop - 1}" if stop - start > 1 else f"stage {start}"
    first, last = timeline.stage_labels[start], timeline.stage_labels[stop - 1]
    return first if first == last else f"{first} ... {last}"


def again(plan: Plan) -> tuple[tuple[int, int, str], ...]:
    """What is executed again: (times, equations, stage in words), most often first."""
    timeline, counts = plan.timeline, plan.mirror_counts
    rows: dict[tuple[int, str], int] = {}
    nodes = timeline.stage_nodes if timeline is not None else (0, plan.n_nodes)
    for stage, (start, stop) in enumerate(pairwise(nodes)):
        label = region_label(timeline, stage, stage + 1) if timeline is not None else "all equations"
        for times in counts[start:stop]:
            if times:
                rows[times, label] = rows.get((times, label), 0) + 1
    return tuple(sorted(((times, n, label) for (times, label), n in rows.items()), key=lambda r: (-r[0], -r[1], r[2])))
