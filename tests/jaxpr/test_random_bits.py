"""Parts of arrays of random bits: to the bit those of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsub.jaxpr.random_bits import part_of_bits

SHAPE = (4, 6, 5)


@pytest.mark.parametrize("n_keys", [0, 3])
@pytest.mark.parametrize("bit_width", [8, 16, 32, 64])
def test_a_part_has_the_bits_of_the_whole(bit_width, n_keys):
    """Along every dimension, for every width, for one key and for several."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(5), n_keys) if n_keys else jax.random.key(5)
        bits = lambda key: jax.random.bits(key, SHAPE, f"uint{bit_width}")  # noqa: E731
        whole = jax.vmap(bits)(keys) if n_keys else bits(keys)
        for dim, index in ((0, [1, 2]), (1, [5, 0, 3]), (2, [4])):
            part = part_of_bits(keys, bit_width, SHAPE, dim, jnp.asarray(index, jnp.uint32))
            np.testing.assert_array_equal(part, np.take(whole, index, axis=dim + keys.ndim), strict=True)


def test_a_long_array():
    """Positions behind 2**31 are those of the whole array, of which nobody makes all."""
    part = part_of_bits(jax.random.key(0), 32, (2**16, 2**16), 0, jnp.array([2**16 - 1], jnp.uint32))
    assert len(np.unique(part)) > 2**16 * 0.99
