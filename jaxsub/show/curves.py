"""The curves that all pictures draw: live bytes over time, before and after, and when each region runs.

Time is in forward passes of the program: one is its forward pass, a backward pass counts as two, and what is executed
again comes on top, so that a plan's curve ends as much later as it costs more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from jaxsub.core.budget import format_bytes
from jaxsub.core.plan import Plan
from jaxsub.core.timeline import StageTimeline

if TYPE_CHECKING:
    from jaxsub.api.explain import Group

OWN = ("its own transients", "cotangents on their way")
FAR = 1.5
"""A level more than so many times as high as all curves would flatten them: it is told and not drawn."""

CHEAP = 0.01
"""What takes less than this share of a forward pass is cheap."""

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
class Level:
    """A height that is marked beside the curves.

    Attributes:
        kind: `budget`, `measured`, or `plain` for what was measured without the plan.
        n_bytes: The height.
        words: What it is.
    """

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


def family(label: str) -> str:
    """A label without the numbers in its module path: alike layers have one.

    Example:
        >>> family("block_3/mlp: dot_general model.py:48")
        'block_*/mlp: dot_general model.py:48'
    """
    path, colon, rest = label.partition(": ")
    return re.sub(r"\d+", "*", path) + colon + rest if colon and " " not in path else label


@dataclass(frozen=True, slots=True)
class Row:
    """Alike things in one row.

    Attributes:
        label: What they are, in words.
        count: How many.
        n_bytes: Their bytes, together.
    """

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


def alike(groups: Iterable[Group]) -> tuple[Row, ...]:
    """Groups of residuals by module, alike modules together, largest first."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(family(f"{group.label}: "), []).append(group)
    rows = (Row(name[:-2] if len(some) > 1 else some[0].label, sum(g.count for g in some), sum(g.n_bytes for g in some))
            for name, some in found.items())  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.n_bytes, row.label)))


def standing(timeline: StageTimeline, step: int) -> tuple[Row, ...]:
    """What stands at a step, alike values together: what is stored, largest first, then what the step works with."""
    found, bare = timeline.steps[step], timeline.alive(step)
    stored = merged((p.label or region_label(timeline, p.first_stage, p.stop_stage), p.n_bytes) for p in bare)
    own = zip(OWN, (found.transient_bytes, found.cotangent_bytes), strict=True)
    return (*stored, *(Row(label, 1, n_bytes) for label, n_bytes in own if n_bytes))


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


def again(plan: Plan) -> tuple[tuple[int, int, str], ...]:
    """What is executed again: (times, equations, stage in words), most often first."""
    timeline, counts = plan.timeline, plan.mirror_counts
    rows: dict[tuple[int, str], int] = {}
    nodes = timeline.stage_nodes if timeline is not None else (0, plan.n_nodes)
    for stage, (start, stop) in enumerate(pairwise(nodes)):
        label = family(region_label(timeline, stage, stage + 1)) if timeline is not None else "all equations"
        for times in counts[start:stop]:
            if times:
                rows[times, label] = rows.get((times, label), 0) + 1
    return tuple(sorted(((times, n, label) for (times, label), n in rows.items()), key=lambda r: (-r[0], -r[1], r[2])))
