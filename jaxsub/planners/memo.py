"""Ask a planner for many budgets: what it has worked out of a chain is kept.

The search for a plan asks for one budget after another on a few chains. A planner that works out all
budgets at once, as `optimal` fills its tables, says so by a method `solved(chain)`, which returns a function of the
budget; of any other planner nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from jaxsub.core.chain import Chain
from jaxsub.core.plan import Plan

Answer = Callable[[int | None], Plan]


def solved(planner: Callable[[Chain, int | None], Plan], chain: Chain) -> Answer:
    """A planner's plans of one chain, as a function of the budget in bytes."""
    own: Callable[[Chain], Answer] | None = getattr(planner, "solved", None)
    return partial(planner, chain) if own is None else own(chain)


KEPT_CHAINS = 4
"""Of so many chains what was worked out is kept: a program has few partitions."""


@dataclass(slots=True, eq=False)
class Held:
    """A planner that keeps what it has worked out of the last few chains.

    Attributes:
        planner: The planner.
    """

    planner: Callable[[Chain, int | None], Plan]
    _answers: list[tuple[Chain, Answer]] = field(init=False, default_factory=list)

    def __call__(self, chain: Chain, budget_bytes: int | None) -> Plan:
        """Plan a chain.

        Args:
            chain: The chain.
            budget_bytes: The budget in bytes; `None` for the planner's natural plan.

        Raises:
            InfeasibleBudgetError: If no plan is predicted to fit.
        """
        answer = next((answer for known, answer in self._answers if known is chain or known == chain), None)
        if answer is None:
            answer = solved(self.planner, chain)
            self._answers = [*self._answers[1 - KEPT_CHAINS :], (chain, answer)]
        return answer(budget_bytes)
