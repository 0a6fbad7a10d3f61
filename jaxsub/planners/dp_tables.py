"""The tables of `optimal`: least extra FLOPs over stages and memory slots, and the runs behind every entry.

Memory is counted in slots of equal size. Two tables are filled from the last stage to the first:

* inside a nest, `extra[s, t, m]`: the backward pass of stages `s .. t` in `m` slots; entering the nest has paid for
  their forward pass. The first stage either is not wrapped, or ends the nest, or opens a run `s .. q - 1` that is
  recomputed: entering it costs its forward pass and `extra[s, q - 1, m]` inside, and the rest has `m` less the slots of
  the values that cross cut `q`;
* at the top level, `top[s, m]`: the same with every option of every item; the first forward pass costs nothing.

For given `s` and `q` the stored bytes do not depend on `t`, so NumPy works on all `t` and `m` at once: `n²/2` steps for
`n` stages. For long chains it fills only entries that a cheapest plan may need: those that recompute no more than plans
without nests in as many slots. Bytes are rounded to slots (`jaxsub.planners.quantize`), so a plan read back from the
tables needs about its slots, not exactly: `jaxsub.core.simulate.predict` has the last word.

Regions save values inside nests too, except the last region of a nest: its backward pass starts at once, so saving
avoids no recompute, and compilers keep more live beside the saved values than is predicted.

Source: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, *Optimal checkpointing for heterogeneous chains* (2019),
with options, inside nests too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxsub.core.chain import Chain, Prediction, Run
from jaxsub.core.simulate import predict
from jaxsub.planners.quantize import INFINITE, Choice, Costs, costs_of

Single = tuple[Run, int, int, np.float32]  # a run without children, slots stored, least slots, FLOPs recomputed
Found = tuple[np.float32, int, Run | None, int]  # FLOPs recomputed, its stop, the run (`None`: a nest), slots stored
TABLE_BYTES = 2**28  # all tables of one kind take at most so much; more stages get fewer slots
FEW_STAGES = 16  # chains of fewer stages are solved quickly without leaving entries out
MOST_FLOPS = np.finfo(np.float32).max
ROUNDING = np.float32(1e-4)  # relative; sums of many float32


@dataclass(frozen=True, slots=True)
class Nests:
    """The least extra FLOPs inside nests, `f32[s, t, m]` for `t >= s`.

    For `[s, t]` the least slots with a finite entry; the length of `m` where no entry is finite.
    """

    extra: np.ndarray
    least: np.ndarray


def nest_table(costs: Costs, most: np.ndarray, inner: Nests | None, is_bounded: bool) -> Nests:
    """Fill the table of stages inside a nest; above `most`, `f32[m]`, the FLOPs of a cheapest plan, it may be infinite.

    With a bound on nesting, `inner` is the table of one level deeper, `None` at the deepest, which has no regions;
    without a bound the table refers to itself.
    """
    n, size = len(costs.chain.stages), costs.n_slots + 1
    nests = Nests(np.empty((n, n, size), dtype=np.float32), np.full((n, n), size, dtype=np.int64))
    scratch = np.empty(n * size, dtype=np.float32)
    for s in reversed(range(n)):
        _fill(costs, most, nests, (inner if is_bounded else nests), s, scratch)
    return nests


def _fill(costs: Costs, most: np.ndarray, nests: Nests, inner: Nests | None, s: int, scratch: np.ndarray) -> None:
    n, size = len(costs.chain.stages), costs.n_slots + 1
    rows = nests.extra[s]
    rows[s:] = INFINITE
    rows[s, costs.leaf[s] :] = 0
    for c in _inner(costs, s, is_deepest=inner is None):
        if not c.option.saved:
            rows[c.stop - 1, c.back :] = np.minimum(rows[c.stop - 1, c.back :], c.last_flops)
        if c.stop < n:
            _relax(costs, nests, s, c.stop, c.stored, c.back, np.full(size, c.flops), scratch)
    if s + 1 < n:
        _relax(costs, nests, s, s + 1, costs.kept[s], costs.kept_back[s], np.zeros(size, np.float32), scratch)
    if inner is not None:
        for q in (s + 1 + np.flatnonzero(costs.flops[s, s + 1 : n] <= most.max())).tolist():
            cost = costs.flops[s, q] + inner.extra[s, q - 1]
            (useful,) = (cost <= most).nonzero()
            if useful.size:
                _relax(costs, nests, s, q, int(costs.stored[s, q]), int(useful[0]), cost[: useful[-1] + 1], scratch)
    finite = np.isfinite(rows[s:])
    nests.least[s, s:] = np.where(finite.any(axis=1), finite.argmax(axis=1), size)


def _inner(costs: Costs, s: int, is_deepest: bool) -> tuple[Choice, ...]:
    return tuple(c for c in costs.inner[s] if not (is_deepest and c.option.is_region))


def _relax(
    costs: Costs, nests: Nests, s: int, q: int, stored: int, back: int, cost: np.ndarray, scratch: np.ndarray
) -> None:
    """Lower the rows of `s` up to `q` or later where a first run `s .. q - 1` that costs `cost[m]` is cheaper.

    Only as many slots as `cost` has entries are looked at.
    """
    size, forward = cost.size, int(costs.forward[s, q])
    at = int(max(stored, back, forward))
    if at >= size:
        return
    rows, later = nests.extra[s, q:, at:size], nests.extra[q, q:, at - stored : size - stored]
    found = scratch[: rows.size].reshape(rows.shape)
    np.add(later, cost[at:], out=found)
    if (tight := int(costs.most_cotangents[q]) - at + forward) > 0:
        barred = costs.barred[q:, at - forward : size - forward]
        np.maximum(found[:, :tight], barred[:, :tight], out=found[:, :tight])
    np.minimum(rows, found, out=rows)


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of one chain on one scale.

    Attributes:
        costs: The chain in slots.
        levels: Tables inside nests, the deepest first; one, which refers to itself, where nesting is not bounded.
        top: `f32[s, m]`: the least extra FLOPs of stages `s` to the last at the top level.
        singles: `[s]`: the runs without children that may start at stage `s` at the top level.
        is_bounded: Whether nesting is bounded.
        floor: Steps in so many slots or fewer are not filled in; -1 where all are.
    """

    costs: Costs
    levels: tuple[Nests, ...]
    top: np.ndarray
    singles: tuple[tuple[Single, ...], ...]
    is_bounded: bool
    floor: int = -1
    _replayed: dict[int, tuple[tuple[Run, ...], Prediction]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def unit_bytes(self) -> float:
        """Bytes of one slot."""
        return self.costs.unit_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of the tables themselves."""
        return self.top.nbytes + sum(nests.extra.nbytes for nests in self.levels)

    def steps(self, most_bytes: float) -> np.ndarray:
        """List the slots, up to so many bytes, at which one slot fewer would recompute more, in rising order."""
        line, slots = self.top[0], np.arange(self.top.shape[1])
        before = np.concatenate([[INFINITE], line[:-1]])
        return np.flatnonzero((line < before) & (slots > self.floor) & (slots * self.unit_bytes <= most_bytes))

    def runs(self, slots: int) -> tuple[Run, ...]:
        """Read the cheapest runs in so many slots back from the tables; there must be some."""
        return tuple(_top_runs(self, slots))

    def replayed(self, slots: int) -> tuple[tuple[Run, ...], Prediction]:
        """The cheapest runs in so many slots and what they cost in exact bytes; a search asks for many twice."""
        if slots not in self._replayed:
            runs = self.runs(slots)
            self._replayed[slots] = runs, predict(self.costs.chain, runs)
        return self._replayed[slots]


def tables_of(chain: Chain, max_bytes: int, slots: int, max_depth: int | None = None,
              least_bytes: float = 0, most_flops: float = math.inf) -> Tables:  # fmt: skip
    """Fill all tables, as far as plans within these limits need them: tighter limits fill sooner.

    There are about so many slots, fewer where the tables would take over a quarter of a GiB.
    """
    entries = len(chain.stages) ** 2 / 2 * (max_depth or 1)
    costs = costs_of(chain, max_bytes, max(16, min(slots, int(TABLE_BYTES / 4 / entries))))
    singles = tuple(tuple(_top_single(costs, s)) for s in range(len(chain.stages)))
    most = np.minimum(_most_flops(costs, singles), np.float32(min(most_flops, float(MOST_FLOPS))))
    floor = min(int(least_bytes / costs.unit_bytes), costs.n_slots) if least_bytes else -1
    most = np.minimum(most, most[max(floor, 0)])  # no plan in more slots recomputes more
    if max_depth is None:
        levels = [nest_table(costs, most, None, is_bounded=False)]
    else:
        levels = [nest_table(costs, most, None, is_bounded=True)]
        for _ in range(max_depth - 1):
            levels.append(nest_table(costs, most, levels[-1], is_bounded=True))
    top = _top_table(costs, singles, most, levels[-1])
    return Tables(costs, tuple(levels), top, singles, max_depth is not None, floor)


def _most_flops(costs: Costs, singles: tuple[tuple[Single, ...], ...]) -> np.ndarray:
    """Bound the FLOPs that a cheapest plan in `m` slots recomputes, `f32[m]`, by the cheapest plan without nests.

    A run that recomputes more is part of no cheapest plan in `m` slots or more, since the memory left only falls along
    a plan. Chains of few stages get no bound: where outputs host stored values, the search also tries plans that are
    cheapest in no number of slots.
    """
    if len(costs.chain.stages) < FEW_STAGES:
        return np.full(costs.n_slots + 1, MOST_FLOPS)
    most: np.ndarray = np.minimum(_top_table(costs, singles)[0] * (1 + ROUNDING), MOST_FLOPS)
    return most


def _top_table(costs: Costs, singles: tuple[tuple[Single, ...], ...], most: np.ndarray | None = None,
               nests: Nests | None = None) -> np.ndarray:  # fmt: skip
    """Fill the table of the top level; without `nests`, of plans without nests."""
    n, size = len(costs.chain.stages), costs.n_slots + 1
    top = np.full((n + 1, size), INFINITE)
    top[n] = 0
    for s in reversed(range(n)):
        runs = [(run.stop, stored, max(at, stored), np.full(size, flops)) for run, stored, at, flops in singles[s]]
        if most is not None and nests is not None:
            runs += _top_nests(costs, most, nests, s)
        for q, stored, at, cost in runs:
            if at < size:
                np.minimum(top[s, at:], cost[at:] + top[q, at - stored : size - stored], out=top[s, at:])
    return top


def _top_nests(costs: Costs, most: np.ndarray, nests: Nests, s: int) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Yield the nests from stage `s` at the top level: the cut that ends each, slots stored, least slots, `cost[m]`."""
    n, size = len(costs.chain.stages), costs.n_slots + 1
    least = np.maximum(costs.forward[s, s + 1 : n], np.maximum(costs.stored[s, s + 1 : n], nests.least[s, s:-1]))
    fits = np.flatnonzero(least < size)
    fits = fits[costs.flops[s, s + 1 + fits] <= most[least[fits]]]
    for at, q in zip(least[fits].tolist(), (s + 1 + fits).tolist(), strict=True):
        yield q, int(costs.stored[s, q]), at, costs.flops[s, q] + nests.extra[s, q - 1]


def _top_single(costs: Costs, s: int) -> Iterator[Single]:
    """Yield the runs without children that may start at stage `s` at the top level."""
    n, nothing = len(costs.chain.stages), np.float32(0)
    if s == n - 1:
        yield Run(s, n), 0, int(costs.leaf[s]), nothing
    else:
        at = max(int(costs.forward[s, s + 1]), int(costs.kept_back[s]))
        yield Run(s, s + 1), int(costs.kept[s]), at, nothing
    for c in costs.choices[s]:
        is_last = c.stop == n
        at = c.back if is_last else max(c.back, int(costs.forward[s, c.stop]))
        yield Run(s, c.stop, c.option), 0 if is_last else c.stored, at, c.flops


def _top_runs(tables: Tables, m: int) -> Iterator[Run]:
    costs, top, s = tables.costs, tables.top, 0
    level = len(tables.levels) - 1
    extra = tables.levels[level].extra
    while s < len(costs.chain.stages):
        found: list[Found] = [(flops + top[run.stop, m - stored], run.stop, run, stored)
                 for run, stored, at, flops in tables.singles[s] if m >= max(at, stored)]  # fmt: skip
        cuts = _cuts(costs, s, len(costs.chain.stages), m, 0)
        rest = top[cuts, m - costs.stored[s, cuts]]
        found += _best_nest(costs, s, cuts, costs.flops[s, cuts] + extra[s, cuts - 1, m] + rest)
        _, q, run, stored = min(found, key=lambda f: f[0])
        yield run if run is not None else _nest(tables, level, s, q, m)
        s, m = q, m - stored


def _cuts(costs: Costs, s: int, stop: int, m: int, cotangents: int) -> np.ndarray:
    """List the cuts before `stop` at which a nest from `s` may end, if its forward pass is to fit `m` slots."""
    cuts = np.arange(s + 1, stop)
    fitting: np.ndarray = cuts[(costs.stored[s, cuts] <= m) & (costs.forward[s, cuts] + cotangents <= m)]
    return fitting


def _best_nest(costs: Costs, s: int, cuts: np.ndarray, flops: np.ndarray) -> list[Found]:
    """Find the cheapest nest, as a list of one; an empty list where there is none."""
    if not cuts.size:
        return []
    best = int(flops.argmin())
    return [(flops[best], int(cuts[best]), None, int(costs.stored[s, cuts[best]]))]


def _nest(tables: Tables, level: int, s: int, q: int, m: int) -> Run:
    if q == s + 1 and m >= tables.costs.leaf[s]:
        return tables.costs.chain.recompute(s)
    return Run(s, q, None, tuple(_nest_runs(tables, level, s, q - 1, m)))


def _nest_runs(tables: Tables, level: int, s: int, t: int, m: int) -> Iterator[Run]:
    """Yield the runs behind `levels[level].extra[s, t, m]`."""
    while s <= t:
        q, run, stored = _first_of_nest(tables, level, s, t, m)
        inner = level - 1 if tables.is_bounded else level
        yield run if run is not None else _nest(tables, inner, s, q, m)
        s, m = q, m - stored


def _first_of_nest(tables: Tables, level: int, s: int, t: int, m: int) -> tuple[int, Run | None, int]:
    """Find the first of the cheapest runs of `s .. t`: where it stops, the run or `None` for a nest, slots stored."""
    costs, extra = tables.costs, tables.levels[level].extra
    if s == t and m >= costs.leaf[s]:
        return s + 1, Run(s, s + 1), 0
    found: list[Found] = []
    cotangents, kept = costs.cotangents[t], int(costs.kept[s])
    if s < t and m >= max(kept, costs.kept_back[s], costs.forward[s, s + 1] + cotangents):
        found.append((extra[s + 1, t, m - kept], s + 1, Run(s, s + 1), kept))
    is_deepest = tables.is_bounded and level == 0
    for c in (c for c in _inner(costs, s, is_deepest) if m >= c.back):
        if c.stop == t + 1 and not c.option.saved:
            found.append((c.last_flops, c.stop, Run(s, c.stop, c.option), 0))
        elif c.stop <= t and m >= max(c.stored, costs.forward[s, c.stop] + cotangents):
            found.append((c.flops + extra[c.stop, t, m - c.stored], c.stop, Run(s, c.stop, c.option), c.stored))
    if not is_deepest:
        cuts = _cuts(costs, s, t + 1, m, cotangents)
        inner = tables.levels[level - tables.is_bounded].extra[s, cuts - 1, m]
        rest = extra[cuts, t, m - costs.stored[s, cuts]]
        found += _best_nest(costs, s, cuts, costs.flops[s, cuts] + inner + rest)
    return min(found, key=lambda f: f[0])[1:]


def depth(runs: tuple[Run, ...]) -> int:
    """Count how deep regions nest; 0 where there are none."""
    return max(
        (depth(r.children) + (bool(r.children) or (r.option is not None and r.option.is_region)) for r in runs),
        default=0,
    )
