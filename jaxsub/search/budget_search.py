"""From a budget in bytes to a plan that the compiler confirms.

The planner is asked for a plan within an inner budget, the plan is compiled, and what the compiler allocates moves the
inner budget: up by what was left over, down by what was too much, and between the two once both have been seen. A plan
that fits and leaves little is taken, unless a cheaper one is expected to fit as well, or a much cheaper one to need
only a little more: it is tried too. Of several that fit it is the one that executes least again. When none fits, the
planner's least plans are tried, of every way to cut that may hold the least, then plans between what the smallest of
them is predicted to need and what it does; the least of all these is what `InfeasibleBudgetError` says. A budget that
buys so little that half a forward pass and more is executed again looks at the other ways to cut too, their least plans
among them: a smaller budget must not find what it has not seen. For the same reason every budget looks first at what
budgets too small for its way to cut would find on others. Where a GPU would make zeros behind gradient barriers ahead,
plans without any barrier are searched too, before any refusal.

Whole programs are compiled at most `MOST_COMPILES` times, the plain one included; those of more than `LONG_EQUATIONS`,
which take minutes, only until a plan fits. A clock does not decide: every host of a cluster must come to the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.plan import Measurement, Plan
from jaxsub.planners import Planner
from jaxsub.planners.baselines import Bare
from jaxsub.planners.select import is_better
from jaxsub.search.candidates import (
    GAIN,
    HALF,
    NEARLY,
    NOTHING,
    lowest,
    predicted_bytes,
    promising,
    settle,
    share_again,
)
from jaxsub.search.verify import Verifier, finish, peak_line, standing

MOST_COMPILES = 6
LONG_EQUATIONS = 10_000
"""Programs with more equations are not compiled again only to look for something better than what fits."""

CLOSE = 0.96
"""A plan that fills this share of the budget is close enough: the next compile would gain little."""

MARGIN = 0.003
"""Share of the budget to aim below it: without it the repair creeps up on the budget and misses by as much."""

MUCH_AGAIN = 0.1
"""Where a plan that fits executes this share of a forward pass again, a cheaper one that may not fit is tried."""

FILL = 0.005
"""What a plan that fits leaves over is filled by more compiles where each would spare this share of a forward pass."""

SPREAD = 0.03
"""Share of the budget by which predictions of plans next to each other err differently: where a plan that fits executes
`MUCH_AGAIN`, one that is predicted to need so much more is tried if it executes less by as much."""

TRIVIAL = 1e-4
"""As `NEARLY`, once a plan that needs so much more than the least is compiled and does not fit."""

NAMED_HOLDERS = 4
"""How many of what stands at the peak are named where nothing fits."""

LEASTS = 2
"""How many least plans are compiled: of ways to cut that may hold the least; of one way the plan that needs nearly the
least too, which may execute far less again, and be packed better."""

BETWEEN, APART = 3, 0.01
"""How many plans are tried before a refusal, of those between what the least is predicted to need and what it does,
where these are this share apart: packing may add a tenth to the one and nothing to the next."""


def fit(
    verifier: Verifier, planner: Planner, budget: Budget, budget_bytes: int, cut_choices: Sequence[Sequence[int]]
) -> Plan:
    """Find a plan that the compiler confirms to fit.

    Args:
        verifier: Compiles plans.
        planner: Makes them.
        budget: The budget as the user gave it.
        budget_bytes: The same in bytes.
        cut_choices: Ways to cut the program into stages; the first is used, the others when nothing fits.

    Returns:
        The plan, measured, the plain program's measurement beside it.

    Raises:
        InfeasibleBudgetError: If none of the planner's plans fits.
    """
    plain = verifier.plain()
    if plain.measurement is not None and plain.measurement.temp_bytes <= budget_bytes:
        return finish(verifier.program, plain.replace(plain_measurement=plain.measurement), budget)
    search = _Search(verifier, planner, budget_bytes)
    *others, own = promising(verifier.pricer, planner, budget_bytes, cut_choices)
    for offer in (*others, own):  # of others' plans one is compiled: where none fits, the rest are for its own
        search.budget_bytes = offer.budget_bytes
        if search.run(offer.cuts, MOST_COMPILES - LEASTS if offer is own else verifier.compiles + 1):
            break
    search.budget_bytes = budget_bytes
    ways = [choice for choice in cut_choices if tuple(choice) != tuple(offer.cuts)]
    if search.best is None:
        search.least(lowest(verifier.pricer, planner, cut_choices))
        ways = [offer.cuts, *ways]  # that the least fits says nothing of what lies between
    search.others(ways)
    search.without_barriers(offer.cuts)
    if search.best is None:
        raise _infeasible(verifier, search, budget_bytes)
    return finish(verifier.program, search.best.replace(plain_measurement=plain.measurement), budget)


@dataclass(slots=True, eq=False)
class _Search:
    verifier: Verifier
    planner: Planner
    budget_bytes: int
    best: Plan | None = None
    least_seen: Plan | None = None
    least_error: int = 2**62
    most_error: int = 0

    def run(self, cuts: Sequence[int], limit: int) -> bool:
        """Move the inner budget until a plan fits and leaves little; say whether any fitted."""
        inner, low, high = float(self.budget_bytes), None, None
        aim, worst, before, slack = self.budget_bytes * (1 - MARGIN), -float(self.budget_bytes), None, NEARLY
        for _ in range(2 * MOST_COMPILES):
            asked = max(1, int(inner))
            plan = settle(self.verifier.pricer, cuts, self.planner, asked, slack)
            predicted = predicted_bytes(plan)
            if _regions(plan) == before and low is None and predicted < asked:
                inner = predicted - NEARLY * self.budget_bytes  # the same plan for less: ask for another
                continue
            inner = max(inner, predicted)
            guess = self.guessed(plan, predicted)
            if guess is None and (_regions(plan) == before or not self._may_try(plan, limit)):
                break
            before = _regions(plan)
            needed = self.try_(plan).temp_bytes if guess is None else guess
            if needed > self.budget_bytes and predicted > asked:
                slack = TRIVIAL if slack == NEARLY else 0.0
            worst = max(worst, needed - predicted)
            if needed <= self.budget_bytes:
                low = max(low, (inner, needed)) if low else (inner, needed)
            else:  # to ask for more than it is predicted to need would give this plan again
                high = min(high, (predicted, needed)) if high else (predicted, needed)
            if self.is_good(plan, needed):
                spare = predicted + self.budget_bytes - needed
                self.dare(cuts, limit, int(spare + SPREAD * self.budget_bytes), MUCH_AGAIN)
                self.fill(cuts, limit, spare)
                break
            following = _between(low, high, inner, needed, aim, worst)
            if following is None or abs(following - inner) < 1e-3 * self.budget_bytes:
                break
            inner = following
        return self.best is not None

    def guessed(self, plan: Plan, predicted: int) -> int | None:
        """What a plan is taken to need where a compile would gain nothing, once one fits; `None` where it may.

        It is no cheaper than the best, or too large even if its prediction errs by half as much as any so far.
        """
        if self.best is None:
            return None
        if share_again(plan) >= share_again(self.best):
            return _needed(self.best)
        at_least = predicted + min(self.least_error, self.least_error // 2)
        may_fit = at_least <= self.budget_bytes * (1 + MARGIN)  # sizes are few and round: many a plan fits to the byte
        return None if self.verifier.is_known(plan) or may_fit else at_least

    def fill(self, cuts: Sequence[int], limit: int, asked: int) -> None:
        """Try plans for what the best leaves over, each for so much less as the one before did not fit by."""
        for _ in range(MOST_COMPILES):
            plan = self.dare(cuts, limit, asked, FILL)
            if plan is None or _needed(plan) <= self.budget_bytes:
                return
            asked = predicted_bytes(plan) + self.budget_bytes - _needed(plan)

    def dare(self, cuts: Sequence[int], limit: int, asked: int, gain: float) -> Plan | None:
        """Try a plan that may not fit, where it would spare so much of a forward pass beside the best that does."""
        again = share_again(self.best) if self.best else 0.0
        if again > gain:
            plan = settle(self.verifier.pricer, cuts, self.planner, asked)
            if share_again(plan) < again - gain and self._may_try(plan, limit):
                return plan.replace(measurement=self.try_(plan))
        return None

    def _may_try(self, plan: Plan, limit: int) -> bool:
        """Whether a plan is known, or may be compiled: there are compiles left, and none fits or they are short.

        The limit leaves compiles for the least plans, which are not needed once a plan fits.
        """
        if self.verifier.is_known(plan):
            return True
        n_equations = len(self.verifier.program.eqns)
        if self.best is None or n_equations <= LONG_EQUATIONS:
            return self.verifier.compiles < (limit if self.best is None else MOST_COMPILES)
        self.verifier.pricer.progress(f"a plan that fits is taken: to compile {n_equations:,} equations takes long")
        return False

    def try_(self, plan: Plan) -> Measurement:
        """Measure a plan and keep it if it is the best that fits."""
        measurement = self.verifier.measure(plan)
        plan = plan.replace(measurement=measurement)
        if plan.prediction is not None:
            error = measurement.temp_bytes - plan.prediction.temp_bytes
            self.least_error, self.most_error = min(self.least_error, error), max(self.most_error, error)
        if measurement.temp_bytes <= self.budget_bytes and (self.best is None or is_better(plan, self.best)):
            self.best = plan
        return measurement

    def is_good(self, plan: Plan, needed: int) -> bool:
        """Whether another compile would gain little: the budget is filled, or nothing is recomputed."""
        nothing_again = (
            plan.prediction is not None and plan.prediction.extra_flops <= NOTHING * plan.prediction.forward_flops
        )
        return CLOSE * self.budget_bytes <= needed <= self.budget_bytes or (
            needed <= self.budget_bytes and nothing_again
        )

    def others(self, choices: Iterable[Sequence[int]]) -> None:
        """Try plans on these ways to cut where they execute less again than the best, and that is much.

        They are the cheapest that fits if predictions of it err as they did, and the least, which a smaller budget
        would be told of.
        """
        for cuts in choices:
            for asked in (max(1, self.budget_bytes - self.most_error), 1):
                again = share_again(self.best) if self.best else 0.0
                if again <= HALF or len(self.verifier.program.eqns) > LONG_EQUATIONS:
                    return
                plan = settle(self.verifier.pricer.anew(), cuts, self.planner, asked, NEARLY)
                if share_again(plan) < again and self._may_try(plan, MOST_COMPILES):
                    self.try_(plan)

    def without_barriers(self, cuts: Sequence[int]) -> None:
        """Search plans without gradient barriers too, where these make a compiler hold zeros that it would not."""
        again = share_again(self.best) if self.best else math.inf
        if again > GAIN and any(stage.ahead_bytes for stage in self.verifier.pricer.chain(cuts).stages):
            fenced, self.planner = self.planner, Bare(self.planner)
            self.least_error = min(self.least_error, 0)  # what barriers add says nothing of these
            self.run(cuts, MOST_COMPILES)
            self.planner = fenced

    def least(self, choices: Sequence[Sequence[int]]) -> None:
        """Try the planner's least plans, found anew so that they are the same whatever was tried before."""
        where, tried = choices[0], [(cuts, slack) for slack in (NEARLY, 0.0) for cuts in choices][:LEASTS]
        for cuts, slack in tried:
            if self.best is not None:
                return  # nothing is refused: the compile that is left serves to find what is cheaper
            plan = settle(self.verifier.pricer.anew(), cuts, self.planner, 1, slack)
            plan = plan.replace(measurement=self.try_(plan))
            if self.least_seen is None or _needed(plan) < _needed(self.least_seen):
                self.least_seen, where = plan, cuts
        is_quick = getattr(self.planner, "is_quick", True) and len(self.verifier.program.eqns) <= LONG_EQUATIONS
        if is_quick and self.verifier.remembers:  # else who asks for what is named may find no compile left for it
            self._between_leasts(where)

    def _between_leasts(self, cuts: Sequence[int]) -> None:
        """Look for what needs less than the least plan does, from what that is predicted to need upwards."""
        low = predicted_bytes(self.least_seen) if self.least_seen else 0
        for _ in range(BETWEEN):
            least = self.least_seen
            if self.best is not None or least is None or _needed(least) - low <= APART * _needed(least):
                return
            asked = (low + _needed(least)) // 2
            plan = settle(self.verifier.pricer.anew(), cuts, self.planner, asked, NEARLY)
            if not self._may_try(plan, MOST_COMPILES):
                return
            plan = plan.replace(measurement=self.try_(plan))
            if _needed(plan) < _needed(least):
                self.least_seen = plan
            if _needed(plan) > (1 - APART) * _needed(least):
                low = asked  # what needs much less, if anything does, is predicted to need more


def _between(low: Any, high: Any, inner: float, needed: float, aim: float, worst: float) -> float | None:
    """The next inner budget: by the worst misprediction until a plan fits, then between one that did and one not."""
    if low is None:
        return max(1.0, min(inner + aim - needed, aim - worst))
    if high is None:
        return inner + aim - needed
    (a, at_a), (b, at_b) = low, high
    if b <= a or at_b <= at_a:
        return None
    share = min(0.9, max(0.1, (aim - at_a) / (at_b - at_a)))
    return float(a + share * (b - a))


def _regions(plan: Plan) -> Any:
    """What is executed again."""
    return plan.segments, plan.loops


def _needed(plan: Plan) -> int:
    return plan.measurement.temp_bytes if plan.measurement else 0


def _infeasible(verifier: Verifier, search: _Search, budget_bytes: int) -> InfeasibleBudgetError:
    least, plain = search.least_seen, verifier.plain()
    assert least is not None
    what = f"the least peak that `{least.planner}` found"
    if _needed(plain) <= _needed(least):  # where one equation holds the peak, what plans add is all that they do
        what = f"what the function needs as it is, and no plan of `{least.planner}` needs less"
        least = plain.replace(timeline=least.plain_timeline)
    least_bytes = _needed(least)
    holders = _holders(finish(verifier.program, least, Budget()))
    return InfeasibleBudgetError(
        f"Budget `{format_bytes(budget_bytes)}` ({budget_bytes} bytes) is below {what}: "
        f"`{format_bytes(least_bytes)}`.{peak_line(verifier.program, least)} It holds {'; '.join(holders)}. "
        f"Pass budget={least_bytes}, or make the batch smaller.",
        requested_bytes=budget_bytes,
        least_bytes=least_bytes,
        holders=holders,
    )


def _holders(plan: Plan) -> tuple[str, ...]:
    """What stands at the predicted peak of a plan, with its share of that."""
    rows = standing(plan)
    total = max(1, sum(n_bytes for n_bytes, _ in rows))
    return tuple(f"{n_bytes / total:.0%} ({format_bytes(n_bytes)}) {words}" for n_bytes, words in rows[:NAMED_HOLDERS])
