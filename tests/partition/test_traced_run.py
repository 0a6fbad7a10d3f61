"""A run's backward pass, composed of its equations', is JAX's own."""

import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import Flops, flops_of
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.run_function import read_avals, run_function, vjp_of
from jaxsub.partition.traced_run import trace_function, trace_run


def arrays(avals):
    """Numbers that no function here minds, whole ones for integers."""
    rng = np.random.default_rng(0)
    for aval in avals:
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            yield jax.random.key(0) if not aval.shape else jax.random.split(jax.random.key(0), aval.shape)
        elif jnp.issubdtype(aval.dtype, jnp.floating):
            yield jnp.asarray(rng.uniform(0.2, 0.8, aval.shape), aval.dtype)
        else:
            yield jnp.ones(aval.shape, aval.dtype)


def evaluate(eqns, inputs, outputs, values):
    """Evaluate equations."""
    env = dict(zip(inputs, values, strict=True))
    read = lambda a: env[a] if compat.is_var(a) else a.val  # noqa: E731
    for eqn in eqns:
        jaxpr = compat.make_jaxpr_of([eqn], given := list(filter(compat.is_var, eqn.invars)), eqn.outvars)
        env.update(zip(eqn.outvars, jax.core.eval_jaxpr(jaxpr, (), *map(read, given)), strict=True))
    return [read(a) for a in outputs]


def flops(run):
    return sum(map(flops_of, (*run.forward, *run.backward)), Flops()).weighted


def runs(program):
    """The whole program, its second half and another, which reads and returns some of what is in between."""
    n, rng = len(program.eqns), random.Random(0)
    start = rng.randrange(n)
    yield from [(0, n), (n // 2, n), (start, rng.randrange(start + 1, n + 1))]


@pytest.mark.parametrize("name", [name for name in zoo.BY_NAME if name not in ("resnet198", "gpt16")])
def test_values_and_cotangents_are_those_of_jax(name):
    """Results, and the gradients that ones give, are those of `jax.vjp` of the run, with as many FLOPs."""
    loss, args = zoo.BY_NAME[name].toy()
    program = trace(loss, args, {})
    for start, stop in runs(program):
        if not all(node.can_recompute for node in program.graph.nodes[start:stop]):
            continue
        traced, function = trace_run(program, start, stop), run_function(program, start, stop)
        values = list(arrays(read_avals(program, function)))
        outs, pullback, _ = vjp_of(function, values)
        ones = tuple(map(jnp.ones_like, outs))
        found = evaluate(traced.forward, traced.inputs, (*traced.returned, *traced.residuals), values)
        chex.assert_trees_all_close(found[: len(outs)], list(outs), rtol=1e-5)
        residuals = found[len(outs) :]
        gradients = evaluate(traced.backward, traced.backward_inputs, traced.backward_outputs, (*residuals, *ones))
        chex.assert_trees_all_close(gradients, list(pullback(ones)), rtol=2e-4, atol=1e-5)
        whole = trace_function(function, read_avals(program, function))
        assert flops(traced) == pytest.approx(flops(whole), rel=0.02)
