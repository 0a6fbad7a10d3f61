"""Haiku: a character model of LSTM layers, as in its example `rnn`, with dropout between them."""

import haiku as hk
import jax
import optax

from gauntlet import Built

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 64, 12, 32


def unrolled(batch):
    core = hk.DeepRNN(
        [
            lambda x: jax.nn.one_hot(x, num_classes=VOCABULARY),
            hk.LSTM(WIDTH),
            lambda x: hk.dropout(hk.next_rng_key(), 0.1, x),
            hk.LSTM(WIDTH),
            hk.nets.MLP([WIDTH, VOCABULARY]),
        ]
    )
    logits, _ = hk.static_unroll(core, batch, core.initial_state(BATCH))
    return logits


def build() -> Built:
    model = hk.transform(unrolled)
    words = jax.random.randint(jax.random.key(0), (LENGTH, BATCH), 0, VOCABULARY)

    def loss(params, rng, words):
        logits = model.apply(params, rng, words)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], words[1:]).mean()

    return Built(loss, (model.init(jax.random.PRNGKey(1), words), jax.random.PRNGKey(2), words))
