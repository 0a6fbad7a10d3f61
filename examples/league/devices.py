"""One command in place of a table of policies for each kind of device that somebody keeps by hand.

A training step of Llama-3.2-1B's sizes, one sequence of 4096, is planned for all that each device has (one line):

    jaxsub plan examples/league/devices.py:step --args examples/league/devices.py:state --step --donate 0
        --budget device --target v100,a100,h100,h200 --json "plan-{target}.json"

A plan is loaded by `jaxsub.jit(step, plan="plan-h100.json")`. Attention is XLA's,
compute f16: cuDNN's attention and bf16 need an A100 or newer.
Nothing is executed; needs `pip install "jaxsub[targets]"`.
"""

from dataclasses import replace
from typing import Any

import jax
from decoder import Weights, loss_of, shapes
from policies import SIZES

import jaxsub

SIZE = replace(SIZES["llama3.2-1b"], attention="xla", dtype="float16", batch=1)
planned = jaxsub.sublinear(loss_of(SIZE))


def step(weights: Weights, tokens: jax.Array) -> tuple[Weights, jax.Array]:
    """One step of plain gradient descent."""
    loss, gradients = jax.value_and_grad(planned)(weights, tokens)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), loss


def state() -> tuple[Any, ...]:
    """Shapes of the weights and of a batch of tokens."""
    return shapes(SIZE)
