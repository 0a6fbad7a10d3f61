"""Counterparts of JAX's own tests of `jax.checkpoint`: what is compiled once, and odds and ends."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counterparts import everywhere, predicted, same, saving, whole


@pytest.fixture
def compiles(caplog):
    """Run something twenty times and count what JAX says that it compiled."""

    def run(f):
        caplog.clear()
        with jax.log_compiles():
            for _ in range(20):
                jax.block_until_ready(f())
        return sum("Compiling" in record.message for record in caplog.records)

    return run


double = jax.jit(lambda x: 2 * x)


@everywhere
def test_linearize_caching(wrap, compiles):
    """A linear map is compiled once."""
    linear = jax.linearize(wrap(double), 1.0)[1]
    assert compiles(lambda: linear(1.0)) <= 1


@everywhere
def test_vjp_caching(wrap, compiles):
    """A backward pass is compiled once, and so is what makes its cotangent."""
    pullback = jax.vjp(wrap(double), 1.0)[1]
    assert compiles(lambda: pullback(1.0)) <= 2


def test_vjp_caching_static_argnums(compiles):
    """The same with a static argument."""
    f = whole(lambda x, y: 2 * x if y else x, static_argnums=1)
    pullback = jax.vjp(lambda x: f(x, True), 1.0)[1]
    assert compiles(lambda: pullback(1.0)) <= 2


@everywhere
def test_fwd_caching(wrap, compiles):
    """Differentiating anew compiles nothing anew."""
    f = wrap(double)
    assert compiles(lambda: jax.vjp(f, 1.0)[0]) <= 1


def test_fwd_caching_static_argnums(compiles):
    """Calling anew compiles nothing anew."""
    f = whole(lambda n, x: n * x, static_argnums=0)
    assert compiles(lambda: f(2, 1.0)) <= 1


def test_excess_precision_hell():
    """What a region hands to its backward pass in bf16 is what the forward pass had, to the bit."""
    dot = jax.custom_vjp(lambda x: jnp.dot(x, x))
    dot.defvjp(lambda x: (dot(x), None), lambda _, ct: (ct,))
    wide = jax.custom_vjp(lambda x: jnp.float32(1) * x.astype("float32"))
    wide.defvjp(lambda x: (wide(x), x), lambda x, ct: (jnp.float32(1) * x.astype("float32"),))
    x = (jnp.bfloat16(1) + jnp.finfo("bfloat16").eps) * jnp.eye(2, dtype="bfloat16")
    for wrap in (whole, predicted, saving("custom_vjp_call")):
        y, pullback = jax.vjp(jax.jit(wrap(lambda x: wide(dot(x)))), x)
        assert jnp.array_equal(pullback(jnp.ones_like(y))[0].astype("float32"), y)


@pytest.mark.parametrize("static", [(), 1], ids=["", "static_argnums"])
def test_concreteness_error_includes_user_code(static):
    """Branching on a value is JAX's error, whose traceback shows the user's line."""

    def f(x, _):
        if x > 0:  # the user's line
            return x
        return jnp.sin(x)

    with pytest.raises(jax.errors.TracerBoolConversionError) as refused:
        whole(f, static_argnums=static)(3.0, 1.0)
    assert "if x > 0:  # the user's line" in str(refused.traceback[-1].statement) + str(
        [entry.statement for entry in refused.traceback]
    )


def test_name_stack_annotation():
    """The user's named scopes are in the backward pass, once under recomputation."""

    @whole
    def f(x, ws):
        for w in ws:
            with jax.named_scope("layer"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    x, ws = jnp.ones((6, 6)), [jnp.ones((6, 8)), jnp.ones((8, 6))]
    text = jax.jit(jax.grad(f)).lower(x, ws).as_text(debug_info=True)
    assert re.search(r"rematted_computation.*layer", text)


def test_remat_grad_accum_refs():
    """A backward pass adds into a reference."""
    f = whole(jnp.sin)
    y, pullback = jax.vjp(f, jnp.float32(2))
    total = jax.new_ref(jnp.float32(1))
    pullback.with_refs(total)(jnp.float32(1))
    same((y, total[...]), (np.sin(2.0), 1 + np.cos(2.0)))
