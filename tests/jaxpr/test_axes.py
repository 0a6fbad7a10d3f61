"""Which axes are independent: rules one by one, what ends a run, and what is never chunked."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from random_chunks import along

from jaxsub.jaxpr import axis_rules
from jaxsub.jaxpr.axis import NotIndependent
from jaxsub.jaxpr.axis_places import Place, Total

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(6, 4, 3)), jnp.float32)
M = jnp.asarray(RNG.normal(size=(6, 4, 4)), jnp.float32)
IDX = jnp.asarray(RNG.integers(0, 4, size=(6, 4)))
IMAGES = jnp.asarray(RNG.normal(size=(6, 8, 8, 2)), jnp.float32)
T = jnp.tril(M[0]) + 4 * jnp.eye(4)
KERNEL = jnp.asarray(RNG.normal(size=(3, 3, 2, 4)), jnp.float32)


def conv(x, k, **params):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **params)


def looped(x):
    return lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * (i + 1), x)


def branched(x, flag):
    return lax.cond(flag.sum() > 0, lambda x: jnp.sin(x), lambda x: jnp.ones_like(x), x)


def rows_scanned(x):
    return lax.scan(lambda c, row: (c + row, (c * row).sum(-1)), jnp.zeros((4, 3)), x)[1]


PASSES = {
    "dot, batch": (lambda x, m: jnp.einsum("bij,bjk->bik", m, x), (X, M), 0, 0),
    "dot, free of the left": (lambda x, w: x @ w, (X, jnp.ones((3, 5))), 0, 1),
    "dot, free of the right": (lambda w, x: x @ w, (jnp.ones((3, 6)), X), 0, 1),
    "dot, contracted": (lambda x, y: jnp.einsum("bij,bik->jk", x, y), (X, X + 1), 0, 0),
    "two axes of weights": (lambda a, b, x: jnp.tanh(x @ a) @ b, (X[0].T, M[0, :, :2], X), 0, 1),
    "conv, batch": (conv, (IMAGES, KERNEL), 0, 0),
    "conv, features out": (lambda k, x: conv(x, k), (KERNEL, IMAGES), 0, 3),
    "conv, features in": (conv, (IMAGES, KERNEL), 0, 3),
    "grouped conv, batch": (lambda x, k: conv(x, k, feature_group_count=2), (IMAGES, KERNEL[:, :, :1]), 0, 0),
    "split in front": (lambda x: jnp.sin(x.reshape(6, 2, 6)).reshape(24, 3), (X,), 0, 0),
    "merged": (lambda x: jnp.tanh(x.reshape(24, 3) @ jnp.ones((3, 2))).reshape(6, 8), (X,), 0, 0),
    "split within units": (lambda x: jnp.tanh(x.reshape(6, 4, 3)).sum(1), (X.reshape(24, 3),), 0, 0),
    "softmax of others": (lambda x: jax.nn.softmax(x, -1), (X,), 0, 1),
    "cumsum of others": (lambda x: jnp.cumsum(x, 1), (X,), 0, 0),
    "sort of others": (lambda x: jnp.sort(x, 1), (X,), 0, 2),
    "nearly the top of others": (lambda x: lax.approx_max_k(x, 2)[0], (X,), 0, 1),
    "logarithms": (lambda x: jnp.log2(x * x + 1), (X,), 0, 1),
    "tridiagonal": (
        lambda x: jax.vmap(
            lambda d, b: lax.linalg.tridiagonal_solve(
                jnp.zeros(4).at[1:].set(0.5), d * d + 4, jnp.zeros(4).at[:3].set(0.25), b
            )
        )(x[:, :, 0], x),
        (X,),
        0,
        0,
    ),
    "buckets": (lambda x: jnp.searchsorted(jnp.arange(4.0), x) * x, (X,), 0, 1),
    "buckets of others": (lambda x: jax.vmap(jnp.searchsorted)(jnp.sort(x[:, 0]), x[:, 1]), (X,), 0, 0),
    "between points": (lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2), (X,), 0, 2),
    "top of others": (lambda x: lax.top_k(x, 2)[0], (X,), 0, 1),
    "fft of others": (lambda x: jnp.abs(jnp.fft.fft(x)), (X,), 0, 0),
    "matrices": (lambda m: jnp.linalg.cholesky(m @ m.mT + 4 * jnp.eye(4)), (M,), 0, 0),
    "solves": (lambda m: lax.linalg.triangular_solve(jnp.tril(m) + 4 * jnp.eye(4), m, left_side=True), (M,), 0, 0),
    "pooling": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (IMAGES,),
        0,
        3,
    ),
    "lookups": (lambda i, x: x[:, :2][i % 6], (IDX, X), 0, 1),
    "along": (lambda x, i: jnp.take_along_axis(x, i[..., None], 1), (X, IDX), 0, 0),
    "scattered": (lambda x, i: jax.vmap(lambda x, i: x.at[i].add(1.0))(x, i), (X, IDX), 0, 0),
    "scattered window": (lambda x: jnp.zeros((7, 4, 3)).at[jnp.array([1, 1, 2, 3, 0, 6])].add(x), (X,), 0, 1),
    "updated": (lambda x: lax.dynamic_update_slice(x, jnp.sin(x[:, :2]), (0, 1, 0)), (X,), 0, 0),
    "a mask of positions": (lambda x: jnp.where(jnp.arange(6)[:, None, None] > 2, x, 0.0), (X,), 0, 0),
    "a triangle": (lambda a, b: jnp.tril(a) @ b, (M[0], M[1]), 0, 0),
    "a table": (lambda x, t: x * t[:, None], (X, jnp.ones((6, 3))), 0, 0),
    "a class": (lambda x: jax.nn.one_hot(jnp.argmax(x, 2), 3), (X,), 0, 0),
    "padded and turned": (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0)))[:, ::-1], (X,), 0, 0),
    "stacked and joined": (lambda x: jnp.concatenate([jnp.stack([x, x], 1), x[:, None]], 1), (X,), 0, 0),
    "split": (lambda x: jnp.split(x, 2, 1)[1] * 2, (X,), 0, 0),
    "derivatives of functions": (
        lambda x: jax.vmap(jax.grad(lambda z: jnp.sum(jnp.tanh(z) + jax.scipy.special.erf(z))))(x),
        (X,),
        0,
        0,
    ),
    "a special function": (lambda x: lax.zeta(x * x + 2.0, x * x + 1.0), (X,), 0, 0),
    "a loop": (looped, (X,), 0, 2),
    "a loop of rows": (rows_scanned, (X,), 0, 1),
    "a conditional": (branched, (X, IDX), 0, 0),
    "a region": (lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x), (X,), 0, 1),
    "a rule": (jax.nn.relu, (X,), 0, 0),
    "attention": (lambda q, k: jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)) @ k, (X, X + 1), 0, 1),
    "group norm": (lambda x: (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(x.var((1, 2), keepdims=True)), (X,), 0, 0),
}


@pytest.mark.parametrize("name", PASSES)
def test_an_independent_axis_is_found(name):
    """The axis is found, and the function in two and in four slices is the function."""
    f, args, seed, dim = PASSES[name]
    axis, chunked = along(f, *args, seed=seed, dim=dim)
    assert axis.steps
    expected = jax.tree.leaves(f(*args))
    for count in (2, min(4, axis.length)):
        for got, wanted in zip(jax.tree.leaves(chunked(count)(*args)), expected, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def batch_norm(x, w):
    h = x @ w
    return ((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)).sum()


def contrastive(x, w):
    z = (x @ w).reshape(6, -1)
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    return -jnp.diag(jax.nn.log_softmax(z @ z.T)).mean()


@jax.custom_jvp
def constant(x):
    return jnp.round(x)


@constant.defjvp
def _refusing(primals, tangents):
    raise RuntimeError("this cannot be differentiated")


REFUSES = {
    "a rule that refuses": (lambda x, w: (constant(x) @ w).sum(), "does not take tangents of all it reads"),
    "batch norm": (batch_norm, "reads a total over the axis"),
    "softmax over it": (lambda x, w: (jax.nn.softmax(x @ w, 0) ** 2).sum(), "takes the largest over the axis|total"),
    "solved along rows": (lambda x, w: lax.linalg.triangular_solve(T, x[:4, :, 0], left_side=True).sum(), "matrices"),
    "solved whole": (lambda x, w: jnp.linalg.solve(x[:4, :, 0] + T, x[:4, :, 1]).sum(), "part of the axis|matrices"),
    "cumsum over it": (lambda x, w: jnp.sin(jnp.cumsum(x @ w, 0)).sum(), "along the axis"),
    "contrastive": (contrastive, "multiplies every part of the axis"),
    "sorted": (lambda x, w: (jnp.sort(x, 0) * jnp.arange(6.0)[:, None, None] @ w).sum(), "sorts along the axis"),
    "rolled": (lambda x, w: (jnp.roll(x, 1, 0) * x).sum(), "part of the axis"),
    "turned": (lambda x, w: (x[::-1] * x).sum(), "turns the axis round"),
    "a recurrence": (lambda x, w: lax.scan(lambda c, r: (jnp.tanh(c + r), None), x[0], x)[0].sum(), "the axis"),
    "one row": (lambda x, w: x[2].sum(), "part of the axis"),
    "a branch by row": (lambda x, w: lax.map(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r), x).sum(), "axis"),
    "largest": (lambda x, w: x.max(0).sum(), "takes the largest"),
    "a product": (lambda x, w: x.prod(0).sum(), "not by a sum"),
    "transposed together": (lambda x, w: jnp.sin(x.transpose(1, 0, 2).reshape(24, 3)).sum(), "mixes the axis"),
    "convolved": (lambda x, w: lax.conv(x.transpose(1, 2, 0)[None], w[None, :4], (1, 1), "SAME").sum(), "axis"),
    "printed": (lambda x, w: [jax.debug.print("{}", x), x.sum()][1], "must happen once"),
    "called back": (lambda x, w: jax.pure_callback(np.sin, x, x).sum(), "no rule"),
}


@pytest.mark.parametrize("name", REFUSES)
def test_what_mixes_an_axis_is_refused(name):
    """What mixes parts of the axis is refused, and the equation named with its line."""
    f, word = REFUSES[name]
    w = jnp.ones((3, 3)) if name != "convolved" else jnp.ones((4, 3, 3))
    with pytest.raises(NotIndependent, match=word) as refused:
        along(f, X, w, seed=0, dim=0)
    assert "test_axes.py:" in str(refused.value) or name == "printed"


def dropped(key, x):
    """Dropout along all of an array."""
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0.0)


def noisy(key, x):
    """Noise in narrow floats, of a shape that is reshaped."""
    return x + jax.random.normal(key, (x.size // 12, 12), jnp.bfloat16).reshape(x.shape).astype(x.dtype)


def routed(key, x):
    """Noise over experts in a loop, as a mixture of experts has it, and in a rule of the user's."""
    gelu = jax.custom_jvp(lambda x: jax.nn.gelu(dropped(key, x)))
    gelu.defjvp(lambda primals, tangents: (gelu(*primals), tangents[0] * jnp.sign(primals[0])))
    step = lambda x, k: (gelu(x + jax.random.gumbel(k, x.shape)), jnp.argmax(dropped(k, x), -1).astype(x.dtype))  # noqa: E731
    x, chosen = lax.scan(step, x, jax.random.split(key, 3))
    return x * jnp.moveaxis(chosen, 0, -1)


def by_example(key, x):
    """Each example has a key of its own."""
    return jax.vmap(lambda k, x: dropped(k, x))(jax.random.split(key, len(x)), x)


def by_number(key, numbers):
    """Each example has a key made of its number, and draws from two made of that."""

    def drawn(number):
        key_1, key_2 = jax.random.split(jax.random.fold_in(key, number))
        return jax.random.normal(key_1, (4,)) + jax.random.uniform(jax.random.key(number), (4,)) * jax.random.bits(
            key_2
        )

    return jax.vmap(drawn)(numbers)


SPD = M @ M.mT + 4 * jnp.eye(4)
SYSTEMS = {
    "systems": lambda m, x: jnp.linalg.solve(m @ m.mT + 4 * jnp.eye(4), x),
    "positive": lambda m, x: jax.vmap(lambda m, x: jax.scipy.linalg.solve(m, x, assume_a="pos"))(
        m @ m.mT + 4 * jnp.eye(4), x
    ),
    "one matrix": lambda m, x: jax.vmap(lambda v: jnp.linalg.solve(SPD[0], v))(m[:, 0] * x[:, :, 0]),
    "one factor": lambda m, x: jax.vmap(lambda v: jax.scipy.linalg.solve_triangular(T, v))(m[:, 0] * x[:, :, 0]),
    "rows": lambda m, x: lax.linalg.triangular_solve(T, m[:, 0] * x[:, :, 0]),
    "inverses": lambda m, x: jnp.linalg.inv(m @ m.mT + 4 * jnp.eye(4)) @ x,
    "volumes": lambda m, x: jnp.linalg.slogdet(m @ m.mT + 4 * jnp.eye(4))[1],
    "exponentials": lambda m, x: jax.vmap(jax.scipy.linalg.expm)(m / 4) @ x,
    "with what is told beside it": lambda m, x: lax.custom_linear_solve(
        lambda y: y * m[:, :, :3], x, lambda _, b: (b / m[:, :, :3], (b.sum(-1),)), symmetric=True, has_aux=True
    )[0],
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_linear_systems_are_solved_in_slices(name):
    """Each by itself, or columns that share a matrix; values, gradients and second derivatives are the plain ones."""
    f = SYSTEMS[name]
    axis, chunked = along(f, M, X)
    assert not any(eqn.primitive.name == "custom_linear_solve" for eqn in axis.before)

    def twice(f):
        def loss(m, x):
            return (f(m, x) ** 2).sum()

        return jax.jit(lambda m, x: (f(m, x), jax.grad(loss, (0, 1))(m, x), jax.jvp(jax.grad(loss), (m, x), (m, x))[1]))

    for count in (2, 4):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max())),
            twice(chunked(count))(M, X),
            twice(f)(M, X),
        )


def drawn_before(axis):
    return [eqn for eqn in axis.before if eqn.primitive.name == "random_bits"]


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["typed", "raw"])
@pytest.mark.parametrize("fun", [dropped, noisy, routed, by_example])
def test_random_bits_are_drawn_in_the_slice(fun, key):
    """The same bits as the plain program's, none of them whole: in loops and rules too, with any kind of keys."""
    axis, chunked = along(fun, key, X, seed=1)
    assert not drawn_before(axis)
    for count in (2, 4, 6):
        np.testing.assert_allclose(chunked(count)(key, X), fun(key, X), rtol=1e-6)
        inside = str(jax.make_jaxpr(chunked(count))(key, X))
        assert not re.search(r"u(8|32)\[(6,4,3|6,12)\] = (random_bits|xor)", inside)


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["typed", "raw"])
def test_keys_of_numbers_are_made_in_the_slice(key):
    numbers = jnp.arange(7, 13)
    axis, chunked = along(by_number, key, numbers, seed=1)
    assert not drawn_before(axis)
    np.testing.assert_allclose(chunked(3)(key, numbers), by_number(key, numbers), rtol=1e-6)
    with pytest.raises(NotIndependent, match="several keys together"):
        along(by_number, jax.random.key(1, impl="unsafe_rbg"), numbers, seed=1)


def test_raw_keys_are_sliced():
    """Keys of examples that are arrays of integers; the integers of one key are not independent."""
    keys = jax.random.split(jax.random.PRNGKey(3), 6)
    f = lambda keys, x: jax.vmap(lambda k, x: dropped(jax.random.fold_in(k, 2), x))(keys, x)  # noqa: E731
    np.testing.assert_array_equal(along(f, keys, X)[1](3)(keys, X), f(keys, X))
    with pytest.raises(NotIndependent, match="several keys together"):
        along(lambda key: jax.random.normal(key, (3,)), keys[0])


@pytest.mark.parametrize("dim", [1, 2])
def test_bits_are_drawn_along_any_dimension(dim):
    key = jax.random.key(1)
    axis, chunked = along(dropped, key, X, seed=1, dim=dim)
    assert not drawn_before(axis)
    np.testing.assert_array_equal(chunked(2)(key, X), dropped(key, X))


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_bits_whose_parts_cannot_be_drawn_alone_are_drawn_whole(impl):
    """Those of other generators, and of threefry as it was: drawn whole, and sliced."""
    key = jax.random.key(1, impl=impl)
    with jax.threefry_partitionable(impl == "rbg"):
        axis, chunked = along(dropped, key, X, seed=1)
        assert drawn_before(axis)
        np.testing.assert_array_equal(chunked(3)(key, X), dropped(key, X))
        np.testing.assert_array_equal(along(routed, key, X, seed=1)[1](3)(key, X), routed(key, X))


def test_masks_are_made_in_the_slice():
    """A mask and a broadcast constant are made at the slice's shape: neither stands whole, nor is it sliced."""

    def masked(q, k):
        scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ k.T, -1e9)
        return jax.nn.softmax(scores) @ k

    q = X[:, 0]
    axis, chunked = along(masked, q, q + 1)
    assert max(v.aval.size for eqn in axis.before for v in eqn.outvars) < 36
    assert [v.aval.shape for v, _ in axis.cut] == [(6, 3)]
    np.testing.assert_allclose(chunked(3)(q, q + 1), masked(q, q + 1), rtol=1e-6, atol=1e-6)


def test_an_inner_gradient_begins_in_the_slice():
    """It begins with ones for all examples, times a matrix: products of broadcasts are made at the slice's shape."""

    def force(w, x):
        return jax.grad(lambda x: (jnp.tanh(x @ w[0]) @ w[1]).sum())(x)

    w, x = (X[0, :3], X[1, :3]), X[:, 0]
    axis, chunked = along(force, w, x, seed=2)
    assert [v.aval.shape for v, _ in axis.cut] == [(6, 3)]
    assert not [eqn for eqn in axis.before if eqn.primitive.name == "dot_general"]

    def twice(f):
        loss = lambda w, x: (f(w, x) ** 2).sum()  # noqa: E731
        return jax.jit(lambda w, x: (f(w, x), jax.grad(loss, (0, 1))(w, x)))(w, x)

    flat = lambda w, x: chunked(3)(*w, x)  # noqa: E731
    chex.assert_trees_all_close(twice(flat), twice(force), rtol=1e-5, atol=1e-6)


def test_masks_of_an_inner_gradients_layers_come_in_slices():
    """Its forward pass makes masks that do not depend on the axis, and its backward pass reads them along it."""

    def force(w, x, key):
        def layer(h, inputs):
            weight, key = inputs
            return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), jnp.tanh(h @ weight), 0), None

        return jax.grad(lambda x: lax.scan(layer, x, (w, jax.random.split(key)))[0].sum())(x)

    w, x, key = jnp.stack([X[0, :3], X[1, :3]]), X[:, 0], jax.random.key(0)
    axis, chunked = along(force, w, x, key, seed=1)
    assert [v.aval.shape for v, _ in axis.cut] == [(6, 3)]
    np.testing.assert_allclose(chunked(3)(w, x, key), force(w, x, key), rtol=1e-5, atol=1e-6)


def test_a_product_of_data_is_not_made_again_in_slices():
    """Only broadcasts are: of another batch the product is made once, and sliced."""
    axis, chunked = along(lambda x, y, w: jnp.sin(x) + y @ w, X[:, 0], X[:, 1], X[0, :3])
    assert [eqn.primitive.name for eqn in axis.before] == ["dot_general"]
    np.testing.assert_allclose(chunked(3)(X[:, 0], X[:, 1], X[0, :3]), jnp.sin(X[:, 0]) + X[:, 1] @ X[0, :3], rtol=1e-5)


def test_totals_are_put_together():
    """Sums are added up, the largest of what has no gradient is kept, and what reads them follows the slices."""

    def measured(x):
        return x.sum() / x.size, lax.stop_gradient(x).max(0), (x > 0).any(0), (x > -9).all(), (x > 0).sum()

    axis, chunked = along(measured, X)
    assert {how for how in axis.places.values() if isinstance(how, Total)} == {Total("sum"), Total("max"), Total("min")}
    for got, wanted in zip(chunked(4)(X), measured(X), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_there_are_rules_for_seventy_primitives():
    """The rules cover at least seventy primitives beside those that hold jaxprs."""
    names = {*axis_rules.ELEMENTWISE, *axis_rules.LINALG, *axis_rules.WINDOWS, *axis_rules.RULES}
    assert len(names) >= 70


def test_what_a_slice_leaves_out_is_left_out():
    """Of an axis whose last units a slice leaves out, as next-token losses do, the first run in slices."""

    def loss(x, w, y):
        logits = jnp.tanh(x) @ w
        losses = jax.nn.logsumexp(logits[:, :-1], -1) - jnp.take_along_axis(logits[:, :-1], y[:, 1:, None], -1)[..., 0]
        return losses.mean()

    w = jnp.asarray(RNG.normal(size=(3, 5)), jnp.float32)
    axis, chunked = along(loss, X, w, IDX, dim=1)
    assert axis.length == 3
    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(X, w, IDX) for f in (chunked(2), loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.parametrize(
    "f", [lambda x: (x[:, :-1].sum(), (x * 2).sum()), lambda x: (x[:, :-1].sum(), x + 1), lambda x: x[:, 1:].sum()]
)
def test_what_a_slice_leaves_out_may_not_be_read(f):
    """Where all of an axis is read too, or its first units are left out, it is not independent."""
    with pytest.raises(NotIndependent, match=r"part of the axis|of which a slice takes a part"):
        along(f, X, dim=1)


def test_units_are_as_coarse_as_reshapes_need():
    """Tokens that are reshaped to sequences are sliced by sequences."""
    axis, _ = along(lambda x: jnp.cumsum(x.reshape(6, 4, 3), 1), X.reshape(24, 3))
    assert axis.length == 6
    assert axis.cut[0][1] == Place(0, 4)
