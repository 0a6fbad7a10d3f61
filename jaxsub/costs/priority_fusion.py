"""Predict which values a GPU's compiler stores though it could fuse them: it does what is faster by its own estimate.

Elementwise work that several kernels need is done in each, or once, in a kernel of its own whose result is stored and
read. XLA fuses one kernel after another into all that read it, always the one that spares most time, until none does.
By its estimate a kernel takes the longer of the time of its operations (`jaxsub.costs.operation_counts`) and of its
reads and writes, nearly: `exp` is repeated, `tanh` of 16-bit floats on an H100 is stored.

Source: OpenXLA, `xla/service/gpu/transforms/priority_fusion.cc` and, for times,
`xla/service/gpu/model/gpu_performance_model_base.cc`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxsub.costs.operation_counts import operations
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat

ERFC_COPIES = 37
"""How often an `erfc` repeats what XLA has moved in front of the reshape of a product's result."""

LAUNCH_SECONDS = 1e-6
OVERLAP = 0.95
"""The part of the shorter of a kernel's two times that passes beside the longer."""


@dataclass(slots=True, eq=False)
class PriorityFusion:
    """Kernels, each by the number of the equation that it ends with.

    Attributes:
        eqns: The equations, in order.
        makers: Variables that may be fused into all that read them, each with the number of the equation that makes it.
        readers: The numbers of the equations that read each variable.
        base: The variable that another is, or is a view of.
        bytes_of: The bytes of a variable.
        gpu: The GPU.
        flat: Variables that products make as matrices, and that are reshaped where they are read.
    """

    eqns: Sequence[Any]
    makers: Mapping[Any, int]
    readers: Mapping[Any, Collection[int]]
    base: Callable[[Any], Any]
    bytes_of: Callable[[Any], int]
    gpu: Target
    flat: Collection[Any] = ()
    _rate: float = field(init=False)
    _operations: dict[int, int] = field(init=False, default_factory=dict)
    _reads: dict[int, set[Any]] = field(init=False, default_factory=dict)
    _repeats: dict[int, set[Any]] = field(init=False, default_factory=dict)
    _users: dict[Any, set[int]] = field(init=False, default_factory=dict)
    _n_bytes: dict[int, int] = field(init=False, default_factory=dict)
    _seconds: dict[int, float] = field(init=False, default_factory=dict)
    _gains: dict[Any, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rate = self.gpu.rate("float32", is_matmul=False)

    def stored(self) -> set[Any]:
        """Find the values that are stored though they could be fused."""
        found = self._connected([v for v in self.makers if self._may_pay(v)])
        for v in found:
            # products do what they fuse in any case
            self._users[v] = {p for p in self.readers.get(v, ()) if self.eqns[p].primitive.name != "dot_general"}
        for kernel in {self.makers[v] for v in found}.union(*self._users.values()):
            self._reads[kernel] = {self.base(a) for a in self.eqns[kernel].invars if compat.is_var(a)}
            self._operations[kernel] = operations(self.eqns[kernel], self.gpu)
            self._repeats[kernel] = self._repeated(self.eqns[kernel])
            self._n_bytes[kernel] = sum(map(self.bytes_of, (*self.eqns[kernel].outvars, *self._reads[kernel])))
            self._seconds[kernel] = self._time(self._operations[kernel], self._n_bytes[kernel])
        return self._fuse(found)

    def _repeated(self, eqn: Any) -> set[Any]:
        """What an equation repeats if it is fused: the operand of an `erfc` of a product's result, but for a bias."""
        if eqn.primitive.name != "erfc":
            return set()
        first = v = self._operand(eqn)
        while v in self.makers:
            v = self._operand(self.eqns[self.makers[v]])
        return {first} if v in self.flat else set()

    def _operand(self, eqn: Any) -> Any:
        """The one operand of a result's shape; `None` where there are several or none."""
        shape = eqn.outvars[0].aval.shape
        found = {self.base(a) for a in eqn.invars if compat.is_var(a) and a.aval.shape == shape}
        return found.pop() if len(found) == 1 else None

    def _may_pay(self, v: Any) -> bool:
        """Tell whether a value takes longer to compute than to write; what does not is fused in any case."""
        seconds = operations(self.eqns[self.makers[v]], self.gpu) / self._rate
        return seconds > self.bytes_of(v) / self.gpu.bytes_per_second

    def _connected(self, values: Iterable[Any]) -> list[Any]:
        """List what values are computed from and what is computed of them, up to what is stored, in order."""
        left, found = list(values), set[Any]()
        while left:
            if (v := left.pop()) in found or v not in self.makers:
                continue
            found.add(v)
            left += [self.base(a) for a in self.eqns[self.makers[v]].invars if compat.is_var(a)]
            left += [w for p in self.readers.get(v, ()) for w in self.eqns[p].outvars]
        return sorted(found, key=self.makers.__getitem__)

    def _fuse(self, values: Sequence[Any]) -> set[Any]:
        """Fuse one value after another, and return those that are left."""
        queue, left = list[tuple[float, int, Any]](), set(values)

        def weigh(v: Any) -> None:
            self._gains[v] = self._gain(v)
            if self._gains[v] >= 0:
                heapq.heappush(queue, (-self._gains[v], -self.makers[v], v))

        for v in values:
            weigh(v)
        while queue:
            gain, _, v = heapq.heappop(queue)
            if v in left and self._users[v] and -gain == self._gains[v]:
                left.remove(v)
                touched = self._into_users(v)
                for w in left & touched:
                    weigh(w)
        return {v for v in left if len(self._users[v]) > 1}

    def _gain(self, v: Any) -> float:
        """What fusing a value into all that read it spares, in seconds."""
        maker = self.makers[v]
        gain = LAUNCH_SECONDS + self._seconds[maker]
        for k in self._users[v]:
            gain += self._seconds[k] - self._time(*self._with(k, v))
        return gain

    def _with(self, kernel: int, v: Any) -> tuple[int, int]:
        """The operations and bytes of a kernel with a value fused into it: it reads what that is made of instead."""
        maker, reads = self.makers[v], self._reads[kernel]
        n_operations = self._operations[maker] * (ERFC_COPIES if v in self._repeats[kernel] else 1)
        n_bytes = sum([self.bytes_of(r) for r in self._reads[maker] if r not in reads])
        n_bytes -= self.bytes_of(v) if v in reads else 0
        return self._operations[kernel] + n_operations, self._n_bytes[kernel] + n_bytes

    def _into_users(self, v: Any) -> set[Any]:
        """Fuse a value into all that read it; return the values that are worth something else now."""
        maker, touched = self.makers[v], set[Any]()
        for kernel in self._users[v]:
            self._operations[kernel], self._n_bytes[kernel] = self._with(kernel, v)
            self._reads[kernel] = (self._reads[kernel] | self._reads[maker]) - {v}
            self._seconds[kernel] = self._time(self._operations[kernel], self._n_bytes[kernel])
            self._repeats[kernel] = self._repeats[kernel] | self._repeats[maker]
            touched.update(self._reads[kernel], self.eqns[kernel].outvars)
        for u in self._reads[maker] & self._users.keys():
            self._users[u] = (self._users[u] - {maker}) | self._users[v]
        return touched

    def _time(self, n_operations: int, n_bytes: int) -> float:
        computing, moving = n_operations / self._rate, n_bytes / self.gpu.bytes_per_second
        return computing + moving - OVERLAP * min(computing, moving)
