"""What `jaxsub.devices.compile` reads of a compiled program, and the option that keeps recomputation on the CPU."""

import ctypes
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
import zoo
from jax.sharding import NamedSharding, PartitionSpec

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.devices.aot import how_it_ended
from jaxsub.devices.compile import compile_for, measure_compiled, measurement, return_freed_memory
from jaxsub.devices.targets import get_target
from jaxsub.emission.emit import as_traced, emit
from jaxsub.jaxpr.compat import checkpoint, cpu_compiler_options
from jaxsub.jaxpr.trace import trace

CPU = get_target("cpu")
ROWS, WIDTH, LAYERS = 512, 64, 16
UNIT_BYTES = ROWS * WIDTH * 4
ARGS = (jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"), [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS)


def chain(x, ws, every=None):
    """A chain of tanh(x @ w), its layers recomputed in groups of `every`."""
    step = len(ws) if every is None else every
    for start in range(0, len(ws), step):

        def group(x, ws):
            for w in ws:
                x = jnp.tanh(x @ w)
            return x

        x = (group if every is None else checkpoint(group))(x, ws[start : start + step])
    return jnp.sum(x)


def gradient(every=None):
    return jax.value_and_grad(lambda x, ws: chain(x, ws, every), argnums=1)


@pytest.mark.parametrize(
    ("version", "is_needed"),
    [("0.10.2", True), ("0.10.3.dev1", True), ("0.11.0", True), ("0.11.1", False), ("0.11.2", False),
     ("0.12.0.1", False), ("1.0", False)],
)  # fmt: skip
def test_the_option_goes_to_the_versions_that_need_it(version, is_needed):
    """The CPU option is given on 0.10.x and 0.11.0 and on no later version."""
    assert bool(cpu_compiler_options(version)) == is_needed


def test_recomputation_survives_the_cpu_compiler():
    """With the options, checkpoints every 4 of 16 layers bring the gradient from a layer each to about 8 units."""
    plain, saved = (measure_compiled(gradient(every), ARGS, CPU) for every in (None, 4))
    assert plain.temp_bytes >= LAYERS * UNIT_BYTES
    assert saved.temp_bytes <= 10 * UNIT_BYTES
    assert saved.flops > 1.15 * plain.flops


MEASURED = """
    import json, sys, jax, jaxsub, zoo
    for name, sizes in json.loads(sys.argv[1]).items():
        loss, init = zoo.BY_NAME[name].build(**zoo.BY_NAME[name].toy_size | sizes)
        lowered = jaxsub.jit(jax.value_and_grad(loss)).lower(*jax.eval_shape(init, jax.random.key(0)))
        compiled = lowered.compile()
        print(compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"])
"""


def test_code_that_never_runs_says_the_same_of_memory():
    """What is compiled to be measured, here too, allocates what the same program allocates that a user runs."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    networks = {"gpt": {"layers": 2}, "resnet": {"depths": (1, 1)}}
    command = [sys.executable, "-c", textwrap.dedent(MEASURED), json.dumps(networks)]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    for (name, sizes), line in zip(networks.items(), found, strict=True):
        loss, init = zoo.BY_NAME[name].build(**zoo.BY_NAME[name].toy_size | sizes)
        measured = measure_compiled(jax.value_and_grad(loss), jax.eval_shape(init, jax.random.key(0)))
        assert line == f"{measured.temp_bytes} {measured.flops}"


def test_sizes_are_those_of_arguments_and_outputs():
    """Argument and output bytes are the arrays' own, whatever trees hold them."""
    measured = measure_compiled(gradient(), ARGS)
    weights_bytes = LAYERS * WIDTH * WIDTH * 4
    assert measured.argument_bytes == UNIT_BYTES + weights_bytes
    assert weights_bytes + 4 <= measured.output_bytes <= weights_bytes + 4 + 16 * LAYERS  # and a table of pointers
    assert measured.compile_seconds > 0
    assert measured.target == get_target(None).name


def test_calls_stay_calls():
    """What is measured is the function as JAX traced it: a call is not written out in line."""

    def loss(w, x):
        return jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x).sum()

    args = ARGS[1][0], ARGS[0]
    program = trace(loss, args, {})
    runs = loss, as_traced(program), emit(program, Plan(program.fingerprint, Budget(), len(program.eqns)))
    assert [str(jax.make_jaxpr(run)(*args)).count("jit[") for run in runs] == [1, 1, 0]


def test_arrays_and_shapes_measure_alike():
    """An array and its shape cost the same, and a Python scalar is taken as it is."""
    array = jnp.ones((8, 8))
    measured = [measure_compiled(lambda x, s: (x * s) @ x, (x, 2.0)) for x in (array, jax.typeof(array))]
    assert measured[0].temp_bytes == measured[1].temp_bytes
    assert measured[0].argument_bytes == measured[1].argument_bytes


def test_compiling_works_under_an_outer_trace():
    """A measurement taken while the user's function is traced is the one taken outside, for shapes and tracers."""
    outside = measure_compiled(gradient(), ARGS).temp_bytes
    inside = []

    @jax.jit
    def step(x, ws):
        inside.append(measure_compiled(gradient(), ARGS).temp_bytes)
        inside.append(measure_compiled(gradient(), (x, ws)).temp_bytes)
        jax.vmap(lambda x: inside.append(measure_compiled(gradient(), (x, ws)).temp_bytes))(x[None])
        return jax.grad(chain)(x, ws)

    jax.eval_shape(step, *ARGS)
    assert inside == [outside] * 3


def test_an_argument_elsewhere_is_taken_along():
    """An array that lies on another device than the target's is measured as if it lay there."""
    code = """
        import jax, jax.numpy as jnp
        from jaxsub.devices.compile import compile_for
        from jaxsub.devices.targets import get_target
        first, second = jax.devices()
        compiled = compile_for(lambda x: x + 1, (jax.device_put(jnp.ones(4), first),), get_target(second))
        assert compiled.input_shardings[0][0].device_set == {second}, compiled.input_shardings
    """
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_option_keeps_values_right():
    """Without it those versions merge what an update in place needs apart, with a barrier written by hand too."""

    def f(w, x):
        h, d = jax.lax.optimization_barrier((jnp.tanh(x @ w), x @ w))
        v = jnp.tanh(d)
        return jnp.mean(jnp.sin(jax.lax.dynamic_update_slice(h, jnp.sin(v[:2, :2]), (1, 1)) + v))

    w, x = (jax.random.normal(key, (4, 4)) for key in jax.random.split(jax.random.key(0)))
    value = jaxsub.jit(jax.value_and_grad(f))(w, x)[0]
    assert jnp.abs(value - f(w, x)) < 1e-6
    if cpu_compiler_options():
        assert jnp.abs(jax.jit(jax.value_and_grad(f))(w, x)[0] - f(w, x)) > 1e-3


def test_barriers_in_small_loops_do_not_abort_the_compiler():
    """Loops of a kilobyte become one kernel, for which XLA has no code of barriers: this process would end."""

    def step(carry, _):
        i, x = jax.lax.optimization_barrier(carry)
        return (i + 1, 2 * x), None

    doubled = jaxsub.jit(lambda x: jax.lax.scan(step, (0, x), None, length=6)[0])
    assert [int(found.max()) for found in doubled(jnp.ones(3))] == [6, 64]


def test_donated_memory_is_counted_as_shared():
    """A donated argument that an output can reuse shows up as alias bytes, for plain and for jitted functions."""
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    donated = measure_compiled(lambda x: x + 1, (shape,), donate_argnums=(0,))
    jitted = measure_compiled(jax.jit(lambda x: x + 1, donate_argnums=0), (shape,))
    kept = measure_compiled(lambda x: x + 1, (shape,))
    assert (donated.alias_bytes, jitted.alias_bytes, kept.alias_bytes) == (64 * 64 * 4, 64 * 64 * 4, 0)


def test_shardings_are_kept():
    """An argument that is sharded over a mesh keeps its sharding."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shape = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    compiled = compile_for(lambda x: x * 2, (shape,))
    assert compiled.input_shardings[0][0].spec == PartitionSpec("data")


class Silent:
    """A program whose compiler reports nothing."""

    def memory_analysis(self):
        return None

    def cost_analysis(self):
        return None


def test_a_silent_compiler_is_an_error_that_says_what_to_do():
    """Without a memory analysis the error names the target and both ways on."""
    with pytest.raises(UnsupportedError, match=r"`cpu`.*verify=False.*target=\"cpu\""):
        measurement(Silent(), CPU, 0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system's own account of memory is read")
def test_freed_memory_is_given_back():
    libc, n, each = ctypes.CDLL(None), 1024, 64 << 10
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(each) for _ in range(n)]
    for block in blocks:
        ctypes.memset(block, 1, each)
    for block in blocks[:-1]:  # the last one, at the top of the heap, keeps glibc from doing it by itself
        libc.free(block)
    before = resident_bytes()
    return_freed_memory()
    given_back = before - resident_bytes()
    libc.free(blocks[-1])
    assert given_back > n * each / 2


def resident_bytes():
    """What the process has in memory."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_crash_of_the_compiler_is_told_in_its_own_words():
    """Not by the calls that led to it, which are the last that a helper process writes."""
    log = "I0000 started\nF1129 23:11:08.5 13 tiling.cc:622] Check failed: found != end \n    @ 0x7fc7 Run()\n" * 2
    assert "F1129 23:11:08.5 13 tiling.cc:622] Check failed: found != end" in how_it_ended(-6, log)
    assert "XLA_FLAGS" in how_it_ended(-6, log)
    assert "0x7fc7" not in how_it_ended(-6, log)
    assert "killed for memory" in how_it_ended(-9, "I0000 started")
    assert how_it_ended(1, "I0000 started\nNo module named x").endswith("No module named x")
