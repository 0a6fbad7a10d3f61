"""JAX's own settings hold of `sublinear` too: strict promotion, checks, 64 bits, either kind of `jax.checkpoint`."""

import textwrap
from concurrent.futures import ThreadPoolExecutor

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


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_nans_are_found_in_slices(around):
    """The operation is named, as without `sublinear`, not the call that runs it a slice at a time."""
    planned = jaxsub.sublinear(lambda w, x: jnp.mean(jnp.log(jnp.tanh(x @ w) - 2) ** 2), chunks={0: 8}, cache=False)
    w, x = jnp.eye(8), jnp.ones((64, 8))
    assert planned.plan(w, x).slices
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
        around(jax.grad(planned))(w, x)


def test_nans_of_values_alone_are_not_passed_over():
    """A call without a derivative raises too, where no operation of the slices by itself is found to be at fault."""

    def bad(w, x):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.log(-(x**2)))

    planned = jaxsub.sublinear(bad, chunks={0: 8}, cache=False)
    w, x = jnp.eye(64), jnp.ones((512, 64))
    assert planned.plan(w, x).slices
    with jax.debug_nans(True):
        for call in (bad, planned, jax.value_and_grad(planned)):
            with pytest.raises(FloatingPointError, match="invalid value"):
                call(w, x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        planned.__wrapped__(w, x)


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


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # of JAX, where the loss is traced
def test_x64_arrays_where_x64_is_off():
    """Arrays of 64 bits that outlive the context they were made in keep them, in loss, plan and whole step."""
    with jax.enable_x64(True):
        w, x = W.astype(jnp.float64), jnp.tile(X, (8, 1)).astype(jnp.float64)
    wanted = jax.value_and_grad(loss)(w, x)
    f = jaxsub.sublinear(loss, budget=0.9, cache=False, progress=False)
    for planned in (predicted(loss), f):
        got = jax.jit(jax.value_and_grad(planned))(w, x)
        assert [v.dtype for v in got] == [v.dtype for v in wanted]
        same(got, wanted, rtol=1e-6)
    assert (
        f.measure(w, x).temp_bytes == f.plan(w, x).measurement.temp_bytes <= 0.9 * jaxsub.measure(loss, w, x).temp_bytes
    )
    step = jaxsub.jit(lambda w, x: w - jax.grad(f)(w, x), memory=0.95, cache=False, progress=False)
    assert step(w, x).dtype == w.dtype
    assert f.frontier(w, x).plans
    assert f.explain(w, x).residuals


def test_x64_is_switched_in_threads():
    """Threads that plan, verify and run in 32 and in 64 bits at once get each its own dtypes and values."""
    losses = [lambda w, x, n=n: loss(w, x) + jnp.sum(jnp.sin(x @ w) ** n) for n in (2, 3)]
    planned = [jaxsub.sublinear(f, verify=True, cache=False, progress=False) for f in losses]

    def work(number):
        bits, which = (32, 64)[number % 2], number // 2 % 2
        with jax.enable_x64(bits == 64):
            w, x = W.astype(f"float{bits}"), X.astype(f"float{bits}")
            got = jax.jit(jax.value_and_grad(planned[which]))(w, x)
            return bits, got, jax.value_and_grad(losses[which])(w, x), jnp.zeros(3).dtype

    with ThreadPoolExecutor(4) as pool:
        for bits, got, wanted, dtype in pool.map(work, range(8)):
            assert [v.dtype for v in got] == [dtype, dtype] == [f"float{bits}"] * 2
            same(got, wanted, rtol=1e-5 if bits == 32 else 1e-13)


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


@pytest.mark.parametrize("budget", [None, 0.6, 0.3])
def test_plans_are_made_under_the_check_for_keys_that_are_used_twice(budget):
    """What is recomputed draws its bits again, with the same key: JAX's check is for the function as it is."""

    def loss(ws, x, key):
        for w in ws:
            key, own = jax.random.split(key)
            x = jnp.tanh(x @ w) * jax.random.bernoulli(own, 0.9, x.shape)
        return jnp.mean(x**2)

    with jax.debug_key_reuse(True):
        plan = jaxsub.plan(loss, [jnp.eye(64)] * 6, jnp.ones((1024, 64)), jax.random.key(0), budget=budget,
                           cache=False, progress=False)  # fmt: skip
    assert plan.segments or plan.slices
