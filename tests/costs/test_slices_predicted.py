"""What a whole function in slices needs, each slice planned too, is predicted as the compiler allocates it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from layers import mixing_layers, tanh_layers

import jaxsub
from jaxsub.core.decisions import Inside
from jaxsub.costs.chain_builder import Pricer, Prices
from jaxsub.devices.targets import get_target
from jaxsub.emission.folding import program_of_slice, with_slices
from jaxsub.jaxpr.trace import trace
from jaxsub.planners import get
from jaxsub.search.slicing import asked, find_runs
from jaxsub.search.verify import Verifier, cut_choices


def gated(ws, x):
    for w in ws:
        x = x + jax.nn.silu(x @ w)
    return jnp.mean(x * x)


WEIGHTS = [jnp.eye(64)] * 12
CASES = [
    (tanh_layers, jnp.ones((8192, 64)), 8),
    (tanh_layers, jnp.ones((8192, 64)), 32),
    (mixing_layers, jnp.ones((4, 64, 4096)), 4),
    (gated, jnp.ones((4096, 64)), 4),
]


@pytest.mark.parametrize(("fun", "x", "count"), CASES, ids=[f"{fun.__name__} in {n}" for fun, _, n in CASES])
@pytest.mark.parametrize("is_planned", [False, True], ids=["kept", "least"])
def test_slices_need_what_is_predicted(fun, x, count, is_planned):
    """Sums of gradients are in their outputs, a step's part of x in a buffer, recompute behind its barriers.

    Their products with the cotangent are counted, which XLA leaves out where that is 1.
    """
    program, cpu = trace(fun, (WEIGHTS, x), {}), get_target("cpu")
    (run,) = asked(program, {0: count})
    if is_planned:
        part = program_of_slice(program, run)
        chain = Pricer(part, cpu).chain(cut_choices(part)[0])
        with pytest.raises(jaxsub.InfeasibleBudgetError) as refused:
            get("optimal")(chain, 1)
        plan = get("optimal")(chain, refused.value.least_bytes)
        run = replace(run, inside=Inside(plan.segments, plan.barriers, plan.loops))
    folded = Pricer(with_slices(program, (run,)), cpu)
    (stage,) = folded.chain((0, len(folded.program.eqns))).stages
    verifier = Verifier(folded)
    measured = verifier.measure(verifier.empty()).temp_bytes
    assert 0.87 * measured <= stage.keep_transient_bytes <= 1.13 * measured + sum(w.nbytes for w in WEIGHTS)


def test_gradients_of_a_repeated_program_are_priced_apart():
    """Equal layers of a program and of a slice share no prices: what a slice adds to a sum is no output."""
    weights, x = [jnp.ones((64, 64))] * 4, jnp.ones((8, 64))
    program = trace(tanh_layers, (weights, x), {})
    cuts, target, prices = cut_choices(program)[0], get_target("cpu"), Prices()
    repeated = Pricer(replace(program, is_repeated=True), target, prices=prices).chain(cuts)
    chain = Pricer(program, target, prices=prices).chain(cuts)
    assert chain == Pricer(program, target).chain(cuts)
    assert [stage.gradient_sizes for stage in repeated.stages] == [()] * len(cuts[1:])
    assert max(s.transient_bytes for s in repeated.stages) > max(s.transient_bytes for s in chain.stages)


def attending(ws, x):
    for w in ws:
        x = jax.lax.cumsum(x) / 4  # mixes the batch: each layer is a run of its own
        x = x + jax.nn.softmax(x @ x.mT) @ jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("depth", [4, 12])
@pytest.mark.parametrize("planner", ["plain", "barriers"])
def test_a_cpu_makes_the_zeros_of_all_loops_when_it_starts(planner, depth):
    """Each layer in slices is two loops; what the second one stacks gradients in is live from the start."""
    ws = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * depth
    program, cpu = trace(attending, (ws, jax.ShapeDtypeStruct((16, 256, 32), jnp.float32)), {}), get_target("cpu")
    runs = [found.slices(program, 4) for found in find_runs(program, cpu, 2**22).runs]
    assert len(runs) == depth
    folded = Pricer(with_slices(program, runs), cpu)
    plan = get(planner)(folded.chain(cut_choices(folded.program)[0]), None)
    measured = Verifier(folded).measure(plan).temp_bytes
    print(f"{plan.prediction.temp_bytes / measured:.2f} of what {depth} layers need")
    assert 0.7 * measured <= plan.prediction.temp_bytes <= 1.2 * measured
