"""Find equations whose inner programs are worth planning: loops of known length, conditionals with deep branches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of, is_costly
from jaxsub.jaxpr.inline import may_report_again
from jaxsub.jaxpr.trace import Program, array_bytes

LEAST_SHARE = 0.01
"""Equations that make less than this share of all bytes that a program makes are not planned."""


def find_loops(program: Program) -> tuple[int, ...]:
    """Find the scans worth planning: differentiated, without effects but reports, of several steps, and not small."""
    return tuple(i for i in _large(program, "scan") if program.eqns[i].params["length"] > 1)


def find_conditionals(program: Program) -> tuple[int, ...]:
    """Find the conditionals worth planning: differentiated, with no effects but reports, not small, a branch deep."""
    return tuple(
        i
        for i in _large(program, "cond")
        if not program.eqns[i].params.get("branches_platforms")
        and len(program.eqns[i].params["branches"]) > 1
        and any(_is_deep(branch) for branch in program.eqns[i].params["branches"])
    )


def find_nested(program: Program) -> tuple[int, ...]:
    """Find loops and conditionals worth planning, in order."""
    return tuple(sorted((*find_loops(program), *find_conditionals(program))))


def _large(program: Program, primitive: str) -> Iterator[int]:
    graph = program.graph
    found = [n for n in graph.nodes if n.primitive == primitive]
    if not found:
        return
    made = [made_bytes(eqn) for eqn in program.eqns]
    for node in found:
        is_active = any(graph.values[v].is_differentiated for v in node.outputs)
        is_free = node.can_recompute and may_report_again(program.eqns[node.index])
        if is_active and is_free and made[node.index] > LEAST_SHARE * sum(made):
            yield node.index


def made_bytes(eqn: Any) -> int:
    """Sum the bytes that an equation makes: of a loop in all steps, of a conditional in its largest branch."""
    if (body := compat.inlined_body(eqn)) is not None:
        return sum(map(made_bytes, body.eqns))
    own: int = sum(map(array_bytes, eqn.outvars))
    if eqn.primitive.name == "scan":
        return own + int(eqn.params["length"]) * sum(map(made_bytes, eqn.params["jaxpr"].eqns))
    if eqn.primitive.name == "cond":
        return own + max(sum(map(made_bytes, branch.eqns)) for branch in eqn.params["branches"])
    return own


def _is_deep(branch: Any) -> bool:
    """Tell whether a branch has a loop or a costly equation: then a region in it may save what is costly."""
    return any(is_costly(eqn) or eqn.primitive.name == "scan" for eqn in _everywhere(branch))


def _everywhere(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            yield from (inner for body in bodies_of(eqn) for inner in _everywhere(body))
        else:
            yield eqn
