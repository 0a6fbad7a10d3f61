"""What shows itself as HTML: the card that a notebook puts under a cell, and a page of its own.

One fragment without links, fonts or requests, made from the templates in `templates` by the class of what is shown.
Everything is there without scripts; with them, the moment under the pointer (or chosen with the arrow keys) says what
is alive. jinja2 escapes all text and all data, so that a name is always shown as text. A plan's card stays under
`MOST_BYTES` whatever its size: names of what is smallest are left out of the script's data first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from jaxsub.core.budget import format_bytes
from jaxsub.core.decisions import Loop
from jaxsub.core.plan import Plan
from jaxsub.core.steps import Steps
from jaxsub.core.timeline import PHASES
from jaxsub.show import curves as drawn
from jaxsub.show.chart import chart_of, rows_of
from jaxsub.show.curves import curves, region_label, whole_in_slices
from jaxsub.show.loops import loop_words, recompute_words, sliceable_words, slices_words, steps_words, times
from jaxsub.show.text import budget_words, plan_words

MOST_BYTES = 190_000
LABEL_LENGTH = 120
MOST_ROWS = 8
MOST_RESIDUALS = 40
TEMPLATES = {"Plan": "plan", "Frontier": "frontier", "Explanation": "explanation", "StepReport": "report",
             "Measurement": "measurement", "Residuals": "residuals", "StepPlan": "step_plan",
             "Difference": "difference", "Diagnosis": "diagnosis"}  # fmt: skip
"""The template of each class."""


@cache
def environment() -> Any:
    """The templates, and what they call; they need jinja2."""
    try:
        import jinja2  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ImportError('HTML needs jinja2: pip install "jaxsub[plot]"') from error
    made = jinja2.Environment(loader=jinja2.PackageLoader("jaxsub.show"), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, undefined=jinja2.StrictUndefined)  # fmt: skip
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.filters.update(bytes=format_bytes, times=times, cut=_cut, slices=slices_words, sliceable=sliceable_words,
                        plan=plan_words, budget=budget_words, recomputes=recompute_words, saves=steps_words,
                        runs=_runs)  # fmt: skip
    made.globals.update(drawn=drawn, chart_of=chart_of, rows_of=rows_of, MOST_ROWS=MOST_ROWS,
                        MOST_RESIDUALS=MOST_RESIDUALS)  # fmt: skip
    return made


def _runs(steps: Steps, plan: Plan | None) -> str:
    """What a loop or a run in slices is, and how it runs."""
    if steps.kind == "slices":
        return f"One of {steps.length} slices: {steps.label}"
    ways = {way.node: way for way in plan.loops} if plan is not None else {}
    way = ways.get(steps.node, Loop(steps.node))
    return f"Loop {loop_words(way, steps)}" if isinstance(way, Loop) else steps.label


def render(name: str, **context: Any) -> Any:
    """A template, filled in: markup that other templates may hold."""
    return _markup(environment().get_template(f"{name}.html").render(**context))


def _markup(text: str) -> Any:
    from markupsafe import Markup  # noqa: PLC0415 - comes with jinja2

    return Markup(text)


def page(thing: Any) -> str:
    """A thing that shows itself, as a page of its own."""
    return str(render("page", body=_markup(fragment(thing)), title=f"jaxsub {_template(thing)}"))


def fragment(thing: Any) -> str:
    """A thing that shows itself, as what a notebook puts under a cell: self-contained, for light and dark."""
    body = render(_template(thing), it=thing)
    for n_labels in (600, 150, 30, 0) if isinstance(thing, Plan) else ():
        data = _data(thing, n_labels)
        if data and len((text := _assemble(body, data)).encode()) <= MOST_BYTES:
            return text
    return _assemble(body, None)


def _template(thing: Any) -> str:
    return next(TEMPLATES[c.__name__] for c in type(thing).__mro__ if c.__name__ in TEMPLATES)


def _assemble(body: str, data: Mapping[str, Any] | None) -> str:
    """A card with its style, and a script where there is data for one."""
    key = "jaxsub-" + hashlib.sha1((body + str(data)).encode()).hexdigest()[:12]
    return str(render("card", body=body, data=data, key=key))


def _cut(text: str) -> str:
    """A label cut to a length, marked where it is."""
    return text if len(text) <= LABEL_LENGTH else text[: LABEL_LENGTH - 1] + "…"


def _data(plan: Plan, n_labels: int) -> dict[str, Any] | None:
    """What the script needs to say what is alive at a moment."""
    timeline, (_, after) = plan.timeline, curves(plan)
    if timeline is None or after is None or whole_in_slices(plan) is not None:
        return None
    labels: dict[str, int] = {}
    bare = replace(timeline, stage_labels=())
    named = set(sorted(range(len(timeline.pieces)), key=lambda i: -timeline.pieces[i].n_bytes)[:n_labels])

    def label(text: str) -> int:
        return labels.setdefault(_cut(text), len(labels))

    pieces = []
    for i, p in enumerate(timeline.pieces):
        text = p.label if i in named and p.label else f"{p.kind}, {region_label(bare, p.first_stage, p.stop_stage)}"
        pieces.append([p.start, p.stop - p.start, p.n_bytes, label(text) if n_labels else -1])
    is_named = n_labels and len(set(timeline.stage_labels)) <= n_labels
    steps = []
    for width, s in zip(map(float.__sub__, after.times[1:], after.times), timeline.steps, strict=True):
        text = region_label(timeline if is_named else bare, s.start, s.stop)
        steps.append([round(width, 5), PHASES.index(s.phase), label(text), s.transient_bytes, s.cotangent_bytes])
    end = max(c.end for c in curves(plan) if c is not None)
    found = ((i, drawn.steps_at(timeline, i, plan.steps)) for i in range(len(steps) if plan.steps else 0))
    parts = {i: [[row.count, row.n_bytes, _cut(row.label)] for row in rows] for i, rows in found if rows}
    return {"end": round(end, 5), "steps": steps, "pieces": pieces, "labels": list(labels), "parts": parts}
