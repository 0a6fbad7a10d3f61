"""Updates in order: each right behind its gradient, and the backward pass goes on behind it.

Where layers are unrolled, XLA may put updates off until all gradients are there: its scheduler for GPUs does. Updates
are what no product, reduction or loop of the step reads. Each is moved to where its gradient is finished, and from time
to time what was updated and what the backward pass goes on with pass one `jax.lax.optimization_barrier`: whenever as
many bytes of gradients were used up as the largest one has, which stands whole anyway.

Barriers forbid fusion across them, and over several devices a gradient's reduction behind the next layer's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis_rules import ELEMENTWISE
from jaxsub.jaxpr.trace import aval_bytes
from jaxsub.step.flat_step import FlatStep

LIGHT = ELEMENTWISE | {"broadcast_in_dim", "reshape", "transpose", "squeeze", "iota", "rev", "slice"}
"""What an update may be made of."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """How many gradients are used up before the backward pass ends, by how many barriers, and the gradients' bytes."""

    n_gradients: int
    gradient_bytes: int
    n_barriers: int


def ordered(step: FlatStep) -> tuple[FlatStep, Ordered | None]:
    """The step with its updates in order; as it is, and `None`, where fewer than two barriers would be."""
    needed = _needed_for_gradients(step.eqns)
    spine = [eqn for eqn in step.eqns if id(eqn) in needed]
    updates = [eqn for eqn in step.eqns if id(eqn) not in needed]
    made_at = {v: i for i, eqn in enumerate(spine) for v in eqn.outvars}
    walk = _Order(step, made_at, _last_reads(spine))
    behind = walk.places(updates)
    walk.put(behind.get(-1, ()))
    for i, eqn in enumerate(spine):
        walk.put([eqn])
        walk.put(behind.get(i, ()))
        walk.end(i, behind.get(i, ()))
    if walk.n_barriers < 2:
        return step, None
    outputs = tuple(walk.name(a) for a in step.outputs)
    reports = tuple(walk.renamed(eqn) for eqn in step.reports)
    done = Ordered(walk.n_gradients, walk.gradient_bytes, walk.n_barriers)
    return replace(step, eqns=tuple(walk.eqns), reports=reports, outputs=outputs), done


def _needed_for_gradients(eqns: Sequence[Any]) -> set[int]:
    """Equations that more is made of than updates: all that a product, a reduction or a loop is made of."""
    wanted: set[Any] = set()
    found: set[int] = set()
    for eqn in reversed(eqns):
        if eqn.primitive.name not in LIGHT or eqn.effects or any(v in wanted for v in eqn.outvars):
            found.add(id(eqn))
            wanted.update(a for a in eqn.invars if compat.is_var(a))
    return found


def _last_reads(eqns: Sequence[Any]) -> dict[Any, int]:
    return {a: i for i, eqn in enumerate(eqns) for a in eqn.invars if compat.is_var(a)}


def _is_float(v: Any) -> bool:
    return bool(v.aval.ndim) and jnp.issubdtype(v.aval.dtype, jnp.floating)


@dataclass(slots=True, eq=False)
class _Order:
    """Equations put one behind the other: which of the backward pass makes a value, and which reads it last."""

    step: FlatStep
    made_at: dict[Any, int]
    read_at: dict[Any, int]
    eqns: list[Any] = field(init=False, default_factory=list)
    n_barriers: int = field(init=False, default=0)
    n_gradients: int = field(init=False, default=0)
    gradient_bytes: int = field(init=False, default=0)
    names: dict[Any, Any] = field(init=False, default_factory=dict)
    """What a value is called behind the barriers."""
    pending: list[Any] = field(init=False, default_factory=list)
    """What is updated, and not behind a barrier yet."""
    used: list[Any] = field(init=False, default_factory=list)
    """The gradients that were used up for it."""
    largest: int = field(init=False, default=0)

    def places(self, updates: Sequence[Any]) -> dict[int, list[Any]]:
        """Behind which equation of the backward pass each update can be; -1 is in front of all."""
        at = dict(self.made_at)
        found: dict[int, list[Any]] = {}
        for eqn in updates:
            place = max((at.get(a, -1) for a in eqn.invars if compat.is_var(a)), default=-1)
            at.update(dict.fromkeys(eqn.outvars, place))
            found.setdefault(place, []).append(eqn)
        gradients = {a for place, eqns in found.items() if place >= 0 for a in self.gradients(eqns)}
        self.largest = max((aval_bytes(v.aval) for v in gradients), default=0)
        return found

    def gradients(self, updates: Sequence[Any]) -> list[Any]:
        """What updates read of the backward pass and nothing else reads later: arrays of floats."""
        reads = dict.fromkeys(a for eqn in updates for a in eqn.invars if compat.is_var(a) and a in self.made_at)
        return [a for a in reads if _is_float(a)]

    def name(self, atom: Any) -> Any:
        return self.names.get(atom, atom) if compat.is_var(atom) else atom

    def renamed(self, eqn: Any) -> Any:
        return eqn.replace(invars=[self.name(a) for a in eqn.invars])

    def put(self, eqns: Sequence[Any]) -> None:
        self.eqns += [self.renamed(eqn) for eqn in eqns] if self.names else eqns

    def end(self, place: int, updates: Sequence[Any]) -> None:
        """What comes behind an equation and its updates: a barrier, if enough is updated and the pass goes on."""
        made = {v for eqn in updates for v in eqn.outvars}
        self.pending += [v for v in dict.fromkeys(self.step.outputs) if compat.is_var(v) and v in made and v.aval.ndim]
        self.used += self.gradients(updates)
        n_bytes = sum(aval_bytes(v.aval) for v in self.used)
        gate = self.gate(place) if self.pending and n_bytes >= self.largest else None
        if gate is None:
            return
        held = [gate, *self.pending]
        fenced = jax.make_jaxpr(jax.lax.optimization_barrier)([v.aval for v in held]).eqns[0]
        new = [compat.new_var(v.aval) for v in held]
        self.eqns.append(fenced.replace(invars=[self.name(v) for v in held], outvars=new))
        self.names.update(zip(held, new, strict=True))
        self.n_barriers, self.n_gradients = self.n_barriers + 1, self.n_gradients + len(self.used)
        self.gradient_bytes += n_bytes
        self.pending, self.used = [], []

    def gate(self, place: int) -> Any | None:
        """What was made last of all that the backward pass goes on with."""
        live = [v for v, i in self.made_at.items() if i <= place < self.read_at.get(v, -1) and _is_float(v)]
        return max(live, key=lambda v: self.made_at[v], default=None)
