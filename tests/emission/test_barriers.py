"""For a GPU the kernels of convolutions are flat arrays behind gradient barriers and where regions begin.

Their gradients lie in place then, and each pass makes its own copy in the layout that a convolution reads.
"""

from dataclasses import replace
from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jaxprs import barriers
from jaxprs import regions as emitted_regions
from models import conv, resnet

import jaxsub
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.emission import barriers as gradient_barriers
from jaxsub.emission import regions
from jaxsub.emission.emit import emit
from jaxsub.emission.scans import body_program, branch_programs
from jaxsub.jaxpr.trace import trace

WIDTH, LAYERS = 128, 8


def loss(kernels, x):
    """A chain of convolutions."""
    for kernel in kernels:
        x = jnp.tanh(conv(kernel.astype(x.dtype), x))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def shapes(dtype=jnp.float32):
    kernel = jax.ShapeDtypeStruct((3, 3, WIDTH, WIDTH), jnp.float32)
    return [kernel] * LAYERS, jax.ShapeDtypeStruct((2, 8, 8, WIDTH), dtype)


def residual():
    """A residual network, and the shapes of its arguments."""
    built, init = resnet((3, 3), batch=2, size=32, width=64, classes=10)
    return built, jax.eval_shape(init, jax.random.key(0))


@pytest.mark.parametrize(
    ("network", "share"), [(residual, 0.85), (lambda: (loss, shapes("bfloat16")), 0.65)], ids=["residual", "bfloat16"]
)
def test_gradients_of_kernels_do_not_stand_twice_on_a_gpu(monkeypatch, network, share):
    """In a layout of cuDNN's until the program's end, and in their own: so they would without being made flat."""
    fun, args = network()
    plan = jaxsub.plan(fun, *args, planner="barriers", target="h100", verify=False, cache=False)

    def temp_bytes():
        run = jaxsub.sublinear(fun, plan=plan, target="h100", verify=False)
        return jaxsub.measure(run, *args, target="h100").temp_bytes

    flat = temp_bytes()
    monkeypatch.setattr(regions, "flat_kernels", lambda program: frozenset())
    assert flat < share * temp_bytes()


def test_regions_keep_no_copies_of_kernels_on_a_gpu(monkeypatch):
    """A convolution reads its kernel in a layout of its own: that copy is not kept for the backward pass."""
    args = shapes()
    program = trace(loss, args, {}, argnums=0)
    starts = [n.index for n in program.graph.nodes if n.primitive == "conv_general_dilated"]
    cuts = list(pairwise([*starts, len(program.eqns)]))
    saved = [program.graph.nodes[start].outputs for start in starts]
    segments = tuple(Segment(a, b, values) for (a, b), values in zip(cuts[:-1], saved, strict=False))
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), segments, tuple(starts[1:]))

    def temp_bytes():
        run = jaxsub.sublinear(loss, plan=plan, target="h100", verify=False)
        return jaxsub.measure(run, *args, target="h100").temp_bytes

    flat = temp_bytes()
    monkeypatch.setattr(regions, "flattened", lambda x: x)
    assert flat < 0.7 * temp_bytes()


def test_flat_kernels_change_no_value():
    """Results and gradients of a program for a GPU, executed here, are those of the plain function."""
    kernels = [jax.random.normal(jax.random.key(i), (3, 3, 4, 4)) for i in range(3)]
    x = jax.random.normal(jax.random.key(9), (2, 6, 6, 4))
    program = replace(trace(loss, (kernels, x), {}, argnums=0), platform="cuda")
    starts = [n.index for n in program.graph.nodes if n.is_costly]
    segments = Segment(0, starts[1]), Segment(starts[1], starts[2], program.graph.nodes[starts[1]].outputs)
    fun = emit(program, Plan(program.fingerprint, Budget(), len(program.eqns), segments, tuple(starts[1:])))
    inputs = [*program.consts, *kernels, x]

    def called(*inputs):
        return fun(*inputs)[0]

    jaxpr = jax.make_jaxpr(called)(*inputs)
    assert len(barriers(jaxpr)) == 2
    read = [v.aval for eqn in emitted_regions(jaxpr) for v in eqn.invars]
    assert [aval.ndim for aval in read if aval.size == kernels[0].size] == [1, 1]
    ours = jax.value_and_grad(called, argnums=tuple(range(len(inputs) - 1)))(*inputs)
    value, gradients = jax.value_and_grad(loss)(kernels, x)
    chex.assert_trees_all_close(ours, (value, tuple(gradients)), rtol=1e-6)


def fenced_ranks(target, *args):
    """Ranks of the weights that barriers hold when the loss is planned with them."""
    plan = jaxsub.plan(loss, *args, planner="barriers", target=target, verify=False, cache=False)
    traced = jax.make_jaxpr(jaxsub.sublinear(loss, plan=plan, target=target, verify=False))(*args)
    return {v.aval.ndim for held in barriers(traced) for v in held if v.aval.size == 9 * WIDTH * WIDTH}


def test_kernels_keep_their_shape_on_a_cpu_and_where_they_are_split():
    """A CPU has one layout; a flat array of what several devices hold a part of would be gathered."""
    kernels, x = shapes()
    assert fenced_ranks("h100", kernels, x) == {1}
    assert fenced_ranks("cpu", kernels, x) == {4}
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(AxisType.Explicit,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "model"))
    program = trace(loss, (kernels, x), {}, argnums=0)
    assert program.shardings == ()
    shardings = (*[split] * LAYERS, None)
    spread = replace(program, platform="cuda", shardings=shardings)
    emitter = regions._Emitter(spread, (1,))
    assert emitter.flat == frozenset()
    assert regions._Emitter(replace(spread, shardings=()), (1,)).flat == frozenset(range(LAYERS))


def test_split_kernels_keep_their_shape_in_the_body_of_a_loop():
    """A body knows of no shardings before it is traced: there the axes of an explicit mesh tell."""
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(AxisType.Explicit,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = gradient_barriers.barrier([0], frozenset([0]))

    def held(kernel):
        env = {0: kernel}
        step(env)
        return env[0]

    with jax.sharding.use_abstract_mesh(mesh):
        ranks = [
            [v.aval.ndim for values in barriers(jax.make_jaxpr(held)(given)) for v in values]
            for given in (jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float32, sharding=s) for s in (split, whole))
        ]
    assert ranks == [[4], [1]]


def test_the_parts_of_a_program_that_is_split_keep_the_shape_of_kernels():
    """Bodies of loops and branches do not say where their kernels lie; the program that they are in does."""

    def looped(kernels, x):
        x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(conv(kernel, x)), None), x, kernels)
        x = jax.lax.cond(x[0, 0, 0, 0] > 0, lambda k, x: conv(k, x), lambda k, x: x, kernels[0], x)
        return jnp.mean(x**2)

    kernels, x = jax.ShapeDtypeStruct((4, 3, 3, 8, 8), "float32"), jax.ShapeDtypeStruct((2, 8, 8, 8), "float32")
    whole = replace(trace(looped, (kernels, x), {}, argnums=0), platform="cuda")
    (loop,) = (node.index for node in whole.graph.nodes if node.primitive == "scan")
    (branch,) = (node.index for node in whole.graph.nodes if node.primitive == "cond")
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, None, "model"))
    for program, is_flat in ((whole, True), (replace(whole, shardings=(split, None)), False)):
        parts = (body_program(program, loop), *branch_programs(program, branch))
        kept = [bool(gradient_barriers.flat_kernels(part)) for part in parts if part.graph.kernels()]
        assert kept == [is_flat, is_flat]


def test_what_convolutions_do_not_read_as_a_kernel_is_no_kernel():
    """Data, weights of products, and kernels that are made of weights."""

    def mixed(kernel, made, weight, x):
        x = conv(jnp.tanh(made), conv(kernel, x))
        x = jnp.where(x > 0, x.astype(jnp.bfloat16), 0.0)  # the cast of a number reads no value
        return jnp.sum(x.mean((1, 2)) @ weight)

    kernel, x = jnp.ones((3, 3, 4, 4)), jnp.ones((2, 6, 6, 4))
    program = trace(mixed, (kernel, kernel, jnp.ones((4, 5)), x), {}, argnums=(0, 1, 2))
    assert program.graph.kernels() == {0}
    frozen = trace(mixed, (kernel, kernel, jnp.ones((4, 5)), x), {}, argnums=(1, 2))
    assert frozen.graph.kernels() == frozenset()


def test_what_every_step_reads_has_one_cotangent():
    """Nested regions of an unrolled recurrent network add their parts of its inputs' cotangent to one array."""

    def unrolled(table, tokens, w):
        xs, h = table[tokens], jnp.zeros((8, 16))
        for i in range(tokens.shape[1]):
            h = jnp.tanh(h @ w + xs[:, i])
        return jnp.mean(h**2)

    args = jnp.ones((64, 16)), jnp.zeros((8, 32), int), jnp.eye(16)
    nested = jaxsub.sublinear(unrolled, planner="recursive", argnums=(0, 2), progress=False)
    assert nested.plan(*args).segments[0].children
    xs_bytes = 8 * 32 * 16 * 4
    assert jaxsub.measure(nested, *args).temp_bytes < 5 * xs_bytes
    chex.assert_trees_all_close(
        jax.grad(nested, (0, 2))(*args), jax.grad(unrolled, (0, 2))(*args), rtol=1e-4, atol=1e-7
    )


def folded_keys(ws, x, key):
    for i, w in enumerate(ws):
        x = x + jnp.tanh(x @ w) * jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
    return (x**2).mean()


def split_keys(ws, x, key):
    for k, w in zip(jax.random.split(key, len(ws)), ws, strict=True):
        x = x + jnp.tanh(x @ w) * jax.random.bernoulli(k, 0.9, x.shape)
    return (x**2).mean()


@pytest.mark.parametrize("loss", [folded_keys, split_keys])
def test_layers_draw_random_bits_one_after_the_other(loss):
    """Drawn when the program starts, dropout's bits of all layers would be live at once: .56 of plain at least."""
    args = [jnp.eye(64)] * 12, jnp.ones((2048, 64)), jax.random.key(0)
    planned = jaxsub.sublinear(loss, budget=0.3, chunks=False, cache=False)
    assert planned.plan(*args).measurement.temp_bytes <= 0.3 * jaxsub.measure(loss, *args).temp_bytes
    got, want = (jax.jit(jax.grad(f))(*args) for f in (planned, loss))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)  # entries of up to 1e-3
