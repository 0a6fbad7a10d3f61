"""Keep what a rule of `custom_vjp` said of its residuals, for every pattern of inputs with tangents.

JAX traces the forward pass of such a rule once for each pattern, and stores beside it the tree of the residuals, and
what is batched of them, of the pattern that was traced last; nothing where the rule refused that one, as Equinox's
rules refuse tangents of what they take no gradient of. Here a function is differentiated in many patterns: what a run
of its equations needs, through which of its inputs an axis can be followed. So what JAX stored for a pattern is stored
again where that is asked for again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jax.extend.linear_util import wrap_init

from jaxsub.jaxpr import compat

Pattern = tuple[Hashable, ...]

_STORED: WeakKeyDictionary[Any, dict[Pattern | None, list[Any]]] = WeakKeyDictionary()
"""`KeptRule.stored` of each rule, by its parameter `out_trees`: equations of one rule share it."""


def with_residuals_of_each_pattern(closed: Any) -> Any:
    """Replace rules of `custom_vjp` in a jaxpr, and in its bodies, by `KeptRule`s; itself where it has none."""
    return _of_body(closed, {})


@dataclass(frozen=True, slots=True, eq=False)
class KeptRule:
    """Traces the forward pass of a rule for a pattern, which JAX does once.

    Attributes:
        thunk: JAX's own function that does so.
        stores: JAX's stores of what belongs to the pattern; where it has none, nothing is put back.
        stored: What they held after each pattern, and under `None` after the last one.
    """

    thunk: Any
    stores: tuple[Any, ...]
    stored: dict[Pattern | None, list[Any]]

    def __call__(self, *pattern: Hashable) -> Any:
        """Trace it, and fill the stores for it; where the rule refuses, for the last pattern that it took."""
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
    """Replace them in a closed or open jaxpr; equations that share a body share the new one."""
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
        kept = KeptRule(thunk, tuple(compat.stores_in(thunk)), _STORED.setdefault(params["out_trees"], {}))
        params["fwd_jaxpr_thunk"] = wrap_init(kept, debug_info=thunk.debug_info)
    return eqn if all(params[key] is param for key, param in eqn.params.items()) else eqn.replace(params=params)


def _of_param(param: Any, known: dict[int, Any]) -> Any:
    if isinstance(param, tuple | list):
        found = [_of_param(part, known) for part in param]
        if all(a is b for a, b in zip(found, param, strict=True)):
            return param
        return type(param)(*found) if hasattr(param, "_fields") else type(param)(found)
    return _of_body(param, known) if hasattr(param, "eqns") else param
