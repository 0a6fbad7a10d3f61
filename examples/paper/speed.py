"""Fig. 7 of the paper: seconds of a training step against depth, plain and under plans of √n and of half the memory.

The paper measured about 30 % more time on a GPU. Here a residual network and an unrolled LSTM run on whatever device
JAX has. All variants of one depth are compiled first; then they take turns, one step each, so that whatever else the
machine does falls on all of them alike. The table gives medians, and the middle half of the ratios to the plain step
of the same turn.

    python examples/paper/speed.py            # sizes for a CPU of two cores, about half an hour
    python examples/paper/speed.py --quick    # a small LSTM, under two minutes
    python examples/paper/speed.py --draw     # the table and the picture again, from the results alone
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
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

DEPTHS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 98: (6, 8, 12, 6), 194: (12, 16, 24, 12)}
RESNET = dict(batch=16, size=64, width=16, classes=10)
LSTM = dict(layers=4, batch=32, n_in=50, width=256, classes=500)
STEPS, QUICK_STEPS = (8, 16, 32), 4
QUICK_LSTM = dict(layers=1, batch=16, n_in=10, width=64, classes=50)
TURNS, QUICK_TURNS = 20, 5
MOST_SECONDS = 1.25
"""How many times the plain step's seconds one of √n memory is to take at most; the paper's took 1.3 on a GPU."""
LABELS = {"plain": "plain", "half": "half the memory", "root": "√n memory"}


def network(name: str, n: int, size: dict[str, int]) -> tuple[Any, tuple[Any, ...]]:
    """The loss of a network of depth n, and its arguments."""
    loss, init = models.resnet(DEPTHS[n], **size) if name == "resnet" else models.lstm(steps=n, **size)
    return loss, init(jax.random.key(0))


def budgets_at(n: int) -> dict[str, float]:
    """What plans at depth n may allocate, as shares of the plain gradient's memory."""
    return {"half": 0.5, "root": min(0.5, 2 / math.sqrt(n))}


def timed(name: str, n: int, size: dict[str, int], turns: int) -> dict[str, Any]:
    """Seconds of each variant's step in every turn, and the compiled memory of each."""
    loss, args = network(name, n, size)
    planned = partial(jaxsub.sublinear, loss, verify=True, progress=False)
    variants = {"plain": loss} | {label: planned(budget=budget) for label, budget in budgets_at(n).items()}
    steps = {label: jaxsub.jit(jax.value_and_grad(fun)).lower(*args).compile() for label, fun in variants.items()}
    memory = {label: step.memory_analysis().temp_size_in_bytes for label, step in steps.items()}
    for step in steps.values():
        seconds(step, args)
    turns_of = [{label: seconds(step, args) for label, step in steps.items()} for _ in range(turns)]
    return {
        "device": jax.devices()[0].device_kind,
        "bytes": memory,
        "seconds": {label: [turn[label] for turn in turns_of] for label in steps},
    }


def seconds(step: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """How long one step takes."""
    start = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - start


def cells(is_quick: bool) -> Iterator[Cell]:
    """Every cell of the figure: a network at a depth, all its variants; of `--quick` the short LSTM alone."""
    if is_quick:
        yield Cell(f"lstm/{QUICK_STEPS}", partial(timed, "lstm", QUICK_STEPS, QUICK_LSTM, QUICK_TURNS))
        return
    for n in (26, 50, 98, 194):
        yield Cell(f"resnet/{n}", partial(timed, "resnet", n, RESNET, TURNS))
    for n in STEPS:
        yield Cell(f"lstm/{n}", partial(timed, "lstm", n, LSTM, TURNS))


def ratios(figures: dict[str, Any], label: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of a variant's time by the plain step's of the same turn."""
    pairs = zip(figures["seconds"][label], figures["seconds"]["plain"], strict=True)
    low, middle, high = statistics.quantiles([own / plain for own, plain in pairs], n=4)
    return low, middle, high


def table(measured: Measured) -> None:
    """Print medians, ratios and memory of every cell."""
    for key, figures in measured.items():
        print(f"{key} on {figures['device']}")
        for label, times in figures["seconds"].items():
            low, middle, high = ratios(figures, label)
            share = figures["bytes"][label] / figures["bytes"]["plain"]
            spread = f"x {middle:.3f} of plain ({low:.3f} to {high:.3f})"
            aim = f"  (aim: at most x {MOST_SECONDS}, {'met' if middle <= MOST_SECONDS else 'missed'})"
            told = f"{LABELS[label]:16} {statistics.median(times):8.3f} s  {spread}  memory x {share:.3f}"
            print(f"  {told}{aim if label == 'root' else ''}")


def broken(measured: Measured) -> Iterator[str]:
    """Plans over their budgets; seconds are told, never promised."""
    for key, figures in measured.items():
        for label, budget in budgets_at(int(key.split("/")[1])).items():
            yield from over_budget(f"{key}, {label}", figures["bytes"][label], budget * figures["bytes"]["plain"])


def draw(measured: Measured, path: Path) -> None:
    """Seconds a step against depth, a panel a network."""
    names = list(dict.fromkeys(key.split("/")[0] for key in measured))
    fig, axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 4), squeeze=False, layout="constrained")
    for ax, name in zip(axes[0], names, strict=True):
        found = {int(key.split("/")[1]): figures for key, figures in measured.items() if key.startswith(name)}
        found = dict(sorted(found.items()))
        for label, stroke in zip(LABELS, ("-", "--", "-"), strict=True):
            medians = [statistics.median(figures["seconds"][label]) for figures in found.values()]
            ax.plot(list(found), medians, ls=stroke, label=LABELS[label], **look(LABELS[label]))
        ax.set(xlabel="layers" if name == "resnet" else "steps", ylabel="seconds a step", title=name, ylim=(0, None))
        legend(ax)
    save(fig, path)
    plt.close(fig)


def main() -> None:
    """Measure what is missing, print the table, draw the picture."""
    figure(
        __doc__,
        HERE.parent / "results" / "paper" / "speed.json",
        quick=lambda: cells(is_quick=True),
        full=lambda: cells(is_quick=False),
        table=table,
        draw=draw,
        broken=broken,
    )


if __name__ == "__main__":
    main()
