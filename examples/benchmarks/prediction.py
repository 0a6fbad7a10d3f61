"""How well peaks are predicted: what is predicted of plans at their first try, beside what the compiler allocates.

For each network, target and budget a plan is made and compiled, before any repair. `error` is predicted over
occupied bytes, less one; `of allocated` is predicted over allocated bytes, less one; `packing` is what the compiler
allocates over the most that it occupies at one time: the gaps that its heap is left with, which no plan can know of.

    python examples/benchmarks/prediction.py            # resumed where it was stopped
    python examples/benchmarks/prediction.py --toy      # toy networks, on the CPU
    python examples/benchmarks/prediction.py --table > examples/results/prediction/README.md    # from the results alone

Nothing is executed: shapes are traced and compiled. Where a median or a worst error misses its aim the command says so
and fails, except with `--toy`.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax

from jaxsub.api.xla_timeline import read_timeline
from jaxsub.core.disk_cache import Store, code_digest, key_of
from jaxsub.core.plan import Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.aot_worker import compile_lowered, devices_of
from jaxsub.devices.compile import compile_for
from jaxsub.devices.targets import Target, get_target
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.trace import Program, trace
from jaxsub.planners import get
from jaxsub.search.candidates import Candidates
from jaxsub.search.verify import cut_choices, gradient

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "tests")]

import zoo  # noqa: E402
from records import MIB, Cell, Measured, fill, load  # noqa: E402

RESULTS = HERE.parent / "results" / "prediction" / "prediction.json"
BUDGETS = ("plain", "0.7", "0.4", "0.2", "least")
TARGETS = ("cpu", "h100")

SIZES: dict[str, dict[str, Any]] = {
    "chain": {"layers": 32, "batch": 4096, "width": 256},
    "mlp": {"layers": 24, "batch": 1024, "width": 256},
    "gpt": {"layers": 4, "batch": 4, "length": 256, "width": 384, "heads": 6, "vocab": 4096},
    "resnet": {"depths": (2, 2, 2), "batch": 16, "size": 112, "width": 32, "classes": 100},
    "unet": {"levels": 4, "batch": 8, "size": 64, "width": 16},
    "vit": {"layers": 4, "batch": 16, "size": 112, "patch": 8, "width": 192, "heads": 3, "classes": 100},
    "lstm": {"layers": 2, "steps": 12, "batch": 64, "n_in": 50, "width": 256, "classes": 1000},
}
"""Each large enough that activations, not weights, hold the memory, and compiled in seconds."""

AIMS = (0.05, 0.30)
"""The median and the worst error that predictions are to keep to."""

PAGE = """# Predicted peaks beside compiled ones

`python examples/benchmarks/prediction.py --table > examples/results/prediction/README.md` makes this page of the JSON
file here; the same command without `--table` measures what is missing in it. Each plan is the planner's first, before
any repair. MiB: what is predicted; the most that the compiled gradient occupies at one time; what the compiler
allocates for it. `error` is predicted over occupied, less one, and what the aims are for; `of allocated` is predicted
over allocated, less one; `packing` is allocated over occupied, less one: gaps in the compiler's heap, of which no plan
can know. A budget below the least gives the least plan.
"""


@functools.cache
def program_of(name: str, is_toy: bool) -> Program:
    """A network of the zoo, traced."""
    model = zoo.BY_NAME[name]
    loss, init = model.build(**(model.toy_size if is_toy else SIZES[name]))
    return trace(loss, jax.eval_shape(init, jax.random.key(0)), {}, argnums=0)


@functools.cache
def pricer_of(name: str, is_toy: bool, target: Target) -> Pricer:
    """What prices a network for all budgets: its stages are traced once."""
    return Pricer(program_of(name, is_toy), target)


def measure(name: str, is_toy: bool, target_name: str, budget: str, store: Store) -> dict[str, int]:
    """One cell: plan for a budget, at the first try, and compile."""
    target = get_target(target_name)
    pricer = pricer_of(name, is_toy, target)
    cuts = cut_choices(pricer.program)[0]
    program, plan = pricer.program, get("plain")(pricer.chain(cuts), None)
    if budget != "plain":
        plain_bytes = compiled_bytes(program, plan, target, store)[0]
        asked = 1 if budget == "least" else math.floor(float(budget) * plain_bytes)
        plan = Candidates(pricer, get("auto"), [cuts]).plan(cuts, asked)
    assert plan.prediction is not None
    allocated, occupied = compiled_bytes(program, plan, target, store)
    return {"predicted": plan.prediction.temp_bytes, "occupied": occupied, "allocated": allocated}


def compiled_bytes(program: Program, plan: Plan, target: Target, store: Store) -> tuple[int, int]:
    """What the compiler allocates for a plan's gradient, and the most of it that is in use at one time."""
    key = key_of("occupied", code_digest(), target.name, target.spec or "", program.fingerprint,
                 repr((plan.segments, plan.barriers, plan.loops)))  # fmt: skip
    known: tuple[int, int] | None = store.get(key, tuple[int, int])
    if known is None:
        compile_plan = _present if target.is_present else _absent
        known = compile_plan(*gradient(program, emit(program, plan)), target)
        store.put(key, known)
    return known


def _present(fun: Callable[..., Any], args: Any, target: Target) -> tuple[int, int]:
    timeline = read_timeline(compile_for(fun, args, target))
    return timeline.temp_bytes, max(timeline.live_bytes, default=timeline.temp_bytes)


def _absent(fun: Callable[..., Any], args: Any, target: Target) -> tuple[int, int]:
    """For a GPU that is not there: XLA writes down lives and places of buffers where it is asked to."""
    sharding = jax.sharding.SingleDeviceSharding(devices_of(target.spec or "", 1)[0])
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        memory = compile_lowered(jax.jit(fun).lower(*placed), options)[0].memory_analysis()
        texts = [next(Path(folder).glob(f"*gpu_after_optimizations-{name}.txt")).read_text("utf-8")
                 for name in ("buffer-assignment", "live-range")]  # fmt: skip
    return int(memory.temp_size_in_bytes), occupied_bytes(*texts)


def occupied_bytes(assignment: str, lives: str) -> int:
    """The most bytes of temporary buffers that live at one time, from XLA's own account in text.

    Args:
        assignment: Its buffer assignment: allocations, and the values in them with sizes and offsets.
        lives: Its live ranges: for each value the instructions between which it lives.
    """
    spans = {name: (int(a), int(b)) for name, a, b in re.findall(r"^    (\S+?)(?:\{\})?:(\d+)-(\d+)$", lives, re.M)}
    heading = r"^allocation \d+: size \d+,(?: page \d+,)? preallocated-temp:\n"
    temporary = re.findall(heading + r"((?: value: .*\n?)*)", assignment, re.M)
    at: dict[int, list[tuple[int, int]]] = {}
    for n, values in enumerate(temporary):
        for name, size, offset in re.findall(r"value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\)", values):
            start, stop = spans.get(name.removesuffix("{}"), (0, -1))
            for step in range(start, stop + 1):
                at.setdefault(step, []).append((n * 2**50 + int(offset), n * 2**50 + int(offset) + int(size)))
    return max(map(_covered, at.values()), default=0)


def _covered(places: list[tuple[int, int]]) -> int:
    total, end = 0, 0
    for start, stop in sorted(places):
        total, end = total + max(0, stop - max(start, end)), max(end, stop)
    return total


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The cells asked for."""
    store = Store(options.cache)
    for target in options.targets:
        for name in options.models:
            for budget in BUDGETS:
                run = functools.partial(measure, name, options.toy, target, budget, store)
                yield Cell(f"{target}/{name}/{budget}", run)


def error(row: dict[str, Any]) -> float:
    """Predicted over occupied bytes, less one."""
    return float(row["predicted"] / row["occupied"] - 1)


def of_allocated(row: dict[str, Any]) -> float:
    """Predicted over allocated bytes, less one."""
    return float(row["predicted"] / row["allocated"] - 1)


def packing(row: dict[str, Any]) -> float:
    """Allocated over occupied bytes, less one."""
    return float(row["allocated"] / row["occupied"] - 1)


SHARES = {"error": error, "of allocated": of_allocated, "packing": packing}


def table(measured: Measured) -> None:
    """Print a page: what became of the aims, then every cell."""
    groups: dict[str, list[dict[str, Any]]] = {}
    lines = []
    for key, row in sorted(measured.items(), key=lambda item: _order(item[0])):
        target, name, budget = key.split("/")
        groups.setdefault(target, []).append(row)
        sizes = " | ".join(f"{row[what] / MIB:.2f}" for what in ("predicted", "occupied", "allocated"))
        shares = " | ".join(f"{share(row):.1%}" for share in SHARES.values())
        lines.append(f"| {target} | {name} | {budget} | {sizes} | {shares} |")
    print(PAGE)
    print(f"| target | cells | aims | {' | '.join(f'{share}: median | worst' for share in SHARES)} |")
    print("|" + "---|" * (3 + 2 * len(SHARES)))
    for target, rows in groups.items():
        found = [[abs(share(row)) for row in rows] for share in SHARES.values()]
        said = " | ".join(f"{median(sizes):.1%} | {max(sizes):.1%}" for sizes in found)
        aims = " and ".join(f"{aim:.0%}" for aim in AIMS)
        print(f"| {target} | {len(rows)} of {len(SIZES) * len(BUDGETS)} | {aims} | {said} |")
    print(f"\n| target | network | budget | predicted | occupied | allocated | {' | '.join(SHARES)} |")
    print("|" + "---|" * (6 + len(SHARES)), *lines, sep="\n")
    sizes = "; ".join(f"{name}: {', '.join(f'{k} {v}' for k, v in size.items())}" for name, size in SIZES.items())
    print(f"\nSizes: {sizes}.")


def broken(measured: Measured) -> Iterator[str]:
    """A sentence for each aim that is missed."""
    for target in dict.fromkeys(key.split("/")[0] for key in measured):
        errors = [abs(error(row)) for key, row in measured.items() if key.startswith(f"{target}/")]
        found = zip(("median", "worst"), (median(errors), max(errors)), AIMS, strict=True)
        yield from (f"{target}: {what} error {size:.1%}, the aim is {aim:.0%}"
                    for what, size, aim in found if size > aim)  # fmt: skip


def _order(key: str) -> tuple[int, ...]:
    places = (TARGETS, tuple(SIZES), BUDGETS)
    return tuple(place.index(part) if part in place else len(place)
                 for part, place in zip(key.split("/"), places, strict=True))  # fmt: skip


def main() -> None:
    """Measure what is missing, and print the table."""
    jax.config.update("jax_platforms", "cpu")  # before backends start: or absent devices cannot be described
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="networks of toy size, on the CPU; results in a new folder")
    parser.add_argument("--table", action="store_true", help="measure nothing: the table from the results alone")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES), help="names in tests/zoo.py")
    parser.add_argument("--targets", nargs="+", default=None, help="names of devices; cpu and h100 where left out")
    parser.add_argument("--results", type=Path, default=None, help="the file that keeps the results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further cell after so many")
    parser.add_argument("--cache", default=None, help="where prices and measurements are kept; left out: in memory")
    options = parser.parse_args()
    options.targets = options.targets or (["cpu"] if options.toy else list(TARGETS))
    path = options.results or (Path(tempfile.mkdtemp(prefix="jaxsub-")) / RESULTS.name if options.toy else RESULTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = load(path) if options.table else fill(path, cells(options), options.minutes)
    if not measured:
        raise SystemExit(f"{path} holds no results: run this without --table first")
    table(measured)
    if not options.toy and (missed := list(broken(measured))):
        raise SystemExit("\n".join(f"BROKEN: {sentence}" for sentence in missed))


if __name__ == "__main__":
    main()
