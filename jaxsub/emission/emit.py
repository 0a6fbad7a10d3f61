"""Emit a function from a `Program` and a `Plan`: `jax.checkpoint` regions and gradient barriers.

Loops and conditionals are rewritten as the plan says (`jaxsub.emission.scans`), then the flat equations become regions
(`jaxsub.emission.regions`). Equations that must run once are never in a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.core

from jaxsub.core.decisions import ControlFlow, Inside, Loop, Segment, saving_in_nests
from jaxsub.core.errors import PlanMismatchError, UnsupportedError
from jaxsub.core.plan import DIGITS, Plan
from jaxsub.emission.folding import in_slices
from jaxsub.emission.forms import numbering
from jaxsub.emission.regions import with_regions
from jaxsub.emission.scans import with_loops
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.differences import first_difference
from jaxsub.jaxpr.trace import Program


def emit(program: Program, plan: Plan) -> Callable[..., list[Any]]:
    """Make the function a plan describes, of the program's flat inputs, constants first, that returns its flat outputs.

    The plan may be of a program that differs only in the order of its equations. `PlanMismatchError` if it is of
    another; `UnsupportedError` lists equations in segments that must run once, and values that JAX would recompute in
    nests.
    """
    check(program, plan)
    program, plan = in_slices(program, plan)
    return with_regions(with_loops(program, plan.loops), plan.segments, plan.barriers)


def as_traced(program: Program) -> Callable[..., Any]:
    """Make the function of a program's flat inputs as JAX traced it, without inlining calls.

    A compiler may order the equations of a call differently from inlined ones: to measure the user's own function, or
    one that has regions already, calls must stay calls.
    """
    n_consts = len(program.traced.constvars)

    def call(*inputs: Any) -> Any:
        return jax.core.eval_jaxpr(program.traced, inputs[:n_consts], *inputs[len(program.consts) :])

    return call


def check(program: Program, plan: Plan) -> None:
    """Refuse a plan of another program, or one that this program or this JAX cannot run; raises as `emit` does."""
    folded, _ = in_slices(program, plan)
    if plan.fingerprint != program.fingerprint or plan.n_nodes != len(folded.eqns):
        there = numbering(program, plan)
        raise PlanMismatchError(
            f"The plan was made for another function: its fingerprint is {plan.fingerprint} "
            f"({len(plan.equations) // DIGITS or plan.n_nodes} equations), this function's is {program.fingerprint} "
            f"({len(there.eqns)} equations). "
            f"{first_difference(there, plan.equations)}Shapes, dtypes and static arguments count. "
            "Make a new plan with jaxsub.plan.",
            plan_fingerprint=plan.fingerprint,
            function_fingerprint=program.fingerprint,
        )
    nodes = folded.graph.nodes
    faults = [nodes[i] for s in plan.segments for i in range(s.start, s.stop) if not nodes[i].can_recompute]
    if faults:
        lines = "; ".join(f"equation {n.index} `{n.primitive}` at {n.source or 'an unknown line'}" for n in faults)
        raise UnsupportedError(f"These must run exactly once and cannot be in a recomputed segment: {lines}.")
    nested = list(saving_in_nests(Inside(plan.segments, ways=plan.loops)))
    if nested and not compat.saves_in_nests():
        where = ", ".join(map(_words, nested))
        raise UnsupportedError(
            f"With jax_remat3, JAX recomputes the values that these save inside other regions: {where}. Make a new "
            "plan with jaxsub.plan, or turn jax_remat3 off."
        )


def _words(saving: Segment | ControlFlow) -> str:
    if isinstance(saving, Segment):
        return f"{saving.start}:{saving.stop}"
    return f"{'steps of loop' if isinstance(saving, Loop) else 'branches of equation'} {saving.node}"


def keep_out(plan: Plan, nodes: Sequence[int]) -> Plan:
    """Split a plan's segments so that none of them holds a node that must run exactly once."""
    segments = tuple(piece for segment in plan.segments for piece in _split(segment, sorted(nodes)))
    return plan if segments == plan.segments else plan.replace(segments=segments)


def _split(segment: Segment, nodes: Sequence[int]) -> Iterator[Segment]:
    inside = [n for n in nodes if segment.start <= n < segment.stop]
    if not inside:
        yield segment
        return
    if segment.children:  # stages recomputed twice inside are now recomputed once, part by part
        starts = [segment.start, *(c.stop for c in segment.children)]
        stops = [*(c.start for c in segment.children), segment.stop]
        gaps = [Segment(a, b) for a, b in zip(starts, stops, strict=True) if a < b]
        for part in sorted((*gaps, *segment.children), key=lambda s: s.start):
            yield from _split(part, inside)
        return
    for a, b in zip([segment.start, *(n + 1 for n in inside)], [*inside, segment.stop], strict=True):
        if a < b:
            yield Segment(a, b)
