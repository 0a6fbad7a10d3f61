"""Faults that the traced program shows: what loops, regions and custom rules keep that need not be kept.

In goes a `Subject`; out come `Finding`s whose bytes are those of arrays in the traced program. The compiler fuses what
is elementwise, so only arrays that it must store are counted: those that a loop stacks or reads, that a barrier of
`jax.checkpoint` holds, that a custom rule returns as residuals, and the logits that a loss is reduced from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

from jaxsub.diagnosis.findings import Finding
from jaxsub.diagnosis.subject import Subject, bind, is_backward
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of, walk
from jaxsub.jaxpr.inline import flatten_closed
from jaxsub.jaxpr.new_equations import is_over_slices
from jaxsub.jaxpr.trace import aval_bytes

SAME = frozenset("copy copy_p name optimization_barrier pvary".split())
"""Primitives whose result is their operand."""

VIEWS = SAME | frozenset("reshape squeeze expand_dims transpose rev".split())
"""Primitives whose result has its operand's elements."""

ELEMENTWISE = VIEWS | frozenset(
    """broadcast_in_dim iota convert_element_type add sub mul div neg select_n eq ne lt le gt ge and or not
    stop_gradient""".split()
)
"""What costs next to nothing to recompute from smaller operands."""

REDUCTIONS = frozenset("reduce_max reduce_sum reduce_min argmax argmin cumsum gather reduce_and reduce_or".split())
"""What takes the words of logits together, or picks one."""

WIDE = 2
"""A product whose result is so many times its operand's width may be logits."""


def opaque_residuals(subject: Subject) -> Iterator[Finding]:
    """Residuals that a `custom_vjp` keeps: no policy and no plan can recompute what is inside."""
    if subject.program is None:
        return
    for eqn, times in _outside_regions(subject.program.eqns):
        if not eqn.primitive.name.startswith("custom_vjp_call"):
            continue
        n_bytes = times * sum(map(aval_bytes, _own_residuals(eqn)))
        name = getattr(_debug_name(eqn), "func_name", "") or "custom_vjp"
        yield Finding(
            "opaque residuals", n_bytes,
            f"the custom_vjp `{name}` keeps arrays that are neither its arguments nor its results; policies cannot "
            "see them.",
            f"wrap it, jax.checkpoint({name}), which runs its forward rule twice; or let its fwd return its arguments.",
            is_measured=False, source=compat.source_of(eqn),
        )  # fmt: skip


def _debug_name(eqn: Any) -> Any:
    body = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    return getattr(compat.open_jaxpr(body), "debug_info", None)


def _outside_regions(eqns: Sequence[Any], times: int = 1) -> Iterator[tuple[Any, int]]:
    """Equations whose residuals are stored: not those in `jax.checkpoint` regions."""
    for eqn in eqns:
        yield eqn, times
        primitive, params = compat.unwrapped(eqn)
        if primitive.name in compat.REGIONS or primitive.name.startswith("custom_"):
            continue
        steps = params["length"] if primitive.name == "scan" else 1
        for body in bodies_of(eqn):
            yield from _outside_regions(compat.open_jaxpr(body).eqns, times * steps)


def _own_residuals(eqn: Any) -> list[Any]:
    """What the rule of a `custom_vjp` keeps beside its arguments and results."""
    variables = list(dict.fromkeys(a for a in eqn.invars if compat.is_var(a)))
    closed_over = [a for a in eqn.invars[: eqn.params.get("num_consts", 0)] if compat.is_var(a)]  # has no gradient
    floats = [v for v in variables if v not in closed_over and jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    if not floats:
        return []

    def forward(*inputs: Any) -> Any:
        env = dict(zip(variables, inputs, strict=True))

        def of_floats(*active: Any) -> Any:
            given = {**env, **dict(zip(floats, active, strict=True))}
            return bind(eqn, [given[a] if compat.is_var(a) else a.val for a in eqn.invars])

        outs, pullback = jax.vjp(of_floats, *(env[v] for v in floats))
        return outs, jax.tree.leaves(pullback)

    closed, shape = jax.make_jaxpr(forward, return_shape=True)(*(compat.shape_of(v.aval) for v in variables))
    _, inputs, results = flatten_closed(closed)
    n_outs = len(shape[0])
    known = {*inputs, *(a for a in results[:n_outs] if compat.is_var(a))}
    return [a.aval for a in dict.fromkeys(a for a in results[n_outs:] if compat.is_var(a)) if a not in known]


def echoes(subject: Subject) -> Iterator[Finding]:
    """What a scan stacks though it is given: one of its inputs, a constant of it, or a carry that never changes."""
    for eqn, _ in walk(subject.eqns):
        if eqn.primitive.name != "scan":
            continue
        n_consts, n_carry = compat.scan_sizes(eqn)
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        given = set(body.invars[:n_consts]) | set(body.invars[n_consts + n_carry :])
        carried = zip(body.invars[n_consts : n_consts + n_carry], body.outvars[:n_carry], strict=True)
        fixed = given | {var for var, out in carried if var is out}
        makers = {v: inner for inner in body.eqns for v in inner.outvars}
        stacked = zip(body.outvars[n_carry:], eqn.outvars[n_carry:], strict=True)
        copies = [out for atom, out in stacked if _through(atom, makers, SAME) in fixed]
        n_bytes = sum(aval_bytes(v.aval) for v in copies)
        if n_bytes:
            yield Finding(
                "scan returns its input", n_bytes,
                f"a scan of {eqn.params['length']} steps stacks {_names(copies)}, equal to what it was given.",
                "return None in its place, and read the scan's own input after the scan.",
                is_measured=False, source=compat.source_of(eqn),
            )  # fmt: skip


def _through(atom: Any, makers: dict[Any, Any], primitives: frozenset[str]) -> Any:
    """What an atom is a copy or a view of."""
    while compat.is_var(atom) and atom in makers and compat.unwrapped(makers[atom])[0].name in primitives:
        atom = makers[atom].invars[0]
    return atom if compat.is_var(atom) else None


def wide_copies(subject: Subject) -> Iterator[Finding]:
    """Residuals that a loop stacks in float32 and that are casts of narrower values."""
    stacked = {v for v, eqn in subject.residuals() if eqn.primitive.name == "scan"}
    for eqn in subject.eqns:
        if eqn.primitive.name != "scan" or is_backward(eqn):
            continue
        _, n_carry = compat.scan_sizes(eqn)
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        makers = {v: inner for inner in body.eqns for v in inner.outvars}
        outs = list(zip(body.outvars[n_carry:], eqn.outvars[n_carry:], strict=True))
        kept = {_through(atom, makers, VIEWS) for atom, out in outs if out in stacked}
        for atom, out in outs:
            narrow = _widened(atom, makers)
            if out not in stacked or narrow is None:
                continue
            n_bytes = aval_bytes(out.aval)
            spared = n_bytes if narrow in kept else n_bytes * (1 - narrow.aval.dtype.itemsize / out.aval.dtype.itemsize)
            yield Finding(
                "wide copy", int(spared),
                f"the backward pass reads {_names([out])}, a cast of {narrow.aval.dtype.name} values in a loop.",
                "put jax.checkpoint round the cast and what reads it, such as a norm or a softmax: it is cast twice.",
                is_measured=False, source=compat.source_of(makers[_through(atom, makers, VIEWS)]),
            )  # fmt: skip


def _widened(atom: Any, makers: dict[Any, Any]) -> Any:
    """The narrower value that an atom is a cast of, or `None`."""
    cast = makers.get(_through(atom, makers, VIEWS))
    if cast is None or cast.primitive.name != "convert_element_type" or not compat.is_var(cast.invars[0]):
        return None
    was, now = cast.invars[0].aval.dtype, cast.outvars[0].aval.dtype
    is_wider = jnp.issubdtype(was, jnp.floating) and jnp.issubdtype(now, jnp.floating) and was.itemsize < now.itemsize
    return _through(cast.invars[0], makers, VIEWS) if is_wider else None


def broadcasts(subject: Subject) -> Iterator[Finding]:
    """Arrays that a loop or region reads, or that are closed over, and that repeat something smaller."""
    makers = {v: eqn for eqn in subject.eqns for v in eqn.outvars}
    small: dict[Any, int] = {}
    seen: set[Any] = set()
    for eqn in subject.eqns:
        for atom in _stored_operands(eqn):
            maker = makers.get(atom)
            if maker is None or atom in seen or is_backward(maker) or maker.primitive.name not in ELEMENTWISE:
                continue
            if not any(map(compat.is_var, maker.invars)) and maker.primitive.name == "broadcast_in_dim":
                continue  # of a number: XLA moves it into the loop (a scan with 1 MiB of zeros takes 0.1 KiB)
            seen.add(atom)
            n_bytes, source = aval_bytes(atom.aval), _source_bytes(atom, makers, small)
            if 2 * source <= n_bytes:
                where = "loop" if eqn.primitive.name == "scan" else "checkpoint region"
                yield Finding(
                    "broadcast", n_bytes - source,
                    f"{_names([atom])}, which a {where} reads, is broadcast before it and so stored in full.",
                    f"compute it inside the {where}: it is elementwise, and is then fused into what reads it.",
                    is_measured=False, source=compat.source_of(maker),
                )  # fmt: skip
    yield from _constants(subject)


def _stored_operands(eqn: Any) -> list[Any]:
    """Operands that have to be in memory: a loop's constants and stacked inputs, what a region's barrier holds."""
    primitive, _ = compat.unwrapped(eqn)
    atoms = list(eqn.invars) if primitive.name in compat.REGIONS and is_backward(eqn) else []
    if primitive.name == "scan" and not is_over_slices(eqn):
        n_consts, n_carry = compat.scan_sizes(eqn)
        atoms = [*eqn.invars[:n_consts], *eqn.invars[n_consts + n_carry :]]
    return [a for a in dict.fromkeys(a for a in atoms if compat.is_var(a)) if a.aval.shape]


def _source_bytes(atom: Any, makers: dict[Any, Any], known: dict[Any, int]) -> int:
    """Bytes of what an array is computed from elementwise; its own where it is computed in another way."""
    if atom not in known:
        maker = makers.get(atom)
        own = aval_bytes(atom.aval)
        if maker is None or maker.primitive.name not in ELEMENTWISE:
            known[atom] = own
        else:
            operands = dict.fromkeys(a for a in maker.invars if compat.is_var(a))
            known[atom] = min(own, sum(_source_bytes(a, makers, known) for a in operands))
    return known[atom]


def _constants(subject: Subject) -> Iterator[Finding]:
    """Closed-over arrays that are equal along an axis."""
    consts = [*subject.closed.consts, *(subject.program.consts if subject.program is not None else ())]
    for const in consts:
        if (
            isinstance(const, jax.core.Tracer)
            or not getattr(const, "shape", ())
            or not isinstance(const.dtype, np.dtype)
        ):
            continue
        array = np.asarray(const)
        smaller = array
        for axis, size in enumerate(array.shape):
            first = smaller.take([0], axis)
            if size > 1 and bool((smaller == first).all()):
                smaller = first
        if smaller.size < array.size:
            shape = ",".join(map(str, array.shape))
            yield Finding(
                "broadcast", array.nbytes - smaller.nbytes,
                f"the constant {array.dtype.name}[{shape}], which the function closes over, repeats an array of shape "
                f"{list(smaller.shape)}.",
                f"close over the array of shape {list(smaller.shape)}: jax.numpy broadcasts where it is read.",
                is_measured=False,
            )  # fmt: skip


def logits(subject: Subject) -> Iterator[Finding]:
    """The scores of all words for all tokens, which a loss takes together: they need never be whole."""
    eqns = [eqn for eqn in subject.eqns if not is_backward(eqn)]
    readers: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for atom in dict.fromkeys(a for a in eqn.invars if compat.is_var(a)):
            readers.setdefault(atom, []).append(eqn)
    for eqn in eqns:
        if eqn.primitive.name != "dot_general" or not eqn.outvars[0].aval.shape:
            continue
        out = eqn.outvars[0]
        (contracted, _), _ = eqn.params["dimension_numbers"]
        width = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        if out.aval.shape[-1] < WIDE * width or not _is_reduced(out, readers):
            continue
        yield Finding(
            "whole logits", aval_bytes(out.aval),
            f"{_names([out])} is computed whole, and a loss is reduced from it.",
            "jaxsub.sublinear(loss, chunks=True) computes it a slice of the tokens at a time, with no FLOPs more.",
            is_measured=False, source=compat.source_of(eqn),
        )  # fmt: skip


def _is_reduced(var: Any, readers: dict[Any, list[Any]]) -> bool:
    """Whether the last dimension of a value is reduced wherever it is read, and never contracted."""
    todo, seen, reduced = [var], {var}, False
    length = var.aval.shape[-1]
    while todo:
        for eqn in readers.get(todo.pop(), ()):
            outs = [v for v in eqn.outvars if v.aval.shape and v.aval.shape[-1] == length]
            if eqn.primitive.name in ("dot_general", "conv_general_dilated", "scan", "while"):
                return False
            reduced = reduced or (eqn.primitive.name in REDUCTIONS and not outs)
            fresh = [v for v in outs if v not in seen]
            seen.update(fresh)
            todo += fresh
    return reduced


def _names(values: Sequence[Any]) -> str:
    return ", ".join(f"{v.aval.dtype.name}[{','.join(map(str, v.aval.shape))}]" for v in values)
