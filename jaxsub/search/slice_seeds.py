"""From which dimensions of what a run reads an axis may be followed, to execute the run in slices of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxsub.core.graph import Value
from jaxsub.core.tuning import TUNING
from jaxsub.jaxpr.axis_origin import origins
from jaxsub.jaxpr.trace import Program


def seeds_of_run(program: Program, start: int, stop: int) -> list[tuple[int, int]]:
    """Dimensions of what a run reads: of activations first, then of weights."""
    graph, weights = program.graph, program.graph.weights()
    order = sorted(graph.read_by(start, stop), key=lambda v: (v in weights, -graph.values[v].n_bytes))
    return [(v, d) for v in order for d, size in enumerate(graph.values[v].shape) if size > 1]


def seeds_round_value(program: Program, start: int, stop: int, value: Value) -> list[tuple[int, int]]:
    """Dimensions of what a run reads up to the last use of a value that it makes, or of all if that is nothing.

    Of a long run only those from which the value's dimensions come. What comes from none, as a mask does, has the
    dimensions of the first value made of it that comes from some.
    """
    graph, eqns = program.graph, program.eqns[start:stop]
    if stop - start <= TUNING.region_equations:
        last = min(stop, graph.last_uses()[value.index] + 1)
        return seeds_of_run(program, start, last) or seeds_of_run(program, start, stop)
    reads = {program.variable(v): v for v in graph.read_by(start, stop)}
    made = {value.index}
    for node in graph.nodes[value.producer or 0 : stop]:
        if not made.isdisjoint((*node.inputs, *node.outputs)):
            made.update(node.outputs)
            found = [seed for v in node.outputs for seed in sources(eqns, program.variable(v), reads)]
            if found:
                return list(dict.fromkeys(found))
    return []


def sources(eqns: Sequence[Any], variable: Any, inputs: Mapping[Any, int]) -> list[tuple[int, int]]:
    """Dimensions of more than one element, of inputs by number, from which the dimensions of a variable come."""
    found = (origins(eqns, variable, (dim,)) for dim in range(len(variable.aval.shape)))
    return [(inputs[v], dims[0]) for some in found for v, dims in some if v in inputs and v.aval.shape[dims[0]] > 1]


def batch_seeds(program: Program, dim: int) -> list[tuple[int, int]]:
    """A dimension of the arguments that are not differentiated, and then of the constants."""
    n_consts = len(program.consts)
    given = [v for v in range(len(program.invars)) if v not in program.differentiated]
    shapes = [(v, program.graph.values[v].shape) for v in given if program.graph.values[v].consumers]
    seeds = [(v, dim) for v, shape in shapes if -len(shape) <= dim < len(shape) and shape[dim] > 1]
    return sorted(seeds, key=lambda seed: seed[0] < n_consts)
