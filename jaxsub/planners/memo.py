"""Ask a planner for many budgets: what it has worked out of a chain is kept while the chain stays the same.

The repair of a plan asks for one budget after another on a chain that seldom changes. A planner that works out all
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


def solves_all(planner: Callable[[Chain, int | None], Plan]) -> bool:
    """Whether a planner works out all budgets of a chain at once."""
    return hasattr(planner, "solved")


def solved(planner: Callable[[Chain, int | None], Plan], chain: Chain) -> Answer:
    """A planner's plans of one chain, as a function of the budget in bytes."""
    own: Callable[[Chain], Answer] | None = getattr(planner, "solved", None)
    return partial(planner, chain) if own is None else own(chain)


@dataclass(slots=True, eq=False)
class Held:
    """A planner that keeps what it knows of the chain it was asked for last.

    Attributes:
        planner: The planner.
    """

    planner: Callable[[Chain, int | None], Plan]
    _chain: Chain | None = field(init=False, default=None)
    _answer: Answer | None = field(init=False, default=None)

    def __call__(self, chain: Chain, budget_bytes: int | None) -> Plan:
        """Plan a chain.

        Args:
            chain: The chain.
            budget_bytes: The budget in bytes; `None` for the planner's natural plan.

        Raises:
            InfeasibleBudgetError: If no plan is predicted to fit.
        """
        if self._answer is None or chain != self._chain:
            self._answer = solved(self.planner, chain)
            self._chain = chain
        return self._answer(budget_bytes)
