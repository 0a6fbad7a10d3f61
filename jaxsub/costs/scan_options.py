"""How a loop may run, and what each way costs: the options that a planner chooses from for a scan.

A scan over L steps is L equal stages. Ways to run it are made of four things: what a step saves, from everything to
named values of its body (the min-cut of `jaxsub.partition.min_cut`, on the body) to nothing but its carry; the sizes of
nested blocks of steps, each executed again from its first carry; how many of the last steps stay outside and keep what
they make; a plan inside the body, of its stages and of the loops in it; and where in the body steps begin (`rotate`).
All are estimated by counting, here:

    kept        carries at the starts of the outermost blocks, and what the steps outside them keep
    transient   the kept, then for each level the carries it starts from and the gradients of slices of xs it copies,
                and what one step's backward pass needs
    again       a forward pass for each level, and what a step does not save

All steps of a short loop may also be written out and planned as a program of their own (`unroll`), where that needs
much less. The ways none of which is better in all three are offered.

Sources: blocks of √L steps are Chen et al. (2016), section 4.3; their nesting is section 4.4; carries are the
checkpoints of Griewank and Walther, *Revolve* (2000), which keeps single steps' starts where this keeps equal blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxsub.core.decisions import Inside, Loop, saving_in_nests
from jaxsub.core.tuning import TUNING
from jaxsub.costs import live_ranges as analytic
from jaxsub.costs.body_options import BodyChain, body_plans, evenly
from jaxsub.devices.targets import Target
from jaxsub.emission.scan_rotation import best_place, rotated
from jaxsub.emission.scan_unrolling import unrolled
from jaxsub.emission.scans import body_program, with_loops
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import Flops, flops_of
from jaxsub.jaxpr.trace import Program, aval_bytes
from jaxsub.partition.inner_programs import find_loops
from jaxsub.partition.min_cut import TracedRun, choices, trace_run

NEAR_FLOPS = 0.01
"""Choices are compared among those whose FLOPs executed again differ by less than this share of the most."""


@dataclass(frozen=True, slots=True)
class LoopChoice:
    """One way to run a loop, and what it is expected to cost.

    Attributes:
        loop: The way.
        kept_bytes: What it keeps from its forward to its backward pass, beside what it reads and returns.
        transient_bytes: What its backward pass allocates, the kept included.
        again_flops: What its backward pass executes again.
    """

    loop: Loop
    kept_bytes: int
    transient_bytes: int
    again_flops: float


@dataclass(frozen=True, slots=True)
class _Step:
    """One way to run a step: what it keeps, needs and executes again, in its `Loop`'s fields."""

    fields: dict[str, Any]
    kept_bytes: int
    transient_bytes: int
    again_flops: float


@dataclass(frozen=True, slots=True)
class _Body:
    """Sizes of a loop's body: carry, slices of xs with their gradients, gradients of constants; a step's FLOPs."""

    node: int
    begin: int
    length: int
    carry_bytes: int
    slice_bytes: int
    slice_gradient_bytes: int
    gradient_bytes: int
    flops: float
    steps: tuple[_Step, ...]
    plain: _Step


def loop_choices(
    program: Program, node: int, body_chain: BodyChain | None = None, *, gpu: Target | None = None
) -> tuple[LoopChoice, ...]:
    """The ways to run a scan of which none is better than another in bytes kept, transient bytes and FLOPs.

    Args:
        program: The program.
        node: The scan.
        body_chain: Prices the body cut into stages; where `None`, nothing is planned inside it but its loops.
        gpu: The GPU to compile for; `None` for a CPU.

    Returns:
        The choices, the one that executes least again first, the plain loop not among them. Their loops' node is
        `node`.
    """
    found: list[LoopChoice] = []
    for body in _bodies(program, node, body_chain, gpu):
        sizes, tails = _block_sizes(body.length), _tails(body)
        ways = [(step, blocks) for step in body.steps for blocks in sizes if not _is_ignored(step, blocks)]
        rest = {blocks: body.length % blocks[0] if blocks else 0 for blocks in sizes}
        whole = _pareto([_choice(body, step, blocks, rest[blocks], tail) for step, blocks in ways
                         for tail in (tails if rest[blocks] else (body.plain,))])  # fmt: skip
        found += whole
        for c in whole:
            if len(c.loop.blocks) == 1 or (not c.loop.blocks and c.loop.is_recomputed):
                fields = replace(c.loop, blocks=(), kept_steps=0, kept_saved=None)
                step = next(s for s in body.steps if fields == Loop(node, begin=body.begin, **s.fields))
                found += _tailed(body, step, c.loop.blocks)
    if body_chain is not None:
        found += [c for c in _written_out(program, node, body_chain) if _is_much_less(c, found)]
    return tuple(c for c in _thinned(_pareto(found)) if c.loop != Loop(node))


def _written_out(program: Program, node: int, body_chain: BodyChain) -> Iterator[LoopChoice]:
    """All steps of a short loop one after the other, planned like any program."""
    eqn, body = program.eqns[node], body_program(program, node)
    (n_consts, n_carry), length = compat.scan_sizes(eqn), eqn.params["length"]
    if find_loops(body) or length * len(body.eqns) > TUNING.unrolled_equations:
        return
    steps = unrolled(body, len(body.consts) + n_consts, n_carry, length, reverse=eqn.params["reverse"])
    forward = sum(n.flops for n in steps.graph.nodes)
    for plan in body_plans(steps, body_chain):
        loop = Loop(node, is_recomputed=plan.is_region, inside=plan.inside, unrolled=length)
        again = plan.again_flops + forward * plan.is_region
        yield LoopChoice(loop, plan.kept_bytes, max(plan.kept_bytes, plan.transient_bytes), again)


def _is_much_less(choice: LoopChoice, others: Sequence[LoopChoice]) -> bool:
    """Whether no other that executes as little again needs about as little: what is written out compiles longer."""
    return not any(c.again_flops <= choice.again_flops and TUNING.much_less * c.kept_bytes <= choice.kept_bytes
                   and TUNING.much_less * c.transient_bytes <= choice.transient_bytes for c in others)  # fmt: skip


def _bodies(program: Program, node: int, body_chain: BodyChain | None, gpu: Target | None) -> Iterator[_Body]:
    """The loop as it stands, and begun in mid-step where its body is small."""
    eqn, body = program.eqns[node], body_program(program, node)
    n_consts, n_carry = (len(body.consts) + n if i == 0 else n for i, n in enumerate(compat.scan_sizes(eqn)))
    length, begin = eqn.params["length"], best_place(body)
    yield _body(body, node, length, (n_consts, n_carry), body_chain, gpu)
    ys_bytes = sum(aval_bytes(v.aval) for v in body.outvars[n_carry:])
    carry_bytes = sum(aval_bytes(v.aval) for v in body.outvars[:n_carry])
    n_costly = sum(n.is_costly for n in body.graph.nodes)
    is_small = n_costly < TUNING.few_costly < length and ys_bytes <= carry_bytes / 4
    if begin and is_small and not find_loops(body):
        turned = rotated(body, n_consts, n_carry, begin)
        found = _body(turned.body, node, length - 1, (n_consts, turned.n_carry), None, gpu)
        yield replace(found, begin=begin)


def _body(body: Program, node: int, length: int, n_inputs: tuple[int, int], body_chain: BodyChain | None,
          gpu: Target | None) -> _Body:  # fmt: skip
    n_consts, n_carry = n_inputs
    differentiated = [i in body.differentiated for i in range(len(body.invars))]
    sizes = [aval_bytes(v.aval) for v in body.invars]
    carry = range(n_consts, n_consts + n_carry)
    xs = range(n_consts + n_carry, len(sizes))
    steps: list[_Step] = []
    plain = 0.0
    for inner in _inner_loops(body, gpu):
        way = with_loops(body, inner)
        traced = trace_run(way, 0, len(way.eqns))
        plain = plain if inner else _flops(traced)
        need = partial(analytic.backward_bytes, traced, gpu=gpu)
        steps += _steps(traced, inner, sizes, n_consts, n_carry, _flops(traced) - plain, need)
    if body_chain is not None:
        steps += _planned_steps(body, body_chain, sum(sizes[i] for i in carry), steps)
    return _Body(
        node=node,
        begin=0,
        length=length,
        carry_bytes=sum(sizes[i] for i in carry),
        slice_bytes=sum(sizes[i] for i in xs),
        slice_gradient_bytes=sum(sizes[i] for i in xs if differentiated[i]),
        gradient_bytes=sum(sizes[i] for i in range(n_consts) if differentiated[i]),
        flops=sum(n.flops for n in body.graph.nodes),
        steps=tuple(steps),
        plain=steps[0],
    )


def _inner_loops(body: Program, gpu: Target | None) -> list[tuple[Loop, ...]]:
    """How the loops inside a body may run, all of them alike: plainly, and then with less and less memory.

    A plan of the body (`jaxsub.costs.body_options`) keeps what crosses between its stages. Where nothing but a loop in
    it runs otherwise, what JAX keeps of the whole body is less: only so is anything saved where nothing runs again.
    """
    nodes = find_loops(body)
    ladders = [_ladder(loop_choices(body, n, gpu=gpu)) for n in nodes]
    settings: list[tuple[Loop, ...]] = [()]
    for rank in range(max(map(len, ladders), default=0)):
        settings.append(tuple(ladder[min(rank, len(ladder) - 1)] for ladder in ladders if ladder))
    return list(dict.fromkeys(settings))


def _ladder(found: Sequence[LoopChoice]) -> list[Loop]:
    """Of ways that keep no tail those with less and less transient memory, at most `Tuning.inner_ranks`."""
    steps: list[LoopChoice] = []
    for c in found:
        if not c.loop.kept_steps and (not steps or c.transient_bytes < 0.8 * steps[-1].transient_bytes):
            steps.append(c)
    return [choice.loop for choice in evenly(steps, TUNING.inner_ranks)]


def _steps(traced: TracedRun, inner: tuple[Loop, ...], sizes: Sequence[int], n_consts: int, n_carry: int,
           again_inside: float, need: Callable[[tuple[int, ...]], int]) -> Iterator[_Step]:  # fmt: skip
    """A step that keeps everything first, then regions that save less and less."""
    carry_bytes = sum(sizes[n_consts : n_consts + n_carry])
    reads = zip(traced.function.reads, traced.inputs, strict=True)
    given = {v for read, v in reads if not n_consts <= read < n_consts + n_carry}
    residuals = {r for r in traced.residuals if compat.is_var(r) and r not in given}
    kept = sum(aval_bytes(r.aval) for r in residuals if hasattr(r.aval, "dtype"))
    inside = Inside(ways=inner)
    yield _Step({"inside": inside}, kept, kept + need(()), again_inside)
    # a value that is carried on is stacked once more when it is saved by name: nothing is free here
    for choice in reversed(choices(replace(traced, free=frozenset()))):
        again = choice.recompute_flops + again_inside
        fields = {"inside": inside, "is_recomputed": True, "saved": choice.saved}
        yield _Step(fields, carry_bytes + choice.saved_bytes, need(choice.saved), again)


def _planned_steps(body: Program, body_chain: BodyChain, carry_bytes: int, plain: Sequence[_Step]) -> Iterator[_Step]:
    """Steps with a plan inside: what a step keeps of its stages, or a region with regions in it."""
    again = next(s.again_flops for s in plain if s.fields == {"inside": Inside(), "is_recomputed": True, "saved": ()})
    for found in body_plans(body, body_chain):
        if found.is_region:
            fields = {"inside": found.inside, "is_recomputed": True, "saved": ()}
            yield _Step(fields, carry_bytes, found.transient_bytes, again + found.again_flops)
        else:
            yield _Step({"inside": found.inside}, carry_bytes + found.kept_bytes, found.transient_bytes,
                        found.again_flops)  # fmt: skip


def _flops(traced: TracedRun) -> float:
    return sum((flops_of(e) for e in (*traced.forward, *traced.backward)), Flops()).weighted


def _block_sizes(length: int) -> list[tuple[int, ...]]:
    """No blocks, and blocks up to three levels deep."""
    found: list[tuple[int, ...]] = [()]
    for depth, ratio in enumerate(TUNING.block_ratios, 1):
        steps = range(1, 1 + int(math.log(length, ratio)))
        sizes = sorted({_near(length / ratio**k, length) for k in steps}, reverse=True)
        found += itertools.combinations([b for b in sizes if 1 < b < length], depth)
    return found


def _near(size: float, length: int) -> int:
    """A divisor of `length` close to `size`, so that nothing is left over; without one the nearest integer."""
    wanted = min(max(size, 2.0), max(length / 2, 2.0))
    divisors = [d for d in range(2, length) if length % d == 0 and 0.66 < d / wanted < 1.5]
    return min(divisors, key=lambda d: abs(math.log(d / wanted)), default=min(round(wanted), max(length // 2, 2)))


def _is_ignored(step: _Step, blocks: tuple[int, ...]) -> bool:
    """Whether names stand in regions inside others, which `jax_remat3` executes again all the same."""
    loop = Loop(0, blocks, **step.fields)
    return not compat.saves_in_nests() and any(saving_in_nests(Inside(ways=(loop,))))


def _tails(body: _Body) -> list[_Step]:
    """How steps that stand outside all blocks may run."""
    plainly = [s for s in body.steps if s.fields["inside"] == Inside()]
    return [s for s in plainly
            if s is body.plain or s.fields.get("saved") or s.again_flops < NEAR_FLOPS * body.flops]  # fmt: skip


def _tailed(body: _Body, step: _Step, blocks: tuple[int, ...]) -> Iterator[LoopChoice]:
    """All steps in blocks but the last ones, with no remainder: two blocks at least."""
    size = blocks[0] if blocks else 1
    wanted = {body.length % size + size * round(share * body.length / size) for share in TUNING.kept_shares}
    for tail in _tails(body):
        for kept_steps in sorted(k for k in wanted if 0 < k <= body.length - 2 * size):
            yield _choice(body, step, blocks, kept_steps, tail)


def _choice(body: _Body, step: _Step, blocks: tuple[int, ...], kept_steps: int, tail: _Step) -> LoopChoice:
    n = body.length - kept_steps
    sizes = [n, *(b for b in blocks if b < n)]
    levels = len(sizes) - 1
    inside = step.transient_bytes + (levels + 1) * body.gradient_bytes + 2 * body.carry_bytes
    starts = [-(-a // b) * body.carry_bytes for a, b in itertools.pairwise(sizes)]
    starts.append(sizes[-1] * step.kept_bytes)
    # a step that keeps everything in a block keeps its slice too; a tail that does keeps a copy of its part of xs
    slices = sizes[-1] * body.slice_bytes if levels and not step.fields.get("is_recomputed") else 0
    tail_bytes = tail.kept_bytes + (body.slice_bytes if tail is body.plain else 0)
    kept = starts[0] + kept_steps * tail_bytes
    copies = sum(sizes[1:]) * body.slice_gradient_bytes + slices
    # when the blocks' turn comes what the tail kept is gone; gradients of parts of xs wait to be put together
    in_tail = kept + tail.transient_bytes if kept_steps else 0
    put_together = body.length * body.slice_gradient_bytes if kept_steps or body.begin else 0
    kept += put_together
    transient = max(sum(starts) + copies + inside, in_tail) + put_together
    again = n * (levels * body.flops + step.again_flops) + kept_steps * tail.again_flops
    loop = Loop(body.node, tuple(sizes[1:]), kept_steps=kept_steps,
                kept_saved=tail.fields.get("saved") if kept_steps else None, begin=body.begin,
                **step.fields)  # fmt: skip
    return LoopChoice(loop, kept, transient, again)


def _pareto(found: Sequence[LoopChoice]) -> list[LoopChoice]:
    """Those of which no other is at least as good in all three."""
    best: list[LoopChoice] = []

    def rank(c: LoopChoice) -> tuple[float, ...]:
        return c.again_flops, c.transient_bytes, c.kept_bytes, c.loop.kept_steps, c.loop.begin

    for c in sorted(found, key=rank):
        if not any(b.kept_bytes <= c.kept_bytes and b.transient_bytes <= c.transient_bytes for b in best):
            best.append(c)
    return best


def _thinned(found: Sequence[LoopChoice]) -> Iterator[LoopChoice]:
    """Of choices that execute nearly the same again those that keep least, need least, and both by sum and product."""
    most = max((c.again_flops for c in found), default=0.0)
    alike: dict[int, list[LoopChoice]] = {}
    for c in found:
        alike.setdefault(round(c.again_flops / max(NEAR_FLOPS * most, 1e-9)), []).append(c)
    for some in alike.values():
        needs_least = min(some, key=lambda c: (c.transient_bytes, c.kept_bytes))
        keeps_least = min(some, key=lambda c: (c.kept_bytes, c.transient_bytes))
        by_sum = min(some, key=lambda c: c.kept_bytes + c.transient_bytes)
        by_product = min(some, key=lambda c: c.kept_bytes * c.transient_bytes)
        yield from dict.fromkeys((needs_least, keeps_least, by_sum, by_product))
