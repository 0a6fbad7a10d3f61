"""Make a function of a flat program with regions and gradient barriers, for `emit`, loops and conditionals.

The flat equations are cut into runs; each is evaluated with `jax.core.eval_jaxpr`. A segment becomes one
`jax.checkpoint` region, nested as its segments are. Its saved values are named inside it, every later consumer reads
the named value, and the region's policy saves those names. Equal segments share one function object, so that JAX traces
and differentiates it once (`jaxsub.jaxpr.identity`).

**Gradient barriers.** A barrier ties the activations that cross there to the weights that the following run uses:
`jax.lax.optimization_barrier((activations, weights))`. Its transpose ties each weight's gradient, accumulated so far,
to the activations' cotangents, so the compiler cannot delay finishing it. In a nest a barrier holds only values that
the nest reads at or after it or returns; the nest also returns what barriers in it hold and is used after it, weights
and activations that came in, so that each contribution is added to the running sum at once.

The order of a barrier's operands matters. On a GPU the weights come before the activations, those read last first, so
that their gradients are made first: XLA's scheduler takes operands in order, and after activations' cotangents it would
make gradients without other readers last, with their operands live until then. On a CPU the activations come first, and
of the weights whose gradients are sums, those read last. There XLA assigns buffers in the order of operands: otherwise
a contribution to one sum would take the buffer of an earlier sum, which then needs a buffer of its own, two during the
addition.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax.core

from jaxsub.core.decisions import Segment, walk
from jaxsub.core.errors import PlannerError
from jaxsub.devices.targets import is_gpu
from jaxsub.emission.barriers import barrier, flat_kernels, flattened, shaped
from jaxsub.emission.offload import settled
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import primitives_in
from jaxsub.jaxpr.identity import identity
from jaxsub.jaxpr.output_only_vjp import is_known_by_result, tagged
from jaxsub.jaxpr.own_rules import rules_of, with_own_rules
from jaxsub.jaxpr.tangents import has_tangent, reaching
from jaxsub.jaxpr.trace import Program

Env = dict[int, Any]
Step = Callable[[Env], None]


def with_regions(
    program: Program,
    segments: Sequence[Segment],
    barriers: Sequence[int],
    scope: str = "jaxsub",
    *,
    holds_weights: bool = True,
) -> Callable[..., list[Any]]:
    """Make a function of a program's flat inputs, constants first, that returns its flat outputs.

    It has these outermost regions, in a scope of this name, and a gradient barrier in front of these nodes; barriers
    hold weights too unless told otherwise: what one returns is a value of its own, and in a step that is no region
    every step would save a copy of its weights. `PlannerError` if a region cannot save its saved values.
    """
    return _Emitter(program, tuple(sorted(set(barriers))), holds_weights).function(segments, scope)


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """A segment as a function, with the values that it reads and returns."""

    call: Callable[..., tuple[Any, ...]]
    reads: tuple[int, ...]
    returns: tuple[int, ...]
    stopped: frozenset[int]
    """Those of its reads whose tangents end in it."""
    flat: frozenset[int]
    """Values that enter it as flat arrays."""


@dataclass(slots=True, eq=False)
class _Emitter:
    program: Program
    barriers: tuple[int, ...]
    holds_weights: bool = True
    variables: list[Any] = field(init=False)
    last_use: tuple[int, ...] = field(init=False)
    gradient_use: tuple[int, ...] = field(init=False)
    weights: frozenset[int] = field(init=False)
    flat: frozenset[int] = field(init=False)
    shared: dict[Any, Callable[..., Any]] = field(init=False, default_factory=dict)
    eqns: Sequence[Any] = field(init=False)
    whiles: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.variables = [*self.program.invars, *(v for eqn in self.program.eqns for v in eqn.outvars)]
        self.last_use = self.program.graph.last_uses()
        self.gradient_use = self.program.graph.gradient_uses()
        self.weights = self.program.graph.weights()
        self.flat = flat_kernels(self.program)

    def function(self, segments: Sequence[Segment], scope: str) -> Callable[..., list[Any]]:
        graph, eqns = self.program.graph, self.program.eqns
        self.eqns = with_own_rules(eqns, rules_of(self.program)) if segments or self.barriers else eqns
        self.whiles = tuple(i for i, eqn in enumerate(eqns) if "while" in primitives_in(eqn)) if segments else ()
        steps, _ = self.steps(0, len(graph.nodes), segments, scope)
        index = {v: i for i, v in enumerate(self.variables)}
        outputs = [index[a] if compat.is_var(a) else a for a in self.program.outvars]

        def run(*inputs: Any) -> list[Any]:
            env: Env = dict(enumerate(inputs))
            for step in steps:
                step(env)
            return [env[o] if isinstance(o, int) else o.val for o in outputs]

        return run

    def steps(self, start: int, stop: int, segments: Sequence[Segment], scope: str) -> tuple[list[Step], set[int]]:
        """Make the steps of one scope, and find its inputs that its barriers hold."""
        steps: list[Step] = []
        fenced: set[int] = set()
        crossing = self._scope_inputs(start, stop) if start else {}
        entering = set(crossing) if self.holds_weights else set()
        for number, (piece, segment) in enumerate(self._pieces(start, stop, segments)):
            if piece.start != start and self._fences(piece.start - 1, piece.start + 1):
                crossing = {v: None for v in crossing if self._last_use_in(v, start, stop) >= piece.start}
                weights = self._weights_read(piece) if self.holds_weights else []
                fenced.update((*weights, *(v for v in crossing if v in entering)))
                weights = [w for w in (*weights, *self._keys_read(piece)) if w not in crossing]
                last_first = (*weights[::-1], *reversed(crossing))
                first_first = (*crossing, *self._sums_last_first(weights, piece.stop))
                steps.append(barrier(last_first if is_gpu(self.program.platform) else first_first, self.flat))
            if segment is None:
                steps.append(self._slice(piece))
            else:
                region, inner = self._region(segment)
                fenced |= inner
                steps.append(_call(region, f"{scope}/segment_{number}" if scope else ""))
            crossing.update((v, None) for v in self._made(piece) if self._is_activation(v))
        return steps, fenced

    def _pieces(self, start: int, stop: int, segments: Sequence[Segment]) -> Iterator[tuple[range, Segment | None]]:
        """Cut a scope at its segments and barriers."""
        at = start
        for segment in [*segments, None]:
            end = stop if segment is None else segment.start
            cuts = [at, *self._fences(at, end), end] if end > at else [at]
            yield from ((range(a, b), None) for a, b in pairwise(cuts))
            if segment is not None:
                yield range(segment.start, segment.stop), segment
                at = segment.stop

    def _slice(self, piece: range) -> Step:
        """Evaluate a run of equations, and return what is used after it, inside or outside its region."""
        reads, returns = self._reads(piece), self._returns(piece)
        jaxpr = compat.make_jaxpr_of(
            self.eqns[piece.start : piece.stop],
            [self.variables[v] for v in reads],
            [self.variables[v] for v in returns],
            self.program.traced,
        )

        def step(env: Env) -> None:
            env.update(zip(returns, jax.core.eval_jaxpr(jaxpr, (), *[env[v] for v in reads]), strict=True))

        return step

    def _region(self, segment: Segment) -> tuple[_Region, set[int]]:
        piece = range(segment.start, segment.stop)
        self._check(segment)
        if segment.children or self._fences(segment.start, segment.stop):
            steps, fenced = self.steps(segment.start, segment.stop, segment.children, scope="")
        else:
            steps, fenced = self._named_steps(piece, self._names(segment)), set()
        threaded = [w for w in sorted(fenced) if self.last_use[w] >= segment.stop and w not in self._made(piece)]
        reads = self._reads(piece)
        returns = tuple(dict.fromkeys((*self._returns(piece), *threaded)))
        key = self._key(segment, reads, returns)
        call = self.shared.get(key)
        if call is None:
            names = self._names(segment)
            moved = [names.pop(v) for v in segment.offloaded if v in names]
            whole = shaped({v: self.variables[v].aval.shape for v in reads if v in self.flat})
            call = self.shared[key] = _checkpointed([whole, *steps], reads, returns, tuple(names.values()), moved)
        return _Region(call, reads, returns, self._stopped(piece, reads, returns), self.flat), fenced

    def _stopped(self, piece: range, reads: Sequence[int], returns: Sequence[int]) -> frozenset[int]:
        """Find the inputs of a region with a `while` in it whose tangents end in it."""
        if bisect_left(self.whiles, piece.start) == bisect_left(self.whiles, piece.stop):
            return frozenset()
        found = reaching(self.eqns[piece.start : piece.stop], [self.variables[v] for v in returns])
        return frozenset(v for v in reads if has_tangent(self.variables[v]) and self.variables[v] not in found)

    def _check(self, segment: Segment) -> None:
        """Refuse saved values that would be ignored: a region saves its own values, and only with nothing inside it."""
        if not segment.saved:
            return
        piece = range(segment.start, segment.stop)
        made, moved = self._made(piece), set(segment.offloaded) & set(self._reads(piece))
        if outside := [v for v in segment.saved if v not in made and v not in moved]:
            raise PlannerError(
                f"Segment {segment.start}:{segment.stop} saves the values {outside}, which it does not make: it makes "
                f"{made.start} to {made.stop - 1}. Its inputs can be saved in host memory only."
            )
        inside = "segments" if segment.children else "barriers" if self._fences(segment.start, segment.stop) else None
        if inside:
            raise PlannerError(
                f"Segment {segment.start}:{segment.stop} saves values and has {inside} inside, so that they would be "
                f"recomputed all the same. Take the {inside} out, or end a segment behind each value to save."
            )

    def _names(self, segment: Segment) -> dict[int, str]:
        """Name the values that a region saves; equal regions have equal names."""
        first, reads = self.program.graph.first_value(segment.start), self._reads(range(segment.start, segment.stop))
        values, place = self.program.graph.values, {v: i for i, v in enumerate(reads)}
        saved = [v for v in segment.saved if self.last_use[v] > (values[v].producer or 0) and self._can_name(v)]
        return {v: f"jaxsub_{v - first}" if v >= first else f"jaxsub_entry_{place[v]}" for v in saved}

    def _named_steps(self, piece: range, names: dict[int, str]) -> list[Step]:
        """Evaluate a run of equations, naming the saved values where they are made, or at its entry."""
        values, at = self.program.graph.values, piece.start
        first = self._made(piece).start
        steps: list[Step] = [_name({v: name for v, name in names.items() if v < first})]
        producers = sorted({values[v].producer or 0 for v in names if v >= first})
        for producer in producers:
            is_alone = is_known_by_result(self.program.eqns[producer])
            run = range(at, producer + (not is_alone))
            steps += [self._slice(run)] if run else []
            if is_alone:
                steps.append(self._tagged(producer, names))
            else:
                steps.append(_name({v: name for v, name in names.items() if values[v].producer == producer}))
            at = producer + 1
        if at < piece.stop:
            steps.append(self._slice(range(at, piece.stop)))
        return steps

    def _tagged(self, node: int, names: dict[int, str]) -> Step:
        eqn, (v,) = self.program.eqns[node], self.program.graph.nodes[node].outputs
        source = self.program.graph.nodes[node].inputs[0]

        def step(env: Env) -> None:
            env[v] = tagged(eqn, env[source], lambda y, _: compat.checkpoint_name(y, names[v]), 0)

        return step

    def _key(self, segment: Segment, reads: Sequence[int], returns: Sequence[int]) -> Any:
        """Make the key of equal segments: equations, connections, returned and saved values, nesting, barriers."""
        base = self._made(range(segment.start, segment.stop)).start
        place = {v: i for i, v in enumerate(reads)}
        wiring = []
        for i in range(segment.start, segment.stop):
            node = self.program.graph.nodes[i]
            places = tuple(v - base if v >= base else ~place[v] for v in node.inputs)
            wiring.append((self.program.signatures[i], identity(self.program.eqns[i]), places))
        inner = list(walk((segment,)))
        shape = tuple(
            (
                *(s.start - segment.start, s.stop - segment.start),
                *(tuple(v - base if v >= base else ~place[v] for v in values) for values in (s.saved, s.offloaded)),
            )
            for s in inner
        )
        fences = tuple(b - segment.start for b in self._fences(segment.start, segment.stop))
        kinds = (
            tuple((v in self.weights, self.program.graph.values[v].is_differentiated) for v in reads) if fences else ()
        )
        known = (*reads, *self._made(range(segment.start, segment.stop))) if fences else ()
        later = tuple(
            (self.last_use[v] >= segment.stop, max(-1, min(self.gradient_use[v], segment.stop) - segment.start))
            for v in known
        )
        results = tuple(v - base if v >= base else ~place[v] for v in returns)
        flat = tuple(v in self.flat for v in reads)
        return tuple(wiring), shape, fences, kinds, later, results, flat

    def _fences(self, start: int, stop: int) -> tuple[int, ...]:
        """The barriers strictly between two nodes."""
        return self.barriers[bisect_right(self.barriers, start) : bisect_left(self.barriers, stop)]

    def _made(self, piece: range) -> range:
        return self.program.graph.made_by(piece.start, piece.stop)

    def _reads(self, piece: range) -> tuple[int, ...]:
        return self.program.graph.read_by(piece.start, piece.stop)

    def _returns(self, piece: range) -> tuple[int, ...]:
        return tuple(v for v in self._made(piece) if self.last_use[v] >= piece.stop)

    def _is_activation(self, v: int) -> bool:
        is_array = not hasattr(self.variables[v].aval, "inner_aval")  # not a reference
        return is_array and self.program.graph.values[v].is_differentiated and v not in self.weights

    def _can_name(self, v: int) -> bool:
        """Tell whether a value can be saved by name: not complex numbers, which JAX cannot round, and not keys."""
        dtype = self.variables[v].aval.dtype
        return not any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.complexfloating, jax.dtypes.extended))

    def _last_use_in(self, v: int, start: int, stop: int) -> int:
        """Find a value's last use that counts in a scope: for its inputs the last in it, for all the gradient's.

        Debug callbacks do not count: behind a barrier the value would get a cotangent of zeros for them.
        """
        value = self.program.graph.values[v]
        if start and (value.producer is None or value.producer < start):
            before = bisect_left(value.consumers, stop)
            return min(value.consumers[before - 1], self.gradient_use[v]) if before else -1
        return self.gradient_use[v]

    def _scope_inputs(self, start: int, stop: int) -> dict[int, None]:
        return {v: None for v in self._reads(range(start, stop)) if self._is_activation(v)}

    def _sums_last_first(self, weights: Sequence[int], stop: int) -> list[int]:
        """Reverse the order of the weights that are read from `stop` on too, whose gradients are sums."""
        is_summed = [self.program.graph.is_joined(w, stop) for w in weights]
        last_first = reversed([w for w, summed in zip(weights, is_summed, strict=True) if summed])
        return [next(last_first) if summed else w for w, summed in zip(weights, is_summed, strict=True)]

    def _keys_read(self, piece: range) -> list[int]:
        """What the keys are made of that a run draws random bits with: a CPU would draw all runs' at the start."""
        keys: set[int] = set()
        for node in reversed(self.program.graph.nodes[piece.start : piece.stop]):
            if node.primitive.startswith(("random_", "threefry")) or not keys.isdisjoint(node.outputs):
                keys.update(node.inputs)
        return [v for v in self._reads(piece) if v in keys]

    def _weights_read(self, piece: range) -> list[int]:
        return [v for v in self._reads(piece) if v in self.weights and self.program.graph.values[v].is_differentiated]


def _name(names: dict[int, str]) -> Step:
    def step(env: Env) -> None:
        env.update((v, compat.checkpoint_name(env[v], name)) for v, name in names.items())

    return step


def _call(region: _Region, scope: str) -> Step:
    def step(env: Env) -> None:
        inputs = [flattened(env[v]) if v in region.flat else env[v] for v in region.reads]
        inputs = [jax.lax.stop_gradient(x) if v in region.stopped else x
                  for v, x in zip(region.reads, inputs, strict=True)]  # fmt: skip
        if scope:
            with jax.named_scope(scope):
                outputs = region.call(*inputs)
        else:
            outputs = region.call(*inputs)
        env.update(zip(region.returns, outputs, strict=True))

    return step


def _checkpointed(
    steps: Sequence[Step], reads: Sequence[int], returns: Sequence[int], names: Sequence[str], moved: Sequence[str]
) -> Callable[..., Any]:
    def region(*inputs: Any) -> tuple[Any, ...]:
        env: Env = dict(zip(reads, inputs, strict=True))
        for step in steps:
            step(env)
        return tuple(env[v] for v in returns)

    if not moved:
        policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
        return compat.checkpoint(region, policy=policy)
    moving = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(names), names_which_can_be_offloaded=list(moved),
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    return settled(compat.checkpoint(region, policy=moving))
