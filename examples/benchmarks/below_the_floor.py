"""Below the floor: what recomputation alone cannot meet, a language model's loss head, MLPs and scores in slices.

Llama-3.2-1B's sizes as people train it (`examples/league/decoder.py`): 16 layers in a scan, 128,256 words, batch
4 x 4096, bf16 compute, f32 weights, value and gradient of the loss, for an H100 that is not there. By hand what
`jax.checkpoint` round the scan's body gives; then `jaxsub` at memories far below, with cuDNN's attention, and with
XLA's, whose scores are materialised. FLOPs are those of the traced gradient's products, kernels of attention apart.

    python examples/benchmarks/below_the_floor.py                       # all; resumed where it was stopped
    python examples/benchmarks/below_the_floor.py --only cudnn/13        # one of them
    python examples/benchmarks/below_the_floor.py --quick               # a toy on the CPU, under two minutes

Nothing is executed. cuDNN's attention needs `pip install "jaxsub[targets-cudnn]"`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "league"), str(HERE.parent)]

from decoder import loss_of, shapes  # noqa: E402
from policies import SIZES, WHOLE, Size  # noqa: E402
from records import Cell, Measured, over_budget, run_cells  # noqa: E402

import jaxsub  # noqa: E402
from jaxsub.jaxpr.flops import bodies_of, flops_of  # noqa: E402

GIB, TOLERANCE, LEAST = 2**30, 0.006, "dots_with_no_batch_dims_saveable"
PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True, slots=True)
class Goal:
    """A memory that is to be met, and the policy whose FLOPs are not to be exceeded there; `None` for any."""

    n_bytes: int
    policy: str | None = None


GOALS = {
    "cudnn": (Goal(13 * GIB, LEAST), Goal(3 * GIB, WHOLE), Goal(2 * GIB)),
    "xla": (Goal(6 * GIB),),
}
QUICK = {"xla": (Goal(2 * 2**20, WHOLE),)}


def product_flops(jaxpr: Any) -> float:
    """FLOPs of all products in a jaxpr, loops with their lengths."""
    found = 0.0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = sum(map(product_flops, bodies_of(eqn)))
        found += flops_of(eqn).arithmetic_flops if eqn.primitive.name in PRODUCTS else times * inner
    return found


def figures(measured: jaxsub.Measurement, fun: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Bytes, and FLOPs of a gradient's products."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fun))(*args).jaxpr
    jaxpr = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return {"bytes": measured.temp_bytes, "flops": product_flops(jaxpr)}


def hand(size: Size, policy: str, target: str) -> dict[str, Any]:
    """A policy by hand."""
    fun, args = loss_of(size, policy), shapes(size)
    return figures(jaxsub.measure(fun, *args, target=target), fun, args)


def ours(size: Size, budget: int, target: str) -> dict[str, Any]:
    """`jaxsub` under a memory."""
    fun, args = loss_of(size), shapes(size)
    try:
        plan = jaxsub.plan(fun, *args, budget=budget, target=target, progress=False, cache=False)
    except jaxsub.InfeasibleBudgetError as refusal:
        return {"budget_bytes": budget, "least_bytes": refusal.least_bytes}
    runs = [f"{run.label}: {run.count} × {run.size} of {run.length}" for run in plan.slices]
    found = figures(plan.measurement, jaxsub.sublinear(fun, plan=plan), args)
    return {**found, "budget_bytes": budget, "planner": plan.planner, "slices": runs}


def cells(is_quick: bool) -> Iterator[Cell]:
    """By hand, then `jaxsub`."""
    name, target = ("toy", "cpu") if is_quick else ("llama3.2-1b", "h100")
    for attention, goals in (QUICK if is_quick else GOALS).items():
        size = replace(SIZES[name], attention=attention)
        for policy in dict.fromkeys((WHOLE, *(goal.policy for goal in goals if goal.policy))):
            yield Cell(f"{attention}/{policy}", partial(hand, size, policy, target))
        for goal in goals:
            yield Cell(f"{attention}/{goal.n_bytes / GIB:.4g} GiB", partial(ours, size, goal.n_bytes, target))


def broken(measured: Measured) -> list[str]:
    """Goals that are not met."""
    found = []
    for attention, goals in (*GOALS.items(), *QUICK.items()):
        for goal in goals:
            key = f"{attention}/{goal.n_bytes / GIB:.4g} GiB"
            if (cell := measured.get(key)) is None:
                continue
            if "flops" not in cell:
                found.append(f"{key} is refused, least {cell['least_bytes'] / GIB:.3g} GiB")
                continue
            found += over_budget(key, cell["bytes"], goal.n_bytes)
            most = (1 + TOLERANCE) * measured[f"{attention}/{goal.policy}"]["flops"] if goal.policy else cell["flops"]
            found += [f"{key} executes more than {goal.policy}"] if cell["flops"] > most else []
    return found


def table(measured: Measured) -> None:
    """Print a row a cell."""
    print("| attention / by hand, or memory | GiB | T FLOPs of products | in slices |\n|---|---|---|---|")
    for key, cell in measured.items():
        if "flops" in cell:
            runs = "; ".join(cell.get("slices", ()))
            print(f"| {key} | {cell['bytes'] / GIB:.3g} | {cell['flops'] / 1e12:.4g} | {runs} |")
        else:
            print(f"| {key} | **refused: {cell['least_bytes'] / GIB:.3g}** | | |")


if __name__ == "__main__":
    run_cells(__doc__, HERE.parent / "results" / "below_the_floor", cells, table, broken)
