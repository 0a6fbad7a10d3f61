"""What the compiler allocates for one run of nodes: small programs that make it say so.

Each probe is a function and its arguments, compiled but never run. What must count as temporary is made inside the
program, each buffer from a seed of its own (equal-looking stand-ins would be merged into one); what must not count, the
run's inputs, comes as arguments. Gradients of weights go out as outputs; cotangents of activations are held together
with them behind one barrier, then summed, so that no output buffer can hide them. The gradient of a weight that is
read later too is added to a sum, which comes as an argument whose memory an output takes over; behind a barrier, as in
plans: a GPU's products add to an argument at once, to anything else from memory of their own.

The memory figures need no loop, except one: what the compiler keeps of an unwrapped run between its passes shows only
while something else holds the peak. There a loop over a ballast of known size stands between the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxsub.core.graph import Value
from jaxsub.costs.hoisted_constants import TOGETHER
from jaxsub.costs.shared_weights import turning_function
from jaxsub.devices.targets import is_gpu
from jaxsub.emission.barriers import barrier, flat_kernels
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.min_cut import RunFunction, read_avals, run_function, vjp_of

BALLAST_BYTES = 2**31
"""More than any one stage is likely to allocate for itself; nothing of it is ever allocated."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A function to compile, its arguments, what to take off the bytes it needs, and which arguments it may reuse."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    ballast_bytes: int = 0
    donated: tuple[int, ...] = ()


def probe(what: str, program: Program, start: int, stop: int, saved: Sequence[int], *, doubles: bool) -> Probe:
    """The probe of a name.

    Args:
        what: `forward`, `last`, `turn` (`last` of several runs at once), `hoisted`, `hoisted_together`, `keep`,
            `held` (`keep` with inputs made inside), `unwrapped` or `backward`.
        program: The program.
        start: The run's first node.
        stop: The node after its last.
        saved: Offsets of the values it saves; for `last` and `held` the positions of inputs that are made inside; for
            `turn` where each run begins and ends.
        doubles: Whether the backend's loops keep two copies of what they carry.
    """
    if what == "forward":
        return forward_probe(program, start, stop)
    if what == "last":
        return last_probe(program, run_function(program, start, stop), saved)
    if what == "turn":
        return last_probe(program, turning_function(program, start, saved))
    if what.startswith("hoisted"):
        return hoist_probe(program, start, stop, doubles=doubles, runs=2 if what == TOGETHER else 1)
    if what == "unwrapped":
        return unwrapped_probe(program, start, stop)
    if what in ("keep", "held"):
        return keep_probe(program, start, stop, doubles=doubles, made=saved)
    return backward_probe(program, start, stop, saved)


def backward_probe(program: Program, start: int, stop: int, saved: Sequence[int]) -> Probe:
    """The backward pass of a region that saves `saved`: recomputation, cotangents in and out."""
    names = [f"jaxsub_{offset}" for offset in saved]
    tag = (lambda x, offset: compat.checkpoint_name(x, f"jaxsub_{offset}")) if saved else None
    function = run_function(program, start, stop, tag=tag, saved=saved)
    policy = jax.checkpoint_policies.save_only_these_names(*names) if saved else None
    region = compat.checkpoint(function.call, policy=policy)
    avals = read_avals(program, function)
    trees: list[Any] = []

    def residuals_of(*inputs: Any) -> Any:
        outs, pullback = vjp_of(function, region, inputs)
        leaves, tree = jax.tree.flatten(pullback)
        trees.append((tree, outs))
        return leaves

    closed = jax.make_jaxpr(residuals_of)(*avals)
    (tree, outs), jaxpr = trees[0], closed.jaxpr
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    sources = [place.get(v) if not hasattr(v, "val") else None for v in jaxpr.outvars]
    shapes = [(a.shape, a.dtype) for a in closed.out_avals]
    cotangents = [(o.shape, o.dtype) for o in outs]

    def call(inputs: Sequence[Any], seeds: Any, sums: Sequence[Any]) -> Any:
        made = _fill([s for s, i in zip(shapes, sources, strict=True) if i is None] + cotangents, seeds)
        stored, cts = made[: len(made) - len(cotangents)], made[len(made) - len(cotangents) :]
        stored_iter = iter(stored)
        leaves = [next(stored_iter) if i is None else inputs[i] for i in sources]
        return _finish(program, function, jax.tree.unflatten(tree, leaves)(tuple(cts)), sums)

    n_seeds = len(cotangents) + sum(i is None for i in sources)
    seeds, sums = jax.ShapeDtypeStruct((max(n_seeds, 1),), jnp.float32), _sums(function, avals)
    return Probe(call, (avals, seeds, sums), donated=(2,) if sums else ())


def forward_probe(program: Program, start: int, stop: int) -> Probe:
    """The forward pass of a run, its results as outputs."""
    function = run_function(program, start, stop)
    return Probe(lambda inputs: function.call(*inputs), (read_avals(program, function),))


def last_probe(program: Program, function: RunFunction, made: Sequence[int] = ()) -> Probe:
    """The forward and backward pass of the last run, unwrapped: its backward pass starts at once.

    Args:
        program: The program.
        function: The run, or several that run at once.
        made: Positions of inputs that are made inside: they are gone once nothing reads them any more.
    """
    avals = read_avals(program, function)
    outs = jax.eval_shape(function.call, *avals)[0]

    def call(inputs: Sequence[Any], cotangents: Any, given: Any) -> Any:
        inputs = _with_made(inputs, avals, made, given)
        results, pullback = vjp_of(function, function.call, inputs)
        is_loss = program.loss is not None and len(results) == 1
        cts = (jnp.ones((), results[0].dtype),) if is_loss else cotangents
        return results, _finish(program, function, pullback(cts))

    given = jax.ShapeDtypeStruct((max(len(made), 1),), jnp.float32)
    return Probe(call, (avals, tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outs), given))


def unwrapped_probe(program: Program, start: int, stop: int) -> Probe:
    """The forward and backward pass of a run of which nothing but what it keeps itself stands between them."""
    function = run_function(program, start, stop)
    avals = read_avals(program, function)

    def call(inputs: Sequence[Any], sums: Sequence[Any]) -> Any:
        results, pullback = vjp_of(function, function.call, inputs)
        results = jax.lax.optimization_barrier(results)
        seeds = [jnp.ravel(r)[0].real.astype(jnp.float32) if r.size else jnp.float32(0) for r in results]
        cts = _fill([(r.shape, r.dtype) for r in results], seeds)
        return results, _finish(program, function, pullback(tuple(cts)), sums)

    sums = _sums(function, avals)
    return Probe(call, (avals, sums), donated=(1,) if sums else ())


def hoist_probe(program: Program, start: int, stop: int, *, doubles: bool, runs: int = 1) -> Probe:
    """A loop over a ballast that everything a run reads waits for, then the run and its backward pass.

    What stands beside the ballast waits for nothing: index arrays and zeros that the compiler makes for a scatter, say.
    It makes them when the program starts, or for all runs when the first begins, and they stand until the run's
    backward pass. What becomes the gradient of a weight that is looked up in lies in its output's place from the start.

    Args:
        program: The program.
        start: The run's first node.
        stop: The node after its last.
        doubles: Whether the backend's loops keep two copies of what they carry.
        runs: How often the run stands there, each time behind such a loop that waits for the one before.
    """
    function = run_function(program, start, stop)
    region = compat.checkpoint(function.call)
    nodes = program.graph.nodes[start:stop]
    looked_up = frozenset(n.inputs[0] for n in nodes if n.primitive == "gather" and n.inputs)
    avals = read_avals(program, function)
    outs = jax.eval_shape(function.call, *avals)[0]

    def call(given: Any, seed: Any) -> Any:
        weights = []
        for _ in range(runs):
            ballast = jnp.broadcast_to(seed, (BALLAST_BYTES // 4,))
            ballast = jax.lax.fori_loop(0, 3, lambda i, b: b * (b[0] + i), ballast)
            *inputs, seeds = jax.lax.optimization_barrier((*given, _seeds_of(ballast, len(outs))))
            results, pullback = vjp_of(function, region, inputs)
            cts = _fill([(r.shape, r.dtype) for r in results], seeds)
            found, seed = _finish(program, function, pullback(tuple(cts)), is_summed=True, apart=looked_up)
            weights.append(found)
        return weights, seed

    return Probe(call, (avals, jax.ShapeDtypeStruct((), jnp.float32)), BALLAST_BYTES * (2 if doubles else 1))


def keep_probe(program: Program, start: int, stop: int, *, doubles: bool, made: Sequence[int] = ()) -> Probe:
    """A run's forward pass, a loop over a ballast, its backward pass: what is kept stands beside the ballast.

    Args:
        program: The program.
        start: The run's first node.
        stop: The node after its last.
        doubles: Whether the backend's loops keep two copies of what they carry, as the CPU's do.
        made: Positions of inputs that are made inside: they stand beside the ballast too, where the backward pass
            reads them.
    """
    function = run_function(program, start, stop)
    avals = read_avals(program, function)

    def call(inputs: Sequence[Any], given: Any) -> Any:
        inputs = _with_made(inputs, avals, made, given)
        results, pullback = vjp_of(function, function.call, inputs)
        seed = sum((jnp.sum(r).real.astype(jnp.float32) for r in results), jnp.float32(0))
        ballast = jnp.broadcast_to(seed, (BALLAST_BYTES // 4,))
        ballast = jax.lax.fori_loop(0, 3, lambda i, b: b * (b[0] + i), ballast)
        cts = _fill([(r.shape, r.dtype) for r in results], _seeds_of(ballast, len(results)))
        return _finish(program, function, pullback(tuple(cts)), is_summed=True)

    given = jax.ShapeDtypeStruct((max(len(made), 1),), jnp.float32)
    return Probe(call, (avals, given), BALLAST_BYTES * (2 if doubles else 1))


def _seeds_of(ballast: Any, n: int) -> Any:
    """What cotangents are made from, behind a barrier: a cotangent that reads the ballast would stand beside it."""
    return jax.lax.optimization_barrier(jax.lax.dynamic_slice(ballast, (0,), (max(n, 1),)))


def _with_made(inputs: Sequence[Any], avals: Sequence[Any], made: Sequence[int], seeds: Any) -> list[Any]:
    """Inputs, some of them made inside the program."""
    merged = list(inputs)
    for i, x in zip(made, _fill([(avals[i].shape, avals[i].dtype) for i in made], seeds), strict=True):
        merged[i] = x
    return merged


def _fill(shapes: Sequence[tuple[Any, Any]], seeds: Any) -> list[Any]:
    """Arrays of given shapes, each from its own seed, all behind one barrier."""
    made = [jnp.broadcast_to((seeds[i] > 0 if dtype == jnp.bool_ else seeds[i].astype(dtype)), shape)
            for i, (shape, dtype) in enumerate(shapes)]  # fmt: skip
    return list(jax.lax.optimization_barrier(made)) if made else []


def _sums(function: RunFunction, avals: Sequence[Any]) -> list[Any]:
    """Shapes of the sums that gradients of a run's weights are added to."""
    return [avals[i] for i in function.differentiated if i in function.joined]


def _finish(program: Program, function: RunFunction, gradients: Sequence[Any], sums: Sequence[Any] = (), *,
            is_summed: bool = False, apart: frozenset[int] = frozenset()) -> Any:  # fmt: skip
    """Weights' gradients, added to the sums given, as outputs; activations' cotangents held with them, then summed.

    With `is_summed` gradients of weights are summed too, those of `apart` left out.
    """
    earlier = iter(jax.lax.optimization_barrier(tuple(sums)) if sums else ())
    gradients = [next(earlier) + g if sums and i in function.joined else g
                 for i, g in zip(function.differentiated, gradients, strict=True)]  # fmt: skip
    values = [program.graph.values[function.reads[i]] for i in function.differentiated]
    if is_gpu(program.platform):
        gradients = _held(gradients, values, flat_kernels(program))
    else:
        gradients = jax.lax.optimization_barrier(tuple(gradients))
    is_out = [v.producer is None and (not is_summed or v.index in apart) for v in values]
    weights = [g for g, goes_out in zip(gradients, is_out, strict=True) if goes_out]
    others = [g for g, goes_out in zip(gradients, is_out, strict=True) if not goes_out]
    return weights, sum((jnp.sum(g).real.astype(jnp.float32) for g in others), jnp.zeros((), jnp.float32))


def _held(gradients: Sequence[Any], values: Sequence[Value], flat: frozenset[int]) -> list[Any]:
    """Gradients behind one barrier as in plans for GPUs: of weights read last first, some flat, then others."""
    order = sorted(range(len(values)), key=lambda i: (0, -i) if values[i].producer is None else (1, -values[i].index))
    held = dict(enumerate(gradients))
    barrier(order, frozenset(i for i, v in enumerate(values) if v.index in flat))(held)
    return [held[i] for i in range(len(values))]
