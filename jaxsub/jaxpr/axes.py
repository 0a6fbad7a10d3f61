"""Find independent axes of a run of equations, by following an axis from one dimension of one input.

A run goes in with a seed, and comes out in three parts. `before` are equations that do not depend on the axis: they run
once. `steps` are those that carry it: they may run a slice of the axis at a time, each with the needs of its operands
and the places of its results. `after` are equations that read only totals over the axis. The analysis is exact and
conservative: `jaxsub.jaxpr.axis_rules` has the rules of primitives, `jaxsub.jaxpr.axis_bodies` those of equations with
inner jaxprs. An equation without a rule, one that mixes parts of the axis, or one that reads both values that carry the
axis and a total over it (batch statistics, a softmax over the axis) ends the run: `NotIndependent` names it with its
source line.

Values that have the axis's length in their shape but do not depend on it (masks, tables, labels) are sliced too: inputs
directly, elementwise work, broadcasts and random bits by evaluating them at the slice's shape, all others as whole
values. Rules of `custom_jvp` and `custom_vjp` are traced at the whole shape, and run in slices too.

Where an equation drops the last units, as `logits[:, :-1]` does, the equations before it run for the first units alone,
if nothing else reads the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxsub.core.tuning import TUNING
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axis import Axis, Body, NotIndependent, Step, live_steps
from jaxsub.jaxpr.axis_bodies import Follow, Held, held_rule
from jaxsub.jaxpr.axis_inverse import step_of_broadcasts
from jaxsub.jaxpr.axis_origin import inputs_with_axis, joining_inputs
from jaxsub.jaxpr.axis_places import Coarser, NoRule, Place, Shorter, State, Total, units_of
from jaxsub.jaxpr.axis_rules import first_units, narrows, needs_at, rule_of
from jaxsub.jaxpr.derivative_rules import is_inexact
from jaxsub.jaxpr.flops import bodies_of, is_costly
from jaxsub.jaxpr.linearity import is_linear_equation
from jaxsub.jaxpr.tangents import ZERO_TANGENT


class MeetsTotal(NoRule):
    """What carries the axis meets totals over it, or what is made of them."""

    def __init__(self, totals: Sequence[Any]) -> None:
        super().__init__("it reads a total over the axis, and what carries the axis")
        self.totals = tuple(totals)


def follow(
    eqns: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    seed: Any,
    dim: int,
    still: Collection[Any] = (),
) -> Axis:
    """Follow an axis, a dimension of one of the inputs, through a run of equations.

    Cheap totals of inputs that are `still`, without tangents, run before the slices: how many tokens a mask leaves, the
    mean of an advantage. Where the axis ends in a sum, a loss, other inputs that have it join where they can, as the
    second of two batches that are compared does, or one with a term of its own: what is made of them runs in slices as
    well. Elsewhere slices are recomputed, and it runs once.
    """
    seeds: list[tuple[Any, int]] = [(seed, dim)]
    axis = follow_all(eqns, inputs, outputs, seeds, may_end_early=True, still=still)
    tried = set(seeds)
    while more := [found for found in dict.fromkeys(joining_inputs(axis, inputs, seeds[0])) if found not in tried]:
        tried.update(more)
        for joining in (more, *([found] for found in more if len(more) > 1)):
            try:
                axis = follow_all(eqns, inputs, outputs, [*seeds, *joining], may_end_early=True, still=still)
            except NotIndependent:
                continue
            seeds += joining
            if joining is more:
                break
    return axis


def follow_all(
    eqns: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    seeds: Sequence[tuple[Any, int]],
    late: Collection[Any] = (),
    may_end_early: bool = False,
    still: Collection[Any] = (),
) -> Axis:
    """Follow an axis that several inputs carry at once, the seeds: each an input and its dimension.

    Of the equations' results the outputs are read later. Inputs that are `late` are known only after the slices have
    run, such as sums over them. With `may_end_early` the last units may be left out where nothing reads them.
    `NotIndependent` says which equation forbids it; `ValueError` if the dimension has a single element.
    """
    length = min(seed.aval.shape[dim] for seed, dim in seeds)
    if length < 2:
        raise ValueError(f"dimension {seeds[0][1]} of {seeds[0][0].aval} has no slices")
    first: int | None = None
    wanted: dict[Any, Place] = {}
    while True:
        walk = _Run(length, inputs, first=first, may_end_early=may_end_early)
        walk.late.update(late)
        walk.wanted.update(wanted)
        walk.light.update(dict.fromkeys(still, 0))
        walk.moving.difference_update(still)
        try:
            for seed, dim in seeds:
                walk.states[seed] = place = Place(dim, seed.aval.shape[dim] // length)
                walk.cut[seed, place] = None
            for eqn in eqns:
                walk.run(eqn)
            return walk.axis(outputs)
        except Coarser as finer:
            length, first = finer.n_units, None
        except Shorter as shorter:
            first = shorter.n_units
        except _Refined as more:
            wanted[more.var] = more.place


def body_of(closed: Any, ins: Sequence[Place | None], n: int, wanted: Sequence[State] = (), order: int = 0,
            joins: bool = False) -> Body:  # fmt: skip
    """Follow an axis of `n` units through a jaxpr in an equation; some inputs may turn out to be needed in slices too.

    How its inputs carry the axis is given, and how its outputs are to carry it at least; `order` is the derivative's.
    With `joins` those inputs are needed in slices, too, of which values are made that have the axis.
    """
    jaxpr, ins = compat.open_jaxpr(closed), list(ins)
    consts = tuple(getattr(closed, "consts", ()))
    while True:
        walk = _Inside(n, jaxpr.invars, order, joins)
        try:
            for var, place in zip(jaxpr.invars, ins, strict=True):
                walk.states[var] = place
            for eqn in jaxpr.eqns:
                walk.run(eqn)
            outs = [walk.state(a) for a in jaxpr.outvars]
            for i, (atom, want) in enumerate(zip(jaxpr.outvars, wanted, strict=False)):
                if outs[i] is None and isinstance(want, Place):
                    walk.place(atom, want)
                    outs[i] = want
                elif want is not None and outs[i] != want:
                    raise NoRule(f"a result of the program inside is carried as {outs[i]} and as {want}")
            steps = live_steps(walk.steps, jaxpr.outvars, outs)
            return Body(jaxpr, consts, tuple(ins), steps, tuple(outs))
        except _Refined as more:
            ins[jaxpr.invars.index(more.var)] = more.place


class _Refined(Exception):
    """An input of a body has to come in slices, or a result that an equation makes in them."""

    def __init__(self, var: Any, place: Place) -> None:
        super().__init__(str(place))
        self.var, self.place = var, place


@dataclass(slots=True, eq=False)
class _Walk:
    """Follows equations one by one; those with an operand that carries the axis run in slices."""

    n: int
    inputs: Sequence[Any]
    order: int = 0
    states: dict[Any, State] = field(init=False, default_factory=dict)
    wanted: dict[Any, Place] = field(init=False, default_factory=dict)
    """Results that do not depend on the axis, and are read in slices."""
    steps: list[Step] = field(init=False, default_factory=list)
    makers: dict[Any, Any] = field(init=False, default_factory=dict)
    placed: set[tuple[Any, Place]] = field(init=False, default_factory=set)
    moving: set[Any] = field(init=False, default_factory=set)
    """Variables that may have tangents."""

    def __post_init__(self) -> None:
        self.moving.update(v for v in self.inputs if is_inexact(v))

    def state(self, atom: Any) -> State:
        return self.states.get(atom) if compat.is_var(atom) else None

    def run(self, eqn: Any) -> None:
        self.makers.update((v, eqn) for v in eqn.outvars)
        if eqn.primitive.name not in ZERO_TANGENT and any(a in self.moving for a in eqn.invars if compat.is_var(a)):
            self.moving.update(v for v in eqn.outvars if is_inexact(v))
        try:
            self.take(eqn, [self.state(a) for a in eqn.invars])
        except NoRule as why:
            raise NotIndependent(eqn, str(why), totals=getattr(why, "totals", ())) from None
        except NotIndependent as inner:
            found = inner if compat.source_of(inner.eqn) else NotIndependent(inner.eqn, inner.reason, eqn)
            found.around = eqn
            raise found from None

    def take(self, eqn: Any, ins: Sequence[State]) -> None:
        raise NotImplementedError

    def whole(self, eqn: Any, state: State) -> None:
        """Let an equation run in each slice on whole values, or on parts of sums."""
        if eqn.effects:
            raise NoRule("its effect must happen once")
        n_ins, n_outs = len(eqn.invars), len(eqn.outvars)
        self.steps.append(Step(eqn, tuple(eqn.invars), (None,) * n_ins, tuple(eqn.outvars), (state,) * n_outs))
        self.states.update(dict.fromkeys(eqn.outvars, state))

    def slice(self, eqn: Any, ins: Sequence[Place | None]) -> None:
        """Let an equation run a slice at a time."""
        if eqn.effects:
            raise NoRule("its effect must happen once")
        n = next(units_of(a, place) for a, place in zip(eqn.invars, ins, strict=True) if place is not None)
        follow = Follow(lambda closed, ins, wanted, *how: body_of(closed, ins, n, wanted, *how), self.order)
        if (rule := rule_of(eqn)) is not None:
            held = Held(rule(eqn, ins, n), ())
        elif (found := held_rule(eqn, ins, follow, [self.wanted.get(v) for v in eqn.outvars])) is not None:
            held = found
        else:
            raise NoRule("it has no rule")
        needs, outs = held.ruled
        if any(isinstance(o, Total) and o.how != "sum" for o in outs) and eqn.invars[0] in self.moving:
            raise NoRule("it takes the largest over the axis, and has a gradient")
        for atom, has, need in zip(eqn.invars, ins, needs, strict=True):
            if has is not None and has != need:
                raise NoRule("it needs an operand along another dimension")
            self.need(atom, need)
        self.steps.append(Step(eqn, tuple(eqn.invars), tuple(needs), tuple(eqn.outvars), tuple(outs), held.bodies,
                               held.rule))  # fmt: skip
        self.states.update(zip(eqn.outvars, outs, strict=True))

    def need(self, atom: Any, place: Place | None) -> None:
        if place is not None and self.state(atom) is None:
            self.place(atom, place)

    def place(self, atom: Any, place: Place) -> None:
        """Provide a whole value in slices: evaluated at the slice's shape where that is cheap, else sliced."""
        if not compat.is_var(atom):
            raise NoRule("a constant has the axis in its shape")
        if (atom, place) in self.placed:
            return
        self.placed.add((atom, place))
        eqn = self.makers.get(atom)
        made = partial(_made_in_slice, order=self.order)
        step = None if eqn is None else made(eqn, atom, place) or step_of_broadcasts(self.makers, eqn, place, made)
        if step is None:
            self.sliced(atom, place)
            return
        for a, need in zip(step.reads, step.needs, strict=True):
            self.need(a, need)
        self.steps.append(step)

    def sliced(self, atom: Any, place: Place) -> None:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class _Inside(_Walk):
    """A body: all of its equations run in the slice, those that do not carry the axis whole."""

    joins: bool = False

    def take(self, eqn: Any, ins: Sequence[State]) -> None:
        if any(isinstance(i, Total) for i in ins):
            self.total(eqn, ins)
        elif any(ins):
            self.slice(eqn, [i for i in ins if not isinstance(i, Total)])
        else:
            self.whole(eqn, None)

    def total(self, eqn: Any, ins: Sequence[State]) -> None:
        """Let a linear equation run on a part of a sum."""
        if any(isinstance(i, Place) or (isinstance(i, Total) and i.how != "sum") for i in ins):
            raise NoRule("it reads a total over the axis, and what carries the axis")
        if narrows(eqn) or not is_linear_equation(eqn, [isinstance(i, Total) for i in ins]):
            raise NoRule("it reads a total over the axis before the axis ends")
        self.whole(eqn, Total())

    def sliced(self, atom: Any, place: Place) -> None:
        if atom in self.inputs:
            raise _Refined(atom, place)
        eqns = tuple(dict.fromkeys(self.makers.values())) if self.joins else ()
        for variable, there in inputs_with_axis(eqns, self.inputs, atom, place.dim, self.n):
            if self.state(variable) is None:
                raise _Refined(variable, there)
        self.steps.append(Step(None, (atom,), (None,), (atom,), (place,)))


@dataclass(slots=True, eq=False)
class _Run(_Walk):
    """A run: equations without the axis run before the slices, those that read totals after them.

    Of the axis `first` units are followed, if not all: an equation drops the others.
    """

    first: int | None = None
    may_end_early: bool = False
    before: list[Any] = field(init=False, default_factory=list)
    after: list[Any] = field(init=False, default_factory=list)
    late: set[Any] = field(init=False, default_factory=set)
    same: set[Any] = field(init=False, default_factory=set)
    """Values made in the slices that are the same in all of them."""
    cut: dict[tuple[Any, Place], None] = field(init=False, default_factory=dict)
    cast: set[Any] = field(init=False, default_factory=set)
    light: dict[Any, int] = field(init=False, default_factory=dict)
    """Inputs and values in slices that have no tangents, and how many equations make them, all of them cheap."""

    def take(self, eqn: Any, ins: Sequence[State]) -> None:
        reads = [a for a in eqn.invars if compat.is_var(a)]
        late = [a for a in reads if isinstance(self.state(a), Total) or a in self.late]
        if eqn.effects:
            raise NoRule("its effect must happen once")
        if late and any(isinstance(i, Place) for i in ins):
            raise MeetsTotal(late)
        if late and not any(a in self.late or a in self.same for a in reads) and self.is_of_sums(eqn, ins):
            self.whole(eqn, Total())
        elif late or (not any(ins) and any(a in self.same for a in reads)):
            self.after.append(eqn)
            self.late.update(eqn.outvars)
        elif any(ins):
            self.slice(eqn, [i for i in ins if not isinstance(i, Total)])
            self.same.update(v for v in eqn.outvars if self.states[v] is None)
            self.lighten(eqn)
        else:
            self.before.append(eqn)

    def lighten(self, eqn: Any) -> None:
        """Run a total before the slices if it is made without tangents by a few cheap equations."""
        n = 1 + sum(self.light.get(a, 0) for a in eqn.invars if compat.is_var(a))
        is_light = all(a in self.light for a in eqn.invars if isinstance(self.state(a), Place))
        is_heavy = n > TUNING.light_equations or is_costly(eqn) or bodies_of(eqn)
        if not is_light or is_heavy or not self.moving.isdisjoint(eqn.outvars):
            return
        if all(isinstance(self.states[v], Total) for v in eqn.outvars):
            self.steps.pop()
            self.states.update(dict.fromkeys(eqn.outvars))
            self.made_before(eqn)
        else:
            self.light.update(dict.fromkeys(eqn.outvars, n))

    def made_before(self, eqn: Any) -> None:
        """Run an equation before the slices, and in front of it those of light values that it reads."""
        for atom in eqn.invars:
            is_light = compat.is_var(atom) and self.light.get(atom)
            if is_light and not any(atom in made.outvars for made in self.before):
                self.made_before(self.makers[atom])
        self.before.append(eqn)

    def is_of_sums(self, eqn: Any, ins: Sequence[State]) -> bool:
        """Whether an equation of sums gives the sum of what it gives of their parts, and is cheap.

        A mean, or a loss of several terms, is one sum then: its gradient is made in the forward pass.
        """
        sums = [a for a, state in zip(eqn.invars, ins, strict=True) if isinstance(state, Total)]
        if any(isinstance(state, Total) and state.how != "sum" for state in ins) or is_costly(eqn):
            return False
        small = sum(v.aval.size for v in eqn.outvars) <= sum(a.aval.size for a in sums)
        are_wide = all(is_inexact(v) and v.aval.dtype.itemsize >= 4 for v in (*sums, *eqn.outvars))
        return small and are_wide and is_linear_equation(eqn, [isinstance(state, Total) for state in ins])

    def need(self, atom: Any, place: Place | None) -> None:
        _Walk.need(self, atom, place)
        eqn = self.makers.get(atom) if compat.is_var(atom) and place is None else None
        if eqn is not None and eqn.primitive.name == "convert_element_type" and narrows(eqn) and atom not in self.cast:
            # weights are cast in each slice, so that their gradients are summed at their own precision
            self.cast.add(atom)
            self.steps.append(Step(eqn, tuple(eqn.invars), (None,), tuple(eqn.outvars), (None,)))

    def place(self, atom: Any, place: Place) -> None:
        if atom in self.same and bodies_of(self.makers[atom]) and atom not in self.wanted:
            raise _Refined(atom, place)
        if atom in self.late or atom in self.same:
            raise MeetsTotal([atom])
        _Walk.place(self, atom, place)

    def sliced(self, atom: Any, place: Place) -> None:
        self.cut[atom, place] = None

    def slice(self, eqn: Any, ins: Sequence[Place | None]) -> None:
        carried = [units_of(a, place) for a, place in zip(eqn.invars, ins, strict=True) if place is not None]
        is_whole = self.first is not None and self.n in carried
        if self.may_end_early and (n_units := first_units(eqn, ins)) is not None:
            if self.first is None:
                raise Shorter(n_units)
            if is_whole and n_units == self.first:
                self.steps.append(Step(eqn, tuple(eqn.invars), tuple(ins), tuple(eqn.outvars), (ins[0],)))
                self.states[eqn.outvars[0]] = ins[0]
                return
        _Walk.slice(self, eqn, ins)
        if is_whole and any(isinstance(self.states[v], Total) for v in eqn.outvars):
            raise NoRule("it reads all of an axis of which a slice takes a part")

    def axis(self, outputs: Sequence[Any]) -> Axis:
        made = {v for step in self.steps for v, out in zip(step.writes, step.outs, strict=True) if out is None}
        made.update(v for step in self.steps for v in step.writes if v in self.states)
        reads = [a for s in self.steps for a, need in zip(s.reads, s.needs, strict=True)
                 if need is None and compat.is_var(a) and a not in made]  # fmt: skip
        wanted = {a for a in (*outputs, *reads, *(a for a, _ in self.cut)) if compat.is_var(a)}
        wanted.update(a for eqn in self.after for a in eqn.invars if compat.is_var(a))
        before = []
        for eqn in reversed(self.before):
            if any(v in wanted for v in eqn.outvars):
                before.append(eqn)
                wanted.update(a for a in eqn.invars if compat.is_var(a))
        places = {v: self.states[v] for step in self.steps for v in step.writes if v in self.states}
        for v, place in places.items():
            if self.first is not None and v in wanted and isinstance(place, Place) and units_of(v, place) == self.n:
                raise NotIndependent(self.makers[v], "all of an axis is read of which a slice takes a part")
        return Axis(self.first or self.n, tuple(before[::-1]), tuple(self.cut), tuple(self.steps), tuple(self.after),
                    places, tuple(dict.fromkeys(reads)))  # fmt: skip


def _made_in_slice(eqn: Any, atom: Any, place: Place, order: int) -> Step | None:
    """A whole equation at the slice's shape, to make one of its results there; `None` where it is not made so."""
    n, inner = units_of(atom, place), compat.inlined_body(eqn)
    if inner is None:
        needs = needs_at(eqn, place, n)
        return None if needs is None else Step(eqn, tuple(eqn.invars), needs, tuple(eqn.outvars), (place,))
    try:
        body = body_of(inner, [None] * len(eqn.invars), n, [place if v is atom else None for v in eqn.outvars], order)
    except NoRule:
        return None
    is_sliced = any(step.eqn is None for step in body.steps)  # a whole value is, which each slice would make
    return None if is_sliced else Step(eqn, tuple(eqn.invars), body.ins, tuple(eqn.outvars), body.outs, (body,))
