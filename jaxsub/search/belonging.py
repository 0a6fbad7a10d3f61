"""Whether a plan that was read from a file or a cache holds together on the program it is to be used on.

A program and a plan go in; faults come out, in words. A plan that a planner made has none. One that was changed,
damaged or made up may name values that are not there, wrap what has to run once, or run a loop in blocks that it does
not have: what `jaxsub.emission.emit` would stumble over, or obey at a price, is found before anything is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from jaxsub.core.decisions import Conditional, ControlFlow, Inside, Loop, Segment, is_saving, walk
from jaxsub.core.errors import PlanMismatchError
from jaxsub.core.plan import MOST_FAULTS, Plan, segment_faults
from jaxsub.core.tuning import TUNING
from jaxsub.emission.folding import in_slices
from jaxsub.emission.scans import body_of, body_program, branch_programs
from jaxsub.jaxpr.inline import may_report_again
from jaxsub.jaxpr.trace import Program


def require_belonging(program: Program, plan: Plan) -> Plan:
    """Refuse a plan that does not hold together on a program of its fingerprint; other programs are `emit`'s matter."""
    if plan.fingerprint == program.fingerprint and (faults := plan_faults(program, plan)):
        raise PlanMismatchError(
            f"The plan bears this function's fingerprint and does not fit it: {'; '.join(faults)}. It was changed "
            "after it was made: make a new one with jaxsub.plan.",
            plan_fingerprint=plan.fingerprint,
            function_fingerprint=program.fingerprint,
        )
    return plan


def plan_faults(program: Program, plan: Plan) -> list[str]:
    """The first of what is wrong with a plan of a program; empty where nothing is."""
    try:
        folded, _ = in_slices(program, plan)
    except PlanMismatchError as error:
        return [str(error)]
    if plan.n_nodes != len(folded.eqns):
        return [f"it has {plan.n_nodes} equations, not {len(folded.eqns)}"]
    inside = Inside(plan.segments, plan.barriers, plan.loops)
    return list(islice((*_measured_faults(plan), *_inside_faults(folded, inside)), MOST_FAULTS))


def _measured_faults(plan: Plan) -> Iterator[str]:
    """What two compiles of one gradient, under the plan and without it, cannot have reported."""
    ours, plain = plan.measurement, plan.plain_measurement
    if ours is None or plain is None:
        return
    if (ours.target, ours.output_bytes) != (plain.target, plain.output_bytes):
        yield "with and without it, it was measured for other targets or outputs"
    decisions = plan.segments, plan.barriers, plan.loops, plan.slices, plan.opened_regions, plan.clones
    if not any(decisions) and ours.temp_bytes != plain.temp_bytes:
        yield f"it changes nothing, and is said to change {plain.temp_bytes} bytes to {ours.temp_bytes}"


def _inside_faults(program: Program, inside: Inside, where: str = "") -> Iterator[str]:
    """What is wrong with how a program, a loop's body or a branch is said to run."""
    n_nodes, n_values = len(program.eqns), len(program.graph.values)
    yield from (where + fault for fault in segment_faults(inside.segments, 0, n_nodes))
    fences = inside.barriers
    if list(fences) != sorted(set(fences)) or not all(0 <= b < n_nodes for b in fences):
        yield f"{where}barriers are out of order, or outside the {n_nodes} equations"
    for segment in walk(inside.segments):
        if 0 <= segment.start < segment.stop <= n_nodes:
            yield from (where + fault for fault in _saved_faults(program, segment, fences, n_values))
    n_made = n_values - len(program.invars)
    if not all(0 <= v < n_made for v in inside.saved):
        yield f"{where}values are saved that are not among the {n_made} it makes"
    if inside.saved and (fences or inside.segments not in ((), (Segment(0, n_nodes),))):
        yield f"{where}values are saved beside segments or barriers inside"
    if any(inner.offloaded for outer in inside.segments for inner in walk(outer.children)):
        yield f"{where}a segment inside another saves values off the device"
    nodes = [way.node for way in inside.ways]
    if nodes != sorted(set(nodes)) or not all(0 <= node < n_nodes for node in nodes):
        yield f"{where}loops are out of order, or outside the {n_nodes} equations"
        return
    for way in inside.ways:
        yield from (f"{where}equation {way.node}: {fault}" for fault in _way_faults(program, way))
        if not where and is_saving(way) and not way.is_recomputed:
            yield f"equation {way.node}: values are saved inside it, with no region around them"


def _saved_faults(program: Program, segment: Segment, fences: Sequence[int], n_values: int) -> Iterator[str]:
    """A region saves what it makes, or off the device what it reads, and only where nothing stands inside it."""
    name, graph = f"segment {segment.start}:{segment.stop}", program.graph
    made = graph.made_by(segment.start, segment.stop)
    if set(segment.offloaded) - set(segment.saved):
        yield f"{name} moves values that it does not save"
    read = (
        {v for node in graph.nodes[segment.start : segment.stop] for v in node.inputs} if segment.offloaded else set()
    )
    there = {v for v in segment.offloaded if v in read}
    if outside := [v for v in segment.saved if v not in made and v not in there]:
        yield f"{name} saves values {outside[:4]}, of {n_values}, which it does not make"
    if segment.saved and (segment.children or any(segment.start < b < segment.stop for b in fences)):
        yield f"{name} saves values and has segments or barriers inside"


def _way_faults(program: Program, way: ControlFlow) -> Iterator[str]:
    eqn = program.eqns[way.node]
    wanted = "cond" if isinstance(way, Conditional) else "scan"
    if eqn.primitive.name != wanted:
        yield f"`{eqn.primitive.name}` is no `{wanted}`"
    elif not may_report_again(eqn) or not program.graph.nodes[way.node].can_recompute:
        yield "its effects must happen once"
    elif isinstance(way, Loop):
        yield from _loop_faults(program, eqn, way)
    elif len(way.branches) != len(eqn.params["branches"]):
        yield f"{len(way.branches)} branches, not {len(eqn.params['branches'])}"
    else:
        for number, (branch, inside) in enumerate(zip(branch_programs(program, way.node), way.branches, strict=True)):
            yield from _inside_faults(branch, inside, f"branch {number}, ")


def _loop_faults(program: Program, eqn: Any, loop: Loop) -> Iterator[str]:
    """What is wrong with numbers of steps; then, where those are right, with what is inside a step."""
    length, body = int(eqn.params["length"]), body_program(program, loop.node)
    if loop.is_unrolled and length * len(body.eqns) > max(TUNING.unrolled_equations, len(body.eqns)):
        yield f"{length} steps of {len(body.eqns)} equations are too many to be unrolled"
        return
    if loop.is_unrolled and loop != Loop(loop.node, inside=loop.inside, is_unrolled=True):
        yield "unrolled steps have no blocks, and no regions but those of the plan inside"
    sizes = loop.blocks
    if not all(a > b for a, b in zip((length + 1, *sizes), (*sizes, 0), strict=True)):
        yield f"{length} steps do not fall into blocks of {list(sizes)}"
    if not 0 <= loop.kept_steps <= length:
        yield f"of {length} steps {loop.kept_steps} are kept"
    body, _ = body_of(program, loop)
    n_made = len(body.graph.values) - len(body.invars)
    if not all(0 <= v < n_made for v in loop.kept_saved or ()):
        yield f"the last steps save values that are not among the {n_made} they make"
    yield from _inside_faults(body, loop.inside, "in a step, ")
