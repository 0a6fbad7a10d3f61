"""Counterparts of JAX's own tests of `jax.checkpoint`: what is saved, under plans and under policies round them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from counterparts import (
    backward,
    check_derivatives,
    everywhere,
    plain,
    policies,
    same,
    saving,
    stored,
    stores_as_much,
    whole,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxsub


@pytest.mark.parametrize("inner", [lambda x: x * x, jax.jit(lambda x: x * x)], ids=["product", "jitted product"])
@pytest.mark.parametrize(
    ("primitives", "sin", "cos"),
    [(("sin", "name", "mul"), 0, 2), (("name",), 0, 2), ((), 2, 2)],
    ids=["all", "names", "nothing"],
)
def test_remat_custom_policy(inner, primitives, sin, cos):
    """Saved values of a plan are not recomputed, all others are."""

    def f(x):
        return checkpoint_name(jnp.sin(inner(checkpoint_name(jnp.sin(x), "sin"))), "sin")

    g = saving(*primitives)(f)
    counts = backward(g, 1.0)
    assert (counts["sin"] <= sin, counts["cos"] <= cos) == (True, True)
    assert (counts["sin"] > 0) == (sin > 0)
    same(jax.jvp(g, [1.0], [2.0]), jax.jvp(f, [1.0], [2.0]))
    check_derivatives(g, f, 3.0)


def products(x, equation="ij,jk->ik"):
    for _ in range(3):
        x = jnp.sin(jnp.einsum(equation, x, x, precision=lax.Precision.HIGHEST) * 0.1)
    return x


def check_products(f, x, dots):
    counts = backward(saving("dot_general")(f), x)
    assert (counts["sin"], counts["dot_general"]) == (2, dots)
    check_derivatives(saving("dot_general")(f), f, x)


def test_remat_checkpoint_dots():
    """Three products saved: two sines again, and the backward pass's own six products."""
    check_products(products, jnp.ones((2, 2)), 6)


def test_remat_checkpoint_dots_with_no_batch_dims2():
    """Products with batch dimensions can be saved like others: a plan tells values apart, not primitives."""
    check_products(functools.partial(products, equation="nij,njk->nik"), jnp.ones((3, 2, 2)), 6)


def test_remat_checkpoint_dots_jit():
    """The same inside jit."""
    check_products(jax.jit(products), jnp.ones((2, 2)), 6)


def test_remat_checkpoint_dots_inside_scan():
    """A loop's body that saves its products: two sines, three cosines, six products in the backward loop."""

    def layers(w, x):
        for _ in range(3):
            x = jnp.sin(jnp.dot(x, w, precision=lax.Precision.HIGHEST))
        return x

    def f(layers):
        return lambda w: lax.scan(lambda x, _: (layers(w, x), None), jnp.ones(5), None, length=2)[0]

    counts = backward(f(saving("dot_general")(layers)), jnp.ones((5, 5)))
    assert (counts["sin"], counts["cos"], counts["dot_general"]) == (2, 3, 6)
    check_derivatives(f(saving("dot_general")(layers)), f(layers), 0.2 * jnp.ones((5, 5)))


def ruled(with_jvp):
    """A sine with a rule of its own."""
    if with_jvp:
        op = jax.custom_jvp(jnp.sin)
        op.defjvp(lambda primals, tangents: (op(*primals), jnp.cos(primals[0]) * tangents[0]))
        return op
    op = jax.custom_vjp(jnp.sin)
    op.defvjp(lambda x: (op(x), x), lambda x, ct: (jnp.cos(x) * ct,))
    return op


def check_rule(sin, modes):
    def f(x):
        for _ in range(3):
            x = sin(x * x * 1e-1)
        return x

    check_derivatives(saving("mul")(f), f, 3.0, modes)
    twice = lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]  # noqa: E731
    check_derivatives(twice(saving("mul")(f)), twice(f), 3.0, modes)


def test_remat_custom_jvp_policy():
    """A rule of the user's own holds in a region that saves values before it, in loops too."""
    check_rule(ruled(True), ["fwd", "rev"])


def test_remat_custom_vjp_policy():
    """The same with a backward pass of the user's own."""
    check_rule(ruled(False), ["rev"])


@everywhere
def test_remat_dropvar_policy(wrap):
    """A gradient inside, of a function with a result that nobody reads."""
    same(jax.grad(wrap(lambda x: jax.grad(lambda x: (x * x * x, x)[0])(x)))(3.0), 18.0)


def test_remat_custom_jvp_linear_policy():
    """A linear rule, alone and in a loop."""
    total = jax.custom_jvp(lambda x: jnp.sum(x, axis=0))
    total.defjvp(lambda primals, tangents: (total(*primals), total(*tangents)))
    check_derivatives(whole(total), total, jnp.ones(3))
    rows = lambda f: lambda x: lax.scan(lambda _, x: (None, f(x)), None, x)[1]  # noqa: E731
    check_derivatives(rows(whole(total)), rows(total), jnp.ones((2, 3)))


def test_constants_not_hoisted():
    """Constants that a region makes are recomputed, not stored."""
    x = jnp.ones((2, 2))
    functions = (lambda x: jnp.einsum("ii->i", x), lambda x: jnp.zeros_like(x) * jnp.sin(x))
    assert [stored(whole(f), x) for f in functions] == [[], []]


def test_name_saveable_input():
    """A name inside is seen by a policy outside."""
    f = lambda x: jnp.dot(y := checkpoint_name(jnp.dot(x, x), "foo"), y)  # noqa: E731
    assert stores_as_much(f, policies.save_only_these_names("foo"), jnp.ones((3, 3))) == 1


def test_name_pytree():
    """A name given to a tree."""
    f = lambda x: jnp.dot(y := checkpoint_name({"a": jnp.dot(x, x)}, "foo")["a"], y)  # noqa: E731
    assert stores_as_much(f, policies.save_only_these_names("foo"), jnp.ones((3, 3))) == 1


def named(x):
    for name in "yzw":
        x = x * checkpoint_name(jnp.sin(x), name)
    return x


@pytest.mark.parametrize("names", ["yzw", "zw", "w", ""])
def test_name_denylist(names):
    """All names but some."""
    stores_as_much(named, policies.save_any_names_but_these(*names), 1.0)


@pytest.mark.parametrize("names", ["yzw", "zw", "w", ""])
def test_name_allowlist(names):
    """Only some names."""
    assert stores_as_much(named, policies.save_only_these_names(*names), 1.0) <= len(names)


def test_checkpoint_name_vmap():
    """A name inside a mapped function."""
    f = jax.vmap(jax.checkpoint(plain(lambda x: checkpoint_name(x * 2.0, "y") + 1.0),
                                policy=policies.save_only_these_names("y")))  # fmt: skip
    x = jnp.arange(6.0).reshape(2, 3)
    same((f(x), jax.grad(lambda x: jnp.sum(f(x)))(x)), (x * 2 + 1, jnp.full_like(x, 2.0)))


@pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_saved_residuals_utility(under):
    """`jaxsub.residuals` names arguments by their paths, and values by the user's names."""

    def f(x, y):
        return checkpoint_name(jnp.sin(x[0]), "z") * x[1] * y

    found = {r.name for r in jaxsub.residuals(under(f), (2.0, 3.0), y=4.0)}
    assert {"z", "arg0[1]", "y"} <= found


@everywhere
def test_checkpoint_dropvars(wrap):
    """An inner result that nobody reads."""
    same(jax.grad(wrap(lambda x: jax.jit(lambda: (x, x))()[1] * 1.0))(3.0), 1.0)


@everywhere
def test_dce_keeps_eqns_with_used_outputs_but_no_used_inputs(wrap):
    """A factor made of nothing."""
    same(jax.grad(wrap(lambda x: jax.jit(lambda: 3.0)() * x))(3.0), 3.0)
