"""From a traced program and what a user asked for to its plan: price, plan, verify.

In goes a `Program` and `Settings`; out comes a finished `Plan`. What a user hands in, a plan or mirror counts, is taken
as it is; a program that cannot be differentiated is left alone; all else is planned, and with a budget in bytes or a
fraction the compiler confirms it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Slices
from jaxsub.core.disk_cache import Store, open_store
from jaxsub.core.errors import InfeasibleBudgetError, JaxsubError, UnsupportedError
from jaxsub.core.plan import Measurement, Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import Target, get_target
from jaxsub.emission.emit import keep_out
from jaxsub.emission.folding import with_slices
from jaxsub.emission.offload import KINDS
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.shardings import data_share, gathered_bytes
from jaxsub.jaxpr.trace import Program, equation_digests
from jaxsub.planners import Planner, get
from jaxsub.planners.memo import Held, solves_all
from jaxsub.planners.milp import Bounded
from jaxsub.search import verify as verifying
from jaxsub.search.belonging import require_belonging
from jaxsub.search.budget_search import fit
from jaxsub.search.candidates import natural, promising
from jaxsub.search.name_overrides import honoured, read_wishes, wishing
from jaxsub.search.plan_cache import find_plan, put_plan, shelf_key
from jaxsub.search.slicing import Chunks, asked, candidates

Mirror = Sequence[int] | Callable[..., int] | Mapping[str, int]
LITTLE_EXTRA = 0.05
"""A plan that recomputes no more of a forward pass than this is taken without looking at runs in slices."""

PROGRESS_DELAY_SECONDS = 2.0
"""Planning that takes less than this shows nothing."""


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

    def __post_init__(self) -> None:
        other = "budget" if self.budget != Budget() else "mirror" if self.mirror is not None else ""
        if self.plan is not None and other:
            raise ValueError(f"plan= is made already, and {other}= would plan anew; pass one of them")
        if not (isinstance(self.chunks, bool | Mapping) or self.chunks == "auto"):
            raise ValueError(f'chunks is "auto", True, False or {{name or axis: count}}, got {self.chunks!r}')
        if self.offload is not None and self.offload not in KINDS:
            raise ValueError(f"offload is None or one of {', '.join(map(repr, KINDS))}, got {self.offload!r}")
        if self.offload is not None and self.bound:
            raise ValueError("bound=True says how little can be executed again without offload=; ask for one of them")
        if not (isinstance(self.profile, bool) or self.profile == "roofline"):
            raise ValueError(f'profile is True, False or "roofline", got {self.profile!r}')


def make_plan(program: Program, settings: Settings) -> Plan:
    """Plan a traced program.

    A program that cannot be differentiated, forward-only as a `while` loop makes it, is left as it is: JAX says why to
    whoever asks for its gradient.
    """
    if settings.plan is not None:
        return require_belonging(program, settings.plan)
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
    is_measured = settings.verify is not False and bool(settings.verify or settings.budget != Budget())
    plan = find_plan(store, key, program, target if is_measured else None)
    if plan is None:
        plan = _planned(program, settings, target, store)
        put_plan(store, key, plan)
    return plan


def _planned(program: Program, settings: Settings, target: Target, store: Store) -> Plan:
    """Plan a program, runs of it in slices where that spares recomputation, or memory that nothing else can."""
    if isinstance(settings.chunks, Mapping):
        return _in_slices(program, asked(program, settings.chunks), settings, target, store)
    plans: list[Plan] = []
    refusals: list[InfeasibleBudgetError] = []
    _try(lambda: _whole(program, settings, target, store), plans, refusals)
    if settings.chunks is not False and _asks_for_slices(program, settings, plans):
        n_bytes = _budget_bytes(settings.budget, plans, refusals)
        bounded = replace(settings, budget=settings.budget if settings.budget == Budget() else Budget(n_bytes))
        for runs in candidates(program, target, n_bytes):
            _try(lambda runs=runs: _in_slices(program, runs, bounded, target, store), plans, refusals)  # type: ignore[misc]
            if plans and _extra(plans[-1]) <= LITTLE_EXTRA:
                break
    if not plans:
        raise min(refusals, key=lambda refused: refused.least_bytes)
    best = min(plans, key=lambda plan: (round(_extra(plan), 3), _need(plan)))
    return _beside_plain(program, best, plans[0], settings, target, store) if best.slices else best


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
    return settings.budget != Budget() and (not plans or _extra(plans[0]) > LITTLE_EXTRA)


def _budget_bytes(budget: Budget, plans: Sequence[Plan], refusals: Sequence[InfeasibleBudgetError]) -> int:
    if budget.n_bytes is not None:
        return budget.n_bytes
    if refusals:
        return refusals[0].requested_bytes
    plain = plans[0].plain_measurement or plans[0].plain_prediction
    return max(1, int((budget.fraction or 1 / 2) * plain.temp_bytes)) if plain is not None else 1


def _extra(plan: Plan) -> float:
    """What a plan recomputes, as a share of a forward pass."""
    return plan.prediction.extra_flops / max(plan.prediction.forward_flops, 1.0) if plan.prediction else 0.0


def _need(plan: Plan) -> int:
    found = plan.measurement or plan.prediction
    return found.temp_bytes if found is not None else 0


def _in_slices(program: Program, runs: Sequence[Slices], settings: Settings, target: Target, store: Store) -> Plan:
    """Plan the program in which some runs are one equation each, executed in slices."""
    plan = _whole(with_slices(program, runs), settings, target, store)
    if plan.prediction is not None:  # in front of the loss each slice is recomputed
        nodes, n = program.graph.nodes, len(program.eqns)
        again = sum(node.flops for run in runs if run.stop < n for node in nodes[run.start : run.stop])
        found = replace(plan.prediction, extra_flops=plan.prediction.extra_flops + again)
        plan = plan.replace(prediction=found)
    return plan.replace(fingerprint=program.fingerprint, slices=tuple(runs), equations=equation_digests(program))


def _whole(program: Program, settings: Settings, target: Target, store: Store) -> Plan:
    budget, is_compiled = settings.budget, settings.verify is not False and not compat.names_axes(program.traced)
    with Progress(settings.progress) as step:
        pricer = Pricer(program, target, is_compiled, store, step, profile=settings.profile, offload=settings.offload)
        verifier = verifying.Verifier(pricer)
        wishes = settings.mirror if isinstance(settings.mirror, Mapping) else {}
        found = get(settings.planner)
        planner = Bounded(wishing(program, once(program, Held(found)), wishes), is_quick=solves_all(found))
        cuts = verifying.cut_choices(program)
        lying = program.avals(), program.shardings, program.differentiated
        pricer.share, pricer.gathered = data_share(*lying), gathered_bytes(*lying)
        if budget == Budget():
            plan = natural(pricer, verifying.usual_choices(program, cuts), planner)
            if settings.verify:
                plan = plan.replace(measurement=verifier.measure(plan), plain_measurement=verifier.plain().measurement)
            plan = verifying.finish(program, plan, budget)
        elif settings.verify is False:
            plan = _trusted(program, pricer, planner, cuts, budget)
        else:
            plain = verifier.measure(verifier.plain())
            if program.shardings:
                pricer.share = _measured_share(pricer, cuts[0], plain)
            n_bytes = budget.n_bytes if budget.n_bytes is not None else int(plain.temp_bytes * (budget.fraction or 1.0))
            plan = fit(verifier, planner, budget, n_bytes, cuts)
            if wishes and not _fits(_wished(verifier, plan, wishes, budget), n_bytes):
                plan = fit(verifier, planner, budget, plain.temp_bytes - 1, cuts)
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
    pricer.share, pricer.gathered = 1.0, ()
    found = get("plain")(pricer.chain(cuts), None).prediction
    return min(1.0, plain.temp_bytes / max(found.temp_bytes, 1)) if found is not None else 1.0


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


def _trusted(program: Program, pricer: Pricer, planner: Planner, cuts: Sequence[Sequence[int]], budget: Budget) -> Plan:
    """Plan by prediction alone."""
    plain = get("plain")(pricer.chain(cuts[0]), None)
    n_bytes = budget.n_bytes
    if n_bytes is None:
        n_bytes = max(1, int((budget.fraction or 1.0) * plain.prediction.temp_bytes)) if plain.prediction else 1
    if plain.prediction is not None and plain.prediction.temp_bytes <= n_bytes:
        return verifying.finish(program, plain, budget)
    offer = promising(pricer, planner, n_bytes, cuts)[0]
    return verifying.finish(program, planner(pricer.chain(offer.cuts), offer.budget_bytes), budget)


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


class Progress:
    """Show what is being compiled while planning takes long; on the terminal, never in the result."""

    def __init__(self, is_shown: bool):
        from tqdm import tqdm  # noqa: PLC0415 - not needed to import jaxsub

        self.bar = tqdm(desc="jaxsub: planning", unit=" compiles", delay=PROGRESS_DELAY_SECONDS, leave=False,
                        disable=not is_shown)  # fmt: skip

    def __enter__(self) -> Callable[[str], None]:
        return self.step

    def step(self, label: str) -> None:
        """Count one compile."""
        self.bar.set_postfix_str(label, refresh=False)
        self.bar.update()

    def __exit__(self, *exc: object) -> None:
        self.bar.close()
