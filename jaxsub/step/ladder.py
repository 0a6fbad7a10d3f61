"""Plans of one function of a step, from its own down to what needs least, by what they may take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Form, Loop, Segment
from jaxsub.core.disk_cache import Store
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer, Prices
from jaxsub.costs.slice_time import has_slow_convolutions
from jaxsub.devices.targets import Target
from jaxsub.emission.emit import keep_out
from jaxsub.emission.forms import program_in
from jaxsub.jaxpr.trace import Program
from jaxsub.planners import get
from jaxsub.planners.memo import Memo
from jaxsub.search.call_sites import CallSite
from jaxsub.search.candidates import Candidates, Partition
from jaxsub.search.fewest_slices import cost_of
from jaxsub.search.forms import in_form
from jaxsub.search.pipeline import Planning, may_be_sliced, once
from jaxsub.search.propagated import pricer_of
from jaxsub.search.slice_search import best_in_slices
from jaxsub.search.verify import cut_choices, untouched, usual_choices


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
    last: dict[int, list[Plan]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        with self.site.axes():
            self._prepare()

    def _prepare(self) -> None:
        settings = self.site.settings
        self.program = program = program_in(self.site.program, self.form)
        self.own = self.site.own if self.form == form_of(self.site.own) else self._of_site(untouched(program))
        self.pricer = pricer_of(program, self.target, self.store, progress=self.progress, offload=settings.offload,
                                prices=self.prices)  # fmt: skip
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
        """What a step is predicted to need under a plan: the function's bytes, and gradients that the plan keeps."""
        return predicted_bytes(plan) + self._besides(plan, self.fused_bytes if fused_bytes is None else fused_bytes)

    def _besides(self, plan: Plan, lost: int) -> int:
        """Bytes of gradients that a plan keeps: of loops that update no weights themselves, and sums over slices."""
        runs = [run for run in plan.slices if not run.within]
        is_whole = any(run.start <= n < run.stop for run in runs for n in self.scans)
        is_split = any(isinstance(way, Loop) and way.is_split for way in plan.loops)
        graph, held = self.program.graph, self.pricer.shares.held
        read = {v for run in runs for v in graph.read_by(run.start, run.stop)}.intersection(self.program.differentiated)
        sums = math.ceil(sum(graph.values[v].n_bytes * held(v) for v in read))
        return max(lost if is_split or is_whole else 0, sums)

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
            if not any(self.needed(plan, lost) <= n_bytes for plan in plans):
                last = self._last_resort(lost)
                may_fit = any(self.needed(plan, lost) <= n_bytes for plan in last)
                plans += self._in_slices(int(n_bytes), lost, is_last=True) if may_fit else last
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
        return has_slow_convolutions(self.program, self.target, plan.slices), cost_of(plan)

    def _in_slices(self, n_bytes: int, lost: int, *, is_last: bool = False) -> list[Plan]:
        """The best plans with runs in slices within so many bytes, or the least; none where nothing may be sliced."""
        program, settings = self.program, self.site.settings
        if not (self.may_slice and may_be_sliced(program, settings)) or isinstance(settings.chunks, Mapping):
            return []
        found: list[Plan] = []
        for splits_loops in (False, True) if lost else (True,):
            if self._little(found, n_bytes, lost):
                break
            if splits_loops not in self.plannings:
                self.plannings[splits_loops] = Planning(program, settings, self.target, self.store, self.progress,
                                                        self.prices, splits_loops)  # fmt: skip
            besides = lost if splits_loops else 0
            plan = self._best_in_slices(n_bytes - besides, splits_loops, is_last)
            if plan is not None and self.needed(plan, lost) > n_bytes and self._besides(plan, lost) > besides:
                plan = self._best_in_slices(n_bytes - self._besides(plan, lost), splits_loops, is_last)
            found += [] if plan is None else [plan]
        return found

    def _last_resort(self, lost: int) -> list[Plan]:
        """The least plans in slices of any size, made once: for small slices a program is traced anew."""
        if lost not in self.last:
            self.last[lost] = self._in_slices(1, lost, is_last=True)
        return self.last[lost]

    def _best_in_slices(self, n_bytes: int, splits_loops: bool, is_last: bool) -> Plan | None:
        """The best plan with runs in slices within so many bytes, of the function; or the least."""
        whole = self.plannings[splits_loops].whole
        plan = best_in_slices(self.program, self.target, max(1, n_bytes), whole, is_last=is_last)
        return None if plan is None else self._of_site(plan)

    def least(self) -> list[Plan]:
        """The least plan on each partition, and in slices; the same whatever was asked before."""
        with self.site.axes():
            makers = self._makers(1, self.fused_bytes)
            whole = [self._of_site(made.plan(cuts, 1)) for made, _ in makers for cuts in self.cuts]
            whole += [] if self.program.loss is not None else [self._of_site(self._one_region())]
            return [*whole, *self._in_slices(1, self.fused_bytes), *self._last_resort(self.fused_bytes)]

    def _one_region(self) -> Plan:
        """All of a part of a network as one region: what calls it in a loop keeps its arguments alone."""
        plain = self.candidates.plain()
        assert plain.prediction is not None
        again = replace(plain.prediction, extra_flops=plain.prediction.forward_flops)
        whole = (Segment(0, len(self.program.eqns)),)
        plan = plain.replace(segments=whole, prediction=again, planner="by hand: full")
        return keep_out(plan, self.program.graph.pinned())

    def usual(self) -> Plan:
        """What at most one extra forward pass buys."""
        with self.site.axes():
            choices = usual_choices(self.program, self.cuts, self.site.settings.planner)
            return self._of_site(self.candidates.natural(choices))


def form_of(plan: Plan) -> Form:
    """The form of a function that a plan is of."""
    return Form(plan.opened_regions, plan.clones)


def ladder_forms(site: CallSite) -> tuple[Form, ...]:
    """The forms to plan a function in: where it has a budget of its own, first the one that is best within it."""
    forms = site.forms()
    return forms if site.settings.budget == Budget() else tuple(dict.fromkeys((form_of(site.own), *forms)))
