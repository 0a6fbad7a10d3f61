"""What a whole step holds, in words: the report of a step that fits, and the error of one that does not.

Arguments are told apart by name, and by what the step returns anew: parameters and optimizer state, as a rule, which
can be donated. Temporaries are told apart by what the plans of the functions inside keep at their peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import SequenceKey, keystr

from jaxsub.core.budget import Budget, format_bytes
from jaxsub.core.disk_cache import Store
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import predicted_bytes, recomputed_share
from jaxsub.core.measurement import Measurement
from jaxsub.core.shown import Shown
from jaxsub.core.step_plan import PlannedSite
from jaxsub.emission.forms import program_in
from jaxsub.search.annotate import opened
from jaxsub.search.repeated_effects import warn_of_repeated
from jaxsub.search.verify import finish, live_at_peak, peak_line
from jaxsub.step.attempt import Attempt
from jaxsub.step.fused_update import Fused, Whole
from jaxsub.step.ladder import form_of
from jaxsub.step.ordered_updates import Ordered

ROWS = 6
"""How many values that stand at the peak are named; the others are counted."""

DOMINANT = 0.5
"""An argument with more than this share of all arguments is told apart by its fields, as a train state has them."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Arguments of a step that belong together.

    Attributes:
        name: The argument's name, or a path into it.
        n_bytes: Their bytes, on one device.
        n_arrays: How many they are.
        largest: The largest of them: path, dtype and shape.
        state_bytes: Bytes of those that the step returns anew: parameters, optimizer state.
        kept_bytes: Bytes of those that it returns anew and that are not donated.
    """

    name: str
    n_bytes: int
    n_arrays: int
    largest: str
    state_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class StepReport(Shown):
    """What a whole step takes, and what was done so that it fits; print it.

    Attributes:
        memory_bytes: What it may take of a device.
        plain: What the compiler allocates for it with every function in it under its own plan, or under none.
        measurement: What the compiler allocates for it now.
        arguments: Its arguments, largest first.
        sites: The sublinear functions in it.
        n_compiles: How many whole steps were compiled.
        fused: Backward scans that update parameters as they go: their gradients stand for one layer at a time.
        whole: Gradients that stand whole, and why.
        ordered: Updates outside of scans that barriers put right behind their gradients.
        passes: How often a backward scan may run, so that what needs all gradients comes before the updates.
    """

    memory_bytes: int
    plain: Measurement
    measurement: Measurement
    arguments: tuple[Argument, ...]
    sites: tuple[PlannedSite, ...]
    n_compiles: int
    fused: tuple[Fused, ...] = ()
    whole: tuple[Whole, ...] = ()
    ordered: Ordered | None = None
    passes: int = 1

    @property
    def step_bytes(self) -> int:
        """What the step takes of a device: arguments, outputs and temporaries, without outputs in donated memory."""
        return self.measurement.step_bytes

    @property
    def plain_bytes(self) -> int:
        """The same before the step was planned."""
        return self.plain.step_bytes

    @property
    def extra(self) -> float:
        """Recompute of the functions in it, in forward passes."""
        found = [(recomputed_share(s.plan), s.plan.prediction.forward_flops * s.calls)
                 for s in self.sites if s.plan.prediction is not None]  # fmt: skip
        return sum(share * forward for share, forward in found) / max(sum(forward for _, forward in found), 1.0)

    @property
    def summary(self) -> str:
        """What was decided, in a line."""
        return (
            f"planned the step: {format_bytes(self.step_bytes)} of {format_bytes(self.memory_bytes)}, "
            f"{format_bytes(self.plain_bytes)} before, {self.extra:.2f} of a forward pass recomputed, "
            f"{self.n_compiles} compiles"
        )


def report(n_bytes: int, plain: Measurement, best: Attempt, held: Sequence[Argument], n_compiles: int,
           store: Store) -> StepReport:  # fmt: skip
    """Put together what was found; warn of side effects that happen more often for it."""
    sites = []
    for key, site in best.trial.sites.items():
        found = best.plans[key]
        own = found.budget if best.trial.are_given else site.settings.budget
        plan = finish(site.program, found, own if found is site.own else Budget(max(1, predicted_bytes(found))))
        with site.axes():
            warn_of_repeated(site.program, found)
            plan = opened(site.program, plan, best.trial.target, store)
        sites.append(PlannedSite(site.name, best.trial.calls[key], plan))
    return StepReport(n_bytes, plain, best.measurement, tuple(held), tuple(sites), n_compiles,
                      best.updates.fused, best.updates.whole, best.updates.ordered, best.updates.passes)  # fmt: skip


def arguments_of(
    args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], traced: Any
) -> tuple[Argument, ...]:
    """What a step's arguments hold, by name, largest first; `names` are those of positional ones.

    The step, traced (`jax.jit(step).trace(...)`), knows what is donated and what is returned.
    """
    returned: dict[Any, int] = {}
    for leaf in jax.tree.leaves(traced.out_info):
        returned[leaf.shape, leaf.dtype] = returned.get((leaf.shape, leaf.dtype), 0) + 1
    infos = iter(jax.tree.leaves(traced.args_info))
    leaves: list[tuple[str, Any, Any, int, bool, bool]] = []
    for name, tree in [*zip(names, args, strict=True), *sorted(kwargs.items())]:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            info = next(infos)
            left = returned.get((info.shape, info.dtype), 0)
            returned[info.shape, info.dtype] = left - 1
            leaves.append((name, path, info, _bytes(leaf, info), left > 0, left > 0 and not info.donated))
    whole = sum(n_bytes for *_, n_bytes, _, _ in leaves)
    groups: dict[str, list[Any]] = {}
    for leaf in leaves:
        groups.setdefault(leaf[0], []).append(leaf)
    split: list[Argument] = []
    for name, members in groups.items():
        parts: dict[str, list[Any]] = {}
        for leaf in members:
            parts.setdefault(name + keystr(leaf[1][:1]), []).append(leaf)
        is_named = not any(isinstance(leaf[1][0], SequenceKey) for leaf in members if leaf[1])
        is_split = is_named and 1 < len(parts) <= ROWS and sum(m[3] for m in members) > DOMINANT * whole
        split += [_argument(n, m) for n, m in (parts if is_split else {name: members}).items()]
    return tuple(sorted(split, key=lambda h: -h.n_bytes))


def _argument(name: str, leaves: Sequence[Any]) -> Argument:
    argument, path, info, *_ = max(leaves, key=lambda leaf: leaf[3])
    largest = f"{argument}{keystr(path)} {info.dtype}[{','.join(map(str, info.shape))}]"
    state, kept = (sum(leaf[3] for leaf in leaves if leaf[place]) for place in (4, 5))
    return Argument(name, sum(leaf[3] for leaf in leaves), len(leaves), largest, state, kept)


def _bytes(leaf: Any, info: Any) -> int:
    """Bytes of an argument on one device."""
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(tuple(info.shape)) if sharding is not None else info.shape
    return int(math.prod(shape) * info.dtype.itemsize)


def infeasible(n_bytes: int, least: Attempt, held: Sequence[Argument], unknown: Sequence[str]) -> InfeasibleBudgetError:
    """The error of a step that does not fit: what holds its memory, and what would fit.

    Args:
        n_bytes: What the step may take.
        least: What was found to need least.
        held: What its arguments hold.
        unknown: Functions that were not tried in slices, for nothing says how their arguments are split over devices.
    """
    measured, needed = least.measurement, least.measurement.step_bytes
    own = max(0, measured.output_bytes - measured.alias_bytes)
    holders = [_row(h.n_bytes, needed, f"{h.name}: {h.n_arrays} arrays, the largest {h.largest}") for h in held[:ROWS]]
    if own:
        holders.append(_row(own, needed, "outputs that are in no donated argument's memory"))
    lines = [f"    {line}" for line in _temporary_lines(least)]
    words = "temporary; predicted to be live at the peaks of its functions:" if lines else "temporary"
    holders += [_row(measured.temp_bytes, needed, words), *lines]
    state = sum(h.state_bytes for h in held)
    wrap = "" if least.trial.sites else (
        " No function in the step is wrapped in jaxsub.sublinear, so nothing can be recomputed: wrap the loss, "
        "loss = jaxsub.sublinear(loss)."
    )  # fmt: skip
    fixed = [site.name for site in least.trial.sites.values() if not site.is_sized]
    if fixed:
        wrap += f" `{'`, `'.join(fixed)}` cannot be planned by the step: made with plan= or mirror=, or no gradient."
    if unknown:
        wrap += (
            f" `{'`, `'.join(unknown)}` ran in no slices: inside jit nothing says how arguments are split over "
            "devices. Pass in_shardings= to its jaxsub.sublinear."
        )
    raise_to = f"Pass memory={needed}"
    donate = sum(h.kept_bytes for h in held)
    names = [h.name for h in held if h.kept_bytes]
    hint = f"donate {' and '.join(names)} (donate_argnums=), which frees up to {format_bytes(donate)}" if donate else ""
    ways = [raise_to, *([hint] if hint else []), "make the batch smaller", "spread it over more devices"]
    return InfeasibleBudgetError(
        f"The step does not fit in `{format_bytes(n_bytes)}` ({n_bytes} bytes) of a device: the least that was found "
        f"is `{format_bytes(needed)}`.{wrap}\n" + "\n".join(holders) + "\n"
        f"Parameters and optimizer state, which the step returns anew, are {format_bytes(state)} of it "
        f"({state / max(needed, 1):.0%}). {', '.join(ways[:-1])}, or {ways[-1]}.",
        requested_bytes=n_bytes,
        least_bytes=needed,
        holders=tuple(holders),
    )  # fmt: skip


def _row(n_bytes: int, whole: int, words: str) -> str:
    return f"  {format_bytes(n_bytes):>10} {n_bytes / max(whole, 1):>4.0%}  {words}"


def _temporary_lines(attempt: Attempt) -> Iterator[str]:
    """What each function keeps at its own peak, largest first, and the gradients of what it differentiates."""
    for key, site in attempt.trial.sites.items():
        program = program_in(site.program, form_of(attempt.plans[key]))  # its own regions opened, as the plan has it
        plan = finish(program, attempt.plans[key], Budget())
        weights = [site.program.graph.values[i] for i in site.program.differentiated]
        rows = [(sum(v.n_bytes for v in weights), f"gradients of {site.name}, {len(weights)} arrays")]
        rows += [(n_bytes, f"{site.name}: {words}") for n_bytes, words in live_at_peak(plan)]
        for n_bytes, words in sorted(rows, key=lambda row: -row[0])[: ROWS + 1]:
            yield f"{format_bytes(n_bytes):>10}  {words}"
        if peak := peak_line(program, plan):
            yield f"{'':>10}  {site.name}:{peak}"
