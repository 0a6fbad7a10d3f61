"""Read XLA's schedule: live bytes at each instruction of the gradient, beside our prediction.

XLA reports the order of instructions (the compiled module, a serialised `HloModuleProto`) and its buffer assignment (a
serialised `BufferAssignmentProto`). A buffer is live from the instruction that defines it to the last one that reads it
or a view of it; buffers of a loop's body are live while the loop runs. Buffers that share memory count once. Both
messages are read by their field numbers, which XLA keeps stable; there are none for an absent device.

Field numbers: `xla/service/hlo.proto` and `xla/xla_data.proto` of OpenXLA.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsub.core.budget import Budget
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.devices.compile import compile_for
from jaxsub.devices.targets import get_target
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.arguments import AnyArgnums, trace_call
from jaxsub.search.belonging import require_belonging
from jaxsub.search.verify import gradient

VIEWS = frozenset(("bitcast", "get-tuple-element", "tuple", "opt-barrier", "while", "conditional", "call"))
"""Opcodes whose result is, or holds, what goes in: reading it is reading that."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One temporary buffer of a compiled program.

    Attributes:
        label: What makes it: JAX's name for the operation and the source line, as the compiler knows them.
        n_bytes: Its bytes.
        offset: Where it lies, in bytes from the start of all temporary memory.
        start: The instruction that defines it, by its place in the schedule.
        stop: The instruction after the last that reads it.
    """

    label: str
    n_bytes: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class XlaTimeline:
    """Temporary memory over the instructions of a compiled program, in the compiler's order.

    Attributes:
        instructions: Names of the instructions, in order.
        buffers: The temporary buffers.
        temp_bytes: What is allocated for all of them.
    """

    instructions: tuple[str, ...]
    buffers: tuple[Scheduled, ...]
    temp_bytes: int

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """For each instruction the bytes of temporary memory that hold something that is still read."""
        places: list[list[tuple[int, int]]] = [[] for _ in self.instructions]
        for b in self.buffers:
            for i in range(b.start, b.stop):
                places[i].append((b.offset, b.offset + b.n_bytes))
        return tuple(map(_covered, places))

    def alive(self, step: int) -> tuple[Scheduled, ...]:
        """The buffers that live at an instruction, largest first."""
        return tuple(sorted((b for b in self.buffers if b.start <= step < b.stop), key=lambda b: -b.n_bytes))

    def plot(self, ax: Any = None) -> Any:
        """Draw live bytes over instructions; needs matplotlib.

        Args:
            ax: The matplotlib axes to draw on; `None` for a new figure's.

        Returns:
            The axes.
        """
        from jaxsub.show.plot import plot_schedule  # noqa: PLC0415 - shown only when asked

        return plot_schedule(self, ax)


def _covered(places: Sequence[tuple[int, int]]) -> int:
    """Bytes that intervals cover together."""
    total, end = 0, 0
    for start, stop in sorted(places):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def xla_timeline(fun: Callable[..., Any], *args: Any, plan: Plan | None = None, argnums: AnyArgnums = None,
                 **kwargs: Any) -> XlaTimeline:  # fmt: skip
    """Compile the gradient of a function for the device in use and read when the compiler keeps what.

    Args:
        fun: The function, plain or `sublinear`.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s.
        plan: A plan to follow; `None` for the function as it is.
        argnums: The arguments the gradient is taken of, as for `jaxsub.sublinear`.
        **kwargs: Its keyword arguments.

    Raises:
        UnsupportedError: If the compiler does not say.
        PlanMismatchError: If the plan was made for another function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> found = xla_timeline(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w).sum(), jnp.ones((8, 8)), jnp.ones((64, 8)))
        >>> 0 < max(found.live_bytes) <= found.temp_bytes
        True
    """
    program = trace_call(fun, args, kwargs, argnums)
    empty = Plan(program.fingerprint, Budget(), len(program.eqns))
    followed = require_belonging(program, plan) if plan is not None else empty
    return read_timeline(compile_for(*gradient(program, emit(program, followed)), get_target(None)))


def read_timeline(compiled: Any) -> XlaTimeline:
    """Read the timeline of a compiled program.

    Raises:
        UnsupportedError: If the compiler does not say in which order it runs and where buffers lie.
    """
    memory = compiled.memory_analysis()
    assignment = getattr(memory, "serialized_buffer_assignment_proto", b"")
    runtime = compiled.runtime_executable() if hasattr(compiled, "runtime_executable") else None
    if not assignment or runtime is None:
        raise UnsupportedError("The compiler does not say when it keeps what; jaxsub.plan(...).timeline is predicted.")
    module = _Module(runtime.hlo_modules()[0].as_serialized_hlo_module_proto())
    if not module.order:
        raise UnsupportedError("The compiled program has no schedule; jaxsub.plan(...).timeline is predicted instead.")
    buffers = tuple(_buffers(assignment, module))
    return XlaTimeline(tuple(module.names[i] for i in module.order), buffers, int(memory.temp_size_in_bytes))


def _buffers(assignment: bytes, module: _Module) -> Iterator[Scheduled]:
    defined = {}
    for field, buffer in _fields(assignment):
        if field == 1:
            entries = dict(_fields(buffer))
            where = entries.get(3, b"")
            defined[entries.get(1, 0)] = dict(_fields(where)).get(4, 0), tuple(_ids(where, 3))
    base = 0
    for field, allocation in _fields(assignment):
        entries = dict(_fields(allocation)) if field == 3 else {}
        if field != 3 or any(entries.get(flag) for flag in (3, 5, 7, 12)):
            continue  # thread-local, an argument, an output, a constant: not temporary
        for _, assigned in ((f, a) for f, a in _fields(allocation) if f == 9):
            place = dict(_fields(assigned))
            instruction, index = defined.get(place.get(1, 0), (0, ()))
            life = module.life(instruction, index)
            if life is not None and place.get(3, 0):
                label = module.labels.get(instruction, "")
                yield Scheduled(label, place[3], base + place.get(2, 0), *life)
        base += entries.get(2, 0)


class _Module:
    """Instructions of a compiled module: their order, names, sources, and who reads whom."""

    def __init__(self, module: bytes):
        entries = list(_fields(module))
        self.names: dict[int, str] = {}
        self.labels: dict[int, str] = {}
        self.opcodes: dict[int, str] = {}
        self.readers: dict[int, list[tuple[int, int]]] = {}
        self.elements: dict[int, int] = {}
        self.callers: dict[int, list[int]] = {}
        self.homes: dict[int, int] = {}
        for computation in (value for field, value in entries if field == 3):
            self._read(computation)
        entry = dict(entries).get(6, 0)
        sequences = [dict(_fields(s)) for f, schedule in entries if f == 7 for g, s in _fields(schedule) if g == 1]
        self.order = next((_ids(s.get(2, b""), 1) for s in sequences if s.get(1) == entry), [])
        self.place = {instruction: i for i, instruction in enumerate(self.order)}

    def _read(self, computation: bytes) -> None:
        entries = list(_fields(computation))
        home = dict(entries).get(5, 0)
        for instruction in (value for field, value in entries if field == 2):
            parts = dict(_fields(instruction))
            me = parts.get(35, 0)
            self.names[me], self.opcodes[me] = parts[1].decode(), parts[2].decode()
            self.labels[me] = _label(parts.get(7, b""), self.names[me])
            self.homes[me] = home
            self.elements[me] = parts.get(13, 0)
            for position, operand in enumerate(_ids(instruction, 36)):
                self.readers.setdefault(operand, []).append((me, position))
            for called in _ids(instruction, 38):
                self.callers.setdefault(called, []).append(me)

    def life(self, instruction: int, index: tuple[int, ...]) -> tuple[int, int] | None:
        """The first and the place after the last instruction of the entry that a value, or its element, lives at."""
        if instruction not in self.place:
            homes = self.callers.get(self.homes.get(instruction, -1), [])
            lives = [life for caller in homes if (life := self.life_of_call(caller)) is not None]
            return (min(a for a, _ in lives), max(b for _, b in lives)) if lives else None
        last = start = self.place[instruction]
        todo: list[tuple[int, tuple[int, ...] | None]] = [(instruction, index)]
        seen = set(todo)
        while todo:
            value, at = todo.pop()
            for reader, position in self.readers.get(value, []):
                opcode, view = self.opcodes[reader], at
                if opcode == "get-tuple-element":
                    if at is not None and at[:1] != (self.elements[reader],):
                        continue
                    view = None if at is None else at[1:]
                elif opcode == "tuple":
                    view = None if at is None else (position, *at)
                elif opcode in ("conditional", "call"):
                    view = None  # it may return what it is given, in any place
                last = max(last, self.place.get(reader, start))
                if opcode in VIEWS and (reader, view) not in seen:
                    seen.add((reader, view))
                    todo.append((reader, view))
        return start, last + 1

    def life_of_call(self, caller: int) -> tuple[int, int] | None:
        """When an instruction of the entry, or one that is called from it, runs."""
        if caller in self.place:
            return self.place[caller], self.place[caller] + 1
        lives = [life for c in self.callers.get(self.homes.get(caller, -1), []) if (life := self.life_of_call(c))]
        return (min(a for a, _ in lives), max(b for _, b in lives)) if lives else None


def _label(metadata: bytes, name: str) -> str:
    parts = dict(_fields(metadata))
    operation = parts[2].decode() if 2 in parts else name
    source = f" {os.path.basename(parts[3].decode())}:{parts.get(4, 0)}" if 3 in parts else ""
    return operation + source


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of a protocol buffer: integers, or bytes; fixed-width numbers are skipped."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
        elif kind == 2:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]


def _ids(message: bytes, field: int) -> list[int]:
    """A repeated integer, packed or not."""
    found: list[int] = []
    for number, value in _fields(message):
        if number == field and isinstance(value, int):
            found.append(value)
        elif number == field:
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
