"""Choose among a planner's candidates: the one of least recompute that fits a budget, or refuse and say what would."""

from __future__ import annotations

from collections.abc import Iterable

from jaxsub.budget import Budget, format_bytes
from jaxsub.chain import Chain, Run, predict
from jaxsub.errors import InfeasibleBudgetError
from jaxsub.plan import Plan, plan_from_runs


def cheapest(chain: Chain, candidates: Iterable[tuple[Run, ...]], budget_bytes: int | None, planner: str) -> Plan:
    """The plan of least recompute, then least memory, among candidates that fit a budget.

    A planner that offers the same candidates whatever the budget is monotone: a larger budget never gets a slower plan.

    Args:
        chain: The chain.
        candidates: Runs that cover the chain, at least one tuple of them.
        budget_bytes: The budget in bytes; `None` for any.
        planner: The planner's name.

    Raises:
        InfeasibleBudgetError: If none fits.
    """
    found = [(p.extra_flops, p.temp_bytes, runs) for runs in candidates for p in [predict(chain, runs)]]
    fitting = [f for f in found if budget_bytes is None or f[1] <= budget_bytes]
    if not fitting and budget_bytes is not None:
        raise infeasible(budget_bytes, min(f[1] for f in found), planner)
    runs = min(fitting, key=lambda f: f[:2])[2]
    return plan_from_runs(chain, runs, budget=Budget(n_bytes=budget_bytes), planner=planner)


def infeasible(budget_bytes: int, least_bytes: int, planner: str) -> InfeasibleBudgetError:
    """The error for a budget that none of a planner's plans fits.

    Args:
        budget_bytes: The budget, in bytes.
        least_bytes: The least predicted peak of its plans, in bytes.
        planner: The planner's name.
    """
    instead = "or make the batch smaller" if planner == "optimal" else 'or planner="auto"'
    return InfeasibleBudgetError(
        f"Budget `{format_bytes(budget_bytes)}` is below the least predicted peak of the plans of `{planner}`, "
        f"`{format_bytes(least_bytes)}`. Pass budget={least_bytes} or more, {instead}.",
        requested_bytes=budget_bytes,
        least_bytes=least_bytes,
    )
