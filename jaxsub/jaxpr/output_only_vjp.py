"""Save the results of elementwise functions whose derivative needs only their result.

JAX's rule for tanh reads the tanh that it makes itself, before `checkpoint_name` can name it. A policy that saves names
then saves a copy that no derivative reads, and the backward pass recomputes the tanh and the product in front of it.
Here the result is named first, and JAX's own rule, traced once, reads the named value: the same numbers, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.core
import jax.numpy as jnp

from jaxsub.jaxpr import compat

CANDIDATES = frozenset("tanh logistic exp exp2 expm1 sqrt cbrt tan".split())
"""Primitives whose rule may read the result alone; it differs between versions of JAX."""


def is_known_by_result(eqn: Any) -> bool:
    """Tell whether an equation is such a function, of real numbers.

    With `jax_remat3` none is: it ignores names inside derivative rules.

    Example:
        >>> tanh, sin = (jax.make_jaxpr(f)(1.0).eqns[0] for f in (jnp.tanh, jnp.sin))
        >>> is_known_by_result(sin), is_known_by_result(tanh) == (compat.remat_flavour() == "remat2")
        (False, True)
    """
    if eqn.primitive.name not in CANDIDATES or not compat.is_var(eqn.invars[0]) or compat.remat_flavour() == "remat3":
        return False
    return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)) and _rule_of(eqn) is not None


def tagged(eqn: Any, x: Any, tag: Callable[[Any, int], Any], offset: int) -> Any:
    """Evaluate such an equation so that its derivative reads the result that `tag(result, offset)` names or marks."""
    rule = _rule_of(eqn)

    def result(x: Any) -> Any:
        with compat.standing_at(eqn):
            return tag(eqn.primitive.bind(x, **eqn.params), offset)

    def pushed_forward(primals: Any, tangents: Any) -> tuple[Any, Any]:
        y = result(*primals)
        with compat.standing_at(eqn):
            return y, jax.core.eval_jaxpr(rule, (), y, *tangents)[0]

    function = jax.custom_jvp(result)
    function.defjvp(pushed_forward)
    return function(x)


def _rule_of(eqn: Any) -> Any:
    """Trace the result's tangent from the result and the argument's tangent; `None` where it needs more."""
    return _rule(eqn.primitive, compat.shape_of(eqn.invars[0].aval), tuple(sorted(eqn.params.items())))


@functools.lru_cache(maxsize=256)
def _rule(primitive: Any, aval: jax.ShapeDtypeStruct, params: tuple[tuple[str, Any], ...]) -> Any:
    def pushed_forward(x: Any, tangent: Any) -> Any:
        return jax.jvp(lambda x: primitive.bind(x, **dict(params)), (x,), (tangent,))

    closed = jax.make_jaxpr(pushed_forward)(aval, aval)
    jaxpr = compat.open_jaxpr(closed)
    (x, tangent), (made, *rest) = jaxpr.invars, jaxpr.eqns
    if made.primitive is not primitive or any(x is a for e in rest for a in e.invars):
        return None
    return compat.make_jaxpr_of(rest, [*made.outvars, tangent], [jaxpr.outvars[1]], closed)
