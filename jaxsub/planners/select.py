"""Choose among plans: of one planner, the plan of least recompute that fits; of measured plans, the better one."""

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
"""Runs that cover a chain, and their prediction."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Plans of one chain that a planner makes from a number, each made and predicted once.

    A planner that compares the same plans for every budget is monotone: a larger budget never gets a slower plan.
    """

    chain: Chain
    runs_of: Callable[[float], tuple[Run, ...]]
    planner: str
    _known: dict[float, Priced] = field(init=False, default_factory=dict, repr=False)

    def priced(self, numbers: Iterable[float]) -> list[Priced]:
        """Make and predict the runs of these numbers."""
        return [self._priced(number) for number in numbers]

    def cheapest(self, numbers: Iterable[float], budget_bytes: int | None) -> Plan:
        """Choose the plan of least recompute, then least memory, of these numbers that fit a budget, or refuse."""
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


def numbers_to_try(least: int, most: int, growth: float) -> list[int]:
    """List whole numbers from `least` to `most`: each one more than the last, or `growth` times it if that is larger.

    Example:
        >>> numbers_to_try(1, 20, 1.5)
        [1, 2, 3, 4, 6, 10, 15, 20]
    """
    tried, number = [least], least + 1.0
    while number < most:
        tried.append(int(number))
        number = max(number + 1, number * growth)
    return sorted({*tried, max(least, most)})


def infeasible(budget_bytes: int, least_bytes: int, planner: str) -> InfeasibleBudgetError:
    """Make the error for a budget that none of a planner's plans fits."""
    instead = "or make the batch smaller" if planner == "optimal" else 'or planner="auto"'
    return InfeasibleBudgetError(
        f"Budget `{format_bytes(budget_bytes)}` is below the least predicted peak of the plans of `{planner}`, "
        f"`{format_bytes(least_bytes)}`. Pass budget={least_bytes} or more, {instead}.",
        requested_bytes=budget_bytes,
        least_bytes=least_bytes,
    )


def is_better(plan: Plan, than: Plan) -> bool:
    """Tell whether to prefer a measured plan to another, where both fit.

    The plan that recomputes less is better, then the one that needs less memory. Where the FLOPs of the whole gradients
    differ by at most half a percent, a plan of clearly fewer regions, which compiles sooner, is better if it needs no
    more memory: otherwise a smaller budget would find a plan that recomputes less.
    """
    (work, extra), (other_work, other_extra) = _work(plan), _work(than)
    if abs(work - other_work) <= TUNING.alike * min(work, other_work):
        if _is_simpler(plan, than):
            return True
        if _is_simpler(than, plan):
            return False
    return (extra, _needed(plan)) < (other_extra, _needed(than))


def _is_simpler(plan: Plan, than: Plan) -> bool:
    """Tell whether a plan has clearly fewer regions, and needs no more memory."""
    is_fewer = plan.n_regions < than.n_regions and plan.n_regions <= TUNING.fewer * than.n_regions
    return is_fewer and _needed(plan) <= _needed(than)


def _work(plan: Plan) -> tuple[float, float]:
    """Estimate FLOPs of a plan's gradient, a backward pass counted as two forward passes, and recomputed FLOPs."""
    if plan.prediction is None:
        return 0.0, 0.0
    return 3 * plan.prediction.forward_flops + plan.prediction.extra_flops, plan.prediction.extra_flops


def expected_compile_seconds(plan: Plan, plain_seconds: float) -> float:
    """Estimate how long a plan compiles: the time grows with the square of the number of equations.

    An equation's gradient counts as three equations, and one more for each recompute.
    """
    counts = plan.mirror_counts
    return float(plain_seconds * (1 + sum(counts) / (3 * max(len(counts), 1))) ** 2)


def _needed(plan: Plan) -> int:
    return plan.measurement.temp_bytes if plan.measurement else 0
