"""FLOPs of equations, against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxsub.jaxpr.flops import jaxpr_flops


def xla_flops(f, *args):
    return jax.jit(f).lower(*args).cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("batch", "channels", "groups"),
    [(4, 3, {}), (4, 64, {"feature_group_count": 64}), (32, 3, {"batch_group_count": 8})],
)
def test_convolutions_in_groups(batch, channels, groups):
    """In groups of features, as depthwise ones, or of the batch, as the gradients of those by their weights."""
    x = jnp.ones((batch, 16, 16, channels))
    w = jnp.ones((3, 3, channels // groups.get("feature_group_count", 1), 64))

    def convolved(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups)

    assert jaxpr_flops(jax.make_jaxpr(convolved)(x, w)).total == xla_flops(convolved, x, w)
