"""Loops and slices opened: what one step saves and recomputes, with the user's names, and what is live inside it.

A program and a plan of it go in, the plan with its `Steps` comes out. One step, as the plan runs it, is traced with its
backward pass; regions in it are opened, so that what they recompute stands where it is executed. Kernels and their live
ranges are those that `jaxsub.costs` prices by. Nothing is compiled. Steps inside the branches of conditionals are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from jaxsub.core.decisions import ControlFlow, Inside, Loop, Slices
from jaxsub.core.disk_cache import Store, code_digest, key_of
from jaxsub.core.graph import Graph, Node
from jaxsub.core.plan import Plan
from jaxsub.core.steps import Holding, Steps
from jaxsub.core.timeline import Piece, StageTimeline, Step
from jaxsub.costs.fusion import Lives
from jaxsub.devices.targets import Target
from jaxsub.emission.bodies import program_within
from jaxsub.emission.folding import in_slices, program_of_slice
from jaxsub.emission.forms import planned_form
from jaxsub.emission.regions import with_regions
from jaxsub.emission.scans import step_of, with_loops
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import Flops, flops_of
from jaxsub.jaxpr.identity import of_jax
from jaxsub.jaxpr.inline import scope_of
from jaxsub.jaxpr.trace import Program, aval_bytes
from jaxsub.partition.inner_programs import find_loops
from jaxsub.partition.traced_run import TracedRun, trace_step

MOST_NAMED = 24
"""How many of the equations that a step recomputes are named."""

MOST_STEPS = 400
"""Of a step with more kernels than this no timeline is kept."""

SAME = ("name", "optimization_barrier", "reduce_precision")
"""What hands a value on as it is."""

PARTS = ("slice", "squeeze", "reshape", "dynamic_slice", "broadcast_in_dim")
"""What only takes a part or a view of a value."""


def opened(program: Program, plan: Plan, target: Target, store: Store | None) -> Plan:
    """The plan with its loops and slices opened; a store keeps that between processes, with the program's lines and
    scopes.
    """
    program, followed = planned_form(program, plan)
    if not program.differentiated or not (plan.slices or plan.loops or find_loops(program)):
        return plan
    lines = [(node.source, node.scope) for node in _everywhere(program.graph)]
    what = program.fingerprint, target.name, plan.loops, plan.slices, lines
    key = key_of("opened", code_digest(), of_jax(), *map(repr, what))
    found: _Opened | None = store.get(key, _Opened) if store is not None else None
    if found is None or any(steps.faults() for steps in found.steps):
        folded, bare = in_slices(program, followed)
        slices = (_opened_slices(program, run, target) for run in plan.slices)
        found = _Opened((*slices, *_loops(folded, bare.loops, target)))
        if store is not None:
            store.put(key, found)
    return plan.replace(steps=found.steps)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What was opened, as it is kept."""

    steps: tuple[Steps, ...]


def _everywhere(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from _everywhere(body)


def _loops(program: Program, ways: Sequence[ControlFlow], target: Target) -> Iterator[Steps]:
    """Yield the loops of a program worth planning, in order; one without a decision runs as it is."""
    told = {way.node: way for way in ways if isinstance(way, Loop)}
    for node in sorted({*told, *find_loops(program)}):
        yield _opened_loop(program, told.get(node, Loop(node)), target)


def _opened_loop(program: Program, loop: Loop, target: Target) -> Steps:
    body, step, n_given = step_of(program, loop)
    n_consts, n_carry = n_given
    traced = trace_step(body, step)
    carry = range(n_consts, n_consts + n_carry)
    saved, carried = _saved(traced, carry), sum(aval_bytes(body.invars[i].aval) for i in carry)
    length = 1 if loop.is_unrolled else program.eqns[loop.node].params["length"]
    n = length - loop.kept_steps
    sizes = [n, *(b for b in loop.blocks if b < n)]
    stored = sum(-(-a // b) * carried for a, b in pairwise(sizes)) + sizes[-1] * sum(h.n_bytes * h.count for h in saved)
    if loop.kept_steps:
        last = Loop(loop.node, is_recomputed=loop.kept_saved is not None, inside=Inside(saved=loop.kept_saved or ()))
        kept = _saved(trace_step(*step_of(program, last)[:2]), carry)
        stored += loop.kept_steps * sum(h.n_bytes * h.count for h in kept)
    node = program.graph.nodes[loop.node]
    inner = tuple(_loops(body, loop.inside.ways, target)) if not loop.is_unrolled else ()
    words = " ".join(part for part in (f"{node.scope}:" if node.scope else "", "scan", node.source) if part)
    return _steps("loop", loop.node, words, length, body, traced, target, saved, stored, inner)


def _opened_slices(program: Program, run: Slices, target: Target) -> Steps:
    program, run = program_within(program, run.within), replace(run, within=())
    part, inside = program_of_slice(program, run), run.inside
    function = with_regions(with_loops(part, inside.ways), inside.segments, inside.barriers, scope="")
    traced = trace_step(part, function)
    saved = _saved(traced, range(0))
    inner = tuple(_loops(part, inside.ways, target))
    return _steps("slices", run.start, run.label, run.count, part, traced, target, saved, 0, inner)


def _steps(kind: str, node: int, label: str, length: int, body: Program, traced: TracedRun, target: Target,
           saved: tuple[Holding, ...], stored_bytes: int, inner: tuple[Steps, ...]) -> Steps:  # fmt: skip
    forward = max(sum(n.flops for n in body.graph.nodes), 1.0)
    again = _again(traced)
    shares: dict[str, float] = {}
    for eqn in again:
        shares[_maker_words(eqn)] = shares.get(_maker_words(eqn), 0.0) + flops_of(eqn).weighted / forward
    rows = sorted(shares.items(), key=lambda row: -row[1])[:MOST_NAMED]
    share = sum((flops_of(eqn) for eqn in again), Flops()).weighted / forward
    return Steps(kind, node, label, length, saved, stored_bytes, tuple(rows), len(body.eqns), share,
                 _timeline(traced, again, target.gpu), inner)  # fmt: skip


def _saved(traced: TracedRun, carry: range) -> tuple[Holding, ...]:
    """What is stored anew for each step: residuals that it makes or is given by the step before it."""
    makers = {v: eqn for eqn in traced.forward for v in eqn.outvars}
    given = {v: i for i, v in enumerate(traced.inputs)}
    residuals = (_origin(r, makers) for r in traced.residuals if compat.is_var(r) and hasattr(r.aval, "dtype"))
    count: dict[tuple[str, int], int] = {}
    for atom in dict.fromkeys(residuals):
        if atom in given and given[atom] not in carry:
            continue
        label = f"carry {_shape(atom)}" if atom in given else _value_words(atom, makers)
        count[label, aval_bytes(atom.aval)] = count.get((label, aval_bytes(atom.aval)), 0) + 1
    rows = (Holding(label, n_bytes, n) for (label, n_bytes), n in count.items())
    return tuple(sorted(rows, key=lambda h: -h.n_bytes * h.count))


def _origin(atom: Any, makers: dict[Any, Any]) -> Any:
    """The value that an atom is: behind barriers and names, and behind parts and views of what a step is given."""
    value = _behind(atom, makers, SAME)
    whole = _behind(value, makers, (*SAME, *PARTS))
    return value if whole in makers else whole


def _behind(atom: Any, makers: dict[Any, Any], names: Sequence[str]) -> Any:
    """What an atom is read from, through equations of these names."""
    while atom in makers and (eqn := makers[atom]).primitive.name in names:
        read = eqn.invars[eqn.outvars.index(atom) if eqn.primitive.name == "optimization_barrier" else 0]
        if not compat.is_var(read):
            break
        atom = read
    return atom


def _again(traced: TracedRun) -> list[Any]:
    """Find the recomputed equations of a backward pass: those that depend on no cotangent."""
    waiting = set(traced.cotangents)
    found = []
    for eqn in traced.backward:
        if eqn.primitive.name == "optimization_barrier":
            waiting.update(v for a, v in zip(eqn.invars, eqn.outvars, strict=True) if compat.is_var(a) and a in waiting)
        elif any(a in waiting for a in eqn.invars if compat.is_var(a)):
            waiting.update(eqn.outvars)
        elif any(compat.is_var(a) for a in eqn.invars):
            found.append(eqn)
    return found


def _timeline(traced: TracedRun, again: Sequence[Any], gpu: Target | None) -> StageTimeline | None:
    """What is live while a step runs forward, and later backward, kernel by kernel, beside what it is given.

    A loop stores residuals between the two passes: no kernel is fused across.
    """
    residuals = [r for r in traced.residuals if compat.is_var(r)]
    passes = (
        Lives(traced.forward, traced.inputs, (*traced.returned, *residuals), {}, gpu is None, gpu),
        Lives(traced.backward, traced.backward_inputs, traced.backward_outputs, {}, gpu is None, gpu),
    )
    kernels = [(kernel, lives.eqns[min(kernel.position, len(lives.eqns) - 1)])
               for lives in passes for kernel in sorted(lives.kernels, key=lambda k: k.position)]  # fmt: skip
    if not 0 < len(kernels) <= MOST_STEPS:
        return None
    stored = {v: passes[0].base(r) for v, r in traced.aliases.items()}
    repeated, turn = {id(eqn) for eqn in again}, len(passes[0].kernels)
    last = {stored.get(b, b): i for i, (k, _) in enumerate(kernels) for b in (*k.makes, *k.reads)}
    last |= {passes[0].base(r): max(last.get(passes[0].base(r), 0), turn) for r in residuals}
    makers = {v: eqn for eqn in (*traced.forward, *traced.backward) for v in eqn.outvars}
    steps = []
    pieces = [Piece("crossing", turn, last[v] + 1, 0, 1, aval_bytes(v.aval), (), "cotangents on their way")
              for v in traced.cotangents if last.get(v, -1) >= turn]  # fmt: skip
    for i, (kernel, eqn) in enumerate(kernels):
        phase = "forward" if i < turn else "recompute" if id(eqn) in repeated else "backward"
        steps.append(Step(phase, i, i + 1, flops_of(eqn).weighted, kernel.inner_bytes))
        for buffer, n_bytes in zip(kernel.makes, kernel.n_bytes, strict=True):
            atom = buffer[0] if isinstance(buffer, tuple) else buffer
            label = _value_words(atom, makers) if atom in makers else _maker_words(eqn)
            if n_bytes:
                pieces.append(Piece("kept", i, min(last[buffer] + 1, len(kernels)), i, i + 1, n_bytes, (), label))
    forward = sum(s.flops for s in steps if s.phase == "forward")
    labels = tuple(_maker_words(eqn) for _, eqn in kernels)
    return StageTimeline(tuple(steps), tuple(pieces), (), forward, tuple(range(len(kernels) + 1)), labels)


def _shape(atom: Any) -> str:
    return f"{atom.aval.dtype}[{','.join(map(str, atom.aval.shape))}]"


def _value_words(atom: Any, makers: dict[Any, Any]) -> str:
    """A value in words: module path, the user's name or else its primitive, dtype and shape, source line."""
    value = _behind(atom, makers, SAME)
    eqn = makers.get(value, makers[atom])
    given = ((e, compat.given_name(e)) for e in makers.values() if e.primitive.name == "name")
    names = [name for e, name in given
             if name and not name.startswith("jaxsub_") and _behind(e.outvars[0], makers, SAME) is value]  # fmt: skip
    return _maker_words(eqn, f"{names[0] if names else eqn.primitive.name} {_shape(atom)}")


def _maker_words(eqn: Any, what: str = "") -> str:
    scope = scope_of(str(eqn.source_info.name_stack))
    words = (f"{scope}:" if scope else "", what or eqn.primitive.name, compat.source_of(eqn))
    return " ".join(word for word in words if word)
