"""`Plan`: the decisions for one program. Plain data, no JAX.

A `Plan` holds node and value indices of one program and that program's fingerprint. It prints, compares, is stored
as JSON and loaded, and is refused on another function.

The paper's mirror count m(v) (Chen et al. 2016, §4.1) is how often node v may be recomputed. In a plan it is the number
of segments that contain v, less those that v ends: the paper keeps the node that ends a segment, with m(v) = 0, and no
backward pass reads its recomputed result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, Literal

from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Prediction, Run
from jaxsub.core.checks import is_whole
from jaxsub.core.decisions import Clone, ControlFlow, PolicyNames, Segment, Slices, walk
from jaxsub.core.figures import Difference, compare, plan_figures, scalars
from jaxsub.core.graph import Graph
from jaxsub.core.measurement import Measurement
from jaxsub.core.output_reuse import unfenced
from jaxsub.core.shown import Shown
from jaxsub.core.simulate import check_runs, predict
from jaxsub.core.steps import Holding, Steps
from jaxsub.core.stored import Stored
from jaxsub.core.timeline import StageTimeline, stage_timeline

DIGITS = 4  # hexadecimal, for each equation: they say where a program differs, its fingerprint that it does
MOST_NODES = 2**24  # larger programs are not traced in an hour: a plan that says so is damaged
MOST_FAULTS = 8  # how many faults of a plan are named


@dataclass(frozen=True, slots=True)
class Plan(Shown, Stored):
    """Which values to save, which to recompute, and where to put gradient barriers.

    Attributes:
        fingerprint: The program it belongs to.
        budget: The budget it was made for.
        n_nodes: How many nodes the program has.
        segments: Outermost segments, in order, disjoint.
        barriers: Nodes that have a gradient barrier in front of them, in order.
        planner: The planner's name.
        prediction: Its predicted costs; `None` for a plan made by hand.
        plain_prediction: The predicted costs of the program without it.
        measurement: The compiler's report; `None` before it is verified.
        plain_measurement: The compiler's report for the program without it.
        is_optimal: Whether the planner proved it optimal in its memory model.
        lower_bound: A certified lower bound on `prediction.extra_flops` for any schedule of the same stages that needs
            no more memory, from `jaxsub.planners.milp`; `None` without `bound=True` or `planner="milp"`.
        holdings: Its saved values, largest first, in words.
        equations: `DIGITS` hexadecimal digits for each equation of its program, in their order.
        loops: How loops and conditionals run that do not run plainly, in order of their nodes.
        note: A remark on the function, such as that its result is no loss; mostly empty.
        slices: Runs of the traced program executed in slices: each is one node for all other fields.
        opened_regions: How many `jax.checkpoint` regions of the function's own the plan was made without: for all other
            fields what is inside them are nodes like any other. 0 where they stay, or there are none.
        clones: Runs of an inner gradient's forward pass that are recomputed for its backward pass: for all other
            fields they are nodes like any other.
        policy_names: Names of the values that its regions save; `None` for a plan made by hand.
        steps: Its loops and slices opened: what each step saves and recomputes, and what is live inside one.
        timeline: Live values step by step; `None` for a plan made by hand.
        plain_timeline: The same without the plan.
    """

    kind: ClassVar[str] = "jaxsub_plan"
    remedy: ClassVar[str] = "jaxsub.plan"

    fingerprint: str
    budget: Budget
    n_nodes: int
    segments: tuple[Segment, ...] = ()
    barriers: tuple[int, ...] = ()
    planner: str = "by hand"
    prediction: Prediction | None = None
    plain_prediction: Prediction | None = None
    measurement: Measurement | None = None
    plain_measurement: Measurement | None = None
    is_optimal: bool = False
    lower_bound: float | None = None
    holdings: tuple[Holding, ...] = ()
    loops: tuple[ControlFlow, ...] = ()
    slices: tuple[Slices, ...] = ()
    opened_regions: int = 0
    clones: tuple[Clone, ...] = ()
    timeline: StageTimeline | None = field(default=None, repr=False)
    plain_timeline: StageTimeline | None = field(default=None, repr=False)
    steps: tuple[Steps, ...] = field(default=(), repr=False)
    equations: str = field(default="", repr=False)
    note: str = ""
    policy_names: PolicyNames | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        faults = list(islice(segment_faults(self.segments, 0, self.n_nodes), MOST_FAULTS))
        if list(self.barriers) != sorted(set(self.barriers)):
            faults.append("the barriers are not in order")
        if outside := [b for b in self.barriers if not 0 <= b < self.n_nodes]:
            faults.append(f"the barriers {outside} are outside the program")
        if any(inner.offloaded for outer in self.segments for inner in walk(outer.children)):
            faults.append("only outermost segments may save values off the device")
        if any(set(s.offloaded) - set(s.saved) for s in self.segments):
            faults.append("what is offloaded must be among what is saved")
        if faults:
            raise ValueError("a plan's segments must be disjoint runs of nodes, in order: " + "; ".join(faults))

    @property
    def mirror_counts(self) -> tuple[int, ...]:
        """The paper's m(v) for each node: how often it would be recomputed if regions saved nothing inside."""
        counts = [0] * self.n_nodes
        for segment in walk(self.segments):
            for node in range(segment.start, segment.stop - 1):
                counts[node] += 1
        return tuple(counts)

    def mirror_counts_in(self, graph: Graph) -> tuple[int, ...]:
        """Count the paper's m(v) for Algorithm 2: 0 also for nodes whose results a segment saves or later nodes read.

        Where one value crosses each end, as in a plain chain, and nothing is saved inside, these are `mirror_counts`.
        In an unrolled recurrent network many cross: if they counted as recomputed, each copy would need the copies of
        all steps before it.

        Args:
            graph: The program's.

        Example:
            >>> from jaxsub.core.graph import graph_of
            >>> names = {"tanh": [0], "sin": [1], "mul": [1, 2], "add": [1, 3]}
            >>> skip = graph_of([(name, reads, [8]) for name, reads in names.items()], 1, [4])
            >>> plan = Plan("f", Budget(), 4, (Segment(0, 3),))
            >>> plan.mirror_counts, plan.mirror_counts_in(skip)
            ((1, 1, 0, 0), (0, 1, 0, 0))

        References:
            Chen et al., 2016, §4.1 and Algorithm 2; `jaxsub.allocator.gradient_graph`.
        """
        counts, last = [0] * self.n_nodes, graph.last_uses()
        for segment in walk(self.segments):
            saved = set(segment.saved)
            for node in graph.nodes[segment.start : segment.stop]:
                counts[node.index] += all(last[v] < segment.stop and v not in saved for v in node.outputs)
        return tuple(counts)

    @classmethod
    def from_mirror_counts(cls, counts: Sequence[int], *, fingerprint: str, budget: Budget | None = None) -> Plan:
        """Make a plan from the user's own m(v), the paper's §4.5 interface.

        A run of nodes with m >= 1 and the node that follows it are a segment; in it, a run with m >= 2 and the node
        that follows it are a segment inside, and so on.

        Args:
            counts: m(v) for each node, each at least 0.
            fingerprint: The program it is for.
            budget: The budget to record.

        Raises:
            ValueError: If a count is negative or no integer.

        Example:
            >>> Plan.from_mirror_counts([1, 1, 0, 1, 0, 0], fingerprint="f").segments == (
            ...     Segment(0, 3),
            ...     Segment(3, 5),
            ... )
            True
        """
        wrong = [f"m({v}) = {m!r}" for v, m in enumerate(counts) if not is_whole(m) or m < 0]
        if wrong:
            raise ValueError(f"mirror counts must be integers of at least 0, got {', '.join(wrong[:5])}")
        segments = tuple(_runs_of(counts, 0, len(counts), level=1))
        barriers = tuple(sorted({s.start for s in walk(segments)} | {s.stop for s in segments if s.stop < len(counts)}))
        return cls(fingerprint, budget or Budget(), len(counts), segments, barriers, planner="mirror")

    @property
    def n_traced(self) -> int:
        """How many equations the program has as it was traced: `n_nodes` where nothing runs in slices."""
        return self.n_nodes + sum(run.stop - run.start - 1 for run in self.slices if not run.within)

    @property
    def n_regions(self) -> int:
        """How many `jax.checkpoint` regions it emits."""
        return sum(1 for _ in walk(self.segments))

    @property
    def gap(self) -> float | None:
        """Extra FLOPs over the lower bound, as a share of one forward pass; `None` where no bound is known."""
        if self.lower_bound is None or self.prediction is None:
            return None
        return (self.prediction.extra_flops - self.lower_bound) / max(self.prediction.forward_flops, 1.0)

    def faults(self) -> list[str]:
        """Say which figures no unchanged plan has, each by its field."""
        measured = {"measurement": self.measurement, "plain_measurement": self.plain_measurement}
        replayed = {"prediction": self.prediction, "plain_prediction": self.plain_prediction,
                    "timeline": self.timeline, "plain_timeline": self.plain_timeline}  # fmt: skip
        found = [f"budget.{f}" for f in self.budget.faults()] + [f"slices.{f}" for s in self.slices for f in s.faults()]
        found += [f"clones.{fault}" for clone in self.clones for fault in clone.faults()]
        found += [f"{name}.{fault}" for name, said in measured.items() if said is not None for fault in said.faults()]
        found += [f"{name}.{fault}" for name, said in replayed.items() if said is not None
                  for fault in islice(said.faults(self.n_nodes), MOST_FAULTS)]  # fmt: skip
        found += [f"steps.{fault}" for steps in self.steps for fault in steps.faults()]
        if not 0 <= self.n_nodes <= MOST_NODES:
            found.append(f"n_nodes: {self.n_nodes} is not in 0 .. {MOST_NODES}")
        if len(self.equations) not in (0, DIGITS * self.n_traced):
            found.append(f"equations: {len(self.equations)} digits, not {DIGITS * self.n_traced}")
        found += ["holdings: less than nothing is kept"] * any(h.n_bytes < 0 or h.count < 1 for h in self.holdings)
        return found[:MOST_FAULTS]

    def diff(self, other: Plan | str | os.PathLike[str]) -> Difference:
        """Compare with another plan: figures, saved values, recomputed equations; print it.

        Args:
            other: The plan to compare with, or the path of one that `save` wrote.

        Example:
            >>> plan = Plan("f", Budget(), 4, (Segment(0, 2),))
            >>> bool(plan.diff(plan)), plan.diff(plan.replace(segments=())).recomputed
            (False, (('equations 0 to 0',), ()))
        """
        return compare(self, Plan.of(other))

    def metrics(self) -> dict[str, float]:
        """Its figures by name, for TensorBoard and its like: `jaxsub/measured_bytes`, `jaxsub/recomputed_share`.

        Example:
            >>> Plan("f", Budget(), 4, (Segment(0, 2),)).metrics()["jaxsub/recomputed_equations"]
            1.0
        """
        return scalars(plan_figures(self))

    def replace(self, **changes: Any) -> Plan:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_policy(self, form: Literal["jax", "maxtext"] = "jax") -> Any:
        """Turn the plan into a policy of `checkpoint_name`s, for its regions: a loop's body, or each block.

        Gradient barriers at the edges of regions are left out; the rest is as planned.

        Args:
            form: `"jax"` for `jax.checkpoint(block, policy=...)`, `"maxtext"` for the settings of MaxText's
                `remat_policy: custom`: each name with `device`, `offload` or `remat`.

        Returns:
            A policy of `jax.checkpoint_policies`, or the settings as a dictionary.

        Raises:
            UnsupportedError: If no such policy does what the plan does; it says why.
            ValueError: If `form` is neither.
        """
        from jaxsub.search.named_policy import exported  # noqa: PLC0415 - JAX is needed only here

        return exported(self, form)

    def plot(self, ax: Any = None, *, inside: int | None = None) -> Any:
        """Draw live bytes over time, before and after; needs matplotlib.

        Args:
            ax: The matplotlib axes to draw on; `None` for a new figure's.
            inside: Which of `steps` to draw one of instead; `None` for the whole plan.

        Returns:
            The axes.

        Raises:
            IndexError: If there are no such steps.
        """
        from jaxsub.show.plot import plot_plan, plot_steps  # noqa: PLC0415 - shown only when asked

        n = len(self.steps)
        if inside is not None and (not is_whole(inside) or not -n <= inside < n):
            raise IndexError(f"inside={inside!r} is none of the {n} loops and runs in slices of `steps`; leave it out.")
        return plot_plan(self, ax) if inside is None else plot_steps(self.steps[inside], ax)


def plan_from_runs(
    chain: Chain,
    runs: Sequence[Run],
    *,
    budget: Budget,
    planner: str,
    is_optimal: bool = False,
    lower_bound: float | None = None,
) -> Plan:
    """Turn a planner's runs into a plan over nodes.

    Args:
        chain: The chain the runs are over.
        runs: The runs; they cover the chain's stages.
        budget: The budget they were made for.
        planner: The planner's name.
        is_optimal: Whether they are proved optimal in the chain's memory model.
        lower_bound: A certified lower bound on the extra FLOPs, where known.

    Raises:
        PlannerError: If the runs do not hold together.
    """
    segments, barriers, loops = decisions_of(chain, runs)
    return Plan(
        chain.fingerprint,
        budget,
        chain.stages[-1].stop,
        segments,
        barriers,
        planner,
        predict(chain, runs),
        predict(unfenced(chain), chain.plain()),
        is_optimal=is_optimal,
        lower_bound=lower_bound,
        loops=loops,
        timeline=stage_timeline(chain, runs),
        plain_timeline=stage_timeline(unfenced(chain), chain.plain()),
    )


def decisions_of(
    chain: Chain, runs: Sequence[Run]
) -> tuple[tuple[Segment, ...], tuple[int, ...], tuple[ControlFlow, ...]]:
    """Turn a planner's runs into segments, barriers, and ways of loops and conditionals, all over nodes.

    `PlannerError` if the runs do not hold together.
    """
    check_runs(chain, runs)
    segments = _moved([s for run in runs for s in _segments(chain, run)])
    barriers = sorted({chain.stages[start].start for start in _barriers(runs)} - {0})
    return segments, tuple(barriers), tuple(loop for run in runs for loop in _loops(chain, run))


def segment_faults(segments: Sequence[Segment], start: int, stop: int) -> Iterator[str]:
    """Say why segments are not disjoint runs of the nodes `start .. stop - 1`, in order, nested likewise."""
    at = start
    for segment in segments:
        if not at <= segment.start < segment.stop <= stop:
            yield f"segment {segment.start}:{segment.stop} does not fit in {at}:{stop}"
        yield from segment_faults(segment.children, segment.start, segment.stop)
        at = segment.stop


def _runs_of(counts: Sequence[int], start: int, stop: int, level: int) -> Iterator[Segment]:
    at = start
    while at < stop:
        end = at
        while end < stop and counts[end] >= level:
            end += 1
        if end > at:
            close = min(end + 1, stop)
            yield Segment(at, close, (), tuple(_runs_of(counts, at, close, level + 1)))
            at = close
        else:
            at += 1


def _segments(chain: Chain, run: Run) -> Iterator[Segment]:
    start, stop = chain.stages[run.start].start, chain.stages[run.stop - 1].stop
    if run.children:
        yield Segment(start, stop, (), tuple(s for c in run.children for s in _segments(chain, c)))
    elif run.option is not None and run.option.is_region:
        first, option = chain.stages[run.start].first_value, run.option
        saved, offloaded = (tuple(first + o for o in offsets) for offsets in (option.saved, option.offloaded))
        yield Segment(start, stop, saved, offloaded=offloaded)


def _moved(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Offload a value in all segments that save it, if one segment offloads it at its entry."""
    entries = {v for s in segments for v in s.offloaded}
    return tuple(replace(s, offloaded=tuple(v for v in s.saved if v in entries)) for s in segments)


def _loops(chain: Chain, run: Run) -> Iterator[ControlFlow]:
    for child in run.children:
        yield from _loops(chain, child)
    if run.option is not None:
        yield from (replace(loop, node=chain.stages[run.start].start + loop.node) for loop in run.option.loops)


def _barriers(runs: Sequence[Run]) -> Iterator[int]:
    for run in runs:
        if run.option is not None:
            yield run.start
        elif run.children:
            yield run.start
            yield from _barriers(run.children)
        else:
            yield from range(run.start, run.stop)
