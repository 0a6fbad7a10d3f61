"""What ways to run loops cost: counted, then corrected by what the compiler said of them and their likes."""

import jax
import jax.numpy as jnp
import pytest

from jaxsub.core.decisions import Loop
from jaxsub.costs.chain_builder import Pricer
from jaxsub.costs.loop_costs import WayBytes, to_ask, way_bytes
from jaxsub.costs.scan_options import LoopChoice
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import trace
from jaxsub.planners import get
from jaxsub.search.candidates import settle
from jaxsub.search.verify import Verifier, cut_choices

STEPS = LoopChoice(Loop(3, is_recomputed=True), 10, 30, 4.0)
BLOCKS = tuple(LoopChoice(Loop(3, (size,)), kept, kept + 20, 8.0) for size, kept in ((4, 8), (8, 4)))
WAYS = (STEPS, *BLOCKS)


def said(**found):
    """A compiler that was asked of blocks of 4 only."""
    return lambda what, way: found.get(what) if way == Loop(0, (4,)) else None


def test_what_nobody_measured_is_counted():
    """Without a compiler the counted bytes hold, and nothing stands from the start."""
    assert way_bytes(WAYS, STEPS, said()) == WayBytes(10, 30, 0)


def test_what_was_measured_holds():
    """What the compiler said of a way is what it costs; it keeps no more than it allocates."""
    assert way_bytes(WAYS, BLOCKS[0], said(keep=16, loop=26, hoisted=7)) == WayBytes(16, 26, 7)
    assert way_bytes(WAYS, BLOCKS[0], said(keep=40, loop=26)) == WayBytes(26, 26, 0)


def test_likes_are_scaled_and_others_are_not():
    """Twice the kept and half the rest of blocks of 4 are twice and half of blocks of 8, and say nothing of steps."""
    known = said(keep=16, loop=26, hoisted=7)
    assert way_bytes(WAYS, BLOCKS[1], known) == WayBytes(8, 18, 7)
    assert way_bytes(WAYS, STEPS, known) == WayBytes(10, 30, 0)


def test_the_nearest_like_says_most():
    """Of likes that were measured those with the same blocks count, then the nearest; copies are not multiplied."""
    tailed = [LoopChoice(Loop(3, (4,), kept_steps=k), 10 * k, 10 * k + 20, 9.0 - k) for k in (1, 2, 3)]
    larger = LoopChoice(Loop(3, (8,), kept_steps=3), 30, 50, 7.0)
    known = {(4, 1): 15, (4, 3): 36, (8, 3): 70}
    ways = (*tailed, larger)

    def found(what, way):
        return known.get((*way.blocks, way.kept_steps)) if what == "keep" else None

    assert way_bytes(ways, tailed[1], found).kept == min(20 + 5, 20 * 15 // 10)
    assert way_bytes(ways, LoopChoice(Loop(3, (2,), kept_steps=3), 60, 80, 5.0), found).kept == 60 + 6


def test_rivals_are_asked_for_once():
    """A way that was never measured is asked for with those unlike it that run less again; a measured one alone."""
    used, steps = Loop(0, (4,)), Loop(0, is_recomputed=True)
    asked = set(to_ask(WAYS, used, said(), is_region=False))
    assert asked == {("keep", used), ("loop", used), ("loop", steps)}
    assert set(to_ask(WAYS, used, said(loop=26), is_region=False)) == {("keep", used), ("loop", used)}
    others = Loop(0, (8,))
    assert set(to_ask(WAYS, others, said(loop=26), is_region=False)) - asked == {("keep", others), ("loop", others)}


def test_what_is_used_in_a_region_keeps_nothing():
    """In a region what stands from the program's start is asked for, and not what the way keeps."""
    assert {what for what, _ in to_ask(WAYS, Loop(0, (4,)), said(loop=26), is_region=True)} == {"loop", "hoisted"}


def test_less_for_loops_is_less_in_truth(tmp_path):
    """Four loops one after another: plans within less and less never need more, as the compiler counts.

    A loop that a region runs again has zeros of its own to fill, and the compiler makes them when the program starts.
    """

    def loss(ws, x):
        for w in ws:
            x = jax.lax.scan(lambda c, _, w=w: (jnp.tanh(c @ w) + 0.1 * c, None), x, None, length=4)[0]
        return jnp.mean(x**2)

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    program = trace(loss, ([square] * 4, jax.ShapeDtypeStruct((512, 16), jnp.float32)), {}, argnums=0)
    pricer = Pricer(program, get_target("cpu"))
    verifier, needed = Verifier(pricer), []
    plain_bytes = verifier.plain().measurement.temp_bytes
    for share in (0.7, 0.5, 0.35):
        plan = settle(pricer, cut_choices(program)[0], get("auto"), int(share * plain_bytes))
        needed.append(verifier.measure(plan).temp_bytes)
        assert plan.prediction.temp_bytes == pytest.approx(needed[-1], rel=0.3)
    assert needed == sorted(needed, reverse=True)
    assert needed[-1] < needed[0]
