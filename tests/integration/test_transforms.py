"""A `sublinear` function under, round and between JAX's transformations is the function it was made of."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from six_layers import XS, W, X, loss, planned, predicted, same

import jaxsub
from jaxsub.jaxpr import compat

saveable = jax.checkpoint_policies.dots_saveable


def in_scan(f, w, x):
    return jax.grad(lambda w: lax.scan(lambda c, x: (c + f(w, x), None), 0.0, jnp.stack([x, 2 * x]))[0])(w)


def in_cond(f, w, x):
    return jax.grad(lambda w: lax.cond(w[0, 0] > 0, f, lambda w, x: w.sum(), w, x))(w)


def under_custom_vjp(f, w, x):
    own = jax.custom_vjp(loss)
    own.defvjp(lambda w, x: jax.vjp(f, w, x), lambda pullback, ct: pullback(ct))
    return jax.grad(own)(w, x)


def under_custom_jvp(f, w, x):
    own = jax.custom_jvp(loss)
    own.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return jax.grad(own)(w, x)


def exported(f, w, x):
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (w, x))
    blob = jax.export.export(jax.jit(f))(*shapes).serialize(vjp_order=1)
    return jax.grad(jax.export.deserialize(blob).call)(w, x)


def in_while(f, w, x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(w, x)), (0, 0.0))[1]


def without_jit(f, w, x):
    with jax.disable_jit():
        return jax.grad(f)(w, x)


TRANSFORMS = {
    "call": lambda f, w, x: f(w, x),
    "jit": lambda f, w, x: jax.jit(f)(w, x),
    "keywords": lambda f, w, x: jax.grad(f)(w, x=x),
    "all keywords": lambda f, w, x: f(w=w, x=x),
    "grad": lambda f, w, x: jax.grad(f)(w, x),
    "jit of grad": lambda f, w, x: jax.jit(jax.grad(f))(w, x),
    "value_and_grad of both": lambda f, w, x: jax.value_and_grad(f, argnums=(0, 1))(w, x),
    "vjp": lambda f, w, x: jax.vjp(f, w, x)[1](2.0),
    "jvp": lambda f, w, x: jax.jvp(f, (w, x), (x.T @ x, x)),
    "linearize": lambda f, w, x: jax.linearize(f, w, x)[1](w, x),
    "linear_transpose": lambda f, w, x: jax.linear_transpose(jax.linearize(lambda w: f(w, x), w)[1], w)(1.0),
    "jacfwd": lambda f, w, x: jax.jacfwd(f)(w, x),
    "jacrev": lambda f, w, x: jax.jacrev(f)(w, x),
    "hessian": lambda f, w, x: jax.hessian(f)(w, x),
    "grad of grad": lambda f, w, x: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) ** 2))(w),
    "vmap": lambda f, w, x: jax.vmap(f, in_axes=(None, 1))(w, XS),
    "vmap with names": lambda f, w, x: jax.vmap(f, in_axes=(None, 1), axis_name="batch")(w, XS),
    "vmap of grad": lambda f, w, x: jax.vmap(jax.grad(f), in_axes=(None, 1))(w, XS),
    "grad of vmap": lambda f, w, x: jax.grad(lambda w: jnp.sum(jax.vmap(f, in_axes=(None, 1))(w, XS)))(w),
    "vmap with spmd_axis_name": lambda f, w, x: jax.vmap(jax.grad(f), (None, 1), 1, spmd_axis_name="d")(w, XS),
    "vmap over a keyword": lambda f, w, x: jax.vmap(lambda x: f(w, x=x), in_axes=1)(XS),
    "vmap of vmap": lambda f, w, x: jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(0, None))(jnp.stack([w, -w]), XS),
    "checkpoint": lambda f, w, x: jax.grad(jax.checkpoint(f))(w, x),
    "checkpoint with a policy": lambda f, w, x: jax.grad(jax.checkpoint(f, policy=saveable))(w, x),
    "checkpoint of grad": lambda f, w, x: jax.checkpoint(jax.grad(f))(w, x),
    "scan": in_scan,
    "jit of scan": lambda f, w, x: jax.jit(functools.partial(in_scan, f))(w, x),
    "while": in_while,
    "cond": in_cond,
    "switch": lambda f, w, x: jax.grad(lambda w: lax.switch(1, [lambda w: w.sum(), lambda w: f(w, x)], w))(w),
    "map": lambda f, w, x: jax.grad(lambda w: lax.map(lambda x: f(w, x), jnp.stack([x, 2 * x])).sum())(w),
    "donation": lambda f, w, x: jax.jit(jax.grad(f), donate_argnums=0)(jnp.copy(w), x),
    "lower and compile": lambda f, w, x: jax.jit(jax.grad(f)).lower(w, x).compile()(w, x),
    "custom_vjp": under_custom_vjp,
    "custom_jvp": under_custom_jvp,
    "disable_jit": without_jit,
    "export with its own gradient": exported,
    "export": lambda f, w, x: jax.export.export(jax.jit(jax.grad(f)))(w, x).call(w, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_composes(transform):
    """Every transformation gives of the planned function what it gives of the plain one."""
    same(transform(planned, W, X), transform(loss, W, X))


INSIDE = {
    "jit": lambda f: jax.jit(lambda w, x: f(w, x))(W, X),
    "jaxsub.jit": lambda f: jaxsub.jit(lambda w, x: f(w, x))(W, X),
    "scan": lambda f: lax.scan(lambda w, x: (w - f(w, x), None), W, XS.swapaxes(0, 1))[0],
    "eval_shape": lambda f: jax.tree.map(lambda s: s.shape, jax.eval_shape(f, W, X)),
    "make_jaxpr": lambda f: [aval.shape for aval in jax.make_jaxpr(f)(W, X).out_avals],
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 1))(W, XS),
    "jit without arguments": lambda f: jax.jit(lambda: f(W, X))(),
}


@pytest.mark.parametrize("options", [{}, {"memory": 1.0}])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_a_step_may_be_called_where_something_else_is_traced(inside, options):
    """On JAX 0.10 a CPU's compiler needs an option, which JAX takes for the outermost `jit` alone."""
    same(inside(jaxsub.jit(jax.grad(planned), **options)), inside(jax.jit(jax.grad(loss))))


STAGED = {
    "at once": (lambda f: f, False),
    "vmap": (lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])), False),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), False),
    "jit": (jax.jit, True),
    "grad": (jax.grad, True),
    "vmap of jit": (lambda f: lambda x: jax.vmap(jax.jit(f))(jnp.stack([x, x])), True),
}


@pytest.mark.parametrize(("inside", "is_staged"), STAGED.values(), ids=STAGED)
def test_what_runs_at_once_keeps_its_compiler_options(inside, is_staged):
    """What a map calls is compiled by itself; what is staged has the options of the function that it is part of."""
    found = []

    def look(x):
        found.append(compat.is_staged())
        return x

    inside(look)(1.0)
    assert found[0] == is_staged


def test_loops_in_slices_without_jit():
    """`jax.disable_jit` writes loops out in what is traced; slices are loops all the same."""
    ws, x = jnp.stack([jnp.eye(64)] * 8), jnp.ones((4096, 64))

    def scanned(ws, x):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    with jax.disable_jit():
        wrapped = jaxsub.sublinear(scanned, budget=0.3, cache=False)
        assert wrapped.plan(ws, x).slices
        same(jax.grad(wrapped)(ws, x), jax.grad(scanned)(ws, x))


def test_the_plan_recomputes():
    """The function that the tests above transform is not the plain one: it has regions and barriers."""
    plan = planned.plan(W, X)
    assert plan.n_regions > 0
    assert plan.barriers
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(planned))(W, X))


def test_shapes_without_values():
    """eval_shape and make_jaxpr need shapes only, and so does the plan."""
    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert jax.eval_shape(planned, *shapes) == jax.eval_shape(loss, *shapes)
    assert jax.make_jaxpr(planned)(*shapes).out_avals == jax.make_jaxpr(loss)(*shapes).out_avals
    assert planned.plan(*shapes) == planned.plan(W, X)


def test_signature_name_and_repr():
    """The function keeps its signature, name and docstring, and says what it is."""
    assert inspect.signature(planned) == inspect.signature(loss)
    assert (planned.__name__, planned.__doc__) == ("loss", loss.__doc__)
    assert repr(predicted(loss, budget="1GiB")) == "sublinear(loss, budget=1.00 GiB)"


def test_spmd_axis_name():
    """A map along a mesh's axis puts that axis into the function's own sharding constraints."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    at = jax.sharding.NamedSharding(mesh, P(None, "model"))

    def f(w, x):
        for _ in range(4):
            x = lax.with_sharding_constraint(jnp.tanh(x @ w), at)
        return jnp.sum(x)

    def traced(**kwargs):
        return str(jax.jit(jax.vmap(jax.grad(predicted(f)), (None, 1), **kwargs)).trace(W, XS).jaxpr)

    assert predicted(f).plan(W, X).n_regions > 0
    assert re.search(r"spec=P\([^)]*'data'", traced(spmd_axis_name="data"))
    assert not re.search(r"spec=P\([^)]*'data'", traced())
    same(
        jax.vmap(jax.grad(predicted(f)), (None, 1), spmd_axis_name="data")(W, XS),
        jax.vmap(jax.grad(f), (None, 1))(W, XS),
    )
