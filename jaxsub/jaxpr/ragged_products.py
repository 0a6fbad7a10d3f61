"""Products by groups of rows as XLA runs them: one product of operands that are masked for each group.

JAX lowers `ragged_dot` on CPUs and GPUs to a product of the rows, copied once for each group with zeros in the rows of
the others; its gradients likewise (`_ragged_dot_general_impl`). XLA finds the copies of the rows that both passes make,
and makes them once: they live from the forward to the backward pass. Where memory is predicted, the function made here
is traced in the equation's place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PLAIN = ((((1,), (1,)), ((), ())), (0,), (0,))
"""Dimension numbers of `jax.lax.ragged_dot`: what is summed, the rows in groups, the groups of weights."""


def masked_product(eqn: Any) -> Callable[..., Any] | None:
    """What a `ragged_dot` runs, as a function of its operands, or `None` for any other equation."""
    if eqn.primitive.name != "ragged_dot_general" or len(eqn.invars) != 3:
        return None
    dims = eqn.params["ragged_dot_dimension_numbers"]
    summed, rows, groups = dims.dot_dimension_numbers, dims.lhs_ragged_dimensions, dims.rhs_group_dimensions
    pairs = tuple(tuple(map(tuple, pair)) for pair in summed)
    if (pairs, tuple(rows), tuple(groups)) != PLAIN or eqn.invars[2].aval.ndim != 1:
        return None
    dtype = eqn.outvars[0].aval.dtype
    product = partial(lax.dot_general, preferred_element_type=dtype)

    @jax.custom_vjp
    def run(x: Any, weights: Any, sizes: Any) -> Any:
        return forward(x, weights, sizes)[0]

    def forward(x: Any, weights: Any, sizes: Any) -> Any:
        copies = _masked(x, sizes)
        return product(copies, weights, (((2, 0), (1, 0)), ((), ()))), (copies, weights, sizes)

    def backward(residuals: Any, cotangent: Any) -> Any:
        copies, weights, sizes = residuals
        cotangents = _masked(cotangent, sizes)
        of_rows = product(cotangents, weights, (((2, 0), (2, 0)), ((), ())))
        of_weights = product(copies, cotangents, (((1,), (1,)), ((0,), (0,))))
        return of_rows.astype(copies.dtype), of_weights.astype(weights.dtype), None

    run.defvjp(forward, backward)
    return run


def _masked(x: Any, sizes: Any) -> Any:
    """Copies of rows, for each group with zeros in the rows of the others."""
    ends = jnp.cumsum(sizes)
    shape = (*sizes.shape, *x.shape)
    row = lax.broadcasted_iota(sizes.dtype, shape, 1)
    is_of_group = ((ends - sizes)[:, None, None] <= row) & (row < ends[:, None, None])
    return lax.select(is_of_group, lax.broadcast_in_dim(x, shape, (1, 2)), jnp.zeros(shape, x.dtype))
