"""Plan a program with chosen runs of it in slices.

A program and `Slices` go in, with what plans a program as it stands; out comes a plan of the program. The runs become
one equation each, and the rest is planned around them; of the whole function in slices each slice may recompute.
"""

from __future__ import annotations

import math
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

    A slice of the whole is planned by prediction, to recompute as little as is predicted to fit. If the compiled plan
    needs more than the budget, or leaves much room, the next one aims for as much less or more; where one needed too
    much, between the two. What is known to recompute more than `most_share` of a forward pass may be refused unplanned.
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
    best: Plan | None = None
    refusals: list[InfeasibleBudgetError] = []
    too_much: _Tried | None = None
    goals = [n_bytes]
    while goals and len(refusals) < TUNING.slice_corrections:
        goal = goals.pop()
        tried = _least_recompute(program, runs, goal, whole, most_share)
        if best is not None and tried.extra_share > best.slices[0].extra_share - TUNING.compile_gain:
            continue
        found = _plan_or_refusal(whole, with_slices(program, tried.runs), budget, is_trusted)
        needed = max(1, needed_or_least(found))
        corrected = int(tried.total * n_bytes / needed)
        if isinstance(found, Plan):
            best = unfolded(program, tried.runs, found)
            spared = tried.extra_share - too_much.extra_share if too_much else 0.0
            has_room = needed < n_bytes / TUNING.prediction_error or spared > TUNING.heavy_recompute
            halfway = math.isqrt(tried.total * (too_much.total if too_much else corrected))
            further = [halfway] if too_much else [corrected, halfway]  # halfway first
            goals = further if has_room and not is_trusted else []
        else:
            refusals.append(found.with_plan(partial(unfolded, program, tried.runs)))
            too_much = tried if too_much is None or tried.total < too_much.total else too_much
            goals = [] if is_trusted or best or tried.total > goal else [corrected]  # none can be planned for less
    if best is None:
        raise min(refusals, key=lambda refused: refused.least_bytes)
    return best


@dataclass(frozen=True, slots=True)
class _Tried:
    """The whole function in slices: what one slice is planned to need, and what all are predicted to."""

    runs: Runs
    needed: int
    total: int

    @property
    def extra_share(self) -> float:
        """What they recompute, as a share of a forward pass."""
        return self.runs[0].extra_share


def _least_recompute(program: Program, runs: Runs, n_bytes: int, whole: Whole, most_share: float) -> _Tried:
    """The whole function in slices that recompute as little as is predicted to fit, or need least where none fits."""
    again = runs[0].extra_share  # of a gradient that is not made in the forward pass
    seen: list[_Tried] = []

    def tried(runs: Runs, needed: int) -> _Tried:
        found = _plan_or_refusal(whole, with_slices(program, runs), Budget(n_bytes), True)
        seen.append(_Tried(runs, needed, needed_or_least(found)))
        return seen[-1]

    def planned(asked: int) -> _Tried:
        inside = _plan_or_refusal(whole, one, Budget(max(1, asked)), True)
        if not isinstance(inside, Plan):  # its budget is that of a slice
            inside = whole(one, Budget(inside.least_bytes), True)
        planned = _with_inside(runs, inside, again)
        if planned[0].extra_share > most_share:  # what is not wanted is not traced
            return _Tried(planned, needed_bytes(inside), most.total)
        return tried(planned, needed_bytes(inside))

    most = tried(runs, 0)
    if most.total <= n_bytes:
        return most
    one = program_of_slice(program, runs[0])
    most = replace(most, needed=needed_bytes(whole(one, Budget(NO_LIMIT), True)))
    asked = most.needed - (most.total - n_bytes) if n_bytes > 1 else 1  # one byte asks for the least
    least = planned(asked)
    aim = int(n_bytes * (1 - TUNING.budget_margin))  # a miss by little costs as much as one by much
    for _ in range(TUNING.slice_corrections):  # on the line through both, before the least
        if least.total <= n_bytes or asked <= 1 or least.needed >= most.needed:
            break
        slope = min(1.0, (most.total - least.total) / (most.needed - least.needed))
        asked = int(least.needed - (least.total - aim) / slope) if slope > 0 else 1
        most, least = least, planned(asked)
    if least.total > n_bytes and asked > 1:
        most, least = least, planned(1)
    low, is_same = least.needed, False
    for _ in range(TUNING.slice_corrections):
        is_near = least.total > n_bytes / TUNING.prediction_error
        if is_near or least.extra_share - most.extra_share < TUNING.compile_gain:
            break
        share = 0.5 if is_same else (n_bytes - least.total) / max(1, most.total - least.total)
        asked = low + int(share * (most.needed - low))
        found = planned(asked)
        is_same = found.runs == least.runs
        if found.total > n_bytes:
            most = found
        else:
            least, low = found, asked
    return least if least.total <= n_bytes else min(seen, key=lambda found: found.total)


def _with_inside(runs: Runs, inside: Plan, again: float) -> Runs:
    planned = Inside(inside.segments, inside.barriers, inside.loops)
    return (replace(runs[0], inside=planned, extra_share=again + recomputed_share(inside)),)


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


def needed_or_least(found: Plan | InfeasibleBudgetError) -> int:
    """What a plan needs, or the least that a refusal names."""
    return needed_bytes(found) if isinstance(found, Plan) else found.least_bytes


def needed_bytes(plan: Plan) -> int:
    """What a plan needs: measured if that is known, else predicted."""
    found = plan.measurement or plan.prediction
    return found.temp_bytes if found is not None else 0
