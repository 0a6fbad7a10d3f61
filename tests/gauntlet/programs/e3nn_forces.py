"""e3nn-jax: energies by spherical harmonics and tensor products, forces as their derivative, both in the loss."""

import e3nn_jax as e3nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from gauntlet import Built

ATOMS, LAYERS = 24, 2


def layer(vectors, senders, receivers, features):
    lengths = e3nn.norm(vectors).array
    messages = e3nn.haiku.Linear(features.irreps)(features)[senders]
    messages = e3nn.concatenate(
        [messages, e3nn.tensor_product(messages, e3nn.spherical_harmonics("1o", vectors, True))]
    ).regroup()
    basis = e3nn.bessel(lengths[:, 0], 8) * e3nn.poly_envelope(5, 2)(lengths)
    mix = e3nn.haiku.MultiLayerPerceptron([32, messages.irreps.num_irreps], act=jax.nn.silu)(basis)
    messages = messages * mix
    summed = e3nn.scatter_sum(messages, dst=receivers, output_size=ATOMS) / 4
    return e3nn.gate(e3nn.haiku.Linear("16x0e + 8x0e + 8x1o")(summed))


def energy(positions, species, senders, receivers):
    vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
    features = e3nn.IrrepsArray("8x0e", hk.Embed(3, 8)(species))
    for _ in range(LAYERS):
        features = layer(vectors, senders, receivers, features)
    return e3nn.haiku.Linear("0e")(features).array.sum()


def build() -> Built:
    rng = np.random.default_rng(0)
    positions = rng.uniform(0, 2.5, (ATOMS, 3)).astype("float32")
    senders, receivers = e3nn.radius_graph(positions, 1.5)
    species = rng.integers(3, size=ATOMS).astype("int32")
    model = hk.without_apply_rng(hk.transform(energy))
    params = model.init(jax.random.PRNGKey(0), positions, species, senders, receivers)
    forces = rng.normal(size=(ATOMS, 3)).astype("float32")

    def loss(params, positions, species, senders, receivers, energies, forces):
        value, grads = jax.value_and_grad(model.apply, argnums=1)(params, positions, species, senders, receivers)
        return (value - energies) ** 2 / ATOMS + jnp.mean((grads + forces) ** 2)

    return Built(loss, (params, positions, species, senders, receivers, np.float32(1.0), forces), rtol=1e-3)
