"""What people use instead, re-expressed for JAX from its sources, and measured by the same compiler.

Plans by hand are in `examples/measuring.py`, which serves other benchmarks too. Here are the rest. As
planners on the stages that `jaxsub` sees, without its gradient barriers: Alpa's division into layers of equal FLOPs
(Zheng et al., OSDI 2022, `automatic_remat`), and the memory budget of PyTorch's partitioner (a minimum cut over what is
cheap to recompute, He and Yu, MLSys 2023, then a knapsack over what to save). Chen et al.'s greedy segments are
`jaxsub`'s own `planner="chen"`, its barriers taken away. Haliax's nested scan is `nested_scan`. XLA's own
rematerialisation pass, which runs on GPUs where a program does not fit, is `by_xla`; on the CPU there is none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from measuring import traced_flops

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Option, Run
from jaxsub.core.plan import plan_from_runs
from jaxsub.devices.targets import Target, get_target

KNAPSACK_SLOTS = 400
NO_TILES = "output tile sizes"
"""What XLA says where it would write a product's kernel itself and finds no tiles for it; with a GPU it tries more."""

SLACK = 1.1
"""Alpa lets a layer have this many times the mean FLOPs of a layer, at least those of its heaviest stage."""


def nested_scan(body: Callable, carry: Any, xs: Any) -> tuple[Any, None]:
    """Haliax's `ScanCheckpointPolicy(nested=True)`: a scan of scans, both bodies checkpointed.

    Args:
        body: The body of the scan, as for `jax.lax.scan`; what it collects is dropped.
        carry: The first carry.
        xs: What is scanned over, of `length` steps; the outer scan takes the divisor nearest to its root.
    """
    length = len(jax.tree.leaves(xs)[0])
    outer = min((n for n in range(1, length + 1) if length % n == 0), key=lambda n: abs(n - math.sqrt(length)))
    blocks = jax.tree.map(lambda leaf: leaf.reshape(outer, length // outer, *leaf.shape[1:]), xs)
    step = jax.checkpoint(body, prevent_cse=False)
    return jax.lax.scan(jax.checkpoint(lambda carry, block: jax.lax.scan(step, carry, block)), carry, blocks)


def by_xla(loss: Callable, args: tuple[Any, ...], target: str, share: float) -> dict[str, Any]:
    """A gradient compiled for a GPU so small that XLA's own rematerialisation pass runs.

    The compile is done here rather than by `jaxsub`, for the program's text is needed: the pass clones fusions,
    products among them, and clones are the recompute. It leaves calls alone: convolutions, which are cuDNN's,
    and products where XLA finds no tiles for one of them, so that all are cuBLAS's.
    JAX's platform must be the CPU.

    Args:
        loss: The loss.
        args: The shapes of its arguments.
        target: A GPU that is not there.
        share: What the pass is given, as a share of the plain gradient's temporary memory.
    """
    gradient, found = jax.jit(jax.value_and_grad(loss)), get_target(target)
    plain = _compiled_for(found, gradient, args)
    memory = plain.memory_analysis()
    temp_bytes = int(share * memory.temp_size_in_bytes)
    room = memory.argument_size_in_bytes + memory.output_size_in_bytes + temp_bytes
    assert found.spec is not None
    spec = re.sub(r"device_memory_size: \d+", f"device_memory_size: {room}", found.spec)
    small = _compiled_for(replace(found, spec=spec), gradient, args)
    again = dot_flops(small.as_text()) - dot_flops(plain.as_text())
    return {
        "bytes": small.memory_analysis().temp_size_in_bytes,
        "flops_ratio": 1 + again / traced_flops(loss, args),
    }


def _compiled_for(target: Target, fun: Any, args: tuple[Any, ...]) -> Any:
    topology = topologies.get_topology_desc(platform="cuda", target_config=target.spec, topology="1x1x1")
    where = jax.sharding.SingleDeviceSharding(topology.devices[0])
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), args)
    lowered = fun.lower(*placed)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def dot_flops(text: str) -> float:
    """FLOPs of the matrix products in a compiled program's text, each counted once."""
    shapes = {name: _dims(dims) for name, dims in re.findall(r"%([\w.-]+) = \w+\[([\d,]*)\]", text)}
    total = 0.0
    for out, lhs, contracted in re.findall(
        r"%([\w.-]+) = \S+ dot\(%([\w.-]+),.*?lhs_contracting_dims={([\d,]*)}", text
    ):
        total += 2.0 * math.prod(shapes[out]) * math.prod(shapes[lhs][axis] for axis in _dims(contracted))
    return total


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


@dataclass(frozen=True, slots=True)
class EqualFlops:
    """Alpa: divide into layers of about equal FLOPs with the least bytes between them; each is a region.

    Attributes:
        layers: How many layers.
    """

    layers: int

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> jaxsub.Plan:
        """Plan a chain; the number of layers decides what it needs, not the budget."""
        ends = self._ends(chain)
        runs = tuple(
            Run(start, stop) if stop == len(chain.stages) else _region(chain, start, stop)
            for start, stop in zip((0, *ends), ends, strict=False)
        )
        return _without_barriers(chain, runs, "equal FLOPs")

    def _ends(self, chain: Chain) -> list[int]:
        """Where layers end: under the least slack, in steps of 10 %, with which stages can be divided at all."""
        flops = np.array([stage.forward_flops for stage in chain.stages])
        crossing = [*map(float, chain.crossing_bytes[0, 1 : len(flops)]), 0.0]
        most = max(SLACK * flops.sum() / self.layers, flops.max())
        while not (ends := _divided(flops, crossing, self.layers, most)):
            most *= SLACK
        return ends


def _divided(flops: np.ndarray, crossing: Sequence[float], layers: int, most: float) -> list[int]:
    """The ends of at most so many runs of stages, none heavier than `most`, least bytes between; none if none are."""
    before, n = np.concatenate([[0], np.cumsum(flops)]), len(flops)
    least = np.full((layers + 1, n + 1), np.inf)
    came_from = np.zeros((layers + 1, n + 1), np.intp)
    least[0, 0] = 0
    for layer in range(1, layers + 1):
        for stop in range(1, n + 1):
            starts = np.flatnonzero(before[stop] - before[:stop] <= most * (1 + 1e-9))
            costs = least[layer - 1, starts] + crossing[stop - 1]
            if len(costs):
                at = int(costs.argmin())
                least[layer, stop], came_from[layer, stop] = costs[at], starts[at]
    reached = np.flatnonzero(np.isfinite(least[:, n]))
    if not len(reached):
        return []
    layer, ends, stop = int(reached[-1]), [], n  # fewer layers where there are not that many stages
    while stop:
        ends.append(stop)
        stop, layer = int(came_from[layer, stop]), layer - 1
    return ends[::-1]


@dataclass(frozen=True, slots=True)
class Knapsack:
    """PyTorch's partitioner: recompute cheap results; of the rest, save within a share of the bytes.

    Attributes:
        share: Of the bytes that are saved when only cheap results are recomputed.
    """

    share: float

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> jaxsub.Plan:
        """Plan a chain; the share decides what it needs, not the budget."""
        last = len(chain.stages) - 1
        single = {item.start: item.options for item in chain.items if item.stop - item.start == 1}
        options = [single[s] for s in range(last)]
        most = sum(min(o, key=lambda option: option.recompute_flops).saved_bytes for o in options)
        chosen = _knapsack(options, self.share * most)
        runs = (*(Run(s, s + 1, option) for s, option in enumerate(chosen)), Run(last, last + 1))
        return _without_barriers(chain, runs, "knapsack")


def _knapsack(options: Sequence[Sequence[Option]], budget_bytes: float) -> list[Option]:
    """One option a stage, of least recompute in all, whose saved bytes fit."""
    unit = max(budget_bytes / KNAPSACK_SLOTS, 1.0)
    costs = np.zeros(KNAPSACK_SLOTS + 1)
    choices = []
    for stage_options in options:
        candidates = np.full((len(stage_options), KNAPSACK_SLOTS + 1), np.inf)
        for i, option in enumerate(stage_options):
            weight = int(option.saved_bytes // unit)
            if weight <= KNAPSACK_SLOTS:
                candidates[i, weight:] = costs[: KNAPSACK_SLOTS + 1 - weight] + option.recompute_flops
        choices.append(candidates.argmin(0))
        costs = candidates.min(0)
    chosen, slot = [], KNAPSACK_SLOTS
    for stage_options, choice in zip(reversed(options), reversed(choices), strict=True):
        option = stage_options[choice[slot]]
        chosen.append(option)
        slot -= int(option.saved_bytes // unit)
    return chosen[::-1]


def _region(chain: Chain, start: int, stop: int) -> Run:
    """A region that saves nothing inside."""
    if stop - start == 1:
        return chain.recompute(start)
    return Run(start, stop, None, tuple(Run(s, s + 1) for s in range(start, stop)))


def _without_barriers(chain: Chain, runs: Sequence[Run], planner: str) -> jaxsub.Plan:
    plan = plan_from_runs(chain, runs, budget=Budget(n_bytes=None), planner=planner)
    return plan.replace(barriers=())


def planners(n_blocks: int) -> Iterator[tuple[str, Any]]:
    """Peers that plan, with their settings."""
    root = math.isqrt(n_blocks)
    for layers in sorted({root, 2 * root, n_blocks}):
        yield f"Alpa, {layers} layers", EqualFlops(layers)
    for share in (0.75, 0.5, 0.25):
        yield f"PyTorch, {share:.0%} saved", Knapsack(share)
