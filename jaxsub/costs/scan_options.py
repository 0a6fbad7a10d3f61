"""Price the options of a scan: the choices that a planner has for a loop.

A scan over L steps is L equal stages. A choice for it consists of: the values that a step saves, from all to named
values of its body (the minimum cut of `jaxsub.partition.min_cut`, on the body) to its carry alone; the sizes of nested
blocks of steps, each recomputed from its first carry; how many of the last steps are outside all blocks and are not
recomputed; and a plan inside the body, of its stages and of the loops in it. The cost model is:

    kept        carries at the starts of the outermost blocks, and the residuals of the steps outside them: of a region
                the carries that it reads; what depends on constants alone once, for JAX takes it out of the loop; on a
                CPU the zeros too in which gradients are stacked and summed, which are made when the program starts
    transient   the kept; for each level the carries it starts from and the gradients of slices of xs that it copies;
                the transient of one step's backward pass; the cotangents of ys that come in, and the gradients that go
                out and are no results of the program
    recompute   a forward pass for each level, of which what depends on constants alone runs once a block; and the
                FLOPs whose results a step does not save

All steps of a short loop may also be unrolled and planned as a program of their own, where that needs much less. The
Pareto-optimal choices in these three costs are the scan's options.

Sources: blocks of √L steps are Chen et al. (2016), section 4.3; their nesting is section 4.4; carries are the
checkpoints of Griewank and Walther, *Revolve* (2000), which stores single steps' starts where this has equal blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxsub.core.decisions import Inside, Loop, saving_in_nests
from jaxsub.core.tuning import TUNING
from jaxsub.costs.body_options import BodyChain, body_plans, evenly
from jaxsub.costs.step_options import Step, steps_of
from jaxsub.devices.targets import Target
from jaxsub.emission.scans import body_of, body_program
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.inner_programs import find_loops

NEAR_FLOPS = 0.01
"""Choices are compared among those whose recomputed FLOPs differ by less than this share of the most."""


@dataclass(frozen=True, slots=True)
class LoopChoice:
    """One choice for a loop, with its costs.

    Attributes:
        loop: The choice.
        kept_bytes: Bytes that are live from its forward to its backward pass, beside inputs and outputs.
        transient_bytes: Bytes that its backward pass allocates, kept bytes included.
        recompute_flops: FLOPs that its backward pass recomputes.
    """

    loop: Loop
    kept_bytes: int
    transient_bytes: int
    recompute_flops: float


@dataclass(frozen=True, slots=True)
class _Ends:
    """Bytes that a loop's backward pass holds from its first step to its last.

    Attributes:
        cotangent_bytes: Of the cotangents of ys, which it is given.
        slice_bytes: Of the gradients of xs that it returns, without those that are results of the program.
        const_bytes: Of the sums of constants' gradients, without those that are results of the program.
    """

    cotangent_bytes: int
    slice_bytes: int
    const_bytes: int

    @classmethod
    def of(cls, program: Program, node: int) -> _Ends:
        """Read them off the program around the loop."""
        eqn, graph = program.eqns[node], program.graph
        n_consts, n_carry = compat.scan_sizes(eqn)
        last, made = graph.last_uses(), graph.made_by(node, node + 1)
        read = (v for v in made[n_carry:] if last[v] > node and graph.values[v].is_differentiated)
        found = {"consts": 0, "carry": 0, "xs": 0}
        inputs = iter(graph.nodes[node].inputs)
        for position, v in ((i, next(inputs)) for i, a in enumerate(eqn.invars) if compat.is_var(a)):
            where = "consts" if position < n_consts else "carry" if position < n_consts + n_carry else "xs"
            is_sum = program.is_repeated or graph.values[v].producer is not None or graph.is_joined(v, node + 1)
            if graph.values[v].is_differentiated and is_sum:
                found[where] += graph.values[v].n_bytes
        return cls(sum(graph.values[v].n_bytes for v in read), found["xs"], found["consts"])


@dataclass(frozen=True, slots=True)
class _Body:
    """A loop's body: bytes of carry, slices of xs, their gradients and those of constants; choices of a step.

    `once_flops` are those of the FLOPs that depend on constants alone.
    """

    node: int
    length: int
    ends: _Ends
    is_cpu: bool
    carry_bytes: int
    slice_bytes: int
    slice_gradient_bytes: int
    gradient_bytes: int
    flops: float
    once_flops: float
    steps: tuple[Step, ...]
    plain: Step


def loop_choices(
    program: Program, node: int, body_chain: BodyChain | None = None, *, gpu: Target | None = None
) -> tuple[LoopChoice, ...]:
    """Find the choices for a scan that are Pareto-optimal in kept bytes, transient bytes and recomputed FLOPs.

    Args:
        program: The program.
        node: The scan.
        body_chain: Prices the body cut into stages; with `None` only loops inside the body are planned.
        gpu: The GPU to compile for; `None` for a CPU.

    Returns:
        The choices, the one of least recompute first, without the plain loop. Their loops' node is `node`.
    """
    body = _body(program, node, body_chain, gpu)
    sizes, tails = _block_sizes(body.length), _tails(body)
    pairs = [(step, blocks) for step in body.steps for blocks in sizes if not _is_ignored(step, blocks)]
    rest = {blocks: body.length % blocks[0] if blocks else 0 for blocks in sizes}
    found = _pareto([_choice(body, step, blocks, rest[blocks], tail) for step, blocks in pairs
                     for tail in (tails if rest[blocks] else (body.plain,))])  # fmt: skip
    for c in tuple(found):
        if len(c.loop.blocks) == 1 or (not c.loop.blocks and c.loop.is_recomputed):
            fields = replace(c.loop, blocks=(), kept_steps=0, kept_saved=None)
            step = next(s for s in body.steps if fields == Loop(node, **s.fields))
            found += _tailed(body, step, c.loop.blocks)
    if body_chain is not None:
        found += [c for c in _unrolled(program, node, body_chain, is_cpu=gpu is None) if _is_much_less(c, found)]
    return tuple(c for c in _thinned(_pareto(found)) if c.loop != Loop(node))


def _unrolled(program: Program, node: int, body_chain: BodyChain, *, is_cpu: bool) -> Iterator[LoopChoice]:
    """Unroll all steps of a short loop and plan them like any program; a region around them is an option of its own."""
    eqn, body = program.eqns[node], body_program(program, node)
    (n_consts, n_carry), length = compat.scan_sizes(eqn), eqn.params["length"]
    if find_loops(body) or length * sum(map(_n_equations, body.eqns)) > TUNING.unrolled_equations:
        return
    steps, _ = body_of(program, Loop(node, is_unrolled=True))
    early = _early_bytes(body, len(body.consts) + n_consts, n_carry, length) if is_cpu else 0
    for plan in body_plans(steps, body_chain, is_written_out=True, most=TUNING.unrolled_stages):
        loop = Loop(node, inside=plan.inside, is_unrolled=True)
        transient = max(plan.kept_bytes, plan.transient_bytes, early)
        yield LoopChoice(loop, plan.kept_bytes, transient, plan.recompute_flops)


def _n_equations(eqn: Any) -> int:
    """How many equations one is to a compiler: of a conditional those of all branches."""
    return 1 + sum(sum(map(_n_equations, branch.eqns)) for branch in eqn.params.get("branches", ()))


def _early_bytes(body: Program, n_consts: int, n_carry: int, length: int) -> int:
    """Sum the slices of all steps that are read beside nothing of the carry: a CPU may cut them out before any step."""
    depends = set(range(n_consts, n_consts + n_carry))
    early = set[int]()
    for node in body.graph.nodes:
        if depends.isdisjoint(node.inputs):
            early.update(v for v in node.inputs if v >= n_consts + n_carry and body.graph.values[v].producer is None)
        else:
            depends.update(node.outputs)
    return length * sum(body.graph.values[v].n_bytes for v in early)


def _is_much_less(choice: LoopChoice, others: Sequence[LoopChoice]) -> bool:
    """Tell whether no choice that recomputes as little needs about as little: an unrolled loop compiles longer."""
    return not any(c.recompute_flops <= choice.recompute_flops and TUNING.much_less * c.kept_bytes <= choice.kept_bytes
                   and TUNING.much_less * c.transient_bytes <= choice.transient_bytes for c in others)  # fmt: skip


def _body(program: Program, node: int, body_chain: BodyChain | None, gpu: Target | None) -> _Body:
    eqn, body = program.eqns[node], body_program(program, node)
    n_consts, n_carry = (len(body.consts) + n if i == 0 else n for i, n in enumerate(compat.scan_sizes(eqn)))
    differentiated = [i in body.differentiated for i in range(len(body.invars))]
    sizes = [value.n_bytes for value in body.graph.values[: len(body.invars)]]
    carry = range(n_consts, n_consts + n_carry)
    xs = range(n_consts + n_carry, len(sizes))
    steps = steps_of(program, node, _inner_loops(body, gpu), body_chain, gpu)
    return _Body(
        node=node,
        length=eqn.params["length"],
        ends=_Ends.of(program, node),
        is_cpu=gpu is None,
        carry_bytes=sum(sizes[i] for i in carry),
        slice_bytes=sum(sizes[i] for i in xs),
        slice_gradient_bytes=sum(sizes[i] for i in xs if differentiated[i]),
        gradient_bytes=sum(sizes[i] for i in range(n_consts) if differentiated[i]),
        flops=sum(n.flops for n in body.graph.nodes),
        once_flops=_once_flops(body, n_consts),
        steps=steps,
        plain=steps[0],
    )


def _inner_loops(body: Program, gpu: Target | None) -> list[tuple[Loop, ...]]:
    """List choices for all loops inside a body at once: the plain loops first, then with less and less memory.

    A plan of the body (`jaxsub.costs.body_options`) keeps all values that cross between its stages. Where only the
    loops inside change, JAX keeps less of the whole body, which can save memory without any recompute.
    """
    nodes = find_loops(body)
    ladders = [_ladder(loop_choices(body, n, gpu=gpu)) for n in nodes]
    settings: list[tuple[Loop, ...]] = [()]
    for rank in range(max(map(len, ladders), default=0)):
        settings.append(tuple(ladder[min(rank, len(ladder) - 1)] for ladder in ladders if ladder))
    return list(dict.fromkeys(settings))


def _ladder(found: Sequence[LoopChoice]) -> list[Loop]:
    """Choose at most `Tuning.inner_ranks` choices without a tail, with less and less transient memory."""
    steps: list[LoopChoice] = []
    for c in found:
        if not c.loop.kept_steps and (not steps or c.transient_bytes < 0.8 * steps[-1].transient_bytes):
            steps.append(c)
    return [choice.loop for choice in evenly(steps, TUNING.inner_ranks)]


def _once_flops(body: Program, n_consts: int) -> float:
    """The FLOPs of a body that depend on constants alone."""
    stepwise, flops = set(range(n_consts, len(body.invars))), 0.0
    for node in body.graph.nodes:
        if stepwise.isdisjoint(node.inputs):
            flops += node.flops
        else:
            stepwise.update(node.outputs)
    return flops


def _block_sizes(length: int) -> list[tuple[int, ...]]:
    """List sizes of blocks up to three levels deep, no blocks first."""
    found: list[tuple[int, ...]] = [()]
    for depth, ratio in enumerate(TUNING.block_ratios, 1):
        steps = range(1, 1 + int(math.log(length, ratio)))
        sizes = sorted({_near(length / ratio**k, length) for k in steps}, reverse=True)
        found += itertools.combinations([b for b in sizes if 1 < b < length], depth)
    return found


def _near(size: float, length: int) -> int:
    """Find a divisor of `length` close to `size`, so that there is no remainder, or else the nearest integer."""
    wanted = min(max(size, 2.0), max(length / 2, 2.0))
    divisors = [d for d in range(2, length) if length % d == 0 and 0.66 < d / wanted < 1.5]
    return min(divisors, key=lambda d: abs(math.log(d / wanted)), default=min(round(wanted), max(length // 2, 2)))


def _is_ignored(step: Step, blocks: tuple[int, ...]) -> bool:
    """Tell whether values are saved by name in nested regions, which `jax_remat3` recomputes all the same."""
    loop = Loop(0, blocks, **step.fields)
    return not compat.saves_in_nests() and any(saving_in_nests(Inside(ways=(loop,))))


def _tails(body: _Body) -> list[Step]:
    """List the choices for steps outside all blocks."""
    plainly = [s for s in body.steps if replace(s.fields["inside"], saved=()) == Inside()]
    return [s for s in plainly
            if s is body.plain or s.fields["inside"].saved or s.recompute_flops < NEAR_FLOPS * body.flops]  # fmt: skip


def _tailed(body: _Body, step: Step, blocks: tuple[int, ...]) -> Iterator[LoopChoice]:
    """Yield choices with at least two blocks, no remainder, and the last steps outside the blocks."""
    size = blocks[0] if blocks else 1
    wanted = {body.length % size + size * round(share * body.length / size) for share in TUNING.kept_shares}
    for tail in _tails(body):
        for kept_steps in sorted(k for k in wanted if 0 < k <= body.length - 2 * size):
            yield _choice(body, step, blocks, kept_steps, tail)


def _choice(body: _Body, step: Step, blocks: tuple[int, ...], kept_steps: int, tail: Step) -> LoopChoice:
    n = body.length - kept_steps
    sizes = [n, *(b for b in blocks if b < n)]
    levels = len(sizes) - 1
    inside = step.transient_bytes + (levels + 1) * body.gradient_bytes + 2 * body.carry_bytes
    starts = [-(-a // b) * body.carry_bytes for a, b in itertools.pairwise(sizes)]
    starts.append(sizes[-1] * step.kept_bytes + step.kept_once_bytes)
    # a step without recompute in a block keeps its slice of xs too; such a tail keeps a copy of its part of xs
    slices = sizes[-1] * body.slice_bytes if levels and not step.fields.get("is_recomputed") else 0
    tail_bytes = tail.kept_bytes + (body.slice_bytes if tail is body.plain else 0)
    kept = starts[0] + kept_steps * tail_bytes + (tail.kept_once_bytes if kept_steps else 0)
    copies = sum(sizes[1:]) * body.slice_gradient_bytes + slices
    # gradients of parts of xs are live until they are concatenated, the larger in the place of a result of the program,
    # and each part sums those of constants by itself
    ends, parts = body.ends, body.ends.slice_bytes
    if kept_steps:
        results = body.length * body.slice_gradient_bytes - parts
        parts += results * min(n, body.length - n) // body.length
    sums = ends.const_bytes + (body.gradient_bytes if kept_steps else 0)
    hoisted = parts + sums if body.is_cpu else 0
    # the tail's residuals are dead when the blocks run backward
    in_tail = kept + tail.transient_bytes + body.gradient_bytes + 2 * body.carry_bytes if kept_steps else 0
    transient = max(sum(starts) + copies + inside, in_tail) + parts + sums + ends.cotangent_bytes
    kept += hoisted
    flops = n * (levels * (body.flops - body.once_flops) + step.recompute_flops) + kept_steps * tail.recompute_flops
    flops += sum(n / size for size in sizes[1:]) * body.once_flops
    loop = Loop(body.node, tuple(sizes[1:]), kept_steps=kept_steps,
                kept_saved=tail.fields["inside"].saved if kept_steps and tail.fields.get("is_recomputed") else None,
                **step.fields)  # fmt: skip
    return LoopChoice(loop, kept, transient, flops)


def _pareto(found: Sequence[LoopChoice]) -> list[LoopChoice]:
    """Keep the choices than which no other is at least as good in all three costs."""
    best: list[LoopChoice] = []

    def rank(c: LoopChoice) -> tuple[float, ...]:
        return c.recompute_flops, c.transient_bytes, c.kept_bytes, c.loop.kept_steps

    for c in sorted(found, key=rank):
        if not any(b.kept_bytes <= c.kept_bytes and b.transient_bytes <= c.transient_bytes for b in best):
            best.append(c)
    return best


def _thinned(found: Sequence[LoopChoice]) -> Iterator[LoopChoice]:
    """Keep, for each level of recompute, the choices of least kept bytes, transient bytes, their sum and product."""
    most = max((c.recompute_flops for c in found), default=0.0)
    alike: dict[int, list[LoopChoice]] = {}
    for c in found:
        alike.setdefault(round(c.recompute_flops / max(NEAR_FLOPS * most, 1e-9)), []).append(c)
    for some in alike.values():
        needs_least = min(some, key=lambda c: (c.transient_bytes, c.kept_bytes))
        keeps_least = min(some, key=lambda c: (c.kept_bytes, c.transient_bytes))
        by_sum = min(some, key=lambda c: c.kept_bytes + c.transient_bytes)
        by_product = min(some, key=lambda c: c.kept_bytes * c.transient_bytes)
        yield from dict.fromkeys((needs_least, keeps_least, by_sum, by_product))
