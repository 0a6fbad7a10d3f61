"""What loops with choices need, beside what the compiler allocates."""

from functools import cache

import jax.numpy as jnp
import pytest
from jax import lax

from jaxsub.core.budget import Budget
from jaxsub.core.chain import Run
from jaxsub.core.plan import plan_from_runs
from jaxsub.core.simulate import predict
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import trace
from jaxsub.search.verify import Verifier, cut_choices

X = jnp.ones((48, 8, 64))


def wide_xs_and_ys(ws, x):
    """Slices of xs and ys are eight times the carry, and neither are inputs or outputs of the program."""

    def step(h, x):
        h = jnp.tanh(h @ ws[1] + x @ ws[2])
        return h, jnp.sin(x) * jnp.tile(h, (1, 8))

    _, ys = lax.scan(step, jnp.zeros((8, 16)), jnp.sin(x @ ws[0]))
    return jnp.mean(jnp.tanh(ys @ ws[3]) ** 2)


def recurrent(ws, x):
    """Every carry is a result, and xs are an input of the program."""

    def step(h, x):
        z, r = jnp.split(jnp.tanh(x @ ws[0] + h @ ws[1]), 2, -1)
        h = (1 - z) * jnp.tanh(x @ ws[2] + (r * h) @ ws[3]) + z * h
        return h, h

    _, ys = lax.scan(step, jnp.zeros((8, 64)), x)
    return jnp.mean(jnp.tanh(ys @ ws[4]) ** 2)


def layers(ws, x):
    def step(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T), None

    return jnp.mean(lax.scan(step, x, ws)[0] ** 2)


def wave(speeds, x):
    """Of two carried fields a step recomputes from one alone, and what depends on the speeds alone is no step's."""
    damping = jnp.ones_like(x).at[:2].set(0.9)

    def step(fields, _):
        u, before = fields
        bend = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) - 2 * u
        return ((2 * u - before + (0.2 * speeds) ** 2 * jnp.sin(bend)) * damping, u * damping), None

    return jnp.mean(lax.scan(step, (x, x), None, length=48)[0][0] ** 2)


PROGRAMS = {
    "wave": (wave, (jnp.ones((64, 32)), jnp.ones((64, 32)))),
    "wide": (wide_xs_and_ys, ([jnp.ones(s) for s in ((64, 128), (16, 16), (128, 16), (128, 32))], X)),
    "recurrent": (recurrent, ([jnp.ones((64, n)) for n in (128, 128, 64, 64, 64)], X)),
    "layers": (layers, (jnp.ones((24, 64, 64)), jnp.ones((256, 64)))),
}
KINDS = {
    "each step": lambda loop: not loop.blocks and not loop.kept_steps,
    "blocks": lambda loop: loop.blocks and not loop.kept_steps,
    "last steps kept": lambda loop: loop.kept_steps and not loop.blocks,
    "blocks and last steps": lambda loop: loop.kept_steps and loop.blocks,
}


@cache
def needing_least(name):
    """The chain of a program, and of each kind of its loop's options that needs least, with its stage."""
    loss, args = PROGRAMS[name]
    pricer = Pricer(trace(loss, args, {}), get_target("cpu"))
    chain = pricer.chain(cut_choices(pricer.program)[0])
    options = [(item.start, option) for item in chain.items if item.stop == item.start + 1 for option in item.options
               if option.loops and not option.loops[0].is_unrolled]  # fmt: skip
    found = {kind: [(s, o) for s, o in options if is_kind(o.loops[0])] for kind, is_kind in KINDS.items()}
    least = {kind: min(of, key=lambda f: f[1].saved_bytes + f[1].transient_bytes) for kind, of in found.items() if of}
    return pricer, chain, least


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_live_in_a_loop_is_counted(name):
    """Cotangents of ys, gradients of xs that are no results, sums of the parts' own: within a tenth of what is held."""
    pricer, chain, least = needing_least(name)
    for kind, (stage, option) in least.items():
        runs = [Run(s, s + 1, option if s == stage else None) for s in range(len(chain.stages))]
        plan = plan_from_runs(chain, runs, budget=Budget(None), planner="optimal")
        measured = Verifier(pricer).measure(plan).temp_bytes
        assert predict(chain, runs).temp_bytes / measured == pytest.approx(1, abs=0.1), kind


def test_every_kind_of_option_is_looked_at():
    """Which kinds a loop has depends on what they spare there; each is an option of some loop."""
    assert {kind for name in PROGRAMS for kind in needing_least(name)[2]} == set(KINDS)


def test_no_nest_spares_what_a_loop_stacks():
    """On a CPU the zeros that a loop inside a nest stacks values in are live from when the program starts."""
    loss, args = PROGRAMS["recurrent"]
    pricer = Pricer(trace(loss, args, {}), get_target("cpu"))
    chain = pricer.chain(cut_choices(pricer.program)[0])
    stage, option = next((i.start, o) for i in chain.items for o in i.options if o.loops and not o.is_region)
    inside = [Run(s, s + 1, option if s == stage else None) for s in range(stage + 2)]
    runs = [chain.nest(0, stage + 2, inside), *(Run(s, s + 1) for s in range(stage + 2, len(chain.stages)))]
    assert chain.kept_bytes(runs[0]) >= option.saved_bytes
    plan = plan_from_runs(chain, runs, budget=Budget(None), planner="optimal")
    measured = Verifier(pricer).measure(plan).temp_bytes
    assert predict(chain, runs).temp_bytes / measured == pytest.approx(1, abs=0.2)
