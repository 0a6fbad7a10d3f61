"""Offload saved values to host memory: where it is possible, its options and their prices, and how a region does it.

A region may offload its saved values, and an input that nothing else reads: the activation at its entry. A region's
options go in; the same come out with others that store less on the device and take longer. Each value crosses PCIe
twice, to the host after the forward pass and back when the region's own backward pass starts: it costs twice its bytes
over the target's PCIe bandwidth, with no overlap assumed. That is slower than recomputing a matrix product of a few
thousand columns, and faster than recomputing a lot for few bytes: plans then minimise seconds and take the faster.

JAX's policy `save_and_offload_only_these_names` moves the values. Only the backward pass reads the copies, so the
compiler's schedule would make them late, and all values would be live on the device until then. `settled` ties the
results of a region to its copies: consumers of the results wait until the copies are made.

Sources: JAX's documentation, "JAX memories and host offloading"; Rhu, Gimelshein, Clemons, Zulfiqar, Keckler, *vDNN*
(MICRO 2016), for keeping layers' inputs in host memory; Beaumont, Eyraud-Dubois, Shilova, *Efficient combination of
rematerialization and offloading for training DNNs* (NeurIPS 2021), for choosing between the two by dynamic programming.
Not supported: offloading inside nests, loops and conditionals; prefetching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jaxsub.core.chain import Option
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.graph import Graph
from jaxsub.devices.targets import Target

LEAST_BYTES = 2**16
"""For smaller values the latency of a transfer, some microseconds, exceeds the copy's time."""

KINDS = ("pinned_host",)
"""Memories that values may be offloaded to, by JAX's names."""


def require_memory(target: Target, kind: str) -> None:
    """Refuse a target without such a memory, by JAX's name for it, or whose own memory is the host's."""
    if target.platform == "cpu":
        raise UnsupportedError(
            f'offload="{kind}" keeps values in the host\'s memory, and `{target.name}` computes in that memory: '
            'nothing would be gained. Leave offload out, or name the GPU to plan for, target="h100".'
        )
    kinds = [memory.kind for memory in target.device.addressable_memories()] if target.device is not None else KINDS
    if kind not in kinds:
        raise UnsupportedError(
            f'offload="{kind}" needs a memory of that kind, and `{target.name}` ({target.platform}) has '
            f"{', '.join(map(repr, kinds)) or 'none that it names'}. Leave offload out."
        )


def with_offloading(
    graph: Graph, start: int, stop: int, options: Sequence[Option], target: Target
) -> tuple[Option, ...]:
    """Add options that offload values to a region's options; the target's PCIe bandwidth is the price.

    Those added are Pareto-optimal in bytes and seconds.
    """
    first = graph.first_value(start)
    entries = tuple(v - first for v in entry_values(graph, start, stop))
    found = list(options)
    for option in options:
        for offloaded in _subsets(graph, start, stop, option, options, entries):
            one = _offloading(graph, first, option, offloaded, target)
            if not any(_is_no_worse(o, one) for o in found):
                found.append(one)
    return tuple(found)


def entry_values(graph: Graph, start: int, stop: int) -> tuple[int, ...]:
    """Find the values that a run of nodes alone reads: on the device they are dead after its forward pass."""
    outputs, weights = graph.output_set(), graph.weights()
    return tuple(
        v
        for v in graph.read_by(start, stop)
        if graph.values[v].producer is not None and v not in outputs and v not in weights
        if _is_movable(graph, v) and all(start <= c < stop for c in graph.values[v].consumers)
    )


def _is_movable(graph: Graph, v: int) -> bool:
    value = graph.values[v]
    return value.n_bytes >= LEAST_BYTES and value.dtype.startswith(("float", "bfloat"))


def _subsets(
    graph: Graph, start: int, stop: int, option: Option, options: Sequence[Option], entries: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield sets of values to offload: inputs, saved values, and those saved values that another option lacks."""
    first, last = graph.first_value(start), graph.last_uses()
    made = tuple(o for o in option.saved if last[first + o] < stop and _is_movable(graph, first + o))
    beyond = (tuple(o for o in made if o not in other.saved) for other in options)
    for inside in dict.fromkeys((made, *beyond, ())):
        for offloaded in dict.fromkeys(((*entries, *inside), inside)):
            if offloaded:
                yield offloaded


def _offloading(graph: Graph, first: int, option: Option, offloaded: tuple[int, ...], target: Target) -> Option:
    """Make an option that offloads some values; offloaded inputs lower its saved bytes, below zero if need be."""
    sizes = {o: graph.values[first + o].n_bytes for o in offloaded}
    n_bytes = sum(sizes.values())
    left = list(option.saved_sizes)
    for o in offloaded:
        if o >= 0:
            left.remove(sizes[o])
    return replace(
        option,
        saved=tuple(sorted({*option.saved, *offloaded})),
        offloaded=offloaded,
        saved_bytes=option.saved_bytes - n_bytes,
        recompute_seconds=option.recompute_seconds + 2 * n_bytes / target.pcie_bytes_per_second,
        saved_sizes=tuple(left),
    )


def _is_no_worse(a: Option, b: Option) -> bool:
    pairs = ((o.saved_bytes, o.transient_bytes, o.recompute_seconds) for o in (a, b))
    return all(x <= y for x, y in zip(*pairs, strict=True))


def settled(region: Callable[..., Any]) -> Callable[..., Any]:
    """Make a region's results, a tuple, wait for its copies in host memory.

    Its derivative is that of the region, taken by `jax.linearize`; the residuals in host memory are put behind one
    barrier with the results. All of JAX's transforms that the region itself allows stay allowed: JAX 0.10 to 0.12 allow
    no second reverse pass over one that offloads.
    """
    call = jax.custom_jvp(region)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of_moving(*active: Any) -> Any:
            merged = list(primals)
            for i, x in zip(moving, active, strict=True):
                merged[i] = x
            return region(*merged)

        outs, linear = jax.linearize(of_moving, *(primals[i] for i in moving))
        leaves, tree = jax.tree.flatten(linear)
        on_host = [i for i, leaf in enumerate(leaves) if _is_in_host_memory(leaf)]
        if on_host:
            outs, copies = jax.lax.optimization_barrier((outs, [leaves[i] for i in on_host]))
            for i, copy in zip(on_host, copies, strict=True):
                leaves[i] = copy
        return outs, jax.tree.unflatten(tree, leaves)(*(tangents[i] for i in moving))

    call.defjvp(rule, symbolic_zeros=True)
    return call


def _is_in_host_memory(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and getattr(jax.typeof(leaf), "memory_space", None) == jax.memory.Space.Host
