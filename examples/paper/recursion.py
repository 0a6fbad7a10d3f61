"""§4.4 of the paper: memory of recursive plans against depth, and what any plan must pay for its memory.

Left, a chain of n layers under the recursion g(n) = k + g(n / (k + 1)) for k = 1, 2, 3, compiled, beside the paper's
k · log_{k+1}(n). Right, forward passes against memory on 64 layers: the recursion, Griewank and Walther's binomial
schedules (revolve), which are optimal where every layer costs the same and keeps only its input, and `jaxsub`'s own
plans, which may also save values inside a layer.

    python examples/paper/recursion.py            # to 1024 layers
    python examples/paper/recursion.py --quick    # to 64 layers, under two minutes
    python examples/paper/recursion.py --draw     # the table and the picture again, from the results alone

Memory is in units of one activation. Nothing is executed: shapes are traced and compiled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt

import jaxsub

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "tests")]

import models  # noqa: E402
from drawing import legend, look, save  # noqa: E402
from records import Cell, Measured, figure, over_budget  # noqa: E402

BATCH, WIDTH = 4096, 64
UNIT_BYTES = BATCH * WIDTH * 4
LENGTHS, QUICK_LENGTHS = (16, 64, 256, 1024), (16, 64)
KS = (1, 2, 3)
FRONTIER_LENGTH, QUICK_FRONTIER_LENGTH = 64, 16
SLOTS = (2, 3, 4, 6, 8, 12, 16)
TOLERANCE = 0.01
"""Forward passes by which a schedule counts as level."""


def chain(n: int) -> tuple[Any, tuple[Any, ...]]:
    """The loss of n layers x = tanh(x @ w), and the shapes of its arguments."""
    loss, init = models.chain(n, BATCH, WIDTH)
    return loss, jax.eval_shape(init, jax.random.key(0))


def figures_of(n: int, plan: jaxsub.Plan) -> dict[str, float]:
    """Units of memory and forward passes of the compiled gradient under a plan."""
    loss, args = chain(n)
    found = jaxsub.measure(jaxsub.sublinear(loss, plan=plan), *args)
    layer = 2 * BATCH * WIDTH**2
    plain = (3 * n - 1) * layer  # the input is data: the first layer has no cotangent to hand on
    return {"units": found.temp_bytes / UNIT_BYTES, "forward_passes": 1 + (found.flops - plain) / (n * layer)}


def planned(n: int, planner: str) -> dict[str, float]:
    """The least memory that a planner reaches."""
    loss, args = chain(n)
    return figures_of(n, jaxsub.plan(loss, *args, planner=planner, verify=False, progress=False))


def within(n: int, budget_bytes: int) -> dict[str, float]:
    """The default planner's plan under a budget; what the least budget is where it is refused."""
    loss, args = chain(n)
    try:
        plan = jaxsub.plan(loss, *args, budget=budget_bytes, verify=True, progress=False)
    except jaxsub.InfeasibleBudgetError as error:
        return {"least_units": error.least_bytes / UNIT_BYTES}
    return figures_of(n, plan)


def cells(lengths: tuple[int, ...], frontier_length: int) -> Iterator[Cell]:
    """Every cell of the figure."""
    for n in lengths:
        for k in KS:
            yield Cell(f"recursion/{n}/{k}", partial(planned, n, f"recursive({k})"))
    for slots in SLOTS:
        if slots < frontier_length:
            planner = f"revolve({slots})"
            yield Cell(f"revolve/{frontier_length}/{slots}", partial(planned, frontier_length, planner))
            budget_bytes = (slots + 2) * UNIT_BYTES
            yield Cell(f"jaxsub/{frontier_length}/{slots}", partial(within, frontier_length, budget_bytes))


def table(measured: Measured) -> None:
    """Print every cell beside what theory says of it."""
    for key, figures in measured.items():
        of, n, parameter = key.split("/")
        if "least_units" in figures:
            print(f"{key:22} refused; the least is {figures['least_units']:.1f} units")
            continue
        line = f"{key:22} {figures['units']:7.1f} units, {figures['forward_passes']:5.2f} forward passes"
        if of == "recursion":
            line += f"   k log n + 3 = {bound(int(n), int(parameter)):.1f}"
        print(line)


def bound(n: int, k: int) -> float:
    """Units that the recursion is given: the paper's k log n, base k + 1, and three more for what a layer needs."""
    return k * math.log(n, k + 1) + 3


def broken(measured: Measured) -> Iterator[str]:
    """Recursions beyond the logarithm; our plans over their budgets, or behind a schedule that fits the same memory."""
    for (n, k), figures in points(measured, "recursion").items():
        yield from over_budget(f"recursion/{n}/{k}", figures["units"] * UNIT_BYTES, bound(n, k) * UNIT_BYTES)
    for key, figures in measured.items():
        of, n, slots = key.split("/")
        if of == "jaxsub":
            budget, passes = int(slots) + 2, figures.get("forward_passes", math.inf)
            yield from over_budget(key, figures.get("units", 0) * UNIT_BYTES, budget * UNIT_BYTES)
            for (length, parameter), other in points(measured, "revolve").items():
                if length == int(n) and other["units"] <= budget and other["forward_passes"] < passes - TOLERANCE:
                    yield f"{key}: {passes:.2f} forward passes, revolve({parameter}) {other['forward_passes']:.2f}"


def points(measured: Measured, of: str) -> dict[tuple[int, int], dict[str, float]]:
    """The cells of one kind that have figures, by length and parameter."""
    split = {tuple(key.split("/")): figures for key, figures in measured.items() if "units" in figures}
    return {(int(n), int(parameter)): found for (kind, n, parameter), found in split.items() if kind == of}


def draw(measured: Measured, path: Path) -> None:
    """Memory against depth, and forward passes against memory."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    recursion = points(measured, "recursion")
    lengths = sorted({n for n, _ in recursion})
    for k, marker in zip(KS, "os^", strict=False):
        here = [n for n in lengths if (n, k) in recursion]
        left.semilogx(
            here, [recursion[n, k]["units"] for n in here], label=f"k = {k}", **{**look("recursion"), "marker": marker}
        )
        theory = [bound(n, k) for n in here]
        left.semilogx(here, theory, color=look("recursion")["color"], linestyle="dotted", linewidth=1)
    left.set(xlabel="layers", ylabel="memory (activations)", xticks=lengths, title="the recursion, compiled")
    left.plot([], [], color="black", linestyle="dotted", linewidth=1, label="k · log n + 3, base k + 1")
    left.xaxis.set_major_formatter("{x:.0f}")
    left.minorticks_off()
    legend(left)
    for of in ("revolve", "jaxsub"):
        found = sorted(points(measured, of).values(), key=lambda figures: figures["units"])
        xs, ys = [f["units"] for f in found], [f["forward_passes"] for f in found]
        label = "revolve (Griewank and Walther)" if of == "revolve" else of
        right.plot(xs, ys, label=label, **look(of))
    n = max((n for n, _ in points(measured, "revolve")), default=max(lengths))
    here = [recursion[n, k] for k in KS if (n, k) in recursion]
    places = [f["units"] for f in here], [f["forward_passes"] for f in here]
    right.plot(*places, ls="none", label="recursion", **look("recursion"))
    right.set(xlabel="memory (activations)", ylabel="forward passes", title=f"{n} layers, compiled")
    legend(right)
    save(fig, path)
    plt.close(fig)


def main() -> None:
    """Measure what is missing, print the table, draw the picture."""
    figure(
        __doc__,
        HERE.parent / "results" / "paper" / "recursion.json",
        quick=lambda: cells(QUICK_LENGTHS, QUICK_FRONTIER_LENGTH),
        full=lambda: cells(LENGTHS, FRONTIER_LENGTH),
        table=table,
        draw=draw,
        broken=broken,
    )


if __name__ == "__main__":
    main()
