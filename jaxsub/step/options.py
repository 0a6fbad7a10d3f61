"""The options of `jaxsub.jit` that are `jax.jit`'s: checked, read, and passed on; and the step with fused updates."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxsub.core.checks import several
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.arguments import Statics
from jaxsub.step.fused_update import Findings, donated_leaves, with_fused_updates

OWN = ("memory", "plan", "target", "cache", "progress", "fuse_updates")
"""What `jaxsub.jit` takes beside."""


def check_jit_kwargs(given: dict[str, Any]) -> None:
    """Refuse what `jax.jit` does not take, before anything is called; say what is close."""
    taken = sorted({*inspect.signature(jax.jit).parameters, *OWN} - {"fun"})
    for name in given:
        if name not in taken:
            close = difflib.get_close_matches(name, taken, 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise TypeError(f"jaxsub.jit takes no {name!r}{hint} It takes {', '.join(taken)}.")


def statics_of(fun: Callable[..., Any], jit_kwargs: dict[str, Any]) -> Statics:
    """Which arguments of a step are static, as they were named to `jax.jit`."""
    return Statics.of(fun, *_named(jit_kwargs, "static"))


def _named(jit_kwargs: dict[str, Any], what: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Positions and names of the arguments that are `static`, or that `donate`."""
    numbers, names = (several(() if (given := jit_kwargs.get(option)) is None else given, option)
                      for option in (f"{what}_argnums", f"{what}_argnames"))  # fmt: skip
    return numbers, names


def fusing(
    run: Callable[..., Any], statics: Statics, jit_kwargs: dict[str, Any], findings: Findings | None = None
) -> Callable[..., Any]:
    """A step whose updates are inside its backward scans where they can be."""
    given = Statics.of(run, *_named(jit_kwargs, "donate"), "donate")

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        found, dynamic, keywords = statics.split(args, kwargs)
        places = [i for i in range(len(args)) if i not in statics.argnums]
        donated = donated_leaves([k for k, i in enumerate(places) if i in given.argnums], given.argnames)
        bound = replace(statics, fun=run).bind(found, len(args))
        return with_fused_updates(bound, donated, findings)(*dynamic, **keywords)

    return call


def donated_argnums(fun: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of the arguments that a function under `jax.jit` donates; refuse one with static arguments.

    Example:
        >>> step = jax.jit(lambda w, x: (w + x, x), donate_argnums=0)
        >>> donated_argnums(step, (jax.ShapeDtypeStruct((2,), "float32"),) * 2)
        (0,)
    """
    if not hasattr(fun, "trace"):
        return ()
    given = fun.trace(*args).args_info[0]
    if len(given) < len(args):
        raise ValueError("the step has static arguments: pass a function of its arrays, and say what it donates.")
    return tuple(
        i for i, arg in enumerate(given) if (leaves := jax.tree.leaves(arg)) and all(x.donated for x in leaves)
    )


def with_options(jit_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What `jax.jit` is given on the device in use."""
    options = compat.cpu_compiler_options() if jax.default_backend() == "cpu" else {}
    if not options:
        return jit_kwargs
    return {**jit_kwargs, "compiler_options": {**options, **(jit_kwargs.get("compiler_options") or {})}}


def under_jit(fun: Callable[..., Any], jit_kwargs: dict[str, Any]) -> Any:
    """A function under `jax.jit`, with the options that the compiler of the device in use needs."""
    given = with_options(jit_kwargs)
    return jax.jit(fun, **jit_kwargs) if given is jit_kwargs else _Outermost(fun, jit_kwargs, given)


class _Outermost:
    """A function under `jax.jit` with compiler options, which JAX takes of the outermost `jit` alone.

    Inside another trace it has none: what is compiled there has those of the outermost function. What is its own is in
    slots: whatever wraps it, as `jax.grad` does, takes over its `__dict__`.
    """

    __slots__ = ("__dict__", "__weakref__", "_inner", "_made_of", "_outermost")

    def __init__(self, fun: Callable[..., Any], jit_kwargs: dict[str, Any], given: dict[str, Any]):
        functools.update_wrapper(self, fun)
        self._made_of = fun, jit_kwargs
        self._outermost: Any = jax.jit(fun, **given)
        self._inner: Any = jax.jit(fun, **jit_kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._here()(*args, **kwargs)

    def _here(self) -> Any:
        return self._inner if compat.is_staged() else self._outermost

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Lower it for arguments, as a function under `jax.jit`."""
        return self._here().lower(*args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Trace it for arguments, as a function under `jax.jit`."""
        return self._here().trace(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Find the shapes of its results, as a function under `jax.jit`."""
        return self._inner.eval_shape(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return under_jit, self._made_of

    def clear_cache(self) -> None:
        """Forget what was compiled."""
        self._outermost.clear_cache()
        self._inner.clear_cache()
