"""The tables of `optimal`: least extra FLOPs over stages and memory slots, and the runs behind every entry.

Memory is counted in slots of equal size. Two tables are filled from the last stage to the first:

* inside a nest, `extra[s, t, m]`: stages `s .. t` backward in `m` slots, their forward pass being paid for by
  entering the nest. The first of them either stands unwrapped, or ends the nest, or opens a run `s .. q - 1` that
  is executed again: entering it costs its forward pass and `extra[s, q - 1, m]` inside, and what follows has
  `m` less what crosses cut `q`;
* at the top level, `top[s, m]`, alike, with every option of every item, and the first forward pass for nothing.

For a given `s` and `q` what is stored does not depend on `t`: NumPy works on all `t` and `m` at once, `n²/2` steps
for `n` stages. Bytes that are stored are rounded to the nearest slot, what stands only for a moment up. A plan read
back from the tables is therefore near its slot but not exactly at it: `jaxsub.chain.predict` has the last word.

Source: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, *Optimal checkpointing for heterogeneous chains* (2019),
with options at the top level and without checkpointed tapes inside nests other than whole stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxsub.chain import Chain, Option, Run

Single = tuple[Run, int, int, np.float32]  # a run that is no nest, slots stored, least slots, FLOPs again
Found = tuple[np.float32, int, Run | None, int]  # FLOPs again, where it stops, the run (`None`: a nest), slots stored
INFINITE = np.float32(np.inf)
TRIED_UNITS = 64  # sizes of a slot that are compared for how well stored bytes fall on whole slots
TABLE_BYTES = 2**28  # what all tables of one kind may take; more stages get fewer slots


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of one item, in slots.

    Attributes:
        stop: The stage after the item's last.
        option: The option.
        stored: Slots it holds until its backward pass: what it saves and what crosses its end.
        back: Slots its backward pass needs.
        flops: What it executes again.
        last_flops: What it executes again where it ends a nest, whose forward pass is paid for.
    """

    stop: int
    option: Option
    stored: int
    back: int
    flops: np.float32
    last_flops: np.float32


@dataclass(frozen=True, slots=True)
class Costs:
    """A chain in slots; `s`, `t` are stages, `q` cuts.

    Attributes:
        chain: The chain.
        unit_bytes: Bytes of one slot.
        n_slots: How many slots there are; tables have one entry more.
        stored: `[s, q]`: what crosses cut `q` and is made in `s .. q - 1`, and what is hoisted for a nest of them.
        forward: `[s, q]`: what running `s .. q - 1` forward needs.
        flops: `[s, q]`: what executing `s .. q - 1` again costs.
        held: `[t]`: cotangents that stand when a nest that ends with `t` begins.
        leaf: `[s]`: what the backward pass of a stage that ends its scope needs.
        kept: `[s]`: what an unwrapped stage stores.
        kept_back: `[s]`: what its backward pass needs.
        choices: `[s]`: the options of items that start at `s`.
        wholes: `[s]`: those that save no values by name, for use inside nests.
        late: `[t, m]`: infinite while `m` is below `held[t]`.
        most_held: `[q]`: the most of `held` from `q` on.
    """

    chain: Chain
    unit_bytes: float
    n_slots: int
    stored: np.ndarray
    forward: np.ndarray
    flops: np.ndarray
    held: np.ndarray
    leaf: np.ndarray
    kept: np.ndarray
    kept_back: np.ndarray
    choices: tuple[tuple[Choice, ...], ...]
    wholes: tuple[tuple[Choice, ...], ...]
    late: np.ndarray
    most_held: np.ndarray


def costs_of(chain: Chain, max_bytes: int, slots: int) -> Costs:
    """Count a chain's bytes in slots.

    Args:
        chain: The chain.
        max_bytes: What all slots together hold, in bytes.
        slots: About how many slots; up to a quarter more where that puts sizes on whole slots, and never below one
            byte each.
    """
    unit_bytes = _unit(chain, max_bytes, slots)
    n, n_slots = len(chain.stages), int(max_bytes / unit_bytes + 1e-9)
    crossing, passing = chain.crossing_bytes, chain.passing_bytes
    around = passing[np.arange(n), np.arange(1, n + 1)]
    held = nearest(chain.cotangent_bytes[0, 1:], unit_bytes)
    kept = _column(chain, "keep_bytes") + crossing[np.arange(n), np.arange(1, n + 1)]
    choices = tuple(tuple(_choices(chain, s, unit_bytes)) for s in range(n))
    return Costs(
        chain, unit_bytes, n_slots,
        stored=nearest(crossing + _hoisted(chain), unit_bytes),
        forward=up(_forward(chain), unit_bytes),
        flops=_again(chain),
        held=held,
        leaf=up(_column(chain, "transient_bytes") + around, unit_bytes),
        kept=nearest(kept, unit_bytes),
        kept_back=up(_column(chain, "keep_transient_bytes") + around, unit_bytes),
        choices=choices,
        wholes=tuple(tuple(c for c in some if not c.option.saved) for some in choices),
        late=np.where(np.arange(n_slots + 1) < held[:, None], INFINITE, np.float32(0)),
        most_held=np.maximum.accumulate(held[::-1])[::-1],
    )  # fmt: skip


def nearest(n_bytes: np.ndarray, unit_bytes: float) -> np.ndarray:
    """Whole slots nearest to bytes."""
    return np.floor(np.asarray(n_bytes) / unit_bytes + 0.5).astype(np.int64)


def up(n_bytes: np.ndarray, unit_bytes: float) -> np.ndarray:
    """The fewest whole slots that hold bytes."""
    return np.ceil(np.asarray(n_bytes) / unit_bytes - 1e-9).astype(np.int64)


def _unit(chain: Chain, max_bytes: int, slots: int) -> float:
    # Chains of equal stages store the same few sizes again and again: a slot that divides them has no rounding.
    most = max_bytes / slots
    if most <= 1:
        return 1.0
    stages = np.arange(len(chain.stages))
    crossing = chain.crossing_bytes[stages, stages + 1]
    saved = [o.saved_bytes + chain.crossing_bytes[i.start, i.stop] for i in chain.items for o in i.options]
    sizes = np.concatenate([crossing, crossing + _column(chain, "keep_bytes"), np.array(saved, dtype=np.int64)])
    sizes, counts = np.unique(sizes[sizes > 0], return_counts=True)
    units = np.maximum(1.0, most * np.linspace(1.0, 0.8, TRIED_UNITS))
    in_slots = sizes[:, None] / units
    errors = np.abs(in_slots - np.floor(in_slots + 0.5)) * units * counts[:, None]
    return float(units[np.argmin(errors.sum(axis=0))])


def _column(chain: Chain, name: str) -> np.ndarray:
    return np.array([getattr(stage, name) for stage in chain.stages], dtype=np.int64)


def _hoisted(chain: Chain) -> np.ndarray:
    """`[s, q]`: what the compiler makes beforehand for stages `s .. q - 1`; zero for q <= s."""
    before = np.concatenate([[0], np.cumsum(_column(chain, "hoisted_bytes"))])
    table: np.ndarray = np.maximum(before[None, :] - before[:-1, None], 0)
    return table


def _forward(chain: Chain) -> np.ndarray:
    n = len(chain.stages)
    each = chain.crossing_bytes[:, :n] + _column(chain, "forward_bytes")
    each[np.tril_indices(n, -1)] = 0
    table = np.zeros((n, n + 1), dtype=np.int64)
    table[:, 1:] = np.maximum.accumulate(each, axis=1)
    return table


def _again(chain: Chain) -> np.ndarray:
    forward = np.array([stage.forward_flops for stage in chain.stages], dtype=np.float64)
    before = np.concatenate([[0.0], np.cumsum(forward)])
    tail = np.array([0.0] + [stage.tail_flops for stage in chain.stages])
    last = np.concatenate([[0.0], before[:-1]])
    again: np.ndarray = last - before[:-1, None] + tail
    return again.astype(np.float32)


def _choices(chain: Chain, start: int, unit_bytes: float) -> Iterator[Choice]:
    for item in chain.items:
        if item.start == start:
            crossing, passing = (int(t[start, item.stop]) for t in (chain.crossing_bytes, chain.passing_bytes))
            for option in item.options:
                stored = int(nearest(np.array(max(0, crossing + option.saved_bytes)), unit_bytes))
                back = int(up(np.array(option.transient_bytes + passing), unit_bytes))
                flops, last_flops = np.float32(option.recompute_flops), np.float32(option.loop_flops)
                yield Choice(item.stop, option, stored, back, flops, last_flops)


@dataclass(frozen=True, slots=True)
class Nests:
    """The least extra FLOPs inside nests.

    Attributes:
        extra: `f32[s, t, m]`; defined for `t >= s`.
        least: `[s, t]`: the least slots with a finite entry; one more than there are where none is.
    """

    extra: np.ndarray
    least: np.ndarray


def nest_table(costs: Costs, inner: Nests | None, is_bounded: bool) -> Nests:
    """Fill the table of what holds inside a nest.

    Args:
        costs: The chain in slots.
        inner: With a bound on nesting, the table of one level deeper; `None` at the deepest, which has no regions.
        is_bounded: Whether nesting is bounded; without a bound the table refers to itself.
    """
    n, size = len(costs.chain.stages), costs.n_slots + 1
    nests = Nests(np.empty((n, n, size), dtype=np.float32), np.full((n, n), size, dtype=np.int64))
    scratch = np.empty(n * size, dtype=np.float32)
    for s in reversed(range(n)):
        _fill(costs, nests, (inner if is_bounded else nests), s, scratch)
    return nests


def _fill(costs: Costs, nests: Nests, inner: Nests | None, s: int, scratch: np.ndarray) -> None:
    n, size = len(costs.chain.stages), costs.n_slots + 1
    rows = nests.extra[s]
    rows[s:] = INFINITE
    rows[s, costs.leaf[s] :] = 0
    for c in _wholes(costs, s, is_deepest=inner is None):
        rows[c.stop - 1, c.back :] = np.minimum(rows[c.stop - 1, c.back :], c.last_flops)
        if c.stop < n:
            _offer(costs, nests, s, c.stop, c.stored, c.back, np.full(size, c.flops), scratch)
    if s + 1 < n:
        _offer(costs, nests, s, s + 1, costs.kept[s], costs.kept_back[s], np.zeros(size, np.float32), scratch)
    for q in range(s + 1, n + 1):
        finite = np.isfinite(rows[q - 1])
        nests.least[s, q - 1] = finite.argmax() if finite[-1] else size
        if inner is not None and q < n:
            cost = costs.flops[s, q] + inner.extra[s, q - 1]
            _offer(costs, nests, s, q, costs.stored[s, q], inner.least[s, q - 1], cost, scratch)


def _wholes(costs: Costs, s: int, is_deepest: bool) -> tuple[Choice, ...]:
    return tuple(c for c in costs.wholes[s] if not (is_deepest and c.option.is_region))


def _offer(
    costs: Costs, nests: Nests, s: int, q: int, stored: int, back: int, cost: np.ndarray, scratch: np.ndarray
) -> None:
    """Offer all ranges that start at `s` and end at `q` or later a first run `s .. q - 1` that costs `cost[m]`."""
    size, forward = costs.n_slots + 1, int(costs.forward[s, q])
    at = int(max(stored, back, forward))
    if at >= size:
        return
    rows, later = nests.extra[s, q:, at:], nests.extra[q, q:, at - stored : size - stored]
    found = scratch[: rows.size].reshape(rows.shape)
    np.add(later, cost[at:], out=found)
    if costs.most_held[q] > at - forward:
        np.maximum(found, costs.late[q:, at - forward : size - forward], out=found)
    np.minimum(rows, found, out=rows)


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of one chain on one scale.

    Attributes:
        costs: The chain in slots.
        levels: Tables inside nests, the deepest first; one, which refers to itself, where nesting is not bounded.
        top: `f32[s, m]`: the least extra FLOPs of stages `s` to the last at the top level.
        singles: `[s]`: all but nests that may stand at stage `s` at the top level.
        is_bounded: Whether nesting is bounded.
    """

    costs: Costs
    levels: tuple[Nests, ...]
    top: np.ndarray
    singles: tuple[tuple[Single, ...], ...]
    is_bounded: bool

    @property
    def unit_bytes(self) -> float:
        """Bytes of one slot."""
        return self.costs.unit_bytes

    def steps(self, most_bytes: float) -> np.ndarray:
        """Slots, up to so many bytes, at which the last one has bought something, in rising order; maybe none."""
        line = self.top[0]
        before = np.concatenate([[INFINITE], line[:-1]])
        return np.flatnonzero((line < before) & (np.arange(line.size) * self.unit_bytes <= most_bytes))

    def runs(self, slots: int) -> tuple[Run, ...]:
        """Read the cheapest runs in so many slots back from the tables; there must be some."""
        return tuple(_top_runs(self, slots))

    def nest(self, start: int, stop: int, slots: int) -> Run:
        """The cheapest nest of stages `start .. stop - 1` in so many slots; there must be one."""
        return _nest(self, len(self.levels) - 1, start, stop, slots)


def tables_of(chain: Chain, max_bytes: int, slots: int, max_depth: int | None = None) -> Tables:
    """Fill all tables.

    Args:
        chain: The chain.
        max_bytes: The most memory to plan for, in bytes.
        slots: About how many slots to divide it into; fewer where the tables would take over a quarter of a GiB.
        max_depth: How deep regions may stand in each other; `None` for any depth.
    """
    entries = len(chain.stages) ** 2 / 2 * (max_depth or 1)
    costs = costs_of(chain, max_bytes, max(16, min(slots, int(TABLE_BYTES / 4 / entries))))
    if max_depth is None:
        levels = [nest_table(costs, None, is_bounded=False)]
    else:
        levels = [nest_table(costs, None, is_bounded=True)]
        for _ in range(max_depth - 1):
            levels.append(nest_table(costs, levels[-1], is_bounded=True))
    singles = tuple(tuple(_top_single(costs, s)) for s in range(len(chain.stages)))
    return Tables(costs, tuple(levels), _top_table(costs, levels[-1], singles), singles, max_depth is not None)


def _top_table(costs: Costs, nests: Nests, singles: tuple[tuple[Single, ...], ...]) -> np.ndarray:
    n, size = len(costs.chain.stages), costs.n_slots + 1
    top = np.full((n + 1, size), INFINITE)
    top[n] = 0
    for s in reversed(range(n)):
        offers = [(run.stop, stored, at, np.full(size, flops)) for run, stored, at, flops in singles[s]]
        for q in range(s + 1, n):
            at = max(int(costs.forward[s, q]), int(nests.least[s, q - 1]))
            offers.append((q, int(costs.stored[s, q]), at, costs.flops[s, q] + nests.extra[s, q - 1]))
        for q, stored, at, cost in offers:
            if (at := max(at, stored)) < size:
                top[s, at:] = np.minimum(top[s, at:], cost[at:] + top[q, at - stored : size - stored])
    return top


def _top_single(costs: Costs, s: int) -> Iterator[Single]:
    """All but nests that may stand at stage `s` at the top level."""
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


def _cuts(costs: Costs, s: int, stop: int, m: int, late: int) -> np.ndarray:
    """Cuts before `stop` at which a nest that starts at `s` may end in `m` slots, as far as its forward pass goes."""
    cuts = np.arange(s + 1, stop)
    fitting: np.ndarray = cuts[(costs.stored[s, cuts] <= m) & (costs.forward[s, cuts] + late <= m)]
    return fitting


def _best_nest(costs: Costs, s: int, cuts: np.ndarray, flops: np.ndarray) -> list[Found]:
    """The cheapest nest, in a list; an empty list where there is none."""
    if not cuts.size:
        return []
    best = int(flops.argmin())
    return [(flops[best], int(cuts[best]), None, int(costs.stored[s, cuts[best]]))]


def _nest(tables: Tables, level: int, s: int, q: int, m: int) -> Run:
    if q == s + 1 and m >= tables.costs.leaf[s]:
        return tables.costs.chain.recompute(s)
    return Run(s, q, None, tuple(_nest_runs(tables, level, s, q - 1, m)))


def _nest_runs(tables: Tables, level: int, s: int, t: int, m: int) -> Iterator[Run]:
    """The runs behind `levels[level].extra[s, t, m]`."""
    while s <= t:
        q, run, stored = _first_of_nest(tables, level, s, t, m)
        inner = level - 1 if tables.is_bounded else level
        yield run if run is not None else _nest(tables, inner, s, q, m)
        s, m = q, m - stored


def _first_of_nest(tables: Tables, level: int, s: int, t: int, m: int) -> tuple[int, Run | None, int]:
    """The first run of the cheapest runs of `s .. t`: where it stops, itself or `None` for a nest, what it stores."""
    costs, extra = tables.costs, tables.levels[level].extra
    if s == t and m >= costs.leaf[s]:
        return s + 1, Run(s, s + 1), 0
    found: list[Found] = []
    late, kept = costs.held[t], int(costs.kept[s])
    if s < t and m >= max(kept, costs.kept_back[s], costs.forward[s, s + 1] + late):
        found.append((extra[s + 1, t, m - kept], s + 1, Run(s, s + 1), kept))
    is_deepest = tables.is_bounded and level == 0
    for c in (c for c in _wholes(costs, s, is_deepest) if m >= c.back):
        if c.stop == t + 1:
            found.append((c.last_flops, c.stop, Run(s, c.stop, c.option), 0))
        elif c.stop <= t and m >= max(c.stored, costs.forward[s, c.stop] + late):
            found.append((c.flops + extra[c.stop, t, m - c.stored], c.stop, Run(s, c.stop, c.option), c.stored))
    if not is_deepest:
        cuts = _cuts(costs, s, t + 1, m, late)
        inner = tables.levels[level - tables.is_bounded].extra[s, cuts - 1, m]
        rest = extra[cuts, t, m - costs.stored[s, cuts]]
        found += _best_nest(costs, s, cuts, costs.flops[s, cuts] + inner + rest)
    return min(found, key=lambda f: f[0])[1:]


def depth(runs: tuple[Run, ...]) -> int:
    """How deep regions stand in each other; 0 where there are none."""
    return max(
        (depth(r.children) + (bool(r.children) or (r.option is not None and r.option.is_region)) for r in runs),
        default=0,
    )
