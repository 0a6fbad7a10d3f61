"""Jraph: a graph network over batched molecules, written with Haiku as in its example `ogbg_molpcba`."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from gauntlet import Built

GRAPHS, NODES, EDGES, WIDTH = 16, 8, 24, 48


def mlp(inputs):
    return hk.nets.MLP([WIDTH, WIDTH])(inputs)


@jraph.concatenated_args
def edge_update(feats):
    return mlp(feats)


@jraph.concatenated_args
def node_update(feats):
    return mlp(feats)


@jraph.concatenated_args
def global_update(feats):
    return mlp(feats)


def net_fn(graph):
    graph = jraph.GraphMapFeatures(hk.Linear(WIDTH), hk.Linear(WIDTH), hk.Linear(WIDTH))(graph)
    for _ in range(3):
        graph = jraph.GraphNetwork(edge_update, node_update, global_update)(graph)
    return hk.Linear(2)(graph.globals)


def molecule(rng):
    return jraph.GraphsTuple(
        nodes=rng.normal(size=(NODES, 8)).astype("float32"),
        edges=rng.normal(size=(EDGES, 4)).astype("float32"),
        globals=np.zeros((1, 1), "float32"),
        senders=rng.integers(NODES, size=EDGES),
        receivers=rng.integers(NODES, size=EDGES),
        n_node=np.array([NODES]),
        n_edge=np.array([EDGES]),
    )


def build() -> Built:
    rng = np.random.default_rng(0)
    graph = jraph.batch_np([molecule(rng) for _ in range(GRAPHS)])
    graph = jraph.pad_with_graphs(graph, GRAPHS * NODES + 1, GRAPHS * EDGES + 8, GRAPHS + 1)
    graph = jax.tree.map(jnp.asarray, graph)
    labels = jnp.arange(GRAPHS + 1) % 2
    net = hk.without_apply_rng(hk.transform(net_fn))

    def compute_loss(params, graph, labels):
        mask = jraph.get_graph_padding_mask(graph)
        losses = optax.softmax_cross_entropy_with_integer_labels(net.apply(params, graph), labels)
        return jnp.sum(losses * mask) / jnp.sum(mask)

    return Built(compute_loss, (net.init(jax.random.PRNGKey(0), graph), graph, labels))
