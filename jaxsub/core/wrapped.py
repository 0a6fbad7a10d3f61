"""What stands in the place of a user's function: it binds, copies and is pickled like one, and prepares a key once.

A function that was decorated at the top of a module is pickled by its name, as functions are. Any other is made anew
from what it was made of; what it remembers of traces and plans stays where it is.
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
Self = TypeVar("Self", bound="Wrapped[..., Any]")


class Locks:
    """One lock for each key, while somebody holds or waits for it: what one thread prepares, others wait for.

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
    """A wrapped method of an instance; it can be asked what the wrapped function can be: `model.loss.plan(batch)`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.func, name)
        return functools.partial(found, *self.args) if callable(found) else found


class Wrapped(abc.ABC, Generic[P, R]):
    """A callable in the place of a function.

    Attributes:
        fun: The function as it was.
    """

    fun: Callable[P, R]

    @abc.abstractmethod
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do what stands in the function's place."""

    @abc.abstractmethod
    def made_of(self) -> tuple[Any, ...]:
        """What an equal one is made of, by its class."""

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
    """What a module holds under a name, `None` where it holds nothing."""
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None
