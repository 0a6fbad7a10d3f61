"""RLax: the loss of an IMPALA learner, V-trace over a batch of trajectories, a value and an entropy term."""

import jax
import jax.numpy as jnp
import rlax

from gauntlet import Built

LENGTH, BATCH, WIDTH, ACTIONS = 20, 16, 96, 6


def network(params, observations):
    h = observations
    for w, b in params["torso"]:
        h = jax.nn.relu(h @ w + b)
    return h @ params["policy"], (h @ params["value"])[..., 0]


def init(key):
    keys = jax.random.split(key, 6)
    torso = [(jax.random.normal(k, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5, jnp.zeros(WIDTH)) for k in keys[:4]]
    heads = dict(policy=(keys[4], ACTIONS), value=(keys[5], 1))
    return {"torso": torso} | {n: jax.random.normal(k, (WIDTH, out)) / WIDTH**0.5 for n, (k, out) in heads.items()}


def trajectory_loss(logits, values, behaviour, actions, rewards, discounts):
    rhos = rlax.categorical_importance_sampling_ratios(logits[:-1], behaviour[:-1], actions[:-1])
    returns = rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], rewards[:-1], discounts[:-1], rhos)
    mask = jnp.ones(LENGTH)
    policy = rlax.policy_gradient_loss(logits[:-1], actions[:-1], returns.pg_advantage, mask)
    return policy + 0.5 * jnp.mean(returns.errors**2) + 0.01 * rlax.entropy_loss(logits[:-1], mask)


def loss(params, observations, behaviour, actions, rewards, discounts):
    logits, values = network(params, observations)
    return jax.vmap(trajectory_loss, in_axes=1)(logits, values, behaviour, actions, rewards, discounts).mean()


def build() -> Built:
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (LENGTH + 1, BATCH)
    data = (
        jax.random.normal(keys[0], (*shape, WIDTH)),
        jax.random.normal(keys[1], (*shape, ACTIONS)),
        jax.random.randint(keys[2], shape, 0, ACTIONS),
        jax.random.normal(keys[3], shape),
        jnp.full(shape, 0.99),
    )
    return Built(loss, (init(keys[4]), *data))
