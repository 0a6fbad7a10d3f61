"""What slices cost and spare on a CPU: step time beside the plain step, and the least memory of the peers' networks.

`time`: value and gradient of a program under a quarter of the memory that full recomputation needs, against the plain
one. Both run in turn; the figure is the median of the ratios of neighbours, which a busy machine disturbs least.
`least`: the smallest budget that is met without slices and with them (`chunks="auto"`), each verified by a compile.

    python examples/benchmarks/in_slices.py                             # all; resumed where it was stopped
    python examples/benchmarks/in_slices.py --only time                 # step times
    python examples/benchmarks/in_slices.py --quick                     # toys, under two minutes
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "peers"), str(HERE.parent)]

from networks import NETWORKS, QUICK, Network  # noqa: E402
from records import MIB, Cell, Measured, over_budget, run_cells  # noqa: E402

import jaxsub  # noqa: E402

ROUNDS, MOST, SHARE = 15, 1.05, 4
"""Pairs of steps, the most that a step may take of plain's time, and the part of full recomputation's memory."""

SLOW_IN_LOOPS = ("stem",)
"""Programs whose gradients hold convolutions: XLA's CPU compiler makes those fast outside of loops only."""

Args = tuple[Any, ...]
Made = tuple[Callable[..., jax.Array], Args]


def head(rows: int, width: int, classes: int) -> Made:
    """Three layers and a loss over many classes."""
    keys = random.split(random.key(0), 3)
    weights = random.normal(keys[0], (3, width, width)) / width**0.5, random.normal(keys[1], (width, classes)) / 16

    def loss(weights: Args, x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in weights[0]:
            x = jnp.tanh(x @ w)
        logits = x @ weights[1]
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()

    return loss, (weights, random.normal(keys[2], (rows, width)), jnp.arange(rows) % classes)


def mlp(rows: int, width: int, hidden: int) -> Made:
    """Two layers with a wide hidden layer between them."""
    keys = random.split(random.key(0), 3)
    weights = random.normal(keys[0], (width, hidden)) / width**0.5, random.normal(keys[1], (hidden, width)) / hidden

    def loss(weights: Args, x: jax.Array) -> jax.Array:
        return jnp.mean((x + jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    return loss, (weights, random.normal(keys[2], (rows, width)))


def stem(batch: int, size: int, width: int) -> Made:
    """Two convolutions of large images, each with group norm behind it."""
    keys = random.split(random.key(0), 3)
    kernels = random.normal(keys[0], (3, 3, 3, width)), random.normal(keys[1], (3, 3, width, width))

    def loss(kernels: Args, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            groups = x.reshape(*x.shape[:3], 4, -1)
            mean, variance = (f(groups, (1, 2, 4), keepdims=True) for f in (jnp.mean, jnp.var))
            x = jax.nn.relu(((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape))
        return jnp.mean(jnp.sin(x))

    return loss, (kernels, random.normal(keys[2], (batch, size, size, 3)))


PROGRAMS = {
    "head": partial(head, 512, 128, 65536),
    "mlp": partial(mlp, 1024, 64, 65536),
    "stem": partial(stem, 16, 96, 16),
}
TOYS = {"head": partial(head, 512, 32, 8192), "mlp": partial(mlp, 512, 32, 8192)}
TOY_NETWORKS = [network.resized(layers=1) for network in QUICK]


def seconds(step: Callable[..., Any], args: Args) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - start


def timed(make: Callable[[], Made]) -> dict[str, Any]:
    """A program in slices beside the plain one."""
    loss, args = make()
    whole = jaxsub.measure(jax.checkpoint(loss), *args).temp_bytes
    plan = jaxsub.plan(loss, *args, budget=whole // SHARE, progress=False, cache=False)
    functions = loss, jaxsub.sublinear(loss, plan=plan)
    steps = [jax.jit(jax.value_and_grad(f)).lower(*args).compile() for f in functions]
    pairs = []
    for i in range(ROUNDS + 1):  # the first warms up
        order = (0, 1) if i % 2 else (1, 0)
        found = {which: seconds(steps[which], args) for which in order}
        pairs.append((found[0], found[1]))
    plain, sliced = zip(*pairs[1:], strict=True)
    return {
        "plain_bytes": steps[0].memory_analysis().temp_size_in_bytes,
        "recomputed_bytes": whole,
        "bytes": steps[1].memory_analysis().temp_size_in_bytes,
        "slices": [f"{run.label}: {run.count} of {run.length} along {run.axis}" for run in plan.slices],
        "ratio": statistics.median(b / a for a, b in zip(plain, sliced, strict=True)),
        "plain_seconds": min(plain),
        "seconds": min(sliced),
    }


def met(loss: Callable[..., Any], args: Args, chunks: Any) -> jaxsub.Plan:
    """The plan of the least budget that is met."""
    asked, is_verified = 1, False
    while True:
        try:
            options = dict(budget=asked, chunks=chunks, verify=is_verified, progress=False, cache=False)
            plan = jaxsub.plan(loss, *args, **options)
        except jaxsub.InfeasibleBudgetError as refusal:
            asked, is_verified = refusal.least_bytes, True
        else:
            return plan


def least(network: Network) -> dict[str, Any]:
    """The least memory of a network without slices, and with them."""
    loss, args = network.shapes()
    found: dict[str, Any] = {"plain_bytes": jaxsub.measure(loss, *args).temp_bytes}
    for name, chunks in (("whole", False), ("sliced", "auto")):
        plan = met(loss, args, chunks)
        found[f"{name}_bytes"] = jaxsub.measure(jaxsub.sublinear(loss, plan=plan), *args).temp_bytes
        found["slices"] = [f"{run.label}: {run.count} of {run.length} along {run.axis}" for run in plan.slices]
    return found


def cells(is_quick: bool) -> Iterator[Cell]:
    """Step times first."""
    for name, make in (TOYS if is_quick else PROGRAMS).items():
        yield Cell(f"{'toy' if is_quick else 'time'}/{name}", partial(timed, make))
    for network in TOY_NETWORKS if is_quick else NETWORKS:
        yield Cell(f"least/{network.name}", partial(least, network))


def broken(measured: Measured) -> list[str]:
    """Memories that are exceeded, steps that are slower, networks that need more with slices than without."""
    found = []
    for key, cell in measured.items():
        if "ratio" in cell:
            found += over_budget(key, cell["bytes"], cell["recomputed_bytes"] // SHARE)
            is_promised = key.startswith("time/") and not key.endswith(SLOW_IN_LOOPS)
            found += [f"{key} takes {cell['ratio']:.3f} of plain"] if is_promised and cell["ratio"] > MOST else []
        else:
            found += over_budget(key, cell["sliced_bytes"], cell["whole_bytes"])
    return found


def table(measured: Measured) -> None:
    """Print both tables."""
    rows = [(key, cell) for key, cell in measured.items() if "ratio" in cell]
    print("| program | plain, MiB | in slices, MiB | time / plain | in slices |\n|---|---|---|---|---|")
    for key, cell in rows:
        sizes = f"{cell['plain_bytes'] / MIB:.1f} | {cell['bytes'] / MIB:.1f}"
        print(f"| {key} | {sizes} | {cell['ratio']:.3f} | {'; '.join(cell['slices'])} |")
    print("\n| network | plain, MiB | least whole, MiB | least with slices, MiB | in slices |\n|---|---|---|---|---|")
    for key, cell in measured.items():
        if "ratio" not in cell:
            sizes = " | ".join(f"{cell[name] / MIB:.1f}" for name in ("plain_bytes", "whole_bytes", "sliced_bytes"))
            print(f"| {key} | {sizes} | {'; '.join(cell['slices'])} |")


if __name__ == "__main__":
    run_cells(__doc__, HERE.parent / "results" / "in_slices", cells, table, broken)
