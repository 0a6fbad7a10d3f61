"""Find arrays without operands that the compiler hoists out of a region's backward pass, such as zeros.

The gradient of a look-up is scattered into zeros, that of a pooling into zeros at an array of indices. On a CPU such
arrays are allocated when the program starts. On a GPU they are allocated where they are used; but one kernel makes all
zeros of one shape when the first is needed, and those of the other stages are live from then on. Loops stack values in
zeros too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import primitives_in
from jaxsub.jaxpr.late_zeros import SCATTER_ADDS
from jaxsub.partition.traced_run import TracedRun

HOISTING = SCATTER_ADDS | {"select_and_scatter_add", "scan"}
"""Primitives of backward passes that need large arrays without operands."""

TOGETHER = "hoisted_together"
"""The case of equal zeros that several stages need: they are live in unwrapped stages too, behind barriers."""

Shape = tuple[tuple[int, ...], Any]


def hoisting(run: TracedRun, shared: frozenset[Shape], *, is_cpu: bool) -> str:
    """Tell which of `hoisted` and `hoisted_together` applies to a run; empty where nothing is hoisted.

    Args:
        run: The run.
        shared: Shapes of zeros that several stages scatter into.
        is_cpu: Whether to compile for a CPU rather than a GPU.
    """
    if not is_cpu and _zeros(run) & shared:
        return TOGETHER
    return "hoisted" if not HOISTING.isdisjoint(_names(run)) else ""


def shared_zeros(runs: Iterable[TracedRun]) -> frozenset[Shape]:
    """Find shapes and dtypes of zeros that the backward passes of more than one run scatter into."""
    counts = Counter(shape for run in runs for shape in _zeros(run))
    return frozenset(shape for shape, count in counts.items() if count > 1)


def _names(run: TracedRun) -> frozenset[str]:
    return frozenset(name for eqn in run.backward for name in primitives_in(eqn))


def _zeros(run: TracedRun) -> frozenset[Shape]:
    made = [eqn.outvars[0].aval for eqn in run.backward if eqn.primitive.name in SCATTER_ADDS]
    if compat.joins_zeros_of_loops():
        made += [v.aval for eqn in run.backward for v in stacked_by(eqn)]
    return frozenset((tuple(aval.shape), aval.dtype) for aval in made)


def stacked_by(eqn: Any) -> tuple[Any, ...]:
    """What a loop stacks, in zeros; of other equations nothing."""
    return tuple(eqn.outvars[compat.scan_sizes(eqn)[1] :]) if eqn.primitive.name == "scan" else ()
