"""Haiku: its own residual blocks, statistics kept as state, as in its example `imagenet`."""

import haiku as hk
import jax
import optax

from gauntlet import Built


def forward(images, is_training):
    net = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=10,
        bn_config=dict(decay_rate=0.9),
        channels_per_group=(16, 32, 32, 32),
        bottleneck=False,
        strides=(1, 1, 2, 2),
    )
    return net(images, is_training=is_training)


def build() -> Built:
    model = hk.transform_with_state(forward)
    images = jax.random.normal(jax.random.key(0), (8, 32, 32, 3))
    labels = jax.random.randint(jax.random.key(1), (8,), 0, 10)
    params, state = model.init(jax.random.PRNGKey(2), images, is_training=True)

    def loss(params, state, images, labels):
        logits, state = model.apply(params, state, None, images, is_training=True)
        l2 = 0.5 * sum(
            (leaf**2).sum() for path, leaf in jax.tree.leaves_with_path(params) if "batchnorm" not in str(path)
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() + 1e-4 * l2, state

    return Built(loss, (params, state, images, labels), has_aux=True)
