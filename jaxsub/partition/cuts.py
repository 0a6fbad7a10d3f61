"""Cut a graph into stages, and find stages that are equal.

A cut is good where few bytes cross. Between every two consecutive costly nodes there is one candidate, the earliest
position with the least live bytes (a stage that ends in its costly node never recomputes it), and another right in
front of a node whose derivative does not need what it reads, such as a Cholesky factorisation: then its operand is
recomputed, and its result is not. A candidate is kept if no other within `window` on either side has fewer bytes. That
finds ResNet blocks, LSTM cells, MLP layers and the halves of transformer blocks. Weights do not count: they are live
under every plan. Behind the last node that a gradient flows through, such as the loss, there are no cuts, since metrics
have no backward pass.

Neighbours of least weight are merged until there are few enough, as a rule `Tuning.stages`. Two runs of nodes are
of one kind when they are the same equations, connected alike, with the same values going out: they share every price
and one emitted function.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np

from jaxsub.core.chain import Crossing
from jaxsub.core.graph import Graph, Node
from jaxsub.core.tuning import TUNING

FUSED = frozenset(
    "convert_element_type add add_any sub mul div neg max min exp log log1p abs sign square integer_pow pow sqrt rsqrt "
    "tanh logistic select_n eq ne lt le gt ge and or not broadcast_in_dim reshape transpose squeeze".split()
)
"""Primitives that map or move elements; XLA fuses them into their consumers."""

FREEING = frozenset("cholesky triangular_solve lu qr geqrf eigh svd fft sort".split())
"""Costly primitives that read what their derivative does not: it is made of what they return, or of indices."""

PLACED = ("random_fold_in", "random_seed", "slice")
"""Primitives whose parameters and constants a kind ignores: equal layers differ in them alone where each draws its own
dropout or reads its own part of stacked weights."""


def find_cuts(
    graph: Graph, *, window: int = 2, required: Iterable[int] = (), most: int | None = None
) -> tuple[int, ...]:
    """Choose the nodes in front of which to cut: the first node of each stage, 0 first, and the number of nodes last.

    A cut is compared with `window` costly nodes on either side. In front of those `required` there is one; of the
    others so many are left out that there are no more than `most` stages, where that can be; by default
    `Tuning.stages`.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> wide = [("matmul", [0], [9]), ("tanh", [1], [9]), ("sum", [2], [1]), ("matmul", [3], [9])]
        >>> find_cuts(graph_of(wide, 1, [4], input_bytes=[1]), required=[1])
        (0, 1, 3, 4)
    """
    live = live_bytes(graph)
    last = max((n.index for n in graph.nodes if any(graph.values[v].is_differentiated for v in n.outputs)), default=0)
    costly = [n.index for n in graph.nodes if n.is_costly]
    if len(costly) < TUNING.few_costly:
        costly = [n.index for n in graph.nodes if n.flops > 0] or list(range(len(graph.nodes)))
    earliest = [a + 1 + int(np.argmin(live[a + 1 : b + 1])) for a, b in pairwise(costly)]
    freed = [b for p, b in zip(earliest, costly[1:], strict=False) if _frees(graph, live, p, b)]
    candidates = sorted({*unfused_cuts(graph, [p for p in earliest if p <= last]), *(p for p in freed if p <= last)})
    heights = live[candidates] if candidates else np.zeros(0, np.int64)
    kept = [p for i, p in enumerate(candidates) if heights[i] <= heights[max(0, i - window) : i + window + 1].min()]
    pinned = {0, len(graph.nodes), *required}
    return _merge(graph, sorted({*kept, *pinned}), pinned, most or TUNING.stages(len(graph.nodes)))


def _frees(graph: Graph, live: np.ndarray, earliest: int, position: int) -> bool:
    """Whether the node at a position frees what it reads, and about as little crosses in front of it as before."""
    is_freeing = graph.nodes[position].primitive in FREEING
    return is_freeing and live[position] <= (1 + TUNING.little_share) * live[earliest]


def unfused_cuts(graph: Graph, positions: Sequence[int]) -> list[int]:
    """Drop the positions where a cut would make XLA materialise more than it would without.

    XLA fuses an elementwise value into its consumers. Where such a value crosses a cut it is materialised instead of
    its operands, which is worse if the operands are smaller. The f32 copy of bf16 logits, or their exponentials, are
    materialised only if a cut is between the product that makes the logits and the sums over them. What is little
    beside all that crosses, as a scale that is computed first and read last, is no reason against a cut.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> nodes = [("matmul", [0], [64]), ("convert_element_type", [1], [128]), ("reduce_max", [2], [8])]
        >>> head = graph_of([*nodes, ("sub", [2, 3], [128]), ("reduce_sum", [4], [1])], 1, [5], input_bytes=[8])
        >>> unfused_cuts(head, range(1, 5))
        [1]
    """
    last, skip = graph.last_uses(), graph.weights() | graph.output_set()
    crossing, fresh, kept, at = set[int](), set[int](), list[int](), 0
    ends: dict[int, list[int]] = {}
    for position in positions:
        for node in graph.nodes[at:position]:
            for v in (v for v in node.outputs if v not in skip and last[v] > node.index):
                crossing.add(v)
                if node.primitive in FUSED:
                    fresh.add(v)
                ends.setdefault(last[v], []).append(v)
            over = ends.pop(node.index, ())
            crossing.difference_update(over)
            fresh.difference_update(over)
        at = position
        more = sum(graph.values[v].n_bytes for v in fresh) - _made_of(graph, fresh, crossing, skip)
        if more <= 0 or more <= TUNING.little_share * sum(graph.values[v].n_bytes for v in crossing):
            kept.append(position)
            fresh.clear()  # a value that crosses a cut is materialised there, once
    return kept


def _made_of(graph: Graph, fused: Collection[int], crossing: Collection[int], skip: Collection[int]) -> int:
    """Sum the bytes of the materialised operands of fused values, those left out that cross anyway or take no room.

    The sum stops at the fused values' own bytes.
    """
    most = sum(graph.values[v].n_bytes for v in fused)
    found, seen, stack = 0, set(fused), list(fused)
    while stack and found < most:
        producer = graph.values[stack.pop()].producer
        for v in graph.nodes[producer].inputs if producer is not None else ():
            if v in seen or v in crossing or v in skip:
                continue
            seen.add(v)
            if _is_fused(graph, v):
                stack.append(v)
            else:
                found += graph.values[v].n_bytes
    return found


def _is_fused(graph: Graph, v: int) -> bool:
    producer = graph.values[v].producer
    return producer is not None and graph.nodes[producer].primitive in FUSED


def widening_head(graph: Graph) -> int | None:
    """Find the node behind the last costly one, where that makes more bytes than cross any cut, as large logits do.

    `find_cuts` has no cut there, since more bytes cross it than any other. But in one stage that makes such values,
    reduces them to a loss and runs back through both, several copies of them are live at once.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> nodes = [("matmul", [0], [4]), ("matmul", [1], [4]), ("matmul", [2], [64]), ("exp", [3], [64])]
        >>> widening_head(graph_of([*nodes, ("sum", [4], [1])], 1, [5], input_bytes=[4]))
        3
    """
    last = next((node for node in reversed(graph.nodes) if node.is_costly), None)
    if last is None or last.index + 1 == len(graph.nodes):
        return None
    crossing = live_bytes(graph)[list(find_cuts(graph)[1:-1])]
    is_wide = sum(graph.values[v].n_bytes for v in last.outputs) > crossing.max(initial=0) > 0
    return last.index + 1 if is_wide else None


def shares_most_weights(graph: Graph) -> bool:
    """Tell whether many equations read most bytes of the weights, as in an unrolled recurrent network."""
    weights = [graph.values[v] for v in graph.inputs if graph.values[v].is_differentiated]
    shared = sum(v.n_bytes for v in weights if len(v.consumers) > 2)
    return 2 * shared > sum(v.n_bytes for v in weights)


def block_ends(graph: Graph, cuts: Sequence[int]) -> list[int]:
    """List the stages at which blocks start, the number of stages last; none where each block is one stage."""
    blocks = set(find_cuts(graph))
    ends = [stage for stage, node in enumerate(cuts) if node in blocks]
    return [] if len(ends) == len(cuts) or shares_most_weights(graph) else ends


def spans_of(
    cuts: Sequence[int], ends: Sequence[int], sizes: Sequence[int], *, is_last: bool = False
) -> list[tuple[int, int]]:
    """List the runs of stages that may be one region: single stages, several stages, several blocks.

    The last stage is one only if told so: where its backward pass does not start at once.
    """
    n = len(cuts) - 1
    sizes = range(2, n) if sizes and n <= TUNING.few_stages else sizes
    spans = [(s, s + size) for size in (1, *sizes) for s in range(n - size)]
    spans += [(a, b) for size in sizes for a, b in zip(ends, ends[size:], strict=False)]
    spans += [(n - 1, n)] * is_last
    if n >= TUNING.most_stages or n <= TUNING.few_stages:
        spans = [(a, b) for a, b in spans if b == a + 1 or cuts[b] - cuts[a] <= TUNING.region_equations]
    return list(dict.fromkeys(spans))


def live_bytes(graph: Graph, from_first_use: bool = False) -> np.ndarray:
    """Sum the bytes that cross each position `p`: made before node `p`, read at or after it; no weights, no outputs.

    Input data counts until its last use: otherwise fewer bytes would seem to cross in the first block than in others.
    It counts from the start, or as if its first reader made it.
    """
    curve = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
    skip = graph.weights() | graph.output_set()
    for value, last in zip(graph.values, graph.last_uses(), strict=True):
        made = -1 if value.producer is None else value.producer
        if from_first_use and value.producer is None and value.consumers:
            made = value.consumers[0]
        if value.index not in skip and last > made:
            curve[made + 1] += value.n_bytes
            if last + 1 < len(curve):
                curve[last + 1] -= value.n_bytes
    return np.cumsum(curve)


def find_crossings(graph: Graph, cuts: Sequence[int]) -> tuple[Crossing, ...]:
    """Find the values that cross cuts; those made and last used in the same stages are one crossing."""
    n = len(cuts) - 1
    stage_of = np.searchsorted(cuts, np.arange(len(graph.nodes) + 1), side="right") - 1
    outputs = graph.output_set()
    sums: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], list[int]] = {}
    for value, last in zip(graph.values, graph.gradient_uses(), strict=True):
        if value.producer is None:
            continue
        made, used = int(stage_of[value.producer]), n if last >= len(graph.nodes) else int(stage_of[last])
        if used > made:
            entry = sums.setdefault((made, used), [0, 0])
            entry[0] += 0 if value.index in outputs else value.n_bytes
            sizes.setdefault((made, used), []).extend([] if value.index in outputs else [value.n_bytes])
            entry[1] += value.n_bytes if value.is_differentiated and used < n else 0
    return tuple(
        Crossing(made, last, size, cotangent, tuple(sizes[made, last]))
        for (made, last), (size, cotangent) in sorted(sums.items())
    )


def kind_of(graph: Graph, signatures: Sequence[bytes], start: int, stop: int) -> str:
    """Make the key of a run's prices: its computation, wherever it is in the program, and how gradients flow.

    Values made inside are numbered from the first, inputs in order of first use. The key is a digest, as stable as the
    signatures: it is looked up for every run, and compared between processes.
    """
    made, last_use = graph.made_by(start, stop), graph.last_uses()
    weights, outputs = graph.weights(), graph.output_set()
    first, place = made.start, dict[int, int]()
    digest = hashlib.blake2b(digest_size=16)
    for i in range(start, stop):
        node = graph.nodes[i]
        refs = [v - first if v >= first else ~place.setdefault(v, len(place)) for v in node.inputs]
        signature = _of_types(graph, node) if node.primitive in PLACED else signatures[i]
        digest.update(signature + repr(refs).encode())
    ends = [(graph.values[v].is_differentiated, v in weights, graph.is_joined(v, stop),
             graph.is_slice_joined(v, start, stop), graph.is_look_up_joined(v, start, stop))
            for v in place]  # fmt: skip
    returns = [(v - first, graph.values[v].is_differentiated, v in outputs) for v in made if last_use[v] >= stop]
    sizes = [graph.values[v].n_bytes for v in (*place, *made)]  # of one device: equal shapes may be split otherwise
    digest.update(repr((ends, returns, sizes)).encode())
    return digest.hexdigest()


def _of_types(graph: Graph, node: Node) -> bytes:
    """Describe a node without the constants among its inputs."""
    values = (graph.values[v] for v in (*node.inputs, *node.outputs))
    return repr((node.primitive, [(v.shape, str(v.dtype)) for v in values])).encode()


def _merge(graph: Graph, cuts: list[int], pinned: set[int], most: int) -> tuple[int, ...]:
    """Drop cuts between the neighbours of least weight until there are few enough stages."""
    flops = np.concatenate([[0.0], np.cumsum([n.flops for n in graph.nodes])])
    after = dict(pairwise(cuts))
    before = {b: a for a, b in after.items()}
    heap = [(flops[after[c]] - flops[before[c]], c) for c in cuts[1:-1] if c not in pinned]
    heapq.heapify(heap)
    left = len(cuts) - 1
    while heap and left > most:
        weight, cut = heapq.heappop(heap)
        if cut not in before or weight < flops[after[cut]] - flops[before[cut]]:
            if cut in before:
                heapq.heappush(heap, (flops[after[cut]] - flops[before[cut]], cut))
            continue
        a, b = before.pop(cut), after.pop(cut)
        after[a], before[b] = b, a
        left -= 1
    return (cuts[0], *sorted(after.values())) if after else tuple(cuts)
