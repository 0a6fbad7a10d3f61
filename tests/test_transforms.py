"""A `sublinear` function under, round and between JAX's transformations is the function it was made of."""

import functools
import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import PartitionSpec as P

import jaxsub
from jaxsub import compat

ROOT = Path(__file__).parent.parent
predicted = functools.partial(jaxsub.sublinear, verify=False, cache=False, progress=False)
saveable = jax.checkpoint_policies.dots_saveable
W, X, XS = jnp.eye(4) * 0.9 + 0.1, jnp.ones((3, 4)), jnp.linspace(0, 1, 24).reshape(3, 2, 4)


def loss(w, x):
    """Six layers, of which a plan recomputes some."""
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


planned = predicted(loss)


def same(got, wanted, *, rtol=2e-6, atol=2e-6):
    """Equal trees, shapes, dtypes and weak types, and values within a few roundings of f32."""
    got, wanted = jax.tree.map(jnp.asarray, (got, wanted))
    chex.assert_trees_all_equal_structs(got, wanted)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    assert list(map(jax.typeof, jax.tree.leaves(got))) == list(map(jax.typeof, jax.tree.leaves(wanted)))
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=atol)


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


# Functions


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
    region = jax.checkpoint(lambda w: jnp.tanh(jnp.sin(w @ w) @ w), policy=saveable)
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
        x = jnp.tanh(x @ w) * n.astype(jnp.int8).astype(w.dtype) * mask
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


def test_names_and_lines_are_kept():
    """Profiles and dumps show the user's named scopes and lines, forward and backward, in regions too."""

    def f(w, x):
        for i in range(6):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    assert predicted(f).plan(W, X).n_regions > 0
    text = jax.jit(jax.grad(predicted(f))).lower(W, x=X).as_text(debug_info=True)
    assert [i for i in range(6) if not re.search(rf"\blayer_{i}\b", text)] == []
    again = "rematted_computation" if compat.remat_flavour() == "remat2" else r"segment_\d+\)*"
    assert re.search(rf"transpose\(.*{again}/layer_", text)
    assert "test_transforms.py" in text


def test_an_error_points_to_the_users_line():
    """What is wrong in the function is JAX's error, raised in the user's file; in a derivative rule too."""

    def wrong(w):
        return jnp.sum(w @ jnp.ones(5))

    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (x @ jnp.ones(7),))
    for f, transform in ((wrong, lambda f: f), (lambda w: jnp.sum(rule(w)), jax.grad)):
        with pytest.raises(TypeError, match=r"dot_general|matmul") as refused:
            transform(predicted(f))(W)
        last = [entry for entry in refused.traceback if Path(str(entry.path)) == Path(__file__)][-1]
        assert "@ jnp.ones" in str(last.statement)


# Settings


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


# Effects


def counted(run):
    """How often, and with what, `run(note)` calls `note`."""
    calls = []
    run(calls.append)
    jax.effects_barrier()
    return calls


def effectful(call, ordered):
    def make(note):
        def f(w):
            x = w
            for i in range(5):
                x = jnp.tanh(x @ w)
                call(lambda v, i=i: note(i), lax.stop_gradient(jnp.sum(x)), ordered)
            return jnp.sum(x)

        return f

    return make


EFFECTS = {
    "debug.callback": effectful(lambda f, v, ordered: jax.debug.callback(f, v, ordered=ordered), False),
    "debug.callback, ordered": effectful(lambda f, v, ordered: jax.debug.callback(f, v, ordered=ordered), True),
    "io_callback": effectful(lambda f, v, ordered: io_callback(f, None, v, ordered=ordered), False),
    "io_callback, ordered": effectful(lambda f, v, ordered: io_callback(f, None, v, ordered=ordered), True),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_happen_as_often(name):
    """Each of five callbacks, alike but for what it closes over, runs once in the forward pass, in order if ordered."""
    make = EFFECTS[name]
    for wrap in (lambda f: f, jax.jit):
        calls = counted(lambda note, wrap=wrap: wrap(predicted(make(note)))(W))
        assert (calls if "ordered" in name else sorted(calls)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["io_callback", "io_callback, ordered"])
def test_io_is_never_doubled(name):
    """What must happen once stands outside every region: it happens once under grad too."""
    gradients = []
    calls = counted(lambda note: gradients.append(jax.jit(jax.grad(predicted(EFFECTS[name](note))))(W)))
    assert sorted(calls) == [0, 1, 2, 3, 4]
    same(gradients[0], jax.grad(EFFECTS[name](lambda i: None))(W))


@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
def test_prints(capfd, ordered):
    """A print shows each line once in the forward pass, in order where that is asked for."""

    def f(w):
        for i in range(5):
            w = jnp.tanh(w @ W)
            jax.debug.print("{} {x:.3f}", i, x=w[0, 0], ordered=ordered)
        return jnp.sum(w)

    jax.block_until_ready(jax.jit(predicted(f))(W))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in (lines if ordered else sorted(lines))] == list("01234")


def test_pure_callbacks_keep_apart():
    """Callbacks of one code that close over different numbers are not taken for one another."""

    def host(c):
        op = jax.custom_jvp(lambda x: jax.pure_callback(lambda v: c * np.sin(v), jax.typeof(x), x))
        op.defjvp(lambda primals, tangents: (op(*primals), c * jnp.cos(primals[0]) * tangents[0]))
        return op

    def f(w):
        x = w
        for c in np.float32([1, 2, 3, 4]):
            x = host(c)(x @ w)
        return jnp.sum(x)

    same(jax.jit(jax.value_and_grad(predicted(f)))(W), jax.jit(jax.value_and_grad(f))(W))


def test_checkify():
    """Checks inside the function are made, in the gradient too, and failed ones are reported."""

    def f(w):
        x = w
        for i in range(5):
            x = jnp.tanh(x @ w)
            checkify.check(jnp.sum(x) < 100 if i < 4 else w[0, 0] < 5, "too large: {}", jnp.sum(x))
        return jnp.sum(x)

    error, gradient = jax.jit(checkify.checkify(jax.grad(predicted(f))))(W)
    assert error.get() is None
    same(gradient, jax.grad(lambda w: checkify.checkify(f)(w)[1])(W))
    assert "too large" in jax.jit(checkify.checkify(predicted(f)))(W + 5)[0].get()


def test_references_as_arguments():
    """A reference that comes in is written as often as before."""

    def f(w, ref):
        x = w
        for _ in range(4):
            x = jnp.tanh(x @ w)
            ref[...] += lax.stop_gradient(jnp.sum(x))
        return jnp.sum(x)

    one, two = jax.new_ref(0.0), jax.new_ref(0.0)
    same(jax.grad(predicted(f))(W, one), jax.grad(f)(W, two))
    same(one[...], two[...])
    batch = jnp.stack([W, -W])
    one, two = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.zeros(2))
    same(jax.vmap(jax.grad(predicted(f)))(batch, one), jax.vmap(jax.grad(f))(batch, two))
    same(one[...], two[...])


def test_references_in_what_is_mapped():
    """References made in a mapped function, inside and outside `sublinear`, with and without `jit`."""
    batch = jnp.stack([W, -W])

    def mapped(f):
        return lambda ws: jnp.sum(jax.vmap(f)(ws))

    wanted = jax.grad(mapped(own_reference))(batch)
    for wrap in (jax.jit, lambda f: f):
        same(wrap(jax.grad(mapped(predicted(own_reference))))(batch), wanted)
        same(wrap(jax.grad(predicted(mapped(own_reference))))(batch), wanted)


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


# Devices


def split(f):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    body = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    return jax.jit(jax.grad(lambda w: body(w, X)))(W)


def test_shard_map():
    """Inside shard_map, with collectives round the function or in it."""
    inside = predicted(lambda w, x: lax.pmean(loss(w, x), "d"))
    plain = split(lambda w, x: lax.pmean(loss(w, x), "d"))
    for f in (lambda w, x: lax.pmean(planned(w, x), "d"), inside):
        same(split(f), plain)


def test_named_axes_cannot_be_measured():
    """A function with collectives is not compiled by itself: bytes are kept by prediction, and that is said."""
    f = jaxsub.sublinear(lambda w, x: lax.pmean(loss(w, x), "d"), budget="1GiB", cache=False, progress=False)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        chex.assert_trees_all_close(split(f), jax.grad(loss)(W, X), rtol=1e-5)
    strict = jaxsub.sublinear(lambda w, x: lax.pmean(loss(w, x), "d"), budget="1GiB", cache=False, verify=True)
    with pytest.raises(jaxsub.UnsupportedError, match="sublinear round"):
        split(strict)


def in_a_process(code, **env):
    """Run code in a process of its own, warnings being errors."""
    start = "import jax, jax.numpy as jnp, functools, jaxsub\nfrom jax import lax\n"
    command = [sys.executable, "-W", "error", "-c", start + textwrap.dedent(code)]
    path = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(command, env={**path, **env}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


LOSS = """
def loss(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

w, x = jnp.eye(16) * .9 + .01, jnp.linspace(0, 1, 512 * 16).reshape(512, 16)
wanted = jax.grad(loss)(w, x)
"""


def test_eight_devices():
    """Sharded arguments, and shard_map over eight devices, give the plain gradient."""
    code = """
    from jax.sharding import NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jaxsub.sublinear(loss, verify=False, cache=False)
    split = jax.device_put(x, NamedSharding(mesh, P("d")))
    assert jnp.allclose(jax.jit(jax.grad(f))(w, split), wanted, atol=1e-6)
    assert jnp.allclose(jax.grad(f)(w, split), wanted, atol=1e-6)
    body = jax.shard_map(lambda w, x: lax.pmean(f(w, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    assert jnp.allclose(jax.jit(jax.grad(body))(w, split), wanted, atol=1e-6)
    assert f.plan(jnp.zeros((16, 16)), jnp.zeros((64, 16))).n_regions > 0
    """
    in_a_process(LOSS + textwrap.dedent(code), XLA_FLAGS="--xla_force_host_platform_device_count=8")


def test_x64_everywhere():
    """With 64 bits from the start all is done in them."""
    code = (
        "f = jaxsub.sublinear(loss, budget=.6, cache=False)\nassert jnp.abs(jax.grad(f)(w, x) - wanted).max() < 1e-15"
    )
    in_a_process(LOSS + "assert wanted.dtype == jnp.float64\n" + code, JAX_ENABLE_X64="1")


@pytest.mark.parametrize("flag", ["true", "false"])
def test_remat3(flag):
    """With either of JAX's implementations gradients stay, mapped ones with names too; where regions would save no
    memory the user is told."""
    code = """
    import warnings
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        f = jaxsub.sublinear(loss, cache=False)
        assert jnp.allclose(jax.jit(jax.grad(f))(w, x), wanted, atol=1e-6)
    from jaxsub import compat
    assert any("jax_remat3" in str(t.message) for t in told) == compat.checkpoint_saves_nothing()
    if not compat.checkpoint_saves_nothing():
        assert jaxsub.measure(f, w, x).temp_bytes < jaxsub.measure(loss, w, x).temp_bytes
    def residual(ws, x):
        for w in ws:
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean(x**2)
    with warnings.catch_warnings(action="ignore"):
        named = jaxsub.sublinear(residual, budget=.5, cache=False, verify=False)
        assert any(s.saved for s in named.plan([w] * 8, x).segments)
        mapped = jax.vmap(jax.grad(residual if compat.checkpoint_saves_nothing() else named), (None, 0))
        assert jnp.allclose(mapped([w] * 8, x[None])[3][0], jax.grad(named)([w] * 8, x)[3], atol=1e-5)
    """
    in_a_process(LOSS + textwrap.dedent(code), JAX_REMAT3=flag)
