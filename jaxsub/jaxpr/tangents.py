"""Find the values whose tangents reach a result, and those that tangents reach, through loops and conditionals too.

A `while` has no backward pass, so in a loss every tangent that enters one ends there. A region, however, passes all of
its inputs with their tangents to JAX, and its backward pass returns no cotangent, not even zeros, for an input whose
tangent ends in a `while`. Before JAX 0.11 a scan cannot stack that: its transpose stops with `Expected cotangent type
float32[] but got float32[4]`. So regions get no tangents that end in them; from 0.11 on that changes nothing.

What a loop carries beside what is differentiated, as the time of a solver of differential equations, has no tangent,
and may be read by a rule that refuses one.

Through opaque equations, such as the user's own rules, every result has the tangents of every input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxsub.jaxpr import compat

ZERO_TANGENT = frozenset("stop_gradient floor ceil round sign nextafter random_bits random_seed random_wrap".split())
"""Primitives with float outputs through which no gradient flows."""


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


def reached(eqn: Any, active: Sequence[bool]) -> list[bool]:
    """Tell which results of an equation have a tangent.

    Args:
        eqn: The equation.
        active: For each operand whether it has one.

    Example:
        >>> import jax
        >>> step = lambda carry, _: ((carry[0] + 1, carry[1] * carry[0]), None)
        >>> loop = jax.make_jaxpr(lambda t, x: jax.lax.scan(step, (t, x), None, length=3)[0])(0.0, 1.0).eqns[0]
        >>> reached(loop, [False, True]), reached(loop, [True, False])
        ([False, True], [True, True])
    """
    if not any(active) or compat.unwrapped(eqn)[0].name in ZERO_TANGENT:
        return [False] * len(eqn.outvars)
    found = _out_of(eqn, active)
    return [is_reached and has_tangent(v) for is_reached, v in zip(found, eqn.outvars, strict=True)]


def carried(eqn: Any, active: Sequence[bool]) -> list[bool]:
    """Tell which operands of a scan have a tangent at some step: what it carries perhaps only from a later one on."""
    n_consts, n_carry = compat.scan_sizes(eqn)
    consts, carry, rest = active[:n_consts], list(active[n_consts : n_consts + n_carry]), active[n_consts + n_carry :]
    while True:
        made = _results(eqn.params["jaxpr"], [*consts, *carry, *rest])
        wider = [a or b for a, b in zip(carry, made, strict=False)]
        if wider == carry:
            return [*consts, *carry, *rest]
        carry = wider


def _out_of(eqn: Any, active: Sequence[bool]) -> Sequence[bool]:
    primitive, params = compat.unwrapped(eqn)
    if primitive.name == "scan":
        return _results(params["jaxpr"], carried(eqn, active))
    if primitive.name == "cond":
        branches = [_results(branch, active[1:]) for branch in params["branches"]]
        return [any(results) for results in zip(*branches, strict=True)]
    if primitive.name in ("jit", "pjit", *compat.REGIONS):
        return _results(params["jaxpr"], active)
    return [True] * len(eqn.outvars)


def _results(body: Any, active: Sequence[bool]) -> list[bool]:
    jaxpr = compat.open_jaxpr(body)
    known = {v for v, is_active in zip(jaxpr.invars, active, strict=True) if is_active}
    for eqn in jaxpr.eqns:
        found = reached(eqn, [compat.is_var(a) and a in known for a in eqn.invars])
        known.update(v for v, is_active in zip(eqn.outvars, found, strict=True) if is_active)
    return [compat.is_var(a) and a in known for a in jaxpr.outvars]


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
