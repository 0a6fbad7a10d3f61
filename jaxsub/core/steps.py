"""What one step of a loop, or one slice of a run, saves and recomputes: a plan's loops opened, in words and bytes.

Plain data, no JAX. `jaxsub.search.annotate` makes it of a program and a plan; `jaxsub.show` displays it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxsub.core.timeline import StageTimeline


@dataclass(frozen=True, slots=True)
class Holding:
    """One value that is kept from the forward to the backward pass, in words.

    Attributes:
        label: Its module path, name, shape and source line.
        n_bytes: Its bytes.
        count: How many alike are kept.
        is_offloaded: Whether it is kept in host memory.
    """

    label: str
    n_bytes: int
    count: int
    is_offloaded: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    """One step of a loop, or one slice of a run, opened.

    Attributes:
        kind: `loop` for the steps of a scan, `slices` for a run in slices.
        node: Its node: of the program, of the body that contains it, or the first one of a run in slices.
        label: What it is, in words.
        length: How many steps or slices there are.
        saved: What each saves from its forward to its backward pass, largest first.
        stored_bytes: What all of them save that is live at once.
        recomputed: What each recomputes: words, and the share of its forward pass in FLOPs, largest first.
        n_nodes: How many equations it has.
        recomputed_share: FLOPs that each recomputes, as a share of its forward pass.
        timeline: What is live inside one of them; `None` where that is not known.
        inner: The loops inside.
    """

    kind: str
    node: int
    label: str
    length: int
    saved: tuple[Holding, ...] = ()
    stored_bytes: int = 0
    recomputed: tuple[tuple[str, float], ...] = ()
    n_nodes: int = 0
    recomputed_share: float = 0.0
    timeline: StageTimeline | None = None
    inner: tuple[Steps, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """What each saves, in all."""
        return sum(h.n_bytes * h.count for h in self.saved)

    def faults(self) -> list[str]:
        """What no steps are, by field."""
        found = [f"kind: {self.kind!r} is unknown"] if self.kind not in ("loop", "slices") else []
        if self.length < 1 or self.stored_bytes < 0 or any(h.n_bytes < 0 or h.count < 1 for h in self.saved):
            found.append(f"length: {self.length} steps, or less than nothing is saved")
        if self.timeline is not None:
            found += [f"timeline.{fault}" for fault in self.timeline.faults(self.timeline.stage_nodes[-1])]
        return found + [f"inner.{fault}" for inner in self.inner for fault in inner.faults()]
