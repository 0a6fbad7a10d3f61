"""Differentiate grouped convolutions on a CPU by their weights in blocks of channels.

Of a convolution in groups, a depthwise one for instance, XLA's CPU compiler makes the weights' gradient densely, for
all pairs of channels, and then takes out those of one group: as many times the FLOPs as there are groups, in kernels
that with 768 channels and 7 x 7 places are 110 MiB each. Block by block of channels the same numbers take as much only
for pairs in one block. Other compilers have grouped kernels and keep JAX's rule.

The rule is that of JAX, but for the weights' tangent: it is convolved in blocks, which are then concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.new_equations import in_place_of

LEAST_CHANNELS = 32
"""Narrower blocks are more kernels, which together take about as long."""
MOST_BLOCKS = 16
"""Each is a convolution to compile."""


def is_grouped(eqn: Any) -> bool:
    """Tell whether an equation is a convolution in groups of more channels than a block has."""
    if eqn.primitive.name != "conv_general_dilated" or eqn.params["feature_group_count"] == 1:
        return False
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    return is_float and len(list(_blocks(eqn))) > 1 and all(map(compat.is_var, eqn.invars))


def in_blocks(eqn: Any) -> Any:
    """Make the equation that replaces such a convolution and is differentiated in blocks."""
    dims = eqn.params["dimension_numbers"]
    reads, makes = (eqn.invars[i].aval.shape[d] // eqn.params["feature_group_count"]
                    for i, d in ((0, dims.lhs_spec[1]), (1, dims.rhs_spec[0])))  # fmt: skip

    def convolved(x: Any, w: Any) -> Any:
        return eqn.primitive.bind(x, w, **eqn.params)

    def block(x: Any, w: Any, start: int, stop: int) -> Any:
        x = lax.slice_in_dim(x, start * reads, stop * reads, axis=dims.lhs_spec[1])
        w = lax.slice_in_dim(w, start * makes, stop * makes, axis=dims.rhs_spec[0])
        return eqn.primitive.bind(x, w, **{**eqn.params, "feature_group_count": stop - start})

    def pushed_forward(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (x, w), (dx, dw) = primals, tangents
        parts = [] if isinstance(dx, SymbolicZero) else [convolved(dx, w)]
        if not isinstance(dw, SymbolicZero):
            parts.append(lax.concatenate([block(x, dw, *ends) for ends in _blocks(eqn)], dims.out_spec[1]))
        return convolved(x, w), sum(parts[1:], parts[0])

    function = jax.custom_jvp(convolved)
    function.defjvp(pushed_forward, symbolic_zeros=True)
    return in_place_of(eqn, function)


def _blocks(eqn: Any) -> Iterator[tuple[int, int]]:
    """Yield the first group of each block and that after its last."""
    groups, channels = eqn.params["feature_group_count"], eqn.outvars[0].aval.shape
    made = channels[eqn.params["dimension_numbers"].out_spec[1]] // groups
    size = max(1, LEAST_CHANNELS // made, -(-groups // MOST_BLOCKS))
    yield from pairwise((*range(0, groups, size), groups))
