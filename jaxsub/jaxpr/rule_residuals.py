"""Keep what a rule of `custom_vjp` said of its residuals, for every pattern of inputs with tangents.

JAX traces the forward pass of such a rule once for each pattern, and stores beside it the tree of the residuals, and
what is batched of them, of the pattern that was traced last; nothing where the rule refused that one, as Equinox's
rules refuse tangents of what they take no gradient of. Here a function is differentiated in many patterns: what a run
of its equations needs, through which of its inputs an axis can be followed. So what JAX stored for a pattern is stored
again where that is asked for again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from jax.extend.linear_util import WrappedFun, wrap_init

from jaxsub.jaxpr import compat

Pattern = tuple[Hashable, ...]

_STORED: WeakKeyDictionary[Any, dict[Pattern | None, list[Any]]] = WeakKeyDictionary()
"""What is stored by pattern, and under `None` for the last one, by the function that JAX asks for trees."""


def with_residuals_of_each_pattern(closed: Any) -> Any:
    """A jaxpr whose rules, those in bodies too, store for each pattern what is its own; itself without such rules."""
    return _of_body(closed, {})


@dataclass(frozen=True, slots=True, eq=False)
class KeptRule:
    """Traces the forward pass of a rule for a pattern, which JAX does once.

    Attributes:
        thunk: JAX's own function that does so.
        stores: Where JAX stores what belongs to the pattern.
        stored: What it stored, by pattern, and under `None` of the last one.
    """

    thunk: Any
    stores: tuple[Any, ...]
    stored: dict[Pattern | None, list[Any]]

    def __call__(self, *pattern: Hashable) -> Any:
        """Trace it; where that fails, what was stored last is stored again."""
        try:
            found = self.thunk.call_wrapped(*pattern)
            if pattern not in self.stored:
                self.stored[pattern] = [store.val for store in self.stores]
            self.stored[None] = self.stored[pattern]
        finally:
            for store, value in zip(self.stores, self.stored.get(None, ()), strict=False):
                store.reset()
                store.store(value)
        return found


def _of_body(closed: Any, known: dict[int, Any]) -> Any:
    """The same of a closed or open jaxpr; equations that share a body share the new one."""
    if id(closed) not in known:
        jaxpr = compat.open_jaxpr(closed)
        eqns = [_of_equation(eqn, known) for eqn in jaxpr.eqns]
        if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
            known[id(closed)] = closed
        else:
            changed = jaxpr.replace(eqns=eqns)
            known[id(closed)] = changed if jaxpr is closed else closed.replace(jaxpr=changed)
    return known[id(closed)]


def _of_equation(eqn: Any, known: dict[int, Any]) -> Any:
    params = {key: _of_param(param, known) for key, param in eqn.params.items()}
    if eqn.primitive.name == "custom_vjp_call":
        thunk = params["fwd_jaxpr_thunk"]
        kept = KeptRule(thunk, tuple(_stores_of(thunk, set())), _STORED.setdefault(params["out_trees"], {}))
        params["fwd_jaxpr_thunk"] = wrap_init(kept, debug_info=thunk.debug_info)
    return eqn if all(params[key] is param for key, param in eqn.params.items()) else eqn.replace(params=params)


def _of_param(param: Any, known: dict[int, Any]) -> Any:
    if isinstance(param, tuple | list):
        found = [_of_param(part, known) for part in param]
        if all(a is b for a, b in zip(found, param, strict=True)):
            return param
        return type(param)(*found) if hasattr(param, "_fields") else type(param)(found)
    return _of_body(param, known) if hasattr(param, "eqns") else param


def _stores_of(held: Any, seen: set[int]) -> Iterator[Any]:
    """Find where JAX stores what a function of its own returns beside its results, in what that closes over."""
    if id(held) in seen or type(held).__module__.partition(".")[0] not in ("jax", "builtins", "jaxsub"):
        return
    seen.add(id(held))
    if hasattr(held, "reset") and hasattr(held, "store"):
        yield held
    elif isinstance(held, KeptRule):
        yield from held.stores
    elif isinstance(held, WrappedFun):
        for part in (held.f, *held.stores):
            yield from _stores_of(part, seen)
    elif isinstance(held, FunctionType) and held.__module__.partition(".")[0] == "jax":
        for cell in held.__closure__ or ():
            yield from _stores_of(cell.cell_contents, seen)
