"""Whatever a function is made of and is called with, of `sublinear` it comes out the same."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from six_layers import W, X, loss, predicted, same

import jaxsub


def sine(c):
    """sin with a derivative of one's own, c times the true one."""
    op = jax.custom_jvp(jnp.sin)
    op.defjvp(lambda primals, tangents: (op(*primals), c * jnp.cos(primals[0]) * tangents[0]))
    return op


def cosine(c):
    """cos with a backward pass of one's own, c times the true one."""
    op = jax.custom_vjp(lambda c, x: jnp.cos(x), nondiff_argnums=(0,))
    op.defvjp(lambda c, x: (op(c, x), x), lambda c, x, ct: (-c * ct * jnp.sin(x),))
    return functools.partial(op, c)


def scaled(make):
    """Layers with one and the same code, whose derivative rules close over different numbers."""
    return lambda w: sum(jnp.sum(make(c)(make(c)(w @ w) @ w) @ w) for c in (0.5, 2.0, 2.0, 3.0))


def checkpoint_inside(w):
    region = jax.checkpoint(lambda w: jnp.tanh(jnp.sin(w @ w) @ w), policy=jax.checkpoint_policies.dots_saveable)
    return jnp.sum(jnp.tanh(region(region(w) @ w) @ w))


def spectrum(w):
    z = jnp.fft.fft(jnp.tanh(w @ w))
    return jnp.sum(jnp.abs(jnp.fft.fft(jnp.sin(z) * z) @ w) ** 2)


def narrow(dtype):
    def f(w):
        x = low = w.astype(dtype)
        for _ in range(5):
            x = jnp.tanh(x @ low)
        return jnp.sum(x.astype(jnp.float32))

    return f


def eight_bits(w):
    x = w
    for _ in range(4):
        low = lambda a: a.astype(jnp.float8_e4m3fn)  # noqa: E731
        x = jnp.tanh(jnp.dot(low(x), low(w), preferred_element_type=jnp.float32))
    return jnp.sum(x)


def small_integers(w):
    x, n = w, jnp.arange(4, dtype=jnp.uint8)
    for _ in range(4):
        n = (n ^ 3) << 1
        mask = lax.population_count(n) > 0
        x = jnp.tanh(x @ w) * (n.astype(jnp.int8).astype(w.dtype) / 16) * mask
    return jnp.sum(x) + jnp.sum(n)


def integer_path(w):
    x, n = w, jnp.arange(4)
    for _ in range(4):
        n = (n * 3 + 1) % 4
        x = jnp.tanh(x @ w)[n] * (n > 1)
    return jnp.sum(x)


def own_reference(w):
    ref = jax.new_ref(w)
    for _ in range(4):
        ref[...] = jnp.tanh(ref[...] @ w)
    return jnp.sum(ref[...])


FUNCTIONS = {
    "custom_jvp that closes over numbers": scaled(sine),
    "custom_vjp with nondiff_argnums": scaled(cosine),
    "checkpoint with a policy": checkpoint_inside,
    "complex numbers": spectrum,
    "bfloat16": narrow(jnp.bfloat16),
    "float16": narrow(jnp.float16),
    "float8": eight_bits,
    "integers and bools": integer_path,
    "small integers": small_integers,
    "references": own_reference,
    "vmap inside": lambda w: jnp.sum(jax.vmap(lambda r: jnp.tanh(jnp.tanh(r @ w) @ w))(w)),
    "grad inside": lambda w: jnp.sum(jax.grad(lambda w: loss(w, X))(w) ** 2),
    "constant": lambda w: jnp.float32(3.0),
    "identity": lambda w: jnp.sum(w),
}


@pytest.mark.parametrize("fun", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(fun):
    """Value, gradient, and gradients of a batch are those of the plain function, whatever it is made of."""
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if fun in [FUNCTIONS[n] for n in ("bfloat16", "float16", "float8")] else {}
    same(jax.jit(jax.value_and_grad(predicted(fun)))(W), jax.jit(jax.value_and_grad(fun))(W), **tolerance)
    batch = jnp.stack([W, -W])
    same(jax.vmap(jax.grad(predicted(fun)))(batch), jax.vmap(jax.grad(fun))(batch), **tolerance)


def test_complex_layers_within_a_budget():
    """Layers that hand on complex numbers are compiled to be priced, forward and backward, without a warning."""

    def rotations(w, x):
        for _ in range(6):
            x = jnp.fft.fft(jnp.tanh(x.real) + 1j * jnp.sin(x.imag)) @ w
        return jnp.mean(jnp.abs(x))

    args = W / 8, jnp.ones((256, 4), "complex64")
    small = jaxsub.sublinear(rotations, budget=0.6, cache=False, progress=False)
    same(jaxsub.jit(jax.grad(small))(*args), jax.jit(jax.grad(rotations))(*args), atol=1e-5)
    assert jaxsub.measure(small, *args).temp_bytes <= 0.6 * jaxsub.measure(rotations, *args).temp_bytes


def test_references_in_what_is_mapped():
    """References made in a mapped function, inside and outside `sublinear`, with and without `jit`."""
    batch = jnp.stack([W, -W])

    def mapped(f):
        return lambda ws: jnp.sum(jax.vmap(f)(ws))

    wanted = jax.grad(mapped(own_reference))(batch)
    for wrap in (jax.jit, lambda f: f):
        same(wrap(jax.grad(mapped(predicted(own_reference))))(batch), wanted)
        same(wrap(jax.grad(predicted(mapped(own_reference))))(batch), wanted)


def test_closures_over_tracers():
    """A gradient flows to what the function closes over, with arguments of its own or without."""

    def outer(wrap):
        return jax.grad(lambda s: wrap(lambda w: jnp.sum(jnp.tanh(jnp.tanh(w * s) @ w) @ w))(W) ** 2)

    same(outer(predicted)(2.0), outer(lambda f: f)(2.0))
    same(jax.jit(outer(predicted))(2.0), outer(lambda f: f)(2.0))
    alone = jax.grad(lambda w: predicted(lambda: loss(w, X))())
    same(alone(W), jax.grad(loss)(W, X))


@pytest.mark.parametrize("argument", [1.0, 2, np.float32(2), jnp.float32(1), jnp.ones(3, jnp.bfloat16)], ids=repr)
def test_weak_types(argument):
    """Python numbers stay weak, through the function and as its results."""
    for f in (lambda x, y: jnp.sin(x) * 2.0 + y, lambda x, y: (y * 1, 1, 2.0, True, None, jnp.float32(3) * y, x)):
        same(predicted(f)(1.5, argument), jax.jit(f)(1.5, argument))


def test_static_arguments():
    """By position or name, defaults left out, told by position or name: all reach the function as they are."""

    def f(w, mode, n=2, *, squared=False):
        assert type(mode) is str
        assert type(n) is int
        for _ in range(n):
            w = jnp.tanh(w @ w) if mode == "tanh" else jnp.sin(w @ w)
        return jnp.sum(w) ** (2 if squared else 1)

    g = predicted(f, static_argnums=1, static_argnames=("n", "squared"))
    for args, kwargs in [
        ((W, "tanh"), {}),
        ((W, "sin", 3), {"squared": True}),
        ((W,), {"mode": "sin", "n": 1}),
        ((W, "tanh"), {"n": 4}),
    ]:
        same(jax.grad(g)(*args, **kwargs), jax.grad(f)(*args, **kwargs))
    assert predicted(lambda w, n: w * (3 if n is True else n), static_argnums=-1)(1.0, True) == 3
    with pytest.raises(TypeError, match="hashable"):
        g(W, ["tanh"])
    with pytest.raises(ValueError, match="widht"):
        predicted(f, static_argnames="widht")


@jax.tree_util.register_dataclass
@dataclass
class Params:
    """A registered pytree with an empty leaf."""

    w: jax.Array
    rest: dict
    nothing: None = None


def test_pytrees():
    """Registered dataclasses, dictionaries and None go in and come out."""

    def f(params, scale=None, *, more=()):
        x = loss(params.w, X) + sum(jnp.sum(m) for m in more)
        return x, {"params": params, "scale": scale, "logits": X @ params.w}

    args = (Params(W, {"b": jnp.ones(2)}),)
    for kwargs in ({}, {"scale": 2.0}, {"more": [X, W], "scale": None}):
        got = jax.value_and_grad(predicted(f), has_aux=True)(*args, **kwargs)
        same(got, jax.value_and_grad(jax.jit(f), has_aux=True)(*args, **kwargs))
        assert got[0][1]["params"].nothing is None


def test_methods():
    """A decorated method binds to its object; an object that is no pytree is a static argument."""

    class Model:
        scale = 3.0

        @functools.partial(predicted, static_argnums=0)
        def loss(self, w, x):
            return self.scale * loss(w, x)

    same(jax.grad(Model().loss)(W, X), 3.0 * jax.grad(loss)(W, X))


KEYS = {"typed": jax.random.key(0), "raw": jax.random.PRNGKey(0), "rbg": jax.random.key(0, impl="rbg")}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_dropout(key):
    """What is recomputed draws the same mask: typed keys and raw ones."""

    def f(w, key):
        x = w
        for _ in range(4):
            key, sub = jax.random.split(key)
            x = jnp.tanh(x @ w) * jax.random.bernoulli(sub, 0.5, x.shape)
        return jnp.sum(x)

    same(jax.jit(jax.value_and_grad(predicted(f)))(W, key), jax.jit(jax.value_and_grad(f))(W, key))


def test_cotangents_of_what_is_no_float():
    """Integers have tangents and cotangents without bytes, as arguments, as results and round a region."""

    def f(w, n):
        for _ in range(4):
            w = jnp.tanh(w @ w) * n
        return jnp.sum(w), n + 1

    nothing = np.zeros((), jax.dtypes.float0)
    small, cotangents = predicted(f, argnums=(0, 1)), (jnp.float32(1), nothing)
    assert small.plan(W, 3).n_regions > 0
    for take in (
        lambda f: jax.vjp(f, W, 3)[1](cotangents),
        lambda f: jax.grad(lambda *args: f(*args)[0], (0, 1), allow_int=True)(W, jnp.int32(3)),
        lambda f: jax.jvp(f, (W, jnp.int32(3)), (W, nothing)),
        lambda f: jax.linearize(f, W, jnp.int32(3))[1](W, nothing),
    ):
        found, wanted = (list(map(np.asarray, jax.tree.leaves(take(g)))) for g in (small, f))
        assert [a.dtype for a in found] == [a.dtype for a in wanted]
        same([a for a in found if a.dtype != jax.dtypes.float0], [a for a in wanted if a.dtype != jax.dtypes.float0])


def test_associative_scan():
    """Linear recurrences by `associative_scan`, from either end, are planned like the equations they are made of."""

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def f(ws, x):
        for i, w in enumerate(ws):
            gates = jax.nn.sigmoid(x @ w), x @ (2 * w)
            x = x + jnp.tanh(lax.associative_scan(join, gates, reverse=i == 1)[1])
        return jnp.mean(x**2)

    ws, x = [W / 2, W / 4, W], jnp.linspace(-1, 1, 11 * 4).reshape(11, 4)
    small = predicted(f)
    assert small.plan(ws, x).n_regions > 0
    same(jax.jit(jax.value_and_grad(small))(ws, x), jax.jit(jax.value_and_grad(f))(ws, x))
    wide = [jax.ShapeDtypeStruct((128, 128), "float32")] * 3, jax.ShapeDtypeStruct((11, 64, 128), "float32")
    assert jaxsub.measure(small, *wide).temp_bytes < 0.7 * jaxsub.measure(f, *wide).temp_bytes
