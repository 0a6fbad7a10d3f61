"""Values behind a gradient barrier: what it holds for a GPU lies as the gradient's place does.

A weight behind `jax.lax.optimization_barrier` has its gradient held by the barrier's transpose. On a GPU a convolution
writes the gradient of its kernel in a layout of its own; barriers let any layout through, and the copy into the place
that the gradient goes out in is put off to the program's end: until then gradients of all kernels stand twice. A kernel
that stands behind the barrier as a flat array has a flat gradient there, and flat means the layout of its place: the
copy is made before the backward pass goes on, and what the convolution wrote is gone.

A convolution reads its kernel in that layout too, a copy that the forward pass makes and the backward pass reads again:
from the one to the other copies of all kernels would stand, where activations could lie. So a kernel enters a region
flat as well, and each pass makes a copy of its own inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxsub.devices.targets import is_gpu
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program


def flat_kernels(program: Program) -> frozenset[int]:
    """The kernels that are flat behind gradient barriers and where regions begin: for a GPU, where none is split.

    Example:
        >>> from dataclasses import replace
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jaxsub.jaxpr.trace import trace
        >>> conv = lambda w, x: jnp.sum(jax.lax.conv(x, w.astype("float16"), (1, 1), "SAME"))
        >>> program = trace(conv, (jnp.ones((4, 3, 3, 3)), jnp.ones((1, 3, 8, 8), "float16")), {}, argnums=0)
        >>> [sorted(flat_kernels(replace(program, platform=name))) for name in ("cuda", "cpu")]
        [[0], []]
    """
    if not is_gpu(program.platform) or program.is_spread:  # a flat array of what is split would be gathered
        return frozenset()
    return program.graph.kernels()


def barrier(values: Sequence[int], flat: frozenset[int] = frozenset()) -> Callable[[dict[int, Any]], None]:
    """A step that puts values of an environment behind one barrier, some of them as flat arrays.

    Args:
        values: The values, in the order in which they are held.
        flat: Those that stand behind it flat, except where several devices hold a part each, as the body of a loop may
            find out when it is traced.
    """

    def step(env: dict[int, Any]) -> None:
        shapes = [env[v].shape for v in values]
        held = compat.fence([flattened(env[v]) if v in flat else env[v] for v in values])
        env.update((v, x.reshape(shape)) for v, x, shape in zip(values, held, shapes, strict=True))

    return step


def flattened(x: Any) -> Any:
    """A value as a flat array, except where several devices hold a part each."""
    return x if _is_split(x) else x.reshape(-1)


def shaped(shapes: Mapping[int, tuple[int, ...]]) -> Callable[[dict[int, Any]], None]:
    """A step that gives values of an environment, flat ones among them, their shapes."""

    def step(env: dict[int, Any]) -> None:
        env.update((v, env[v].reshape(shape)) for v, shape in shapes.items())

    return step


def _is_split(x: Any) -> bool:
    """Whether several devices hold a part each, by the axes of an explicit mesh: a flat array has no such parts."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)
