"""`jit`: a whole train step that fits a device: parameters, optimizer state, batch and temporaries together.

`jax.jit` compiles the step; what the compiler allocates for it is read, and the `sublinear` functions inside are given
the plans with which the whole fits (`jaxsub.step.sizing`). What is compiled to find out is what runs: a second call
with the same shapes traces, plans and compiles nothing. Measurements and plans are kept on disk: another process traces
the step, finds its plans, and compiles only what runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable
from operator import is_
from typing import Any, Protocol, TypeVar, overload

import jax.core
import jax.numpy as jnp

from jaxsub.api.sublinear import AnyCache, type_of
from jaxsub.core.budget import Budget
from jaxsub.core.disk_cache import key_of, open_store
from jaxsub.core.step_plan import StepPlan
from jaxsub.core.wrapped import Locks, P, R, Wrapped
from jaxsub.costs.chain_builder import Prices
from jaxsub.devices.aot import cross_compile, lower
from jaxsub.devices.compile import measurement
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.arguments import argument_name
from jaxsub.jaxpr.shardings import spans_devices
from jaxsub.jaxpr.static_leaves import losing_nothing
from jaxsub.search import call_sites
from jaxsub.search.call_sites import CallSite, Trial
from jaxsub.search.progress import Progress, say
from jaxsub.search.verify import recalled
from jaxsub.step import kept_plans
from jaxsub.step.attempt import Attempt
from jaxsub.step.device import device_bytes, explaining
from jaxsub.step.fused_update import Findings
from jaxsub.step.given import arguments_digest, require_fitting, require_same_arguments, require_same_sites
from jaxsub.step.options import check_jit_kwargs, fusing, statics_of, under_jit
from jaxsub.step.report import Argument, StepReport, arguments_of, infeasible, report
from jaxsub.step.sizing import Sizing

R_co = TypeVar("R_co", covariant=True)
AnyMemory = str | float | Budget
AnyStepPlan = StepPlan | str | os.PathLike[str]
_is_none = functools.partial(is_, None)


class Jitted(Protocol[P, R_co]):
    """What `jax.jit` returns, with the signature of its function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function."""
        raise NotImplementedError

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The function, lowered."""

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The function, traced."""

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes of the results."""

    def clear_cache(self) -> None:
        """Forget what was compiled."""


@overload
def jit(fun: Callable[P, R], *, memory: None = None, plan: None = None,
        target: Any = None, cache: AnyCache = True, progress: bool = True, fuse_updates: bool | None = None,
        **jit_kwargs: Any) -> Jitted[P, R]: ...  # fmt: skip


@overload
def jit(fun: Callable[P, R], *, memory: AnyMemory, plan: AnyStepPlan | None = None,
        target: Any = None, cache: AnyCache = True, progress: bool = True, fuse_updates: bool | None = None,
        **jit_kwargs: Any) -> Step[P, R]: ...  # fmt: skip


@overload
def jit(fun: Callable[P, R], *, plan: AnyStepPlan, memory: AnyMemory | None = None,
        target: Any = None, cache: AnyCache = True, progress: bool = True, fuse_updates: bool | None = None,
        **jit_kwargs: Any) -> Step[P, R]: ...  # fmt: skip


@overload
def jit(fun: None = None, *, memory: None = None, plan: None = None,
        target: Any = None, cache: AnyCache = True, progress: bool = True, fuse_updates: bool | None = None,
        **jit_kwargs: Any) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...  # fmt: skip


@overload
def jit(fun: None = None, *, memory: AnyMemory, plan: AnyStepPlan | None = None,
        target: Any = None, cache: AnyCache = True, progress: bool = True, fuse_updates: bool | None = None,
        **jit_kwargs: Any) -> Callable[[Callable[P, R]], Step[P, R]]: ...  # fmt: skip


@overload
def jit(fun: None = None, *, plan: AnyStepPlan, memory: AnyMemory | None = None,
        target: Any = None, cache: AnyCache = True, progress: bool = True, fuse_updates: bool | None = None,
        **jit_kwargs: Any) -> Callable[[Callable[P, R]], Step[P, R]]: ...  # fmt: skip


def jit(fun: Callable[..., Any] | None = None, *, memory: AnyMemory | None = None, plan: AnyStepPlan | None = None,
        target: Any = None, cache: AnyCache = True, progress: bool = True, fuse_updates: bool | None = None,
        **jit_kwargs: Any) -> Any:  # fmt: skip
    """`jax.jit` for train steps: one that fits a device's memory, and that the CPU's compiler does not undo.

    With `memory`, the `sublinear` functions inside the step are given plans with which the whole step fits: its
    arguments, outputs and temporaries on one device, without the outputs that reuse a donated argument, as the
    compiler reports them. A function with a budget of its own keeps to it, one with none recomputes nothing where the
    step fits so; its own `jax.checkpoint` regions are opened. Without `memory` it is `jax.jit`, but for an option
    without which JAX 0.10 to 0.11.0 would merge recomputation away on the CPU. JAX takes it of the outermost `jit`
    alone: round a `scan` or a `grad` of a step put another `jaxsub.jit`.

    Args:
        fun: The function, usually a whole train step. Left out, a decorator is returned.
        memory: What the step may take of a device: `"24GiB"`, an int of bytes; `"device"` for what the device has, as
            `jaxsub targets` lists it (of an absent GPU the three quarters that JAX takes by default); a float in
            (0, 1], the fraction of what it takes unplanned; or `None` for as much as it takes.
        plan: A plan that `step.plan(*args)` made before, or the path of one that `StepPlan.save` wrote: nothing is
            searched. `memory` is then the plan's own unless it is given.
        target: The device to plan and verify for, such as `"h100"`; calls run on the device in use, under the plans
            that were found. `None` for the device in use.
        cache: Where prices are kept, as for `jaxsub.sublinear`.
        progress: Whether to show a progress bar when planning takes long.
        fuse_updates: Whether the optimizer's update moves into the backward scan, so that a scan's gradients stand for
            one layer at a time: wherever all that reads them treats layers one by one, as SGD and AdamW do. What cannot
            move stays where it is, and the report says why. `None`: with `memory`.
        **jit_kwargs: As for `jax.jit`: `donate_argnums`, `static_argnames`, `in_shardings` and so on.

    Returns:
        The compiled function, as `jax.jit` makes it; with `memory` or `plan`, a `jaxsub.step.jit.Step`, whose
        `report(*args)` says what the step takes and what was done, and whose `plan(*args)` can be stored.

    Raises:
        BudgetError: If `memory` cannot be read.
        InfeasibleBudgetError: At the first call, if the step does not fit; it says what holds the memory and the least
            that would do.
        UnsupportedError: At the first call, if the compiler does not say what it allocates, or if modules of Flax NNX
            change in the step and are not returned: `jaxsub.flax.nnx.jit` writes them back.
        PlanMismatchError: At the first call, if `plan` was made for another step, or other shapes.
        VerificationError: At the first call, if the step takes more under `plan` than `memory`.
        OutOfMemoryError: At a call, if the device has no room for the step after all; nothing is retried.

    Example:
        >>> import jax, jax.numpy as jnp, jaxsub
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).mean()
        >>> loss = jaxsub.sublinear(loss)
        >>> @jaxsub.jit(memory=0.7, donate_argnums=0)
        ... def step(ws, x):
        ...     return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))
        >>> ws, x = [jnp.eye(16)] * 16, jnp.ones((256, 16))
        >>> found = step.report(ws, x)
        >>> found.step_bytes <= found.memory_bytes < found.plain_bytes
        True
    """
    check_jit_kwargs(jit_kwargs)
    if fun is None:
        return functools.partial(jit, memory=memory, plan=plan, target=target, cache=cache, progress=progress,
                                 fuse_updates=fuse_updates, **jit_kwargs)  # fmt: skip
    if memory is not None or plan is not None:
        return Step(fun, memory, target, cache, progress, jit_kwargs, fuse_updates is not False, plan)
    if target is not None:
        raise ValueError(f"target={target!r} says what to plan for; say how much it may take, too: memory=.")
    run = losing_nothing(fun, "jit")
    if fuse_updates:
        findings = Findings.on(jax.default_backend(), jax.device_count())
        run = fusing(run, statics_of(fun, jit_kwargs), jit_kwargs, findings)
    return under_jit(run, jit_kwargs)


class Step(Wrapped[P, R]):
    """A whole step that fits a device; made by `jit(memory=...)`.

    Attributes:
        fun: The step as it was.
        memory: What it may take of a device, as it was given; that of its plan where only that was given.
        target: What it is planned for; `None` for the device in use.
    """

    __slots__ = ("_cache", "_called", "_fuses", "_jit_kwargs", "_locks", "_plan", "_progress", "_ready", "_shardings",
                 "_statics", "memory", "target")  # fmt: skip

    def __init__(self, fun: Callable[P, R], memory: Any, target: Any, cache: AnyCache, progress: bool,
                 jit_kwargs: dict[str, Any], fuse_updates: bool = True, plan: AnyStepPlan | None = None):  # fmt: skip
        functools.update_wrapper(self, fun)
        check_jit_kwargs(jit_kwargs)
        self.fun = fun
        self._plan = None if plan is None else StepPlan.of(plan)
        memory = self._plan.memory_bytes if memory is None and self._plan is not None else memory
        self.memory: Any = memory if memory == "device" else Budget.parse(memory)
        self.target = target
        self._cache, self._progress, self._jit_kwargs = cache, progress, jit_kwargs
        self._called = losing_nothing(fun, "jit")
        self._fuses = fuse_updates
        self._statics = statics_of(fun, jit_kwargs)
        self._shardings = jit_kwargs.get("in_shardings")
        self._locks = Locks()
        self._ready: dict[Any, tuple[Any, StepReport]] = {}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step.

        Raises:
            OutOfMemoryError: If the device has no room for it; it says what was planned and which budget to try.
        """
        run, found = self._prepare(args, kwargs)
        with explaining(found.measurement, found.memory_bytes, self._stats):
            result: R = run(*args, **kwargs)
        return result

    def _stats(self) -> Any:
        """What the device in use says of its memory."""
        device = get_target(None).device
        return device.memory_stats() if device is not None else None

    def plan(self, /, *args: Any, **kwargs: Any) -> StepPlan:
        """What was decided for arguments of these shapes: to be stored, compared, and given to `jaxsub.jit(plan=)`."""
        found = self._prepare(args, kwargs)[1]
        return StepPlan(self._digest(args, kwargs), found.memory_bytes, found.measurement, found.plain, found.sites,
                        found.passes)  # fmt: skip

    def clear_cache(self) -> None:
        """Forget what was compiled and planned in this process; what is on disk stays."""
        for run, _ in self._ready.values():
            run.clear_cache()
        self._ready.clear()

    def report(self, /, *args: Any, **kwargs: Any) -> StepReport:
        """What the step takes for arguments of these shapes, arrays or `jax.ShapeDtypeStruct`s; nothing is run."""
        return self._prepare(args, kwargs)[1]

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """The step, lowered under its plans, as `jax.jit` does it."""
        return self._prepare(args, kwargs)[0].lower(*args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """The step, traced under its plans, as `jax.jit` does it."""
        return self._prepare(args, kwargs)[0].trace(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes of the results; nothing is planned."""
        return jax.eval_shape(self._called, *args, **kwargs)

    def made_of(self) -> tuple[Any, ...]:
        """What an equal one is made of."""
        return (self.fun, self.memory, self.target, self._cache, self._progress, self._jit_kwargs, self._fuses,
                self._plan)  # fmt: skip

    def __repr__(self) -> str:
        return f"jaxsub.jit({getattr(self.fun, '__qualname__', self.fun)!s}, memory={self.memory!s})"

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, StepReport]:
        statics, dynamic_args, dynamic_kwargs = self._statics.split(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic_args, dynamic_kwargs))
        are_told = self._shardings is not None and None not in jax.tree.leaves(self._shardings, is_leaf=_is_none)
        types = tuple(_placed_type(leaf)[: 1 if are_told else 2] for leaf in leaves)
        key = (statics, tree, types, compat.trace_context())
        if key not in self._ready:
            with self._locks(key):
                if key not in self._ready:  # no other thread has sized it meanwhile
                    self._ready[key] = self._size(args, kwargs)
        return self._ready[key]

    def _size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, StepReport]:
        start = time.perf_counter()
        limit = device_bytes(get_target(self.target)) if self.memory == "device" else None
        with Progress(self._progress) as told:
            if self._plan is not None:
                best, found = self._as_planned(self._plan, limit, args, kwargs)
            else:
                best, found = self._searched(limit, args, kwargs, told)
        if self._progress:
            say(found.summary, time.perf_counter() - start)
        return best.run if best.trial.target.is_present else self._jitted(best.trial, best.updates), found

    def _searched(self, limit: int | None, args: Any, kwargs: Any, told: Any) -> tuple[Attempt, StepReport]:
        """The step under the plans with which it fits, from the cache or a search."""
        sizing, store = self.sizing(args, kwargs, told), open_store(self._cache)
        n_bytes = limit if limit is not None else self._n_bytes(sizing.first)
        best = kept_plans.find(store, sizing, n_bytes)
        plain = sizing.first.measurement
        if best is None:
            best = sizing.run(n_bytes)
            if best is None and sizing.first.updates.can_more:  # a backward pass more, which no plan costs
                sizing = self.sizing(args, kwargs, told, passes=2, prices=sizing.prices)
                best = kept_plans.find(store, sizing, n_bytes) or sizing.run(n_bytes)
            if best is None and (best := kept_plans.find_least(store, sizing, n_bytes)) is None:
                kept_plans.keep_least(store, sizing, least := sizing.least())
                raise infeasible(n_bytes, least, self._arguments(sizing.first, args, kwargs),
                                 sizing.unknown_shardings())  # fmt: skip
            kept_plans.keep(store, sizing, n_bytes, best)
        held = self._arguments(sizing.first, args, kwargs)
        return best, report(n_bytes, plain, best, held, len(sizing.attempts), store)

    def _as_planned(self, plan: StepPlan, limit: int | None, args: Any, kwargs: Any) -> tuple[Attempt, StepReport]:
        """The step under a plan that was given, compiled once: it is that step's, and keeps to the memory."""
        require_same_arguments(plan, self._digest(args, kwargs))
        given = Trial(get_target(self.target), plan.plans, are_given=True)
        self._jitted(given).trace(*args, **kwargs)
        require_same_sites(plan, given.sites)
        best = self.compile(Trial(given.target, plan.plans, are_given=True), args, kwargs, passes=plan.passes)
        n_bytes = limit or self.memory.n_bytes or int(plan.plain_measurement.step_bytes * (self.memory.fraction or 1.0))
        require_fitting(plan, best.measurement, n_bytes)
        held = self._arguments(best, args, kwargs)
        return best, report(n_bytes, plan.plain_measurement, best, held, 1, open_store(self._cache))

    def _digest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        _, dynamic_args, dynamic_kwargs = self._statics.split(args, kwargs)
        return arguments_digest(dynamic_args, dynamic_kwargs)

    def sizing(self, args: tuple[Any, ...], kwargs: dict[str, Any], told: Callable[[str], None], *,
               passes: int = 1, prices: dict[str, Prices] | None = None) -> Sizing:  # fmt: skip
        """Begin to size the step for arguments of these shapes: it is compiled as it stands."""
        target = get_target(self.target)

        def compile_trial(trial: Trial) -> Attempt:
            told("the whole step")
            return self.compile(trial, args, kwargs, passes=passes)

        return Sizing(compile_trial(Trial(target)), compile_trial, target, open_store(self._cache), told,
                      target.n_devices > 1 or spans_devices((args, kwargs, self._shardings)), prices or {})  # fmt: skip

    def _n_bytes(self, first: Attempt) -> int:
        """What the step may take, in bytes."""
        if self.memory.n_bytes is not None:
            return int(self.memory.n_bytes)
        return int(first.measurement.step_bytes * (self.memory.fraction or 1.0))

    def _jitted(self, trial: Trial, findings: Findings | None = None, *, is_here: bool = True) -> Any:
        run: Any = functools.wraps(self.fun)(call_sites.tried(self._called, trial))
        if self._fuses:
            run = fusing(run, self._statics, self._jit_kwargs, findings)
        return under_jit(run, self._jit_kwargs) if is_here else jax.jit(run, **self._jit_kwargs)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, CallSite]:
        """The sublinear functions inside the step, by fingerprint; nothing is compiled."""
        trial = Trial(get_target(self.target))
        self._jitted(trial).trace(*args, **kwargs)
        return trial.sites

    def compile(self, trial: Trial, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                passes: int = 1) -> Attempt:  # fmt: skip
        """Compile the step under a trial's plans, unless what comes out of that is on disk."""
        start, target, store = time.perf_counter(), trial.target, open_store(self._cache)
        updates = Findings.on(target.platform, target.n_devices, passes)
        jitted = self._jitted(trial, updates, is_here=target.is_present)
        chosen: Any = contextlib.nullcontext()
        if target.is_present and self.target is not None:
            chosen = jax.default_device(target.device)
        with chosen:
            here = target.is_present
            lowered: Any = jitted.lower(*args, **kwargs) if here else lower(jitted, args, target, kwargs)
            options = sorted((self._jit_kwargs.get("compiler_options") or {}).items())
            digest = hashlib.blake2b(lowered.as_text().encode(), digest_size=16).hexdigest()
            key = key_of("step", target.name, target.spec or "", repr(options), digest)
            found = recalled(store, key, target)
            if found is None:
                quick = compat.cpu_measuring_options() if target.platform == "cpu" else None  # it is not run
                compiled: Any = lowered.compile(quick) if here else cross_compile(jitted, args, target, kwargs)
                found = measurement(compiled, target, time.perf_counter() - start)
                store.put(key, found)
        return Attempt(trial, found, jitted, digest, updates)

    def _arguments(self, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Argument, ...]:
        _, dynamic_args, dynamic_kwargs = self._statics.split(args, kwargs)
        numbers = [i for i in range(len(args)) if i not in self._statics.argnums]
        if self._shardings is not None:
            told = jax.tree.broadcast(self._shardings, tuple(dynamic_args), is_leaf=_is_none)
            dynamic_args = jax.tree.map(_spread, tuple(dynamic_args), told, is_leaf=_is_none)
        return arguments_of(
            dynamic_args,
            dynamic_kwargs,
            [argument_name(self.fun, i) for i in numbers],
            attempt.run.trace(*args, **kwargs),
        )


def _placed_type(leaf: Any) -> tuple[Any, Any]:
    """What of an argument a step's memory depends on: shape and dtype, and how it is spread over devices."""
    if isinstance(leaf, jax.core.Tracer) or not hasattr(leaf, "dtype"):
        return type_of(leaf), None
    sharding = getattr(leaf, "sharding", None)
    spread = None if isinstance(sharding, jax.sharding.SingleDeviceSharding) else sharding
    return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)), spread


def _spread(leaf: Any, sharding: Any) -> Any:
    return leaf if sharding is None else jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding)
