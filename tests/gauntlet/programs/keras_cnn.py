"""Keras with the JAX backend: a convolutional network trained as in the guide "Writing a training loop in JAX"."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

from gauntlet import Built


def build() -> Built:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((16, 16, 3))]
    for _ in range(4):
        layers += [
            keras.layers.Conv2D(16, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("gelu"),
            keras.layers.Dropout(0.1),
        ]
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-3)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 16, 16, 3)).astype("float32"), rng.integers(10, size=16).astype("int32")

    def compute_loss_and_updates(trainable_variables, non_trainable_variables, x, y):
        y_pred, non_trainable_variables = model.stateless_call(
            trainable_variables, non_trainable_variables, x, training=True
        )
        return loss_fn(y, y_pred), non_trainable_variables

    trainable = [v.value for v in model.trainable_variables]
    non_trainable = [v.value for v in model.non_trainable_variables]

    def make_step(loss):
        grad_fn = jax.value_and_grad(loss, has_aux=True)

        def train_step(state, data):
            trainable_variables, non_trainable_variables, optimizer_variables = state
            x, y = data
            (value, non_trainable_variables), grads = grad_fn(trainable_variables, non_trainable_variables, x, y)
            trainable_variables, optimizer_variables = optimizer.stateless_apply(
                optimizer_variables, grads, trainable_variables
            )
            return value, (trainable_variables, non_trainable_variables, optimizer_variables)

        return train_step, ((trainable, non_trainable, [v.value for v in optimizer.variables]), (x, y))

    return Built(compute_loss_and_updates, (trainable, non_trainable, x, y), has_aux=True, make_step=make_step)
