"""Fig. 6 of the paper: memory of an LSTM against the number of steps; 4 layers, 1024 hidden, batch 64, softmax 5000.

Up to 128 steps the network is unrolled, as in the paper; longer ones are scans, which compile in constant time. Two
accounts of memory: the paper's own allocator on the unrolled gradient graph, where Algorithm 3 takes at 128 steps less
than a fourth of what sharing does, as in the paper; and what XLA allocates for the compiled gradient under budgets of a
12th, a 24th and a 35th of the plain gradient's memory, of a scan of a 4th and an 8th: it adds up its weights' gradients
beside everything else, whatever its length.

    python examples/paper/lstm.py            # full sizes, resumed where it was stopped
    python examples/paper/lstm.py --quick    # a small network, under two minutes
    python examples/paper/lstm.py --draw     # the table and the picture again, from the results alone

Nothing is executed: shapes are traced and compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt

import jaxsub
from jaxsub.allocator import LEAST_NEEDS, allocate, gradient_graph
from jaxsub.jaxpr.trace import trace

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "tests")]

import models  # noqa: E402
from drawing import STROKES, legend, look, save  # noqa: E402
from measuring import ONE_FORWARD_PASS, traced_flops  # noqa: E402
from records import Cell, Measured, figure, mib, over_budget  # noqa: E402

FULL = dict(layers=4, batch=64, n_in=50, width=1024, classes=5000)
QUICK = dict(layers=1, batch=16, n_in=10, width=64, classes=50)
UNROLLED, SCANNED = (32, 64, 128), (256, 512, 1024, 2048)
QUICK_UNROLLED, QUICK_SCANNED = (4,), ()
ALLOCATED = {"no optimization": "none", "inplace": "inplace", "sharing": "sharing", "sublinear plan": "sharing"}
SHARES, SCANNED_SHARES, QUICK_SHARES = (12, 24, 35), (4, 8), (2,)
MOST_FLOPS = {(steps, share): most for steps in (32, 64) for share, most in ((12, 1.0), (24, 1.22), (35, 1.3))}
"""What plans of the unrolled network are to cost at most, by steps and share; one extra forward pass elsewhere."""
LEAST_SAVED = {128: 4}
"""How many times less memory than sharing alone the paper's plan is to take in the allocator, by steps."""


def network(steps: int, size: dict[str, int], is_scan: bool) -> tuple[Any, tuple[Any, ...]]:
    """The loss of an LSTM over `steps` steps, and the shapes of its arguments."""
    loss, init = models.lstm(steps=steps, scan=jax.lax.scan if is_scan else None, **size)
    return loss, jax.eval_shape(init, jax.random.key(0))


def allocated(steps: int, size: dict[str, int], strategy: str) -> dict[str, float]:
    """Bytes by the paper's allocator: of the plain gradient graph, or of Algorithm 3's under sharing."""
    loss, args = network(steps, size, is_scan=False)
    graph, counts = trace(loss, args, {}).graph, ()
    if strategy == "sublinear plan":
        plan = jaxsub.plan(loss, *args, planner="chen", verify=False, progress=False)
        counts = plan.mirror_counts_in(graph)
    schedule = gradient_graph(graph, counts, needs=LEAST_NEEDS)
    return {"bytes": allocate(schedule, ALLOCATED[strategy]).total_bytes}


def plain(steps: int, size: dict[str, int], is_scan: bool) -> dict[str, float]:
    """Bytes and FLOPs of the compiled plain gradient."""
    loss, args = network(steps, size, is_scan)
    found = jaxsub.measure(loss, *args)
    return {"bytes": found.temp_bytes, "flops": found.flops}


def planned(steps: int, size: dict[str, int], is_scan: bool, share: int) -> dict[str, float]:
    """Bytes and FLOPs of the compiled gradient under a budget; what the least budget is where it is refused."""
    loss, args = network(steps, size, is_scan)
    try:
        plan = jaxsub.plan(loss, *args, budget=1 / share, verify=True, progress=False)
    except jaxsub.InfeasibleBudgetError as error:
        return {"refused_bytes": error.requested_bytes, "least_bytes": error.least_bytes}
    ratio = plan.measurement.flops / plan.plain_measurement.flops
    if is_scan:  # the compiler counts a loop's body once
        ratio = traced_flops(jaxsub.sublinear(loss, plan=plan), args) / traced_flops(loss, args)
    return {
        "bytes": plan.measurement.temp_bytes,
        "plain_bytes": plan.plain_measurement.temp_bytes,
        "flops_ratio": ratio,
        "regions": plan.n_regions,
    }


def cells(
    unrolled: tuple[int, ...], scans: tuple[int, ...], size: dict[str, int], shares: tuple[int, ...],
    scanned_shares: tuple[int, ...] = (),
) -> Iterator[Cell]:  # fmt: skip
    """Every cell of the figure."""
    for steps in unrolled:
        for strategy in ALLOCATED:
            yield Cell(f"allocator/{steps}/{strategy}", partial(allocated, steps, size, strategy))
    for account, lengths in (("unrolled", unrolled), ("scan", scans)):
        is_scan = account == "scan"
        for steps in lengths:
            yield Cell(f"{account}/{steps}/plain", partial(plain, steps, size, is_scan))
            for share in scanned_shares if is_scan else shares:
                yield Cell(f"{account}/{steps}/1 of {share}", partial(planned, steps, size, is_scan, share))


def table(measured: Measured) -> None:
    """Print the bytes of every cell, and what plans cost."""
    for key, figures in measured.items():
        if "least_bytes" in figures:
            print(f"{key:36} refused; the least is {mib(figures['least_bytes'])}")
        else:
            cost = ""
            if "flops_ratio" in figures:
                less = figures["plain_bytes"] / figures["bytes"]
                cost = f"  {less:.1f} x less, FLOPs x {figures['flops_ratio']:.3f}"
            print(f"{key:36} {mib(figures['bytes']):>14}{cost}")


def broken(measured: Measured) -> Iterator[str]:
    """Plans that are refused, over their budgets, cost more than they may, or save less than the paper's."""
    for steps, times in LEAST_SAVED.items():
        shared, plan = (measured.get(f"allocator/{steps}/{name}") for name in ("sharing", "sublinear plan"))
        if shared and plan and times * plan["bytes"] > shared["bytes"]:
            less = shared["bytes"] / plan["bytes"]
            yield f"allocator/{steps}/sublinear plan: {less:.1f} x less memory than sharing, not {times} x"
    for key, figures in measured.items():
        if "least_bytes" in figures:
            yield f"{key}: {mib(figures['refused_bytes'])} refused; the least is {mib(figures['least_bytes'])}"
        elif "plain_bytes" in figures:
            account, steps, strategy = key.split("/")
            share = int(strategy.split(" of ")[1])
            yield from over_budget(key, figures["bytes"], figures["plain_bytes"] / share)
            most = MOST_FLOPS.get((int(steps), share)) if account == "unrolled" else None
            if figures["flops_ratio"] > (most or ONE_FORWARD_PASS):
                yield f"{key}: FLOPs x {figures['flops_ratio']:.3f}, more than x {most or ONE_FORWARD_PASS:.2f}"


def draw(measured: Measured, path: Path) -> None:
    """One panel an account, both axes logarithmic, as in the paper."""
    accounts = list(dict.fromkeys(key.split("/")[0] for key in measured))
    fig, axes = plt.subplots(1, len(accounts), figsize=(5 * len(accounts), 4), squeeze=False, layout="constrained")
    for ax, account in zip(axes[0], accounts, strict=True):
        lines: dict[str, dict[int, float]] = {}
        for key, figures in measured.items():
            of, steps, strategy = key.split("/")
            if of == account and "bytes" in figures:
                lines.setdefault(strategy, {})[int(steps)] = figures["bytes"] / 2**20
        shares = sorted((s for s in lines if " of " in s), key=lambda s: int(s.split()[-1]))
        for strategy, sizes in lines.items():
            steps, mibs = zip(*sorted(sizes.items()), strict=True)
            label = f"jaxsub, {strategy.replace(' of ', '/')} of plain" if strategy in shares else strategy
            stroke = STROKES[shares.index(strategy) if strategy in shares else 0]
            ax.loglog(steps, mibs, label=label, ls=stroke, **look(label))
        title = "the paper's allocator" if account == "allocator" else f"compiled by XLA, {account}"
        ax.set(xlabel="steps", title=title, xticks=sorted({step for sizes in lines.values() for step in sizes}))
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.minorticks_off()
        legend(ax)
    axes[0][0].set_ylabel("memory of the gradient (MiB)")
    save(fig, path)
    plt.close(fig)


def main() -> None:
    """Measure what is missing, print the table, draw the picture."""
    figure(
        __doc__,
        HERE.parent / "results" / "paper" / "lstm.json",
        quick=lambda: cells(QUICK_UNROLLED, QUICK_SCANNED, QUICK, QUICK_SHARES),
        full=lambda: cells(UNROLLED, SCANNED, FULL, SHARES, SCANNED_SHARES),
        table=table,
        draw=draw,
        broken=broken,
    )


if __name__ == "__main__":
    main()
