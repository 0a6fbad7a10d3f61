"""Find plans of a program at every budget at once: as it stands, and with runs of it in slices.

A program's prices go in, candidates come out: predicted bytes, recompute, and a function that makes the plan. The
tables of the planner `optimal` answer for all budgets, so each set of runs in slices costs one pricing and no search. A
whole function in slices is one stage: where less memory is wanted than that needs, one slice of it is planned alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar

from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Run
from jaxsub.core.decisions import Inside, Slices
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer
from jaxsub.emission.emit import keep_out
from jaxsub.emission.folding import program_of_slice, with_slices
from jaxsub.planners.optimal import solve
from jaxsub.search.propagated import carried
from jaxsub.search.sliced_program import is_whole_function, unfolded
from jaxsub.search.slicing import Chunks, asked, find_runs
from jaxsub.search.verify import cut_choices, finish, usual_choices


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A plan that is not made yet: its predicted peak, and what it recomputes in forward passes."""

    temp_bytes: int
    extra: float
    make: Callable[[], Plan]
    is_sliced: bool = False


class Rated(Protocol):
    """What is compared with others: its predicted peak, its recompute, and whether it runs in slices."""

    @property
    def temp_bytes(self) -> int:
        """Its predicted peak."""
        ...

    @property
    def extra(self) -> float:
        """Its recompute, in forward passes."""
        ...

    @property
    def is_sliced(self) -> bool:
        """Whether runs are executed in slices."""
        ...


F = TypeVar("F", bound=Rated)


def at_every_budget(pricer: Pricer, chunks: Chunks) -> list[Candidate]:
    """Candidates none of which is better than another, memory rising.

    Unless `chunks` is `True`, slices have to spare more recompute than a plan is given without looking at them.
    """
    if isinstance(chunks, Mapping):
        return undominated(_in_slices(pricer, asked(pricer.program, chunks)))
    found = undominated(_as_it_stands(pricer))
    if chunks is False:
        return found
    sets = find_runs(pricer.program, pricer.target, max(1, found[0].temp_bytes // 2)).sets()
    sliced = (candidate for runs in sets for candidate in _in_slices(pricer, runs))
    return undominated([*found, *sliced], price_of_slices(chunks))


def price_of_slices(chunks: Chunks) -> float:
    """What slices have to spare, in forward passes."""
    return TUNING.little_recompute if chunks == "auto" else 0.0


def undominated(found: Iterable[F], price: float = 0.0) -> list[F]:
    """Those that no other is better than in both memory and recompute, memory rising; slices count as `price` forward
    passes.
    """

    def cost(point: F) -> float:
        return point.extra + price * point.is_sliced

    rising = sorted(found, key=lambda point: (point.temp_bytes, cost(point)))
    least = accumulate(map(cost, rising[:-1]), min, initial=math.inf)
    return [point for point, before in zip(rising, least, strict=True) if cost(point) < before]


def finished(pricer: Pricer, plan: Plan) -> Plan:
    """A plan with its seconds, and its own predicted peak as its budget."""
    plan = keep_out(pricer.timed(plan), pricer.program.graph.pinned())
    return finish(pricer.program, plan, Budget(max(1, predicted_bytes(plan))))


def _as_it_stands(pricer: Pricer) -> Iterator[Candidate]:
    for cuts in usual_choices(pricer.program, cut_choices(pricer.program)):
        chain = pricer.chain(cuts)
        for n_bytes, flops, runs in solve(chain).frontier():
            yield Candidate(n_bytes, flops / max(chain.forward_flops, 1.0), partial(_made, pricer, chain, runs))


def _made(pricer: Pricer, chain: Chain, runs: tuple[Run, ...]) -> Plan:
    return finished(pricer, plan_from_runs(chain, runs, budget=Budget(), planner="optimal"))


def _in_slices(pricer: Pricer, runs: tuple[Slices, ...]) -> Iterator[Candidate]:
    """Candidates with these runs in slices, and where the whole function is, with slices that recompute too."""
    outside = list(_around(pricer, runs))
    yield from outside
    if not is_whole_function(pricer.program, runs):
        return
    part = carried(pricer, program_of_slice(pricer.program, runs[0]))
    inside = undominated(_as_it_stands(part))
    needed = outside[0].temp_bytes - inside[-1].temp_bytes
    for candidate in inside[:-1]:
        make = partial(_made_inside, pricer, runs[0], candidate)
        yield Candidate(max(1, needed + candidate.temp_bytes), candidate.extra, make, True)


def _around(pricer: Pricer, runs: tuple[Slices, ...]) -> Iterator[Candidate]:
    again = sum(run.extra_share for run in runs)
    for found in _as_it_stands(carried(pricer, with_slices(pricer.program, runs))):
        make = partial(_made_around, pricer, runs, found)
        yield Candidate(found.temp_bytes, found.extra + again, make, True)


def _made_around(pricer: Pricer, runs: tuple[Slices, ...], found: Candidate) -> Plan:
    return unfolded(pricer.program, runs, found.make())


def _made_inside(pricer: Pricer, run: Slices, found: Candidate) -> Plan:
    plan = found.make()
    inside = Inside(plan.segments, plan.barriers, plan.loops)
    return next(_around(pricer, (replace(run, inside=inside, extra_share=recomputed_share(plan)),))).make()
