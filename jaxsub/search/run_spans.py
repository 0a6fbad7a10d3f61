"""From where to where a run round a wide value may be executed in slices: between places where little is alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from jaxsub.core.graph import Value
from jaxsub.core.tuning import TUNING
from jaxsub.costs.fusible import LOOPS
from jaxsub.jaxpr.trace import Program, remembered
from jaxsub.partition.cuts import find_cuts


def spans(program: Program, live: np.ndarray, value: Value, stop: int) -> Iterator[tuple[int, int]]:
    """Runs round a value, the longest first; to the end of the program first of all if that is a loss."""
    n, cuts = len(program.eqns), _cuts_of(program)
    producer = value.producer or 0
    starts = _reach(program, live, range(producer, -1, -1), value.n_bytes, max(c for c in cuts if c <= producer))
    stops = _reach(program, live, range(stop, n + 1), value.n_bytes, min(c for c in cuts if c >= stop))
    ends = (n, *stops) if program.loss is not None else stops
    yield from dict.fromkeys((a, b) for b in ends for a in starts)


@remembered
def _cuts_of(program: Program) -> tuple[int, ...]:
    return find_cuts(program.graph)


def _reach(program: Program, live: np.ndarray, positions: Sequence[int], n_bytes: int, cut: int) -> tuple[int, ...]:
    """Where a run may end in one direction, the farthest first.

    It goes on until little is alive beside the value, or to the bottom of a valley, and from there as far as nothing
    costly follows, so that casts of weights and what maps elements run in the slices too. It never takes in a loop.
    Where nowhere little is alive it ends at a cut.
    """
    nodes, little = program.graph.nodes, _little(live, positions, n_bytes)
    nearest, farthest, lowest = None, positions[0], live[positions[0]]
    for here, there in pairwise((positions[0], *positions)):
        node, is_low = nodes[min(here, there, len(nodes) - 1)], nearest is not None
        if there != here and (node.primitive in LOOPS or (is_low and node.is_costly)):
            break
        if live[there] <= little and (not is_low or live[there] <= lowest):
            nearest, farthest, lowest = there if nearest is None else nearest, there, live[there]
    return tuple(dict.fromkeys((cut, positions[0]) if nearest is None else (farthest, nearest, positions[0])))


def _little(live: np.ndarray, positions: Sequence[int], n_bytes: int) -> float:
    """How many bytes count as little: a small part of the value's, or what is alive at the bottom of a valley.

    Both sides of a valley are as high as the value is beside what is little.
    """
    lowest = live[positions[0]]
    for here in positions:
        if TUNING.run_reach * live[here] <= n_bytes:
            return n_bytes / TUNING.run_reach
        if live[here] >= TUNING.run_reach * lowest:
            return float(lowest)
        lowest = min(lowest, live[here])
    return -1.0
