"""Runs in slices: derivatives, memory and FLOPs, sums and their precision, names and lines."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from random_chunks import along, check, check_number
from random_steps import STEPS, UNARY

import jaxsub
from jaxsub.emission.chunks import makes_gradient, sliced
from jaxsub.jaxpr import axis_rules, compat
from jaxsub.jaxpr.axes import follow
from jaxsub.jaxpr.axis import NotIndependent
from jaxsub.jaxpr.flops import bodies_of, flops_of
from jaxsub.jaxpr.trace import trace

RNG = np.random.default_rng(0)
ROWS, WIDTH, CLASSES = 24, 8, 20
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(WIDTH, CLASSES)) * 0.3, jnp.float32)
Y = jnp.asarray(RNG.integers(0, CLASSES, ROWS))
MASK = jnp.asarray(RNG.random(ROWS) > 0.3, jnp.float32)


def head(w, x, y, mask):
    """A masked cross entropy, and how often it is right."""
    logits = x @ w
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return (losses * mask).sum() / mask.sum(), (jnp.argmax(logits, 1) == y).mean()


ARGS = W, X, Y, MASK
COTANGENTS = W + 1, X * 2, np.zeros(ROWS, jax.dtypes.float0), MASK - 0.5


def loss_of(f, argnums=(0, 1)):
    return jax.value_and_grad(lambda *args: f(*args)[0], argnums)


def hessian_product(f, args):
    w, x, *rest = args
    return jax.jvp(lambda w, x: loss_of(f)(w, x, *rest), (w, x), (w + 1, x * 2))[1]


DERIVATIVES = {
    "value": lambda f: f(*ARGS),
    "gradient": lambda f: loss_of(f)(*ARGS),
    "gradient of all": lambda f: loss_of(f, (0, 1, 3))(*ARGS),
    "gradient of aux": lambda f: jax.grad(lambda w: f(w, *ARGS[1:])[0] * 3 + f(w, *ARGS[1:])[1])(W),
    "tangents": lambda f: jax.jvp(f, ARGS, COTANGENTS)[:1],
    "tangent of the loss": lambda f: jax.jvp(lambda *a: f(*a)[0], ARGS, COTANGENTS),
    "batch": lambda f: jax.vmap(f, (None, 0, None, None))(W, jnp.stack([X, X + 1]), Y, MASK),
    "gradients of a batch": lambda f: jax.vmap(lambda x: loss_of(f)(W, x, Y, MASK))(jnp.stack([X, X + 1])),
    "gradient over a batch": lambda f: jax.grad(
        lambda w: jax.vmap(lambda x: f(w, x, Y, MASK)[0])(jnp.stack([X, X + 1])).sum()
    )(W),
    "second derivatives": lambda f: hessian_product(f, ARGS),
    "reverse twice": lambda f: jax.grad(lambda w: (jax.grad(lambda w: f(w, *ARGS[1:])[0])(w) * W).sum())(W),
    "hessian": lambda f: jax.hessian(lambda v: f(W.at[0].set(v), *ARGS[1:])[0])(W[0]),
    "in a region": lambda f: jax.grad(lambda w: jax.checkpoint(f)(w * 2, *ARGS[1:])[0])(W),
    "under jit": lambda f: jax.jit(lambda: loss_of(f)(*ARGS))(),
}


@pytest.mark.parametrize("count", [5])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_a_head_in_slices(name, count):
    """Every derivative of a loss head in slices is the plain one's, whether the count divides the axis or not."""
    _, chunked = along(head, *ARGS, seed=1)
    got, wanted = (jax.tree.leaves(DERIVATIVES[name](f)) for f in (chunked(count), head))
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def products_of(f, *args):
    """FLOPs of all products and convolutions of a function."""
    return sum(flops_of(eqn).arithmetic_flops for eqn in jax.make_jaxpr(f)(*args).eqns)


def temp_bytes(f, *args):
    return (
        jax.jit(f, compiler_options=compat.cpu_compiler_options())
        .lower(*args)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


def test_the_gradient_of_a_loss_is_made_in_the_forward_pass():
    """A head's gradient in slices needs a fraction of the memory, and no product more."""
    x, w = jnp.ones((2048, 64)), jnp.ones((64, 4096))
    args = w, x, jnp.zeros(2048, int), jnp.ones(2048)
    _, chunked = along(head, *args, seed=1)
    assert temp_bytes(loss_of(chunked(16)), *args) < temp_bytes(loss_of(head), *args) / 8
    assert products_of(loss_of(chunked(16)), *args) == products_of(loss_of(head), *args)


@pytest.mark.parametrize("count", [32, 5])
def test_data_along_an_inner_axis_is_not_copied(count):
    """Slices of a batch behind the axis of time are cut out one by one, the last of them shorter too."""
    w, x = jnp.eye(8) / 2, jnp.asarray(RNG.normal(size=(512, 32, 8)), jnp.float32)

    def loss(w, x):
        def step(h, t):
            h = jnp.tanh(h @ w + t)
            return h, (h**2).sum()

        return jax.lax.scan(jax.checkpoint(step), jnp.zeros((x.shape[1], 8)), x)[1].sum()

    _, chunked = along(loss, w, x, seed=1, dim=1)
    gradient, plain = (jax.value_and_grad(f) for f in (lambda *args: chunked(count)(*args), loss))
    chex.assert_trees_all_close(gradient(w, x), plain(w, x), rtol=1e-4)
    assert temp_bytes(gradient, w, x) < x.nbytes


def variational(w, x):
    """A reconstruction and a divergence, each a mean of its own; then means over members."""
    made = jnp.stack([jnp.tanh(x @ w), jnp.sin(x @ w)])
    return 0.0 + jnp.mean((made - 1) ** 2, (1, 2)).mean() + 0.1 * jnp.mean(jnp.sum(made**2, -1))


def spectral(w, x):
    """Complex weights, made of real ones before the slices."""
    found = jnp.fft.rfft(x, axis=1).astype("complex64") @ jax.lax.complex(w[:5], w[-5:])
    return jnp.mean(jnp.abs(found) ** 2) + found.imag.sum()


@pytest.mark.parametrize("loss", [variational, spectral])
def test_a_loss_of_several_terms_and_of_complex_weights_is_one_sum(loss):
    """No product runs twice, and the gradient is the plain one."""
    w, x = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((8, 6), (12, 8)))
    _, chunked = along(loss, w, x, seed=1)
    gradient, plain = (jax.value_and_grad(f) for f in (lambda *args: chunked(4)(*args), loss))
    assert products_of(gradient, w, x) <= products_of(plain, w, x)
    chex.assert_trees_all_close(gradient(w, x), plain(w, x), rtol=1e-5, atol=1e-6)


def with_auxiliary(w, x):
    """As people return them: predictions of each row, a metric that has a gradient too, constants and arguments."""
    predicted = jnp.tanh(x @ w)
    norm = jnp.sum(jnp.abs(predicted))
    return jnp.mean(predicted**2), {"predicted": predicted, "norm": norm, "rate": 0.1, "weights": w, "x": x}


def test_auxiliary_results_do_not_run_slices_twice():
    """Predictions and metrics that depend on weights: no product runs twice, and all results are the plain ones."""
    w, x = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((8, 6), (12, 8)))
    in_slices = jaxsub.sublinear(with_auxiliary, chunks={0: 4}, progress=False, cache=False)
    assert in_slices.plan(w, x).slices[0].count == 4
    gradient, plain = (jax.value_and_grad(f, has_aux=True) for f in (in_slices, with_auxiliary))
    assert products_of(gradient, w, x) <= products_of(plain, w, x)
    chex.assert_trees_all_close(gradient(w, x), plain(w, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["predicted", "norm"])
def test_auxiliary_results_have_derivatives(name):
    """Of these alone, with the loss, and forward."""
    w, x = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((8, 6), (12, 8)))
    in_slices = jaxsub.sublinear(with_auxiliary, chunks={0: 4}, progress=False, cache=False)

    def alone(f):
        return lambda w: jnp.sum(f(w, x)[1][name] ** 2)

    def both(f):
        return lambda w: f(w, x)[0] * jnp.sum(f(w, x)[1][name] ** 2)

    for of in (alone, both):
        chex.assert_trees_all_close(jax.grad(of(in_slices))(w), jax.grad(of(with_auxiliary))(w), rtol=1e-3, atol=1e-3)
    forward = (jax.jvp(lambda w, f=f: f(w, x), (w,), (w,)) for f in (in_slices, with_auxiliary))
    chex.assert_trees_all_close(*forward, rtol=1e-5, atol=1e-5)


def test_what_moves_beside_a_sum_that_does_not_is_no_loss():
    """Moments of a batch, not a loss, beside a sum of the mask: no gradient is made in the forward pass."""

    def moments(w, x):
        mask = x[:, 0] > 0
        return jnp.sum((x @ w) ** 2, 0) / jnp.maximum(jnp.sum(mask * 1.0), 1)

    jaxpr = jax.make_jaxpr(moments)(W, X).jaxpr
    axis = follow(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, jaxpr.invars[1], 0)
    assert not makes_gradient(axis, jaxpr.outvars, jaxpr.invars)
    jaxpr = jax.make_jaxpr(lambda w, x: moments(w, x).sum())(W, X).jaxpr
    axis = follow(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, jaxpr.invars[1], 0)
    assert not makes_gradient(axis, jaxpr.outvars, jaxpr.invars)
    mean = jax.make_jaxpr(lambda w, x: jnp.mean(x @ w, 0).mean())(W, X).jaxpr
    axis = follow(mean.eqns, mean.invars, mean.outvars, mean.invars[1], 0)
    assert makes_gradient(axis, mean.outvars, mean.invars)


def siamese(w, x, y):
    """Two batches that are compared."""
    return jnp.mean((jnp.tanh(x @ w).sum(-1) - jnp.tanh(y @ w).sum(-1)) ** 2)


def adversarial(w, x, y):
    """Scores of two batches, and of what is mixed of both."""
    mixed = jax.vmap(jax.grad(lambda z: jnp.tanh(z @ w).sum()))(0.3 * x + 0.7 * y)
    return jnp.tanh(x @ w).mean() - jnp.tanh(y @ w).mean() + jnp.mean((jnp.linalg.norm(mixed, axis=-1) - 1) ** 2)


def translated(w, x, y):
    """A decoder that attends to what an encoder makes of another batch."""
    source, target = (jnp.tanh(a.reshape(-1, 4, 2) @ w[:2]) for a in (x, y))
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", target, source))
    return jnp.mean((scores @ source) ** 2)


@pytest.mark.parametrize("loss", [siamese, adversarial, translated])
@pytest.mark.parametrize("seed", [1, 2])
def test_batches_that_meet_are_sliced_together(loss, seed):
    """Nothing of either runs before the slices, which give the value and the gradients of the plain loss."""
    args = W, X, jnp.sin(X)
    axis, chunked = along(loss, *args, seed=seed)
    assert not [eqn for eqn in axis.before if eqn.primitive.name == "dot_general"]
    gradients = (jax.value_and_grad(f, (0, 1, 2))(*args) for f in (chunked(3), loss))
    chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-6)


def test_a_batch_that_may_not_join_keeps_no_other_from_it():
    """Of four batches the second one's mean is needed whole: the others are sliced, two of them joining one by one."""

    def compared(w, x, a, b, c):
        centre = jnp.tanh(a @ w).mean(0)
        return jnp.mean((jnp.tanh(x @ w) - centre) * (a @ w) * jnp.tanh(b @ w) * jnp.sin(c @ w))

    args = W, X, X + 1, X + 2, X + 3
    axis, chunked = along(compared, *args, seed=1)
    assert len([eqn for eqn in axis.before if eqn.primitive.name == "dot_general"]) <= 2
    gradients = (jax.value_and_grad(f, (0, 1, 2, 3, 4))(*args) for f in (chunked(3), compared))
    chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-6)


def masked(w, x, y):
    """Two means over what a mask leaves, and advantages less their mean."""
    mask = (jnp.abs(y).sum(-1) > 1).astype(jnp.float32)
    advantage = (y[:, 0] - y[:, 0].mean()) / (y[:, 0].std() + 1e-6)
    score = jnp.tanh(x @ w).sum(-1)
    return (score * mask * advantage).sum() / mask.sum() + (score**2 * mask).sum() / mask.sum()


def test_cheap_totals_without_tangents_are_made_before_the_slices():
    """One sum is left, whose gradient is made in the forward pass; derivatives for what is still are right too."""
    args = W, X, jnp.sin(X)
    jaxpr = jax.make_jaxpr(masked)(*args).jaxpr
    with pytest.raises(NotIndependent):
        follow(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, jaxpr.invars[2], 0)
    program = trace(masked, args, {}, argnums=(0, 1))
    axis = follow(program.eqns, program.invars, program.outvars, program.invars[2], 0, {program.invars[2]})
    assert makes_gradient(axis, program.outvars, program.invars[:2])
    run = sliced(axis, program.invars, program.outvars, 3)
    for argnums in ((0, 1), (0, 2)):
        gradients = (jax.value_and_grad(f, argnums)(*args) for f in (lambda *a: run(*a)[0], masked))
        chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_needed_whole_runs_before_the_slices():
    """The mean of another batch is one value for all slices; where slices are recomputed, so is what runs once."""

    def centred(w, x, y):
        return jnp.mean((jnp.tanh(x @ w) - jnp.tanh(y @ w).mean(0)) ** 2)

    def residual(w, x, y):
        return jnp.tanh(x @ w) * jnp.tanh(y @ w)

    for f in (centred, residual):
        axis, chunked = along(f, W, X, jnp.sin(X), seed=1)
        assert [eqn for eqn in axis.before if eqn.primitive.name == "dot_general"]
        chex.assert_trees_all_close(chunked(3)(W, X, jnp.sin(X)), f(W, X, jnp.sin(X)), rtol=1e-5)


@jax.custom_vjp
def clipped(x):
    """The same, its cotangent clipped."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))


@jax.custom_vjp
def regularised(x):
    """The same, with a penalty on its size in the backward pass only."""
    return x


regularised.defvjp(lambda x: (x, x), lambda x, ct: (ct + 1e-2 * x,))


@pytest.mark.parametrize("rule", [clipped, regularised])
@pytest.mark.parametrize("place", ["in the open", "in a region", "in a scan"])
def test_rules_that_do_not_scale_with_the_cotangent(rule, place):
    """A backward pass that clips its cotangent, or adds to it, gets the one it gets without slices."""
    scanned = lambda x: jax.lax.scan(lambda c, _: (rule(jnp.sin(c)), None), x, None, length=2)[0]  # noqa: E731
    run = {"in the open": rule, "in a region": jax.checkpoint(rule), "in a scan": scanned}[place]
    loss = lambda w, x: (run(x @ w) ** 2).mean()  # noqa: E731
    _, chunked = along(loss, W, X, seed=1)
    got, wanted = (jax.grad(f, (0, 1))(W, X) for f in (chunked(5), loss))
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-7)


PHASES, IS_WAVE = jnp.arange(5.0), jnp.arange(20) % 3 > 0


def waves(x):
    """A sum over a grid where a mask says so: both are closed over."""
    return jnp.where(IS_WAVE, jnp.sin(PHASES + x[..., None]).sum(-1), x)


def waves_by_vjp():
    """The same with a backward pass of its own, whose forward pass calls the function itself."""

    @jax.custom_vjp
    def f(x):
        return waves(x)

    def forward(x):
        return f(x), jnp.where(IS_WAVE, jnp.cos(PHASES + x[..., None]).sum(-1), 1.0)

    f.defvjp(forward, lambda slope, ct: (ct * slope,))
    return f


def waves_by_jvp():
    """The same with tangents of its own."""

    @jax.custom_jvp
    def f(x):
        return waves(x)

    @f.defjvp
    def _(primals, tangents):
        return f(*primals), jnp.where(IS_WAVE, jnp.cos(PHASES + primals[0][..., None]).sum(-1), 1.0) * tangents[0]

    return f


@pytest.mark.parametrize("make", [waves_by_vjp, waves_by_jvp])
@pytest.mark.parametrize("is_looped", [False, True])
def test_rules_of_functions_that_close_over_arrays(make, is_looped):
    """What is closed over has no gradient, which JAX refuses to take: slices ask for none."""
    f = make()
    scanned = lambda x: jax.lax.scan(lambda c, _: (f(jnp.sin(c)), None), x, None, length=2)[0]  # noqa: E731
    run = scanned if is_looped else f
    loss = lambda w, x: (run(x @ w) ** 2).mean()  # noqa: E731
    w = jnp.linspace(-1, 1, W.shape[0] * 20).reshape(-1, 20)
    _, chunked = along(loss, w, X, seed=1)
    for order in (jax.grad, lambda f, argnums: jax.grad(lambda *a: (jax.grad(f)(*a) ** 2).sum(), argnums)):
        got, wanted = (order(f, (0, 1))(w, X) for f in (chunked(5), loss))
        chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-6)
    plan = jaxsub.plan(loss, w, jnp.tile(X, (512, 1)), budget=0.3, cache=False, progress=False)
    assert plan.slices


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_floats_of_few_exponents(dtype):
    """Cotangents that vanish in a narrow type, or overflow there, do so in slices too."""
    loss = lambda w, x: 1e-6 * ((x @ w).astype(dtype).astype("float32") ** 2).sum()  # noqa: E731
    _, chunked = along(loss, W, 100 * X, seed=1)
    got, wanted = (jax.grad(f, (0, 1))(W, 100 * X) for f in (chunked(5), loss))
    chex.assert_trees_all_close(got, wanted, rtol=1e-2, atol=1e-9)


def test_other_runs_recompute_each_slice():
    """An MLP in slices is a scan of checkpointed slices: its gradient needs a fraction, for one more forward pass."""

    def mlp(x, a, b):
        return x + jnp.tanh(x @ a) @ b

    args = jnp.ones((1024, 64)), jnp.ones((64, 2048)), jnp.ones((2048, 64))
    gradient = lambda f: jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2))  # noqa: E731
    _, chunked = along(mlp, *args)
    assert temp_bytes(gradient(chunked(8)), *args) < temp_bytes(gradient(mlp), *args) / 4
    _, by_hidden = along(mlp, *args, seed=1, dim=1)
    assert temp_bytes(gradient(by_hidden(8)), *args) < temp_bytes(gradient(mlp), *args) / 4


@pytest.mark.parametrize("count", [3, 4])
def test_arrays_without_elements_are_sliced_too(count):
    """An associative scan of an odd length makes some."""

    def f(x):
        return jax.lax.associative_scan(jnp.multiply, x[:, 1:2], axis=1)[:, :0], jnp.sin(x)

    _, chunked = along(f, X)
    chex.assert_trees_all_close(chunked(count)(X), f(X))


def test_rules_that_call_their_own_function_are_followed_in_bodies_too():
    """The rule of `log_sigmoid` reads `logaddexp`, whose rule calls it again: in a loop's body, three calls deep."""

    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (jax.nn.log_sigmoid(x @ w), None), x, ws)[0].mean()

    ws, x = jnp.asarray(RNG.normal(size=(4, 64, 64)) / 8, jnp.float32), jnp.ones((4096, 64))
    wrapped = jaxsub.sublinear(loss, budget=0.3, cache=False)
    assert wrapped.plan(ws, x).slices
    chex.assert_trees_all_close(jax.grad(wrapped)(ws, x), jax.grad(loss)(ws, x), atol=1e-6)


def test_gradients_of_narrow_weights_are_no_worse():
    """A weight that is cast to bfloat16 gets its gradient summed in float32: as near the truth as the plain one."""

    def loss(w, x):
        return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum()

    x, w = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((512, 16), (16, 16)))
    truth = jax.grad(lambda w: jnp.tanh(x.astype(jnp.bfloat16).astype(jnp.float32) @ w).sum())(
        w.astype(jnp.bfloat16).astype(jnp.float32)
    )
    _, chunked = along(loss, w, x, seed=1)
    errors = [float(jnp.abs(jax.grad(f)(w, x) - truth).max()) for f in (chunked(32), loss)]
    assert errors[0] <= 1.5 * errors[1]


def test_narrow_sums_are_kept_wide():
    """A product summed over 64 slices in bfloat16 is as near the truth as the plain product."""
    x = jnp.asarray(RNG.random(size=(512, 4)), jnp.bfloat16)
    product = lambda x: x.T @ x  # noqa: E731
    _, chunked = along(product, x)
    truth = np.asarray(x, np.float64).T @ np.asarray(x, np.float64)
    errors = [np.abs(np.asarray(f(x), np.float64) - truth).max() for f in (chunked(64), product)]
    assert errors[0] <= errors[1] + 0.5 * 2**-8 * truth.max()


def all_eqns(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies_of(eqn):
            yield from all_eqns(body)


def test_names_lines_and_scopes_are_kept():
    """What `checkpoint_name` calls a value, the user's line and the named scope are found in the slices too."""

    def named(x, w):
        with jax.named_scope("my_head"):
            return checkpoint_name(jax.nn.relu(x @ w), "mine").sum()

    _, chunked = along(named, X, W)
    eqns = list(all_eqns(jax.make_jaxpr(chunked(4))(X, W)))
    product = next(e for e in eqns if e.primitive.name == "dot_general")
    assert "test_chunks.py" in compat.source_of(product)
    assert "named" in compat.source_of(product)
    assert "my_head" in str(product.source_info.name_stack)
    assert "mine" in [compat.given_name(e) for e in eqns]


@settings(max_examples=14)
@given(
    st.lists(st.tuples(*[st.integers(0, n) for n in (len(STEPS) - 1, 50, 50)]), min_size=2, max_size=5),
    st.integers(0, 2**31),
)
def test_random_runs_in_slices(steps, seed):
    """A random run of a random program in slices has the plain program's derivatives, or the analysis says no."""
    check(steps, seed)


def test_most_random_programs_have_a_run_in_slices():
    """The analysis does not say no to everything: of ten programs at least eight have a run that is sliced."""
    assert sum(check_number(number) for number in range(10)) >= 8


CUMSUM = next(i for i, f in enumerate(UNARY) if "cumsum" in getattr(getattr(f, "__code__", None), "co_names", ()))
FLIP = next(i for i, f in enumerate(UNARY) if "rev" in getattr(getattr(f, "__code__", None), "co_names", ()))


@pytest.mark.parametrize(("name", "op"), [("cumsum", CUMSUM), ("rev", FLIP)])
def test_the_random_check_can_fail(monkeypatch, name, op):
    """With a rule that lets through what mixes the axis, the check of random programs fails."""
    monkeypatch.setitem(axis_rules.RULES, name, axis_rules._elementwise)
    with pytest.raises(AssertionError, match="slices"):
        [check([(op, 0, 0), (op, 0, 1), (op, 0, 0)], seed) for seed in range(40)]
