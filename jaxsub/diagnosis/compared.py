"""Faults that two compiles show: the program as it is, and with one thing changed.

In goes a `Subject`; out come `Finding`s whose bytes are differences between what the compiler allocates for both.
Looked at are `jax.checkpoint` regions that save no memory, offloads that move nothing, arguments that could be donated,
gradients that are live whole though their update could run inside the backward scan, and what a plan would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxsub.core.budget import format_bytes
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import recomputed_share
from jaxsub.diagnosis.findings import Finding
from jaxsub.diagnosis.subject import Flat, Subject, bind, is_backward, of_loss, returned_anew
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of, walk
from jaxsub.jaxpr.policy_calls import bare
from jaxsub.jaxpr.trace import Program
from jaxsub.search.pipeline import Settings, make_plan
from jaxsub.step.fused_update import Findings as Updates
from jaxsub.step.fused_update import fuse

NO_UPDATE = frozenset(("dot_general", "conv_general_dilated", "gather", "reduce_sum", "reduce_max"))
"""What makes something else of an argument than an update of it."""

SAVES = 0.99
"""Regions with which a program needs more than this share of what it needs without them change nothing."""

MOST_KINDS = 3
"""Of so many kinds of regions, the first in the program, each is looked at: that takes two compiles."""

Key = tuple[str, str, int]
"""A kind of regions: the name of their policy, their source line, how many other regions are round them."""

Change = Callable[[Any, Flat], Flat]


def regions(subject: Subject) -> Iterator[Finding]:
    """Regions of `jax.checkpoint` without which the gradient needs no more memory."""
    if subject.program is None or subject.is_planned:
        return
    kinds: dict[Key, list[Any]] = {}
    for eqn, depth in _nested(subject.program.eqns):
        kinds.setdefault((_policy_name(eqn), compat.source_of(eqn), depth), []).append(eqn)
    with_all = _gradient(subject, (), _inline)
    for key, eqns in list(kinds.items())[:MOST_KINDS]:
        now, without = (s.measurement.temp_bytes for s in (with_all, _gradient(subject, eqns, _inline)))
        full = _gradient(subject, eqns, _recompute)
        if now >= SAVES * without:
            yield _region_finding(key, now, without, full.measurement.temp_bytes)
        elif "offload" in key[0] and not _moves(with_all, full):
            yield Finding(
                "offload moves nothing", 0,
                f"no value is moved to host memory under {key[0]}: none in the region has a name that it offloads.",
                "name the values in the region, jax.ad_checkpoint.checkpoint_name(x, name), or use jax.checkpoint(f).",
                is_measured=True, source=key[1],
            )  # fmt: skip


def _nested(eqns: Sequence[Any], depth: int = 0) -> Iterator[tuple[Any, int]]:
    """The regions of a program, each with how many others are round it."""
    for eqn in eqns:
        if _is_region(eqn):
            yield eqn, depth
        for body in bodies_of(eqn):
            yield from _nested(compat.open_jaxpr(body).eqns, depth + _is_region(eqn))


def _region_finding(key: Key, now: int, without: int, full: int) -> Finding:
    best = min(without, full, now)
    fix = f"jax.checkpoint(f) without a policy, which takes {format_bytes(full)}." if full == best else "remove it."
    return Finding(
        "checkpoint saves nothing", now - best,
        f"with {key[0]} {'here' if key[1] else 'round the whole function'} the gradient takes {format_bytes(now)}, "
        f"and {format_bytes(without)} without.",
        fix if best < now else "remove it: what it recomputes saves nothing.", is_measured=True, source=key[1],
    )  # fmt: skip


def _is_region(eqn: Any) -> bool:
    return eqn.primitive.name in compat.REGIONS


def _policy_name(eqn: Any) -> str:
    policy = bare(eqn.params.get("policy"))
    name = getattr(policy, "__qualname__", type(policy).__qualname__).split(".<locals>")[0]
    return "jax.checkpoint" if policy is None else f"policy {name}"


def _inline(eqn: Any, body: Flat) -> Flat:
    return body


def _recompute(eqn: Any, body: Flat) -> Flat:
    return compat.checkpoint(body, prevent_cse=eqn.params.get("prevent_cse", True))


def _gradient(subject: Subject, eqns: Sequence[Any], change: Change) -> Subject:
    """The gradient with some regions changed; all forms are put together in one way, to be compared."""
    program: Program = subject.program  # type: ignore[assignment]
    changed = _Changed(frozenset(map(id, eqns)), change)

    def flat(*inputs: Any) -> list[Any]:
        return changed.evaluate(program.eqns, program.invars, program.outvars, inputs)

    return of_loss(program, flat, subject.target)


@dataclass(frozen=True, slots=True)
class _Changed:
    """Evaluates equations, some regions among them in another way."""

    eqns: frozenset[int]
    change: Change

    def evaluate(
        self, eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], inputs: Sequence[Any]
    ) -> list[Any]:
        """Evaluate equations in order."""
        env = dict(zip(invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return env[atom] if compat.is_var(atom) else atom.val

        for eqn in eqns:
            values = [read(a) for a in eqn.invars]
            env.update(zip(eqn.outvars, self._run(eqn)(*values), strict=True))
        return [read(a) for a in outvars]

    def _run(self, eqn: Any) -> Flat:
        """An equation as a function, what is in it changed."""
        if not any(id(inner) in self.eqns for inner, _ in walk([eqn])) or len(bodies_of(eqn)) != 1:
            return lambda *values: bind(eqn, values)
        (closed,) = bodies_of(eqn)
        jaxpr, consts = compat.open_jaxpr(closed), getattr(closed, "consts", ())

        def body(*values: Any) -> list[Any]:
            inputs = (*consts, *values)
            return self.evaluate(jaxpr.eqns, (*jaxpr.constvars, *jaxpr.invars), jaxpr.outvars, inputs)

        if id(eqn) in self.eqns:
            return self.change(eqn, body)
        if _is_region(eqn):
            return compat.checkpoint(body, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
        if eqn.primitive.name == "scan":
            changed = jax.make_jaxpr(body)(*(compat.shape_of(v.aval) for v in jaxpr.invars))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": changed})
        elif compat.inlined_body(eqn) is not None:
            return body
        return lambda *values: bind(eqn, values)


def _moves(subject: Subject, other: Subject) -> bool:
    """Whether a gradient moves more values between memories than another."""
    here, there = (sum(e.primitive.name == "device_put" for e, _ in walk(s.eqns)) for s in (subject, other))
    return bool(here > there)


def donations(subject: Subject) -> Iterator[Finding]:
    """Arguments that the step returns updated and that are not donated."""
    if subject.program is not None:
        return
    numbers, leaves, at, updated = [], list(subject.donated), 0, _updated(subject)
    for number, argument in enumerate(subject.arguments):
        size = len(jax.tree.leaves(argument))
        kept = not all(subject.donated[at : at + size])
        if kept and returned_anew(argument, subject.out_info) and updated & set(subject.inputs[at : at + size]):
            numbers.append(number)
            leaves[at : at + size] = [True] * size
        at += size
    if not numbers:
        return
    saved = subject.measurement.step_bytes - subject.measure(subject.call, leaves).step_bytes
    told = str(numbers[0]) if len(numbers) == 1 else str(tuple(numbers))
    counted = ", counted without static arguments" if subject.has_statics else ""
    yield Finding(
        "not donated", saved,
        f"the step returns {'argument' if len(numbers) == 1 else 'arguments'} {told} updated, in new memory.",
        f"jax.jit(step, donate_argnums={told}){counted}, and use only what it returns afterwards.", is_measured=True,
    )  # fmt: skip


def _updated(subject: Subject) -> set[Any]:
    """Inputs that results are updates of: read elementwise, or carried by a loop, on the way back to a gradient."""
    makers = {v: eqn for eqn in subject.eqns for v in eqn.outvars}
    todo, found = [a for a in subject.outputs if compat.is_var(a)], set()
    while todo:
        if (var := todo.pop()) in found:
            continue
        found.add(var)
        if (maker := makers.get(var)) is not None:
            todo += [a for a in _updates(maker, maker.outvars.index(var)) if compat.is_var(a)]
    return found


def _updates(eqn: Any, place: int) -> Sequence[Any]:
    """What an equation's result may be an update of."""
    if not is_backward(eqn):
        return () if eqn.primitive.name in NO_UPDATE else eqn.invars
    n_consts, n_carry = compat.scan_sizes(eqn) if eqn.primitive.name == "scan" else (0, 0)
    return eqn.invars[n_consts + place : n_consts + place + 1] if place < n_carry else ()


def whole_gradients(subject: Subject) -> Iterator[Finding]:
    """Stacked gradients that are live whole before the update reads them."""
    if subject.program is not None or subject.is_planned:
        return
    updates = Updates()
    call = fuse(subject.closed, subject.donated, updates)
    fused, whole = updates.fused, updates.whole
    if fused:
        saved = subject.measurement.step_bytes - subject.measure(call).step_bytes
        n = sum(scan.n_gradients for scan in fused)
        yield Finding(
            "whole gradients", saved,
            f"{n} stacked gradients, {format_bytes(sum(scan.gradient_bytes for scan in fused))} in all, are live "
            "before the update reads them layer by layer.",
            "jaxsub.jit(step, fuse_updates=True) updates inside the backward scan.",
            is_measured=True, source=fused[0].source,
        )  # fmt: skip
    for scan in whole:
        yield Finding(
            "whole gradients", scan.n_bytes, f"gradients are live whole before their update: {scan.reason}.",
            "update layer by layer where you can: optax.clip instead of a clip by the norm of all gradients.",
            is_measured=False,
        )  # fmt: skip


def plan(subject: Subject, *, cache: Any = True) -> Iterator[Finding]:
    """What a plan that runs at most one more forward pass would save."""
    if subject.program is None or subject.is_planned:
        return
    settings = Settings(target=subject.target, verify=True, cache=cache, progress=False)
    try:
        made = make_plan(subject.program, settings)
    except InfeasibleBudgetError:
        return
    if made.measurement is None:
        return
    now, planned = subject.measurement.temp_bytes, made.measurement.temp_bytes
    size, unit = (2**20, "MiB") if planned > 2**24 else (2**10, "KiB")
    yield Finding(
        "a plan saves", now - planned,
        f"the gradient takes {format_bytes(now)} beside its arguments and results; a plan needs "
        f"{format_bytes(planned)} and recomputes {recomputed_share(made):.0%} of a forward pass.",
        f'jaxsub.sublinear(loss, budget="{-(-planned // size)}{unit}"), or any budget between.', is_measured=True,
    )  # fmt: skip
