"""The chain: stages, their options and their costs. Planners see nothing else.

A program is cut into **stages** at points where few bytes cross; stage `s` runs forward from the values that cross cut
`s`, and its backward pass runs from the cotangents of those that cross cut `s + 1`. A planner returns a sequence of
`Run`s that covers the stages. A run is one of three things:

* a **region** with an `Option`: one `jax.checkpoint` that saves the option's values and recomputes the rest;
* a **nest**, with children: one `jax.checkpoint` that saves nothing; its recompute runs as the children say;
* **unwrapped**, with neither: its residuals, as the compiler chooses them, are live until its backward pass.

`jaxsub.core.simulate.predict` replays such a sequence in exact bytes.

Sources: the chain model of Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, *Optimal checkpointing for heterogeneous
chains* (2019), with options inside stages as in Zhao et al., *Rockmate* (ICML 2023). Ours in addition: values that
cross many cuts are counted once where they are made, and cotangents that pass over a stage. Where several stages share
a weight, the sum of its gradients is in its output's buffer; each new contribution is part of a stage's transient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxsub.core.decisions import ControlFlow


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of saved values for a region, with its costs.

    Attributes:
        saved: The saved values, as offsets from the first value that the region makes.
        saved_bytes: Bytes that are live on the device between its passes beyond crossing values; below zero where it
            offloads more of the values that cross into it.
        transient_bytes: Bytes that its own backward pass allocates, saved values included.
        recompute_flops: FLOPs that its backward pass recomputes, weighed as in `jaxsub.jaxpr.flops`.
        recompute_seconds: The same in seconds, where known.
        loops: How loops and conditionals in it run, where not plainly.
        loop_flops: The part of `recompute_flops` that these recompute, wherever the region is.
        is_region: Whether it is a `jax.checkpoint` region; a loop that saves its own steps may not need one.
        loop_seconds: `loop_flops` in seconds, where known.
        saved_sizes: Bytes of each of the values that `saved_bytes` counts, where known.
        offloaded: Those of `saved` that are in host memory; negative offsets are values of earlier stages.
        is_hoisted: Whether `saved_bytes` are of arrays that are made when the program starts: no nest spares them.
    """

    saved: tuple[int, ...] = ()
    saved_bytes: int = 0
    transient_bytes: int = 0
    recompute_flops: float = 0.0
    recompute_seconds: float = 0.0
    loops: tuple[ControlFlow, ...] = ()
    loop_flops: float = 0.0
    is_region: bool = True
    loop_seconds: float = 0.0
    saved_sizes: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    is_hoisted: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of nodes between two cuts.

    Attributes:
        start: Its first node.
        stop: The node after its last.
        kind: Stages of one kind are the same program; they share all costs.
        forward_flops: FLOPs of its forward pass.
        tail_flops: FLOPs of the values that its own backward pass reads: the recompute of a region's last stage.
        forward_bytes: Bytes that its forward pass alone allocates beside its inputs and outputs.
        transient_bytes: Bytes that its backward pass allocates when nothing of it is saved, recompute included.
        keep_bytes: Bytes of its residuals when it is unwrapped.
        keep_transient_bytes: Bytes that its backward pass then allocates, residuals included.
        made_bytes: Bytes of all values it makes (the paper's sum of size-of-output over its nodes).
        first_value: The first value it makes; options' offsets count from there.
        hoisted_bytes: Bytes that the compiler hoists out of it in a region: items' options count them as saved.
        forward_seconds: Seconds of its forward pass, where known.
        backward_seconds: Seconds of its backward pass without recompute, where known.
        tail_seconds: `tail_flops` in seconds, where known.
        keep_sizes: Bytes of each of the values that `keep_bytes` counts, where known.
        gradient_sizes: Bytes of gradients that the program returns and that are written from its backward pass on.
        joined_bytes: Bytes of gradients that its backward pass adds to sums of later stages' gradients.
        summed_bytes: Bytes of all contributions to sums that are complete after its backward pass.
        summed_sizes: Bytes of gradients that are such sums: without barriers they are written when complete.
        operand_bytes: Bytes of the operands of contributions to such sums, where a GPU may compute them last.
        ahead_bytes: The part of `keep_bytes` that is live only because barriers separate stages that need equal zeros.
    """

    start: int
    stop: int
    kind: int = 0
    forward_flops: float = 1.0
    tail_flops: float = 1.0
    forward_bytes: int = 0
    transient_bytes: int = 0
    keep_bytes: int = 0
    keep_transient_bytes: int = 0
    made_bytes: int = 0
    first_value: int = 0
    hoisted_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    tail_seconds: float = 0.0
    keep_sizes: tuple[int, ...] = ()
    gradient_sizes: tuple[int, ...] = ()
    joined_bytes: int = 0
    summed_bytes: int = 0
    summed_sizes: tuple[int, ...] = ()
    operand_bytes: int = 0
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """A run of stages that may be one region at the top level, and its options.

    Attributes:
        start: Its first stage.
        stop: The stage after its last.
        options: Its options; the first saves least.
    """

    start: int
    stop: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Values made in one stage and last used in another: they cross every cut between.

    Attributes:
        made: The stage that makes them.
        last: The last stage that reads them; the number of stages for outputs of the program.
        n_bytes: Their bytes beside the program's outputs.
        cotangent_bytes: Bytes of their cotangents; 0 where no gradient flows.
        sizes: Bytes of each of the values that `n_bytes` counts, where known.
        is_spent: Whether they are dead after the forward pass of `last`, unwrapped, which keeps other values instead.
    """

    made: int
    last: int
    n_bytes: int
    cotangent_bytes: int
    sizes: tuple[int, ...] = ()
    is_spent: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A planner's decision for stages `start` to `stop - 1`; see the module docstring.

    Attributes:
        start: Its first stage.
        stop: The stage after its last.
        option: The option of a region; `None` for a nest or an unwrapped run.
        children: The runs inside a nest; they cover its stages.
    """

    start: int
    stop: int
    option: Option | None = None
    children: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class Untimed:
    """A run of nodes that a plan recomputes, before its seconds are known.

    Attributes:
        start: Its first node.
        stop: The node after its last.
        saved: Offsets of the values that it saves; `None` where its whole forward pass is executed.
        times: How often it is executed, a loop's part of itself a fraction.
    """

    start: int
    stop: int
    saved: tuple[int, ...] | None
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted costs of a plan.

    Attributes:
        temp_bytes: Peak bytes that the compiler allocates beside arguments and outputs.
        extra_flops: Recomputed FLOPs, with a low weight for elementwise work; weighed by seconds where a plan minimises
            seconds.
        forward_flops: FLOPs of one forward pass, weighed alike.
        peak_at: The stage whose forward or backward pass has the peak.
        origin: Where the figures come from: `analytic`, `compiled` or `measured`.
        extra_seconds: Seconds of the recompute; `None` where unknown.
        step_seconds: Seconds of value and gradient without recompute; `None` where unknown.
        seconds_origin: Where the seconds come from: `roofline`, `roofline, nominal` (of a device whose figures are a
            guess) or `profiled`; empty where there are none.
        minimises: `flops`, or `seconds` where FLOPs are weighed by them.
        untimed: What is recomputed, while its seconds are not known.
    """

    temp_bytes: int
    extra_flops: float
    forward_flops: float
    peak_at: int
    origin: str
    extra_seconds: float | None = None
    step_seconds: float | None = None
    seconds_origin: str = ""
    minimises: str = "flops"
    untimed: tuple[Untimed, ...] = ()

    def faults(self, n_nodes: int) -> Iterator[str]:
        """Say what no replay predicts of a program of so many nodes, by field."""
        for name in ("temp_bytes", "extra_flops", "forward_flops", "peak_at", "extra_seconds", "step_seconds"):
            if ((figure := getattr(self, name)) or 0) < 0:
                yield f"{name}: {figure} is below zero"
        for run in self.untimed:
            if not 0 <= run.start < run.stop <= n_nodes:
                yield f"untimed: {run.start}:{run.stop} is no run of the {n_nodes} nodes"


@dataclass(frozen=True)
class Chain:
    """Stages, items and crossings of one program; planners read nothing else.

    Attributes:
        stages: The stages, in order; they cover the program.
        items: Runs of stages that may be one region, in any order.
        crossings: The values that cross cuts.
        fingerprint: The program's fingerprint; plans carry it.
        origin: Where the costs come from: `analytic`, `compiled` or `measured`.
        seconds_origin: Where seconds come from: `roofline`, `roofline, nominal` or `profiled`; empty where stages and
            options have none: what a plan recomputes is timed when it is chosen.
        minimises: What planners minimise: `flops`, or `seconds` where FLOPs are weighed by them.
        saves_in_nests: Whether regions may save values inside nests; JAX's `jax_remat3` recomputes them.
    """

    stages: tuple[Stage, ...]
    items: tuple[Item, ...]
    crossings: tuple[Crossing, ...]
    fingerprint: str = "by hand"
    origin: str = "by hand"
    seconds_origin: str = ""
    minimises: str = "flops"
    saves_in_nests: bool = True

    def __post_init__(self) -> None:
        n = len(self.stages)
        faults = [f"stage {s} does not start where stage {s - 1} stops"
                  for s in range(1, n) if self.stages[s].start != self.stages[s - 1].stop]  # fmt: skip
        faults += [f"{c} does not run forward" for c in self.crossings if not 0 <= c.made < c.last <= n]
        faults += [f"{i.start}:{i.stop} is no run of stages" for i in self.items if not 0 <= i.start < i.stop <= n]
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def forward_flops(self) -> float:
        """FLOPs of one forward pass through all stages."""
        return float(sum(stage.forward_flops for stage in self.stages))

    @cached_property
    def crossing_bytes(self) -> np.ndarray:
        """`[s, q]`: bytes made in stages `s .. q - 1` that cross cut `q`; shape (n, n + 1), zero for q <= s."""
        return self._made_and_crossing([c.n_bytes for c in self.crossings])

    @cached_property
    def cotangent_bytes(self) -> np.ndarray:
        """`[s, q]`: bytes of cotangents of values that stages `s .. q - 1` make and others at or after `q` read."""
        return self._made_and_crossing([c.cotangent_bytes for c in self.crossings])

    @cached_property
    def passing_bytes(self) -> np.ndarray:
        """`[s, q]`: bytes of cotangents live while `s .. q - 1` runs backward: made before `s`, used from `q`."""
        n = len(self.stages)
        table = np.zeros((n + 1, n + 2), dtype=np.int64)
        for c in self.crossings:
            table[c.made + 1, c.last] += c.cotangent_bytes
        # made < s  and  last >= q
        table = np.cumsum(table, axis=0)
        return np.cumsum(table[:, ::-1], axis=1)[:, ::-1][:n, : n + 1]

    def held_bytes(self, cut: int) -> int:
        """Sum the bytes of cotangents that are live when the backward pass reaches cut `cut`."""
        return int(self.cotangent_bytes[0, cut]) if cut else 0

    def kept_bytes(self, run: Run) -> int:
        """Sum the bytes that are live between a run's passes beyond the values that cross the cuts at its ends."""
        if run.children:
            return sum(self._hoisted_bytes(child) for child in run.children)
        if run.option is not None:
            return run.option.saved_bytes
        inside = sum(self.stages[s].keep_bytes for s in range(run.start, run.stop))
        crossing = int(self.crossing_bytes[run.start, run.stop])
        made = sum(int(self.crossing_bytes[s, s + 1]) for s in range(run.start, run.stop))
        return inside + max(0, made - crossing)

    def _hoisted_bytes(self, run: Run) -> int:
        """Sum the bytes of a run that are live even where a nest around it saves nothing."""
        if run.children:
            return sum(map(self._hoisted_bytes, run.children))
        if run.option is not None and run.option.is_hoisted:
            return run.option.saved_bytes
        return sum(s.hoisted_bytes for s in self.stages[run.start : run.stop])

    def plain(self) -> tuple[Run, ...]:
        """Make the runs of no rematerialisation: every stage unwrapped."""
        return tuple(Run(s, s + 1) for s in range(len(self.stages)))

    def recompute(self, stage: int) -> Run:
        """Make the run that saves nothing of one stage."""
        s = self.stages[stage]
        return Run(stage, stage + 1, Option((), s.hoisted_bytes, s.transient_bytes, s.tail_flops, s.tail_seconds))

    def nest(self, start: int, stop: int, children: Sequence[Run] = ()) -> Run:
        """Make a nest over stages `start .. stop - 1`; without children, its stages are unwrapped inside."""
        return Run(start, stop, None, tuple(children) or tuple(Run(s, s + 1) for s in range(start, stop)))

    def _made_and_crossing(self, sizes: Sequence[int]) -> np.ndarray:
        n = len(self.stages)
        table = np.zeros((n, n + 1), dtype=np.int64)
        for c, size in zip(self.crossings, sizes, strict=True):
            table[c.made, c.made + 1 : c.last + 1] += size
        # rows from the bottom up: made in s .. q-1; a value is in the table only for q > made
        return np.cumsum(table[::-1], axis=0)[::-1].copy()
