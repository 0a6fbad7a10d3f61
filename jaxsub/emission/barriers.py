"""Put values behind a gradient barrier; on a GPU as flat arrays where the layout of their gradients matters.

The gradient of a weight behind `jax.lax.optimization_barrier` goes through the barrier's transpose. On a GPU a
convolution writes the gradient of its kernel in a layout of its own. Barriers pass any layout on, and XLA delays the
copy into the output's layout to the end of the program: until then the gradients of all kernels are live twice. A
kernel that is flat behind the barrier has a flat gradient there, which has the output's layout: the copy is made before
the backward pass goes on, and the convolution's result is dead after it.

A convolution also reads its kernel in its own layout, from a copy that the forward pass makes and the backward pass
would read again: copies of all kernels would be live between the passes. So a kernel enters a region flat as well, and
each pass makes its own copy inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxsub.devices.targets import is_gpu
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.shardings import unsaid_devices
from jaxsub.jaxpr.trace import Program


def flat_kernels(program: Program) -> frozenset[int]:
    """Find the kernels to make flat behind gradient barriers and at the entry of regions: on a single GPU, all."""
    if not is_gpu(program.platform) or program.is_sharded or unsaid_devices(program.avals()) > 1:
        return frozenset()  # to flatten a sharded array would gather it
    return program.graph.kernels()


def barrier(values: Sequence[int], flat: frozenset[int] = frozenset()) -> Callable[[dict[int, Any]], None]:
    """Make a step that puts values of an environment behind one barrier, in this order.

    Those in `flat` are flat behind it, unless they turn out to be sharded when the body of a loop is traced.
    """

    def step(env: dict[int, Any]) -> None:
        shapes = {v: env[v].shape for v in values if v in flat}
        held = fence([flattened(env[v]) if v in flat else env[v] for v in values])
        env.update(zip(values, held, strict=True))
        shaped(shapes)(env)

    return step


def fence(values: Sequence[Any]) -> list[Any]:
    """Put values behind one barrier; in `shard_map`, where JAX 0.10 would change their types, one for each type."""
    types = [jax.typeof(x) for x in values]
    fenced = list(jax.lax.optimization_barrier(list(values)))
    if [jax.typeof(x) for x in fenced] == types:
        return fenced
    axes = [frozenset(compat.varying(t)) for t in types]
    for kind in dict.fromkeys(axes):
        places = [i for i, a in enumerate(axes) if a == kind]
        for i, x in zip(places, jax.lax.optimization_barrier([values[i] for i in places]), strict=True):
            fenced[i] = x
    return fenced


def flattened(x: Any) -> Any:
    """Flatten a value, unless it is sharded."""
    return x if _is_split(x) else x.reshape(-1)


def shaped(shapes: Mapping[int, tuple[int, ...]]) -> Callable[[dict[int, Any]], None]:
    """Make a step that restores the shapes of values of an environment."""

    def step(env: dict[int, Any]) -> None:
        env.update((v, env[v].reshape(shape)) for v, shape in shapes.items())

    return step


def _is_split(x: Any) -> bool:
    """Tell whether a value is sharded along axes of an explicit mesh, which a flat array does not have."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)
