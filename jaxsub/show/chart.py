"""The geometry of a chart of live bytes: outlines in SVG's own units and places in percent, for the templates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxsub.core.budget import format_bytes
from jaxsub.core.timeline import PHASES
from jaxsub.show.curves import Bar, Curve, Level, top_of

WIDTH, HEIGHT = 1000, 100
"""The chart's own units; it is stretched to the room there is, its labels are not."""

TICKS = 4
MOST_COLUMNS = 1200
MOST_BARS = 4000
ROOM = 1.12
"""The chart is so many times as high as what is drawn: the peak's label stands above it."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Where everything stands; percents count from the left and from below.

    Attributes:
        before: The outline without the plan; empty where it is not known.
        after: The outline with it.
        ticks: Height in percent, and words, of each tick.
        levels: Height in percent, and what is marked there, of each level; the height is negative above the chart.
        turn: Where the backward pass starts, in percent.
        peak: Where the highest point of `after` is: percent from the left, and from below.
        rows: For each depth of nesting the phases and outlines of its regions.
    """

    before: str
    after: str
    ticks: tuple[tuple[float, str], ...]
    levels: tuple[tuple[float, Level], ...]
    turn: float
    peak: tuple[float, float]
    rows: tuple[tuple[tuple[str, str], ...], ...]


def chart_of(before: Curve | None, after: Curve, bars: Sequence[Bar], found: Sequence[Level] = ()) -> Chart:
    """Place curves, regions and levels in a chart."""
    end = max(c.end for c in (before, after) if c is not None)
    top = ROOM * top_of((before, after), found)
    step = 2.0 ** math.ceil(math.log2(max(top / TICKS, 1.0)) - 1e-9)
    ticks = [i * step for i in range(TICKS + 2) if i * step <= top]
    highest = after.live_bytes.index(after.peak_bytes)
    middle = (after.times[highest] + after.times[highest + 1]) / 2
    return Chart(
        _path(before, end, top) if before is not None else "",
        _path(after, end, top),
        tuple((100 * t / top, _tick(t)) for t in ticks),
        tuple((100 * level.n_bytes / top if level.n_bytes <= top else -1.0, level) for level in found),
        100 * after.turn / end,
        (100 * middle / end, 100 * after.peak_bytes / top),
        rows_of(bars, end),
    )


def rows_of(found: Sequence[Bar], end: float) -> tuple[tuple[tuple[str, str], ...], ...]:
    """One row for each depth of nesting, one outline for each phase of it."""
    depths = range(1 + max((b.depth for b in found), default=-1))
    room = MOST_BARS // (3 * max(1, len(depths)))
    return tuple(
        tuple((phase, "".join(_bar(b, end) for b in here))
              for phase in PHASES if (here := [b for b in found if b.depth == d and b.phase == phase][:room]))
        for d in depths
    )  # fmt: skip


def _tick(n_bytes: float) -> str:
    """A tick's label: no decimals that say nothing."""
    number, _, unit = format_bytes(n_bytes).partition(" ")
    return f"{float(number):g} {unit}" if n_bytes else "0"


def _path(curve: Curve, end: float, top: float) -> str:
    """The outline of a step function, closed at the bottom."""
    edges, live = curve.times, curve.live_bytes
    if len(live) > MOST_COLUMNS:
        live = curve.sampled(MOST_COLUMNS, curve.end)
        edges = tuple(curve.end * i / MOST_COLUMNS for i in range(MOST_COLUMNS + 1))
    steps = "".join(
        f"V{HEIGHT * (1 - b / top):.4g}H{WIDTH * t / end:.5g}" for b, t in zip(live, edges[1:], strict=True)
    )
    return f"M0 {HEIGHT}{steps}V{HEIGHT}Z"


def _bar(bar: Bar, end: float) -> str:
    x, width = WIDTH * bar.start / end, WIDTH * (bar.stop - bar.start) / end
    return f"M{x:.5g} 0h{width - min(0.8, 0.25 * width):.3g}V10H{x:.5g}z"
