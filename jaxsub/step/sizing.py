"""Plans for a whole step: how much each sublinear function in it may take, so that the step fits.

One level, in bytes, is asked of all functions at once: each gets its best plan within that level, or keeps its own plan
where that needs no more. Where functions run one after the other that is the best there is, since the step's peak is
that of the worst of them. The whole step is compiled and what the compiler allocates moves the level
(`jaxsub.search.bracket`). In the end each function is tried at its own plan again, for one that does not stand at the
peak need not recompute anything.

Whatever is compiled is remembered, and of all that fits the least recomputation is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxsub.core.decisions import Form
from jaxsub.core.disk_cache import Store
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Prices
from jaxsub.devices.targets import Target
from jaxsub.emission.own_regions import n_own_regions
from jaxsub.search.bracket import Bracket
from jaxsub.search.call_sites import CallSite, Trial
from jaxsub.search.pipeline import may_be_sliced
from jaxsub.step.attempt import Attempt, cost_of_step, extra_flops, forward_flops
from jaxsub.step.ladder import Ladder, form_of, ladder_forms


@dataclass(slots=True, eq=False)
class Sizing:
    """The search for the plans of one step.

    Attributes:
        first: The step with every function under its own plan.
        compile_trial: Compiles the step under a trial's plans.
        target: What it is planned for.
        store: Where prices are remembered.
        progress: Told of what is compiled.
        is_spread: Whether the step runs on several devices: then only functions whose shardings are known run in
            slices.
        prices: Costs that are known already, by the fingerprint of a function.
        attempts: All that was compiled.
        least_bytes: What is temporary under the least plans that were compiled whatever the budget is.
        ways: The plans of every function that may be planned, by fingerprint: of those that may be planned in several
            forms, in the first, then in the second and so on.
    """

    first: Attempt
    compile_trial: Callable[[Trial], Attempt]
    target: Target
    store: Store | None
    progress: Callable[[str], None]
    is_spread: bool = False
    prices: dict[str, Prices] = field(default_factory=dict)
    attempts: dict[Any, Attempt] = field(init=False)
    least_bytes: float = field(init=False, default=math.inf)
    ways: list[dict[str, Ladder]] = field(init=False)

    def __post_init__(self) -> None:
        self.attempts = {_shape(self.first.plans): self.first}
        sized = {key: site for key, site in self.first.trial.sites.items() if site.is_sized}
        forms = {key: ladder_forms(site) for key, site in sized.items()}
        most = max(map(len, forms.values()), default=1)
        self.ways = [
            {key: self._ladder(site, forms[key][min(n, len(forms[key]) - 1)]) for key, site in sized.items()}
            for n in range(most)
        ]

    def _ladder(self, site: CallSite, form: Form) -> Ladder:
        """The plans of a function in a form: with its own regions as they are nothing runs in slices."""
        is_last = form.opened_regions < n_own_regions(site.program)
        may_slice = not (is_last or self._is_unknown(site))
        fused_bytes = sum(fused.gradient_bytes for fused in self.first.updates.fused)
        prices = self.prices.setdefault(site.program.fingerprint, Prices())
        return Ladder(site, self.target, self.store, self.progress, may_slice, form, fused_bytes, prices)

    def _is_unknown(self, site: CallSite) -> bool:
        """Whether the step runs on several devices, and nothing says how the arguments of a function are split."""
        return self.is_spread and not site.program.is_sharded and not site.is_mapped

    def attempt(self, plans: Mapping[str, Plan]) -> Attempt:
        """Compile the step under plans, unless that was done before."""
        key = _shape({**self.first.plans, **plans})
        if key not in self.attempts:
            self.attempts[key] = self.compile_trial(Trial(self.target, plans, known=self.first.trial.sites))
        return self.attempts[key]

    def run(self, n_bytes: int) -> Attempt | None:
        """Find the plans with which the step fits in so many bytes of a device and recomputes least, or `None`."""
        if self._fits(self.first, n_bytes) and all(ladder.own is ladder.site.own for ladder in self.ways[0].values()):
            return self.first
        for ladders in self.ways if self.ways[0] else ():
            if (best := self._best(n_bytes)) is not None and best.extra_flops <= self._added_flops(ladders):
                continue
            self._search(ladders, n_bytes)
            best = self._best(n_bytes)
            if best is None or best.is_slow or best.is_heavy:
                self._try_least(ladders, n_bytes, best)
            if (best := self._best(n_bytes)) is not None:
                self._relax(ladders, best, n_bytes)
        return self._best(n_bytes)

    def _added_flops(self, ladders: Mapping[str, Ladder]) -> float:
        """What the forms that functions are planned in add, whatever their plans are."""
        calls = self.first.trial.calls
        return sum(own.site.added_flops(own.form) * calls[key] for key, own in ladders.items())

    def unknown_shardings(self) -> list[str]:
        """Functions that may run in slices if only it were known how their arguments are split over the devices."""
        sites = [ladder.site for ladder in self.ways[0].values() if self._is_unknown(ladder.site)]
        return [site.name for site in sites if may_be_sliced(site.program, site.settings)]

    def least(self) -> Attempt:
        """What needs least of all that is tried whatever the budget is."""
        for ladders in self.ways:
            self._try_least(ladders)
        return min(self.attempts.values(), key=lambda a: a.measurement.step_bytes)

    def _try_least(self, ladders: Mapping[str, Ladder], n_bytes: int = 0, best: Attempt | None = None) -> None:
        """Compile the least plans, lowest prediction first: those that may need less than others, or may fit.

        Where something fits, only those that cost less.
        """
        room = n_bytes - self._given_bytes
        share = _share(self.first.measurement.temp_bytes, _top_bytes(ladders))

        def needed(plans: Mapping[str, Plan]) -> float:
            return share * max(ladders[key].needed(plan) for key, plan in plans.items())

        for plans in sorted(_least_plans(ladders, is_all=best is None), key=needed):
            if best is not None and cost_of_step({**best.plans, **plans}, best.trial) >= best.cost:
                continue
            predicted = needed(plans) / TUNING.prediction_error
            if best is None and predicted <= self.least_bytes:
                self.least_bytes = min(self.least_bytes, self.attempt(plans).measurement.temp_bytes)
            elif predicted <= room:
                self.attempt(plans)

    @property
    def _given_bytes(self) -> int:
        """What the step holds beside temporary values."""
        return self.first.measurement.step_bytes - self.first.measurement.temp_bytes

    def _fits(self, attempt: Attempt, n_bytes: int) -> bool:
        return attempt.measurement.step_bytes <= n_bytes

    def _best(self, n_bytes: int) -> Attempt | None:
        fitting = [a for a in self.attempts.values() if self._fits(a, n_bytes)]
        return min(fitting, key=lambda a: (*a.cost, a.measurement.step_bytes), default=None)

    def _search(self, ladders: Mapping[str, Ladder], n_bytes: int) -> None:
        """Move the level until the step fits and leaves little."""
        budget = n_bytes - self._given_bytes
        top = float(_top_bytes(ladders))
        if budget <= 0 or top <= 0:
            return
        most, at_top = len(self.attempts) - 1 + TUNING.most_compiles, {key: own.own for key, own in ladders.items()}
        is_far = any(ladder.form != Form() for ladder in ladders.values()) and top > TUNING.plain_far * budget
        base = None if is_far else self.attempt(at_top)
        plain = base.measurement.temp_bytes if base is not None else top
        share = _share(plain, top)
        bracket = Bracket(budget * (1 - TUNING.budget_margin), slope=1.0 if share == 1.0 else None)
        bracket.add(top, plain)
        level, seen, in_vain, least = max(1.0, bracket.following() or top), {id(base)}, 0, plain
        while len(self.attempts) < most and (base is None or not self._fits(base, n_bytes)):
            plans = {key: ladder.at(level) for key, ladder in ladders.items()}
            planned = [ladders[key].needed(plan) for key, plan in plans.items() if plan is not ladders[key].own]
            if share * max(planned, default=0) > TUNING.plain_far * budget:
                break
            found = self.attempt(plans)
            if id(found) in seen:
                break
            seen.add(id(found))
            needed = found.measurement.temp_bytes
            # below what these plans need there are others
            level = max(planned, default=level) if needed > budget else max(level, 1.0, *planned)
            is_cheap = found.extra_flops <= 1e-3 * forward_flops(plans)
            if needed <= budget and (needed >= TUNING.close_step * budget or is_cheap):
                break
            bracket.add(level, needed)
            in_vain = 0 if needed < (1 - TUNING.between_gap) * least else in_vain + 1
            least = min(least, needed)
            if bracket.low is None and in_vain == 2:
                break  # what is outside the functions, or what one equation needs, holds the peak
            following = bracket.following()
            if following is None or abs(following - level) < TUNING.least_slack * top:
                break
            level = max(1.0, following)
        self._try_split(ladders, bracket.following() or level, n_bytes)

    def _try_split(self, ladders: Mapping[str, Ladder], level: float, n_bytes: int) -> None:
        """Try plans that split loops where they recompute clearly less: their gradients may not be live at the peak."""
        best = self._best(n_bytes)
        if best is None or not any(ladder.fused_bytes for ladder in ladders.values()):
            return
        most = best.extra_flops - TUNING.compile_gain * forward_flops(best.plans)
        plans = {key: ladder.at(max(1.0, level), 0) for key, ladder in ladders.items()} if most > 0 else {}
        if plans and cost_of_step(plans, self.first.trial)[1] < most:
            self.attempt(plans)

    def _relax(self, ladders: Mapping[str, Ladder], best: Attempt, n_bytes: int) -> None:
        """Give each function its own plan back where that spares enough and the step still fits, costliest first."""
        if len(ladders) == 1:
            return
        plans = dict(best.plans)
        cost = {key: extra_flops(plan, ladders[key].site) for key, plan in plans.items() if key in ladders}
        least = TUNING.compile_gain * forward_flops(plans)
        for key in sorted(ladders, key=lambda key: -cost[key]):
            relaxed = {**plans, key: ladders[key].own}
            if cost[key] > least and self._fits(self.attempt(relaxed), n_bytes):
                plans = relaxed


def _top_bytes(ladders: Mapping[str, Ladder]) -> int:
    """What the largest function's own plan is predicted to need."""
    return max((ladder.top_bytes for ladder in ladders.values()), default=0)


def _share(needed: float, predicted: float) -> float:
    """Bytes that a step needs for each that is predicted: below 1 where its functions are spread over devices."""
    return 1.0 if needed >= TUNING.same_step * predicted else needed / predicted


def _least_plans(ladders: Mapping[str, Ladder], *, is_all: bool) -> Iterator[dict[str, Plan]]:
    """Functions at their least, on each partition, and at what is usual: weights' gradients may hold more.

    Unless it is all, one that needs no more than another at its least keeps its own plan.
    """
    least: dict[str, list[Plan]] = {}
    floor, small = 0, set[str]()
    for key, ladder in sorted(ladders.items(), key=lambda item: -item[1].top_bytes):
        if not is_all and ladder.top_bytes <= floor:
            small.add(key)
        least[key] = [ladder.own] if key in small else ladder.least()
        floor = max(floor, min(map(ladder.needed, least[key])))
    for number in range(max((len(plans) for plans in least.values()), default=0)):
        yield {key: plans[min(number, len(plans) - 1)] for key, plans in least.items()}
    if ladders:
        yield {key: ladder.own if key in small else ladder.usual() for key, ladder in ladders.items()}


def _shape(plans: Mapping[str, Plan]) -> Any:
    """What of plans decides what is compiled."""
    return tuple((key, form_of(p), p.slices, p.segments, p.barriers, p.loops) for key, p in sorted(plans.items()))
