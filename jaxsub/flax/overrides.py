"""`policies`: put policies on the modules of a model without editing it, by name, type or path, for Linen and NNX.

Inside the context every call of a module is compared with the patterns; a call that matches is recomputed in the
backward pass, except the values that its policy saves. Linen has interceptors for that. NNX has none, so the `__call__`
of its module classes is replaced inside the context. Parameters, their names, states and results do not change.

A compiled function keeps the policies it was traced with: trace it inside the context.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
from flax import nnx as flax_nnx

from jaxsub import policies as named
from jaxsub.core.errors import PolicyError
from jaxsub.flax import linen, nnx

SHOWN = 12
"""How many modules an error or a table lists of one pattern."""


@dataclass(frozen=True, slots=True)
class Match:
    """One module that a pattern matched.

    Attributes:
        pattern: The pattern, or the name of the type.
        path: The module's path in the model: `blocks/0/attention`; empty for the model itself.
        type: The name of its class.
        policy: The policy that it is called under, by name.
    """

    pattern: str
    path: str
    type: str
    policy: str

    def __str__(self) -> str:
        return f"{self.path or '(the model)'} {self.type}: {self.policy}"


def policies(patterns: Mapping[str | type, str | named.Policy | named.JaxPolicy | None]) -> Swap:
    """Call a model's modules under policies, without editing the model.

    Args:
        patterns: For each pattern a policy, as `jaxsub.policies.get` takes it. A pattern is a module class, or text
            that is compared with the name of a module's class (`"Block"`), its own name (`"encoder_0"`) and its path
            (`"blocks/0/attention"`). `*`, `?` and `[...]` mean the same as in file names, and `.` means `/`. Where
            several patterns match one module, the first counts.

    Returns:
        A context manager. It yields itself: print it, or read `matched`, to see which modules matched.

    Raises:
        PolicyError: On creation if there is no such policy; on leaving the context if a pattern matched no module.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> model, x = nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(2)]), jnp.ones((1, 3))
        >>> variables = model.init(jax.random.key(0), x)
        >>> with policies({"layers_0": "save_costly"}) as swap:
        ...     grads = jax.grad(lambda v: model.apply(v, x).sum())(variables)
        >>> print(swap)
        layers_0: 1 module
          layers_0 Dense: save_costly
    """
    return Swap(patterns)


@dataclass(eq=False)
class Swap:
    """Policies on the modules of a model, while entered; made by `policies`.

    Attributes:
        patterns: For each pattern its policy.
        matched: The modules that matched so far, each once.
    """

    patterns: Mapping[str | type, Any]
    _seen: dict[Match, None] = field(default_factory=dict, repr=False)
    _hits: set[str] = field(default_factory=set, repr=False)
    _called: dict[str, None] = field(default_factory=dict, repr=False)
    _local: _Calls = field(default_factory=lambda: _Calls(), repr=False)
    _exit: ExitStack = field(default_factory=ExitStack, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, Mapping) or not self.patterns:
            raise PolicyError(
                "policies() takes a mapping of patterns, at least one, to policies, such as {'Block': 'save_costly'}; "
                f"got {self.patterns!r:.99}."
            )
        self.patterns = {pattern: named.get(policy) for pattern, policy in self.patterns.items()}
        if wrong := [p for p in self.patterns if not isinstance(p, str | type)]:
            raise PolicyError(f"A pattern is a module class or text, got {wrong[0]!r}.")

    @property
    def matched(self) -> tuple[Match, ...]:
        """The modules that matched so far, each once."""
        return tuple(self._seen)

    def __enter__(self) -> Swap:
        with ExitStack() as stack:
            stack.enter_context(nn.intercept_methods(self._intercept))
            stack.enter_context(_patched(self._around))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._exit.__exit__(kind, *error)
        missed = [_label(p) for p in self.patterns if _label(p) not in self._hits]
        if kind is None and missed:
            raise PolicyError(self._complaint(missed))

    def __str__(self) -> str:
        lines = []
        for pattern in map(_label, self.patterns):
            rows = [m for m in self._seen if m.pattern == pattern]
            lines.append(f"{pattern}: {len(rows)} module{'s' * (len(rows) != 1)}")
            lines += [f"  {row}" for row in rows[:SHOWN]]
            lines += [f"  and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)
        return "\n".join(lines)

    def _complaint(self, missed: Sequence[str]) -> str:
        quoted = ", ".join(map(repr, missed))
        if not self._called:
            return (
                f"No module was called, so nothing matched {quoted}. A function that was compiled before keeps the "
                "policies it was traced with: trace it inside the context."
            )
        words = {w for name in self._called for w in name.split(" ")}
        near = [n for p in missed for n in difflib.get_close_matches(p, words, n=1)]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        called = "; ".join(list(self._called)[:SHOWN]) + ("; ..." if len(self._called) > SHOWN else "")
        return f"No module matched {quoted}.{hint} Called were: {called}."

    def _policy_of(self, module: Any, path: str) -> Any:
        """Find and record the policy of a module by the first pattern that matches it; `None` if none does."""
        kind = type(module)
        self._called[f"{path} {kind.__name__}".strip()] = None
        found = None
        for pattern, policy in self.patterns.items():
            if _matches(pattern, kind, path):
                self._hits.add(_label(pattern))
                if found is None:
                    found = policy
                    self._seen[Match(_label(pattern), path, kind.__name__, named.label(policy))] = None
        return found

    def _intercept(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Call a Linen module."""
        module, inside = context.module, self._local.inside
        if context.method_name != "__call__" or module.scope is None or module.path in inside:
            return call(*args, **kwargs)
        policy = self._policy_of(module, "/".join(module.path))
        if policy is None or module.is_initializing():
            return call(*args, **kwargs)
        leaves, rebuild = _without_scalars(args, kwargs)

        def region(module: Any, *leaves: Any) -> Any:
            args, kwargs = rebuild(leaves)
            return module(*args, **kwargs)

        inside.append(module.path)
        try:
            return linen.remat(region, policy=policy)(module, *leaves)
        finally:
            inside.pop()

    def _around(self, call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Call an NNX module."""
        calls = self._local
        if any(module is m for m in calls.entered):
            return call(module, *args, **kwargs)
        with calls.located(module) as path:
            policy = self._policy_of(module, path)
            if policy is None:
                return call(module, *args, **kwargs)
            leaves, rebuild = _without_scalars(args, kwargs)

            def region(module: Any, *leaves: Any) -> Any:
                args, kwargs = rebuild(leaves)
                with calls.entering(module, path):
                    return call(module, *args, **kwargs)

            return nnx.remat(region, policy=policy)(module, *leaves)


class _Calls(threading.local):
    """A thread's open calls: paths of Linen modules, NNX modules that were entered, and paths of NNX modules."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.entered: list[Any] = []
        self.places: list[tuple[Any, dict[int, str]]] = []

    @contextmanager
    def located(self, module: Any) -> Iterator[str]:
        """Find the path of an NNX module in the outermost module that was called."""
        places = self.places[-1][1] if self.places else {}
        if id(module) in places:
            yield places[id(module)]
            return
        with self.placed(module, ""):
            yield ""

    @contextmanager
    def entering(self, module: Any, path: str) -> Iterator[None]:
        """Record that a region is entered, where an NNX module and its submodules are new objects."""
        self.entered.append(module)
        try:
            with self.placed(module, path):
                yield
        finally:
            self.entered.pop()

    @contextmanager
    def placed(self, root: Any, path: str) -> Iterator[None]:
        """Record the paths of the submodules of a module."""
        prefix = (path,) if path else ()
        found = {id(m): "/".join(map(str, (*prefix, *where))) for where, m in flax_nnx.iter_modules(root)}
        self.places.append((root, found))
        try:
            yield
        finally:
            self.places.pop()


@contextmanager
def _patched(around: Callable[..., Any]) -> Iterator[None]:
    """Replace `__call__` of every NNX module class that defines one."""
    originals = {cls: vars(cls)["__call__"] for cls in _subclasses(flax_nnx.Module) if "__call__" in vars(cls)}
    try:
        for cls, original in originals.items():
            type.__setattr__(cls, "__call__", _routed(original, around))
        yield
    finally:
        for cls, original in originals.items():
            type.__setattr__(cls, "__call__", original)


def _routed(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, args, kwargs)

    return __call__


def _subclasses(cls: type) -> set[type]:
    found: set[type] = set()
    kinds: list[type] = cls.__subclasses__()
    for kind in kinds:
        found |= {kind} | _subclasses(kind)
    return found


def _without_scalars(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Split off numbers and strings, which a module may branch on; return the rest and a function to rebuild."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=nnx.is_node)
    is_fixed = [isinstance(leaf, bool | int | float | complex | str) for leaf in leaves]

    def rebuild(rest: Sequence[Any]) -> Any:
        given = iter(rest)
        return jax.tree.unflatten(
            tree, [x if fixed else next(given) for x, fixed in zip(leaves, is_fixed, strict=True)]
        )

    return [x for x, fixed in zip(leaves, is_fixed, strict=True) if not fixed], rebuild


def _matches(pattern: str | type, kind: type, path: str) -> bool:
    if isinstance(pattern, type):
        return issubclass(kind, pattern)
    steps, wanted = path.split("/"), pattern.replace(".", "/").split("/")
    if any(fnmatchcase(name, pattern) for name in (kind.__name__, steps[-1]) if name):
        return True
    return len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted))


def _label(pattern: str | type) -> str:
    return pattern if isinstance(pattern, str) else pattern.__qualname__
