"""What a run's backward pass allocates, without a compiler: liveness that knows what the compiler fuses.

The compiler does not store most values of a jaxpr: elementwise chains are computed inside the fusion that reads them.
So a value is *stored* only if it comes from a costly equation or a reduction, or if a costly equation reads it, or
if it goes out. Every other value is *virtual*: reading it reads the stored values that it is made of, whose lives it
prolongs. Reshapes and transposes are views. A fusion may write over an operand of its own size that dies there.

Elementwise work that is slow, such as tanh, is stored too: the compiler does it once where both the recomputation and
the derivative read it.

The figure is exact on hand-worked chains and usually within a third of what the compiler allocates, but little more
than half of it on the two-product MLP of a transformer; `probes` asks the compiler itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from jaxsub import compat
from jaxsub.chain import Stage
from jaxsub.flops import bodies_of, is_costly
from jaxsub.graph import Graph
from jaxsub.options import TracedRun, mark_of
from jaxsub.program import aval_bytes

VIEWS = frozenset("reshape transpose squeeze expand_dims optimization_barrier name copy_p stop_gradient".split())
SLOW = frozenset(
    "tanh exp exp2 log log1p expm1 erf erfc erf_inv sin cos tan logistic pow rsqrt sqrt cbrt atan2".split()
)
"""Elementwise primitives that the compiler does not like to do twice."""

REDUCTIONS = ("reduce_", "argm", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod")


def backward_bytes(traced: TracedRun, saved: Sequence[int]) -> int:
    """What the backward pass of a region allocates: saved values, recomputation, cotangents in and out.

    Args:
        traced: The run.
        saved: Offsets of the values it saves.

    Returns:
        Bytes at the peak; the run's inputs, and gradients of weights that join no sum, are not among them.
    """
    again, stored = recomputed(traced, frozenset(saved))
    alias = {v: r for v, r in zip(traced.backward_inputs, traced.residuals, strict=False) if compat.is_var(r)}
    cotangents = traced.backward_inputs[len(traced.residuals) :]
    outputs, gradients = _cotangents_and_gradients(traced)
    return Lives((*again, *traced.backward), (*stored, *cotangents), outputs, gradients, alias,
                 is_slow_stored=True).peak()  # fmt: skip


def _cotangents_and_gradients(traced: TracedRun) -> tuple[list[Any], list[Any]]:
    """What a backward pass returns: what is handed on or joins a sum, and gradients of weights that go straight out."""
    handed_on: list[Any] = []
    written: list[Any] = []
    for v, i in zip(traced.backward_outputs, traced.function.differentiated, strict=True):
        goes_out = traced.weights[i] and i not in traced.function.joined
        (written if goes_out else handed_on).append(v)
    return handed_on, written


def pinned_stage(graph: Graph, start: int, stop: int, kind: int, seconds: float) -> Stage:
    """A stage that runs once: it is taken to keep all it makes and to allocate as much again."""
    made, flops = graph.made_by(start, stop), sum(n.flops for n in graph.nodes[start:stop])
    size = sum(graph.values[v].n_bytes for v in made)
    return Stage(start, stop, kind, flops, flops, size, size, size, size, size, made.start,
                 forward_seconds=seconds, tail_seconds=seconds)  # fmt: skip


def forward_bytes(traced: TracedRun) -> int:
    """What the forward pass of a run allocates beside what it reads and returns."""
    outputs = [v for v in traced.returned if compat.is_var(v)]
    return fused_peak(traced.forward, (), (), outputs, {})


def kept_bytes(traced: TracedRun) -> int:
    """What the compiler is likely to keep of a run between its passes, beside what it reads and returns."""
    return sum(kept_sizes(traced))


def kept_sizes(traced: TracedRun, most_bytes: float = math.inf) -> tuple[int, ...]:
    """Bytes of each of those values, largest first, as long as they are no more than `most_bytes` together."""
    returned = _bases(traced, filter(compat.is_var, traced.returned))
    lives = _unwrapped(traced)
    values = _read_again(traced, lives) - set(traced.inputs) - returned
    sizes = sorted((aval_bytes(v.aval) for v in values for _ in range(1 + (v in lives.turned))), reverse=True)
    return tuple(size for size, total in zip(sizes, accumulate(sizes), strict=True) if total <= most_bytes)


def kept_returned_bytes(traced: TracedRun) -> int:
    """Bytes of what a run returns that its own backward pass reads: they stand anyway and must not count twice."""
    residuals = _bases(traced, filter(compat.is_var, traced.residuals)) - set(traced.inputs)
    returned = _bases(traced, filter(compat.is_var, traced.returned))
    return sum(aval_bytes(v.aval) for v in residuals & returned)


def _bases(traced: TracedRun, values: Iterable[Any]) -> set[Any]:
    """What values are views of."""
    viewed = {
        e.outvars[0]: e.invars[0] for e in traced.forward if e.primitive.name in VIEWS and compat.is_var(e.invars[0])
    }

    def base(atom: Any) -> Any:
        while atom in viewed:
            atom = viewed[atom]
        return atom

    return set(map(base, values))


def unread_inputs(traced: TracedRun) -> frozenset[int]:
    """Which of a run's inputs its own backward pass is not likely to read: positions in `function.reads`.

    An input whose tanh a costly equation reads need not stand until the backward pass, for that reads the tanh.
    """
    read = _read_again(traced, _unwrapped(traced))
    return frozenset(i for i, v in enumerate(traced.inputs) if v not in read and not traced.weights[i])


def unwrapped_bytes(traced: TracedRun) -> int:
    """What both passes of an unwrapped run allocate, cotangents included, beside what it reads and returns."""
    given = set(traced.inputs)
    returned = {v for v in traced.returned if compat.is_var(v)}
    lives = _unwrapped(traced)
    lives.free |= given | returned | set(filter(compat.is_var, _cotangents_and_gradients(traced)[1]))
    return lives.peak()


def _unwrapped(traced: TracedRun) -> Lives:
    """Lives in an unwrapped run, forward and then backward.

    Elementwise work is done again inside the fusions of the backward pass, except what is slow, such as tanh: what the
    forward pass reads of that is stored, and the backward pass reads it too.
    """
    alias = {v: r for v, r in zip(traced.backward_inputs, traced.residuals, strict=False) if compat.is_var(r)}
    cotangents = traced.backward_inputs[len(traced.residuals) :]
    return Lives((*traced.forward, *traced.backward), (*traced.inputs, *cotangents),
                 (*traced.returned, *traced.backward_outputs), (), alias, is_slow_stored=True)  # fmt: skip


def _read_again(traced: TracedRun, lives: Lives) -> set[Any]:
    """The stored values that an unwrapped run's backward pass reads: inputs of the run, and what it makes."""
    n = len(traced.forward)
    again = {v for v, position in lives.last.items() if position >= n}
    return again & {*traced.inputs, *(v for e in traced.forward for v in e.outvars)}


def fused_peak(eqns: Sequence[Any], stored: Iterable[Any], outputs: Sequence[Any], free: Sequence[Any],
               alias: dict[Any, Any]) -> int:  # fmt: skip
    """Peak bytes of a run of equations.

    Args:
        eqns: The equations, in order.
        stored: Variables that stand at the start and are freed after their last use.
        outputs: Variables that must stand at the end.
        free: Variables whose memory is somebody else's: they cost nothing.
        alias: Variables that are other variables.

    Returns:
        The peak, in bytes.
    """
    return Lives(eqns, tuple(stored), outputs, free, alias).peak()


class Lives:
    """Which variables are stored, what each reads, and when it dies.

    Attributes:
        fusible: For each equation whether it is fused with what reads its result.
        reads: For each equation the stored variables that it reads, through what is fused with it.
        roots: For each variable the stored ones that it is made of: itself where it is stored.
        last: For each stored variable the position of the last equation that reads it.
    """

    def __init__(self, eqns: Sequence[Any], stored: Sequence[Any], outputs: Sequence[Any], free: Sequence[Any],
                 alias: dict[Any, Any], *, is_slow_stored: bool = False):  # fmt: skip
        self.eqns, self.stored, self.alias = eqns, stored, alias
        self.free = set(filter(compat.is_var, free))
        self.fusible = [_is_fusible(eqn) for eqn in eqns]
        self.needed = self._needed(outputs)
        if is_slow_stored:
            self.needed |= {v for e in eqns if e.primitive.name in SLOW for v in e.outvars}
        self.roots: dict[Any, frozenset[Any]] = {v: frozenset([v]) for v in stored}
        self.last: dict[Any, int] = {}
        self.reads: list[frozenset[Any]] = []
        self._walk(outputs)
        self.turned = self._copied(is_turned)
        self.copied = self.turned | self._copied(is_summed)

    def _atom(self, atom: Any) -> Any:
        return self.alias.get(atom, atom)

    def _needed(self, outputs: Sequence[Any]) -> set[Any]:
        """Variables that must be stored because a costly equation reads them, or they go out; views pass it on."""
        needed = {self._atom(v) for v in outputs if compat.is_var(v)} | self.free
        for eqn, is_fusible in zip(reversed(self.eqns), reversed(self.fusible), strict=True):
            is_view = eqn.primitive.name in VIEWS
            if is_view and not any(v in needed for v in eqn.outvars):
                continue
            if is_view or not is_fusible:
                ins = [self._atom(a) for a in eqn.invars if compat.is_var(a)]
                needed.update(v for v in ins if is_view or not _is_reduction(eqn))
        return needed

    def _walk(self, outputs: Sequence[Any]) -> None:
        for position, eqn in enumerate(self.eqns):
            ins = [self._atom(a) for a in eqn.invars if compat.is_var(a)]
            reads = frozenset().union(*(self.roots.get(v, ()) for v in ins)) if ins else frozenset()
            self.reads.append(reads)
            is_virtual = eqn.primitive.name in VIEWS or self.fusible[position]
            for v in eqn.outvars:
                stays = not is_virtual or (v in self.needed and eqn.primitive.name not in VIEWS)
                self.roots[v] = frozenset([v]) if stays else reads
                if stays:
                    self.last.update((r, position) for r in reads)
                    self.last.setdefault(v, position)
        end = len(self.eqns)
        for v in filter(compat.is_var, outputs):  # a branch may return a literal
            self.last.update((r, end) for r in self.roots.get(self._atom(v), ()))

    def _copied(self, is_laid_out: Callable[[Any, int], bool]) -> frozenset[Any]:
        """What stands twice: some products read a copy that is laid out for them, and others read the value."""
        readers: dict[Any, int] = {}
        laid_out: set[Any] = set()
        for eqn, reads in zip(self.eqns, self.reads, strict=True):
            for root in reads if eqn.primitive.name not in VIEWS else ():
                readers[root] = readers.get(root, 0) + 1
            for place, atom in enumerate(eqn.invars if eqn.primitive.name == "dot_general" else ()):
                if compat.is_var(atom) and is_laid_out(eqn, place):
                    laid_out |= self.roots.get(self._atom(atom), frozenset())
        return frozenset(v for v in laid_out - set(self.stored) if readers[v] > 1)

    def stores(self, eqn: Any) -> bool:
        """Whether an equation makes something that is stored, rather than read inside the fusion that reads it."""
        return any(self.roots[v] == frozenset([v]) for v in eqn.outvars)

    def peak(self) -> int:
        """Replay the lives."""
        dying: dict[int, list[Any]] = {}
        for v, position in self.last.items():
            dying.setdefault(position, []).append(v)
        live = sum(self._bytes(v) for v in self.stored)
        live -= sum(self._bytes(v) for v in self.stored if v not in self.last)
        peak = live
        for position, eqn in enumerate(self.eqns):
            made = [v for v in eqn.outvars if self.roots[v] == frozenset([v])]
            size = sum(self._bytes(v) for v in made)
            dies = [self._bytes(v) for v in dying.get(position, ()) if v not in made]
            reused = size if self.fusible[position] and any(0 < size <= d for d in dies) else 0
            peak = max(peak, live + size - reused + _inner_peak(eqn))
            live += size - sum(dies) - sum(self._bytes(v) for v in made if self.last[v] == position)
        return peak

    def _bytes(self, v: Any) -> int:
        if v in self.free or not hasattr(v.aval, "dtype"):
            return 0
        return aval_bytes(v.aval) * (2 if v in self.copied else 1)


def _is_fusible(eqn: Any) -> bool:
    return not (
        is_costly(eqn)
        or _is_reduction(eqn)
        or bodies_of(eqn)
        or eqn.primitive.name.startswith("scatter")
        or eqn.primitive.name in ("gather", "reduce_window_sum", "reduce_window_max", "select_and_scatter_add")
    )


def is_summed(eqn: Any, place: int) -> bool:
    """Whether a product sums over several axes of an operand."""
    return len(eqn.params["dimension_numbers"][0][place]) > 1


def is_turned(eqn: Any, place: int) -> bool:
    """Whether a batch of products does not read an operand as it lies: along the last axis, of the second the rows."""
    summed, batched = eqn.params["dimension_numbers"]
    return bool(batched[place]) and summed[place] != (eqn.invars[place].aval.ndim - 1 - place,)


def _is_reduction(eqn: Any) -> bool:
    return bool(eqn.primitive.name.startswith(REDUCTIONS))


def _inner_peak(eqn: Any) -> int:
    bodies = bodies_of(eqn)
    if not bodies or not is_costly(eqn):
        return 0
    return max(
        fused_peak(b.eqns, (), [v for v in compat.open_jaxpr(b).outvars if compat.is_var(v)], (), {}) for b in bodies
    )


def recomputed(traced: TracedRun, saved: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """The forward equations that a choice executes again, in order, and the variables it saves.

    Args:
        traced: The run.
        saved: Offsets of the values it saves.
    """
    wanted = {r for r in traced.residuals if compat.is_var(r)}
    again, stored = [], []
    for eqn in reversed(traced.forward):
        if not any(v in wanted for v in eqn.outvars):
            continue
        if mark_of(eqn) in saved:
            stored += [v for v in eqn.outvars if v in wanted]
            continue
        again.append(eqn)
        wanted.update(a for a in eqn.invars if compat.is_var(a))
    return again[::-1], stored
