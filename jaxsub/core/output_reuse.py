"""Predict which residuals XLA allocates in gradient output buffers.

The compiler allocates the gradient of every weight for the whole program, and the backward pass writes it late. Until
then its buffer is unused, and XLA puts residuals there where they fit: a whole value into the buffer of one output as
large or larger, one value at a time. With small batches, where activations are no larger than weights, many residuals
then cost nothing.

Source: the buffer assignment of OpenXLA (`xla/service/buffer_assignment.cc`): values by size, the largest first, equal
sizes in the order in which they are made; each goes into the smallest buffer that is unused for its live range. Of
gradients that one product or convolution writes at once only values that are live between the passes are considered,
of gradients that loops write only what follows the last loop (on a GPU). Other transient values may use such buffers
too; they are left out, so predictions are rather high.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxsub.core.chain import Chain, Run
from jaxsub.core.graph import Graph, Node, Value

SLICED = frozenset(("gather", "dynamic_slice", "slice"))
"""Primitives whose gradients are added into zeros."""

Piece = tuple[int, int, int, bool]
"""Bytes of a value, the run that makes it, the last stage whose gradients may host it, and whether it crosses a cut."""


def hosted_bytes(chain: Chain, runs: Sequence[Run]) -> tuple[tuple[int, int], ...]:
    """Predict for each run the bytes of its residuals that outputs host; no run is inside another.

    They are two sums: of values that cross the cut behind it, and of what it saves or keeps.
    """
    places: dict[int, deque[int]] = {}
    for stage, s in enumerate(chain.stages):
        for size in s.gradient_sizes:
            places.setdefault(size, deque()).append(stage)
    sizes, totals = sorted(places), [[0, 0] for _ in runs]
    if places:
        pieces = ((-size, run, crosses, i, last) for i, (size, run, last, crosses) in enumerate(_pieces(chain, runs)))
        for negative, run, crosses, _, last in sorted(pieces):  # the largest first
            for at in range(bisect_left(sizes, -negative), len(sizes)):
                stages = places[sizes[at]]
                if stages[0] <= last:
                    stages.popleft()
                    if not stages:
                        sizes.pop(at)
                    totals[run][0 if crosses else 1] -= negative
                    break
    return tuple((crossing, kept) for crossing, kept in totals)


def most_hosted(chain: Chain) -> int:
    """Bound the bytes that outputs can host under any plan: in each the largest value that fits.

    Example:
        >>> from jaxsub.core.chain import Crossing, Stage
        >>> stages = (Stage(0, 1, gradient_sizes=(8,)), Stage(1, 2, gradient_sizes=(3,)), Stage(2, 3))
        >>> most_hosted(Chain(stages, (), (Crossing(0, 1, 5, 0, (5,)), Crossing(1, 2, 5, 0, (5,)))))
        5
    """
    sizes = {size for c in chain.crossings for size in c.sizes} | {size for s in chain.stages for size in s.keep_sizes}
    sizes |= {size for item in chain.items for option in item.options for size in option.saved_sizes}
    places = (place for stage in chain.stages for place in stage.gradient_sizes)
    return sum(max((size for size in sizes if size <= place), default=0) for place in places)


def _pieces(chain: Chain, runs: Sequence[Run]) -> Iterator[Piece]:
    """Yield the values that are live between the passes; a run's own gradients are written while they are read."""
    run_of = [number for number, run in enumerate(runs) for _ in range(run.start, run.stop)]
    moves = {i for i, run in enumerate(runs) if run.option is not None and min(run.option.saved, default=0) < 0}
    for c in chain.crossings:
        reader = run_of[c.last] if c.last < len(run_of) else len(runs)
        if run_of[c.made] < reader and reader not in moves:  # offloaded values are not on the device
            yield from ((size, run_of[c.made], c.made, True) for size in c.sizes)
    for number, run in enumerate(runs):
        if run.option is not None:
            yield from ((size, number, run.start - 1, False) for size in run.option.saved_sizes)
        elif not run.children:
            for place in range(run.start, run.stop):
                stage = chain.stages[place]
                yield from ((size, number, run.start - 1, False) for size in stage.keep_sizes)


def gradient_sizes(graph: Graph, start: int, stop: int) -> tuple[int, ...]:
    """List the bytes of gradients that a run's backward pass writes first: of weights that no later product reads."""
    return tuple(weight.n_bytes for node, _, weight in _last_reads(graph, start, stop) if node.is_costly)


def loop_gradient_sizes(graph: Graph, start: int) -> tuple[int, ...]:
    """List the bytes of gradients that loops before a node write: of weights that nothing after the loop reads.

    A loop writes all of them as it runs backward. What is dead by then may lie in them, such as the logits behind a
    scan over layers, whose weights are stacked.
    """
    return tuple(sorted(w.n_bytes for node, _, w in _last_reads(graph, 0, start) if node.primitive == "scan"))


def late_gradients(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield for each gradient that is written at once, late, the node that reads its weight last, and its bytes.

    That of a weight which a gather or a slice reads itself is filled with zeros first, early; of one that is cast
    before, the cast back writes it.
    """
    for node, read, weight in _last_reads(graph, 0, len(graph.nodes)):
        is_cast = not graph.weights().isdisjoint(node.outputs)
        if not is_cast and not (read == weight.index and node.primitive in SLICED):
            yield node.index, weight.n_bytes


def _last_reads(graph: Graph, start: int, stop: int) -> Iterator[tuple[Node, int, Value]]:
    """Yield the nodes of a run that are the last to read a weight, with the value that they read and the weight."""
    for node in graph.nodes[start:stop]:
        for v in sorted({*node.inputs}):
            if (weight := _weight(graph, v, node.index)) is not None:
                yield node, v, weight


def _weight(graph: Graph, value: int, reader: int) -> Value | None:
    """The differentiated input that a node is the last to read, converted, reshaped or transposed perhaps."""
    found = graph.values[value]
    if value not in graph.weights() or found.consumers[-1] != reader:
        return None
    if found.producer is None:
        return found
    (given,) = set(graph.nodes[found.producer].inputs)
    is_whole = math.prod(found.shape) == math.prod(graph.values[given].shape)
    return _weight(graph, given, found.producer) if is_whole else None


def joined_bytes(graph: Graph, start: int, stop: int) -> int:
    """Sum the bytes of differentiated inputs that a run and later ones read: their gradients are sums."""
    read = {v for node in graph.nodes[start:stop] for v in node.inputs}
    return sum(_contribution(graph, v, start, stop) for v in read if graph.is_joined(v, stop))


def _contribution(graph: Graph, value: int, start: int, stop: int) -> int:
    """Bytes of what a run adds to the gradient of an input."""
    if not graph.is_slice_joined(value, start, stop):
        return graph.values[value].n_bytes
    return next(sum(graph.values[v].n_bytes for v in node.outputs) for node in graph.nodes[start:stop]
                if value in node.inputs)  # fmt: skip


def summed_sizes(graph: Graph, cuts: Sequence[int], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Find gradients that are sums and that a run, the first to read the weight, completes.

    For each the bytes of the sum, and of all that stages before in the backward pass add to it.
    """
    read = {v for node in graph.nodes[start:stop] for v in node.inputs if graph.is_joined(v, stop)}
    firsts = [graph.values[v] for v in sorted(read) if graph.values[v].consumers[0] >= start]
    return tuple((w.n_bytes, _others(graph, cuts, w)) for w in firsts)


def _others(graph: Graph, cuts: Sequence[int], weight: Value) -> int:
    """Bytes of all contributions to the gradient of an input but that of the first run that reads it."""
    runs = sorted({bisect_right(cuts, c) for c in weight.consumers})[1:]
    ends = (*cuts, len(graph.nodes))
    return sum(_contribution(graph, weight.index, ends[run - 1], ends[run]) for run in runs)


def unfenced(chain: Chain) -> Chain:
    """Price a chain without gradient barriers: contributions to a sum of gradients are live until the last is made.

    A GPU may instead compute them all when they are added up, from operands that are live until then, whichever needs
    less; then the sums' buffers host other values until that time. Zeros that barriers would keep live are not hoisted.
    """
    if not any(s.joined_bytes or s.ahead_bytes for s in chain.stages):
        return chain
    operands = sum(s.operand_bytes for s in chain.stages)
    least = operands + max(s.summed_bytes for s in chain.stages)
    is_late = operands > 0 and least < sum(s.joined_bytes for s in chain.stages)
    pile, stages, late = 0, [], Counter(size for s in chain.stages for size in s.summed_sizes if is_late)
    for s in reversed(chain.stages):
        adding = pile + s.summed_bytes if is_late else 0
        own, kept = max(adding, s.transient_bytes + pile), max(adding, s.keep_transient_bytes + pile)
        early = Counter(s.gradient_sizes)
        moved = early & late
        sizes = (*(early - moved).elements(), *(s.summed_sizes if is_late else ()))
        keep = s.keep_bytes - s.ahead_bytes
        stages.append(replace(s, transient_bytes=own, keep_transient_bytes=kept, keep_bytes=keep, gradient_sizes=sizes,
                              joined_bytes=0, summed_bytes=0, summed_sizes=(), ahead_bytes=0,
                              operand_bytes=0))  # fmt: skip
        pile, late = pile + (s.operand_bytes if is_late else s.joined_bytes - s.summed_bytes), late - moved
    return replace(chain, stages=tuple(reversed(stages)))


def saved_sizes(graph: Graph, start: int, stop: int, saved: Sequence[int]) -> tuple[int, ...]:
    """List the bytes of each value that a region saves beside its results, by offsets from the first it makes."""
    first, last = graph.made_by(start, stop).start, graph.last_uses()
    return tuple(graph.values[first + offset].n_bytes for offset in saved if last[first + offset] < stop)


def operand_bytes(graph: Graph, start: int, stop: int) -> int:
    """Sum the bytes of operands of contributions to shared weights' gradients: activations, cotangents of results."""
    nodes = (n for n in graph.nodes[start:stop] if n.is_costly and any(_is_shared(graph, v) for v in n.inputs))
    values = {v for n in nodes for v in (*n.inputs, *n.outputs) if not _is_shared(graph, v)}
    return sum(graph.values[v].n_bytes for v in values)


def _is_shared(graph: Graph, value: int) -> bool:
    found = graph.values[value]
    return found.producer is None and found.is_differentiated and len(found.consumers) > 1
