"""`auto`, the default: run all planners that apply and keep the fastest plan that is predicted to fit.

That is nearly always `optimal`'s plan, which is worse than another's only by its rounding to slots. Without a budget it
is `optimal`'s plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from jaxsub.core.chain import Chain
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Plan
from jaxsub.planners.cheap import Cheap
from jaxsub.planners.chen import Chen
from jaxsub.planners.memo import AllBudgets, Answer
from jaxsub.planners.optimal import Optimal
from jaxsub.planners.recursive import Recursive
from jaxsub.planners.revolve import Revolve


@dataclass(frozen=True, slots=True)
class Auto(AllBudgets):
    """Plan with every planner that applies and keep the best.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> stages = tuple(Stage(s, s + 1, transient_bytes=1, keep_bytes=1) for s in range(9))
        >>> chain = Chain(stages, (), tuple(Crossing(s, s + 1, 1, 0) for s in range(8)))
        >>> plan = Auto()(chain, 5)
        >>> plan.planner, plan.prediction.temp_bytes
        ('optimal', 5)
    """

    def solved(self, chain: Chain) -> Answer:
        """Plan a chain for all budgets; without one, the least memory that one extra forward pass buys."""
        return partial(_best, [p.solved(chain) for p in (Optimal(), Chen(), Cheap(), Recursive(), Revolve())])


def _best(answers: Sequence[Answer], budget_bytes: int | None) -> Plan:
    """Choose the best of all answers; the first is `optimal`'s, which decides alone without a budget."""
    if budget_bytes is None:
        return answers[0](None)
    found: list[Plan] = []
    refusals: list[InfeasibleBudgetError] = []
    for answer in answers:
        try:
            found.append(answer(budget_bytes))
        except InfeasibleBudgetError as refusal:
            refusals.append(refusal)
    if not found:
        raise min(refusals, key=lambda refusal: refusal.least_bytes)
    return min(found, key=_cost)


def _cost(plan: Plan) -> tuple[float, int]:
    assert plan.prediction is not None
    return plan.prediction.extra_flops, plan.prediction.temp_bytes
