"""Predict the order in which a compiled program runs its kernels, and its peak of live bytes.

Kernels go in, each with the buffers that it makes and reads; their order and the most live bytes come out. A CPU runs
them breadth first: each as soon as its operands are made, needed or not. A GPU's compiler tries several orders and
takes the one that needs least. A kernel may overwrite an operand of its own shape at its last use, and until an output
is written, its buffer may host other values that fit.

Sources: OpenXLA, `BFScheduler`, `ListScheduler` and `DFSMemoryScheduler` in
`xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc`, and `xla/service/buffer_assignment.cc`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Kernel:
    """Equations that run as one kernel.

    Attributes:
        position: The equation for which it runs.
        makes: The buffers it makes: variables, or pairs of a variable and the reason for its copy.
        reads: The buffers it reads.
        n_bytes: Bytes of each buffer it makes.
        inner_bytes: Bytes it allocates for itself.
        over: The operands that it may overwrite: of the same shape, and read element by element.
        is_late: Whether it is a single elementwise equation: among kernels that are ready, these come last.
        shape: The shape of kernels that a GPU may fuse with others of that shape; `None` for other kernels.
        axes: The axes it sums over; `None` where it sums over none.
        each: For fused kernels: for each buffer they make, the operands that it may overwrite.
        after: The buffers that have to be made before, though it does not read them: a barrier waits for them.
    """

    position: int
    makes: tuple[Any, ...]
    reads: frozenset[Any]
    n_bytes: tuple[int, ...]
    inner_bytes: int = 0
    over: frozenset[Any] = frozenset()
    is_late: bool = False
    shape: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    each: tuple[frozenset[Any], ...] = ()
    after: frozenset[Any] = frozenset()


def schedule(kernels: Sequence[Kernel], given: Iterable[Any], is_cpu: bool) -> list[Kernel]:
    """Order kernels as they run: on a CPU breadth first, on a GPU as given."""
    if not is_cpu:
        return list(kernels)
    made = {buffer for kernel in kernels for buffer in kernel.makes}
    known = set(given)
    waits = [((k.reads | k.after) & made) - known for k in kernels]
    missing = list(map(len, waits))
    readers: dict[Any, list[int]] = {}
    for i, _ in sorted(enumerate(kernels), key=lambda pair: pair[1].is_late):
        for buffer in waits[i]:
            readers.setdefault(buffer, []).append(i)
    ready, order = deque(i for i, n in enumerate(missing) if not n), []
    while ready:
        i = ready.popleft()
        order.append(kernels[i])
        for buffer in kernels[i].makes:
            for j in readers.get(buffer, ()) if buffer not in known else ():
                missing[j] -= 1
                if not missing[j]:
                    ready.append(j)
    return order


def body_orders(kernels: Sequence[Kernel], given: Iterable[Any], outputs: Iterable[Any],
                is_cpu: bool) -> list[list[Kernel]]:  # fmt: skip
    """Order the kernels of a loop's body: a GPU's compiler takes the order of those returned that needs less."""
    first = schedule(kernels, given, is_cpu)
    return [first] if is_cpu else [first, depth_first(kernels, outputs)]


def made_late(kernels: Sequence[Kernel], n: int) -> list[Kernel]:
    """Delay the kernels of the first `n` equations until another kernel reads their results.

    Args:
        kernels: The kernels, in the order of their equations.
        n: How many equations may be delayed.
    """
    makers = {buffer: kernel for kernel in kernels for buffer in kernel.makes if kernel.position < n}
    rank = {id(kernel): i for i, kernel in enumerate(kernels)}
    order: dict[int, Kernel] = {}
    for kernel in kernels:
        ahead = [kernel] if kernel.position >= n else []
        while ahead:
            missing = [m for b in ahead[-1].reads if (m := makers.get(b)) is not None and id(m) not in order]
            if missing:
                ahead.append(min(missing, key=lambda m: (m.position, rank[id(m)])))
            else:
                done = ahead.pop()
                order[id(done)] = done
    order.update((id(kernel), kernel) for kernel in kernels if id(kernel) not in order)
    return list(order.values())


def greedy(kernels: Sequence[Kernel], at_start: dict[Any, int], ends: set[Any], free: set[Any]) -> list[Kernel]:
    """Order kernels greedily: of those that are ready, run the one after which the fewest bytes are live.

    Args:
        kernels: The kernels, in a valid order.
        at_start: Bytes of the buffers that are live at the start.
        ends: Buffers that are live at the end.
        free: Buffers that are live anyway.
    """
    sizes = {**at_start, **{b: n for k in kernels for b, n in zip(k.makes, k.n_bytes, strict=True)}}
    makers = {b: i for i, k in enumerate(kernels) for b in k.makes}
    uses = Counter(b for k in kernels for b in k.reads)
    before = [{makers[b] for b in k.reads if b in makers} for k in kernels]
    behind: list[list[int]] = [[] for _ in kernels]
    for i, found in enumerate(before):
        for j in found:
            behind[j].append(i)
    missing = [len(found) for found in before]
    ready, order = [i for i, n in enumerate(missing) if not n], []

    def gain(i: int) -> int:
        dies = (sizes.get(b, 0) for b in kernels[i].reads if uses[b] == 1 and b not in ends and b not in free)
        return sum(dies) - sum(kernels[i].n_bytes)

    while ready:
        best = max(ready, key=gain)
        ready.remove(best)
        order.append(kernels[best])
        uses.subtract(kernels[best].reads)
        for i in behind[best]:
            missing[i] -= 1
            if not missing[i]:
                ready.append(i)
    return order


def depth_first(kernels: Sequence[Kernel], outputs: Iterable[Any]) -> list[Kernel]:
    """Order kernels depth first: operands with the most readers first, then those that need the most memory to make.

    Args:
        kernels: The kernels, in a valid order.
        outputs: Buffers that are live at the end, in order.
    """
    makers = {b: i for i, k in enumerate(kernels) for b in k.makes}
    uses = Counter(b for k in kernels for b in k.reads)
    weight, total = dict[int, tuple[int, int]](), 0
    for i, kernel in enumerate(kernels):
        before = [weight[j] for j in {makers[b] for b in kernel.reads if b in makers}]
        total += sum(kernel.n_bytes)
        users = max(0, sum(uses[b] for b in kernel.makes) - 1) + sum(users for users, _ in before)
        weight[i] = (min(users, len(kernels)), min(total, sum(kernel.n_bytes) + sum(size for _, size in before)))
    order: dict[int, Kernel] = {}
    for last in (*(makers[b] for b in outputs if b in makers), *range(len(kernels))):
        ahead = [last]
        while ahead:
            missing = {j for b in kernels[ahead[-1]].reads if (j := makers.get(b, -1)) >= 0 and j not in order}
            if missing:
                ahead.append(max(missing, key=lambda j: (weight[j], -j)))
            else:
                done = ahead.pop()
                order[done] = kernels[done]
    return list(order.values())


def peak_bytes(kernels: Sequence[Kernel], at_start: dict[Any, int], ends: set[Any], free: set[Any],
               written: Iterable[Any] = (), spare: Sequence[int] = ()) -> int:  # fmt: skip
    """Find the peak of live bytes.

    Args:
        kernels: The kernels, in the order in which they run.
        at_start: Bytes of the buffers that are live at the start.
        ends: Buffers that are live at the end.
        free: Buffers whose memory is counted elsewhere.
        written: Those of `free` that are outputs which a kernel writes: until then they host other values.
        spare: Bytes of outputs that are written later than by all kernels: they host what is dead at the end.
    """
    sizes = {**at_start, **{b: n for k in kernels for b, n in zip(k.makes, k.n_bytes, strict=True)}}
    last = {buffer: i for i, kernel in enumerate(kernels) for buffer in (*kernel.makes, *kernel.reads)}
    last |= dict.fromkeys(ends, len(kernels))
    born = {buffer: i for i, kernel in enumerate(kernels) for buffer in kernel.makes}
    outputs = [(size, len(kernels)) for size in spare]
    elsewhere, returned = set(free), set(written)
    for b in filter(returned.__contains__, born):  # in the order in which they are made
        outputs.append((sizes[b], _first_made(b, kernels, sizes, born, last, elsewhere)))
    sizes |= dict.fromkeys(elsewhere, 0)
    spans = {b: (born.get(b, 0), last[b]) for b in sizes if b in last}
    sizes |= dict.fromkeys(_hosted(sizes, spans, outputs), 0)
    dying: dict[int, list[Any]] = {}
    for buffer, i in last.items():
        dying.setdefault(i, []).append(buffer)
    live = sum(sizes[b] for b in at_start if b in last)
    peak = live
    for i, kernel in enumerate(kernels):
        size = sum(sizes[b] for b in kernel.makes)
        dies = [sizes.get(b, 0) for b in dying.get(i, ())]
        reused = _reused(kernel, sizes, dying.get(i, ()))
        peak = max(peak, live + size - reused + kernel.inner_bytes)
        live += size - sum(dies)
    return peak


def _first_made(output: Any, kernels: Sequence[Kernel], sizes: dict[Any, int], born: dict[Any, int],
                last: dict[Any, int], elsewhere: set[Any]) -> int:  # fmt: skip
    """Find the first kernel that uses an output's buffer: what the output is written over, step by step, lies there.

    Those values are added to what is counted `elsewhere`.
    """
    b, i = output, born[output]
    while True:
        kernel, place = kernels[i], kernels[i].makes.index(b)
        over = kernel.each[place] if place < len(kernel.each) else kernel.over
        fitting = [a for a in over - elsewhere if last[a] == i and born.get(a, i) < i and sizes[a] == sizes[output]]
        if not fitting:
            return i
        b = max(fitting, key=lambda a: (born[a], kernels[born[a]].makes.index(a)))
        elsewhere.add(b)
        i = born[b]


def _reused(kernel: Kernel, sizes: dict[Any, int], dying: Iterable[Any]) -> int:
    """Count the bytes that a kernel writes over operands whose last use it is."""
    left, reused = set(dying), 0
    pairs = [(sizes[b], over) for b, over in zip(kernel.makes, kernel.each, strict=False)]
    for size, over in pairs or [(sum(sizes[b] for b in kernel.makes), kernel.over)]:
        fitting = [b for b in left & over if 0 < size <= sizes.get(b, 0)]
        if fitting:
            left.remove(min(fitting, key=lambda b: sizes[b]))
            reused += size
    return reused


def _hosted(sizes: dict[Any, int], spans: dict[Any, tuple[int, int]], outputs: Sequence[tuple[int, int]]) -> list[Any]:
    """List the buffers, largest first, that outputs host before they are written."""
    outputs, found = sorted(outputs), []
    room, taken = [size for size, _ in outputs], [0] * len(outputs)  # an output's bits are the times it is in use
    for b in sorted((b for b in spans if sizes[b]), key=lambda b: (-sizes[b], spans[b])):
        start, stop = spans[b]
        span = (2 << stop) - (1 << start)
        for p in range(bisect_left(room, sizes[b]), len(outputs)):
            if stop < outputs[p][1] and not taken[p] & span:
                taken[p] |= span
                found.append(b)
                break
    return found
