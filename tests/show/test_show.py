"""Plans, frontiers and explanations as they are shown: text, HTML and matplotlib."""

import json
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
import zoo
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import jaxsub
from jaxsub.api.frontier import spread
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Crossing, Option, Run, Stage
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan, Segment, plan_from_runs
from jaxsub.core.steps import Holding
from jaxsub.jaxpr.inline import scope_of
from jaxsub.search.frontier_points import Candidate
from jaxsub.show.curves import curves, recomputed, savers
from jaxsub.show.html import MOST_BYTES, environment, fragment, page

mpl.use("Agg")
from matplotlib.figure import Figure

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>&amp;\u2028\x00'
VOID = frozenset("meta br img".split())


class Reader(HTMLParser):
    """Reads a page: its tags and text, and whether every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter = Counter()
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.addresses += [v for k, v in attrs if k in ("src", "href") or k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html: str) -> Reader:
    """Parse a page that must hold together."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def a_chain(n: int, nodes_each: int = 3) -> Chain:
    """Equal stages in a row."""
    stages = tuple(
        Stage(s * nodes_each, (s + 1) * nodes_each, forward_flops=1e9, tail_flops=5e8, forward_bytes=2**19,
              transient_bytes=4 * 2**20, keep_bytes=3 * 2**20, keep_transient_bytes=3 * 2**20,
              first_value=1 + s * nodes_each)
        for s in range(n)
    )  # fmt: skip
    return Chain(stages, (), tuple(Crossing(s, s + 1, 2**20, 2**20) for s in range(n - 1)), "f")


def nested(chain: Chain, start: int, stop: int, depth: int) -> Run:
    """Regions in regions, each split in two halves."""
    middle = (start + stop) // 2
    if depth == 0 or middle == start:
        return chain.nest(start, stop)
    return chain.nest(start, stop, [nested(chain, start, middle, depth - 1), nested(chain, middle, stop, depth - 1)])


def planned(n: int, nodes_each: int = 3, depth: int = 0, parts: int = 3) -> Plan:
    """A plan of so many stages in so many outermost segments, nested so deep, the last stage unwrapped."""
    chain = a_chain(n, nodes_each)
    edges = np.linspace(0, n - 1, parts + 1).astype(int).tolist()
    runs = [nested(chain, a, b, depth) for a, b in pairwise(edges) if b > a]
    return plan_from_runs(chain, [*runs, Run(n - 1, n)], budget=Budget(n_bytes=40 * 2**20), planner="by hand")


def labelled(plan: Plan, label: str) -> Plan:
    """The plan with this label on everything that has one, each a little different."""
    timeline = plan.timeline
    pieces = tuple(replace(p, label=f"{label} {i}") for i, p in enumerate(timeline.pieces))
    stages = tuple(f"{label} stage {i}" for i in range(len(timeline.stage_nodes) - 1))
    timeline = replace(timeline, pieces=pieces, stage_labels=stages)
    return plan.replace(timeline=timeline, holdings=(Holding(label, 2**20, 3),), planner=label)


SMALL = planned(9)
LARGE = labelled(
    planned(301, nodes_each=67, depth=3, parts=300 // 8), "block_3/attention/dot_general model.py:48 (attend)"
)
PLANS = {
    "three segments": SMALL,
    "300 segments": planned(301, parts=300),
    "20,000 equations, nested three deep": LARGE,
    "hostile": labelled(SMALL, HOSTILE),
    "by hand": Plan("f", Budget(), 9, (Segment(0, 5, (), (Segment(0, 2),)), Segment(5, 8))),
    "nothing": Plan("f", Budget(), 0),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_page_holds_together(plan):
    """Any plan is a small page of well-formed HTML that fetches nothing and holds no other script than ours."""
    for html in (page(plan), fragment(plan), plan._repr_html_()):
        found = read(html)
        assert len(html.encode()) < 200_000
        assert found.addresses == []
        assert found.tags["script"] == (2 if plan.timeline else 0)
        assert not re.search(r"https?://|@import|url\(", html)
        assert found.tags["img"] == found.tags["link"] == 0


def test_a_hostile_name_is_shown_as_text():
    """Markup in a name is text in the page and escaped in its data."""
    html = page(PLANS["hostile"])
    assert '<script>alert("x")' not in html
    assert "&lt;script&gt;alert(" in html
    data = re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[1]
    assert any("<script>" in label for label in json.loads(data)["labels"])


def test_a_hostile_checkpoint_name_is_shown_as_text():
    """A name given by `checkpoint_name` reaches the page only as text."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(checkpoint_name(x @ w, "<script>alert(1)</script>"))
        return (x**2).mean()

    plan = jaxsub.plan(loss, [jnp.ones((8, 8))] * 6, jnp.ones((64, 8)), budget=0.6, verify=False)
    html = plan._repr_html_()
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "\\u003cscript\\u003ealert(1)" in html


def test_a_large_plan_is_rendered_quickly():
    """A plan of 20,000 equations is text and a page in under two seconds."""
    start = time.perf_counter()
    assert LARGE.n_nodes > 20_000
    assert str(LARGE)
    assert page(LARGE)
    assert time.perf_counter() - start < 2


def test_the_data_of_the_page_is_that_of_the_timeline():
    """What the script shows of a moment adds up to what the timeline says stands then."""
    html = fragment(SMALL)
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[1])
    for i, (step, live) in enumerate(zip(data["steps"], SMALL.timeline.live_bytes, strict=True)):
        assert sum(step[3:]) + sum(p[2] for p in data["pieces"] if p[0] <= i < p[0] + p[1]) == live


def test_a_page_that_would_grow_too_large_names_less():
    """Labels are left out, largest pieces last, before the page grows over its limit."""
    html = fragment(labelled(LARGE, "語" * 110))
    assert len(html.encode()) <= MOST_BYTES
    assert "js-after" in html


FIGURES = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-1, 2**70)


@given(st.text(max_size=50), FIGURES, FIGURES, st.integers(0, 2**60))
def test_showing_never_raises(label, extra, forward, temp_bytes):
    """Whatever figures and names a plan holds, it can be shown in every form."""
    prediction = replace(SMALL.prediction, extra_flops=extra, forward_flops=forward, temp_bytes=temp_bytes)
    measured = Measurement(temp_bytes, 0, 0, 0, None, 0.1, label)
    plan = labelled(SMALL, label).replace(prediction=prediction, measurement=measured, plain_prediction=None)
    assert all((repr(plan), str(plan), plan.to_html()))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_plan_in_words_is_80_columns_wide(plan):
    """No line of a printed plan is wider than 80 columns, the chart's included."""
    assert max(map(len, str(plan).split("\n"))) <= 80


def test_the_chart_of_the_text_reaches_the_peak():
    """The chart's highest row marks the plain peak, and the plan's marks stay as much lower as it saves."""
    rows = [line for line in str(SMALL).splitlines() if re.match(r"[ \w.]{11} \|", line)]
    assert "." in rows[0]
    assert "#" not in rows[0]
    assert "#" in rows[-1]


def test_curves_share_one_clock():
    """Before and after are drawn over the same time: one forward pass, two for the backward pass, and what is again."""
    before, after = curves(SMALL)
    assert before.end == pytest.approx(3, rel=0.02)
    extra = SMALL.prediction.extra_flops / SMALL.prediction.forward_flops
    assert after.end == pytest.approx(3 + extra, rel=0.02)
    assert max(after.sampled(66, after.end)) == after.peak_bytes


def test_savers_and_what_runs_again():
    """The regions' savings are listed largest first, and every recomputed equation is counted once."""
    plan = planned(9, depth=1)
    found = savers(plan)
    assert [s.saved_bytes for s in found] == sorted((s.saved_bytes for s in found), reverse=True)
    extra = plan.prediction.extra_flops / plan.prediction.forward_flops
    assert sum(s.extra for s in found) == pytest.approx(extra)
    assert sum(n for _, n, _ in recomputed(plan)) == sum(1 for m in plan.mirror_counts if m)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_plan_is_drawn_on_the_axes_given(plan):
    """`plot` draws on the axes it is given, returns them, and changes no other state."""
    ax = Figure().subplots()
    assert plan.plot(ax) is ax
    ax.figure.canvas.draw()
    if plan.timeline is not None:
        assert ax.get_ylabel().startswith("memory")
        assert len({tuple(p.get_facecolor()) for p in ax.patches}) >= 2


def layers(ws, x):
    """A chain to draw frontiers of."""
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


SHAPES = ([jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 16, jax.ShapeDtypeStruct((128, 16), jnp.float32))


def test_a_frontier_is_one():
    """Along a frontier memory rises and recomputation falls, down to none; points made by hand lie on or above it."""
    found = jaxsub.frontier(layers, *SHAPES, points=6)
    memory, extra = [p.temp_bytes for p in found.points], [p.extra for p in found.points]
    assert 2 <= len(memory) <= 6
    assert memory == sorted(set(memory))
    assert extra == sorted(set(extra), reverse=True)
    assert extra[-1] == 0
    every = jaxsub.frontier(layers, *SHAPES, points=100).points
    for other in found.others:
        assert any(p.temp_bytes <= other.temp_bytes and p.extra <= other.extra for p in every), other.name
    assert {"checkpoint every stage", "√n segments", "chen", "revolve"} <= {p.name for p in found.others}


def test_a_plan_of_a_frontier_can_be_used():
    """Any plan of a frontier is a plan of the function."""
    ws, x = [0.1 * jnp.eye(16)] * 16, jnp.ones((128, 16))
    plan = jaxsub.frontier(layers, ws, x, points=4).plans[0]
    got = jax.grad(jaxsub.sublinear(layers, plan=plan))(ws, x)
    want = jax.grad(layers)(ws, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


def test_a_frontier_is_shown():
    """A frontier is a table of 80 columns, a small page, and a picture with the budget marked."""
    found = jaxsub.frontier(layers, *SHAPES, points=5, budget="64KiB")
    assert max(map(len, str(found).splitlines())) <= 80
    assert read(found._repr_html_()).tags["tr"] == 3 + len(found.points) + len(found.others)
    ax = Figure().subplots()
    assert found.plot(ax) is ax
    assert "budget" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_too_few_points_are_refused():
    """A frontier of one point is none."""
    for points in (1, 2.5, "8", True):
        with pytest.raises(ValueError, match=f"points= is a whole number of at least 2, got {points!r}"):
            jaxsub.frontier(layers, *SHAPES, points=points)


def test_a_frontier_marks_bytes():
    """A fraction is refused: it would not be marked."""
    with pytest.raises(jaxsub.BudgetError, match=r"marks bytes.* got the fraction budget=0.5"):
        jaxsub.frontier(layers, *SHAPES, budget=0.5)


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=60, unique=True), st.integers(2, 12))
def test_points_are_spread_with_both_ends(sizes, points):
    """So many points at most are chosen, in order, the least and the most memory among them."""
    found = [Candidate(size, 0.0, list) for size in sorted(sizes)]
    chosen = spread(found, points)
    assert len(chosen) <= max(points, 1)
    assert chosen[0] == found[0]
    assert chosen[-1] == found[-1]
    assert chosen == [candidate for candidate in found if candidate in chosen]


@pytest.mark.parametrize("name", ["gpt", "branches", "dropout", "scan", "cond", "custom_vjp", "tied"])
def test_residuals_are_what_jax_says(name, capsys):
    """Shapes and number of residuals are those that JAX prints, scalars of literals left out."""
    loss, args = zoo.BY_NAME[name].toy()
    jax.ad_checkpoint.print_saved_residuals(lambda params: loss(params, *args[1:]), args[0])
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if not re.search(r"from (the argument|a (constant|literal))", line)
    ]
    want = Counter(short[1] for line in lines if (short := re.match(r"\w+\[([\d,]*)\]", line)))
    got = Counter(",".join(map(str, r.shape)) for r in jaxsub.residuals(loss, *args) if not r.is_given)
    assert got == want


def test_residuals_have_names_lines_and_scopes():
    """A residual knows its checkpoint name, its source line and its named scope; an argument its path."""

    def loss(p, x):
        with jax.named_scope("head"):
            return jnp.sin(checkpoint_name(x @ p["w"], "logits")).sum()

    found = jaxsub.residuals(loss, {"w": jnp.ones((4, 4))}, jnp.ones((2, 4)))
    (made,) = (r for r in found if not r.is_given)
    assert (made.producer, made.scope) == ("cos", "head")
    assert "test_show.py:" in made.source
    assert {r.name for r in found if r.is_given} == {"arg1"}
    assert str(made).startswith("head: ")


@pytest.mark.parametrize(
    ("stack", "scope"),
    [
        ("jvp(block_0)/attention", "block_0/attention"),
        ("transpose(jvp(a/b))/c", "a/b/c"),
        ("", ""),
        ("a", "a"),
    ],
)
def test_scopes_without_transformations(stack, scope):
    """A name stack is shown without the transformations that wrap its parts."""
    assert scope_of(stack) == scope


def test_an_explanation_adds_up():
    """Every grouping of the residuals has the same total, the largest first, and the words name it."""
    loss, args = zoo.BY_NAME["gpt"].toy()
    found = jaxsub.explain(loss, *args)
    for groups in (found.by_source(), found.by_scope(), found.by_producer()):
        assert sum(g.n_bytes for g in groups) == found.total_bytes
        assert [g.n_bytes for g in groups] == sorted((g.n_bytes for g in groups), reverse=True)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert found.by_source()[0].label in text
    assert text.count('budget="') == len(found.frontier.points) - 1
    assert read(found._repr_html_()).tags["table"] == 3
    assert found.by_source()[0].label in found._repr_html_()


def test_a_budget_an_explanation_names_is_met():
    """The budgets that are said to be within reach are."""
    text = str(jaxsub.explain(layers, *SHAPES))
    for budget in re.findall(r'budget="(\w+\.?\w*)"', text):
        plan = jaxsub.plan(layers, *SHAPES, budget=budget, verify=False)
        assert plan.prediction.temp_bytes <= Budget.parse(budget).n_bytes


def test_saving_options_are_part_of_what_is_drawn():
    """A region that saves a value holds it from its forward to its backward pass."""
    chain = a_chain(3)
    runs = (Run(0, 1, Option((0,), 7 * 2**20, 9 * 2**20)), Run(1, 3))
    plan = plan_from_runs(chain, runs, budget=Budget(), planner="p")
    assert plan.timeline.alive(plan.timeline.peak_step)[0].kind == "saved"


def test_residuals_are_a_table():
    """Residuals are a tuple that prints alike ones in one line, and has a row of HTML for each."""
    found = jaxsub.residuals(layers, *SHAPES)
    assert isinstance(found, tuple)
    assert f"{sum(r.producer == 'tanh' for r in found)} x  float32[128,16] by tanh" in str(found)
    assert read(found._repr_html_()).tags["tr"] == 1 + len(str(found).splitlines()) < len(found)


def test_without_jinja2_a_notebook_gets_the_text(monkeypatch):
    """Where jinja2 is missing a notebook shows the text and the extra that brings it; `to_html` says so as an error."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    environment.cache_clear()
    try:
        assert "budget: 40.0 MiB" in SMALL._repr_html_()
        assert "jaxsub[plot]" in SMALL._repr_html_()
        with pytest.raises(ImportError, match=r'HTML needs jinja2: pip install "jaxsub\[plot\]"'):
            SMALL.to_html()
    finally:
        environment.cache_clear()
