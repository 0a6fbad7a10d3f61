"""The update inside the backward scan of steps as users of Flax and Equinox write them, and over a mesh."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from processes import quickly

import jaxsub
from jaxsub.flax import nnx as jaxsub_nnx

LAYERS, WIDTH, HIDDEN = 12, 32, 128
GRADIENTS = 4 * LAYERS * (2 * WIDTH * HIDDEN + HIDDEN + 3 * WIDTH)
X = jax.random.normal(jax.random.key(1), (16, WIDTH))
OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


class LinenBlock(nn.Module):
    """LayerNorm and an MLP."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x)))), None


class LinenNet(nn.Module):
    """Its blocks in `nn.scan`, recomputed."""

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock, prevent_cse=False)
        scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return nn.Dense(1)(scanned()(x, None)[0])


def linen(jit):
    """`TrainState` with `apply_gradients`."""
    net = LinenNet()
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), X), tx=OPTIMIZER)

    @jit(donate_argnums=0)
    def step(state, x):
        value, gradients = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=gradients), value

    memory = step.lower(state, X).compile().memory_analysis()
    for _ in range(3):
        state, value = step(state, X)
    return memory, (state.params, state.opt_state, value), step


class NnxBlock(nnx.Module):
    """LayerNorm and an MLP."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxNet(nnx.Module):
    """Its blocks made by `nnx.vmap` and run by `nnx.scan`, which returns their weights anew."""

    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock, axis_size=LAYERS))(rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        one = nnx.remat(lambda block, x: block(x), prevent_cse=False)
        return self.out(nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x))


def nnx_loss(model, x):
    """A scalar loss."""
    return jnp.mean(model(x) ** 2)


def nnx_step(model, optimizer, x):
    """A step as the tutorials have it."""
    value, gradients = nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, gradients)
    return value


def nnx_state():
    """A model and its optimizer."""
    model = NnxNet(nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def nnx_objects(jit):
    """Modules and `nnx.Optimizer`, updated in place."""
    jit = functools.partial(jaxsub_nnx.jit, **jit.keywords)
    step, (model, optimizer) = jit(donate_argnums=(0, 1))(nnx_step), nnx_state()
    memory = step.lower(model, optimizer, X).compile().memory_analysis()
    for _ in range(3):
        value = step(model, optimizer, X)
    return memory, (nnx.state(model), nnx.state(optimizer), value), step


def nnx_split(jit):
    """`nnx.split` outside, `nnx.merge` inside."""
    graph, state = nnx.split(nnx_state())

    @jit(donate_argnums=0)
    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        value = nnx_step(model, optimizer, x)
        return nnx.state((model, optimizer)), value

    memory = step.lower(state, X).compile().memory_analysis()
    for _ in range(3):
        state, value = step(state, X)
    return memory, (state, value), step


class EqxBlock(eqx.Module):
    """LayerNorm and an MLP."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up, self.down = eqx.nn.Linear(WIDTH, HIDDEN, key=up), eqx.nn.Linear(HIDDEN, WIDTH, key=down)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class EqxNet(eqx.Module):
    """Its blocks stacked by `eqx.filter_vmap`."""

    blocks: EqxBlock
    out: eqx.nn.Linear

    def __init__(self, key):
        self.blocks = eqx.filter_vmap(EqxBlock)(jax.random.split(key, LAYERS))
        self.out = eqx.nn.Linear(WIDTH, 1, key=key)

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @eqx.filter_checkpoint
        def one(x, block):
            return eqx.combine(block, static)(x), None

        return self.out(jax.lax.scan(one, x, arrays)[0])


def equinox(jit):
    """`eqx.filter_value_and_grad` and `eqx.apply_updates`; the model is an argument as it is."""
    model = EqxNet(jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    @jit(donate_argnums=(0, 1))
    def step(model, state, x):
        value, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    memory = step.lower(model, state, X).compile().memory_analysis()
    for _ in range(3):
        model, state, value = step(model, state, X)
    return memory, (eqx.filter((model, state), eqx.is_array), value), step


def test_the_report_names_the_users_line():
    """The line of a scan is the user's, not the library's."""
    step = jaxsub_nnx.jit(nnx_step, memory="1GiB", donate_argnums=(0, 1), progress=False)
    words = str(step.report(*nnx_state(), X))
    assert "inside the backward scan (test_fused_libraries.py" in words


@pytest.mark.parametrize("train", [linen, nnx_objects, nnx_split, equinox])
def test_steps_of_libraries_are_fused(train):
    """As users write them: the same weights and state after three steps, the gradients' bytes gone, all aliased."""
    before, expected, _ = train(functools.partial(jaxsub.jit, fuse_updates=False))
    after, found, _ = train(functools.partial(jaxsub.jit, fuse_updates=True))
    chex.assert_trees_all_close(jax.tree.leaves(found), jax.tree.leaves(expected), rtol=1e-4, atol=1e-6)
    assert after.temp_size_in_bytes < before.temp_size_in_bytes - GRADIENTS / 2
    assert after.alias_size_in_bytes == before.alias_size_in_bytes > 3 * GRADIENTS


MESH = """
import re
import jax, jax.numpy as jnp, optax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxsub

LAYERS, WIDTH, BATCH = 12, 64, 2048
for kind in (AxisType.Auto, AxisType.Explicit):
    is_explicit = kind == AxisType.Explicit
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    jax.set_mesh(mesh)
    spread = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    up, down = (jax.random.normal(jax.random.key(i), (LAYERS, WIDTH, WIDTH)) / 16 for i in range(2))
    params = {"up": spread(up, None, "fsdp"), "down": spread(down, None, "fsdp")}
    x = spread(jax.random.normal(jax.random.key(2), (BATCH, WIDTH)), "fsdp")
    optimizer = optax.adam(1e-2)
    moments = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    state = (optax.ScaleByAdamState(spread(0), *moments), optax.EmptyState())

    def loss(params, x):
        def layer(x, w):
            if is_explicit:
                w = jax.tree.map(lambda a: jax.sharding.reshard(a, P()), w)
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0] ** 2)

    def step(params, state, x):
        value, gradient = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    memory, results = [], []
    for fuses in (False, True):
        run = jaxsub.jit(step, fuse_updates=fuses, donate_argnums=(0, 1))
        compiled = run.lower(params, state, x).compile()
        memory.append(compiled.memory_analysis())
        entry = compiled.as_text().split("ENTRY")[1]
        assert not re.search(r"64,64[^=]* (all-reduce|reduce-scatter)", entry)
        assert re.search(r"f32.64,(64|8).* (all-reduce|reduce-scatter)", compiled.as_text())
        results.append(jax.tree.leaves(run(*jax.tree.map(jnp.copy, (params, state)), x)))
    gradient_bytes = 2 * 4 * LAYERS * WIDTH * WIDTH // 8
    assert memory[1].temp_size_in_bytes < memory[0].temp_size_in_bytes - gradient_bytes / 2, memory
    assert memory[1].alias_size_in_bytes == memory[0].alias_size_in_bytes > 3 * gradient_bytes
    for found, expected in zip(*results):
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
"""


def test_gradients_split_over_a_mesh_are_reduced_inside_the_scan():
    """FSDP on eight devices: no device holds its part of all gradients, and each layer's is reduced in the loop."""
    env = {**os.environ, **quickly(8), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", MESH], check=True, env=env, timeout=240)


def test_an_ensemble_in_a_scan_that_begins_with_a_number():
    """The backward scan starts from the cotangent of a sum of losses, a literal: it updates as it goes."""

    def loss(members):
        return jax.lax.scan(lambda total, w: (total + jnp.mean(jnp.tanh(X @ w) ** 2), None), 0.0, members)[0]

    def step(members):
        value, gradient = jax.value_and_grad(loss)(members)
        return members - 0.1 * gradient, value

    members = jax.random.normal(jax.random.key(2), (LAYERS, WIDTH, HIDDEN))
    runs = [jaxsub.jit(step, fuse_updates=is_fused, donate_argnums=0) for is_fused in (True, False)]
    fused, whole = (run.lower(members).compile().memory_analysis().temp_size_in_bytes for run in runs)
    assert fused < whole - members.nbytes / 2
    chex.assert_trees_all_close(runs[0](jnp.copy(members)), step(members), rtol=1e-6)
