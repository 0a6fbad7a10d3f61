"""Equations that JAX expands into others only when it lowers a program: primitives with a function of their own.

From JAX 0.12 on `jax.numpy.searchsorted` is one, and with it `digitize`, `interp` and `jax.scipy.linalg.expm` hold one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def expanded(eqn: Any) -> Any | None:
    """Return the closed jaxpr that an equation is expanded to; `None` for other equations.

    Those with results that may have a derivative are left as they are: they have rules of their own for it.
    """
    if eqn.primitive.name != "call_hi_primitive" or eqn.effects:
        return None
    if any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
        return None
    primitive = eqn.params["_prim"]
    return _expanded(primitive, tuple(primitive.in_avals_flat))


@functools.lru_cache(maxsize=256)
def _expanded(primitive: Any, avals: tuple[Any, ...]) -> Any:
    def run(*flat: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, flat))

    return jax.make_jaxpr(run)(*avals)
