"""Figures of plans by name: what two plans differ in, and scalars for TensorBoard and its like.

`plan_figures` and `step_figures` give numbers by name, units in the names. `compare` puts those of two plans side by
side, and adds which saved values and which recomputed equations only one of them has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxsub.core.budget import format_bytes
from jaxsub.core.measurement import Measurement
from jaxsub.core.shown import Shown

MOST_ROWS = 8
"""How many saved values and runs of equations are listed of each plan."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure in which two plans differ, its unit in the name, `None` where one of them has none."""

    name: str
    this: float | None
    other: float | None

    @property
    def words(self) -> tuple[str, str, str]:
        """Its name and both figures, as people write them.

        Example:
            >>> Row("measured_bytes", 2**30, None).words
            ('measured', '1.00 GiB', '-')
        """
        stem, _, unit = self.name.rpartition("_")
        name = (stem if unit in ("bytes", "share") else self.name).replace("_", " ")
        return name, *("-" if x is None else _figure(x, unit) for x in (self.this, self.other))  # type: ignore[return-value]


def _figure(x: float, unit: str) -> str:
    return format_bytes(int(x)) if unit == "bytes" else f"{x:.1%}" if unit == "share" else f"{x:,.6g}"


@dataclass(frozen=True, slots=True)
class Difference(Shown):
    """What two plans differ in; print it. It is false where they decide the same.

    Attributes:
        is_same_program: Whether both are plans of one function or step, at the same shapes.
        rows: The figures in which they differ.
        saved: What only the first saves for the backward pass, and what only the second does, in words.
        recomputed: Runs of equations that only the first recomputes, and those that only the second does; empty where
            their programs differ.
        parts: Of steps, the functions in them whose plans differ, by name.
    """

    is_same_program: bool
    rows: tuple[Row, ...]
    saved: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    recomputed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    parts: tuple[tuple[str, Difference], ...] = ()

    @property
    def alone(self) -> tuple[tuple[str, str], ...]:
        """What only one of them saves or recomputes: which one, and what, in words."""
        return tuple(
            (f"{what} by {side} alone", words)
            for what, sides in (("saved", self.saved), ("recomputed", self.recomputed))
            for side, rows in zip(("this", "other"), sides, strict=True)
            for words in rows
        )

    def __bool__(self) -> bool:
        return bool(not self.is_same_program or self.rows or any((*self.saved, *self.recomputed)) or self.parts)


def plan_figures(plan: Any) -> dict[str, float]:
    """A plan's figures by name; those that nobody predicted or measured are left out."""
    predicted, counts = plan.prediction, plan.mirror_counts
    found: dict[str, float | None] = {
        "budget_bytes": plan.budget.n_bytes,
        "budget_share": plan.budget.fraction,
        "predicted_bytes": predicted.temp_bytes if predicted else None,
        **_measured("", plan.measurement),
        **_measured("plain_", plan.plain_measurement),
        "recomputed_share": recomputed_share(plan) if predicted else None,
        "recomputed_equations": sum(1 for m in counts if m),
        "regions": plan.n_regions,
        "barriers": len(plan.barriers),
        "loops": len(plan.loops),
        "slices": sum(run.count for run in plan.slices),
        "saved_in_regions_bytes": sum(h.n_bytes * h.count for h in plan.holdings if not h.is_offloaded),
        "offloaded_bytes": sum(h.n_bytes * h.count for h in plan.holdings if h.is_offloaded),
    }
    return {name: float(x) for name, x in found.items() if x is not None}


def recomputed_share(plan: Any) -> float:
    """What a plan recomputes, as a share of one forward pass; 0 where it does not say."""
    found: float = plan.prediction.extra_flops / max(plan.prediction.forward_flops, 1.0) if plan.prediction else 0.0
    return found + sum(float(run.extra_share) for run in (*plan.slices, *plan.clones))


def predicted_bytes(plan: Any) -> int:
    """The predicted peak of a plan, in bytes; 0 where it does not say."""
    return int(plan.prediction.temp_bytes) if plan.prediction else 0


def _measured(prefix: str, measured: Measurement | None) -> dict[str, float | None]:
    return {f"{prefix}measured_bytes": measured.temp_bytes if measured is not None else None}


def step_figures(plan: Any) -> dict[str, float]:
    """The figures of a step's plan by name, those of the functions in it left out."""
    measured = plan.measurement
    return {
        "memory_bytes": float(plan.memory_bytes),
        "step_bytes": float(measured.step_bytes),
        "plain_step_bytes": float(plan.plain_measurement.step_bytes),
        "filled_share": measured.step_bytes / max(plan.memory_bytes, 1),
        "argument_bytes": float(measured.argument_bytes),
        "output_bytes": float(measured.output_bytes),
        "temporary_bytes": float(measured.temp_bytes),
        "donated_bytes": float(measured.alias_bytes),
    }


def scalars(figures: Mapping[str, float], under: str = "jaxsub") -> dict[str, float]:
    """Figures under one name, as TensorBoard groups them.

    Example:
        >>> scalars({"regions": 4.0})
        {'jaxsub/regions': 4.0}
    """
    return {f"{under}/{name}": figure for name, figure in figures.items()}


def compare(this: Any, other: Any) -> Difference:
    """What two plans of functions differ in."""
    is_same = (this.fingerprint, this.n_nodes) == (other.fingerprint, other.n_nodes)
    pairs = ((this, other), (other, this))
    recomputed = [_runs(a, b) if is_same else () for a, b in pairs]
    saved = [_saved(a.holdings, b.holdings) for a, b in pairs]
    return Difference(this.fingerprint == other.fingerprint, rows_of(plan_figures(this), plan_figures(other)),
                      (saved[0], saved[1]), (recomputed[0], recomputed[1]))  # fmt: skip


def rows_of(this: Mapping[str, float], other: Mapping[str, float]) -> tuple[Row, ...]:
    """The figures that differ, in order.

    Example:
        >>> [row.name for row in rows_of({"regions": 4.0, "barriers": 2.0}, {"regions": 5.0, "barriers": 2.0})]
        ['regions']
    """
    names = dict.fromkeys((*this, *other))
    return tuple(Row(n, this.get(n), other.get(n)) for n in names if this.get(n) != other.get(n))


def _saved(here: Sequence[Any], there: Sequence[Any]) -> tuple[str, ...]:
    """What one plan saves more of than another."""
    counts = {(h.label, h.n_bytes, h.is_offloaded): h.count for h in there}
    more = [(h, h.count - counts.get((h.label, h.n_bytes, h.is_offloaded), 0)) for h in here]
    rows = sorted(((h, n) for h, n in more if n > 0), key=lambda row: -row[0].n_bytes * row[1])
    words = [f"{n} x {format_bytes(h.n_bytes)}  {h.label}" + " in host memory" * h.is_offloaded for h, n in rows]
    return (*words[:MOST_ROWS], *([f"and {len(words) - MOST_ROWS} more"] if len(words) > MOST_ROWS else []))


def _runs(here: Any, there: Any) -> tuple[str, ...]:
    """Runs of equations that one plan recomputes and another does not."""
    alone = [a > 0 and b == 0 for a, b in zip(here.mirror_counts, there.mirror_counts, strict=True)]
    edges = [i for i, (a, b) in enumerate(pairwise([False, *alone, False])) if a != b]
    runs = [f"equations {start} to {stop - 1}" for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return (*runs[:MOST_ROWS], *([f"and {len(runs) - MOST_ROWS} more runs"] if len(runs) > MOST_ROWS else []))
