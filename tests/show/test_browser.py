"""Cards in a real browser: every kind of card laid out by headless Chromium at 400 and 1,000 px, light and dark."""

import html
import json
import re
import shutil
import subprocess
from itertools import pairwise, product
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from test_show import PLANS

import jaxsub

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to lay the cards out"),
    pytest.mark.once,
]

PROBE = Path(__file__).with_name("probe.js").read_text("utf-8")
TOO_WIDE = (
    '<html lang="en"><div class="jaxsub"><table><tr><td style="white-space:nowrap">'
    + "wide " * 300
    + "</td></table></div>"
)


def layers(ws, x):
    """A chain of blocks with names that are alike."""
    for i, w in enumerate(ws):
        with jax.named_scope(f"encoder/block_{i}/feed_forward"):
            x = x + jnp.tanh(x @ w) @ w.T
    return (x**2).mean()


def scanned(w, x):
    """The same as a loop."""
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, w)[0] ** 2)


def things():
    """One of everything that has a card."""
    ws, x = [jnp.eye(32, 128)] * 8, jnp.ones((256, 32))
    optimiser = optax.adam(1e-3)
    loss = jaxsub.sublinear(layers)

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimiser.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    plan = jaxsub.plan(layers, ws, x, budget=0.5, chunks=False)
    yield "plan", plan
    yield "loop", jaxsub.plan(scanned, jnp.ones((120, 32, 128)), x, verify=False)
    yield "slices", jaxsub.plan(layers, ws, x, verify=False, chunks={0: 4})
    yield "frontier", jaxsub.frontier(layers, ws, x, points=5, budget="1MiB")
    yield "explanation", jaxsub.explain(layers, ws, x)
    yield "residuals", jaxsub.residuals(layers, ws, x)
    yield "measurement", jaxsub.measure(layers, ws, x)
    planned = jaxsub.jit(step, memory="64MiB", donate_argnums=(0, 1))
    yield "report", planned.report(ws, optimiser.init(ws), x)
    yield "step plan", planned.plan(ws, optimiser.init(ws), x)
    yield "difference", plan.diff(jaxsub.plan(layers, ws, x, verify=False, chunks=False))
    yield "diagnosis", jaxsub.doctor(step, ws, optimiser.init(ws), x, verify=False)
    yield from PLANS.items()


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """What the browser says of every card, by name, theme and width."""
    frames = []
    for name, page in [*((name, thing.to_html()) for name, thing in things()), ("too wide", TOO_WIDE)]:
        for theme, width in product(("light", "dark"), (400, 1000)):
            themed = html.escape(page.replace("<html ", f'<html data-theme="{theme}" '))
            style = f"width:{width}px;height:900px;border:0"
            frames.append(f'<iframe name="{name}|{theme}|{width}" srcdoc="{themed}" style="{style}"></iframe>')
    path = tmp_path_factory.mktemp("browser") / "cards.html"
    body = f'<script>{PROBE}</script><pre id="out"></pre>{"".join(frames)}'
    path.write_text(f'<!DOCTYPE html><meta charset="utf-8">{body}', "utf-8")
    profile = tmp_path_factory.mktemp("profile")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    return {tuple(each["name"].split("|")): each for each in found}


def test_no_card_is_wider_than_its_room(laid_out):
    """At 400 px and at 1,000 px nothing of any card is cut off or scrolls sideways, everything unfolded."""
    cards = {key: each for key, each in laid_out.items() if key[0] != "too wide"}
    assert len(cards) == 4 * (11 + len(PLANS))
    assert {key: each["wide"] for key, each in cards.items() if each["wide"]} == {}
    assert [key for key, each in cards.items() if each["width"] > each["room"]] == []


def test_a_card_that_is_too_wide_is_found(laid_out):
    """The check above fails for a table that does not break its lines."""
    found = laid_out["too wide", "light", "1000"]
    assert found["wide"]
    assert found["width"] > found["room"]


def test_cards_are_read_in_light_and_dark(laid_out):
    """A card takes the theme of the page around it, and its text keeps its contrast."""
    for (name, theme, _), each in laid_out.items():
        if name != "too wide":
            assert each["dark"] == (theme == "dark")
            assert each["contrast"] > 7


def test_the_theme_and_the_width_change_no_content(laid_out):
    """A card has the same tiles, charts, rows and words in every theme and width."""
    for name in {key[0] for key in laid_out}:
        found = [each for key, each in laid_out.items() if key[0] == name]
        assert len({(*each["parts"], each["text"]) for each in found}) == 1


def test_labels_of_a_chart_are_apart(laid_out):
    """No two ticks overlap, and the peak's label stands inside its chart, above the peak."""
    for key, each in laid_out.items():
        for ticks in each["ticks"]:
            tops = sorted((top, bottom) for _, top, _, bottom in ticks)
            assert all(a[1] <= b[0] + 1 for a, b in pairwise(tops)), key
        for area, peak, label in each["peaks"]:
            assert area[0] - 1 <= label[0] < label[2] <= area[2] + 1, key
            assert area[1] - 1 <= label[1], key
            assert label[3] <= peak[1] + 5, key


def test_no_phase_has_the_colour_of_the_curve(laid_out):
    """Forward, recomputed and backward are told apart, and from the curve."""
    for theme in ("light", "dark"):
        curve, *phases = laid_out["plan", theme, "1000"]["fills"]
        assert len(set(phases)) == 3
        assert curve not in phases


def test_the_pointer_says_what_is_live(laid_out):
    """With scripts, the moment under the pointer replaces the peak's."""
    assert laid_out["plan", "light", "1000"]["moved"]
    assert laid_out["loop", "dark", "400"]["moved"]


def test_what_cards_say(laid_out):
    """Each kind of card has its own parts: tiles, tables and charts."""
    parts = {name: tuple(each["parts"][:2]) for (name, _, width), each in laid_out.items() if width == "1000"}
    assert parts["plan"] == (4, 1)
    assert parts["loop"] == (4, 2)
    assert parts["report"][0] >= 4
    assert (parts["frontier"], parts["explanation"], parts["residuals"]) == ((0, 0), (3, 0), (0, 0))
    assert "encoder/block_*/feed_forward" in laid_out["plan", "light", "1000"]["text"]
    assert "Inside one step" in laid_out["loop", "light", "400"]["text"]
