"""A train step as flat equations: what is rewritten where updates move into the backward scan.

Calls, and regions with a scan inside, are inlined as JAX lowers them, what only reports comes last, and what a scan
merely hands on is read where it came from. Equations are data: a rewrite is another tuple of them, and the step is
traced once whatever is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.core
import jax.numpy as jnp

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axes import follow_all
from jaxsub.jaxpr.axis import Axis, NotIndependent
from jaxsub.jaxpr.axis_origin import split_otherwise
from jaxsub.jaxpr.axis_places import Place
from jaxsub.jaxpr.flops import primitives_in
from jaxsub.jaxpr.inline import flatten_jaxpr, inline_regions, live_eqns, renamed, reports_last

Values = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FlatStep:
    """A step's equations; its inputs' constants first."""

    eqns: tuple[Any, ...]
    reports: tuple[Any, ...]
    """What only reports, as `jax.debug.print` does: it comes last."""
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    consts: tuple[Any, ...]
    donated: tuple[Any, ...]
    """The inputs that are donated, in order."""

    @classmethod
    def of(cls, closed: Any, donated: Sequence[bool]) -> FlatStep:
        """Of a step's jaxpr, and which of its inputs are donated."""
        eqns, inputs, outputs, consts = flatten_jaxpr(closed)
        eqns, outputs = inline_regions(eqns, outputs, _is_region_of_scan)
        eqns, outputs = unforwarded(live_eqns(reports_last(eqns), outputs), outputs)
        given = inputs[len(consts) :]
        kept = [v for v, is_donated in zip(given, donated, strict=True) if is_donated]
        n = next((n for n in range(len(eqns), 0, -1) if eqns[n - 1].outvars), 0)
        return cls(tuple(eqns[:n]), tuple(eqns[n:]), tuple(inputs), tuple(outputs), tuple(consts), tuple(kept))

    @property
    def results(self) -> tuple[Any, ...]:
        """What is read of the equations in the end."""
        return (*self.outputs, *(a for eqn in self.reports for a in eqn.invars))

    def run(self, *args: Any) -> Values:
        """The step's results."""
        flat = compat.make_jaxpr_of([*self.eqns, *self.reports], self.inputs, self.outputs)
        return tuple(jax.core.eval_jaxpr(flat, (), *self.consts, *args))

    def stacked(self, place: int) -> list[Any]:
        """Floating-point results that a scan stacks and something reads."""
        scan = self.eqns[place]
        _, n_carry = compat.scan_sizes(scan)
        read = {a for eqn in self.eqns[place + 1 :] for a in eqn.invars if compat.is_var(a)}
        return [v for v in scan.outvars[n_carry:] if v in read and jnp.issubdtype(v.aval.dtype, jnp.floating)]

    def unfenced(self, place: int) -> FlatStep:
        """The step whose barriers leave out what a scan stacks, and what is made of it.

        A plan's gradient barriers finish gradients before the backward pass goes on. Those of a scan that updates as it
        goes are finished in it.
        """
        carried, names, eqns = set(self.stacked(place)), dict[Any, Any](), list(self.eqns[: place + 1])

        def read_anew(eqn: Any) -> Any:
            is_same = names.keys().isdisjoint(filter(compat.is_var, eqn.invars))
            return eqn if is_same else eqn.replace(invars=[renamed(names, a) for a in eqn.invars])

        for eqn in self.eqns[place + 1 :]:
            new = read_anew(eqn)
            pairs = list(zip(new.invars, new.outvars, strict=False))
            within = [a for a in new.invars if compat.is_var(a) and a in carried]
            if within and eqn.primitive.name == "optimization_barrier":
                names.update((v, a) for a, v in pairs if a in within)
                left = [(a, v) for a, v in pairs if a not in within]
                eqns += [new.replace(invars=[a for a, _ in left], outvars=[v for _, v in left])] if left else []
                continue
            carried.update(new.outvars if within else ())
            eqns.append(new)
        outputs = tuple(renamed(names, a) for a in self.outputs)
        return replace(self, eqns=tuple(eqns), outputs=outputs, reports=tuple(map(read_anew, self.reports)))

    def origins(self, place: int) -> dict[Any, Any]:
        """Of what barriers pass on and reshapes return in front of a place: which of the step's inputs it is."""
        found = {v: v for v in self.inputs}
        for eqn in self.eqns[:place]:
            if eqn.primitive.name in ("optimization_barrier", "reshape"):
                pairs = zip(eqn.invars, eqn.outvars, strict=False)
                found.update((v, found[a]) for a, v in pairs if compat.is_var(a) and a in found)
        return found

    def made_of(self, place: int, atoms: Sequence[Any]) -> set[Any]:
        """All that values are made of, back to a place."""
        makers = {v: eqn for eqn in self.eqns[place + 1 :] for v in eqn.outvars}
        found, todo = set(), [a for a in atoms if compat.is_var(a)]
        while todo:
            atom = todo.pop()
            if atom not in found:
                found.add(atom)
                todo += [a for a in makers[atom].invars if compat.is_var(a)] if atom in makers else []
        return found

    def follow(self, place: int, eqns: Sequence[Any], seeds: Sequence[Any], results: Sequence[Any]) -> Axis:
        """Follow the layers of a scan's stacked results through equations behind it, unless one needs them all."""
        known = [*self.inputs, *(v for eqn in self.eqns[: place + 1] for v in eqn.outvars)]
        late = [v for v in self.eqns[place].outvars if v not in seeds]
        axis = follow_all(eqns, known, results, [(seed, 0) for seed in seeds], late)
        if (eqn := split_otherwise(axis.steps)) is not None:
            raise NotIndependent(eqn, "it splits the axis over devices")
        return axis


def _is_region_of_scan(eqn: Any) -> bool:
    return eqn.primitive.name in compat.REGIONS and "scan" in primitives_in(eqn)


def unforwarded(eqns: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Read what a scan takes apart and stacks as it was, as the scans of NNX do with weights, where it came from."""
    same: dict[Any, Any] = {}

    def was(atom: Any) -> Any:
        return same.get(atom, atom) if compat.is_var(atom) else atom

    found = []
    for eqn in eqns:
        new = eqn.replace(invars=[was(a) for a in eqn.invars]) if same else eqn
        if eqn.primitive.name == "scan":
            n_consts, n_carry = compat.scan_sizes(eqn)
            body = compat.open_jaxpr(eqn.params["jaxpr"])
            taken = dict(zip(body.invars[n_consts + n_carry :], new.invars[n_consts + n_carry :], strict=True))
            stacked = zip(eqn.outvars[n_carry:], body.outvars[n_carry:], strict=True)
            same.update((v, taken[a]) for v, a in stacked if compat.is_var(a) and a in taken)
        found.append(new)
    return live_eqns(found, outputs := [was(a) for a in outputs]), outputs


def run_twice(step: FlatStep, place: int, seeds: Sequence[Any], needed: Sequence[Any]) -> tuple[FlatStep, Any] | None:
    """The step with a scan in it twice: what needs all gradients reads the first's, the updates read the second's.

    All that `needed` is made of, such as a norm, stands between the two, so the second may update as it goes. What
    carries the layers and is read by both, as a gradient's square is by a norm and by Adam, is made for both. Returns
    the step and the second scan; `None` if what is needed needs all gradients twice, is not made of them, or they are
    returned.
    """
    scan, behind, found = step.eqns[place], step.eqns[place + 1 :], step.made_of(place, needed)
    first = [eqn for eqn in behind if any(v in found for v in eqn.outvars)]
    try:
        axis = step.follow(place, first, seeds, needed)
    except NotIndependent:
        return None
    if any(v in seeds for v in step.results if compat.is_var(v)):
        return None
    again = [scan.replace(outvars=[compat.new_var(v.aval) for v in scan.outvars])]
    names = {v: new for v, new in zip(scan.outvars, again[0].outvars, strict=True) if v in seeds}
    for eqn in behind:
        carried = [v for v in eqn.outvars if isinstance(axis.places.get(v), Place)]
        if eqn in first and not carried:
            continue
        new = eqn.replace(invars=[names.get(a, a) if compat.is_var(a) else a for a in eqn.invars])
        if carried:
            new = new.replace(outvars=[compat.new_var(v.aval) for v in eqn.outvars])
            names.update((v, w) for v, w in zip(eqn.outvars, new.outvars, strict=True) if v in carried)
        again.append(new)
    outputs = tuple(names.get(a, a) if compat.is_var(a) else a for a in step.outputs)
    twice = replace(step, outputs=outputs)
    eqns = tuple(live_eqns([*step.eqns[: place + 1], *first, *again], twice.results))
    are_both_needed = scan in eqns and again[0] in eqns
    return (replace(twice, eqns=eqns), again[0]) if are_both_needed else None
