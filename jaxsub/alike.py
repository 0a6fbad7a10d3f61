"""Which equations do the same: those of one signature whose functions and inner constants are the same too.

Two callbacks, or two derivative rules, that are the same lines of code but close over different things are not alike.
Two that close over equal things are, though JAX wraps a rule anew at every use.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import jax

from jaxsub.flops import bodies_of


def identity(eqn: Any) -> tuple[Any, ...]:
    """What two equations of one signature must agree on besides to do the same: functions, inner constants.

    Args:
        eqn: An equation.

    Example:
        >>> import jax
        >>> def ruled(c):
        ...     rule = jax.custom_jvp(jax.numpy.sin)
        ...     rule.defjvp(lambda primals, tangents: (jax.numpy.sin(*primals), c * tangents[0]))
        ...     return jax.make_jaxpr(rule)(1.0).eqns[0]
        >>> identity(ruled(2.0)) == identity(ruled(2.0)), identity(ruled(2.0)) == identity(ruled(3.0))
        (True, False)
    """
    found = tuple(_root(p, ()) for key, p in sorted(eqn.params.items()) if _is_function(p) and key != "out_trees")
    for body in bodies_of(eqn):
        consts = tuple(map(id, getattr(body, "consts", ())))
        found += (consts, *(identity(inner) for inner in body.eqns))
    return tuple(part for part in found if part)


def _is_function(x: Any) -> bool:
    return not hasattr(x, "eqns") and not isinstance(x, type) and (callable(x) or _is_wrapped(x))


def _is_wrapped(x: Any) -> bool:
    """JAX's own wrapped function: a function, transformations, their parameters."""
    return hasattr(x, "transforms") and hasattr(x, "f") and hasattr(x, "params")


def _root(x: Any, above: tuple[int, ...]) -> Any:
    """Equal for two functions that do the same: one piece of code, and equal things closed over.

    JAX wraps a rule anew at every use; in its own closures only functions and plain values are looked at.
    """
    if id(x) in above:
        return "itself"
    above += (id(x),)
    if isinstance(x, tuple | list):
        return tuple(_root(part, above) for part in x)
    if isinstance(x, dict):
        return tuple((key, _root(part, above)) for key, part in x.items())
    if isinstance(x, types.MethodType):
        return _root(x.__func__, above), id(x.__self__)
    if isinstance(x, functools.partial) or _is_wrapped(x):
        parts = (x.func, x.args, x.keywords) if isinstance(x, functools.partial) else (x.f, x.transforms, x.params)
        return _root(parts, above)
    if isinstance(x, types.FunctionType):
        held = [*(cell.cell_contents for cell in x.__closure__ or ()), x.__defaults__ or (), x.__kwdefaults__ or {}]
        is_jax = x.__module__.partition(".")[0] == "jax"
        return x.__code__, *(_root(part, above) for part in held if not is_jax or _is_function(part) or _is_plain(part))
    return (type(x), x) if _is_plain(x) or isinstance(x, jax.tree_util.PyTreeDef) else id(x)


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, bool | int | float | complex | str | bytes)
