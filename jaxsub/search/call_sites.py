"""Sublinear functions inside a whole step, or inside one another: how they are found, and given their plans.

A step that is sized as a whole is traced once for each choice of plans. Such a trace is a `Trial`: a table of plans by
fingerprint, into which every `sublinear` function that is called meanwhile puts itself. The trial is the value of a
JAX user context, so that what JAX remembers of inner functions (`jax.jit`, bodies of loops) is remembered for that
trial alone. A sublinear function inside another one is part of it: the outermost plans for all of it, and the trace
that it plans from has the inner ones as they were, but for plans and mirror counts of the user's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxsub.core.decisions import Form
from jaxsub.core.plan import Plan
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import Program, as_wide_as
from jaxsub.search.forms import added_flops, forms_of
from jaxsub.search.pipeline import Settings, can_plan, make_plan
from jaxsub.search.verify import untouched

_TRIAL: Any = jax.make_user_context(None)


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """One sublinear function in a step, at one set of shapes.

    Attributes:
        name: What the function is called.
        program: The function, traced; the values of what it closes over are left out.
        settings: How it was asked to plan.
        own: The plan it has when nothing is asked of the whole step: within its own budget, or the plain program.
        is_sized: Whether the step may plan it: not with a plan or mirror counts of the user's own.
        axes: The named axes around the call, to be re-entered to plan it.
        is_mapped: Whether it is inside a `jax.shard_map`, where values are those of one device.
    """

    name: str
    program: Program
    settings: Settings
    own: Plan
    is_sized: bool
    axes: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    is_mapped: bool = False

    def forms(self) -> tuple[Form, ...]:
        """The forms to plan it in."""
        with self.axes():
            return forms_of(self.program)

    def added_flops(self, form: Form) -> float:
        """What a form adds to its gradient, in FLOPs."""
        with self.axes():
            return added_flops(self.program, form)


@dataclass(slots=True, eq=False)
class Trial:
    """One trace of a step.

    Attributes:
        target: What the step is planned for, and so are functions in it that name no target themselves.
        plans: Plans by fingerprint; a function without one here has its own.
        are_given: Whether the plans were made before: a function that has one is not planned by itself.
        known: What another trace of the step has found.
        sites: The sublinear functions that the trace has met, by fingerprint.
        calls: How often it has met each.
    """

    target: Target
    plans: Mapping[str, Plan] = field(default_factory=dict)
    are_given: bool = False
    known: Mapping[str, CallSite] = field(default_factory=dict)
    sites: dict[str, CallSite] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def plan(self, name: str, program: Program, settings: Settings) -> Plan:
        """Take note of a function and give it its plan."""
        key = program.fingerprint
        if key not in self.sites:
            chosen = replace(settings, target=self.target if settings.target is None else settings.target)
            given = self.plans.get(key) if self.are_given else None
            self.sites[key] = self.known.get(key) or _site(name, program, chosen, given)
        self.calls[key] = self.calls.get(key, 0) + 1
        return self.plans.get(key, self.sites[key].own)


@dataclass(frozen=True, slots=True)
class Enclosing:
    """The trace of a sublinear function, which plans for those that are called meanwhile.

    Attributes:
        target: What it is planned for.
        manual_axes: The axes of `jax.shard_map` that it is inside of.
    """

    target: Any
    manual_axes: tuple[str, ...]

    def plan(self, name: str, program: Program, settings: Settings) -> Plan:
        """Leave a function inside as it is, unless the user has planned it, or a `shard_map` stands between."""
        is_mapped = _manual_axes() != self.manual_axes  # it is one equation to a plan, whatever is inside
        return make_plan(program, settings) if settings.is_fixed or is_mapped else untouched(program)


def _site(name: str, program: Program, settings: Settings, given: Plan | None) -> CallSite:
    is_bounded = settings.budget.n_bytes is not None or settings.budget.fraction is not None
    own = given or (make_plan(program, settings) if settings.is_fixed or is_bounded else untouched(program))
    axes, bare = compat.axes_in_scope(), replace(program, consts=())

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with axes(), as_wide_as(bare):
            yield

    return CallSite(name, bare, settings, own, not settings.is_fixed and can_plan(bare), entered, bool(_manual_axes()))


def current() -> Trial | Enclosing | None:
    """The trial, or the sublinear function, that is being traced, if any."""
    found: Trial | Enclosing | None = _TRIAL.value
    return found


@contextlib.contextmanager
def enclosing(target: Any) -> Iterator[Any]:
    """Trace a sublinear function: no step plans what is called meanwhile, and it does not plan for itself.

    Yields the target to plan for: without one of its own that of the step, or the function, around it.
    """
    around = current()
    target = around.target if target is None and around is not None else target
    with _TRIAL(Enclosing(target, _manual_axes())):
        yield target


def _manual_axes() -> tuple[str, ...]:
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def tried(fun: Callable[..., Any], trial: Trial) -> Callable[..., Any]:
    """A function whose every trace is one of a trial; its arguments are those of `fun`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _TRIAL(trial):
            return fun(*args, **kwargs)

    return run
