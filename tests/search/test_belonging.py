"""Plans from files: whatever was changed in one, it is refused in plain words, or it runs and changes no value."""

import functools
import json
import random
import time
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import PLANS, mutated_bytes, mutated_json, peak_bytes, reset_peak_bytes

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Conditional, Inside, Loop, Segment, Slices
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.trace import trace
from jaxsub.search.belonging import plan_faults, require_belonging

LOOP, COND = 8, 13

QUICK = 40
"""How many changed plans every run tries; `pytest -m exhaustive tests/search/test_belonging.py` tries `PLANS`."""

W, X = jnp.eye(8) + 0.1, jnp.linspace(0, 1, 64 * 8).reshape(64, 8)


def deep(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x


def loss(w, x):
    """Layers, a loop whose steps hold layers, a conditional, and layers."""
    x = deep(w, x)
    x = jax.lax.scan(lambda x, _: (deep(w, x), None), x, None, length=60)[0]
    x = jax.lax.cond(x[0, 0] > 0, functools.partial(deep, w), jnp.sin, x)
    with jax.named_scope("head"):
        x = deep(w, x)
    return jnp.mean(x**2)


@functools.cache
def program():
    return trace(loss, (W, X), {})


STEP = Inside((Segment(0, 4, (), (Segment(0, 2),)), Segment(4, 6)), (4,))
WAYS = (Loop(LOOP, blocks=(12, 3), is_recomputed=True, kept_steps=5, kept_saved=(0,), inside=Inside(saved=(1, 3))),
        Conditional(COND, (Inside((Segment(0, 1),)), STEP)))  # fmt: skip
OTHER_WAYS = (Loop(LOOP, (6,), inside=STEP),)
MEASURED = Measurement(4096, 2304, 260, 4, 1e6, 0.5, "cpu")


@functools.cache
def bases():
    """Plans that hold all that a plan may hold."""
    made = jaxsub.plan(loss, W, X, budget=0.5, verify=False, profile="roofline", cache=False, progress=False)
    made = made.replace(measurement=MEASURED, plain_measurement=replace(MEASURED, temp_bytes=9999))
    nest = Segment(0, 8, (), (Segment(0, 2), Segment(4, 8, (), (Segment(4, 6),))))
    region = Segment(14, 22, (16, 19))
    sliced = jaxsub.plan(loss, W, X, chunks={"head": 4}, verify=False, cache=False, progress=False)
    return (
        made,
        made.replace(segments=(nest, region), barriers=(0, 2, 4, 8, 14, 22), loops=WAYS),
        made.replace(segments=(region,), barriers=(8, 14), loops=OTHER_WAYS, budget=Budget(n_bytes=5000)),
        made.replace(segments=(), barriers=(), loops=(Loop(LOOP, is_unrolled=True),), measurement=None),
        sliced,
    )


def test_the_plans_that_are_changed_hold_everything():
    """Labels, digests, live values, seconds: beside what is written above, nothing is empty."""
    plan = bases()[0]
    assert all((plan.timeline.pieces, plan.timeline.spans, plan.barriers, plan.holdings, plan.equations))
    assert plan.prediction.step_seconds


@pytest.mark.parametrize("number", range(5))
def test_what_planners_make_belongs(number):
    """A plan that runs as it says has no faults, comes back from JSON as it was, and changes no value."""
    plan = bases()[number]
    assert plan_faults(program(), plan) == []
    assert plan.faults() == []
    assert Plan.from_json(plan.to_json()) == plan
    assert_right(emit(program(), plan))


@functools.cache
def plainly():
    return jax.value_and_grad(loss)(W, X)


def assert_right(run):
    """A function that was emitted has the values and gradients of the loss."""
    chex.assert_trees_all_close(jax.value_and_grad(lambda w: run(w, X)[0])(W), plainly(), rtol=1e-4)


def changed(seed):
    """The JSON of a plan with some things changed, now and then as text."""
    rng = random.Random(seed)
    text = rng.choice(bases()).to_json()
    if rng.random() < 0.2:
        return mutated_bytes(rng, text.encode())
    data = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        names = ("segments", "barriers", "loops", "n_nodes", "timeline", "prediction", "measurement", "holdings",
                 "slices")  # fmt: skip
        name = rng.choice((*names, *data))
        data[name] = mutated_json(rng, data[name], 1) if name in data and data[name] is not None else 3
    return json.dumps(data)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in range(1, PLANS // QUICK))]
)
def test_changed_plans_are_refused_or_right(part):
    """Loading raises `ValueError` alone, use `PlanMismatchError` or `UnsupportedError` alone; what is used is right."""
    used, refused = [], []
    for seed in range(part * QUICK, (part + 1) * QUICK):
        text, start, before = changed(seed), time.process_time(), reset_peak_bytes()
        try:
            plan = Plan.from_json(text)
            shown = str(plan), plan.to_html()
            used.append((emit(program(), require_belonging(program(), plan)), shown))
        except (ValueError, jaxsub.UnsupportedError) as error:
            refused.append(str(error))
        assert time.process_time() - start < 5, seed
        assert peak_bytes() - before < 200e6, seed
    assert all(10 < len(words) < 2000 for words in refused)
    assert refused
    for run, _ in used[:4]:
        assert_right(run)
    for run, _ in used[4:]:
        jax.eval_shape(run, W, X)


@given(st.one_of(st.text(), st.binary(), st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
).map(json.dumps)))  # fmt: skip
def test_text_that_is_no_plan(text):
    """Whatever the text, loading raises `ValueError`."""
    with pytest.raises(ValueError, match=r"JSON|UTF-8|nested|no jaxsub plan"):
        Plan.from_json(text)


PLACES = {
    ("segments", 0, "start"): ("0", r"Expected `int`, got `str` - at `\$\.segments\[0\]\.start`"),
    ("segments", 0, "stop"): (1.5, r"Expected `int`, got `float` - at `\$\.segments\[0\]\.stop`"),
    ("segments", 0, "more"): (1, r"unknown field `more` - at `\$\.segments\[0\]`"),
    ("loops", 0, "node"): (None, r"Expected `int`, got `null` - at `\$\.node` - at `\$\.loops\[0\]`"),
    ("budget", "n_bytes"): (-1, r"budget\.n_bytes: -1 is not positive"),
    ("budget", "fraction"): (7.5, r"budget\.fraction: 7\.5 is not in"),
    ("prediction", "peak_at"): (-(10**6), r"prediction\.peak_at: -1000000 is below zero"),
    ("prediction", "extra_flops"): ("many", r"at `\$\.prediction\.extra_flops`"),
    ("prediction", "untimed"): ([dict(start=0, stop=10**6, saved=[])], r"prediction\.untimed: 0:1000000 is no run"),
    ("measurement", "temp_bytes"): (10**30, r"integer of at most 64 bits - at `\$\.measurement\.temp_bytes`"),
    ("measurement", "alias_bytes"): (10**9, r"measurement\.alias_bytes: 1000000000 is more than the outputs"),
    ("timeline", "pieces", 0, "stop"): (10**6, r"timeline\.pieces: none can be at steps \d+:1000000"),
    ("timeline", "steps", 0, "phase"): ("sideways", r"timeline\.steps: none can be at"),
    ("timeline", "stage_nodes"): ([0], r"timeline\.stage_nodes: not in order, or not up to"),
    ("slices",): ([dict(start=0, stop=4, value=0, dim=0, count=0)], r"slices\.count: 0 slices"),
    ("n_nodes",): (2**62, r"n_nodes: \d+ is not in 0 \.\. 16777216"),
    ("equations",): ("abc", r"equations: 3 digits, not"),
    ("is_optimal",): (1, r"Expected `bool`, got `int` - at `\$\.is_optimal`"),
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_the_field_that_is_wrong_is_named(place):
    """A plan with one wrong field is refused when it is loaded, by the field's name."""
    data = json.loads(bases()[1].to_json())
    at, (wrong, words) = data, PLACES[place]
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = wrong
    with pytest.raises(ValueError, match=words):
        Plan.from_json(json.dumps(data))


def test_a_file_that_is_no_plan_is_named(tmp_path):
    """What is wrong with a plan's file names the file."""
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"plan\.json: the text is not UTF-8"):
        jaxsub.sublinear(loss, plan=path)


WRONG = {
    "values that are not there": (dict(segments=(Segment(0, 4, (999,)),)), r"segment 0:4 saves values \[999\], of \d+"),
    "values of others": (dict(segments=(Segment(4, 6, (3,)),)), r"segment 4:6 saves values \[3\], of \d+"),
    "values of a nest": (dict(segments=(Segment(0, 6, (3,), (Segment(0, 3),)),)), "has segments or barriers inside"),
    "values round a barrier": (dict(segments=(Segment(0, 6, (3,)),), barriers=(2,)), "has segments or barriers inside"),
    "a loop where none is": (dict(loops=(Loop(1),)), r"equation 1: `tanh` is no `scan`"),
    "a conditional where none is": (dict(loops=(Conditional(LOOP, ()),)), "`scan` is no `cond`"),
    "loops outside": (dict(loops=(Loop(99),)), r"loops are out of order, or outside the \d+ equations"),
    "a loop twice": (dict(loops=(Loop(LOOP), Loop(LOOP))), "loops are out of order"),
    "blocks too long": (dict(loops=(Loop(LOOP, blocks=(99,)),)), r"60 steps do not fall into blocks of \[99\]"),
    "blocks of nothing": (dict(loops=(Loop(LOOP, blocks=(4, 0)),)), "do not fall into blocks"),
    "unrolled steps": (dict(loops=(Loop(LOOP, (4,), is_unrolled=True),)), "unrolled steps have no blocks"),
    "steps kept": (dict(loops=(Loop(LOOP, kept_steps=61),)), "of 60 steps 61 are kept"),
    "values of a step": (
        dict(loops=(Loop(LOOP, is_recomputed=True, inside=Inside(saved=(77,))),)),
        "not among the 8 it makes",
    ),
    "values beside segments": (
        dict(loops=(Loop(LOOP, is_recomputed=True, inside=Inside((Segment(0, 1),), saved=(0,))),)),
        "values are saved beside segments or barriers inside",
    ),
    "values without a region": (
        dict(loops=(Loop(LOOP, inside=Inside(saved=(0,))),)),
        "values are saved inside it, with no region around them",
    ),
    "inside a step": (
        dict(loops=(Loop(LOOP, inside=Inside((Segment(0, 99),))),)),
        "in a step, segment 0:99 does not fit",
    ),
    "barriers inside": (dict(loops=(Loop(LOOP, inside=Inside((), (-1,))),)), "in a step, barriers are out of order"),
    "branches": (dict(loops=(Conditional(COND, (Inside(),)),)), "1 branches, not 2"),
    "inside a branch": (
        dict(loops=(Conditional(COND, (Inside(), Inside((Segment(5, 3),)))),)),
        "branch 1, segment 5:3",
    ),
    "more slices than units": (dict(slices=(Slices(14, 22, 15, 0, 65),), n_nodes=18), "65 slices of an axis of 64"),
    "slices of what is not read": (dict(slices=(Slices(14, 22, 3, 0, 2),), n_nodes=18), "does not read value 3"),
    "fewer equations": (dict(n_nodes=3, segments=(), barriers=(), loops=()), r"it has 3 equations, not \d+"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_plan_is_compared_with_the_function_before_it_is_used(what):
    """What a plan says of equations, values, loops and steps that are not there is refused in plain words."""
    names = [node.primitive for node in program().graph.nodes]
    assert (names[LOOP], names[COND]) == ("scan", "cond")
    changes, words = WRONG[what]
    plan = bases()[0].replace(**(dict(segments=(), barriers=(), loops=(), measurement=None) | changes))
    used = jaxsub.sublinear(loss, plan=plan)
    with pytest.raises(jaxsub.PlanMismatchError, match=f"does not fit it: .*{words}.* make a new one with jaxsub.plan"):
        jax.grad(used)(W, X)


def test_measurements_that_cannot_be_are_refused():
    """Two compiles of one gradient return the same, and a plan that changes nothing needs what the program needs."""
    plan = bases()[0]
    for changes, words in (
        (dict(plain_measurement=jaxsub.measure(lambda w: (w**2).sum(), jnp.ones(3))), "other targets or outputs"),
        (dict(segments=(), barriers=(), loops=()), "changes nothing, and is said to change"),
    ):
        with pytest.raises(jaxsub.PlanMismatchError, match=words):
            require_belonging(program(), plan.replace(**changes))
