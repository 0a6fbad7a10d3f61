"""Checkmate's table: the largest batch whose training step fits 16 GB, at most one extra forward pass allowed.

Jain et al. (MLSys 2020, Fig. 6) trained VGG-19, MobileNet and U-Net on a GPU of 16 GB: without checkpoints, with
segments of √n blocks, with Chen et al.'s greedy segments, and with their own integer program. Here the same networks
are compiled, in float32 for the CPU: parameters, gradients, images and temporary memory together must fit. Memory
grows about linearly with the batch; so lines through what was compiled say where to look, until the next larger batch
is known not to fit.

    python examples/peers/batches.py                      # all networks, resumed where it was stopped
    python examples/peers/batches.py --only vgg-19        # one of them
    python examples/peers/batches.py --quick              # a small network in 64 MB, under two minutes
    python examples/peers/batches.py --draw               # the table and the picture again, from the results alone

Batches of different frameworks and devices are not alike; their ratios to the batch without checkpoints are.
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
from jaxsub.core.measurement import Measurement
from jaxsub.jaxpr.trace import trace
from jaxsub.step.max_batch import largest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from drawing import legend, look, save  # noqa: E402
from measuring import ONE_FORWARD_PASS  # noqa: E402
from networks import NETWORKS, QUICK, Network  # noqa: E402
from records import Cell, Measured, figure  # noqa: E402

MEMORY, QUICK_MEMORY = 16 * 10**9, 64 * 10**6
NAMES = ("vgg-19", "mobilenet", "unet", "resnet-50")
WAYS = ("no checkpoints", "√n segments", "Chen et al., greedy", "jaxsub")
PLANNED: dict[str, dict[str, Any]] = {
    "Chen et al., greedy": dict(planner="chen", verify=False),
    "jaxsub": dict(verify=True),  # without a budget: the least memory that at most one extra forward pass can buy
}
CHECKMATE = {"vgg-19": dict(zip(WAYS, (167, 197, 266, 289), strict=True))} | {
    name: {"jaxsub": batch} for name, batch in (("mobilenet", 1105), ("unet", 57), ("resnet-50", 193))
}
"""What the paper reports of all four; its own program, at least, stands where `jaxsub` stands here."""


def measured(
    network: Network, way: str, batch: int, plan: jaxsub.Plan | None
) -> tuple[Measurement, jaxsub.Plan | None]:
    """What the compiler allocates for a batch, under one way of four, and the plan for it.

    A plan made for another batch is carried over: the programs differ in nothing but that size.
    """
    by_hand = dict(wrap=jax.checkpoint, every=math.isqrt(network.n_blocks)) if way == "√n segments" else {}
    loss, args = network.resized(batch=batch).shapes(**by_hand)
    if way not in PLANNED:
        return jaxsub.measure(loss, *args), None
    if plan is None:
        plan = jaxsub.plan(loss, *args, progress=False, **PLANNED[way])
        if way != "jaxsub":
            plan = plan.replace(barriers=())
    plan = plan.replace(fingerprint=trace(loss, args, {}).fingerprint)
    return jaxsub.measure(jaxsub.sublinear(loss, plan=plan), *args), plan


def total_bytes(found: Measurement) -> int:
    """Everything that a step holds: parameters and images, gradients, temporary memory."""
    return found.argument_bytes + found.output_bytes + found.temp_bytes - found.alias_bytes


def searched(network: Network, way: str, memory: int) -> dict[str, Any]:
    """The largest batch of a network under one way, and what it executes for each image."""
    found: dict[int, Measurement] = {}
    plan: jaxsub.Plan | None = None

    def bytes_at(batch: int) -> int:
        nonlocal plan
        if batch not in found:
            found[batch], plan = measured(network, way, batch, plan)
        return total_bytes(found[batch])

    first = max(1, network.size["batch"] // 4)
    batch = largest(bytes_at, memory, unit=1, known=first if bytes_at(first) <= memory else 0)
    return {
        "batch": batch,
        "bytes": bytes_at(batch) if batch else None,
        "flops_per_image": found[batch].flops / batch if batch else None,
        "tried": {str(n): bytes_at(n) for n in sorted(found)},
    }


def cells(networks: list[Network], memory: int) -> Iterator[Cell]:
    """Every cell of the table."""
    for network in networks:
        for way in WAYS:
            yield Cell(f"{network.name}/{way}", partial(searched, network, way, memory))


def rows(stored: Measured) -> dict[str, dict[str, dict[str, Any]]]:
    """Cells by network, then by way."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for key, figures in stored.items():
        name, way = key.split("/")
        found.setdefault(name, {})[way] = figures
    return found


def table(stored: Measured) -> None:
    """Print batches, their ratios to the plain one's, FLOPs for each image, and Checkmate's."""
    print("| network | | largest batch | ratio | FLOPs per image | Checkmate: batch | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, by_way in rows(stored).items():
        plain, theirs = by_way.get(WAYS[0]), CHECKMATE.get(name, {})
        for way, own in sorted(by_way.items(), key=lambda item: WAYS.index(item[0])):
            ratios = " | "
            if plain and own["batch"] and plain["batch"]:
                more, flops = (own[what] / plain[what] for what in ("batch", "flops_per_image"))
                ratios = f"{more:.2f} | {flops:.3f}"
            beside = f"{theirs.get(way, '')} | " + (f"{theirs[way] / theirs[WAYS[0]]:.2f}" if WAYS[0] in theirs else "")
            print(f"| {name} | {way} | {own['batch']} | {ratios} | {beside} |")


def broken(stored: Measured) -> Iterator[str]:
    """Networks of which another way fits a larger batch than `jaxsub`, or its own step executes too much."""
    for name, by_way in rows(stored).items():
        plain, own = by_way.get(WAYS[0]), by_way.get("jaxsub")
        for way, found in by_way.items() if own else ():
            if found["batch"] > own["batch"]:
                yield f"{name}: a batch of {found['batch']} with {way}, {own['batch']} with jaxsub"
        if plain and own and own["flops_per_image"] > ONE_FORWARD_PASS * plain["flops_per_image"]:
            yield f"{name}: more than one extra forward pass"


def draw(stored: Measured, path: Path) -> None:
    """Bars of the ratios to the batch without checkpoints."""
    found = {name: by_way for name, by_way in rows(stored).items() if by_way.get(WAYS[0], {}).get("batch")}
    fig, ax = plt.subplots(figsize=(1.5 + 2 * max(len(found), 1), 4), layout="constrained")
    for i, way in enumerate(WAYS):
        shown = [(x, by_way) for x, by_way in enumerate(found.values()) if way in by_way]
        heights = [by_way[way]["batch"] / by_way[WAYS[0]]["batch"] for _, by_way in shown]
        bars = ax.bar([x + 0.2 * (i - 1.5) for x, _ in shown], heights, 0.19, color=look(way)["color"], label=way)
        ax.bar_label(bars, fmt="%.1f", fontsize="small")
    ax.set(xticks=range(len(found)), xticklabels=list(found), ylabel="largest batch (1 = no checkpoints)")
    legend(ax)
    save(fig, path)
    plt.close(fig)


def main() -> None:
    """Measure what is missing, print the table, draw the picture."""
    by_name = {network.name: network for network in NETWORKS}
    figure(
        __doc__,
        HERE.parent / "results" / "peers" / "batches.json",
        quick=lambda: cells([network.resized(batch=16) for network in QUICK], QUICK_MEMORY),
        full=lambda: cells([by_name[name] for name in NAMES], MEMORY),
        table=table,
        draw=draw,
        broken=broken,
        suffix=".md",
    )


if __name__ == "__main__":
    main()
