"""Choose among candidates: the one of least recompute that fits a budget, or refuse and say what would.

Of plans that were measured and fit, `is_better` says which to keep.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxsub.budget import Budget, format_bytes
from jaxsub.chain import Chain, Run, predict
from jaxsub.errors import InfeasibleBudgetError
from jaxsub.plan import Plan, plan_from_runs

ALIKE, FEWER = 0.01, 0.8
"""Of two plans whose FLOPs differ by no more than the first share, one with at most the second of the regions is
preferred if it needs no more memory."""


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


def is_better(plan: Plan, than: Plan) -> bool:
    """Whether a measured plan is preferred to another that fits as well.

    The one that executes less is; of two within a percent of each other, the one of clearly fewer regions, which
    compiles sooner, if it needs no more memory: else a smaller budget would find the one that executes less. Of two
    that execute the same it is the one of less memory.
    """
    (work, again), (other_work, other_again) = _work(plan), _work(than)
    if abs(work - other_work) <= ALIKE * min(work, other_work):
        if _is_simpler(plan, than):
            return True
        if _is_simpler(than, plan):
            return False
    return (again, _needed(plan)) < (other_again, _needed(than))


def _is_simpler(plan: Plan, than: Plan) -> bool:
    """Whether a plan has clearly fewer regions, and needs no more."""
    is_fewer = plan.n_regions < than.n_regions and plan.n_regions <= FEWER * than.n_regions
    return is_fewer and _needed(plan) <= _needed(than)


def _work(plan: Plan) -> tuple[float, float]:
    """FLOPs of a plan's gradient, the backward pass taken for two forward passes, and those executed again."""
    if plan.prediction is None:
        return 0.0, 0.0
    return 3 * plan.prediction.forward_flops + plan.prediction.extra_flops, plan.prediction.extra_flops


def expected_compile_seconds(plan: Plan, plain_seconds: float) -> float:
    """Roughly how long the compiler takes for a plan: compile time grows like the square of the number of equations.

    Args:
        plan: The plan. The gradient of an equation is taken for three, and one more each time it is executed again.
        plain_seconds: How long the plain gradient took.

    Example:
        >>> round(expected_compile_seconds(Plan.from_mirror_counts([1, 1, 1, 0], fingerprint="f"), 9.0), 1)
        14.1
    """
    counts = plan.mirror_counts
    return float(plain_seconds * (1 + sum(counts) / (3 * max(len(counts), 1))) ** 2)


def _needed(plan: Plan) -> int:
    return plan.measurement.temp_bytes if plan.measurement else 0
