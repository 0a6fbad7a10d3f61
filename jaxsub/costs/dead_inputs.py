"""Inputs of stages that are gone once read: what crosses a cut is not always kept until the backward pass.

Where an unwrapped stage begins with tanh and goes on with a product, its backward pass reads the tanh and not what the
tanh was taken of. That crossed the cut in front of the stage, and is counted there; unless something else reads it
again, the stage keeps the tanh in its place and not beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from jaxsub.core.graph import Graph
from jaxsub.costs.live_ranges import unread_inputs
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.partition.min_cut import Choice, TracedRun

Stretch = tuple[int, int]
Traced = tuple[TracedRun, tuple[Choice, ...]]


def spent_inputs(
    graph: Graph, runs: Sequence[Stretch], traced: Mapping[Stretch, Traced], *, gpu: Target | None = None
) -> dict[Stretch, tuple[int, ...]]:
    """Find the inputs of stages that neither they nor the stages that make them are likely to read again.

    Args:
        graph: The program.
        runs: The first node of each stage and the node after its last, in order.
        traced: The stages that may be recomputed, with what they may save; those alike may share one trace.
        gpu: The GPU to compile for; `None` for a CPU.

    Returns:
        For each such stage, positions among what it reads: activations that no other stage reads, that
        the program does not return, and that the stage which makes them neither reads again nor saves; keys left out.
    """
    starts = [start for start, _ in runs]
    unread = {id(t): unread_inputs(t, gpu=gpu) for t in {id(t): t for t, _ in traced.values()}.values()}
    found = {}
    for run in traced:
        reads, spent = _reads(graph, run), []
        for i in sorted(unread[id(traced[run][0])]):
            value = graph.values[reads[i]]
            maker = runs[bisect_right(starts, value.producer or 0) - 1]
            is_alone = run[0] <= min(value.consumers) and max(value.consumers) < run[1]
            is_alone = is_alone and value.index not in graph.outputs and maker in traced
            if is_alone and not _keeps(traced[maker], value.index - graph.made_by(*maker).start):
                spent.append(i)
        found[run] = tuple(spent)
    return found


def spent_crossings(graph: Graph, cuts: Sequence[int], spent: Mapping[Stretch, tuple[int, ...]]) -> set[Stretch]:
    """The stages that make what `spent_inputs` found and the stages that read it.

    Args:
        graph: The program.
        cuts: The first node of each stage, and the number of nodes last.
        spent: What was found, of the stages that keep something else in its place.
    """
    found = set[Stretch]()
    for run, places in spent.items():
        reads = _reads(graph, run)
        makers = (graph.values[reads[i]].producer or 0 for i in places)
        found.update((bisect_right(cuts, maker) - 1, bisect_right(cuts, run[0]) - 1) for maker in makers)
    return found


def _reads(graph: Graph, run: Stretch) -> tuple[int, ...]:
    made = graph.made_by(*run).start
    return tuple(dict.fromkeys(v for n in graph.nodes[run[0] : run[1]] for v in n.inputs if v < made))


def _keeps(made_by: Traced, offset: int) -> bool:
    """Whether a stage may keep something that it returns for its own backward pass."""
    run, choices = made_by
    read, returned = (frozenset(v for v in atoms if compat.is_var(v)) for atoms in (run.residuals, run.returned))
    return bool(read & returned) or any(offset in choice.saved for choice in choices)
