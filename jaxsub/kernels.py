"""In what order a compiled program runs its kernels, and what stands in memory meanwhile.

Kernels go in, each with the buffers that it makes and reads; the order and the most bytes that stand at one time come
out. A CPU runs them breadth first: each as soon as what it reads is there, needed or not. A kernel may write over an
operand of its own shape that dies there, and until an output is written its place hosts what fits.

Sources: OpenXLA, `BFScheduler` in `xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc`, and
`xla/service/buffer_assignment.cc`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Kernel:
    """What runs at once.

    Attributes:
        position: The equation for which it runs.
        makes: The buffers it makes: variables, or pairs of a variable and what it was copied for.
        reads: The buffers it reads.
        n_bytes: Bytes of each buffer it makes.
        inner_bytes: What it allocates for itself.
        over: Of what it reads, what it may write over: of the same shape, and read element by element.
        is_late: Whether a single elementwise equation is all of it: of what is ready at once, such come last.
    """

    position: int
    makes: tuple[Any, ...]
    reads: frozenset[Any]
    n_bytes: tuple[int, ...]
    inner_bytes: int = 0
    over: frozenset[Any] = frozenset()
    is_late: bool = False


def schedule(kernels: Sequence[Kernel], given: Iterable[Any], is_cpu: bool) -> list[Kernel]:
    """The order in which kernels run: on a CPU breadth first, on a GPU as they come."""
    if not is_cpu:
        return list(kernels)
    made = {buffer for kernel in kernels for buffer in kernel.makes}
    there = set(given)
    missing = [len((k.reads & made) - there) for k in kernels]
    readers: dict[Any, list[int]] = {}
    for i, kernel in sorted(enumerate(kernels), key=lambda pair: pair[1].is_late):
        for buffer in kernel.reads:
            readers.setdefault(buffer, []).append(i)
    ready, order = deque(i for i, n in enumerate(missing) if not n), []
    while ready:
        i = ready.popleft()
        order.append(kernels[i])
        for buffer in kernels[i].makes:
            for j in readers.get(buffer, ()) if buffer not in there else ():
                missing[j] -= 1
                if not missing[j]:
                    ready.append(j)
    return order


def made_late(kernels: Sequence[Kernel], n: int) -> list[Kernel]:
    """The same kernels, but those of the first `n` equations only when something else reads what they make.

    Args:
        kernels: The kernels, in the order of their equations.
        n: How many equations may wait.
    """
    makers = {buffer: kernel for kernel in kernels for buffer in kernel.makes if kernel.position < n}
    order: dict[int, Kernel] = {}
    for kernel in kernels:
        ahead = [kernel] if kernel.position >= n else []
        while ahead:
            missing = [m for b in ahead[-1].reads if (m := makers.get(b)) is not None and id(m) not in order]
            if missing:
                ahead.append(min(missing, key=lambda m: m.position))
            else:
                done = ahead.pop()
                order[id(done)] = done
    order.update((id(kernel), kernel) for kernel in kernels if id(kernel) not in order)
    return list(order.values())


def peak_bytes(kernels: Sequence[Kernel], standing: dict[Any, int], ends: set[Any], free: set[Any],
               written: Iterable[Any] = ()) -> int:  # fmt: skip
    """The most bytes that stand at one time.

    Args:
        kernels: The kernels, in the order in which they run.
        standing: Bytes of the buffers that stand at the start.
        ends: Buffers that must stand at the end.
        free: Buffers whose memory is somebody else's.
        written: Of these, outputs that a kernel writes: until then their places host what fits.
    """
    sizes = {**standing, **{b: n for k in kernels for b, n in zip(k.makes, k.n_bytes, strict=True)}}
    last = {buffer: i for i, kernel in enumerate(kernels) for buffer in (*kernel.makes, *kernel.reads)}
    last |= dict.fromkeys(ends, len(kernels))
    born = {buffer: i for i, kernel in enumerate(kernels) for buffer in kernel.makes}
    places = [(sizes[b], born[b]) for b in written if b in born]
    sizes |= dict.fromkeys(free, 0)
    spans = {b: (born.get(b, 0), last[b]) for b in sizes if b in last}
    sizes |= dict.fromkeys(_hosted(sizes, spans, places), 0)
    dying: dict[int, list[Any]] = {}
    for buffer, i in last.items():
        dying.setdefault(i, []).append(buffer)
    live = sum(sizes[b] for b in standing if b in last)
    peak = live
    for i, kernel in enumerate(kernels):
        size = sum(sizes[b] for b in kernel.makes)
        dies = [sizes.get(b, 0) for b in dying.get(i, ())]
        over = [sizes.get(b, 0) for b in dying.get(i, ()) if b in kernel.over]
        reused = size if any(0 < size <= d for d in over) else 0
        peak = max(peak, live + size - reused + kernel.inner_bytes)
        live += size - sum(dies)
    return peak


def _hosted(sizes: dict[Any, int], spans: dict[Any, tuple[int, int]], places: Sequence[tuple[int, int]]) -> list[Any]:
    """The buffers, largest first, that lie in places of outputs before those are written."""
    taken: list[list[tuple[int, int]]] = [[] for _ in places]
    order, found = sorted(range(len(places)), key=lambda p: places[p][0]), []
    for b in sorted(spans, key=lambda b: (-sizes[b], spans[b])):
        start, stop = spans[b]
        for p in order if sizes[b] else ():
            size, written_at = places[p]
            is_free = all(stop < a or z < start for a, z in taken[p])
            if sizes[b] <= size and stop < written_at and is_free:
                taken[p].append((start, stop))
                found.append(b)
                break
    return found
