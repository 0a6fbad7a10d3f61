"""How long a first plan is waited for: processor seconds of a cold, verified plan beside the plain gradient's compile.

    python examples/benchmarks/waiting.py                     # resumed where it was stopped
    python examples/benchmarks/waiting.py --only decoder      # programs whose names begin like this
    python examples/benchmarks/waiting.py --quick             # toy sizes, under two minutes
    python examples/benchmarks/waiting.py --targets h100      # for a GPU that need not be there

Every measurement is a process of its own with an empty cache. Its processor seconds, those of the processes it started
among them, count from the moment the arguments' shapes are known. `compile` is `jax.jit(jax.value_and_grad(loss))`
lowered and compiled as JAX does it. A budget is a share of what that program allocates, given in bytes. `times` is the
plan's seconds over those of `compile`; for a GPU both count the helper process that compiles, and its start. `compiles`
counts what XLA was given in that process, and not what a helper was given. FLOPs are those of
traced products and convolutions, loops and slices with their lengths, relative to the plain gradient's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax

import jaxsub
from jaxsub.devices.targets import get_target

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from measuring import device, processor_seconds, traced_flops  # noqa: E402
from programs import PROGRAMS  # noqa: E402
from records import Cell, Measured, fill, keep_table, load, mib, options, over_budget, picked, tell  # noqa: E402

RESULTS = HERE.parent / "results" / "waiting"
SHARES = (0.5, 0.25)
QUICK = ("decoder", "runge_kutta", "chain")
AIMS = {"cpu": (2.0, 4.0), "h100": (3.0, 6.0)}
"""The median and the most that a plan may take of the plain compile, by target."""

COMPILED = "/jax/core/compile/backend_compile_duration"


def program(name: str, is_quick: bool) -> tuple[Any, tuple[Any, ...]]:
    """A loss and the shapes of its arguments."""
    loss, init = PROGRAMS[name](is_quick)
    return loss, jax.eval_shape(init, jax.random.key(0))


def compiled(name: str, is_quick: bool) -> dict[str, Any]:
    """What JAX takes to lower and compile the plain gradient, and what XLA says of it."""
    loss, args = program(name, is_quick)
    start = processor_seconds()
    built = jax.jit(jax.value_and_grad(loss)).lower(*args).compile()
    seconds = processor_seconds() - start
    flops = built.cost_analysis()["flops"]
    return {"used_at_start": start, "seconds": seconds, "flops": flops, "traced_flops": traced_flops(loss, args)}


def compiled_for(target: str, name: str, is_quick: bool) -> dict[str, Any]:
    """The plain gradient for a target: its bytes as plans are measured; seconds too where that is no CPU."""
    loss, args = program(name, is_quick)
    start = processor_seconds()
    found = jaxsub.measure(loss, *args, target=device(target))
    return {"used_at_start": start, "seconds": processor_seconds() - start, "bytes": found.temp_bytes}


def planned(target: str, name: str, is_quick: bool, budget: int, cache: str) -> dict[str, Any]:
    """A plan for a budget in bytes, and what XLA says of it."""
    loss, args = program(name, is_quick)
    compiles: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiles.append(seconds) if event == COMPILED else None
    )
    start = processor_seconds()
    began = time.perf_counter()
    try:
        plan = jaxsub.plan(loss, *args, budget=budget, target=device(target), cache=cache, progress=False)
    except jaxsub.InfeasibleBudgetError as refusal:
        return {"used_at_start": start, "seconds": processor_seconds() - start, "waited": time.perf_counter() - began,
                "compiles": len(compiles), "budget": budget, "least_bytes": refusal.least_bytes}  # fmt: skip
    found = {"used_at_start": start, "seconds": processor_seconds() - start, "waited": time.perf_counter() - began}
    measured = plan.measurement
    assert measured is not None
    found |= {"compiles": len(compiles), "budget": budget, "bytes": measured.temp_bytes, "regions": plan.n_regions}
    found["predicted_bytes"] = plan.prediction.temp_bytes if plan.prediction else 0
    followed = jaxsub.sublinear(loss, plan=plan)
    found["flops"] = measured.flops if get_target(measured.target).is_present else jaxsub.measure(followed, *args).flops
    return found | {"traced_flops": traced_flops(followed, args)}


def apart(*asked: str) -> dict[str, Any]:
    """Measure in a process of its own, with an empty cache; processes that it leaves behind count too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--cell", *asked, "--cache", cache]
        cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=cpu)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    found["whole_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def cells(path: Path, targets: list[str], is_quick: bool) -> Iterator[Cell]:
    """Plain programs first: budgets are shares of what they need."""
    size = "quick" if is_quick else "full"
    for name in QUICK if is_quick else PROGRAMS:
        yield Cell(f"{name}/compile", partial(apart, "compile", size, name))
        for target in targets:
            plain = f"{name}/{target}/plain"
            yield Cell(plain, partial(apart, target, size, name))
            for share in SHARES[:1] if is_quick else SHARES:
                yield Cell(f"{name}/{target}/{share}", partial(_planned, path, plain, share, target, size, name))


def _planned(path: Path, plain: str, share: float, *asked: str) -> dict[str, Any]:
    budget = int(share * load(path)[plain]["bytes"])
    return apart(*asked, str(budget))


def rows(measured: Measured) -> Iterator[tuple[str, str, float, dict[str, Any], float, float | None]]:
    """Program, target, share, the cell, its seconds over the compile's, and its FLOPs over the plain gradient's."""
    for key, cell in measured.items():
        name, *rest = key.split("/")
        if len(rest) == 2 and rest[1] != "plain" and f"{name}/compile" in measured:
            target, share = rest
            plain = measured[f"{name}/compile"]
            base = plain if target == "cpu" else measured[f"{name}/{target}/plain"]
            flops = cell["traced_flops"] / plain["traced_flops"] if "traced_flops" in cell else None
            yield name, target, float(share), cell, cell["seconds"] / base["seconds"], flops


def table(measured: Measured) -> None:
    """Print the table, and the median and worst of each target."""
    print(f"{'program':16}{'for':6}{'budget':>7}{'compile s':>11}{'plan s':>9}{'times':>7}{'compiles':>10}"
          f"{'bytes':>13}{'of budget':>11}{'FLOPs':>8}")  # fmt: skip
    times: dict[str, list[float]] = {}
    for name, target, share, cell, ratio, flops in rows(measured):
        times.setdefault(target, []).append(ratio)
        got = f"{mib(cell['bytes']):>13}{cell['bytes'] / cell['budget']:11.3f}" if "bytes" in cell else (
            f"{'refused':>13}{cell['least_bytes'] / cell['budget']:11.3f}")  # fmt: skip
        print(f"{name:16}{target:6}{share:7}{cell['seconds'] / ratio:11.1f}{cell['seconds']:9.1f}{ratio:7.1f}"
              f"{cell['compiles'] or '-':>10}{got}{flops or math.nan:8.3f}")  # fmt: skip
    for target, found in times.items():
        print(f"{target}: {median(found):.1f} times the plain compile in the median of {len(found)}, "
              f"{max(found):.1f} at worst")  # fmt: skip


def broken(measured: Measured, *, is_quick: bool) -> Iterator[str]:
    """Budgets that are not kept, and aims that are missed; toys compile too quickly to say anything of time."""
    times: dict[str, list[float]] = {}
    for name, target, share, cell, ratio, _ in rows(measured):
        times.setdefault(target, []).append(ratio)
        if "bytes" in cell:
            yield from over_budget(f"{name}/{target}/{share}", cell["bytes"], cell["budget"])
    for target, found in times.items() if not is_quick else ():
        for what, value, aim in zip(("median", "worst"), (median(found), max(found)), AIMS[target], strict=True):
            if value > aim:
                yield f"{target}: {what} {value:.1f} times the plain compile, the aim is {aim:.0f}"


def main() -> None:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", default=["cpu"], choices=tuple(AIMS), help="what to plan for")
    parser.add_argument("--cell", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="waiting", help="of the results' files, to keep figures of several versions")
    told, _ = parser.parse_known_args()
    if told.cell:
        print(json.dumps(one(told.cell, told.cache)))
        return
    chosen = options(parser, RESULTS)
    path = chosen.out / f"{chosen.name}.json"
    if not chosen.draw:
        wanted = picked(cells(path, chosen.targets, chosen.quick), chosen.only)
        fill(path, wanted, chosen.minutes, chosen.anew)
    measured = load(path)
    keep_table(table, measured, path.with_suffix(".txt"))
    tell(list(broken(measured, is_quick=chosen.quick)), is_check=chosen.quick)


def one(asked: list[str], cache: str) -> dict[str, Any]:
    """Measure one cell in this process."""
    what, size, name, *budget = asked
    if what == "compile":
        return compiled(name, size == "quick")
    if not budget:
        return compiled_for(what, name, size == "quick")
    return planned(what, name, size == "quick", int(budget[0]), cache)


if __name__ == "__main__":
    main()
