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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from numbers import Real
from typing import Any

from jaxsub.core.budget import Budget
from jaxsub.core.disk_cache import Store, open_store
from jaxsub.core.errors import InfeasibleBudgetError, JaxsubError, UnsupportedError
from jaxsub.core.figures import predicted_bytes
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer, Prices
from jaxsub.devices.aot import only_mesh
from jaxsub.devices.targets import Target, get_target
from jaxsub.emission.emit import keep_out
from jaxsub.emission.offload import KINDS
from jaxsub.emission.own_regions import n_own_regions
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.derivative_rules import over_tracers
from jaxsub.jaxpr.trace import Program, with_own_settings
from jaxsub.planners import Planner, get
from jaxsub.planners.auto import Auto
from jaxsub.planners.memo import Memo
from jaxsub.planners.milp import Bounded
from jaxsub.search import verify as verifying
from jaxsub.search.annotate import opened
from jaxsub.search.belonging import require_belonging
from jaxsub.search.budget_search import fit
from jaxsub.search.by_hand import plans_by_hand
from jaxsub.search.candidates import Candidates
from jaxsub.search.compile_worth import EFFORTS, NOTHING, Elsewhere
from jaxsub.search.forms import best_of_forms
from jaxsub.search.name_overrides import overridden, overriding, read_overrides
from jaxsub.search.plan_cache import find_least, find_plan, find_refusal, met_otherwise, plan_keys, put_least, put_plan
from jaxsub.search.progress import Progress, say, summary, tell
from jaxsub.search.propagated import carried, pricer_of
from jaxsub.search.slice_search import best_in_slices, sliced_or_whole
from jaxsub.search.sliced_program import needed_bytes
from jaxsub.search.slicing import Chunks

Mirror = Sequence[int] | Callable[..., int] | Mapping[str, int]


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

    @property
    def overrides(self) -> Mapping[str, int]:
        """Counts by name, where `mirror` gives them."""
        return self.mirror if isinstance(self.mirror, Mapping) else {}

    @property
    def is_fixed(self) -> bool:
        """Whether the user has planned: no step or function around it plans anew."""
        return self.plan is not None or self.mirror is not None

    def __post_init__(self) -> None:
        others = {"budget": self.budget != Budget(), "mirror": self.mirror is not None,
                  "planner": self.planner != "auto", "chunks": self.chunks != "auto", "offload": bool(self.offload),
                  "effort": self.effort != "default", "max_seconds": self.max_seconds is not None,
                  "profile": bool(self.profile), "bound": self.bound}  # fmt: skip
        if self.plan is not None and (given := [f"{name}=" for name, is_given in others.items() if is_given]):
            raise ValueError(f"plan= is made already; it needs no {', no '.join(given)}, which are for planning anew.")
        if not isinstance(self.mirror, Iterable | Callable | None):
            raise ValueError(f"mirror= takes counts, by equation or by name, or a function; got {self.mirror!r:.99}")
        if not (isinstance(self.chunks, bool | Mapping) or self.chunks == "auto"):
            raise ValueError(f'chunks is "auto", True, False or {{name or axis: count}}, got {self.chunks!r}')
        if self.effort not in EFFORTS:
            raise ValueError(f"effort is one of {', '.join(map(repr, EFFORTS))}, got {self.effort!r}")
        seconds = math.inf if self.max_seconds is None else self.max_seconds
        if isinstance(seconds, bool) or not (isinstance(seconds, Real) and seconds > 0):
            raise ValueError(f"max_seconds is None or a positive number of seconds, got {self.max_seconds!r}")
        if self.offload is not None and self.offload not in KINDS:
            raise ValueError(f"offload is None or one of {', '.join(map(repr, KINDS))}, got {self.offload!r}")
        if self.offload is not None and self.bound:
            raise ValueError("bound=True says how little can be recomputed without offload=; ask for one of them")
        if not (isinstance(self.profile, bool) or self.profile == "roofline"):
            raise ValueError(f'profile is True, False or "roofline", got {self.profile!r}')


@with_own_settings
def make_plan(program: Program, settings: Settings) -> Plan:
    """Plan a traced program.

    A program that cannot be differentiated, forward-only as with a `while` loop, is left as it is: JAX says why where
    its gradient is taken.
    """
    if settings.plan is not None:
        return require_belonging(program, settings.plan)
    if settings.mirror is not None and not isinstance(settings.mirror, Mapping):
        return _mirrored(program, settings, settings.mirror)
    if not any(program.graph.values[v].is_differentiated for node in program.graph.nodes for v in node.outputs):
        return verifying.finish(program, verifying.untouched(program), settings.budget)
    settings = replace(settings, verify=_may_verify(program, settings))
    try:
        return _kept(program, settings)
    except JaxsubError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        if (eqn := over_tracers(program.eqns)) is not None:
            raise _closes_over(eqn) from error
        if not verifying.has_gradient(program):
            return verifying.finish(program, verifying.untouched(program), settings.budget)
        if not isinstance(error, NotImplementedError) or settings.verify is False:
            raise
        told = f"This function cannot be compiled ({error}), so its plan cannot be measured."
        _without_measuring(settings, told, "Pass verify=False")  # a primitive may have no more than an implementation
        return _kept(program, replace(settings, verify=False))


def _closes_over(eqn: Any) -> UnsupportedError:
    name, where = eqn.primitive.name.removesuffix("_call"), compat.source_of(eqn)
    return UnsupportedError(
        f"The derivative rule of a `{name}` function{f' ({where})' if where else ''} closes over a traced value, so "
        "that no plan can be made: jax.checkpoint cannot differentiate such a function either if the value is traced "
        "inside of it. Make the value an argument of the function that has the rule."
    )


def _kept(program: Program, settings: Settings) -> Plan:
    """The plan as it was made before, in this process or another, or else made now."""
    planner, target, store = get(settings.planner), get_target(settings.target), open_store(settings.cache)
    if not target.is_present:
        only_mesh(program.shardings, target)
    asked = replace(settings, planner="", target=None, cache=False, progress=False, budget=Budget())
    what = repr((asked, program.shardings))
    keys = plan_keys(program, planner, target, what, settings.budget) if settings.mirror is None else ()
    if not keys:
        return opened(program, _planned(program, settings, target, store), target, store)
    key, least_key = keys
    is_measured = settings.verify is not False and bool(settings.verify or settings.budget != Budget())
    plan = _known(store, keys, program, target if is_measured else None, settings.budget)
    if plan is not None and settings.progress:
        say(f"found in the plan cache, {summary(plan)}", 0.0)
    if plan is None:
        refusal = find_refusal(store, key)
        try:
            if refusal is not None:
                raise refusal
            plan = _planned(program, settings, target, store)
        except InfeasibleBudgetError as error:
            plan = met_otherwise(store, keys, program, target, error, error is not refusal, is_measured)
            if settings.progress:
                say(f"met by a plan that was made for another budget, {summary(plan)}", 0.0)
        if is_measured:
            put_least(store, least_key, program, target, plan)
        put_plan(store, key, plan)
    return opened(program, plan, target, store)


def _known(store: Store, keys: Sequence[str], program: Program, measured: Target | None, budget: Budget) -> Plan | None:
    """The plan that is kept for a budget, or the one that needs least of all, where the budget is just that."""
    key, least_key = keys
    plan = find_plan(store, key, program, measured)
    if plan is not None or measured is None or budget.n_bytes is None:
        return plan
    least = find_least(store, least_key, program, measured, budget.n_bytes)
    return least if least is not None and needed_bytes(least) > budget.n_bytes / (1 + TUNING.least_slack) else None


def _planned(program: Program, settings: Settings, target: Target, store: Store) -> Plan:
    """Plan a program and say what was decided."""
    began = time.monotonic()
    with Progress(settings.progress) as step:
        first = Planning(program, settings, target, store, step)
        budget = first.in_bytes(program, settings.budget)
        has_forms = settings.mirror is None and settings.budget != Budget()
        in_bytes = replace(settings, budget=budget)  # a fraction is of the program as it is

        @cache
        def planning(p: Program) -> Planning:
            return first if p is program else Planning(p, in_bytes, target, store, step, first.prices)

        def planned(p: Program, elsewhere: Elsewhere = NOTHING) -> Plan:
            # with its own regions it is the last resort: without them it runs in slices
            is_last = p is program and settings.chunks == "auto" and has_forms and n_own_regions(program) > 0
            return first.whole(p, budget, False) if is_last else planning(p).best(p, budget, elsewhere)

        def predicted(p: Program) -> Plan:
            return planning(p).whole(p, budget, True)

        def is_far(p: Program) -> bool:
            return budget.n_bytes is not None and first.is_far(p, budget.n_bytes)

        plan = best_of_forms(program, planned, predicted, is_far) if has_forms else planned(program)
        if plan.opened_regions or plan.clones:  # beside what the function needs as it is
            is_known = settings.budget.fraction is not None and settings.verify is not False
            plain = first.prepared(program)[0].plain().measurement if is_known else None
            plan = plan.replace(plain_measurement=plain)
        plan = plan.replace(budget=settings.budget)
    if settings.progress:
        tell(plan, time.monotonic() - began)
    return plan


def may_be_sliced(program: Program, settings: Settings) -> bool:
    """Whether runs of a program may be executed in slices; what is asked for by name or axis says itself why not."""
    return settings.mirror is None and settings.chunks is not False and not compat.has_collectives(program.traced)


@dataclass(slots=True, eq=False)
class Planning:
    """Plans a program, and others with runs of it in slices: what one was priced and compiled for is remembered."""

    program: Program
    settings: Settings
    target: Target
    store: Store | None
    step: Callable[[str], None]
    prices: Prices = field(default_factory=Prices)
    splits_loops: bool = True
    pricer: Pricer = field(init=False)
    known: dict[str, tuple[verifying.Verifier, Bounded, Candidates]] = field(init=False, default_factory=dict)
    errors: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        settings = self.settings
        self.pricer = pricer_of(self.program, self.target, self.store, progress=self.step, prices=self.prices,
                                profile=settings.profile, offload=settings.offload,
                                splits_loops=self.splits_loops)  # fmt: skip

    def prepared(self, program: Program) -> tuple[verifying.Verifier, Bounded, Candidates]:
        """What prices and compiles plans of a program, and what makes them."""
        if program.fingerprint not in self.known:
            settings = self.settings
            pricer = self.pricer if program is self.program else carried(self.pricer, program)
            verifier = verifying.Verifier(pricer, TUNING.most_compiles + TUNING.by_hand_compiles)
            planner = Bounded(overriding(program, once(program, Memo(get(settings.planner))), settings.overrides))
            candidates = Candidates(pricer, planner, verifying.cut_choices(program))
            self.known[program.fingerprint] = verifier, planner, candidates
        return self.known[program.fingerprint]

    def in_bytes(self, program: Program, budget: Budget) -> Budget:
        """A budget that is a fraction in bytes, of what the program is measured to need, or predicted to."""
        if budget.fraction is None:
            return budget
        verifier, _, candidates = self.prepared(program)
        if self.settings.verify is False:
            found = predicted_bytes(candidates.plain())
        else:
            found = verifier.measure(verifier.empty()).temp_bytes
        return Budget(max(1, int(found * budget.fraction)))

    def is_far(self, program: Program, n_bytes: int) -> bool:
        """Whether a program is predicted to need far more than a budget, also with runs in slices."""
        candidates, most = self.prepared(program)[2], TUNING.plain_far * n_bytes
        if any(predicted_bytes(candidates.plan(cuts, 1)) <= most for cuts in candidates.choices):
            return False
        if not may_be_sliced(program, self.settings):
            return True
        sliced = (best_in_slices(program, self.target, n_bytes, self.whole, is_last) for is_last in (False, True))
        return all(plan is None or predicted_bytes(plan) > most for plan in sliced)

    def best(self, program: Program, budget: Budget, elsewhere: Elsewhere = NOTHING) -> Plan:
        """Plan a program for a budget, runs of it in slices where they may be, unless `elsewhere` more is spared."""
        settings = self.settings
        fits_as_it_is = settings.budget.fraction == 1 and settings.chunks == "auto"
        if fits_as_it_is or not may_be_sliced(program, settings):
            return self.whole(program, budget, False, elsewhere)
        plan = sliced_or_whole(program, self.target, budget, settings.chunks, self.whole, elsewhere)
        if plan.slices and plan.plain_measurement is None:
            plan = self.beside_plain(program, plan)
        return plan

    def whole(self, program: Program, budget: Budget, is_trusted: bool, elsewhere: Elsewhere = NOTHING) -> Plan:
        """Plan a program for a budget, as it stands; where told so, by prediction alone.

        Only what recomputes less than what there is `elsewhere` is compiled.
        """
        settings, (verifier, planner, candidates) = self.settings, self.prepared(program)
        verifier.compiles = 0
        overrides = settings.overrides
        n_bytes = budget.n_bytes
        if n_bytes is None:
            plan = candidates.natural(verifying.usual_choices(program, candidates.choices, settings.planner))
            if settings.verify and not is_trusted:
                plan = plan.replace(measurement=verifier.measure(plan), plain_measurement=verifier.plain().measurement)
            plan = verifying.finish(program, plan, budget)
        elif is_trusted or settings.verify is False:
            plan = _trusted(candidates, n_bytes)
        else:
            plan = self._fitted(verifier, candidates, n_bytes, overrides, elsewhere)
        if overrides:
            plan = _with_overrides(verifier, plan, overrides, budget)
        if settings.bound and not is_trusted:
            plan = planner.bounded(plan)
        return plan if is_trusted else verifier.pricer.timed(plan)

    def beside_plain(self, program: Program, plan: Plan) -> Plan:
        """A plan with what its program needs without it: measured if that is known, else predicted."""
        verifier, _, candidates = self.prepared(program)
        if verifier.is_known(verifier.empty()):
            return plan.replace(plain_measurement=verifier.plain().measurement)
        return plan.replace(plain_prediction=candidates.plain().prediction)

    def _fitted(self, verifier: verifying.Verifier, candidates: Candidates, n_bytes: int,
                overrides: Mapping[str, int], elsewhere: Elsewhere) -> Plan:  # fmt: skip
        """A plan that the compiler confirms to fit."""
        settings = self.settings
        most_seconds = math.inf if settings.max_seconds is None else settings.max_seconds
        effort = replace(EFFORTS[settings.effort], max_seconds=most_seconds)
        is_open = isinstance(get(settings.planner), Auto) and not (overrides or settings.profile or settings.offload)
        pricer = verifier.pricer
        by_hand = partial(plans_by_hand, pricer.sized, self.target.gpu, pricer.share) if is_open else tuple
        plan = fit(verifier, candidates, n_bytes, effort, by_hand, elsewhere, self.errors)
        if overrides and needed_bytes(_with_overrides(verifier, plan, overrides, Budget(n_bytes))) > n_bytes:
            less_bytes = verifier.measure(verifier.empty()).temp_bytes - 1
            plan = fit(verifier, candidates, less_bytes, effort)
        return plan


def _with_overrides(verifier: verifying.Verifier, plan: Plan, overrides: Mapping[str, int], budget: Budget) -> Plan:
    """Apply overrides by name, also where the program fits without a planner."""
    changed = overridden(verifier.program, plan, read_overrides(verifier.program, overrides))
    if changed is plan:
        return plan
    if plan.measurement is not None:
        changed = changed.replace(measurement=verifier.measure(changed))
    return verifying.finish(verifier.program, changed, budget)


@with_own_settings
def can_plan(program: Program) -> bool:
    """Whether a plan could do anything for a program: its gradient can be taken."""
    active = any(program.graph.values[v].is_differentiated for node in program.graph.nodes for v in node.outputs)
    return active and (compat.names_axes(program.traced) or verifying.has_gradient(program))


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
    """Decide about verification where nothing can be compiled; warn where a budget relies on it.

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


def _trusted(candidates: Candidates, n_bytes: int) -> Plan:
    """Plan by prediction alone.

    Raises:
        InfeasibleBudgetError: If no plan is predicted to fit.
    """
    plan = candidates.plain()
    if (needed := predicted_bytes(plan)) > n_bytes:
        plan = candidates.predicted_to_fit(n_bytes, needed)
    return verifying.finish(candidates.pricer.program, plan, Budget(n_bytes))


def _mirrored(program: Program, settings: Settings, mirror: Sequence[int] | Callable[..., int]) -> Plan:
    """The user's own m(v): a sequence, or a function of nodes (the paper's section 4.5)."""
    if isinstance(mirror, str):
        raise ValueError(f"mirror= is the name {mirror!r}: give it a count, as in mirror={{{mirror!r}: 1}}.")
    nodes = program.graph.nodes
    counts = [mirror(node) for node in nodes] if callable(mirror) else list(mirror)
    if len(counts) != len(nodes):
        raise ValueError(f"mirror= gives {len(counts)} counts, but the function has {len(nodes)} equations.")
    plan = Plan.from_mirror_counts(counts, fingerprint=program.fingerprint, budget=settings.budget)
    if settings.verify:
        verifier = verifying.Verifier(Pricer(program, get_target(settings.target), store=open_store(settings.cache)))
        plan = plan.replace(measurement=verifier.measure(plan), plain_measurement=verifier.plain().measurement)
    return verifying.finish(program, plan, settings.budget)
