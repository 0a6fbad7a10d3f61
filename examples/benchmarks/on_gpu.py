"""On a present GPU: check the predictions made for it while absent, and time plans. One command, under nine minutes.

A small Llama, a ResNet-50 and an unrolled LSTM, each plainly, by hand (`jax.checkpoint` round every block), and planned
at the memory that by hand needs. Of each: temporaries that the GPU's compiler allocates and those that it was said to
for the same GPU not there, the peak that the device itself saw beside arguments + outputs + temporaries, the time of a
step (median), and how far planned gradients are from plain ones. Then the largest batch of the Llama by
`jaxsub.max_batch` for a given memory, and whether it runs.

    python examples/benchmarks/on_gpu.py                    # writes on_gpu.json and on_gpu.md beside the results
    python examples/benchmarks/on_gpu.py --quick            # toy sizes, on a CPU too

Every cell runs in a process of its own: a device tells its peak since a process began. Cells that are measured already
are not measured again; `--minutes 8` begins none after that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "league"), str(HERE.parents[1] / "tests")]

import decoder  # noqa: E402
import models  # noqa: E402
from policies import PLAIN, WHOLE, Size  # noqa: E402
from records import Cell, Measured, fill, keep_table, load, options, over_budget, picked, tell  # noqa: E402

import jaxsub  # noqa: E402
from jaxsub.devices import targets  # noqa: E402
from jaxsub.jaxpr.compat import cpu_compiler_options  # noqa: E402

GIB = 2**30
WAYS = ("plain", "by hand", "planned")
LLAMA = Size(1024, 12, 16, 8, 64, 4096, 32_000, batch=8, length=2048)
TOY_LLAMA = Size(32, 2, 2, 2, 16, 96, 256, batch=2, length=16, is_scanned=False, attention="xla")
BATCH_MEMORY = {False: 24 * GIB, True: 2**19}
STEPS, WARM_UP, CLOSE = 7, 2, 0.05
"""Steps that are timed, steps before them, and how far bf16 gradients may be apart, as a share of the largest."""


def llama(is_toy: bool, wrap: Any = None, batch: int | None = None) -> tuple[Callable, tuple[Any, ...]]:
    """The league's decoder at a small size."""
    size = TOY_LLAMA if is_toy else LLAMA
    size = size if batch is None else Size(**{f: getattr(size, f) for f in Size.__slots__} | {"batch": batch})
    return decoder.loss_of(size, WHOLE if wrap else PLAIN), arguments(size)


def arguments(size: Size) -> tuple[Any, jax.Array]:
    """A decoder's weights and tokens, which are random: the gradients of equal ones would all be added to one row."""
    weights, tokens = decoder.shapes(size)
    return filled(weights), jax.random.randint(jax.random.key(0), tokens.shape, 0, size.words, "int32")


def resnet(is_toy: bool, wrap: Any = None) -> tuple[Callable, tuple[Any, ...]]:
    """ResNet-50 on ImageNet's sizes."""
    sizes = dict(batch=2, size=8, width=4, classes=10) if is_toy else dict(batch=64, size=224, width=64, classes=1000)
    return built(partial(models.resnet, (2,) if is_toy else (3, 4, 6, 3), **sizes), wrap)


def lstm(is_toy: bool, wrap: Any = None) -> tuple[Callable, tuple[Any, ...]]:
    """The paper's LSTM."""
    sizes = dict(layers=1, steps=4, batch=4, n_in=16, width=32, classes=10)
    if not is_toy:
        sizes = dict(layers=4, steps=32, batch=64, n_in=50, width=1024, classes=5000)
    return built(partial(models.lstm, **sizes), wrap)


NETWORKS = {"llama": llama, "resnet-50": resnet, "lstm": lstm}


def built(build: Callable, wrap: Any) -> tuple[Callable, tuple[Any, ...]]:
    """A network of the tests, with its arguments."""
    loss, init = build(wrap=wrap) if wrap else build()
    return loss, init(jax.random.key(0))


def filled(shapes: Any) -> Any:
    """Arrays of such shapes: small numbers, all different."""
    return jax.tree.map(lambda s: jnp.sin(jnp.arange(s.size, dtype=s.dtype)).reshape(s.shape) * 0.02, shapes)


def measured(name: str, way: str, is_toy: bool, budget: int | None) -> dict[str, Any]:
    """One cell, in this process: its device's peak is this cell's."""
    loss, args = NETWORKS[name](is_toy, jax.checkpoint if way == "by hand" else None)
    device = jax.devices()[0]
    fun = loss if way != "planned" else jaxsub.sublinear(loss, budget=budget, progress=False)
    begun = time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(fun)).lower(*args)  # plans
    with ThreadPoolExecutor(1) as pool:  # both compilers at once: a machine with a GPU has the cores
        absent = absent_name(device)
        of_absent = pool.submit(jaxsub.measure, fun, *jax.eval_shape(lambda: args), target=absent) if absent else None
        step = lowered.compile(compiler_options=cpu_compiler_options() if device.platform == "cpu" else None)
    found = step.memory_analysis()
    figures = {
        "bytes": found.temp_size_in_bytes,
        "whole_bytes": found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes,
        "seconds_to_plan_and_compile": round(time.perf_counter() - begun, 1),
        "step_seconds": timed(step, args),
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "device": device.device_kind,
        "budget_bytes": budget,
    }
    if of_absent is not None:
        figures["absent_bytes"] = of_absent.result().temp_bytes
    if way == "planned":
        figures["gradient_error"] = apart(step(*args)[1], jax.jit(jax.grad(loss))(*args))
    return figures


def timed(step: Callable, args: tuple[Any, ...]) -> float:
    """Seconds of a step, the median of some after a warm-up."""
    seconds = []
    for _ in range(WARM_UP + STEPS):
        begun = time.perf_counter()
        jax.block_until_ready(step(*args))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[WARM_UP:])


def apart(found: Any, wanted: Any) -> float:
    """The largest difference of gradients, as a share of the largest entry of each array."""
    shares = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(b)) + 1e-30), found, wanted)
    return float(jnp.max(jnp.stack(jax.tree.leaves(shares))))


def absent_name(device: jax.Device) -> str | None:
    """The name under which the same GPU is known when it is not there; `None` where it is not, or this is a CPU."""
    if device.platform not in ("gpu", "cuda"):
        return None
    name = targets.get_target(device).name
    return name if name in targets.NAMES else None


def batches(is_toy: bool) -> dict[str, Any]:
    """The largest batch that a memory is said to hold, planned without slices, and whether it runs."""

    def step_for(batch: int) -> tuple[Callable, tuple[Any, ...]]:
        loss, args = llama(is_toy, batch=batch)
        return jax.value_and_grad(jaxsub.sublinear(loss, chunks=False, progress=False)), jax.eval_shape(lambda: args)

    found = jaxsub.max_batch(step_for, memory=BATCH_MEMORY[is_toy], progress=False)
    _, args = llama(is_toy, batch=found.planned)
    step = jaxsub.jit(step_for(found.planned)[0], memory=BATCH_MEMORY[is_toy], progress=False)
    loss, _ = jax.block_until_ready(step(*args))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"plain": found.plain, "planned": found.planned, "loss": float(loss), "peak_bytes": peak,
            "budget_bytes": BATCH_MEMORY[is_toy]}  # fmt: skip


def in_a_process(arguments: list[str]) -> dict[str, Any]:
    """What this file prints when it is run for one cell."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def cells(is_toy: bool, path: Path) -> Iterator[Cell]:
    """Every network in every way, then the batches."""
    toy = ["--quick"] if is_toy else []

    def planned(name: str) -> dict[str, Any]:
        budget = load(path)[f"{name}/by hand"]["bytes"]
        return in_a_process(["--cell", name, "planned", *toy, "--budget", str(budget)])

    for name in NETWORKS if not is_toy else ("lstm",):  # the batches are of the Llama
        for way in WAYS[:2]:
            yield Cell(f"{name}/{way}", partial(in_a_process, ["--cell", name, way, *toy]))
        yield Cell(f"{name}/planned", partial(planned, name))
    yield Cell("llama/batches", partial(in_a_process, ["--cell", "llama", "batches", *toy]))


def table(found: Measured) -> None:
    """Print the figures of all cells."""
    print("| | temporaries, MiB | said of the absent GPU | peak, MiB | predicted | step, ms | gradients apart |")
    print("|---|---|---|---|---|---|---|")
    for key, cell in found.items():
        if "bytes" in cell:
            row = [cell["bytes"], cell.get("absent_bytes"), cell["peak_bytes"], cell["whole_bytes"]]
            mib = ["" if n is None else f"{n / 2**20:.1f}" for n in row]
            print(
                f"| {key} | {' | '.join(mib)} | {1e3 * cell['step_seconds']:.1f} | {cell.get('gradient_error', '')} |"
            )
        else:
            batches = f"{cell['plain']} plain, {cell['planned']} planned"
            print(f"\n{key}: {batches} in {cell['budget_bytes'] / 2**20:.0f} MiB")


def broken(found: Measured) -> list[str]:
    """Promises that cells break: budgets, and equal gradients."""
    said = []
    for key, cell in found.items():
        if key.endswith("/planned"):
            said += over_budget(key, cell["bytes"], cell["budget_bytes"])
            if cell["gradient_error"] > CLOSE:
                said.append(f"{key}: gradients are {cell['gradient_error']:.2g} of their largest entry apart")
        if key.endswith("/batches") and not cell["planned"] >= cell["plain"]:
            said.append(f"{key}: {cell['planned']} planned, {cell['plain']} plain")
    return said


def main() -> None:
    """Read the command line; measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", nargs=2, metavar=("NETWORK", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    chosen = options(parser, HERE.parent / "results" / "on_gpu")
    if chosen.cell:
        name, way = chosen.cell
        one = batches(chosen.quick) if way == "batches" else measured(name, way, chosen.quick, chosen.budget)
        print(json.dumps(one))
        return
    path = chosen.out / "on_gpu.json"
    if not chosen.draw:
        fill(path, picked(cells(chosen.quick, path), chosen.only), chosen.minutes, chosen.anew)
    found = load(path)
    if not found:
        raise SystemExit(f"{path} holds no results: run this without --draw first")
    keep_table(table, found, path.with_suffix(".md"))
    tell(broken(found), is_check=chosen.quick)


if __name__ == "__main__":
    main()
