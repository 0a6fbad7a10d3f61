"""Decisions of a plan: segments of a program, and how its loops and conditionals run. Plain data.

A `Segment` is a run of nodes that becomes one `jax.checkpoint` region. A `Loop` says how a `lax.scan` runs, a
`Conditional` how the branches of a `lax.cond` or `lax.switch` do. An `Inside` plans an inner program, a loop's body or
a branch: its segments, its gradient barriers, and how its own loops and conditionals run.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING


@dataclass(frozen=True, slots=True)
class Segment:
    """A half-open run of nodes: one `jax.checkpoint` region.

    Attributes:
        start: Its first node.
        stop: The node after its last.
        saved: Values made inside that are saved for its backward pass; only where it has no segments inside.
        children: Segments inside it.
        offloaded: Those of `saved` that are kept in host memory; among them may be values that it reads.
    """

    start: int
    stop: int
    saved: tuple[int, ...] = ()
    children: tuple[Segment, ...] = ()
    offloaded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """Over which devices an axis is split.

    Attributes:
        mesh: Names and sizes of a mesh's axes.
        names: Those that split it, the outermost first; empty where no device has a part alone.

    Example:
        >>> Split((("data", 4), ("model", 2)), ("data",)).parts
        4
    """

    mesh: tuple[tuple[str, int], ...] = ()
    names: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Over how many devices."""
        return math.prod(size for name, size in self.mesh if name in self.names)


UNSPLIT = Split()
"""Every device has all of it."""


@dataclass(frozen=True, slots=True)
class Slices:
    """A run of nodes executed a slice of an independent axis at a time: in a plan's program, one node.

    Attributes:
        start: Its first node, counted in the program as it was traced.
        stop: The node after its last.
        value: A value that it reads and that carries the axis.
        dim: The dimension of it that does.
        count: In how many slices, the last of them perhaps shorter.
        length: How many units the axis has.
        label: What runs so, in words.
        spared_bytes: Bytes of the values it makes that carry the axis, less those of one slice.
        extra_share: What it recomputes, as a share of the program's forward pass.
        inside: How one slice runs; indices are those of what a slice executes (`jaxsub.emission.folding`).
        within: The body that contains the run, if it is not in the program itself: the loop or conditional, and which
            of its bodies; then the one in that body, and so on. All indices are those of the innermost body.
        axis: Which dimension of which argument the axis is, in words; empty where it is not known.
        split: Over which devices the axis is split: a slice takes the same share of what each of them holds.
        slowed_share: How much longer weights and sums of their gradients take to move, as a share of the program's
            forward pass; 0 where it was not estimated.
    """

    start: int
    stop: int
    value: int
    dim: int
    count: int
    length: int = 0
    label: str = ""
    spared_bytes: int = 0
    extra_share: float = 0.0
    inside: Inside = field(default_factory=lambda: Inside())
    within: tuple[tuple[int, int], ...] = ()
    axis: str = ""
    split: Split = UNSPLIT
    slowed_share: float = 0.0

    @property
    def parts(self) -> int:
        """Over how many devices the axis is split."""
        return self.split.parts

    def faults(self) -> list[str]:
        """What no run in slices is, by field."""
        found = [] if 0 <= self.start < self.stop else [f"{self.start}:{self.stop} is no run of nodes"]
        if self.count < 2 or self.count > (self.length or self.count):
            found.append(f"count: {self.count} slices of {self.length} units")
        if self.parts > 1 and self.length % (self.count * self.parts):
            found.append(f"split: {self.count} slices of {self.length} units on {self.parts} devices")
        return found

    @property
    def size(self) -> int:
        """How many units a slice has."""
        return -(-self.length // self.count)

    @property
    def executed(self) -> Slices:
        """The same without what is said about it: equal to others that execute the same."""
        return replace(self, label="", spared_bytes=0, extra_share=0.0, axis="", slowed_share=0.0)


@dataclass(frozen=True, slots=True)
class Clone:
    """A run of the function's equations that is recomputed in front of a later equation.

    A function may take a gradient itself: forces are the gradient of an energy. What the inner backward pass reads is
    then recomputed right before, as XLA's rematerialisation clones instructions, and not live since the forward pass.

    Attributes:
        start: Its first node, counted in the function without clones.
        stop: The node after its last.
        before: The node in front of which it is recomputed, and from which on its values are read.
        extra_share: What it adds to the gradient, as a share of the function's forward pass.
    """

    start: int
    stop: int
    before: int
    extra_share: float = 0.0

    def faults(self) -> list[str]:
        """What no clone is, by field."""
        is_run = 0 <= self.start < self.stop <= self.before
        return [] if is_run else [f"{self.start}:{self.stop} is no run of nodes before {self.before}"]


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a function is planned.

    Attributes:
        opened_regions: How many `jax.checkpoint` regions of its own are opened: all, or none.
        clones: Runs that are recomputed.
    """

    opened_regions: int = 0
    clones: tuple[Clone, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyNames:
    """What a plan's regions save, by the names that `checkpoint_name` gave: `Plan.to_policy` makes a policy of it.

    Attributes:
        saved: Names whose values are saved.
        offloaded: Names whose values are saved in host memory.
        recomputed: The other names inside regions.
        unsaid: What no policy of names can say, in words; the names are empty then.
    """

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inside:
    """How a program inside an equation runs; all indices are its own.

    Attributes:
        segments: Its outermost segments, in order, disjoint.
        barriers: Nodes that have a gradient barrier in front of them, in order.
        ways: How its loops and conditionals run that do not run plainly.
        saved: Values that it makes that the innermost region around it saves, as offsets from the first; only where
            it has no barriers, and no segments but one of all of it, which is inside that region.
    """

    segments: tuple[Segment, ...] = ()
    barriers: tuple[int, ...] = ()
    ways: tuple[ControlFlow, ...] = ()
    saved: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """How a loop of known length runs: without recompute, or with each step or blocks of steps recomputed.

    Attributes:
        node: Its node, counted from the first node of the stage in an `Option`, and of the program in a `Plan`.
        blocks: Steps in each block, outermost blocks first, each size smaller than the one before; every block is a
            region that saves its first carry.
        is_recomputed: Whether each step is a region too, which saves what is saved `inside`.
        kept_steps: How many of the last steps are outside all blocks and keep their residuals.
        kept_saved: Saved values of each of those, in a region of its own, as offsets from the first value that the
            body makes; `None` for no region.
        inside: How its body runs.
        is_unrolled: Whether all steps are unrolled into one program: `inside` is a plan of that, the rest unset.
    """

    node: int
    blocks: tuple[int, ...] = ()
    is_recomputed: bool = False
    kept_steps: int = 0
    kept_saved: tuple[int, ...] | None = None
    inside: Inside = Inside()
    is_unrolled: bool = False

    @property
    def is_split(self) -> bool:
        """Whether it is no more one loop over its steps."""
        return bool(self.blocks or self.kept_steps or self.is_unrolled)

    @property
    def programs(self) -> tuple[Inside, ...]:
        """How its body runs."""
        return (self.inside,)


@dataclass(frozen=True, slots=True)
class Conditional:
    """How the branches of a conditional run.

    Attributes:
        node: Its node, counted as a `Loop`'s.
        branches: How each branch runs, in the order of the equation's branches.
        is_recomputed: Whether all of it is one region, which saves what is saved inside its branches.
    """

    node: int
    branches: tuple[Inside, ...]
    is_recomputed: bool = False

    @property
    def programs(self) -> tuple[Inside, ...]:
        """How each branch runs."""
        return self.branches


if TYPE_CHECKING:
    ControlFlow = Loop | Conditional
else:  # a class, not a union: of unions of dataclasses `msgspec` cannot tell which is meant (`jaxsub.core.codec` does)

    class ControlFlow(ABC):  # noqa: B024 - only named
        """How an equation that holds programs runs: a `Loop` or a `Conditional`."""

    ControlFlow.register(Loop)
    ControlFlow.register(Conditional)


def walk(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Every segment and everything nested in it, outermost first."""
    for segment in segments:
        yield segment
        yield from walk(segment.children)


def saving_in_nests(inside: Inside, *, depth: int = 0) -> Iterator[Segment | ControlFlow]:
    """Yield segments, loops and conditionals that save values inside another region, in order.

    Args:
        inside: How a program runs.
        depth: How many regions are around it.

    Example:
        >>> nest = Segment(0, 9, children=(Segment(0, 4, saved=(3,)), Segment(5, 9)))
        >>> [(found.start, found.stop) for found in saving_in_nests(Inside((nest,)))]
        [(0, 4)]
    """
    outer = inside.segments if depth else (child for segment in inside.segments for child in segment.children)
    yield from (segment for segment in walk(tuple(outer)) if segment.saved)
    for way in inside.ways:
        around = depth + way.is_recomputed + (isinstance(way, Loop) and bool(way.blocks))
        in_tail = depth > 0 and isinstance(way, Loop) and bool(way.kept_saved)
        if in_tail or (around > 1 and any(p.saved for p in way.programs)):
            yield way
        for program in way.programs:
            yield from saving_in_nests(program, depth=around)


def is_saving(way: ControlFlow) -> bool:
    """Tell whether values are saved inside a loop or conditional, but for those that regions inside it save.

    Example:
        >>> branch = Inside(ways=(Loop(3, inside=Inside(saved=(0,))),))
        >>> is_saving(Conditional(5, (branch, Inside()), is_recomputed=True))
        True
    """
    return any(p.saved or any(not inner.is_recomputed and is_saving(inner) for inner in p.ways) for p in way.programs)


def depth_of(way: ControlFlow) -> int:
    """Count how deep loops and conditionals nest, this one included."""
    return 1 + max((depth_of(inner) for program in way.programs for inner in program.ways), default=0)
