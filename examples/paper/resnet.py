"""Fig. 5 of the paper: memory of a residual network against its depth, on ImageNet-sized images in batches of 32.

Depths grow from 50 to 1001 layers by deepening every stage alike. Two accounts of memory are given for each: the
paper's own allocator, which places every value of the gradient graph (no optimization, inplace, sharing, and sharing
under the plans "drop bn-relu", §4.2, and Algorithm 3), and what XLA allocates for the compiled gradient, plain, under
the same two plans and under `jaxsub`'s own. XLA always works in place and shares, so that its plain gradient stands for
the first three. `jaxsub` is asked for a budget that falls with the root of the depth. On a GPU, where fusion halves
what the plain gradient needs, a small share of it costs more: there 1001 layers are to fit an 18th, on a CPU a 21st.

    python examples/paper/resnet.py            # full sizes, resumed where it was stopped
    python examples/paper/resnet.py --quick    # small images, 14 and 26 layers, under two minutes
    python examples/paper/resnet.py --draw     # the table and the picture again, from the results alone

Nothing is executed: shapes are traced and compiled. A log-log slope of 1 is linear growth, of 1/2 the root's. With
`XLA_FLAGS=--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters` the compiler spends less on machine code
that is never run, 4.0 processor seconds, not 6.5 for the plain gradient of 50 layers, and reports the same bytes and
FLOPs. What then grows with the square of the depth is its check of every pair of operations for shared buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxsub
from jaxsub.allocator import LEAST_NEEDS, STRATEGIES, allocate, gradient_graph
from jaxsub.jaxpr.trace import trace

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "tests")]

import models  # noqa: E402
from drawing import legend, look, save  # noqa: E402
from records import Cell, Measured, figure, mib, over_budget  # noqa: E402

DEPTHS = {
    14: (4,),
    26: (8,),
    50: (3, 4, 6, 3),
    98: (6, 8, 12, 6),
    194: (12, 16, 24, 12),
    386: (24, 32, 48, 24),
    1001: (63, 83, 124, 63),
}
FULL = dict(batch=32, size=224, width=64, classes=1000)
QUICK = dict(batch=4, size=32, width=8, classes=10)
FULL_DEPTHS, QUICK_DEPTHS = (50, 98, 194, 386, 1001), (14, 26)
MOST_FLOPS = 1.25
SHARES = {"cpu": (0.22, 0.52), "h100": (0.24, 0.528)}
"""The share of the plain gradient's memory that 50 layers are to fit, and the power of the depth that it falls by."""
LEAST_SAVED = {("cpu", 1001): 20, ("h100", 1001): 20}
"""How many times less memory than the plain gradient's the deepest network is to need."""
PLANS = {"drop bn-relu": "cheap", "sublinear plan": "chen"}
LESS = (("inplace", "no optimization"), ("sharing", "inplace"), *((plan, "sharing") for plan in PLANS))
"""Pairs of the allocator's strategies: the first of each needs no more than the second."""

PLANNERS = {"plain": "plain", **PLANS}
"""The plain gradient is a plan too: what was compiled for it is remembered, and the other cells compile it no more."""

TARGETS = {"cpu": None, "h100": "h100"}


def network(depth: int, size: dict[str, int]) -> tuple[Any, tuple[Any, ...]]:
    """The loss of a residual network of `depth` layers, and the shapes of its arguments."""
    loss, init = models.resnet(DEPTHS[depth], **size)
    return loss, jax.eval_shape(init, jax.random.key(0))


def allocated(depth: int, size: dict[str, int], strategy: str) -> dict[str, float]:
    """Bytes by the paper's allocator: of the plain gradient graph, or of a plan's under sharing."""
    loss, args = network(depth, size)
    graph, counts = trace(loss, args, {}).graph, ()
    if strategy in PLANS:
        plan = jaxsub.plan(loss, *args, planner=PLANS[strategy], verify=False, progress=False)
        counts, strategy = plan.mirror_counts_in(graph), "sharing"
    strategy = "none" if strategy == "no optimization" else strategy
    return {"bytes": allocate(gradient_graph(graph, counts, needs=LEAST_NEEDS), strategy).total_bytes}


def compiled(depth: int, size: dict[str, int], strategy: str, account: str) -> dict[str, Any]:
    """Bytes and FLOPs by XLA's account: of the plain gradient, or of one that is planned and verified."""
    loss, args = network(depth, size)
    asked: dict[str, Any] = (
        {"budget": share(account, depth)} if strategy == "jaxsub" else {"planner": PLANNERS[strategy]}
    )
    plan = jaxsub.plan(loss, *args, target=TARGETS[account], verify=True, progress=False, **asked)
    found, plain = plan.measurement, plan.plain_measurement
    return {
        "bytes": found.temp_bytes,
        "compile_seconds": found.compile_seconds,
        "plain_bytes": plain.temp_bytes,
        "flops_ratio": found.flops / plain.flops,
        "predicted_bytes": plan.prediction.temp_bytes,
        "regions": plan.n_regions,
    }


def share(account: str, depth: int) -> float:
    """The budget as a share of the plain gradient's memory: it falls about as the root of the depth."""
    at_50, power = SHARES[account]
    return at_50 * (50 / depth) ** power


def cells(
    depths: tuple[int, ...], size: dict[str, int], targets: tuple[str, ...], strategies: tuple[str, ...]
) -> Iterator[Cell]:
    """Every cell of the figure; of `strategies` what is compiled."""
    for depth in depths:
        for strategy in ("no optimization", *STRATEGIES[1:], *PLANS):
            yield Cell(f"allocator/{depth}/{strategy}", partial(allocated, depth, size, strategy))
    for target in targets:
        for depth in depths:
            for strategy in strategies:
                run = partial(compiled, depth, size, strategy, target)
                yield Cell(f"{target}/{depth}/{strategy}", run)


def series(measured: Measured) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Cells by account and strategy, then by depth."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for key, figures in measured.items():
        account, depth, strategy = key.split("/")
        found.setdefault((account, strategy), {})[int(depth)] = figures
    return {line: dict(sorted(by_depth.items())) for line, by_depth in found.items()}


def slope(by_depth: dict[int, dict[str, Any]]) -> float:
    """The exponent β of bytes = α · depth^β."""
    sizes = [figures["bytes"] for figures in by_depth.values()]
    return float(np.polyfit(np.log(list(by_depth)), np.log(sizes), 1)[0]) if len(sizes) > 1 else float("nan")


def table(measured: Measured) -> None:
    """Print bytes by depth, the slope of each line, and what plans cost."""
    for (account, strategy), by_depth in series(measured).items():
        sizes = "  ".join(f"{depth}: {mib(figures['bytes'])}" for depth, figures in by_depth.items())
        print(f"{account:9} {strategy:16} slope {slope(by_depth):5.2f}   {sizes}")
    for (account, strategy), by_depth in series(measured).items():
        for depth, figures in by_depth.items():
            if "plain_bytes" in figures and strategy != "plain":
                less, flops = figures["plain_bytes"] / figures["bytes"], figures["flops_ratio"]
                print(f"{account} {depth} layers, {strategy}: {less:.1f} x less memory, FLOPs x {flops:.3f}")


def broken(measured: Measured) -> Iterator[str]:
    """Plans over their budgets or beyond one extra forward pass, and lines that do not bend as they should."""
    lines = series(measured)
    for (account, strategy), by_depth in lines.items():
        for depth, figures in by_depth.items():
            key = f"{account}/{depth}/{strategy}"
            if strategy == "jaxsub":
                yield from over_budget(key, figures["bytes"], share(account, depth) * figures["plain_bytes"])
                less, aim = figures["plain_bytes"] / figures["bytes"], LEAST_SAVED.get((account, depth), 1)
                if less < aim:
                    yield f"{key}: {less:.1f} x less memory, not {aim} x"
                if figures["flops_ratio"] > MOST_FLOPS:
                    yield f"{key}: FLOPs x {figures['flops_ratio']:.3f}, more than x {MOST_FLOPS}"
        if strategy == "jaxsub" and slope(by_depth) > 0.5:
            yield f"{account}: the slope of {strategy} is {slope(by_depth):.2f}, more than the root's 0.5"
    for better, worse in LESS:
        smaller, larger = lines.get(("allocator", better), {}), lines.get(("allocator", worse), {})
        for depth in smaller.keys() & larger.keys():
            yield from over_budget(f"allocator/{depth}/{better}", smaller[depth]["bytes"], larger[depth]["bytes"])


def draw(measured: Measured, path: Path) -> None:
    """One panel an account, both axes logarithmic, as in the paper."""
    lines = series(measured)
    accounts = list(dict.fromkeys(account for account, _ in lines))
    fig, axes = plt.subplots(
        1, len(accounts), figsize=(5 * len(accounts), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for ax, account in zip(axes[0], accounts, strict=True):
        for (of, strategy), by_depth in lines.items():
            if of == account:
                sizes = [figures["bytes"] / 2**30 for figures in by_depth.values()]
                label = f"{strategy} ({slope(by_depth):.2f})" if len(by_depth) > 1 else strategy
                ax.loglog(list(by_depth), sizes, label=label, **look(strategy))
        title = "the paper's allocator" if account == "allocator" else f"compiled by XLA, {account}"
        ax.set(xlabel="layers", title=title, xticks=list(next(iter(lines.values()))))
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.minorticks_off()
        legend(ax, title="strategy (log-log slope)")
    axes[0][0].set_ylabel("memory of the gradient (GiB)")
    save(fig, path)
    plt.close(fig)


def main() -> None:
    """Measure what is missing, print the table, draw the picture."""
    figure(
        __doc__,
        HERE.parent / "results" / "paper" / "resnet.json",
        quick=lambda: cells(QUICK_DEPTHS, QUICK, ("cpu",), ("plain", "jaxsub")),
        full=lambda: cells(FULL_DEPTHS, FULL, tuple(TARGETS), ("plain", "jaxsub", *PLANS)),
        table=table,
        draw=draw,
        broken=broken,
    )


if __name__ == "__main__":
    main()
