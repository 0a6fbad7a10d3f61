"""Values saved by name inside loops and conditionals: by the innermost region around, and by that one alone."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax, random
from jaxprs import equations, regions
from loops import assert_same, gradient_flops

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Conditional, Inside, Loop, Segment, depth_of, is_saving, saving_in_nests
from jaxsub.core.plan import Plan
from jaxsub.emission.scans import body_program, branch_programs
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.inner_programs import find_nested

W = random.normal(random.key(0), (16, 64)) / 4
X = random.normal(random.key(1), (8, 16))


def layer(w, x):
    return x + jax.nn.gelu(x @ w) @ w.T


def chosen(w, x):
    return jnp.mean(lax.switch(jnp.argmax(x[0]) % 3, [layer, lambda w, x: x, lambda w, x: jnp.sin(x @ w) @ w.T], w, x))


def chosen_twice(w, x):
    def inner(w, x):
        return lax.cond(x[0, 0] > -9, layer, lambda w, x: x, w, x)

    return jnp.mean(lax.cond(x[0, 1] > -9, inner, lambda w, x: x * 2, w, x))


def products(program):
    """The offsets of what products make."""
    first = program.graph.first_value(0)
    return tuple(v - first for node in program.graph.nodes if node.is_costly and node.primitive != "cond"
                 for v in node.outputs)  # fmt: skip


def saving_products(program, is_region, is_wrapped):
    """All conditionals of a program, saving what products in their branches make."""
    for node in find_nested(program):
        insides = []
        for branch in branch_programs(program, node):
            saved = products(branch)
            segments = (Segment(0, len(branch.eqns)),) if saved and is_wrapped else ()
            insides.append(Inside(segments, (), tuple(saving_products(branch, False, is_wrapped)), saved))
        yield Conditional(node, tuple(insides), is_region)


def planned(f, ways, *args):
    program = trace(f, args, {}, argnums=(0, 1))
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), loops=tuple(ways(program)))
    assert Plan.from_json(plan.to_json()) == plan
    return jaxsub.sublinear(f, plan=plan, argnums=(0, 1))


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("f", [chosen, chosen_twice])
def test_a_region_saves_values_of_branches(f, is_wrapped):
    """Values and gradients are the plain ones; no product is executed a second time, as in a region that saves none."""
    if is_wrapped and not compat.saves_in_nests():
        pytest.skip("jax_remat3 recomputes what regions inside regions save")
    saving = planned(f, lambda program: saving_products(program, True, is_wrapped), W, X)
    nothing = planned(f, lambda p: [Conditional(n, (Inside(),) * len(branch_programs(p, n)), True)
                                    for n in find_nested(p)], W, X)  # fmt: skip
    assert_same(f, saving, W, X)
    for transform in (lambda f: jax.jvp(f, (W, X), (W * 0.1, X)),
                      lambda f: jax.vmap(jax.grad(f), (None, 0))(W, jnp.stack([X, -X]))):  # fmt: skip
        chex.assert_trees_all_close(transform(saving), transform(f), rtol=1e-4, atol=1e-5)
    plain = gradient_flops(f, (W, X))
    product = 2 * 8 * 16 * 64
    assert gradient_flops(saving, (W, X)) - plain < product / 2
    assert gradient_flops(nothing, (W, X)) - plain > product / 2


def nested_loops(w, x):
    def outer(x, w):
        return lax.scan(lambda h, _: (jnp.sin(h @ w @ w.T), None), jnp.tanh(x @ w @ w.T), None, 4)[0], None

    w = w / 4  # each step contracts: rounding errors do not grow
    return jnp.mean(lax.scan(outer, x, jnp.stack([w, w * 0.9]))[0])


@pytest.mark.parametrize("inner_saved", [(), (0,)])
def test_a_step_that_saves_values_runs_its_loops_as_planned(inner_saved):
    """A step's inner loop keeps its own regions where the step saves values by name, and names of the two differ."""
    if inner_saved and not compat.saves_in_nests():
        pytest.skip("jax_remat3 recomputes what regions inside regions save")

    def ways(program):
        (node,) = find_nested(program)
        body = body_program(program, node)
        (at,) = find_nested(body)
        first = body.graph.first_value(0)
        tanh = next(n.outputs[0] - first for n in body.graph.nodes if n.primitive == "tanh")
        inner = Loop(at, is_recomputed=True, inside=Inside(saved=inner_saved))
        yield Loop(node, is_recomputed=True, inside=Inside(ways=(inner,), saved=(tanh,)))

    f = planned(nested_loops, ways, W, X)
    assert_same(nested_loops, f, W, X)
    jaxpr = jax.make_jaxpr(f)(W, X)
    assert len(list(regions(jaxpr.jaxpr))) == 2
    names = [e.params["name"] for e in equations(jaxpr.jaxpr) if e.primitive.name == "name"]
    assert len(set(names)) == len(names) == 1 + len(inner_saved)


def test_what_saves_inside_and_how_deep():
    """A region saves for conditionals inside it, not for regions inside it; what is saved in nests is found."""
    leaf = Conditional(1, (Inside(saved=(0,)), Inside()))
    assert is_saving(leaf)
    assert is_saving(Conditional(4, (Inside(ways=(leaf,)),), True))
    assert not is_saving(Conditional(4, (Inside(ways=(Conditional(1, leaf.branches, True),)),), True))
    assert depth_of(leaf) == 1
    assert depth_of(Loop(2, inside=Inside(ways=(leaf,)))) == 2
    step = Loop(2, is_recomputed=True, inside=Inside(ways=(leaf,)))
    assert list(saving_in_nests(Inside(ways=(step,)))) == []
    nested = Conditional(1, leaf.branches, True)
    around = Loop(2, is_recomputed=True, inside=Inside(ways=(nested,)))
    assert list(saving_in_nests(Inside(ways=(around,)))) == [nested]
    in_blocks = Loop(2, (4,), is_recomputed=True, inside=Inside(saved=(0,)))
    assert list(saving_in_nests(Inside(ways=(in_blocks,)))) == [in_blocks]
