"""A run of nodes as a function of the values that it reads, to trace or to evaluate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.output_only_vjp import is_known_by_result
from jaxsub.jaxpr.output_only_vjp import tagged as tagged_result
from jaxsub.jaxpr.own_rules import rules_of, with_own_rules
from jaxsub.jaxpr.trace import Program


@dataclass(frozen=True, slots=True, eq=False)
class RunFunction:
    """A run of nodes as a function of the values that it reads.

    Attributes:
        call: `call(*inputs) -> (differentiated outputs, other outputs)`.
        reads: The values it reads, in order.
        differentiated: Positions in `reads` that a gradient flows to.
        returns: The values of the differentiated outputs.
        joined: Positions in `reads` of weights that later equations read too: their gradients are added to a sum.
        slices: Positions in `reads` of values of which it reads one slice, and later equations others.
        looked_up: Positions in `reads` of values that it only looks rows up of, and that later equations read too.
    """

    call: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
    reads: tuple[int, ...]
    differentiated: tuple[int, ...]
    returns: tuple[int, ...]
    joined: frozenset[int]
    slices: frozenset[int] = frozenset()
    looked_up: frozenset[int] = frozenset()


def run_function(
    program: Program, start: int, stop: int, *, tag: Callable[[Any, int], Any] | None = None, saved: Sequence[int] = ()
) -> RunFunction:
    """Make a function of a run of nodes; `tag` names values that it makes, at offsets `saved` or all."""
    graph = program.graph
    made, last = graph.made_by(start, stop), graph.last_uses()
    reads = graph.read_by(start, stop)
    returns = tuple(v for v in made if last[v] >= stop)
    active = tuple(v for v in returns if graph.values[v].is_differentiated)
    rest = tuple(v for v in returns if not graph.values[v].is_differentiated)
    wanted = frozenset(saved) or frozenset(range(len(made)))

    @functools.cache
    def slices() -> list[tuple[Any, tuple[int, ...], tuple[int, ...], int, bool]]:
        ends_at = {graph.values[made.start + o].producer for o in wanted} if tag else set()
        alone = {i for i in ends_at if i is not None and is_known_by_result(program.eqns[i])}
        ends = [i + 1 for i in range(start, stop) if i in ends_at or i + 1 in alone or i == stop - 1]
        return [(*_slice(program, a, b), b - 1, b - 1 in alone) for a, b in zip([start, *ends], ends, strict=False)]

    def call(*inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        env = dict(zip(reads, inputs, strict=True))
        for jaxpr, ins, outs, end, is_alone in slices():
            if tag and is_alone:
                env[outs[0]] = tagged_result(program.eqns[end], env[ins[0]], tag, outs[0] - made.start)
                continue
            results = jax.core.eval_jaxpr(jaxpr, (), *[env[v] for v in ins])
            for v, result in zip(outs, results, strict=True):
                env[v] = tag(result, v - made.start) if tag and v - made.start in wanted else result
        return tuple(env[v] for v in active), tuple(env[v] for v in rest)

    positions = tuple(i for i, v in enumerate(reads) if graph.values[v].is_differentiated)
    joined = frozenset(i for i in positions if program.is_repeated or graph.is_joined(reads[i], stop))
    slices_of = frozenset(i for i in positions if graph.is_slice_joined(reads[i], start, stop))
    looked_up = frozenset(i for i in positions if graph.is_look_up_joined(reads[i], start, stop))
    return RunFunction(call, reads, positions, active, joined, slices_of, looked_up)


def vjp_of(function: RunFunction, inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return differentiated outputs of a run, the pullback with respect to its differentiated inputs, other outputs."""

    def of_differentiated(*active: Any) -> Any:
        merged = list(inputs)
        for i, x in zip(function.differentiated, active, strict=True):
            merged[i] = x
        return function.call(*merged)

    return jax.vjp(of_differentiated, *(inputs[i] for i in function.differentiated), has_aux=True)


def read_avals(program: Program, function: RunFunction) -> list[jax.ShapeDtypeStruct]:
    """List shapes and dtypes of the values that a run reads."""
    return [compat.shape_of(v.aval) for v in map(program.variable, function.reads)]


def _slice(program: Program, start: int, stop: int) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    reads, outs = program.graph.read_by(start, stop), tuple(program.graph.made_by(start, stop))
    eqns = with_own_rules(program.eqns[start:stop], rules_of(program))
    jaxpr = compat.make_jaxpr_of(eqns, [*map(program.variable, reads)], [*map(program.variable, outs)], program.traced)
    return jaxpr, reads, outs
