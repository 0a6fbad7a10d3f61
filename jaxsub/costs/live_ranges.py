"""Predict the bytes that the passes of a run allocate, from live ranges of its kernels' buffers, without a compiler.

`jaxsub.costs.fusion` makes the kernels. The prediction is exact on hand-worked chains;
`examples/results/prediction/README.md` has its errors on networks.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from jaxsub.core.chain import Stage
from jaxsub.core.graph import Graph
from jaxsub.costs.fusible import VIEWS, written_over
from jaxsub.costs.fusion import Lives
from jaxsub.costs.hoisted_constants import TOGETHER, stacked_by
from jaxsub.costs.multi_output_fusion import joined
from jaxsub.costs.scheduler import Kernel, depth_first, greedy, made_late, peak_bytes, schedule
from jaxsub.costs.split_k import is_part
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.late_zeros import SCATTER_ADDS
from jaxsub.partition.traced_run import TracedRun

Found = TypeVar("Found")
MOST_KNOWN = 64
"""Results are kept for so many runs, those seen last."""


def backward_bytes(
    traced: TracedRun, saved: Sequence[int], *, gpu: Target | None = None, spare: Sequence[int] = ()
) -> int:
    """Predict the bytes that a region's backward pass allocates: saved and recomputed values, cotangents in and out.

    Args:
        traced: The run.
        saved: Offsets of the values it saves.
        gpu: The GPU to compile for; `None` for a CPU.
        spare: Bytes of gradients that are written later, by loops: until then they host transient values.

    Returns:
        Bytes at the peak, without the run's inputs and without gradients of weights that are added to no sum.
    """
    eqns, stored = recomputed(traced, frozenset(saved))
    given = (*stored, *traced.cotangents)
    lives = Lives((*eqns, *traced.backward), (*given, *traced.inputs), traced.backward_outputs, traced.aliases,
                  gpu is None, gpu, traced.sizes)  # fmt: skip
    at_start = {v: traced.bytes_of(v) for v in given}
    written, scattered = (found - set(given) for found in _written(traced, lives))
    free = written | scattered | (set(traced.inputs) - set(given))
    return _least_peak(traced, lives, lives.kernels, at_start, free, written, n_late=len(eqns), spare=spare)


def _least_peak(traced: TracedRun, lives: Lives, kernels: Sequence[Kernel], at_start: dict[Any, int], free: set[Any],
                written: set[Any], *, n_late: int = 0, spare: Sequence[int] = ()) -> int:  # fmt: skip
    """Find the peak of a run's passes: on a CPU in its one order, on a GPU in the order that needs least.

    A GPU adds contributions to sums of gradients as soon as they are made: they are not live at the end. A CPU fills
    the gradients that a loop writes with zeros when the program starts: they are not spare.
    """
    ends = lives.ends()
    if lives.gpu is None:
        order = schedule(kernels, (*traced.inputs, *at_start), True)
        return peak_bytes(order, at_start, ends, free, written)
    outputs = [lives.base(v) for v in (*traced.backward_outputs, *lives.outputs) if compat.is_var(v)]
    ends -= _added(traced, lives)
    kernels = joined(kernels, map(lives.base, lives.given), outputs)
    orders = [kernels, made_late(kernels, n_late), depth_first(kernels, outputs)]
    orders.append(greedy(kernels, at_start, ends, free - written))
    return min(peak_bytes(order, at_start, ends, free, written, spare) for order in orders)


def hoisted_bytes(traced: TracedRun, *, gpu: Target | None = None, is_shared: bool = False) -> int:
    """Predict the bytes that are hoisted out of a region's backward pass: arrays without operands, such as zeros.

    A CPU makes them when the program starts; a GPU hoists them if several stages need equal ones (`is_shared`).
    """
    if gpu is not None and not is_shared:
        return 0
    free, stacked = _hoisted(traced, None)
    return free + stacked if gpu is None or compat.joins_zeros_of_loops() else free


def stacked_bytes(traced: TracedRun) -> int:
    """Predict the bytes of the zeros in which loops of a backward pass stack what is no output: a CPU's are hoisted."""
    return _hoisted(traced, None)[1]


def counted(what: str, traced: TracedRun, saved: Sequence[int], *, at_once: bool, gpu: Target | None,
            spare: Sequence[int] = ()) -> int:  # fmt: skip
    """Predict the bytes of one pass of a run.

    Args:
        what: `forward`, `backward`, `last` (both passes, the second at once), `unwrapped` (both, the second later),
            `keep` and `held` (live between them, without and with some inputs), `hoisted`, `hoisted_together`,
            `stacked`.
        traced: The run.
        saved: Offsets of the values that a region saves; for `last` and `held` positions of inputs to count.
        at_once: Whether the run's backward pass starts at once.
        gpu: The GPU to compile for; `None` for a CPU.
        spare: Bytes of gradients that are written later; for `backward` and `last`.
    """
    if what == "forward":
        return forward_bytes(traced, gpu=gpu)
    if what == "backward":
        return backward_bytes(traced, saved, gpu=gpu, spare=spare)
    if what.startswith("hoisted"):
        return hoisted_bytes(traced, gpu=gpu, is_shared=what == TOGETHER)
    if what == "stacked":
        return stacked_bytes(traced)
    if what in ("keep", "held"):
        return kept_bytes(traced, saved, gpu=gpu)
    return unwrapped_bytes(traced, saved, at_once=at_once, gpu=gpu, spare=spare)


def _added(traced: TracedRun, lives: Lives) -> set[Any]:
    """Find the buffers of contributions to sums of gradients: a GPU adds each to its sum as soon as it is made."""
    pairs = zip(traced.backward_outputs, traced.function.differentiated, strict=True)
    return {lives.base(v) for v, i in pairs if compat.is_var(v) and traced.weights[i] and i in traced.function.joined}


def _written(traced: TracedRun, lives: Lives) -> tuple[set[Any], set[Any]]:
    """Find the buffers of gradients that are outputs of their own, and of those scattered into a sum.

    Sums are of gradients of weights that other stages read too, or of values that the run looks rows up of:
    `zeros.at[i].add(u) + sum` is scattered into the sum, without zeros.
    """
    function = traced.function
    pairs = [p for p in zip(traced.backward_outputs, function.differentiated, strict=True) if compat.is_var(p[0])]
    gradients = {lives.base(v): i not in function.joined for v, i in pairs if traced.weights[i]}
    summed = {lives.base(v) for v, i in pairs if i in function.looked_up}
    over, read_by = dict[Any, Any](), Counter[Any]()
    for eqn in lives.eqns:
        for v, a in written_over(eqn):
            made, read = lives.base(v), lives.base(a) if compat.is_var(a) else None
            if read is not None and (made in gradients or eqn.primitive.name in SCATTER_ADDS):
                over[made] = read
                read_by[read] += 1  # an operand of several loop results is copied for each
    found = set[Any]()
    for made in (gradients.keys() | summed) & over.keys():
        found.add(made)
        while made in over and read_by[over[made]] == 1:
            made = over[made]
            found.add(made)
    alone = {v for v, is_alone in gradients.items() if is_alone}
    return alone, found - alone


def pinned_stage(graph: Graph, start: int, stop: int, kind: int, seconds: float) -> Stage:
    """Price a stage that runs once: assume that it keeps all its values and that its passes allocate as much more."""
    made, flops = graph.made_by(start, stop), sum(n.flops for n in graph.nodes[start:stop])
    size = sum(graph.values[v].n_bytes for v in made)
    return Stage(start, stop, kind, flops, flops, size, size, size, size, size, made.start,
                 forward_seconds=seconds, tail_seconds=seconds)  # fmt: skip


def forward_bytes(traced: TracedRun, *, gpu: Target | None = None) -> int:
    """Predict the bytes that a forward pass alone allocates beside inputs and outputs, with no residuals."""
    eqns = compat.needed_for(traced.returned, traced.forward, traced.inputs)
    lives = Lives(eqns, traced.inputs, traced.returned, {}, gpu is None, gpu, traced.sizes)
    order = schedule(lives.kernels, lives.given, gpu is None)
    return peak_bytes(order, {}, lives.ends(), lives.ends() | set(traced.inputs))


def kept_bytes(traced: TracedRun, made: Sequence[int] = (), *, gpu: Target | None = None) -> int:
    """Predict the bytes that are live between the passes of a run, beside inputs and outputs.

    Args:
        traced: The run.
        made: Positions of inputs to count, where the backward pass reads them.
        gpu: The GPU to compile for; `None` for a CPU.
    """
    inputs = {traced.inputs[i] for i in made} & _residuals(traced, gpu).keys()
    return sum(_kept(traced, gpu).values()) + sum(map(traced.bytes_of, inputs))


def kept_sizes(traced: TracedRun, most_bytes: float = math.inf, *, gpu: Target | None = None) -> tuple[int, ...]:
    """List the bytes of each of those values, largest first, up to `most_bytes` together.

    Products in parts are left out: their parts are dead before the run's backward pass writes a gradient.
    """
    sizes = sorted((size for v, size in _kept(traced, gpu).items() if not is_part(v)), reverse=True)
    return tuple(size for size, total in zip(sizes, accumulate(sizes), strict=True) if total <= most_bytes)


def _kept(traced: TracedRun, gpu: Target | None) -> dict[Any, int]:
    returned = _bases(traced, filter(compat.is_var, traced.returned))
    return {v: n for v, n in _residuals(traced, gpu).items() if v not in returned and v not in traced.inputs}


def _bases(traced: TracedRun, values: Iterable[Any]) -> set[Any]:
    """Find the buffers that values are views of."""
    viewed = {
        e.outvars[0]: e.invars[0] for e in traced.forward if e.primitive.name in VIEWS and compat.is_var(e.invars[0])
    }

    def base(atom: Any) -> Any:
        while atom in viewed:
            atom = viewed[atom]
        return atom

    return set(map(base, values))


def unread_inputs(traced: TracedRun, *, gpu: Target | None = None) -> frozenset[int]:
    """Find the inputs that a run's own backward pass is not likely to read: positions in `function.reads`.

    An input whose tanh a costly equation reads is dead after the forward pass: the backward pass reads the tanh.
    """
    read = _residuals(traced, gpu)
    return frozenset(i for i, v in enumerate(traced.inputs) if v not in read and not traced.weights[i])


def unwrapped_bytes(
    traced: TracedRun,
    made: Sequence[int] = (),
    *,
    at_once: bool = False,
    gpu: Target | None = None,
    spare: Sequence[int] = (),
) -> int:
    """Predict the bytes that both passes of an unwrapped run allocate beside inputs and outputs, with cotangents.

    Args:
        traced: The run.
        made: Positions of inputs to count.
        at_once: Whether the cotangents are live from the start, as the loss's is, or from the last output on.
        gpu: The GPU to compile for; `None` for a CPU.
        spare: Bytes of gradients that are written later.
    """
    lives = _unwrapped(traced, gpu)
    kernels, counted = lives.kernels, {traced.inputs[i] for i in made}
    returned = {lives.base(v) for v in traced.returned if compat.is_var(v)}
    sizes = {v: traced.bytes_of(v) for v in traced.cotangents}
    at_start = {v: traced.bytes_of(v) for v in counted}
    if at_once:
        at_start |= sizes
    elif sizes:
        n = len(traced.forward)
        come = Kernel(n, tuple(sizes), frozenset(returned), tuple(sizes.values()))
        kernels = [k for k in kernels if k.position < n] + [come] + [k for k in kernels if k.position >= n]
    written, scattered = (found - sizes.keys() for found in _written(traced, lives))
    free = (set(traced.inputs) - counted) | returned | written | scattered
    return _least_peak(traced, lives, kernels, at_start, free - sizes.keys(), written, spare=spare)


def _cached(find: Callable[[TracedRun, Target | None], Found]) -> Callable[[TracedRun, Target | None], Found]:
    """Cache results by run, without references to the run: its constants may be a user's arrays or tracers."""
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


@_cached
def _unwrapped(traced: TracedRun, gpu: Target | None) -> Lives:
    """Make the kernels of an unwrapped run, forward and then backward."""
    return Lives((*traced.forward, *traced.backward), (*traced.inputs, *traced.cotangents),
                 (*traced.returned, *traced.backward_outputs), traced.aliases, gpu is None, gpu,
                 traced.sizes)  # fmt: skip


@_cached
def _hoisted(traced: TracedRun, gpu: Target | None) -> tuple[int, int]:
    """The bytes of what kernels make without operands, and of what backward loops stack, as a CPU has them."""
    eqns, _ = recomputed(traced, frozenset())
    given = (*traced.inputs, *traced.cotangents)
    lives = Lives((*eqns, *traced.backward), given, traced.backward_outputs, traced.aliases, is_cpu=gpu is None,
                  sizes=traced.sizes)  # fmt: skip
    straight = _written(traced, lives)[1]
    stacked = {lives.base(v) for eqn in traced.backward for v in stacked_by(eqn)}
    made = [(not k.reads, b in stacked, n) for k in lives.kernels for b, n in zip(k.makes, k.n_bytes, strict=True)
            if b not in straight]  # fmt: skip
    return sum(n for is_free, _, n in made if is_free), sum(n for is_free, is_in, n in made if is_in and not is_free)


@_cached
def _residuals(traced: TracedRun, gpu: Target | None) -> dict[Any, int]:
    """Predict the bytes of each buffer that is live between the passes of an unwrapped run, inputs included.

    A CPU runs everything that does not depend on cotangents before these are made; a GPU runs it when it is needed.
    Zeros to which a gradient is added lie where that is returned, and do not count.
    """
    lives = _unwrapped(traced, gpu)
    waiting, found = set(traced.cotangents), set[Any]()
    sizes = {v: traced.bytes_of(v) for v in traced.inputs}
    for kernel in lives.kernels:
        is_late = (
            not waiting.isdisjoint(kernel.reads | kernel.after)
            if gpu is None
            else kernel.position >= len(traced.forward)
        )
        if is_late:
            waiting.update(kernel.makes)
            found |= kernel.reads
        else:
            sizes.update(zip(kernel.makes, kernel.n_bytes, strict=True))
    found -= _written(traced, lives)[1] - set(traced.inputs)
    return {b: sizes[b] for b in sizes if b in found}


def recomputed(traced: TracedRun, saved: frozenset[int]) -> tuple[list[Any], list[Any]]:
    """Find the forward equations that a choice recomputes, in order, and the variables that it saves.

    Args:
        traced: The run.
        saved: Offsets of the values it saves.
    """
    wanted = {r for r in traced.residuals if compat.is_var(r)}
    eqns, stored = [], []
    for eqn in reversed(traced.forward):
        if not any(v in wanted for v in eqn.outvars):
            continue
        if traced.mark_of(eqn) in saved:
            stored += [v for v in eqn.outvars if v in wanted]
            continue
        eqns.append(eqn)
        wanted.update(a for a in eqn.invars if compat.is_var(a))
    return eqns[::-1], stored
