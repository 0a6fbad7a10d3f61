"""Plan one chain for many budgets.

The search for a plan tries one budget after another on a few chains. A planner that plans a chain for all budgets at
once, as `optimal` fills its tables, is an `AllBudgets`; `Memo` keeps its answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from jaxsub.core.chain import Chain
from jaxsub.core.errors import PlannerError
from jaxsub.core.plan import Plan

Answer = Callable[[int | None], Plan]


class AllBudgets(ABC):
    """A planner that plans a chain for all budgets at once."""

    __slots__ = ()

    @abstractmethod
    def solved(self, chain: Chain) -> Answer:
        """Return the plans of one chain as a function of the budget in bytes."""

    def __call__(self, chain: Chain, budget_bytes: int | None = None) -> Plan:
        """Plan a chain.

        Args:
            chain: The chain.
            budget_bytes: The most that the compiler may allocate beside arguments and outputs, in bytes; `None` for
                the planner's natural plan.

        Returns:
            The plan; its prediction is exact on the chain.

        Raises:
            InfeasibleBudgetError: If no plan is predicted to fit.
        """
        return self.solved(chain)(budget_bytes)


def solved(planner: Callable[[Chain, int | None], Plan], chain: Chain) -> Answer:
    """Return any planner's plans of one chain as a function of the budget in bytes."""
    own: Callable[[Chain], Answer] | None = getattr(planner, "solved", None)
    return partial(planner, chain) if own is None else own(chain)


KEPT_CHAINS = 4  # a program has few partitions


@dataclass(slots=True, eq=False)
class Memo:
    """A planner that keeps another planner's answers for the last few chains."""

    planner: Callable[[Chain, int | None], Plan]
    _answers: list[tuple[Chain, Answer]] = field(init=False, default_factory=list)

    def __call__(self, chain: Chain, budget_bytes: int | None) -> Plan:
        """Plan a chain; `None` asks for the planner's natural plan, `InfeasibleBudgetError` says that none fits."""
        answer = next((answer for known, answer in self._answers if known is chain or known == chain), None)
        if answer is None:
            answer = solved(self.planner, chain)
            self._answers = [*self._answers[1 - KEPT_CHAINS :], (chain, answer)]
        plan = answer(budget_bytes)
        if not isinstance(plan, Plan):
            raise PlannerError(
                f"a planner returns a jaxsub.Plan, as jaxsub.core.plan.plan_from_runs(chain, runs, ...) makes it; got "
                f"{plan!r:.99} of {self.planner!r:.99}"
            )
        return plan
