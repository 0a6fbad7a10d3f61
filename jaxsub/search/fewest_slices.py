"""As few slices as may do: each of them reads the weights once more, and adds to their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Slices
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.search.sliced_program import Runs, needed_bytes, slowed_share

ROUNDING = 0.0005
"""Shares of a forward pass are compared to three places."""


def fewest_slices(
    runs: Runs, n_bytes: int, needed: int, plain: int, most: float,
    planned: Callable[[Runs, Budget, float], Plan | InfeasibleBudgetError],
) -> tuple[Runs, ...]:  # fmt: skip
    """The same runs in as few slices as fit and cost no more, then in twice as many, and so on to as many as given.

    What grows with a slice is twice as large in half as many: two plans say where the limit may be, first this one and
    the one without slices.

    Args:
        runs: The runs.
        n_bytes: The budget.
        needed: What they need in so many slices,
        plain: and what the program does without slices: where half as many would need far more by both, none are tried.
        most: What they may cost.
        planned: Plans the program with runs in slices for a budget, by prediction; what recomputes more than a share of
            a forward pass may be refused.
    """
    every = [runs]
    while (fewer := tuple(map(_halved, every[-1]))) != every[-1]:
        every.append(fewer)
    known, low, high = {0: needed}, 0, len(every)
    whole = known | {round(math.log2(max(run.count for run in runs))): plain}
    if _farthest(whole, int(TUNING.prediction_error * n_bytes)) < 1:
        return (runs,)
    while low + 1 < high and (there := _farthest(known if low else whole, n_bytes)) > low:
        there = there if there < high else (low + high) // 2
        found = planned(every[there], Budget(n_bytes), round(most, 3) + ROUNDING - slowed_share(every[there]))
        if not isinstance(found, Plan) or round(cost_of(found), 3) > round(most, 3):
            high = there
        else:
            low, known[there] = there, needed_bytes(found)
    return tuple(every[low::-1])


def cost_of(plan: Plan) -> float:
    """What a plan recomputes and what its slices move again, as a share of a forward pass."""
    return recomputed_share(plan) + slowed_share(plan.slices)


def _halved(run: Slices) -> Slices:
    """A run in half as many slices."""
    half = run.count if run.parts > 1 and run.count % 2 else run.count // 2  # still a divisor
    count, whole = max(2, half), run.spared_bytes * run.count // (run.count - 1)
    slowed = run.slowed_share * (count - 1) / (run.count - 1)
    return replace(run, count=count, spared_bytes=whole - whole // count, slowed_share=slowed)


def _farthest(needs: Mapping[int, int], room: int) -> int:
    """How often a number of slices may be halved for what they need to stay within the room, by what is known of two.

    Example:
        >>> _farthest({0: 10, 1: 12}, 25), _farthest({0: 10}, 25)
        (3, 1)
    """
    *before, last = sorted(needs)
    if not before:
        return 1 if needs[last] <= room else 0
    grown = (needs[last] - needs[before[-1]]) / (2**last - 2 ** before[-1])
    most = (room - needs[last]) / grown + 2**last if grown > 0 else math.inf
    return int(math.log2(max(1.0, min(most, 2.0**62))))
