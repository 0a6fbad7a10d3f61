"""Random programs: a list of steps over a growing list of 4 x 4 arrays.

Every step is smooth enough, and bounded, so that second derivatives can be compared. It is jitted, so that JAX
differentiates it once in the plain program, however many programs contain it; plans are made of its equations all
the same.
"""

import jax
import jax.numpy as jnp
from jax import lax, random
from zoo import smooth_abs

from jaxsub.jaxpr import compat

N = 4
KEY = random.key(0)


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
    lhs, rhs = x.reshape(1, N, N, 1), jnp.tanh(y[:2, :4]).reshape(2, 2, 1, 2)
    out = lax.conv_general_dilated(
        lhs, rhs, (2, 2), ((0, 0), (0, 0)), lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.pad(out.reshape(-1), (0, N * N))[: N * N].reshape(N, N)


def gathered_window(x, y):
    start = jnp.int32(jnp.clip(lax.stop_gradient(y[0, 0]) * 2, 0, 2))
    window = lax.dynamic_slice_in_dim(x, start, N // 2, axis=1)
    return jnp.concatenate([window, jnp.take_along_axis(y, jnp.argsort(lax.stop_gradient(x), 1), 1)[:, : N // 2]], 1)


def scattered_most(x, y):
    return x.at[(jnp.array([0, 1, 3]), jnp.array([2, 0, 3]))].max(y[0, :3]).at[jnp.array([1, 2])].min(y[:2])


def updated(x, y):
    return lax.dynamic_update_slice(x, jnp.sin(y[:2, :2]), (1, 1))


def joined(x, y):
    """A product beside what it was made of, and a product of both."""
    return jnp.tanh(jnp.concatenate([x @ y + x[0], x], -1) @ jnp.concatenate([y, x]) / N)


def split_on(key, x, y):
    key, k = random.split(key)
    return key, jnp.where(random.bernoulli(k, 0.7, x.shape), x / 0.7, 0 * y)


def split_into_many(key, x, y):
    keys = random.split(key, 3)
    return keys[2], x * random.bernoulli(keys[0], 0.5, x.shape) + y * random.uniform(keys[1], x.shape, x.dtype)


def folded_on(key, x, y):
    key = random.fold_in(key, jnp.int32(jnp.sum(lax.stop_gradient(y) > 0)))
    return key, jnp.sin(x) + 0.1 * random.normal(key, x.shape, x.dtype) * y


def split_for_rows(key, x, y):
    keys = random.split(key, N)
    return keys[0], jax.vmap(lambda k, a, b: jnp.where(random.bernoulli(k, 0.7, a.shape), a, b))(keys, x, y)


def dropped_in_a_scan(key, x, y):
    """A loop that carries its key beside its values, and drops some of them in every step."""

    def step(carry, row):
        key, c = carry
        key, k = random.split(key)
        c = jnp.where(random.bernoulli(k, 0.7, c.shape), jnp.tanh(c + row), c)
        return (key, c), c * row

    (key, _), rows = lax.scan(step, (key, x[0]), y)
    return key, rows


def dropped_by_many_keys(key, x, y):
    """A loop over keys and rows."""
    keys = random.split(key, N + 1)
    body = lambda c, kr: (jnp.sin(c) + kr[1] * random.bernoulli(kr[0], 0.7, c.shape), c)  # noqa: E731
    return keys[N], lax.scan(body, y[1], (keys[:N], x))[1]


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
    lambda x: compat.checkpoint_name(jnp.sin(x), "mine"),  # with jax_remat3, JAX before 0.11 cannot map its own
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
    joined,
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
KEYED = (split_on, split_into_many, folded_on, split_for_rows, dropped_in_a_scan, dropped_by_many_keys)
JITTED = tuple(map(jax.jit, (*UNARY, *BINARY)))
DRAWN = tuple(map(jax.jit, KEYED))
STEPS = JITTED + JITTED[len(UNARY) :] + 2 * DRAWN  # half of the steps have two inputs, more or less
FIRST_DRAWN = len(STEPS) - 2 * len(DRAWN)


def random_steps(rng):
    """Two to six steps: which, and which of the latest values they read."""
    return [tuple(map(int, rng.integers((len(STEPS), 51, 51)))) for _ in range(rng.integers(2, 7))]


def loss_of(program, has_metrics=False):
    """The program as a loss of a weight and an input, with a part of it made half way.

    Its random steps draw from a key that each passes on, typed or raw. With metrics, floats and integers are made of
    the values behind the loss, and returned beside it.
    """
    start = KEY if program[0][1] % 2 else random.PRNGKey(1)

    def loss(w, x):
        values, key = [x, jnp.tanh(x @ w), w], start
        for op, i, j in program:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            if op >= FIRST_DRAWN:
                key, made = STEPS[op](key, a, b)
                values.append(made)
            else:
                values.append(STEPS[op](a) if op < len(UNARY) else STEPS[op](a, b))
        found = jnp.mean(jnp.sin(values[-1] + values[-2])) + 0.1 * jnp.mean(values[len(values) // 2] * w)
        if not has_metrics:
            return found
        last = values[-1]
        return found, {"max": last.max(), "count": jnp.sum(last > 0), "places": jnp.argmax(last @ w, -1)}

    return loss
