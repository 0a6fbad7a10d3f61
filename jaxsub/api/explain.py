"""Where memory goes before any plan: `residuals` lists what the backward pass reads, `explain` says it in words.

Residuals are what JAX hands from the forward to the backward pass. The compiler stores less: it recomputes cheap
elementwise chains inside fusions. So the peak that is named, and what budgets buy, come from priced stages; residuals
say where in the program memory comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jaxsub.api.frontier import Frontier, frontier_of
from jaxsub.core.shown import Shown
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.arguments import AnyArgnums, refuse_collisions, trace_call
from jaxsub.jaxpr.inline import flatten_jaxpr, scope_of
from jaxsub.jaxpr.trace import Program, aval_bytes, with_own_settings
from jaxsub.partition.run_function import read_avals, run_function, vjp_of
from jaxsub.search.propagated import pricer_of
from jaxsub.search.sliceable import Sliceable, sliceable


@dataclass(frozen=True, slots=True)
class Residual:
    """One array that the backward pass reads.

    Attributes:
        shape: Its shape.
        dtype: Its dtype's name.
        n_bytes: Its bytes.
        producer: The primitive that makes it; `argument` or `constant` for values that are live under every plan.
        source: The user's source line; empty where it is not known.
        scope: The named scopes it is made in, without JAX's own marks of transformations.
        name: The user's name for it (an argument's path, a `checkpoint_name`), or `None`.
    """

    shape: tuple[int, ...]
    dtype: str
    n_bytes: int
    producer: str
    source: str = ""
    scope: str = ""
    name: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether it is an argument or a constant, which is live under every plan."""
        return self.producer in ("argument", "constant")

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        scope = f"{self.scope}:" if self.scope else ""
        words = (scope, self.name, f"{self.dtype}[{dims}]", f"by {self.producer}", self.source)
        return " ".join(word for word in words if word)


class Residuals(Shown, tuple[Residual, ...]):
    """The residuals of a function, largest first: a tuple that a notebook shows as a table."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Residuals that have in common what the label says, their bytes together and how many they are."""

    label: str
    n_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Explanation(Shown):
    """Where a function's memory goes, and what can be done about it; print it.

    Attributes:
        residuals: What the backward pass reads and the forward pass makes, largest first.
        given_bytes: Arguments and constants that the backward pass reads: they stand anyway.
        frontier: What budgets are within reach without slices, at what price.
        runs: Which runs may be executed in slices to get below that, along which axis, and what ends them; those that
            may not last.
        is_spread: Whether residuals are bytes of several devices together; what budgets buy is of one.
    """

    residuals: tuple[Residual, ...]
    given_bytes: int
    frontier: Frontier
    runs: tuple[Sliceable, ...] = ()
    is_spread: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all residuals that the forward pass makes."""
        return sum(r.n_bytes for r in self.residuals)

    def by_source(self) -> tuple[Group, ...]:
        """Residuals by source line, largest first."""
        return _grouped((r.source or "(unknown line)", r) for r in self.residuals)

    def by_scope(self) -> tuple[Group, ...]:
        """Residuals by module or named scope, largest first."""
        return _grouped((r.scope or "(no named scope)", r) for r in self.residuals)

    def by_producer(self) -> tuple[Group, ...]:
        """Residuals by the primitive that makes them, largest first."""
        return _grouped((r.producer, r) for r in self.residuals)


def _grouped(labelled: Iterable[tuple[str, Residual]]) -> tuple[Group, ...]:
    found: dict[str, tuple[int, int]] = {}
    for label, residual in labelled:
        n_bytes, count = found.get(label, (0, 0))
        found[label] = n_bytes + residual.n_bytes, count + 1
    rows = (Group(label, n_bytes, count) for label, (n_bytes, count) in found.items())
    return tuple(sorted(rows, key=lambda g: (-g.n_bytes, g.label)))


def residuals(fun: Callable[..., Any], /, *args: Any, argnums: AnyArgnums = None, **kwargs: Any) -> Residuals:
    """List what the backward pass of a function reads: what `jax.ad_checkpoint.print_saved_residuals` only prints.

    Args:
        fun: The function; checkpoints in it, made by hand or by `jaxsub.sublinear`, are respected.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s.
        argnums: The arguments its gradient is taken of, as for `jaxsub.sublinear`.
        **kwargs: Its keyword arguments.

    Returns:
        The residuals, each once, largest first, in a tuple; arguments and constants among them.

    Raises:
        UnsupportedError: If nothing can be differentiated.

    Example:
        >>> import jax.numpy as jnp, jaxsub
        >>> found = jaxsub.residuals(lambda w, x: jnp.sin(x @ w).sum(), jnp.ones((4, 4)), jnp.ones((2, 4)))
        >>> [(r.producer, r.shape, r.n_bytes) for r in found]
        [('cos', (2, 4), 32), ('argument', (2, 4), 32)]
    """
    refuse_collisions(residuals, locals())
    return residuals_of(trace_call(fun, args, kwargs, argnums))


def residuals_of(program: Program) -> Residuals:
    """The residuals of a traced program."""
    function = run_function(program, 0, len(program.eqns))

    def forward(*inputs: Any) -> list[Any]:
        return jax.tree.leaves(vjp_of(function, inputs)[1])

    eqns, inputs, results, _ = flatten_jaxpr(jax.make_jaxpr(forward)(*read_avals(program, function)))
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    n_constants = len(inputs) - len(function.reads)
    given = dict(zip(inputs[n_constants:], function.reads, strict=True))
    found = []
    for atom in dict.fromkeys(a for a in results if compat.is_var(a)):
        if atom in makers:
            found.append(_made(atom, makers[atom], makers))
        else:
            found.append(_given(atom, program.graph.values[given[atom]].name if atom in given else "const"))
    return Residuals(sorted(found, key=lambda r: (-r.n_bytes, r.is_given)))


def _made(atom: Any, eqn: Any, makers: dict[Any, Any]) -> Residual:
    """A residual that an equation makes; a value the user named has what names it as its maker."""
    name = compat.given_name(eqn)
    maker = makers.get(eqn.invars[0], eqn) if name is not None and compat.is_var(eqn.invars[0]) else eqn
    aval = atom.aval
    return Residual(tuple(aval.shape), str(aval.dtype), aval_bytes(aval), maker.primitive.name, compat.source_of(maker),
                    scope_of(str(maker.source_info.name_stack)), name)  # fmt: skip


def _given(atom: Any, name: str | None) -> Residual:
    aval, is_constant = atom.aval, name == "const"
    producer = "constant" if is_constant else "argument"
    return Residual(tuple(aval.shape), str(aval.dtype), aval_bytes(aval), producer, name=None if is_constant else name)


def explain(
    fun: Callable[..., Any],
    /,
    *args: Any,
    target: Any = None,
    argnums: AnyArgnums = None,
    **kwargs: Any,
) -> Explanation:
    """Say where a function's memory goes before any plan, and what budgets are within reach at what price.

    Args:
        fun: The function.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`s.
        target: The device to price for; `None` for the one in use.
        argnums: The arguments its gradient is taken of, as for `jaxsub.sublinear`.
        **kwargs: Its keyword arguments. One that is called like an option above is refused: ask
            `jaxsub.sublinear(fun, ...).explain(*args, **kwargs)`, whose names are all the function's.

    Returns:
        The explanation: print it, or read its groups. Nothing is compiled for it.

    Raises:
        UnsupportedError: If something in the function cannot be supported.

    Example:
        >>> import jax.numpy as jnp, jaxsub
        >>> found = jaxsub.explain(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w).sum(), jnp.ones((4, 4)), jnp.ones((2, 4)))
        >>> [(group.label, group.n_bytes) for group in found.by_producer()]
        [('cos', 64), ('sin', 32)]
    """
    refuse_collisions(explain, locals())
    return explanation_of(trace_call(fun, args, kwargs, argnums), target)


@with_own_settings
def explanation_of(program: Program, target: Any = None) -> Explanation:
    """The explanation of a traced program."""
    found = residuals_of(program)
    target = get_target(target)
    frontier = frontier_of(pricer_of(program, target), points=6)
    made = tuple(r for r in found if not r.is_given)
    runs = sliceable(program, target, frontier.points[0].temp_bytes)
    return Explanation(made, sum(r.n_bytes for r in found if r.is_given), frontier, runs, program.is_sharded)
