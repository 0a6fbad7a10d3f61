"""What people use instead, re-expressed for JAX from its sources, and measured by the same compiler.

By hand, round the blocks of a network: `jax.checkpoint` with each of JAX's policies, every √n blocks, and recursive
halving (jax PR 4363). As planners on the stages that `jaxsub` sees, without its gradient barriers: Alpa's division
into layers of equal FLOPs (Zheng et al., OSDI 2022, `automatic_remat`), and the memory budget of PyTorch's partitioner
(a minimum cut over what is cheap to make again, He and Yu, MLSys 2023, then a knapsack over what to save). Chen et
al.'s greedy segments are `jaxsub`'s own `planner="chen"`, its barriers taken away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import jaxsub
from jaxsub.budget import Budget
from jaxsub.chain import Chain, Option, Run
from jaxsub.plan import plan_from_runs

KNAPSACK_SLOTS = 400
SLACK = 1.1
"""Alpa lets a layer have this many times the mean FLOPs of a layer, at least those of its heaviest stage."""


@dataclass(frozen=True, slots=True)
class ByHand:
    """A wrapper that goes round blocks, and how many blocks it goes round; a tuple nests."""

    label: str
    wrap: Callable
    every: int | tuple[int, ...]


def convolutions_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save what convolutions make."""
    return primitive.name == "conv_general_dilated"


def by_hand(n_blocks: int, is_convolutional: bool) -> Iterator[ByHand]:
    """Everything that is written by hand round `n_blocks` blocks."""
    policies, root = jax.checkpoint_policies, math.isqrt(n_blocks)
    yield ByHand("every block", jax.checkpoint, 1)
    yield ByHand("√n segments", jax.checkpoint, root)
    halves = tuple(n_blocks >> level for level in range(1, n_blocks.bit_length()) if n_blocks >> level)
    yield ByHand("recursive halving", jax.checkpoint, halves)
    if is_convolutional:
        yield ByHand("convolutions saved", partial(jax.checkpoint, policy=convolutions_saveable), 1)
    for name in ("dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable"):
        yield ByHand(name, partial(jax.checkpoint, policy=getattr(policies, name)), 1)


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
        flops = np.array([stage.forward_flops for stage in chain.stages])
        before, n = np.concatenate([[0], np.cumsum(flops)]), len(flops)
        most = max(SLACK * before[-1] / self.layers, flops.max())
        crossing = [float(chain.crossing_bytes[0, q]) if q < n else 0.0 for q in range(n + 1)]
        least = np.full((self.layers + 1, n + 1), np.inf)
        came_from = np.zeros((self.layers + 1, n + 1), np.intp)
        least[0, 0] = 0
        for layer in range(1, self.layers + 1):
            for stop in range(1, n + 1):
                starts = np.flatnonzero(before[stop] - before[:stop] <= most)
                costs = least[layer - 1, starts] + crossing[stop]
                if len(costs):
                    at = int(costs.argmin())
                    least[layer, stop], came_from[layer, stop] = costs[at], starts[at]
        layer = int(np.flatnonzero(np.isfinite(least[:, n]))[-1])  # fewer where there are not that many stages
        ends, stop = [], n
        while stop:
            ends.append(stop)
            stop, layer = int(came_from[layer, stop]), layer - 1
        return ends[::-1]


@dataclass(frozen=True, slots=True)
class Knapsack:
    """PyTorch's partitioner: what is cheap is made again; of the rest, save within a share of the bytes.

    Attributes:
        share: Of the bytes that are saved when only what is cheap is made again.
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
    for offered in options:
        candidates = np.full((len(offered), KNAPSACK_SLOTS + 1), np.inf)
        for i, option in enumerate(offered):
            weight = int(option.saved_bytes // unit)
            if weight <= KNAPSACK_SLOTS:
                candidates[i, weight:] = costs[: KNAPSACK_SLOTS + 1 - weight] + option.recompute_flops
        choices.append(candidates.argmin(0))
        costs = candidates.min(0)
    chosen, slot = [], KNAPSACK_SLOTS
    for offered, choice in zip(reversed(options), reversed(choices), strict=True):
        option = offered[choice[slot]]
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
