"""The choices for one step of a scan: what it saves, and how what is inside it runs.

A step keeps everything, or is a region that saves fewer and fewer named values of its body, by minimum cuts; those of
branches of its conditionals among them. Or there is a plan inside it, in a region around the step or without one.
`jaxsub.costs.scan_options` combines them with blocks of steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxsub.core.decisions import Inside, Loop
from jaxsub.costs import live_ranges as analytic
from jaxsub.costs.body_options import BodyChain, body_plans
from jaxsub.costs.cond_options import saving_ways
from jaxsub.devices.targets import Target
from jaxsub.emission.scans import body_program, step_of, with_loops
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.min_cut import Choice, choices
from jaxsub.partition.traced_run import TracedRun, trace_run, trace_step


@dataclass(frozen=True, slots=True)
class Step:
    """One choice for a step, as fields of a `Loop`, with its kept and transient bytes and recomputed FLOPs.

    Residuals of `kept_once_bytes` are saved once, not for each step.
    """

    fields: dict[str, Any]
    kept_bytes: int
    transient_bytes: int
    recompute_flops: float
    kept_once_bytes: int = 0


def steps_of(
    program: Program, node: int, inner_loops: Sequence[tuple[Loop, ...]], body_chain: BodyChain | None,
    gpu: Target | None,
) -> tuple[Step, ...]:  # fmt: skip
    """Find the choices for a step of a scan, the one that keeps everything first.

    Args:
        program: The program.
        node: The scan.
        inner_loops: How the loops inside its body may run, plainly first.
        body_chain: Prices the body cut into stages; with `None` no plan is made inside it.
        gpu: The GPU to compile for; `None` for a CPU.
    """
    eqn, body = program.eqns[node], body_program(program, node)
    n_consts, n_carry = (len(body.consts) + n if i == 0 else n for i, n in enumerate(compat.scan_sizes(eqn)))
    steps: list[Step] = []
    plain = trace_run(body, 0, len(body.eqns))
    for inner in inner_loops:
        changed = with_loops(body, inner)
        traced = trace_run(changed, 0, len(changed.eqns)) if inner else plain
        need = partial(analytic.backward_bytes, traced, gpu=gpu)
        steps += _steps(traced, inner, n_consts, n_carry, traced.flops - plain.flops, need)
    steps += _saving_in_branches(program, node, plain, gpu)
    if body_chain is not None:
        sizes = [value.n_bytes for value in body.graph.values[: len(body.invars)]]
        gradient_bytes = sum(sizes[i] for i in range(n_consts) if i in body.differentiated)
        carry_bytes = sum(sizes[n_consts : n_consts + n_carry])
        steps += _planned_steps(body, body_chain, carry_bytes, gradient_bytes, steps, eqn.params["length"])
    return tuple(steps)


def _steps(traced: TracedRun, inner: tuple[Loop, ...], n_consts: int, n_carry: int, inner_flops: float,
           need: Callable[[tuple[int, ...]], int]) -> Iterator[Step]:  # fmt: skip
    """Yield a step that keeps everything, then regions that save less and less."""
    inside = Inside(ways=inner)
    kept, once = _residual_bytes(traced, n_consts, n_carry)
    yield Step({"inside": inside}, kept, need(()), inner_flops, once)
    reads = zip(traced.inputs, traced.function.reads, strict=True)
    carry = {v for v, read in reads if n_consts <= read < n_consts + n_carry}
    for choice in reversed(_choices(traced)):
        flops = choice.recompute_flops + inner_flops
        fields = {"inside": replace(inside, saved=choice.saved), "is_recomputed": True}
        entry_bytes = sum(map(traced.bytes_of, carry & traced.read_with(choice.saved)))
        yield Step(fields, entry_bytes + choice.saved_bytes, need(choice.saved), flops)


def _choices(traced: TracedRun) -> tuple[Choice, ...]:
    """What a step may save: a carried value is stacked a second time when it is saved by name, so none is free."""
    return choices(replace(traced, free=frozenset()))


def _saving_in_branches(program: Program, node: int, run: TracedRun, gpu: Target | None) -> Iterator[Step]:
    """Yield regions that save values of branches of a step's conditionals too, less and less of them."""
    body = body_program(program, node)
    ways = tuple(saving_ways(body))
    if not ways:
        return
    plainly = trace_step(*step_of(program, Loop(node))[:2]).flops
    base = len(body.invars)
    for inner, choice, is_kept in itertools.product(ways, _choices(run), (False, True)):
        # what a conditional returns is cheap to make of what its branches save, yet for that alone all of it runs
        made = {v - base for way in inner for v in body.graph.nodes[way.node].outputs} if is_kept else ()
        saved = tuple(sorted({*choice.saved, *made}))
        fields: dict[str, Any] = {"inside": Inside(ways=inner, saved=saved), "is_recomputed": True}
        _, step, (n_consts, n_carry) = step_of(program, Loop(node, **fields))
        traced = trace_step(body, step)
        kept, once = _residual_bytes(traced, n_consts, n_carry)
        yield Step(fields, kept, analytic.backward_bytes(traced, (), gpu=gpu), traced.flops - plainly, once)


def _residual_bytes(traced: TracedRun, n_consts: int, n_carry: int) -> tuple[int, int]:
    """Bytes that a step keeps beside its constants and slices, and of what depends on constants alone."""
    reads = dict(zip(traced.inputs, traced.function.reads, strict=True))
    carry = {v for v, read in reads.items() if n_consts <= read < n_consts + n_carry}
    stepwise = traced.made_from([v for v, read in reads.items() if read >= n_consts])
    kept = {r: traced.bytes_of(r) for r in traced.residuals if compat.is_var(r) and r not in reads.keys() - carry}
    once = sum(n_bytes for r, n_bytes in kept.items() if r not in stepwise)
    return sum(kept.values()) - once, once


def _planned_steps(body: Program, body_chain: BodyChain, carry_bytes: int, gradient_bytes: int, plain: Sequence[Step],
                   length: int) -> Iterator[Step]:  # fmt: skip
    """Yield steps with a plan inside, in a region around the step and without one."""
    nothing_saved = {"inside": Inside(), "is_recomputed": True}
    flops = next(s.recompute_flops for s in plain if s.fields == nothing_saved)
    for found in body_plans(replace(body, is_repeated=True), body_chain, times=length):
        transient = found.transient_bytes - gradient_bytes  # constants' gradients, which are counted beside a step
        if found.is_region:
            fields = {"inside": found.inside, "is_recomputed": True}
            yield Step(fields, carry_bytes, transient, flops + found.recompute_flops)
        else:
            yield Step({"inside": found.inside}, carry_bytes + found.kept_bytes, transient, found.recompute_flops)
