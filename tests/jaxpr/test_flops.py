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


@pytest.mark.parametrize(
    ("f", "shapes", "flops"),
    [
        (jnp.linalg.cholesky, [(3, 60, 60)], 3 * 60**3 / 3),
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), [(2, 60, 60), (2, 60, 8)], 2 * 60**2 * 8),
        (lambda a, b: lax.linalg.triangular_solve(a, b), [(60, 60), (8, 60)], 60**2 * 8),
        (lax.linalg.lu, [(60, 60)], 2 * 60**3 / 3),
        (lax.linalg.lu, [(20, 60)], 20**2 * (60 - 20 / 3)),
        (lambda a: lax.linalg.qr(a, full_matrices=False), [(4, 60, 20)], 4 * 4 * 20**2 * (60 - 20 / 3)),
        (lax.linalg.eigh, [(2, 30, 30)], 2 * 9 * 30**3),
        (lambda a: lax.fft(a, lax.FftType.RFFT, (64, 32)), [(4, 64, 32)], 5 * 4 * 64 * 32 * 11),
        (lambda a: lax.sort(a, dimension=0), [(32, 7)], 32 * 7 * 5),
    ],
    ids="cholesky solve solve_right lu lu_wide qr eigh fft sort".split(),
)
def test_linear_algebra(f, shapes, flops):
    """Counted as textbooks do, of each matrix of a batch; by its elements a Cholesky factor would cost nothing."""
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    assert jaxpr_flops(jaxpr.jaxpr).arithmetic_flops == pytest.approx(flops)
