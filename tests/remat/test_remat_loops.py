"""Counterparts of JAX's own tests of `jax.checkpoint`: regions and policies round loops and branches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counterparts import (
    FAST,
    backward,
    check_derivatives,
    everywhere,
    plain,
    policies,
    predicted,
    same,
    saving,
    sines,
    stores_as_much,
    whole,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def looped(x):
    return lax.scan(lambda c, _: (jnp.sin(c), jnp.sin(c)), x, None, length=3)


def once(f, x):
    return lax.scan(lambda x, _: (f(x), None), x, None, length=1)[0]


def either(f, x):
    return lax.cond(x.sum() > -jnp.inf, f, lambda x: x, x)


def test_remat_of_scan():
    """A loop in a region runs again."""
    check_derivatives(whole(looped), looped, 3.0)
    counts = backward(whole(looped), 4.0)
    assert counts["sin"] > 0
    assert counts["cos"] > 0


def test_remat_of_scan_unused_extensive_output_grad():
    """A loop whose stacked results nobody differentiates."""

    def step(c, a):
        b = jnp.sin(a).sum() + jnp.sin(c).sum()
        return jnp.sin(c * b), b

    def f(wrap):
        return jax.grad(lambda c, a: wrap(functools.partial(lax.scan, step))(c, a)[0].sum())

    args = jnp.arange(4.0) / 4, jnp.arange(15.0).reshape(5, 3) / 15
    same(f(whole)(*args), f(lambda g: g)(*args))


def test_remat_of_jit_residual_forwarding():
    """A named constant that two inner functions read is stored once."""

    def f(x):
        y = checkpoint_name(jnp.sin(jnp.ones(2, "float32")), "y")
        return jax.jit(lambda x: x * y)(jax.jit(lambda: x * y)()).sum()

    stores_as_much(f, policies.save_only_these_names("y"), jnp.float32(3))
    same(jax.grad(saving("name")(f))(jnp.float32(3)), 2 * np.sin(1.0) ** 2)


def moves(f, *args):
    """How often a gradient moves a value to the host, and from there."""
    text = str(jax.make_jaxpr(jax.grad(f))(*args))
    return text.count("MemorySpace.Host"), text.count("MemorySpace.Device")


offload = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["y"],
    names_which_can_be_offloaded=["z", "w"],
    offload_src="device",
    offload_dst="pinned_host",
)


def three_names(x):
    y = checkpoint_name(jnp.sin(x), "y")
    z = checkpoint_name(jnp.sin(y), "z")
    w = checkpoint_name(jnp.sin(z), "w")
    return w, jnp.sum(w * z)


@pytest.mark.parametrize(
    "around",
    [lambda f: jax.checkpoint(plain(f), policy=offload), lambda f: plain(jax.checkpoint(f, policy=offload))],
    ids=["round", "inside"],
)
def test_remat_offload_names_jaxpr(around):
    """The user's own policy that moves names to the host does so round and inside a planned function."""
    assert moves(around(lambda x: three_names(x)[1]), jnp.arange(16.0)) == (2, 2)


def test_remat_offload_names_of_scan_jaxpr():
    """The same with the names inside a loop."""
    f = lambda x: jnp.sum(lax.scan(lambda y, _: three_names(y), x, None, length=3)[1])  # noqa: E731
    assert moves(plain(jax.checkpoint(f, policy=offload)), jnp.arange(16.0)) == (2, 2)


def test_remat_offload_dot_with_no_batch_dims_jaxpr():
    """A policy that moves products to the host."""
    policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def f(x, b):
        return jnp.sum(jnp.sin(x @ x)) + jnp.sum(jnp.sin(jnp.einsum("bij,bjk->bik", b, b)))

    assert moves(plain(jax.checkpoint(f, policy=policy)), jnp.ones((4, 4)), jnp.ones((2, 4, 4))) == (1, 1)


@everywhere
@pytest.mark.parametrize("round_", [once, either], ids=["scan", "cond"])
def test_const_in_jvp(wrap, round_):
    """A rule that makes an array of its own, in a loop and in a branch."""
    op = jax.custom_jvp(lambda x: x * jnp.arange(3.0))
    op.defjvp(lambda primals, tangents: (op(*primals), tangents[0] * jnp.arange(3.0)))
    same(jax.grad(wrap(lambda x: round_(op, x).sum()))(jnp.arange(3.0)), jnp.arange(3.0))


def three_layers(apply):
    def layers(w, x):
        for _ in range(3):
            x = jnp.sin(jnp.dot(x, w, precision=lax.Precision.HIGHEST))
        return x

    return lambda w: apply(functools.partial(layers, w), 0.5 * jnp.ones(5))


def of_jitted(x):
    return jax.jit(lambda: (jnp.sin(x), jnp.cos(x)))()


FUNNY = {"jitted": of_jitted}
FUNNY["in a loop"] = lambda x: once(lambda xs: (jnp.sin(xs[0]), jnp.cos(xs[1])), (x, x))
FUNNY["in a branch"] = lambda x: lax.cond(True, of_jitted, lambda x: (x, x), x)


def funny(inner):
    """A sine whose derivative's sine and cosine are made by one inner call."""
    op = jax.custom_jvp(jnp.sin)

    @op.defjvp
    def _(primals, tangents):
        y, c = inner(*primals)
        return y, c * tangents[0]

    return op


NAMED = {
    "loop": lambda: (looped, 3.0),
    "branch": lambda: (lambda x: lax.cond(x > 0, jnp.sin, lambda x: x, x), 3.0),
    "products in a loop": lambda: (three_layers(lambda f, x: once(lambda x: f(x), x)), 0.2 * jnp.ones((5, 5))),
    "products in a branch": lambda: (three_layers(either), 0.2 * jnp.ones((5, 5))),
    **{
        f"rule {kind}, {where}": functools.partial(lambda f, k: (functools.partial(f, funny(FUNNY[k])), 3.0), f, kind)
        for kind in FUNNY
        for where, f in (("loop", once), ("branch", either))
    },
}
POLICIES = {
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "products": policies.dots_saveable,
    "cosines": lambda prim, *_, **__: prim.name == "cos",
    "sines": lambda prim, *_, **__: prim.name == "sin",
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMED)
def test_policies_round_loops_and_branches(name, policy):
    """Under a policy of the user's a planned function recomputes what the plain one does; gradients too."""
    f, x = NAMED[name]()
    found, wanted = (backward(jax.checkpoint(g, policy=POLICIES[policy]), x) for g in (plain(f), f))
    assert found == wanted
    if policy in ("products", "cosines"):
        loss = lambda f: jax.jit(jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x))))), compiler_options=FAST)  # noqa: E731
        same(loss(jax.checkpoint(whole(f), policy=POLICIES[policy]))(x), loss(f)(x))


def test_remat_of_cond():
    """A branch in a region: only what its backward pass reads is recomputed."""
    flat = lambda x: lax.cond(x > 0.0, lambda c: (jnp.sin(c), jnp.sin(c)), lambda c: (jnp.sin(c), c), x)  # noqa: E731
    deep = lambda x: lax.cond(x > 0.0, sines, lambda c: c, x)  # noqa: E731
    for f in (flat, deep):
        check_derivatives(whole(f), f, 3.0)
    assert backward(whole(flat), 4.0)["sin"] == 0
    assert backward(whole(deep), 4.0)["sin"] > 0


def test_remat_of_while_loop():
    """Forward derivatives go through a loop of unknown length, with any policy."""
    f = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]  # noqa: E731
    wanted = jax.grad(lambda x: jnp.sin(sines(x)))(3.0)
    for g in (whole(f), predicted(f), jax.checkpoint(plain(f), policy=POLICIES["cosines"])):
        y, linear = jax.linearize(g, 3.0)
        same((y, linear(1.0)), (f(3.0), wanted))
