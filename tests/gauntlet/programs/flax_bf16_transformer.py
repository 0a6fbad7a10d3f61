"""Flax Linen: a causal transformer in bf16 with f32 parameters and dropout, as in its example `lm1b`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gauntlet import Built

VOCABULARY, WIDTH, LENGTH, BATCH, LAYERS = 256, 64, 64, 4, 3


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask, deterministic=False):
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.MultiHeadDotProductAttention(4, dtype=jnp.bfloat16, dropout_rate=0.1, deterministic=deterministic)(
            y, y, mask=mask
        )
        x = x + nn.Dropout(0.1, deterministic=deterministic)(y)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(y))
        y = nn.Dropout(0.1, deterministic=deterministic)(y)
        return x + nn.Dropout(0.1, deterministic=deterministic)(nn.Dense(WIDTH, dtype=jnp.bfloat16)(y))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, words):
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)
        x = embed(words) + self.param("position", nn.initializers.normal(0.02), (LENGTH, WIDTH)).astype(jnp.bfloat16)
        mask = nn.make_causal_mask(words)
        for _ in range(LAYERS):
            x = Block()(x, mask)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def build() -> Built:
    model = Transformer()
    words = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, VOCABULARY)
    params = model.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, words)["params"]

    def loss_fn(params, dropout_rng, words):
        logits = model.apply({"params": params}, words, rngs={"dropout": dropout_rng})
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], words[:, 1:]).mean()

    return Built(loss_fn, (params, jax.random.key(3), words), rtol=0.05)
