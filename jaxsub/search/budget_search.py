"""From a budget in bytes to a plan that the compiler confirms.

The planner's plan for the budget is compiled whole, and what the compiler allocates says by how much its prediction
errs. The planner is asked again for so much more or less (`jaxsub.search.bracket`): while no plan fits, and then while
a plan that is expected to fit spares enough recomputation to be worth a compile. Of several that fit it is the one that
recomputes least. Plans as people write them by hand (`jaxsub.search.by_hand`) are tried where they may recompute less
than that, and before any refusal. When none fits, the least plans are tried, on the partitions where the least is
predicted lowest; the least of all that was measured is what `InfeasibleBudgetError` says, and asking for it finds the
same plans.

At most `Tuning.most_compiles` whole programs are compiled, and `Tuning.by_hand_compiles` more of plans by hand. No
clock decides that a budget is refused, nor anything else unless `max_seconds` is given: every host of a cluster must
come to the same plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, product

from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.jaxpr.new_equations import runs_in_slices
from jaxsub.planners.select import is_better
from jaxsub.search.bracket import Bracket
from jaxsub.search.candidates import Candidates, Partition
from jaxsub.search.compile_worth import NOTHING, Effort, Elsewhere, by_hand_error, fitting_probability
from jaxsub.search.verify import Verifier, finish, live_at_peak, peak_line

NAMED_HOLDERS = 4
"""How many of the values live at the peak a refusal names."""


def fit(verifier: Verifier, candidates: Candidates, budget_bytes: int, effort: Effort,
        by_hand: Callable[[], Sequence[Plan]] = tuple, elsewhere: Elsewhere = NOTHING,
        seen: list[float] | None = None) -> Plan:  # fmt: skip
    """Find a plan that the compiler confirms to fit; beside its measurement the plain program's, if that was compiled.

    Plans by hand (`jaxsub.search.by_hand`) are tried too. Only what recomputes less is compiled than what is known to
    fit `elsewhere`, or is expected to once a prediction was too low. In `seen` is by what factor predictions were too
    low for other programs of the same function; this search adds its own. `InfeasibleBudgetError` if no plan fits.
    """
    began = time.monotonic()
    plain = candidates.plain()
    said = predicted_bytes(plain)
    if said <= TUNING.plain_near * budget_bytes or verifier.is_known(verifier.empty()):
        plain = verifier.plain()
        if _needed(plain) <= budget_bytes:
            return _finished(verifier, plain, plain, budget_bytes)
    search = _Search(verifier, candidates, budget_bytes, effort, began, elsewhere, [] if seen is None else seen)
    if elsewhere.is_refused and elsewhere.share == math.inf and search.gives_up:
        raise _nothing_less(budget_bytes)
    made = cache(by_hand)
    first = candidates.ranked(budget_bytes)[0]
    search.by_hand_before(made, candidates.plan(first, budget_bytes))
    search.run(first, budget_bytes / search.error)
    if search.best is None and not search.is_beaten:  # what was measured ranks partitions otherwise
        ranked = candidates.ranked(int(budget_bytes / search.error))
        for cuts in [cuts for cuts in ranked if cuts != first][:1]:
            search.run(cuts, budget_bytes / search.error)
    if search.is_beaten or (search.best is None and search.errors and elsewhere.is_better(search.error, math.inf)):
        raise _nothing_less(budget_bytes)
    search.by_hand(made)
    if search.best is None and elsewhere.share == math.inf:
        search.from_the_least(made)
    expected = said * min(search.errors, default=1.0)  # it may err as others do
    if plain.measurement is None and expected <= TUNING.plain_far * search.may_be_plain_below():
        plain = verifier.plain()
    if plain.measurement is not None and _needed(plain) <= budget_bytes:
        return _finished(verifier, plain, plain, budget_bytes)
    if search.best is None and search.least_seen is None:
        raise _nothing_less(budget_bytes)
    if search.best is None:
        raise _infeasible(verifier, search.least_seen, plain, budget_bytes)
    return _finished(verifier, search.best, plain, budget_bytes)


def _finished(verifier: Verifier, plan: Plan, plain: Plan, budget_bytes: int) -> Plan:
    return finish(verifier.program, plan.replace(plain_measurement=plain.measurement), Budget(budget_bytes))


@dataclass(slots=True, eq=False)
class _Search:
    verifier: Verifier
    candidates: Candidates
    budget_bytes: int
    effort: Effort
    began: float
    elsewhere: Elsewhere = NOTHING
    seen: list[float] = field(default_factory=list)
    planned_share: float = math.inf
    best: Plan | None = None
    least_seen: Plan | None = None
    errors: list[float] = field(default_factory=list)
    is_beaten: bool = False

    @property
    def error(self) -> float:
        """By what factor even the best of the predictions so far was too low; 1 where one was not.

        Before there is any, that of other programs of the function.
        """
        return max(1.0, min(self.errors or self.seen, default=1.0))

    @property
    def price(self) -> float:
        """What another plan must spare now, as a share of a forward pass."""
        return self.effort.price(len(self.seen))

    @property
    def gives_up(self) -> bool:
        """Whether enough was compiled that does not fit."""
        return self.effort.gives_up(len(self.seen))

    @property
    def price_by_hand(self) -> float:
        """The same of a plan by hand: half as much, at first .5 % of the gradient's FLOPs."""
        return self.price / 2

    @property
    def most_share(self) -> float:
        """What the best that is known to fit recomputes, of this program or another; infinite where nothing is.

        While plans by hand come first, what the planner's is predicted to.
        """
        return min(self.elsewhere.share, self.planned_share, recomputed_share(self.best) if self.best else math.inf)

    def from_the_least(self, make: Callable[[], Sequence[Plan]]) -> None:
        """Try the least plans; where only these fit, by recomputing much, look for one that fills the budget better."""
        self.least()
        if self.best is None:
            return
        if recomputed_share(self.best) > TUNING.heavy_recompute:
            said, least = predicted_bytes(self.best), _needed(self.best)
            asked = (said + int(self.budget_bytes * max(1.0, said / least))) // 2
            self.run(self.candidates.ranked(asked)[0], asked)
        self.by_hand(make)

    def run(self, cuts: Partition, asked: float) -> None:
        """Move what the planner is asked for until a plan fits, and on while another compile is worth it."""
        bracket = Bracket(self.budget_bytes * (1 - TUNING.budget_margin), slope=1.0)
        tried, needed = dict[object, int](), 0
        while True:
            plan = self._aimed(cuts, asked)
            predicted, is_same = predicted_bytes(plan), _regions(plan) in tried
            if not is_same or not (bracket.low and bracket.high):
                if predicted > asked or is_same or not self.may_try(plan):
                    return
                if self.best is None and self.errors and self.elsewhere.is_better(self.error, recomputed_share(plan)):
                    self.is_beaten = True
                    return
                missed, needed = needed, self.try_(plan).temp_bytes
                tried[_regions(plan)] = needed
                if self.best is None and 0 < missed <= needed:
                    return  # what a stage needs by itself holds the peak, or the packing of buffers
            needed = tried[_regions(plan)]
            # below one that does not fit, what is asked for up to here gives no other plan than this
            bracket.add(asked if bracket.high and needed <= self.budget_bytes else predicted, needed)
            following = bracket.following()
            if following is None or abs(following - asked) < TUNING.least_slack * self.budget_bytes:
                return
            asked = following

    def _aimed(self, cuts: Partition, asked: float) -> Plan:
        """The plan to compile for what is asked: until one is measured, one that leaves room where room is cheap.

        What was measured says by how much predictions err.
        """
        if self.errors:
            return self.candidates.plan(cuts, asked, TUNING.least_slack)
        return self.candidates.roomier(cuts, asked, TUNING.least_slack)

    def may_try(self, plan: Plan) -> bool:
        """Whether a plan is worth a compile: none fits yet, or it is predicted to spare enough beside the best."""
        if self.verifier.is_known(plan):
            return True
        if self.most_share == math.inf:
            return not self.gives_up and self.verifier.compiles < TUNING.most_compiles - TUNING.least_compiles
        is_long = len(self.verifier.program.eqns) > TUNING.long_equations
        spared = self.most_share - recomputed_share(plan)
        if is_long or spared <= self.price or self.verifier.compiles >= TUNING.most_compiles:
            return False
        left = self.effort.max_seconds - (time.monotonic() - self.began)
        return self.verifier.expected_seconds(plan) <= left

    def try_(self, plan: Plan) -> Measurement:
        """Measure a plan and keep it if it is the best that fits, or needs least."""
        measurement = self.verifier.measure(plan)
        plan = plan.replace(measurement=measurement)
        error = measurement.temp_bytes / max(predicted_bytes(plan), 1)
        self.errors.append(error)
        self.seen.append(error)
        if measurement.temp_bytes <= self.budget_bytes and (self.best is None or is_better(plan, self.best)):
            self.best = plan
        if self.least_seen is None or measurement.temp_bytes < _needed(self.least_seen):
            self.least_seen = plan
        return measurement

    def by_hand_before(self, make: Callable[[], Sequence[Plan]], planned: Plan) -> None:
        """Try plans by hand before the planner's, where one is predicted to fit and to recompute clearly less.

        Not where plans of another program of the function were measured: they say more than predictions do.
        """
        fits = predicted_bytes(planned) <= self.budget_bytes
        planned_share = recomputed_share(planned) if fits else math.inf
        if self.seen or planned_share <= self.price_by_hand:
            return
        most = planned_share - self.price_by_hand
        if any(predicted_bytes(plan) <= self.budget_bytes and recomputed_share(plan) < most for plan in make()):
            self.planned_share = planned_share
            self.by_hand(make)
            self.planned_share = math.inf

    def by_hand(self, make: Callable[[], Sequence[Plan]]) -> None:
        """Try plans by hand that recompute clearly less than the best that fits; where none fits the least one too.

        A plan that needs far more than predicted rules out what is predicted to need as much, unless something fits
        already: then that is half as likely to fit, a quarter after two, for XLA may order one program otherwise than
        the next. Predictions below it are corrected by half of its error, by three quarters after two such plans, and
        so on: buffers of gradients may host what two values save and not what three do. Plans by hand that were
        measured before count too. Where the last one misses the budget by no more than predictions err, one more is
        compiled.
        """
        is_long = len(self.verifier.program.eqns) > TUNING.long_equations
        is_enough = is_long or self.most_share <= self.price_by_hand if self.most_share < math.inf else self.gives_up
        if is_enough:
            return
        if not (left := self._recompute_less(every := make())):
            return
        # sizes are round: many a plan fits to the byte
        bracket = Bracket(self.budget_bytes * (1 + TUNING.budget_margin), slope=1.0)
        known = [plan for plan in every if self.verifier.is_known(plan)]
        plan = known[0] if known else self._first_by_hand(left, bracket.limit)
        tries, known, worst, far = TUNING.by_hand_compiles + len(known), known[1:], 0.0, list[int]()
        is_near = False
        for number in count(1):
            if plan is None or number > tries + is_near:  # one more after a near miss
                return
            left = [p for p in left if p is not plan]
            plan = plan.replace(measurement=self.try_(plan))
            bracket.add(predicted_bytes(plan), _needed(plan))
            worst = max(worst, _needed(plan) / predicted_bytes(plan) - 1)
            most, left = bracket.following() or 0.0, self._recompute_less(left)
            is_near = 1.0 < _needed(plan) / self.budget_bytes <= 1 + TUNING.median_error
            if _needed(plan) > (1 + TUNING.median_error) * bracket.limit:
                far.append(predicted_bytes(plan))
                most = most if bracket.low else max(most, bracket.limit / (1 + worst * (1 - 0.5 ** len(far))))
            error = worst * 0.5 ** max(len(far), 1)
            below = [p for p in left if predicted_bytes(p) < min(far, default=math.inf)]
            fitting = known or [p for p in below if predicted_bytes(p) <= most]
            plan = fitting[0] if fitting else self._largest_expected_gain(below, most, error)
            if plan is None and self.most_share < math.inf:
                plan = self._largest_expected_gain(left, bracket.limit, doubt=0.5 ** len(far))
            known = known[1:]

    def _first_by_hand(self, plans: Sequence[Plan], limit: float) -> Plan | None:
        """Of plans by hand the one to compile first: it shows how all of them err.

        Where a plan fits already, that is the one with the largest expected gain, before the least, if it may fit: what
        the best was predicted to need too much others may be, and by as much predictions err here.
        """
        if self.most_share < math.inf:
            spare = max(0, predicted_bytes(self.best) - _needed(self.best)) if self.best else 0
            return self._largest_expected_gain(plans, limit + spare, spare / limit)
        first = min(plans, key=predicted_bytes)
        return first if predicted_bytes(first) <= TUNING.prediction_error * limit else None

    def _largest_expected_gain(self, plans: Sequence[Plan], limit: float, error: float = 0.0,
                               doubt: float = 1.0) -> Plan | None:  # fmt: skip
        """The plan with the largest gain times the probability that it fits; `None` where that is worth no compile.

        Predictions err by `error`, and at least as those of plans by hand do; the probability is `doubt` times as high.
        Where nothing fits, one that does is worth a forward pass more than the costliest recomputes.
        """
        most = min(self.most_share, 1 + max(map(recomputed_share, plans), default=0.0))
        error = max(error, by_hand_error(self.verifier.pricer.target))

        def expected(plan: Plan) -> float:
            probability = doubt * fitting_probability(predicted_bytes(plan) / max(limit, 1.0), error)
            gain = probability * (most - recomputed_share(plan))
            is_likely = probability >= TUNING.least_probability
            return round(gain, 3) if is_likely or gain > self.price_by_hand else 0.0

        found = max(plans, key=expected, default=None)
        return found if found is not None and expected(found) > 0 else None

    def _recompute_less(self, plans: Sequence[Plan]) -> list[Plan]:
        """Those that recompute clearly less than the best that fits."""
        most = self.most_share - self.price_by_hand
        return [plan for plan in plans if recomputed_share(plan) < most]

    def least(self) -> None:
        """Try the planner's least plans, the same whatever the budget is."""
        partitions = self.candidates.choices
        found = sorted((predicted_bytes(self.candidates.plan(cuts, 1)), i) for i, cuts in enumerate(partitions))
        near = [partitions[i] for n_bytes, i in found if n_bytes <= found[0][0] * (1 + TUNING.packing)]
        tried: list[object] = []
        for slack, cuts in product((TUNING.least_slack, 0.0), near):
            if len(tried) == TUNING.least_compiles:
                break
            if tried and (self.gives_up or not self._may_need_less(found[0][0])):
                return
            plan = self.candidates.plan(cuts, 1, slack)
            if _regions(plan) in tried:  # what differs in barriers alone says the same
                continue
            tried.append(_regions(plan))
            self.try_(plan)
            if self.best is not None:
                return
        if self._may_need_less(found[0][0]):
            self._between_leasts(near[0])

    def _may_need_less(self, least_bytes: int) -> bool:
        """Whether a plan that is predicted to need more than the least may need less, and enough to matter.

        Not where the least, as predicted or as seen, is further above the budget than predictions err; nor where it
        needs more beside its prediction than packing adds: larger plans are predicted too small as well then.
        """
        needed = _needed(self.least_seen)
        is_far = max(least_bytes, needed) > TUNING.plain_far * self.budget_bytes
        return not is_far and needed <= TUNING.prediction_error * least_bytes

    def may_be_plain_below(self) -> int:
        """For what budget the plain program may be as good as all that was found; 0 where it is no better.

        Before a refusal it is looked at more readily: that no plan needs less than the function as it is helps a user.
        """
        if self.best is None:
            return _needed(self.least_seen)
        return self.budget_bytes if recomputed_share(self.best) > TUNING.compile_gain else 0

    def _between_leasts(self, cuts: Partition) -> None:
        """Look for what needs less than the least plan does, from what that is predicted to need upwards.

        Packing may add a tenth to the least and nothing to a larger plan.
        """
        low = predicted_bytes(self.candidates.plan(cuts, 1))
        for _ in range(TUNING.between_compiles):
            least = _needed(self.least_seen)
            if self.best is not None or self.gives_up or least - low <= TUNING.between_gap * least:
                return
            asked = (low + least) // 2
            plan = self.candidates.plan(cuts, asked, TUNING.least_slack)
            low = asked if self.try_(plan).temp_bytes > (1 - TUNING.between_gap) * least else low


def _regions(plan: Plan) -> object:
    """What is recomputed."""
    return plan.segments, plan.loops


def _needed(plan: Plan | None) -> int:
    return plan.measurement.temp_bytes if plan and plan.measurement else 0


def _nothing_less(budget_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        "No plan that may fit recomputes less than another program of the function does, or is expected to.",
        requested_bytes=budget_bytes,
        least_bytes=0,
    )


def _infeasible(verifier: Verifier, least: Plan | None, plain: Plan, budget_bytes: int) -> InfeasibleBudgetError:
    assert least is not None
    what = f"the least peak that `{least.planner}` found"
    if plain.measurement is not None and _needed(plain) <= _needed(least):
        # where one equation holds the peak, what plans add is all that they do
        is_sliced = any(map(runs_in_slices, verifier.program.eqns))
        sliced = " and runs of it in slices" if is_sliced else ""
        what = f"what the function needs with nothing recomputed{sliced}, and no plan of `{least.planner}` needs less"
        least = plain.replace(timeline=least.plain_timeline)
    least_bytes = _needed(least)
    holders = _holders(finish(verifier.program, least, Budget()), least_bytes)
    held = f" It holds {'; '.join(holders)}." if holders else ""
    return InfeasibleBudgetError(
        f"Budget `{format_bytes(budget_bytes)}` ({budget_bytes} bytes) is below {what}: "
        f"`{format_bytes(least_bytes)}`.{peak_line(verifier.program, least)}{held} "
        f"Pass budget={least_bytes}, or make the batch smaller.",
        requested_bytes=budget_bytes,
        least_bytes=least_bytes,
        holders=holders,
        plan=least,
    )


def _holders(plan: Plan, least_bytes: int) -> tuple[str, ...]:
    """List the values live at the predicted peak of a plan, each with its share; together no more than it needs."""
    rows = live_at_peak(plan)
    total = max(1, sum(n_bytes for n_bytes, _ in rows))
    scale = min(1.0, least_bytes / total)
    return tuple(f"{n_bytes / total:.0%} ({format_bytes(int(n_bytes * scale))}) {words}"
                 for n_bytes, words in rows[:NAMED_HOLDERS])  # fmt: skip
