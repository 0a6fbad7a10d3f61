"""Plans, frontiers and explanations as HTML: what a notebook shows of them, and a plan's page of its own.

One fragment without links, fonts or requests. Everything is there without scripts; with them, the moment under the
pointer (or chosen with the arrow keys) says what is alive. All text goes through `html.escape`, all data through JSON
with `<` escaped, so that a name is always shown as text. The page stays under `MOST_BYTES` whatever the plan's
size: names of what is smallest are left out first.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from jaxsub.core.budget import format_bytes
from jaxsub.core.plan import Plan
from jaxsub.core.timeline import PHASES
from jaxsub.show.curves import Bar, Curve, Saver, again, bars, curves, region_label, savers
from jaxsub.show.text import describe_explanation, times

if TYPE_CHECKING:
    from jaxsub.api.explain import Explanation
    from jaxsub.api.frontier import Frontier, Point

MOST_BYTES = 190_000
WIDTH, HEIGHT = 1000, 100
"""The chart's own units; it is stretched to the room there is, its labels are not."""

TICKS = 4
MOST_COLUMNS = 1200
MOST_BARS = 4000
LABEL_LENGTH = 120
MOST_ROWS = 8
OWN = ("its own transients", "cotangents on their way")


def page(plan: Plan) -> str:
    """A plan as a page of its own."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>jaxsub plan</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>body{margin:0;padding:12px;background:Canvas;color-scheme:light dark}</style></head>"
        f"<body>{fragment(plan)}</body></html>\n"
    )


def fragment(plan: Plan) -> str:
    """A plan as what a notebook puts under a cell: self-contained, for light and dark, under `MOST_BYTES`."""
    body = "".join((_header(plan), _chart(plan), _savers(savers(plan)), _again(plan), _holdings(plan)))
    for n_labels in (600, 150, 30, 0):
        data = _data(plan, n_labels)
        text = _assemble(body, data)
        if len(text.encode()) <= MOST_BYTES:
            return text
    return _assemble(body, "")


def _assemble(body: str, data: str) -> str:
    key = "jaxsub-" + hashlib.sha1((body + data).encode()).hexdigest()[:12]
    script = f'<script type="application/json">{data}</script>' if data else ""
    run = f"<script>{_resource('plan.js').replace('ROOT_ID', key)}</script>" if data else ""
    return f'<style>{_resource("plan.css")}</style><div class="jaxsub" data-jaxsub="{key}">{body}{script}</div>{run}'


@cache
def _resource(name: str) -> str:
    """A file that lies beside this one."""
    return (resources.files("jaxsub.show") / name).read_text("utf-8")


def _header(plan: Plan) -> str:
    tiles = [*_memory_tiles(plan)]
    if plan.prediction is not None:
        share = plan.prediction.extra_flops / max(plan.prediction.forward_flops, 1.0)
        tiles.append(_tile("runs again", f"{share:.1%}", "of one forward pass, in FLOPs"))
    counts = plan.mirror_counts
    often = times(max(counts, default=0))
    note = f"{sum(1 for m in counts if m)} of {plan.n_nodes} equations run again, at most {often}"
    tiles.append(_tile("regions", str(plan.n_regions), f"{note}; {len(plan.barriers)} barriers"))
    proof = " It is proved optimal in its memory model." if plan.is_optimal else ""
    made = f"jaxsub plan by <code>{escape(plan.planner)}</code>, budget: {escape(str(plan.budget))}.{proof}"
    made += f" {escape(plan.note)}" if plan.note else ""
    return f'<div class="js-title">{made}</div><div class="js-tiles">{"".join(tiles)}</div>'


def _memory_tiles(plan: Plan) -> Iterator[str]:
    target = f"by the compiler for {plan.measurement.target}" if plan.measurement is not None else ""
    for name, where, before, after in (
        ("measured peak", target, plan.plain_measurement, plan.measurement),
        ("predicted peak", "", plan.plain_prediction, plan.prediction),
    ):
        if after is not None:
            was = f"{format_bytes(before.temp_bytes)} → " if before is not None else ""
            less = f"{before.temp_bytes / max(after.temp_bytes, 1):.1f}× less" if before is not None else ""
            note = ", ".join(part for part in (less, where) if part)
            yield _tile(name, was, note, bold=format_bytes(after.temp_bytes))
    if plan.measurement is None:
        yield _tile("measured peak", "not yet", "no compile has verified it")


def _tile(name: str, value: str, note: str, bold: str = "") -> str:
    shown = escape(value) + (f"<b>{escape(bold)}</b>" if bold else "")
    return f'<div class="js-tile"><span>{escape(name)}</span><div>{shown}</div><small>{escape(note)}</small></div>'


def _chart(plan: Plan) -> str:
    before, after = curves(plan)
    found = bars(plan)
    if after is None:
        rows = _bars(found, float(max(plan.n_nodes, 1)))
        note = "The regions over the equations, nested ones below; what stands in memory was not predicted."
        return f'<p class="js-note">{note}</p><div class="js-plot"><div></div>{rows}</div>' if rows else ""
    end = max(c.end for c in (before, after) if c is not None)
    budget = plan.budget.n_bytes or 0
    top = float(max([c.peak_bytes for c in (before, after) if c is not None] + [1]))
    top = 1.06 * (max(top, budget) if budget < 1.5 * top else top)
    ticks = [i * _nice(top / TICKS) for i in range(TICKS + 2)]
    axis = "".join(f'<span style="bottom:{100 * t / top:.2f}%">{_tick(t)}</span>' for t in ticks if t <= top)
    grid = "".join(f'<path class="js-grid" d="M0 {_y(t, top)}H{WIDTH}"/>' for t in ticks if t <= top)
    parts = [grid]
    if before is not None:
        parts.append(f'<path class="js-before" d="{_path(before, end, top)}"/>')
    parts.append(f'<path class="js-after" d="{_path(after, end, top)}"/>')
    if 0 < budget <= top:
        parts.append(f'<path class="js-budget" d="M0 {_y(budget, top)}H{WIDTH}"/>')
    turn = 100 * after.turn / end
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{"".join(parts)}</svg>'
    words = f"memory over time, at most {format_bytes(after.peak_bytes)}; arrow keys move, details follow"
    area = (
        f'<div class="js-area" tabindex="0" role="img" aria-label="{words}">{svg}'
        f'<i class="js-turn" style="left:{turn:.2f}%"></i><i class="js-cursor"></i></div>'
    )
    time = f'<div class="js-time"><span style="width:{turn:.2f}%">forward</span><span>backward →</span></div>'
    rows = f'<div class="js-rows-label">regions</div>{_bars(found, end)}' if found else ""
    return (
        f"{_legend(plan, before, after, 0 < budget <= top)}"
        f'<div class="js-plot"><div class="js-axis">{axis}</div>{area}{rows}<div></div>{time}</div>'
        f'<div class="js-detail">{_moment(plan, after)}</div>'
    )


def _legend(plan: Plan, before: Curve | None, after: Curve, has_budget: bool) -> str:
    entries = [
        f'<span><i class="js-key js-key-after"></i>with the plan, {format_bytes(after.peak_bytes)} at most</span>'
    ]
    if before is not None:
        entries.insert(
            0, f'<span><i class="js-key js-key-before"></i>without, {format_bytes(before.peak_bytes)}</span>'
        )
    if has_budget:
        entries.append(f'<span><i class="js-key js-key-budget"></i>budget, {escape(str(plan.budget))}</span>')
    return f'<div class="js-legend"><b>Memory over time, predicted</b>{"".join(entries)}</div>'


def _nice(step: float) -> float:
    """A power of two, at least a step."""
    return 2.0 ** math.ceil(math.log2(max(step, 1.0)) - 1e-9)


def _tick(n_bytes: float) -> str:
    """A tick's label: no decimals that say nothing."""
    number, _, unit = format_bytes(n_bytes).partition(" ")
    return f"{float(number):g} {unit}" if n_bytes else "0"


def _cut(text: str) -> str:
    """A label cut to a length, marked where it is."""
    return text if len(text) <= LABEL_LENGTH else text[: LABEL_LENGTH - 1] + "…"


def _y(n_bytes: float, top: float) -> str:
    return f"{HEIGHT * (1 - n_bytes / top):.4g}"


def _path(curve: Curve, end: float, top: float) -> str:
    """The outline of a step function, closed at the bottom."""
    edges, live = curve.times, curve.live_bytes
    if len(live) > MOST_COLUMNS:
        live = curve.sampled(MOST_COLUMNS, curve.end)
        edges = tuple(curve.end * i / MOST_COLUMNS for i in range(MOST_COLUMNS + 1))
    steps = "".join(f"V{_y(b, top)}H{WIDTH * t / end:.5g}" for b, t in zip(live, edges[1:], strict=True))
    return f"M0 {HEIGHT}{steps}V{HEIGHT}Z"


def _bars(found: Sequence[Bar], end: float) -> str:
    """One row for each depth of nesting, one outline for each phase of it."""
    rows = []
    for depth in range(1 + max((b.depth for b in found), default=-1)):
        paths = []
        for phase in PHASES:
            here = [b for b in found if b.depth == depth and b.phase == phase][: MOST_BARS // (3 * (depth + 1))]
            outline = "".join(_bar(b, end) for b in here)
            if outline:
                paths.append(f'<path class="js-{phase}" d="{outline}"/>')
        rows.append(f'<svg class="js-row js-depth-{min(depth, 3)}" viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" '
                    f'aria-hidden="true">{"".join(paths)}</svg>')  # fmt: skip
    return f'<div class="js-rows">{"".join(rows)}</div>' if rows else ""


def _bar(bar: Bar, end: float) -> str:
    x, width = WIDTH * bar.start / end, WIDTH * (bar.stop - bar.start) / end
    return f"M{x:.5g} 0h{width - min(0.8, 0.25 * width):.3g}V10H{x:.5g}z"


def _moment(plan: Plan, after: Curve) -> str:
    """What is alive at the peak: what stands there before any pointer has moved."""
    timeline = plan.timeline
    if timeline is None:
        return ""
    peak = timeline.peak_step
    step, alive = timeline.steps[peak], timeline.alive(peak)
    rows = "".join(
        _row(p.label or region_label(timeline, p.first_stage, p.stop_stage), p.n_bytes) for p in alive[:MOST_ROWS]
    )
    rest = sum(p.n_bytes for p in alive[MOST_ROWS:])
    rows += _row(f"{len(alive) - MOST_ROWS} smaller", rest) if rest else ""
    own = (step.transient_bytes, step.cotangent_bytes)
    rows += "".join(_row(name, n_bytes) for name, n_bytes in zip(OWN, own, strict=True) if n_bytes)
    title = f"At the peak: {step.phase}, {region_label(timeline, step.start, step.stop)}"
    return f"<b>{escape(title)}</b> {format_bytes(after.peak_bytes)}<table>{rows}</table>"


def _row(label: str, n_bytes: int) -> str:
    return f'<tr><td class="js-number">{format_bytes(n_bytes)}</td><td>{escape(_cut(label))}</td></tr>'


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], n_all: int) -> str:
    if not rows:
        return ""
    heads = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    table = f'<div class="js-scroll"><table><tr>{heads}</tr>{body}</table></div>'
    more = f'<p class="js-note">and {n_all - len(rows)} more</p>' if n_all > len(rows) else ""
    return f"<details open><summary>{escape(title)}</summary>{table}{more}</details>"


def _cells(row: Sequence[str]) -> str:
    """The cells of a row: numbers, and words last."""
    numbers = "".join(f'<td class="js-number">{escape(cell)}</td>' for cell in row[:-1])
    return f"{numbers}<td>{escape(row[-1])}</td>"


def _savers(found: Sequence[Saver]) -> str:
    rows = [(format_bytes(s.saved_bytes), f"{s.extra:.2%}", str(s.count), _cut(s.label)) for s in found[:MOST_ROWS]]
    return _table("Largest savers", ("stores less", "runs again", "regions", "where"), rows, len(found))


def _again(plan: Plan) -> str:
    found = again(plan)
    rows = [(f"{often} ×", str(n), _cut(label)) for often, n, label in found[:MOST_ROWS]]
    return _table("What runs again, how often", ("again", "equations", "where"), rows, len(found))


def _holdings(plan: Plan) -> str:
    rows = [(f"{h.count} ×", format_bytes(h.n_bytes), _cut(h.label + " (in host memory)" * h.is_offloaded))
            for h in plan.holdings[:MOST_ROWS]]  # fmt: skip
    return _table("What is kept for the backward pass", ("kept", "each", "what"), rows, len(plan.holdings))


def _data(plan: Plan, n_labels: int) -> str:
    """What the script needs to say what is alive at a moment, as JSON that can stand in a page."""
    timeline, (_, after) = plan.timeline, curves(plan)
    if timeline is None or after is None:
        return ""
    labels: dict[str, int] = {}
    bare = replace(timeline, stage_labels=())
    named = set(sorted(range(len(timeline.pieces)), key=lambda i: -timeline.pieces[i].n_bytes)[:n_labels])

    def label(text: str) -> int:
        return labels.setdefault(_cut(text), len(labels))

    pieces = []
    for i, p in enumerate(timeline.pieces):
        text = p.label if i in named and p.label else f"{p.kind}, {region_label(bare, p.first_stage, p.stop_stage)}"
        pieces.append([p.start, p.stop - p.start, p.n_bytes, label(text) if n_labels else -1])
    named_stages = n_labels and len(set(timeline.stage_labels)) <= n_labels
    steps = []
    for width, s in zip(map(float.__sub__, after.times[1:], after.times), timeline.steps, strict=True):
        text = region_label(timeline, s.start, s.stop) if named_stages else region_label(bare, s.start, s.stop)
        own = [s.transient_bytes, s.cotangent_bytes]
        steps.append([round(width, 5), PHASES.index(s.phase), label(text), *own])
    end = max(c.end for c in curves(plan) if c is not None)
    data: dict[str, Any] = {"end": round(end, 5), "steps": steps, "pieces": pieces, "labels": list(labels)}
    return (
        json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def frontier_fragment(frontier: Frontier) -> str:
    """A frontier as a table, with bars for memory; a column for what was measured where anything was."""
    points = (*frontier.points, *frontier.others)
    top = max([p.temp_bytes for p in points] + [1])
    is_measured = any(p.plan.measurement is not None for p in points)
    names = ("", "predicted", *(("measured",) if is_measured else ()), "runs again", "regions", "plan")
    heads = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(_point_row(p, top, is_measured) for p in points)
    table = f'<div class="js-scroll"><table class="js-points"><tr>{heads}</tr>{rows}</table></div>'
    return _assemble(f'<div class="js-title">What each budget buys</div>{table}', "")


def _point_row(point: Point, top: int, is_measured: bool) -> str:
    bar = f'<i class="js-bar" style="width:{max(1.0, 100 * point.temp_bytes / top):.1f}%"></i>'
    measured = format_bytes(point.plan.measurement.temp_bytes) if point.plan.measurement is not None else ""
    figures = (f"{point.extra:.1%}", str(point.plan.n_regions), _cut(point.name))
    cells = _cells((format_bytes(point.temp_bytes), *((measured,) if is_measured else ()), *figures))
    return f'<tr><td class="js-bars">{bar}</td>{cells}</tr>'


def explanation_fragment(found: Explanation) -> str:
    """An explanation: its words."""
    return _assemble(f'<pre class="js-words">{escape(describe_explanation(found))}</pre>', "")
