"""Fuse kernels as XLA's multi-output fusion does on a GPU: kernels that read the same array and are independent.

Elementwise kernels of one shape that share an operand are fused into one kernel with several results; so are a kernel
and a consumer of its result, if nothing has to run between them. All results of a fused kernel are live at once, and
all its operands must be live before: a value that is recomputed for a weight's gradient, for example, is made together
with the cotangent that reads the same stored value.

The compiler goes through the shared arrays from the last to the first. Source: OpenXLA,
`xla/backends/gpu/transforms/multi_output_fusion.cc`.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jaxsub.costs.scheduler import Kernel


def joined(kernels: Sequence[Kernel], given: Iterable[Any], outputs: Iterable[Any]) -> list[Kernel]:
    """Fuse kernels.

    Args:
        kernels: Kernels in a valid order, each with a `shape` where it may be fused with others of that shape.
        given: Buffers that are live before the first, in order.
        outputs: Buffers that the program returns, in order.

    Returns:
        The kernels, in a valid order.
    """
    groups = _Groups(kernels)
    for buffer in _uses_first(kernels, given, outputs):
        groups.join_readers(buffer)
        groups.join_maker(buffer)
    return groups.kernels()


class _Groups:
    """Groups of fused kernels, each named by one of its kernels."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.all = kernels
        self.home = list(range(len(kernels)))
        self.members: dict[int, list[int]] = {i: [i] for i in self.home}
        self.makers = {buffer: i for i, kernel in enumerate(kernels) for buffer in kernel.makes}
        self.readers: dict[Any, list[int]] = {}
        self.behind: list[int] = []  # for each kernel, itself and those that it depends on, as bits
        for i, kernel in enumerate(kernels):
            for buffer in kernel.reads:
                self.readers.setdefault(buffer, []).append(i)
            bits = (self.behind[self.makers[b]] for b in kernel.reads if b in self.makers)
            self.behind.append(functools.reduce(operator.or_, bits, 1 << i))

    def join_readers(self, buffer: Any) -> None:
        """Fuse the readers of a buffer: with those that are fused already, then with the last."""
        found = list({self.home[i] for i in self.readers.get(buffer, ()) if self.all[i].shape is not None})
        found.sort(key=lambda i: (len(self.members[i]) == 1, -max(self.members[i])))
        while found:
            first, *found = found
            for other in list(found):
                if self._alike(first, other) and not self._waits(first, other) and not self._waits(other, first):
                    self._join(first, other)
                    found.remove(other)

    def join_maker(self, buffer: Any) -> None:
        """Fuse the maker of a buffer with a reader, unless another kernel must run between them."""
        maker = self.home[self.makers[buffer]] if buffer in self.makers else None
        readers = {self.home[i] for i in self.readers.get(buffer, ())} - {maker}
        if maker is None or (len(readers) == 1 and len(self.members[next(iter(readers))]) == 1):
            return
        for reader in sorted(readers, key=lambda i: (len(self.members[i]) == 1, i)):
            if self._alike(maker, reader) and not any(self._waits(i, maker) for i in self._before(reader) - {maker}):
                self._join(maker, reader)
                return

    def kernels(self) -> list[Kernel]:
        """Return the kernels, fused ones in the place of their last."""
        missing = {i: len(self._before(i)) for i in self.members}
        waiting: dict[int, list[int]] = {}
        for i in self.members:
            for j in self._before(i):
                waiting.setdefault(j, []).append(i)
        ready = [(max(self.members[i]), i) for i, n in missing.items() if not n]
        heapq.heapify(ready)
        order = []
        while ready:
            _, i = heapq.heappop(ready)
            order.append(self._merged(self.members[i]))
            for j in waiting.get(i, ()):
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, (max(self.members[j]), j))
        return order

    def _merged(self, members: Sequence[int]) -> Kernel:
        if len(members) == 1:
            return self.all[members[0]]
        parts = [self.all[i] for i in sorted(members)]
        makes = tuple(b for k in parts for b in k.makes)
        sizes = tuple(n for k in parts for n in k.n_bytes)
        uses = Counter(b for k in parts for b in k.reads)
        each = tuple(frozenset(b for b in k.over if uses[b] == 1) - set(makes) for k in parts for _ in k.makes)
        return Kernel(max(k.position for k in parts), makes, frozenset(uses) - set(makes), sizes,
                      max(k.inner_bytes for k in parts), shape=parts[0].shape, each=each)  # fmt: skip

    def _alike(self, a: int, b: int) -> bool:
        """Tell whether two kernels work on arrays of one shape, and reduce the same axes where both reduce."""
        if self.all[a].shape is None or self.all[a].shape != self.all[b].shape:
            return False
        axes = {self.all[i].axes for i in (*self.members[a], *self.members[b])} - {None}
        return len(axes) <= 1

    def _before(self, i: int) -> set[int]:
        """Find the groups that make a group's operands."""
        read = (b for j in self.members[i] for b in self.all[j].reads)
        return {self.home[self.makers[b]] for b in read if b in self.makers} - {i}

    def _waits(self, a: int, b: int) -> bool:
        """Tell whether one kernel depends on another."""
        return bool(self.behind[a] >> b & 1)

    def _join(self, a: int, b: int) -> None:
        for i in self.members[b]:
            self.home[i] = a
        self.members[a] += self.members.pop(b)
        both, bits = 1 << a | 1 << b, self.behind[a] | self.behind[b]
        for i in self.members:
            if self.behind[i] & both:
                self.behind[i] |= bits


def _uses_first(kernels: Sequence[Kernel], given: Iterable[Any], outputs: Iterable[Any]) -> list[Any]:
    """List buffers, each before its operands: the reverse of a walk from the outputs."""
    reads = {buffer: kernel.reads for kernel in kernels for buffer in kernel.makes}
    places = {buffer: i for i, buffer in enumerate(dict.fromkeys((*given, *reads)))}
    order: dict[Any, None] = {}
    for output in outputs:
        stack = [output]
        while stack:
            missing = [b for b in reads.get(stack[-1], ()) if b not in order]
            if missing:  # program inputs first, then the buffers that are made first
                stack += sorted(missing, key=lambda b: places.get(b, -1), reverse=True)
            else:
                order.setdefault(stack.pop())
    return list(order)[::-1]
