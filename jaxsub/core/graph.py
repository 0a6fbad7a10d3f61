"""A computation graph by index: what a program computes, without JAX.

A `Graph` is a flat program in topological order. Nodes are its equations, values the arrays that flow between
them; both refer to each other by position, so that a graph can be written by hand in a test, compared, hashed
and stored. Values are numbered inputs first, then the outputs of node 0, of node 1, and so on: the values that
a run of nodes makes are a contiguous range, so that equal runs can share prices and functions.

Costs are in FLOPs (`Node.flops`) and bytes (`Value.n_bytes`); other modules compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

SLICES = frozenset({"slice", "dynamic_slice"})
"""Primitives that take a part of an array."""


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the program.

    Attributes:
        index: Its position in `Graph.values`.
        shape: Its shape.
        dtype: Its dtype's name, such as `float32`.
        n_bytes: What one copy of it takes, in bytes.
        producer: The node that makes it; `None` for an input of the program.
        consumers: The nodes that read it, in order, each once.
        name: The user's name for it (an argument's path, a `checkpoint_name`), or `None`.
        is_differentiated: Whether a gradient flows through it: it depends on a differentiated input and the
            differentiated output depends on it.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int
    producer: int | None
    consumers: tuple[int, ...]
    name: str | None = None
    is_differentiated: bool = True

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{self.name or f'%{self.index}'} {self.dtype}[{dims}]"


@dataclass(frozen=True, slots=True)
class Node:
    """One equation of the program.

    Attributes:
        index: Its position in `Graph.nodes`.
        primitive: The name of its primitive, such as `dot_general`.
        inputs: Values it reads, in order, with repetition; literals are left out.
        outputs: Values it makes, in order.
        flops: Floating-point operations of one execution, loops counted with their lengths.
        is_costly: Whether it does real arithmetic (a matrix product, a convolution, a loop over such) rather than
            moving or mapping elements. The paper's §4.2 drops the results of nodes that are not.
        source: The user's source line, such as `model.py:48 (attention)`; empty when unknown.
        scope: Its named scopes, such as `block_3/attention`.
        bodies: Graphs of its inner programs (a loop's body, a conditional's branches).
        can_recompute: Whether it may be recomputed: false for effects that must happen once.
    """

    index: int
    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float = 0.0
    is_costly: bool = False
    source: str = ""
    scope: str = ""
    bodies: tuple[Graph, ...] = ()
    can_recompute: bool = True


@dataclass(frozen=True)
class Graph:
    """A flat program in topological order.

    Attributes:
        nodes: The equations, in execution order.
        values: The arrays: inputs first, then each node's outputs in order.
        inputs: Indices of the values that come in.
        outputs: Indices of the values that go out, in order, with repetition.
        fingerprint: A digest of the program's structure; two graphs with one fingerprint take the same plans.

    Raises:
        ValueError: If the indices do not hold together.
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        made = list(self.inputs)
        for position, node in enumerate(self.nodes):
            if node.index != position:
                raise ValueError(f"node {node.index} stands at position {position}")
            late = [v for v in node.inputs if v >= len(made)]
            if late:
                raise ValueError(f"node {position} ({node.primitive}) reads values {late} before they are made")
            made.extend(node.outputs)
        if made != list(range(len(self.values))):
            raise ValueError("values must be numbered inputs first, then each node's outputs in order")

    def made_by(self, start: int, stop: int) -> range:
        """Values made by nodes `start` to `stop - 1`: a contiguous range of indices."""
        return range(self._first_values[start], self._first_values[stop])

    def read_by(self, start: int, stop: int) -> tuple[int, ...]:
        """Values that nodes `start` to `stop - 1` read and do not make, in the order in which they read them."""
        first = self._first_values[start]
        return tuple(dict.fromkeys(v for node in self.nodes[start:stop] for v in node.inputs if v < first))

    def first_value(self, node: int) -> int:
        """The index of the first value that node `node` or a later one makes."""
        return self._first_values[node]

    def last_uses(self) -> tuple[int, ...]:
        """For each value the last node that reads it; `len(nodes)` for outputs; its producer if unread."""
        return self._last_uses

    def gradient_uses(self) -> tuple[int, ...]:
        """As `last_uses`, but only of nodes that a gradient depends on, so without debug callbacks."""
        return self._gradient_uses

    def weights(self) -> frozenset[int]:
        """Differentiated inputs, and values made of one of them without arithmetic (casts, reshapes, transposes)."""
        return self._weights

    def kernels(self) -> frozenset[int]:
        """The differentiated inputs that convolutions read as kernels, in their own type or another."""
        return self._kernels

    def is_joined(self, value: int, stop: int) -> bool:
        """Whether a differentiated input is read at node `stop` or later, so that its gradient is a sum."""
        found = self.values[value]
        is_read = found.producer is None and found.is_differentiated and bool(found.consumers)
        return is_read and found.consumers[-1] >= stop

    def is_slice_joined(self, value: int, start: int, stop: int) -> bool:
        """Whether a run reads one slice of a differentiated value that later nodes read too.

        What it adds to the gradient is as large as the slice: the compiler pads it as it adds it.
        """
        readers = self._readers_before(value, start, stop)
        return len(readers) == 1 and readers[0] in SLICES

    def is_look_up_joined(self, value: int, start: int, stop: int) -> bool:
        """Whether a run only looks rows of a made value up, and later nodes read that too.

        What it adds to the gradient is scattered into the sum of theirs.
        """
        return self.values[value].producer is not None and set(self._readers_before(value, start, stop)) == {"gather"}

    def _readers_before(self, value: int, start: int, stop: int) -> list[str]:
        """Primitives of the nodes of a run that read a differentiated value; none where no later node reads it too."""
        found = self.values[value]
        if not found.is_differentiated or not found.consumers or found.consumers[-1] < stop:
            return []
        return [self.nodes[i].primitive for i in found.consumers if start <= i < stop]

    def between(self, start: int, stop: int) -> Graph:
        """The nodes before `stop`, and which of them read what those from `start` on make; nothing goes out."""
        kept = self.values[: self.first_value(stop)]
        ends = (stop if (-1 if v.producer is None else v.producer) >= start else 0 for v in kept)
        values = tuple(replace(v, consumers=tuple(c for c in v.consumers if c < end))
                       for v, end in zip(kept, ends, strict=True))  # fmt: skip
        return replace(self, nodes=self.nodes[:stop], values=values, outputs=())

    def pinned(self) -> tuple[int, ...]:
        """The nodes that must run once: none of them may be in a region."""
        return self._pinned

    def output_set(self) -> frozenset[int]:
        """The values that go out."""
        return self._output_set

    # cached: these are needed for every run of nodes, which must not cost a walk through the program

    @cached_property
    def _first_values(self) -> tuple[int, ...]:
        firsts = [len(self.values)]
        for node in reversed(self.nodes):
            firsts.append(node.outputs[0] if node.outputs else firsts[-1])
        return tuple(reversed(firsts))

    @cached_property
    def _last_uses(self) -> tuple[int, ...]:
        last = [v.consumers[-1] if v.consumers else (v.producer if v.producer is not None else -1) for v in self.values]
        for v in self.outputs:
            last[v] = len(self.nodes)
        return tuple(last)

    @cached_property
    def _gradient_uses(self) -> tuple[int, ...]:
        wanted = {v.index for v in self.values if v.is_differentiated}
        last = [-1 if v.producer is None else v.producer for v in self.values]
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.outputs):
                wanted.update(node.inputs)
                for v in node.inputs:
                    last[v] = max(last[v], node.index)
        for v in self.outputs:
            last[v] = len(self.nodes)
        return tuple(last)

    @cached_property
    def _pinned(self) -> tuple[int, ...]:
        return tuple(node.index for node in self.nodes if not node.can_recompute)

    @cached_property
    def _output_set(self) -> frozenset[int]:
        return frozenset(self.outputs)

    @cached_property
    def _weights(self) -> frozenset[int]:
        found = {v for v in self.inputs if self.values[v].is_differentiated}
        for node in self.nodes:
            if node.flops == 0 and len(set(node.inputs)) == 1 and node.inputs[0] in found:
                found.update(node.outputs)
        return frozenset(found)

    @cached_property
    def _kernels(self) -> frozenset[int]:
        read = (self.values[n.inputs[-1]] for n in self.nodes if n.primitive == "conv_general_dilated" and n.inputs)
        casts = {n.index: n.inputs[0] for n in self.nodes if n.primitive == "convert_element_type" and n.inputs}
        given = (v if v.producer is None else self.values[casts.get(v.producer, v.index)] for v in read)
        return frozenset(v.index for v in given if v.producer is None and v.is_differentiated)


def graph_of(
    nodes: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    n_inputs: int,
    outputs: Sequence[int],
    *,
    input_bytes: Sequence[int] | None = None,
    flops: Sequence[float] | None = None,
    costly: Sequence[str] = ("matmul", "conv"),
    fingerprint: str = "by hand",
) -> Graph:
    """Build a graph by hand from nodes `(primitive, inputs, output_bytes)`: inputs are values `0 .. n_inputs - 1`.

    The outputs of nodes are numbered on from there. Every value is differentiated. A node's FLOPs are its output bytes,
    and an input has none, where left out; `costly` names primitives.

    Example:
        >>> g = graph_of([("matmul", [0], [8]), ("tanh", [1], [8])], 1, [2])
        >>> g.values[1].consumers
        (1,)
    """
    sizes = list(input_bytes or [0] * n_inputs)
    producers: list[int | None] = [None] * n_inputs
    made: list[tuple[int, ...]] = []
    for position, (_, _, out_bytes) in enumerate(nodes):
        made.append(tuple(range(len(sizes), len(sizes) + len(out_bytes))))
        sizes += out_bytes
        producers += [position] * len(out_bytes)
    consumers: list[list[int]] = [[] for _ in sizes]
    for position, (_, inputs, _) in enumerate(nodes):
        for v in dict.fromkeys(inputs):
            consumers[v].append(position)
    return Graph(
        nodes=tuple(
            Node(i, prim, tuple(ins), made[i], float(flops[i] if flops else sum(out)), prim in costly)
            for i, (prim, ins, out) in enumerate(nodes)
        ),
        values=tuple(
            Value(i, (size,), "uint8", size, producers[i], tuple(consumers[i])) for i, size in enumerate(sizes)
        ),
        inputs=tuple(range(n_inputs)),
        outputs=tuple(outputs),
        fingerprint=fingerprint,
    )
