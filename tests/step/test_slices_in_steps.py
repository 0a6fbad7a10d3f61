"""Whole steps whose functions run in slices: where recomputation alone does not fit, in memory and in the batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsub
from jaxsub.devices.compile import measure_compiled

ROWS, WIDTH, CLASSES = 512, 32, 8192
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, CLASSES, ROWS))
W = jnp.asarray(RNG.normal(size=(WIDTH, CLASSES)) / 6, jnp.float32)
MEMORY = 8 * 2**20


def loss(w, x, y):
    """A loss over many classes, as next-token losses are."""
    logits = jnp.tanh(x @ w[:, :WIDTH]) @ w
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]).mean()


def step_of(loss):
    def step(w, x, y):
        value, gradient = jax.value_and_grad(loss)(w, x, y)
        return w - 0.1 * gradient, value

    return step


def test_a_step_fits_in_slices():
    """A step that no recomputation fits into its memory runs in slices and trains as before; `chunks=False` forbids."""
    step = jaxsub.jit(step_of(jaxsub.sublinear(loss)), memory=MEMORY, donate_argnums=0, progress=False)
    report = step.report(W, X, Y)
    assert report.sites[0].plan.slices
    assert jaxsub.measure(loss, W, X, Y).step_bytes > 2 * MEMORY
    assert report.step_bytes <= MEMORY
    wanted = jax.jit(step_of(loss))(W, X, Y)
    for a, b in zip(step(W + 0, X, Y), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    whole = jaxsub.jit(step_of(jaxsub.sublinear(loss, chunks=False)), memory=MEMORY, progress=False)
    with pytest.raises(jaxsub.InfeasibleBudgetError):
        whole.report(W, X, Y)


def test_a_step_runs_in_no_more_slices_than_fit():
    """Each slice reads and writes the weights: with twice the memory a step takes at most half as many slices."""
    counts = []
    for memory in (MEMORY, 2 * MEMORY):
        step = jaxsub.jit(step_of(jaxsub.sublinear(loss)), memory=memory, donate_argnums=0, progress=False)
        report = step.report(W, X, Y)
        counts.append(max(run.count for run in report.sites[0].plan.slices))
        assert report.step_bytes <= memory
    assert 2 <= 2 * counts[1] <= counts[0]


def test_the_sums_that_slices_add_up_are_counted():
    """A gradient returns them; in a step they are temporary, and as large here as a third of what slices leave."""

    def blocks(ws, x):
        for w in ws:
            x = x + jax.nn.gelu(x @ w) @ w.T
        return (x**2).mean()

    def step(loss, ws, momenta, x):
        gradients = jax.grad(loss)(ws, x)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momenta), momenta

    ws = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    args = ws, ws, jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    plain = measure_compiled(partial(step, blocks), args, donate_argnums=(0, 1))
    memory = plain.step_bytes - int(0.6 * plain.temp_bytes)
    planned = partial(step, jaxsub.sublinear(blocks))
    report = jaxsub.jit(planned, memory=memory, donate_argnums=(0, 1), progress=False).report(*args)
    assert report.step_bytes <= memory
    print(f"{report.extra:.2f} of a forward pass, {report.n_compiles} compiles")
    assert report.sites[0].plan.slices
    assert report.extra < 0.01


def test_the_largest_batch_uses_slices():
    """With slices a batch fits that is several times the largest one that fits as it stands."""

    def step_for_batch(n):
        shapes = jax.ShapeDtypeStruct((n, WIDTH), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
        return step_of(jaxsub.sublinear(loss)), (jax.ShapeDtypeStruct(W.shape, W.dtype), *shapes)

    found = jaxsub.max_batch(step_for_batch, memory=MEMORY, multiple_of=64, progress=False, donate_argnums=0)
    assert found.planned >= 8 * found.plain
    assert found.report.sites[0].plan.slices
    assert found.report.step_bytes <= MEMORY


@pytest.mark.parametrize("share", [0.6, 0.3])
def test_convolutions_run_in_slices_on_a_cpu_where_nothing_else_fits(share):
    """In a loop they take many times as long there."""

    def convolutions(ws, x):
        for w in ws:
            h = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = x + jax.nn.silu(h) * jax.nn.sigmoid(h)
        return (x**2).mean()

    def step(ws, x):
        return jax.tree.map(
            lambda w, g: w - 0.1 * g, ws, jax.grad(jaxsub.sublinear(convolutions, progress=False))(ws, x)
        )

    args = [jnp.full((3, 3, 16, 16), 0.01)] * 8, jnp.ones((16, 32, 32, 16))
    plain = jaxsub.measure(convolutions, *args)
    memory = plain.step_bytes - int((1 - share) * plain.temp_bytes)
    report = jaxsub.jit(step, memory=memory, donate_argnums=0, progress=False).report(*args)
    assert report.step_bytes <= memory
    assert not report.sites[0].plan.slices
