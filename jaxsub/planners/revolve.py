"""`revolve(slots)`: binomial checkpointing, optimal on chains of equal stages.

With s slots for stored states, l equal stages and r the least number with beta(s, r) = (s + r over s) >= l, no stage
is recomputed more than r times, and the total is the least possible: r l - beta(s + 1, r - 1). The first state is
stored after j stages; the rest is reversed with one slot less, then the first j stages with all slots. Every j with
beta(s, r - 2) <= j <= beta(s, r - 1) and beta(s - 1, r - 1) <= l - j <= beta(s - 1, r) is optimal; the least gives the
shallowest nests. On chains of unequal stages the same division is valid, but not optimal.

Source: Griewank, Walther, *Algorithm 799: revolve* (2000); the range of optimal j is from Grimm, Pottier,
Rostaing-Schmidt, *Optimal time and minimum space-time product for reversing a certain class of programs* (1996).
Not the online variant: the number of stages is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxsub.core.chain import Chain, Run
from jaxsub.planners.memo import AllBudgets, Answer
from jaxsub.planners.select import Candidates, numbers_to_try

GROWTH = 1.1  # from one number of slots to try to the next, once they are large


def beta(slots: int, repeats: int) -> int:
    """Count the equal stages that can be reversed with `slots` states and at most `repeats` recomputes of each.

    Example:
        >>> beta(3, 2)
        10
    """
    return math.comb(slots + repeats, slots) if slots >= 0 and repeats >= 0 else 0


def repeats_of(n: int, slots: int) -> int:
    """Find how often each of `n` stages is recomputed at most, with `slots` states."""
    return next(r for r in range(n + 1) if beta(slots, r) >= n)


def revolve_runs(chain: Chain, slots: int) -> tuple[Run, ...]:
    """Make the runs of binomial checkpointing with so many states stored beside the chain's input, at least one."""
    return tuple(_reversed(chain, 0, len(chain.stages), slots))


def _reversed(chain: Chain, start: int, n: int, slots: int) -> Iterator[Run]:
    while n > 1:
        repeats = repeats_of(n, slots)
        first = max(1, beta(slots, repeats - 2), n - beta(slots - 1, repeats))
        if first == 1:
            yield chain.recompute(start)
        else:
            yield Run(start, start + first, None, tuple(_reversed(chain, start, first, slots)))
        start, n, slots = start + first, n - first, slots - 1
    yield Run(start, start + 1)


@dataclass(frozen=True, slots=True)
class Revolve(AllBudgets):
    """Plan by binomial checkpointing.

    Attributes:
        slots: How many states may be stored, at least 1; more are taken where regions would nest deeper than
            `max_depth`. `None` for the slots of least recompute that fit the budget, or, without a budget, the fewest
            that recompute no stage more than twice.
        max_depth: How deep regions may nest.

    Raises:
        ValueError: If either is below 1.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> stages = tuple(Stage(s, s + 1, transient_bytes=1, keep_bytes=1) for s in range(64))
        >>> chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 0) for s in range(63)))
        >>> plan = Revolve(4)(chain)
        >>> plan.prediction.temp_bytes, plan.prediction.extra_flops
        (5, 200.0)

    References:
        Griewank, Walther, 2000.
    """

    slots: int | None = None
    max_depth: int = 8

    def __post_init__(self) -> None:
        if self.max_depth < 1 or (self.slots is not None and self.slots < 1):
            raise ValueError(f"revolve needs at least 1 slot and depth 1, got {self.slots} and {self.max_depth}")

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets."""
        n = len(chain.stages)
        least = _fewest(n, self.max_depth)
        found = Candidates(chain, lambda slots: revolve_runs(chain, int(slots)), "revolve")
        natural = [max(least, self.slots if self.slots is not None else _fewest(n, 2))]
        every = natural if self.slots is not None else numbers_to_try(least, n - 1, GROWTH)
        return lambda budget_bytes: found.cheapest(natural if budget_bytes is None else every, budget_bytes)


def _fewest(n: int, repeats: int) -> int:
    """Find the fewest slots that reverse `n` stages with at most so many recomputes of each."""
    return next(slots for slots in range(1, n + 1) if beta(slots, repeats) >= n)
