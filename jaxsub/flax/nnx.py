"""For `flax.nnx`: `remat` instead of `nnx.remat` with every policy, `sublinear` for losses of modules, and `jit`.

Modules are split into arrays and structure in front of the regions and merged inside, as all transformations of NNX do;
changed variables are results and are written back once. So BatchNorm statistics are updated once, RNG streams advance
once, and a shared submodule stays shared inside, however often the backward pass recomputes it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxsub import policies
from jaxsub.api import sublinear as api
from jaxsub.api.explain import Explanation
from jaxsub.api.frontier import Frontier
from jaxsub.core.checks import several
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.wrapped import P, R, Wrapped
from jaxsub.jaxpr.static_leaves import Static
from jaxsub.step import jit as step
from jaxsub.step.ahead_of_time import Lowered

CONTEXT = "jaxsub"


def remat(
    f: Callable[..., Any] | None = None,
    *,
    policy: str | policies.Policy | policies.JaxPolicy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Recompute a function's intermediates in the backward pass, except those that a policy saves.

    It replaces `nnx.remat`, and takes every policy, and bound methods too.

    Args:
        f: A function of modules and arrays, or a method, bound or not. Left out, a decorator is returned.
        policy: A name such as `"save_costly"` or `"save_within(2GiB)"`, a policy of `jaxsub.policies` or of JAX, or
            `None` to save nothing.
        prevent_cse: As for `jax.checkpoint`; pass `False` inside `nnx.scan`.
        static_argnums: Positions of static arguments.
        static_argnames: Names of such arguments, such as a flag that a module branches on.
        graph: As for `nnx.remat`: modules are graphs with shared references here; `None` or `True`.
        graph_updates: As for `nnx.remat`: variables made inside are returned; `None` or `True`.

    Returns:
        A function with the same arguments, results and effects on its modules.

    Raises:
        PolicyError: If there is no such policy.
        UnsupportedError: If `graph` or `graph_updates` is `False`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> remat(lambda layer, x: jnp.sin(layer(x)), policy="save_costly")(layer, jnp.ones((1, 3))).shape
        (1, 2)
    """
    for name, given in (("graph", graph), ("graph_updates", graph_updates)):
        if given is False:
            raise UnsupportedError(
                f"{name}=False: jaxsub.flax.nnx.remat treats modules as graphs and returns all changes to them, which "
                f"is more than nnx.remat does with {name}=False. Leave {name}= out."
            )
    if f is None:
        return functools.partial(
            remat,
            policy=policy,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    numbers, names = several(static_argnums, "static_argnums"), several(static_argnames, "static_argnames")
    if inspect.ismethod(f):
        wrapped = remat(
            f.__func__, policy=policy, prevent_cse=prevent_cse, static_argnums=numbers, static_argnames=names
        )
        return functools.partial(wrapped, f.__self__)
    found = policies.get(policy)
    lifted = policies.checkpoint(_pure(f), policy=found, prevent_cse=prevent_cse)

    @functools.wraps(f)
    def wrapped_f(*args: Any, **kwargs: Any) -> Any:
        return _call(lifted, nnx.Param, numbers, names, *args, **kwargs)

    return wrapped_f


def sublinear(
    loss: Callable[..., Any] | None = None,
    *,
    wrt: Any = nnx.Param,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **options: Any,
) -> Any:
    """Return the same loss of modules with a gradient that fits a budget: `jaxsub.sublinear` for NNX.

    Args:
        loss: A function of modules and arrays, `loss(model, batch)`. Left out, a decorator is returned.
        wrt: The variables to differentiate: a filter, as for `nnx.DiffState`.
        static_argnums: Positions of static arguments; they must be hashable.
        static_argnames: Names of such arguments.
        **options: As for `jaxsub.sublinear`: `budget`, `planner`, `plan`, `target` and so on.

    Returns:
        A function with the same signature, for `nnx.grad`, `nnx.value_and_grad` or a plain call; its method
        `plan(model, batch)` returns the plan it uses.

    Raises:
        BudgetError: If the budget cannot be read.
        InfeasibleBudgetError: At the first call, if no plan fits.
        UnsupportedError: If `in_shardings` has more than one sharding for a module.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> loss = sublinear(lambda model, x: (model(x) ** 2).sum())
        >>> nnx.grad(loss)(model, jnp.ones((1, 3)))["kernel"].shape
        (3, 2)
    """
    if loss is None:
        return functools.partial(
            sublinear, wrt=wrt, static_argnums=static_argnums, static_argnames=static_argnames, **options
        )
    given = options.get("argnums")
    for state in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(state, nnx.DiffState):
            raise TypeError(
                f"argnums takes no nnx.DiffState here: pass wrt={getattr(state.filter, '__name__', state.filter)} to "
                "jaxsub.flax.nnx.sublinear, and the nnx.DiffState to nnx.grad or nnx.value_and_grad alone."
            )
    is_state = lambda x: isinstance(x, nnx.State) or is_node(x)  # noqa: E731
    if any(map(is_state, jax.tree.leaves(options.get("in_shardings"), is_leaf=is_state))):
        raise UnsupportedError(
            "in_shardings= takes one sharding for a module, or None, here. With a sharding for each of its variables, "
            "nnx.split the module and pass its state to jaxsub.sublinear; outside of jit its arrays carry their own."
        )
    numbers, names = several(static_argnums, "static_argnums"), several(static_argnames, "static_argnames")
    return _Sublinear(loss, wrt, numbers, names, options)


class _Sublinear(Wrapped[P, R]):
    """A loss of modules under a plan."""

    __slots__ = ("_how", "_options", "_planned")

    def __init__(
        self, loss: Callable[P, R], wrt: Any, numbers: Sequence[int], names: Sequence[str], options: dict[str, Any]
    ):
        functools.update_wrapper(self, loss)
        self.fun, self._options = loss, options
        self._planned = api.sublinear(_pure(loss), **options)
        self._how = (wrt, numbers, names)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the loss; its changes to modules are written back once."""
        result: R = _call(self._planned, *self._how, *args, **kwargs)
        return result

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Make the plan for these modules and arrays, without changing the modules."""
        with nnx.update_context(CONTEXT):
            return self._planned.plan(*_split(args, kwargs, *self._how))

    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        """Measure the memory of the gradient under the plan, as `jaxsub.measure` does."""
        with nnx.update_context(CONTEXT):
            return self._planned.measure(*_split(args, kwargs, *self._how))

    def frontier(self, *args: Any, **kwargs: Any) -> Frontier:
        """Plan for many budgets, as `jaxsub.frontier` does."""
        with nnx.update_context(CONTEXT):
            return self._planned.frontier(*_split(args, kwargs, *self._how))

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Explain its memory before any plan, as `jaxsub.explain` does."""
        with nnx.update_context(CONTEXT):
            return self._planned.explain(*_split(args, kwargs, *self._how))

    def made_of(self) -> tuple[Any, ...]:
        """What an equal one is made of."""
        return self.fun, *self._how, self._options

    def __repr__(self) -> str:
        return repr(self._planned)


def jit(fun: Callable[..., Any] | None = None, *, memory: Any = None, **options: Any) -> Any:
    """`jaxsub.jit` for steps of modules and optimizers: what `nnx.jit` is to `jax.jit`.

    Changes to modules and optimizers are written back. With `memory` the `sublinear` functions inside get plans with
    which the whole step fits; without, it is `nnx.jit` with an option that keeps JAX 0.10 to 0.11.0 from merging
    recomputation away on the CPU.

    Args:
        fun: The function of modules, optimizers and arrays. Left out, a decorator is returned.
        memory: The most memory of a device that the step may take, as for `jaxsub.jit`.
        **options: As for `jaxsub.jit`: `donate_argnums`, `static_argnames`, `target`, `progress` and so on. Donated
            modules are overwritten, so that their arrays count once.

    Returns:
        A `Jitted`.

    Raises:
        BudgetError: If `memory` cannot be read.
        InfeasibleBudgetError: At the first call, if the step does not fit.
        UnsupportedError: If shardings are given: arrays keep their own.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> loss = sublinear(lambda model, x: (model(x) ** 2).sum())
        >>> @jit(donate_argnums=(0, 1))
        ... def train_step(model, optimizer, x):
        ...     value, grads = nnx.value_and_grad(loss)(model, x)
        ...     optimizer.update(model, grads)
        ...     return value
        >>> first, second = (float(train_step(model, optimizer, jnp.ones((1, 3)))) for _ in range(2))
        >>> second < first
        True
    """
    if fun is None:
        return functools.partial(jit, memory=memory, **options)
    if given := sorted({"in_shardings", "out_shardings"} & options.keys()):
        raise UnsupportedError(
            f"jaxsub.flax.nnx.jit takes no {' and no '.join(given)}: arrays keep their shardings. Shard them first, "
            "with jax.device_put or with shardings in the model."
        )
    return Jitted(fun, memory, options)


class Jitted(Wrapped[P, R]):
    """A compiled step of modules and optimizers; made by `jit`."""

    __slots__ = ("_memory", "_options", "_step")

    def __init__(self, fun: Callable[P, R], memory: Any, options: dict[str, Any]):
        functools.update_wrapper(self, fun)
        self.fun, self._memory, self._options = fun, memory, options
        self._step: Any = step.jit(_step_of_arrays(fun), memory=memory, **options)

    def made_of(self) -> tuple[Any, ...]:
        """What an equal one is made of."""
        return self.fun, self._memory, self._options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step; changes to its arguments are written back."""
        result: R = self._call(self._step, *args, **kwargs)
        return result

    def _call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(CONTEXT):
            pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=CONTEXT)
            pure = run(*pure_args, **pure_kwargs)
            return nnx.from_tree(pure, ctxtag=CONTEXT, is_inner=False)[1]

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lower the step as `jax.jit` does: `.compile()` takes what it takes, and reports its memory."""
        return Lowered(self._with_arrays(self._step.lower, args, kwargs), self._call)

    def report(self, *args: Any, **kwargs: Any) -> Any:
        """Report the step's memory and plans, as `jaxsub.step.jit.Step.report` does, without running it.

        Modules and optimizers may be those of `nnx.eval_shape`, which have shapes in place of arrays.
        """
        return self._of_step("report", args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Make the plan of the step, as `jaxsub.step.jit.Step.plan` does: `jit(plan=...)` takes it."""
        return self._of_step("plan", args, kwargs)

    def _of_step(self, method: str, args: Any, kwargs: Any) -> Any:
        if not isinstance(self._step, step.Step):
            raise ValueError(f'{method}() needs a memory: pass jit(memory=...), such as memory=0.5 or "24GiB".')
        return self._with_arrays(getattr(self._step, method), args, kwargs)

    def _with_arrays(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with nnx.update_context(CONTEXT):
            pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=CONTEXT)
            return function(*pure_args, **pure_kwargs)


def _step_of_arrays(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of modules into one of arrays, argument by argument, that returns changed modules and result."""

    @functools.wraps(fun)
    def pure(*pure_args: Any, **pure_kwargs: Any) -> Any:
        args, kwargs = nnx.from_tree((pure_args, pure_kwargs), ctxtag=CONTEXT, is_inner=True)
        out = fun(*args, **kwargs)
        return nnx.to_tree((_nodes((args, kwargs)), out), ctxtag=CONTEXT)

    return pure


def _nodes(tree: Any) -> Any:
    """Replace everything in a tree but modules and variables by `None`."""
    return jax.tree.map(lambda x: x if is_node(x) else None, tree, is_leaf=is_node)


def _call(
    lifted: Callable[..., Any], wrt: Any, numbers: Sequence[int], names: Sequence[str], /, *args: Any, **kwargs: Any
) -> Any:
    """Split the modules among the arguments, call a lifted pure function, write back its changes."""
    with nnx.update_context(CONTEXT):
        active, tree = _split(args, kwargs, wrt, numbers, names)
        first, (rest, shape, tree_out) = lifted(active, tree)
        out = jax.tree.unflatten(shape.value, [first, *rest] if shape.value.num_leaves else [])
        _, merged = nnx.from_tree((tree_out, out), ctxtag=CONTEXT, is_inner=False)
        return merged


def _split(
    args: Sequence[Any], kwargs: dict[str, Any], wrt: Any, numbers: Sequence[int], names: Sequence[str]
) -> tuple[list[Any], Any]:
    """Split arguments into the differentiated variables and one tree of everything else."""
    fixed = {n % len(args) for n in numbers if -len(args) <= n < len(args)}
    wrapped = [Static(a) if i in fixed else a for i, a in enumerate(args)]
    keywords = {k: Static(v) if k in names else v for k, v in kwargs.items()}
    active: list[Any] = []

    def split(context: Any, path: Any, prefix: Any, node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return nnx.NodeStates.from_split(*context.split(node))
        graphdef, wanted, rest = context.split(node, wrt, ...)
        active.append(wanted)
        return nnx.NodeStates.from_split(graphdef, rest)

    return active, nnx.to_tree((wrapped, keywords), split_fn=split, ctxtag=CONTEXT)


def _pure(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of modules into one of arrays: from `_split`'s pair to the result's leaves and tree and modules.

    The first leaf comes first, where a loss is expected.
    """

    @functools.wraps(fun)
    def pure(active: Sequence[Any], tree: Any) -> Any:
        states = iter(active)

        def merge(context: Any, path: Any, prefix: Any, value: Any) -> Any:
            if isinstance(value.graphdef, nnx.graph.VariableDef):
                return context.merge(value.graphdef, *value.states)
            return context.merge(value.graphdef, next(states), *value.states)

        args, kwargs = nnx.from_tree(tree, merge_fn=merge, ctxtag=CONTEXT, is_inner=True)
        out = fun(*map(_unwrap, args), **{k: _unwrap(v) for k, v in kwargs.items()})
        tree_out, pure_out = nnx.to_tree((_nodes((args, kwargs)), out), ctxtag=CONTEXT)
        leaves, shape = jax.tree.flatten(pure_out)
        return (leaves[0] if leaves else 0.0), (leaves[1:], Static(shape), tree_out)

    return pure


def _unwrap(x: Any) -> Any:
    return x.value if isinstance(x, Static) else x


def is_node(x: Any) -> bool:
    """Tell whether something is a module, a variable or another object that NNX keeps by reference."""
    return isinstance(x, nnx.Variable) or nnx.graph.is_graph_node(x)
