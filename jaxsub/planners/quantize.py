"""A chain in slots: its bytes counted in slots of equal size, for the tables of `optimal`.

A `Chain` and the most memory to plan for go in, `Costs` come out: what is stored is rounded to the nearest slot, what
stands only for a moment up. The size of a slot is chosen so that the sizes that are stored most fall on whole slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxsub.core.chain import Chain, Option
from jaxsub.core.simulate import may_nest

INFINITE = np.float32(np.inf)
TRIED_UNITS = 64  # sizes of a slot that are compared for how well stored bytes fall on whole slots


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
        inner: `[s]`: those that may stand inside nests.
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
    inner: tuple[tuple[Choice, ...], ...]
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
        inner=tuple(tuple(c for c in some if may_nest(chain, c.option)) for some in choices),
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
