"""Replay a plan step by step: the forward and backward passes, and the live ranges of stored values.

A chain and a planner's runs go in, a `StageTimeline` comes out; the largest of its `live_bytes` is the peak that
`jaxsub.core.simulate.predict` returns. Time is counted in FLOPs, a backward pass as two forward passes; all steps
together take three forward passes and the plan's `extra_flops`. The backward pass of a scope's last run starts at once:
its forward and its backward pass are one step.

`name_pieces` adds the user's names, shapes and source lines to stored values. Plain data, no JAX.
"""

from __future__ import annotations

import os.path
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from jaxsub.core.chain import Chain, Run
from jaxsub.core.graph import Graph
from jaxsub.core.output_reuse import hosted_bytes

BACKWARD_FORWARDS = 2.0
"""A backward pass takes about as long as two forward passes: one product for each of a layer's two gradients."""

NAMED_VALUES = 2
"""How many of the values that are stored together are named; the others are counted."""


PHASES = ("forward", "recompute", "backward")
KINDS = ("crossing", "saved", "kept", "moved")


@dataclass(frozen=True, slots=True)
class Step:
    """One stage, or one region's stages, run forward, forward again, or backward.

    Attributes:
        phase: `forward`, `recompute` (inside the backward pass) or `backward`.
        start: The first stage.
        stop: The stage after the last.
        flops: How long it takes, in FLOPs.
        transient_bytes: Bytes it allocates for itself.
        cotangent_bytes: Bytes of live cotangents that are not its own.
    """

    phase: str
    start: int
    stop: int
    flops: float
    transient_bytes: int
    cotangent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Values that are live from one step to another.

    Attributes:
        kind: `crossing`: values that later stages read; `saved`: values that a region saves inside; `kept`: residuals
            of an unwrapped stage; `moved`: values that a region offloads, with negative bytes.
        start: The first step at which it is live.
        stop: The step after the last.
        first_stage: The first stage of those that made it.
        stop_stage: The stage after their last.
        n_bytes: Its bytes.
        values: Offsets of saved values from the first value the stages make; empty where they are not known so.
        label: What it is, in words; empty before `name_pieces`.
    """

    kind: str
    start: int
    stop: int
    first_stage: int
    stop_stage: int
    n_bytes: int
    values: tuple[int, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """The steps at which a region runs.

    Attributes:
        depth: How many regions contain it.
        phase: `forward`, `recompute` or `backward`.
        start: Its first step.
        stop: The step after its last.
        first_stage: Its first stage.
        stop_stage: The stage after its last.
        extra_flops: FLOPs it recomputes, without regions nested in it; of its backward pass only.
    """

    depth: int
    phase: str
    start: int
    stop: int
    first_stage: int
    stop_stage: int
    extra_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """Live bytes while a plan runs, step by step.

    Attributes:
        steps: The steps, in order.
        pieces: Stored values with their live ranges.
        spans: The regions, and when they run; outer ones before those nested in them.
        forward_flops: FLOPs of one forward pass through all stages.
        stage_nodes: The first node of each stage, and the number of nodes last.
        stage_labels: What each stage is, in words; empty before `name_pieces`.
    """

    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]
    forward_flops: float
    stage_nodes: tuple[int, ...]
    stage_labels: tuple[str, ...] = ()

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """For each step the live bytes, beside arguments and outputs."""
        change = [0] * (len(self.steps) + 1)
        for piece in self.pieces:
            change[piece.start] += piece.n_bytes
            change[piece.stop] -= piece.n_bytes
        own = (s.transient_bytes + s.cotangent_bytes for s in self.steps)
        return tuple(stored + here for stored, here in zip(accumulate(change), own, strict=False))

    @property
    def peak_step(self) -> int:
        """The first step with the most live bytes; -1 without steps."""
        live = self.live_bytes
        return live.index(max(live)) if live else -1

    def alive(self, step: int) -> tuple[Piece, ...]:
        """List the stored values that are live at a step, largest first."""
        there = (p for p in self.pieces if p.start <= step < p.stop and p.n_bytes > 0)
        return tuple(sorted(there, key=lambda p: -p.n_bytes))

    def live_at(self, step: int) -> tuple[tuple[int, str], ...]:
        """List bytes and labels of all that is live at a step, largest first: stored values and transients."""
        found, sizes = self.steps[step], dict[str, int]()
        stage = self.stage_labels[found.start] if self.stage_labels else f"stage {found.start}"
        sizes[f"what `{stage}` works with, {found.phase}"] = found.transient_bytes
        sizes["cotangents on their way"] = found.cotangent_bytes
        for piece in self.alive(step):
            sizes[piece.label] = sizes.get(piece.label, 0) + piece.n_bytes
        rows = ((n_bytes, words) for words, n_bytes in sizes.items() if n_bytes)
        return tuple(sorted(rows, key=lambda row: -row[0]))

    def stored_bytes(self, start: int, stop: int) -> int:
        """Sum the bytes that stages `start .. stop - 1` store at the top level until their backward pass."""
        turn = next((i for i, s in enumerate(self.steps) if s.phase == "backward"), len(self.steps))
        inside = (p for p in self.pieces if start <= p.first_stage and p.stop_stage <= stop)
        return sum(p.n_bytes for p in inside if p.start <= turn < p.stop or p.stop == turn)

    def faults(self, n_nodes: int) -> Iterator[str]:
        """Say what no replay of a program of so many nodes gives, by field: wrong indices, unknown phases and kinds."""
        n_steps, n_stages = len(self.steps), len(self.stage_nodes) - 1
        nodes = (-1, *self.stage_nodes)
        if n_stages < 0 or nodes[-1] != n_nodes or any(a >= b for a, b in pairwise(nodes)):
            yield f"stage_nodes: not in order, or not up to {n_nodes}"
        if len(self.stage_labels) not in (0, n_stages):
            yield f"stage_labels: {len(self.stage_labels)} for {n_stages} stages"
        if self.forward_flops < 0 or any(step.flops < 0 for step in self.steps):
            yield "forward_flops, steps: less than no FLOPs"
        steps = [(i, i, s.start, s.stop, s.phase in PHASES) for i, s in enumerate(self.steps)]
        pieces = [(p.start, p.stop, p.first_stage, p.stop_stage, p.kind in KINDS) for p in self.pieces]
        spans = [(s.start, s.stop, s.first_stage, s.stop_stage, s.phase in PHASES and 0 <= s.depth < len(self.spans))
                 for s in self.spans]  # fmt: skip
        for name, found in (("steps", steps), ("pieces", pieces), ("spans", spans)):
            for start, stop, first, last, is_known in found:
                if not (is_known and 0 <= start <= stop <= n_steps and 0 <= first < last <= n_stages):
                    yield f"{name}: none can be at steps {start}:{stop} and stages {first}:{last}, or of that kind"


def stage_timeline(chain: Chain, runs: Sequence[Run]) -> StageTimeline:
    """Replay runs that cover a chain's stages, step by step."""
    replay = _Replay(chain)
    replay.scope(runs, held=0, depth=0)
    nodes = (*(s.start for s in chain.stages), chain.stages[-1].stop)
    return StageTimeline(tuple(replay.steps), tuple(replay.pieces), tuple(replay.spans), chain.forward_flops, nodes)


@dataclass
class _Replay:
    """Steps, stored pieces and spans, in the order in which a program runs them.

    The last run of a scope starts its backward pass at once, so its forward pass is part of its transient.
    """

    chain: Chain
    steps: list[Step] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def scope(self, runs: Sequence[Run], held: int, depth: int) -> None:
        """Run a scope forward, then backward."""
        born: list[int] = []
        hosted = hosted_bytes(self.chain, runs) if not depth else ((0, 0),) * len(runs)
        stop = runs[-1].stop
        for run in runs:
            is_turn = run is runs[-1] and not run.children
            if not is_turn:
                self._forward(run, held, depth, stop)
            born.append(len(self.steps))
        for position, run in reversed(list(enumerate(runs))):
            is_last = run is runs[-1]
            self._store(run, born[position], len(self.steps), hosted[position])
            first, place = len(self.steps), len(self.spans)
            if run.children:
                self.scope(run.children, self.chain.held_bytes(run.stop), depth + 1)
            else:
                self._backward(run, is_last, depth)
            if run.children or (run.option is not None and run.option.is_region):
                extra = own_recompute(self.chain, run, is_last and depth > 0)
                self.spans.insert(place, Span(depth, "backward", first, len(self.steps), run.start, run.stop, extra))

    def _forward(self, run: Run, held: int, depth: int, scope_stop: int) -> None:
        first, phase = len(self.steps), "recompute" if depth else "forward"
        for s in range(run.start, run.stop):
            inside = int(self.chain.crossing_bytes[run.start, s]) + self.chain.stages[s].forward_bytes
            self.steps.append(Step(phase, s, s + 1, self._forward_flops(s, depth, scope_stop), inside, held))
        if run.children or (run.option is not None and run.option.is_region):
            self.spans.append(Span(depth, phase, first, len(self.steps), run.start, run.stop))

    def _store(self, run: Run, born: int, stop: int, hosted: tuple[int, int]) -> None:
        """Record a run's residuals between its two passes, without those that outputs host."""
        chain = self.chain
        values = run.option.saved if run.option is not None else ()
        kept = chain.kept_bytes(run) - hosted[1]
        kind = "kept" if run.option is None else "saved" if kept >= 0 else "moved"
        for name, n_bytes, made in (
            ("crossing", int(chain.crossing_bytes[run.start, run.stop]) - hosted[0], ()),
            (kind, kept, tuple(v for v in values if (v < 0) == (kept < 0))),
        ):
            if n_bytes and stop > born:
                self.pieces.append(Piece(name, born, stop, run.start, run.stop, n_bytes, made))

    def _backward(self, run: Run, is_last: bool, depth: int) -> None:
        if run.option is not None:
            flops = own_recompute(self.chain, run, is_last and depth > 0)
            for s in range(run.start, run.stop):
                flops += BACKWARD_FORWARDS * self.chain.stages[s].forward_flops
                flops += self._forward_flops(s, depth, run.stop) if is_last else 0.0
            self._backward_step(run.start, run.stop, run.option.transient_bytes, flops)
            return
        if is_last:
            self._turning_stages(run, depth)
        first, left = len(self.steps), run.stop - run.start
        for offset, s in enumerate(range(run.start, run.stop - 1)):
            stage = self.chain.stages[s]
            for kind, n_bytes in (("crossing", int(self.chain.crossing_bytes[s, s + 1])), ("kept", stage.keep_bytes)):
                if n_bytes:
                    self.pieces.append(Piece(kind, first, first + left - 1 - offset, s, s + 1, n_bytes))
        for s in reversed(range(run.start, run.stop)):
            stage, turns = self.chain.stages[s], is_last and s == run.stop - 1
            flops = BACKWARD_FORWARDS * stage.forward_flops
            flops += self._forward_flops(s, depth, run.stop) if turns else 0.0
            self._backward_step(s, s + 1, stage.transient_bytes if turns else stage.keep_transient_bytes, flops)

    def _turning_stages(self, run: Run, depth: int) -> None:
        """Run the stages before the last of a scope's last run forward: their residuals add up."""
        phase = "recompute" if depth else "forward"
        stored = 0
        for s in range(run.start, run.stop - 1):
            stored += self.chain.stages[s].keep_bytes + int(self.chain.crossing_bytes[s, s + 1])
            self.steps.append(Step(phase, s, s + 1, self.chain.stages[s].forward_flops, stored))

    def _backward_step(self, start: int, stop: int, transient: int, flops: float) -> None:
        around = int(self.chain.passing_bytes[start, stop])
        self.steps.append(Step("backward", start, stop, flops, transient, around))

    def _forward_flops(self, stage: int, depth: int, scope_stop: int) -> float:
        """Count FLOPs of a stage; of a nested scope's last stage only the part that its backward pass reads."""
        found = self.chain.stages[stage]
        return found.tail_flops if depth and stage == scope_stop - 1 else found.forward_flops


def own_recompute(chain: Chain, run: Run, is_paid: bool, unit: str = "flops") -> float:
    """What a run recomputes, in FLOPs or seconds, without the runs inside it.

    A nest costs one forward pass of its stages, of the last stage only the part that its backward pass reads. That pays
    for the last run inside the nest too.
    """
    if run.children:
        *others, last = chain.stages[run.start : run.stop]
        return float(sum(getattr(s, f"forward_{unit}") for s in others) + getattr(last, f"tail_{unit}"))
    if run.option is None:
        return 0.0
    return float(getattr(run.option, f"{'loop' if is_paid else 'recompute'}_{unit}"))


def name_pieces(timeline: StageTimeline, graph: Graph) -> StageTimeline:
    """Add names, shapes and source lines to stored values and to stages of a chain that was made of the graph."""
    last, nodes = graph.last_uses(), timeline.stage_nodes
    known: dict[tuple[Any, ...], str] = {}

    def label(piece: Piece) -> str:
        key = (piece.kind, piece.first_stage, piece.stop_stage, piece.values)
        if key not in known:
            made = graph.made_by(nodes[piece.first_stage], nodes[piece.stop_stage])
            stop = nodes[piece.stop_stage]
            inside = [made.start + v for v in piece.values if -made.start <= v < len(made)]
            values = inside or [v for v in made if last[v] >= stop]
            known[key] = _kept_label(graph, nodes, piece) if piece.kind == "kept" else _values_label(graph, values)
        return known[key]

    stages = tuple(_stage_label(graph, start, stop) for start, stop in pairwise(nodes))
    return replace(timeline, pieces=tuple(replace(p, label=label(p)) for p in timeline.pieces), stage_labels=stages)


def family(label: str) -> str:
    """Remove the numbers from a label's module path, or path into an argument, so that equal layers share a label.

    Example:
        >>> family("block_3/mlp: dot_general model.py:48"), family("arg0[3]['up'] float32[8] by argument")
        ('block_*/mlp: dot_general model.py:48', "arg0[*]['up'] float32[8] by argument")
    """
    path, colon, rest = label.partition(": ")
    if colon and " " not in path:
        return re.sub(r"\d+", "*", path) + colon + rest
    path, blank, rest = label.partition(" ")
    return re.sub(r"\[\d+\]", "[*]", path) + blank + rest if "[" in path and path[0].isidentifier() else label


def value_label(graph: Graph, value: int) -> str:
    """Describe a value: module path, its name (its own, or a later `checkpoint_name`) or its maker, shape, line."""
    v = graph.values[value]
    node = graph.nodes[v.producer] if v.producer is not None else None
    dims = ",".join(map(str, v.shape))
    named = (graph.values[graph.nodes[c].outputs[0]].name for c in v.consumers if graph.nodes[c].primitive == "name")
    name = v.name or next(named, None) or (node.primitive if node is not None else "input")
    scope = f"{node.scope}: " if node is not None and node.scope else ""
    return f"{scope}{name} {v.dtype}[{dims}] {node.source if node is not None else ''}".strip()


def _values_label(graph: Graph, values: Iterable[int]) -> str:
    ordered = sorted(values, key=lambda v: -graph.values[v].n_bytes)
    counts = Counter(family(value_label(graph, v)) for v in ordered) if len(ordered) > 1 else Counter(
        value_label(graph, v) for v in ordered)  # fmt: skip
    shown = [f"{n} x {text}" if n > 1 else text for text, n in list(counts.items())[:NAMED_VALUES]]
    rest = sum(list(counts.values())[NAMED_VALUES:])
    return "; ".join(shown) + (f"; and {rest} more" if rest else "")


def _kept_label(graph: Graph, nodes: Sequence[int], piece: Piece) -> str:
    return f"{_stage_label(graph, nodes[piece.first_stage], nodes[piece.stop_stage])}, kept by the compiler"


def _stage_label(graph: Graph, start: int, stop: int) -> str:
    """Describe a run of nodes: its named scope, or the source line of the node with most FLOPs."""
    inside = graph.nodes[start:stop]
    heaviest = max(inside, key=lambda node: node.flops)
    scope = os.path.commonpath([node.scope for node in inside if node.scope] or [""]) or heaviest.scope
    return " ".join(part for part in (f"{scope}:" if scope else "", heaviest.primitive, heaviest.source) if part)
