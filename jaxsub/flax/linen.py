"""For `flax.linen`: `remat` instead of `nn.remat`, and `sublinear` for losses of variables or of bound modules.

Both lift a transformation of pure functions to modules the way Linen lifts `jax.checkpoint`: variable collections and
PRNG sequences become arguments, mutated collections become results. So BatchNorm statistics, sown values and dropout
keys pass through a region like all values, and recompute in the backward pass never writes them a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_transform

from jaxsub import policies
from jaxsub.api import sublinear as api
from jaxsub.core.checks import several
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.wrapped import P, R, Wrapped

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def remat(
    target: Any,
    variables: Any = True,
    rngs: Any = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: str | policies.Policy | policies.JaxPolicy | None = None,
    methods: Any = None,
) -> Any:
    """Recompute a module's intermediates in the backward pass, except those that a policy saves.

    It replaces `nn.remat`: it takes the same arguments and every policy, and gives parameters the same names.

    Args:
        target: A module class, or a function or method whose first argument is a module.
        variables: The variable collections that are lifted.
        rngs: The PRNG sequences that are lifted.
        concrete: Must be `False`: JAX removed it, and `static_argnums` replaces it.
        prevent_cse: As for `jax.checkpoint`; pass `False` inside `nn.scan`.
        static_argnums: Positions of static arguments; 0 is the module.
        policy: A name such as `"save_costly"` or `"save_within(2GiB)"`, a policy of `jaxsub.policies` or of JAX, or
            `None` to save nothing.
        methods: The methods to wrap, as for `nn.remat`; `None` for `__call__`.

    Returns:
        The class or function, wrapped.

    Raises:
        PolicyError: If there is no such policy.
        UnsupportedError: If `concrete` is true.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> layer = remat(nn.Dense, policy="save_costly")(2)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> layer.apply(variables, jnp.ones((1, 3))).shape
        (1, 2)
    """
    if concrete:
        raise UnsupportedError(
            "concrete=True: JAX removed it, and nn.remat refuses it too. Leave it out, and name the arguments "
            "that the module branches on: static_argnums=(1,) for the first one after the module."
        )
    found = policies.get(policy)
    numbers = several(static_argnums, "static_argnums")
    # the lifted function has variables and keys as arguments 0 and 1 in place of the module, then the others from 2 on
    inner = tuple(n + 1 if n > 0 else n for n in numbers)

    def wrap(pure: Callable[..., Any]) -> Callable[..., Any]:
        return policies.checkpoint(pure, policy=found, prevent_cse=prevent_cse, static_argnums=inner)

    def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _lifted(fn, wrap, variables, rngs)

    return lift_transform(checkpoint, target, methods=methods)


def sublinear(loss: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the same loss with a gradient that fits a budget: `jaxsub.sublinear` for Linen.

    The loss may be a function of variables, `loss(params, batch)`, that calls `model.apply` itself, unbound modules
    among its arguments included; or, inside a module, a function of a bound module, `loss(module, batch)`, whose
    variables are then lifted as `nn.value_and_grad` lifts them.

    Args:
        loss: The loss. Left out, a decorator is returned.
        **options: As for `jaxsub.sublinear`.

    Returns:
        A function with the same signature.

    Raises:
        BudgetError: If the budget cannot be read.
        InfeasibleBudgetError: At the first call, if no plan fits.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> model, x = nn.Dense(2), jnp.ones((1, 3))
        >>> variables = model.init(jax.random.key(0), x)
        >>> loss = sublinear(lambda variables, x: (model.apply(variables, x) ** 2).sum())
        >>> jax.grad(loss)(variables, x)["params"]["kernel"].shape
        (3, 2)
    """
    if loss is None:
        return functools.partial(sublinear, **options)
    return _Sublinear(loss, options)


class _Sublinear(Wrapped[P, R]):
    """A loss of variables, or of a bound module; `plan` and the like take a loss of variables."""

    __slots__ = ("_lifted", "_options", "_plain", "explain", "frontier", "measure", "plan")

    def __init__(self, loss: Callable[P, R], options: dict[str, Any]):
        functools.update_wrapper(self, loss)
        self.fun = loss
        self._plain = api.sublinear(loss, **options)
        self._lifted: Callable[..., Any] = lift_transform(self._transform, loss)
        self._options = options
        self.plan, self.measure = self._plain.plan, self._plain.measure
        self.frontier, self.explain = self._plain.frontier, self._plain.explain

    def made_of(self) -> tuple[Any, ...]:
        """What an equal one is made of."""
        return self.fun, self._options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the loss."""
        is_bound = bool(args) and isinstance(args[0], nn.Module) and args[0].scope is not None
        result: R = (self._lifted if is_bound else self._plain)(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return repr(self._plain)

    def _transform(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return _lifted(fn, functools.partial(_sublinear_pure, options=self._options), True, True)


def _sublinear_pure(pure: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Plan a pure function `-> (result, variables)`; its first leaf comes first, where a loss is expected."""
    trees: list[Any] = []

    def flat(*args: Any, **kwargs: Any) -> Any:
        result, variables = pure(*args, **kwargs)
        leaves, tree = jax.tree.flatten(result)
        trees.append(tree)
        return leaves[0], (leaves[1:], variables)

    planned = api.sublinear(flat, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        first, (rest, variables) = planned(*args, **kwargs)
        return jax.tree.unflatten(trees[-1], [first, *rest]), variables

    return call


def _lifted(fn: Callable[..., Any], wrap: Transform, variables: Any, rngs: Any) -> Callable[..., Any]:
    """Lift a transformation of pure functions to a function of scopes, as `flax.core.lift.checkpoint` does."""

    def inner(scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(fn)
        def pure(variable_groups: Any, rng_groups: Any, *args: Any, **kwargs: Any) -> Any:
            scope = scope_fn(variable_groups, rng_groups)
            result = fn(scope, *args, **kwargs)
            return result, repack_fn(scope)

        return wrap(pure)(variable_groups, rng_groups, *args, **kwargs)

    return lift.pack(inner, (variables,), (variables,), (rngs,), name="remat", enable_kwargs=True)
