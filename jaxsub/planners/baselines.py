"""`plain` and `barriers`: no recomputation at all, without and with gradient barriers.

`plain` leaves the program as it is. `barriers` puts a gradient barrier in front of every stage, so that XLA adds up the
weight gradients of one stage before the backward pass goes on. That costs no run time and often saves much memory where
weights are shared; elsewhere the two need the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxsub.core.chain import Chain
from jaxsub.core.output_reuse import unfenced
from jaxsub.planners.memo import AllBudgets, Answer
from jaxsub.planners.select import Candidates


@dataclass(frozen=True, slots=True)
class Plain(AllBudgets):
    """Plan nothing: the program as it is.

    Example:
        >>> from jaxsub.core.chain import Stage
        >>> Plain()(Chain((Stage(0, 4), Stage(4, 9)), (), ())).barriers
        ()
    """

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets."""
        found = Candidates(unfenced(chain), lambda _: chain.plain(), "plain")
        return lambda budget_bytes: found.cheapest([0], budget_bytes).replace(barriers=())


@dataclass(frozen=True, slots=True)
class Barriers(AllBudgets):
    """Plan gradient barriers in front of every stage and nothing else.

    Example:
        >>> from jaxsub.core.chain import Stage
        >>> Barriers()(Chain((Stage(0, 4), Stage(4, 9)), (), ())).barriers
        (4,)
    """

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets."""
        return partial(Candidates(chain, lambda _: chain.plain(), "barriers").cheapest, [0])
