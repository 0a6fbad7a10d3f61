"""Leaves of arguments that are no arrays and are left as they are: functions, and what Equinox's modules hold.

A function among the leaves, an activation perhaps, cannot be traced and need not be: it is part of what the arguments
are, like their tree. In an Equinox module so is every leaf that is no array, a dropout rate or a flag, as
`equinox.filter_jit` has it. Elsewhere Python's numbers are arguments, as for `jax.jit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

Fixed = tuple[tuple[int, type, Any], ...]
"""Leaves that are left as they are: position, type and value; hashable if the values are."""


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
