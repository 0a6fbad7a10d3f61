"""What the passes of a run allocate, without a compiler: lives of what its kernels make (`jaxsub.costs.fusion`).

The figure is exact on hand-worked chains; `examples/results/prediction/README.md` has what it comes to on networks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from jaxsub.core.chain import Stage
from jaxsub.core.graph import Graph
from jaxsub.costs.fusible import IN_PLACE, VIEWS
from jaxsub.costs.fusion import Lives, is_part
from jaxsub.costs.hoisted_constants import TOGETHER
from jaxsub.costs.multi_output_fusion import joined
from jaxsub.costs.scheduler import Kernel, depth_first, greedy, made_late, peak_bytes, schedule
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import aval_bytes
from jaxsub.partition.min_cut import TracedRun, mark_of

Found = TypeVar("Found")
MOST_KNOWN = 64
"""Of so many runs, those seen last, what was found is remembered."""


def backward_bytes(traced: TracedRun, saved: Sequence[int], *, gpu: Target | None = None) -> int:
    """What the backward pass of a region allocates: saved values, recomputation, cotangents in and out.

    Args:
        traced: The run.
        saved: Offsets of the values it saves.
        gpu: The GPU to compile for; `None` for a CPU.

    Returns:
        Bytes at the peak; the run's inputs, and gradients of weights that join no sum, are not among them.
    """
    again, stored = recomputed(traced, frozenset(saved))
    given = (*stored, *traced.cotangents)
    lives = Lives((*again, *traced.backward), (*given, *traced.inputs), traced.backward_outputs, traced.aliases,
                  gpu is None, gpu)  # fmt: skip
    standing = {v: aval_bytes(v.aval) for v in given}
    written, scattered = (found - set(given) for found in _written(traced, lives))
    free = written | scattered | (set(traced.inputs) - set(given))
    return _least_peak(traced, lives, lives.kernels, standing, free, written, n_late=len(again))


def _least_peak(traced: TracedRun, lives: Lives, kernels: Sequence[Kernel], standing: dict[Any, int], free: set[Any],
                written: set[Any], *, n_late: int = 0) -> int:  # fmt: skip
    """The peak of a run's passes: on a CPU of its one order, on a GPU of the order that needs least.

    A GPU adds contributions to sums of gradients as soon as they are made: they need not stand at the end.
    """
    ends = lives.ends()
    if lives.gpu is None:
        order = schedule(kernels, (*traced.inputs, *standing), True)
        return peak_bytes(order, standing, ends, free, written)
    outputs = [lives.base(v) for v in (*traced.backward_outputs, *lives.outputs) if compat.is_var(v)]
    ends -= _added(traced, lives)
    kernels = joined(kernels, map(lives.base, lives.given), outputs)
    orders = [kernels, made_late(kernels, n_late), depth_first(kernels, outputs)]
    orders.append(greedy(kernels, standing, ends, free - written))
    return min(peak_bytes(order, standing, ends, free, written) for order in orders)


def hoisted_bytes(traced: TracedRun, *, gpu: Target | None = None, is_shared: bool = False) -> int:
    """What is made for a region ahead of its backward pass: arrays that wait for nothing, such as zeros.

    A CPU makes them when the program starts; a GPU where several stages need alike ones, which is `is_shared`.
    """
    if gpu is not None and not is_shared:
        return 0
    again, _ = recomputed(traced, frozenset())
    given = (*traced.inputs, *traced.cotangents)
    lives = Lives((*again, *traced.backward), given, traced.backward_outputs, traced.aliases, is_cpu=True)
    straight = _written(traced, lives)[1]
    return sum(n for k in lives.kernels if not k.reads
               for b, n in zip(k.makes, k.n_bytes, strict=True) if b not in straight)  # fmt: skip


def counted(what: str, traced: TracedRun, saved: Sequence[int], *, at_once: bool, gpu: Target | None) -> int:
    """What one pass of a run allocates.

    Args:
        what: `forward`, `backward`, `last` (both passes, the second at once), `unwrapped` (both, the second later),
            `keep` and `held` (what stands between them, without and with some inputs), `hoisted`, `hoisted_together`.
        traced: The run.
        saved: Offsets of the values that a region saves; for `last` and `held` positions of inputs that count too.
        at_once: Whether the run's backward pass starts at once.
        gpu: The GPU to compile for; `None` for a CPU.
    """
    if what == "forward":
        return forward_bytes(traced, gpu=gpu)
    if what == "backward":
        return backward_bytes(traced, saved, gpu=gpu)
    if what.startswith("hoisted"):
        return hoisted_bytes(traced, gpu=gpu, is_shared=what == TOGETHER)
    if what in ("keep", "held"):
        return kept_bytes(traced, saved, gpu=gpu)
    return unwrapped_bytes(traced, saved, at_once=at_once, gpu=gpu)


def _added(traced: TracedRun, lives: Lives) -> set[Any]:
    """The buffers of contributions to sums of gradients: a GPU adds each to its sum as soon as it is made."""
    pairs = zip(traced.backward_outputs, traced.function.differentiated, strict=True)
    return {lives.base(v) for v, i in pairs if compat.is_var(v) and traced.weights[i] and i in traced.function.joined}


def _written(traced: TracedRun, lives: Lives) -> tuple[set[Any], set[Any]]:
    """The buffers of gradients that go straight out, in places of their own, and of those scattered into a sum."""
    function = traced.function
    pairs = zip(traced.backward_outputs, function.differentiated, strict=True)
    gradients = {lives.base(v): i not in function.joined for v, i in pairs if compat.is_var(v) and traced.weights[i]}
    found: set[Any] = set()
    for eqn in lives.eqns:
        if eqn.primitive.name in IN_PLACE and lives.base(eqn.outvars[0]) in gradients:
            found |= {lives.base(eqn.outvars[0]), lives.base(eqn.invars[0])}
    alone = {v for v, is_alone in gradients.items() if is_alone}
    return alone, found - alone


def pinned_stage(graph: Graph, start: int, stop: int, kind: int, seconds: float) -> Stage:
    """A stage that runs once: it is taken to keep all it makes and to allocate as much again."""
    made, flops = graph.made_by(start, stop), sum(n.flops for n in graph.nodes[start:stop])
    size = sum(graph.values[v].n_bytes for v in made)
    return Stage(start, stop, kind, flops, flops, size, size, size, size, size, made.start,
                 forward_seconds=seconds, tail_seconds=seconds)  # fmt: skip


def forward_bytes(traced: TracedRun, *, gpu: Target | None = None) -> int:
    """What the forward pass of a run allocates beside what it reads and returns, nothing kept for the backward pass."""
    eqns = compat.needed_for(traced.returned, traced.forward, traced.inputs)
    lives = Lives(eqns, traced.inputs, traced.returned, {}, gpu is None, gpu)
    order = schedule(lives.kernels, lives.given, gpu is None)
    return peak_bytes(order, {}, lives.ends(), lives.ends() | set(traced.inputs))


def kept_bytes(traced: TracedRun, made: Sequence[int] = (), *, gpu: Target | None = None) -> int:
    """What the compiler is likely to keep of a run between its passes, beside what it reads and returns.

    Args:
        traced: The run.
        made: Positions of inputs that count too, where the backward pass reads them.
        gpu: The GPU to compile for; `None` for a CPU.
    """
    inputs = {traced.inputs[i] for i in made} & _read_again(traced, gpu).keys()
    return sum(_kept(traced, gpu).values()) + sum(aval_bytes(v.aval) for v in inputs)


def kept_sizes(traced: TracedRun, most_bytes: float = math.inf, *, gpu: Target | None = None) -> tuple[int, ...]:
    """Bytes of each of those values, largest first, as long as they are no more than `most_bytes` together.

    Products in parts are left out: their parts are gone before the run's backward pass writes a gradient.
    """
    sizes = sorted((size for v, size in _kept(traced, gpu).items() if not is_part(v)), reverse=True)
    return tuple(size for size, total in zip(sizes, accumulate(sizes), strict=True) if total <= most_bytes)


def _kept(traced: TracedRun, gpu: Target | None) -> dict[Any, int]:
    returned = _bases(traced, filter(compat.is_var, traced.returned))
    return {v: n for v, n in _read_again(traced, gpu).items() if v not in returned and v not in traced.inputs}


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


def unread_inputs(traced: TracedRun, *, gpu: Target | None = None) -> frozenset[int]:
    """Which of a run's inputs its own backward pass is not likely to read: positions in `function.reads`.

    An input whose tanh a costly equation reads need not stand until the backward pass, for that reads the tanh.
    """
    read = _read_again(traced, gpu)
    return frozenset(i for i, v in enumerate(traced.inputs) if v not in read and not traced.weights[i])


def unwrapped_bytes(
    traced: TracedRun, made: Sequence[int] = (), *, at_once: bool = False, gpu: Target | None = None
) -> int:
    """What both passes of an unwrapped run allocate, cotangents included, beside what it reads and returns.

    Args:
        traced: The run.
        made: Positions of inputs that count too.
        at_once: Whether the cotangents are there from the start, as the loss's is, or come when all is returned.
        gpu: The GPU to compile for; `None` for a CPU.
    """
    lives = _unwrapped(traced, gpu)
    kernels, counted = lives.kernels, {traced.inputs[i] for i in made}
    returned = {lives.base(v) for v in traced.returned if compat.is_var(v)}
    sizes = {v: aval_bytes(v.aval) for v in traced.cotangents}
    standing = {v: aval_bytes(v.aval) for v in counted}
    if at_once:
        standing |= sizes
    elif sizes:
        n = len(traced.forward)
        come = Kernel(n, tuple(sizes), frozenset(returned), tuple(sizes.values()))
        kernels = [k for k in kernels if k.position < n] + [come] + [k for k in kernels if k.position >= n]
    written, scattered = (found - sizes.keys() for found in _written(traced, lives))
    free = (set(traced.inputs) - counted) | returned | written | scattered
    return _least_peak(traced, lives, kernels, standing, free - sizes.keys(), written)


def _while_it_lives(find: Callable[[TracedRun, Target | None], Found]) -> Callable[[TracedRun, Target | None], Found]:
    """Remember what is found of a run, but keep no run alive: its constants may be a user's arrays or tracers."""
    known: WeakKeyDictionary[TracedRun, dict[Target | None, Found]] = WeakKeyDictionary()

    @functools.wraps(find)
    def of(traced: TracedRun, gpu: Target | None) -> Found:
        found = known.setdefault(traced, {})
        if gpu not in found:
            found[gpu] = find(traced, gpu)
        while len(known) > MOST_KNOWN:
            known.pop(next(iter(known)), None)
        return found[gpu]

    return of


@_while_it_lives
def _unwrapped(traced: TracedRun, gpu: Target | None) -> Lives:
    """Lives in an unwrapped run, forward and then backward."""
    return Lives((*traced.forward, *traced.backward), (*traced.inputs, *traced.cotangents),
                 (*traced.returned, *traced.backward_outputs), traced.aliases, gpu is None, gpu)  # fmt: skip


@_while_it_lives
def _read_again(traced: TracedRun, gpu: Target | None) -> dict[Any, int]:
    """Bytes of the buffers that stand between the passes of an unwrapped run, its inputs among them.

    A CPU runs before the cotangents come whatever does not wait for them; a GPU runs it when it is needed.
    """
    lives = _unwrapped(traced, gpu)
    waiting, found = set(traced.cotangents), set[Any]()
    sizes = {v: aval_bytes(v.aval) for v in traced.inputs}
    for kernel in lives.kernels:
        is_late = not kernel.reads.isdisjoint(waiting) if gpu is None else kernel.position >= len(traced.forward)
        if is_late:
            waiting.update(kernel.makes)
            found |= kernel.reads
        else:
            sizes.update(zip(kernel.makes, kernel.n_bytes, strict=True))
    return {b: sizes[b] for b in sizes if b in found}


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
