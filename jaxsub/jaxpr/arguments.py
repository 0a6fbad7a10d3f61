"""Split static arguments from the others, and bind them.

The user names them by position or name, as for `jax.jit`; either covers arguments that are passed by position and by
name. Two static arguments are the same when they are equal and of one type: `1` and `True` are traced apart. The same
holds for static leaves of the other arguments (`jaxsub.jaxpr.static_leaves`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxsub.core.checks import require_function, several
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.wrapped import name_of
from jaxsub.jaxpr.static_leaves import fixed_leaves, of_the_others, without
from jaxsub.jaxpr.trace import Program, check_differentiated, trace

AnyArgnums = int | Sequence[int] | None
"""How a user may name the differentiated arguments."""


@dataclass(frozen=True, slots=True)
class Statics:
    """The static arguments of a function, by position and by name."""

    fun: Callable[..., Any]
    argnums: frozenset[int]
    argnames: frozenset[str]

    @classmethod
    def of(
        cls, fun: Callable[..., Any], argnums: Sequence[int], argnames: Sequence[str], what: str = "static"
    ) -> Statics:
        """Complete positions and names from the function's signature, as `jax.jit` does."""
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):  # a builtin without a signature
            return cls(fun, frozenset(argnums), frozenset(argnames))
        ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        places = {n % len(ordered) if ordered and -len(ordered) <= n < 0 else n for n in argnums}
        names = {*argnames, *(p.name for i, p in enumerate(ordered) if i in places and p.kind is not p.POSITIONAL_ONLY)}
        places |= {i for i, p in enumerate(ordered) if p.name in argnames}
        far = sorted(places - set(range(len(ordered))))
        if far and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise ValueError(f"{what}_argnums names {far}, but the function takes {len(ordered)} positional arguments")
        unknown = set(argnames) - {p.name for p in parameters}
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"{what}_argnames names {sorted(unknown)}, which are no parameters of the function")
        return cls(fun, frozenset(places), frozenset(names))

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
        """Split arguments: static ones by position and name, the other positional ones, the other keywords."""
        static_args = tuple((i, type(args[i]), args[i]) for i in sorted(self.argnums) if i < len(args))
        static_kwargs = tuple((k, type(kwargs[k]), kwargs[k]) for k in sorted(kwargs) if k in self.argnames)
        dynamic = [a for i, a in enumerate(args) if i not in self.argnums]
        keywords = {k: v for k, v in kwargs.items() if k not in self.argnames}
        fixed = fixed_leaves((dynamic, keywords))
        named: list[tuple[Any, Any]] = [(argument_name(self.fun, i), value) for i, _, value in static_args]
        named += [(name, value) for name, _, value in (*static_kwargs, *fixed)]
        for name, value in named:
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(f"static argument `{name}` must be hashable, got a {type(value).__name__}") from error
        if not fixed:
            return (static_args, static_kwargs, None), dynamic, keywords
        inner = (jax.tree.structure((dynamic, keywords)), fixed)
        return (static_args, static_kwargs, inner), *without((dynamic, keywords), fixed)

    def bind(self, statics: Any, n_args: int) -> Callable[..., Any]:
        """Bind the static arguments; return a function of the others."""
        static_args, static_kwargs = ({place: value for place, _, value in found} for found in statics[:2])
        if not static_args and not static_kwargs:
            return self.fun if statics[2] is None else of_the_others(self.fun, *statics[2])

        def bound(*dynamic: Any, **kwargs: Any) -> Any:
            rest = iter(dynamic)
            args = [static_args[i] if i in static_args else next(rest) for i in range(n_args)]
            return self.fun(*args, **kwargs, **static_kwargs)

        return bound if statics[2] is None else of_the_others(bound, *statics[2])

    def dynamic_argnums(self, argnums: int | tuple[int, ...] | None, n_args: int) -> tuple[int, ...] | None:
        """Find the positions of the differentiated arguments among those that are not static; `None` for `None`."""
        if argnums is None:
            return None
        arrays = [i for i in range(n_args) if i not in self.argnums]
        wanted = [a % n_args if n_args and -n_args <= a < n_args else a
                  for a in ([argnums] if isinstance(argnums, int) else argnums)]  # fmt: skip
        if static := [a for a in wanted if a in self.argnums]:
            raise UnsupportedError(f"argument {static[0]} is static and cannot be differentiated; pass argnums=.")
        return tuple(arrays.index(a) if a in arrays else a for a in wanted)


def argument_name(fun: Callable[..., Any], number: int) -> str:
    """What a function calls a positional argument.

    Example:
        >>> argument_name(lambda w, *xs: w, 0), argument_name(lambda w, *xs: w, 1)
        ('w', 'argument 1')
    """
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):  # a builtin without a signature
        return f"argument {number}"
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names[number] if number < len(names) else f"argument {number}"


def read_argnums(argnums: AnyArgnums) -> tuple[int, ...] | None:
    """Normalise `argnums`; `TypeError` if it is neither a whole number nor a sequence of at least one.

    Example:
        >>> read_argnums([0, 2])
        (0, 2)
    """
    return None if argnums is None else several(argnums, "argnums", least=1)


def refuse_collisions(call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse an option of ours that may be meant for a parameter of the user's function.

    `call` is the function of ours that was called, such as `jaxsub.plan`, and `given` its arguments by name, `fun`
    among them. A `TypeError` says how to call without a collision.
    """
    require_function(given["fun"], getattr(call, "__name__", ""))
    try:
        free = inspect.signature(given["fun"])
        bound = free.bind_partial(*given["args"]).arguments
    except (ValueError, TypeError):  # a builtin without a signature, or wrong arguments: the call itself says so
        return
    for name, option in inspect.signature(call).parameters.items():
        is_passed = option.kind is option.KEYWORD_ONLY and given[name] is not option.default
        if is_passed and name in free.parameters and name not in bound:
            fun, called = name_of(given["fun"]), name_of(call)
            raise TypeError(
                f"{name}= is a parameter of {fun} and an option of jaxsub.{called}. Pass options and arguments "
                f"separately: jaxsub.sublinear({fun}, ...).{called}(..., {name}=...)."
            )


def trace_call(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], argnums: AnyArgnums) -> Program:
    """Trace a function whose arguments may have static leaves, as Equinox's modules do, and that has a gradient."""
    is_wrapped = isinstance(getattr(type(fun), "statics", None), property)  # a `Sublinear` has its own
    statics = replace(fun.statics, fun=fun) if is_wrapped else Statics.of(fun, (), ())  # type: ignore[attr-defined]
    fixed, dynamic_args, dynamic_kwargs = statics.split(args, kwargs)
    wanted = statics.dynamic_argnums(read_argnums(argnums), len(args))
    program = trace(statics.bind(fixed, len(args)), dynamic_args, dynamic_kwargs, argnums=wanted)
    check_differentiated(program)
    return program
