"""Loops and slices opened: what each step saves and recomputes, in text, card and picture, against the compiler."""

import re

import jax
import jax.numpy as jnp
import matplotlib as mpl
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxsub
from jaxsub.core.plan import Plan
from jaxsub.show.curves import MOST_MARKS, bars, steps_a_mark
from jaxsub.show.text import plan_words

mpl.use("Agg")
from matplotlib.figure import Figure

STEPS, ROWS, WIDTH, HIDDEN = 12, 256, 32, 128


def layers(weights, x):
    """A residual MLP of many layers, as a scan."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
            x = x + hidden @ w["down"]
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    with jax.named_scope("layers"):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def shapes(steps=STEPS):
    """The arguments of `layers`."""
    up, down = (jax.ShapeDtypeStruct((steps, *s), jnp.float32) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    return {"up": up, "down": down}, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def planned(**options):
    """A plan of the scan."""
    return jaxsub.plan(layers, *shapes(), chunks=False, **options)


@pytest.fixture(scope="module")
def half():
    """Each step recomputed, some of its values saved."""
    return planned(budget=0.4)


@pytest.fixture(scope="module")
def least():
    """As little as one more forward pass buys."""
    return planned(verify=False)


def test_what_steps_save_is_what_the_compiler_allocates(half):
    """What a plan says all steps save is, with what one step works with, what the compiler allocates."""
    (steps,) = half.steps
    assert steps.length == STEPS
    assert steps.stored_bytes == STEPS * steps.saved_bytes
    inside = max(steps.timeline.live_bytes)
    assert steps.stored_bytes < half.measurement.temp_bytes < 1.1 * (steps.stored_bytes + inside)
    (plain,) = planned(budget=1.0).steps
    assert plain.stored_bytes == pytest.approx(half.plain_measurement.temp_bytes, rel=0.15)
    assert plain.recomputed_share == 0


def test_values_that_steps_save_are_named(half):
    """The text names each value that a step saves: its module path, name, shape and line; and bytes in all."""
    text, (steps,) = str(half), half.steps
    assert "mlp: hidden float32[256,128] test_steps.py:" in text
    assert f"carry float32[{ROWS},{WIDTH}]" in text
    assert f"{STEPS} steps: each step recomputed" in " ".join(text.split())
    assert re.search(r"saves +\S+ KiB a step, \S+ MiB in all", text)
    assert {h.label.split(":")[0] for h in steps.saved if "carry" not in h.label} == {"mlp"}


def test_what_steps_recompute_is_named(least):
    """What each step recomputes is named with its share; the shares are those of the plan's own prediction."""
    (steps,) = least.steps
    share = least.prediction.extra_flops / least.prediction.forward_flops
    assert steps.recomputed_share == pytest.approx(share, rel=0.05)
    assert sum(part for _, part in steps.recomputed) == pytest.approx(steps.recomputed_share, rel=0.05)
    assert f"recomputes {steps.recomputed_share:.0%} of a step's forward pass: mlp: dot_general" in " ".join(
        str(least).split()
    )


def test_cheap_work_is_said_to_be_cheap(half):
    """Where what is recomputed is elementwise only, the text says that, not how many equations it is."""
    (steps,) = half.steps
    assert 0 < steps.recomputed_share < 0.01
    assert "recomputes cheap elementwise work only" in str(half)


def test_one_step_can_be_opened(half, least):
    """The timeline inside a step holds what the step saves from its forward to its backward pass, and its peak."""
    for plan in (half, least):
        (steps,) = plan.steps
        timeline = steps.timeline
        turn = [s.phase for s in timeline.steps].index("backward" if steps.recomputed_share < 0.01 else "recompute")
        assert {s.phase for s in timeline.steps[:turn]} <= {"forward", "recompute"}
        made = sum(h.n_bytes * h.count for h in steps.saved if not h.label.startswith("carry"))
        assert timeline.live_bytes[turn] >= made
        assert "Inside one step" in plan.to_html()
        ax = Figure().subplots()
        assert plan.plot(ax, inside=0) is ax
        assert max(p.get_data().values.max() for p in ax.patches if hasattr(p, "get_data")) > 0


def test_the_regions_row_shows_the_steps(least):
    """Each step of a loop is a mark in the regions row, forward and backward, what it recomputes first."""
    found = bars(least)
    assert sum(bar.phase == "forward" for bar in found) == STEPS
    assert sum(bar.phase == "backward" for bar in found) == sum(bar.phase == "recompute" for bar in found) == STEPS
    assert "each mark is a step of a loop" in least.to_html()


def test_pictures_reports_and_frontiers_name_what_steps_save(half):
    """Under a picture the largest values that steps save are named; a step's report and a frontier open loops too."""
    label = half.steps[0].saved[0].label
    assert label in half.plot(Figure().subplots()).get_xlabel()
    (weights, x), loss = shapes(), jaxsub.sublinear(layers)
    found = jaxsub.jit(lambda w, x: jax.grad(loss)(w, x), memory="64MiB").report(weights, x)
    assert "carry float32" in found.sites[0].plan.to_html()
    assert "carry float32" in found.to_html()
    assert all(point.plan.steps for point in jaxsub.frontier(layers, weights, x, points=2).points)


def test_many_steps_share_a_mark():
    """A loop of many steps is drawn with several of them in a mark, and the picture says how many."""
    plan = jaxsub.plan(layers, *shapes(4 * MOST_MARKS), verify=False)
    assert steps_a_mark(plan.steps[0].length) == 4
    assert "each mark is 4 steps of a loop" in plan.to_html()


def test_opened_steps_are_stored(half):
    """JSON brings back the same steps; steps that cannot be are refused by their field."""
    assert Plan.from_json(half.to_json()) == half
    damaged = half.to_json().replace('"kind": "loop"', '"kind": "spiral"')
    with pytest.raises(ValueError, match=r"steps\.kind: 'spiral' is unknown"):
        Plan.from_json(damaged)


def test_blocks_say_what_stands_at_once():
    """A loop in blocks names its blocks; live at once are the blocks' starts and one block's steps."""
    plan = jaxsub.plan(lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x * w), None), x, w)[0].sum(),
                       jnp.ones((256, 64)), jnp.ones((4096, 64)), verify=False, chunks=False)  # fmt: skip
    (steps,), (loop,) = plan.steps, plan.loops
    assert loop.blocks
    assert steps.stored_bytes < 256 * steps.saved_bytes / 2
    assert f"blocks of {' of '.join(map(str, loop.blocks))} steps" in " ".join(str(plan).split())


def test_the_whole_function_in_slices_says_what_one_slice_does():
    """A plan that runs the whole function in slices tells what one slice saves; equations outside are not counted."""

    def loss(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"block_{i}"):
                x = jnp.tanh(x @ w)
        return (x**2).mean()

    plan = jaxsub.plan(loss, [jnp.eye(64)] * 6, jnp.ones((1024, 64)), verify=False, chunks={0: 4})
    text = " ".join(str(plan).split())
    assert "0 of 1" not in text + plan.to_html()
    assert "recompute nothing outside of slices" in text
    assert "whole function: 4 × 256 of 1,024 along axis 0 of `arg1`" in text
    assert re.search(r"\d x 64.0 KiB block_\*: tanh float32\[256,64\] test_steps.py:", text)
    assert "predicted memory inside one slice" in text
    assert "One of 4 slices: whole function" in plan.to_html()
    assert plan_words(plan).startswith("whole function in 4 slices, 0.00 of a forward pass again")
    assert (
        "inside one of 4\nwhole function: saves" in plan.replace(timeline=None).plot(Figure().subplots()).get_xlabel()
    )
