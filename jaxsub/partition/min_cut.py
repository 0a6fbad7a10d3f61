"""Find what a run of nodes may save: a minimum cut over its vector-Jacobian product, with recomputation priced.

`jax.vjp` of the run is traced once, with every value that it makes marked. In the forward jaxpr, the residuals are what
the backward pass reads. For a price λ of one FLOP in bytes we minimise

    sum of bytes of saved values  +  λ · sum of FLOPs of recomputed equations

subject to: residuals are available; a recomputed equation's inputs are available; a value is available if it is an
input, is saved, or its equation is recomputed. That is a minimum cut, found exactly by one maximum flow for each λ.
Only marked values can be saved: an unmarked value inside a derivative rule, as of tanh, has no name. Values that the
run returns cost no bytes to save, since they are live anyway.

Sources: He & Yu, *Transcending runtime-memory tradeoffs in checkpointing by being fusion aware* (MLSys 2023), for the
cut; the priced recomputation is the Lagrangian of Checkmate's problem (Jain et al., MLSys 2020) on one backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import flops_of
from jaxsub.jaxpr.inline import flatten_closed, live_eqns
from jaxsub.jaxpr.max_pool_vjp import without_scatter
from jaxsub.jaxpr.output_only_vjp import is_known_by_result
from jaxsub.jaxpr.output_only_vjp import tagged as tagged_result
from jaxsub.jaxpr.trace import Program, aval_bytes

MARK = "jaxsub_mark_"
_MARK = re.compile(MARK + r"(\d+)")
INFINITE = 2**30
LEAST_PRICE, MOST_PRICE = 1e-3, 1e5
MOST_VALUES = 10
"""Up to so many values, every subset is priced."""

FINER_GAIN = 0.005
"""Of those, a choice must recompute less than the one before it by at least this share of the run's FLOPs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One Pareto-optimal split of a run's residuals into saved and recomputed.

    Saved are offsets from the first value that the run makes; their bytes are without values that the run returns.
    """

    saved: tuple[int, ...]
    saved_bytes: int
    recompute_flops: float


@dataclass(frozen=True, slots=True, eq=False)
class RunFunction:
    """A run of nodes as a function of the values that it reads.

    Attributes:
        call: `call(*inputs) -> (differentiated outputs, other outputs)`.
        reads: The values it reads, in order.
        differentiated: Positions in `reads` that a gradient flows to.
        returns: The values of the differentiated outputs.
        joined: Positions in `reads` of weights that later equations read too: their gradients are added to a sum.
    """

    call: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
    reads: tuple[int, ...]
    differentiated: tuple[int, ...]
    returns: tuple[int, ...]
    joined: frozenset[int]


def run_function(
    program: Program, start: int, stop: int, *, tag: Callable[[Any, int], Any] | None = None, saved: Sequence[int] = ()
) -> RunFunction:
    """Make a function of a run of nodes; `tag` marks or names values that it makes, at offsets `saved` or all."""
    graph = program.graph
    made, last = graph.made_by(start, stop), graph.last_uses()
    reads = tuple(dict.fromkeys(v for n in graph.nodes[start:stop] for v in n.inputs if v < made.start))
    returns = tuple(v for v in made if last[v] >= stop)
    active = tuple(v for v in returns if graph.values[v].is_differentiated)
    rest = tuple(v for v in returns if not graph.values[v].is_differentiated)
    wanted = frozenset(saved) or frozenset(range(len(made)))
    ends_at = {graph.values[made.start + o].producer for o in wanted} if tag else set()
    alone = {i for i in ends_at if i is not None and is_known_by_result(program.eqns[i])}
    ends = [i + 1 for i in range(start, stop) if i in ends_at or i + 1 in alone or i == stop - 1]
    slices = [(*_slice(program, a, b), b - 1) for a, b in zip([start, *ends], ends, strict=False)]

    def call(*inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        env = dict(zip(reads, inputs, strict=True))
        for jaxpr, ins, outs, end in slices:
            if tag and end in alone:
                env[outs[0]] = tagged_result(program.eqns[end], env[ins[0]], tag, outs[0] - made.start)
                continue
            results = jax.core.eval_jaxpr(jaxpr, (), *[env[v] for v in ins])
            for v, result in zip(outs, results, strict=True):
                env[v] = tag(result, v - made.start) if tag and v - made.start in wanted else result
        return tuple(env[v] for v in active), tuple(env[v] for v in rest)

    positions = tuple(i for i, v in enumerate(reads) if graph.values[v].is_differentiated)
    joined = frozenset(i for i in positions if graph.is_joined(reads[i], stop))
    return RunFunction(call, reads, positions, active, joined)


def vjp_of(function: RunFunction, call: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    """Return the outputs and the pullback of a run with respect to its differentiated inputs."""

    def of_differentiated(*active: Any) -> Any:
        merged = list(inputs)
        for i, x in zip(function.differentiated, active, strict=True):
            merged[i] = x
        return call(*merged)

    outs, pullback, _ = jax.vjp(of_differentiated, *(inputs[i] for i in function.differentiated), has_aux=True)
    return outs, pullback


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TracedRun:
    """A run of nodes with its backward pass, flat.

    Attributes:
        function: The run.
        forward: Equations of its forward pass, marked, without dead code.
        inputs: Input variables of `forward`, one for each value in `function.reads`.
        residuals: Atoms of `forward` that the backward pass reads.
        backward: Equations of its backward pass.
        backward_inputs: Its input variables: the residuals, then the cotangents of the outputs.
        backward_outputs: Its outputs: cotangents of the differentiated inputs.
        free: Offsets of values that the run returns: they are live anyway.
        weights: For each value in `function.reads`, whether it is an input of the program.
        returned: Atoms of `forward` that the run returns.
    """

    function: RunFunction
    forward: tuple[Any, ...]
    inputs: tuple[Any, ...]
    residuals: tuple[Any, ...]
    backward: tuple[Any, ...]
    backward_inputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    free: frozenset[int]
    weights: tuple[bool, ...]
    returned: tuple[Any, ...]

    @property
    def cotangents(self) -> tuple[Any, ...]:
        """The part of `backward_inputs` that is cotangents."""
        return self.backward_inputs[len(self.residuals) :]

    @property
    def aliases(self) -> dict[Any, Any]:
        """For each residual among `backward_inputs`, its variable in `forward`."""
        return {v: r for v, r in zip(self.backward_inputs, self.residuals, strict=False) if compat.is_var(r)}


class NoBackwardPass(ValueError):
    """A run whose backward pass cannot be traced by itself."""


def trace_run(program: Program, start: int, stop: int, marked: Sequence[int] = ()) -> TracedRun:
    """Trace a run of nodes and its backward pass, with the values at some offsets marked, or all when empty.

    `NoBackwardPass` if a derivative rule refuses, in its own way, cotangents of all that the run returns.
    """
    function = run_function(program, start, stop, tag=mark, saved=marked)
    base, last = program.graph.made_by(start, stop), program.graph.last_uses()
    free = frozenset(v - base.start for v in base if last[v] >= stop)
    weights = tuple(program.graph.values[v].producer is None for v in function.reads)
    try:
        traced = trace_function(function, read_avals(program, function))
    except NotImplementedError:  # the program has no gradient, not this run alone
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise NoBackwardPass(f"the backward pass of equations {start} to {stop} cannot be traced: {error}") from error
    return replace(traced, free=free, weights=weights)


def trace_function(
    function: RunFunction, avals: Sequence[jax.ShapeDtypeStruct], opened: Sequence[str] = ()
) -> TracedRun:
    """Trace a function and its backward pass, with primitives in `opened`, such as those of regions, inlined."""
    trees: list[Any] = []

    def residuals_of(*inputs: Any) -> Any:
        outs, pullback = vjp_of(function, function.call, inputs)
        leaves, tree = jax.tree.flatten(pullback)
        trees.append((tree, [compat.shape_of(jax.typeof(o)) for o in outs], len(leaves)))
        return leaves, outs

    forward = jax.make_jaxpr(residuals_of)(*avals)
    eqns, inputs, results = flatten_closed(forward, opened)
    tree, cotangents, n_residuals = trees[0]
    residuals = results[:n_residuals]
    shapes = [compat.shape_of(a) for a in forward.out_avals[:n_residuals]]
    backward = jax.make_jaxpr(lambda leaves, cts: jax.tree.unflatten(tree, leaves)(cts))(shapes, tuple(cotangents))
    back_eqns, back_inputs, back_outputs = flatten_closed(backward, opened)
    return TracedRun(function, tuple(live_eqns(eqns, results)), tuple(inputs), tuple(residuals), tuple(back_eqns),
                     tuple(back_inputs), tuple(back_outputs), frozenset(), (False,) * len(inputs),
                     tuple(results[n_residuals:]))  # fmt: skip


def read_avals(program: Program, function: RunFunction) -> list[jax.ShapeDtypeStruct]:
    """List shapes and dtypes of the values that a run reads."""
    return [compat.shape_of(v.aval) for v in _variables(program, function.reads)]


def choices(traced: TracedRun, *, least_gain: float = 0.03) -> tuple[Choice, ...]:
    """Find the Pareto-optimal choices of saved values of a run, the one that saves nothing first.

    They are those of the lower convex hull that gain at least this share of its FLOPs over the one before them.
    """
    cut = _Cut.of(traced)
    total = float(cut.flops.sum())
    if not cut.names or total == 0:
        return (cut.choice(frozenset()),)
    return _thinned(cut, _hull(cut, max(least_gain * total, 1e-9) / 4), least_gain)


def choice_of(traced: TracedRun, saved: Iterable[int]) -> Choice:
    """Price the choice of saving these values, by their offsets, as far as the backward pass reads them."""
    return _Cut.of(traced).choice(frozenset(saved))


def finer(traced: TracedRun, found: Sequence[Choice]) -> tuple[Choice, ...]:
    """Find more choices of a small run: every subset of the values that `choices` save, if they are few."""
    cut = _Cut.of(traced)
    values = sorted({offset for choice in found for offset in choice.saved})
    if not 1 < len(values) <= MOST_VALUES:
        return tuple(found)
    every = (subset for n in range(1, len(values) + 1) for subset in combinations(values, n))
    return _thinned(cut, {*found, *(cut.choice(frozenset(subset)) for subset in every)}, FINER_GAIN)


def mark(x: Any, offset: int) -> Any:
    """Mark a value so that a jaxpr shows it: a barrier in a named scope, the same in every JAX version."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or jnp.issubdtype(x.dtype, np.complexfloating):
        return x  # JAX cannot save these by name
    with jax.named_scope(f"{MARK}{offset}"):
        return jax.lax.optimization_barrier(x)


def _variables(program: Program, values: Sequence[int]) -> list[Any]:
    graph, n = program.graph, len(program.invars)
    found = []
    for v in values:
        producer = graph.values[v].producer
        found.append(program.invars[v] if v < n or producer is None
                     else program.eqns[producer].outvars[v - graph.nodes[producer].outputs[0]])  # fmt: skip
    return found


def _slice(program: Program, start: int, stop: int) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    made = program.graph.made_by(start, stop)
    reads = tuple(dict.fromkeys(v for n in program.graph.nodes[start:stop] for v in n.inputs if v < made.start))
    outs = tuple(made)
    eqns = without_scatter(program.eqns[start:stop])
    jaxpr = compat.make_jaxpr_of(eqns, _variables(program, reads), _variables(program, outs), program.traced)
    return jaxpr, reads, outs


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The minimum-cut network: vertex 0 is the source, 1 the sink, then equations, then values."""

    heads: np.ndarray
    tails: np.ndarray
    capacities: np.ndarray  # bytes; infinite is -1
    flops: np.ndarray  # by equation
    names: dict[int, int]  # vertex of a marked value -> offset
    producers: dict[int, int]  # vertex of a value -> vertex of its equation
    bytes: dict[int, int]  # vertex of a value -> bytes
    made: list[int]  # by equation: the values it makes, a set of vertices as the bits of a number
    read: list[int]  # by equation: the values it reads, inputs of the run left out, likewise
    wanted: int  # the values the backward pass reads, likewise

    @classmethod
    def of(cls, traced: TracedRun) -> _Cut:
        eqns, given = traced.forward, set(traced.inputs)
        vertex: dict[Any, int] = {}
        edges: list[tuple[int, int, int]] = []
        names, producers, sizes = {}, {}, {}
        made: list[int] = []
        read: list[int] = []
        for e, eqn in enumerate(eqns):
            offset = mark_of(eqn)
            for var in eqn.outvars:
                v = vertex[var] = 2 + len(eqns) + len(vertex)
                producers[v], sizes[v] = 2 + e, aval_bytes(var.aval) if hasattr(var.aval, "dtype") else 0
                if offset is None:
                    edges.append((v, 2 + e, -1))
                else:
                    names[v] = offset
                    sizes[v] = 0 if offset in traced.free else sizes[v]
                    edges.append((v, 2 + e, max(sizes[v], 1)))
            made.append(_bits(vertex[v] for v in eqn.outvars))
            reads = [vertex[a] for a in eqn.invars if compat.is_var(a) and a not in given]
            read.append(_bits(reads))
            edges += [(2 + e, v, -1) for v in reads]
        wanted = [vertex[a] for a in set(filter(compat.is_var, traced.residuals)) if a not in given]
        edges += [(0, v, -1) for v in wanted]
        heads, tails, capacities = (
            (np.array(x, dtype=np.int64) for x in zip(*edges, strict=True)) if edges else (np.zeros(0, np.int64),) * 3
        )
        return cls(heads, tails, capacities, np.array([flops_of(e).weighted for e in eqns]), names, producers, sizes,
                   made, read, _bits(wanted))  # fmt: skip

    def solve(self, price: float) -> Choice:
        """Find the cheapest choice when a FLOP costs `price` bytes."""
        from scipy.sparse import csgraph, csr_array  # noqa: PLC0415 - as long to import as all of jaxsub

        n_eqns = len(self.flops)
        costs = np.concatenate([self.capacities.astype(float), price * self.flops])
        finite = np.where(costs < 0, 0.0, costs)
        scale = (INFINITE / 2) / max(finite.sum(), 1.0)
        scaled = np.where(costs < 0, INFINITE, np.ceil(finite * scale)).astype(np.int32)
        heads = np.concatenate([self.heads, 2 + np.arange(n_eqns)])
        tails = np.concatenate([self.tails, np.ones(n_eqns, np.int64)])
        size = 2 + n_eqns + len(self.producers)
        network = csr_array((scaled, (heads, tails)), shape=(size, size), dtype=np.int32)
        network.sum_duplicates()
        network.data = np.minimum(network.data, INFINITE)
        residual = network - csgraph.maximum_flow(network, 0, 1).flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        reached = set(csgraph.breadth_first_order(residual, 0, return_predecessors=False).tolist())
        recomputed = [e for e in range(n_eqns) if 2 + e in reached]
        saved = [v for v, e in self.producers.items() if v in reached and e not in reached]
        return Choice(
            tuple(sorted({self.names[v] for v in saved})),
            sum(self.bytes[v] for v in saved),
            float(self.flops[recomputed].sum()),
        )

    def choice(self, saved: frozenset[int]) -> Choice:
        """Price the choice of saving these values, as far as they are read."""
        bound = [v for v, offset in self.names.items() if offset in saved]
        wanted, unbound, recompute_flops = self.wanted, ~_bits(bound), 0.0
        for made, read, flops in zip(reversed(self.made), reversed(self.read), self.flops[::-1].tolist(), strict=True):
            if made & wanted & unbound:
                recompute_flops += flops
                wanted |= read
        found = [v for v in bound if wanted >> v & 1]
        names, n_bytes = sorted({self.names[v] for v in found}), sum(map(self.bytes.__getitem__, found))
        return Choice(tuple(names), n_bytes, recompute_flops)


def _bits(vertices: Iterable[int]) -> int:
    """Encode a set of vertices as the bits of an integer, which makes pricing thousands of choices fast."""
    return sum(1 << v for v in set(vertices))


def mark_of(eqn: Any) -> int | None:
    """Return the offset of the value that an equation marks, or `None`."""
    if eqn.primitive.name != "optimization_barrier":
        return None
    found = _MARK.search(str(eqn.source_info.name_stack))
    return int(found[1]) if found else None


def _thinned(cut: _Cut, found: Iterable[Choice], least_gain: float) -> tuple[Choice, ...]:
    """Keep the choices that gain enough over the ones before them, the one that saves nothing first."""
    kept, least_gain = [cut.choice(frozenset())], max(least_gain * float(cut.flops.sum()), 1e-9)
    for choice in sorted(found, key=lambda c: (c.saved_bytes, c.recompute_flops, c.saved)):
        if kept[-1].recompute_flops - choice.recompute_flops >= least_gain:
            if choice.saved_bytes == kept[-1].saved_bytes and len(kept) > 1:
                kept.pop()
            kept.append(choice)
    return tuple(kept)


def _hull(cut: _Cut, least_gain: float) -> set[Choice]:
    """Find the corners of the lower convex hull of bytes and FLOPs, each from the slope between two others.

    Corners closer than `least_gain` FLOPs are merged, so that a few minimum cuts are enough.
    """
    ratio = max(sum(cut.bytes.values()), 1) / float(cut.flops.sum())
    first, last = cut.solve(ratio * LEAST_PRICE), cut.solve(ratio * MOST_PRICE)
    found, lines = {first, last}, [(first, last)]
    while lines:
        low, high = lines.pop()
        gain, n_bytes = low.recompute_flops - high.recompute_flops, high.saved_bytes - low.saved_bytes
        if gain < least_gain or n_bytes <= 0:
            continue
        corner = cut.solve(n_bytes / gain)
        if corner not in found:  # otherwise no choice is below the line
            found.add(corner)
            lines += [(low, corner), (corner, high)]
    return found
