"""The public calls, in order and nothing else: trace, plan, emit.

Traces and plans are kept with the function they belong to, by the shapes of its arguments: a second call with the same
shapes traces and plans nothing. Verified plans and prices are kept on disk too (`cache=`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, overload

import jax.core

from jaxsub.api.explain import Explanation, explanation_of
from jaxsub.api.frontier import POINTS, Frontier, frontier_of
from jaxsub.core.budget import Budget
from jaxsub.core.checks import several
from jaxsub.core.disk_cache import Store, open_store
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.wrapped import Locks, P, R, Wrapped, name_of
from jaxsub.devices.targets import Target, get_target
from jaxsub.emission.emit import as_traced, emit
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.arguments import AnyArgnums, Statics, read_argnums, refuse_collisions, trace_call
from jaxsub.jaxpr.constants import constants_key
from jaxsub.jaxpr.shardings import all_shardings, given_shardings, sharding_of
from jaxsub.jaxpr.static_leaves import losing_nothing, passed
from jaxsub.jaxpr.trace import Program, check_differentiated, trace
from jaxsub.planners import Planner, get
from jaxsub.search import call_sites
from jaxsub.search import verify as verifying
from jaxsub.search.pipeline import Mirror, Settings, make_plan, may_be_sliced
from jaxsub.search.propagated import pricer_of
from jaxsub.search.repeated_effects import warn_of_repeated
from jaxsub.search.slicing import Chunks
from jaxsub.search.unsaid_shardings import as_said

AnyCache = bool | str | os.PathLike[str] | Store
AnyBudget = str | int | float | None | Budget


class Options(TypedDict, total=False):
    """The options of `sublinear`."""

    budget: AnyBudget
    planner: str | Planner
    plan: Plan | str | os.PathLike[str] | None
    mirror: Mirror | None
    verify: bool | None
    target: Any
    argnums: AnyArgnums
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    in_shardings: Any
    cache: AnyCache
    progress: bool
    profile: bool | str
    offload: str | None
    chunks: Chunks
    effort: str
    max_seconds: float | None


class Sublinear(Wrapped[P, R]):
    """A function whose gradient fits a budget; made by `sublinear`.

    Its methods take the function's own arguments and nothing else: no name of theirs can be one of jaxsub's options.

    Attributes:
        fun: The function as it was.
        settings: How it is planned.
    """

    __slots__ = ("_locks", "_plans", "_programs", "_ready", "_statics", "_told", "settings")

    def __init__(
        self, fun: Callable[P, R], settings: Settings, static_argnums: Sequence[int], static_argnames: Sequence[str]
    ):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.settings = settings
        self._told = tuple(static_argnums), tuple(static_argnames)
        self._statics = Statics.of(losing_nothing(fun, "sublinear"), *self._told)
        self._locks = Locks()
        self._ready: dict[Any, tuple[Program, Callable[..., Any], Plan]] = {}
        self._programs: dict[Any, Program] = {}
        self._plans: dict[Any, Plan] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function; its gradient keeps to the plan."""
        program, run, _ = self._prepare(args, kwargs)
        _, dynamic_args, dynamic_kwargs = self._statics.split(args, kwargs)
        outputs = run(*program.consts, *jax.tree.leaves((dynamic_args, dynamic_kwargs)))
        result: R = passed(program.out_tree, outputs)
        return result

    @property
    def statics(self) -> Statics:
        """Which of its arguments are no arrays."""
        return self._statics

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes: arrays or `jax.ShapeDtypeStruct`s."""
        return self._prepare(args, kwargs)[2]

    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        """What the compiler allocates for the gradient under the plan, as `jaxsub.measure` has it; nothing is run."""
        program, _, made = self._prepare(args, kwargs)
        check_differentiated(program)
        return verifying.measured(program, emit(program, made), get_target(self.settings.target))

    def frontier(self, *args: Any, **kwargs: Any) -> Frontier:
        """What every budget buys, as `jaxsub.frontier` finds it; measured with `verify=True`."""
        program, settings = self._traced(args, kwargs), self.settings
        is_measured = settings.verify is True
        pricer = pricer_of(program, get_target(settings.target), open_store(settings.cache))
        chunks = settings.chunks if may_be_sliced(program, settings) else False
        return frontier_of(pricer, POINTS, settings.budget.n_bytes, is_measured=is_measured, chunks=chunks)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Where its memory goes before any plan, as `jaxsub.explain` says it."""
        return explanation_of(self._traced(args, kwargs), self.settings.target)

    def made_of(self) -> tuple[Any, ...]:
        """What an equal one is made of."""
        return self.fun, self.settings, *self._told

    def __repr__(self) -> str:
        return f"sublinear({getattr(self.fun, '__qualname__', self.fun)!s}, budget={self.settings.budget!s})"

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """The function, traced and not planned."""
        statics, dynamic_args, dynamic_kwargs = self._statics.split(args, kwargs)
        with call_sites.enclosing(self.settings.target) as target:
            program = self._trace(statics, dynamic_args, dynamic_kwargs, len(args))
        check_differentiated(program)
        return replace(program, platform=get_target(target).platform)

    def _trace(self, statics: Any, args: list[Any], kwargs: dict[str, Any], n_args: int) -> Program:
        argnums = self._statics.dynamic_argnums(self.settings.argnums, n_args)
        program = trace(self._statics.bind(statics, n_args), args, kwargs, argnums=argnums)
        return program if self.settings.in_shardings is None else self._with_shardings(program, args, kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Callable[..., Any], Plan]:
        statics, dynamic_args, dynamic_kwargs = self._statics.split(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic_args, dynamic_kwargs))
        trial = call_sites.current()
        with call_sites.enclosing(self.settings.target) as target:
            key = (statics, tree, tuple(map(type_of, leaves)), compat.trace_context())
            if trial is None and key in self._ready:
                return self._ready[key]
            with self._locks(key):
                if trial is None and key in self._ready:
                    return self._ready[key]  # another thread has made it meanwhile
                program = self._programs.get(key)
                if program is None:
                    program = self._trace(statics, dynamic_args, dynamic_kwargs, len(args))
                return self._planned(key, program, trial, target)

    def _planned(self, key: Any, program: Program, trial: Any, target: Any) -> tuple[Program, Callable[..., Any], Plan]:
        program = replace(program, platform=get_target(target).platform)
        plan = self._plan_for(program) if trial is None else trial.plan(name_of(self.fun), program, self.settings)
        run = _Emitted(emit(program, plan), name_of(self.fun))
        if not any(isinstance(c, jax.core.Tracer) for c in program.consts):
            self._programs[key] = program
            if trial is None:
                self._ready[key] = (program, run, plan)
        return program, run, plan

    def _plan_for(self, program: Program) -> Plan:
        settings = as_said(program, self.settings)
        where = program.shardings, settings is self.settings, compat.trace_context()
        key = program.fingerprint, constants_key(program), where
        if key not in self._plans:
            self._plans[key] = make_plan(program, settings)
            warn_of_repeated(program, self._plans[key])
        return self._plans[key]

    def _with_shardings(self, program: Program, args: Any, kwargs: Any) -> Program:
        """Add the user's shardings of the arguments to a program."""
        leaves = jax.tree.leaves((args, kwargs))
        given = given_shardings(self.settings.in_shardings, args, len(program.consts), len(jax.tree.leaves(kwargs)))
        return replace(program, shardings=all_shardings([*program.consts, *leaves], given))


@overload
def sublinear(fun: Callable[P, R], **options: Unpack[Options]) -> Sublinear[P, R]: ...


@overload
def sublinear(fun: None = None, **options: Unpack[Options]) -> Callable[[Callable[P, R]], Sublinear[P, R]]: ...


def sublinear(
    fun: Callable[..., Any] | None = None,
    *,
    budget: AnyBudget = None,
    planner: str | Planner = "auto",
    plan: Plan | str | os.PathLike[str] | None = None,
    mirror: Mirror | None = None,
    verify: bool | None = None,
    target: Any = None,
    argnums: AnyArgnums = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    in_shardings: Any = None,
    cache: bool | str | os.PathLike[str] | Store = True,
    progress: bool = True,
    profile: bool | str = False,
    offload: str | None = None,
    chunks: Chunks = "auto",
    effort: str = "default",
    max_seconds: float | None = None,
) -> Any:
    """Return the same function with a gradient that fits a memory budget.

    The function is traced, its intermediates are priced, a plan is made of what to save and what to recompute, and the
    function is put together again with nested `jax.checkpoint` regions and gradient barriers. Arguments, results
    and gradients stay what they are. With a budget in bytes, or a fraction, regions that the function has are planned
    anew, and the plan is compiled and measured first. Under `jax.vmap` the budget is that of one example: put
    `sublinear` round the mapped function. Of such functions that call one another the outermost plans for all.

    Args:
        fun: The function, usually a loss. Left out, a decorator is returned.
        budget: What the compiler may allocate for its `value_and_grad` beside arguments and outputs: `"8GiB"`, an int
            of bytes, a float in (0, 1] (the fraction of what it needs now), or `None` for the least that at most one
            extra forward pass buys.
        planner: A planner's name or a planner; `jaxsub.planners.names()` lists them.
        plan: A plan made before, or the path of one that `Plan.save` wrote; nothing is planned then.
        mirror: The user's own mirror counts m(v), the paper's section 4.5. One for each equation, or a function of a
            `jaxsub.core.graph.Node`: they are the plan. A mapping from names that `jax.ad_checkpoint.checkpoint_name`
            gave to counts, such as `{"attention": 1, "mlp": 0}`: the planner plans, values counted 0 are saved, and
            those counted 1 or more are recomputed in the backward pass.
        verify: Whether to compile the plan and measure it. `None`: where the budget is bytes or a fraction. `False`
            trusts predictions, made without any compiler.
        target: The device to plan for, such as `"h100"`; `None` for the one in use.
        argnums: The arguments to differentiate, as for `jax.grad`: that gradient is planned and measured. `None`: the
            first positional argument with floating-point leaves, as for `jax.grad`, else all keyword arguments. All
            other derivatives are right too; a function with nothing to differentiate is not changed.
        static_argnums: Positions of static arguments; they must be hashable.
        static_argnames: Names of such arguments.
        in_shardings: Shardings of the positional arguments, as for `jax.jit` (trees of `jax.sharding.NamedSharding`):
            budgets are bytes of one device. `None`: those of arrays, shapes and explicit mesh axes; with automatic axes
            nothing inside `jax.jit` has a known sharding.
        cache: The plan cache and price cache: `True` for the user's cache directory, `False` for memory only, or a
            directory.
        progress: Whether to show, on a terminal, what is compiled when planning takes long, and to log what was decided
            in a line (logger `jaxsub`, level `INFO`).
        profile: What plans minimise: `False` for recomputed FLOPs, `True` for seconds, measured by running each
            distinct stage on the device in use, `"roofline"` for seconds by the published figures of `target`.
        offload: `"pinned_host"`: values may also be saved in that memory of the host, at the cost of copying them over
            the target's PCIe twice; plans then minimise seconds. Values inside loops, conditionals and nested regions
            stay on the device. `None`: on the device only.
        chunks: Whether runs of equations may be executed a slice of an independent axis at a time: a loss head in
            slices of its tokens, the whole function in slices of the batch. `"auto"`: with a budget in bytes or a
            fraction, where nothing else fits, or recomputes more than a little. `True`: wherever it spares memory.
            `False`: never. Or counts, by the name of a `jax.named_scope` or function, or by the dimension of the batch:
            `{"head": 8}`, `{0: 4}`.
        effort: `"low"` takes the first compiled plan that fits. `"high"` compiles others while one may spare 1 % of the
            gradient's FLOPs. `"default"` does too, but after four compiles each must spare twice as much as the last.
        max_seconds: After how many seconds nothing better than a plan that fits is looked for; one that fits is looked
            for all the same. Processes that must come to the same plan, such as hosts of a cluster, should not use it.

    Returns:
        A function with the same signature. Its methods `plan`, `measure`, `frontier` and `explain` take that function's
        arguments, all of which stay its own: `sublinear(loss, target="h100").plan(w, x, target=y)`.

    Raises:
        BudgetError: If the budget cannot be read.
        InfeasibleBudgetError: At the first call, if no plan fits; it says the least that would.
        UnsupportedError: At the first call, if something in the function cannot be supported, or the target has no
            memory to offload to.
        PlanMismatchError: At the first call, if `plan` was made for another function.

    Example:
        >>> import jax, jax.numpy as jnp, jaxsub
        >>> @jaxsub.sublinear
        ... def loss(w, x):
        ...     for _ in range(4):
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).mean()
        >>> jax.grad(loss)(jnp.eye(2), jnp.ones((3, 2))).shape
        (2, 2)

    References:
        Chen, Xu, Zhang, Guestrin, Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    made = None if plan is None else Plan.of(plan)
    settings = Settings(Budget.parse(budget), planner, made, mirror, verify, target,
                        read_argnums(argnums), cache, progress, profile,
                        in_shardings=in_shardings, offload=offload, chunks=chunks, effort=effort,
                        max_seconds=max_seconds)  # fmt: skip
    get(planner)
    numbers, names = several(static_argnums, "static_argnums"), several(static_argnames, "static_argnames")
    if fun is None:
        return lambda f: Sublinear(f, settings, numbers, names)
    return Sublinear(fun, settings, numbers, names)


def plan(fun: Callable[..., Any], /, *args: Any, budget: AnyBudget = None, planner: str | Planner = "auto",
         mirror: Mirror | None = None, verify: bool | None = None, target: Any = None, argnums: AnyArgnums = None,
         cache: AnyCache = True, progress: bool = True, profile: bool | str = False, offload: str | None = None,
         bound: bool = False, chunks: Chunks = "auto", effort: str = "default", max_seconds: float | None = None,
         **kwargs: Any) -> Plan:  # fmt: skip
    """Plan a function without running it.

    Args:
        fun: The function.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s.
        budget: As for `sublinear`, and so are the options that follow.
        planner: As for `sublinear`.
        mirror: As for `sublinear`.
        verify: As for `sublinear`.
        target: As for `sublinear`.
        argnums: As for `sublinear`.
        cache: As for `sublinear`.
        progress: As for `sublinear`.
        profile: As for `sublinear`.
        offload: As for `sublinear`.
        effort: As for `sublinear`.
        max_seconds: As for `sublinear`.
        bound: Whether to ask how far from the best the plan can be: `plan.lower_bound`, `plan.gap` and a line of
            `print(plan)`. Seconds, for programs of at most 60 stages; others get a warning and no bound.
        chunks: As for `sublinear`.
        **kwargs: Its keyword arguments. One that is called like an option above is refused: ask
            `jaxsub.sublinear(fun, ...).plan(*args, **kwargs)`, whose names are all the function's.

    Returns:
        The plan; print it, save it, or pass it to `sublinear(plan=...)`.

    Raises:
        BudgetError: If the budget cannot be read.
        InfeasibleBudgetError: If no plan fits; it says the least that would.
        UnsupportedError: If something in the function cannot be supported.

    Example:
        >>> import jax.numpy as jnp, jaxsub
        >>> plan = jaxsub.plan(
        ...     lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum(), jnp.eye(2), jnp.ones((3, 2)), verify=False
        ... )
        >>> plan.n_nodes
        5
    """
    refuse_collisions(plan, locals())
    wrapped = sublinear(fun, budget=budget, planner=planner, mirror=mirror, verify=verify, target=target,
                        argnums=argnums, cache=cache, progress=progress, profile=profile, offload=offload,
                        chunks=chunks, effort=effort, max_seconds=max_seconds)  # fmt: skip
    wrapped.settings = replace(wrapped.settings, bound=bound)
    return wrapped.plan(*args, **kwargs)


def measure(fun: Callable[..., Any], /, *args: Any, target: str | Target | None = None, argnums: AnyArgnums = None,
            **kwargs: Any) -> Measurement:  # fmt: skip
    """Compile the gradient of a function and read what the compiler allocates; nothing is run.

    Args:
        fun: The function: plain, `sublinear`, or with checkpoints made by hand. Its gradient is `jax.value_and_grad` of
            a scalar result, or of the first of a pair (loss, aux); of anything else the vector-Jacobian product.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s.
        target: The device to compile for; `None` for the one in use.
        argnums: The arguments the gradient is taken of, as for `jaxsub.sublinear`.
        **kwargs: Its keyword arguments. One that is called like an option above is refused: ask
            `jaxsub.sublinear(fun, ...).measure(*args, **kwargs)`, whose names are all the function's.

    Returns:
        Bytes, FLOPs and the time the compile took.

    Raises:
        UnsupportedError: If nothing can be differentiated, or the compiler does not say what it allocates.

    Example:
        >>> import jax.numpy as jnp, jaxsub
        >>> jaxsub.measure(lambda w: jnp.tanh(w).sum(), jnp.ones((8, 8))).output_bytes >= 256
        True
    """
    refuse_collisions(measure, locals())
    program = trace_call(fun, args, kwargs, argnums)
    return verifying.measured(program, as_traced(program), get_target(target))


def type_of(leaf: Any) -> Any:
    """What of an argument a trace and its plan depend on."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding
    try:
        return jax.typeof(leaf), sharding_of(leaf)
    except TypeError:
        return type(leaf)  # no array: `trace` says what is wrong with it


NOT_FOUND = (
    "invalid value (nan or infinity) encountered in what runs in slices or in regions, in no single operation. Call "
    "the plain function, in `__wrapped__`, under jax.debug_nans(True) to learn where."
)


class _Emitted:
    """An emitted function under `jax.jit`; a primitive that cannot be compiled runs by its own implementation."""

    def __init__(self, run: Callable[..., Any], name: str):
        run.__name__ = run.__qualname__ = f"sublinear_{name}"
        self._run = run
        self._jitted: Callable[..., Any] = jax.jit(run, inline=True)

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self._jitted(*inputs)
        except NotImplementedError:  # nothing has run yet; what was no fault of the compiler's is raised again
            outputs = self._run(*inputs)
            self._jitted = self._run
            return outputs
        except compat.NOT_FINITE as error:  # by `jax_debug_nans`, which names the operation that runs by itself
            with jax.disable_jit():
                self._run(*inputs)
            raise FloatingPointError(NOT_FOUND) from error  # as JAX does
