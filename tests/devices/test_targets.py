"""Targets: their figures, and compiling for GPUs that are not there."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import zoo
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

import jaxsub
from jaxsub.core.errors import UnsupportedError
from jaxsub.devices import aot, aot_worker, targets
from jaxsub.devices.compile import compile_for, measure_compiled
from jaxsub.devices.cuda_plugin import NVIDIA_DRIVERS
from jaxsub.devices.targets import NAMES, get_target, read_spec
from jaxsub.jaxpr.compat import checkpoint


def _lack():
    try:
        aot.require_packages()
    except UnsupportedError as error:
        return str(error)
    return ""


needs_packages = pytest.mark.skipif(bool(_lack()), reason=_lack() or "installed")
ROWS, WIDTH, LAYERS = 4096, 256, 64
ACTIVATION_BYTES = ROWS * WIDTH * 2
CHAIN = (
    jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16"),
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16")] * LAYERS,
)
SMALL = (jax.ShapeDtypeStruct((128, 64), "float32"), [jax.ShapeDtypeStruct((64, 64), "float32")] * 2)


def product(a, b):
    """A product that sums in f32 whatever the device."""
    return jax.lax.dot(a, b, precision="BF16_BF16_F32", preferred_element_type="float32")


def layers(x, ws):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def chain(x, ws, every=None):
    """A chain of tanh(x @ w); with `every`, that many layers to a checkpoint and a gradient barrier between them.

    As plans have it: the last layers are not wrapped, and a barrier holds first what is read last. With the activation
    first the whole takes one activation more.
    """
    every = every or len(ws)
    for start in range(0, len(ws), every):
        group = ws[start : start + every]
        if start:
            *group, x = jax.lax.optimization_barrier((*group[::-1], x))
            group = group[::-1]
        x = (layers if start + every >= len(ws) else checkpoint(layers))(x, group)
    return jnp.sum(x.astype("float32"))


def gradient(every=None):
    return jax.value_and_grad(lambda x, ws: chain(x, ws, every), argnums=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_tells_what_the_datasheet_tells(tmp_path, name):
    """Rates computed from a spec are the datasheet's within 9 % (Hopper's tensor cores are rated at a lower clock)."""
    target = get_target(name)
    path = tmp_path / "gpu.txt"
    path.write_text(target.spec)
    read = get_target(path)
    assert (read.memory_bytes, read.bytes_per_second) == (target.memory_bytes, target.bytes_per_second)
    assert read.rate("float32", is_matmul=False) == pytest.approx(target.rate("float32", is_matmul=False), rel=0.02)
    assert read.tensor_flops_per_second
    for dtype, rate in read.tensor_flops_per_second:
        assert rate == pytest.approx(dict(target.tensor_flops_per_second)[dtype], rel=0.09)
    assert read == get_target(str(path))


def test_matrix_products_use_tensor_cores():
    """Matmul rates are those of tensor cores where the GPU has them for the dtype, else the ordinary ones."""
    h100, v100 = get_target("h100"), get_target("v100")
    assert h100.rate("float32", is_matmul=True) == 494.7e12
    assert h100.rate("float8_e4m3fn", is_matmul=True) == 1979e12
    assert v100.rate("bfloat16", is_matmul=True) == v100.rate("float32", is_matmul=False)


@pytest.mark.parametrize("target", ["h300", "h100:0", "h100:x", "cpu:2", "", 3.5, "no/such/spec.txt"])
def test_an_unknown_target_is_told_the_forms(target):
    """What is no target raises an error that shows it and lists what would be."""
    with pytest.raises(ValueError, match=r"'h200'.*jax\.Device"):
        get_target(target)


def test_a_file_that_is_no_spec_is_told_what_it_lacks(tmp_path):
    """A file without the needed fields is refused with their names."""
    path = tmp_path / "spec.txt"
    path.write_text("core_count: 3")
    with pytest.raises(ValueError, match="lacks fpus_per_core, clock_rate_ghz"):
        read_spec(path)


def test_present_devices_are_targets():
    """A device, its platform's name and `None` under that default device are one target."""
    device = jax.devices("cpu")[0]
    target = get_target(device)
    assert target.is_present
    assert target.memory_bytes > 2**28
    with jax.default_device(device):
        assert get_target(None) == target == get_target("cpu") == get_target(target)


class Gpu:
    """A GPU that JAX reports, as far as a target asks."""

    platform = "gpu"

    def __init__(self, kind, limit=None):
        self.device_kind = kind
        self.limit = limit

    def memory_stats(self):
        return self.limit and {"bytes_limit": self.limit}


@pytest.mark.parametrize(
    ("kind", "like"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
     ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", None), ("NVIDIA GH200 480GB", None)],
)  # fmt: skip
def test_a_present_gpu_is_known_by_its_kind(kind, like):
    """A GPU of the table has the table's rates, any other is marked as a guess; memory is what JAX may allocate."""
    target = targets._present(Gpu(kind, 10**10))
    assert (target.memory_bytes, target.is_present, target.platform) == (10**10, True, "cuda")
    assert target.origin == ("datasheet" if like else "nominal")
    assert target.flops_per_second == get_target(like or "a100").flops_per_second
    assert targets._present(Gpu(kind)).memory_bytes == get_target(like or "a100").memory_bytes


def test_a_missing_package_is_named():
    """Without the extra the error names the package and the command that installs it."""
    with pytest.raises(UnsupportedError, match=r'jax-cuda12-plugin.*pip install "jaxsub\[targets\]"'):
        aot.require_packages(lambda module: "plugins" not in module)


def test_a_mesh_has_the_targets_devices():
    """A mesh of another size than the target is refused with the name that has it."""
    with pytest.raises(ValueError, match='target="h100:4"'):
        get_target("h100:8").mesh((4,), ("data",))


@needs_packages
def test_bf16_chain_on_an_absent_h200():
    """64 bf16 layers on an H200: 129 units plain, at most 19 with checkpoints every 8 and gradient barriers."""
    plain, saved = (measure_compiled(gradient(every), CHAIN, get_target("h200")) for every in (None, 8))
    assert plain.temp_bytes / ACTIVATION_BYTES == pytest.approx(129, abs=1)
    assert saved.temp_bytes / ACTIVATION_BYTES <= 19
    assert plain.target == "h200"


@needs_packages
def test_flops_are_counted_for_an_absent_gpu():
    """XLA counts none there: two products a layer backward, one forward, and one more for what is recomputed."""
    plain, saved = (measure_compiled(gradient(every), CHAIN, get_target("h200")).flops for every in (None, 8))
    product = 2 * ROWS * WIDTH**2
    assert plain / product == pytest.approx(3 * LAYERS - 1, rel=0.05)  # nobody asks for the input's cotangent
    assert saved / plain == pytest.approx(4 / 3, abs=0.05)


@needs_packages
@pytest.mark.slow
def test_a_planned_bf16_chain_fits_19_units_of_an_absent_h200(tmp_path):
    """64 bf16 layers, planned for an H200: a budget of 19 units, of 129, is met."""
    plan = jaxsub.plan(chain, *CHAIN, budget=19 * ACTIVATION_BYTES, argnums=1, target="h200", cache=tmp_path,
                       progress=False, chunks=False)  # fmt: skip
    plain = jaxsub.measure(chain, *CHAIN, argnums=1, target="h200")
    assert plain.temp_bytes / ACTIVATION_BYTES == pytest.approx(129, abs=1)
    assert plan.measurement.temp_bytes <= 19 * ACTIVATION_BYTES
    assert (plan.measurement.target, plan.prediction.seconds_origin) == ("h200", "roofline")


@needs_packages
@pytest.mark.exhaustive
@pytest.mark.parametrize(("has_two", "plain_mib"), [(True, 2584), (False, 1089)])
def test_an_unrolled_lstm_fits_170_mib_of_an_absent_h200(tmp_path, has_two, plain_mib):
    """LSTM, 4 layers x 32 steps, planned for an H200: 2584 MiB become at most 170 MiB.

    So with a matrix for the input and one for the state. With one for both XLA adds most contributions to a weight's
    gradient as it makes them: the plain gradient needs less than half.
    """
    model = zoo.BY_NAME["lstm"]
    loss, init = model.build(**model.full_size, has_two=has_two)
    args = jax.eval_shape(init, jax.random.key(0))
    plan = jaxsub.plan(loss, *args, budget="170MiB", target="h200", cache=tmp_path, progress=False)
    assert plan.plain_measurement.temp_bytes / 2**20 == pytest.approx(plain_mib, rel=0.03)
    assert plan.measurement.temp_bytes <= 170 * 2**20


@needs_packages
@pytest.mark.parametrize("name", NAMES)
def test_every_gpu_of_the_table_compiles(name):
    """XLA takes every spec of the table and compiles a gradient for it."""
    measured = measure_compiled(gradient(), SMALL, get_target(name))
    assert measured.argument_bytes == 128 * 64 * 4 + 2 * 64 * 64 * 4
    assert measured.temp_bytes >= 128 * 64 * 4


@needs_packages
def test_arguments_are_per_device():
    """Over eight devices a batch that is split counts an eighth, and a weight that is not counts whole."""
    target = get_target("h100:8")
    mesh = target.mesh((8,), ("data",))
    x = jax.ShapeDtypeStruct((1024, 64), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    measured = measure_compiled(gradient(), (x, SMALL[1]), target)
    assert measured.argument_bytes == 1024 * 64 * 4 // 8 + 2 * 64 * 64 * 4
    with pytest.raises(UnsupportedError, match='target="h100:8"'):
        measure_compiled(gradient(), (x, SMALL[1]), get_target("h100"))
    with pytest.raises(UnsupportedError, match=r'over 8 devices.*`h100:4` has 4.*target="h100:8"'):
        jaxsub.plan(lambda w, x: jax.numpy.tanh(x @ w).sum(), SMALL[1][0], x, target="h100:4", verify=False)


@needs_packages
def test_what_xla_refuses_is_said_in_a_line():
    """A product that a target has no algorithm for: XLA's words, and the line of source, without how we came there."""
    x = jax.ShapeDtypeStruct((64, 64), "bfloat16")
    with pytest.raises(UnsupportedError, match=r"absent `v100`.*Unsupported algorithm.*test_targets.py") as refused:
        jaxsub.measure(lambda w, x: product(w, x).sum(), x, x, target="v100")
    assert "\n" not in str(refused.value)


@needs_packages
def test_donations_and_wide_dtypes_reach_the_helper():
    """A donated f64 argument is counted in f64 and as shared with the output."""
    with jax.enable_x64(True):
        shape = jax.ShapeDtypeStruct((64, 64), "float64")
        measured = measure_compiled(lambda x: x + 1, (shape,), get_target("a100"), donate_argnums=(0,))
    assert (measured.argument_bytes, measured.alias_bytes) == (64 * 64 * 8, 64 * 64 * 8)


@needs_packages
def test_keys_trees_and_an_outer_trace():
    """Typed keys and any tree of arguments go through, also while the user's function is being traced."""
    seen = []

    def noisy(key, tree):
        return tree["x"] + jax.random.normal(key, tree["x"].shape)

    @jax.jit
    def step(key, tree):
        seen.append(measure_compiled(noisy, (key, tree), get_target("l4")))
        return noisy(key, tree)

    jax.eval_shape(step, jax.random.key(0), {"x": jnp.ones((32, 32))})
    assert seen[0].argument_bytes == 2 * 4 + 32 * 32 * 4


@needs_packages
def test_what_belongs_to_a_present_machine_is_refused():
    """A callback in order is refused with JAX's reason and what to do, and the helper works on."""

    def loud(x):
        io_callback(print, None, x[0], ordered=True)
        return x.sum()

    with pytest.raises(UnsupportedError, match=r"OrderedIO.*callbacks that are ordered cannot be exported"):
        measure_compiled(loud, (jnp.ones(3),), get_target("h100"))
    assert measure_compiled(jnp.sum, (jnp.ones(3),), get_target("h100")).argument_bytes == 12


@needs_packages
def test_a_product_without_tiles_is_left_to_cublas():
    """Heads of a length that is no power of two, put together for a product: XLA's own kernels find no tiles for it."""

    def loss(q, w):
        qkv = (q @ w).reshape(16, 196, 3, 3, 64)
        q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        mixed = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2)) @ v
        return jnp.sum(mixed.transpose(0, 2, 1, 3).reshape(16, 196, 192))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 196, 192), (192, 576))]
    compiled = compile_for(jax.grad(loss, (0, 1)), shapes, get_target("h100"))
    assert compiled.leaves_products or jax.__version_info__ >= (0, 11)  # later ones find tiles
    assert compiled.memory_analysis().temp_size_in_bytes > 16 * 3 * 196 * 196 * 4


@needs_packages
def test_products_may_be_left_to_cublas():
    """Where XLA is not to write kernels of products, cuBLAS runs them, with memory to work in."""
    x, (w, _) = SMALL
    own = get_target("h100")
    temps = {}
    for target in (own, replace(own, writes_products=False)):
        compiled = compile_for(lambda x, w: jax.nn.gelu(x @ w) @ w, (x, w), target)
        temps[compiled.leaves_products] = compiled.memory_analysis().temp_size_in_bytes
    assert temps[True] >= 4 * 2**20 > temps[False]


@needs_packages
def test_a_spec_that_xla_refuses_is_an_error(tmp_path):
    """A spec with an unknown field is refused in XLA's own words, with the name of the GPU."""
    path = tmp_path / "odd.txt"
    path.write_text(get_target("h100").spec.replace("core_count", "wheels: 4 core_count"))
    with pytest.raises(UnsupportedError, match=r"`NVIDIA H100 80GB HBM3`.*GpuTargetConfigProto"):
        measure_compiled(jnp.sum, (jnp.ones(3),), get_target(path))


@needs_packages
def test_a_helper_is_kept_and_a_dead_one_replaced():
    """Programs share a helper; when it is killed the next program gets a new one."""
    helpers = aot._Helpers(1)
    try:
        measured, first = _ask(helpers)
        assert _ask(helpers) == (measured, first)
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        again, second = _ask(helpers)
        assert again == measured
        assert second != first
    finally:
        helpers.close()


def _ask(helpers):
    jitted = jax.jit(jnp.sum)
    target = get_target("h100")
    program = aot._export(jitted, (jax.ShapeDtypeStruct((8,), "float32"),), {}, target)
    request = {"spec": target.spec, "n_devices": 1, "mesh": None, "donated": [], "writes_products": True,
               "n_bytes": len(program)}  # fmt: skip
    answer = helpers.ask(request, program)
    return answer, helpers.free.queue[-1].process.pid


@needs_packages
def test_compiles_of_a_helper_share_kernels():
    """The second finds those of the first, and what it allocates is the same; no file outlives the helper."""
    helpers = aot._Helpers(1)
    try:
        first, _ = _ask(helpers)
        kernels = Path(helpers.free.queue[-1].kernels)
        written = kernels.stat()
        assert written.st_size > 0
        assert _ask(helpers)[0] == first
        assert kernels.stat().st_size == written.st_size
    finally:
        helpers.close()
    assert not kernels.parent.exists()


def test_a_large_kernel_cache_is_begun_anew(tmp_path, monkeypatch):
    """XLA reads all of it in every compile."""
    monkeypatch.setattr(aot_worker, "MOST_KERNEL_BYTES", 2)
    file = tmp_path / "kernels"
    for content, is_kept in (b"ab", True), (b"abc", False):
        file.write_bytes(content)
        assert aot_worker.kernel_cache(str(file)) == {"xla_gpu_kernel_cache_file": str(file)}
        assert file.exists() == is_kept


@needs_packages
def test_a_helper_ends_with_its_parent():
    """A process that is killed leaves none behind that compiles for nobody, though what it reads from stays open."""
    script = Path(aot.__file__).with_name("aot_worker.py")
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-P', {str(script)!r}])"
    command = [sys.executable, "-c", starter]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with ThreadPoolExecutor(1) as pool, subprocess.Popen(command, **pipes) as parent:
        for line in ({"path": sys.path, "parent": parent.pid}, {"n_bytes": 0}):
            parent.stdin.write(json.dumps(line).encode() + b"\n")
        parent.stdin.flush()
        assert "error" in json.loads(parent.stdout.readline())
        parent.kill()
        try:  # the last process that may write there ends it
            assert pool.submit(parent.stdout.read).result(timeout=60) == b""
        finally:
            parent.stdin.close()


def test_threads_may_compile_at_once():
    """Four threads get the figures that one gets."""
    alone = measure_compiled(gradient(), SMALL, get_target("h100")).temp_bytes
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda _: measure_compiled(gradient(), SMALL, get_target("h100")).temp_bytes, range(4))
        )
    assert found == [alone] * 4


def run_unset(code):
    """Run code in a process of its own where no platform is chosen."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)


@needs_packages
@pytest.mark.parametrize("backends_first", [False, True])
def test_a_users_session_is_left_alone(backends_first):
    """Before or after the backends are up, with no platform set: the same default device, and no process left."""
    code = f"""
        import json, os, warnings
        warnings.simplefilter("error")
        import jax
        if {backends_first}:
            jax.devices()
        from jaxsub.devices import aot, aot_worker
        from jaxsub.devices.compile import compile_for, measure_compiled
        from jaxsub.devices.targets import get_target
        shape = jax.ShapeDtypeStruct((4,), "float32")
        n_bytes = measure_compiled(lambda x: x * 2, (shape,), get_target("h100")).argument_bytes
        helper = next(h for h in aot._helpers(os.getpid()).free.queue if h)
        print(json.dumps([n_bytes, jax.devices()[0].platform, jax.config.jax_platforms, helper.process.pid]))
    """
    done = run_unset(textwrap.dedent(code))
    n_bytes, platform, platforms, helper = json.loads(done.stdout)
    assert (n_bytes, platform, platforms or None) == (16, "cpu", None)
    with pytest.raises(ProcessLookupError):
        os.kill(helper, 0)


@needs_packages
@pytest.mark.skipif(any(map(os.path.exists, NVIDIA_DRIVERS)), reason="there is a GPU: the plugin starts")
@pytest.mark.parametrize("is_quiet", [False, True])
def test_jax_says_nothing_of_a_gpu_that_is_not_there(is_quiet):
    """With the plugin installed JAX prints a traceback at its first use, and none where jaxsub is imported."""
    code = "import jaxsub, jaxsub.devices.cuda_plugin as p; p.quiet_cuda_plugin(); " * is_quiet
    code += "import jax; print(jax.devices()[0].platform)"
    done = run_unset(code)
    assert done.stdout == "cpu\n"
    assert ("Jax plugin configuration error" in done.stderr) is not is_quiet
