"""Plans and frontiers drawn with matplotlib, which is imported only here and only when something is drawn.

Functions take axes or draw on the current ones, return them, and leave figures, styles and saving to the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxsub.core.budget import format_bytes
from jaxsub.core.plan import Plan
from jaxsub.show.curves import Bar, Curve, bars, curves

if TYPE_CHECKING:
    from jaxsub.api.frontier import Frontier
    from jaxsub.api.xla_timeline import XlaTimeline

BEFORE, AFTER, BUDGET = "#8a8a8a", "#0072b2", "#d55e00"
PHASES = {"forward": "#009e73", "again": "#e69f00", "backward": "#56b4e9"}
MARKERS = "sD^vP*Xph8"
"""Shapes besides colours, so that points are told apart in print."""

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
MANY = 80
"""With more regions in a row than this the lines between them would hide them."""

ROW_SHARE = 0.045
"""Height of a row of regions, as a share of the highest curve."""


def _current_axes() -> Any:
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "jaxsub[plot]"') from error
    return plt.gca()


def plot_plan(plan: Plan, ax: Any = None) -> Any:
    """Draw what stands in memory over time, before and after, with the regions under it.

    Args:
        plan: The plan.
        ax: The axes; `None` for the current ones.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not there.
    """
    ax = _current_axes() if ax is None else ax
    before, after = curves(plan)
    rows = bars(plan)
    top = max([c.peak_bytes for c in (before, after) if c is not None] + [1])
    unit, size = next((u, s) for u, s in UNITS if top >= s)
    if before is not None:
        _steps(ax, before, size, BEFORE, f"without the plan, {format_bytes(before.peak_bytes)}", alpha=0.25)
    if after is not None:
        _steps(ax, after, size, AFTER, f"with it, {format_bytes(after.peak_bytes)}", alpha=0.45)
        ax.axvline(after.turn, color="0.4", lw=0.8, ls=":")
        if plan.budget.n_bytes is not None and plan.budget.n_bytes < 1.5 * top:
            ax.axhline(plan.budget.n_bytes / size, color=BUDGET, ls="--", lw=1.4, label=f"budget, {plan.budget}")
    height = ROW_SHARE * top / size
    drawn = _rows(ax, rows, height, with_phases=after is not None)
    ax.set_ylim(bottom=-(1 + max((b.depth for b in rows), default=0)) * 1.35 * height)
    ax.set_yticks([t for t in ax.get_yticks() if 0 <= t <= ax.get_ylim()[1]] if after is not None else [])
    ax.set_xlabel("time, in forward passes" if after is not None else "equation")
    ax.set_ylabel(f"memory ({unit})" if after is not None else "regions, nested ones lower")
    if before is not None or after is not None or drawn:
        ax.legend(loc="upper right", fontsize="small", framealpha=0.85)
    return ax


def _steps(ax: Any, curve: Curve, size: int, color: str, label: str, alpha: float) -> None:
    ax.stairs([b / size for b in curve.live_bytes], curve.times, fill=True, color=color, alpha=alpha)
    ax.stairs([b / size for b in curve.live_bytes], curve.times, color=color, lw=1.5, label=label)


def _rows(ax: Any, rows: tuple[Bar, ...], height: float, *, with_phases: bool) -> int:
    """Draw the regions under the zero line, nested ones lower; one legend entry for each phase."""
    together: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for bar in rows:
        together.setdefault((bar.phase, bar.depth), []).append((bar.start, bar.stop - bar.start))
    seen: set[str] = set()
    for (phase, depth), spans in together.items():
        words = {"forward": "a region forward", "again": "forward again", "backward": "backward"}[phase]
        label = (words if with_phases else "region") if phase not in seen else None
        seen.add(phase)
        place = (-(depth + 1) * 1.3 * height, height)
        width = 0.5 if len(spans) < MANY else 0.0
        ax.broken_barh(spans, place, color=PHASES[phase], ec="white", lw=width, label=label)
    return len(seen)


def plot_frontier(frontier: Frontier, ax: Any = None) -> Any:
    """Draw memory against recomputation: the frontier, plans made by hand, and what was measured.

    Args:
        frontier: The frontier.
        ax: The axes; `None` for the current ones.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not there.
    """
    ax = _current_axes() if ax is None else ax
    top = max(point.temp_bytes for point in frontier.points)
    unit, size = next(((u, s) for u, s in UNITS if top >= s), UNITS[-1])
    memory = [point.temp_bytes / size for point in frontier.points]
    extra = [100 * point.extra for point in frontier.points]
    ax.step(memory, extra, where="post", color=AFTER, lw=1.5, alpha=0.6)
    ax.plot(memory, extra, "o", color=AFTER, label="optimal")
    palette = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
    for i, point in enumerate(frontier.others):
        # hollow and each larger than the one before, so that equal points stand in each other
        style = dict(marker=MARKERS[i % len(MARKERS)], color=palette[i % len(palette)], ms=7 + 1.5 * i, mew=1.6)
        style |= dict(ls="none", mfc="none")
        ax.plot([point.temp_bytes / size], [100 * point.extra], label=point.name, **style)
    if frontier.budget_bytes is not None:
        ax.axvline(frontier.budget_bytes / size, color=BUDGET, ls="--", lw=1.2, label="budget")
    ax.set_xlim(left=0)
    ax.set_xlabel(f"peak memory, predicted ({unit})")
    ax.set_ylabel("executed again (% of a forward pass)")
    ax.legend(fontsize="small", framealpha=0.85, labelspacing=0.8)
    return ax


def plot_schedule(timeline: XlaTimeline, ax: Any = None) -> Any:
    """Draw the temporary memory that the compiler has scheduled, instruction by instruction.

    Args:
        timeline: The timeline.
        ax: The axes; `None` for the current ones.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not there.
    """
    ax = _current_axes() if ax is None else ax
    unit, size = next(((u, s) for u, s in UNITS if timeline.temp_bytes >= s), UNITS[-1])
    live = [n_bytes / size for n_bytes in timeline.live_bytes]
    ax.stairs(live, fill=True, color=AFTER, alpha=0.35)
    ax.stairs(live, color=AFTER, lw=1.2, label="alive, as compiled")
    ax.axhline(timeline.temp_bytes / size, color="0.3", ls=":", label=f"allocated, {format_bytes(timeline.temp_bytes)}")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("instruction, in the compiler's order")
    ax.set_ylabel(f"memory ({unit})")
    ax.legend(fontsize="small", framealpha=0.85)
    return ax
