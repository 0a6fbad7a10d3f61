"""Find a program's blocks by repetition: the layers of a network, say.

The period is looked for with which the program's equations repeat over most of its FLOPs; blocks begin where the fewest
bytes cross. A program without repetition is cut where few bytes cross (`jaxsub.partition.cuts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from jaxsub.core.graph import Graph
from jaxsub.core.tuning import TUNING
from jaxsub.partition.cuts import find_cuts, live_bytes

NEXT = 4
"""The period is looked for between an equation and the next ones like it: a block has several of most kinds."""


def blocks_of(graph: Graph) -> list[tuple[int, int]]:
    """Runs of nodes that are the program's blocks, in order, the last one never among them if it ends the program.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> layer = [("matmul", [8]), ("tanh", [8]), ("matmul", [8]), ("add", [8])]
        >>> nodes = [(name, [i], size) for i, (name, size) in enumerate([("take", [8]), *layer * 3, ("sum", [1])])]
        >>> blocks_of(graph_of(nodes, 1, [14]))
        [(1, 5), (5, 9), (9, 13)]
    """
    found = repeated_blocks(graph)
    if not found:
        cuts = find_cuts(graph)
        found = list(pairwise(cuts))[:-1]
    return [span for span in found if span[1] < len(graph.nodes)]


def repeated_blocks(graph: Graph) -> list[tuple[int, int]]:
    """Runs of nodes that repeat with one period over most of the FLOPs whose gradient is taken.

    They are whole periods from where the fewest bytes cross; none where nothing repeats.
    """
    known: dict[Any, int] = {}
    shapes = [(n.primitive, *((graph.values[v].shape, graph.values[v].dtype) for v in n.outputs)) for n in graph.nodes]
    kinds = np.array([known.setdefault(shape, len(known)) for shape in shapes])
    active = (any(graph.values[v].is_differentiated for v in node.outputs) for node in graph.nodes)
    counted = [node.flops * is_active for node, is_active in zip(graph.nodes, active, strict=True)]
    flops = np.concatenate([[0.0], np.cumsum(counted)])
    best: tuple[float, int, int, int] | None = None
    for period in sorted(set(_periods(graph, kinds))):
        start, stop = _longest_run(kinds[period:] == kinds[:-period])
        held = float(flops[stop + period] - flops[start])
        is_more = best is None or held > best[0] * 1.01
        if stop - start >= period and held >= TUNING.block_flops * flops[-1] and is_more:
            best = held, period, start, stop + period
    if best is None:
        return []
    _, period, start, stop = best
    live = live_bytes(graph)
    phase = min(range(period), key=lambda i: (float(live[start + i : stop + 1 : period].mean()), i))
    starts = list(range(start + phase, stop + 1, period))
    first = [max(0, start + phase - period)] if phase else []
    return list(pairwise([*first, *starts]))


def _periods(graph: Graph, kinds: np.ndarray) -> Iterator[int]:
    """Distances between costly nodes and the next ones of their kind, the commonest of each kind."""
    places: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.is_costly:
            places.setdefault(int(kinds[node.index]), []).append(node.index)
    for found in places.values():
        for step in range(1, min(NEXT, len(found) - 1) + 1):
            distances = Counter(b - a for a, b in zip(found, found[step:], strict=False))
            yield distances.most_common(1)[0][0]


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    """The longest run of true entries, half open."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest])
