"""How long planning takes without compiles, by its steps, and how it grows with the number of equations.

Networks of many equations are traced, cut, priced by counting, planned and emitted; beside that stands what JAX itself
takes to trace the same gradient. Every network is measured in a process of its own, in that process's CPU seconds,
which other programs on the machine lengthen least; its peak memory is read before JAX's own trace.

    python examples/benchmarks/planning_time.py                  # GPT-48, ResNet-1001, up to 50,000 equations
    python examples/benchmarks/planning_time.py --only gpt48     # one network
    python examples/benchmarks/planning_time.py --toy            # small ones, under a minute

Columns: tracing to a program, cutting, pricing, planning, emission; their sum; `gradient`, JAX's trace of the emitted
function's gradient; `jax`, its trace of the plain one; `found`, all that a `sublinear` function takes to trace its
gradient where its plan is found on disk: tracing, finding, emission and `gradient`. `added` is what that adds to `jax`,
`+ plan` what tracing, planning, emission and `gradient` do. The exponent is the slope of log(sum) over log(equations)
for one network at doubling sizes: 1 is linear. Nothing is compiled or executed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))

import models

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.simulate import predict
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.trace import trace
from jaxsub.planners import get
from jaxsub.search.verify import cut_choices, finish, gradient

GPT = partial(models.gpt, batch=1, length=16, width=32, heads=4, vocab=64)
RESNET = partial(models.resnet, batch=2, size=8, width=4, classes=10)
MLP = partial(models.mlp, batch=2, width=4)
MLP_EQUATIONS = 10
"""Equations in one layer of the network that is measured at doubling sizes."""

NETWORKS: dict[str, Callable[[], models.Built]] = {
    "gpt48": partial(GPT, 48),
    "resnet1001": partial(RESNET, (111, 111, 111)),
    **{f"mlp{n}": partial(MLP, n // MLP_EQUATIONS) for n in (6_250, 12_500, 25_000, 50_000)},
}
TOYS: dict[str, Callable[[], models.Built]] = {
    "gpt2": partial(GPT, 2),
    "resnet20": partial(RESNET, (2, 2, 2)),
    **{f"mlp{n}": partial(MLP, n // MLP_EQUATIONS) for n in (200, 400, 800)},
}
PHASES = ("trace", "cut", "price", "plan", "emit")
SHARE, TOY_SHARE = 0.3, 0.7
"""The budget, as a share of what the plain gradient is predicted to need."""


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add a step's CPU seconds."""
    start = time.process_time()
    yield
    seconds[name] = time.process_time() - start


def measure(build: Callable[[], models.Built], share: float) -> dict[str, Any]:
    """Every step of planning one network, then JAX's own trace of its gradient."""
    loss, init = build()
    args = jax.eval_shape(init, jax.random.key(0))
    jax.clear_caches()  # what making the arguments' shapes has traced
    seconds: dict[str, float] = {}
    with timed(seconds, "trace"):
        program = trace(loss, args, {})
    with timed(seconds, "cut"):
        cuts = cut_choices(program)[0]
    with timed(seconds, "price"):
        chain = Pricer(program, get_target(None)).chain(cuts)
        budget = int(share * predict(chain, chain.plain()).temp_bytes)
    with timed(seconds, "plan"):
        plan = finish(program, get("auto")(chain, budget), Budget(n_bytes=budget))
    with timed(seconds, "emit"):
        emitted, shapes = gradient(program, emit(program, plan))
    with timed(seconds, "gradient"):
        jax.make_jaxpr(emitted)(*shapes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    jax.clear_caches()
    with timed(seconds, "jax"):
        jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    with tempfile.TemporaryDirectory() as folder:
        planned = partial(jaxsub.sublinear, loss, budget=budget, verify=False, cache=folder, progress=False)
        planned().plan(*args)
        jax.clear_caches()
        with timed(seconds, "found"):
            jax.make_jaxpr(jax.value_and_grad(planned()))(*args)
    return {"equations": len(program.eqns), "regions": plan.n_regions, "peak_mib": peak, "seconds": seconds}


def measure_apart(name: str) -> dict[str, Any]:
    """Measure a network in a process of its own."""
    ran = subprocess.run([sys.executable, __file__, "--cell", name], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    s = found["seconds"]
    total = sum(s[p] for p in PHASES)
    with_plan = total + s["gradient"]
    phases = "".join(f"{s[p]:8.2f}" for p in PHASES)
    return (
        f"{name:12}{found['equations']:10}{phases}{total:8.2f}{s['gradient']:10.2f}{s['jax']:8.2f}{s['found']:8.2f}"
        f"{s['found'] / s['jax'] - 1:+8.0%}{with_plan / s['jax'] - 1:+8.0%}{found['regions']:9}"
        f"{found['peak_mib']:8.0f} MiB"
    )


def exponent(found: list[dict[str, Any]]) -> float:
    """The slope of log(seconds) over log(equations)."""
    totals = [sum(f["seconds"][p] for p in PHASES) for f in found]
    return float(np.polyfit(np.log([f["equations"] for f in found]), np.log(totals), 1)[0])


def main() -> None:
    """Measure each network and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="small networks")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, help="these networks")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        is_toy = options.cell in TOYS
        build = TOYS[options.cell] if is_toy else NETWORKS[options.cell]
        print(json.dumps(measure(build, TOY_SHARE if is_toy else SHARE)))
        return
    first, rest = (*PHASES, "sum"), ("jax", "found", "added", "+ plan")
    heads, more = ("".join(f"{name:>8}" for name in names) for names in (first, rest))
    print(f"{'':12}{'equations':>10}{heads}{'gradient':>10}{more}{'regions':>9}{'peak':>12}")
    doubling = []
    for name in tqdm(options.only or (TOYS if options.toy else NETWORKS), unit="network", leave=False):
        found = measure_apart(name)
        tqdm.write(row(name, found))
        doubling += [found] if name.startswith("mlp") else []
    if len(doubling) > 1:
        print(f"seconds grow as equations ** {exponent(doubling):.2f}")


if __name__ == "__main__":
    main()
