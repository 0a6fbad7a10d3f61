"""Draw a part of an array of random bits: the same bits as of the whole.

JAX's usual generator, threefry, hashes a key and an element's position (`jax_threefry_partitionable`, the default), so
that any part of an array can be drawn without the rest of it. Other generators cannot do so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from jaxsub.jaxpr.axis_places import Place


def is_threefry(eqn: Any) -> bool:
    """Whether an equation draws bits of JAX's usual generator, or a part of them."""
    is_bits = eqn.primitive.name == "random_bits" and is_of_threefry(eqn.invars[0])
    return is_bits or eqn.primitive.name == "threefry2x32"


def is_of_threefry(keys: Any) -> bool:
    """Whether a variable holds keys of JAX's usual generator."""
    return "fry" in str(keys.aval.dtype)


def needs_of_part(eqn: Any, place: Place) -> tuple[Place | None, ...] | None:
    """What a part of `random_bits` needs of their keys: a part of these, or all; `None` where no part can be drawn."""
    if not is_threefry(eqn):
        return None
    if place.dim < len(eqn.invars[0].aval.shape):
        return (place,)
    is_small = math.prod(eqn.params["shape"]) < 2**32  # positions and strides are 32 bits wide
    return (None,) if is_small and getattr(jax.config, "jax_threefry_partitionable", False) else None


def part_of_bits(keys: Any, bit_width: int, shape: Sequence[int], dim: int, index: Any) -> Any:
    """Draw a part of the bits that keys give.

    Args:
        keys: An array of keys of threefry.
        bit_width: Bits of an element: 8, 16, 32, or 64 with `jax_enable_x64`.
        shape: The shape of the bits that each key gives.
        dim: The dimension of it along which a part is drawn.
        index: What of that dimension to draw, a vector of `uint32`.

    Returns:
        Bits: the shape of the keys, then `shape` with as many elements in that dimension as the index has.

    Example:
        >>> keys = jax.random.key(3)
        >>> part = part_of_bits(keys, 32, (4, 6), 1, jnp.arange(2, 5, dtype=jnp.uint32))
        >>> bool((part == jax.random.bits(keys, (4, 6))[:, 2:5]).all())
        True
    """
    part = [len(index) if d == dim else size for d, size in enumerate(shape)]
    along = [lax.broadcast_in_dim(index, part, (d,)) if d == dim else lax.broadcasted_iota(jnp.uint32, part, d)
             for d in range(len(shape))]  # fmt: skip
    position = sum(x * np.uint32(math.prod(shape[d + 1 :])) for d, x in enumerate(along))
    position = jnp.broadcast_to(position, (*keys.shape, *part))
    words = [jax.random.key_data(keys)[..., i] for i in range(2)]
    if keys.ndim:  # a scalar stays one: the loop that draws on a CPU carries its operands
        words = [lax.broadcast_in_dim(word, position.shape, tuple(range(keys.ndim))) for word in words]
    high, low = threefry2x32_p.bind(*words, jnp.zeros_like(position), position)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return lax.shift_left(high.astype(dtype), dtype.type(32)) | low.astype(dtype)
    return (high ^ low).astype(dtype)
