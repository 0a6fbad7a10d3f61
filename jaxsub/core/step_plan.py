"""`StepPlan`: what `jaxsub.jit(step, memory=...)` decided, as plain data without JAX.

It holds the plans of the `sublinear` functions inside a step, what the compiler allocated, and a digest of the step's
arguments. It is stored as JSON, compared, and given back by `jaxsub.jit(step, plan=...)`: nothing is searched then, and
a plan of another step is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from jaxsub.core.figures import Difference, compare, rows_of, scalars, step_figures
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.shown import Shown
from jaxsub.core.stored import Stored


@dataclass(frozen=True, slots=True)
class PlannedSite:
    """A sublinear function in a step, how often the step calls it, and its plan."""

    name: str
    calls: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class StepPlan(Shown, Stored):
    """The decisions for a whole step that fits a device.

    Attributes:
        arguments: A digest of the paths, shapes and dtypes of the step's arguments.
        memory_bytes: The most bytes of a device that the step may take.
        measurement: The compiler's report for the step under the plan.
        plain_measurement: The same with every function in it under its own plan, or under none.
        sites: The sublinear functions in it, each with its plan.
        passes: How often its backward scans run: twice where what needs all gradients comes before the updates.
    """

    kind: ClassVar[str] = "jaxsub_step_plan"
    remedy: ClassVar[str] = "jaxsub.jit(step, memory=...).plan"

    arguments: str
    memory_bytes: int
    measurement: Measurement
    plain_measurement: Measurement
    sites: tuple[PlannedSite, ...]
    passes: int = 1

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans by the fingerprint of their functions."""
        return {s.plan.fingerprint: s.plan for s in self.sites}

    def faults(self) -> list[str]:
        """Say which figures are impossible, each by its field."""
        measured = {"measurement": self.measurement, "plain_measurement": self.plain_measurement}
        found = [f"{name}.{fault}" for name, m in measured.items() for fault in m.faults()]
        found += [f"sites.{s.name}.{fault}" for s in self.sites for fault in s.plan.faults()]
        if not 0 < self.measurement.step_bytes <= self.memory_bytes:
            found.append(f"memory_bytes: {self.memory_bytes} is less than the step takes")
        if self.passes not in (1, 2):
            found.append(f"passes: {self.passes} is not 1 or 2")
        if len(self.plans) < len(self.sites) or any(s.calls < 1 for s in self.sites):
            found.append("sites: a function is there twice, or is never called")
        return found

    def diff(self, other: StepPlan | str | os.PathLike[str]) -> Difference:
        """Compare with another plan: figures and functions; print it, or show it in a notebook.

        Args:
            other: The plan to compare with, or the path of one that `save` wrote.
        """
        other = StepPlan.of(other)
        there = {s.name: s.plan for s in other.sites}
        parts = tuple((s.name, found) for s in self.sites if s.name in there
                      and (found := compare(s.plan, there[s.name])))  # fmt: skip
        is_same = self.arguments == other.arguments and set(self.plans) == set(other.plans)
        return Difference(is_same, rows_of(step_figures(self), step_figures(other)), parts=parts)

    def metrics(self) -> dict[str, float]:
        """Its figures by name, for TensorBoard and its like: `jaxsub/step_bytes`, `jaxsub/loss/recomputed_share`."""
        parts = {k: v for s in self.sites for k, v in scalars(s.plan.metrics(), s.name).items()}
        own = scalars(step_figures(self))
        return own | {f"jaxsub/{name.replace('/jaxsub/', '/')}": figure for name, figure in parts.items()}
