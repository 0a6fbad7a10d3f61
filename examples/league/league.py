"""The league: policies that people write by hand for language models, and `jaxsub` at the memory of each.

For each model a table and a panel of one picture: temporaries of the compiled gradient, FLOPs of its trace (products
and attention), seconds by roofline; every policy a point, `jaxsub` the line. Where `jaxsub` refuses a policy's memory,
or takes over half a percent more FLOPs there, the cell is bold: that is a bug. The last column says how long a plan
takes: its processor seconds over those in which the plain gradient is traced, lowered and compiled.

    python examples/league/league.py --only llama3.2-1b     # one model, for an H100 that is not there
    python examples/league/league.py --hands                # the policies alone: a compile each
    JAX_PLATFORMS=cpu python examples/league/league.py --target h100:8 --only llama3-8b     # weights split over eight
    python examples/league/league.py --quick                # a toy on the CPU, under two minutes
    python examples/league/league.py --draw                 # table and picture again, from the results alone

Nothing is executed. cuDNN's attention needs `pip install "jaxsub[targets-cudnn]"`.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding, PartitionSpec

import jaxsub

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from decoder import loss_of, shapes  # noqa: E402
from drawing import draw_points, legend, look, save  # noqa: E402
from measuring import processor_seconds  # noqa: E402
from policies import PLAIN, POLICIES, SIZES, WHOLE, Size  # noqa: E402
from records import Cell, Measured, fill, keep_table, load, options, over_budget, picked, tell  # noqa: E402

from jaxsub.costs.roofline import eqns_seconds  # noqa: E402
from jaxsub.devices.targets import get_target  # noqa: E402
from jaxsub.jaxpr.flops import jaxpr_flops  # noqa: E402

Figures = dict[str, Any]
GIB, TOLERANCE = 2**30, 0.005
OURS = "jaxsub at "
XLA, XLA_SHARE = "XLA's own rematerialisation", 0.76
"""XLA rematerialises where a program needs more than this share of its device (80 % less a slop of 5 %)."""
QUICK = (PLAIN, WHOLE, "maxtext save_qkv_proj")


def figures(measured: jaxsub.Measurement, fun: Any, args: tuple[Any, ...], target: str) -> dict[str, Any]:
    """Bytes, FLOPs and seconds of a gradient."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fun))(*args).jaxpr
    jaxpr = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return {
        "bytes": measured.temp_bytes,
        "flops": jaxpr_flops(jaxpr).arithmetic_flops,
        "seconds": eqns_seconds(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, get_target(target)),
        "compile_seconds": measured.compile_seconds,
    }


def arguments(size: Size, target: str) -> tuple[Any, ...]:
    """Shapes of weights and tokens; over several devices weights are split along their widest axes, tokens by batch."""
    weights, tokens = shapes(size)
    device = get_target(target)
    if device.n_devices == 1:
        return weights, tokens
    mesh = device.mesh((device.n_devices // size.tensor, size.tensor), ("fsdp", "tensor"))

    def split(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shared = (size.heads, size.kv_heads, size.mlp, size.words) if size.tensor > 1 else ()
        tensor = next((i for i, n in enumerate(leaf.shape) if n in shared and (i or n != size.layers)), None)
        axes = [i for i, n in enumerate(leaf.shape) if i != tensor and n % mesh.shape["fsdp"] == 0]
        fsdp = max(axes[len(axes) > 1 :], key=lambda i: leaf.shape[i])  # layers are stacked along the first
        names = {tensor: "tensor", fsdp: "fsdp"}
        return placed(leaf, *(names.get(i) for i in range(len(leaf.shape))))

    def placed(leaf: jax.ShapeDtypeStruct, *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(split, weights), placed(tokens, "fsdp")


def hand(size: Size, policy: str, target: str) -> dict[str, Any]:
    """A policy, measured."""
    fun, args = loss_of(size, policy), arguments(size, target)
    began = processor_seconds()
    measured = jaxsub.measure(fun, *args, target=target)
    seconds = processor_seconds() - began
    return {**figures(measured, fun, args, target), "processor_seconds": seconds}


def by_xla(size: Size, target: str, path: Path, key: str) -> dict[str, Any]:
    """XLA's own rematerialisation: nothing recomputed by hand, for a device that has room for what `full` takes.

    FLOPs are those of the program that XLA is given: what it recomputes by itself is not in them.
    """
    fun, args, device = loss_of(size), arguments(size, target), get_target(target)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args)) / device.n_devices
    n_bytes = int((2 * weights + load(path)[key]["bytes"]) / XLA_SHARE)  # weights, and gradients of their size
    spec = re.sub(r"device_memory_size: \d+", f"device_memory_size: {n_bytes}", str(device.spec))
    return figures(jaxsub.measure(fun, *args, target=replace(device, spec=spec)), fun, args, target)


def ours(size: Size, policy: str, target: str, path: Path, key: str) -> dict[str, Any]:
    """`jaxsub` under the memory that a policy needs."""
    fun, args, budget = loss_of(size), arguments(size, target), load(path)[key]["bytes"]
    began = processor_seconds()
    try:
        plan = jaxsub.plan(fun, *args, budget=budget, target=target, cache=False, progress=False)
    except jaxsub.InfeasibleBudgetError as refusal:
        return {"budget_bytes": budget, "least_bytes": refusal.least_bytes}
    seconds = processor_seconds() - began
    found = figures(plan.measurement, jaxsub.sublinear(fun, plan=plan), args, target)
    return {**found, "budget_bytes": budget, "planner": plan.planner, "processor_seconds": seconds}


def cells(name: str, target: str, path: Path, policies: tuple[str, ...], is_hands: bool) -> Iterator[Cell]:
    """The policies of one model, then `jaxsub` at the memory of each."""
    n_devices = get_target(target).n_devices
    if SIZES[name].tensor > n_devices:
        return
    size = SIZES[name] if n_devices == 1 else replace(SIZES[name], batch=n_devices)
    for policy in policies:
        yield Cell(f"{name}/{target}/{policy}", partial(hand, size, policy, target))
    if get_target(target).spec is not None:
        yield Cell(f"{name}/{target}/{XLA}", partial(by_xla, size, target, path, f"{name}/{target}/{WHOLE}"))
    for policy in () if is_hands else policies[1:]:
        key = f"{name}/{target}/{policy}"
        yield Cell(f"{name}/{target}/{OURS}{policy}", partial(ours, size, policy, target, path, key))


def groups(measured: Measured) -> dict[tuple[str, str], Measured]:
    """The cells of each model and target, by policy."""
    found: dict[tuple[str, str], Measured] = {}
    for key, cell in measured.items():
        name, target, policy = key.split("/", 2)
        found.setdefault((name, target), {})[policy] = cell
    return found


def is_behind(cell: dict[str, Any], by_hand: dict[str, Any]) -> bool:
    """Whether `jaxsub` refused a policy's memory or executes more there."""
    return "flops" not in cell or cell["flops"] > (1 + TOLERANCE) * by_hand["flops"]


def table(measured: Measured) -> None:
    """Print a table a model."""
    for (name, target), found in groups(measured).items():
        plain, compile_seconds = found[PLAIN]["flops"], found[PLAIN].get("processor_seconds")
        print(
            f"\n### {name}, {target}\n\n"
            "| policy | GiB | FLOPs | seconds by roofline | jaxsub: GiB | FLOPs | seconds | planning |"
        )
        print("|---|---|---|---|---|---|---|---|")
        hands = {policy: cell for policy, cell in found.items() if not policy.startswith(OURS)}
        for policy, cell in sorted(hands.items(), key=lambda item: -item[1]["bytes"]):
            row = f"| {policy} | {cell['bytes'] / GIB:.3g} | {cell['flops'] / plain:.3f} | {cell['seconds']:.3g} | "
            print(row + _ours_words(found.get(OURS + policy), cell, plain, compile_seconds))
        took = [cell["processor_seconds"] for p, cell in found.items() if OURS in p and "processor_seconds" in cell]
        if took and compile_seconds:
            print(f"\nplanning: median {statistics.median(took) / compile_seconds:.1f} plain compiles")


def _ours_words(
    cell: dict[str, Any] | None, by_hand: dict[str, Any], plain: float, compile_seconds: float | None
) -> str:
    if cell is None:
        return "| | | |"
    if "flops" not in cell:
        return f"**refused: {cell['least_bytes'] / GIB:.3g}** | | | |"
    flops = f"{cell['flops'] / plain:.3f}"
    flops = f"**{flops}**" if is_behind(cell, by_hand) else flops
    took = cell.get("processor_seconds")
    wait = f"{took / compile_seconds:.1f}" if compile_seconds and took else ""
    return f"{cell['bytes'] / GIB:.3g} | {flops} | {cell['seconds']:.3g} | {wait} |"


def draw(measured: Measured, path: Path) -> None:
    """Draw a panel a model: policies as points, `jaxsub` as a line."""
    found = groups(measured)
    n_rows = -(-len(found) // 2)
    figure, axes = plt.subplots(n_rows, 2, figsize=(15, 4.8 * n_rows), squeeze=False, layout="constrained")
    for ax in axes.flat[len(found) :]:
        ax.remove()
    for ax, ((name, target), group) in zip(axes.flat, found.items(), strict=False):
        plain = group[PLAIN]["flops"]
        hands = [(policy, cell) for policy, cell in group.items() if not policy.startswith(OURS)]
        line = sorted((c["bytes"], c["flops"]) for p, c in group.items() if p.startswith(OURS) and "flops" in c)
        if line:
            ax.plot([b / GIB for b, _ in line], [f / plain for _, f in line], label="jaxsub", **look("jaxsub"))
            legend(ax)
        ax.set(title=f"{name}, {target}", xlabel="temporaries, GiB", ylabel="FLOPs, plain = 1", xscale="log")
        draw_points(ax, {policy: (cell["bytes"] / GIB, cell["flops"] / plain) for policy, cell in hands})
    save(figure, path)
    plt.close(figure)


def broken(measured: Measured) -> list[str]:
    """Cells where by hand is ahead."""
    found = []
    for key, cell in measured.items():
        if OURS not in key:
            continue
        policy = measured[key.replace(OURS, "")]
        if is_behind(cell, policy):
            found.append(f"{key}: by hand is ahead")
        found += over_budget(key, cell.get("bytes", 0), cell["budget_bytes"])
    return found


def main() -> None:
    """Read the command line; measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="h100", help="what to compile for (default: h100)")
    parser.add_argument("--hands", action="store_true", help="the policies alone, without jaxsub")
    chosen = options(parser, HERE.parent / "results" / "league")
    path = chosen.out / "league.json"
    if not chosen.draw:
        names = ["toy"] if chosen.quick else [name for name in SIZES if name != "toy"]
        target, policies = ("cpu", QUICK) if chosen.quick else (chosen.target, POLICIES)
        asked = [cell for name in names for cell in cells(name, target, path, policies, chosen.hands)]
        fill(path, picked(asked, chosen.only), chosen.minutes, chosen.anew)
    measured = load(path)
    if not measured:
        raise SystemExit(f"{path} holds no results: run this without --draw first")
    keep_table(table, measured, path.with_suffix(".md"))
    draw(measured, path.with_suffix(".png"))
    print(f"results: {path}, table: {path.with_suffix('.md')}, picture: {path.with_suffix('.png')}")
    tell(broken(measured), is_check=chosen.quick)


if __name__ == "__main__":
    main()
