"""Refuse what is given for an option and is of the wrong kind: the option, what it takes and the value got."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number: an int, or what can be an index as one of NumPy's can; no bool.

    Example:
        >>> is_whole(3), is_whole(3.0), is_whole(True)
        (True, False, False)
    """
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def whole(value: Any, option: str, least: int) -> int:
    """An option as an int; `ValueError` if it is no whole number, or a smaller one."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{option}= is a whole number of at least {least}, got {value!r:.99}.")
    return operator.index(value)


def several(given: Any, option: str, least: int = 0) -> tuple[Any, ...]:
    """What an option names, one or several: positions where it is called so, such as `static_argnums`, else names.

    Example:
        >>> several(2, "static_argnums"), several(["x", "y"], "static_argnames")
        ((2,), ('x', 'y'))
    """
    are_names = not option.endswith("nums")
    is_right: Callable[[Any], bool] = (lambda one: isinstance(one, str)) if are_names else is_whole
    is_one = isinstance(given, str) or is_right(given) or not isinstance(given, Iterable)
    found: tuple[Any, ...] = (given,) if is_one else tuple(given)
    if len(found) < least or not all(map(is_right, found)):
        kind = "names of arguments, as JAX does: 'x'" if are_names else "positions of arguments, as JAX does: 0"
        raise TypeError(f"{option} takes the {kind}, or several of them; got {given!r:.99}.")
    return found if are_names else tuple(map(operator.index, found))


def require_function(fun: Any, call: str, option: str = "the budget") -> None:
    """Refuse what cannot be called where a function is wanted; an option that it may have been meant as is named."""
    if not callable(fun):
        raise TypeError(f"jaxsub.{call} takes a function, and options such as {option} by name; got {fun!r:.99}.")
