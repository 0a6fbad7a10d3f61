"""Make the plans that people write by hand: `jax.checkpoint` around each loop's body, or each block, with one policy.

Where a loop's body has blocks itself, as one over micro-batches has, there are plans with regions around those too.

A program goes in; plans come out, the one of least recompute first, each with its predicted peak. They have no gradient
barriers: where cuts and barriers inside a loss head cost more than they save, or a prediction errs, one of these may be
the plan that fits. So the search tries them too, and is never behind what a user gets by hand.

Policies are JAX's own, called for each equation as `jax.checkpoint` does; those that save the user's names, all of them
or those that spare most recompute a byte; and the minimum cuts of a step or block, which nobody writes by hand.
`jaxsub.partition.blocks` finds blocks.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax

from jaxsub.core.budget import Budget
from jaxsub.core.chain import Prediction
from jaxsub.core.decisions import Inside, Loop, Segment
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.output_reuse import late_gradients, loop_gradient_sizes
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs import live_ranges
from jaxsub.devices.targets import Target
from jaxsub.emission.emit import emit
from jaxsub.emission.scans import body_program
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.inline import flatten_jaxpr
from jaxsub.jaxpr.policy_calls import answer
from jaxsub.jaxpr.trace import Program, program_of
from jaxsub.partition.blocks import blocks_of, repeated_blocks
from jaxsub.partition.cuts import kind_of
from jaxsub.partition.inner_programs import find_loops
from jaxsub.partition.min_cut import Choice, choice_of, choices, finer
from jaxsub.partition.traced_run import NoBackwardPass, TracedRun, trace_run

BY_HAND = "by hand"
"""How the planners' names of these plans begin."""
Saves = Callable[[Any], bool]


def _by_policy(policy: Callable[..., Any]) -> Saves:
    return lambda eqn: bool(answer(policy, eqn))


POLICIES: dict[str, Saves] = {
    "full": lambda eqn: False,
    "dots_saveable": _by_policy(jax.checkpoint_policies.dots_saveable),
    "names": lambda eqn: compat.given_name(eqn) is not None,
    "dots_with_no_batch_dims_saveable": _by_policy(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}
"""What a region saves beside what it starts from, by the name that the plan's planner gets: `by hand: full`."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A loop's step or a block, to become a region.

    Attributes:
        node: The loop that it is or is in, or else the block's first node.
        stop: The node after it.
        kind: Equal for pieces that are alike.
        program: The program of the equations: the loop's body, or the whole.
        run: Its first node in that program, and the node after its last.
        carries: Inputs of the loop's body that are its carry: a step keeps those that its regions read.
        times: How often it runs.
        crossing: Bytes of each value made since the block before it begins, and read in or behind it.
        in_loop: Whether it is a loop's step, or a block in one.
    """

    node: int
    stop: int
    kind: Any
    program: Program
    run: tuple[int, int]
    carries: range = range(0)
    times: int = 1
    crossing: tuple[int, ...] = ()
    in_loop: bool = False

    @property
    def is_step(self) -> bool:
        """Whether it is all of a loop's step."""
        return self.in_loop and self.run == (0, len(self.program.eqns))

    def saved(self, saves: Saves) -> tuple[int, ...]:
        """Offsets of the values that a policy saves, from the first value that the piece makes."""
        graph, (start, stop) = self.program.graph, self.run
        made = (v for node in graph.nodes[start:stop] if saves(self.program.eqns[node.index]) for v in node.outputs)
        return tuple(v - graph.first_value(start) for v in made if graph.values[v].is_differentiated)

    def kept_bytes(self, run: TracedRun, choice: Choice) -> int:
        """Bytes of residuals each time that it runs."""
        return sum(self.crossing) + sum(self._entries(run, choice)) + choice.saved_bytes

    def buffers(self, run: TracedRun, choice: Choice) -> list[int]:
        """Bytes of each buffer of residuals that a gradient may host.

        A loop stacks those of all its steps in one. XLA places larger buffers first, so what is no larger than a value
        of a step may come too late.
        """
        graph, first = self.program.graph, self.program.graph.first_value(self.run[0])
        made = [value.n_bytes for value in graph.values[first:]]
        found = [*self.crossing, *self._entries(run, choice), *(made[offset] for offset in choice.saved)]
        return [self.times * n for n in found if self.times == 1 or self.times * n > max(made)]

    def _entries(self, run: TracedRun, choice: Choice) -> list[int]:
        """Bytes of each value of the carry that a loop's step starts from."""
        read = run.read_with(choice.saved) if self.carries else ()
        return [run.bytes_of(v) for v, i in zip(run.inputs, run.function.reads, strict=True)
                if i in self.carries and v in read]  # fmt: skip


def plans_by_hand(program: Program, gpu: Target | None = None, share: float = 1.0) -> list[Plan]:
    """The plans that people write by hand for a program, one a policy, the one that recomputes least first.

    One device holds a `share` of each byte.

    There are none where there is neither a loop nor a block. Of two policies that save the same there is one plan,
    named after the first. Of loops in loops there is one more, that recomputes each step at every depth.
    """
    if len(program.eqns) > TUNING.long_equations:
        return []
    found: dict[Any, Plan] = {}
    with contextlib.suppress(NoBackwardPass):
        steps = tuple(_loops(program))
        for plan in _plans_of(program, steps or tuple(_blocks(program)), gpu):
            found.setdefault((plan.segments, plan.loops), plan)
        if (blocks := tuple(block for step in steps for block in _blocks_in(step) or [step])) != steps:
            for plan in _plans_of(program, blocks, gpu):
                found.setdefault((plan.segments, plan.loops), plan)
    # of those that recompute the same, up to elementwise work, what needs least
    plans = [_on_one_device(plan, share) for plan in found.values()]
    return sorted(plans, key=lambda plan: (round(recomputed_share(plan), 3), predicted_bytes(plan)))


def _on_one_device(plan: Plan, share: float) -> Plan:
    assert plan.prediction is not None
    return plan.replace(prediction=replace(plan.prediction, temp_bytes=math.ceil(share * plan.prediction.temp_bytes)))


def _plans_of(program: Program, pieces: Sequence[_Piece], gpu: Target | None) -> Iterator[Plan]:
    """Plans with a region around each of some pieces."""
    if not pieces:
        return
    traced: dict[Any, TracedRun] = {}
    for piece in pieces:
        if piece.kind not in traced:
            run = trace_run(piece.program, *piece.run)
            # a value that a step carries on is stacked once more when it is saved by name: nothing is free there
            traced[piece.kind] = replace(run, free=frozenset()) if piece.is_step else run
    head, outside = _head_bytes(program, pieces, gpu), _outside_bytes(program, pieces, gpu)
    for name, chosen in _chosen(pieces, traced, gpu):
        regions = [(p, traced[p.kind], chosen[p.kind]) for p in pieces]
        predicted = _predicted(program, regions, head, gpu)
        predicted = replace(predicted, temp_bytes=predicted.temp_bytes + outside - _in_gradients(program, regions))
        segments = () if pieces[0].in_loop else _as_segments(pieces, chosen)
        loops = _as_loops(pieces, chosen) if pieces[0].in_loop else ()
        yield Plan(program.fingerprint, Budget(), len(program.eqns), planner=f"{BY_HAND}: {name}",
                   prediction=predicted, segments=segments, loops=loops)  # fmt: skip
    if all(piece.is_step for piece in pieces) and any(find_loops(piece.program) for piece in pieces):
        with contextlib.suppress(NoBackwardPass):
            yield _at_every_depth(program, pieces, head, gpu)


def _loops(program: Program) -> list[_Piece]:
    """The steps of every loop."""
    found = []
    for node in find_loops(program):
        eqn, body = program.eqns[node], body_program(program, node)
        n_consts, n_carry = compat.scan_sizes(eqn)
        first = len(body.consts) + n_consts
        found.append(_Piece(node, node + 1, node, body, (0, len(body.eqns)), carries=range(first, first + n_carry),
                            times=int(eqn.params["length"]), in_loop=True))  # fmt: skip
    return found


def _blocks_in(step: _Piece) -> list[_Piece]:
    """The blocks of a loop's step, where it repeats the same ones."""
    blocks = _pieces(step.program, repeated_blocks(step.program.graph))
    return [replace(step, kind=(step.node, block.kind), run=block.run, crossing=block.crossing) for block in blocks]


def _at_every_depth(program: Program, pieces: Sequence[_Piece], head_bytes: int, gpu: Target | None) -> Plan:
    """Recompute the steps of every loop, and of the loops inside them."""
    regions = []
    for piece in pieces:
        ways = _every_step(piece.program)
        inner = Plan(piece.program.fingerprint, Budget(), len(piece.program.eqns), loops=ways)
        closed = jax.make_jaxpr(emit(piece.program, inner))(*piece.program.avals())
        eqns, invars, outvars, consts = flatten_jaxpr(closed)
        names, positions = ["const"] * len(invars), {len(consts) + i for i in piece.program.differentiated}
        body = piece.program.part(program_of(eqns, invars, outvars, consts, positions, None, None, names, closed))
        run = trace_run(body, 0, len(body.eqns))
        again = choice_of(run, ())
        inside = sum(piece.program.graph.nodes[way.node].flops for way in ways)
        regions.append((piece, run, replace(again, recompute_flops=again.recompute_flops + inside)))
    loops = tuple(Loop(piece.node, is_recomputed=True, inside=Inside(ways=_every_step(piece.program)))
                  for piece in pieces)  # fmt: skip
    return Plan(program.fingerprint, Budget(), len(program.eqns), planner=f"{BY_HAND}: full at every depth",
                prediction=_predicted(program, regions, head_bytes, gpu), loops=loops)  # fmt: skip


def _every_step(program: Program) -> tuple[Loop, ...]:
    """Recompute each step of a program's loops, and of the loops inside them."""
    return tuple(Loop(node, is_recomputed=True, inside=Inside(ways=_every_step(body_program(program, node))))
                 for node in find_loops(program))  # fmt: skip


def _blocks(program: Program) -> list[_Piece]:
    """Find the blocks in which everything may be recomputed."""
    return _pieces(program, blocks_of(program.graph))


def _pieces(program: Program, spans: Sequence[tuple[int, int]]) -> list[_Piece]:
    graph = program.graph
    spans = [s for s in spans if all(node.can_recompute for node in graph.nodes[s[0] : s[1]])]
    kinds = [kind_of(graph, program.signatures, *span) for span in spans]
    values = zip(graph.values, graph.last_uses(), strict=True)
    made = [(v.n_bytes, v.producer, last) for v, last in values if v.producer is not None]
    firsts = [0, *(start for start, _ in spans)]  # what crosses several blocks is counted at the first of them
    crossing = [tuple(n for n, producer, last in made if before <= producer < start <= last)
                for before, start in pairwise(firsts)]  # fmt: skip
    return [_Piece(*span, kind, program, span, crossing=sizes)
            for span, kind, sizes in zip(spans, kinds, crossing, strict=True)]  # fmt: skip


def _chosen(pieces: Sequence[_Piece], traced: Mapping[Any, TracedRun],
            gpu: Target | None) -> Iterator[tuple[str, dict[Any, Choice]]]:  # fmt: skip
    """What each kind of piece saves: by each policy, and by the minimum cuts of the commonest kind and others' like."""
    firsts = {piece.kind: piece for piece in reversed(pieces)}
    for name, saves in POLICIES.items():
        yield name, {kind: choice_of(traced[kind], piece.saved(saves)) for kind, piece in firsts.items()}
    hulls = {kind: finer(run, choices(run)) for kind, run in traced.items()}
    most = max(hulls[kind][0].recompute_flops for kind in hulls)
    lead = next(kind for kind in hulls if hulls[kind][0].recompute_flops == most)
    for names in (_names_of(firsts[lead]), _names_of_products(firsts[lead])):
        for kept in _one_by_one(names, firsts[lead], traced[lead], gpu):
            saves = _by_names(kept)
            yield "names", {kind: choice_of(traced[kind], piece.saved(saves)) for kind, piece in firsts.items()}
    for choice in hulls[lead]:
        share = choice.recompute_flops / max(most, 1.0)
        yield "minimum cut", {kind: min(hull, key=lambda c: abs(c.recompute_flops - share * hull[0].recompute_flops))
                              for kind, hull in hulls.items()}  # fmt: skip


def _by_names(names: Collection[str]) -> Saves:
    return lambda eqn: compat.given_name(eqn) in names


def _one_by_one(names: Sequence[str], piece: _Piece, run: TracedRun, gpu: Target | None) -> Iterator[tuple[str, ...]]:
    """Of some names ever more, next the one that spares most recomputation a byte; of alike ones the smallest."""

    def need(choice: Choice) -> int:
        return live_ranges.backward_bytes(run, choice.saved, gpu=gpu)

    left, kept, now = list(names), tuple[str, ...](), choice_of(run, ())
    while left:
        tried = {name: choice_of(run, piece.saved(_by_names((*kept, name)))) for name in left}
        worth = {name: (now.recompute_flops - choice.recompute_flops) / max(choice.saved_bytes - now.saved_bytes, 1)
                 for name, choice in tried.items()}  # fmt: skip
        alike = [name for name in left if worth[name] >= (1 - TUNING.alike) * max(worth.values())]
        name = min(alike, key=lambda name: (tried[name].saved_bytes, need(tried[name]))) if len(alike) > 1 else alike[0]
        now = tried[name]
        left.remove(name)
        kept = (*kept, name)
        yield kept


def _names_of(piece: _Piece) -> tuple[str, ...]:
    """The user's names of values of a piece."""
    eqns = piece.program.eqns[piece.run[0] : piece.run[1]]
    return tuple(dict.fromkeys(name for eqn in eqns if (name := compat.given_name(eqn)) is not None))


def _names_of_products(piece: _Piece) -> tuple[str, ...]:
    """The user's names of what is made of products without batch dimensions by cheap equations alone."""
    saves, made_of, found = POLICIES["dots_with_no_batch_dims_saveable"], dict[int, set[int]](), list[str]()
    for node in piece.program.graph.nodes[piece.run[0] : piece.run[1]]:
        costly = {node.index} if node.is_costly else set[int]().union(*(made_of.get(v, ()) for v in node.inputs))
        made_of.update(dict.fromkeys(node.outputs, costly))
        name = compat.given_name(piece.program.eqns[node.index])
        if name is not None and costly and all(saves(piece.program.eqns[i]) for i in costly):
            found.append(name)
    return tuple(found)


def _as_loops(pieces: Sequence[_Piece], chosen: Mapping[Any, Choice]) -> tuple[Loop, ...]:
    found: dict[int, Loop] = {}
    for piece in pieces:
        if piece.is_step:
            inside = Inside(saved=chosen[piece.kind].saved)
        else:
            alike = [block for block in pieces if block.node == piece.node]
            inside = Inside(_as_segments(alike, chosen))
        found[piece.node] = Loop(piece.node, is_recomputed=piece.is_step, inside=inside)
    return tuple(found.values())


def _as_segments(pieces: Sequence[_Piece], chosen: Mapping[Any, Choice]) -> tuple[Segment, ...]:
    firsts = [piece.program.graph.first_value(piece.run[0]) for piece in pieces]
    return tuple(Segment(*piece.run, tuple(first + offset for offset in chosen[piece.kind].saved))
                 for piece, first in zip(pieces, firsts, strict=True))  # fmt: skip


def _head_bytes(program: Program, pieces: Sequence[_Piece], gpu: Target | None) -> int:
    """What the passes of what follows the last region need, in the program or in a loop's step."""
    start, needs = pieces[-1].stop, [0]
    if (rest := _traced(program, start, len(program.eqns))) is not None:
        spare = loop_gradient_sizes(program.graph, start)
        at_once = program.loss is not None
        needs.append(live_ranges.counted("last", rest, (), at_once=at_once, gpu=gpu, spare=spare))
    for last in {piece.node: piece for piece in pieces if piece.in_loop}.values():
        if (rest := _traced(last.program, last.run[1], len(last.program.eqns))) is not None:
            needs.append(live_ranges.counted("unwrapped", rest, (), at_once=False, gpu=gpu))
    return max(needs)


def _outside_bytes(program: Program, pieces: Sequence[_Piece], gpu: Target | None) -> int:
    """What equations outside of the regions keep for their own backward passes, in each step of a loop."""
    total = _kept_between(program, [(piece.node, piece.stop) for piece in pieces], gpu)
    for step in {piece.node: piece for piece in pieces if piece.in_loop}.values():
        end = len(step.program.eqns)
        runs = [piece.run for piece in pieces if piece.node == step.node]
        total += step.times * _kept_between(step.program, [*runs, (end, end)], gpu)
    return total


def _kept_between(program: Program, runs: Sequence[tuple[int, int]], gpu: Target | None) -> int:
    gaps = zip([0, *(stop for _, stop in runs)], (start for start, _ in runs), strict=False)
    return sum(live_ranges.kept_bytes(run, gpu=gpu) for gap in gaps if (run := _traced(program, *gap)))


def _traced(program: Program, start: int, stop: int) -> TracedRun | None:
    """A run outside of all regions; `None` where there is none, or none that can be traced by itself."""
    if start >= stop or not all(node.can_recompute for node in program.graph.nodes[start:stop]):
        return None
    try:
        return trace_run(program, start, stop)
    except NoBackwardPass:
        return None


def _predicted(program: Program, regions: Sequence[tuple[_Piece, TracedRun, Choice]], head_bytes: int,
               gpu: Target | None) -> Prediction:  # fmt: skip
    """What is saved, and on top of it the largest of the backward passes, of a region or of what follows the last.

    The peak is at the first stage where a region holds it, and at the stage behind the last region where the rest does.
    """
    saved = sum(piece.times * piece.kept_bytes(run, choice) for piece, run, choice in regions)
    needs = {piece.kind: live_ranges.backward_bytes(run, choice.saved, gpu=gpu) - choice.saved_bytes
             for piece, run, choice in {r[0].kind: r for r in regions}.values()}  # fmt: skip
    extra = sum(piece.times * choice.recompute_flops for piece, _, choice in regions)
    forward = sum(node.flops for node in program.graph.nodes)
    most = max(needs.values())
    at = len(regions) if head_bytes > most else 0
    return Prediction(saved + max(head_bytes, most), extra, forward, at, "analytic")


def _in_gradients(program: Program, regions: Sequence[tuple[_Piece, TracedRun, Choice]]) -> int:
    """What regions save in the buffers of gradients that are made after it is dead: XLA allocates nothing for that.

    A gradient is made where the backward pass comes to the last region that reads its weight, so it has room for what
    later regions save: a value of at most its size, or all that a loop stacks of one. A loop carries the gradients of
    what it reads itself: they have no room for what it stacks.
    """
    starts = [piece.node for piece, _, _ in regions]
    made = sorted((bisect_right(starts, reader), n_bytes) for reader, n_bytes in late_gradients(program.graph))
    free, total, begun = list[int](), 0, 0
    for number, (piece, run, choice) in enumerate(regions):
        while begun < len(made) and made[begun][0] <= number:
            insort(free, made[begun][1])
            begun += 1
        for size in sorted(piece.buffers(run, choice), reverse=True):
            if (at := bisect_left(free, size)) < len(free):
                del free[at]
                total += size
    return total
