"""Find the values whose tangents reach a result, through loops and conditionals too.

A `while` has no backward pass, so in a loss every tangent that enters one ends there. A region, however, passes all of
its inputs with their tangents to JAX, and its backward pass returns no cotangent, not even zeros, for an input whose
tangent ends in a `while`. Before JAX 0.11 a scan cannot stack that: its transpose stops with `Expected cotangent type
float32[] but got float32[4]`. So regions get no tangents that end in them; from 0.11 on that changes nothing.

Through opaque equations, such as the user's own rules, every result has the tangents of every input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import ZERO_TANGENT


def reaching(eqns: Sequence[Any], results: Sequence[Any]) -> set[Any]:
    """Find the floating-point results, and all variables that their tangents come from."""
    found = {a for a in results if has_tangent(a)}
    for eqn in reversed(eqns):
        wanted = [v in found for v in eqn.outvars]
        if any(wanted):
            places = zip(eqn.invars, _through(eqn, wanted), strict=True)
            found.update(a for a, is_reaching in places if is_reaching and has_tangent(a))
    return found


def has_tangent(atom: Any) -> bool:
    """Tell whether an atom of a jaxpr is a variable that can have a tangent: a floating-point or complex one."""
    return compat.is_var(atom) and jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact)


def _through(eqn: Any, wanted: Sequence[bool]) -> list[bool]:
    """Tell for each input of an equation whether its tangent may reach one of the wanted results."""
    primitive, params = compat.unwrapped(eqn)
    if primitive.name in ZERO_TANGENT:
        return [False] * len(eqn.invars)
    if primitive.name == "while":
        is_read = _looped(params["body_jaxpr"], params["body_nconsts"], len(wanted), wanted)
        return [False] * params["cond_nconsts"] + is_read
    if primitive.name == "scan":
        return _looped(params["jaxpr"], *compat.scan_sizes(eqn), wanted)
    if primitive.name == "cond":
        branches = [_inside(body, wanted) for body in params["branches"]]
        return [False, *map(any, zip(*branches, strict=True))]
    if primitive.name in ("jit", "pjit", *compat.REGIONS):
        return _inside(params["jaxpr"], wanted)
    return [True] * len(eqn.invars)


def _inside(body: Any, wanted: Sequence[bool]) -> list[bool]:
    jaxpr = compat.open_jaxpr(body)
    found = reaching(jaxpr.eqns, [a for a, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted])
    return [v in found for v in jaxpr.invars]


def _looped(body: Any, n_consts: int, n_carry: int, wanted: Sequence[bool]) -> list[bool]:
    """Do the same through a loop's body, where an input of a step may reach the result of a later one."""
    carry, rest = list(wanted[:n_carry]), list(wanted[n_carry:])
    while True:
        found = _inside(body, carry + rest)
        wider = [a or b for a, b in zip(carry, found[n_consts:], strict=False)]
        if wider == carry:
            return [*found[:n_consts], *carry, *found[n_consts + n_carry :]]
        carry = wider
