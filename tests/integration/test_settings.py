"""JAX's own settings hold of `sublinear` too: strict promotion, checks, 64 bits, either kind of `jax.checkpoint`."""

import textwrap

import jax
import jax.numpy as jnp
import pytest
from six_layers import LOSS, W, X, in_a_process, loss, predicted, same

import jaxsub
from jaxsub.jaxpr.identity import of_jax


def test_strict_promotion_leaks_checks_and_nans():
    """JAX's own checks find nothing to complain of, and NaNs are still found."""
    settings = (
        jax.numpy_dtype_promotion("strict"),
        jax.checking_leaks(),
        jax.enable_checks(True),
        jax.debug_nans(True),
    )
    for setting in settings:
        with setting:
            same(jax.jit(jax.grad(predicted(loss)))(W, X), jax.grad(loss)(W, X))
            over_tracers = jax.jit(jax.grad(lambda s: predicted(lambda w: jnp.sum(jnp.tanh(w * s) @ w))(W)))
            same(over_tracers(2.0), jax.grad(lambda s: jnp.sum(jnp.tanh(W * s) @ W))(2.0))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.grad(predicted(lambda w: jnp.sum(jnp.log(jnp.tanh(w - 5) @ w) @ w)))(W)


def test_x64_in_a_context():
    """Inside jax.enable_x64 the function is traced, priced and compiled in 64 bits, and in 32 outside."""
    f = jaxsub.sublinear(loss, cache=False, progress=False)
    with jax.enable_x64(True):
        w, x = W.astype(jnp.float64), X.astype(jnp.float64)
        same(jax.grad(f)(w, x), jax.grad(loss)(w, x), rtol=1e-14, atol=1e-14)
    same(jax.grad(f)(W, X), jax.grad(loss)(W, X))


def test_python_number_in_two_precisions():
    """One call with a Python number in 32 and then in 64 bits: each result has its own dtype."""
    f = predicted(lambda x: jnp.sin(x) * x)
    assert f(2.0).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(2.0).dtype == jnp.float64


def test_x64_is_switched_between_planned_calls():
    """One function planned and compiled in 64 bits, in 32, and in 64 again; JAX computes as before in between."""
    f, plain = jaxsub.sublinear(loss, verify=True, cache=False, progress=False), jax.grad(loss)
    for bits in (64, 32, 64, 32):
        with jax.enable_x64(bits == 64):
            for dtype in ("float32", f"float{bits}"):
                w, x = W.astype(dtype), jnp.tile(X, (8, 1)).astype(dtype)
                same(jax.jit(jax.grad(f))(w, x), plain(w, x))
            assert jnp.zeros(3).dtype == (jnp.cumsum(x, 0) * 2.0).dtype == f"float{bits}"
    with jax.enable_x64(True):
        in_64_bits = of_jax()
    assert in_64_bits != of_jax()  # plans and prices on disk keep the two apart


def test_x64_everywhere():
    """With 64 bits from the start all is done in them."""
    code = (
        "f = jaxsub.sublinear(loss, budget=.6, cache=False)\nassert jnp.abs(jax.grad(f)(w, x) - wanted).max() < 1e-15"
    )
    in_a_process(LOSS + "assert wanted.dtype == jnp.float64\n" + code, JAX_ENABLE_X64="1")


@pytest.mark.parametrize("flag", ["true", "false"])
def test_remat3(flag):
    """With either of JAX's implementations gradients stay, mapped ones with names too, and regions save memory."""
    code = """
    f = jaxsub.sublinear(loss, cache=False)
    assert jnp.allclose(jax.jit(jax.grad(f))(w, x), wanted, atol=1e-6)
    assert jaxsub.measure(f, w, x).temp_bytes < jaxsub.measure(loss, w, x).temp_bytes
    def residual(ws, x):
        for w in ws:
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean(x**2)
    named = jaxsub.sublinear(residual, budget=.5, cache=False, verify=False, chunks=False)
    assert any(s.saved for s in named.plan([w] * 8, x).segments)
    mapped = jax.vmap(jax.grad(named), (None, 0))
    assert jnp.allclose(mapped([w] * 8, x[None])[3][0], jax.grad(named)([w] * 8, x)[3], atol=1e-5)
    """
    in_a_process(LOSS + textwrap.dedent(code), JAX_REMAT3=flag)
