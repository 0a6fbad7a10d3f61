"""Counterparts of JAX's own tests of `jax.checkpoint`: values, transformations, control flow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counterparts import (
    backward,
    everywhere,
    executed,
    make,
    predicted,
    same,
    sines,
    whole,
)
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

import jaxsub
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import trace

COS_SIN = np.cos(np.sin(2.0)) * np.cos(2.0)


@everywhere
def test_remat_basic(wrap):
    """Value, linear map, and, of the whole as a region, one sine again for two cosines."""
    g = wrap(lambda x: (sines(x), 3.0))
    y, linear = jax.linearize(lambda x: g(x)[0], 2.0)
    same((y, linear(3.0)), (np.sin(np.sin(2.0)), 3 * COS_SIN))
    if wrap is whole:
        names = list(executed(jax.make_jaxpr(linear)(3.0)))
        assert (names.count("sin"), names.count("cos")) == (1, 2)


@everywhere
def test_remat_freevars(wrap):
    """A function that closes over a tracer is linearized in it too."""

    def f(wrap, x):
        y = 2 * jnp.sin(x)
        return wrap(lambda x: jnp.cos(x) * jnp.sin(y))(x)

    (y, linear), (wanted, wanted_linear) = (jax.linearize(functools.partial(f, w), 2.0) for w in (wrap, lambda g: g))
    same((y, linear(3.0)), (wanted, wanted_linear(3.0)))


def test_remat_grad_python_control_flow_static_argnums():
    """Python may branch on a static argument; that argument itself has no gradient, and this is said."""
    g = whole(lambda x, up: lax.sin(x) if up else lax.cos(x), static_argnums=1)
    same((g(2.0, True), jax.grad(g)(2.0, True), jax.grad(g)(2.0, False)), (np.sin(2.0), np.cos(2.0), -np.sin(2.0)))
    with pytest.raises(jaxsub.UnsupportedError, match="static and cannot be differentiated"):
        whole(lambda up, x: x, static_argnums=0, argnums=(0, 1))(True, 2.0)


def test_remat_grad_python_control_flow_unhashable_static_argnums():
    """A static argument without a hash is refused with its name and type."""
    with pytest.raises(TypeError, match="static argument `box` must be hashable, got a list"):
        whole(lambda x, box: x * box[0], static_argnums=1)(1.0, [2.0])


@everywhere
def test_remat_retracing(wrap):
    """Ten calls trace the function once."""
    traces = []
    g = wrap(lambda x: (traces.append(x), lax.sin(x))[1])
    for _ in range(10):
        g(2.0)
        jax.grad(g)(2.0)
    assert len(traces) == 1


def test_remat_static_agnums_retracing():
    """Ten calls with equal static arguments trace the function once, and with another one once more."""
    traces = []
    g = whole(lambda n, x: (traces.append(n), lax.sin(x) * n)[1], static_argnums=0)
    for n in [3] * 10 + [4] * 10:
        same(jax.grad(g, argnums=1)(n, 2.0), n * np.cos(2.0))
    assert traces == [3, 4]


@everywhere
def test_remat_jit(wrap):
    """Under jit, and its gradient, and the gradient under jit."""
    g = wrap(sines)
    same((jax.jit(g)(2.0), jax.grad(jax.jit(g))(2.0), jax.jit(jax.grad(g))(2.0)), (sines(2.0), COS_SIN, COS_SIN))


@everywhere
def test_remat_vmap(wrap):
    """Mapped, and both Jacobians; a mapping that brings constants of its own."""
    x = np.arange(3.0, dtype=np.float32)
    g = wrap(lambda x: lax.sin(lax.sin(x)))
    slope = np.diag(np.cos(np.sin(x)) * np.cos(x))
    same((jax.vmap(g)(x), jax.jacfwd(g)(x), jax.jacrev(g)(x)), (np.sin(np.sin(x)), slope, slope))

    @jax.custom_batching.custom_vmap
    def numbered(x):
        return x

    @numbered.def_vmap
    def _(axis_size, in_batched, x):
        return x + np.arange(axis_size, dtype=x.dtype), True

    same(jax.vmap(wrap(lambda x: numbered(x) * 1.0))(jnp.ones(20)), 1.0 + np.arange(20))


@everywhere
def test_remat_vmap_not_leading_dim(wrap):
    """Mapped over the last axis, results along the first."""
    x = np.arange(15.0, dtype=np.float32).reshape(3, 5)
    same(jax.vmap(wrap(sines), 1, 0)(x), np.sin(np.sin(x)).T)


@everywhere
def test_remat_higher_order_autodiff(wrap):
    """The second derivative."""
    f = lambda x: lax.cos(lax.sin(x))  # noqa: E731
    same(jax.grad(jax.grad(wrap(f)))(3.0), jax.grad(jax.grad(f))(3.0))


@pytest.mark.parametrize("f", [sines, lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x)], ids=["sines", "cond"])
def test_remat_higher_order_ad_preserves_remat_primitive(f):
    """The second derivative has regions too."""
    g = whole(f)
    same(jax.grad(jax.grad(g))(0.3), jax.grad(jax.grad(f))(0.3))
    text = str(jax.make_jaxpr(jax.grad(jax.grad(g)))(0.3))
    assert ("RematTraced" if compat.remat_flavour() == "remat3" else "remat2") in text


@everywhere
def test_remat_scan(wrap):
    """As a loop's body; what the whole region recomputes of a step is recomputed in the loop."""

    def f(body):
        return lambda x: lax.scan(body, x, np.arange(3.0, dtype=np.float32))[0]

    step = wrap(lambda c, x: (jnp.sin(c), None))
    same(
        (f(step)(4.0), jax.grad(f(step))(4.0)),
        jax.value_and_grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(4.0),
    )
    if wrap is whole:
        assert backward(f(step), 4.0)["cos"] == 1


def test_remat_no_redundant_flops():
    """A planner recomputes nothing of a function so short: its backward pass starts at once."""
    f = predicted(lambda x, y: jnp.sin(x) * y)
    names = list(executed(jax.make_jaxpr(jax.grad(jax.jit(lambda x: f(2.0, x))))(3.0)))
    assert names.count("sin") <= 1


def test_remat_binomial_checkpointing():
    """Regions nested by halves, two deep."""
    f = lambda x: sines(sines(x))  # noqa: E731
    program = trace(f, (4.0,), {})
    nest = (Segment(0, 2, (), (Segment(0, 1), Segment(1, 2))), Segment(2, 4, (), (Segment(2, 3), Segment(3, 4))))
    halved = jaxsub.sublinear(f, plan=Plan(program.fingerprint, Budget(), 4, nest))
    same(jax.value_and_grad(halved)(4.0), jax.value_and_grad(f)(4.0))


@everywhere
def test_remat_symbolic_zeros(wrap):
    """A loop's body with an unused result and a closed-over tracer."""

    def force(wrap, scale):
        start = jax.random.uniform(jax.random.key(0), (5, 3), maxval=5.0)
        move = wrap(lambda r, i: (r + 0.001 * scale * r, jnp.zeros(1)))
        return lax.scan(move, start, jnp.arange(2))[0][0, 0]

    same(jax.grad(functools.partial(force, wrap))(5.0), jax.grad(functools.partial(force, lambda g: g))(5.0))


@everywhere
def test_remat_jit2(wrap):
    """A function without arguments gives what it closes over, differentiable or not."""
    same(jax.jit(lambda x: wrap(lambda: 2 * x)())(3.0), 6.0)
    assert jax.jit(lambda x: wrap(lambda: 2 * x)())(3) == 6


@everywhere
def test_remat_nontrivial_env(wrap):
    """Defaults, Python numbers and arrays among the arguments of a loop's body."""

    @wrap
    def swing(state, dt=0.5, c=1):
        u, v = state
        v = v + c**2 * u * dt
        return u, v

    @functools.partial(jax.jit, static_argnums=1)
    def steps(state, count, dt, c):
        return lax.scan(lambda s, _: (swing(s, dt, c), None), state, None, count)[0]

    u = jnp.ones((8, 8))
    same(steps((u, 0 * u), 10, 1 / jnp.sqrt(2), 1), (u, 10 / jnp.sqrt(2) * u))
    same(swing((u, 0 * u), c=2), (u, 2 * u))


@everywhere
def test_remat_jit3(wrap):
    """Attention's products, and jitted products of one body."""

    def attention(w, x):
        a = x @ w
        return jnp.sum(jnp.einsum("btT,bTd->btd", jnp.einsum("btd,bTd->btT", a, a), a))

    mul = jax.jit(lambda a, b: a * b)
    same(jax.grad(wrap(attention))(jnp.ones((1, 1)), jnp.ones((1, 1, 1))), jnp.full((1, 1), 3.0))
    same(jax.grad(wrap(lambda w, x: mul(mul(w, x), mul(w, x))))(1.0, 1.0), 2.0)


@everywhere
def test_remat_scan2(wrap):
    """A loop inside, with None for its xs and among the arguments."""
    add = wrap(lambda x, _: (lax.scan(lambda x, _: (x + 1, None), x, xs=None, length=1)[0], None))
    same(jax.grad(lambda x: add(x, None)[0])(1.0), 1.0)


@everywhere
def test_remat_jit_static_argnum_omnistaging(wrap):
    """Python branches on an argument that is static for both."""
    f = wrap(lambda up, y: y + 1 if up else y, static_argnums=0)
    same(jax.jit(f, static_argnums=0)(True, 1.0), 2.0)


def test_remat_eval_counter():
    """A region in a region: two evaluations forward, three in the backward pass."""
    g = whole(lambda x: jnp.exp(whole(jnp.exp)(x)))
    assert list(executed(jax.make_jaxpr(g)(0.0))).count("exp") == 2
    assert backward(g, 0.0)["exp"] == 3


@everywhere
def test_escaped_tracer_remat(wrap):
    """A tracer that escapes is JAX's error still."""

    def f():
        kept = [jnp.zeros([])]

        def g():
            kept[0] += 1
            return kept[0]

        wrap(g)()
        wrap(lambda: g())()

    with pytest.raises(jax.errors.UnexpectedTracerError, match="global state"):
        jax.jit(f)()


def test_no_cse_widget_on_primals():
    """Of a region without gradient barriers the forward pass has no barrier, and the backward pass has one."""
    g = whole(lambda x: (sines(x), 3.0))
    forward, gradient = (jax.jit(f).lower(2.0).as_text() for f in (g, jax.grad(lambda x: g(x)[0])))
    assert "optimization_barrier" not in forward
    assert "optimization_barrier" in gradient


def test_a_primitive_that_cannot_be_compiled():
    """What only runs by its own implementation is planned by counting, and runs so; a promise in bytes is refused."""
    add_one, runs = Primitive("add_one"), []
    add_one.def_impl(lambda x: (runs.append(1), x + 1)[1])
    add_one.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[add_one] = lambda primals, tangents: (
        add_one.bind(*primals), add_one.bind(*primals) * tangents[0],
    )  # fmt: skip
    loss = lambda x: jnp.sin(add_one.bind(jnp.sin(x)))  # noqa: E731
    for wrap in (make, predicted, whole):
        f, runs[:] = wrap(loss), []
        y, pullback = jax.vjp(f, 2.0)
        same((y, pullback(1.0)), jax.vjp(loss, 2.0)[0:1] + (jax.vjp(loss, 2.0)[1](1.0),))
        assert runs
    with pytest.warns(UserWarning, match="cannot be compiled.*add_one"):
        same(make(loss, budget="1MiB")(2.0), loss(2.0))
    with pytest.raises(jaxsub.UnsupportedError, match="verify=False"):
        make(loss, budget="1MiB", verify=True)(2.0)
