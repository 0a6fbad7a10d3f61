"""Without a budget: the least memory that at most one extra forward pass can buy."""

import chex
import jax
import numpy as np
import pytest
from zoo import BY_NAME

import jaxsub
from jaxsub.core.figures import recomputed_share

# of plain's memory; of each network another partition than the likeliest needs a fifth less than that does
SHARES = {"resnet": 0.3, "vit": 0.3}


@pytest.mark.parametrize("name", SHARES)
def test_every_partition_is_looked_at_without_a_budget(name):
    """The least memory is that of the partition which needs least, and the gradient is the plain one."""
    loss, args = BY_NAME[name].toy()
    plan = jaxsub.plan(loss, *args, verify=True)
    assert recomputed_share(plan) <= 1
    assert plan.measurement.temp_bytes <= SHARES[name] * plan.plain_measurement.temp_bytes
    found, plain = (jax.jit(jax.grad(f))(*args) for f in (jaxsub.sublinear(loss, plan=plan), loss))
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    chex.assert_trees_all_close(found, plain, rtol=1e-4, atol=1e-4 * scale)
