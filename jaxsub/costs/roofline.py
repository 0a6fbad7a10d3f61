"""Estimate how long runs of equations take, from a target's figures, or measure it on the device in use.

**Roofline** (Williams, Waterman, Patterson, *Roofline: an insightful visual performance model*, CACM 2009): an equation
whose result is stored takes the longer of two times: its arithmetic at the target's rate for the dtype (on tensor cores
for matrix products), and its memory traffic at the target's bandwidth. Fused equations (`jaxsub.costs.fusion`) cost
nothing themselves: the equation that stores the result of the fusion reads its roots. On a GPU each stored result is a
kernel, and takes `KERNEL_SECONDS` beside. Rates are peaks that programs do not reach, and caches and occupancy are left
out, so that only ratios mean much.

**Profiled**: forward and backward pass of a stage are compiled for the device in use and timed, the median of several
runs. The recompute of an option is the measured forward pass times its share of that pass by roofline.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsub.core.chain import Chain, Option
from jaxsub.core.disk_cache import Store, key_of
from jaxsub.core.errors import PlannerError, UnsupportedError
from jaxsub.costs.fusible import IN_PLACE
from jaxsub.costs.fusion import Lives
from jaxsub.costs.live_ranges import recomputed
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of, flops_of, is_costly
from jaxsub.jaxpr.inline import flatten_closed
from jaxsub.jaxpr.trace import Program, array_bytes
from jaxsub.partition.run_function import read_avals, run_function, vjp_of
from jaxsub.partition.traced_run import TracedRun

MATMULS = frozenset(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general scaled_matmul scaled_matmul_wrapper "
    "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper "
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper".split()
)
"""Primitives that run on tensor cores."""

PARTS = frozenset("slice dynamic_slice gather".split())
"""Primitives that read no more of an array than they make."""

KERNEL_SECONDS = 7e-6
"""What a kernel of a GPU takes however little it does: to launch, to fill the GPU and to drain it.

On an H200 the same work in more kernels takes 5.4 µs longer for each of them (`python
examples/benchmarks/slices_on_gpu.py --draw`). One that is counted here stands for a little more: copies are left out.
"""

RUNS = 7
"""Timed runs of each pass, in turn, after one that warms up caches."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """How long the passes of one stage take.

    Attributes:
        forward: Its forward pass.
        backward: Its backward pass without recompute.
        scale: Measured over roofline; 1 where nothing was measured.
    """

    forward: float
    backward: float
    scale: float = 1.0


@dataclass(slots=True, eq=False)
class Clock:
    """Times of the runs of one program on one target; each distinct run is timed or estimated once.

    Attributes:
        program: The program.
        target: The device.
        is_profiled: Whether stages are timed, rather than estimated by roofline.
        store: The price cache for measured times, or `None`.
        progress: Called with a label as a stage is timed.
    """

    program: Program
    target: Target
    is_profiled: bool
    store: Store | None
    progress: Callable[[str], None]
    _stages: dict[Any, StageSeconds] = field(init=False, default_factory=dict)
    _backward: dict[Any, float] = field(init=False, default_factory=dict)

    @property
    def origin(self) -> str:
        """The origin of its figures, as in `jaxsub.core.chain.Prediction`."""
        nominal = ", nominal" if self.target.origin == "nominal" else ""
        return "profiled" if self.is_profiled else f"roofline{nominal}"

    def stage(self, kind: Any, run: tuple[int, int], traced: TracedRun, most: Sequence[int]) -> StageSeconds:
        """Estimate or time the passes of a stage.

        Args:
            kind: The key of equal stages.
            run: Its first node, and the node after its last.
            traced: The stage.
            most: Offsets of the values that the choice of least recompute saves.
        """
        if kind not in self._stages:
            forward = eqns_seconds(traced.forward, traced.inputs, traced.returned, self.target)
            found = StageSeconds(forward, backward_seconds(traced, most, self.target))
            if self.is_profiled:
                measured = self._profiled(kind, run)
                found = StageSeconds(*measured, measured[0] / forward if forward else 1.0)
            self._stages[kind] = found
        return self._stages[kind]

    def recompute(self, kind: Any, traced: TracedRun, saved: tuple[int, ...], most: tuple[int, ...]) -> float:
        """Estimate how much longer a backward pass takes than that of the choice of least recompute, by roofline."""
        for choice in (saved, most):
            if (kind, choice) not in self._backward:
                self._backward[kind, choice] = backward_seconds(traced, choice, self.target)
        return max(0.0, self._backward[kind, saved] - self._backward[kind, most])

    def _profiled(self, kind: Any, run: tuple[int, int]) -> tuple[float, float]:
        require_present(self.target)
        key = key_of("seconds", self.target.name, platform.processor(), str(os.cpu_count()), repr(kind))
        known: tuple[float, float] | None = self.store.get(key, tuple[float, float]) if self.store is not None else None
        if known is None or min(known) < 0:
            known = profile(self.program, *run, self.target)
            self.progress("the time of a stage")
            if self.store is not None:
                self.store.put(key, known)
        return known


def by_seconds(chain: Chain) -> Chain:
    """Weigh a chain's FLOPs by seconds, so that planners minimise seconds.

    A forward pass keeps its FLOPs; each of its parts gets the share of them that it has of the seconds.

    Args:
        chain: A chain with seconds.

    Raises:
        PlannerError: If the chain has no seconds.

    Example:
        >>> from jaxsub.core.chain import Stage
        >>> chain = Chain((Stage(0, 1, 0, 9.0, 9.0, forward_seconds=1.0), Stage(1, 2, forward_seconds=4.0)), (), ())
        >>> [stage.forward_flops for stage in by_seconds(chain).stages]
        [2.0, 8.0]
    """
    seconds = sum(stage.forward_seconds for stage in chain.stages)
    if seconds <= 0:
        raise PlannerError("the stages of this chain have FLOPs but no seconds, so seconds cannot be minimised")
    rate = chain.forward_flops / seconds

    def weighed(option: Option) -> Option:
        return replace(option, recompute_flops=rate * option.recompute_seconds, loop_flops=rate * option.loop_seconds)

    stages = tuple(replace(s, forward_flops=rate * s.forward_seconds, tail_flops=rate * s.tail_seconds)
                   for s in chain.stages)  # fmt: skip
    items = tuple(replace(item, options=tuple(map(weighed, item.options))) for item in chain.items)
    return replace(chain, stages=stages, items=items, minimises="seconds")


def backward_seconds(traced: TracedRun, saved: Sequence[int], target: Target) -> float:
    """Estimate how long the backward pass of a region takes at least, recompute included.

    An elementwise equation is fused into its consumers: these read its operands instead of its result.

    Args:
        traced: The run.
        saved: Offsets of the values it saves.
        target: The device.
    """
    eqns, stored = recomputed(traced, frozenset(saved))
    return eqns_seconds((*eqns, *traced.backward), (*traced.inputs, *stored, *traced.cotangents),
                        traced.backward_outputs, target, traced.aliases)  # fmt: skip


def eqns_seconds(eqns: Sequence[Any], inputs: Iterable[Any], outputs: Iterable[Any], target: Target,
                 alias: dict[Any, Any] | None = None) -> float:  # fmt: skip
    """Estimate the seconds of equations by roofline.

    Args:
        eqns: The equations.
        inputs: Variables in memory.
        outputs: Atoms that must be stored.
        target: The device.
        alias: Variables that are other variables.

    Example:
        >>> from jaxsub.devices.targets import get_target
        >>> jaxpr = jax.make_jaxpr(lambda a, b: jnp.tanh(a @ b))(*[jnp.ones((4096, 4096), "bfloat16")] * 2)
        >>> seconds = eqns_seconds(jaxpr.eqns, jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, get_target("h100"))
        >>> f"{seconds * 1e6:.0f} us for {2 * 4096**3 / 1e9:.0f} GFLOPs, two passes over 32 MiB and two kernels"
        '173 us for 137 GFLOPs, two passes over 32 MiB and two kernels'
    """
    return sum(_seconds(eqn, reads, target) for eqn, reads in _stored(eqns, inputs, outputs, alias or {}))


def count_kernels(eqns: Sequence[Any], inputs: Iterable[Any], outputs: Iterable[Any]) -> int:
    """Count the results that equations store, those in loops as often as these run: a kernel each, on a GPU.

    Example:
        >>> layer = lambda x, _: (jnp.tanh(x @ x), None)
        >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(layer, x, None, length=5)[0])(jnp.ones((64, 64)))
        >>> count_kernels(jaxpr.eqns, jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars)
        10
    """
    count = 0
    for eqn, _ in _stored(eqns, inputs, outputs, {}):
        inner = _in_bodies(eqn, lambda body: count_kernels(*flatten_closed(body)))
        count += 1 if inner is None else int(inner)
    return count


def _stored(
    eqns: Sequence[Any], inputs: Iterable[Any], outputs: Iterable[Any], alias: dict[Any, Any]
) -> Iterator[tuple[Any, frozenset[Any]]]:
    """Equations whose results are stored, with what they read; the others are fused into them."""
    lives = Lives(eqns, tuple(inputs), [v for v in outputs if compat.is_var(v)], alias, is_cpu=False)
    fused: dict[Any, frozenset[Any]] = {}  # what a variable that is not stored is computed from
    for eqn in eqns:
        operands = [lives.base(a) for a in eqn.invars if compat.is_var(a)]
        is_part = _reads_part(eqn)
        reads = frozenset(eqn.outvars if is_part else ()).union(*(fused.get(v, (v,)) for v in operands if not is_part))
        if lives.stores(eqn) or (bodies_of(eqn) and is_costly(eqn)):
            yield eqn, reads
        else:
            fused.update((v, reads) for v in eqn.outvars)


def _in_bodies(eqn: Any, figure: Callable[[Any], float]) -> float | None:
    """A figure of the costly bodies of an equation: of a loop once a step, of a conditional the largest."""
    bodies = bodies_of(eqn)
    if not (bodies and is_costly(eqn)):
        return None
    found = [figure(body) for body in bodies]
    if eqn.primitive.name == "cond":
        return max(found)
    return sum(found) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


def _reads_part(eqn: Any) -> bool:
    """Whether an equation, or a function with a custom rule, reads no more of an array than it makes."""
    return eqn.primitive.name in PARTS or any(_reads_part(e) for body in bodies_of(eqn) for e in body.eqns)


def _seconds(eqn: Any, reads: Iterable[Any], target: Target) -> float:
    inner = _in_bodies(eqn, lambda body: eqns_seconds(*flatten_closed(body), target))
    if inner is not None:
        return inner
    written = sum(map(array_bytes, eqn.outvars))
    if eqn.primitive.name in IN_PLACE and eqn.invars[0] in reads:
        reads = frozenset(reads) - {eqn.invars[0]}
        written = max(map(array_bytes, eqn.invars[1:]))
    moved = sum(map(array_bytes, reads)) + written
    dtype = next((str(a.aval.dtype) for a in eqn.invars if hasattr(a.aval, "dtype")), "float32")
    rate = target.rate(dtype, is_matmul=eqn.primitive.name in MATMULS)
    least = 0.0 if target.platform == "cpu" else KERNEL_SECONDS
    return least + max(flops_of(eqn).total / rate, moved / target.bytes_per_second)


def profile(program: Program, start: int, stop: int, target: Target) -> tuple[float, float]:
    """Time the passes of a run of nodes on a present device.

    Args:
        program: The program.
        start: The run's first node.
        stop: The node after its last.
        target: The device.

    Returns:
        Seconds of the forward and of the backward pass, medians of several runs.

    Raises:
        UnsupportedError: If the device is absent.
    """
    require_present(target)
    function = run_function(program, start, stop)
    inputs = [_array(a) for a in read_avals(program, function)]

    def both(*inputs: Any) -> Any:
        outs, pullback, _ = vjp_of(function, inputs)
        return outs, pullback(tuple(jnp.ones_like(o) for o in outs))

    forward, whole = _median_seconds((function.call, both), inputs, target)
    return forward, max(0.0, whole - forward)


def require_present(target: Target) -> None:
    """Check that a device can be timed.

    Raises:
        UnsupportedError: If the device is absent.
    """
    if not target.is_present:
        raise UnsupportedError(
            f"profile=True measures stages on the device in use, and `{target.name}` is absent. Plan on a machine "
            'that has it, or pass profile="roofline" to minimise seconds by its published figures.'
        )


def _array(aval: Any) -> Any:
    """Make an array to run on; its values do not change the time."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        impl: list[Any] = []
        jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), aval)  # it takes keys, not shapes
        return jax.random.split(jax.random.key(0, impl=impl[0]), aval.shape)
    return jnp.ones(aval.shape, aval.dtype)


def _median_seconds(functions: Sequence[Any], inputs: Sequence[Any], target: Target) -> list[float]:
    """Time functions in turn, so that other load on the machine affects all equally; return medians."""
    options: Any = (compat.cpu_compiler_options() if target.platform == "cpu" else {}) or None
    seconds: list[list[float]] = [[] for _ in functions]
    with jax.default_device(target.device):
        calls = [jax.jit(f).lower(*inputs).compile(compiler_options=options) for f in functions]
        for _ in range(RUNS + 1):
            for call, times in zip(calls, seconds, strict=True):
                begin = time.perf_counter()
                jax.block_until_ready(call(*inputs))
                times.append(time.perf_counter() - begin)
    return [statistics.median(times[1:]) for times in seconds]
