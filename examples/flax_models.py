"""Flax's own example models under budgets, run as their authors wrote them but for one line.

    python examples/flax_models.py --toy      # tiny ones, three steps, under a minute
    python examples/flax_models.py            # the authors' architectures: 20 steps, plain and planned
    python examples/flax_models.py --full     # their batches and types too: compiled but not run
    python examples/flax_models.py --table    # the tables, from the results that are kept

ResNet-50, the lm1b decoder and Gemma 3 270M are what Flax's source distribution holds, fetched with pip, or a checkout
given with `--flax-examples`. One line, such as `jaxsub.flax.linen.sublinear`, goes round the loss. With `--full`, what
can be had by hand stands beside it: blocks under `nn.remat`, each or every second one, with the policies of
`jax.checkpoint_policies`, put there by `jaxsub.flax.policies`. For every policy by hand that no other one beats, jaxsub
is given the memory that it takes. A run that was stopped goes on where it stood.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxsub
import jaxsub.flax

sys.path.insert(0, str(Path(__file__).parent))
from flax_authors import CASES, SIZES, Case, examples_folder
from records import MIB, Cell, Measured, fill, load

POLICIES = jax.checkpoint_policies
RESULTS = Path(__file__).parent / "results" / "flax"
ROUNDING = 1e-3  # the compiler's packing moves some kilobytes: what fits this closely takes the same memory
STEPS = {"toy": 3, "trained": 20, "full": 0}
COMMANDS = {"toy": "--toy", "trained": "", "full": "--full"}
HEADER = """# Flax's own example models under budgets

`python examples/flax_models.py --table > examples/results/flax/README.md` makes this page of the JSON files here; the
command above each table measured them. MiB are what the compiler allocates for value and gradient beside arguments and
outputs; FLOPs are those it counts. A row of jaxsub stands at the memory of a row by hand that no other one beats, to a
thousandth, or says the least it knows. Losses are those of the first and the last of 20 steps, on one random batch;
`apart` is the largest relative difference from the plain ones in any step.
"""
WAYS_BY_HAND = {"toy": 0, "trained": 1, "full": 7}


def ways_by_hand(case: Case) -> dict[str, dict[str, Any]]:
    """What can be had by `nn.remat` or `nnx.remat` on blocks: for each way the policies on the modules."""
    every_second = case.blocks[::2]
    return {
        "each block, nothing": {case.block: POLICIES.nothing_saveable},
        "each block, dots_saveable": {case.block: POLICIES.dots_saveable},
        "each block, dots_with_no_batch_dims": {case.block: POLICIES.dots_with_no_batch_dims_saveable},
        "each block, products and convolutions": {case.block: "save_costly"},
        "each block, everything": {case.block: POLICIES.everything_saveable},
        "every 2nd block, nothing": dict.fromkeys(every_second, POLICIES.nothing_saveable),
        "every 2nd block, dots_saveable": dict.fromkeys(every_second, POLICIES.dots_saveable),
    }


def measured(case: Case, loss: Callable[..., Any], steps: int, target: str | None) -> dict[str, Any]:
    """Compile the gradient of a loss, read what it takes, and train with it for some steps."""
    if not steps:
        found = jaxsub.measure(loss, *case.shapes(), target=target)
        return {"temp_bytes": found.temp_bytes, "flops": found.flops}
    gradient = jaxsub.jit(jax.value_and_grad(loss, has_aux=True)).lower(*case.shapes()).compile()
    return {
        "temp_bytes": gradient.memory_analysis().temp_size_in_bytes,
        "flops": (gradient.cost_analysis() or {}).get("flops"),
        "losses": trained(case, gradient, steps),
    }


@cache
def start_and_update(case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What makes parameters and state, and what applies gradients: the same for every way, compiled once."""

    @partial(jax.jit, donate_argnums=(0, 2))
    def update(params: Any, grads: Any, opt_state: Any) -> Any:
        updates, opt_state = case.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(case.init), update


def trained(case: Case, gradient: Callable[..., Any], steps: int) -> list[float]:
    """The losses of some steps of training."""
    start, update = start_and_update(case)
    batch, (params, state) = case.batch(), start(jax.random.key(0))
    opt_state, losses = case.optimizer.init(params), []
    for i in range(steps):
        (value, state), grads = gradient(params, state, batch, jax.random.key(i))
        params, opt_state = update(params, grads, opt_state)
        losses.append(float(value))
    return losses


class Comparison:
    """The cells of one model at one size: plain, by hand, and with jaxsub in the memory of what is by hand.

    Args:
        model: Its name in `CASES`.
        size: One of `SIZES`.
        examples: The folder of Flax's examples.
        target: The device to compile for, or `None` for the one in use.
    """

    def __init__(self, model: str, size: str, examples: Path, target: str | None = None):
        self.case = CASES[model](examples, size)
        self.size, self.target = size, target
        self.place = f"{size}/{target or jax.default_backend()}"

    def fill(self, path: Path) -> Measured:
        """Measure what the file at `path` lacks."""
        ways = list(ways_by_hand(self.case))[: WAYS_BY_HAND[self.size]]
        found = fill(path, [self.plain(), *map(self.by_hand, ways)])
        budgets = [found[key]["temp_bytes"] for key in unbeaten(found) if not key.endswith("/plain")]
        if not ways:
            budgets = [int(0.7 * found[f"{self.place}/plain"]["temp_bytes"])]
        return found | fill(path, [self.ours(budget) for budget in budgets])

    def cell(self, way: str, make: Callable[[], Mapping[str, Any]]) -> Cell:
        """A cell that says with which Flax it was measured."""
        return Cell(f"{self.place}/{way}", lambda: {"model": self.case.name, "flax": version("flax"), **make()})

    def plain(self) -> Cell:
        """The loss as it is, trained."""
        steps = STEPS[self.size]
        return self.cell("plain", lambda: measured(self.case, self.case.build(lambda f: f), steps, self.target))

    def by_hand(self, way: str) -> Cell:
        """The loss with its blocks under policies, compiled."""

        def make() -> dict[str, Any]:
            with jaxsub.flax.policies(ways_by_hand(self.case)[way]):
                return measured(self.case, self.case.build(lambda f: f), 0, self.target)

        return self.cell(way, make)

    def ours(self, budget: int) -> Cell:
        """The loss under a budget, up to `ROUNDING`, trained; or the least that jaxsub knows where that is more."""

        def make() -> dict[str, Any]:
            limit, verify = int(budget * (1 + ROUNDING)), self.size != "toy"
            wrap = partial(self.case.sublinear, budget=limit, target=self.target, verify=verify)
            try:
                found = measured(self.case, self.case.build(wrap), STEPS[self.size], self.target)
            except jaxsub.InfeasibleBudgetError as error:
                found = {"least_bytes": error.least_bytes}
            return {"budget_bytes": budget, **found}

        return self.cell(f"jaxsub in {budget / MIB:.2f} MiB", make)


def unbeaten(found: Measured) -> Iterator[str]:
    """The keys of what nothing else beats in memory and in FLOPs, from the least memory on."""
    best = float("inf")
    for key in sorted(found, key=lambda k: (found[k]["temp_bytes"], found[k]["flops"] or 0.0)):
        flops = found[key]["flops"] or 0.0
        if flops < best:
            best = flops
            yield key


def tables(results: Sequence[Measured]) -> Iterator[str]:
    """Markdown lines of all that some files hold."""
    for size in ("toy", "trained", "full"):
        places = {key.rsplit("/", 1)[0]: None for found in results for key in found if key.startswith(f"{size}/")}
        for place in places:
            rows = {(i, k): f for i, found in enumerate(results) for k, f in found.items() if k.startswith(f"{place}/")}
            yield from table(place, rows)


def table(place: str, rows: Mapping[tuple[int, str], Mapping[str, Any]]) -> Iterator[str]:
    """One table: every model at one size, for one device."""
    size, device = place.split("/")
    first = next(iter(rows.values()))
    versions = ", ".join(f"{name} {number}" for name, number in (*first["versions"].items(), ("flax", first["flax"])))
    command = " ".join(["python examples/flax_models.py", COMMANDS[size]]).strip()
    command += "" if device == jax.default_backend() else f" --target {device}"
    yield f"\n`{command}`: {SIZES[size]}; compiled for {device}. {versions}; {first['machine']}.\n"
    yield "| model | way | MiB | of plain | FLOPs of plain | losses |"
    yield "|---|---|---|---|---|---|"
    for i in dict.fromkeys(i for i, _ in rows):
        found = {key: figures for (j, key), figures in rows.items() if j == i}
        plain = found[f"{place}/plain"]
        order = sorted(found, key=lambda k: (found[k].get("temp_bytes", 0), "jaxsub" in k), reverse=True)
        yield from (row(key.split("/", 2)[2], found[key], plain) for key in order)


def row(way: str, figures: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """One line of a table."""
    if "least_bytes" in figures:
        least = f"refused: the least is {figures['least_bytes'] / MIB:.2f} MiB"
        return f"| {figures['model']} | {way} | {least} | {figures['least_bytes'] / plain['temp_bytes']:.3f} | | |"
    losses = figures.get("losses", [])
    text = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""
    if losses and way != "plain":
        text += f", at most {distance(figures, plain):.0e} apart"
    flops = f"{figures['flops'] / plain['flops']:.3f}" if figures["flops"] and plain["flops"] else ""
    memory = f"{figures['temp_bytes'] / MIB:.2f} | {figures['temp_bytes'] / plain['temp_bytes']:.3f}"
    return f"| {figures['model']} | {way} | {memory} | {flops} | {text} |"


def distance(figures: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """How far losses are from the plain ones at most, relative to those."""
    ours, theirs = (np.array(f["losses"]) for f in (figures, plain))
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))


def run(size: str, models: Sequence[str], examples: Path, folder: Path, target: str | None) -> None:
    """Measure what is missing for some models, check the losses, print the tables of this run."""
    for model in models:
        found = Comparison(model, size, examples, target).fill(folder / f"{model}.json")
        print("\n".join(tables([found])), flush=True)
        plain = next(figures for key, figures in found.items() if key.endswith("/plain"))
        far = [distance(figures, plain) for figures in found.values() if "losses" in figures]
        if max(far, default=0.0) > 2e-3:
            raise SystemExit(f"{model}: a plan changed the losses, by {max(far):.1e}")


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flax-examples", type=Path, help="the examples folder of a checkout of Flax")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--toy", action="store_true", help="tiny networks, three steps; results are not kept")
    size.add_argument("--full", action="store_true", help="the authors' sizes: compiled, not run")
    size.add_argument("--table", action="store_true", help="measure nothing: the tables of the results that are kept")
    parser.add_argument("--target", help="the device to compile for with --full, such as h200; this one if left out")
    parser.add_argument("--only", choices=list(CASES), nargs="+", default=list(CASES), help="some of the models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    chosen = parser.parse_args()
    if chosen.target and not chosen.full:
        parser.error("--target is for --full: only what is compiled for the device in use can be trained")
    if chosen.table:
        print(HEADER + "\n".join(tables([load(chosen.out / f"{model}.json") for model in chosen.only])))
        return
    jax.config.update("jax_disable_most_optimizations", chosen.toy)  # it is compiled for longer than it runs
    examples = examples_folder(chosen.flax_examples)
    if not chosen.toy:
        chosen.out.mkdir(parents=True, exist_ok=True)
        run("full" if chosen.full else "trained", chosen.only, examples, chosen.out, chosen.target)
        return
    with tempfile.TemporaryDirectory() as folder:
        run("toy", chosen.only, examples, Path(folder), None)


if __name__ == "__main__":
    main()
