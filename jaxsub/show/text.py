"""Plans, frontiers and explanations in plain words, at most 80 columns wide: what `print` shows of them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from jaxsub.core.budget import format_bytes, unit_of
from jaxsub.core.chain import Prediction
from jaxsub.core.figures import recomputed_share
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.core.steps import Holding
from jaxsub.show.curves import Row, alike, curve_of, curves, residual_rows, whole_in_slices
from jaxsub.show.loops import COLUMNS, HOLDINGS, recompute_words, regions_words, slices_lines, ways_lines
from jaxsub.show.loops import sliceable_words as run_words

if TYPE_CHECKING:
    from jaxsub.api.explain import Explanation, Group, Residuals
    from jaxsub.api.frontier import Frontier, Point
    from jaxsub.core.figures import Difference
    from jaxsub.core.step_plan import StepPlan
    from jaxsub.diagnosis.findings import Diagnosis
    from jaxsub.search.sliceable import Sliceable
    from jaxsub.step.report import Argument, StepReport

CHART_ROWS, CHART_COLUMNS = 7, 66
GROUPS = 6
"""How many groups of residuals are listed."""

HELD = 6
"""How many arguments of a step are named."""

BAR_COLUMNS = 20
LESS = 1.05
"""A peak that falls by less than this is not said to be so many times less."""

DOMINANT = 0.4
"""A group with more than this share of all residuals dominates."""


def describe(plan: Plan) -> str:
    """Say in plain words what a plan keeps, recomputes and costs; at most 80 columns wide."""
    lines = [f"jaxsub plan by `{plan.planner}`, budget: {plan.budget}"]
    lines += textwrap.wrap(plan.note, COLUMNS)
    lines += list(_memory_lines(plan))
    regions = regions_words(plan.segments, plan.barriers)
    lines.append(f"recompute  {recompute_words(plan)}{f'; {regions}' if regions else ''}")
    for run, steps in zip_longest(plan.slices, [steps for steps in plan.steps if steps.kind == "slices"]):
        lines += slices_lines(run, steps)
    lines += ways_lines(plan.loops, [steps for steps in plan.steps if steps.kind == "loop"])
    lines += [_holding_line(h) for h in plan.holdings[:HOLDINGS]]
    if len(plan.holdings) > HOLDINGS:
        lines.append(f"           and {sum(h.count for h in plan.holdings[HOLDINGS:])} smaller values")
    return "\n".join([*(line[:COLUMNS] for line in lines), *_chart(plan)])


def _holding_line(holding: Holding) -> str:
    verb = "offload" if holding.is_offloaded else "keep"
    return f"{verb:<10} {holding.count:>4} x {format_bytes(holding.n_bytes):>9}  {holding.label}"


def _memory_lines(plan: Plan) -> Iterator[str]:
    for name, before, after in (
        ("predicted", plan.plain_prediction, plan.prediction),
        ("measured ", plan.plain_measurement, plan.measurement),
    ):
        if after is not None:
            was = f"{format_bytes(before.temp_bytes)} -> " if before is not None else ""
            ratio = before.temp_bytes / max(after.temp_bytes, 1) if before is not None else 1.0
            less = f" ({ratio:.1f}x less)" if ratio >= LESS else ""
            yield f"{name}  peak {was}{format_bytes(after.temp_bytes)}{less}"
    if plan.prediction is not None:
        share = recomputed_share(plan)
        unit = "time" if plan.prediction.minimises == "seconds" else "FLOPs"
        yield f"extra      {share:.1%} of one forward pass in {unit}" + _measured_flops(plan)
        moved = sum(h.n_bytes * h.count for h in plan.holdings if h.is_offloaded)
        if moved:
            yield f"host       {format_bytes(moved)} kept in host memory, there and back within that time"
        if plan.gap is not None:
            yield f"bound      at most {plan.gap:.1%} of a forward pass above the least possible"
        yield from _time_lines(plan.prediction)
    if plan.measurement is None:
        yield "           not verified by a compile"


def _time_lines(prediction: Prediction) -> Iterator[str]:
    if prediction.extra_seconds is not None and prediction.step_seconds:
        share = prediction.extra_seconds / prediction.step_seconds
        extra, whole = format_seconds(prediction.extra_seconds), format_seconds(prediction.step_seconds)
        yield f"time       +{extra} ({share:.1%}) on {whole} a gradient ({prediction.seconds_origin})"


def format_seconds(seconds: float) -> str:
    """Seconds with three digits and the unit that suits them.

    Example:
        >>> format_seconds(0.01234), format_seconds(2.5e-6), format_seconds(0.0)
        ('12.3 ms', '2.5 us', '0 s')
    """
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    size, unit = next(((size, unit) for size, unit in units if seconds >= size), units[0])
    return f"{seconds / size:.3g} {unit}"


def _measured_flops(plan: Plan) -> str:
    if plan.measurement is None or plan.plain_measurement is None or not plan.plain_measurement.flops:
        return ""
    if plan.loops:  # the compiler counts a loop's body once, whatever its length
        return ""
    return f"; {(plan.measurement.flops or 0) / plan.plain_measurement.flops:.3f}x the FLOPs in all"


def _chart(plan: Plan) -> Iterator[str]:
    """Live bytes over time: `.` before, `#` after."""
    before, after = curves(plan)
    inside = whole_in_slices(plan)
    if inside is not None:
        before, after = None, curve_of(inside.timeline)
    if after is None:
        return
    end = max(c.end for c in (before, after) if c is not None)
    peak = max(c.peak_bytes for c in (before, after) if c is not None)
    if not peak:
        return
    was = before.sampled(CHART_COLUMNS, end) if before is not None else (0,) * CHART_COLUMNS
    now = after.sampled(CHART_COLUMNS, end)
    yield ""
    yield "predicted memory " + ("inside one slice" if inside else "over time: `.` without the plan, `#` with it")
    for row in range(CHART_ROWS, 0, -1):
        level = peak * (row - 0.5) / CHART_ROWS
        label = format_bytes(peak) if row == CHART_ROWS else ""
        marks = ("#" if b >= level else "." if a >= level else " " for a, b in zip(was, now, strict=True))
        yield f"{label:>11} |{''.join(marks)}".rstrip()
    turn = min(CHART_COLUMNS - 1, round(after.turn / end * CHART_COLUMNS))
    yield " " * 12 + "-" * turn + "+" + "-" * (CHART_COLUMNS - turn)
    yield (" " * 12 + "forward"[:turn].ljust(turn) + "| backward").rstrip()[:COLUMNS]


def describe_frontier(frontier: Frontier) -> str:
    """A table of plans, least memory first, and beside it what is made by hand; at most 80 columns wide."""
    top = max([p.temp_bytes for p in frontier.points] + [1])
    lines = ["predicted       again                 memory               plan"]
    lines += [_point_line(p, top) for p in frontier.points]
    if frontier.others:
        lines += ["", "for comparison, on the same stages:", *(_point_line(p, top) for p in frontier.others)]
    if any(p.plan.measurement is not None for p in frontier.points):
        lines += ["", "measured by the compiler, in the same order:"]
        lines += ["  " + format_bytes(p.plan.measurement.temp_bytes) for p in frontier.points if p.plan.measurement]
    return "\n".join(line[:COLUMNS].rstrip() for line in lines)


def _point_line(point: Point, top: int) -> str:
    bar = "#" * max(1, min(BAR_COLUMNS, round(BAR_COLUMNS * point.temp_bytes / top)))
    figures = f"{format_bytes(point.temp_bytes):>10} {point.extra:>8.1%} {point.plan.n_regions:>5} regions"
    return f"{figures}  {bar:<{BAR_COLUMNS}} {point.name}"


def describe_explanation(found: Explanation) -> str:
    """Where memory goes, what dominates, and what budgets buy; at most 80 columns wide."""
    plain, n = found.frontier.points[-1], len(found.residuals)
    lines = [
        f"The backward pass reads {format_bytes(found.total_bytes)} that the forward pass makes, in {n} arrays,",
        f"and {format_bytes(found.given_bytes)} of arguments and constants, which stand anyway. The compiler",
        f"makes some of it again inside fusions: the predicted peak is {format_bytes(plain.temp_bytes)}.",
        *(["Arrays are counted on all devices together, and peaks on one of them."] if found.is_spread else []),
    ]
    scopes, sources = alike(found.by_scope()), found.by_source()
    if len(scopes) > 1:
        lines += ["", "by module or named scope", *_group_lines(scopes, found.total_bytes)]
    lines += ["", "by source line", *_group_lines(sources, found.total_bytes)]
    lines += ["", "by what makes it", *_group_lines(found.by_producer(), found.total_bytes)]
    lines += ["", *_verdict(sources, found.total_bytes), *_reach(found.frontier, found.runs)]
    return "\n".join(line[:COLUMNS].rstrip() for line in lines)


def _group_lines(groups: Sequence[Group | Row], total: int) -> list[str]:
    shown, rest = groups[:GROUPS], groups[GROUPS:]
    lines = [
        f"{format_bytes(g.n_bytes):>10} {g.n_bytes / max(total, 1):>6.1%} {g.count:>5} x  {g.label}" for g in shown
    ]
    return lines + ([f"{format_bytes(sum(g.n_bytes for g in rest)):>10} in {len(rest)} others"] if rest else [])


def _verdict(sources: Sequence[Group], total: int) -> list[str]:
    if not sources or not total:
        return ["Nothing is kept for the backward pass."]
    share = sources[0].n_bytes / total
    return [f"{sources[0].label} holds {share:.0%} of it." if share > DOMINANT else
            f"No line dominates: the largest, {sources[0].label}, holds {share:.0%}."]  # fmt: skip


def _reach(frontier: Frontier, runs: Sequence[Sliceable]) -> list[str]:
    """What budgets are within reach, in words, and what may run in slices."""
    least, plain = frontier.points[0], frontier.points[-1]
    lines = ["Within reach, as predicted:"] if len(frontier.points) > 1 else []
    for point in frontier.points[:-1][::-1]:
        share = f"{point.temp_bytes / max(plain.temp_bytes, 1):.0%} of it"
        lines.append(
            f'  budget="{budget_words(point.temp_bytes)}", {share}, for {point.extra:.1%} of a forward pass again'
        )
    if not any(run.count > 1 for run in runs):
        lines.append(f"Less than {format_bytes(least.temp_bytes)} is out of reach.")
    if runs:
        lines += [f"For less than {format_bytes(least.temp_bytes)}, or less recomputation, runs may be in slices:"]
    for run in runs:
        size = f"{format_bytes(run.n_bytes) if run.n_bytes else '':>10}  "
        lines += textwrap.wrap(run_words(run), COLUMNS, initial_indent=size, subsequent_indent=" " * 14)
    return lines


def budget_words(n_bytes: int) -> str:
    """Bytes as a budget is written, rounded up in the last place."""
    unit, size = unit_of(n_bytes)
    return f"{-(-n_bytes * 100 // size) / 100:g}{unit}" if size > 1 else f"{n_bytes}B"


def _report_lines(found: StepReport) -> Iterator[str]:
    """What a whole step takes, and what was done so that it fits."""
    measured = found.measurement
    was = f"{format_bytes(found.plain_bytes)} -> " if found.plain_bytes != found.step_bytes else ""
    yield (
        f"jaxsub step: {was}{format_bytes(found.step_bytes)} of {format_bytes(found.memory_bytes)} "
        f"({measured.target}, {found.n_compiles} compiles)"
    )
    donated = f", {format_bytes(measured.alias_bytes)} of them in donated memory" if measured.alias_bytes else ""
    yield f"arguments  {format_bytes(measured.argument_bytes)}: {_argument_words(found.arguments) or 'none'}"
    yield f"outputs    {format_bytes(measured.output_bytes)}{donated}"
    before = found.plain.temp_bytes
    yield "temporary  " + (
        f"{format_bytes(before)} -> " if before != measured.temp_bytes else ""
    ) + format_bytes(measured.temp_bytes)  # fmt: skip
    yield from _update_lines(found)
    for site in found.sites:
        times = f", called {site.calls} times" if site.calls > 1 else ""
        yield f"{site.name}{times}: {plan_words(site.plan)}"


def _update_lines(found: StepReport) -> Iterator[str]:
    """What became of the updates: inside a backward scan, or behind the gradients, and why."""
    for scan in found.fused:
        where = f" ({scan.source})" if scan.source else ""
        copied = f"; {format_bytes(scan.copied_bytes)} are copied, not donated" if scan.copied_bytes else ""
        yield (
            f"update     inside the backward scan{where}: {scan.n_gradients} gradients, "
            f"{format_bytes(scan.gradient_bytes)} in all, stand one of {scan.steps} layers at a time{copied}"
            + (f"; it runs twice, for {scan.twice}" if scan.twice else "")
        )
    if (order := found.ordered) is not None:
        yield (
            f"update     right behind its gradient, by {order.n_barriers} barriers: {order.n_gradients} gradients, "
            f"{format_bytes(order.gradient_bytes)} in all, live until then"
        )
    for whole in found.whole:
        yield f"update     gradients stand whole, {format_bytes(whole.n_bytes)}: {whole.reason}"


def _argument_words(held: Sequence[Argument]) -> str:
    return ", ".join(f"{h.name} {format_bytes(h.n_bytes)}" for h in held[:HELD])


def plan_words(plan: Plan) -> str:
    """What a plan does, in one line."""
    if not (plan.segments or plan.barriers or plan.loops or plan.slices):
        return "nothing recomputed"
    regions = regions_words(plan.segments, plan.barriers)
    sliced = [f"{run.label} in {run.count} slices" for run in plan.slices]
    extra = f"{recomputed_share(plan):.2f} of a forward pass again" if plan.prediction else ""
    return f"{', '.join(filter(None, [regions, *sliced, extra]))} (`{plan.planner}`)"


def _measurement_words(found: Measurement) -> str:
    flops = "" if found.flops is None else f", {found.flops:.3g} FLOPs"
    host = f", {format_bytes(found.host_temp_bytes)} in host memory" if found.host_temp_bytes else ""
    return (
        f"{format_bytes(found.temp_bytes)} temporary, {format_bytes(found.argument_bytes)} arguments, "
        f"{format_bytes(found.output_bytes)} outputs{host}{flops} "
        f"({found.target}, compiled in {found.compile_seconds:.1f} s)"
    )


def _residual_words(found: Residuals) -> str:
    """One line for each residual, alike ones together, the bytes of all of them first."""
    return "\n".join(f"{format_bytes(r.n_bytes):>10} {r.count:>4} x  {r.label}" for r in residual_rows(found))


def _diagnosis_lines(found: Diagnosis) -> Iterator[str]:
    """What is wrong with a loss or a step, those faults first that cost most, each with its fix."""
    subject = "step" if found.is_step else "gradient"
    taken = f": {found.measurement}" if found.measurement is not None else ", not compiled"
    yield from textwrap.wrap(f"jaxsub doctor, the {subject}{taken}", COLUMNS)
    if not found.findings:
        yield "No fault was found."
    for number, finding in enumerate(found.findings, 1):
        how = "measured" if finding.is_measured else "at most"
        often = f" ({finding.count} ×)" if finding.count > 1 else ""
        where = f", {finding.source}" if finding.source else ""
        yield f"{number:>2}. {format_bytes(finding.n_bytes):>10} {how:<9} {finding.kind}{often}{where}"
        yield from textwrap.wrap(finding.what, COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 4)
        yield f"    fix: {finding.fix}"
    for left_out in found.not_looked_at:
        yield from textwrap.wrap(f"not looked at: {left_out}", COLUMNS, subsequent_indent=" " * 4)


def _difference_lines(found: Difference, indent: str = "") -> Iterator[str]:
    """The figures, saved values and recomputed equations in which two plans differ."""
    if not found:
        yield f"{indent}The plans decide the same."
        return
    if not found.is_same_program:
        yield f"{indent}The plans are of different programs, or of different shapes."
    if found.rows:
        yield f"{indent}{'':<25} {'this':>12} {'other':>12}"
    for row in found.rows:
        name, this, other = row.words
        yield f"{indent}{name:<25} {this:>12} {other:>12}"
    yield from (f"{indent}{name:<25} {words}"[:COLUMNS] for name, words in found.alone)
    for name, part in found.parts:
        yield f"{indent}{name}:"
        yield from _difference_lines(part, indent + "  ")


def _step_plan_lines(found: StepPlan) -> Iterator[str]:
    before, after = (format_bytes(m.step_bytes) for m in (found.plain_measurement, found.measurement))
    yield f"jaxsub step plan: {before} -> {after} of {format_bytes(found.memory_bytes)} ({found.measurement.target})"
    for site in found.sites:
        often = f", called {site.calls} times" if site.calls > 1 else ""
        yield f"{site.name}{often}: {plan_words(site.plan)}"


def words_of(thing: Any) -> str:
    """What `print` shows of a thing that shows itself, by the name of its class."""
    describe_it: Callable[[Any], str] = next(WORDS[c.__name__] for c in type(thing).__mro__ if c.__name__ in WORDS)
    return describe_it(thing)


WORDS: dict[str, Callable[[Any], str]] = {
    "Plan": describe,
    "Measurement": _measurement_words,
    "Frontier": describe_frontier,
    "Explanation": describe_explanation,
    "Residuals": _residual_words,
    "StepReport": lambda found: "\n".join(_report_lines(found)),
    "StepPlan": lambda found: "\n".join(_step_plan_lines(found)),
    "Difference": lambda found: "\n".join(_difference_lines(found)),
    "Diagnosis": lambda found: "\n".join(_diagnosis_lines(found)),
}
