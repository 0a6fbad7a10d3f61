"""A step that another process has planned: its plans are read, and nothing is planned or compiled again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import quickly

TESTS = Path(__file__).parents[1]
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
import jaxsub
import jaxsub.costs.chain_builder

DIM, DEPTH, X = 16, 4, jnp.linspace(0, 1, 512 * 16).reshape(512, 16)
KEYS = jax.random.split(jax.random.key(0), DEPTH)

def gelu():
    def loss(params, x):
        for w in params:
            x = x + jax.nn.gelu(x @ w)
        return (x**2).mean()
    return loss, [jax.random.normal(k, (DIM, DIM)) / 8 for k in KEYS]

def equinox():
    import equinox as eqx
    model = [eqx.nn.MLP(DIM, DIM, 32, 1, activation=jax.nn.gelu, key=k) for k in KEYS]
    params, static = eqx.partition(model, eqx.is_array)
    def loss(params, x):
        for layer in eqx.combine(params, static):
            x = x + jax.vmap(layer)(x)
        return (x**2).mean()
    return loss, params

def linen():
    import flax.linen as nn
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(DEPTH):
                x = x + nn.Dense(DIM)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
            return x
    return lambda params, x: (Net().apply(params, x) ** 2).mean(), Net().init(jax.random.key(0), X)

def flax_nnx():
    from flax import nnx
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(DIM, 32, rngs=rngs), nnx.Linear(32, DIM, rngs=rngs)
        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))
    graph, params = nnx.split(nnx.Sequential(*[Block(nnx.Rngs(i)) for i in range(DEPTH)]))
    return lambda params, x: (nnx.merge(graph, params)(x) ** 2).mean(), params

loss, params = {"gelu": gelu, "equinox": equinox, "linen": linen, "nnx": flax_nnx}[sys.argv[1]]()
planned = jaxsub.sublinear(loss)

@jaxsub.jit(memory=0.75, cache=sys.argv[2], progress=False)
def step(params, momentum, x):
    value, gradient = jax.value_and_grad(planned)(params, x)
    momentum = jax.tree.map(lambda m, g: .9 * m + g, momentum, gradient)
    return jax.tree.map(lambda w, m: w - .1 * m, params, momentum), momentum, value

momentum = jax.tree.map(jnp.zeros_like, params)
if sys.argv[3] == "second":
    jaxsub.costs.chain_builder.Pricer.chain = None
    jax.stages.Lowered.compile = None
found = step.report(params, momentum, X)
told = {name: getattr(found, name) for name in ("step_bytes", "memory_bytes", "plain_bytes")}
print("TOLD " + json.dumps([told, [site.plan.to_json() for site in found.sites]]))
"""


def told(name, cache, which):
    """What a process of its own says of the step."""
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent), **quickly()}
    command = [sys.executable, "-W", "error::UserWarning:jaxsub", "-c", PROGRAM, name, str(cache), which]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.split("TOLD ")[1])


@pytest.mark.parametrize("name", ["gelu", "equinox", "nnx", pytest.param("linen", marks=pytest.mark.exhaustive)])
def test_the_second_process_only_reads(name, tmp_path):
    """The same step in a second process: the same plans and bytes, without pricing, planning or compiling anything."""
    first = told(name, tmp_path, "first")
    assert first[0]["step_bytes"] <= first[0]["memory_bytes"] < first[0]["plain_bytes"]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert told(name, tmp_path, "second") == first
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
