"""Plans and frontiers drawn with matplotlib, which is imported only here and only when something is drawn.

Functions draw on the axes they are given or on a new figure's, return them, and leave styles and saving to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxsub.core.budget import format_bytes, unit_of
from jaxsub.core.plan import Plan
from jaxsub.core.steps import Steps
from jaxsub.show.curves import (
    Bar,
    Curve,
    bars,
    curve_of,
    curves,
    levels,
    marks_words,
    phase_bars,
    saved_rows,
    top_of,
    whole_in_slices,
)
from jaxsub.show.loops import slices_words, steps_words

if TYPE_CHECKING:
    from jaxsub.api.frontier import Frontier
    from jaxsub.api.xla_timeline import XlaTimeline

BEFORE, AFTER, BUDGET = "#8a8a8a", "#0072b2", "#d55e00"
PHASES = {"forward": "#009e73", "recompute": "#e69f00", "backward": "#cc79a7"}
"""No phase has the colour of a curve."""

WORDS = {"forward": "forward", "recompute": "recomputed", "backward": "backward"}
LEVELS = {"budget": (BUDGET, "--"), "measured": (AFTER, ":"), "plain": (BEFORE, ":")}
MARKERS = "sD^vP*Xph8"
"""Shapes besides colours, so that points are told apart in print."""

MANY = 80
"""With more regions in a row than this the lines between them would hide them."""

NAMED = 3
"""How many of the values that a step saves are named under a picture."""

ROW_SHARE = 0.045
"""Height of a row of regions, as a share of the highest curve."""


def _axes(ax: Any) -> Any:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "jaxsub[plot]"') from error
    return plt.subplots(figsize=(7, 4.2), layout="constrained")[1]


def _legend(ax: Any) -> None:
    """A legend above the axes, clear of everything that is drawn."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3, fontsize="small", frameon=False, borderaxespad=0)


def plot_plan(plan: Plan, ax: Any = None) -> Any:
    """Draw live bytes over time, before and after, with regions and the steps of loops under them; return the axes.

    A plan without a timeline, or of a function that runs in slices as a whole, is drawn as one step or slice.
    """
    before, after = curves(plan)
    inside = whole_in_slices(plan)
    if after is None and not plan.segments:
        inside = next((steps for steps in plan.steps if steps.timeline is not None), None)
    if inside is not None:
        return plot_steps(inside, ax)
    ax, found = _axes(ax), levels(plan)
    top = top_of((before, after), found)
    unit, size = unit_of(top)
    if before is not None:
        _steps(ax, before, size, BEFORE, f"without the plan, {format_bytes(before.peak_bytes)}", alpha=0.25)
    if after is not None:
        _curve(ax, after, size, f"with it, {format_bytes(after.peak_bytes)}")
        for level in found:
            color, style = LEVELS[level.kind]
            if level.n_bytes <= top:
                ax.axhline(level.n_bytes / size, color=color, ls=style, lw=1.4, label=level.words)
            else:
                ax.plot([], [], color=color, ls=style, lw=1.4, label=f"{level.words}, above the axes")
    _rows(ax, bars(plan), ROW_SHARE * top / size)
    _finish(ax, unit if after is not None else "", bool(after))
    words = [slices_words(run) for run in plan.slices]
    words += [line for steps in plan.steps for line in _steps_lines(steps)]
    return _told(ax, [*words, marks_words(plan)])


def plot_steps(steps: Steps, ax: Any = None) -> Any:
    """Draw what is live inside one step of a loop, or one slice; `ValueError` if it has too many kernels to draw."""
    curve = curve_of(steps.timeline)
    if curve is None or steps.timeline is None:
        raise ValueError(f"one step of `{steps.label}` has too many kernels to draw; print the plan")
    ax = _axes(ax)
    unit, size = unit_of(curve.peak_bytes)
    _curve(ax, curve, size, f"live beside what it is given, {format_bytes(curve.peak_bytes)}")
    _rows(ax, phase_bars(steps.timeline), ROW_SHARE * curve.peak_bytes / size)
    _finish(ax, unit, is_timed=True)
    return _told(ax, [f"inside one of {steps.length}", *_steps_lines(steps)])


def _steps_lines(steps: Steps) -> list[str]:
    """What a loop or a run in slices is, what each step saves, and the largest of that by name."""
    rows = saved_rows(steps)
    named = [f"{row.count} × {row.label}" for row in rows[:NAMED]]
    more = [f"and {len(rows) - NAMED} more"] if len(rows) > NAMED else []
    return [f"{steps.label}: saves {steps_words(steps)[0]}", *named, *more]


def _told(ax: Any, words: Sequence[str]) -> Any:
    """The axes with some lines of words under them."""
    ax.set_xlabel("\n".join([ax.get_xlabel(), *filter(None, words)]), fontsize="small" if any(words) else None)
    return ax


def _curve(ax: Any, curve: Curve, size: int, label: str) -> None:
    """A curve, its peak marked, and where its backward pass starts."""
    _steps(ax, curve, size, AFTER, label, alpha=0.45)
    highest = curve.live_bytes.index(curve.peak_bytes)
    middle = (curve.times[highest] + curve.times[highest + 1]) / 2
    ax.plot([middle], [curve.peak_bytes / size], "o", ms=5, mfc="white", mec=AFTER, label="peak")
    ax.axvline(curve.turn, color="0.4", lw=0.8, ls=":")


def _finish(ax: Any, unit: str, is_timed: bool) -> None:
    ax.set_yticks([t for t in ax.get_yticks() if 0 <= t <= ax.get_ylim()[1]] if unit else [])
    ax.set_xlabel("time, in forward passes" if is_timed else "equation")
    ax.set_ylabel(f"memory ({unit})" if unit else "regions, nested ones lower")
    _legend(ax)


def _steps(ax: Any, curve: Curve, size: int, color: str, label: str, alpha: float) -> None:
    ax.stairs([b / size for b in curve.live_bytes], curve.times, fill=True, color=color, alpha=alpha)
    ax.stairs([b / size for b in curve.live_bytes], curve.times, color=color, lw=1.5, label=label)


def _rows(ax: Any, rows: tuple[Bar, ...], height: float) -> None:
    """Draw the regions under the zero line, nested ones lower; one legend entry for each phase."""
    together: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for bar in rows:
        together.setdefault((bar.phase, bar.depth), []).append((bar.start, bar.stop - bar.start))
    seen: set[str] = set()
    for (phase, depth), spans in together.items():
        place = (-(depth + 1) * 1.3 * height, height)
        width = 0.5 if len(spans) < MANY else 0.0
        label = None if phase in seen else WORDS[phase]
        seen.add(phase)
        ax.broken_barh(spans, place, color=PHASES[phase], ec="white", lw=width, label=label)
    ax.set_ylim(bottom=-(1 + max((b.depth for b in rows), default=0)) * 1.35 * height)


def plot_frontier(frontier: Frontier, ax: Any = None) -> Any:
    """Draw memory against recomputation: the frontier, plans made by hand, and what was measured."""
    ax = _axes(ax)
    top = max(point.temp_bytes for point in frontier.points)
    unit, size = unit_of(top)
    memory = [point.temp_bytes / size for point in frontier.points]
    extra = [100 * point.extra for point in frontier.points]
    ax.step(memory, extra, where="post", color=AFTER, lw=1.5, alpha=0.6)
    ax.plot(memory, extra, "o", color=AFTER, label="optimal")
    palette = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
    for i, point in enumerate(frontier.others):
        # hollow, each larger than the one before, so that equal points are seen around each other
        style = dict(marker=MARKERS[i % len(MARKERS)], color=palette[i % len(palette)], ms=7 + 1.5 * i, mew=1.6)
        style |= dict(ls="none", mfc="none")
        ax.plot([point.temp_bytes / size], [100 * point.extra], label=point.name, **style)
    if frontier.budget_bytes is not None:
        ax.axvline(frontier.budget_bytes / size, color=BUDGET, ls="--", lw=1.2, label="budget")
    ax.set_xlim(left=0)
    ax.set_xlabel(f"peak memory, predicted ({unit})")
    ax.set_ylabel("recomputed (% of a forward pass)")
    _legend(ax)
    return ax


def plot_schedule(timeline: XlaTimeline, ax: Any = None) -> Any:
    """Draw the temporary memory that the compiler has scheduled, instruction by instruction."""
    ax = _axes(ax)
    unit, size = unit_of(timeline.temp_bytes)
    live = [n_bytes / size for n_bytes in timeline.live_bytes]
    ax.stairs(live, fill=True, color=AFTER, alpha=0.35)
    ax.stairs(live, color=AFTER, lw=1.2, label="alive, as compiled")
    ax.axhline(timeline.temp_bytes / size, color="0.3", ls=":", label=f"allocated, {format_bytes(timeline.temp_bytes)}")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("instruction, in the compiler's order")
    ax.set_ylabel(f"memory ({unit})")
    _legend(ax)
    return ax
