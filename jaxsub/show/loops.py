"""Loops, branches and slices of a plan in plain words: how each runs, what a step saves, what it recomputes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxsub.core.budget import format_bytes
from jaxsub.core.decisions import Conditional, ControlFlow, Inside, Loop, Segment, Slices, walk
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.steps import Steps
from jaxsub.core.timeline import family
from jaxsub.show.curves import is_cheap, saved_rows

if TYPE_CHECKING:
    from jaxsub.search.sliceable import Sliceable

COLUMNS = 80
HOLDINGS = 8
"""How many of a plan's holdings are listed; the others are counted."""


def recompute_words(plan: Plan) -> str:
    """What a plan recomputes, in words: how many equations, or where that says little, that they are cheap."""
    counts = plan.mirror_counts
    n = sum(1 for m in counts if m)
    if n and plan.prediction is not None and is_cheap(recomputed_share(plan)):
        return "cheap elementwise work only"
    if not n:
        return f"nothing outside of {'slices' if plan.slices else 'loops'}" if plan.slices or plan.loops else "nothing"
    return f"{n} of {plan.n_nodes} equations, at most {times(max(counts, default=0))}"


def regions_words(segments: Sequence[Segment], barriers: Sequence[int]) -> str:
    """How many regions and barriers; nothing where there are none."""
    return f"{len(list(walk(segments)))} regions, {len(barriers)} barriers" if segments or barriers else ""


def slices_lines(run: Slices, opened: Steps | None) -> Iterator[str]:
    """A run in slices, and what each of them saves and recomputes, one line each."""
    yield from _wrapped(f"in slices  {slices_words(run)}")
    if opened is not None:
        yield from _steps_lines(opened, run.inside.ways, regions_words(run.inside.segments, run.inside.barriers))


def slices_words(slices: Slices) -> str:
    """A run in slices, in plain words.

    Example:
        >>> slices_words(Slices(0, 3, 1, 0, 8, 16384, "head", 2**30, axis="axis 0 of `tokens`"))
        'head: 8 × 2,048 of 16,384 along axis 0 of `tokens`, spares up to 1.00 GiB'
    """
    spared = format_bytes(slices.spared_bytes)
    again = f", recomputes {slices.extra_share:.0%} of a forward pass" if slices.extra_share else ""
    along = f" along {slices.axis}" if slices.axis else " units"
    sizes = f"{slices.count} × {slices.size:,} of {slices.length:,}{along}"
    return f"{slices.label}: {sizes}, spares up to {spared}{again}"


def sliceable_words(run: Sliceable) -> str:
    """Which slices a run may be executed in and what ends it, or why it may not be.

    Example:
        >>> from jaxsub.search.sliceable import Sliceable
        >>> sliceable_words(Sliceable("head", 2**30, 16384, 16, "axis 0 of `tokens`"))
        'head: up to 16 slices of 1,024 along axis 0 of `tokens`'
    """
    often = f"{run.times} × " if run.times > 1 else ""
    if not run.length:
        return f"{often}{run.label}: never. {run.ended_by}"
    along = f" along {run.axis}" if run.axis else " units"
    size = f"{-(-run.length // max(run.count, 1)):,}"
    words = f"up to {run.count} slices of {size}{along}" if run.count > 1 else f"products are too small{along}"
    return f"{often}{run.label}: {words}" + (f", ended by {run.ended_by}" if run.ended_by else "")


if TYPE_CHECKING:
    from jaxsub.search.sliceable import Sliceable


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent + " " * 11, drop_whitespace=True)


def ways_lines(ways: Sequence[ControlFlow], opened: Sequence[Steps], indent: str = "") -> Iterator[str]:
    """How loops and the branches of conditionals run, what each step saves and recomputes, what is inside indented."""
    told, known = {way.node: way for way in ways}, {steps.node: steps for steps in opened}
    for node in sorted({*told, *known}):
        way, steps = told.get(node, Loop(node)), known.get(node)
        if isinstance(way, Conditional):
            yield f"{indent}branches   equation {way.node}:{' recomputed' if way.is_recomputed else ''}"
            for number, inside in enumerate(way.branches):
                yield f"{indent}  branch {number}: {_inside_words(inside)}"
                yield from ways_lines(inside.ways, (), indent + "    ")
            continue
        yield from _wrapped(f"{indent}loop       {loop_words(way, steps)}", indent)
        if steps is not None:
            yield from _steps_lines(steps, way.inside.ways, "", indent)
        else:
            yield from ways_lines(way.inside.ways, (), indent + "    ")


def loop_words(way: Loop, steps: Steps | None) -> str:
    """How a loop runs."""
    words = ["unrolled"] if way.is_unrolled else []
    words += [f"blocks of {' of '.join(map(str, way.blocks))} steps"] if way.blocks else []
    words += ["each step recomputed"] if way.is_recomputed else []
    words += [f"the last {way.kept_steps} steps kept"] if way.kept_steps else []
    if way.inside.segments or way.inside.barriers:
        words.append(f"{'' if way.is_unrolled else 'in a step '}{_inside_words(way.inside)}")
    where = f"equation {way.node}" if steps is None else steps.label
    return f"{where}{f', {steps.length} steps' if steps and steps.length > 1 else ''}: {'; '.join(words) or 'as it is'}"


def steps_words(steps: Steps) -> tuple[str, str]:
    """What each step or slice saves, and what it recomputes."""
    unit = "slice" if steps.kind == "slices" else "step" if steps.length > 1 else "loop"
    in_all = f", {format_bytes(steps.stored_bytes)} in all" if steps.stored_bytes and steps.length > 1 else ""
    saves = f"{format_bytes(steps.saved_bytes)} a {unit}{in_all}"
    shares: dict[str, float] = {}
    for label, share in steps.recomputed:
        shares[family(label)] = shares.get(family(label), 0.0) + share
    rows = [f"{label} ({share:.0%})" for label, share in shares.items() if not is_cheap(share)]
    if not rows:
        return saves, "cheap elementwise work only" if steps.recomputed_share else "nothing"
    return saves, f"{steps.recomputed_share:.0%} of a {unit}'s forward pass: {', '.join(rows)}"


def _steps_lines(steps: Steps, ways: Sequence[ControlFlow], inside: str, indent: str = "") -> Iterator[str]:
    saves, recomputes = steps_words(steps)
    yield from _wrapped(f"{indent}  in each: {inside}") if inside else ()
    yield f"{indent}  saves    {saves}"
    rows = saved_rows(steps)
    yield from (
        f"{indent}{row.count:>8} x {format_bytes(row.n_bytes // row.count):>9}  {row.label}" for row in rows[:HOLDINGS]
    )
    if len(rows) > HOLDINGS:
        yield f"{indent}         and {sum(row.count for row in rows[HOLDINGS:])} smaller values"
    yield from _wrapped(f"{indent}  recomputes {recomputes}", indent)
    yield from ways_lines(ways, steps.inner, indent + "    ")


def _inside_words(inside: Inside) -> str:
    """What happens to a loop's body or a branch."""
    regions = list(walk(inside.segments))
    saved = sum(len(segment.saved) for segment in regions) + len(inside.saved)
    if inside == Inside(ways=inside.ways):
        return "as it is"
    words = f"{len(regions)} regions, {saved} values saved" if saved else f"{len(regions)} regions"
    return f"{words}, {len(inside.barriers)} barriers"


def times(n: int) -> str:
    """How often, in words: `once`, `3 times`."""
    return "once" if n == 1 else f"{n} times"
