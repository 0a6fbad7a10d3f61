"""`max_batch`: the largest batch with which a whole step fits, as it stands and planned.

Memory grows about linearly with the batch, which `jaxsub.search.bracket` makes use of. Every batch is compiled for
shapes alone; nothing is executed. Planned, a batch is tried under the plans that need least, found once and carried
over to other batches of the same program; what is found is then planned as `jaxsub.jit` plans it, so that it is known
to do so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxsub.api.sublinear import AnyCache
from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.checks import whole
from jaxsub.core.errors import BudgetError, InfeasibleBudgetError
from jaxsub.core.plan import Plan
from jaxsub.devices.targets import get_target
from jaxsub.emission.folding import carried_over
from jaxsub.emission.forms import numbering
from jaxsub.search.bracket import largest
from jaxsub.search.call_sites import Trial
from jaxsub.search.progress import Progress, say
from jaxsub.step.device import device_bytes
from jaxsub.step.jit import Step
from jaxsub.step.report import StepReport


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The largest batches with which a step fits; print it.

    Attributes:
        memory_bytes: What the step may take of a device.
        plain: The largest batch with which it fits as it stands; 0 where none does.
        planned: The largest batch that was found to fit under `jaxsub.jit(memory=...)`.
        report: What the step takes there, and what is recomputed.
    """

    memory_bytes: int
    plain: int
    planned: int
    report: StepReport

    def __str__(self) -> str:
        times = f" ({self.planned / self.plain:.1f} times)" if self.plain else ""
        again = f", {self.report.extra:.2f} of a forward pass again" if self.report.extra else ""
        again += "" if self.report.sites else "; no function in the step is wrapped in jaxsub.sublinear: wrap the loss"
        return (
            f"largest batch in {format_bytes(self.memory_bytes)} ({self.report.measurement.target}): "
            f"{self.plain or 'none'} as it stands, {self.planned} planned{times}{again}"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("BatchSizes(...)" if cycle else str(self))


def max_batch(step_for_batch: Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]], *, memory: str | int,
              target: Any = None, multiple_of: int = 1, cache: AnyCache = True, progress: bool = True,
              **jit_kwargs: Any) -> BatchSizes:  # fmt: skip
    """Find the largest batch with which a step fits a device, as it stands and planned; nothing is executed.

    Args:
        step_for_batch: Returns, for a batch size, the step, as it would be given to `jaxsub.jit` or as that returns it,
            and its positional arguments: arrays or `jax.ShapeDtypeStruct`s.
        memory: What the step may take of a device, in bytes, or `"device"`; as for `jaxsub.jit`.
        target: The device to plan for, such as `"h100"`; `None` for the one in use.
        multiple_of: What the batch must be a multiple of.
        cache: Where prices are kept, as for `jaxsub.sublinear`.
        progress: Whether to show a progress bar when it takes long.
        **jit_kwargs: As for `jax.jit`, such as `donate_argnums`.

    Returns:
        The batches, and what the step takes with the larger one.

    Raises:
        BudgetError: If `memory` is no number of bytes, or the device does not say what it has.
        InfeasibleBudgetError: If the step fits with no batch at all; it says what holds the memory. Or if a function in
            it does not fit a budget of its own; a note says with which batch.
        ValueError: If `multiple_of` is no whole number of at least 1, or no batch takes more memory than others.

    Example:
        >>> import jax, jax.numpy as jnp, jaxsub
        >>> @jaxsub.sublinear
        ... def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).mean()
        >>> ws = [jnp.eye(16)] * 6
        >>> found = jaxsub.max_batch(
        ...     lambda n: (jax.grad(loss), (ws, jax.ShapeDtypeStruct((n, 16), "float32"))),
        ...     memory="256KiB", multiple_of=64,
        ... )  # fmt: skip
        >>> found.plain < found.planned
        True
    """
    unit = whole(multiple_of, "multiple_of", 1)
    n_bytes = device_bytes(get_target(target)) if memory == "device" else Budget.parse(memory).n_bytes
    if n_bytes is None:
        raise BudgetError(f'memory={memory!r} is no number of bytes: pass "24GiB", an int, or "device".')
    with Progress(progress) as told:
        batches = _Batches(step_for_batch, n_bytes, target, cache, jit_kwargs, told)
        try:
            found = batches.sizes(unit)
        except InfeasibleBudgetError as error:
            error.add_note(f"That was with a batch of {batches.tried}; max_batch begins with multiple_of={unit}.")
            raise
    if progress:
        say(f"the largest batch is {found.planned}, {found.plain} without a plan, in {format_bytes(n_bytes)}", 0.0)
    return found


@dataclass(slots=True, eq=False)
class _Batches:
    """A step at several batch sizes."""

    step_for_batch: Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]
    n_bytes: int
    target: Any
    cache: AnyCache
    jit_kwargs: dict[str, Any]
    told: Callable[[str], None]
    least: list[Plan] = field(init=False, default_factory=list)
    tried: int = field(init=False, default=0)

    def sizes(self, unit: int) -> BatchSizes:
        """The largest multiples of a unit; `InfeasibleBudgetError` if there are none."""
        n_bytes = self.n_bytes
        plain = largest(self.plain_bytes, n_bytes, unit)
        self.find_least(plain or unit)
        planned = largest(self.least_bytes, n_bytes, unit, plain) if self.least else plain
        if self.least and not any(plan.slices for plan in self.least):  # small batches have no use for slices
            self.find_least(max(planned, plain) + unit)
            planned = largest(self.least_bytes, n_bytes, unit, max(planned, plain))
        while True:
            planned = max(planned, plain, unit)
            try:
                return BatchSizes(n_bytes, plain, planned, self.report(planned))
            except InfeasibleBudgetError as error:
                if planned <= max(plain, unit):
                    raise
                planned = min(planned - unit, planned * n_bytes // error.least_bytes) // unit * unit

    def _step(self, batch: int) -> tuple[Step[..., Any], tuple[Any, ...]]:
        self.tried, found = batch, self.step_for_batch(batch)
        match found:
            case (Step() as made, [*args]):  # its own memory, or plan, does not count
                run, _, target, _, _, jit_kwargs, is_fused, _ = made.made_of()
                given = {**jit_kwargs, **self.jit_kwargs}
                return Step(run, self.n_bytes, self.target or target, self.cache, False, given, is_fused), tuple(args)
            case (fun, [*args]) if callable(fun):
                return Step(fun, self.n_bytes, self.target, self.cache, False, self.jit_kwargs), tuple(args)
        raise TypeError(f"step_for_batch({batch}) must return a step and a tuple of its arguments, got {found!r:.99}.")

    def plain_bytes(self, batch: int) -> int:
        """What the step takes as it stands."""
        step, args = self._step(batch)
        return step.sizing(args, {}, self.told).first.measurement.step_bytes

    def find_least(self, batch: int) -> None:
        """Find the plans that need least."""
        step, args = self._step(batch)
        sizing = step.sizing(args, {}, self.told)
        self.least = list(sizing.least().plans.values()) if sizing.ways[0] else []

    def least_bytes(self, batch: int) -> int:
        """What the step takes under the plans that need least, carried over where the program is of the same form."""
        step, args = self._step(batch)
        sites = step.find(args, {})
        programs = [numbering(s.program, p) for s, p in zip(sites.values(), self.least, strict=False)]
        alike = len(sites) == len(self.least) and all(
            len(program.eqns) == plan.n_traced for program, plan in zip(programs, self.least, strict=True)
        )
        if not alike:
            return step.sizing(args, {}, self.told).least().measurement.step_bytes
        plans = {}
        for key, program, plan in zip(sites, programs, self.least, strict=True):
            slices = tuple(carried_over(program, run) for run in plan.slices)
            plans[key] = plan.replace(fingerprint=key, slices=slices)
        self.told(f"the whole step, batch {batch}")
        return step.compile(Trial(get_target(self.target), plans), args, {}).measurement.step_bytes

    def report(self, batch: int) -> StepReport:
        """The step, planned; `InfeasibleBudgetError` if it does not fit."""
        step, args = self._step(batch)
        return step.report(*args)
