"""Differentiate max-pooling without a scatter.

The gradient of JAX's max-pooling is a select-and-scatter. XLA's CPU and GPU compilers expand it into sorts of index
arrays as large as the input. These have no operands, so they are hoisted to the start of the program and are live until
they are used, whatever is recomputed. In a plan, max-pooling has another rule. A window's tangent is that of its first
largest element, which is found by comparing the result with one strided slice of the input for each position in the
window; transposed, that is products and sums, which XLA fuses with their neighbours. Values and gradients are the same,
ties included: the first of equals gets all of the gradient. Where windows overlap, the order in which their gradients
are added may differ. In a window with a NaN, another element gets the gradient than in JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.new_equations import in_place_of

MOST_PLACES = 25
"""Larger windows would need many slices; they keep JAX's gradient."""


def is_max_pooling(eqn: Any) -> bool:
    """Tell whether an equation is max-pooling with so small a window."""
    if eqn.primitive.name != "reduce_window_max" or not compat.is_var(eqn.invars[0]):
        return False
    dilations = (*eqn.params["base_dilation"], *eqn.params["window_dilation"])
    n_places = math.prod(eqn.params["window_dimensions"])
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    return is_float and n_places <= MOST_PLACES and all(d == 1 for d in dilations)


def by_slices(eqn: Any) -> Any:
    """Make the equation that replaces a max-pooling and is differentiated by slices."""

    def pool(x: Any) -> Any:
        return eqn.primitive.bind(x, **eqn.params)

    def pushed_forward(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (x,), (t,) = primals, tangents
        y, is_found, tangent = pool(x), jnp.array(False), jnp.zeros((), t.dtype)
        for here, t_here in zip(_slices(eqn, x, y.shape), _tangents(eqn, t, y.shape), strict=True):
            is_largest = ~(here < y)
            tangent = tangent + jnp.where(is_largest & ~is_found, t_here, 0)
            is_found = is_largest | is_found
        return y, tangent

    function = jax.custom_jvp(pool)
    function.defjvp(pushed_forward)
    return in_place_of(eqn, function)


def _slices(eqn: Any, x: Any, shape: Sequence[int]) -> Iterator[Any]:
    """Yield, for each position in the window, the elements at that position in every window."""
    dims, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), [(low, high, 0) for low, high in eqn.params["padding"]])
    for offset in product(*map(range, dims)):
        stop = [o + (n - 1) * s + 1 for o, n, s in zip(offset, shape, strides, strict=True)]
        yield lax.slice(padded, offset, stop, strides)


def _tangents(eqn: Any, t: Any, shape: Sequence[int]) -> Iterator[Any]:
    """Yield the same of a tangent, with zeros round each slice.

    Zeros round the whole of it would be taken off the sum of all slices' gradients, and where that sum has several
    readers, XLA's CPU compiler would keep every slice's gradient, each as large as the input.
    """
    params = eqn.params
    for offset in product(*map(range, params["window_dimensions"])):
        places = map(_place, offset, params["window_strides"], params["padding"], t.shape, shape)
        starts, stops, edges = zip(*places, strict=True)
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            yield jnp.zeros(shape, t.dtype)
            continue
        here = lax.slice(t, starts, stops, params["window_strides"])
        yield lax.pad(here, jnp.zeros((), t.dtype), edges) if any(map(any, edges)) else here


def _place(offset: int, stride: int, padding: tuple[int, int], size: int, n: int) -> tuple[int, int, Any]:
    """Where a slice starts and stops in one dimension of the input, and how many of `n` windows lack that element."""
    before = padding[0] - offset
    first, end = max(0, -(-before // stride)), min(n, (size - 1 + before) // stride + 1)
    return first * stride - before, (end - 1) * stride - before + 1, (first, n - end, 0)
