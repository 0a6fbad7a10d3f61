"""A whole training step with Optax in a given memory: what the compiler allocates before and after, and the losses.

`jaxsub.jit(step, memory=...)` stands where `jax.jit(step)` stood. The memory is that of the whole step on one device:
parameters, optimizer state, batch, outputs and temporaries; parameters and state are donated, so that they count once.
The loss is wrapped in `jaxsub.sublinear` without a budget: the step finds it and gives it the plan with which the
whole fits. Then the same step is asked for more than there is, and for the largest batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsub


def init(depth: int, dim: int) -> list[dict[str, jax.Array]]:
    """Parameters of `depth` residual layers, each dim -> 4 dim -> dim."""
    keys = jax.random.split(jax.random.key(0), (depth, 2))
    return [
        {
            "up": jax.random.normal(k[0], (dim, 4 * dim)) / dim**0.5,
            "down": jax.random.normal(k[1], (4 * dim, dim)) / (4 * dim),
        }
        for k in keys
    ]


def loss(params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error of a residual network on x f32[batch, dim] and y f32[batch, dim]."""
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return ((x - y) ** 2).mean()


def step_of(loss: Callable[..., Any], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A training step: parameters, optimizer state and a batch in; parameters, state and the loss out."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def train(step: Callable[..., Any], params: Any, state: Any, batches: list[Any]) -> list[float]:
    """Run a step on every batch; return the losses."""
    params, state = jax.tree.map(jnp.copy, (params, state))  # the step takes the memory of those it is given
    losses = []
    for x, y in batches:
        params, state, value = step(params, state, x, y)
        losses.append(float(value))
    return losses


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a small network and a few steps")
    depth, dim, batch, n_steps = (4, 16, 256, 5) if parser.parse_args().toy else (16, 128, 4096, 20)
    print(__doc__, flush=True)
    rng = np.random.default_rng(0)
    batches = [tuple(rng.normal(size=(2, batch, dim)).astype(np.float32)) for _ in range(n_steps)]
    params = init(depth, dim)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, n_steps)))
    state = optimizer.init(params)

    planned = step_of(jaxsub.sublinear(loss), optimizer)
    small = jaxsub.jit(planned, memory=0.6, donate_argnums=(0, 1))  # or "24GiB", or "device"
    report = small.report(params, state, *batches[0])
    print(report, "\n", flush=True)

    plain = train(jax.jit(step_of(loss, optimizer), donate_argnums=(0, 1)), params, state, batches)
    losses = train(small, params, state, batches)
    print(
        f"losses, plain:   {plain[0]:.6f} ... {plain[-1]:.6f}\nlosses, planned: {losses[0]:.6f} ... {losses[-1]:.6f}\n"
    )
    assert np.allclose(plain, losses, rtol=1e-4), "the plan changed the losses"

    try:
        jaxsub.jit(planned, memory=report.step_bytes // 8, donate_argnums=(0, 1)).report(params, state, *batches[0])
    except jaxsub.InfeasibleBudgetError as error:
        print(error, "\n", flush=True)

    def step_for_batch(n: int) -> Any:
        shape = jax.ShapeDtypeStruct((n, dim), jnp.float32)
        return planned, (params, state, shape, shape)

    print(jaxsub.max_batch(step_for_batch, memory=report.plain_bytes, multiple_of=batch // 4, donate_argnums=(0, 1)))


if __name__ == "__main__":
    main()
