"""Recompute runs of equations in front of later ones, so that an inner backward pass reads what is not saved for it.

Between two passes everything that a clone reads goes through one barrier, together with what is alive there of the way
down. Without it XLA would merge the clone with the run, or run it at once. Its transpose does the same for the
outer gradient, as gradient barriers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsub.core.decisions import Clone
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.inline import renamed, with_new_names
from jaxsub.jaxpr.new_equations import barrier_eqn
from jaxsub.jaxpr.trace import Program, remembered


def with_clones(program: Program, clones: Sequence[Clone]) -> Program:
    """Recompute runs where the plan says; `ValueError` if they are no runs of the program."""
    return _with_clones(program, tuple(replace(clone, extra_share=0.0) for clone in clones)) if clones else program


@remembered
def _with_clones(program: Program, clones: tuple[Clone, ...]) -> Program:
    n_nodes = len(program.eqns)
    if faults := [f"{c.start}:{c.stop} before {c.before}" for c in clones if c.faults() or c.before >= n_nodes]:
        raise ValueError(f"runs to recompute that are none of these {n_nodes} equations: {', '.join(faults)}")
    waiting = {v for clone in clones for v in _late(program, clone)}
    names: dict[Any, Any] = {}
    made: list[Any] = []
    for node, eqn in enumerate(program.eqns):
        for clone in (clone for clone in clones if clone.before == node):
            made += _cloned(program, clone, waiting, names)
        made.append(eqn.replace(invars=[renamed(names, a) for a in eqn.invars]) if names else eqn)
    return program.with_eqns(made, [renamed(names, v) for v in program.outvars])


def _cloned(program: Program, clone: Clone, waiting: set[Any], names: dict[Any, Any]) -> list[Any]:
    """The equations of a clone, its barrier first; `names` gets what later equations read instead."""
    late = _late(program, clone)
    eqns, wanted = [], set(late)
    for eqn in reversed(program.eqns[clone.start : clone.stop]):
        if not wanted.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            wanted.update(a for a in eqn.invars if compat.is_var(a))
    inside = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(a for eqn in reversed(eqns) for a in eqn.invars if compat.is_var(a) and a not in inside)
    fenced = [v for v in read if not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)]
    alive = [v for v in _alive(program, clone) if v not in waiting and v not in read]
    invars = [renamed(names, v) for v in (*fenced, *alive)]
    outvars = [compat.new_var(v.aval) for v in invars]
    mine = {v: renamed(names, v) for v in read} | dict(zip(fenced, outvars, strict=False))
    names.update(zip(alive, outvars[len(fenced) :], strict=True))
    barrier = [barrier_eqn().replace(invars=invars, outvars=outvars)] if invars else []
    copies = [with_new_names(eqn, mine) for eqn in reversed(eqns)]
    names.update((v, mine[v]) for v in late)
    return [*barrier, *copies]


def _late(program: Program, clone: Clone) -> list[Any]:
    """What a run makes that is read from the clone on, and not between the two."""
    graph = program.graph
    values = (graph.values[v] for v in graph.made_by(clone.start, clone.stop) if v not in graph.output_set())
    reads = ((v, [c for c in v.consumers if c >= clone.stop]) for v in values)
    return [program.variable(v.index) for v, late in reads if late and min(late) >= clone.before]


def _alive(program: Program, clone: Clone) -> list[Any]:
    """What was made behind the run and is read from the clone on, as far as a gradient may flow through it."""
    graph, last = program.graph, program.graph.last_uses()
    made = range(graph.first_value(clone.stop), graph.first_value(clone.before))
    variables = [program.variable(v) for v in made if last[v] >= clone.before and v not in graph.output_set()]
    return [v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
