"""Tell whether a jaxpr is linear in some of its inputs: whether a backward pass only scales with its cotangents.

JAX's own backward passes are linear in the cotangents; the rule of a `custom_vjp` may be anything: it may clip,
quantise or add to them. A gradient that was computed for the cotangent 1 may be scaled afterwards only where the rule
is linear. Values are marked from the inputs on: independent of the inputs in question, linear in them, or zeros. What
no table has counts as not linear: a rule that is linear in a way not known here costs recomputation, no wrong value.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxsub.jaxpr import compat

MOVES = frozenset(
    "reshape broadcast_in_dim transpose slice dynamic_slice squeeze rev gather convert_element_type copy copy_p name "
    "expand_dims split unstack reduce_precision sharding_constraint device_put mesh_cast neg conj real imag reduce_sum "
    "cumsum reduce_window_sum".split()
)
"""Linear in the first operand; the others say where."""
SUMS = frozenset("add add_any sub concatenate pad stack dynamic_update_slice scatter scatter-add complex".split())
"""Linear in all their floating-point operands together."""
PRODUCTS = frozenset("mul dot_general conv_general_dilated ragged_dot ragged_dot_general".split())
"""Linear in each operand alone."""

ATTENTION = "dot_product_attention_bwd_wrapper"
"""The backward pass of cuDNN's attention: linear in its last operand."""


class Mark(enum.Enum):
    """How a value depends on the inputs in question."""

    ZERO = 0
    LINEAR = 1
    FREE = 2


class _NotLinear(Exception):
    """A value is neither independent of the inputs nor linear in them."""


def is_linear(closed: Any, moving: Sequence[bool]) -> bool:
    """Tell whether every output is linear in the inputs that move, or zero, whatever the other inputs are.

    Example:
        >>> import jax
        >>> ones = jnp.ones(3)
        >>> is_linear(jax.make_jaxpr(lambda x, ct: (ct * jnp.cos(x)).sum())(ones, ones), (False, True))
        True
        >>> is_linear(jax.make_jaxpr(lambda x, ct: jnp.clip(ct, -1, 1))(ones, ones), (False, True))
        False
    """
    try:
        return Mark.FREE not in _outputs(closed, [Mark.LINEAR if m else Mark.FREE for m in moving])
    except _NotLinear:
        return False


def is_linear_equation(eqn: Any, moving: Sequence[bool]) -> bool:
    """Tell whether every result of one equation is linear in its operands that move, whatever other variables are."""
    marks = [Mark.LINEAR if m else Mark.FREE if compat.is_var(a) else _of_literal(a)
             for a, m in zip(eqn.invars, moving, strict=True)]  # fmt: skip
    try:
        return Mark.FREE not in _through(eqn, marks)
    except _NotLinear:
        return False


def _outputs(body: Any, marks: Sequence[Mark]) -> list[Mark]:
    """The marks of a jaxpr's outputs; its constants depend on nothing."""
    jaxpr = compat.open_jaxpr(body)
    found: dict[Any, Mark] = dict(zip(jaxpr.invars, marks, strict=True))

    def mark(atom: Any) -> Mark:
        return found.get(atom, Mark.FREE) if compat.is_var(atom) else _of_literal(atom)

    for eqn in jaxpr.eqns:
        outs = _through(eqn, [mark(atom) for atom in eqn.invars])
        found.update(zip(eqn.outvars, outs, strict=True))
    return [mark(atom) for atom in jaxpr.outvars]


def _of_literal(atom: Any) -> Mark:
    return Mark.FREE if np.any(np.asarray(atom.val) != 0) else Mark.ZERO


def _through(eqn: Any, ins: Sequence[Mark]) -> list[Mark]:
    """The marks of an equation's results."""
    primitive, params = compat.unwrapped(eqn)
    name = primitive.name
    if name == "scan":
        return _scan(eqn, ins)
    for key in ("jaxpr", "call_jaxpr"):  # calls, regions, and functions with rules: what they compute
        if key in params and len(compat.open_jaxpr(params[key]).invars) == len(ins):
            return _outputs(params[key], ins)
    if name == "optimization_barrier":
        return list(ins)
    if Mark.LINEAR not in ins and not (name in MOVES and ins[0] is Mark.ZERO):
        return [Mark.FREE] * len(eqn.outvars)
    if not _is_linear_here(name, ins, [jnp.issubdtype(a.aval.dtype, jnp.inexact) for a in eqn.invars]):
        raise _NotLinear
    if any(not jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars) and Mark.LINEAR in ins:
        raise _NotLinear  # rounded to whole numbers
    return [Mark.LINEAR if Mark.LINEAR in ins else Mark.ZERO] * len(eqn.outvars)


def _is_linear_here(name: str, ins: Sequence[Mark], is_inexact: Sequence[bool]) -> bool:
    """Whether an equation is linear in the operands that are."""
    if name in MOVES or name == "div":
        return Mark.LINEAR not in ins[1:]
    if name == ATTENTION:
        return Mark.LINEAR not in ins[:-1]
    if name in PRODUCTS:
        return list(ins).count(Mark.LINEAR) == 1
    if name == "select_n":
        return ins[0] is Mark.FREE and Mark.FREE not in ins[1:]
    return name in SUMS and all(m is not Mark.FREE for m, known in zip(ins, is_inexact, strict=True) if known)


def _scan(eqn: Any, ins: Sequence[Mark]) -> list[Mark]:
    """The same for a loop: what it carries is marked before a step as after it."""
    n_consts, n_carry = compat.scan_sizes(eqn)
    marks = list(ins)
    while True:
        outs = _outputs(eqn.params["jaxpr"], marks)
        carried = [_joined(a, b) for a, b in zip(marks[n_consts:], outs[:n_carry], strict=False)]
        if carried == marks[n_consts : n_consts + n_carry]:
            return [*carried, *outs[n_carry:]]
        marks[n_consts : n_consts + n_carry] = carried


def _joined(a: Mark, b: Mark) -> Mark:
    if a is b or Mark.ZERO in (a, b):
        return b if a is Mark.ZERO else a
    raise _NotLinear
