"""The gradient of a program as an explicit graph, in execution order: the paper's Algorithm 2.

A `Graph` and a mirror count for each node go in; a `Schedule` comes out: forward nodes, mirrored copies just before
they are first needed, gradient nodes, and the arrays that flow between them. `allocation` assigns memory to these.

The values that a gradient node reads of its forward node must be live until then, so `LEAST_NEEDS` declares as few as
possible (§3); `ELEMENTWISE` names the operations that may overwrite an input.

The gradient is symbolic: it says which values are read and made, not how. Cotangents are summed in place by the
gradient nodes that contribute, not by operations of their own.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §3, §4.1 and Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxsub.core.graph import Graph, Node

Role = Literal["forward", "mirror", "gradient"]
Needs = Literal["both", "output", "inputs", "undifferentiated", "neither"]

_NEEDS: dict[Needs, str] = {
    "output": "exp exp2 tanh logistic sqrt rsqrt cbrt tan erf_inv",
    "inputs": "dot_general matmul conv conv_general_dilated mul div sin cos log log1p log2 expm1 erf erfc abs square"
    " integer_pow asin acos atan atan2 sinh cosh asinh acosh atanh lgamma digamma max min clamp rem reduce_prod",
    "undifferentiated": "select_n gather dynamic_slice dynamic_update_slice scatter-add",
    "neither": "add sub neg add_any reshape transpose reduce_sum broadcast broadcast_in_dim convert_element_type"
    " squeeze expand_dims concatenate split pad slice rev copy copy_p cumsum real imag complex conj reduce_precision"
    " name optimization_barrier psum all_gather ppermute",
}
LEAST_NEEDS: Mapping[str, Needs] = {name: needs for needs, names in _NEEDS.items() for name in names.split()}
"""The values that the gradient of a primitive must read of its node beside the cotangents (§3)."""

_ELEMENTWISE = (
    "exp exp2 tanh logistic sqrt rsqrt cbrt tan sin cos log log1p log2 expm1 erf erfc erf_inv abs square integer_pow"
    " pow asin acos atan atan2 sinh cosh asinh acosh atanh lgamma digamma max min clamp rem mul div add sub neg add_any"
    " select_n reshape squeeze expand_dims copy copy_p convert_element_type reduce_precision name sign floor ceil round"
    " not and or xor eq ne lt le gt ge is_finite nextafter conj"
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Primitives that may overwrite an input: element i of their output depends on no other element of their inputs."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array of a schedule: a value, a mirrored copy of one, or a cotangent.

    Attributes:
        index: Its position in `Schedule.buffers`.
        value: The value of the graph that it is, or is the cotangent of.
        copy: 0 for the value itself, k for its k-th mirrored copy; of a cotangent, how many contributions it sums
            beyond the first.
        is_cotangent: Whether it is a cotangent.
        n_bytes: Its bytes.
    """

    index: int
    value: int
    copy: int
    is_cotangent: bool
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One execution of an operation.

    Attributes:
        role: `forward`, `mirror` for a recomputed node, or `gradient`.
        node: The node of the graph.
        copy: 0, or k for the k-th mirrored copy.
        reads: The buffers it reads, each once.
        writes: The buffers it makes.
        in_place: Pairs (read, written) that may share memory, if nothing reads the first afterwards.
    """

    role: Role
    node: int
    copy: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    in_place: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations in execution order, and the arrays that flow between them.

    Attributes:
        graph: The program it executes.
        steps: The operations, in the logical execution order (V' of Algorithm 2).
        buffers: The arrays: arguments first, then those that each step makes, in order.
        n_given: How many buffers are arguments: the program's inputs and the cotangents of its outputs.
        results: The buffers that are live at the end: the program's outputs and its inputs' cotangents.
    """

    graph: Graph
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    n_given: int
    results: tuple[int, ...]

    def label(self, buffer: int) -> str:
        """Describe a buffer, such as `cotangent of %3 float32[8]` or `h float32[8], recomputed`."""
        b = self.buffers[buffer]
        if b.is_cotangent:
            return f"cotangent of {self.graph.values[b.value]}"
        return str(self.graph.values[b.value]) + (", recomputed" if b.copy else "")


def forward_graph(graph: Graph) -> Schedule:
    """Schedule a program alone, as in prediction, where each value lives until its last use.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> [step.reads for step in forward_graph(graph_of([("tanh", [v], [8]) for v in range(3)], 1, [3])).steps]
        [(0,), (1,), (2,)]
    """
    work = _Construction(graph, {})
    work.run_forward()
    return work.schedule()


def gradient_graph(
    graph: Graph, mirror_counts: Sequence[int] = (), *, needs: Mapping[str, Needs] | None = None
) -> Schedule:
    """Construct the memory-optimised gradient graph of a program: the paper's Algorithm 2.

    A node with m(v) = 0 saves its outputs. The others are recomputed up to m(v) times, the k-th copy from the k-th
    copies of its inputs (or the last that exist), and each copy only where a gradient needs it. A gradient node reads
    the cotangents of its outputs and what its primitive needs of the last copies. The cotangent of a value that is used
    several times is summed one contribution after another.

    Args:
        graph: The program. Its differentiated outputs are given cotangents.
        mirror_counts: m(v) for each node, at least 0; all 0 when left out. A plan's are `Plan.mirror_counts_in(graph)`.
        needs: The values that the gradient of each primitive reads of its node, such as `LEAST_NEEDS`; inputs and
            outputs for primitives that it does not name, which is the default for all.

    Returns:
        The schedule, in the logical execution order.

    Raises:
        ValueError: If the counts are not one a node and at least 0, or repeat a node that must run once.

    Example:
        >>> from jaxsub.core.graph import graph_of
        >>> graph = graph_of([("sin", [v], [8]) for v in range(3)], 1, [3])
        >>> [(step.role, step.node) for step in gradient_graph(graph, [1, 1, 0], needs=LEAST_NEEDS).steps][3:]
        [('mirror', 0), ('mirror', 1), ('gradient', 2), ('gradient', 1), ('gradient', 0)]

    References:
        Chen et al., 2016, Algorithm 2.
    """
    counts = _checked_counts(graph, mirror_counts)
    work = _Construction(graph, needs or {})
    work.run_forward()
    for k in range(1, max(counts, default=0) + 1):
        for node in graph.nodes:
            if k <= counts[node.index]:
                work.execute(node, k)
    work.run_backward()
    return work.schedule()


def _checked_counts(graph: Graph, counts: Sequence[int]) -> Sequence[int]:
    if not len(counts):
        return [0] * len(graph.nodes)
    if len(counts) != len(graph.nodes):
        raise ValueError(f"expected a mirror count for each of {len(graph.nodes)} nodes, got {len(counts)}")
    faults = [f"m({v}) = {m!r} is below 0" for v, m in enumerate(counts) if m < 0]
    faults += [
        f"m({n.index}) = {counts[n.index]} repeats `{n.primitive}`, which must happen once {n.source}".rstrip()
        for n in graph.nodes
        if counts[n.index] > 0 and not n.can_recompute
    ]
    if faults:
        raise ValueError("; ".join(faults))
    return counts


class _Construction:
    """Run Algorithm 2; numbers are provisional until `schedule`, which drops unused copies."""

    def __init__(self, graph: Graph, needs: Mapping[str, Needs]) -> None:
        self.graph = graph
        self.needs = needs
        self.buffers: list[Buffer] = []
        self.created: list[Step] = []
        self.creator: dict[int, int] = {}  # buffer -> the step in `created` that makes it
        self.order: list[int] = []  # V', as positions in `created`
        self.is_ordered: list[bool] = []
        self.latest = {v: self._buffer(v) for v in graph.inputs}  # a[v], as a buffer for each value
        self.cotangent: dict[int, int] = {}  # g[v], for each value the sum so far
        self.given = list(self.latest.values())
        self.results: list[int] = []

    def run_forward(self) -> None:
        """V' <- topological-order(V)."""
        for node in self.graph.nodes:
            self._append(self.execute(node, 0))
        self.results = [self.latest[v] for v in dict.fromkeys(self.graph.outputs)]

    def run_backward(self) -> None:
        """Append each gradient node, with its ancestors that are still missing, in reverse topological order."""
        for v in dict.fromkeys(self.graph.outputs):
            if self.graph.values[v].is_differentiated:
                self.cotangent[v] = self._buffer(v, is_cotangent=True)
                self.given.append(self.cotangent[v])
        for node in reversed(self.graph.nodes):
            self._differentiate(node)
        self.results += [self.cotangent[v] for v in self.graph.inputs if v in self.cotangent]

    def execute(self, node: Node, copy: int) -> int:
        """Create the `copy`-th execution of a node on the latest copies of its inputs; a[v] <- the new node."""
        reads = tuple(dict.fromkeys(self.latest[v] for v in node.inputs))
        writes = tuple(self._buffer(v, copy) for v in node.outputs)
        self.latest.update(zip(node.outputs, writes, strict=True))
        pairs = self._pairs(node, reads, writes)
        return self._create(Step("mirror" if copy else "forward", node.index, copy, reads, writes, pairs))

    def _differentiate(self, node: Node) -> None:
        """g[v] <- gradient(the cotangents of its outputs, a[v], the a of what it reads)."""
        incoming = [self.cotangent[v] for v in node.outputs if v in self.cotangent]
        wanted = list(dict.fromkeys(v for v in node.inputs if self.graph.values[v].is_differentiated))
        if not incoming or not wanted:
            return
        sums = [self.cotangent.get(v) for v in wanted]
        made = [self._buffer(v, 0 if s is None else self.buffers[s].copy + 1, is_cotangent=True)
                for v, s in zip(wanted, sums, strict=True)]  # fmt: skip
        added = tuple((s, b) for s, b in zip(sums, made, strict=True) if s is not None)
        others = tuple(dict.fromkeys((*(self.latest[v] for v in self._needed(node)), *incoming)))
        reads = (*(s for s, _ in added), *others)
        pairs = (*added, *self._pairs(node, others, made))
        self.cotangent.update(zip(wanted, made, strict=True))
        self._append(self._create(Step("gradient", node.index, 0, reads, tuple(made), pairs)))

    def _needed(self, node: Node) -> Iterator[int]:
        """Yield the values of a node that its gradient reads."""
        needs = self.needs.get(node.primitive, "both")
        if needs in ("both", "inputs"):
            yield from node.inputs
        if needs == "undifferentiated":
            yield from (v for v in node.inputs if not self.graph.values[v].is_differentiated)
        if needs in ("both", "output"):
            yield from node.outputs

    def _pairs(self, node: Node, reads: Iterable[int], writes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        if node.primitive not in ELEMENTWISE:
            return ()
        return tuple((r, w) for r in reads for w in writes if self.buffers[r].n_bytes == self.buffers[w].n_bytes)

    def _buffer(self, value: int, copy: int = 0, is_cotangent: bool = False) -> int:
        size = self.graph.values[value].n_bytes
        self.buffers.append(Buffer(len(self.buffers), value, copy, is_cotangent, size))
        return len(self.buffers) - 1

    def _create(self, step: Step) -> int:
        self.creator.update((buffer, len(self.created)) for buffer in step.writes)
        self.created.append(step)
        self.is_ordered.append(False)
        return len(self.created) - 1

    def _append(self, position: int) -> None:
        """V' <- append(V', topological-order(ancestors) - V'); the order of creation is topological."""
        self.is_ordered[position] = True
        missing, found = [position], [position]
        while missing:
            makers = {self.creator[r] for r in self.created[missing.pop()].reads if r in self.creator}
            new = [m for m in makers if not self.is_ordered[m]]
            for m in new:
                self.is_ordered[m] = True
            missing += new
            found += new
        self.order += sorted(found)

    def schedule(self) -> Schedule:
        """Number the buffers that are used: arguments first, then those that each step makes."""
        used = [*self.given, *(w for p in self.order for w in self.created[p].writes)]
        number = {buffer: i for i, buffer in enumerate(used)}

        def final(step: Step) -> Step:
            reads, writes = (tuple(number[b] for b in bs) for bs in (step.reads, step.writes))
            pairs = tuple((number[r], number[w]) for r, w in step.in_place)
            return replace(step, reads=reads, writes=writes, in_place=pairs)

        return Schedule(
            graph=self.graph,
            steps=tuple(final(self.created[p]) for p in self.order),
            buffers=tuple(replace(self.buffers[b], index=i) for i, b in enumerate(used)),
            n_given=len(self.given),
            results=tuple(dict.fromkeys(number[b] for b in self.results)),
        )
