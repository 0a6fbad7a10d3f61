"""Derivative rules of a function's own: equations of `jax.custom_jvp` and `jax.custom_vjp`, differentiated as JAX does.

A jaxpr holds such a rule as a Python function, which no text of the jaxpr shows. What it computes is part of the
program's gradient all the same, and of what that needs: traced at the equation's shapes it is a jaxpr like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsub.jaxpr import compat

RULED = ("custom_jvp_call", "custom_vjp_call")
"""Primitives with a derivative rule of their own."""

NOT_TRACED = (AssertionError, NameError, RuntimeError, TypeError, ValueError)
"""What rules raise that are not meant for all inputs at once, or not outside of their `jax.shard_map`."""


def is_inexact(atom: Any) -> bool:
    """Tell whether an atom, or an array, can have a tangent."""
    return bool(jnp.issubdtype(getattr(getattr(atom, "aval", atom), "dtype", bool), jnp.inexact))


def no_tangent(x: Any) -> np.ndarray:
    """Make the tangent of values without one, such as integers."""
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


def function_of(eqn: Any) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """An equation as a function of its operands, and their shapes."""
    invars, outvars = ([compat.new_var(a.aval) for a in atoms] for atoms in (eqn.invars, eqn.outvars))
    jaxpr = compat.make_jaxpr_of([eqn.replace(invars=invars, outvars=outvars)], invars, outvars)
    return lambda *xs: jax.core.eval_jaxpr(jaxpr, (), *xs), [compat.shape_of(v.aval) for v in invars]


def jvp_of(eqn: Any) -> tuple[Callable[..., list[Any]], list[Any], list[Any]]:
    """The forward derivative of an equation: of its operands and of their tangents, results and their tangents.

    Operands without a tangent, such as integers, have none.
    """
    function, shapes = function_of(eqn)
    can_move = [is_inexact(a) for a in shapes]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        moving = iter(tangents)
        outs, moved = jax.jvp(function, primals, [next(moving) if m else no_tangent(p)
                                                  for p, m in zip(primals, can_move, strict=True)])  # fmt: skip
        return [*outs, *(t for o, t in zip(outs, moved, strict=True) if is_inexact(o))]

    return jvp, shapes, [a for a, m in zip(shapes, can_move, strict=True) if m]


def traced_rule(eqn: Any) -> Any:
    """The jaxpr of an equation's derivative by its own rule; `None` where that cannot be traced by itself."""
    try:
        if eqn.primitive.name == "custom_jvp_call":
            jvp, shapes, tangents = jvp_of(eqn)
            return jax.make_jaxpr(jvp)(shapes, tangents)
        function, shapes = function_of(eqn)
        given = [compat.shape_of(v.aval) for v in eqn.outvars if is_inexact(v)]
        return jax.make_jaxpr(lambda xs, cts: _pulled(eqn, function, xs, cts))(shapes, given)
    except NOT_TRACED:
        return None


def _pulled(eqn: Any, function: Callable[..., list[Any]], xs: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    outs, pullback = jax.vjp(function, *xs)
    left = iter(given)
    found = pullback([next(left) if is_inexact(v) else no_tangent(v.aval) for v in eqn.outvars])
    return [*outs, *(c for c, x in zip(found, xs, strict=True) if is_inexact(x))]
