"""Make zeros that something is scattered into when that is there.

XLA's CPU compiler makes arrays without operands when the program starts, one for each scatter that is written over
them: sums over segments, in every layer of a graph network, are live from the start to where they are used, also those
of regions that are recomputed late. Here zeros depend on what is scattered: they are of the one sign or the other, by
whether its first element is a number. No compiler can tell before, and the sums are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.new_equations import call_eqn

SCATTER_ADDS = frozenset(("scatter-add", "scatter_add"))
"""Primitives that add to some elements of an operand: JAX has renamed it."""


def with_late_zeros(eqns: Sequence[Any]) -> list[Any]:
    """Replace the equations that add to zeros of floats which others of these equations make."""
    zeros = {eqn.outvars[0] for eqn in eqns if _is_zeros(eqn)}
    return [_into_late_zeros(eqn) if _adds_to(eqn, zeros) else eqn for eqn in eqns]


def _is_zeros(eqn: Any) -> bool:
    is_constant = eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)
    return is_constant and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) and not np.any(eqn.invars[0].val)


def _adds_to(eqn: Any, zeros: set[Any]) -> bool:
    return eqn.primitive.name in SCATTER_ADDS and eqn.invars[0] in zeros and eqn.invars[2].aval.size > 0


def _into_late_zeros(eqn: Any) -> Any:
    def scattered(zeros: Any, indices: Any, updates: Any) -> Any:
        first, zero = lax.stop_gradient(updates.ravel()[0]), jnp.zeros((), zeros.dtype)
        late = jnp.where(first == first, zero, -zero)
        return eqn.primitive.bind(jnp.broadcast_to(late, zeros.shape), indices, updates, **eqn.params)

    found = call_eqn(scattered, [compat.shape_of(v.aval) for v in eqn.invars])
    return found.replace(invars=list(eqn.invars), outvars=list(eqn.outvars), source_info=eqn.source_info)
