"""Kernels that a GPU's compiler makes one: those that read the same array, and none of which waits for another.

Elementwise kernels of one shape that share an operand become one kernel with several results; so do a kernel and
another that reads its result, if nothing between them has to run first. What is made together stands together, and all
that any of them reads has to be there before: a value that is executed again for a weight's gradient, say, is made with
the cotangent that reads the same stored value.

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
    """Join kernels.

    Args:
        kernels: Kernels, each with a `shape` where it may be joined with others of that shape; in an order in which
            each finds what it reads.
        given: Buffers that stand before the first, in order.
        outputs: Buffers that the program returns, in order.

    Returns:
        The kernels, in an order in which each finds what it reads.
    """
    groups = _Groups(kernels)
    for buffer in _uses_first(kernels, given, outputs):
        groups.join_readers(buffer)
        groups.join_maker(buffer)
    return groups.kernels()


class _Groups:
    """Kernels, some of them joined: one of each group stands for it."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.all = kernels
        self.home = list(range(len(kernels)))
        self.members: dict[int, list[int]] = {i: [i] for i in self.home}
        self.makers = {buffer: i for i, kernel in enumerate(kernels) for buffer in kernel.makes}
        self.readers: dict[Any, list[int]] = {}
        self.behind: list[int] = []  # as bits, those that a kernel waits for, and itself
        for i, kernel in enumerate(kernels):
            for buffer in kernel.reads:
                self.readers.setdefault(buffer, []).append(i)
            bits = (self.behind[self.makers[b]] for b in kernel.reads if b in self.makers)
            self.behind.append(functools.reduce(operator.or_, bits, 1 << i))

    def join_readers(self, buffer: Any) -> None:
        """Join those that read a buffer: with those that are joined already, then with the last."""
        found = list({self.home[i] for i in self.readers.get(buffer, ()) if self.all[i].shape is not None})
        found.sort(key=lambda i: (len(self.members[i]) == 1, -max(self.members[i])))
        while found:
            first, *found = found
            for other in list(found):
                if self._alike(first, other) and not self._waits(first, other) and not self._waits(other, first):
                    self._join(first, other)
                    found.remove(other)

    def join_maker(self, buffer: Any) -> None:
        """Join what makes a buffer with a reader of it that waits for nothing else that waits for it."""
        maker = self.home[self.makers[buffer]] if buffer in self.makers else None
        readers = {self.home[i] for i in self.readers.get(buffer, ())} - {maker}
        if maker is None or (len(readers) == 1 and len(self.members[next(iter(readers))]) == 1):
            return
        for reader in sorted(readers, key=lambda i: (len(self.members[i]) == 1, i)):
            if self._alike(maker, reader) and not any(self._waits(i, maker) for i in self._before(reader) - {maker}):
                self._join(maker, reader)
                return

    def kernels(self) -> list[Kernel]:
        """The kernels, those joined in the place of their last."""
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
        """Whether two work on arrays of one shape, and sum over the same axes where both sum."""
        if self.all[a].shape is None or self.all[a].shape != self.all[b].shape:
            return False
        axes = {self.all[i].axes for i in (*self.members[a], *self.members[b])} - {None}
        return len(axes) <= 1

    def _before(self, i: int) -> set[int]:
        """Those that one reads from."""
        read = (b for j in self.members[i] for b in self.all[j].reads)
        return {self.home[self.makers[b]] for b in read if b in self.makers} - {i}

    def _waits(self, a: int, b: int) -> bool:
        """Whether one waits for another."""
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
    """Buffers, each before those that it is made of: a walk from the outputs, turned round."""
    reads = {buffer: kernel.reads for kernel in kernels for buffer in kernel.makes}
    places = {buffer: i for i, buffer in enumerate(dict.fromkeys((*given, *reads)))}
    order: dict[Any, None] = {}
    for output in outputs:
        stack = [output]
        while stack:
            missing = [b for b in reads.get(stack[-1], ()) if b not in order]
            if missing:  # what is given is met first, then what is made first
                stack += sorted(missing, key=lambda b: places.get(b, -1), reverse=True)
            else:
                order.setdefault(stack.pop())
    return list(order)[::-1]
