"""JAX's own tests of `jax.checkpoint`, asked of `sublinear`: what holds of a region holds of a planned function.

`tests/api_test.py` of JAX, class `RematTest`, was read; each of its tests has a counterpart of the same name below,
or a line in `ELSEWHERE` that says where the counterpart stands, or in `NOT_APPLICABLE` that says why there is none.
Where JAX wraps a function in `jax.remat`, here the whole of it is one region (`whole`); where JAX gives a policy, here
a plan saves the results of the same primitives (`saving`), or the policy is the user's own, round or inside.
"""

import functools
import inspect
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxsub
from jaxsub import compat
from jaxsub.flops import bodies_of
from jaxsub.plan import Budget, Plan, Segment
from jaxsub.program import trace

policies = jax.checkpoint_policies
make = functools.partial(jaxsub.sublinear, cache=False, progress=False)
predicted = functools.partial(make, verify=False)
plain = functools.partial(make, planner="plain", verify=False)
whole = functools.partial(make, mirror=lambda node: int(node.can_recompute))


def saving(*primitives):
    """One region round everything, which saves the results of some primitives."""

    def wrap(f):
        @functools.wraps(f)
        def call(*args):
            program = trace(f, args, {})
            graph = program.graph
            saved = tuple(v for node in graph.nodes if node.primitive in primitives for v in node.outputs)
            segment = Segment(0, len(graph.nodes), saved)
            return jaxsub.sublinear(f, plan=Plan(program.fingerprint, Budget(), len(graph.nodes), (segment,)))(*args)

        return call

    return wrap


FAST = {"xla_backend_optimization_level": 0}
everywhere = pytest.mark.parametrize("wrap", [whole, predicted], ids=["whole", "predicted"])


def executed(jaxpr):
    """The primitives of a jaxpr and of all that it calls, each time it does."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for body in bodies_of(eqn):
            yield from executed(body)


def backward(f, *args):
    """How often the backward pass of a function executes each primitive."""
    y, pullback = jax.vjp(f, *args)
    names = list(executed(jax.make_jaxpr(pullback)(jax.tree.map(jnp.ones_like, y))))
    return {name: names.count(name) for name in ("sin", "cos", "dot_general", "exp")}


def stored(f, *args):
    """The shapes of what the backward pass of a function reads beside the arguments."""
    traced = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]))(*args)
    jaxpr = compat.open_jaxpr(traced)
    return [v.aval.shape for v in jaxpr.outvars if compat.is_var(v) and v not in set(jaxpr.invars)]


def same(got, wanted, rtol=1e-5):
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=1e-6)


def check_derivatives(f, wanted, x, modes=("fwd", "rev")):
    """First and second derivatives of a function are another's."""

    def derivatives(f):
        loss = lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x))))  # noqa: E731
        twice = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) * x))
        tangents = lambda x: jax.jvp(jax.grad(loss), (x,), (x,)) if "fwd" in modes else x  # noqa: E731
        run = jax.jit(lambda x: (jax.value_and_grad(loss)(x), twice(x), tangents(x)), compiler_options=FAST)
        return run(x)

    same(derivatives(f), derivatives(wanted), rtol=1e-4)


def sines(x):
    return lax.sin(lax.sin(x))


COS_SIN = np.cos(np.sin(2.0)) * np.cos(2.0)


# Values, transformations, control flow


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
    """A static argument without a hash is refused with its value."""
    with pytest.raises(TypeError, match=r"must be hashable, got \[2.0\]"):
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
    """A function without arguments gives what it closes over; with nothing to differentiate that is said."""
    same(jax.jit(lambda x: wrap(lambda: 2 * x)())(3.0), 6.0)
    with pytest.raises(jaxsub.UnsupportedError, match="Nothing to differentiate"):
        jax.jit(lambda x: wrap(lambda: 2 * x)())(3)


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


# What is saved


@pytest.mark.parametrize("inner", [lambda x: x * x, jax.jit(lambda x: x * x)], ids=["product", "jitted product"])
@pytest.mark.parametrize(
    ("primitives", "sin", "cos"),
    [(("sin", "name", "mul"), 0, 2), (("name",), 0, 2), ((), 2, 2)],
    ids=["all", "names", "nothing"],
)
def test_remat_custom_policy(inner, primitives, sin, cos):
    """What a plan saves is not executed again, what it does not is."""

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
    """A rule of the user's own keeps in a region that saves what stands before it, in loops too."""
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
    """Constants that a region makes are made again, not stored."""
    x = jnp.ones((2, 2))
    functions = (lambda x: jnp.einsum("ii->i", x), lambda x: jnp.zeros_like(x) * jnp.sin(x))
    assert [stored(whole(f), x) for f in functions] == [[], []]


# The user's own names and policies, round a planned function


def stores_as_much(f, policy, *args):
    """Whether under a policy of the user's a planned function stores what the plain one stores."""
    found, wanted = (stored(jax.checkpoint(g, policy=policy), *args) for g in (plain(f), f))
    assert found == wanted
    return len(found)


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


# Compiled once


@pytest.fixture
def compiles(caplog):
    """Run something twenty times and count what JAX says that it compiled."""

    def run(f):
        caplog.clear()
        with jax.log_compiles():
            for _ in range(20):
                jax.block_until_ready(f())
        return sum("Compiling" in record.message for record in caplog.records)

    return run


double = jax.jit(lambda x: 2 * x)


@everywhere
def test_linearize_caching(wrap, compiles):
    """A linear map is compiled once."""
    linear = jax.linearize(wrap(double), 1.0)[1]
    assert compiles(lambda: linear(1.0)) <= 1


@everywhere
def test_vjp_caching(wrap, compiles):
    """A backward pass is compiled once, and so is what makes its cotangent."""
    pullback = jax.vjp(wrap(double), 1.0)[1]
    assert compiles(lambda: pullback(1.0)) <= 2


def test_vjp_caching_static_argnums(compiles):
    """The same with a static argument."""
    f = whole(lambda x, y: 2 * x if y else x, static_argnums=1)
    pullback = jax.vjp(lambda x: f(x, True), 1.0)[1]
    assert compiles(lambda: pullback(1.0)) <= 2


@everywhere
def test_fwd_caching(wrap, compiles):
    """Differentiating anew compiles nothing anew."""
    f = wrap(double)
    assert compiles(lambda: jax.vjp(f, 1.0)[0]) <= 1


def test_fwd_caching_static_argnums(compiles):
    """Calling anew compiles nothing anew."""
    f = whole(lambda n, x: n * x, static_argnums=0)
    assert compiles(lambda: f(2, 1.0)) <= 1


# Regions and policies round loops and branches


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
    """Under a policy of the user's a planned function executes again what the plain one does; gradients too."""
    f, x = NAMED[name]()
    found, wanted = (backward(jax.checkpoint(g, policy=POLICIES[policy]), x) for g in (plain(f), f))
    assert found == wanted
    if policy in ("products", "cosines"):
        loss = lambda f: jax.jit(jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x))))), compiler_options=FAST)  # noqa: E731
        same(loss(jax.checkpoint(whole(f), policy=POLICIES[policy]))(x), loss(f)(x))


def test_remat_of_cond():
    """A branch in a region: only what its backward pass reads is executed again."""
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


# Odds and ends


def test_excess_precision_hell():
    """What a region hands to its backward pass in bf16 is what the forward pass had, to the bit."""
    dot = jax.custom_vjp(lambda x: jnp.dot(x, x))
    dot.defvjp(lambda x: (dot(x), None), lambda _, ct: (ct,))
    wide = jax.custom_vjp(lambda x: jnp.float32(1) * x.astype("float32"))
    wide.defvjp(lambda x: (wide(x), x), lambda x, ct: (jnp.float32(1) * x.astype("float32"),))
    x = (jnp.bfloat16(1) + jnp.finfo("bfloat16").eps) * jnp.eye(2, dtype="bfloat16")
    for wrap in (whole, predicted, saving("custom_vjp_call")):
        y, pullback = jax.vjp(jax.jit(wrap(lambda x: wide(dot(x)))), x)
        assert jnp.array_equal(pullback(jnp.ones_like(y))[0].astype("float32"), y)


@pytest.mark.parametrize("static", [(), 1], ids=["", "static_argnums"])
def test_concreteness_error_includes_user_code(static):
    """Branching on a value is JAX's error, whose traceback shows the user's line."""

    def f(x, _):
        if x > 0:  # the user's line
            return x
        return jnp.sin(x)

    with pytest.raises(jax.errors.TracerBoolConversionError) as refused:
        whole(f, static_argnums=static)(3.0, 1.0)
    assert "if x > 0:  # the user's line" in str(refused.traceback[-1].statement) + str(
        [entry.statement for entry in refused.traceback]
    )


def test_name_stack_annotation():
    """Named scopes of the user stand in the backward pass, once under what is executed again."""

    @whole
    def f(x, ws):
        for w in ws:
            with jax.named_scope("layer"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    x, ws = jnp.ones((6, 6)), [jnp.ones((6, 8)), jnp.ones((8, 6))]
    text = jax.jit(jax.grad(f)).lower(x, ws).as_text(debug_info=True)
    assert re.search(r"rematted_computation.*layer", text)


def test_remat_grad_accum_refs():
    """A backward pass adds into a reference."""
    f = whole(jnp.sin)
    y, pullback = jax.vjp(f, jnp.float32(2))
    total = jax.new_ref(jnp.float32(1))
    pullback.with_refs(total)(jnp.float32(1))
    same((y, total[...]), (np.sin(2.0), 1 + np.cos(2.0)))


# The table

ELSEWHERE = {
    "test_remat_recursive_checkpoint_recompute_counts": "test_emit.py::test_evaluations_of_recursive_halving",
    "test_remat_checkpoint_dots_with_no_batch_dims": "test_remat_counterparts.py::test_remat_checkpoint_dots",
    "test_saved_residuals_utility_jit": "test_remat_counterparts.py::test_saved_residuals_utility",
    "test_const_in_jvp_scan": "test_remat_counterparts.py::test_const_in_jvp",
    "test_const_in_jvp_cond": "test_remat_counterparts.py::test_const_in_jvp",
    "test_remat_of_while_loop_policy": "test_remat_counterparts.py::test_remat_of_while_loop",
    "test_concreteness_error_includes_user_code_with_static_argnums": (
        "test_remat_counterparts.py::test_concreteness_error_includes_user_code"
    ),
    **dict.fromkeys(
        (
            "test_remat_custom_policy_save_cos",
            "test_remat_checkpoint_dots_outside_scan",
            "test_remat_of_scan_policy",
            "test_remat_of_scan_funky_custom_jvp",
            "test_remat_of_scan_funky_custom_jvp2",
            "test_remat_checkpoint_dots_inside_cond",
            "test_remat_checkpoint_dots_outside_cond",
            "test_remat_of_cond_policy",
            "test_remat_of_cond_funky_custom_jvp",
            "test_remat_of_cond_funky_custom_jvp2",
        ),
        "test_remat_counterparts.py::test_policies_round_loops_and_branches",
    ),
}
NOT_APPLICABLE = {
    "test_no_cse_widget_with_prevent_cse_false": "sublinear has no prevent_cse: without it a plan would save nothing",
    "test_remat_partial_cse_prevention": "sublinear has no prevent_cse, whole or by argument",
    "test_remat_partial_cse_prevention_all_false": "sublinear has no prevent_cse, whole or by argument",
    "test_remat_partial_cse_prevention_pytree": "sublinear has no prevent_cse, whole or by argument",
    "test_remat_residual_logging": "what is saved is told by the plan when it is printed, not by a log",
}
JAX_TESTS = """
test_remat_basic test_remat_freevars test_remat_grad_python_control_flow_static_argnums
test_remat_grad_python_control_flow_unhashable_static_argnums test_remat_retracing
test_remat_static_agnums_retracing test_remat_jit test_remat_vmap test_remat_vmap_not_leading_dim
test_remat_higher_order_autodiff test_remat_higher_order_ad_preserves_remat_primitive test_remat_scan
test_remat_no_redundant_flops test_remat_binomial_checkpointing test_remat_symbolic_zeros test_remat_jit2
test_remat_nontrivial_env test_remat_jit3 test_remat_scan2 test_remat_jit_static_argnum_omnistaging
test_remat_eval_counter test_remat_recursive_checkpoint_recompute_counts test_escaped_tracer_remat
test_no_cse_widget_on_primals test_no_cse_widget_with_prevent_cse_false test_remat_custom_policy
test_remat_custom_policy_save_cos test_remat_checkpoint_dots test_remat_checkpoint_dots_with_no_batch_dims
test_remat_checkpoint_dots_with_no_batch_dims2 test_remat_checkpoint_dots_jit
test_remat_checkpoint_dots_inside_scan test_remat_custom_jvp_policy test_remat_custom_vjp_policy
test_remat_dropvar_policy test_remat_custom_jvp_linear_policy test_constants_not_hoisted
test_name_saveable_input test_name_pytree test_name_denylist test_name_allowlist test_checkpoint_name_vmap
test_saved_residuals_utility test_saved_residuals_utility_jit test_checkpoint_dropvars
test_dce_keeps_eqns_with_used_outputs_but_no_used_inputs test_linearize_caching test_vjp_caching
test_vjp_caching_static_argnums test_fwd_caching test_fwd_caching_static_argnums test_remat_of_scan
test_remat_of_scan_unused_extensive_output_grad test_remat_of_jit_residual_forwarding
test_remat_offload_names_jaxpr test_remat_offload_names_of_scan_jaxpr
test_remat_offload_dot_with_no_batch_dims_jaxpr test_const_in_jvp_scan test_remat_checkpoint_dots_outside_scan
test_remat_of_scan_policy test_remat_of_scan_funky_custom_jvp test_remat_of_scan_funky_custom_jvp2
test_remat_of_cond test_const_in_jvp_cond test_remat_checkpoint_dots_inside_cond
test_remat_checkpoint_dots_outside_cond test_remat_of_cond_policy test_remat_of_cond_funky_custom_jvp
test_remat_of_cond_funky_custom_jvp2 test_remat_of_while_loop test_remat_of_while_loop_policy
test_remat_residual_logging test_excess_precision_hell test_concreteness_error_includes_user_code
test_concreteness_error_includes_user_code_with_static_argnums test_name_stack_annotation
test_remat_partial_cse_prevention test_remat_partial_cse_prevention_all_false
test_remat_partial_cse_prevention_pytree test_remat_grad_accum_refs
""".split()


def test_every_one_has_its_counterpart():
    """Each of JAX's tests is here under its name, or stands elsewhere, or has a reason; no line is about another."""
    here = {name for name, value in globals().items() if inspect.isfunction(value)}
    assert [name for name in JAX_TESTS if (name in here) + (name in ELSEWHERE) + (name in NOT_APPLICABLE) != 1] == []
    assert set(ELSEWHERE) | set(NOT_APPLICABLE) <= set(JAX_TESTS)
    folder = Path(__file__).parent
    lost = [w for w in ELSEWHERE.values() if f"def {w.split('::')[1]}(" not in (folder / w.split("::")[0]).read_text()]
    assert lost == []
