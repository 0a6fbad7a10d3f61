"""Plan a program with chosen runs of it in slices.

A program and `Slices` go in, with what plans a program as it stands; out comes a plan of the program. The runs become
one equation each, and the rest is planned around them; of the whole function in slices each slice may recompute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from jaxsub.search.sliceable import named


class Whole(Protocol):
    """Plans a program for a budget, as it stands; where told so, by prediction alone."""

    def __call__(self, program: Program, budget: Budget, is_trusted: bool, known_share: float = ..., /) -> Plan:
        """Return the plan; with `known_share` one that recomputes less of a forward pass, or a refusal."""
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
              known_share: float = math.inf) -> Plan:  # fmt: skip
    """Plan the program in which some runs are one equation each, executed in slices; of the whole one may recompute.

    A slice of the whole is planned by prediction, for as much less than it needs as all need over the budget. What is
    predicted to need more than predictions err by is not compiled, unless no slice can be planned for less.
    """
    n_bytes, needed = budget.n_bytes, 0
    if not runs:
        return whole(program, budget, is_trusted, known_share)
    if n_bytes is None or not is_whole_function(program, runs):
        known_share -= fixed_cost(runs)
        return unfolded(program, runs, whole(with_slices(program, runs), budget, is_trusted, known_share))
    refusals: list[InfeasibleBudgetError] = []
    tried: list[_Tried] = []
    again = runs[0].extra_share  # of a gradient that is not made in the forward pass
    for _ in range(TUNING.slice_corrections):
        folded = with_slices(program, runs)
        found = _plan_or_refusal(whole, folded, budget, True)
        tried.append(_Tried(runs, needed, needed_bytes(found) if isinstance(found, Plan) else found.least_bytes))
        if isinstance(found, Plan) and _has_room(tried, n_bytes):
            runs = _roomier(program, tried, again, n_bytes, whole)
            folded = with_slices(program, runs)
            found = _plan_or_refusal(whole, folded, budget, True)
        is_far = not isinstance(found, Plan) and found.least_bytes > TUNING.prediction_error * n_bytes
        if not (is_trusted or is_far):
            found = _plan_or_refusal(whole, folded, budget, False)
        if isinstance(found, Plan):
            return unfolded(program, runs, found)
        if is_trusted or not is_far:
            refusals.append(found)
        one = program_of_slice(program, runs[0])
        if not needed:
            needed = needed_bytes(whole(one, Budget(NO_LIMIT), True))
            tried = [replace(tried[0], needed=needed)]
        inside = _plan_or_refusal(whole, one, Budget(max(1, needed - (found.least_bytes - n_bytes))), True)
        if not isinstance(inside, Plan):  # its budget is that of a slice: report the whole program's
            if inside.least_bytes >= needed:
                break
            inside = whole(one, Budget(inside.least_bytes), True)
        runs, needed = _with_inside(runs, inside, again), needed_bytes(inside)
    if not refusals:
        return unfolded(program, runs, whole(with_slices(program, runs), budget, is_trusted))
    raise min(refusals, key=lambda refused: refused.least_bytes)


@dataclass(frozen=True, slots=True)
class _Tried:
    """The whole function in slices: what one slice is planned to need, and what all are predicted to."""

    runs: Runs
    needed: int
    total: int


def _has_room(tried: Sequence[_Tried], n_bytes: int) -> bool:
    """Whether slices that recompute leave so much of the budget that they may recompute less."""
    first, last = tried[0], tried[-1]
    recomputes = last.runs[0].extra_share - first.runs[0].extra_share > TUNING.compile_gain
    return recomputes and last.needed < first.needed and TUNING.prediction_error * last.total < n_bytes


def _roomier(program: Program, tried: Sequence[_Tried], again: float, n_bytes: int, whole: Whole) -> Runs:
    """The same slices with more room inside, by what they need with and without recomputation; if that fits."""
    first, last = tried[0], tried[-1]
    share = (n_bytes / TUNING.prediction_error - last.total) / max(1, first.total - last.total)
    asked = last.needed + int(share * (first.needed - last.needed))
    inside = _plan_or_refusal(whole, program_of_slice(program, last.runs[0]), Budget(asked), True)
    if not isinstance(inside, Plan):
        return last.runs
    runs = _with_inside(last.runs, inside, again)
    found = _plan_or_refusal(whole, with_slices(program, runs), Budget(n_bytes), True)
    return runs if isinstance(found, Plan) and runs[0].extra_share < last.runs[0].extra_share else last.runs


def _with_inside(runs: Runs, inside: Plan, again: float) -> Runs:
    planned = Inside(inside.segments, inside.barriers, inside.loops)
    return (replace(runs[0], inside=planned, extra_share=again + recomputed_share(inside)),)


def _plan_or_refusal(whole: Whole, program: Program, budget: Budget, is_trusted: bool) -> Plan | InfeasibleBudgetError:
    try:
        return whole(program, budget, is_trusted)
    except InfeasibleBudgetError as refused:
        return refused


def fixed_cost(runs: Runs) -> float:
    """What plans with these runs in slices cost, whatever else they recompute."""
    return slowed_share(runs) + sum(run.extra_share for run in runs)


def slowed_share(runs: Runs) -> float:
    """How much longer a forward pass takes for the weights and kernels of further slices, as a share of it."""
    return sum(run.slowed_share for run in runs)


def needed_bytes(plan: Plan) -> int:
    """What a plan needs: measured if that is known, else predicted."""
    found = plan.measurement or plan.prediction
    return found.temp_bytes if found is not None else 0
