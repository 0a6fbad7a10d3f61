"""Random programs under random plans: every derivative is the plain program's.

A program is a list of steps over a growing list of 4 x 4 arrays. Every step is smooth enough, and bounded, so that
second derivatives can be compared. 60 programs by default; 2,000 with

    pytest tests/test_random_programs.py -m exhaustive --hypothesis-seed=0
"""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax, random
from zoo import smooth_abs

import jaxsub
from jaxsub.budget import Budget
from jaxsub.plan import Plan, Segment
from jaxsub.planners import get
from jaxsub.pricing import Pricer
from jaxsub.program import trace
from jaxsub.targets import get_target
from jaxsub.verify import cut_choices

N = 4
KEY = random.key(0)
FAST_COMPILE = {"xla_backend_optimization_level": 0}
TOLERANCE = 2e-5  # of the largest entry: second derivatives of a dozen layers in f32, fused differently


def scanned(x, y):
    return lax.scan(lambda c, row: (jnp.tanh(c + row), jnp.sin(c) * row), x[0], y)[1]


def scanned_back(x, y):
    return lax.scan(lambda c, row: (0.5 * c + row, c * jnp.cos(row)), y[1], x, reverse=True)[1]


def nested_scan(x, y):
    def body(c, row):
        return lax.scan(lambda d, z: (jnp.sin(d + z), d), c, jnp.stack([row, y[0]]))[0], c

    return lax.scan(body, x[0], x)[1]


def gathered(x, y):
    rows = (jnp.argsort(lax.stop_gradient(y[:, 0])) + 1) % N
    return x[rows] * (rows % 2 == 0)[:, None]


def scattered(x, y):
    return x.at[jnp.array([0, 2, 2])].add(y[:3]).at[1, :].multiply(0.5)


def convolved(x, y):
    return lax.conv_general_dilated(x[None, None], jnp.tanh(y[None, None, :3, :3]), (1, 1), "SAME")[0, 0]


def branched(x, y):
    return lax.cond(jnp.sum(x) > 0, lambda x, y: jnp.sin(x) * y, lambda x, y: x - jnp.tanh(y), x, y)


def switched(x, y):
    index = jnp.int32(jnp.abs(lax.stop_gradient(y[0, 0])) * 10) % 3
    return lax.switch(index, [jnp.sin, jnp.tanh, lambda x: 0.5 * x], x)


def dropped(x, y):
    return jnp.where(random.bernoulli(random.fold_in(KEY, 3), 0.5, x.shape), x * 2, y)


def counted(x, y):
    n = lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.int32(jnp.sum(lax.stop_gradient(y) > 0)) % 3)
    return x * n


def updated(x, y):
    return lax.dynamic_update_slice(x, jnp.sin(y[:2, :2]), (1, 1))


UNARY = (
    jnp.tanh,
    jnp.sin,
    jnp.cos,
    jax.nn.softmax,
    jax.nn.silu,
    jax.nn.gelu,
    jax.nn.relu,
    jnp.abs,
    smooth_abs,
    jnp.transpose,
    lambda x: jnp.exp(-x * x),
    lambda x: jnp.log1p(x * x),
    lambda x: jnp.sqrt(1 + x * x),
    lambda x: lax.rsqrt(1 + x * x),
    lambda x: lax.erf(x),
    lambda x: jnp.expm1(-jnp.abs(x)),
    lambda x: x**3 / (1 + x**4),
    lambda x: lax.integer_pow(jnp.sin(x), 3),
    lambda x: jnp.cumsum(x, 1) / N,
    lambda x: jnp.cumsum(x, 0, dtype=x.dtype)[::-1] / N,
    lambda x: lax.cumlogsumexp(jnp.tanh(x)),
    lambda x: jnp.sort(x, axis=0),
    lambda x: lax.top_k(x, N)[0],
    lambda x: x.reshape(-1)[::-1].reshape(N, N),
    lambda x: jnp.concatenate([x[1:], x[:1]]),
    lambda x: jnp.pad(x, 1)[1:-1, 2:],
    lambda x: jnp.roll(x, 1, 1),
    lambda x: jnp.broadcast_to(x.mean(0), (N, N)),
    lambda x: x - x.max(1, keepdims=True),
    lambda x: x - jax.nn.logsumexp(x, 0),
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    lambda x: x / (1 + jnp.sum(x * x)),
    lambda x: jnp.prod(jnp.cos(x), 0) * x,
    lambda x: jnp.where(x > 0, x, 0.1 * x),
    lambda x: jnp.clip(x, -0.5, 0.7),
    lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2)(x),
    lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x),
    lambda x: x + lax.stop_gradient(jnp.round(x)),
    lambda x: jnp.real(jnp.fft.ifft(jnp.fft.fft(x) * jnp.arange(N))) / N,
    lambda x: jnp.tril(x) - jnp.triu(x, 1),
    lambda x: x * jax.nn.one_hot(jnp.argmax(x, 1), N),
    lambda x: jax.vmap(jnp.flip)(x),
    lambda x: jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "mine"),
    lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x + i), x),
    lambda x: lax.map(lambda r: r * jnp.sum(r), x),
    lambda x: lax.associative_scan(jnp.add, x) / N,
    lambda x: x.astype(jnp.float16).astype(x.dtype) * x,
    lambda x: jnp.split(x, 2)[0].repeat(2, 0),
    lambda x: -x[None].squeeze(0),
)
BINARY = (
    jnp.add,
    jnp.subtract,
    lambda x, y: x * jnp.tanh(y),
    lambda x, y: jnp.tanh(x @ y),
    lambda x, y: jnp.sin(x @ y.T),
    lambda x, y: x / (1 + y * y),
    jnp.maximum,
    jnp.minimum,
    lambda x, y: jnp.arctan2(x, 2 + jnp.sin(y)),
    scanned,
    scanned_back,
    nested_scan,
    gathered,
    scattered,
    convolved,
    branched,
    switched,
    dropped,
    counted,
    updated,
    lambda x, y: lax.select(x > y, jnp.sin(x), y),
    lambda x, y: jnp.einsum("ij,ij->i", x, y)[:, None] * x / N,
    lambda x, y: jnp.stack([x, y]).mean(0),
    lambda x, y: jax.lax.optimization_barrier((x, y))[0] + y,
    lambda x, y: lax.dynamic_slice(jnp.tile(x, (2, 1)), (jnp.int32(lax.stop_gradient(y[0, 0]) > 0), 0), (N, N)),
)
steps = st.tuples(st.integers(0, len(UNARY) + 2 * len(BINARY) - 1), st.integers(0, 50), st.integers(0, 50))
programs = st.lists(steps, min_size=3, max_size=9)


def loss_of(program):
    """The program as a loss of a weight and an input, with an auxiliary result made half way."""

    def loss(w, x):
        values = [x, jnp.tanh(x @ w), w]
        for op, i, j in program:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(UNARY[op](a) if op < len(UNARY) else BINARY[(op - len(UNARY)) % len(BINARY)](a, b))
        return jnp.mean(jnp.sin(values[-1] + values[-2])) + 0.1 * jnp.mean(values[len(values) // 2] * w)

    return loss


def derivatives(f):
    """Value, gradients, a tangent, a batch of gradients, the gradient of a batch, a second derivative."""

    def run(w, x, t):
        batch = jnp.stack([x, x + 0.25])
        return (
            jax.value_and_grad(f, argnums=(0, 1))(w, x),
            jax.jvp(f, (w, x), (t, x)),
            jax.vmap(jax.grad(f), in_axes=(None, 0))(w, batch),
            jax.grad(lambda w: jnp.sum(jax.vmap(f, in_axes=(None, 0))(w, batch)))(w),
            jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (t,)),
        )

    return jax.jit(run, compiler_options=FAST_COMPILE)(*ARGUMENTS)


ARGUMENTS = tuple(random.normal(key, (N, N)) * 0.7 for key in random.split(KEY, 3))


def assert_alike(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert jnp.abs(a - b).max() <= TOLERANCE * max(1.0, jnp.abs(b).max())


def random_segments(rng, start, stop, depth):
    """Disjoint runs of nodes in order, up to three deep."""
    cuts = sorted(set(rng.integers(start, stop + 1, size=2 * rng.integers(1, 4)).tolist()))
    for a, b in zip(cuts[::2], cuts[1::2], strict=False):
        yield Segment(a, b, (), tuple(random_segments(rng, a, b, depth - 1)) if depth and b > a + 1 else ())


def random_plan(program, seed):
    """Any plan that holds together: segments, nests, saved values and barriers anywhere."""
    rng, graph = np.random.default_rng(seed), program.graph
    n = len(graph.nodes)
    segments = [s for s in random_segments(rng, 0, n, depth=2) if s.stop > s.start]
    for i, s in enumerate(segments):
        made = np.array(graph.made_by(s.start, s.stop))
        if not s.children and len(made):
            segments[i] = Segment(
                s.start, s.stop, tuple(sorted(rng.choice(made, rng.integers(len(made) + 1), replace=False).tolist()))
            )
    barriers = tuple(sorted(set(rng.integers(0, n, size=rng.integers(0, 6)).tolist())))
    return Plan(program.fingerprint, Budget(), n, tuple(segments), barriers)


def planned(program, seed):
    """A planner's own plan for a program, at a random budget."""
    chain = Pricer(program, get_target(None), is_compiled=False).chain(cut_choices(program)[seed % 2 - 1])
    planner = get(("auto", "chen", "cheap", "recursive(1)", "revolve", "barriers")[seed % 6])
    plain = get("plain")(chain, None).prediction.temp_bytes
    try:
        return planner(chain, None if seed % 4 == 0 else int(plain * (seed % 100 + 1) / 100) + 1)
    except jaxsub.InfeasibleBudgetError as refused:
        return planner(chain, refused.least_bytes)


def check(steps_of_program, seed):
    loss = loss_of(steps_of_program)
    program = trace(loss, ARGUMENTS[:2], {})
    wanted = derivatives(loss)
    plan = (random_plan if seed % 2 else planned)(program, seed // 2)
    assert_alike(derivatives(jaxsub.sublinear(loss, plan=plan)), wanted)


@settings(max_examples=60)
@given(programs, st.integers(0, 2**32 - 1))
def test_random_programs(steps_of_program, seed):
    """Values, gradients, jvp, vmap-of-grad, grad-of-vmap and second derivatives are the plain program's."""
    check(steps_of_program, seed)


@pytest.mark.slow
@pytest.mark.exhaustive
@settings(max_examples=2000, derandomize=False)
@given(programs, st.integers(0, 2**32 - 1))
def test_many_random_programs(steps_of_program, seed):
    """The same for 2,000 programs."""
    check(steps_of_program, seed)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("op", range(len(UNARY) + len(BINARY)))
def test_every_step_alone(op):
    """Each step of the generator, repeated, under a plan with a nest, barriers and saved values."""
    loss = loss_of([(op, 0, 1), (op, 1, 0), (op, 0, 2)])
    program = trace(loss, ARGUMENTS[:2], {})
    n = len(program.eqns)
    a, b, c = n // 4, n // 2, 3 * n // 4
    saved = Segment(0, a, tuple(program.graph.made_by(0, a)))
    nest = Segment(a, n - 1, (), (Segment(a, b), Segment(b, c)))
    plan = Plan(program.fingerprint, Budget(), n, (saved, nest), tuple(sorted({a, b})))
    assert_alike(derivatives(jaxsub.sublinear(loss, plan=plan)), derivatives(loss))


def test_the_check_can_fail():
    """A derivative rule that inlining would lose is seen: without it the gradient differs."""
    loss, other = loss_of([(UNARY.index(smooth_abs), 0, 0)] * 3), loss_of([(UNARY.index(jnp.abs), 0, 0)] * 3)
    with pytest.raises(AssertionError):
        assert_alike(derivatives(loss), derivatives(other))
