"""Memory against FLOPs: what people use instead, and `jaxsub` under budgets, on the same networks.

For each network one picture, a panel a target: the compiled gradient's memory and FLOPs relative to the plain one's,
every peer a point, `jaxsub` a line through its budgets; and for each panel a table of what `jaxsub` needs in FLOPs at
each peer's memory, in bold where the peer needs less. Where a peer is ahead of the budgets measured, `jaxsub` is asked
for its memory too.

    python examples/peers/frontiers.py                              # all networks; long, resumed where it was stopped
    python examples/peers/frontiers.py --only cpu/vgg-19 cpu/unet   # some of them
    python examples/peers/frontiers.py --target h100                # bfloat16, compiled for a GPU that is not there
    python examples/peers/frontiers.py --quick                      # a tiny network, under two minutes
    python examples/peers/frontiers.py --draw                       # tables and pictures again, from the results alone

Nothing is executed: shapes are traced and compiled. FLOPs are the CPU compiler's count, which is below 1 where making
an elementwise result again spares the program to store and read it; for GPUs and scans, those of products and
convolutions in the traced gradient.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import jaxsub

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from drawing import draw_points, legend, look, save  # noqa: E402
from measuring import ByHand, by_hand, compiled, device, traced_flops, within  # noqa: E402
from networks import NETWORKS, QUICK, Network  # noqa: E402
from peers import by_xla, nested_scan, planners  # noqa: E402
from records import Cell, Measured, fill, keep_table, load, options, over_budget, picked, tell  # noqa: E402

BUDGETS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.8, 0.6, 0.4, 0.25, 0.07, 0.05)
QUICK_BUDGETS = (0.3,)
FEW_BUDGETS = (0.2, 0.1, 0.05)
MANY_BLOCKS = 200
"""Networks of more, whose every compile takes many minutes, are measured under few budgets beside few peers."""

SHARES_OF_XLA = (0.5, 0.2)
"""What XLA's own pass is given, as shares of the plain gradient's memory."""
TOLERANCE = 0.003
"""A plan this little above a peer's FLOPs counts as level with it."""

PUBLISHED = {
    "resnet-50": ("MONeT (Shah et al. 2021), batch 184", 4.99 / 15.06, 1.12),
    "resnet-152": ("OGC (Feng and Huang 2021), batch 16", 0.19, 1.37),
    "densenet-201": ("OGC (Feng and Huang 2021), batch 16", 0.15, 1.53),
}
"""What papers report of these networks: the share of memory that was left, at how many times the plain step's time."""

EXPLAINED = {
    "cpu/densenet-201": "From a quarter of plain's memory on, nothing is recomputed: products and convolutions of "
    "the traced gradient are those of the plain one. A percent of FLOPs between these plans, and between them and "
    "convolutions saved, is elementwise arithmetic that XLA's fusions do in more than one place, most of all in the "
    "plain gradient.",
    "h100/resnet-1001": "Recursive halving is not compiled: its gradient executes 2.759 of plain's FLOPs, as traced, "
    "and its compile was given up after an hour beside others.",
}
"""Why a peer seems ahead of some plan of ours, or is not measured."""

Point = tuple[float, float]


def wrapped(network: Network, target: str, peer: ByHand | None) -> dict[str, Any]:
    """A network as it is, or wrapped by hand."""
    loss, args = network.shapes(**({} if peer is None else dict(wrap=peer.wrap, every=peer.every)))
    return compiled(loss, args, device(target), traced_flops)


def scanned(network: Network, target: str) -> dict[str, Any]:
    """A network's blocks in Haliax's nested scan; its FLOPs beside those of a plain scan, loops with their lengths."""
    plain, nested = (network.shapes(scan=scan) for scan in (jax.lax.scan, nested_scan))
    found = jaxsub.measure(nested[0], *nested[1], target=device(target))
    return {"bytes": found.temp_bytes, "flops_ratio": traced_flops(*nested) / traced_flops(*plain)}


def squeezed(network: Network, target: str, share: float) -> dict[str, Any]:
    """The plain network on a GPU so small that XLA's own pass runs."""
    return by_xla(*network.shapes(), target, share)


def planned(network: Network, target: str, **asked: Any) -> dict[str, Any]:
    """A network under a planner of a peer; barriers are taken away."""
    loss, args = network.shapes()
    plan = jaxsub.plan(loss, *args, target=device(target), verify=False, progress=False, **asked)
    fun = jaxsub.sublinear(loss, plan=plan.replace(barriers=()))
    return compiled(fun, args, device(target), traced_flops)


def budgeted(network: Network, target: str, budget: float) -> dict[str, Any]:
    """A network under a budget; what the least is where that is refused."""
    return within(*network.shapes(), budget, device(target), traced_flops)


def cells(network: Network, target: str, budgets: tuple[float, ...]) -> Iterator[Cell]:
    """Every cell of a network's picture."""
    name = f"{target}/{network.name}"
    yield Cell(f"{name}/peer/plain", partial(wrapped, network, target, None))
    for budget in budgets:
        yield Cell(f"{name}/jaxsub/{budget}", partial(budgeted, network, target, budget))
    for peer in by_hand(network.n_blocks, network.is_convolutional):
        yield Cell(f"{name}/peer/{peer.label}", partial(wrapped, network, target, peer))
    yield Cell(f"{name}/peer/Chen et al., greedy", partial(planned, network, target, planner="chen"))
    for label, planner in planners(network.n_blocks):
        yield Cell(f"{name}/peer/{label}", partial(planned, network, target, planner=planner))
    if network.is_scannable:
        yield Cell(f"{name}/peer/Haliax, nested scan", partial(scanned, network, target))
    for share in () if target == "cpu" else SHARES_OF_XLA:
        yield Cell(f"{name}/peer/XLA's own, in {share:.0%}", partial(squeezed, network, target, share))


def asked_for(network: Network, target: str, is_quick: bool) -> list[Cell]:
    """The cells of a network to measure: all, or few budgets and one or two peers of each family."""
    if not is_quick and network.n_blocks <= MANY_BLOCKS:
        return list(cells(network, target, BUDGETS))
    peers = ("plain", "every 1", "recursive", "convolutions", "dots_saveable", "Chen", "PyTorch, 50%", "Haliax",
             f"Alpa, {math.isqrt(network.n_blocks)} layers", "XLA's own, in 50%")  # fmt: skip
    starts = ("jaxsub", *(f"peer/{label}" for label in peers))
    found = cells(network, target, QUICK_BUDGETS if is_quick else FEW_BUDGETS)
    return [cell for cell in found if cell.key.split("/", 2)[2].startswith(starts)]


def answers(measured: Measured, network: Network, target: str) -> Iterator[Cell]:
    """What `jaxsub` does in the memory of each peer that is ahead of it: its budgets may lie on either side."""
    name = f"{target}/{network.name}"
    peers, ours = relative(measured, name) if f"{name}/peer/plain" in measured else ({}, [])
    budgets = {math.ceil(1e4 * peers[label][0]) / 1e4 for label in ahead(peers, ours)}
    for budget in sorted(budgets, reverse=True):
        yield Cell(f"{name}/jaxsub/{budget}", partial(budgeted, network, target, budget))


def relative(measured: Measured, name: str) -> tuple[dict[str, Point], list[Point]]:
    """Peers by label, and the points of `jaxsub`, as shares of the plain gradient's memory and FLOPs."""
    plain = measured[f"{name}/peer/plain"]
    points = {
        key.removeprefix(f"{name}/"): (found["bytes"] / plain["bytes"], flops_ratio(found, plain))
        for key, found in measured.items()
        if key.startswith(f"{name}/") and "bytes" in found
    }
    peers = {key.removeprefix("peer/"): point for key, point in points.items() if key.startswith("peer/")}
    return peers, sorted(point for key, point in points.items() if key.startswith("jaxsub/"))


def flops_ratio(found: dict[str, Any], plain: dict[str, Any]) -> float:
    """FLOPs as a multiple of the plain gradient's."""
    return found["flops_ratio"] if "flops_ratio" in found else found["flops"] / plain["flops"]


def flops_at(ours: list[Point], memory: float) -> float | None:
    """The fewest FLOPs of our points that need no more than this memory; `None` where none does."""
    return min((flops for need, flops in ours if need <= memory * (1 + TOLERANCE)), default=None)


def memory_at(ours: list[Point], flops: float) -> float | None:
    """The least memory of our points that execute no more than these FLOPs; `None` where none does."""
    return min((need for need, cost in ours if cost <= flops * (1 + TOLERANCE)), default=None)


def ahead(peers: dict[str, Point], ours: list[Point]) -> list[str]:
    """The peers at whose memory `jaxsub` executes more, or which need less than it was seen to."""
    found = {label: flops_at(ours, memory) for label, (memory, _) in peers.items()} if ours else {}
    return [label for label, own in found.items() if own is None or own > peers[label][1] + TOLERANCE]


def names(measured: Measured) -> list[str]:
    """The networks of the results, with their targets, that have a plain cell."""
    return [key.removesuffix("/peer/plain") for key in measured if key.endswith("/peer/plain")]


def table(measured: Measured) -> None:
    """Print each peer's point beside ours at its memory; bold where the peer is ahead."""
    for name in names(measured):
        peers, ours = relative(measured, name)
        bold = ahead(peers, ours)
        print(f"\n{name}\n| peer | memory | FLOPs | jaxsub, FLOPs at that memory |\n|---|---|---|---|")
        for label, (memory, flops) in sorted(peers.items(), key=lambda peer: -peer[1][0]):
            own = flops_at(ours, memory)
            cell = f"{own:.3f}" if own is not None else "needs more" if ours else "not measured yet"
            print(f"| {label} | {memory:.3f} | {flops:.3f} | {f'**{cell}**' if label in bold else cell} |")
        if published := PUBLISHED.get(name.split("/")[1]):
            label, memory, times = published
            own = memory_at(ours, times)
            beside = "none measured" if own is None else f"memory {own:.3f} at FLOPs of at most {times:.2f}"
            print(f"| {label} | {memory:.3f} | {times:.3f} (time) | {beside} |")
        print("| jaxsub | " + " · ".join(f"{memory:.3f} at {flops:.3f}" for memory, flops in ours) + " | | |")
        if name in EXPLAINED:
            print(f"\n{EXPLAINED[name]}")


def broken(measured: Measured) -> Iterator[str]:
    """Plans over their budgets, and peers that need less of both memory and FLOPs than one of our points."""
    for name in names(measured):
        plain = measured[f"{name}/peer/plain"]["bytes"]
        for key, found in measured.items():
            if key.startswith(f"{name}/jaxsub/") and "bytes" in found:
                yield from over_budget(key, found["bytes"], float(key.split("/")[-1]) * plain)
        peers, ours = relative(measured, name)
        for own_memory, own_flops in ours:
            for label, (memory, flops) in peers.items():
                if memory <= own_memory and flops < own_flops - TOLERANCE:
                    told = f"needs {memory:.3f} at {flops:.3f}, jaxsub {own_memory:.3f} at {own_flops:.3f}"
                    yield f"{name}: {label} {told}"


def draw(measured: Measured, folder: Path) -> list[Path]:
    """One picture a network, its targets side by side."""
    panels: dict[str, list[str]] = {}
    for name in names(measured):
        peers, ours = relative(measured, name)
        if ours or len(peers) > 1:  # more than the plain one, with which all is compared
            panels.setdefault(name.split("/")[1], []).append(name)
    paths = [folder / f"{network}.png" for network in panels]
    for path, wanted in zip(paths, panels.values(), strict=True):
        fig, axes = plt.subplots(1, len(wanted), figsize=(7.5 * len(wanted), 5.5), squeeze=False, layout="constrained")
        for ax, name in zip(axes[0], wanted, strict=True):
            panel(ax, name, *relative(measured, name))
        save(fig, path)
        plt.close(fig)
    return paths


def panel(ax: Axes, name: str, peers: dict[str, Point], ours: list[Point]) -> None:
    """The peers of a network on one target as points, and `jaxsub` as a line."""
    memory, flops = zip(*ours, strict=True) if ours else ((), ())
    ax.plot(memory, flops, label="jaxsub", zorder=3, **look("jaxsub"))
    target, network = name.split("/")
    dtype = "float32" if target == "cpu" else "bfloat16"
    ax.set(xlabel="memory (1 = plain)", ylabel="FLOPs (1 = plain)", title=f"{network}, {target}, {dtype}")
    draw_points(ax, peers)
    legend(ax)


def main() -> None:
    """Measure what is missing, print the tables, draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu", help='"cpu" (float32) or a GPU (bfloat16), such as "h100"')
    chosen = options(parser, HERE.parent / "results" / "peers")
    path = chosen.out / "frontiers.json"
    if not chosen.draw:
        jax.config.update("jax_platforms", "cpu")  # GPUs are compiled for, never used
        dtype = jnp.float32 if chosen.target == "cpu" else jnp.bfloat16
        sized = [replace(network, dtype=dtype) for network in (QUICK if chosen.quick else NETWORKS)]
        asked = [cell for network in sized for cell in asked_for(network, chosen.target, chosen.quick)]
        fill(path, picked(asked, chosen.only), chosen.minutes, chosen.anew)
        found = {} if chosen.quick else load(path)
        more = [cell for network in sized for cell in answers(found, network, chosen.target)]
        fill(path, picked(more, chosen.only), chosen.minutes)
    measured = load(path)
    keep_table(table, measured, path.with_suffix(".md"))
    print("\npictures: " + ", ".join(str(picture) for picture in draw(measured, chosen.out)))
    tell(list(broken(measured)), is_check=chosen.quick)


if __name__ == "__main__":
    main()
