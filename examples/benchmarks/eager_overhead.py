"""What a call of a `sublinear` function costs outside `jax.jit`, next to `jax.checkpoint` of the same function.

Prints both times, medians of repeated calls of `jax.grad` on a chain of layers, and their ratio.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxsub


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """The mean square of what a chain of tanh layers makes."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def median_seconds(fun: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    """The median time of one call, after two that are not counted."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(fun(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), options.layers + 1)
    weights = [jax.random.normal(key, (options.width, options.width)) / options.width**0.5 for key in keys[1:]]
    args = weights, jax.random.normal(keys[0], (options.batch, options.width))
    by_hand = median_seconds(jax.grad(jax.checkpoint(loss)), args, options.repeats)
    planned = median_seconds(jax.grad(jaxsub.sublinear(loss, verify=False)), args, options.repeats)
    print(f"jax.grad(jax.checkpoint(f))    {1e3 * by_hand:8.2f} ms a call")
    print(f"jax.grad(jaxsub.sublinear(f))  {1e3 * planned:8.2f} ms a call")
    print(f"ratio                          {planned / by_hand:8.2f}")


if __name__ == "__main__":
    main()
