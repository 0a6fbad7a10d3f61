"""Choose among candidates: the one of least recompute that fits a budget, or refuse and say what would.

Of plans that were measured and fit, `is_better` says which to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.chain import Chain, Prediction, Run
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.simulate import predict
from jaxsub.core.tuning import TUNING

Priced = tuple[tuple[Run, ...], Prediction]
"""Runs that cover a chain, and what they cost."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Runs of one chain that a planner makes of a number, each made and priced once.

    A planner that offers the same candidates whatever the budget is monotone: a larger budget never gets a slower plan.

    Attributes:
        chain: The chain.
        runs_of: The runs of a number; they cover the chain.
        planner: The planner's name.
    """

    chain: Chain
    runs_of: Callable[[float], tuple[Run, ...]]
    planner: str
    _known: dict[float, Priced] = field(init=False, default_factory=dict, repr=False)

    def priced(self, numbers: Iterable[float]) -> list[Priced]:
        """The runs of these numbers and what they cost."""
        return [self._priced(number) for number in numbers]

    def cheapest(self, numbers: Iterable[float], budget_bytes: int | None) -> Plan:
        """The plan of least recompute, then least memory, among those of these numbers that fit a budget.

        Args:
            numbers: At least one.
            budget_bytes: The budget in bytes; `None` for any.

        Raises:
            InfeasibleBudgetError: If none fits.
        """
        found = self.priced(numbers)
        fitting = [f for f in found if budget_bytes is None or f[1].temp_bytes <= budget_bytes]
        if not fitting and budget_bytes is not None:
            raise infeasible(budget_bytes, min(p.temp_bytes for _, p in found), self.planner)
        runs = min(fitting, key=lambda f: (f[1].extra_flops, f[1].temp_bytes))[0]
        return plan_from_runs(self.chain, runs, budget=Budget(n_bytes=budget_bytes), planner=self.planner)

    def _priced(self, number: float) -> Priced:
        if number not in self._known:
            runs = self.runs_of(number)
            alike = (found for found in self._known.values() if found[0] == runs)
            self._known[number] = next(alike, None) or (runs, predict(self.chain, runs))
        return self._known[number]


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
    if abs(work - other_work) <= TUNING.alike * min(work, other_work):
        if _is_simpler(plan, than):
            return True
        if _is_simpler(than, plan):
            return False
    return (again, _needed(plan)) < (other_again, _needed(than))


def _is_simpler(plan: Plan, than: Plan) -> bool:
    """Whether a plan has clearly fewer regions, and needs no more."""
    is_fewer = plan.n_regions < than.n_regions and plan.n_regions <= TUNING.fewer * than.n_regions
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
