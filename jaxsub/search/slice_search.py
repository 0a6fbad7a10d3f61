"""Choose which runs to execute in slices: from sets of runs (`jaxsub.search.slicing`) and a budget to a plan.

Each set makes a program in which these runs are one equation each, and that is planned like any other: first by
prediction alone, which says what recomputes least; the most promising are then planned with the compiler, and so is
the program without slices. That comes first where it is predicted to recompute little, and no set is looked at if it
does; it comes last where it is predicted not to fit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxsub.core.budget import Budget
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.slice_time import has_slow_convolutions
from jaxsub.devices.targets import Target
from jaxsub.jaxpr.trace import Program
from jaxsub.search import sliced_program
from jaxsub.search.by_hand import BY_HAND
from jaxsub.search.candidates import below_least
from jaxsub.search.compile_worth import NOTHING, Elsewhere, by_hand_error, fitting_probability
from jaxsub.search.fewest_slices import cost_of, fewest_slices
from jaxsub.search.sliced_program import WHOLE, Runs, Whole, fixed_cost, in_slices, needed_bytes, needed_or_least
from jaxsub.search.slicing import Chunks, RunsFound, asked, find_runs


def sliced_or_whole(program: Program, target: Target, budget: Budget, chunks: Chunks, whole: Whole,
                    elsewhere: Elsewhere = NOTHING) -> Plan:  # fmt: skip
    """Plan a program, runs of it in slices where that spares recomputation, or memory that nothing else can.

    Args:
        program: The program.
        target: What it is planned for.
        budget: The budget.
        chunks: What the user asks for.
        whole: Plans a program as it stands.
        elsewhere: What is expected of other forms of the program.

    Raises:
        InfeasibleBudgetError: If nothing fits; the least that it names is met when it is asked for. It names none if
            nothing was found to fit and more is expected `elsewhere`.
        ChunksError: If what the user asks for by name or axis cannot be done.
    """
    if isinstance(chunks, Mapping):
        return in_slices(program, asked(program, chunks), budget, whole, False)
    search = _Search(program, target, budget, chunks is True, whole, elsewhere)
    search.run()
    if not search.plans:
        raise search.refusal()

    def rank(plan: Plan) -> tuple[float, int, int]:
        if search.is_asked:
            return round(recomputed_share(plan), 3), 0, needed_bytes(plan)
        return round(cost_of(plan), 3), sliced_program.n_slices(plan.slices), needed_bytes(plan)

    return min(search.plans, key=rank)


def best_in_slices(program: Program, target: Target, n_bytes: int, whole: Whole, is_last: bool = False) -> Plan | None:
    """The plan in slices that is predicted to recompute least within a budget; where none fits, that needs least.

    Args:
        program: The program.
        target: What it is planned for.
        n_bytes: The budget.
        whole: Plans a program as it stands.
        is_last: Whether nothing else fits: then slices may have any number of rows, and values be of any size.

    Returns:
        The plan; `None` where no run may be executed in slices.
    """
    search = _Search(program, target, Budget(n_bytes), False, whole)
    found: list[tuple[tuple[bool, bool, float, int], Runs, Plan]] = []
    for number, runs in enumerate(search.last_sets() if is_last else search.sets):
        is_slow_there = has_slow_convolutions(program, target, runs)
        at_least = False, is_slow_there, round(fixed_cost(runs), 3), number
        if found and min(rank for rank, *_ in found) < at_least:
            continue
        with contextlib.suppress(InfeasibleBudgetError):  # a plan inside slices may need more than it was said to
            try:
                plan = search.planned(runs, search.budget)
                rank = (False, is_slow_there, round(cost_of(plan), 3), number)
            except InfeasibleBudgetError as refused:
                plan = search.planned(runs, Budget(refused.least_bytes))
                rank = (True, False, float(needed_bytes(plan)), number)
            found.append((rank, runs, plan))
    if not found:
        return None
    (does_not_fit, *_), chosen, plan = min(found, key=lambda ranked: ranked[0])
    if does_not_fit:
        return plan
    needed, plain = needed_bytes(plan), search.plain_bytes
    fewest, *_ = fewest_slices(chosen, n_bytes, needed, plain, cost_of(plan), search._plan_or_refusal)
    return search.planned(fewest, search.budget)


@dataclass(eq=False)
class _Search:
    """Plans that fit and refusals, with the runs in slices that they are of."""

    program: Program
    target: Target
    budget: Budget
    is_asked: bool
    whole: Whole
    elsewhere: Elsewhere = NOTHING
    plans: list[Plan] = field(init=False, default_factory=list)
    refusals: list[tuple[InfeasibleBudgetError, Runs]] = field(init=False, default_factory=list)
    predicted: dict[tuple[Runs, Budget, float], Plan | InfeasibleBudgetError] = field(init=False, default_factory=dict)
    error: float = field(init=False, default=1.0)
    """By what factor predictions were too low, of what was postponed or given up."""

    postponed: set[Runs] = field(init=False, default_factory=set)
    """What others were expected to recompute less than, or fit already and do."""

    is_beaten: bool = field(init=False, default=False)
    """Whether nothing fits yet, and more is expected elsewhere."""

    leasts: dict[sliced_program.Places, dict[int, int]] = field(init=False, default_factory=dict)
    """Of runs that are predicted not to fit: the least, by how many slices they have together."""

    def run(self) -> None:
        """Plan what is predicted to recompute least: the program as it stands, or with a set of runs in slices."""
        is_whole_first = self.budget.n_bytes is None or self.is_asked or self._said()[0] <= TUNING.little_recompute
        if is_whole_first:
            self._try(WHOLE, tuple if self.budget == Budget() else lambda: self.sets)
            if self.budget == Budget() and not self.is_asked:
                return
            if self.plans and not self.is_asked and recomputed_share(self.plans[0]) <= TUNING.little_recompute:
                return
        is_left = WHOLE in self.postponed or not is_whole_first
        sets = {WHOLE: None, **self.sets} if is_left else dict(self.sets)
        self._try_sets(sets, TUNING.slice_sets + is_left)
        if not self.plans:
            self._try_sets({**sets, **self.last_sets()}, TUNING.slice_sets, is_last=True)

    @cached_property
    def found(self) -> RunsFound:
        """The runs of the program that may be executed in slices."""
        return find_runs(self.program, self.target, self.n_bytes)

    @cached_property
    def sets(self) -> dict[Runs, None]:
        """The usual sets of them."""
        return dict.fromkeys(self.found.sets())

    def last_sets(self) -> dict[Runs, None]:
        """Other sets, where nothing else fits."""
        wide, keeps = TUNING.wide_share * self.n_bytes, self.found.kept_whole()
        last = [] if wide < TUNING.least_sliced_bytes and keeps <= wide else [self.found.as_last()]
        if wide < max(TUNING.least_sliced_bytes, keeps):
            last.append(find_runs(self.program, self.target, self.n_bytes, True))
        return {runs: None for found in last for runs in found.sets() if runs not in self.sets}

    def _try_sets(self, sets: dict[Runs, None], most: int, is_last: bool = False) -> None:
        """Plan the program with the most promising sets of runs in slices.

        Once predictions of one have been too low, another may be expected to recompute less: it comes first then.
        """
        n_tried = 0
        while n_tried < most and (found := min(self._predicted(sets, is_last), key=lambda f: f[0], default=None)):
            (does_not_fit, _, cost, _), chosen = found
            if is_last and self.plans:
                break
            chosen = WHOLE if WHOLE in sets and not does_not_fit and self._may_spare(cost) else chosen
            sets.pop(chosen)
            if self._tried(chosen, tuple(sets)):
                sets[chosen] = None
            else:
                n_tried += 1
        if WHOLE in sets and (is_last or not self._is_far()) and self._may_err():
            self._try(WHOLE)
            sets.pop(WHOLE)

    def _tried(self, chosen: Runs, others: Collection[Runs]) -> bool:
        """Plan a set of runs in as few slices as may do; whether another of the sets has to come first."""
        others = others if chosen not in self.postponed else ()
        for runs in dict.fromkeys((*self._fewer(chosen)[:2], chosen)):  # at the same cost fewer are better
            if self._try(runs, lambda: others, math.inf if runs == chosen else self._little_more(chosen)):
                is_slowed = sliced_program.slowed_share(runs) > TUNING.compile_gain
                if is_slowed and (fewer := self._fewer(runs, self.plans[-1])[0]) != runs:
                    self._try(fewer)
                break
            if runs in self.postponed:
                self.postponed.add(chosen)
                return bool(others) and not self.plans
        return False

    @property
    def n_bytes(self) -> int:
        """The budget; without one half of what the program needs, for slices that were asked for."""
        if self.budget.n_bytes is not None:
            return self.budget.n_bytes
        plain = self.plans[0].plain_measurement or self.plans[0].plain_prediction if self.plans else None
        return max(1, plain.temp_bytes // 2) if plain is not None else 1

    @property
    def plain_bytes(self) -> int:
        """What the program is predicted to need as it is."""
        return needed_bytes(self.planned(WHOLE, Budget(sliced_program.NO_LIMIT)))

    def _said(self) -> tuple[float, int]:
        """What the whole is predicted to recompute, and 0; where it does not fit, infinity and the least it needs."""
        try:
            return recomputed_share(self.planned(WHOLE, self._expected())), 0
        except InfeasibleBudgetError as refused:
            return math.inf, refused.least_bytes

    def _is_far(self) -> bool:
        """Whether the program without slices is predicted to need far more than the budget."""
        return self._said()[1] > TUNING.plain_far * self.n_bytes

    def _may_spare(self, cost: float) -> bool:
        """Whether the program without slices, predicted not to fit, may spare so much of a cost that it comes first."""
        least = self._said()[1]
        if not least:
            return False
        share = recomputed_share(self.planned(WHOLE, Budget(least)))
        probability = fitting_probability(least / self.n_bytes, by_hand_error(self.target))
        return probability * (cost - share) > TUNING.compile_gain

    def _may_err(self) -> bool:
        """Whether the program without slices may fit though it is predicted not to, by hand perhaps.

        Where something was found, only what recomputes less is compiled; where nothing was, what may need least too:
        a refusal names it.
        """
        if self.plans:
            return self._least_cost() > TUNING.little_recompute and not self._is_far()
        if any(runs for _, runs in self.refusals):
            return self._said()[1] < max(TUNING.prediction_error * self.n_bytes, self._least_measured())
        return not self._is_far() or self._said()[1] < self._least_measured()

    def _may_need_less(self, expected: float) -> bool:
        """Whether runs in slices that are predicted not to fit may fit, or need less than all that was measured.

        Where others were measured that is expected by how they erred; before, predictions may err as at worst.
        """
        if not any(runs for _, runs in self.refusals):
            return expected < TUNING.prediction_error * self._least_measured()
        most = max((1 + TUNING.packing) * self.n_bytes, (1 - TUNING.between_gap) * self._least_measured())
        return expected < most

    def _predicted(self, sets: Collection[Runs], is_last: bool) -> Iterator[tuple[tuple[float, ...], Runs]]:
        """Sets worth compiling: do they not fit by prediction (by far is last), are they slow, their cost, a rank."""
        known = self._said()[0] if WHOLE in sets and not self.plans else self._least_cost()
        most = self._least_cost() - TUNING.compile_gain
        for number, runs in enumerate(sets):
            is_slow_there = has_slow_convolutions(self.program, self.target, runs)
            is_too_dear = (is_slow_there and self.plans) or known <= sliced_program.least_gain(runs)
            if not self.is_asked and (is_too_dear or self._is_in_vain(runs)):
                continue
            is_alike = bool(runs) and not self.is_asked and self._is_refused_alike(runs)
            if is_alike and not self._is_misjudged():
                continue
            found = self._plan_or_refusal(runs, self._corrected() if runs else self._expected())
            if not isinstance(found, Plan):
                leasts = self.leasts.setdefault(sliced_program.places_of(runs), {})
                leasts[sliced_program.n_slices(runs)] = found.least_bytes
            if is_alike or not isinstance(found, Plan):
                least = needed_or_least(found) / (self._excess() if runs else 1.0)
                is_near = is_last or least < TUNING.prediction_error * self.n_bytes
                if not self.plans and is_near and (self._may_need_less(least) if runs else self._may_err()):
                    yield (True, False, 0.0, least), runs
                continue
            share = round(cost_of(found) - (0.0 if runs else TUNING.compile_gain), 3)
            known = known if is_slow_there else min(known, share)
            if cost_of(found) < most or (self.is_asked and self._spares(found)):
                yield (False, is_slow_there, share, number), runs

    def _is_in_vain(self, runs: Runs) -> bool:
        """Whether these runs need no less in slices than the program without, and in more slices no less than in few.

        What holds the peak is elsewhere, and is there in any number of slices.
        """
        leasts = self.leasts.get(sliced_program.places_of(runs), {})
        if len(leasts) < 2 or sliced_program.n_slices(runs) in leasts:
            return False
        fewest, most = leasts[min(leasts)], leasts[max(leasts)]
        return most >= max((1 - TUNING.between_gap) * fewest, self._least_bytes(WHOLE))

    def _least_measured(self, of: Runs | None = None) -> float:
        """The least that was measured of what does not fit, with some runs in slices or any; infinite if nothing."""
        measured = (refused.least_bytes for refused, runs in self.refusals if of is None or runs == of)
        return min(filter(None, measured), default=math.inf)

    def _excess(self) -> float:
        """By what factor predictions for runs in slices that did not fit were too large; below 1 if too small."""
        return max(self._refused_ratios(), default=1.0)

    def _refused_ratios(self) -> list[float]:
        """What was predicted of runs in slices that did not fit over what they were measured to need."""
        return [((refused.plan and predicted_bytes(refused.plan)) or self._least_bytes(runs)) / refused.least_bytes
                for refused, runs in self.refusals if runs and refused.least_bytes]  # fmt: skip

    def _is_refused_alike(self, runs: Runs) -> bool:
        """Whether the program without slices was refused, and with them is predicted to need no less."""
        if self.plans or self._least_measured(WHOLE) == math.inf:
            return False
        return self._least_bytes(runs) > (1 - TUNING.between_gap) * self._least_bytes(WHOLE)

    def _is_misjudged(self) -> bool:
        """Whether the program without slices needs far more than predicted: then predictions say little of slices."""
        return self._least_measured(WHOLE) > TUNING.prediction_error * self._least_bytes(WHOLE)

    def _least_bytes(self, runs: Runs) -> int:
        """The least that is predicted with some runs in slices."""
        found = self.predicted.get((runs, self.budget, math.inf))
        found = found if isinstance(found, InfeasibleBudgetError) else self._plan_or_refusal(runs, Budget(1))
        return needed_or_least(found)

    def _spares(self, plan: Plan) -> bool:
        """Whether a plan needs less than all found so far, and recomputes no more."""
        return all(needed_bytes(plan) < needed_bytes(known) and recomputed_share(plan) <= recomputed_share(known)
                   for known in self.plans)  # fmt: skip

    def _corrected(self) -> Budget:
        """The budget, by as much larger as what fits in slices is measured to need less than was predicted of it.

        Where no set of runs in slices fits, it is smaller: what was refused needs more than was predicted of it, and so
        may others. Predictions of plans by hand err otherwise.
        """
        if self.budget == Budget():
            return self.budget
        pairs = [(p.prediction.temp_bytes, p.measurement.temp_bytes) for p in self.plans
                 if p.slices and p.prediction and p.measurement and not p.planner.startswith(BY_HAND)]  # fmt: skip
        if not pairs:
            return Budget(int(self.n_bytes * min((1 / self.error, *self._refused_ratios()))))
        return Budget(int(self.n_bytes * max((said / max(is_, 1) for said, is_ in pairs), default=1.0)))

    def _expected(self) -> Budget:
        """The budget for predictions of the program without slices, which are as wrong as they were."""
        return self.budget if self.error == 1.0 else Budget(int(self.n_bytes / self.error))

    def _least_cost(self) -> float:
        """What the best plan that was found costs; infinite where there is none."""
        return min(map(cost_of, self.plans), default=math.inf)

    def planned(self, runs: Runs, budget: Budget) -> Plan:
        """Plan with some runs in slices by prediction alone."""
        found = self._plan_or_refusal(runs, budget)
        if not isinstance(found, Plan):
            raise found
        return found

    def _plan_or_refusal(self, runs: Runs, budget: Budget, most: float = math.inf) -> Plan | InfeasibleBudgetError:
        """The plan by prediction alone, or the refusal, of what recomputes too much perhaps; that is done once."""
        key = runs, budget, most
        if key not in self.predicted:
            try:
                self.predicted[key] = in_slices(self.program, runs, budget, self.whole, True, most_share=most)
            except InfeasibleBudgetError as refused:
                self.predicted[key] = refused
        return self.predicted[key]

    def _little_more(self, runs: Runs) -> float:
        """What fewer slices may recompute, as a share: what these are predicted to, and what is worth a compile."""
        found = self._plan_or_refusal(runs, self._corrected())
        return recomputed_share(found) + TUNING.compile_gain if isinstance(found, Plan) else math.inf

    def _fewer(self, runs: Runs, plan: Plan | None = None) -> tuple[Runs, ...]:
        """The same runs in fewer slices: in as few as may fit and recompute no more, then in twice as many each.

        What a plan in slices is measured to need less than was predicted of it, its fewer slices need less as well.
        """
        if self.budget == Budget() or not runs:
            return (runs,)
        with contextlib.suppress(InfeasibleBudgetError):
            now = self.planned(runs, self._corrected())
            room = int(self.n_bytes / TUNING.prediction_error) + needed_bytes(now) - needed_bytes(plan or now)
            return fewest_slices(runs, max(1, room), needed_bytes(now), self.plain_bytes, cost_of(plan or now),
                                 self._plan_or_refusal)  # fmt: skip
        return (runs,)

    def _try(self, runs: Runs, others: Callable[[], Collection[Runs]] = tuple, most: float = math.inf) -> bool:
        """Plan with the compiler; unless slices were asked for, only what recomputes less than others do or may."""

        def is_better(error: float, share: float) -> bool:
            self.error = max(self.error, error)
            self.is_beaten = not self.plans and self.elsewhere.is_better(error, share)
            return self.is_beaten or any(
                self._recomputes_less(other, self._expected(), share) for other in others() if other != runs
            )

        elsewhere = NOTHING if self.is_asked else Elsewhere(self._least_cost(), bool(self.refusals), is_better)
        try:
            self.plans.append(in_slices(self.program, runs, self.budget, self.whole, False, elsewhere, most))
        except InfeasibleBudgetError as refused:
            if self.is_beaten:
                raise
            if refused.least_bytes:
                self.refusals.append((refused, runs))
            else:
                self.postponed.add(runs)
            return False
        return True

    def _recomputes_less(self, runs: Runs, budget: Budget, share: float) -> bool:
        """Whether some runs in slices are predicted to fit a budget, and to recompute clearly less than a share."""
        if sliced_program.least_gain(runs) >= share or has_slow_convolutions(self.program, self.target, runs):
            return False
        found = self._plan_or_refusal(runs, budget)
        return isinstance(found, Plan) and cost_of(found) <= share - TUNING.little_recompute

    def refusal(self) -> InfeasibleBudgetError:
        """The refusal of the least, with its plan; where that is predicted alone, of the least that is met if asked."""
        refused, runs = min(self.refusals, key=lambda found: found[0].least_bytes)
        again = _Search(self.program, self.target, Budget(refused.least_bytes), self.is_asked, self.whole)
        if refused.plan is not None or not (runs or again._is_far()):
            return refused
        again.run()  # other budgets have other sets
        return refused if again.plans else below_least(self.n_bytes, again.refusal().least_bytes)
