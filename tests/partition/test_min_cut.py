"""What a run may save: the corners of the hull, choices between them, and values worth a mark."""

from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.costs.chain_builder import _worth_marking
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.cuts import find_cuts
from jaxsub.partition.min_cut import choices
from jaxsub.partition.traced_run import trace_run

WIDTHS = (8, 16, 24, 48, 96)
ARGS = [jnp.ones(shape) for shape in pairwise(WIDTHS)], jnp.ones((16, WIDTHS[0]))


def loss(ws, x):
    for w in ws:
        x = jnp.sin(x @ w)
    return jnp.sum(x**2)


@pytest.fixture(scope="module")
def program():
    return trace(loss, ARGS, {})


def test_what_ends_a_run_is_not_executed_again(program):
    """Of a run that ends in a product whose result its backward pass does not read, the product is dead code."""
    assert program.graph.nodes[4].primitive == "dot_general"
    product = program.graph.nodes[4].flops
    assert choices(trace_run(program, 4, 5))[0].recompute_flops == 0
    assert 0 < choices(trace_run(program, 4, 6))[0].recompute_flops <= 1.1 * product


def test_of_several_stages_what_one_saves_or_returns_is_marked(program):
    """Of a single stage nothing is left out; of several what none of them saves by itself, or returns, is."""
    cuts = find_cuts(program.graph, window=0)
    assert len(cuts) > 3

    def found(a, b):
        return choices(trace_run(program, a, b))

    start, stop = cuts[0], cuts[3]
    assert _worth_marking(program.graph, cuts, cuts[0], cuts[1], found) == ()
    assert _worth_marking(program.graph, cuts, cuts[0], cuts[1] + 1, found) == ()
    marked = _worth_marking(program.graph, cuts, start, stop, found)
    n_made = len(program.graph.made_by(start, stop))
    assert 0 < len(marked) < n_made
    every, narrow = (choices(trace_run(program, start, stop, m)) for m in ((), marked))
    assert [c.saved for c in every] == [c.saved for c in narrow]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_constants_of_a_gradient_rule_are_neither_inputs_nor_residuals(where):
    """A rule that brings arrays of its own, as differential equation solvers do, is planned like any other."""
    table = jnp.arange(24.0).reshape(3, 8)

    @jax.custom_vjp
    def scaled(x):
        return x * 2

    def forward(x):
        return x * 2, (x, table[0] * x if where == "forward" else x)

    def backward(kept, g):
        return (g * 2 + 0 * kept[1] * (table[1] if where == "backward" else 1),)

    scaled.defvjp(forward, backward)

    def rule_loss(w, x):
        for _ in range(4):
            x = scaled(jnp.sin(x @ w))
        return jnp.sum(x**2)

    args = jnp.eye(8), jnp.ones((64, 8))
    program = trace(rule_loss, args, {})
    for node in range(len(program.graph.nodes)):
        traced = trace_run(program, node, node + 1)
        assert len(traced.inputs) == len(traced.function.reads)
        assert len(traced.backward_inputs) - len(traced.residuals) == len(traced.function.returns)
    small = jaxsub.sublinear(rule_loss, verify=False, progress=False)
    chex.assert_trees_all_close(jax.grad(small)(*args), jax.grad(rule_loss)(*args), rtol=1e-6)
