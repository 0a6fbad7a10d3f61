"""A whole training step with Optax, plain and under a budget: what the compiler allocates for it, and the losses.

The loss is the only line that changes. `jaxsub.jit` compiles the step as `jax.jit` does, and keeps the compiler of the
CPU from undoing the plan where its version would. Parameters and optimizer state are donated, so that the step's memory
is theirs once, and what the gradient needs on top: that is what the budget bounds.
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

MIB = 2**20


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


def train(loss: Callable[..., Any], params: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    """Compile one step, run it on every batch; return what the compiler allocates, and the losses."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, len(batches)))
    )

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(jnp.copy, params)  # the step takes the memory of those it is given
    state, losses = optimizer.init(params), []
    compiled = jaxsub.jit(step, donate_argnums=(0, 1)).lower(params, state, *batches[0]).compile()
    for x, y in batches:
        params, state, value = compiled(params, state, x, y)
        losses.append(float(value))
    return compiled.memory_analysis(), losses


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a small network and a few steps")
    depth, dim, batch, steps = (6, 16, 256, 5) if parser.parse_args().toy else (16, 128, 4096, 20)
    print(__doc__, flush=True)
    rng = np.random.default_rng(0)
    batches = [tuple(rng.normal(size=(2, batch, dim)).astype(np.float32)) for _ in range(steps)]
    params = init(depth, dim)
    budget = 0.3
    runs = {"plain": train(loss, params, batches)}
    runs[f"in {budget:.0%}"] = train(jaxsub.sublinear(loss, budget=budget), params, batches)
    print(f"{'':>8} {'temporary, MiB':>15} {'whole step, MiB':>16} {'first loss':>11} {'last loss':>10}")
    for name, (memory, losses) in runs.items():
        temp = memory.temp_size_in_bytes
        whole = temp + memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        print(f"{name:>8} {temp / MIB:15.2f} {whole / MIB:16.2f} {losses[0]:11.6f} {losses[-1]:10.6f}")
    (_, plain), (_, small) = runs.values()
    assert np.allclose(plain, small, rtol=1e-4), "the budget changed the losses"


if __name__ == "__main__":
    main()
