"""Find inputs of stages that are dead after the forward pass: not every value that crosses a cut is a residual.

Where an unwrapped stage begins with tanh and goes on with a product, its backward pass reads the tanh and not the
operand of the tanh. The operand crosses the cut in front of the stage and is counted there; unless something else reads
it later, the stage keeps the tanh instead of it, not beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from jaxsub.core.graph import Graph
from jaxsub.costs.live_ranges import unread_inputs
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.partition.min_cut import Choice
from jaxsub.partition.traced_run import TracedRun

Stretch = tuple[int, int]
Traced = tuple[TracedRun, tuple[Choice, ...]]


def dead_inputs(
    graph: Graph, runs: Sequence[Stretch], traced: Mapping[Stretch, Traced], *, gpu: Target | None = None
) -> dict[Stretch, tuple[int, ...]]:
    """Find the inputs of stages that no backward pass is likely to read.

    Args:
        graph: The program.
        runs: The first node of each stage and the node after its last, in order.
        traced: The stages that may be recomputed, with their choices; equal stages may share one trace.
        gpu: The GPU to compile for; `None` for a CPU.

    Returns:
        For each such stage, positions among its inputs: activations that no other stage reads, that the program does
        not return, and that the backward pass of the stage that makes them neither reads nor saves; no keys.
    """
    starts = [start for start, _ in runs]
    unread = {id(t): unread_inputs(t, gpu=gpu) for t in {id(t): t for t, _ in traced.values()}.values()}
    found = {}
    for run in traced:
        reads, dead = graph.read_by(*run), []
        for i in sorted(unread[id(traced[run][0])]):
            value = graph.values[reads[i]]
            maker = runs[bisect_right(starts, value.producer or 0) - 1]
            is_alone = run[0] <= min(value.consumers) and max(value.consumers) < run[1]
            is_alone = is_alone and value.index not in graph.outputs and maker in traced
            if is_alone and not _keeps(traced[maker], value.index - graph.made_by(*maker).start):
                dead.append(i)
        found[run] = tuple(dead)
    return found


def dead_crossings(graph: Graph, cuts: Sequence[int], dead: Mapping[Stretch, tuple[int, ...]]) -> set[Stretch]:
    """Find the pairs of stages, maker and reader, of the values that `dead_inputs` found.

    Args:
        graph: The program.
        cuts: The first node of each stage, and the number of nodes last.
        dead: The dead inputs of the stages that keep something else instead.
    """
    found = set[Stretch]()
    for run, positions in dead.items():
        reads = graph.read_by(*run)
        makers = (graph.values[reads[i]].producer or 0 for i in positions)
        found.update((bisect_right(cuts, maker) - 1, bisect_right(cuts, run[0]) - 1) for maker in makers)
    return found


def _keeps(made_by: Traced, offset: int) -> bool:
    """Tell whether a stage may keep one of its results for its own backward pass."""
    run, choices = made_by
    read, returned = (frozenset(v for v in atoms if compat.is_var(v)) for atoms in (run.residuals, run.returned))
    return bool(read & returned) or any(offset in choice.saved for choice in choices)
