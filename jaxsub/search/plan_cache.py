"""The plan cache: finished plans on disk, which another process finds without tracing or compiling a stage.

In goes a traced program and what was asked for; out comes the plan that was made for that before, or nothing. The key
holds the program's fingerprint, the budget, the planner and its settings, the target, the versions of JAX, and a digest
of this package's own code: what is found is what planning would find. A planner of the user's own runs every time,
since its dependencies are unknown. Source lines are no part of a fingerprint, so labels are written when a plan is
found.

A plan that is found is fully checked before it is used: its types (`jaxsub.core.codec`), its figures (`Plan.faults`),
what it does to the program (`jaxsub.search.belonging`), and, where plans are measured, that what it does was measured
as it says and keeps to its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.disk_cache import Store, code_digest, key_of
from jaxsub.core.errors import InfeasibleBudgetError, PlanMismatchError, UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.devices.targets import Target
from jaxsub.emission.emit import check
from jaxsub.emission.folding import in_slices
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.constants import constants_key
from jaxsub.jaxpr.identity import of_jax
from jaxsub.jaxpr.trace import Program
from jaxsub.planners import Planner
from jaxsub.search.belonging import plan_faults
from jaxsub.search.verify import finish, measured_key, recalled


def plan_keys(program: Program, planner: Planner, target: Target, asked: str, budget: Budget) -> tuple[str, ...]:
    """The keys of a plan for a budget, and of the one that needs least; `asked` is what else was asked.

    Empty where the planner is not one of this package's.
    """
    if not type(planner).__module__.startswith("jaxsub.planners."):
        return ()
    is_mapped = str(compat.names_axes(program.traced))
    given = (code_digest(), of_jax(), target.name, target.spec or "", program.fingerprint, constants_key(program),
             repr(planner), is_mapped, asked)  # fmt: skip
    return key_of("made", *given, repr(budget)), key_of("least", *given)


_LEASTS = Store()


def of_leasts(store: Store) -> Store:
    """Where the plans that need least are kept: in a store of memory alone for as long as the process runs."""
    return store if store.directory is not None else _LEASTS


def find_least(store: Store, key: str, program: Program, target: Target, n_bytes: int) -> Plan | None:
    """The plan that needed least of all that were found or that refusals named, where a budget has room for it."""
    plan = find_plan(of_leasts(store), key, program, target)
    if plan is None or plan.measurement is None or plan.measurement.temp_bytes > n_bytes:
        return None
    return plan.replace(budget=Budget(n_bytes))


def met_otherwise(store: Store, keys: Sequence[str], program: Program, target: Target, error: InfeasibleBudgetError,
                  is_new: bool, is_measured: bool) -> Plan:  # fmt: skip
    """The plan of another budget that a refused one has room for.

    Raises:
        InfeasibleBudgetError: The refusal, which is kept if it is new; it names the plan of another budget where that
            needs less than what this search found.
    """
    key, least_key = keys
    below = max(error.requested_bytes, error.least_bytes - 1)
    plan = find_least(store, least_key, program, target, below) if is_measured else None
    if plan is not None and plan.measurement is not None and plan.measurement.temp_bytes <= error.requested_bytes:
        return plan.replace(budget=Budget(error.requested_bytes))
    if is_new:
        put_refusal(store, key, least_key, program, target, error)
    if plan is None or plan.measurement is None:
        raise error
    least = plan.measurement.temp_bytes
    raise InfeasibleBudgetError(
        f"Budget `{format_bytes(error.requested_bytes)}` ({error.requested_bytes} bytes) is below the least that was "
        f"found, for another budget: `{format_bytes(least)}`. Pass budget={least}, or make the batch smaller.",
        requested_bytes=error.requested_bytes,
        least_bytes=least,
        plan=plan.replace(budget=Budget(least)),
    ) from None


def put_least(store: Store, key: str, program: Program, target: Target, plan: Plan) -> None:
    """Keep a measured plan if it needs less than the one there is: no budget that has room for it is refused."""
    kept, found = of_leasts(store), plan.measurement
    known: Plan | None = kept.get(key, Plan)
    if found is None or (known is not None and known.measurement is not None
                         and known.measurement.temp_bytes <= found.temp_bytes):  # fmt: skip
        return
    kept.put(key, plan.replace(budget=Budget(found.temp_bytes)))
    if kept is not store:  # where it was measured that is known
        kept.put(_measured_key(program, plan, target), found)


def put_plan(store: Store, key: str, plan: Plan) -> None:
    """Keep a plan."""
    store.put(key, plan)


def find_plan(store: Store, key: str, program: Program, measured: Target | None = None) -> Plan | None:
    """The plan that was kept under a key, its parts named as the program names them now.

    `None` where there is none, or one that no planner made for this program; with `measured`, also one that was not
    measured for that target, within its budget.
    """
    plan: Plan | None = store.get(key, Plan)
    if plan is None or plan.faults():
        return None
    try:
        check(program, plan)
    except (PlanMismatchError, UnsupportedError):
        return None
    if plan_faults(program, plan) or (measured is not None and not _keeps_its_budget(store, program, plan, measured)):
        return None
    return finish(program, plan, plan.budget)


def _keeps_its_budget(store: Store, program: Program, plan: Plan, target: Target) -> bool:
    """Whether what a plan does was measured for a target, as it says itself, and fits the budget it was made for."""
    found, plain, budget = plan.measurement, plan.plain_measurement, plan.budget
    known = recalled(store, _measured_key(program, plan, target), target)
    if found is None or known is None:
        return False
    if replace(known, compile_seconds=found.compile_seconds) != found:  # another process may have compiled it too
        return False
    if budget.fraction is not None:
        return plain is not None and found.temp_bytes <= int(plain.temp_bytes * budget.fraction)
    return budget.n_bytes is None or found.temp_bytes <= budget.n_bytes


def _measured_key(program: Program, plan: Plan, target: Target) -> str:
    folded, bare = in_slices(program, plan)
    return measured_key(folded, target, bare)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A refusal as it is kept."""

    message: str
    requested_bytes: int
    least_bytes: int
    holders: tuple[str, ...]
    plan: Plan | None


def put_refusal(store: Store, key: str, least_key: str, program: Program, target: Target,
                error: InfeasibleBudgetError) -> None:  # fmt: skip
    """Keep that a budget was refused, and how, and the plan that it names."""
    if error.plan is not None:
        put_least(store, least_key, program, target, finish(program, error.plan, Budget(error.least_bytes)))
    store.put(_refusal_key(key), _Refusal(str(error), error.requested_bytes, error.least_bytes, tuple(error.holders),
                                           error.plan))  # fmt: skip


def find_refusal(store: Store, key: str) -> InfeasibleBudgetError | None:
    """The refusal that was kept under a key; `None` where there is none."""
    found: _Refusal | None = store.get(_refusal_key(key), _Refusal)
    if found is None or (found.plan is not None and found.plan.faults()):
        return None
    return InfeasibleBudgetError(found.message, requested_bytes=found.requested_bytes, least_bytes=found.least_bytes,
                                 holders=found.holders, plan=found.plan)  # fmt: skip


def _refusal_key(key: str) -> str:
    return key_of("refused", key)
