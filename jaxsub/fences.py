"""Values behind a gradient barrier: what it holds for a GPU lies as the gradient's place does.

A weight behind `jax.lax.optimization_barrier` has its gradient held by the barrier's transpose. On a GPU a convolution
writes the gradient of its kernel in a layout of its own; barriers let any layout through, and the copy into the place
that the gradient goes out in is put off to the program's end: until then gradients of all kernels stand twice. A kernel
that stands behind the barrier as a flat array has a flat gradient there, and flat means the layout of its place: the
copy is made before the backward pass goes on, and what the convolution wrote is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsub import compat
from jaxsub.graph import Graph

CONVOLUTION, CAST = "conv_general_dilated", "convert_element_type"


def kernels_of(graph: Graph) -> frozenset[int]:
    """The differentiated inputs of a program that convolutions read as kernels, in their own type or another.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jaxsub.program import trace
        >>> conv = lambda w, x: jnp.sum(jax.lax.conv(x, w.astype("float16"), (1, 1), "SAME"))
        >>> args = jnp.ones((4, 3, 3, 3)), jnp.ones((1, 3, 8, 8), "float16")
        >>> kernels_of(trace(conv, args, {}, argnums=0).graph)
        frozenset({0})
    """
    found = set()
    for node in graph.nodes:
        if node.primitive == CONVOLUTION and node.inputs:
            value = graph.values[node.inputs[-1]]
            if value.producer is not None and graph.nodes[value.producer].primitive == CAST:
                value = graph.values[graph.nodes[value.producer].inputs[0]]
            if value.producer is None and value.is_differentiated:
                found.add(value.index)
    return frozenset(found)


def barrier(values: Sequence[int], flat: frozenset[int] = frozenset()) -> Callable[[dict[int, Any]], None]:
    """A step that puts values of an environment behind one barrier, some of them as flat arrays.

    Args:
        values: The values, in the order in which they are held.
        flat: Those that stand behind it flat, except where several devices hold a part each, as the body of a loop may
            find out when it is traced.
    """

    def step(env: dict[int, Any]) -> None:
        shapes = [env[v].shape if v in flat and not _is_split(env[v]) else None for v in values]
        given = [env[v] if shape is None else env[v].reshape(-1) for v, shape in zip(values, shapes, strict=True)]
        held = zip(values, compat.fence(given), shapes, strict=True)
        env.update((v, x if shape is None else x.reshape(shape)) for v, x, shape in held)

    return step


def _is_split(x: Any) -> bool:
    """Whether several devices hold a part each, by the axes of an explicit mesh: a flat array has no such parts."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)
