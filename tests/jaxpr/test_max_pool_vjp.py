"""Max-pooling in plans: the same numbers as JAX's gradient, without its scatter, and the memory that saves."""

import chex
import jax
import jax.numpy as jnp
import pytest
import zoo
from jax import lax, random
from jaxprs import equations

import jaxsub
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.trace import trace

WINDOWS = [
    ((1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
    ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    ((1, 2, 3, 1), (1, 1, 3, 1), "VALID"),
    ((1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (2, 0), (1, 2), (0, 0))),
]


def pooled(window, x):
    dims, strides, padding = window
    y = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, dims, strides, padding)
    return jnp.sum(jnp.sin(y) * jnp.arange(y.size).reshape(y.shape))


def planned(fun, x, n_regions=1):
    """A function of an array with everything but its last equation in a region."""
    return planned_of(fun, (x,), n_regions)


def planned_of(fun, args, n_regions=1):
    """A function with everything but its last equation in a region."""
    program = trace(fun, tuple(args), {})
    segments = (Segment(0, len(program.eqns) - 1),) * n_regions
    run = emit(program, Plan(program.fingerprint, Budget(), len(program.eqns), segments))
    return lambda *args: run(*jax.tree.leaves(args))[0]


@pytest.mark.parametrize("window", [pytest.param(w, marks=[pytest.mark.exhaustive] * (i == 2), id=f"{i}")
                                    for i, w in enumerate(WINDOWS)])  # fmt: skip
def test_gradients_are_those_of_jax(window):
    """With many ties, in reverse and forward mode, to second order and under vmap."""
    x = random.normal(random.key(0), (3, 9, 7, 2))

    def plain(x):
        return pooled(window, x)

    def figures(f):
        second = jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x)
        return (
            jax.value_and_grad(f)(x),
            jax.jvp(f, (x,), (jnp.cos(x),)),
            second,
            jax.vmap(jax.grad(f))(jnp.stack([x, -x])),
        )

    chex.assert_trees_all_close(*(jax.jit(figures, static_argnums=0)(f) for f in (plain, planned(plain, x))), rtol=1e-5)


def test_there_is_no_scatter_in_a_plan():
    """A plan's gradient has none; a function that is left as it is, and a large window, keep JAX's."""
    x = jnp.ones((1, 8, 8, 1))

    def has_scatter(fun, n_regions):
        jaxpr = jax.make_jaxpr(jax.grad(planned(fun, x, n_regions)))(x)
        found = {eqn.primitive.name for eqn in equations(jaxpr)}
        return any("scatter" in name for name in found)

    assert not has_scatter(lambda x: pooled(WINDOWS[0], x), 1)
    assert has_scatter(lambda x: pooled(WINDOWS[0], x), 0)
    assert has_scatter(lambda x: pooled(((1, 6, 6, 1), (1, 1, 1, 1), "VALID"), x), 1)


def test_regions_that_pool_need_less():
    """Three convolutions, each pooled: regions round them take less than those written by hand."""

    def block(w, x):
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")

    def loss(ws, x, wrap=lambda f: f):
        for w in ws:
            x = wrap(block)(w, x)
        return jnp.sum(x**2)

    args = [jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)] * 3, jax.ShapeDtypeStruct((4, 64, 64, 8), jnp.float32)
    program = trace(loss, args, {})
    ends = [n.index + 1 for n in program.graph.nodes if n.primitive == "reduce_window_max"]
    segments = tuple(Segment(a, b) for a, b in zip([0, *ends], ends, strict=False))
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), segments)
    by_hand = jaxsub.measure(lambda *a: loss(*a, wrap=jax.checkpoint), *args).temp_bytes
    assert jaxsub.measure(jaxsub.sublinear(loss, plan=plan), *args).temp_bytes < 0.8 * by_hand


@pytest.mark.exhaustive
def test_a_network_that_pools_needs_much_less():
    """A U-Net reaches three quarters of the least memory that regions written by hand reach."""
    size = dict(levels=3, batch=4, size=32, width=16)
    model = zoo.BY_NAME["unet"]

    def shapes(**by_hand):
        loss, init = model.build(**size, **by_hand)
        return loss, jax.eval_shape(init, random.key(0))

    by_hand = (jaxsub.measure(*unpacked(shapes(wrap=jax.checkpoint, every=every))).temp_bytes for every in (1, 2))
    loss, args = shapes()
    budget = int(0.75 * min(by_hand))
    assert jaxsub.plan(loss, *args, budget=budget, progress=False).measurement.temp_bytes <= budget


def unpacked(built):
    loss, args = built
    return loss, *args


@pytest.mark.parametrize("target", ["cpu", pytest.param("h100", marks=pytest.mark.slow)])
def test_gradients_of_slices_are_added_up_at_once(target):
    """Padded windows over a sum, whose gradient a bias and a convolution read: not a buffer for each place in them."""

    def loss(weights, x):
        w, b = weights
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
        return jnp.sum(lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") ** 2)

    args = [(jnp.ones((3, 3, 3, 16)), jnp.ones(16)), jnp.ones((16, 64, 64, 3))]
    function = planned_of(loss, args)
    needed = jaxsub.measure(function, *args, target=None if target == "cpu" else target).temp_bytes
    plain = jaxsub.measure(loss, *args, target=None if target == "cpu" else target).temp_bytes
    print(f"{target}: {plain / 2**20:.1f} MiB plainly, {needed / 2**20:.1f} in a plan")
    assert needed < 5 * 16 * 64 * 64 * 16 * 4
