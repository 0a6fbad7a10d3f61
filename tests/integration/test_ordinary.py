"""What everybody writes: dropout with keys that are split on, joined products, metrics behind the loss."""

import chex
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import pytest
from jax import random
from jax.custom_derivatives import SymbolicZero
from jax.experimental import io_callback
from jax.interpreters import ad, mlir
from six_layers import same

import jaxsub

WEIGHTS, X = [0.2 * random.normal(k, (16, 16)) for k in random.split(random.key(1), 3)], jnp.ones((32, 16))


def split_on(key, x, i):
    key, k = random.split(key)
    return key, random.bernoulli(k, 0.9, x.shape)


def folded(key, x, i):
    return key, random.bernoulli(random.fold_in(key, i), 0.9, x.shape)


def folded_on(key, x, i):
    key = random.fold_in(key, i)
    return key, random.bernoulli(key, 0.9, x.shape)


def split_into_many(key, x, i):
    keys = random.split(key, 3)
    return keys[i], random.bernoulli(keys[2 - i], 0.9, x.shape)


def mapped(key, x, i):
    keys = random.split(key, len(x))
    return keys[0], jax.vmap(lambda k, row: random.bernoulli(k, 0.9, row.shape))(keys, x)


DROPOUTS = (split_on, folded, folded_on, split_into_many, mapped)


def dropping(drop, is_first=False):
    def loss(ws, x, key):
        for i, w in enumerate(ws):
            x = x if is_first else jnp.tanh(x @ w)
            key, is_kept = drop(key, x, i)
            x = jnp.where(is_kept, x / 0.9, 0)
            x = jnp.tanh(x @ w) if is_first else x
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("make", [random.key, random.PRNGKey], ids=["typed", "raw"])
@pytest.mark.parametrize("drop", DROPOUTS)
def test_dropout_is_planned(drop, make):
    """Keys that are split, folded in, passed on or mapped inside the loss: compiled prices, and the plain gradients."""
    loss, key = dropping(drop, is_first=drop is folded_on), make(0)
    planned = jaxsub.sublinear(loss, cache=False, progress=False)
    same(jax.jit(jax.value_and_grad(planned))(WEIGHTS, X, key), jax.jit(jax.value_and_grad(loss))(WEIGHTS, X, key))


def test_a_joined_product_of_a_million_elements():
    """A product that is fused with its large input is planned: a broadcast operand is in the product's buffer."""

    def loss(ws, x):
        for w, b, v in ws:
            x = jnp.tanh(jnp.concatenate([x @ w + b, x], -1) @ v)
        return jnp.mean(x**2)

    w, b, v, x = (jax.ShapeDtypeStruct(s, "float32") for s in [(128, 128), (128,), (256, 128), (8192, 128)])
    assert jaxsub.plan(loss, [(w, b, v)] * 4, x, verify=False, cache=False, progress=False).n_regions


METRICS = {
    "a maximum": lambda loss, h: h.max(),
    "a count": lambda loss, h: {"positive": jnp.sum(h > 0), "rate": jnp.mean(h > 0)},
    "a product": lambda loss, h: jnp.argmax(h @ h.T, -1),
    "the loss itself": lambda loss, h: jnp.sqrt(loss),
}


@pytest.mark.parametrize(
    ("metric", "asked"),
    [*((name, {}) for name in METRICS), ("a count", {"budget": 0.8}), ("a count", {"planner": "chen"})],
)
def test_a_metric_behind_the_loss(metric, asked):
    """A metric made after the loss is an auxiliary result like one made before it."""

    def loss(ws, x):
        for w in ws:
            x = x + jnp.sin(jnp.tanh(x @ w)) * jnp.cos(x)
        found = jnp.mean(x**2)
        return found, METRICS[metric](found, x)

    planned = jaxsub.sublinear(loss, **asked, cache=False, progress=False)
    gradients = (jax.jit(jax.value_and_grad(f, has_aux=True))(WEIGHTS, X) for f in (planned, loss))
    same(*gradients)


@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
def test_a_frontier_leaves_out_what_must_run_once(ordered):
    """Every plan of a frontier, and those beside it, keep an `io_callback` out of their regions, and run."""
    seen = []

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
            io_callback(lambda v: seen.append(v), None, jax.lax.stop_gradient(x.sum()), ordered=ordered)
        return jnp.mean(x**2)

    found = jaxsub.frontier(loss, WEIGHTS * 2, X, points=3, verify=False, cache=False)
    for point in (*found.points, *found.others):
        seen.clear()
        planned = jaxsub.sublinear(loss, plan=point.plan, progress=False)
        jax.block_until_ready(jax.jit(jax.grad(planned))(WEIGHTS * 2, X))
        jax.effects_barrier()
        assert len(seen) == 6


@jax.custom_vjp
def with_count(x):
    """A library's rule that has no gradient of its second result, and says so where one is asked for."""
    return jnp.tanh(x), jnp.sum(x > 0, dtype=x.dtype)


def no_gradient_of_the_count(x, cotangents):
    cotangent, of_count = cotangents
    if not isinstance(of_count, SymbolicZero):
        raise ValueError("no gradient of the count")
    return (cotangent * (1 - jnp.tanh(x) ** 2),)


with_count.defvjp(lambda x: (with_count(x.value), x.value), no_gradient_of_the_count, symbolic_zeros=True)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_rule_that_refuses_cotangents_of_all_results(in_a_loop):
    """A stage that cannot be differentiated by itself is left as it is, and the function is planned around it."""

    def layer(carry, w):
        x, total = carry
        x, count = with_count(x @ w)
        return (jnp.sin(jnp.tanh(x @ w) @ w), total + jax.lax.stop_gradient(count)), None

    def loss(ws, x):
        carry = x, jnp.zeros(())
        if in_a_loop:
            carry, _ = jax.lax.scan(layer, carry, jnp.stack(ws))
        else:
            for w in ws:
                carry, _ = layer(carry, w)
        return jnp.mean(carry[0] ** 2) + 0 * carry[1]

    ws = [*WEIGHTS, *WEIGHTS]
    small = jaxsub.sublinear(loss, budget=0.8, cache=False, progress=False)
    same(jaxsub.jit(jax.value_and_grad(small))(ws, X), jax.jit(jax.value_and_grad(loss))(ws, X))
    assert small.plan(ws, X).measurement.temp_bytes <= 0.8 * jaxsub.measure(loss, ws, X).temp_bytes


def _scaled_primitive():
    """A primitive with a parameter that is named as the first argument of policies is, as Equinox makes."""
    scaled_p = jex_core.Primitive("scaled")
    scaled_p.def_impl(lambda x, *, prim: x * prim)
    scaled_p.def_abstract_eval(lambda x, *, prim: x)
    mlir.register_lowering(scaled_p, mlir.lower_fun(lambda x, *, prim: x * prim, multiple_results=False))
    ad.deflinear2(scaled_p, lambda ct, x, **params: [scaled_p.bind(ct, **params)])
    return scaled_p


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_primitive_whose_parameter_is_called_as_a_policys_argument(is_scanned):
    scaled_p = _scaled_primitive()
    weights, x = jnp.stack([jnp.eye(64)] * 8), jnp.ones((256, 64)) / 2

    def layer(x, w):
        return jnp.tanh(scaled_p.bind(jnp.sin(x @ w), prim=0.5)), None

    def loss(weights, x):
        if is_scanned:
            return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()
        for w in weights:
            x, _ = layer(x, w)
        return (x**2).mean()

    planned = jaxsub.sublinear(loss, budget=0.4, chunks=False, cache=False)
    chex.assert_trees_all_close(jax.grad(planned)(weights, x), jax.grad(loss)(weights, x), rtol=1e-6)
    for policy in ("save_costly", jax.checkpoint_policies.save_only_these_names("a")):
        layered = jaxsub.policies.checkpoint(loss, policy=policy)
        chex.assert_trees_all_close(jax.grad(layered)(weights, x), jax.grad(loss)(weights, x), rtol=1e-6)
