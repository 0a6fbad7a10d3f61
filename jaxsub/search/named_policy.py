"""A plan as a policy of names: what `jax.checkpoint` round each of its regions has to save, by `checkpoint_name`.

In goes a finished plan, out come the names that its regions save, or what of it no policy of names can say: regions
inside regions, blocks of a loop's steps, slices, saved values without a name, gradient barriers that hold weights'
gradients. A policy says what a region saves, not where it stands: it belongs round what the plan makes a region, a
loop's body or each block. One region round a whole network that saves the same values is not the same: everything else
may then be recomputed at once.

JAX saves what carries a name as the name's own result: a function that is differentiated by what it returned (`tanh`,
`exp`) and named after it runs again all the same, which a plan that saves its result spares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax

from jaxsub.core.decisions import Conditional, Loop, PolicyNames
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.core.timeline import value_label
from jaxsub.emission.scans import body_program
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.output_only_vjp import is_known_by_result
from jaxsub.jaxpr.trace import Program

MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "copy")
"""What makes a value of another without arithmetic and at the same size: saving either costs the same bytes."""

UNSAID = (
    ("blocks", "a loop runs in blocks of steps"),
    ("kept_steps", "a loop's last steps are kept"),
    ("is_unrolled", "a loop is unrolled"),
)


@dataclass(frozen=True, slots=True)
class _Region:
    """A region: a run of a program's nodes, and what it saves on the device and in host memory."""

    program: Program
    start: int
    stop: int
    saved: tuple[int, ...]
    offloaded: tuple[int, ...] = ()

    def places(self) -> Iterator[tuple[str, str]]:
        """Each name that is given inside, and where its value is: "device", "offload" or "remat"."""
        kept = {name: "device" for v in self.saved if (name := self.name_of(v)) is not None}
        kept |= {name: "offload" for v in self.offloaded if (name := self.name_of(v)) is not None}
        values = {self.named_value(v) for v in self.saved}
        for node in self.program.graph.nodes[self.start : self.stop]:
            if (name := compat.given_name(self.program.eqns[node.index])) is not None:
                yield name, kept[name] if node.outputs[0] in values else "remat"

    def name_of(self, value: int) -> str | None:
        """The name that saves a value; `None` where there is none."""
        named = self.named_value(value)
        return None if named is None else self.program.graph.values[named].name

    def named_value(self, value: int) -> int | None:
        """The result of a name inside that holds the same as a value."""
        graph, eqns = self.program.graph, self.program.eqns
        while (at := graph.values[value].producer) is not None and graph.nodes[at].primitive in MOVES:
            value = graph.nodes[at].inputs[0]
        if at is None:
            return None
        if not self.start <= at < self.stop or compat.given_name(eqns[at]) is not None:
            return value if self.start <= at < self.stop else None
        readers = graph.values[value].consumers
        is_alone = len(readers) == 1 and readers[0] < self.stop and not is_known_by_result(eqns[at])
        return graph.nodes[readers[0]].outputs[0] if is_alone and compat.given_name(eqns[readers[0]]) else None


def policy_names(program: Program, plan: Plan) -> PolicyNames:
    """What the regions of a plan save, by name, or what no policy of names can say; of a program in its order."""
    if unsaid := tuple(dict.fromkeys(_unsaid(program, plan))):
        return PolicyNames(unsaid=unsaid)
    places: dict[str, set[str]] = {}
    for region in _regions(program, plan):
        for v in region.saved:
            if region.name_of(v) is None:
                unsaid += (f"the saved value `{value_label(region.program.graph, v)}` has no name",)
        for name, place in region.places() if not unsaid else ():
            places.setdefault(name, set()).add(place)
    unsaid += tuple(f"{name!r} is saved in one place and not in another" for name, p in places.items() if len(p) > 1)
    if unsaid:
        return PolicyNames(unsaid=tuple(dict.fromkeys(unsaid)))
    of = (tuple(sorted(n for n, p in places.items() if p == {at})) for at in ("device", "offload", "remat"))
    return PolicyNames(*of)


def exported(plan: Plan, form: str) -> Any:
    """The policy of a plan, for `Plan.to_policy`, which says what `form` may be and what is raised."""
    if form not in ("jax", "maxtext"):
        raise ValueError(f'A plan is exported for "jax" or for "maxtext", got {form!r}.')
    names = plan.policy_names
    if names is None:
        raise UnsupportedError("This plan was made by hand and knows no names; to_policy() needs one of jaxsub.plan.")
    unsaid = list(names.unsaid)
    if plan.opened_regions:
        unsaid.insert(0, "regions of the function's own, opened")
    if plan.clones:
        unsaid.insert(0, "runs recomputed for an inner gradient")
    if plan.slices:
        unsaid.insert(0, "runs in slices")
    if unsaid:
        hint = " Name values with jax.ad_checkpoint.checkpoint_name." if "no name" in str(unsaid) else ""
        raise UnsupportedError(
            f"No policy of names says what this plan does: {'; '.join(unsaid)}.{hint} Use the plan itself: "
            "jaxsub.sublinear(fun, plan=plan)."
        )
    if form == "maxtext":
        of = {"device": names.saved, "offload": names.offloaded, "remat": names.recomputed}
        return {"remat_policy": "custom"} | {name: place for place, found in of.items() for name in found}
    if not names.offloaded:
        return jax.checkpoint_policies.save_only_these_names(*names.saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(names.saved), names_which_can_be_offloaded=list(names.offloaded),
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


def _regions(program: Program, plan: Plan) -> Iterator[_Region]:
    for s in plan.segments:
        yield _Region(program, s.start, s.stop, s.saved, s.offloaded)
    for loop in plan.loops:
        if isinstance(loop, Loop) and loop.is_recomputed:
            body = body_program(program, loop.node)
            first = body.graph.first_value(0)
            yield _Region(body, 0, len(body.eqns), tuple(first + v for v in loop.inside.saved))


def _unsaid(program: Program, plan: Plan) -> Iterator[str]:
    """What of a plan no policy says, whatever is named."""
    for loop in plan.loops:
        if isinstance(loop, Conditional):
            yield "the branches of a conditional have regions of their own"
            continue
        yield from (words for field, words in UNSAID if getattr(loop, field))
        if loop.inside.segments or loop.inside.ways or loop.inside.barriers:
            yield "a loop's body has regions or gradient barriers of its own"
    if any(s.children for s in plan.segments):
        yield "regions stand inside regions"
    if not plan.segments and not any(isinstance(loop, Loop) and loop.is_recomputed for loop in plan.loops):
        yield "it recomputes nothing, so leave jax.checkpoint out"
    yield from _barriers(program, plan)


def _barriers(program: Program, plan: Plan) -> Iterator[str]:
    """Barriers that hold gradients of weights back, which the edge of a region does not do too."""
    graph = program.graph
    edges = {at for s in plan.segments for at in (s.start, s.stop)} | {
        loop.node + after for loop in plan.loops for after in (0, 1)
    }
    cuts = sorted({*edges, *plan.barriers, len(graph.nodes)})
    for start, stop in pairwise(cuts):
        read = {v for node in graph.nodes[start:stop] for v in node.inputs if v in graph.weights()}
        held = {v for v in read if graph.values[v].is_differentiated}
        if start in plan.barriers and (any(graph.is_joined(v, stop) for v in held) if start in edges else held):
            yield "gradient barriers inside regions, or between equations that are in none, order weights' gradients"
