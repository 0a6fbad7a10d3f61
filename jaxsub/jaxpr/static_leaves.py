"""Find static leaves of arguments and results, and refuse lost changes to modules of Flax NNX.

A function among the leaves, such as an activation, cannot be traced: it is static, like the structure of the tree. In
an Equinox module every leaf but arrays is static, such as a dropout rate or a flag, as for `equinox.filter_jit`.
Elsewhere Python's numbers are arguments, as for `jax.jit`.

Modules of Flax NNX are pytrees too, but calls change them: statistics, counters of random streams. Changes inside a
traced function would be lost, as under `jax.jit`, and the next step would be wrong.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax

from jaxsub.core.checks import require_function
from jaxsub.core.errors import UnsupportedError

Fixed = tuple[tuple[int, type, Any], ...]
"""Static leaves: position, type and value; hashable if the values are."""


@jax.tree_util.register_static
class Static:
    """Wrap a static value as a node of a tree without leaves, part of the structure; `1` and `True` differ.

    Example:
        >>> jax.tree.leaves([Static("relu"), 2.0]), Static(1) == Static(True)
        ([2.0], False)
    """

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


@jax.tree_util.register_static
class _Passed(Static):
    """A static leaf of a result."""


def can_trace(leaf: Any) -> bool:
    """Whether JAX can trace a leaf: an array, a shape with a dtype, or a number."""
    return isinstance(leaf, Number) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def passing(results: Any) -> Any:
    """Let results that JAX cannot trace, such as names or the activations of a model, pass as parts of their tree."""
    return jax.tree.map(lambda x: x if can_trace(x) else _Passed(x), results)


def passed(structure: Any, arrays: Sequence[Any]) -> Any:
    """Build the results of a function that was traced `passing` them."""
    leaves, tree = jax.tree.flatten(jax.tree.unflatten(structure, arrays), is_leaf=lambda x: isinstance(x, _Passed))
    return jax.tree.unflatten(tree, [leaf.value if isinstance(leaf, _Passed) else leaf for leaf in leaves])


def fixed_leaves(tree: Any) -> Fixed:
    """Find the static leaves.

    Example:
        >>> [place for place, _, _ in fixed_leaves({"activation": max, "rate": 0.5})]
        [0]
    """
    leaves = jax.tree.leaves(tree)
    if all(hasattr(leaf, "dtype") for leaf in leaves):
        return ()
    module = getattr(sys.modules.get("equinox"), "Module", ())
    is_fixed: list[bool] = []
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module)):
        if isinstance(part, module):
            is_fixed += [not hasattr(leaf, "dtype") for leaf in jax.tree.leaves(part)]
        else:
            is_fixed.append(callable(part) and not hasattr(part, "dtype"))
    return tuple((i, type(leaves[i]), leaves[i]) for i, fixed in enumerate(is_fixed) if fixed)


def without(tree: Any, fixed: Fixed) -> Any:
    """Replace static leaves by `None`."""
    leaves, structure = jax.tree.flatten(tree)
    places = {i for i, _, _ in fixed}
    return jax.tree.unflatten(structure, [None if i in places else leaf for i, leaf in enumerate(leaves)])


def put_back(structure: Any, leaves: Sequence[Any], fixed: Fixed) -> Any:
    """Build the tree of `structure` from the static leaves and the others."""
    values = {i: value for i, _, value in fixed}
    rest = iter(leaves)
    merged = [values[i] if i in values else next(rest) for i in range(structure.num_leaves)]
    return jax.tree.unflatten(structure, merged)


def of_the_others(fun: Callable[..., Any], structure: Any, fixed: Fixed) -> Callable[..., Any]:
    """Turn a function of `(args, kwargs)` of a structure into one that takes them without the static leaves."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = put_back(structure, jax.tree.leaves((list(args), kwargs)), fixed)
        return fun(*args, **kwargs)

    return call


def losing_nothing(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make a function refuse to change modules of Flax NNX in place without returning the changes.

    At the call, an `UnsupportedError` names the function of ours in `jaxsub.flax.nnx` that keeps them.
    """
    require_function(fun, name)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = {place: id(leaf) for place, _, leaf in _in_modules((args, kwargs))}
        alive = jax.tree.leaves((args, kwargs)) if before else []  # so that no id is reused
        out = fun(*args, **kwargs)
        if not before:
            return out
        returned = set(map(id, jax.tree.leaves(out)))
        others = [
            (called, leaf) for place, called, leaf in _in_modules((args, kwargs)) if before.get(place) != id(leaf)
        ]
        changed = [called for called, leaf in others if id(leaf) not in returned]
        del alive
        if changed:
            raise UnsupportedError(
                f"The function changes {len(changed)} variables of its modules, such as `{changed[0]}`, and the "
                f"changes would be lost. Pass it to jaxsub.flax.nnx.{name} instead of jaxsub.{name}, which writes them "
                "back once, or return nnx.state(module) too."
            )
        return out

    return call


def returning_changes(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that changes arguments in place, as modules of Flax NNX, return these as well."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        before = list(map(jax.tree.leaves, given))
        out = fun(*args, **kwargs)
        pairs = zip(given, before, strict=True)
        changed = [a for a, old in pairs if list(map(id, old)) != list(map(id, jax.tree.leaves(a)))]
        return (out, changed) if changed else out

    return call


def _in_modules(tree: Any) -> list[tuple[str, str, Any]]:
    """List the leaves of modules of Flax NNX: path in the tree, name in the module, leaf."""
    module = getattr(sys.modules.get("flax.nnx"), "Module", ())
    found = []
    for at, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, module)):
        if isinstance(part, module):
            inside = jax.tree_util.tree_leaves_with_path(part)
            for path, leaf in inside:
                name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
                found.append((jax.tree_util.keystr((*at, *path)), name, leaf))
    return found
