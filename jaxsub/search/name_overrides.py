"""Apply per-name overrides to any planner's plan: save the values of a name, or recompute them.

The user names values by `jax.ad_checkpoint.checkpoint_name`. Overrides are mirror counts by name, the paper's m(v) for
those nodes alone: 0 saves the value, 1 or more recomputes it in the backward pass. Where a planner's plan differs,

* a value to save is saved by the region that makes it; a region with regions or barriers inside is split behind the
  value;
* a value to recompute is removed from its region's saved values; a value between regions or outside them gets one
  region around all equations that make and read it.

The prediction is adjusted by the bytes saved in addition and the FLOPs of equations that were in no region before;
where plans are measured, the compiler's figures count. The function's results are live under every override.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §4.5: the user sets the
mirror attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxsub.core.checks import is_whole
from jaxsub.core.decisions import Segment
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import walk
from jaxsub.jaxpr.trace import Program


@dataclass(frozen=True, slots=True)
class Overrides:
    """The values to save and those to recompute, by index."""

    saved: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()


def read_overrides(program: Program, counts: Mapping[str, int]) -> Overrides:
    """Find the values of mirror counts by name, 0 to save and more to recompute; refuse other names and counts."""
    wrong = [f"{name!r}: {m!r}" for name, m in counts.items() if not is_whole(m) or m < 0]
    if wrong:
        raise ValueError(f"mirror counts must be integers of at least 0, got {', '.join(wrong)}")
    named: dict[str, list[int]] = {}
    for eqn, node in zip(program.eqns, program.graph.nodes, strict=True):
        if (name := compat.given_name(eqn)) is not None:
            named.setdefault(name, []).append(node.outputs[0])
    unknown = [name for name in counts if name not in named]
    if unknown:
        raise ValueError(
            _unknown(unknown, sorted(named), {compat.given_name(inner) for inner, _ in walk(program.eqns)})
        )
    saved = tuple(sorted(v for name, m in counts.items() if m == 0 for v in named[name]))
    return Overrides(saved, tuple(sorted(v for name, m in counts.items() if m for v in named[name])))


def _unknown(unknown: Sequence[str], known: Sequence[str], inner: set[str | None]) -> str:
    there = f"there are {', '.join(map(repr, known))}" if known else "it names none"
    hidden = [name for name in unknown if name in inner]
    text = f"mirror= names {', '.join(map(repr, unknown))}, and no value of the function has that name: {there}."
    if hidden:
        text += f" {', '.join(map(repr, hidden))} is inside a loop, a conditional or a function with its own rule."
    return f"{text} Name values with jax.ad_checkpoint.checkpoint_name."


def overriding(program: Program, planner: Callable[..., Plan], counts: Mapping[str, int]) -> Callable[..., Plan]:
    """Make a planner apply mirror counts by name to its plans."""
    overrides = read_overrides(program, counts)
    return lambda chain, budget_bytes: overridden(program, planner(chain, budget_bytes), overrides)


def overridden(program: Program, plan: Plan, overrides: Overrides) -> Plan:
    """Change a plan where it differs from the overrides; refuse to recompute an equation that must run exactly once."""
    changed = _Changed(program, list(plan.segments), set(plan.barriers), overrides)
    for v in overrides.recomputed:
        changed.recompute(v)
    for v in overrides.saved:
        changed.save(v)
    segments, barriers = tuple(changed.segments), tuple(sorted(changed.barriers))
    if (segments, barriers) == (plan.segments, plan.barriers):
        return plan
    prediction = plan.prediction
    if prediction is not None:
        prediction = replace(
            prediction,
            temp_bytes=prediction.temp_bytes + changed.more_bytes,
            extra_flops=prediction.extra_flops + changed.more_flops,
        )
    return plan.replace(segments=segments, barriers=barriers, prediction=prediction, timeline=None, is_optimal=False)


@dataclass(slots=True)
class _Changed:
    """A plan while it is being changed."""

    program: Program
    segments: list[Segment]
    barriers: set[int]
    overrides: Overrides
    more_bytes: int = 0
    more_flops: float = 0.0

    def recompute(self, v: int) -> None:
        """Make one outermost region contain a value's maker and all its readers, without saving it."""
        graph = self.program.graph
        last, made = graph.last_uses()[v], graph.values[v].producer
        if made is None or last <= made or last >= len(graph.nodes):
            return
        source = graph.values[graph.nodes[made].inputs[0]].producer
        start, stop = (made if source is None else source), last + 1
        met = [s for s in self.segments if s.start < stop and s.stop > start]
        saved = tuple(u for s in met for u in s.saved if u not in self.overrides.recomputed)
        if len(met) == 1 and met[0].start <= start and stop <= met[0].stop:
            merged = replace(met[0], saved=saved)
        else:
            start, stop = min([start, *(s.start for s in met)]), max([stop, *(s.stop for s in met)])
            merged = Segment(start, stop, saved, () if saved else tuple(met))
            before = {i for s in met for i in range(s.start, s.stop)}
            self.more_flops += sum(n.flops for n in graph.nodes[start:stop] if n.index not in before)
            self._check(range(start, stop), v)
            self.barriers |= {b for b in (start, stop) if 0 < b < len(graph.nodes)}
        if merged.saved:
            self.barriers -= set(range(merged.start + 1, merged.stop))
        self._put(met, [merged])

    def save(self, v: int) -> None:
        """Make the region that makes and reads a value save it."""
        graph = self.program.graph
        made = graph.values[v].producer
        met = [s for s in self.segments if made is not None and s.start <= made < s.stop]
        if made is None or not met or v in met[0].saved:
            return
        (segment,) = met
        if not any(made < reader < segment.stop for reader in graph.values[v].consumers):
            return
        cut = made + 1
        if segment.children or self.barriers & set(range(segment.start + 1, segment.stop)):
            self.more_bytes += sum(
                graph.values[u].n_bytes for u in graph.made_by(segment.start, cut) if graph.last_uses()[u] >= cut
            )
            self.barriers.add(cut)
            self._put(met, list(_split(segment, cut)))
        else:
            self.more_bytes += graph.values[v].n_bytes
            self._put(met, [replace(segment, saved=tuple(sorted({*segment.saved, v})))])

    def _put(self, old: Sequence[Segment], new: Sequence[Segment]) -> None:
        self.segments = sorted([*(s for s in self.segments if s not in old), *new], key=lambda s: s.start)

    def _check(self, nodes: range, v: int) -> None:
        pinned = [n for n in self.program.graph.nodes[nodes.start : nodes.stop] if not n.can_recompute]
        if pinned:
            raise UnsupportedError(
                f"mirror= recomputes `{self.program.graph.values[v].name}`, but between it and its readers "
                f"`{pinned[0].primitive}` at {pinned[0].source or 'an unknown line'} must run exactly once. Save it: "
                "give its name the count 0."
            )


def _split(segment: Segment, cut: int) -> Iterator[Segment]:
    """Split a segment at a cut, and its children likewise."""
    if not segment.start < cut < segment.stop:
        yield segment
        return
    children = [piece for child in segment.children for piece in _split(child, cut)]
    for start, stop in ((segment.start, cut), (cut, segment.stop)):
        yield Segment(start, stop, (), tuple(c for c in children if start <= c.start < stop))
