"""Count a chain's bytes in slots of equal size, for the tables of `optimal`.

A `Chain` and the most memory to plan for go in, `Costs` come out. Stored bytes are rounded to the nearest slot,
transient bytes up. The slot size is chosen so that the most frequent stored sizes are whole slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxsub.core.chain import Chain, Option
from jaxsub.core.simulate import may_nest

INFINITE = np.float32(np.inf)
TRIED_UNITS = 64  # slot sizes that are compared for how well stored sizes fall on whole slots


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of one item, in slots.

    Attributes:
        stop: The stage after the item's last.
        option: The option.
        stored: Slots that are live until its backward pass: its saved values and those that cross its end.
        back: Slots that its backward pass needs.
        flops: FLOPs that it recomputes.
        last_flops: FLOPs that it recomputes where it ends a nest, whose forward pass is paid for.
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
        stored: `[s, q]`: slots of the values of `s .. q - 1` that cross cut `q`, and of what a nest of them hoists.
        forward: `[s, q]`: slots that the forward pass of `s .. q - 1` needs.
        flops: `[s, q]`: FLOPs of recomputing `s .. q - 1`.
        cotangents: `[t]`: slots of the cotangents that are live when a nest that ends with `t` begins.
        leaf: `[s]`: slots that the backward pass of a stage that ends its scope needs.
        kept: `[s]`: slots that an unwrapped stage stores.
        kept_back: `[s]`: slots that its backward pass needs.
        choices: `[s]`: the options of items that start at `s`.
        inner: `[s]`: those that are allowed inside nests.
        barred: `[t, m]`: infinite where `m` is below `cotangents[t]`, 0 elsewhere.
        most_cotangents: `[q]`: the most of `cotangents` from `q` on.
    """

    chain: Chain
    unit_bytes: float
    n_slots: int
    stored: np.ndarray
    forward: np.ndarray
    flops: np.ndarray
    cotangents: np.ndarray
    leaf: np.ndarray
    kept: np.ndarray
    kept_back: np.ndarray
    choices: tuple[tuple[Choice, ...], ...]
    inner: tuple[tuple[Choice, ...], ...]
    barred: np.ndarray
    most_cotangents: np.ndarray


def costs_of(chain: Chain, max_bytes: int, slots: int) -> Costs:
    """Count a chain's bytes in slots; up to a quarter more of them where sizes are then whole slots."""
    unit_bytes = _unit(chain, max_bytes, slots)
    n, n_slots = len(chain.stages), int(max_bytes / unit_bytes + 1e-9)
    crossing, passing = chain.crossing_bytes, chain.passing_bytes
    around = passing[np.arange(n), np.arange(1, n + 1)]
    cotangents = nearest(chain.cotangent_bytes[0, 1:], unit_bytes)
    kept = _column(chain, "keep_bytes") + crossing[np.arange(n), np.arange(1, n + 1)]
    choices = tuple(tuple(_choices(chain, s, unit_bytes)) for s in range(n))
    hoisted = _least_hoisted(chain)
    inner = (tuple(c for c in some if may_nest(chain, c.option) and _spares(c.option, least))
             for some, least in zip(choices, hoisted, strict=True))  # fmt: skip
    return Costs(
        chain, unit_bytes, n_slots,
        stored=nearest(crossing + _summed(hoisted), unit_bytes),
        forward=up(_forward(chain), unit_bytes),
        flops=_recompute_flops(chain),
        cotangents=cotangents,
        leaf=up(_column(chain, "transient_bytes") + around, unit_bytes),
        kept=nearest(kept, unit_bytes),
        kept_back=up(_column(chain, "keep_transient_bytes") + around, unit_bytes),
        choices=choices,
        inner=tuple(inner),
        barred=np.where(np.arange(n_slots + 1) < cotangents[:, None], INFINITE, np.float32(0)),
        most_cotangents=np.maximum.accumulate(cotangents[::-1])[::-1],
    )  # fmt: skip


def nearest(n_bytes: np.ndarray, unit_bytes: float) -> np.ndarray:
    """Round bytes to the nearest whole slots."""
    return np.floor(np.asarray(n_bytes) / unit_bytes + 0.5).astype(np.int64)


def up(n_bytes: np.ndarray, unit_bytes: float) -> np.ndarray:
    """Round bytes up to whole slots."""
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


def _least_hoisted(chain: Chain) -> list[int]:
    """For each stage the least bytes that it keeps in nests: of loops whose saved bytes no nest spares the fewest."""
    found: dict[int, int] = {}
    for item in chain.items:
        for option in item.options:
            if option.is_hoisted:
                found[item.start] = min(found.get(item.start, option.saved_bytes), option.saved_bytes)
    return [found.get(s, stage.hoisted_bytes) for s, stage in enumerate(chain.stages)]


def _spares(option: Option, least_bytes: int) -> bool:
    return not option.is_hoisted or option.saved_bytes <= least_bytes


def _summed(each: Sequence[int]) -> np.ndarray:
    """Sums over stages `s .. q - 1`, as `[s, q]`; zero for q <= s."""
    before = np.concatenate([[0], np.cumsum(each)])
    table: np.ndarray = np.maximum(before[None, :] - before[:-1, None], 0)
    return table


def _forward(chain: Chain) -> np.ndarray:
    n = len(chain.stages)
    each = chain.crossing_bytes[:, :n] + _column(chain, "forward_bytes")
    each[np.tril_indices(n, -1)] = 0
    table = np.zeros((n, n + 1), dtype=np.int64)
    table[:, 1:] = np.maximum.accumulate(each, axis=1)
    return table


def _recompute_flops(chain: Chain) -> np.ndarray:
    forward = np.array([stage.forward_flops for stage in chain.stages], dtype=np.float64)
    before = np.concatenate([[0.0], np.cumsum(forward)])
    tail = np.array([0.0] + [stage.tail_flops for stage in chain.stages])
    last = np.concatenate([[0.0], before[:-1]])
    flops: np.ndarray = last - before[:-1, None] + tail
    return flops.astype(np.float32)


def _choices(chain: Chain, start: int, unit_bytes: float) -> Iterator[Choice]:
    for item in chain.items:
        if item.start == start:
            crossing, passing = (int(t[start, item.stop]) for t in (chain.crossing_bytes, chain.passing_bytes))
            for option in item.options:
                stored = int(nearest(np.array(max(0, crossing + option.saved_bytes)), unit_bytes))
                back = int(up(np.array(option.transient_bytes + passing), unit_bytes))
                flops, last_flops = np.float32(option.recompute_flops), np.float32(option.loop_flops)
                yield Choice(item.stop, option, stored, back, flops, last_flops)
