"""On a present GPU: what slices cost in time, by kernel, and how long a language model's step takes in less memory.

Value and gradient of decoders of `examples/league/decoder.py`, plainly, by hand, and under plans: at the memory of
`jax.checkpoint` round each layer in 4 and in 8 slices of the batch (the same work in more and more kernels), and
Llama-3.2-1B's sizes, 4 x 4096 tokens, at budgets from 20 GiB down to 2 GiB. Of each: the temporaries that the GPU's
compiler allocates and those that it was said to for the same GPU not there, the time of a step (median), and, from
JAX's profiler, how many kernels and copies the GPU runs and how long it is busy.

    python examples/benchmarks/slices_on_gpu.py             # writes slices_on_gpu.json and .md beside the results
    python examples/benchmarks/slices_on_gpu.py --draw      # the table again, from the results alone
    python examples/benchmarks/slices_on_gpu.py --quick     # a toy, on a CPU too, which runs no kernels

The last line is what each kernel costs: from 4 slices to 8, how much longer a step takes, over how many kernels more.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "league")]

import decoder  # noqa: E402
from on_gpu import LLAMA, TOY_LLAMA, absent_name, arguments, timed  # noqa: E402
from policies import PLAIN, SIZES, WHOLE, Size  # noqa: E402
from records import Cell, Measured, mib, run_cells  # noqa: E402

import jaxsub  # noqa: E402

GIB = 2**30
LEAST = "dots_with_no_batch_dims_saveable"
SLICES = (4, 8)


def measured(size: Size, make: Callable[[], Callable]) -> dict[str, Any]:
    """One cell: a gradient is compiled, timed, and profiled once."""
    device, fun = jax.devices()[0], make()
    shapes = decoder.shapes(size)
    args = arguments(size)
    step = jax.jit(jax.value_and_grad(fun)).lower(*args).compile()
    figures: dict[str, Any] = {"bytes": step.memory_analysis().temp_size_in_bytes, "device": device.device_kind}
    if (absent := absent_name(device)) is not None:
        figures["absent_bytes"] = jaxsub.measure(fun, *shapes, target=absent).temp_bytes
    seconds = timed(step, args)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(*args))
        found = kernels(Path(folder))
    return {**figures, **found, "step_seconds": seconds, "slices": told(fun, shapes)}


def kernels(folder: Path) -> dict[str, Any]:
    """How many kernels and copies a profile shows, and how long one at least was running."""
    (path,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    streams = (line for plane in data.planes if "GPU" in plane.name for line in plane.lines)
    spans = sorted((e.start_ns, e.start_ns + e.duration_ns) for s in streams if s.name.startswith("Stream")
                   for e in s.events)  # fmt: skip
    busy, end = 0.0, 0.0
    for begun, ended in spans:
        busy, end = busy + max(0.0, ended - max(begun, end)), max(end, ended)
    return {"kernels": len(spans), "busy_seconds": busy / 1e9}


def told(fun: Any, shapes: tuple[Any, ...]) -> list[str]:
    """What a plan runs in slices; nothing without a plan."""
    runs = fun.plan(*shapes).slices if hasattr(fun, "plan") else ()
    return [f"{run.label}: {run.count} × {run.size} of {run.length}" for run in runs]


def cells(is_toy: bool) -> Iterator[Cell]:
    """By hand, then planned."""
    small = TOY_LLAMA if is_toy else LLAMA

    def planned(size: Size, **options: Any) -> Callable:
        return jaxsub.sublinear(decoder.loss_of(size), progress=False, **options)

    def in_slices(n: int) -> Callable:
        of = WHOLE if not is_toy else PLAIN  # a toy's regions need more than it does without
        given = jaxsub.measure(decoder.loss_of(small, of), *decoder.shapes(small))
        return planned(small, budget=given.temp_bytes, chunks={0: n})

    for name, policy in (("plain", PLAIN), ("by hand", WHOLE)):
        yield Cell(f"small/{name}", partial(measured, small, partial(decoder.loss_of, small, policy)))
    for n in SLICES if not is_toy else (2,):
        yield Cell(f"small/batch in {n}", partial(measured, small, partial(in_slices, n)))
    if not is_toy:
        large = SIZES["llama3.2-1b"]
        for name, policy in (("plain", PLAIN), ("by hand", WHOLE), (LEAST, LEAST)):
            yield Cell(f"1b/{name}", partial(measured, large, partial(decoder.loss_of, large, policy)))
        for n in (20, 13, 3, 2):
            yield Cell(f"1b/{n} GiB", partial(measured, large, partial(planned, large, budget=n * GIB)))


def table(found: Measured) -> None:
    """Print the figures of all cells, and what a kernel costs."""
    print("| | temporaries | said of the absent GPU | step, ms | kernels | busy, ms | in slices |")
    print("|---|---|---|---|---|---|---|")
    for key, cell in found.items():
        absent = mib(cell["absent_bytes"]) if "absent_bytes" in cell else ""
        profile = f"{cell['kernels']} | {1e3 * cell['busy_seconds']:.1f}" if "kernels" in cell else " | "
        row = f"{mib(cell['bytes'])} | {absent} | {1e3 * cell['step_seconds']:.1f} | {profile}"
        print(f"| {key} | {row} | {'; '.join(cell['slices'])} |")
    few, many = (found.get(f"small/batch in {n}") for n in SLICES)
    if few and many and many["kernels"] > few["kernels"]:
        longer, more = many["step_seconds"] - few["step_seconds"], many["kernels"] - few["kernels"]
        print(f"\n{1e6 * longer / more:.1f} µs a kernel")


if __name__ == "__main__":
    run_cells(__doc__, HERE.parent / "results" / "slices_on_gpu", cells, table, lambda found: [])
