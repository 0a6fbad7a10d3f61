"""Replace runs of equations by one equation each, which runs them in slices of an independent axis.

Each is a `jit` equation, so that planners, regions and the cost model treat it like any other node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.core

from jaxsub.core.decisions import UNSPLIT, Inside, Slices
from jaxsub.core.errors import PlanMismatchError
from jaxsub.core.plan import Plan, segment_faults
from jaxsub.emission.bodies import PLANNED, bodies_of_node, program_within, with_bodies
from jaxsub.emission.chunks import jaxpr_of_slice, sliced
from jaxsub.emission.forms import planned_form
from jaxsub.emission.regions import with_regions
from jaxsub.emission.scans import with_loops
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axes import follow
from jaxsub.jaxpr.axis import Axis, NotIndependent
from jaxsub.jaxpr.derivative_rules import is_inexact
from jaxsub.jaxpr.inline import flatten_jaxpr
from jaxsub.jaxpr.new_equations import IN_SLICES, call_eqn
from jaxsub.jaxpr.own_rules import rules_of
from jaxsub.jaxpr.trace import Program, program_of, remembered


def run_of(program: Program, start: int, stop: int) -> tuple[tuple[Any, ...], list[Any], list[Any]]:
    """The equations of a run, the variables they read and do not make, and those that are read later."""
    graph, eqns = program.graph, program.eqns[start:stop]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = dict.fromkeys(a for eqn in eqns for a in eqn.invars if compat.is_var(a) and a not in made)
    last = graph.last_uses()
    variables = [v for eqn in eqns for v in eqn.outvars]
    returns = [v for i, v in zip(graph.made_by(start, stop), variables, strict=True) if last[i] >= stop]
    return eqns, list(reads), returns


def still_of(program: Program, start: int, stop: int) -> set[Any]:
    """The variables that a run reads, does not make, and that have no tangents."""
    read = (program.graph.values[v] for v in program.graph.read_by(start, stop))
    return {program.variable(value.index) for value in read if not value.is_differentiated}


def auxiliary_of(program: Program, start: int, stop: int) -> set[Any]:
    """The variables of a run that are results of a loss beside it, and read by nothing behind the run."""
    if program.loss is None:
        return set()
    made = {v for eqn in program.eqns[start:stop] for v in eqn.outvars}
    read = {a for eqn in program.eqns[stop:] for a in eqn.invars if compat.is_var(a)}
    loss = program.outvars[program.loss]
    return {v for v in program.outvars if compat.is_var(v) and v in made and v is not loss} - read


def axis_of(program: Program, slices: Slices) -> Axis:
    """Follow the axis along which a run is sliced.

    Raises:
        NotIndependent: If it is not independent.
    """
    return _axis_of(program, slices.start, slices.stop, slices.value, slices.dim)


@remembered
def _axis_of(program: Program, start: int, stop: int, value: int, dim: int) -> Axis:
    eqns, reads, returns = run_of(program, start, stop)
    return follow(eqns, reads, returns, program.variable(value), dim, still_of(program, start, stop))


def carried_over(program: Program, slices: Slices) -> Slices:
    """A run of a program of the same form, for another batch, in slices as large as they were.

    Raises:
        NotIndependent: If it is not independent here.
    """
    length = axis_of(program_within(program, slices.within), slices).length
    parts = slices.parts if length % slices.parts == 0 else 1
    least = max(2, -(-length // slices.size))
    count = least if parts == 1 else next((c for c in range(least, length + 1) if length % (c * parts) == 0), least)
    is_split = parts > 1 and length % (count * parts) == 0
    return replace(slices, length=length, count=count, split=slices.split if is_split else UNSPLIT)


def program_of_slice(program: Program, slices: Slices) -> Program:
    """Make a program of one slice: a function of its start, its parts, and the values read whole.

    Its loss is the one scalar that is summed over slices; it has the differentiated inputs of the run.
    """
    return _program_of_slice(program, replace(slices.executed, inside=Inside()))


@remembered
def _program_of_slice(program: Program, slices: Slices) -> Program:
    axis = axis_of(program, slices)
    closed, results = jaxpr_of_slice(axis, run_of(program, slices.start, slices.stop)[2], slices.count, slices.split)
    eqns, invars, outvars, consts = flatten_jaxpr(closed)
    active = {program.variable(v.index) for v in program.graph.values if v.is_differentiated}
    given = [None, *(v for v, _ in axis.cut), *axis.reads]
    positions = {len(consts) + i for i, v in enumerate(given) if v in active}
    losses = [i for i, v in enumerate(results) if v.aval.shape == () and is_inexact(v)]
    names = ["const"] * len(consts) + ["start", *("" for _ in given[1:])]
    tree = jax.tree.structure(tuple(results))
    part = program_of(eqns, invars, outvars, consts, positions, losses[0] if len(losses) == 1 else None, tree, names,
                      closed)  # fmt: skip
    return replace(program.part(part), is_repeated=True)


def with_slices(program: Program, slices: Sequence[Slices]) -> Program:
    """Replace each of these runs by one equation that runs it in slices.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsub.jaxpr.trace import trace
        >>> program = trace(lambda w, x: jnp.tanh(x @ w).sum(), (jnp.ones((2, 3)), jnp.ones((4, 2))), {})
        >>> [e.primitive.name for e in with_slices(program, [Slices(0, 3, 1, 0, 2)]).eqns]
        ['jit']
    """
    return _with_slices(program, tuple(run.executed for run in slices)) if slices else program


@remembered
def _with_slices(program: Program, slices: tuple[Slices, ...]) -> Program:
    given, eqns, at = list(program.eqns), list[Any](), 0
    with compat.without_mesh():  # as planned, also where a plan is read under the user's `jax.set_mesh`
        for node in {run.within[0][0] for run in slices if run.within}:
            given[node] = _with_bodies_in_slices(program, node, [run for run in slices if run.within[:1]])
        for run in sorted((run for run in slices if not run.within), key=lambda s: s.start):
            eqns += [*given[at : run.start], _folded(program, run)]
            at = run.stop
    eqns += given[at:]
    return program.with_eqns(eqns)


def _with_bodies_in_slices(program: Program, node: int, runs: Sequence[Slices]) -> Any:
    """Make a loop or conditional run parts of its bodies in slices."""

    def in_slices(body: Program, at: tuple[int, int]) -> Any:
        mine = [replace(run, within=run.within[1:]) for run in runs if run.within[0] == at]
        found = with_slices(body, mine)
        return compat.make_jaxpr_of(found.eqns, found.invars, found.outvars)

    return with_bodies(program, node, in_slices)


def _planned_slice(program: Program, slices: Slices) -> Callable[..., Any] | None:
    """Make the function of a slice with its planned regions and loops; `None` if there are none."""
    inside = slices.inside
    if inside == Inside():
        return None
    part = program_of_slice(program, slices)
    function = with_regions(with_loops(part, inside.ways), inside.segments, inside.barriers, scope="")
    return lambda *args: function(*part.consts, *args)


def in_slices(program: Program, plan: Plan) -> tuple[Program, Plan]:
    """Replace a plan's runs in slices by one equation each; return that program and the rest of the plan.

    The function's own regions are opened where the plan was made without them.

    Raises:
        PlanMismatchError: If the plan has the program's fingerprint, but its slices do not fit it.
    """
    program, plan = planned_form(program, plan)
    if not plan.slices or plan.fingerprint != program.fingerprint:
        return program, plan
    if faults := list(_faults(program, plan.slices)):
        raise PlanMismatchError(
            f"The plan's runs in slices do not fit this function: {'; '.join(faults)}. "
            "Make a new plan with jaxsub.plan.",
            plan_fingerprint=plan.fingerprint,
            function_fingerprint=program.fingerprint,
        )
    folded = with_slices(program, plan.slices)
    return folded, plan.replace(fingerprint=folded.fingerprint, slices=(), equations="")


def _faults(program: Program, slices: Sequence[Slices]) -> Iterator[str]:
    for within in dict.fromkeys(run.within for run in slices if run.within):
        if fault := _within_fault(program, slices, within):
            yield fault
            return
        mine = [replace(run, within=()) for run in slices if run.within == within]
        yield from (f"within {within}: {fault}" for fault in _faults(program_within(program, within), mine))
    at = 0
    for run in (run for run in slices if not run.within):
        name = f"{run.start}:{run.stop}"
        if not at <= run.start < run.stop <= len(program.eqns) or run.count < 2:
            yield f"{name} in {run.count} slices does not follow on equation {at}"
            return
        at, values = run.stop, program.graph.values
        if not 0 <= run.value < len(values) or not 0 <= run.dim < len(values[run.value].shape):
            yield f"{name} reads no dimension {run.dim} of value {run.value}"
            continue
        if program.variable(run.value) not in run_of(program, run.start, run.stop)[1]:
            yield f"{name} does not read value {run.value}"
            continue
        try:
            if run.inside != Inside():
                inside, part = run.inside, program_of_slice(program, run)
                yield from (
                    f"{name}, in a slice: {fault}" for fault in segment_faults(inside.segments, 0, len(part.eqns))
                )
            if run.count > (axis := axis_of(program, run)).length:
                yield f"{name} in {run.count} slices of an axis of {axis.length}"
        except NotIndependent as why:
            yield f"{name} cannot run in slices: {why}"
        except ValueError as why:
            yield f"{name}: {why}"


def _within_fault(program: Program, slices: Sequence[Slices], within: Sequence[tuple[int, int]]) -> str:
    """Say what is wrong with the body that a run is in."""
    if any(run.start <= within[0][0] < run.stop for run in slices if not run.within):
        return f"within {within}: equation {within[0][0]} runs in slices itself"
    for node, number in within:
        is_there = 0 <= node < len(program.eqns) and program.eqns[node].primitive.name in PLANNED
        if not is_there or not 0 <= number < len(bodies := bodies_of_node(program, node)):
            return f"within {within}: equation {node} holds no body {number}"
        program = bodies[number]
    return ""


def _folded(program: Program, slices: Slices) -> Any:
    eqns, reads, returns = run_of(program, slices.start, slices.stop)
    one = _planned_slice(program, slices)
    auxiliary = auxiliary_of(program, slices.start, slices.stop)
    function = sliced(axis_of(program, slices), reads, returns, slices.count, one, slices.split, auxiliary,
                      rules_of(program))  # fmt: skip

    def run(*args: Any) -> list[Any]:
        return list(function(*args))

    run.__name__ = IN_SLICES
    call = call_eqn(run, [compat.shape_of(v.aval) for v in reads])
    source = max(eqns, key=lambda eqn: sum(getattr(v.aval, "size", 0) for v in eqn.outvars)).source_info
    if (len(call.invars), len(call.outvars)) != (len(reads), len(returns)):
        raise AssertionError(f"in slices the run {call.invars} -> {call.outvars}, it was {reads} -> {returns}")
    return call.replace(invars=reads, outvars=returns, source_info=source)
