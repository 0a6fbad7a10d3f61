"""Find gradients that a function takes itself, and what of their forward passes may be recomputed.

A loss of forces is a function of an energy's gradient. Its live bytes run up a hill: what the energy's forward pass
makes is alive until the backward pass, on the way down, reads it. No cut of such a program is good, for all of that
crosses every cut near the top. But of what is read again on the way up few values cross between two layers. A run
between two such cuts may be recomputed where the way down first reads what it made.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from jaxsub.core.decisions import Clone
from jaxsub.core.graph import Graph
from jaxsub.core.tuning import TUNING
from jaxsub.partition.cuts import find_cuts, live_bytes


def find_clones(graph: Graph) -> tuple[Clone, ...]:
    """List the runs of inner forward passes to recompute, in order; none where there is no inner gradient.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxsub.jaxpr.trace import trace
        >>> def energy(x, ws):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return x.sum()
        >>> forces = trace(lambda ws, x: (jax.grad(energy)(x, ws) ** 2).sum(), ([jnp.eye(4)] * 6, jnp.ones((9, 4))), {})
        >>> [(clone.start, clone.stop) for clone in find_clones(forces.graph)]
        [(1, 4), (4, 7), (7, 10), (10, 13)]
    """
    curve = live_bytes(graph)
    costly = np.cumsum([0, *(node.is_costly for node in graph.nodes)])
    hills = [hill for hill in _hills(curve) if costly[hill[1]] - costly[hill[0]] >= TUNING.few_costly]
    clones = sorted((c for hill in hills for c in _clones(graph, curve, *hill)), key=lambda clone: clone.start)
    return tuple(clones) if len(clones) > 1 else ()  # one layer alone, such as one skip connection's, is no gradient


def _hills(curve: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """The start, top and end of the highest hill, and of others at least half as high.

    Between two of them there is a valley at most half as high as the lower one.
    """
    between, highest = [(0, len(curve))], curve.max()
    while between:
        low, high = between.pop()
        top, least = low + int(curve[low:high].argmax()), int(curve[low:high].max()) // 2
        left, right = _valley(curve[low : top + 1][::-1], least), _valley(curve[top:high], least)
        start, end = low if left is None else top - left, high if right is None else top + right
        between += [(a, b) for a, b in ((low, start), (end, high)) if a < b]
        if 2 * curve[top] >= highest:
            yield start, top, end


def _valley(curve: np.ndarray, least: int) -> int | None:
    """Where the lowest point is before the highest hill, but for the one that the curve starts at; or `None`."""
    deepest = np.minimum.accumulate(curve)
    hills = np.flatnonzero((curve >= least) & (curve >= 2 * deepest) & (curve > 0))
    return None if not len(hills) else int(curve[: hills[curve[hills].argmax()]].argmin())


def _clones(graph: Graph, curve: np.ndarray, low: int, top: int, high: int) -> Iterator[Clone]:
    if not _is_inner_gradient(graph, int(curve[top]), low, top):
        return
    crossed = np.flatnonzero(live_bytes(graph.between(low, top)))
    found = find_cuts(graph.between(low, int(crossed[-1]))) if len(crossed) else ()
    cuts = [cut for cut in found[:-1] if cut > low]
    for start, stop in pairwise([low, *cuts]):  # what is above the last cut is read at once
        late = _read_late(graph, start, stop, top)
        n_bytes = sum(graph.values[v].n_bytes for v in late)
        if n_bytes <= TUNING.little_share * curve[top] or not all(n.can_recompute for n in graph.nodes[start:stop]):
            continue
        before = min(node for v in late for node in graph.values[v].consumers if node >= stop)
        if before < high:
            yield Clone(start, stop, before)


def _is_inner_gradient(graph: Graph, height: int, low: int, top: int) -> bool:
    """Whether much of what is alive at the top of a hill was last read long before, and is read again behind it."""
    long_before, last = low + TUNING.hill_share * (top - low), graph.last_uses()
    waiting = (
        value.n_bytes
        for value in graph.values[graph.first_value(low) : graph.first_value(top)]
        if last[value.index] >= top
        and max(value.producer or 0, *(c for c in value.consumers if c < top), 0) < long_before
    )
    return sum(waiting) >= TUNING.waiting_share * height


def _read_late(graph: Graph, start: int, stop: int, top: int) -> list[int]:
    """What a run makes that is read again from the top of the hill on, and not between the run and there."""
    outputs = graph.output_set()
    return [v for v in graph.made_by(start, stop) if v not in outputs
            and (late := [c for c in graph.values[v].consumers if c >= stop]) and min(late) >= top]  # fmt: skip
