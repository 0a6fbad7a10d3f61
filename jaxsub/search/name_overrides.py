"""What a user wishes of values that bear a name: saved, or made again; any planner's plan is changed to honour it.

Values are named by `jax.ad_checkpoint.checkpoint_name` in the user's function, and wishes are mirror counts by name,
the paper's m(v) for those nodes alone: 0 says save, 1 or more says make it again in the backward pass. A planner is
asked as ever; where its plan does otherwise,

* a value to be saved is saved by the region it is made in; where that holds regions or barriers of its own, it ends
  behind the value, which then stands between two regions;
* a value to be made again is taken out of what its region saves; where it stands between regions or outside of them,
  one region is put round all that make and read it.

A prediction then counts the bytes that are saved in addition, and the FLOPs of what was in no region before; where
plans are measured, the compiler's figures count. What the function returns stands anyway, whatever is wished.

Source: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, §4.5: the user sets the
mirror attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxsub.core.decisions import Segment
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of
from jaxsub.jaxpr.trace import Program


@dataclass(frozen=True, slots=True)
class Wishes:
    """Values by index.

    Attributes:
        saved: Those to be saved.
        again: Those to be made again.
    """

    saved: tuple[int, ...] = ()
    again: tuple[int, ...] = ()


def read_wishes(program: Program, counts: Mapping[str, int]) -> Wishes:
    """Find the values that mirror counts by name speak of.

    Args:
        program: The program.
        counts: A mirror count for each name: 0 to save its values, 1 or more to make them again.

    Raises:
        ValueError: If a count is negative or no integer, or the function has no value of that name.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from jaxsub.jaxpr.trace import trace
        >>> program = trace(lambda x: checkpoint_name(jnp.sin(x), "wave").sum(), (jnp.ones(3),), {})
        >>> read_wishes(program, {"wave": 0})
        Wishes(saved=(2,), again=())
    """
    wrong = [f"{name!r}: {m!r}" for name, m in counts.items() if isinstance(m, bool) or not isinstance(m, int) or m < 0]
    if wrong:
        raise ValueError(f"mirror counts must be integers of at least 0, got {', '.join(wrong)}")
    named: dict[str, list[int]] = {}
    for eqn, node in zip(program.eqns, program.graph.nodes, strict=True):
        if (name := compat.given_name(eqn)) is not None:
            named.setdefault(name, []).append(node.outputs[0])
    unknown = [name for name in counts if name not in named]
    if unknown:
        raise ValueError(_unknown(unknown, sorted(named), {name for eqn in program.eqns for name in _inner(eqn)}))
    saved = tuple(sorted(v for name, m in counts.items() if m == 0 for v in named[name]))
    return Wishes(saved, tuple(sorted(v for name, m in counts.items() if m for v in named[name])))


def _unknown(unknown: Sequence[str], known: Sequence[str], inner: set[str]) -> str:
    there = f"there are {', '.join(map(repr, known))}" if known else "it names none"
    hidden = [name for name in unknown if name in inner]
    text = f"mirror= names {', '.join(map(repr, unknown))}, and no value of the function bears that name: {there}."
    if hidden:
        text += f" {', '.join(map(repr, hidden))} stands inside a loop, a conditional or a function with its own rule."
    return f"{text} Name values with jax.ad_checkpoint.checkpoint_name."


def _inner(eqn: Any) -> Iterator[str]:
    for body in bodies_of(eqn):
        for inner in body.eqns:
            if (name := compat.given_name(inner)) is not None:
                yield name
            yield from _inner(inner)


def wishing(program: Program, planner: Callable[..., Plan], counts: Mapping[str, int]) -> Callable[..., Plan]:
    """A planner whose plans honour mirror counts by name."""
    wishes = read_wishes(program, counts)
    return lambda chain, budget_bytes: honoured(program, planner(chain, budget_bytes), wishes)


def honoured(program: Program, plan: Plan, wishes: Wishes) -> Plan:
    """Change a plan where it does otherwise than wished.

    Args:
        program: The program it is for.
        plan: The plan.
        wishes: The wishes.

    Returns:
        The plan itself where it honours them.

    Raises:
        UnsupportedError: If what must run exactly once would have to be executed again for a wish.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from jaxsub.core.budget import Budget
        >>> from jaxsub.jaxpr.trace import trace
        >>> program = trace(lambda x: checkpoint_name(jnp.sin(x), "wave").sum(), (jnp.ones(3),), {})
        >>> plan = Plan(program.fingerprint, Budget(), len(program.eqns))
        >>> honoured(program, plan, read_wishes(program, {"wave": 1})).segments
        (Segment(start=0, stop=3, saved=(), children=(), offloaded=()),)
    """
    changed = _Changed(program, list(plan.segments), set(plan.barriers), wishes)
    for v in wishes.again:
        changed.make_again(v)
    for v in wishes.saved:
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
    wishes: Wishes
    more_bytes: int = 0
    more_flops: float = 0.0

    def make_again(self, v: int) -> None:
        """See to it that one outermost region makes a value, with all that read it, and does not save it."""
        graph = self.program.graph
        last, made = graph.last_uses()[v], graph.values[v].producer
        if made is None or last <= made or last >= len(graph.nodes):
            return
        source = graph.values[graph.nodes[made].inputs[0]].producer
        start, stop = (made if source is None else source), last + 1
        met = [s for s in self.segments if s.start < stop and s.stop > start]
        saved = tuple(u for s in met for u in s.saved if u not in self.wishes.again)
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
        """See to it that the region that makes a value and reads it saves it."""
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
                f"mirror= wants `{self.program.graph.values[v].name}` made again, and between it and what reads it "
                f"`{pinned[0].primitive}` at {pinned[0].source or 'an unknown line'} must run exactly once."
            )


def _split(segment: Segment, cut: int) -> Iterator[Segment]:
    """A segment as two, one on each side of a cut, its children divided likewise."""
    if not segment.start < cut < segment.stop:
        yield segment
        return
    children = [piece for child in segment.children for piece in _split(child, cut)]
    for start, stop in ((segment.start, cut), (cut, segment.stop)):
        yield Segment(start, stop, (), tuple(c for c in children if start <= c.start < stop))
