"""Values kept in host memory between the passes: where that is possible, what it costs, and how a region does it.

A region may keep in the host's memory what it saves, and what it reads that nothing else reads: the activation at its
entry. In go a region's options, out come the same and others that store less on the device and take longer. Each value
goes over PCIe twice, to the host after the forward pass and back when the region's own backward pass begins, so that
it costs twice its bytes over the target's PCIe bandwidth; nothing is taken to hide behind other work. That is more
than executing a matrix product of a few thousand columns again, and less than executing much again for little: plans
are made in seconds, and take whichever is quicker.

JAX's policy `save_and_offload_only_these_names` moves the values. What reads the copy is the backward pass, and the
compiler's schedule puts off what nobody reads: without more ado it copies late and all values stand on the device
meanwhile. `settled` ties the results of a region to its copies: whoever reads the results waits until they are made.

Sources: JAX's documentation, "JAX memories and host offloading"; Rhu, Gimelshein, Clemons, Zulfiqar, Keckler, *vDNN*
(MICRO 2016), for keeping layers' inputs in host memory; Beaumont, Eyraud-Dubois, Shilova, *Efficient combination of
rematerialization and offloading for training DNNs* (NeurIPS 2021), for choosing between the two by dynamic programming.
It does not: offload inside nests, loops and conditionals; copy back ahead of time.
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
"""A smaller value takes longer to send off than to copy: some microseconds a transfer."""

KINDS = ("pinned_host",)
"""Memories that values may be kept in, as JAX calls them."""


def require_memory(target: Target, kind: str) -> None:
    """Refuse a target without such a memory.

    Args:
        target: The device.
        kind: The memory, as JAX calls it.

    Raises:
        UnsupportedError: If the device has none, or its own memory is the host's.

    Example:
        >>> from jaxsub.devices.targets import get_target
        >>> require_memory(get_target("h100"), "pinned_host")
        >>> require_memory(get_target("cpu"), "pinned_host")
        Traceback (most recent call last):
        jaxsub.core.errors.UnsupportedError: offload="pinned_host" keeps values in the host's memory...
    """
    if target.platform == "cpu":
        raise UnsupportedError(
            f'offload="{kind}" keeps values in the host\'s memory, and `{target.name}` computes in that memory: '
            'nothing would be gained. Leave offload out, or name the GPU to plan for, target="h100".'
        )
    there = [memory.kind for memory in target.device.addressable_memories()] if target.device is not None else KINDS
    if kind not in there:
        raise UnsupportedError(
            f'offload="{kind}" needs a memory of that kind, and `{target.name}` ({target.platform}) has '
            f"{', '.join(map(repr, there)) or 'none that it names'}. Leave offload out."
        )


def with_offloading(
    graph: Graph, start: int, stop: int, options: Sequence[Option], target: Target
) -> tuple[Option, ...]:
    """The options of a region, and those that keep values in host memory.

    Args:
        graph: The program.
        start: The region's first node.
        stop: The node after its last.
        options: What it may save on the device.
        target: The device; its PCIe bandwidth is the price.

    Returns:
        The options as they are, then others; none of these stores as much and takes as long as another option.
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
    """Values that a run of nodes reads and that nothing else reads: gone from the device once the run has them."""
    first, outputs, weights = graph.first_value(start), graph.output_set(), graph.weights()
    read = dict.fromkeys(v for node in graph.nodes[start:stop] for v in node.inputs if v < first)
    return tuple(
        v
        for v in read
        if graph.values[v].producer is not None and v not in outputs and v not in weights
        if _is_movable(graph, v) and all(start <= c < stop for c in graph.values[v].consumers)
    )


def _is_movable(graph: Graph, v: int) -> bool:
    value = graph.values[v]
    return value.n_bytes >= LEAST_BYTES and value.dtype.startswith(("float", "bfloat"))


def _subsets(
    graph: Graph, start: int, stop: int, option: Option, options: Sequence[Option], entries: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """What of an option may go to the host: what it reads, what it saves, and what it saves beyond another option."""
    first, last = graph.first_value(start), graph.last_uses()
    made = tuple(o for o in option.saved if last[first + o] < stop and _is_movable(graph, first + o))
    beyond = (tuple(o for o in made if o not in other.saved) for other in options)
    for inside in dict.fromkeys((made, *beyond, ())):
        for offloaded in dict.fromkeys(((*entries, *inside), inside)):
            if offloaded:
                yield offloaded


def _offloading(graph: Graph, first: int, option: Option, offloaded: tuple[int, ...], target: Target) -> Option:
    """An option with some values moved to the host: what it reads and moves counts as less than nothing."""
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
    """A region that keeps values in host memory, whose results are there only when its copies are.

    Its derivative is that of the region, taken by `jax.linearize`: what stands in host memory in it is put behind one
    barrier with the results. All of JAX's transforms that the region itself allows stay allowed: JAX 0.10 to 0.12
    allow no second reverse pass over one that offloads.

    Args:
        region: A function of arrays that returns a tuple of arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> float(jax.grad(lambda x: settled(lambda y: (jnp.sin(y),))(x)[0])(0.0))
        1.0
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
        there = [i for i, leaf in enumerate(leaves) if _is_in_host_memory(leaf)]
        if there:
            outs, copies = jax.lax.optimization_barrier((outs, [leaves[i] for i in there]))
            for i, copy in zip(there, copies, strict=True):
                leaves[i] = copy
        return outs, jax.tree.unflatten(tree, leaves)(*(tangents[i] for i in moving))

    call.defjvp(rule, symbolic_zeros=True)
    return call


def _is_in_host_memory(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and getattr(jax.typeof(leaf), "memory_space", None) == jax.memory.Space.Host
