"""Plan a program with chosen runs of it in slices.

A program and `Slices` go in, with what plans a program as it stands; out comes a plan of the program. The runs become
one equation each, and the rest is planned around them; of the whole function in slices each slice may recompute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Inside, Slices
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.emission.folding import program_of_slice, with_slices
from jaxsub.jaxpr.differences import equation_digests
from jaxsub.jaxpr.trace import Program
from jaxsub.search.compile_worth import NOTHING, Elsewhere
from jaxsub.search.sliceable import named


class Whole(Protocol):
    """Plans a program for a budget, as it stands; where told so, by prediction alone."""

    def __call__(self, program: Program, budget: Budget, is_trusted: bool, elsewhere: Elsewhere = ..., /) -> Plan:
        """Return the plan, one that recomputes less than what there is `elsewhere`; or a refusal."""
        ...


Runs = tuple[Slices, ...]
Places = tuple[tuple[tuple[tuple[int, int], ...], int, int], ...]
"""Where runs are, in however many slices."""

WHOLE: Runs = ()
"""No run in slices: the program as it stands."""

NO_LIMIT = 2**62
"""Bytes that no program needs."""


def is_whole_function(program: Program, runs: Runs) -> bool:
    """Whether one run is all of a program."""
    return [(run.start, run.stop, run.within) for run in runs] == [(0, len(program.eqns), ())]


def unfolded(program: Program, runs: Runs, plan: Plan) -> Plan:
    """A plan of a program in which runs are one equation each, as a plan of the program with these runs in slices."""
    return plan.replace(fingerprint=program.fingerprint, slices=named(program, runs), plain_measurement=None,
                        plain_prediction=None, plain_timeline=None, equations=equation_digests(program))  # fmt: skip


def in_slices(program: Program, runs: Runs, budget: Budget, whole: Whole, is_trusted: bool,
              elsewhere: Elsewhere = NOTHING, most_share: float = math.inf) -> Plan:  # fmt: skip
    """Plan the program in which some runs are one equation each, executed in slices; of the whole one may recompute.

    A slice of the whole is planned by prediction, to recompute as little as is predicted to fit. What is known to
    recompute more than `most_share` of a forward pass may be refused unplanned.
    """
    n_bytes = budget.n_bytes
    if not runs:
        return whole(program, budget, is_trusted, elsewhere)
    if n_bytes is None or not is_whole_function(program, runs):
        beside = elsewhere.beside(fixed_cost(runs))
        found = _plan_or_refusal(whole, with_slices(program, runs), budget, is_trusted, beside)
        if isinstance(found, Plan):
            return unfolded(program, runs, found)
        raise found.with_plan(partial(unfolded, program, runs))
    tried = _least_recompute(program, runs, n_bytes, whole, most_share)
    if not is_trusted:
        return _verified(program, runs, n_bytes, whole, tried, most_share)
    found = _plan_or_refusal(whole, with_slices(program, tried.runs), budget, True)
    if isinstance(found, Plan):
        return unfolded(program, tried.runs, found)
    raise found.with_plan(partial(unfolded, program, tried.runs))


@dataclass(frozen=True, slots=True)
class _Tried:
    """The whole function in slices: what one slice is planned to need, and what all are predicted or measured to."""

    runs: Runs
    needed: int
    total: int

    @property
    def extra_share(self) -> float:
        """What they recompute, as a share of a forward pass."""
        return self.runs[0].extra_share


def _verified(program: Program, runs: Runs, n_bytes: int, whole: Whole, tried: _Tried, most_share: float) -> Plan:
    """The whole function in slices, compiled: corrected by what it needs while that gains something.

    Of plans that recompute more or less the same is needed beside a slice, to 1 % mostly, whatever a slice needs.
    """
    best: Plan | None = None
    known: list[_Tried] = []
    refusals: list[InfeasibleBudgetError] = []
    while True:
        found = _plan_or_refusal(whole, with_slices(program, tried.runs), Budget(n_bytes), False)
        if isinstance(found, Plan):
            best = unfolded(program, tried.runs, found)
        else:
            refusals.append(found.with_plan(partial(unfolded, program, tried.runs)))
        if best and best.slices[0].extra_share - runs[0].extra_share < TUNING.compile_gain:
            break
        needed = tried.needed or _most_needed(program, runs, whole)
        known.append(replace(tried, needed=needed, total=max(1, needed_or_least(found))))
        is_least = tried.total > n_bytes  # none can be planned for less
        if len(known) == TUNING.slice_corrections:
            break
        tried = _planned_beside(known, n_bytes, program, runs, whole)
        is_in_vain = tried.extra_share > best.slices[0].extra_share - TUNING.compile_gain if best else is_least
        if is_in_vain or tried.extra_share > most_share or tried.runs in [before.runs for before in known]:
            break
    if best is None:
        raise min(refusals, key=lambda refused: refused.least_bytes)
    return best


def _least_recompute(program: Program, runs: Runs, n_bytes: int, whole: Whole, most_share: float) -> _Tried:
    """The whole function in slices that recompute as little as is predicted to fit, or need least where none fits."""

    def predicted(tried: _Tried) -> _Tried:
        found = _plan_or_refusal(whole, with_slices(program, tried.runs), Budget(n_bytes), True)
        return replace(tried, total=needed_or_least(found))

    most = predicted(_Tried(runs, 0, 0))
    if most.total <= n_bytes:
        return most
    seen = [replace(most, needed=_most_needed(program, runs, whole))]
    for number in range(TUNING.slice_corrections):  # one byte asks for the least, and so does the last
        is_last = n_bytes == 1 or number == TUNING.slice_corrections - 1
        planned = _planned_beside(seen, 0 if is_last else n_bytes, program, runs, whole)
        if planned.extra_share > most_share or planned.runs in [known.runs for known in seen]:
            break  # what is not wanted is not traced
        seen.append(predicted(planned))
        spared = seen[-1].extra_share - runs[0].extra_share
        is_near = seen[-1].total > n_bytes / TUNING.prediction_error or spared < TUNING.compile_gain
        if is_last or (seen[-1].total <= n_bytes and is_near):
            break
    fitting = [tried for tried in seen if tried.total <= n_bytes]
    return min(fitting, key=lambda t: t.extra_share) if fitting else min(seen, key=lambda t: t.total)


def _planned_beside(known: Sequence[_Tried], n_bytes: int, program: Program, runs: Runs, whole: Whole) -> _Tried:
    """Slices that recompute as little as fits, on the line through what is known of the last two; 0 asks for the least.

    Where one is known, all need as much beside a slice.
    """
    *before, last = known
    slope = (last.total - before[-1].total) / ((last.needed - before[-1].needed) or 1) if before else 1.0
    slope = min(slope, 1.0) if slope > 0 else 1.0
    aim = n_bytes * (1 - TUNING.between_gap)  # a miss by little costs as much as one by much
    asked = int(last.needed + (aim - last.total) / slope) if n_bytes else 1
    one = program_of_slice(program, runs[0])
    inside = _plan_or_refusal(whole, one, Budget(max(1, asked)), True)
    if not isinstance(inside, Plan):
        inside = whole(one, Budget(inside.least_bytes), True)
    needed = needed_bytes(inside)
    return _Tried(_with_inside(runs, inside), needed, int(last.total + slope * (needed - last.needed)))


def _most_needed(program: Program, runs: Runs, whole: Whole) -> int:
    """What a slice needs that recomputes nothing."""
    return needed_bytes(whole(program_of_slice(program, runs[0]), Budget(NO_LIMIT), True))


def _with_inside(runs: Runs, inside: Plan) -> Runs:
    planned = Inside(inside.segments, inside.barriers, inside.loops)
    return (replace(runs[0], inside=planned, extra_share=runs[0].extra_share + recomputed_share(inside)),)


def _plan_or_refusal(whole: Whole, program: Program, budget: Budget, is_trusted: bool,
                     elsewhere: Elsewhere = NOTHING) -> Plan | InfeasibleBudgetError:  # fmt: skip
    try:
        return whole(program, budget, is_trusted, elsewhere)
    except InfeasibleBudgetError as refused:
        return refused


def fixed_cost(runs: Runs) -> float:
    """What plans with these runs in slices cost, whatever else they recompute."""
    return slowed_share(runs) + sum(run.extra_share for run in runs)


def slowed_share(runs: Runs) -> float:
    """How much longer a forward pass takes for the weights and kernels of further slices, as a share of it."""
    return sum(run.slowed_share for run in runs)


def least_gain(runs: Runs) -> float:
    """What runs in slices must be able to spare for their gradients to be traced, as a share of a forward pass."""
    most = max((run.stop - run.start for run in runs), default=0)
    return max(TUNING.compile_gain * most / TUNING.region_equations + slowed_share(runs), fixed_cost(runs))


def n_slices(runs: Runs) -> int:
    """How many slices runs have together."""
    return sum(run.count for run in runs)


def places_of(runs: Runs) -> Places:
    """Where runs are."""
    return tuple((run.within, run.start, run.stop) for run in runs)


def needed_or_least(found: Plan | InfeasibleBudgetError) -> int:
    """What a plan needs, or the least that a refusal names."""
    return needed_bytes(found) if isinstance(found, Plan) else found.least_bytes


def needed_bytes(plan: Plan) -> int:
    """What a plan needs: measured if that is known, else predicted."""
    found = plan.measurement or plan.prediction
    return found.temp_bytes if found is not None else 0
