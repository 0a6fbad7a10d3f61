"""Wrap a user's function: the wrapper binds, copies and pickles like a function, and prepares each key once.

A function that was decorated at the top of a module is pickled by its name, as functions are. Any other is rebuilt from
its constructor's arguments; its traces and plans are not pickled.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Self = TypeVar("Self", bound="Wrapped[..., Any]")


def name_of(fun: Any) -> str:
    """What a function is called, or the class of an object that is called; a field may be called `__name__` as well.

    Example:
        >>> name_of(len), name_of(functools.partial(len))
        ('len', 'partial')
    """
    name = getattr(fun, "__name__", None)
    return name if isinstance(name, str) else type(fun).__name__


class Locks:
    """One lock for each key, while a thread holds or waits for it: one thread prepares a key, the others wait.

    Example:
        >>> locks = Locks()
        >>> with locks("key"), locks("another"), locks("key"):
        ...     len(locks)
        2
        >>> len(locks)
        0
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[Hashable, tuple[threading.RLock, list[None]]] = {}

    @contextlib.contextmanager
    def __call__(self, key: Hashable) -> Iterator[None]:
        """Hold the lock of a key; a thread may hold it more than once."""
        with self._guard:
            lock, users = self._held.setdefault(key, (threading.RLock(), []))
            users.append(None)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                users.pop()
                if not users:
                    del self._held[key]

    def __len__(self) -> int:
        return len(self._held)


class Bound(functools.partial[R]):
    """A wrapped method of an instance, with the methods of the wrapped function: `model.loss.plan(batch)`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.func, name)
        return functools.partial(found, *self.args) if callable(found) else found


class Wrapped(abc.ABC, Generic[P, R]):
    """A callable that replaces a function of the user's, `fun`.

    What is its own is in slots: whatever wraps it, as `jax.grad` does, takes over its `__dict__`.
    """

    __slots__ = ("__dict__", "__weakref__", "fun")
    fun: Callable[P, R]

    @abc.abstractmethod
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the replacement of the function."""

    @abc.abstractmethod
    def made_of(self) -> tuple[Any, ...]:
        """List the arguments from which its class makes an equal one."""

    @overload
    def __get__(self: Self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Bound[R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind like a function does, so that methods can be decorated."""
        return self if instance is None else Bound(cast(Any, self), instance)

    def __reduce__(self) -> str | tuple[Any, ...]:
        name, module = getattr(self, "__qualname__", ""), self.__module__
        # what cloudpickle takes along from a script or notebook, whose names another process lacks, it takes by value
        by_value = module == "__main__" and "cloudpickle" in sys.modules
        if not by_value and _named(module, name) is self:
            return name
        return type(self), self.made_of()


def _named(module: str, name: str) -> Any:
    """Look up a name in a module; `None` if it is not there."""
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None
