"""Assign memory to each value of a program and its gradient: the paper's §3 and Fig. 2.

A schedule goes in (`forward_graph`, or `gradient_graph`: Algorithm 2). `allocate` assigns an allocation to every value,
in one pass with a liveness counter for each. `timeline` counts the live bytes at each step and lists the values that
are live at the peak.

The strategies are the paper's (§5.1). *none*: each value has its own allocation. *inplace*: an elementwise operation
that is the last to read an input overwrites it, and cotangents are summed in place. *sharing*: besides, the allocation
of a dead value is reused; as in the authors' MXNet only between values of which one is at most 16 times the other. All
are linear in the size of the graph, up to a logarithm.

This explains a plan operation by operation without any compiler, and reproduces the paper's curves. A compiler
allocates otherwise: this has no fusion, no temporaries inside an operation and no alignment. Arguments, which include
the cotangents of the program's outputs, take no memory; results are live until the end.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §3.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from jaxsub.allocator.gradient import Schedule, Step

Strategy = Literal["none", "inplace", "sharing"]

STRATEGIES: tuple[Strategy, ...] = ("none", "inplace", "sharing")
MATCH_RANGE = 16  # the authors' own: NNVM_EXEC_MATCH_RANGE of MXNet's graph allocator


@dataclass(frozen=True, slots=True)
class Allocation:
    """The memory of every buffer of a schedule.

    Attributes:
        strategy: The strategy it was made with.
        tags: For each buffer the number of its allocation; `None` for arguments.
        offsets: For each buffer where its allocation starts, in bytes; `None` for arguments.
        total_bytes: Bytes of all allocations.
    """

    strategy: Strategy
    tags: tuple[int | None, ...]
    offsets: tuple[int | None, ...]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes while each step of a schedule runs, without arguments.

    Attributes:
        live_bytes: For each step the bytes of all buffers that are live while it runs; buffers that are updated in
            place count once.
        peak_bytes: The most of them: no allocation needs less.
        peak_step: The first step that reaches it; -1 where there is none.
        alive: The buffers that are live then, largest first.
    """

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    alive: tuple[int, ...]


def allocate(schedule: Schedule, strategy: Strategy = "sharing") -> Allocation:
    """Assign memory to every buffer, statically, in one pass with liveness counters: the paper's Fig. 2.

    Args:
        schedule: The operations, in execution order.
        strategy: `none`, `inplace` or `sharing`; see the module's docstring.

    Returns:
        The allocation. `sharing` never takes more than `inplace`, nor that more than `none`.

    Raises:
        ValueError: If there is no such strategy.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> from jaxsub.allocator import LEAST_NEEDS, gradient_graph
        >>> layer = graph_of([("dot_general", [0, 1], [8]), ("tanh", [2], [8])], 2, [3])
        >>> schedule = gradient_graph(layer, needs=LEAST_NEEDS)
        >>> [allocate(schedule, strategy).total_bytes for strategy in STRATEGIES]
        [24, 16, 16]

    References:
        Chen et al., 2016, §3 and Fig. 2.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"expected a strategy of {', '.join(STRATEGIES)}, got {strategy!r}")
    pool = _Pool()
    tags: list[int | None] = [None] * len(schedule.buffers)
    for step, donors, dead in _liveness(schedule, in_place=strategy != "none"):
        for w in step.writes:
            tags[w] = tags[donors[w]] if w in donors else pool.take(schedule.buffers[w].n_bytes)
        for b in dead if strategy == "sharing" else ():
            pool.free(tags[b])
    starts = [0, *accumulate(pool.sizes)]
    offsets = tuple(None if tag is None else starts[tag] for tag in tags)
    return Allocation(strategy, tuple(tags), offsets, starts[-1])


def _liveness(schedule: Schedule, in_place: bool) -> Iterator[tuple[Step, dict[int, int], list[int]]]:
    """Yield each step, the read that each write takes the memory of, and the buffers that are dead after it.

    A counter for each buffer holds the number of reads still to come; only a last read is overwritten.
    """
    pending = [0] * len(schedule.buffers)
    for step in schedule.steps:
        for r in step.reads:
            pending[r] += 1
    for b in (*range(schedule.n_given), *schedule.results):
        pending[b] += 1
    for step in schedule.steps:
        donors: dict[int, int] = {}
        taken: set[int] = set()
        for r, w in step.in_place if in_place else ():
            if pending[r] == 1 and w not in donors and r not in taken:
                donors[w] = r
                taken.add(r)
        for r in step.reads:
            pending[r] -= 1
        yield step, donors, [b for b in (*step.reads, *step.writes) if not pending[b] and b not in taken]


class _Pool:
    """Allocations by number, and the unused ones sorted by size."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.unused: list[tuple[int, int]] = []

    def take(self, n_bytes: int) -> int:
        """Take the smallest unused allocation that is large enough, else grow the largest, else make one."""
        at = bisect_left(self.unused, (n_bytes, -1))
        if at < len(self.unused) and self.unused[at][0] <= n_bytes * MATCH_RANGE:
            return self.unused.pop(at)[1]
        if at and self.unused[at - 1][0] * MATCH_RANGE >= n_bytes:
            tag = self.unused.pop(at - 1)[1]
            self.sizes[tag] = n_bytes
            return tag
        self.sizes.append(n_bytes)
        return len(self.sizes) - 1

    def free(self, tag: int | None) -> None:
        """Return an allocation for reuse."""
        if tag is not None:
            insort(self.unused, (self.sizes[tag], tag))


def timeline(schedule: Schedule) -> Timeline:
    """Count the live bytes at each step, and list the buffers that are live at the peak.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> from jaxsub.allocator import forward_graph
        >>> line = timeline(forward_graph(graph_of([("sin", [0], [8]), ("dot_general", [1, 0], [4])], 1, [2])))
        >>> line.live_bytes, line.peak_step
        ((8, 12), 1)
    """
    n = len(schedule.steps)
    births, deaths = [n] * len(schedule.buffers), [n - 1] * len(schedule.buffers)
    for at, (step, donors, dead) in enumerate(_liveness(schedule, in_place=True)):
        for w in step.writes:
            births[w] = at
        for b in dead:
            deaths[b] = at
        for b in donors.values():
            deaths[b] = at - 1
    change = [0] * (n + 1)
    made = schedule.buffers[schedule.n_given :]
    for buffer in made:
        change[births[buffer.index]] += buffer.n_bytes
        change[deaths[buffer.index] + 1] -= buffer.n_bytes
    live = tuple(accumulate(change[:n]))
    peak = max(live, default=0)
    peak_step = live.index(peak) if live else -1
    alive = [buffer for buffer in made if births[buffer.index] <= peak_step <= deaths[buffer.index]]
    return Timeline(live, peak, peak_step, tuple(b.index for b in sorted(alive, key=lambda b: -b.n_bytes)))
