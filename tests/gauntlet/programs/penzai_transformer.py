"""Penzai: its Llama-like decoder with named axes, parameters unbound and bound as in its `basic_training`."""

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from gauntlet import Built

VOCABULARY, LENGTH, BATCH = 128, 64, 4


def build() -> Built:
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=64,
        projection_dim=16,
        mlp_hidden_dim=128,
        num_decoder_blocks=3,
        vocab_size=VOCABULARY,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model = llamalike_common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    stateless, variables = pz.unbind_variables(model)
    params = pz.freeze_params(variables)
    tokens = pz.nx.wrap(jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCABULARY)).tag("batch", "seq")
    positions = pz.nx.arange("seq", LENGTH)

    def loss(params, tokens, positions):
        logits = pz.bind_variables(stateless, params)(tokens, token_positions=positions)
        log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
        chosen = log_probs.untag("seq", "vocabulary")
        picked = pz.nx.nmap(lambda rows, words: jnp.take_along_axis(rows[:-1], words[1:, None], -1).mean())(
            chosen, tokens.untag("seq")
        )
        return -picked.untag("batch").unwrap().mean()

    return Built(loss, (params, tokens, positions))
