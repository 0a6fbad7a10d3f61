"""Predict which elementwise work a CPU's library calls fuse: XLA grows one call around each sum.

From the last sum to the first, what makes an operand is taken in where all that reads it is inside, and the only
reader of a result, until nothing more can be: so a product, a sum of it, and what reads both are one call, as in the
backward pass of a softmax. Small arrays are left to XLA's own code. Programs with 16-bit floats are not looked at:
which of their conversions XLA removes is not known.

Source: OpenXLA, `xla/backends/cpu/transforms/library_rewriter.cc` and `xla/backends/cpu/ynn_support.cc`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxsub.costs.fusible import TAKEN_IN
from jaxsub.costs.narrow_floats import is_narrow
from jaxsub.jaxpr import compat

LEAST_ELEMENTS = 4096
"""Elements of an array that is worth the library's while (`IsInstructionPreferredByYnn`)."""


def library_calls(
    eqns: Sequence[Any], work: Sequence[int], made_at: Mapping[Any, int], readers: Mapping[Any, Collection[int]],
    ends: Collection[Any], base: Callable[[Any], Any],
) -> dict[int, set[int]]:  # fmt: skip
    """Find the library calls of a run of equations: by each of its equations all that are one call with it.

    Args:
        eqns: The equations, in order.
        work: The numbers of those that are no views and not merged with others, in order.
        made_at: The number of the one that makes each variable.
        readers: The numbers of those that read each variable.
        ends: Variables that are read at the end.
        base: The variable that another is, or is a view of.
    """
    calls: dict[int, set[int]] = {}
    if any(is_narrow(v) for eqn in eqns for v in eqn.outvars):
        return calls

    def beside(p: int, call: set[int]) -> Iterator[int]:
        """What may be taken in beside an equation that has been."""
        for v in map(base, filter(compat.is_var, eqns[p].invars)) if eqns[p].primitive.name != "dot_general" else ():
            if v in made_at and v not in ends and call.issuperset(readers[v]):
                yield made_at[v]
        v = eqns[p].outvars[0]
        if v not in ends and len(after := readers.get(v, ())) == 1:
            yield from after

    for start in reversed(work):
        if start in calls or not _is_sum(eqns[start]):
            continue
        call, left = set[int](), [start]
        while left:
            more = calls.get(p := left.pop(), {p}) - call
            call |= more
            left += [q for each in more for q in beside(each, call) if q not in call and _is_taken_in(eqns[q])]
        calls.update((p, call) for p in call)
    return calls


def _is_sum(eqn: Any) -> bool:
    return eqn.primitive.name in ("reduce_sum", "reduce_max", "reduce_min") and _elements(eqn) >= LEAST_ELEMENTS


def _is_taken_in(eqn: Any) -> bool:
    is_work = eqn.primitive.name in TAKEN_IN and _elements(eqn) >= LEAST_ELEMENTS
    return is_work or eqn.primitive.name in ("dot_general", "broadcast_in_dim") or _is_sum(eqn)


def _elements(eqn: Any) -> int:
    """The elements of the largest array that an equation reads or makes."""
    return max(int(math.prod(v.aval.shape)) for v in (*eqn.invars, *eqn.outvars))
