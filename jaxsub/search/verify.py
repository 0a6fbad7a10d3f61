"""Emit, compile and measure a program under a plan, and describe the plan's saved values.

A program and a plan go in; the measured gradient, its memory, and the saved values in words come out. A program that
was compiled once, in this process or another, is not compiled a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from jaxsub.core.budget import Budget
from jaxsub.core.disk_cache import Store, code_digest, key_of
from jaxsub.core.graph import Node
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.steps import Holding
from jaxsub.core.timeline import family, name_pieces, value_label
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.compile import LONG_SECONDS, measure_compiled
from jaxsub.devices.targets import Target
from jaxsub.emission.emit import emit
from jaxsub.emission.folding import in_slices
from jaxsub.emission.forms import planned_form
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.constants import constants_key, known_constants
from jaxsub.jaxpr.derivative_rules import is_inexact
from jaxsub.jaxpr.differences import equation_digests
from jaxsub.jaxpr.flops import primitives_in
from jaxsub.jaxpr.identity import of_jax
from jaxsub.jaxpr.shardings import constrain, placed
from jaxsub.jaxpr.trace import Program, with_own_settings
from jaxsub.partition.cuts import find_cuts, shares_most_weights, widening_head
from jaxsub.partition.inner_programs import find_nested
from jaxsub.planners import get
from jaxsub.planners.auto import Auto
from jaxsub.planners.optimal import Optimal
from jaxsub.planners.select import expected_compile_seconds
from jaxsub.search.named_policy import policy_names

MOST_EQUATIONS = 1000
"""A partition with more of them in one stage is used only where all have more."""


def gradient(program: Program, flat: Callable[..., Sequence[Any]]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient that is measured: of the loss, or of every floating-point output where there is none.

    It is a function that returns outputs and gradients, and before them an error where there are `checkify` checks.
    Beside it come the shapes of its arguments: the program's flat inputs but for constants, which the compiler may fold
    as in the user's own program, and cotangents for its outputs where it has no loss.
    """
    constants = known_constants(program)

    def of(inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        given = iter(inputs)
        known = [constants[i] if i in constants else next(given) for i in range(len(program.invars))]

        def active(leaves: Sequence[Any]) -> Any:
            merged = list(known)
            for i, leaf in zip(program.differentiated, leaves, strict=True):
                merged[i] = leaf
            return _split(program, flat(*merged))

        leaves = [known[i] for i in program.differentiated]
        outs, pullback, rest = jax.vjp(active, leaves, has_aux=True)
        cts = [jnp.ones_like(outs[0])] if program.loss is not None else list(cotangents)
        return outs, rest, constrain(pullback(cts)[0], where)

    if any("check" in primitives_in(eqn) for eqn in program.eqns):  # as the user's call has them: else none compiles
        of = checkify.checkify(of)
    where = [program.shardings[i] for i in program.differentiated] if program.shardings else []
    every = placed(program.avals(), program.shardings)
    outs = [] if program.loss is not None else jax.eval_shape(lambda *i: _split(program, flat(*i))[0], *every)
    return of, ([shape for i, shape in enumerate(every) if i not in constants], outs)


@with_own_settings
def measured(program: Program, flat: Callable[..., Sequence[Any]], target: Target) -> Measurement:
    """What the compiler allocates for the gradient of a program, given as a function of its flat inputs."""
    return measure_compiled(*gradient(program, flat), target)


def untouched(program: Program) -> Plan:
    """The plan of leaving a program as it is."""
    return Plan(program.fingerprint, Budget(), len(program.eqns), planner="plain")


def has_gradient(program: Program) -> bool:
    """Whether JAX can trace the gradient of a program."""
    function, shapes = gradient(program, emit(program, untouched(program)))
    try:
        jax.eval_shape(function, *shapes)
    except (ValueError, TypeError, NotImplementedError):
        return False
    return True


def _split(program: Program, outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Outputs that the gradient is taken of, and the rest."""
    if program.loss is not None:
        return [outputs[program.loss]], [o for i, o in enumerate(outputs) if i != program.loss]
    floats = [o for o in outputs if jnp.issubdtype(jnp.result_type(o), jnp.inexact)]
    return floats, [o for o in outputs if not jnp.issubdtype(jnp.result_type(o), jnp.inexact)]


@dataclass(slots=True, eq=False)
class Verifier:
    """Compiles plans of one program and remembers what they need, and how many whole programs it compiled."""

    pricer: Pricer
    most_compiles: int = 1
    compiles: int = field(init=False, default=0)
    _pace: float = field(init=False, default=0.0)
    known: dict[Any, Measurement] = field(init=False, default_factory=dict)

    @property
    def program(self) -> Program:
        """The program."""
        return self.pricer.program

    def empty(self) -> Plan:
        """The plan of doing nothing."""
        return untouched(self.program)

    def plain(self) -> Plan:
        """The plan of doing nothing, measured."""
        empty = self.empty()
        return empty.replace(measurement=self.measure(empty))

    def measure(self, plan: Plan) -> Measurement:
        """What the compiler allocates for a plan."""
        shape = _shape(plan)
        if shape not in self.known:
            self.known[shape] = self._recall(plan) or self._compile(plan)
        return self.known[shape]

    def expected_seconds(self, plan: Plan) -> float:
        """How long a plan's compile is expected to take, by the last one; 0 before the first."""
        return expected_compile_seconds(plan, self._pace)

    def is_known(self, plan: Plan) -> bool:
        """Whether measuring a plan would compile nothing."""
        return _shape(plan) in self.known

    def _recall(self, plan: Plan) -> Measurement | None:
        store, target = self.pricer.store, self.pricer.target
        return None if store is None else recalled(store, measured_key(self.program, target, plan), target)

    def _compile(self, plan: Plan) -> Measurement:
        self.compiles += 1
        seconds = self.expected_seconds(plan)
        about = f", about {seconds:.0f} s" if seconds >= LONG_SECONDS else ""
        many = f"compile {self.compiles} of at most {max(self.most_compiles, self.compiles)}"
        self.pricer.progress(f"{many}: the whole gradient, {plan.n_regions} regions{about}")
        found = measured(self.program, emit(self.program, plan), self.pricer.target)
        self._pace = found.compile_seconds / expected_compile_seconds(plan, 1.0)
        if self.pricer.store is not None:
            self.pricer.store.put(measured_key(self.program, self.pricer.target, plan), found)
        return found


def measured_key(program: Program, target: Target, plan: Plan) -> str:
    """The key under which a store keeps what a plan was measured to need."""
    where = of_jax(), target.name, target.spec or ""
    shape = repr(_shape(plan)), constants_key(program), *map(repr, program.shardings)
    return key_of("plan", code_digest(), *where, program.fingerprint, *shape)  # emission decides what is measured


def recalled(store: Store, key: str, target: Target) -> Measurement | None:
    """A measurement for a target from a store; `None` where there is none, or one that no compiler reports."""
    found: Measurement | None = store.get(key, Measurement)
    return found if found is not None and found.target == target.name and not found.faults() else None


def live_at_peak(plan: Plan) -> tuple[tuple[int, str], ...]:
    """List bytes and labels of the values live at the predicted peak of a plan, largest first."""
    timeline = plan.timeline
    return timeline.live_at(timeline.peak_step) if timeline is not None and timeline.steps else ()


KEPT_WHOLE = {
    "custom_vjp_call": "has a backward pass of its own: what it saves for it is not cut.",
    "shard_map": (
        "is one equation to a plan: put sublinear round the function that it maps, and let jaxsub.jit(memory=...) "
        "measure the step."
    ),
    **dict.fromkeys(compat.REGIONS, "is a jax.checkpoint region that stays as it is."),
}
"""Equations that are never cut, and what a refusal says of them."""


def peak_line(program: Program, plan: Plan) -> str:
    """Where the peak of a plan is expected, with the user's line, and what of that is never cut."""
    nodes, where = program.graph.nodes, ""
    if plan.prediction is not None and plan.barriers:
        starts = [0, *plan.barriers]
        at = min(plan.prediction.peak_at, len(starts) - 1)
        nodes = nodes[starts[at] : (*starts, len(program.eqns))[at + 1]]
        where = f" The peak is near `{nodes[0].primitive}` at {nodes[0].source}." if nodes[0].source else ""
    return where + _whole(nodes)


def _whole(nodes: Sequence[Node]) -> str:
    """What of a run is never cut; empty where that is less than half of its FLOPs."""
    found = max((n for n in nodes if n.primitive in KEPT_WHOLE), key=lambda n: n.flops, default=None)
    if found is None or 2 * found.flops < sum(node.flops for node in nodes):
        return ""
    where = f" at {found.source}" if found.source else ""
    return f" `{found.primitive}`{where} {KEPT_WHOLE[found.primitive]}"


def finish(program: Program, plan: Plan, budget: Budget) -> Plan:
    """Put the budget and the saved values, in words, into a plan."""
    base, followed = planned_form(program, plan)
    folded, bare = in_slices(base, followed)
    named = {name: name_pieces(found, folded.graph) for name in ("timeline", "plain_timeline")
             if (found := getattr(plan, name)) is not None}  # fmt: skip
    told = {"holdings": holdings(folded, bare), "equations": equation_digests(base), "note": note(program, plan),
            "policy_names": policy_names(folded, bare)}  # fmt: skip
    return plan.replace(budget=budget, **told, **named)


def note(program: Program, plan: Plan) -> str:
    """What a reader of a plan should know: that there is nothing to differentiate, no loss, or what it left out."""
    if not program.differentiated or not any(map(is_inexact, program.outvars)):
        return "There is nothing to differentiate: the function is left as it is."
    notes = []
    if program.loss is None:
        notes += ["The result is no scalar loss: the gradient planned for is that of all its floating-point results."]
    if plan.opened_regions:
        notes += [f"Regions of the function's own (jax.checkpoint) that were planned anew: {plan.opened_regions}."]
    if plan.clones:
        notes += [f"Runs recomputed for a gradient inside the function: {len(plan.clones)}."]
    return " ".join(notes)


def holdings(program: Program, plan: Plan) -> tuple[Holding, ...]:
    """What a plan keeps from the forward to the backward pass, alike values together, largest first.

    That is what its outermost segments read from one another and what they save. The plain program keeps what the
    compiler decides; nothing is listed for it.
    """
    graph = program.graph
    kept: set[int] = set()
    moved = {v for segment in plan.segments for v in segment.offloaded}
    for segment in plan.segments:
        kept.update(segment.saved)
        kept.update(v for v in graph.read_by(segment.start, segment.stop) if v >= len(graph.inputs))
    alike: dict[tuple[str, int, bool], list[str]] = {}
    for v in sorted(kept):
        label = value_label(graph, v)
        alike.setdefault((family(label), graph.values[v].n_bytes, v in moved), []).append(label)
    rows = (Holding(labels[0] if len(set(labels)) == 1 else name, size, len(labels), is_moved)
            for (name, size, is_moved), labels in alike.items())  # fmt: skip
    return tuple(sorted(rows, key=lambda h: -h.n_bytes * h.count)[:64])


def cut_choices(program: Program) -> list[tuple[int, ...]]:
    """List partitions of a program, the likeliest first; all but that one cut a wide head too, the second nothing else.

    Where most weights are shared between many equations, as in an unrolled recurrent network, every costly equation
    is a stage of its own: each barrier then lets a contribution to a weight's gradient join its running sum. What must
    run once is a stage of its own too.
    """
    graph = program.graph
    windows = (0, 2) if shares_most_weights(graph) else (2, 0)
    required = {node + after for node in (*find_nested(program), *graph.pinned()) for after in (0, 1)}
    head = widening_head(graph)
    finer = required if head is None else {*required, head}
    ways = [(windows[0], required), *((w, finer) for w in windows)]
    choices = dict.fromkeys(find_cuts(graph, window=w, required=cuts) for w, cuts in ways)
    short = (cuts for cuts in choices if all(stop - start <= MOST_EQUATIONS for start, stop in pairwise(cuts)))
    return list(short) or list(choices)


def usual_choices(program: Program, choices: Sequence[Sequence[int]], planner: Any = "auto") -> Sequence[Any]:
    """Choose the partitions to look at without a budget: the likeliest, with and without a wide head cut.

    For the least memory finer ones too, unless the chain is long. In stages of a coarser one contributions to gradients
    that are sums would not be added as they are made. Other planners' plans are of the likeliest stages.
    """
    if isinstance(get(planner), Auto | Optimal) and len(choices[0]) <= TUNING.long_chain + 1:
        return [cuts for cuts in choices if len(cuts) >= len(choices[0])]
    return choices[: 1 if widening_head(program.graph) is None else 2]


def _shape(plan: Plan) -> Any:
    """What of a plan decides what is compiled."""
    return (plan.segments, plan.barriers, *plan.loops)
