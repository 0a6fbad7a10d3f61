"""What a CPU makes of 16-bit floats: it computes in float32 and rounds the results.

Products and convolutions read float32 copies of their operands. Elementwise work converts as it goes; rounding a result
to bfloat16 is slow work, done once where several kernels need it.

Sources: OpenXLA, `FloatNormalization`, `ChangeOpDataType`, `CpuInstructionFusion::IsExpensive`; and programs that it
compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsub.costs.fusible import SLOW
from jaxsub.jaxpr import compat

ROUND_FREE = frozenset("transpose broadcast_in_dim iota copy".split())
BFLOAT16 = jnp.dtype("bfloat16")
NARROW = frozenset((BFLOAT16, jnp.dtype("float16")))
WIDENED = ("dot_general", "conv_general_dilated")
"""Primitives that a CPU computes on float32 copies of 16-bit operands."""


def is_slow(eqn: Any, is_cpu: bool) -> bool:
    """Tell whether elementwise work is not repeated in each kernel that needs it: nor are look-ups, on a CPU.

    A CPU rounds to bfloat16 after slices and other copies, too; not after transposes and broadcasts.
    """
    name = eqn.primitive.name
    is_rounded = is_cpu and name not in ROUND_FREE and eqn.outvars[0].aval.dtype == BFLOAT16
    return name in SLOW or is_rounded or (is_cpu and name == "gather")


def widened(eqns: Sequence[Any]) -> tuple[Sequence[Any], Sequence[int]]:
    """Convert what products and convolutions of 16-bit floats read and make, as a CPU does, which has none of them.

    They read float32 copies of their operands, and their results are rounded. Products of two such operands that return
    float32 and add along the rows of the first read 16 bits.

    Args:
        eqns: The equations, in order.

    Returns:
        The equations with conversions, and for each the number of the equation that it was.
    """
    if not any(is_narrow(a) for eqn in eqns for a in (*eqn.invars, *eqn.outvars)):
        return eqns, range(len(eqns))
    found, places = list[Any](), list[int]()
    for place, eqn in enumerate(eqns):
        ahead, behind = [], []
        if eqn.primitive.name in WIDENED and not _reads_narrow(eqn):
            pairs = {a: compat.new_var(a.aval.update(dtype=jnp.dtype("float32"))) for a in eqn.invars if is_narrow(a)}
            ahead = [_converted(a, wide) for a, wide in pairs.items()]
            result = eqn.outvars[0]
            if is_narrow(result):
                wide = compat.new_var(result.aval.update(dtype=jnp.dtype("float32")))
                behind, result = [_converted(wide, result)], wide
            eqn = eqn.replace(invars=[pairs.get(a, a) if compat.is_var(a) else a for a in eqn.invars], outvars=[result])
        found += [*ahead, eqn, *behind]
        places += [place] * (len(ahead) + 1 + len(behind))
    return found, places


def is_narrow(atom: Any) -> bool:
    """Tell whether an atom is an array of 16-bit floats."""
    return getattr(atom.aval, "dtype", None) in NARROW and compat.is_var(atom)


def _reads_narrow(eqn: Any) -> bool:
    """Tell whether a product reads 16-bit floats as they are."""
    if eqn.primitive.name != "dot_general" or is_narrow(eqn.outvars[0]) or not all(map(is_narrow, eqn.invars)):
        return False
    (summed, _), _ = eqn.params["dimension_numbers"]
    return tuple(summed) == (eqn.invars[0].aval.ndim - 1,)


def _converted(atom: Any, var: Any) -> Any:
    """Make the equation that converts an atom to the type of a variable."""
    return _conversion(atom.aval.dtype, var.aval.dtype).replace(invars=[atom], outvars=[var])


@functools.cache
def _conversion(dtype: Any, to: Any) -> Any:
    traced = jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, to))(jax.ShapeDtypeStruct((), dtype))
    return compat.open_jaxpr(traced).eqns[0]
