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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Form, Loop
from jaxsub.core.disk_cache import Store
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer, Prices
from jaxsub.devices.targets import Target
from jaxsub.emission.forms import program_in
from jaxsub.emission.own_regions import n_own_regions
from jaxsub.jaxpr.shardings import gathered_bytes
from jaxsub.jaxpr.trace import Program
from jaxsub.planners import get
from jaxsub.planners.memo import Memo
from jaxsub.search.bracket import Bracket
from jaxsub.search.call_sites import CallSite, Trial
from jaxsub.search.candidates import Candidates, Partition
from jaxsub.search.forms import added_flops, forms_of, in_form
from jaxsub.search.pipeline import Planning, may_be_sliced, once
from jaxsub.search.propagated import shares_of
from jaxsub.search.slice_search import best_in_slices, cost_of, is_slow
from jaxsub.search.verify import cut_choices, untouched, usual_choices
from jaxsub.step.fused_update import Findings


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A step that was compiled.

    Attributes:
        trial: Its plans, and the functions that were found in it.
        measurement: What the compiler allocates for it.
        run: What can be called: the step under `jax.jit`.
        digest: A digest of what was compiled.
        updates: Which updates run inside the backward scans.
    """

    trial: Trial
    measurement: Measurement
    run: Any
    digest: str = ""
    updates: Findings = field(default_factory=Findings)

    @property
    def plans(self) -> dict[str, Plan]:
        """Each function's plan, by fingerprint."""
        return {key: self.trial.plans.get(key, site.own) for key, site in self.trial.sites.items()}

    @property
    def extra_flops(self) -> float:
        """Recompute of all its functions, own regions' too, and the time in which slices move weights, as FLOPs."""
        return sum(_extra_flops(plan, self.trial.sites[key]) * self.trial.calls[key]
                   for key, plan in self.plans.items())  # fmt: skip

    @property
    def is_heavy(self) -> bool:
        """Whether so much is recomputed that plans which need less may recompute less too."""
        return self.extra_flops > TUNING.heavy_recompute * _forward_flops(self.plans)

    @property
    def is_slow(self) -> bool:
        """Whether runs in slices of its functions are slow."""
        pairs = ((self.trial.sites[key].program, plan) for key, plan in self.plans.items() if plan.slices)
        return any(is_slow(program_in(program, plan), self.trial.target, plan.slices) for program, plan in pairs)


@dataclass(slots=True, eq=False)
class Ladder:
    """Plans of one function from its own down to the least.

    In another form than that of its own plan it begins with the function in that form. Where the step updates in the
    backward scans of its loops, plans that split these keep so many bytes of gradients besides (`fused_bytes`).
    """

    site: CallSite
    target: Target
    store: Store | None
    progress: Callable[[str], None]
    may_slice: bool
    form: Form
    fused_bytes: int = 0
    prices: Prices = field(default_factory=Prices)
    program: Program = field(init=False)
    own: Plan = field(init=False)
    pricer: Pricer = field(init=False)
    cuts: list[tuple[int, ...]] = field(init=False)
    candidates: Candidates = field(init=False)
    scans: list[int] = field(init=False)
    unsplit: Candidates | None = field(init=False, default=None)
    chosen: Partition | None = field(init=False, default=None)
    plannings: dict[bool, Planning] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.site.settings
        self.program = program = program_in(self.site.program, self.form)
        self.own = self.site.own if self.form == _form_of(self.site.own) else self._of_site(untouched(program))
        gathered = gathered_bytes(program.avals(), program.shardings, program.differentiated)
        self.pricer = Pricer(program, self.target, self.store, self.progress, False, shares_of(program, self.target),
                             gathered, settings.offload, self.prices)  # fmt: skip
        self.cuts = cut_choices(program)
        planner = once(program, Memo(get(settings.planner)))
        self.candidates = Candidates(self.pricer, planner, self.cuts)
        weights = sum(program.graph.values[i].n_bytes for i in program.differentiated)
        self.scans = [node.index for node in program.graph.nodes if node.primitive == "scan"]
        self.fused_bytes = min(self.fused_bytes, weights) if self.scans else 0
        if self.fused_bytes:
            planner = once(program, Memo(get(settings.planner)))
            self.unsplit = Candidates(replace(self.pricer, splits_loops=False), planner, self.cuts)

    @property
    def top_bytes(self) -> int:
        """What the function's own plan is predicted to need."""
        with self.site.axes():
            own = self.own.prediction or self.candidates.plain().prediction
        return own.temp_bytes if own is not None else 0

    def needed(self, plan: Plan, fused_bytes: int | None = None) -> int:
        """What a plan is predicted to need, gradients besides that the step would not keep with loops as they are."""
        lost = self.fused_bytes if fused_bytes is None else fused_bytes
        is_whole = any(not run.within and any(run.start <= n < run.stop for n in self.scans) for run in plan.slices)
        is_split = any(isinstance(way, Loop) and way.is_split for way in plan.loops)
        return predicted_bytes(plan) + (lost if is_split or is_whole else 0)

    def _of_site(self, plan: Plan) -> Plan:
        """A plan of the program as one of the function."""
        return in_form(self.site.program, self.form, plan)

    def at(self, n_bytes: float, fused_bytes: int | None = None) -> Plan:
        """The best plan within so many bytes, or the least; with fewer gradients kept besides if given."""
        lost = self.fused_bytes if fused_bytes is None else fused_bytes
        if n_bytes >= self.top_bytes:
            return self.own
        with self.site.axes():
            if self.chosen is None:
                self.chosen = self.candidates.ranked(max(1, int(n_bytes)))[0]
            plans = [self._of_site(made.plan(self.chosen, asked)) for made, asked in self._makers(n_bytes, lost)]
            if not self._little(plans, n_bytes, lost):
                plans += self._in_slices(max(1, int(n_bytes)), lost)
        fitting = [plan for plan in plans if self.needed(plan, lost) <= n_bytes]
        return min(fitting, key=self._cost) if fitting else min(plans, key=partial(self.needed, fused_bytes=lost))

    def _little(self, plans: list[Plan], n_bytes: float, lost: int) -> bool:
        """Whether one of the plans is predicted to fit and to recompute hardly anything."""
        return any(self.needed(plan, lost) <= n_bytes and recomputed_share(plan) <= TUNING.little_recompute
                   for plan in plans)  # fmt: skip

    def _makers(self, n_bytes: float, lost: int) -> list[tuple[Candidates, float]]:
        """What makes plans, and what it is asked for: those that may split loops leave room for the gradients."""
        room = max(1.0, n_bytes - lost)
        return [(self.candidates, room), *([(self.unsplit, n_bytes)] if self.unsplit is not None and lost else [])]

    def _cost(self, plan: Plan) -> tuple[bool, float]:
        """What a plan costs: slices that are slow come last."""
        return is_slow(self.program, self.target, plan.slices), cost_of(plan)

    def _in_slices(self, n_bytes: int, lost: int) -> list[Plan]:
        """The best plans with runs in slices within so many bytes, or the least; none where nothing may be sliced."""
        program, settings = self.program, self.site.settings
        if not (self.may_slice and may_be_sliced(program, settings)) or isinstance(settings.chunks, Mapping):
            return []
        found: list[Plan] = []
        for splits_loops in (False, True) if lost else (True,):
            if self._little(found, n_bytes, lost):
                break
            if splits_loops not in self.plannings:
                self.plannings[splits_loops] = Planning(settings, self.target, self.store, self.progress, self.prices,
                                                        splits_loops)  # fmt: skip
            room = max(1, n_bytes - lost) if splits_loops else n_bytes
            plan = best_in_slices(program, self.target, room, self.plannings[splits_loops].whole)
            found += [] if plan is None else [self._of_site(plan)]
        return found

    def least(self) -> list[Plan]:
        """The least plan on each partition, and in slices; the same whatever was asked before."""
        with self.site.axes():
            makers = self._makers(1, self.fused_bytes)
            whole = (self._of_site(made.plan(cuts, 1)) for made, _ in makers for cuts in self.cuts)
            return [*whole, *self._in_slices(1, self.fused_bytes)]

    def usual(self) -> Plan:
        """What at most one extra forward pass buys."""
        with self.site.axes():
            choices = usual_choices(self.program, self.cuts, self.site.settings.planner)
            return self._of_site(self.candidates.natural(choices))


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
        forms = {key: _forms(site) for key, site in sized.items()}
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
        return self.is_spread and not site.program.is_sharded

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
                self._try_least(ladders, n_bytes)
            if best is not None:
                self._relax(ladders, best, n_bytes)
        return self._best(n_bytes)

    def _added_flops(self, ladders: Mapping[str, Ladder]) -> float:
        """What the forms that functions are planned in add, whatever their plans are."""
        calls = self.first.trial.calls
        return sum(added_flops(own.site.program, own.form) * calls[key] for key, own in ladders.items())

    def unknown_shardings(self) -> list[str]:
        """Functions that may run in slices if only it were known how their arguments are split over the devices."""
        sites = [ladder.site for ladder in self.ways[0].values() if self._is_unknown(ladder.site)]
        return [site.name for site in sites if may_be_sliced(site.program, site.settings)]

    def least(self) -> Attempt:
        """What needs least of all that is tried whatever the budget is."""
        for ladders in self.ways:
            self._try_least(ladders)
        return min(self.attempts.values(), key=lambda a: a.measurement.step_bytes)

    def _try_least(self, ladders: Mapping[str, Ladder], n_bytes: int = 0) -> None:
        """Compile the least plans, lowest prediction first: those that may need less than others, or may fit."""
        room = n_bytes - self._given_bytes

        def needed(plans: Mapping[str, Plan]) -> int:
            return max(ladders[key].needed(plan) for key, plan in plans.items())

        for plans in sorted(_least_plans(ladders), key=needed):
            predicted = needed(plans) / TUNING.prediction_error
            if predicted <= self.least_bytes:
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
        return min(fitting, key=lambda a: (a.is_slow, a.extra_flops, a.measurement.step_bytes), default=None)

    def _search(self, ladders: Mapping[str, Ladder], n_bytes: int) -> None:
        """Move the level until the step fits and leaves little."""
        budget = n_bytes - self._given_bytes
        top = float(max(ladder.top_bytes for ladder in ladders.values()))
        if budget <= 0 or top <= 0:
            return
        most, at_top = len(self.attempts) - 1 + TUNING.most_compiles, {key: own.own for key, own in ladders.items()}
        is_far = any(ladder.form != Form() for ladder in ladders.values()) and top > TUNING.plain_far * budget
        base = None if is_far else self.attempt(at_top)
        plain = base.measurement.temp_bytes if base is not None else top
        # where functions are spread over devices, a level is worth another number of bytes
        bracket = Bracket(budget * (1 - TUNING.budget_margin), slope=1.0 if plain >= TUNING.same_step * top else None)
        bracket.add(top, plain)
        level, seen, in_vain, least = max(1.0, bracket.following() or top), {id(base)}, 0, plain
        while len(self.attempts) < most and (base is None or not self._fits(base, n_bytes)):
            plans = {key: ladder.at(level) for key, ladder in ladders.items()}
            planned = [ladders[key].needed(plan) for key, plan in plans.items() if plan is not ladders[key].own]
            if max(planned, default=0) > TUNING.plain_far * budget:
                break
            found = self.attempt(plans)
            if id(found) in seen:
                break
            seen.add(id(found))
            needed = found.measurement.temp_bytes
            # below what these plans need there are others
            level = max(planned, default=level) if needed > budget else max(level, 1.0, *planned)
            is_cheap = found.extra_flops <= 1e-3 * _forward_flops(plans)
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
        best, calls = self._best(n_bytes), self.first.trial.calls
        if best is None or not any(ladder.fused_bytes for ladder in ladders.values()):
            return
        most = best.extra_flops - TUNING.compile_gain * _forward_flops(best.plans)
        plans = {key: ladder.at(max(1.0, level), 0) for key, ladder in ladders.items()} if most > 0 else {}
        if plans and sum(_extra_flops(p, ladders[key].site) * calls[key] for key, p in plans.items()) < most:
            self.attempt(plans)

    def _relax(self, ladders: Mapping[str, Ladder], best: Attempt, n_bytes: int) -> None:
        """Give each function its own plan back where that spares enough and the step still fits, costliest first."""
        if len(ladders) == 1:
            return
        plans = dict(best.plans)
        cost = {key: _extra_flops(plan, ladders[key].site) for key, plan in plans.items() if key in ladders}
        least = TUNING.compile_gain * _forward_flops(plans)
        for key in sorted(ladders, key=lambda key: -cost[key]):
            relaxed = {**plans, key: ladders[key].own}
            if cost[key] > least and self._fits(self.attempt(relaxed), n_bytes):
                plans = relaxed


def _least_plans(ladders: Mapping[str, Ladder]) -> Iterator[dict[str, Plan]]:
    """Every function at its least, on each partition, and at what is usual: weights' gradients may hold more."""
    least = {key: ladder.least() for key, ladder in ladders.items()}
    for number in range(max((len(plans) for plans in least.values()), default=0)):
        yield {key: plans[min(number, len(plans) - 1)] for key, plans in least.items()}
    if ladders:
        yield {key: ladder.usual() for key, ladder in ladders.items()}


def _form_of(plan: Plan) -> Form:
    return Form(plan.opened_regions, plan.clones)


def _forms(site: CallSite) -> tuple[Form, ...]:
    """The forms to plan a function in: where it has a budget of its own, first the one that is best within it."""
    forms = forms_of(site.program)
    return forms if site.settings.budget == Budget() else tuple(dict.fromkeys((_form_of(site.own), *forms)))


def _extra_flops(plan: Plan, site: CallSite) -> float:
    kept = added_flops(site.program, Form(plan.opened_regions))
    forward_flops = plan.prediction.forward_flops if plan.prediction else sum(n.flops for n in site.program.graph.nodes)
    return kept + cost_of(plan) * max(forward_flops, 1.0)


def _forward_flops(plans: Mapping[str, Plan]) -> float:
    return sum(p.prediction.forward_flops for p in plans.values() if p.prediction is not None)


def _shape(plans: Mapping[str, Plan]) -> Any:
    """What of plans decides what is compiled."""
    return tuple((key, _form_of(p), p.slices, p.segments, p.barriers, p.loops) for key, p in sorted(plans.items()))
