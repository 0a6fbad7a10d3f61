"""What a device has for a step, and what to say when a step that was planned does not fit it after all.

A plan speaks of one step, as the compiler allocates it. On the device other arrays may be live, another process may
hold memory, or free memory may be in pieces. Then the runtime refuses; its error is caught, put beside the plan, and
raised with a budget to try. Nothing is run again: the user decides.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxsub.core.budget import format_bytes
from jaxsub.core.errors import JaxsubError
from jaxsub.core.measurement import Measurement
from jaxsub.devices.targets import Target

JAX_SHARE = 0.75
"""What JAX takes of a GPU's memory unless it is told otherwise (its page "GPU memory allocation")."""

EXHAUSTED = "RESOURCE_EXHAUSTED"
"""With this status the runtime refuses an allocation, whatever the device."""

LESS = 0.9
"""Where a device says nothing of what it has left, this share of what did not fit is the budget to try."""

if TYPE_CHECKING:  # the runtime's class has no type
    _RuntimeError = RuntimeError
else:
    _RuntimeError = jax.errors.JaxRuntimeError

_ALLOCATION = re.compile(r"allocat\w*\s+(\d+)\s*bytes", re.IGNORECASE)


class OutOfMemoryError(JaxsubError, _RuntimeError):
    """A step that was planned to fit, and that the device had no room for.

    It is a `jax.errors.JaxRuntimeError` too; the runtime's own stands behind it (`__cause__`).

    Attributes:
        planned_bytes: What the step was measured to take.
        memory_bytes: What it was allowed to take.
        refused_bytes: The allocation that was refused; `None` where the device does not say.
        try_bytes: The budget to try: `jaxsub.jit(step, memory=error.try_bytes)`.
    """

    def __init__(
        self, message: str, *, planned_bytes: int, memory_bytes: int, refused_bytes: int | None, try_bytes: int
    ):
        super().__init__(message)
        self.planned_bytes = planned_bytes
        self.memory_bytes = memory_bytes
        self.refused_bytes = refused_bytes
        self.try_bytes = try_bytes


def device_bytes(target: Target) -> int:
    """What a device has for a program, as `jaxsub targets` lists it; of an absent GPU what JAX would take of it.

    Example:
        >>> from jaxsub.devices.targets import get_target
        >>> device_bytes(get_target("h100")) / 2**30
        60.0
    """
    return int(target.memory_bytes * (1 if target.is_present else JAX_SHARE))


@contextlib.contextmanager
def explaining(measured: Measurement, memory_bytes: int, stats: Any) -> Iterator[None]:
    """Run a planned step; where the device has no room for it, say what was planned, what it said, and what to try.

    Given nothing, `stats` returns what the device says of its memory, as `jax.Device.memory_stats` does, or `None`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error) or isinstance(error, OutOfMemoryError):
            raise
        raise out_of_memory(measured, memory_bytes, str(error), stats() or {}) from error


def out_of_memory(measured: Measurement, memory_bytes: int, said: str, stats: Mapping[str, int]) -> OutOfMemoryError:
    """The error of a step that was planned to fit and did not; `said` is the runtime's own message.

    Of `stats` are read `bytes_limit`, `bytes_in_use` and `largest_free_block_bytes`.
    """
    planned, found = measured.step_bytes, _ALLOCATION.search(said)
    refused = int(found[1]) if found else None
    others = max(0, stats.get("bytes_in_use", 0) - measured.argument_bytes)
    room = stats.get("bytes_limit", planned) - others
    free = stats.get("largest_free_block_bytes")
    why = ""
    if room < planned:
        why = f" Other arrays hold {format_bytes(others)} of the {format_bytes(stats.get('bytes_limit', 0))} it has."
    elif refused is not None and free is not None and free < refused:
        room = planned - (refused - free)
        why = f" Its free memory is in pieces: the largest is {format_bytes(free)}."
    else:
        room = int(LESS * planned)
    room = max(1, room)
    first = said.strip().splitlines()[0]
    return OutOfMemoryError(
        f"The step was planned to take `{format_bytes(planned)}` ({planned} bytes) of `{format_bytes(memory_bytes)}` "
        f"on `{measured.target}`, and the device had no room for it. Planned: {format_bytes(measured.argument_bytes)} "
        f"arguments, {format_bytes(measured.output_bytes)} outputs, {format_bytes(measured.temp_bytes)} temporary, "
        f"less {format_bytes(measured.alias_bytes)} in donated memory. The device said: {first}.{why} Nothing was "
        "retried. "
        f"Try jaxsub.jit(step, memory={room}), `{format_bytes(room)}`; or delete what else is live on the device.",
        planned_bytes=planned,
        memory_bytes=memory_bytes,
        refused_bytes=refused,
        try_bytes=room,
    )
