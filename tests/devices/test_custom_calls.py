"""Fused kernels for a GPU that is not there: exported, compiled, counted, planned round; what cannot be says why."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import AbstractMesh, AxisType
from six_layers import in_a_process

import jaxsub
from jaxsub.devices.aot import require_packages
from jaxsub.devices.aot_worker import attention_workspace
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import jaxpr_flops

HEADS, LENGTH, WIDTH = 8, 512, 512
WEIGHTS = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16") for name in "qkvo"}
X = jax.ShapeDtypeStruct((2, LENGTH, WIDTH), "bfloat16")
SQUARE = jax.ShapeDtypeStruct((256, 256), "float32")
SCORES = 2 * HEADS * LENGTH * LENGTH * 2


@pytest.fixture
def cudnn(monkeypatch):
    """CuDNN's version is asked for when attention is traced; nothing of cuDNN is called."""
    require_packages()
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)


def heads(x):
    return x.reshape(*x.shape[:2], HEADS, -1)


def attention(w, x, implementation="cudnn"):
    q, k, v = (heads(x @ w[name]) for name in "qkv")
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return x + out.reshape(x.shape) @ w["o"]


def loss(w, x, implementation="cudnn"):
    for _ in range(4):
        x = attention(w, x, implementation)
    return jnp.sum(x.astype("float32") ** 2)


def doubled(x, params=None):
    """A Triton kernel with its rule."""

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    block = pl.BlockSpec((64, 256), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel, grid=(4,), in_specs=[block], out_specs=block, compiler_params=params, out_shape=SQUARE
    )
    rule = jax.custom_vjp(call)
    rule.defvjp(lambda x: (call(x), None), lambda _, g: (call(g),))
    return rule(x)


def of_ffi(x):
    call = jax.ffi.ffi_call("nobody_knows", SQUARE)
    rule = jax.custom_vjp(call)
    rule.defvjp(lambda x: (call(x), None), lambda _, g: (call(g),))
    return rule(x)


def test_cudnn_attention(cudnn):
    """CuDNN's attention is compiled for an absent GPU, and holds no scores."""
    fused = jaxsub.measure(loss, WEIGHTS, X, target="h100")
    plain = jaxsub.measure(lambda w, x: loss(w, x, "xla"), WEIGHTS, X, target="h100")
    assert plain.temp_bytes - fused.temp_bytes > 4 * SCORES


@pytest.mark.parametrize(
    ("n_keys", "n_bytes"), [(32, 136_315_136), (8, 270_532_864)], ids=["its own keys", "shared keys"]
)
def test_attention_works_with_memory_of_its_own(cudnn, n_keys, n_bytes):
    """Its backward pass has what XLA asks cuDNN for where there is a GPU: of shared keys as read off an H200."""
    query, key = (jax.ShapeDtypeStruct((4, 4096, heads, 64), "bfloat16") for heads in (32, n_keys))

    def fun(query, key, value):
        return jnp.sum(jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn"))

    shapes = [(4, heads, 4096, 64) for heads in (32, n_keys, n_keys)]
    assert attention_workspace(*shapes, 2) == n_bytes
    found = jaxsub.measure(fun, query, key, key, target="h100", argnums=(0, 1, 2))
    out = 4 * 4096 * 32 * 64 * 2
    assert n_bytes + 2 * out <= found.temp_bytes < n_bytes + 4 * out


def test_cudnn_attention_is_planned(cudnn):
    """A plan round it, made by prediction alone, needs less, and keeps the softmax's statistics or recomputes them."""
    known = dict(target="h100", verify=False, cache=False, progress=False)
    plain = jaxsub.measure(loss, WEIGHTS, X, target="h100")
    plan = jaxsub.plan(loss, WEIGHTS, X, budget=0.5, **known)
    assert jaxsub.measure(jaxsub.sublinear(loss, plan=plan), WEIGHTS, X, target="h100").temp_bytes < plain.temp_bytes


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_counted(cudnn, causal):
    """Two products forward, five backward, half of each where the mask is causal."""
    q = jax.ShapeDtypeStruct((2, LENGTH, HEADS, 64), "bfloat16")

    def fun(*qkv):
        out = jax.nn.dot_product_attention(*qkv, is_causal=causal, implementation="cudnn")
        return out.astype("float32").sum()

    product = 2 * 2 * HEADS * LENGTH * LENGTH * 64
    counted = jaxpr_flops(jax.make_jaxpr(jax.grad(fun, (0, 1, 2)))(q, q, q)).arithmetic_flops
    assert counted == 7 * product / (2 if causal else 1)


def test_without_cudnn(monkeypatch):
    """Where cuDNN is not installed the error names the packages."""

    def missing():
        raise RuntimeError("cuDNN not found.")

    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", missing)
    with pytest.raises(jaxsub.UnsupportedError, match=r"no GPU is needed.*jaxsub\[targets-cudnn\]"):
        jaxsub.plan(loss, WEIGHTS, X, target="h100", budget="1GiB", cache=False, progress=False)


def test_pallas_is_counted_by_its_grid():
    """A Pallas kernel's body counts once for each point of its grid, or as its own estimate says."""

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    def product(**more):
        specs = [pl.BlockSpec((64, 256), lambda i, j: (i, 0)), pl.BlockSpec((256, 64), lambda i, j: (0, j))]
        out = pl.BlockSpec((64, 64), lambda i, j: (i, j))
        return pl.pallas_call(kernel, grid=(4, 4), in_specs=specs, out_specs=out, out_shape=SQUARE, **more)

    estimate = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=0)
    assert jaxpr_flops(jax.make_jaxpr(product())(SQUARE, SQUARE)).arithmetic_flops == 2 * 256**3
    assert jaxpr_flops(jax.make_jaxpr(product(cost_estimate=estimate))(SQUARE, SQUARE)).arithmetic_flops == 7


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_triton_kernel():
    """A Triton kernel is compiled for an absent GPU; where Pallas asks which that is, the error says how to answer."""
    require_packages()

    def fun(w, x):
        return jnp.sum(doubled(x @ w, triton.CompilerParams()) ** 2)

    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), (AxisType.Explicit,), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        assert jaxsub.measure(fun, SQUARE, SQUARE, target="h100").temp_bytes >= 256 * 256 * 4
    if jax.__version_info__ >= (0, 12):
        with pytest.raises(jaxsub.UnsupportedError, match="use_abstract_mesh"):
            jaxsub.measure(fun, SQUARE, SQUARE, target="h100")


def test_a_call_whose_library_is_not_there():
    """A foreign call that nobody registered is refused with the next step."""
    require_packages()
    with pytest.raises(jaxsub.UnsupportedError, match=r"nobody_knows.*stand-in of the same shapes"):
        jaxsub.measure(lambda w, x: jnp.sum(of_ffi(x @ w) ** 2), SQUARE, SQUARE, target="h100")


def by_host(x):
    """Tanh by NumPy on the host, 256 KiB."""
    rule = jax.custom_jvp(lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    rule.defjvps(lambda g, y, x: g * (1 - y**2))
    return rule(x)


def told(x):
    """A debug print, a callback, and one with a result."""
    jax.debug.print("largest {}", jnp.max(x))
    jax.debug.callback(lambda x: None, x)
    largest = jax.lax.stop_gradient(jnp.max(x))
    return x + io_callback(np.negative, jax.ShapeDtypeStruct((), x.dtype), largest)


@pytest.mark.parametrize("call", [by_host, told])
def test_host_callbacks_are_not_called_and_their_results_count(call):
    """A program with them is measured and planned for an absent GPU, and called where it runs."""
    require_packages()

    def fun(w, x):
        for _ in range(6):
            x = x + call(jnp.sin(x @ w))
        return jnp.sum(x**2)

    plain = jaxsub.measure(fun, SQUARE, SQUARE, target="h100").temp_bytes
    assert plain > 6 * 256 * 256 * 4
    plan = jaxsub.plan(fun, SQUARE, SQUARE, budget=0.7, target="h100", progress=False)
    assert plan.measurement.temp_bytes <= 0.7 * plain
    w, x = 0.01 * jnp.ones((256, 256)), jnp.ones((256, 256))
    value, wanted = (jax.jit(jax.value_and_grad(f))(w, x) for f in (jaxsub.sublinear(fun, plan=plan), fun))
    chex.assert_trees_all_close(value, wanted, rtol=1e-5)


def test_callbacks_are_called_while_others_are_left_out():
    """Several threads may compile for absent GPUs, one ending before the other; what runs meanwhile calls its host."""
    seen, is_inside, may_end = [], Event(), Event()

    def leave_out():
        with compat.callbacks_left_out():
            is_inside.set()
            may_end.wait()

    other = ThreadPoolExecutor(1)
    with compat.callbacks_left_out():
        ended = other.submit(leave_out)
        is_inside.wait()
    report = jax.jit(lambda x: jax.debug.callback(seen.append, x))
    report(1.0)
    may_end.set()
    ended.result()
    jax.jit(lambda x: jax.debug.callback(seen.append, x + 1))(1.0)
    jax.effects_barrier()
    assert seen == [1.0, 2.0]


def test_cudnn_attention_over_a_mesh():
    """What partitions itself over a mesh is compiled for the target's own devices, per device; planned too."""
    require_packages()
    code = """
    import jax._src.cudnn.fused_attention_stablehlo as fused
    from jax.sharding import NamedSharding, PartitionSpec as P
    fused.check_cudnn_version = lambda: 91000
    mesh = jaxsub.targets.get_target("h100:8").mesh((8,), ("d",))
    shape = lambda spec, *s: jax.ShapeDtypeStruct(s, "bfloat16", sharding=NamedSharding(mesh, spec))
    def loss(w, x):
        for i in range(2):
            q, k, v = (jnp.tanh(x @ w[i, j]).reshape(*x.shape[:2], 4, 64) for j in range(3))
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            x = x + out.reshape(x.shape)
        return jnp.sum(x.astype("float32"))
    args = shape(P(None, None, "d"), 2, 3, 256, 256), shape(P("d"), 16, 256, 256)
    found = jaxsub.measure(loss, *args, target="h100:8")
    assert found.argument_bytes == (6 * 256 * 256 + 16 * 256 * 256) * 2 // 8, found
    plan = jaxsub.plan(loss, *args, target="h100:8", budget=.5, verify=False, cache=False)
    assert jaxsub.measure(jaxsub.sublinear(loss, plan=plan), *args, target="h100:8").temp_bytes < found.temp_bytes
    """
    in_a_process(code)
