"""How well peaks are predicted: what is predicted of plans at their first try, beside what the compiler allocates.

For each network, target and budget a plan is made and compiled, before any repair: once with costs that the compiler
was asked for, stage by stage, and once with analytic costs, made without any compiler. `error` is predicted over
occupied bytes, less one; `packing` is what the compiler allocates over the most that it occupies at one time: the gaps
that its heap is left with, which no plan can know of.
"""

import argparse
import importlib
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxsub.compiled import compile_for
from jaxsub.crosscompile_child import devices_of
from jaxsub.emit import emit
from jaxsub.plan import Plan
from jaxsub.planners import get
from jaxsub.pricing import Pricer
from jaxsub.program import Program, trace
from jaxsub.schedule import read_timeline
from jaxsub.store import Store, key_of
from jaxsub.targets import Target, get_target
from jaxsub.verify import cut_choices, gradient, settle

BUDGETS = ("plain", 0.7, 0.4, 0.2, "least")
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One plan: what was predicted of it, what the compiler allocates, and how much of that it occupies at most."""

    predicted_bytes: int
    temp_bytes: int
    occupied_bytes: int

    @property
    def error(self) -> float:
        """Predicted over occupied bytes, less one."""
        return self.predicted_bytes / self.occupied_bytes - 1

    @property
    def packing(self) -> float:
        """Allocated over occupied bytes, less one."""
        return self.temp_bytes / self.occupied_bytes - 1


def compiled_bytes(program: Program, plan: Plan, target: Target, store: Store) -> tuple[int, int]:
    """What the compiler allocates for a plan's gradient, and the most of it that is in use at one time."""
    key = key_of("occupied", target.name, target.spec or "", program.fingerprint,
                 repr((plan.segments, plan.barriers, plan.loops)))  # fmt: skip
    if (known := store.get(key)) is None:
        compile_plan = _present if target.is_present else _absent
        known = compile_plan(*gradient(program, emit(program, plan)), target)
        store.put(key, known)
    return known[0], known[1]


def _present(fun: Callable[..., Any], args: Any, target: Target) -> tuple[int, int]:
    timeline = read_timeline(compile_for(fun, args, target))
    return timeline.temp_bytes, max(timeline.live_bytes, default=timeline.temp_bytes)


def _absent(fun: Callable[..., Any], args: Any, target: Target) -> tuple[int, int]:
    """For a GPU that is not there: XLA writes down lives and places of buffers where it is asked to."""
    sharding = jax.sharding.SingleDeviceSharding(devices_of(target.spec or "", 1)[0])
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        memory = jax.jit(fun).lower(*placed).compile(compiler_options=options).memory_analysis()
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
    temporary = re.findall(r"^allocation \d+: size \d+, preallocated-temp:\n((?: value: .*\n?)*)", assignment, re.M)
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


def rows(program: Program, target: Target, is_compiled: bool, store: Store) -> Iterator[tuple[str, Row]]:
    """Plan and compile for each budget, at the first try."""
    cuts, planner = cut_choices(program)[0], get("auto")
    pricer = Pricer(program, target, is_compiled, store)
    plain = get("plain")(pricer.chain(cuts), None)
    plain_temp = compiled_bytes(program, plain, target, store)
    for budget in BUDGETS:
        if budget == "plain":
            plan, found = plain, plain_temp
        else:
            n_bytes = 1 if budget == "least" else math.floor(float(budget) * plain_temp[0])
            plan = settle(pricer, cuts, planner, n_bytes)
            found = compiled_bytes(program, plan, target, store)
        assert plan.prediction is not None
        yield str(budget), Row(plan.prediction.temp_bytes, *found)


def main() -> None:
    """Print the table, and under it medians and worsts."""
    jax.config.update("jax_platforms", "cpu")  # before backends start: or absent devices cannot be described
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    zoo = importlib.import_module("zoo")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="networks of toy size")
    parser.add_argument("--models", nargs="+", default=[m.name for m in zoo.NETWORKS], help="names in tests/zoo.py")
    parser.add_argument("--targets", nargs="+", default=["cpu", "h100"])
    parser.add_argument("--costs", nargs="+", default=["compiled", "analytic"], choices=["compiled", "analytic"])
    parser.add_argument("--cache", default=None, help="where prices and measurements are kept; left out: in memory")
    options = parser.parse_args()
    store = Store(options.cache)
    print(f"{'costs':9}{'target':8}{'network':10}{'budget':>7}{'predicted':>11}{'occupied':>11}{'allocated':>11}"
          f"{'error':>8}{'packing':>9}")  # fmt: skip
    for costs in options.costs:
        for target in map(get_target, options.targets):
            found = []
            for name in options.models:
                loss, args = zoo.BY_NAME[name].toy() if options.toy else zoo.BY_NAME[name].full()
                program = trace(loss, args, {}, argnums=0)
                for budget, row in rows(program, target, costs == "compiled", store):
                    found.append(row)
                    sizes = (row.predicted_bytes, row.occupied_bytes, row.temp_bytes)
                    print(f"{costs:9}{target.name:8}{name:10}{budget:>7}" + "".join(f"{b / MIB:11.2f}" for b in sizes)
                          + f"{row.error:8.1%}{row.packing:9.1%}", flush=True)  # fmt: skip
            errors = [abs(row.error) for row in found]
            print(f"{costs:9}{target.name:8}median {statistics.median(errors):.1%}, worst {max(errors):.1%}; packing "
                  f"median {statistics.median(r.packing for r in found):.1%}, "
                  f"worst {max(r.packing for r in found):.1%}\n", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
