"""Tell the user which side effects happen more often under a plan than without it, and how often.

A program and its plan go in; a warning, or nothing, comes out. Debug callbacks, such as `jax.debug.print`, come last in
a traced program, and equations that must run once are in no region: both happen as often as before. Inside a loop, a
branch or a call they stay in place, and a plan that recomputes the body repeats them, as `jax.checkpoint` does. The
traced gradients say how often, with a loop's steps multiplied out; of `while` loops one step counts, of branches all.
Programs without such equations are not traced again.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import jax

from jaxsub.core.plan import Plan
from jaxsub.emission.emit import emit
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of, walk
from jaxsub.jaxpr.trace import Program, with_own_settings
from jaxsub.search.verify import gradient, untouched

MOST_NAMED = 3
"""How many equations are named; of the others it is said how many there are."""


@with_own_settings
def warn_of_repeated(program: Program, plan: Plan) -> None:
    """Warn of side effects that the gradient under a plan has more often than the plain one."""
    if not (plan.segments or plan.loops) or not any(map(_may_report_again, program.eqns)):
        return
    if compat.names_axes(program.traced):
        return  # its gradient means nothing outside of them
    before, after = _times(program, untouched(program)), _times(program, plan)
    rows = [f"`{name}` at {where or 'an unknown line'}: {after[name, where]} times with each gradient, {n} without plan"
            for (name, where), n in before.items() if after[name, where] > n]  # fmt: skip
    if rows:
        more = f"; and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
        warnings.warn(
            f"Side effects inside what the plan recomputes happen again: {'; '.join(rows[:MOST_NAMED])}{more}. "
            "jax.checkpoint does the same. Move them out of the loop or branch, or use jax.experimental.io_callback: "
            "equations around it are never recomputed.",
            stacklevel=2,
        )


def _may_report_again(eqn: Any) -> bool:
    """Whether an equation's side effects may be doubled: they are inside it, or a region may hold it."""
    return any(type(effect).__name__ in ("DebugEffect", "OrderedDebugEffect") for effect in eqn.effects)


def _times(program: Program, plan: Plan) -> Counter[tuple[str, str]]:
    """How often each reporting equation runs in the gradient under a plan, by its primitive and the user's line."""
    function, shapes = gradient(program, emit(program, plan))
    found: Counter[tuple[str, str]] = Counter()
    for eqn, times in walk(jax.make_jaxpr(function)(*shapes).eqns):
        if _may_report_again(eqn) and not bodies_of(eqn):
            found[eqn.primitive.name, compat.source_of(eqn)] += times
    return found
