"""From a traced program and what a user asked for to its plan: price, plan, verify.

In goes a `Program` and `Settings`; out comes a finished `Plan`. What a user hands in, a plan or mirror counts, is taken
as it is; a program that cannot be differentiated is left alone; all else is planned, and with a budget in bytes or a
fraction the compiler confirms it.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Inside, Slices
from jaxsub.core.disk_cache import Store, open_store
from jaxsub.core.errors import InfeasibleBudgetError, JaxsubError, UnsupportedError
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import Target, get_target
from jaxsub.emission.emit import keep_out
from jaxsub.emission.folding import program_of_slice, with_slices
from jaxsub.emission.offload import KINDS
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.order import equation_digests, ordered_as
from jaxsub.jaxpr.shardings import data_share, gathered_bytes
from jaxsub.jaxpr.trace import Program, in_its_width
from jaxsub.planners import Planner, get
from jaxsub.planners.auto import Auto
from jaxsub.planners.memo import Memo
from jaxsub.planners.milp import Bounded
from jaxsub.search import verify as verifying
from jaxsub.search.belonging import require_belonging
from jaxsub.search.budget_search import EFFORTS, Effort, fit
from jaxsub.search.by_hand import plans_by_hand
from jaxsub.search.candidates import Candidates, recomputed_share
from jaxsub.search.name_overrides import honoured, read_wishes, wishing
from jaxsub.search.plan_cache import find_plan, find_refusal, put_plan, put_refusal, shelf_key
from jaxsub.search.progress import Progress, tell
from jaxsub.search.slicing import Chunks, asked
from jaxsub.search.slicing import candidates as sliced_runs

Mirror = Sequence[int] | Callable[..., int] | Mapping[str, int]
CORRECTIONS = 4
"""How often a plan inside slices is made, each time for as much less than one needs as all need over the budget."""

LITTLE_EXTRA = 0.05
"""A plan that recomputes no more of a forward pass than this is taken without looking at runs in slices."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to plan: what `sublinear` and `plan` have in common; see `sublinear`."""

    budget: Budget = field(default_factory=Budget)
    planner: str | Planner = "auto"
    plan: Plan | None = None
    mirror: Mirror | None = None
    verify: bool | None = None
    target: Any = None
    argnums: int | tuple[int, ...] | None = None
    cache: bool | str | os.PathLike[str] | Store = True
    progress: bool = True
    profile: bool | str = False
    bound: bool = False
    in_shardings: Any = None
    offload: str | None = None
    chunks: Chunks = "auto"
    effort: str = "default"
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        other = "budget" if self.budget != Budget() else "mirror" if self.mirror is not None else ""
        if self.plan is not None and other:
            raise ValueError(f"plan= is made already, and {other}= would plan anew; pass one of them")
        if not (isinstance(self.chunks, bool | Mapping) or self.chunks == "auto"):
            raise ValueError(f'chunks is "auto", True, False or {{name or axis: count}}, got {self.chunks!r}')
        if self.effort not in EFFORTS:
            raise ValueError(f"effort is one of {', '.join(map(repr, EFFORTS))}, got {self.effort!r}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds is None or a positive number of seconds, got {self.max_seconds!r}")
        if self.offload is not None and self.offload not in KINDS:
            raise ValueError(f"offload is None or one of {', '.join(map(repr, KINDS))}, got {self.offload!r}")
        if self.offload is not None and self.bound:
            raise ValueError("bound=True says how little can be executed again without offload=; ask for one of them")
        if not (isinstance(self.profile, bool) or self.profile == "roofline"):
            raise ValueError(f'profile is True, False or "roofline", got {self.profile!r}')


@in_its_width
def make_plan(program: Program, settings: Settings) -> Plan:
    """Plan a traced program.

    A program that cannot be differentiated, forward-only as a `while` loop makes it, is left as it is: JAX says why to
    whoever asks for its gradient.
    """
    if settings.plan is not None:
        return require_belonging(ordered_as(program, settings.plan), settings.plan)
    if settings.mirror is not None and not isinstance(settings.mirror, Mapping):
        return _mirrored(program, settings, settings.mirror)
    if not any(program.graph.values[v].is_differentiated for node in program.graph.nodes for v in node.outputs):
        return verifying.finish(program, untouched(program), settings.budget)
    settings = replace(settings, verify=_may_verify(program, settings))
    try:
        return _kept(program, settings)
    except JaxsubError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        if not verifying.has_gradient(program):
            return verifying.finish(program, untouched(program), settings.budget)
        if not isinstance(error, NotImplementedError) or settings.verify is False:
            raise
        told = f"This function cannot be compiled ({error}), so its plan cannot be measured."
        _without_measuring(settings, told, "Pass verify=False")  # a primitive may have no more than an implementation
        return _kept(program, replace(settings, verify=False))


def _kept(program: Program, settings: Settings) -> Plan:
    """The plan as it was made before, in this process or another, or else made now."""
    planner, target, store = get(settings.planner), get_target(settings.target), open_store(settings.cache)
    asked = replace(settings, planner="", target=None, cache=False, progress=False)
    key = shelf_key(program, planner, target, repr((asked, program.shardings))) if settings.mirror is None else None
    if key is None:
        return _planned(program, settings, target, store)
    if (refusal := find_refusal(store, key)) is not None:
        raise refusal
    is_measured = settings.verify is not False and bool(settings.verify or settings.budget != Budget())
    plan = find_plan(store, key, program, target if is_measured else None)
    if plan is None:
        try:
            plan = _planned(program, settings, target, store)
        except InfeasibleBudgetError as error:
            put_refusal(store, key, error)
            raise
        put_plan(store, key, plan)
    return plan


def _planned(program: Program, settings: Settings, target: Target, store: Store) -> Plan:
    """Plan a program and say what was decided."""
    began = time.monotonic()
    plan = _sliced_or_whole(program, settings, target, store)
    if settings.progress:
        tell(plan, time.monotonic() - began)
    return plan


def _sliced_or_whole(program: Program, settings: Settings, target: Target, store: Store) -> Plan:
    """Plan a program, runs of it in slices where that spares recomputation, or memory that nothing else can."""
    if isinstance(settings.chunks, Mapping):
        return _in_slices(program, asked(program, settings.chunks), settings, target, store)
    plans, refusals = _tried(program, settings, target, store)
    if not plans:
        raise _that_works(program, settings, target, store, refusals)
    best = min(plans, key=lambda plan: (round(recomputed_share(plan), 3), _need(plan)))
    return _beside_plain(program, best, plans[0], settings, target, store) if best.slices else best


def _that_works(
    program: Program, settings: Settings, target: Target, store: Store, refusals: Sequence[InfeasibleBudgetError]
) -> InfeasibleBudgetError:
    """The refusal that names the least budget which is met when it is asked for: other budgets have other slices."""
    for refused in sorted(refusals, key=lambda refused: refused.least_bytes):
        again = replace(settings, budget=Budget(refused.least_bytes))
        if refused is refusals[0] or _tried(program, again, target, store)[0]:
            return refused
    return refusals[0]


def _tried(
    program: Program, settings: Settings, target: Target, store: Store
) -> tuple[list[Plan], list[InfeasibleBudgetError]]:
    """Plans that fit, the one without slices first, and refusals."""
    plans: list[Plan] = []
    refusals: list[InfeasibleBudgetError] = []
    _try(lambda: _whole(program, settings, target, store), plans, refusals)
    if settings.chunks is not False and _asks_for_slices(program, settings, plans):
        n_bytes = _budget_bytes(settings.budget, plans, refusals)
        bounded = replace(settings, budget=settings.budget if settings.budget == Budget() else Budget(n_bytes))
        for runs in sliced_runs(program, target, n_bytes):
            if _is_promising(program, runs, bounded, target, store, plans):
                _try(lambda runs=runs: _in_slices(program, runs, bounded, target, store), plans, refusals)  # type: ignore[misc]
            if plans and recomputed_share(plans[-1]) <= LITTLE_EXTRA:
                break
    return plans, refusals


def _is_promising(
    program: Program, runs: Sequence[Slices], settings: Settings, target: Target, store: Store, plans: Sequence[Plan]
) -> bool:
    """Whether a plan in slices is predicted to spare enough beside what fits already to be worth its compiles."""
    if not plans or settings.budget == Budget():
        return True
    try:
        plan = _in_slices(program, runs, replace(settings, verify=False), target, store)
    except InfeasibleBudgetError:
        return False
    return recomputed_share(plan) < min(map(recomputed_share, plans)) - TUNING.compile_gain


def _beside_plain(program: Program, plan: Plan, whole: Plan, settings: Settings, target: Target, store: Store) -> Plan:
    """A plan in slices with the user's budget, and what the program needs without a plan and without slices."""
    plain = whole.plain_measurement
    if whole.slices and plan.measurement is not None:
        plain = verifying.Verifier(Pricer(program, target, store=store)).plain().measurement
    prediction = None if whole.slices else whole.plain_prediction
    return plan.replace(budget=settings.budget, plain_measurement=plain, plain_prediction=prediction)


def _try(make: Callable[[], Plan], plans: list[Plan], refusals: list[InfeasibleBudgetError]) -> None:
    try:
        plans.append(make())
    except InfeasibleBudgetError as refused:
        refusals.append(refused)


def _asks_for_slices(program: Program, settings: Settings, plans: Sequence[Plan]) -> bool:
    """Whether runs in slices are looked at: where nothing else fits or costs little, or where the user says so."""
    if compat.names_axes(program.traced) or settings.mirror is not None:
        return False
    if settings.chunks is True:
        return True
    return settings.budget != Budget() and (not plans or recomputed_share(plans[0]) > LITTLE_EXTRA)


def _budget_bytes(budget: Budget, plans: Sequence[Plan], refusals: Sequence[InfeasibleBudgetError]) -> int:
    if budget.n_bytes is not None:
        return budget.n_bytes
    if refusals:
        return refusals[0].requested_bytes
    plain = plans[0].plain_measurement or plans[0].plain_prediction
    return max(1, int((budget.fraction or 1 / 2) * plain.temp_bytes)) if plain is not None else 1


def _need(plan: Plan) -> int:
    found = plan.measurement or plan.prediction
    return found.temp_bytes if found is not None else 0


def _in_slices(program: Program, runs: Sequence[Slices], settings: Settings, target: Target, store: Store) -> Plan:
    """Plan the program in which some runs are one equation each, executed in slices; of the whole one may recompute."""
    n_bytes, room = settings.budget.n_bytes, 0
    refusals: list[InfeasibleBudgetError] = []
    for _ in range(CORRECTIONS):
        try:
            plan = _whole(with_slices(program, runs), settings, target, store)
        except InfeasibleBudgetError as refused:
            is_all = len(runs) == 1 and (runs[0].start, runs[0].stop) == (0, len(program.eqns))
            if not is_all or n_bytes is None:
                raise
            room = room - (refused.least_bytes - n_bytes) if room else n_bytes
            refusals.append(refused)
        else:
            return plan.replace(fingerprint=program.fingerprint, slices=tuple(runs),
                                equations=equation_digests(program))  # fmt: skip
        try:
            run, room = _planned_inside(program, runs[0], room, settings, target, store)
        except InfeasibleBudgetError:  # its budget is that of a slice: the user is told of the whole
            raise refusals[-1] from None
        runs = (run,)
    raise refusals[-1]


def _planned_inside(
    program: Program, run: Slices, room: int, settings: Settings, target: Target, store: Store
) -> tuple[Slices, int]:
    """A run in slices, each of them planned for so many bytes, and what one needs."""
    plan = _whole(program_of_slice(program, run), replace(settings, budget=Budget(max(1, room))), target, store)
    extra = plan.prediction.extra_flops / max(plan.prediction.forward_flops, 1.0) if plan.prediction else 0.0
    return replace(run, inside=Inside(plan.segments, plan.barriers, plan.loops), extra_share=extra), _need(plan)


def _whole(program: Program, settings: Settings, target: Target, store: Store) -> Plan:
    budget = settings.budget
    effort = Effort(EFFORTS[settings.effort], math.inf if settings.max_seconds is None else settings.max_seconds)
    with Progress(settings.progress) as step:
        lying = program.avals(), program.shardings, program.differentiated
        pricer = Pricer(program, target, store, step, settings.profile, data_share(*lying), gathered_bytes(*lying),
                        settings.offload)  # fmt: skip
        verifier = verifying.Verifier(pricer, TUNING.most_compiles + TUNING.by_hand_compiles)
        wishes = settings.mirror if isinstance(settings.mirror, Mapping) else {}
        planner = Bounded(wishing(program, once(program, Memo(get(settings.planner))), wishes))
        cuts = verifying.cut_choices(program)
        candidates = Candidates(pricer, planner, cuts)
        if budget == Budget():
            plan = candidates.natural(verifying.usual_choices(program, cuts))
            if settings.verify:
                plan = plan.replace(measurement=verifier.measure(plan), plain_measurement=verifier.plain().measurement)
            plan = verifying.finish(program, plan, budget)
        elif settings.verify is False:
            plan = _trusted(candidates, budget)
        else:
            if program.shardings:
                share = _measured_share(pricer, cuts[0], verifier.measure(verifier.empty()))
                verifier.pricer = pricer = replace(pricer, share=share)
                candidates = replace(candidates, pricer=pricer)
            n_bytes = budget.n_bytes
            if n_bytes is None:
                n_bytes = int(verifier.measure(verifier.empty()).temp_bytes * (budget.fraction or 1.0))
            is_open = isinstance(get(settings.planner), Auto) and not (wishes or settings.profile or settings.offload)
            by_hand = partial(plans_by_hand, pricer.program, target.gpu) if is_open else tuple
            plan = fit(verifier, candidates, budget, n_bytes, effort, by_hand)
            if wishes and not _fits(_wished(verifier, plan, wishes, budget), n_bytes):
                less_bytes = verifier.measure(verifier.empty()).temp_bytes - 1
                plan = fit(verifier, candidates, budget, less_bytes, effort)
        plan = pricer.timed(plan)
        if wishes:
            plan = _wished(verifier, plan, wishes, budget)
        return planner.bounded(plan) if settings.bound else plan


def _wished(verifier: verifying.Verifier, plan: Plan, wishes: Mapping[str, int], budget: Budget) -> Plan:
    """The plan with its wishes, also where no planner was asked because the program fits as it is."""
    changed = honoured(verifier.program, plan, read_wishes(verifier.program, wishes))
    if changed is plan:
        return plan
    if plan.measurement is not None:
        changed = changed.replace(measurement=verifier.measure(changed))
    return verifying.finish(verifier.program, changed, budget)


def _fits(plan: Plan, n_bytes: int) -> bool:
    return plan.measurement is None or plan.measurement.temp_bytes <= n_bytes


def _measured_share(pricer: Pricer, cuts: Sequence[int], plain: Measurement) -> float:
    """What one device holds of a predicted byte of the plain gradient."""
    found = get("plain")(replace(pricer, share=1.0, gathered=()).chain(cuts), None).prediction
    return min(1.0, plain.temp_bytes / max(found.temp_bytes, 1)) if found is not None else 1.0


@in_its_width
def can_plan(program: Program) -> bool:
    """Whether a plan could do anything for a program: its gradient can be taken."""
    active = any(program.graph.values[v].is_differentiated for node in program.graph.nodes for v in node.outputs)
    return active and (compat.names_axes(program.traced) or verifying.has_gradient(program))


def untouched(program: Program) -> Plan:
    """The plan of leaving a program as it is."""
    return Plan(program.fingerprint, Budget(), len(program.eqns), planner="plain")


def _may_verify(program: Program, settings: Settings) -> bool | None:
    """What is asked of verification, `False` where the program alone cannot be compiled; the user is told."""
    if settings.verify is False or not compat.names_axes(program.traced):
        return settings.verify
    told = (
        "This function uses named axes (of jax.shard_map, or of jax.vmap with collectives): it cannot be compiled "
        "outside of them, so its plan cannot be measured."
    )
    remedy = ("Put sublinear round the shard_map or vmap, let jaxsub.jit(memory=...) measure the whole step, or pass "
              "verify=False")  # fmt: skip
    return _without_measuring(settings, told, remedy)


def _without_measuring(settings: Settings, told: str, remedy: str) -> bool | None:
    """What is asked of verification where nothing can be compiled; whoever relies on it is told.

    Raises:
        UnsupportedError: If the user asked for it.
    """
    if settings.verify:
        raise UnsupportedError(f"{told} {remedy}.")
    if settings.budget != Budget():
        warnings.warn(f"{told} The plan keeps to the budget by prediction; pass verify=False to say so.", stacklevel=2)
        return False
    return None


def once(program: Program, planner: Planner) -> Planner:
    """A planner whose segments leave out what must run once."""
    pinned = program.graph.pinned()
    return planner if not pinned else lambda chain, budget_bytes: keep_out(planner(chain, budget_bytes), pinned)


def _trusted(candidates: Candidates, budget: Budget) -> Plan:
    """Plan by prediction alone.

    Raises:
        InfeasibleBudgetError: If no plan is predicted to fit.
    """
    pricer = candidates.pricer
    plain = get("plain")(pricer.chain(candidates.choices[0]), None)
    n_bytes = budget.n_bytes
    if n_bytes is None:
        n_bytes = max(1, int((budget.fraction or 1.0) * plain.prediction.temp_bytes)) if plain.prediction else 1
    if plain.prediction is not None and plain.prediction.temp_bytes <= n_bytes:
        return verifying.finish(pricer.program, plain, budget)
    return verifying.finish(pricer.program, candidates.predicted_to_fit(n_bytes), budget)


def _mirrored(program: Program, settings: Settings, mirror: Sequence[int] | Callable[..., int]) -> Plan:
    """The user's own m(v): a sequence, or a function of nodes (the paper's section 4.5)."""
    nodes = program.graph.nodes
    counts = [mirror(node) for node in nodes] if callable(mirror) else list(mirror)
    if len(counts) != len(nodes):
        raise ValueError(f"mirror= gives {len(counts)} counts, but the function has {len(nodes)} equations.")
    plan = Plan.from_mirror_counts(counts, fingerprint=program.fingerprint, budget=settings.budget)
    if settings.verify:
        verifier = verifying.Verifier(Pricer(program, get_target(settings.target), store=open_store(settings.cache)))
        plan = plan.replace(measurement=verifier.measure(plan), plain_measurement=verifier.plain().measurement)
    return verifying.finish(program, plan, settings.budget)
