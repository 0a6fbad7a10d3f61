"""Random programs and random plans for them.

A program is a list of steps over a growing list of 4 x 4 arrays. Every step is smooth enough, and bounded, so that
second derivatives can be compared. It is jitted, so that JAX differentiates it once in the plain program, however many
programs it stands in; plans are made of its equations all the same.

Programs by number are checked without compiling them, in double precision:

    python tests/random_programs.py 2000 4000
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from interpreter import evaluate
from jax import lax, random
from jax.extend.core import jaxpr_as_fun
from zoo import smooth_abs

import jaxsub
from jaxsub.budget import Budget
from jaxsub.emit import emit, keep_out
from jaxsub.plan import Plan
from jaxsub.planners import get
from jaxsub.pricing import Pricer
from jaxsub.program import trace
from jaxsub.targets import get_target
from jaxsub.verify import cut_choices
from jaxsub.ways import Segment

N = 4
KEY = random.key(0)
TOLERANCE = 1e-9
"""Of the largest entry, in double precision: a plan changes no more than the order in which gradients are summed."""
NARROW_TOLERANCE = 1e-2
"""The same where cotangents pass through half precision, which rounds their sums."""


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


def ruled(f, backward):
    """An operation with a backward pass of its own, not quite the true one."""
    op = jax.custom_vjp(f)
    op.defvjp(lambda x: (op(x), x), lambda x, ct: (backward(x) * ct,))
    return op


def looped_rule(x):
    """A rule whose passes are loops."""
    op = jax.custom_vjp(lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y + i), x))
    op.defvjp(
        lambda x: (op(x), x),
        lambda x, ct: (lax.scan(lambda c, row: (c, jnp.cos(row)), 0.0, x)[1] * ct,),
    )
    return op(x)


def branched_loop(x, y):
    """A branch in every step of a loop, and a loop in one of the branches."""

    def step(c, row):
        inner = lambda c: lax.scan(lambda d, _: (jnp.tanh(d + row), None), c, None, length=2)[0]  # noqa: E731
        return lax.cond(jnp.sum(row) > 0, inner, lambda c: jnp.sin(c) * row, c), c

    return lax.scan(step, y[0], x)[1]


def integers_carried(x, y):
    """A loop that carries an index and a flag beside its values, and stacks integers."""

    def step(carry, row):
        i, flag, c = carry
        c = jnp.where(flag, jnp.sin(c + row), c * row)
        return ((i + 1) % N, ~flag, c), (i, c[i])

    _, (indices, picked) = lax.scan(step, (jnp.int32(0), jnp.bool_(True), y[0]), x)
    return x * picked[indices][:, None].astype(x.dtype)


def solved(x, y):
    lower = jnp.tril(0.3 * jnp.tanh(x)) + 2.0 * jnp.eye(N)
    return lax.linalg.triangular_solve(lower, y, left_side=True, lower=True)


def factored(x):
    return jnp.linalg.cholesky(x @ x.T / (1 + jnp.sum(x * x)) + jnp.eye(N))


def complex_product(x, y):
    z = lax.complex(jnp.tanh(x), y / (1 + y * y))
    return jnp.real(z @ jnp.conj(z)) + jnp.imag(jnp.exp(1j * jnp.tanh(x)))


def pooled(x):
    return lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME") / N


def convolved_wide(x, y):
    lhs, rhs = x.reshape(1, N, N, 1), jnp.tanh(y[:2, :]).reshape(2, 2, 1, 2)
    out = lax.conv_general_dilated(
        lhs, rhs, (2, 2), ((0, 0), (0, 0)), lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.pad(out.reshape(-1), (0, N * N))[: N * N].reshape(N, N)


def gathered_window(x, y):
    start = jnp.int32(jnp.clip(lax.stop_gradient(y[0, 0]) * 2, 0, 2))
    window = lax.dynamic_slice_in_dim(x, start, 2, axis=1)
    return jnp.concatenate([window, jnp.take_along_axis(y, jnp.argsort(lax.stop_gradient(x), 1), 1)[:, :2]], 1)


def scattered_most(x, y):
    return x.at[(jnp.array([0, 1, 3]), jnp.array([2, 0, 3]))].max(y[0, :3]).at[jnp.array([1, 2])].min(y[:2])


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
    ruled(jnp.sin, lambda x: 0.5 * jnp.cos(x)),
    ruled(lambda x: lax.map(jnp.tanh, x), lambda x: 1 - jnp.tanh(x) ** 2),
    looped_rule,
    factored,
    pooled,
    lambda x: lax.cumprod(jnp.cos(x), axis=1),
    lambda x: lax.cummax(x, axis=0),
    lambda x: lax.reduce_precision(x, 8, 10) + x,
    lambda x: jax.nn.elu(x) + jax.nn.softplus(x),
    lambda x: lax.logistic(x) * lax.lgamma(1.5 + jnp.tanh(x)),
    lambda x: jnp.arcsinh(x) + jnp.sinh(jnp.tanh(x)),
    lambda x: lax.clamp(-0.5, x, 0.8) * (x.astype(jnp.int8).astype(x.dtype) + 1),
    lambda x: jnp.bitwise_xor(jnp.arange(N), 1).astype(x.dtype) * x / N,
    lambda x: lax.rem(x, jnp.full_like(x, 3.0)),
    lambda x: jnp.var(x, axis=1, keepdims=True) * jnp.sin(x),
    lambda x: lax.rev(lax.expand_dims(x, (0,)), (1,)).reshape(N, N).T,
    lambda x: jnp.sort(x + 0.1 * jnp.arange(N), axis=1)[:, ::-1],
    lambda x: jax.jvp(jnp.sin, (x,), (jnp.cos(x),))[1],
    lambda x: jax.vmap(jax.grad(lambda r: jnp.sum(jnp.tanh(r) ** 3)))(x),
    lambda x: jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.dots_saveable)(x @ x / N),
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
    branched_loop,
    integers_carried,
    solved,
    complex_product,
    convolved_wide,
    gathered_window,
    scattered_most,
    lambda x, y: lax.dot_general(jnp.stack([x, y]), jnp.stack([y, x]), (((2,), (1,)), ((0,), (0,))))[0] / N,
    lambda x, y: jnp.hypot(x, 1.0 + y * y) / N,
    lambda x, y: jnp.power(1.5 + jnp.tanh(x), y / (1 + y * y)),
    lambda x, y: jnp.logaddexp(x, y) / 2,
    lambda x, y: lax.select_n(jnp.int32(x > 0) + jnp.int32(y > 0), jnp.sin(x), y, x * 0.5),
    lambda x, y: jax.lax.batch_matmul(x[None], y[None])[0] / (1 + jnp.sum(y * y)),
    lambda x, y: lax.fori_loop(0, jnp.int32(2), lambda i, c: jnp.tanh(c) + lax.stop_gradient(y), lax.stop_gradient(x)),
    lambda x, y: jnp.where(jnp.triu(jnp.ones((N, N), bool)), x, -1e9).clip(-2) * y,
    lambda x, y: lax.select(x > y, jnp.sin(x), y),
    lambda x, y: jnp.einsum("ij,ij->i", x, y)[:, None] * x / N,
    lambda x, y: jnp.stack([x, y]).mean(0),
    lambda x, y: jax.lax.optimization_barrier((x, y))[0] + y,
    lambda x, y: lax.dynamic_slice(
        jnp.tile(x, (2, 1)), (jnp.int32(lax.stop_gradient(y[0, 0]) > 0), jnp.int32(0)), (N, N)
    ),
)
JITTED = tuple(map(jax.jit, (*UNARY, *BINARY)))
STEPS = JITTED + JITTED[len(UNARY) :]  # half of the steps have two inputs, more or less


def random_steps(rng):
    """Two to six steps: which, and which of the latest values they read."""
    return [tuple(map(int, rng.integers((len(STEPS), 51, 51)))) for _ in range(rng.integers(2, 7))]


def loss_of(program):
    """The program as a loss of a weight and an input, with an auxiliary result made half way."""

    def loss(w, x):
        values = [x, jnp.tanh(x @ w), w]
        for op, i, j in program:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(STEPS[op](a) if op < len(UNARY) else STEPS[op](a, b))
        return jnp.mean(jnp.sin(values[-1] + values[-2])) + 0.1 * jnp.mean(values[len(values) // 2] * w)

    return loss


def random_segments(rng, start, stop, depth):
    """Disjoint runs of nodes in order, up to three deep."""
    cuts = sorted(set(rng.integers(start, stop + 1, size=2 * rng.integers(1, 4)).tolist()))
    for a, b in zip(cuts[::2], cuts[1::2], strict=False):
        yield Segment(a, b, (), tuple(random_segments(rng, a, b, depth - 1)) if depth and b > a + 1 else ())


def random_plan(program, seed):
    """Any plan that holds together: segments, nests, saved values, and barriers where nothing is saved."""
    rng, graph = np.random.default_rng(seed), program.graph
    n = len(graph.nodes)
    segments = [s for s in random_segments(rng, 0, n, depth=2) if s.stop > s.start]
    for i, s in enumerate(segments):
        made = np.array(graph.made_by(s.start, s.stop))
        if not s.children and len(made):
            segments[i] = Segment(
                s.start, s.stop, tuple(sorted(rng.choice(made, rng.integers(len(made) + 1), replace=False).tolist()))
            )
    saving = [s for s in segments if s.saved]
    barriers = sorted(set(rng.integers(0, n, size=rng.integers(0, 6)).tolist()))
    barriers = tuple(b for b in barriers if not any(s.start < b < s.stop for s in saving))
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


def kept_out(program, plan):
    """The plan, from which what must run once is kept out."""
    return keep_out(plan, [node.index for node in program.graph.nodes if not node.can_recompute])


def has_tangents(program):
    """Whether a program can be differentiated forward: what has a backward pass of its own has no tangents."""
    return all(eqn.primitive.name != "custom_vjp_call" for eqn in program.eqns)


def is_narrow(program):
    """Whether anything in a program is rounded to fewer bits."""
    return any(
        eqn.primitive.name == "reduce_precision" or any(v.aval.dtype == jnp.float16 for v in eqn.outvars)
        for eqn in program.eqns
    )


def derivatives_of(f, arguments, turn):
    """Value and gradients of a scalar function, and in turn a fourth more, by interpreting their jaxprs.

    0: tangents of value and gradients. 1: gradients under `vmap`. 2: the gradient of a function under `vmap`. 3: the
    gradient of gradients. What stands inside is traced first and once, as JAX's transformations do it.
    """
    w, x, _ = arguments
    batch = np.stack([x, x + 0.25])
    f = jaxpr_as_fun(jax.make_jaxpr(f)(w, x))
    gradient = jax.make_jaxpr(jax.value_and_grad(lambda *args: f(*args)[0], argnums=(0, 1)))(w, x)
    both = jaxpr_as_fun(gradient)

    def along(w, x, t, batch):
        _, by_w, by_x = both(w, x)
        return jnp.sum(by_w * t) + jnp.sum(by_x * x)

    further = (
        lambda w, x, t, batch: jax.jvp(both, (w, x), (t, x)),
        lambda w, x, t, batch: jax.vmap(both, (None, 0))(w, batch),
        jax.grad(lambda w, x, t, batch: jnp.sum(jax.vmap(lambda x: f(w, x)[0])(batch))),
        jax.grad(along, argnums=(0, 1)),
    )
    arguments = (*arguments, batch)
    return [*evaluate(gradient, (w, x)), *evaluate(jax.make_jaxpr(further[turn])(*arguments), arguments)]


def check(number):
    """Program by number: under a plan by number its derivatives are the plain program's."""
    rng = np.random.default_rng(number)
    steps, seed = random_steps(rng), int(rng.integers(2**31))
    with jax.enable_x64(True):
        arguments = tuple(0.7 * rng.normal(size=(3, N, N)))
        loss = loss_of(steps)
        program = trace(loss, arguments[:2], {})
        plan = kept_out(program, (planned if number % 4 == 0 else random_plan)(program, seed))
        run = emit(program, plan)
        turn = seed % 4 if has_tangents(program) else 1 + seed % 3
        got = derivatives_of(lambda w, x: run(*program.consts, w, x)[0], arguments, turn)
        wanted = derivatives_of(loss, arguments, turn)
    tolerance = NARROW_TOLERANCE if is_narrow(program) else TOLERANCE
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        worst = np.abs(a - b).max()
        assert worst <= tolerance * max(1.0, np.abs(b).max()), (
            f"Program {number}: {steps}, plan {plan.segments}, barriers {plan.barriers}, turn {turn}: {worst} off."
        )


def main(first, stop):
    """Check programs by number; print the numbers of those that fail, and why."""
    start, failed = time.process_time(), 0
    for number in range(first, stop):
        try:
            check(number)
        except (AssertionError, TypeError, ValueError, jaxsub.JaxsubError) as fault:
            failed += 1
            print(f"{number}: {type(fault).__name__}: {str(fault)[:400]}", flush=True)
    seconds = (time.process_time() - start) / (stop - first)
    print(f"programs {first} to {stop - 1}: {failed} failed; {seconds:.3f} s of processor time each", flush=True)
    return failed


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(min(main(int(sys.argv[1]), int(sys.argv[2])), 1))
