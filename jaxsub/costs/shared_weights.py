"""What a GPU's compiler makes of weights that several stages read, where no gradient barrier stands between the stages.

Products of one weight that do not wait for one another become one product: of an unrolled recurrent network the heads
of all steps, run when the last state is known, their backward pass right behind. And the contributions to a weight's
gradient, which nothing but their sum reads, may all be made last: until then their operands stand.

Source: OpenXLA's `dot_merger.cc`, and its schedulers, of which the one that needs least memory is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from jaxsub.core.graph import Graph
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.min_cut import RunFunction, run_function

Stretch = tuple[int, int]


def operand_bytes(graph: Graph, start: int, stop: int) -> int:
    """Bytes of what contributions to shared weights' gradients are products of: activations, cotangents of results.

    Args:
        graph: The program.
        start: The run's first node.
        stop: The node after its last.
    """
    nodes = (n for n in graph.nodes[start:stop] if n.is_costly and any(_is_shared(graph, v) for v in n.inputs))
    values = {v for n in nodes for v in (*n.inputs, *n.outputs) if not _is_shared(graph, v)}
    return sum(graph.values[v].n_bytes for v in values)


def at_once(graph: Graph, cuts: Sequence[int]) -> tuple[Stretch, ...]:
    """The stages that run with the last one, which reads a weight that they read too and waits for none of them.

    Args:
        graph: The program.
        cuts: The first node of each stage, and the number of nodes last.

    Returns:
        The first node of each and the node after its last, the last stage among them; empty where it is alone.
    """
    last = graph.nodes[cuts[-2] :]
    for weight in dict.fromkeys(v for n in last if n.is_costly for v in n.inputs if _is_shared(graph, v)):
        readers = [c for c in graph.values[weight].consumers if graph.nodes[c].is_costly]
        depths = _depths(graph, frozenset(readers))
        alike = [c for c in readers if depths[c] == depths[readers[-1]]]
        stages = sorted({bisect_right(cuts, c) - 1 for c in alike})
        if len(stages) > 1 and stages[-1] == len(cuts) - 2:
            return tuple((cuts[s], cuts[s + 1]) for s in stages)
    return ()


def turning_bytes(graph: Graph, cuts: Sequence[int], ask: Callable[[str, int, int, Any], int], alone: int) -> int:
    """What is allocated beyond what the last stage needs alone, and what the others keep, where they run at once.

    Args:
        graph: The program.
        cuts: The first node of each stage, and the number of nodes last.
        ask: What a probe of a name says of a run.
        alone: What the last stage allocates alone.
    """
    stages = at_once(graph, cuts)
    if not stages:
        return 0
    places = tuple(node - stages[0][0] for run in stages for node in run)
    found = ask("turn", stages[0][0], stages[-1][1], places)
    return max(0, found - alone - sum(ask("keep", *run, ()) for run in stages[:-1]))


def turning_function(program: Program, start: int, places: Sequence[int]) -> RunFunction:
    """Several runs, one after the other, as a function of what they read and none of them makes.

    No gradient flows to weights: contributions to theirs are counted elsewhere.

    Args:
        program: The program.
        start: The first node of the first run.
        places: Where each begins and ends, from there.
    """
    bounds = iter(places)
    runs = [run_function(program, start + a, start + b) for a, b in zip(bounds, bounds, strict=True)]
    made = {v for run in runs for v in run.returns}
    reads = tuple(dict.fromkeys(v for run in runs for v in run.reads if v not in made))

    def call(*inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        env = dict(zip(reads, inputs, strict=True))
        for run in runs:
            results, rest = run.call(*(env[v] for v in run.reads))
            env.update(zip(run.returns, results, strict=True))
        return results, rest

    values = [program.graph.values[v] for v in reads]
    positions = tuple(i for i, v in enumerate(values) if v.is_differentiated and v.producer is not None)
    return RunFunction(call, reads, positions, runs[-1].returns, frozenset())


def _is_shared(graph: Graph, value: int) -> bool:
    found = graph.values[value]
    return found.producer is None and found.is_differentiated and len(found.consumers) > 1


def _depths(graph: Graph, marked: frozenset[int]) -> list[int]:
    """For each node the most marked nodes on a way to it, itself among them."""
    depths: list[int] = []
    for node in graph.nodes:
        producers = (graph.values[v].producer for v in node.inputs)
        before = max((depths[p] for p in producers if p is not None), default=0)
        depths.append(before + (node.index in marked))
    return depths
