"""The bodies of loops and the branches of conditionals, as programs: found by their place, and changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.core

from jaxsub.emission.scans import body_program, branch_programs
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program

PLANNED = ("scan", "cond")
"""Equations whose bodies are planned."""


def bodies_of_node(program: Program, node: int) -> tuple[Program, ...]:
    """Make programs of the body of a loop, or the branches of a conditional."""
    is_loop = program.eqns[node].primitive.name == "scan"
    return (body_program(program, node),) if is_loop else branch_programs(program, node)


def with_bodies(program: Program, node: int, change: Callable[[Program, tuple[int, int]], Any]) -> Any:
    """Make a loop or conditional whose bodies are changed: each, with the node and its number, to a jaxpr."""
    eqn, closed = program.eqns[node], []
    for number, body in enumerate(bodies_of_node(program, node)):
        call = partial(jax.core.eval_jaxpr, change(body, (node, number)), (), *body.consts)
        closed.append(jax.make_jaxpr(call)(*[compat.shape_of(v.aval) for v in body.invars[len(body.consts) :]]))
    bodies = {"jaxpr": closed[0]} if eqn.primitive.name == "scan" else {"branches": tuple(closed)}
    return eqn.replace(params={**eqn.params, **bodies})


def program_within(program: Program, within: Sequence[tuple[int, int]]) -> Program:
    """Find the body that contains a run in slices."""
    for node, number in within:
        program = bodies_of_node(program, node)[number]
    return program
