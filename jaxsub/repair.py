"""From a budget in bytes to a plan that the compiler confirms.

The planner is asked for a plan within an inner budget, the plan is compiled, and what the compiler allocates moves the
inner budget: up by what was left over, down by what was too much, and between the two once both have been seen. A plan
that fits and leaves little is taken, unless a cheaper one is expected to fit as well, or a much cheaper one to need
only a little more: it is tried too. Of several that fit it is the one that executes least again. When none fits, the
planner's least plans are tried, of every way to cut that may hold the least, and what the smallest of them needs is
what `InfeasibleBudgetError` says. A budget that buys so little that half a forward pass and more is executed again
looks at the other ways to cut too, their least plans among them: a smaller budget must not find what it has not seen.
For the same reason every budget looks first at what budgets too small for its way to cut would find on others.

Whole programs are compiled at most `MOST_COMPILES` times, the plain one included; those of more than `LONG_EQUATIONS`,
which take minutes, only until a plan fits. A clock does not decide: every host of a cluster must come to the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsub.budget import Budget, format_bytes
from jaxsub.errors import InfeasibleBudgetError
from jaxsub.plan import Measurement, Plan
from jaxsub.planners import Planner
from jaxsub.planners.fit import is_better
from jaxsub.pricing import Pricer
from jaxsub.verify import Verifier, finish, peak_line, standing

MOST_COMPILES = 6
LONG_EQUATIONS = 10_000
"""Programs with more equations are not compiled again only to look for something better than what fits."""

CLOSE = 0.96
"""A plan that fills this share of the budget is close enough: the next compile would gain little."""

MARGIN = 0.003
"""Share of the budget to aim below it: without it the repair creeps up on the budget and misses by as much."""

MUCH_AGAIN = 0.1
"""Where a plan that fits executes this share of a forward pass again, a cheaper one that may not fit is tried."""

LARGE, GAIN = 0.25, 0.015
"""Finer stages are tried where a plan executes anything worth it again, in stages whose backward pass takes this share
of the budget, and taken where they spare this share of a forward pass: they cost compiles, and barriers."""

NOTHING = 1e-3
"""What is executed again below this share of a forward pass counts as nothing: a scalar here and there."""

FEW_STAGES, COUNTING = 64, 0.25
"""What a budget too small for a way to cut buys on others is looked at where these have at most so many stages: longer
chains execute far more again at their least than at larger budgets. Counting may say that they need as much more."""

FILL = 0.005
"""What a plan that fits leaves over is filled by one more compile where that spares this share of a forward pass."""

SPREAD = 0.03
"""Share of the budget by which predictions of plans next to each other err differently: where a plan that fits executes
`MUCH_AGAIN`, one that is predicted to need so much more is tried if it executes less by as much."""

NAMED_HOLDERS = 4
"""How many of what stands at the peak are named where nothing fits."""

NEARLY, TRIVIAL = 1e-3, 1e-4
"""Shares of the least predicted peak: plans that need as much more are tried before the one with the least."""

HALF = 0.5
"""Where more than this share of a forward pass is executed again, plans of other stages are looked at: prices of theirs
cost compiles, and budgets that buy more seldom gain by it."""

LEASTS, PACKING = 2, 0.12
"""How many least plans are compiled: of ways to cut on which the least is predicted within so much of the lowest, since
by as much the compiler's packing of buffers adds to what is alive; of one way the plan that needs nearly the least too,
which may execute far less again, and be packed better."""

REFINEMENTS = 6
"""How often a planner is asked again after the compiler has corrected the price of regions it used."""


def settle(pricer: Pricer, cuts: Sequence[int], planner: Planner, budget_bytes: int | None,
           slack: float = 0.0) -> Plan:  # fmt: skip
    """Ask a planner until every region it uses has a true price.

    A planner that says nothing fits is asked for its least, or a share more: last bytes can cost a forward pass.
    """
    for _ in range(REFINEMENTS):
        chain = pricer.chain(cuts)
        try:
            plan = planner(chain, budget_bytes)
        except InfeasibleBudgetError as error:
            plan = planner(chain, int(error.least_bytes * (1 + slack)))
        if not pricer.refine(plan):
            break
    return plan


def natural(pricer: Pricer, cut_choices: Sequence[Sequence[int]], planner: Planner) -> Plan:
    """The plan without a budget: on the first way to cut on which it is predicted to need the least, or nearly."""
    plans = [settle(pricer, cuts, planner, None) for cuts in cut_choices]
    least = min(map(_predicted, plans))
    return next(plan for plan in plans if _predicted(plan) <= least * (1 + NEARLY))


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
    if search.best is not None:
        search.others([choice for choice in cut_choices if tuple(choice) != tuple(offer.cuts)])
    else:
        search.least(_lowest(verifier.pricer, planner, cut_choices))
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
            predicted = _predicted(plan)
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
                self.dare(cuts, limit, spare, FILL)
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
        if _share_again(plan) >= _share_again(self.best):
            return _needed(self.best)
        at_least = predicted + min(self.least_error, self.least_error // 2)
        may_fit = at_least <= self.budget_bytes * (1 + MARGIN)  # sizes are few and round: many a plan fits to the byte
        return None if self.verifier.is_known(plan) or may_fit else at_least

    def dare(self, cuts: Sequence[int], limit: int, asked: int, gain: float) -> None:
        """Try one plan that may not fit, where it would spare so much of a forward pass beside the best that does."""
        again = _share_again(self.best) if self.best else 0.0
        if again > gain:
            plan = settle(self.verifier.pricer, cuts, self.planner, asked)
            if _share_again(plan) < again - gain and self._may_try(plan, limit):
                self.try_(plan)

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
        """Try plans of other stages where they execute less again than the best, and that is much.

        They are the cheapest that fits if predictions of it err as they did, and the least, which a smaller budget
        would be told of.
        """
        for cuts in choices:
            for asked in (max(1, self.budget_bytes - self.most_error), 1):
                again = _share_again(self.best) if self.best else 0.0
                if again <= HALF or len(self.verifier.program.eqns) > LONG_EQUATIONS:
                    return
                plan = settle(self.verifier.pricer.anew(), cuts, self.planner, asked, NEARLY)
                if _share_again(plan) < again and self._may_try(plan, MOST_COMPILES):
                    self.try_(plan)

    def least(self, choices: Sequence[Sequence[int]]) -> None:
        """Try the planner's least plans, found anew so that they are the same whatever was tried before."""
        tried = [(cuts, slack) for slack in (NEARLY, 0.0) for cuts in choices][:LEASTS]
        for cuts, slack in tried:
            plan = settle(self.verifier.pricer.anew(), cuts, self.planner, 1, slack)
            plan = plan.replace(measurement=self.try_(plan))
            if self.least_seen is None or _needed(plan) < _needed(self.least_seen):
                self.least_seen = plan


def _lowest(pricer: Pricer, planner: Planner, choices: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The ways to cut whose least plans may be the least, those first on which it is predicted lowest.

    They are the same whatever the budget: who asks for what the smallest of these plans needs gets it.
    """
    least = sorted((_least_on(pricer.anew(), planner, cuts), i) for i, cuts in enumerate(choices))
    return [choices[i] for n_bytes, i in least if n_bytes <= least[0][0] * (1 + PACKING)]


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to cut, and how to plan on it.

    Attributes:
        cuts: The way to cut.
        budget_bytes: What to plan for.
        again: What is expected to be executed again, as a share of a forward pass; infinite where nothing fits.
    """

    cuts: Sequence[int]
    budget_bytes: int
    again: float


def promising(pricer: Pricer, planner: Planner, budget_bytes: int, choices: Sequence[Sequence[int]]) -> list[Offer]:
    """The first way to cut on which the planner predicts to fit, or else the one on which it needs least.

    Where that way executes anything again that is worth it, stages whose own backward pass takes much of the budget are
    cut as finely as any way cuts them, if that is predicted to pay. A budget too small for that way is planned on
    others; where the largest such budget executes less again there, that comes first: it serves the larger one too.
    """
    least: list[tuple[int, Sequence[int]]] = []
    for i, cuts in enumerate(choices):
        chain = pricer.anew().chain(cuts)
        try:
            own = Offer(cuts, budget_bytes, _share_again(planner(chain, budget_bytes)))
        except InfeasibleBudgetError as error:
            least.append((error.least_bytes, cuts))
            continue
        large = [stage for stage in chain.stages if stage.transient_bytes > LARGE * budget_bytes]
        inside = {cut for other in choices for cut in other for stage in large if stage.start < cut < stage.stop}
        if own.again > GAIN and inside - set(cuts):
            finer = tuple(sorted({*cuts, *inside}))
            again = _again_within(pricer.anew(), planner, finer, budget_bytes)
            own = Offer(finer, budget_bytes, again) if again < own.again - GAIN else own
        return [*_of_smaller(pricer, planner, own, cuts, choices[i + 1 :]), own]
    cuts = next(cuts for n_bytes, cuts in least if n_bytes <= min(least)[0] * (1 + NEARLY))
    return [Offer(cuts, budget_bytes, math.inf)]


def _of_smaller(
    pricer: Pricer, planner: Planner, own: Offer, cuts: Sequence[int], others: Iterable[Sequence[int]]
) -> list[Offer]:
    """What a budget too small for a way is offered on others, where that executes less again; a list of one offer.

    It is counted first, and asked of the compiler only where counting does not rule it out. A planner that takes long
    for every budget says so, and is not asked.
    """
    others = [other for other in others if max(len(other), len(cuts)) <= FEW_STAGES + 1]
    found: list[Offer] = []
    if own.again > NOTHING and others and getattr(planner, "is_quick", True):
        for of, room in [(pricer.anew(is_counted=True), COUNTING)] * pricer.is_compiled + [(pricer, 0.0)]:
            below = int(_too_small(of.anew(), planner, cuts, own.budget_bytes) * (1 + room))
            found = [f for f in promising(of, planner, below, others)[:1] if f.again < own.again] if below else []
            if not found:
                break
    return found


def _too_small(pricer: Pricer, planner: Planner, cuts: Sequence[int], budget_bytes: int) -> int:
    """The largest budget that is planned on other ways too: none of a way's plans fits, or much is executed again."""
    low, high = _least_on(pricer, planner, cuts) - 1, budget_bytes
    if _again_within(pricer, planner, cuts, low + 1) <= HALF:
        return low
    while high - low > max(1, NEARLY * low):
        middle = (low + high) // 2
        is_much = _again_within(pricer, planner, cuts, middle) > HALF
        low, high = (middle, high) if is_much else (low, middle)
    return low


def _again_within(pricer: Pricer, planner: Planner, cuts: Sequence[int], budget_bytes: int) -> float:
    """What the planner executes again on a way to cut, as a share of a forward pass; infinite where nothing fits."""
    try:
        return _share_again(planner(pricer.chain(cuts), budget_bytes))
    except InfeasibleBudgetError:
        return math.inf


def _least_on(pricer: Pricer, planner: Planner, cuts: Sequence[int]) -> int:
    """The least that the planner predicts to fit on a way to cut."""
    try:
        return _predicted(planner(pricer.chain(cuts), 1))
    except InfeasibleBudgetError as error:
        return error.least_bytes


def _share_again(plan: Plan) -> float:
    """What a plan executes again, as a share of one forward pass; 0 where it does not say."""
    return plan.prediction.extra_flops / max(plan.prediction.forward_flops, 1.0) if plan.prediction else 0.0


def _predicted(plan: Plan) -> int:
    return plan.prediction.temp_bytes if plan.prediction else 0


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
