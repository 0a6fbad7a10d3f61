"""For Equinox: `filter_jit` and `filter_checkpoint` in the places of those of Equinox.

Filtered as there: arrays of JAX and NumPy are traced, every other leaf is static, of arguments, of the function itself
where it is a module, and of results. A loss needs nothing of this: `jaxsub.sublinear` takes modules as they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import equinox as eqx
import jax

from jaxsub import policies
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.step_plan import StepPlan
from jaxsub.core.wrapped import P, R, Wrapped, name_of
from jaxsub.jaxpr.static_leaves import Static
from jaxsub.step import jit as step
from jaxsub.step.ahead_of_time import Lowered
from jaxsub.step.options import with_options
from jaxsub.step.report import StepReport

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
DONATE = ("all", "all-except-first", "warn", "warn-except-first", "none")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
ITSELF = "the function itself"
"""What the arrays of a module that is compiled as a function are called; no parameter can be called so."""


@overload
def filter_jit(
    fun: Callable[P, R], *, memory: None = None, donate: Donate = "none", **options: Any
) -> Callable[P, R]: ...


@overload
def filter_jit(
    fun: Callable[P, R], *, memory: step.AnyMemory, donate: Donate = "none", **options: Any
) -> Jitted[P, R]: ...


@overload
def filter_jit(
    fun: None = None, *, memory: None = None, donate: Donate = "none", **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@overload
def filter_jit(
    fun: None = None, *, memory: step.AnyMemory, donate: Donate = "none", **options: Any
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def filter_jit(
    fun: Callable[..., Any] | None = None,
    *,
    memory: step.AnyMemory | None = None,
    donate: Donate = "none",
    **options: Any,
) -> Any:
    """`eqx.filter_jit` for train steps: one that fits a device's memory, and that the CPU's compiler does not undo.

    With `memory` the `sublinear` functions inside are given plans with which the whole step fits, as by `jaxsub.jit`.
    Without, it is `eqx.filter_jit`, but for an option without which JAX 0.10 to 0.11.0 would merge recomputation away
    on the CPU.

    Args:
        fun: The function: all arrays among the leaves of its arguments are traced, everything else is static. A module
            is a function too. Left out, a decorator is returned.
        memory: What the step may take of a device, as for `jaxsub.jit`.
        donate: Whose arrays are donated, as for `eqx.filter_jit`: `"all"`, `"all-except-first"` (the first argument's
            are kept), `"warn"` and `"warn-except-first"` (the same, and JAX warns of those that it cannot reuse), or
            `"none"`.
        **options: With `memory`, as for `jaxsub.jit`: `target`, `cache`, `progress` and so on; else for `jax.jit`.

    Returns:
        With `memory` a `Jitted`, whose `report(*args)` says what the step takes; else what `eqx.filter_jit` returns.

    Raises:
        BudgetError: If `memory` cannot be read.
        InfeasibleBudgetError: At the first call, if the step does not fit.
        ValueError: If `donate` is none of these.
        UnsupportedError: If arguments are named that are static or donated, or shardings are given.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, jaxsub
        >>> loss = jaxsub.sublinear(lambda model, x: (jax.vmap(model)(x) ** 2).mean())
        >>> @filter_jit(memory=0.9, donate="all-except-first", progress=False)
        ... def step(x, model):
        ...     grads = eqx.filter_grad(loss)(model, x)
        ...     return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        >>> model = eqx.nn.MLP(16, 16, 16, 16, activation=jnp.tanh, key=jax.random.key(0))
        >>> x = jnp.ones((256, 16))
        >>> found = step.report(x, model)
        >>> found.step_bytes <= found.memory_bytes < found.plain_bytes
        True
        >>> model = step(x, model)
    """
    if fun is None:
        return functools.partial(filter_jit, memory=memory, donate=donate, **options)
    refused = {f"{what}_{how}" for what in ("static", "donate") for how in ("argnums", "argnames")}
    if told := sorted((refused | {"in_shardings", "out_shardings"}) & options.keys()):
        raise UnsupportedError(
            f"jaxsub.equinox.filter_jit takes no {' and no '.join(told)}: all but arrays is static, donate= says "
            "whose arrays are donated, and the step runs where its arrays lie."
        )
    if donate not in DONATE:
        raise ValueError(f"donate= is one of {', '.join(map(repr, DONATE))}, got {donate!r}.")
    if memory is not None:
        return Jitted(fun, memory, donate, options)
    if told := sorted(options.keys() - inspect.signature(jax.jit).parameters.keys()):
        raise TypeError(f"{told[0]}= says how to size a step, or nothing at all; say what it may take, too: memory=.")
    return eqx.filter_jit(fun, donate=donate, **with_options(options))


class Jitted(Wrapped[P, R]):
    """A step of modules that fits a device; made by `filter_jit(memory=...)`."""

    __slots__ = ("_donate", "_memory", "_options", "_signature", "_step")

    def __init__(self, fun: Callable[P, R], memory: Any, donate: Donate, options: dict[str, Any]):
        functools.update_wrapper(self, fun, updated=())  # the fields of a module stay its own
        self.fun, self._memory, self._donate, self._options = fun, memory, donate, options
        self._signature = _with_a_first(inspect.signature(fun))
        parameters = list(self._signature.parameters.values())
        keeps_first = donate.endswith("-except-first") and parameters and parameters[0].kind in POSITIONAL
        names = [p.name for p in parameters[bool(keeps_first) :]]
        donated = [] if donate == "none" else [ITSELF, *names]
        self._step: Any = step.jit(self._pure(), memory=memory, static_argnums=0, donate_argnames=donated, **options)

    def made_of(self) -> tuple[Any, ...]:
        """What an equal one is made of."""
        return self.fun, self._memory, self._donate, self._options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step."""
        static, arrays = self._split(args, kwargs)
        with self._warnings():
            made, rest = self._step(static, **arrays)
        result: R = eqx.combine(made, rest.value)
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The step, lowered as `jax.jit` does it: `.compile()` takes what it does, and says what memory it takes."""
        static, arrays = self._split(args, kwargs)
        with self._warnings():
            return Lowered(self._step.lower(static, **arrays), self._call_compiled)

    def _call_compiled(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made, rest = compiled(**self._split(args, kwargs)[1])
        return eqx.combine(made, rest.value)

    def report(self, *args: Any, **kwargs: Any) -> StepReport:
        """What the step takes, as `jaxsub.step.jit.Step.report` says it; arrays may be shapes, and nothing is run."""
        static, arrays = self._split(args, kwargs)
        with self._warnings():
            found: StepReport = self._step.report(static, **arrays)
            return found

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """What was decided, as `jaxsub.step.jit.Step.plan` has it: `filter_jit(memory=..., plan=...)` takes it."""
        static, arrays = self._split(args, kwargs)
        with self._warnings():
            found: StepPlan = self._step.plan(static, **arrays)
            return found

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Static, dict[str, Any]]:
        """What is static, and arrays by the names of their arguments."""
        named = {**self._signature.bind(*args, **kwargs).arguments, ITSELF: self.fun}
        arrays, rest = eqx.partition(named, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
        leaves, tree = jax.tree.flatten(rest)
        return Static((tree, tuple((type(leaf), leaf) for leaf in leaves))), arrays

    def _pure(self) -> Callable[..., Any]:
        """The function of what is static and of arrays by name, to arrays and what else it returns."""

        def pure(static: Static, /, **arrays: Any) -> tuple[Any, Static]:
            tree, leaves = static.value
            named = eqx.combine(arrays, jax.tree.unflatten(tree, [leaf for _, leaf in leaves]))
            fun = named.pop(ITSELF)
            bound = inspect.BoundArguments(self._signature, named)
            return _filtered(fun(*bound.args, **bound.kwargs))

        pure.__name__ = pure.__qualname__ = name_of(self.fun)
        return pure

    @contextlib.contextmanager
    def _warnings(self) -> Iterator[None]:
        with warnings.catch_warnings():
            if self._donate.startswith("all"):
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            yield


def filter_checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: str | policies.Policy | policies.JaxPolicy | None = None,
) -> Any:
    """Recompute a function's intermediates in the backward pass, but for what a policy saves.

    It replaces `eqx.filter_checkpoint`, with its arguments, and takes every policy.

    Args:
        fun: A function of modules and arrays, or a module. Left out, a decorator is returned.
        prevent_cse: As for `jax.checkpoint`; pass `False` inside `jax.lax.scan`.
        policy: What to save: a name such as `"save_costly"` or `"save_within(2GiB)"`, a policy of `jaxsub.policies` or
            of JAX, or `None` for nothing.

    Returns:
        A module in the place of the function; where that is a module, its arrays are leaves of this one.

    Raises:
        PolicyError: If there is no such policy.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> layer = filter_checkpoint(eqx.nn.Linear(3, 2, key=jax.random.key(0)), policy="save_costly")
        >>> layer(jnp.ones(3)).shape, [leaf.shape for leaf in jax.tree.leaves(layer)]
        ((2,), [(2, 3), (2,)])
    """
    if fun is None:
        return functools.partial(filter_checkpoint, prevent_cse=prevent_cse, policy=policy)
    return eqx.module_update_wrapper(Checkpointed(fun, policies.get(policy), prevent_cse))


class Checkpointed(eqx.Module):
    """A function or module under a policy; made by `filter_checkpoint`."""

    fun: Callable[..., Any]
    policy: Any = eqx.field(static=True)
    prevent_cse: bool = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; arrays among the leaves of its arguments are differentiated, the rest is static."""
        arrays, static = eqx.partition((self.fun, args, kwargs), eqx.is_array)

        def pure(arrays: Any) -> tuple[Any, Static]:
            fun, args, kwargs = eqx.combine(arrays, static)
            return _filtered(fun(*args, **kwargs))

        pure.__name__ = pure.__qualname__ = name_of(self.fun)
        made, rest = policies.checkpoint(pure, policy=self.policy, prevent_cse=self.prevent_cse)(arrays)
        return eqx.combine(made, rest.value)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind like a function does, so that methods can be decorated."""
        return self if instance is None else eqx.Partial(self, instance)


def _filtered(out: Any) -> tuple[Any, Static]:
    """The arrays of a result, and the rest of it."""
    arrays, rest = eqx.partition(out, eqx.is_array)
    return arrays, Static(rest)


def _with_a_first(signature: inspect.Signature) -> inspect.Signature:
    """The same signature, in which the first argument has a parameter of its own, not one with those after it."""
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        return signature
    first = inspect.Parameter(f"first_of_{parameters[0].name}", inspect.Parameter.POSITIONAL_ONLY, default=None)
    return signature.replace(parameters=[first, *parameters])
