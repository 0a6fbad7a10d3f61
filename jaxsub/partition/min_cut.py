"""Find what a run of nodes may save: a minimum cut over its vector-Jacobian product, with recomputation priced.

A run with its backward pass (`jaxsub.partition.traced_run`) goes in, the values that it makes marked. The residuals are
what the backward pass reads of the forward pass. For a price λ of one FLOP in bytes we minimise

    sum of bytes of saved values  +  λ · sum of FLOPs of recomputed equations

subject to: residuals are available; a recomputed equation's inputs are available; a value is available if it is an
input, is saved, or its equation is recomputed. That is a minimum cut, found exactly by one maximum flow for each λ.
Only marked values can be saved: an unmarked value inside a derivative rule, as of tanh, has no name. Values that the
run returns cost no bytes to save, since they are live anyway.

Sources: He & Yu, *Transcending runtime-memory tradeoffs in checkpointing by being fusion aware* (MLSys 2023), for the
cut; the priced recomputation is the Lagrangian of Checkmate's problem (Jain et al., MLSys 2020) on one backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import flops_of
from jaxsub.partition.traced_run import TracedRun

INFINITE = 2**30
LEAST_PRICE, MOST_PRICE = 1e-3, 1e5
MOST_VALUES = 10
"""Up to so many values, every subset is priced."""

FINER_GAIN = 0.005
"""Of those, a choice must recompute less than the one before it by at least this share of the run's FLOPs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One Pareto-optimal split of a run's residuals into saved and recomputed.

    Saved are offsets from the first value that the run makes; their bytes are without values that the run returns.
    """

    saved: tuple[int, ...]
    saved_bytes: int
    recompute_flops: float


def choices(traced: TracedRun, *, least_gain: float = 0.03) -> tuple[Choice, ...]:
    """Find the Pareto-optimal choices of saved values of a run, the one that saves nothing first.

    They are those of the lower convex hull that gain at least this share of its FLOPs over the one before them.
    """
    cut = _Cut.of(traced)
    total = float(cut.flops.sum())
    if not cut.names or total == 0:
        return (cut.choice(frozenset()),)
    return _thinned(cut, _hull(cut, max(least_gain * total, 1e-9) / 4), least_gain)


def choice_of(traced: TracedRun, saved: Iterable[int]) -> Choice:
    """Price the choice of saving these values, by their offsets, as far as the backward pass reads them."""
    return _Cut.of(traced).choice(frozenset(saved))


def finer(traced: TracedRun, found: Sequence[Choice]) -> tuple[Choice, ...]:
    """Find more choices of a small run: every subset of the values that `choices` save, if they are few."""
    cut = _Cut.of(traced)
    values = sorted({offset for choice in found for offset in choice.saved})
    if not 1 < len(values) <= MOST_VALUES:
        return tuple(found)
    every = (subset for n in range(1, len(values) + 1) for subset in combinations(values, n))
    return _thinned(cut, {*found, *(cut.choice(frozenset(subset)) for subset in every)}, FINER_GAIN)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The minimum-cut network: vertex 0 is the source, 1 the sink, then equations, then values."""

    heads: np.ndarray
    tails: np.ndarray
    capacities: np.ndarray  # bytes; infinite is -1
    flops: np.ndarray  # by equation
    names: dict[int, int]  # vertex of a marked value -> offset
    producers: dict[int, int]  # vertex of a value -> vertex of its equation
    bytes: dict[int, int]  # vertex of a value -> bytes
    made: list[int]  # by equation: the values it makes, a set of vertices as the bits of a number
    read: list[int]  # by equation: the values it reads, inputs of the run left out, likewise
    wanted: int  # the values the backward pass reads, likewise

    @classmethod
    def of(cls, traced: TracedRun) -> _Cut:
        eqns, given = traced.forward, set(traced.inputs)
        vertex: dict[Any, int] = {}
        edges: list[tuple[int, int, int]] = []
        names, producers, sizes = {}, {}, {}
        made: list[int] = []
        read: list[int] = []
        for e, eqn in enumerate(eqns):
            offset = traced.mark_of(eqn)
            for var in eqn.outvars:
                v = vertex[var] = 2 + len(eqns) + len(vertex)
                producers[v], sizes[v] = 2 + e, traced.bytes_of(var)
                if offset is None:
                    edges.append((v, 2 + e, -1))
                else:
                    names[v] = offset
                    sizes[v] = 0 if offset in traced.free else sizes[v]
                    edges.append((v, 2 + e, max(sizes[v], 1)))
            made.append(_bits(vertex[v] for v in eqn.outvars))
            reads = [vertex[a] for a in eqn.invars if compat.is_var(a) and a not in given]
            read.append(_bits(reads))
            edges += [(2 + e, v, -1) for v in reads]
        wanted = [vertex[a] for a in set(filter(compat.is_var, traced.residuals)) if a not in given]
        edges += [(0, v, -1) for v in wanted]
        heads, tails, capacities = (
            (np.array(x, dtype=np.int64) for x in zip(*edges, strict=True)) if edges else (np.zeros(0, np.int64),) * 3
        )
        return cls(heads, tails, capacities, np.array([flops_of(e).weighted for e in eqns]), names, producers, sizes,
                   made, read, _bits(wanted))  # fmt: skip

    def solve(self, price: float) -> Choice:
        """Find the cheapest choice when a FLOP costs `price` bytes."""
        from scipy.sparse import csgraph, csr_array  # noqa: PLC0415 - as long to import as all of jaxsub

        n_eqns = len(self.flops)
        costs = np.concatenate([self.capacities.astype(float), price * self.flops])
        finite = np.where(costs < 0, 0.0, costs)
        scale = (INFINITE / 2) / max(finite.sum(), 1.0)
        scaled = np.where(costs < 0, INFINITE, np.ceil(finite * scale)).astype(np.int32)
        heads = np.concatenate([self.heads, 2 + np.arange(n_eqns)])
        tails = np.concatenate([self.tails, np.ones(n_eqns, np.int64)])
        size = 2 + n_eqns + len(self.producers)
        network = csr_array((scaled, (heads, tails)), shape=(size, size), dtype=np.int32)
        network.sum_duplicates()
        network.data = np.minimum(network.data, INFINITE)
        residual = network - csgraph.maximum_flow(network, 0, 1).flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        reached = set(csgraph.breadth_first_order(residual, 0, return_predecessors=False).tolist())
        recomputed = [e for e in range(n_eqns) if 2 + e in reached]
        saved = [v for v, e in self.producers.items() if v in reached and e not in reached]
        return Choice(
            tuple(sorted({self.names[v] for v in saved})),
            sum(self.bytes[v] for v in saved),
            float(self.flops[recomputed].sum()),
        )

    def choice(self, saved: frozenset[int]) -> Choice:
        """Price the choice of saving these values, as far as they are read."""
        bound = [v for v, offset in self.names.items() if offset in saved]
        wanted, unbound, recompute_flops = self.wanted, ~_bits(bound), 0.0
        for made, read, flops in zip(reversed(self.made), reversed(self.read), self.flops[::-1].tolist(), strict=True):
            if made & wanted & unbound:
                recompute_flops += flops
                wanted |= read
        found = [v for v in bound if wanted >> v & 1]
        names, n_bytes = sorted({self.names[v] for v in found}), sum(map(self.bytes.__getitem__, found))
        return Choice(tuple(names), n_bytes, recompute_flops)


def _bits(vertices: Iterable[int]) -> int:
    """Encode a set of vertices as the bits of an integer, which makes pricing thousands of choices fast."""
    return sum(1 << v for v in set(vertices))


def _thinned(cut: _Cut, found: Iterable[Choice], least_gain: float) -> tuple[Choice, ...]:
    """Keep the choices that gain enough over the ones before them, the one that saves nothing first."""
    kept, least_gain = [cut.choice(frozenset())], max(least_gain * float(cut.flops.sum()), 1e-9)
    for choice in sorted(found, key=lambda c: (c.saved_bytes, c.recompute_flops, c.saved)):
        if kept[-1].recompute_flops - choice.recompute_flops >= least_gain:
            if choice.saved_bytes == kept[-1].saved_bytes and len(kept) > 1:
                kept.pop()
            kept.append(choice)
    return tuple(kept)


def _hull(cut: _Cut, least_gain: float) -> set[Choice]:
    """Find the corners of the lower convex hull of bytes and FLOPs, each from the slope between two others.

    Corners closer than `least_gain` FLOPs are merged, so that a few minimum cuts are enough.
    """
    ratio = max(sum(cut.bytes.values()), 1) / float(cut.flops.sum())
    first, last = cut.solve(ratio * LEAST_PRICE), cut.solve(ratio * MOST_PRICE)
    found, lines = {first, last}, [(first, last)]
    while lines:
        low, high = lines.pop()
        gain, n_bytes = low.recompute_flops - high.recompute_flops, high.saved_bytes - low.saved_bytes
        if gain < least_gain or n_bytes <= 0:
            continue
        corner = cut.solve(n_bytes / gain)
        if corner not in found:  # otherwise no choice is below the line
            found.add(corner)
            lines += [(low, corner), (corner, high)]
    return found
