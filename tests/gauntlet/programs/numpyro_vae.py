"""NumPyro: a variational autoencoder with stax-like modules, its ELBO as the loss, as in its example `vae`."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.example_libraries import stax
from numpyro.infer import SVI, Trace_ELBO

from gauntlet import Built

PIXELS, HIDDEN, Z, BATCH = 128, 96, 16, 128


def encoder():
    return stax.serial(
        stax.Dense(HIDDEN),
        stax.Softplus,
        stax.Dense(HIDDEN),
        stax.Softplus,
        stax.FanOut(2),
        stax.parallel(stax.Dense(Z), stax.serial(stax.Dense(Z), stax.Exp)),
    )


def decoder():
    return stax.serial(
        stax.Dense(HIDDEN), stax.Softplus, stax.Dense(HIDDEN), stax.Softplus, stax.Dense(PIXELS), stax.Sigmoid
    )


def model(batch):
    decode = numpyro.module("decoder", decoder(), (BATCH, Z))
    with numpyro.plate("batch", BATCH):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([Z]).to_event(1))
        return numpyro.sample("obs", dist.Bernoulli(decode(z)).to_event(1), obs=batch)


def guide(batch):
    encode = numpyro.module("encoder", encoder(), (BATCH, PIXELS))
    z_loc, z_std = encode(batch)
    with numpyro.plate("batch", BATCH):
        return numpyro.sample("z", dist.Normal(z_loc, z_std).to_event(1))


def build() -> Built:
    batch = jax.random.bernoulli(jax.random.key(0), 0.4, (BATCH, PIXELS)).astype(jnp.float32)
    elbo = Trace_ELBO(num_particles=2)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), elbo)
    params = svi.get_params(svi.init(jax.random.PRNGKey(1), batch))

    def loss(params, rng_key, batch):
        return elbo.loss(rng_key, params, model, guide, batch)

    return Built(loss, (params, jax.random.PRNGKey(2), batch))
