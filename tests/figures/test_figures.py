"""The figures that jaxsub promises, on the compiler's own account: full-size networks, compiled and never run.

Those that take a minute and more run before a release: `pytest tests/figures -m exhaustive`.
"""

import functools
import math

import jax
import numpy as np
import pytest
import zoo

import jaxsub

pytestmark = pytest.mark.once
MIB = 2**20
BUDGETS = (0.7, 0.4, 0.2)
FULL = ("gpt", "resnet")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Prices and measurements, shared by the tests of this file."""
    return tmp_path_factory.mktemp("cache")


@functools.cache
def per_block_bytes(name):
    """What `jax.checkpoint` round every block needs."""
    loss, args = zoo.BY_NAME[name].full(wrap=jax.checkpoint)
    return jaxsub.measure(loss, *args).temp_bytes


def planned(name, cache, **options):
    loss, args = zoo.BY_NAME[name].full()
    return jaxsub.plan(loss, *args, cache=cache, progress=False, **options)


def test_a_chain_needs_an_eighth_for_less_than_a_third_more_work(cache):
    """64 layers of tanh(x @ w): 65 units become at most 17, at most 1.30 x the FLOPs."""
    plan = planned("chain", cache, verify=True)
    unit = 4096 * 256 * 4
    assert plan.plain_measurement.temp_bytes / unit == pytest.approx(65, rel=0.01)
    assert plan.measurement.temp_bytes / unit <= 17
    assert plan.measurement.flops / plan.plain_measurement.flops <= 1.30


@pytest.mark.slow
@pytest.mark.parametrize("depths", [(16, 64, 256), pytest.param((256, 512, 1024), marks=pytest.mark.exhaustive)])
def test_memory_grows_with_the_root_of_depth(depths, cache):
    """The paper's planner, 16 to 1024 layers, compiled: log-log slope at most .55 where the plain program has 1."""
    plain, needed = [], []
    for depth in depths:
        loss, init = zoo.BY_NAME["chain"].build(layers=depth, batch=512, width=64)
        args = jax.eval_shape(init, jax.random.key(0))
        plan = jaxsub.plan(loss, *args, planner="chen", cache=cache, progress=False, verify=True)
        plain.append(plan.plain_measurement.temp_bytes)
        needed.append(plan.measurement.temp_bytes)
    assert slope(depths, plain) > 0.9
    assert slope(depths, needed) <= 0.55


def slope(depths, sizes):
    return np.polyfit([math.log(d) for d in depths], [math.log(s) for s in sizes], 1)[0]


@pytest.mark.exhaustive
def test_barriers_alone_free_an_unrolled_lstm(cache):
    """LSTM, 4 layers x 32 steps: over 3 GiB become at most 360 MiB with no recompute, at most 180 MiB with a plan."""
    plan = planned("lstm", cache, planner="barriers", verify=True)
    assert plan.plain_measurement.temp_bytes > 3000 * MIB
    assert plan.n_regions == 0
    assert plan.measurement.temp_bytes <= 360 * MIB
    assert plan.measurement.flops <= plan.plain_measurement.flops
    assert planned("lstm", cache, verify=True).measurement.temp_bytes <= 180 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("lstm", *FULL))])
def test_budgets_are_kept(name, cache):
    """No compiled gradient needs more than its budget; nothing is refused that per-block checkpoints meet."""
    kept, refused = 0, []
    for fraction in BUDGETS:
        try:
            plan = planned(name, cache, budget=fraction)
        except jaxsub.InfeasibleBudgetError as error:
            refused.append(error.requested_bytes)
            continue
        kept += 1
        assert plan.measurement.temp_bytes <= fraction * plan.plain_measurement.temp_bytes
    assert kept >= 2
    assert not refused or per_block_bytes(name) > max(refused)


@pytest.mark.exhaustive
def test_what_a_refusal_says_would_fit_does(cache):
    """A budget too small for any plan is refused with the least bytes that work, and those are then met."""
    with pytest.raises(jaxsub.InfeasibleBudgetError, match="Pass budget=") as caught:
        planned("chain", cache, budget="2MiB")
    least = caught.value.least_bytes
    assert caught.value.requested_bytes == 2 * MIB < least
    assert planned("chain", cache, budget=least).measurement.temp_bytes <= least
