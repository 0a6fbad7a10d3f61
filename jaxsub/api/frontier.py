"""`frontier`: what every budget buys, from the least memory to the plain program, predicted.

Points are those of `jaxsub.search.frontier_points`, with runs in slices where these spare something. Beside them stand
what is done by hand today and the paper's own planners, priced on the chain of the program as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Run
from jaxsub.core.checks import whole
from jaxsub.core.decisions import Form
from jaxsub.core.disk_cache import open_store
from jaxsub.core.errors import BudgetError, UnsupportedError
from jaxsub.core.figures import recomputed_share
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan, plan_from_runs
from jaxsub.core.shown import Shown
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.emission.folding import in_slices
from jaxsub.emission.forms import program_in
from jaxsub.emission.own_regions import n_own_regions
from jaxsub.jaxpr.arguments import AnyArgnums, refuse_collisions, trace_call
from jaxsub.jaxpr.trace import with_own_settings
from jaxsub.planners import get
from jaxsub.search.annotate import opened
from jaxsub.search.forms import in_form
from jaxsub.search.frontier_points import Candidate, at_every_budget, finished, price_of_slices, undominated
from jaxsub.search.pipeline import Settings, may_be_sliced
from jaxsub.search.propagated import pricer_of
from jaxsub.search.slicing import Chunks
from jaxsub.search.verify import Verifier, cut_choices

POINTS = 8
"""About how many plans a frontier has where nobody says."""

NAMED = ("chen", "recursive", "revolve")
"""Planners whose own plans stand beside the frontier."""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan on or beside a frontier.

    Attributes:
        name: What it is called.
        plan: The plan.
    """

    name: str
    plan: Plan

    @property
    def temp_bytes(self) -> int:
        """Its predicted peak, in bytes."""
        return self.plan.prediction.temp_bytes if self.plan.prediction is not None else 0

    @property
    def extra(self) -> float:
        """Its recompute, in forward passes."""
        return recomputed_share(self.plan)

    @property
    def is_sliced(self) -> bool:
        """Whether runs of it are executed in slices."""
        return bool(self.plan.slices)


@dataclass(frozen=True, slots=True)
class Frontier(Shown):
    """Plans of one function, none of which is better than another in both memory and recomputation.

    Attributes:
        points: The plans, least memory first; the last one recomputes nothing. Those that run in slices are called
            "in slices".
        others: What is made by hand, and by the paper's planners, on the same chain.
        budget_bytes: A budget to mark, or `None`.
    """

    points: tuple[Point, ...]
    others: tuple[Point, ...] = ()
    budget_bytes: int | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, least memory first; each can be passed to `jaxsub.sublinear(plan=...)`."""
        return tuple(point.plan for point in self.points)

    def plot(self, ax: Any = None) -> Any:
        """Draw memory against recomputation; needs matplotlib.

        Args:
            ax: The matplotlib axes to draw on; `None` for a new figure's.

        Returns:
            The axes.
        """
        from jaxsub.show.plot import plot_frontier  # noqa: PLC0415 - shown only when asked

        return plot_frontier(self, ax)


def frontier(
    fun: Callable[..., Any],
    /,
    *args: Any,
    points: int = POINTS,
    budget: Any = None,
    target: Any = None,
    verify: bool = False,
    chunks: Chunks = "auto",
    argnums: AnyArgnums = None,
    cache: Any = True,
    **kwargs: Any,
) -> Frontier:
    """Find what every budget buys: plans from the least memory to no recomputation at all.

    Args:
        fun: The function.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s.
        points: About how many plans.
        budget: A budget in bytes to mark in the picture.
        target: The device to plan for, such as `"h100"`; `None` for the one in use.
        verify: Whether to compile and measure every plan of the frontier; otherwise figures are predictions, made
            without a compiler.
        chunks: Which runs may be executed a slice at a time, as for `jaxsub.sublinear`. With `"auto"`, points in slices
            are there where no plan without them needs so little memory or recomputes nearly as little; with `False`
            the frontier ends at what one stage needs at once, and is found in a fraction of the time.
        argnums: The arguments its gradient is taken of, as for `jaxsub.sublinear`.
        cache: Where compiled figures are kept, as for `jaxsub.sublinear`.
        **kwargs: Its keyword arguments. One that is called like an option above is refused: ask
            `jaxsub.sublinear(fun, ...).frontier(*args, **kwargs)`, whose names are all the function's.

    Returns:
        The frontier; print it, plot it, or take a plan of it.

    Raises:
        BudgetError: If the budget cannot be read, or is a fraction.
        UnsupportedError: If something in the function cannot be supported.
        ChunksError: If what `chunks=` asks for by name or axis cannot be done.
        ValueError: If `points` is no whole number of at least 2.

    Example:
        >>> import jax, jax.numpy as jnp, jaxsub
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).mean()
        >>> w, x = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (64, 1024))
        >>> found = jaxsub.frontier(loss, [w] * 16, x)
        >>> found.points[0].temp_bytes < found.points[-1].temp_bytes, found.points[-1].extra
        (True, 0.0)

    References:
        Beaumont et al., Optimal checkpointing for heterogeneous chains, 2019.
    """
    refuse_collisions(frontier, locals())
    points, marked = whole(points, "points", 2), Budget.parse(budget)
    if marked.fraction is not None:
        raise BudgetError(f'A frontier marks bytes, such as "8GiB" or an int; got the fraction budget={budget!r}.')
    program = trace_call(fun, args, kwargs, argnums)
    pricer = pricer_of(program, get_target(target), open_store(cache))
    if not may_be_sliced(program, Settings(chunks=chunks)):
        chunks = False
    return frontier_of(pricer, points, marked.n_bytes, is_measured=verify, chunks=chunks)


@with_own_settings
def frontier_of(pricer: Pricer, points: int, budget_bytes: int | None = None, *, is_measured: bool = False,
                chunks: Chunks = False) -> Frontier:  # fmt: skip
    """The frontier of a program whose stages a pricer prices; regions of its own are opened."""
    program, store, plain = pricer.program, pricer.store, None
    if not program.eqns:
        raise UnsupportedError("The function computes nothing, so that there is nothing to plan or to explain.")
    form = Form(n_own_regions(program))
    bare = pricer_of(program_in(program, form), pricer.target, store) if form != Form() else pricer
    plans = [candidate.make() for candidate in spread(at_every_budget(bare, chunks), points)]
    chain = bare.chain(cut_choices(bare.program)[0])
    others = [Point(name, finished(bare, plan)) for name, plan in by_hand(chain)]
    if is_measured:
        plain, verifier = Verifier(pricer).plain().measurement, Verifier(bare)
        plans = [plan.replace(measurement=_measure(verifier, plan), plain_measurement=plain) for plan in plans]
    plans = [opened(program, in_form(program, form, plan), pricer.target, store) for plan in plans]
    found = [Point("in slices" if plan.slices else "optimal", plan) for plan in plans]
    return Frontier(tuple(undominated(found, price_of_slices(chunks))), tuple(others), budget_bytes)


def _measure(verifier: Verifier, plan: Plan) -> Measurement:
    if plan.slices:
        folded, plan = in_slices(verifier.program, plan)
        verifier = Verifier(replace(verifier.pricer, program=folded))
    return verifier.measure(plan)


def spread(found: Sequence[Candidate], points: int) -> list[Candidate]:
    """Choose points that are spread evenly over the logarithm of memory, both ends among them."""
    if len(found) <= points:
        return list(found)
    low, high = (math.log(max(1, found[end].temp_bytes)) for end in (0, -1))
    chosen = {0, len(found) - 1}
    for i in range(1, points - 1):
        goal = low + (high - low) * i / (points - 1)
        chosen.add(min(range(len(found)), key=lambda k: abs(math.log(max(1, found[k].temp_bytes)) - goal)))
    return [found[k] for k in sorted(chosen)]


def by_hand(chain: Chain) -> Iterator[tuple[str, Plan]]:
    """What one does without a planner, and the paper's planners' own plans."""
    n = len(chain.stages)
    if n > 1:
        each = [chain.recompute(s) for s in range(n - 1)] + [Run(n - 1, n)]
        yield "checkpoint every stage", plan_from_runs(chain, each, budget=Budget(), planner="by hand")
        roots = list(_equal(chain, math.isqrt(n)))
        yield "√n segments", plan_from_runs(chain, roots, budget=Budget(), planner="by hand")
    for name in NAMED:
        yield name, get(name)(chain, None)


def _equal(chain: Chain, count: int) -> Iterator[Run]:
    """So many nests of equally many stages; the last stands unwrapped."""
    n = len(chain.stages)
    edges = [round(i * n / count) for i in range(count + 1)]
    for start, stop in pairwise(edges[:-1]):
        yield chain.nest(start, stop)
    yield from (Run(s, s + 1) for s in range(edges[-2], n))
