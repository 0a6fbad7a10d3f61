"""Plans beside what can be written by hand: memory and FLOPs of the compiled gradient, relative to the plain one.

By hand each network's blocks are wrapped in `jax.checkpoint`, in every way that `examples/measuring.py` lists.
`jaxsub` is given budgets.
The lower convex hull of the hand-made points, plain among them, is what a plan is held against: at each budget a plan
should execute no more FLOPs than the hull has there. Budgets go down to three quarters of the least by hand. Beside
them stands what a prototype of the planner reached at the same budget (`tests/prototype.py`).

    python examples/benchmarks/hull.py                        # every network at full size, resumed where it was stopped
    python examples/benchmarks/hull.py --models mlp gpt16     # some of them
    python examples/benchmarks/hull.py --models resnet --budgets 0.2 0.15 --minutes 10   # some cells, a piece at a time
    python examples/benchmarks/hull.py --quick                # toy sizes, under two minutes
    python examples/benchmarks/hull.py --draw                 # the tables again, from the results alone

Results and tables are kept in `examples/results/hull/`. Nothing is executed: shapes are traced and compiled. FLOPs are
the CPU compiler's count, for other targets too: their compilers give none. XLA counts less than 1 where recomputing
spares it to store and read elementwise results.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "tests")]

import zoo  # noqa: E402
from measuring import by_hand, compiled, device, within  # noqa: E402
from prototype import BEATEN, MATCHED, ON_THE_HULL, PROTOTYPE  # noqa: E402
from records import Cell, Measured, fill, load, mib, over_budget, tell  # noqa: E402

TOLERANCE = 0.003
"""A plan this little above the hull counts as on it."""

BELOW = 0.75
"""The share of the least memory by hand that plans are asked to reach."""

BUDGETS: dict[str, tuple[float, ...]] = {
    "mlp": (0.8, 0.6, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1),
    "gpt16": (0.8, 0.6, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.08, 0.065),
    "unet": (0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4),
    "vit": (0.8, 0.6, 0.4, 0.3, 0.25, 0.2, 0.15),
    "resnet": (0.8, 0.6, 0.4, 0.3, 0.25, 0.22, 0.18, 0.15),
    "lstm": (0.5, 0.2, 0.1, 0.08, 0.07, 0.06, 0.05, 0.045),
    "resnet198": (0.6, 0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06),
}
"""Budgets of a network on every target; those of the prototype there join them."""

BLOCKS = {"mlp": 48, "gpt16": 16, "unet": 9, "vit": 12, "resnet": 16, "lstm": 32, "resnet198": 66}
CONVOLUTIONAL = frozenset(("unet", "resnet", "resnet198"))
TARGETS = {"mlp": ("cpu", "h200"), "gpt16": ("cpu", "h200")}
QUICK_BUDGETS = (0.4,)
QUICK_BLOCKS = {"mlp": 12, "gpt16": 4}

Point = tuple[float, float]


def hand_made(
    model: zoo.Model, size: str, target: str, on_cpu: dict[str, Any], by_hand: dict[str, Any]
) -> dict[str, Any]:
    """Figures of a network, wrapped by hand or not; FLOPs are those of the same on the CPU, where it was compiled."""
    loss, args = getattr(model, size)(**by_hand)
    return compiled(loss, args, device(target), (lambda *_: on_cpu["flops"]) if on_cpu else None)


def planned(model: zoo.Model, size: str, target: str, budget: int | float) -> dict[str, Any]:
    """Figures of a network under a budget; the least where nothing fits."""
    return within(*getattr(model, size)(), budget, device(target))


def hand_cells(name: str, target: str, size: str, n_blocks: int, stored: Measured) -> Iterator[Cell]:
    """The plain network and everything by hand."""
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    for way in by_hand(n_blocks, name in CONVOLUTIONAL):
        ways[f"by hand/{way.label}"] = dict(wrap=way.wrap, every=way.every)
    for label, wrapped in ways.items():
        on_cpu = stored.get(f"{name}/cpu/{label}", {})
        yield Cell(f"{name}/{target}/{label}", partial(hand_made, zoo.BY_NAME[name], size, target, on_cpu, wrapped))


def budgets_of(name: str, target: str) -> list[float]:
    """The budgets of a network, those of the prototype among them."""
    return sorted({*BUDGETS[name], *PROTOTYPE.get((name, target), {})}, reverse=True)


def plan_cells(name: str, target: str, size: str, budgets: Iterable[float], hand: Measured) -> Iterator[Cell]:
    """Plans at all budgets, the last one below what can be had by hand."""
    plain_bytes = hand[f"{name}/{target}/plain"]["bytes"]
    least = BELOW * min(figures["bytes"] for figures in hand.values()) / plain_bytes
    for budget in (*budgets, round(least, 4)):
        run = partial(planned, zoo.BY_NAME[name], size, target, budget)
        yield Cell(f"{name}/{target}/budget/{budget}", run)


def lower_hull(points: list[Point]) -> list[Point]:
    """The corners of the lower convex hull, memory rising, down to the fewest FLOPs."""
    corners: list[Point] = []
    for x, y in sorted(points):
        while corners and y <= corners[-1][1] and x == corners[-1][0]:
            corners.pop()
        while len(corners) > 1 and _turns_up(corners[-2], corners[-1], (x, y)):
            corners.pop()
        if not corners or y < corners[-1][1]:
            corners.append((x, y))
    return corners


def _turns_up(a: Point, b: Point, c: Point) -> bool:
    """Whether `b` lies on or above the line from `a` to `c`."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def height(corners: list[Point], x: float) -> float | None:
    """The hull's FLOPs at a share of memory; `None` left of it."""
    if x < corners[0][0]:
        return None
    for (x0, y0), (x1, y1) in pairwise(corners):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return corners[-1][1]


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan beside the hull and the prototype.

    Attributes:
        line: What the table says.
        broken: The promises that it breaks, a sentence each.
        of_hull: Its FLOPs over the hull's there; `None` where nothing by hand needs as little memory.
        of_prototype: Its FLOPs over the prototype's at the same budget; `None` where there is no such figure.
    """

    line: str
    broken: tuple[str, ...] = ()
    of_hull: float | None = None
    of_prototype: float | None = None


def prototype(name: str, target: str, budget: float, hull: float | None) -> float | None:
    """FLOPs over plain that the prototype reached at a budget, where there is a figure."""
    share = ON_THE_HULL.get((name, target, budget))
    if share is not None and hull is not None:
        return share * hull
    return PROTOTYPE.get((name, target), {}).get(budget)


def judge(key: str, budget: float, point: Point, hull: float | None, floor: float | None) -> Judged:
    """Hold a plan's point at a budget against the hull's FLOPs there and the prototype's."""
    x, y = point
    of_hull, of_prototype = (y / f if f else None for f in (hull, floor))
    is_above, is_behind = (of_hull or 0) > 1 + TOLERANCE, (of_prototype or 0) > MATCHED
    line = f"  budget {budget:.4f}  {x:.4f} @ {y:.4f}  "
    line += f"hull {hull:.4f}  {100 * (of_hull - 1):+5.1f} %" if of_hull else f"{'nothing by hand':20}"
    line += f"  prototype {floor:.4f}  {100 * (of_prototype - 1):+5.1f} %" if of_prototype else ""
    broken = [f"{key}: {y:.4f} of the FLOPs, above the hull's {hull:.4f}"] if is_above else []
    broken += [f"{key}: {y:.4f} of the FLOPs, the prototype's {floor:.4f}"] if is_behind else []
    mark = "  ABOVE" * is_above + "  BEHIND" * is_behind
    return Judged(line.rstrip() + mark, tuple(broken), of_hull, of_prototype)


def table(name: str, target: str, stored: Measured, size: str) -> tuple[list[str], list[Judged]]:
    """A network's hand-made points in lines, and its plans, judged; the prototype's are of full size."""
    start = f"{name}/{target}/"
    found = {key.removeprefix(start): figures for key, figures in stored.items() if key.startswith(start)}
    if "plain" not in found:
        return [], []
    plain = found.pop("plain")
    lines = [f"{name} on {target}: plain {mib(plain['bytes'])}, {plain['flops']:.4g} FLOPs"]

    def share(figures: dict[str, Any]) -> Point:
        in_loops = figures.get("flops_ratio")  # a compiler counts the body of slices once
        return figures["bytes"] / plain["bytes"], in_loops or figures["flops"] / plain["flops"]

    hand = {key.partition("/")[2]: share(f) for key, f in found.items() if key.startswith("by hand/")}
    for label, (x, y) in sorted(hand.items(), key=lambda entry: entry[1]):
        lines.append(f"  by hand {label:34} {x:.4f} @ {y:.4f}")
    corners, judged = lower_hull([(1.0, 1.0), *hand.values()]), list[Judged]()
    budgets = {float(key.partition("/")[2]): f for key, f in found.items() if key.startswith("budget/")}
    for budget, figures in sorted(budgets.items(), reverse=True):
        if "bytes" not in figures:
            least, asked = figures["least_bytes"] / plain["bytes"], BELOW * min(x for x, _ in hand.values())
            said = f"{start}{budget}: the least is {least:.4f}, not 25 % below that by hand, {asked:.4f}"
            is_broken = budget >= asked - 1e-4
            judged.append(Judged(f"  budget {budget:.4f}  refused: the least is {least:.4f}", (said,) * is_broken))
            continue
        hull = height(corners, budget)
        floor = prototype(name, target, budget, hull) if size == "full" else None
        entry = judge(f"{start}{budget}", budget, share(figures), hull, floor)
        over = over_budget(f"{start}{budget}", figures["bytes"], budget * plain["bytes"])
        judged.append(replace(entry, broken=(*over, *entry.broken)))
    return [*lines, *(entry.line for entry in judged)], judged


def summary(judged: list[Judged]) -> str:
    """How many plans keep to what they are held against."""
    hull = [entry.of_hull for entry in judged if entry.of_hull]
    floor = [entry.of_prototype for entry in judged if entry.of_prototype]
    said = (
        f"{sum(y <= 1 + TOLERANCE for y in hull)} of {len(hull)} plans are on or below the hull, "
        f"{len(judged) - len(hull)} where nothing by hand needs as little"
    )
    return said + (
        f"; {sum(y <= MATCHED for y in floor)} of {len(floor)} match the prototype's FLOPs, "
        f"{sum(y <= BEATEN for y in floor)} are a percent below them or more"
    ) * bool(floor)


def options() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(BUDGETS), default=tuple(BUDGETS), metavar="MODEL",
                        help=f"some of {', '.join(BUDGETS)}")  # fmt: skip
    parser.add_argument("--targets", nargs="+", help="only these of a network's targets")
    parser.add_argument("--quick", action="store_true", help="toy sizes, under two minutes on two cores")
    parser.add_argument("--draw", action="store_true", help="measure nothing: tables from the results alone")
    parser.add_argument("--budgets", nargs="+", type=float, help="these budgets instead of a network's own")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many")
    parser.add_argument("--out", type=Path, help="where results are kept (default: examples/results/hull)")
    chosen = parser.parse_args()
    if chosen.out is None:
        chosen.out = Path(tempfile.mkdtemp(prefix="jaxsub-")) if chosen.quick else HERE.parent / "results" / "hull"
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen


def main() -> None:
    """Measure what is missing, network by network, and print and keep the tables."""
    chosen, begun = options(), time.monotonic()
    path = chosen.out / "hull.json"
    blocks, size = (QUICK_BLOCKS, "toy") if chosen.quick else (BLOCKS, "full")
    for name in (n for n in chosen.models if n in blocks and not chosen.draw):
        targets = ("cpu",) if chosen.quick else TARGETS.get(name, ("cpu",))
        for target in (t for t in targets if not chosen.targets or t in chosen.targets):
            cells = list(hand_cells(name, target, size, blocks[name], load(path)))
            hand = fill(path, cells, chosen.minutes - (time.monotonic() - begun) / 60)
            if len(hand) == len(cells):
                budgets = chosen.budgets or (QUICK_BUDGETS if chosen.quick else budgets_of(name, target))
                cells = list(plan_cells(name, target, size, budgets, hand))
                fill(path, cells, chosen.minutes - (time.monotonic() - begun) / 60)
    stored = load(path)
    tables = [table(name, target, stored, size) for name in blocks for target in ("cpu", "h200")]
    judged = [entry for _, entries in tables for entry in entries]
    text = "\n\n".join(["\n".join(lines) for lines, _ in tables if lines] + [summary(judged)])
    broken = [sentence for entry in judged for sentence in entry.broken]
    path.with_suffix(".txt").write_text(
        "\n".join([text, "", *(f"BROKEN: {b}" for b in broken)]).rstrip() + "\n", "utf-8"
    )
    print(f"{text}\n\nresults: {path}")
    tell(broken, is_check=chosen.quick)


if __name__ == "__main__":
    main()
