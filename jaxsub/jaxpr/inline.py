"""Flatten a jaxpr: inline calls, drop dead code, move debug callbacks last.

Plain calls (`jit` without shardings of its own, `closed_call`) are inlined, each time with fresh variables. Calls with
a differentiation rule (`custom_jvp_call`, `custom_vjp_call`), loops, conditionals and the user's own `jax.checkpoint`
regions stay whole. Equations without readers and effects are dropped; debug callbacks, such as `jax.debug.print`, come
last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.derivative_rules import RULED
from jaxsub.jaxpr.new_equations import barrier_eqn, runs_in_slices


def flatten_jaxpr(
    closed: Any, *, keeps_slices: bool = False, opened: Sequence[str] = ()
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Inline calls, and primitives in `opened`; return equations, inputs (constants first), outputs and constants.

    Constants whose values are not known, as a primitive that is not JAX's may have them, are inputs behind the others.
    """

    def body_of(eqn: Any) -> Any:
        if keeps_slices and runs_in_slices(eqn):
            return None
        if eqn.primitive.name in opened:
            return eqn.params["call_jaxpr" if eqn.primitive.name in RULED else "jaxpr"]
        return compat.inlined_body(eqn)

    jaxpr = compat.open_jaxpr(closed)
    eqns: list[Any] = []
    consts = getattr(closed, "consts", ())
    hoisted: list[tuple[Any, Any]] = list(zip(jaxpr.constvars, consts, strict=False))
    given = [*jaxpr.constvars[len(consts) :], *jaxpr.invars]
    env: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        _inline(eqn, env, eqns, hoisted, None, body_of)
    outvars = [renamed(env, a) for a in jaxpr.outvars]
    eqns = sliced_where_used(eqns, outvars)
    return eqns, [v for v, _ in hoisted] + given, outvars, [c for _, c in hoisted]


def arrays_for_rules(eqns: Sequence[Any], variables: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
    """Constants, those that a derivative rule reads as JAX arrays, as the function gave them to it.

    JAX keeps them as NumPy arrays, which a rule cannot index by what is traced. Others stay: they may be large.
    """
    read = {a for eqn in eqns if eqn.primitive.name in RULED for a in eqn.invars if compat.is_var(a)}
    with jax.ensure_compile_time_eval():
        return [jnp.asarray(c) if v in read and not isinstance(c, jax.Array) else c
                for v, c in zip(variables, consts, strict=False)]  # fmt: skip


def flatten_closed(closed: Any, opened: Sequence[str] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Equations, inputs and outputs as `flatten_jaxpr` has them; constants are literals, and no inputs.

    For a program that is not differentiated any more: functions with a rule of their own are calls like others.
    """
    eqns, inputs, outvars, consts = flatten_jaxpr(closed, opened=(*opened, *RULED))
    eqns, outvars = _with_literals(list(zip(inputs, consts, strict=False)), eqns, outvars)
    return eqns, inputs[len(consts) :], outvars


def _with_literals(
    consts: Sequence[tuple[Any, Any]], eqns: list[Any], outvars: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Put constants, variables with their values, where they are read."""
    if not consts:
        return eqns, outvars
    literals = {v: Literal(value, v.aval) for v, value in consts}
    eqns = [eqn.replace(invars=[renamed(literals, a) for a in eqn.invars]) for eqn in eqns]
    return eqns, [renamed(literals, a) for a in outvars]


def inline_regions(
    eqns: Sequence[Any], outvars: Sequence[Any], is_opened: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """Inline regions among flat equations, and the calls in them; return equations and outputs."""

    def body_of(eqn: Any) -> Any:
        return compat.unwrapped(eqn)[1]["jaxpr"] if is_opened(eqn) else compat.inlined_body(eqn)

    made: list[Any] = []
    consts: list[tuple[Any, Any]] = []
    env: dict[Any, Any] = {}
    for eqn in eqns:
        _inline(eqn, env, made, consts, None, body_of)
    made, outvars = _with_literals(consts, made, [renamed(env, a) for a in outvars])
    return sliced_where_used(made, outvars), outvars


def renamed(names: Mapping[Any, Any], atom: Any) -> Any:
    """What an atom is called now; a variable without another name, or a constant, is itself."""
    return names.get(atom, atom) if compat.is_var(atom) else atom


def with_new_names(eqn: Any, names: dict[Any, Any]) -> Any:
    """The equation with its variables renamed, those that it makes to new ones, which are added to `names`."""
    invars = [renamed(names, a) for a in eqn.invars]
    outvars = [compat.new_var(v.aval) for v in eqn.outvars]
    names.update(zip(eqn.outvars, outvars, strict=True))
    return eqn.replace(invars=invars, outvars=outvars)


def _inline(eqn: Any, env: dict[Any, Any], eqns: list[Any], hoisted: list[tuple[Any, Any]], caller: Any,
            body_of: Callable[[Any], Any]) -> None:  # fmt: skip
    body = body_of(eqn)
    invars = [renamed(env, a) for a in eqn.invars]
    if body is None:
        if caller is not None:
            eqn = with_new_names(eqn, env).replace(source_info=compat.within(eqn, caller))
        elif env:
            eqn = eqn.replace(invars=invars)
        eqns.append(eqn)
        return
    if caller is not None:
        eqn = eqn.replace(source_info=compat.within(eqn, caller))
    if _is_fenced(eqn) and invars:
        fenced = [compat.new_var(a.aval) for a in invars]  # as JAX lowers it
        eqns.append(barrier_eqn().replace(invars=invars, outvars=fenced))
        invars = fenced
    jaxpr = compat.open_jaxpr(body)
    inner: dict[Any, Any] = dict(zip(jaxpr.invars, invars, strict=True))
    for var, const in zip(jaxpr.constvars, getattr(body, "consts", ()), strict=False):
        inner[var] = compat.new_var(var.aval)
        hoisted.append((inner[var], const))
    for inner_eqn in jaxpr.eqns:
        _inline(inner_eqn, inner, eqns, hoisted, eqn, body_of)
    env.update((v, renamed(inner, a)) for v, a in zip(eqn.outvars, jaxpr.outvars, strict=True))


def _is_fenced(eqn: Any) -> bool:
    """Whether an equation is a region in a backward pass whose inputs JAX puts behind a barrier."""
    params = eqn.params
    return eqn.primitive.name in compat.REGIONS and params.get("prevent_cse", True) and params.get("differentiated")


_TRANSFORMED = re.compile(r"\b(?:jvp|transpose|vmap|jit|pjit|checkpoint)\(((?:[^()]|\([^()]*\))*)\)")
_MARKS = frozenset(("checkpoint", "rematted_computation", "closed_call", "jaxsub"))


def scope_of(stack: str) -> str:
    """A name stack without transformations and JAX's own marks.

    Example:
        >>> scope_of("transpose(jvp(block_0))/checkpoint/attention")
        'block_0/attention'
    """
    bare = _TRANSFORMED.sub(r"\1", stack)
    if bare != stack:
        return scope_of(bare)
    return "/".join(part for part in stack.split("/") if part and part not in _MARKS)


def live_eqns(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Drop equations without readers and effects."""
    wanted = {a for a in outvars if compat.is_var(a)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(a for a in eqn.invars if compat.is_var(a))
    return kept[::-1]


def reports_last(eqns: Sequence[Any]) -> list[Any]:
    """Move debug callbacks, such as `jax.debug.print`, to the end, so that no region prints twice.

    JAX promises no order among such equations unless they are `ordered`; those stay in order with all ordered effects.
    """
    kept: list[Any] = []
    reports: list[Any] = []
    for eqn in eqns:
        if _only_reports(eqn):
            reports.append(eqn)
            continue
        if _is_ordered(eqn):
            kept += [report for report in reports if _is_ordered(report)]
            reports = [report for report in reports if not _is_ordered(report)]
        kept.append(eqn)
    return kept + reports


def may_report_again(eqn: Any) -> bool:
    """Whether all effects of an equation, a loop perhaps, are reports in no order: `jax.checkpoint` repeats them."""
    return {type(effect).__name__ for effect in eqn.effects} <= {"DebugEffect"}


def _only_reports(eqn: Any) -> bool:
    """Tell whether an equation is a debug callback, as of `jax.debug.print` and `jax.debug.callback`.

    The effects' classes are private; in a version with other names such equations stay in place.
    """
    names = {type(effect).__name__ for effect in eqn.effects}
    return not eqn.outvars and bool(names) and names <= {"DebugEffect", "OrderedDebugEffect"}


def _is_ordered(eqn: Any) -> bool:
    """Tell whether an equation has ordered effects."""
    return any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects)


def sliced_where_used(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Replace `unstack` by slices, each where it is read first.

    From 0.12 on iterating over an array is one equation, `unstack`; before it was slices. The results of an `unstack`
    would all cross every cut between it and their readers.
    """
    if not any(eqn.primitive.name == "unstack" for eqn in eqns):
        return list(eqns)
    parts: dict[Any, tuple[Any, int]] = {}
    found: list[Any] = []

    def take(atoms: Sequence[Any]) -> None:
        for var in dict.fromkeys(a for a in atoms if compat.is_var(a)):
            if var in parts:
                eqn, i = parts.pop(var)
                take(eqn.invars)
                found.extend(_slice_eqns(eqn, i, var))

    for eqn in eqns:
        if eqn.primitive.name == "unstack":
            parts.update((var, (eqn, i)) for i, var in enumerate(eqn.outvars))
        else:
            take(eqn.invars)
            found.append(eqn)
    take(outvars)
    return found


def _slice_eqns(eqn: Any, i: int, var: Any) -> list[Any]:
    """Make the equations of one result of an `unstack`."""
    axis = eqn.params["axis"]
    traced = jax.make_jaxpr(lambda x: jax.lax.index_in_dim(x, i, axis, keepdims=False))(
        compat.shape_of(eqn.invars[0].aval)
    )
    jaxpr = compat.open_jaxpr(traced)
    names = {jaxpr.invars[0]: eqn.invars[0], jaxpr.outvars[0]: var}
    return [
        inner.replace(
            invars=[names.get(a, a) if compat.is_var(a) else a for a in inner.invars],
            outvars=[names.get(v, v) for v in inner.outvars],
            source_info=eqn.source_info,
        )
        for inner in jaxpr.eqns
    ]
