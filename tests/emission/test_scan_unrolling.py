"""Loops written out: steps one after the other compute what they did, and are planned like any other program."""

import jax
import jax.numpy as jnp
import pytest
from loops import assert_same, gradient_flops
from test_loop_cases import PAIRS
from test_scans import (
    WS,
    X,
    backwards,
    carried_through,
    dropping,
    looped,
    plain,
    without_xs,
)

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Inside, Loop, Segment
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.costs.chain_builder import Pricer
from jaxsub.costs.scan_options import loop_choices
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.inner_programs import find_loops


def counted_chain(body, cuts):
    return Pricer(body, get_target("cpu")).chain(cuts)


def written_out(f, args):
    """The program, and the ways to run its loop in which all steps are written out."""
    program = trace(f, args, {}, argnums=(0, 1))
    (node,) = find_loops(program)
    return program, [c for c in loop_choices(program, node, counted_chain) if c.loop.is_unrolled]


def planned(f, program, choice):
    return jaxsub.sublinear(
        f, plan=Plan(program.fingerprint, Budget(), len(program.eqns), loops=(choice.loop,)), argnums=(0, 1)
    )


@pytest.mark.parametrize("f", [backwards, without_xs, dropping, carried_through], ids=lambda f: f.__name__)
def test_steps_written_out_are_the_same_function(f):
    """Values and gradients are those of the plain loop, whatever it holds."""
    assert_same(f, looped(f, Loop(0, is_unrolled=True), WS, X), WS, X)


def test_plans_of_all_steps_are_the_same_function():
    """So are regions in them."""
    x = jnp.tile(X, (4, 1))
    program, found = written_out(plain, (WS, x))
    for choice in (found[0], found[-1]):
        assert choice.loop.inside.segments
        assert_same(plain, planned(plain, program, choice), WS, x)


def test_written_out_a_loop_needs_what_a_program_without_loops_does():
    """At less than one forward pass more, 32 steps need 12 carries; blocks of a loop need 14 at two."""
    _, loop, args, _ = PAIRS["tanh"]
    program, found = written_out(loop, args)
    (node,) = find_loops(program)
    forward, carry_bytes = program.graph.nodes[node].flops, 4 * 256 * 32
    choice = min((c for c in found if c.recompute_flops < forward), key=lambda c: c.transient_bytes)
    g = planned(loop, program, choice)
    more = gradient_flops(g, args) - gradient_flops(loop, args)
    assert more == pytest.approx(choice.recompute_flops, rel=0.05)
    assert more < forward
    assert jaxsub.measure(g, *args, argnums=(0, 1)).temp_bytes < 12 * carry_bytes


def test_long_loops_and_little_gains_are_not_written_out():
    """What would be a long program is left a loop, and so is what as a loop needs hardly more."""
    length = TUNING.unrolled_equations // 2 + 1
    long = jnp.tile(WS[:1], (length, 1, 1)), X
    assert not written_out(plain, long)[1]
    program, found = written_out(plain, (WS, jnp.ones((64, 8))))
    looped_ways = [c for c in loop_choices(program, find_loops(program)[0]) if not c.loop.is_unrolled]
    assert found
    for c in found:
        as_cheap = [w for w in looped_ways if w.recompute_flops <= c.recompute_flops]
        assert not [
            w for w in as_cheap if max(w.kept_bytes / max(c.kept_bytes, 1), w.transient_bytes / c.transient_bytes) < 1.1
        ]


def test_inputs_that_are_cut_out_before_any_step_count():
    """A CPU cuts out the inputs of all steps first where products read them before the state: blocks need less."""
    w, xs = jnp.eye(64), jnp.ones((30, 32, 64))

    def recurrent(w, xs):
        return jnp.mean(jax.lax.scan(lambda h, x: (jnp.tanh(x @ w + h @ w), None), xs[0], xs)[0])

    def beside_the_state(w, xs):
        return jnp.mean(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + h * x), None), xs[0], xs)[0])

    early = [min(c.transient_bytes for c in written_out(f, (w, xs))[1]) for f in (recurrent, beside_the_state)]
    assert early[0] >= xs.nbytes > early[1]
    budget = 4 * xs.nbytes // 5
    plan = jaxsub.plan(recurrent, w, xs, budget=budget, chunks=False, cache=False, progress=False)
    assert not plan.loops[0].is_unrolled


def test_a_long_loop_that_is_written_out_has_few_stages():
    """Planning takes time by the cube of the stages: neighbours are merged, and plans stay within what they say."""
    w, x = jnp.stack([0.1 * jnp.eye(16)] * 120), jnp.ones((64, 16))
    stages = []

    def counted(body, cuts):
        stages.append(len(cuts) - 1)
        return counted_chain(body, cuts)

    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None), x, w)[0])

    program = trace(loss, (w, x), {})
    assert any(c.loop.is_unrolled for c in loop_choices(program, find_loops(program)[0], counted))
    assert max(stages) == TUNING.unrolled_stages


def test_a_plan_that_unrolls_a_long_loop_is_refused():
    """As one is that was changed by hand: the program would be too long."""
    length = TUNING.unrolled_equations // 2 + 1
    long = jnp.tile(WS[:1], (length, 1, 1)), X
    program = trace(plain, long, {}, argnums=(0, 1))
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), loops=(Loop(*find_loops(program), is_unrolled=True),))
    with pytest.raises(jaxsub.PlanMismatchError, match=rf"{length} steps of \d+ equations are too many to be unrolled"):
        jaxsub.sublinear(plain, plan=plan, argnums=(0, 1))(*long)


def test_a_plan_says_what_is_written_out():
    """In words, and when it is stored and loaded."""
    plan = Plan("f", Budget(), 9, loops=(Loop(3, is_unrolled=True, inside=Inside((Segment(0, 4),))),))
    assert Plan.from_json(plan.to_json()) == plan
    assert "unrolled; 1 regions" in str(plan)
