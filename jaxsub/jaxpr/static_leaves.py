"""Leaves of arguments that are no arrays, functions and what Equinox's modules hold; and modules that change in place.

A function among the leaves, an activation perhaps, cannot be traced and need not be: it is part of what the arguments
are, like their tree. In an Equinox module so is every leaf that is no array, a dropout rate or a flag, as
`equinox.filter_jit` has it. Elsewhere Python's numbers are arguments, as for `jax.jit`.

Modules of Flax NNX are pytrees too, but change when they are called: statistics, counters of random streams. What a
traced function changes in them would be lost, as it is under `jax.jit`, and the next step would not be the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsub.core.errors import UnsupportedError

Fixed = tuple[tuple[int, type, Any], ...]
"""Leaves that are left as they are: position, type and value; hashable if the values are."""


@jax.tree_util.register_static
class Static:
    """What is no array, as a node of a tree: it has no leaves and is part of the tree; `1` and `True` are two.

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


def fixed_leaves(tree: Any) -> Fixed:
    """Find the leaves that are left as they are.

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
    """The tree with nothing in the place of fixed leaves."""
    leaves, structure = jax.tree.flatten(tree)
    places = {i for i, _, _ in fixed}
    return jax.tree.unflatten(structure, [None if i in places else leaf for i, leaf in enumerate(leaves)])


def put_back(structure: Any, leaves: Sequence[Any], fixed: Fixed) -> Any:
    """The tree of `structure` with the fixed leaves among the others."""
    values = {i: value for i, _, value in fixed}
    rest = iter(leaves)
    merged = [values[i] if i in values else next(rest) for i in range(structure.num_leaves)]
    return jax.tree.unflatten(structure, merged)


def of_the_others(fun: Callable[..., Any], structure: Any, fixed: Fixed) -> Callable[..., Any]:
    """A function of `(args, kwargs)` of a structure as one that is given them without the fixed leaves."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = put_back(structure, jax.tree.leaves((list(args), kwargs)), fixed)
        return fun(*args, **kwargs)

    return call


def losing_nothing(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function, which refuses to change modules of Flax NNX in place without returning what it changed.

    Args:
        fun: The function.
        name: What it is handed to, such as `"sublinear"`: that of `jaxsub.flax.nnx` keeps the changes.

    Raises:
        UnsupportedError: At the call; it says where the change can be kept.
    """

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = {place: id(leaf) for place, _, leaf in _in_modules((args, kwargs))}
        held = jax.tree.leaves((args, kwargs)) if before else []  # so that no id is given twice
        out = fun(*args, **kwargs)
        if not before:
            return out
        returned = set(map(id, jax.tree.leaves(out)))
        others = [
            (called, leaf) for place, called, leaf in _in_modules((args, kwargs)) if before.get(place) != id(leaf)
        ]
        changed = [called for called, leaf in others if id(leaf) not in returned]
        del held
        if changed:
            raise UnsupportedError(
                f"The function changes {len(changed)} variables of its modules, `{changed[0]}` among them, and what it "
                f"makes of them would be lost. Hand it to jaxsub.flax.nnx.{name} instead of jaxsub.{name}: that writes "
                "them back once. Or return nnx.state(module) too."
            )
        return out

    return call


def _in_modules(tree: Any) -> list[tuple[str, str, Any]]:
    """All that modules of Flax NNX hold: its place in the tree, its name in its module, its leaf."""
    module = getattr(sys.modules.get("flax.nnx"), "Module", ())
    found = []
    for at, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, module)):
        if isinstance(part, module):
            inside = jax.tree_util.tree_leaves_with_path(part)
            for path, leaf in inside:
                name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
                found.append((jax.tree_util.keystr((*at, *path)), name, leaf))
    return found
