"""Plan inside a loop's body or a branch: a few plans of its chain, each with its kept and transient bytes.

A body is a program like any other: it is cut into stages, and `jaxsub.planners.optimal` plans them. Such a plan is used
in two ways. Where the step or the branch is a region, the plan nests in it and needs its predicted peak; its regions
save values where JAX allows that in nests. Otherwise the inputs and saved values of its outermost regions are live
until the backward pass, for every step; then the last stage is a region too, since its backward pass does not start at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from jaxsub.core.chain import Chain, Item, Option, Run
from jaxsub.core.decisions import Inside
from jaxsub.core.plan import decisions_of
from jaxsub.core.simulate import extra_flops, may_nest, predict
from jaxsub.core.tuning import TUNING
from jaxsub.jaxpr.trace import Program
from jaxsub.partition.cuts import find_cuts
from jaxsub.partition.inner_programs import find_nested
from jaxsub.planners.optimal import Frontier, solve

T = TypeVar("T")
BodyChain = Callable[[Program, tuple[int, ...]], Chain]
"""Prices a body cut into stages."""


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """One plan inside a body or a branch.

    Attributes:
        inside: The plan.
        is_region: Whether it nests in a region around the whole body.
        kept_bytes: Bytes that are live from its forward to its backward pass beside its inputs; 0 in a region.
        transient_bytes: Bytes that its backward pass allocates, kept bytes included.
        recompute_flops: FLOPs that its backward pass recomputes; in a region, beyond those of the region itself.
    """

    inside: Inside
    is_region: bool
    kept_bytes: int
    transient_bytes: int
    recompute_flops: float


def body_cuts(body: Program, most: int = TUNING.most_stages) -> tuple[int, ...]:
    """Where to cut a body into at most so many stages; nowhere if it is too small for a plan of its own."""
    nested = find_nested(body)
    if not nested and sum(node.is_costly for node in body.graph.nodes) < TUNING.few_costly:
        return (0, len(body.eqns))
    return find_cuts(body.graph, required={node + after for node in nested for after in (0, 1)}, most=most)


def body_plans(
    body: Program, price: BodyChain, *, is_written_out: bool = False, most: int = TUNING.most_stages, times: int = 1
) -> tuple[BodyPlan, ...]:
    """Plans for a body, those that nest in a region and those that do not.

    Args:
        body: The body of a loop, or a branch.
        price: Prices it, cut into stages.
        is_written_out: Whether it is all steps of a loop: no region is put around it, and only its peak matters.
        most: The most stages.
        times: How often the body runs: so many may keep what they keep at once.

    Returns:
        The plans, least FLOPs first; none for a body of one stage, unless that is a loop or a conditional.
    """
    cuts = body_cuts(body, most)
    if len(cuts) < 3 and not find_nested(body):
        return ()
    chain = price(body, cuts)
    if is_written_out:  # such a loop compiles long: nothing of its last stage is saved by name to spare a little more
        chain = replace(chain, items=tuple(item for item in chain.items if item.stop < len(chain.stages)))
    peaks = [costs for _, _, runs in _frontier(chain) for costs in _closed(chain, runs)]
    if is_written_out:
        return tuple(_plans(chain, _thinned(peaks)))
    found = [*peaks, *(costs for runs in _least_kept(chain) for costs in _closed(chain, runs))]
    return (*_nested(chain), *_plans(chain, dict.fromkeys((*_thinned(found), *_thinned(found, times)))))


def _nested(chain: Chain) -> Iterator[BodyPlan]:
    items = (Item(i.start, i.stop, tuple(o for o in i.options if may_nest(chain, o))) for i in chain.items)
    nestable = replace(chain, items=tuple(i for i in items if i.options))
    for costs in _thinned(_Costs(0, n_bytes, flops, runs) for n_bytes, flops, runs in _frontier(nestable)):
        yield BodyPlan(_inside(nestable, costs.runs), True, 0, costs.transient_bytes, costs.recompute_flops)


def _frontier(chain: Chain) -> Frontier:
    """Plans of a chain, at no finer steps than `_thinned` tells apart."""
    return solve(chain, slots=TUNING.body_slots).frontier(TUNING.body_plans)


def _plans(chain: Chain, found: Iterable[_Costs]) -> Iterator[BodyPlan]:
    """Plans without a region around the body."""
    for costs in found:
        yield BodyPlan(_inside(chain, costs.runs), False, costs.kept_bytes, costs.transient_bytes,
                       costs.recompute_flops)  # fmt: skip


class _Costs(NamedTuple):
    """What runs of a body cost."""

    kept_bytes: int
    transient_bytes: int
    recompute_flops: float
    runs: tuple[Run, ...]


def _closed(chain: Chain, runs: tuple[Run, ...]) -> Iterator[_Costs]:
    """What runs cost with the last stage in a region, by what it saves: its backward pass does not start at once."""
    last = len(chain.stages) - 1
    if runs[-1].option is not None or runs[-1].children or runs[-1].start != last:
        yield _costs(chain, runs)
        return
    yield _costs(chain, (*runs[:-1], chain.recompute(last)))
    options = (o for item in chain.items if (item.start, item.stop) == (last, last + 1) for o in item.options)
    for option in options:
        if option.saved:
            yield _costs(chain, (*runs[:-1], Run(last, last + 1, option)))


def _costs(chain: Chain, runs: tuple[Run, ...]) -> _Costs:
    kept = sum(chain.kept_bytes(run) for run in runs)
    # the values that cross the last cut are the body's results: they are live anyway
    stored = sum(int(chain.crossing_bytes[run.start, run.stop]) for run in runs[:-1])
    return _Costs(kept + stored, predict(chain, runs).temp_bytes, extra_flops(chain, runs), runs)


def _inside(chain: Chain, runs: Sequence[Run]) -> Inside:
    return Inside(*decisions_of(chain, runs))


def _least_kept(chain: Chain) -> Iterator[tuple[Run, ...]]:
    """Plans of least kept bytes, whatever is live beside them: those of a chain whose passes allocate nothing else."""
    originals, items = dict[tuple[int, int, Option], Option](), list[Item]()
    for item in chain.items:
        options = tuple(replace(o, transient_bytes=o.saved_bytes) for o in item.options)
        originals.update(((item.start, item.stop, o), own) for o, own in zip(options, item.options, strict=True))
        items.append(replace(item, options=options))
    stages = [replace(s, forward_bytes=0, transient_bytes=s.hoisted_bytes, keep_transient_bytes=s.keep_bytes)
              for s in chain.stages]  # fmt: skip
    # the passes of a chain's last stage follow on one another; those of a body's do not
    stages[-1] = replace(stages[-1], transient_bytes=stages[-1].keep_bytes)
    crossings = tuple(replace(c, cotangent_bytes=0) for c in chain.crossings)
    bare = replace(chain, stages=tuple(stages), items=tuple(items), crossings=crossings)
    for _, _, runs in _frontier(bare):
        if not any(run.children for run in runs):
            yield tuple(_original(chain, run, originals) for run in runs)


def _original(chain: Chain, run: Run, originals: Mapping[tuple[int, int, Option], Option]) -> Run:
    """The run of a chain that one of the same chain without transient bytes is."""
    if run.option is None:
        return run
    known = originals.get((run.start, run.stop, run.option))
    return chain.recompute(run.start) if known is None else replace(run, option=known)


def _thinned(found: Iterable[_Costs], times: int = 1) -> list[_Costs]:
    """Choose a few, by rising recompute and clearly falling memory, where so many bodies keep what they keep."""

    def need(costs: _Costs) -> int:
        return times * costs.kept_bytes + costs.transient_bytes

    steps: list[_Costs] = []
    for costs in sorted(found, key=lambda c: (c.recompute_flops, need(c))):
        if not steps or need(costs) < TUNING.much_less * need(steps[-1]):
            steps.append(costs)
    return evenly(steps, TUNING.body_plans)


def evenly(found: Sequence[T], n: int) -> list[T]:
    """Choose at most `n`, the first and the last among them, at equal distances.

    Example:
        >>> evenly("abcdefg", 4)
        ['a', 'c', 'e', 'g']
    """
    return [found[i] for i in sorted({round(i * (len(found) - 1) / (n - 1)) for i in range(n)})] if found else []
