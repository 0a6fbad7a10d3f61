"""Plans inside equations: the branches of conditionals, and deep bodies of loops."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax, random
from jax.experimental import io_callback
from jaxprs import by_result, equations, regions
from loops import assert_same, gradient_flops

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Chain, Item, Option, Stage
from jaxsub.core.decisions import Conditional, Inside, Loop, Segment, walk
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.costs.body_options import body_plans
from jaxsub.costs.chain_builder import Pricer
from jaxsub.costs.cond_options import branch_choices
from jaxsub.costs.scan_options import loop_choices
from jaxsub.devices.targets import get_target
from jaxsub.emission.scans import body_program, branch_programs
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.inner_programs import find_conditionals, find_loops, find_nested

WS = random.normal(random.key(0), (6, 8, 8)) / 3
X = random.normal(random.key(1), (16, 8))


def deep(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def one_deep_branch(ws, x):
    return jnp.mean(lax.cond(x[0, 0] > 0, lambda x: deep(ws, x), lambda x: jnp.sin(x @ ws[0]), x) ** 2)


def the_other_branch(ws, x):
    return one_deep_branch(ws, x * -jnp.sign(x[0, 0]))


def three_branches(ws, x):
    branches = [lambda x, n: deep(ws, x) * n, lambda x, n: x, lambda x, n: deep(ws, jnp.sin(x)) + n]
    return jnp.mean(lax.switch(2 * jnp.argmax(x[0]) % 3, branches, x, jnp.int32(3)) ** 2)


def closed_over(ws, x):
    """Branches that close over values computed outside, and return integers and Booleans too."""
    y, flag = jnp.sin(x), x[1, 1] > 0
    x, n, same = lax.cond(x[0, 0] != 0, lambda x: (deep(ws, x) * y, 2, flag), lambda x: (y, 3, ~flag), x)
    return jnp.mean(jnp.where(same, x, y) ** 2) * n


def in_a_loop(ws, x):
    def step(x, i):
        return lax.cond(i % 2 == 0, lambda x: deep(ws, x), lambda x: jnp.cos(x @ ws[0]), x), None

    return jnp.mean(lax.scan(step, x, jnp.arange(5))[0] ** 2)


CONDITIONALS = (one_deep_branch, the_other_branch, three_branches, closed_over)
HALVES = Inside((Segment(0, 4), Segment(4, 8)), (4, 8))


def inside_of(body):
    """Two regions and two barriers, where the body is long enough."""
    return HALVES if len(body.eqns) > 8 else Inside()


def by_hand(f, *args):
    """The function with regions inside its branches, those of a loop's body too."""
    program = trace(f, args, {}, argnums=(0, 1))
    ways = tuple(branches_by_hand(program))
    for node in find_loops(program):
        ways += (Loop(node, (2,), True, inside=Inside(ways=tuple(branches_by_hand(body_program(program, node))))),)
    assert ways
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), loops=ways)
    return jaxsub.sublinear(f, plan=plan, argnums=(0, 1))


def branches_by_hand(program):
    for node in find_conditionals(program):
        way = Conditional(node, tuple(inside_of(b) for b in branch_programs(program, node)))
        assert HALVES in way.branches
        yield way


@pytest.mark.parametrize("f", [*CONDITIONALS, in_a_loop], ids=lambda f: f.__name__)
def test_regions_in_branches_are_the_same_function(f):
    """Values and gradients are those of the plain conditional, whichever branch runs."""
    assert_same(f, by_hand(f, WS, X), WS, X)


@pytest.mark.parametrize("transform", ["jvp", "vmap"])
def test_planned_branches_compose(transform):
    """Forward mode, and batching, which runs all branches, go through regions in branches."""
    f, g = one_deep_branch, by_hand(one_deep_branch, WS, X)
    transformed = {
        "jvp": lambda f: jax.jvp(f, (WS, X), (WS * 0.1, X * 0.2)),
        "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0))(WS, jnp.stack([X, -X])),
    }[transform]
    for a, b in zip(jax.tree.leaves(transformed(g)), jax.tree.leaves(transformed(f)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_regions_in_branches_are_there():
    """The branch that is planned holds two regions, the other none."""

    def counts(f):
        (cond,) = (e for e in equations(jax.make_jaxpr(f)(WS, X)) if e.primitive.name == "cond")
        return [len(list(regions(branch))) for branch in cond.params["branches"]]

    assert counts(by_hand(one_deep_branch, WS, X)) == [0, 2]
    assert counts(one_deep_branch) == [0, 0]


def test_conditionals_that_stay_as_they_are():
    """Shallow branches, branches with effects and conditionals without a gradient are left alone."""

    def f(ws, x):
        x = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        x = lax.cond(x[0, 0] > 0, lambda x: io_callback(lambda: None, None) or deep(ws, x), jnp.cos, x)
        still = lax.stop_gradient(x)
        fixed = lax.stop_gradient(ws)
        return jnp.mean(x * lax.cond(x[0, 0] > 0, lambda x: deep(fixed, x), jnp.cos, still))

    program = trace(f, (WS, X), {}, argnums=(0, 1))
    assert sum(node.primitive == "cond" for node in program.graph.nodes) == 3
    assert find_nested(program) == ()


def test_branches_are_offered_for_less_and_less_memory():
    """Of the ways to run a conditional each keeps less, needs less or runs less again than any other of its form."""
    program = trace(three_branches, (WS, X), {}, argnums=(0, 1))
    (node,) = find_conditionals(program)
    pricer = Pricer(program, get_target(None))
    found = branch_choices(program, node, pricer._body_chain)
    assert {c.is_region for c in found} == {False, True}
    assert all(c.loop.branches[1] == Inside() for c in found)
    kept = [c.kept_bytes for c in found if not c.is_region]
    assert min(kept) < max(kept)


def test_a_plan_in_a_region_saves_values():
    """In a recomputed step its stages' regions save values, where JAX saves them in nests."""

    def f(ws, x):
        def step(x, w):
            for _ in range(5):
                x = x + jnp.tanh(jnp.tanh(x @ w) @ w.T)
            return x, None

        return jnp.mean(lax.scan(step, x, ws)[0] ** 2)

    program = trace(f, (WS, jnp.ones((256, 8))), {}, argnums=(0, 1))
    pricer = Pricer(program, get_target(None))
    body = body_program(program, *find_loops(program))
    plans = [plan for plan in body_plans(body, pricer._body_chain) if plan.is_region]
    saving = [plan for plan in plans if any(segment.saved for segment in walk(plan.inside.segments))]
    assert bool(saving) == compat.saves_in_nests()
    again = [plan.recompute_flops for plan in plans]
    assert min(again) < max(again)


def test_a_plan_with_branches_is_stored_shown_and_loaded():
    """JSON brings back the same branches; the text names each."""
    way = Conditional(3, (Inside(), Inside((Segment(0, 4, (2,)),), (4,), (Loop(5, (8,)),))))
    plan = Plan("f", Budget(), 9, loops=(way,))
    assert Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "branch 0: as it is" in text
    assert "branch 1: 1 regions, 1 values saved, 1 barriers" in text
    assert "blocks of 8 steps" in text


def test_a_deep_branch_is_planned():
    """A branch of ten layers needs less than half of what it did, and nobody notices which branch runs."""

    def f(ws, x):
        branches = [lambda x: deep(ws, x), lambda x: jnp.sin(x @ ws[0])]
        return jnp.mean(lax.switch((x[0, 0] < 0).astype(int), branches, x) ** 2)

    ws, x = random.normal(random.key(0), (10, 16, 16)) / 4, jnp.full((256, 16), 0.5)
    plain = jaxsub.measure(f, ws, x, argnums=(0, 1)).temp_bytes
    g = jaxsub.sublinear(f, budget=0.45, argnums=(0, 1), progress=False)
    assert any(isinstance(way, Conditional) for way in g.plan(ws, x).loops)
    assert jaxsub.measure(g, ws, x, argnums=(0, 1)).temp_bytes <= 0.45 * plain
    assert_same(f, g, ws, x)
    assert_same(f, g, ws, -x)


def test_a_loop_that_is_all_of_a_branch_is_planned():
    """Loops of solvers are nested so: blocks of steps in a conditional, steps in another."""

    def steps(ws, x):
        return lax.scan(lambda x, _: (x + 0.1 * deep(ws, x), None), x, None, length=6)[0]

    def f(ws, x):
        def block(x, i):
            return lax.cond(i < 4, lambda x: steps(ws, x), lambda x: x, x), None

        return jnp.mean(lax.scan(block, x, jnp.arange(6))[0] ** 2)

    ws, x = random.normal(random.key(0), (6, 32, 32)) / 6, random.normal(random.key(1), (128, 32))
    budget = jaxsub.measure(f, ws, x).temp_bytes * 8 // 100
    planned = jaxsub.sublinear(f, budget=budget, chunks=False, cache=False, progress=False)
    assert planned.plan(ws, x).measurement.temp_bytes <= budget
    assert_same(f, planned, ws, x)


def test_loops_are_found_by_what_calls_in_their_bodies_make():
    """What a call returns may be small, as the steps of an inner training are."""

    @jax.jit
    def fitted(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    def f(w, x):
        w = lax.scan(lambda w, i: (lax.cond(i < 9, lambda w: fitted(w, x), lambda w: w, w), None), w, jnp.arange(8))[0]
        return jnp.mean(jnp.sin(jnp.outer(x @ w, w)) ** 2)

    assert find_loops(trace(f, (jnp.ones(64), jnp.ones((1024, 64))), {}, argnums=0))


def kinds_of_layers(ws, x):
    """A scan over layers of three kinds, two of them with no more than a few products."""

    def dense(x, w):
        return x + jax.nn.gelu(x @ w) @ w.T

    def attention(x, w):
        h = x @ w
        return x + jax.nn.softmax(h @ h.T / 8) @ h @ w.T

    def layer(x, of_layer):
        w, kind = of_layer
        return lax.switch(kind, [dense, attention, lambda x, w: x], x, w), None

    return jnp.mean(lax.scan(layer, x, (ws, jnp.arange(len(ws)) % 3))[0] ** 2)


KINDS = random.normal(random.key(0), (9, 32, 128)) / 24, random.normal(random.key(1), (256, 32))


@cache
def needed_by_kinds():
    """What the layers of three kinds need as they are."""
    return jaxsub.measure(kinds_of_layers, *KINDS).temp_bytes


def test_regions_in_small_branches_save_their_products():
    """Half of the memory takes no product a second time: elementwise work of two products is enough."""
    budget = needed_by_kinds() // 2
    f = jaxsub.sublinear(kinds_of_layers, budget=budget, progress=False)
    assert recomputed_share(f.plan(*KINDS)) < 0.01
    assert jaxsub.measure(f, *KINDS).temp_bytes <= budget
    assert_same(kinds_of_layers, f, *KINDS)


@pytest.mark.parametrize("budget", [0.5, 0.25])
def test_what_any_branch_keeps_is_counted(budget):
    """Residuals of all branches are there whichever runs: what is predicted with plans in branches is near it."""
    plan = jaxsub.plan(kinds_of_layers, *KINDS, budget=int(budget * needed_by_kinds()), verify=False, progress=False)
    measured = jaxsub.measure(jaxsub.sublinear(kinds_of_layers, plan=plan), *KINDS).temp_bytes
    assert any(isinstance(way, Conditional) for loop in plan.loops for way in loop.inside.ways)
    assert plan.prediction.temp_bytes == pytest.approx(measured, rel=0.2)


def test_a_step_may_save_what_its_branches_multiply():
    """A region around a step with experts saves their products too, as `jax.checkpoint(step, dots_saveable)` does."""
    keys = random.split(random.key(0), 6)
    up, down = random.normal(keys[0], (2, 32, 128)) / 6, random.normal(keys[1], (2, 128, 32)) / 11
    args = (up, down), random.normal(keys[2], (24, 64, 32)), jnp.arange(24) % 3

    def loss(weights, rows, which, wrap=lambda step: step):
        up, down = weights
        experts = [lambda h, i=i: h + jax.nn.gelu(h @ up[i]) @ down[i] for i in range(2)] + [lambda h: h]

        def step(h, x):
            h = lax.switch(x[1], experts, jnp.tanh(h @ jnp.eye(32) + x[0]))
            h = lax.cond(jnp.mean(h) > 0, jnp.sin, lambda h: h / (1 + jnp.abs(h)), h)
            return h, jnp.mean(h**2)

        return jnp.mean(lax.scan(wrap(step), jnp.zeros((64, 32)), (rows, which))[1])

    by_hand = partial(loss, wrap=partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable))
    budget = int(1.05 * jaxsub.measure(by_hand, *args, argnums=(0, 1)).temp_bytes)
    g = jaxsub.sublinear(loss, budget=budget, argnums=(0, 1), progress=False, cache=False)
    plan = g.plan(*args)
    assert recomputed_share(plan) < 0.02
    assert jaxsub.measure(g, *args, argnums=(0, 1)).temp_bytes <= budget
    assert gradient_flops(g, args) < 1.01 * gradient_flops(by_hand, args)
    assert_same(loss, g, *args)


def recurrent(ws, x):
    """Layers of a recurrence over rows and a few products."""

    def layer(x, w):
        return deep(w[1:], lax.scan(lambda h, row: (jnp.tanh(h @ w[0] + row),) * 2, x[0] * 0, x)[1]), None

    return jnp.mean(lax.scan(layer, x, jnp.stack([ws, ws, ws]))[0] ** 2)


@by_result
def test_a_loop_inside_a_body_may_be_all_that_runs_otherwise(monkeypatch):
    """Where a step's inner loop saves one value a row less is kept, nothing runs again, and nothing else keeps less."""
    program = trace(recurrent, (WS, random.normal(random.key(2), (256, 8))), {}, argnums=(0, 1))
    (node,) = find_loops(program)

    def free():
        ways = loop_choices(program, node)
        return [c for c in ways if c.recompute_flops < 0.01 * program.graph.nodes[node].flops]

    found = min(free(), key=lambda way: way.transient_bytes)
    assert found.loop.inside.ways
    assert not found.loop.inside.segments
    monkeypatch.setattr("jaxsub.costs.scan_options._inner_loops", lambda *_: [()])
    assert all(found.transient_bytes < way.transient_bytes for way in free())


def layers(ws, x):
    return jnp.mean(lax.scan(lambda x, ws: (deep(ws, x), None), x, ws)[0] ** 2)


def test_a_deep_body_is_planned_inside():
    """A loop of three steps of ten layers fits where running whole steps again does not."""
    args = (jnp.zeros((3, 10, 16, 16)) + jnp.eye(16), jnp.ones((256, 16)))
    program = trace(layers, args, {}, argnums=(0, 1))
    (node,) = find_loops(program)
    whole = Plan(program.fingerprint, Budget(), len(program.eqns), loops=(Loop(node, (), True),))
    steps_again = jaxsub.sublinear(layers, plan=whole, argnums=(0, 1))
    budget = int(0.8 * jaxsub.measure(steps_again, *args, argnums=(0, 1)).temp_bytes)
    g = jaxsub.sublinear(layers, budget=budget, argnums=(0, 1), progress=False)
    (way,) = g.plan(*args).loops
    assert way.inside.segments
    assert jaxsub.measure(g, *args, argnums=(0, 1)).temp_bytes <= budget
    assert gradient_flops(g, args) < 1.7 * gradient_flops(layers, args)
    assert_same(layers, g, *args)


def test_a_loop_of_wide_conditionals_is_not_written_out():
    """Every branch is compiled as often as a loop's steps are: of six branches and sixteen steps that is long."""

    def f(ws, x):
        branches = [lambda x, w=w: jax.nn.gelu(x @ w) @ w.T for w in ws]
        return jnp.mean(lax.map(lambda rows: lax.switch(jnp.argmax(rows[0]) % 6, branches, rows), x) ** 2)

    args = jnp.ones((6, 16, 64)), jnp.ones((16, 32, 16))
    program = trace(f, args, {}, argnums=(0,))
    (node,) = find_loops(program)
    pricer = Pricer(program, get_target(None))
    assert not any(choice.loop.is_unrolled for choice in loop_choices(program, node, pricer._body_chain))


def experts(ws, x, region=lambda row: row):
    """Layers that send each row of a batch to one of four experts, in a loop over rows."""
    up, down, router = ws
    branches = [lambda x, e=e: jax.nn.gelu(x @ up[e]) @ down[e] for e in range(4)]

    def row(x):
        return x + lax.switch(jnp.argmax(x[0] @ router), branches, x)

    for _ in range(2):
        x = lax.map(region(row), x)
    return jnp.mean(x**2)


EXPERTS = ((random.normal(random.key(0), (4, 32, 128)) / 6, random.normal(random.key(1), (4, 128, 32)) / 11,
            random.normal(random.key(2), (32, 4))), random.normal(random.key(3), (16, 32, 32)))  # fmt: skip


def test_experts_need_no_more_than_a_region_of_each_step_that_saves_products():
    """What `jax.checkpoint(step, policy=dots_saveable)` reaches is a budget that recomputes no product."""

    by_hand = partial(experts, region=partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable))
    budget = int(1.05 * jaxsub.measure(by_hand, *EXPERTS).temp_bytes)
    assert budget < 0.5 * jaxsub.measure(experts, *EXPERTS).temp_bytes
    f = jaxsub.sublinear(experts, budget=budget, progress=False)
    assert recomputed_share(f.plan(*EXPERTS)) < 0.01
    assert jaxsub.measure(f, *EXPERTS).temp_bytes <= budget
    assert_same(experts, f, *EXPERTS)


def test_what_runs_often_is_planned_for_what_it_keeps():
    """An option that keeps a tenth and allocates more at once than the plain body is worth it where many steps keep."""
    program = trace(deep_body, (WS, X), {}, argnums=(0, 1))
    sizes = {"transient_bytes": 100, "keep_bytes": 100, "keep_transient_bytes": 100}
    stages = tuple(Stage(s, s + 1, tail_flops=1.0 - s, **sizes) for s in range(2))
    plain, sparing = Option((), 100, 100, 0.0, is_region=False), Option((), 10, 350, 0.01, is_region=False)
    chain = Chain(stages, (Item(0, 1, (plain, sparing)), Item(1, 2, (plain,))), ())
    once, often = (body_plans(program, lambda *_: chain, times=times) for times in (1, 16))
    kept = [min(p.kept_bytes for p in plans if p.recompute_flops < 0.1 and not p.is_region) for plans in (once, often)]
    assert kept == [100, 10]


def deep_body(ws, x):
    return jnp.mean(deep(ws, x) ** 2)
