"""Make zeros that something is scattered into when that is there.

XLA's CPU compiler makes arrays without operands when the program starts, one for each scatter that is written over
them: sums over segments, in every layer of a graph network, are live from the start to where they are used, also those
of regions that are recomputed late. Here zeros depend on what is scattered: they are of the one sign or the other, by
whether its first element is a number. No compiler can tell before, and the sums are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxsub.jaxpr.new_equations import in_place_of

SCATTER_ADDS = frozenset(("scatter-add", "scatter_add"))
"""Primitives that add to some elements of an operand: JAX has renamed it."""


def with_late_zeros(eqns: Sequence[Any]) -> list[Any]:
    """Replace the equations that add to zeros of floats which others of these equations make."""
    zeros = {eqn.outvars[0] for eqn in eqns if makes_zeros(eqn) and _is_float(eqn.outvars[0])}
    return [_into_late_zeros(eqn) if _adds_to(eqn, zeros) else eqn for eqn in eqns]


def makes_zeros(eqn: Any) -> bool:
    """Tell whether an equation makes zeros of nothing."""
    is_constant = eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)
    return is_constant and not np.any(eqn.invars[0].val)


def _is_float(variable: Any) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.floating))


def _adds_to(eqn: Any, zeros: set[Any]) -> bool:
    return eqn.primitive.name in SCATTER_ADDS and eqn.invars[0] in zeros and eqn.invars[2].aval.size > 0


def _into_late_zeros(eqn: Any) -> Any:
    def scattered(zeros: Any, indices: Any, updates: Any) -> Any:
        first, zero = lax.stop_gradient(updates.ravel()[0]), jnp.zeros((), zeros.dtype)
        late = jnp.where(first == first, zero, -zero)
        return eqn.primitive.bind(jnp.broadcast_to(late, zeros.shape), indices, updates, **eqn.params)

    return in_place_of(eqn, jax.jit(scattered))
