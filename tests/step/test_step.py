"""Whole train steps under `jaxsub.jit(memory=...)`: they fit, compute the same, and say what they take."""

import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from processes import quickly

import jaxsub
from jaxsub.devices.aot import cross_compile, require_packages
from jaxsub.devices.targets import get_target
from jaxsub.step.device import device_bytes
from jaxsub.step.max_batch import largest
from jaxsub.step.sizing import Sizing

DIM, DEPTH, BATCH = 16, 6, 512
OPTIMIZER = optax.adam(1e-2)
quiet = functools.partial(jaxsub.jit, progress=False)


def loss(params, x, y):
    """A residual network."""
    for layer in params:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return ((x - y) ** 2).mean()


def params():
    keys = jax.random.split(jax.random.key(0), DEPTH)
    return [{"up": jax.random.normal(k, (DIM, 2 * DIM)) / 4, "down": jax.random.normal(k, (2 * DIM, DIM)) / 16}
            for k in keys]  # fmt: skip


def batch(n=BATCH):
    return tuple(jax.random.normal(jax.random.key(i), (n, DIM)) for i in (1, 2))


def state():
    weights = params()
    return weights, OPTIMIZER.init(weights)


def step_of(loss):
    def step(weights, opt_state, x, y):
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, value

    return step


def taken(step, *args, **kwargs):
    """What the compiler says that a step takes, asked of JAX itself."""
    memory = step.lower(*args, **kwargs).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return used - memory.alias_size_in_bytes


def planned(report):
    """The plans of a report that do something."""
    return [site.plan for site in report.sites if site.plan.segments or site.plan.barriers or site.plan.slices]


STEP = step_of(jaxsub.sublinear(loss, progress=False, chunks=False))


@functools.cache
def sized(memory):
    """The same step at one size; shared, for it takes seconds to find."""
    step = quiet(STEP, memory=memory, donate_argnums=(0, 1))
    return step, step.report(*state(), *batch())


@pytest.mark.parametrize("memory", [1.0, 0.7, 0.5])
def test_a_step_fits_and_trains_as_before(memory):
    """The compiler confirms the whole step's memory, donated buffers included, and the losses are the plain step's."""
    step, report = sized(memory)
    assert report.step_bytes == taken(step, *state(), *batch()) <= report.memory_bytes
    assert report.plain_bytes == taken(jaxsub.jit(step_of(loss), donate_argnums=(0, 1)), *state(), *batch())
    assert bool(planned(report)) == (memory < 1)
    mine, plain, other = state(), state(), jax.jit(step_of(loss))
    for _ in range(3):
        *mine, value = step(*mine, *batch())
        *plain, wanted = other(*plain, *batch())
        chex.assert_trees_all_close(value, wanted, rtol=1e-5)
    chex.assert_trees_all_close(mine, plain, rtol=1e-3, atol=1e-5)


def test_more_memory_never_recomputes_more():
    """Less memory, more recomputation, and nothing recomputed where the step fits; most of the memory is used."""
    extras = [sized(memory)[1].extra for memory in (0.5, 0.7, 1.0)]
    assert extras == sorted(extras, reverse=True)
    assert extras[-1] == 0 < extras[0]
    assert sized(0.5)[1].step_bytes >= 0.93 * sized(0.5)[1].memory_bytes
    assert all(sized(memory)[1].n_compiles <= 6 for memory in (0.5, 0.7, 1.0))


def test_a_second_call_traces_and_compiles_nothing(monkeypatch):
    """The loss's own code runs once however many plans are tried; the second call of a shape is the compiled step."""
    counted = chex.assert_max_traces(loss, n=1)
    step = quiet(step_of(jaxsub.sublinear(counted, progress=False)), memory=0.5, donate_argnums=(0, 1))
    weights = step(*state(), *batch())[:2]
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled again"))
        step(*weights, *batch())
        assert step.report(*state(), *batch()) is step.report(*jax.eval_shape(state), *batch())
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(*state(), *batch(8))


def test_a_step_that_cannot_fit_says_what_holds_the_memory():
    """Names, shapes, lines and shares; what is parameters and optimizer state; the least, which then works."""
    step = quiet(STEP, memory="100KiB")
    with pytest.raises(jaxsub.InfeasibleBudgetError) as caught:
        step.report(*state(), *batch())
    error, text = caught.value, str(caught.value)
    assert error.requested_bytes == 100 * 1024 < error.least_bytes
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state()))
    share = f"{n_bytes / error.least_bytes:.0%}"
    for words in (
        "does not fit in `100.0 KiB` (102400 bytes)",
        "opt_state: 25 arrays, the largest opt_state[0].mu[0]['down'] float32[32,16]",
        "weights: 12 arrays",
        "x: 1 arrays, the largest x float32[512,16]",
        "gradients of loss, 12 arrays",
        "test_step.py",
        f"Parameters and optimizer state, which the step returns anew, are {n_bytes / 1024:.1f} KiB of it ({share})",
        f"Pass memory={error.least_bytes}, donate opt_state and weights (donate_argnums=), which frees up to",
    ):
        assert words in text
    assert any("loss" in line for line in error.holders)
    shares = [int(found[1]) for line in error.holders if (found := re.search(r"iB +(\d+)%", line))]
    assert 97 <= sum(shares) <= 103
    again = quiet(STEP, memory=error.least_bytes)
    assert taken(again, *state(), *batch()) <= error.least_bytes


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_the_least_of_a_step_is_found_without_a_search(is_on_disk, tmp_path, monkeypatch):
    """Where just that is asked for; and no memory above it is refused, whatever a search finds."""
    step, args = step_of(jaxsub.sublinear(loss)), (*state(), *batch())
    cache = tmp_path if is_on_disk else False
    with pytest.raises(jaxsub.InfeasibleBudgetError) as refused:
        quiet(step, memory="150KiB", donate_argnums=(0, 1), cache=cache).report(*args)
    least = refused.value.least_bytes
    monkeypatch.setattr(Sizing, "run", lambda self, n_bytes: None)
    for memory in (least, int(1.2 * least)):
        found = quiet(step, memory=memory, donate_argnums=(0, 1), cache=cache).report(*args)
        assert found.step_bytes == least
    with pytest.raises(jaxsub.InfeasibleBudgetError):
        quiet(step, memory=least - 1, donate_argnums=(0, 1), cache=cache).report(*args)


def test_a_step_without_a_planned_function_says_what_to_wrap():
    """Too much memory and nothing to plan: the error says to wrap the loss; enough memory is no error."""
    with pytest.raises(jaxsub.InfeasibleBudgetError, match=r"wrap the loss, loss = jaxsub.sublinear\(loss\)"):
        quiet(step_of(loss), memory="200KiB")(*state(), *batch())
    report = quiet(step_of(loss), memory="1GiB").report(*state(), *batch())
    assert report.sites == ()
    assert report.n_compiles == 1


def generator(weights, x):
    for layer in weights:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x


def test_two_functions_in_one_step():
    """Both losses of a step are planned; a function that is small enough keeps everything."""
    hard = jaxsub.sublinear(lambda w, x: (generator(w, x) ** 2).mean(), progress=False, chunks=False)
    easy = jaxsub.sublinear(lambda w, x: jnp.abs(generator(w[:2], x[:64])).mean(), progress=False)

    def step(weights, x):
        grads = jax.tree.map(jnp.add, jax.grad(hard)(weights, x), jax.grad(easy)(weights, x))
        return jax.tree.map(lambda w, g: w - g, weights, grads)

    made = quiet(step, memory=0.5, donate_argnums=0)
    report = made.report(params(), batch()[0])
    assert len(report.sites) == 2
    assert report.step_bytes <= report.memory_bytes
    extra = sorted(site.plan.prediction.extra_flops if site.plan.prediction else 0.0 for site in report.sites)
    assert extra[0] == 0 < extra[1]
    chex.assert_trees_all_close(made(params(), batch()[0]), step(params(), batch()[0]), rtol=1e-4, atol=1e-6)


def test_micro_batches_in_a_scan():
    """A function inside a loop's body, differentiated there, is planned; JAX's memory of the body does not hide it."""
    small = jaxsub.sublinear(loss, progress=False)

    @jax.jit
    def gradient(weights, x, y):
        return jax.grad(small)(weights, x, y)

    def step(weights, xs, ys):
        def body(total, pair):
            return jax.tree.map(jnp.add, total, gradient(weights, *pair)), None

        grads, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, weights), (xs, ys))
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    xs, ys = (jnp.stack([a, a + 1]) for a in batch())
    made = quiet(step, memory=0.6, donate_argnums=0)
    report = made.report(params(), xs, ys)
    assert planned(report)
    assert taken(made, params(), xs, ys) <= report.memory_bytes < report.plain_bytes
    chex.assert_trees_all_close(made(params(), xs, ys), step(params(), xs, ys), rtol=1e-4, atol=1e-6)


def test_static_and_keyword_arguments_and_auxiliary_results():
    """Arguments as `jax.jit` takes them; a loss with an auxiliary result, called twice."""

    @functools.partial(jaxsub.sublinear, static_argnames="power", progress=False)
    def with_aux(weights, x, *, power):
        out = generator(weights, x)
        return jnp.mean(out**power), {"largest": out.max()}

    def step(weights, x, scale, *, power):
        (_, aux), grads = jax.value_and_grad(with_aux, has_aux=True)(weights, x, power=power)
        again = jax.grad(with_aux, has_aux=True)(weights, x + 1, power=power)[0]
        return jax.tree.map(lambda w, g, h: w - scale * (g + h), weights, grads, again), aux

    made = quiet(step, memory=0.6, static_argnames="power", donate_argnames="weights")
    args, kwargs = (batch()[0],), {"scale": 0.1, "power": 2}
    report = made.report(params(), *args, **kwargs)
    assert [site.calls for site in report.sites] == [2]
    assert planned(report)
    assert {held.name for held in report.arguments} == {"weights", "x", "scale"}
    wanted = step(params(), *args, **kwargs)
    chex.assert_trees_all_close(made(params(), *args, **kwargs), wanted, rtol=1e-4, atol=1e-6)


def test_keyword_arguments_hold_what_is_theirs():
    """What a step's arguments hold is told by their names, in whatever order they are given."""

    def step(w, *, small, large):
        return w * small.sum() * large.sum()

    report = quiet(step, memory="1GiB").report(jnp.ones(4), small=jnp.ones(2), large=jnp.ones(64))
    assert {held.name: held.n_bytes for held in report.arguments} == {"w": 16, "small": 8, "large": 256}
    assert quiet(lambda self: self + 1, memory="1GiB")(self=jnp.ones(2)).tolist() == [2, 2]


def test_budgets_and_plans_of_ones_own_are_kept():
    """A function with a budget takes at most that, one with a plan keeps it, whatever the step may take."""
    within = jaxsub.sublinear(loss, budget=0.5, progress=False, chunks=False)
    report = quiet(step_of(within), memory="1GiB").report(*state(), *batch())
    own = within.plan(params(), *batch())
    assert report.sites[0].plan.segments == own.segments
    assert own.segments
    fixed = jaxsub.sublinear(loss, plan=own)
    with pytest.raises(jaxsub.InfeasibleBudgetError, match="`loss` cannot be planned by the step: made with plan="):
        quiet(step_of(fixed), memory="300KiB").report(*state(), *batch())


def test_nnx_modules():
    """The state of an nnx model, split and merged round the step, and jaxsub.flax.nnx.sublinear inside."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(DEPTH)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + jnp.tanh(layer(x))
            return x

    small = jaxsub.flax.nnx.sublinear(lambda model, x: (model(x) ** 2).mean(), progress=False)
    graph, weights = nnx.split(Net(nnx.Rngs(0)))

    def step(weights, x):
        model = nnx.merge(graph, weights)
        value, grads = nnx.value_and_grad(small)(model, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    made = quiet(step, memory=0.6)
    report = made.report(weights, batch()[0])
    assert planned(report)
    assert report.step_bytes <= report.memory_bytes
    chex.assert_trees_all_close(made(weights, batch()[0]), step(weights, batch()[0]), rtol=1e-4, atol=1e-6)


def test_what_a_device_has():
    """memory="device": of a GPU what JAX takes of it; a memory that cannot be read is refused."""
    assert device_bytes(get_target("h100")) == int(0.75 * 80 * 2**30)
    with pytest.raises(ValueError, match="say how much it may take, too: memory="):
        jaxsub.jit(STEP, target="h100")
    with pytest.raises(jaxsub.BudgetError, match="Cannot read"):
        jaxsub.jit(STEP, memory="plenty")


SHARDED = """
import jax, jaxsub, test_step as t
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
shardings = {"in_shardings": (whole, whole, rows, rows), "out_shardings": (whole, whole, whole)}
step = t.quiet(t.STEP, memory=0.6, **shardings)
args = *t.state(), *t.batch(2048)
report = step.report(*args)
assert t.planned(report) and t.taken(step, *args) == report.step_bytes <= report.memory_bytes < report.plain_bytes
assert report.plain_bytes == t.taken(jaxsub.jit(t.step_of(t.loss), **shardings), *args)
assert {h.name: h.n_bytes for h in report.arguments}["x"] == 4 * 16 * 2048 / 4
out = step(*args)
t.chex.assert_trees_all_close(out[2], jax.jit(t.step_of(t.loss))(*args)[2], rtol=1e-5)
step(*out[:2], *args[2:])
assert len(step._ready) == 1
"""


def test_a_step_over_several_devices():
    """With shardings, memory is that of one device, and a second call with what the first returned sizes nothing."""
    folder = Path(__file__).parent
    env = {
        **os.environ,
        **quickly(4),
        "PYTHONPATH": os.pathsep.join([str(folder.parents[1]), str(folder.parent), str(folder)]),
    }
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env=env)


@pytest.fixture
def h100():
    """A target that is not there, where it can be compiled for."""
    try:
        require_packages()
    except jaxsub.UnsupportedError as missing:
        pytest.skip(str(missing))
    return "h100"


def test_a_step_for_a_gpu_that_is_not_there(h100):
    """What the H100 has is enough: compiled for it once, and run here."""
    made = quiet(STEP, memory="device", target=h100, donate_argnums=(0, 1))
    report = made.report(*state(), *batch())
    assert report.measurement.target == "h100"
    assert report.n_compiles == 1
    chex.assert_trees_all_close(made(*state(), *batch())[2], loss(params(), *batch()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_planned_for_a_gpu_that_is_not_there(h100):
    """Planned and verified for an H100, run here under the plans found."""
    args = *state(), *batch()
    report = quiet(STEP, memory="device", target=h100, donate_argnums=(0, 1)).report(*args)
    tight = quiet(STEP, memory=int(0.75 * report.step_bytes), target=h100, donate_argnums=(0, 1))
    found = tight.report(*jax.eval_shape(lambda: args))
    assert found.step_bytes <= found.memory_bytes
    assert planned(found)
    wanted = step_of(loss)(*args)
    chex.assert_trees_all_close(tight(*args), wanted, rtol=1e-3, atol=1e-5)


def test_what_was_measured_is_found_on_disk(tmp_path, monkeypatch):
    """A new step finds plans and measurements of one like it, and compiles nothing; a larger batch is another step."""
    check_found_on_disk(None, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_was_measured_for_an_absent_gpu_is_found_on_disk(h100, tmp_path, monkeypatch):
    """The same where the helper process compiles."""
    check_found_on_disk(h100, tmp_path, monkeypatch)


def check_found_on_disk(target, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", counting(jax.stages.Lowered.compile, compiled))
    monkeypatch.setattr("jaxsub.step.jit.cross_compile", counting(cross_compile, compiled))
    first, again, other = (quiet(STEP, memory=m, target=target, cache=tmp_path) for m in (0.6, 0.6, "1GiB"))
    args = jax.eval_shape(lambda: (*state(), *batch()))
    found = first.report(*args)
    assert planned(found)
    n_first = len(compiled)
    assert n_first >= 2
    repeated = again.report(*args)
    assert len(compiled) == n_first
    assert (repeated.step_bytes, repeated.plain_bytes) == (found.step_bytes, found.plain_bytes)
    assert planned(repeated) == planned(found)
    other.report(*jax.eval_shape(lambda: (*state(), *batch(2 * BATCH))))
    assert len(compiled) > n_first


def counting(fun, calls):
    """A function that takes note of its calls."""

    @functools.wraps(fun)
    def counted(*args, **kwargs):
        calls.append(fun)
        return fun(*args, **kwargs)

    return counted


def test_reports_are_readable():
    """A report says before and after, what the arguments are, and what was done with each function."""
    _, report = sized(0.5)
    lines = str(report).splitlines()
    assert re.fullmatch(r"jaxsub step: .*iB -> .*iB of .*iB \(cpu, \d compiles\)", lines[0])
    assert "opt_state" in lines[1]
    assert "donated" in lines[2]
    assert "->" in lines[3]
    assert re.fullmatch(r"loss: \d+ regions, \d+ barriers, .* of a forward pass again \(`\w+`\)", lines[4])
    assert str(sized(1.0)[1]).splitlines()[-1] == "loss: nothing recomputed"
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(("a", "b", "unit", "limit"), [(100, 7, 1, 10**4), (0, 3, 8, 10**5), (9, 5000, 1, 4000)])
def test_the_search_for_a_batch_is_exact(a, b, unit, limit):
    """The largest multiple within a limit, in few evaluations, or 0 where not even one fits."""
    asked = []
    found = largest(lambda n: asked.append(n) or a + b * n, limit, unit)
    assert found == max(0, (limit - a) // b // unit * unit)
    assert len(asked) <= 8


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_largest_batch():
    """The next batch does not fit as it stands, and what is found planned does; nothing is executed."""

    def step_for_batch(n):
        shape = jax.ShapeDtypeStruct((n, DIM), jnp.float32)
        return STEP, (*jax.eval_shape(state), shape, shape)

    memory, unit = 700_000, 64
    found = jaxsub.max_batch(step_for_batch, memory=memory, multiple_of=unit, progress=False, donate_argnums=(0, 1))
    plain = jaxsub.jit(step_of(loss), donate_argnums=(0, 1))
    assert (
        taken(plain, *step_for_batch(found.plain)[1]) <= memory < taken(plain, *step_for_batch(found.plain + unit)[1])
    )
    assert found.planned >= 1.5 * found.plain
    step = quiet(STEP, memory=memory, donate_argnums=(0, 1))
    assert taken(step, *step_for_batch(found.planned)[1]) == found.report.step_bytes <= memory
    pattern = (
        rf"largest batch in 683.6 KiB \(cpu\): {found.plain} as it stands, {found.planned} planned \(.* times\), .*"
    )
    assert re.fullmatch(pattern, str(found))


def test_a_batch_that_cannot_be_found_says_why():
    """Memory that is no number of bytes, and a step that fits with no batch at all."""

    def step_for_batch(n):
        shape = jax.ShapeDtypeStruct((n, DIM), jnp.float32)
        return step_of(loss), (*jax.eval_shape(state), shape, shape)

    with pytest.raises(jaxsub.BudgetError, match="no number of bytes"):
        jaxsub.max_batch(step_for_batch, memory=0.5)
    for unit in (0, 8.0, "8", True):
        with pytest.raises(ValueError, match=f"multiple_of= is a whole number of at least 1, got {unit!r}"):
            jaxsub.max_batch(step_for_batch, memory="1GiB", multiple_of=unit)
    with pytest.raises(TypeError, match=r"step_for_batch\(1\) must return a step and a tuple of its arguments, got <"):
        jaxsub.max_batch(lambda n: step_of(loss), memory="1GiB")
    with pytest.raises(jaxsub.InfeasibleBudgetError, match="wrap the loss"):
        jaxsub.max_batch(step_for_batch, memory="10KiB", progress=False)


def test_a_step_that_takes_the_same_with_every_batch_is_refused():
    """A slip in `step_for_batch` is noticed after a few batches."""
    tried = []
    with pytest.raises(ValueError, match=r"A batch of \d+ takes no more memory than one of 64: .*step_for_batch"):
        jaxsub.max_batch(lambda n: tried.append(n) or (jnp.add, batch()), memory="1GiB", multiple_of=64, progress=False)
    assert len(tried) <= 12


def test_a_function_whose_own_budget_does_not_fit_says_with_which_batch():
    """It is no fault of the step's memory: a note on the function's refusal says which batch was tried."""
    small = jaxsub.sublinear(loss, budget=100)
    with pytest.raises(jaxsub.InfeasibleBudgetError, match="100 bytes") as caught:
        jaxsub.max_batch(
            lambda n: (step_of(small), (*jax.eval_shape(state), *[jax.ShapeDtypeStruct((n, DIM), jnp.float32)] * 2)),
            memory="1GiB", multiple_of=jnp.int32(32), progress=False,
        )  # fmt: skip
    assert "That was with a batch of 32; max_batch begins with multiple_of=32." in caught.value.__notes__


def test_a_small_step_may_run_in_slices_too():
    """Where nothing else fits slices may have any size, as in a plan of the loss by itself."""
    weights, x = [jax.random.normal(jax.random.key(i), (32, 32)) / 4 for i in range(6)], jnp.ones((256, 32))

    def layers(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step_with(loss):
        def step(weights, x):
            value, gradients = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

        return step

    own = step_with(jaxsub.sublinear(layers, budget="24KiB", cache=False, progress=False))
    memory = taken(jaxsub.jit(own, donate_argnums=0), weights, x)
    step = quiet(step_with(jaxsub.sublinear(layers)), memory=memory, donate_argnums=0)
    assert step.report(weights, x).step_bytes <= memory
    chex.assert_trees_all_close(jaxsub.jit(step_with(layers))(weights, x), step(weights, x), rtol=1e-4)


def test_a_step_without_a_planned_loss_says_so():
    """Its refusal lists no values that nothing is known of, and `max_batch` says why it finds no larger batch."""
    loss = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()  # noqa: E731
    step, arguments = jax.grad(loss), (jnp.ones((8, 8)), jnp.ones((64, 8)))
    with pytest.raises(jaxsub.InfeasibleBudgetError) as caught:
        quiet(step, memory="1KiB").report(*arguments)
    assert "No function in the step is wrapped in jaxsub.sublinear" in str(caught.value)
    assert "predicted to be live" not in str(caught.value)
    with pytest.raises(jaxsub.InfeasibleBudgetError, match="predicted to be live at the peaks of its functions"):
        quiet(jax.grad(jaxsub.sublinear(loss)), memory="1KiB").report(*arguments)
    found = jaxsub.max_batch(lambda n: (step, (jnp.ones((8, 8)), jnp.ones((n, 8)))), memory="64KiB", progress=False)
    assert "no function in the step is wrapped in jaxsub.sublinear" in str(found)


def test_the_largest_batch_of_a_step_that_is_made_is_that_of_its_function():
    """Of a step with a memory of its own its function counts, and what it is compiled with."""

    def largest_of(step, **jit_kwargs):
        shapes = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 6
        return jaxsub.max_batch(lambda n: (step, (shapes, jax.ShapeDtypeStruct((n, 32), jnp.float32))),
                                memory="256KiB", multiple_of=64, progress=False, **jit_kwargs)  # fmt: skip

    @jaxsub.sublinear
    def layers(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(layers)(ws, x))

    wanted = largest_of(step, donate_argnums=0)
    assert wanted.planned > wanted.plain
    made = largest_of(jaxsub.jit(step, memory="1MiB", donate_argnums=0))
    assert (made.plain, made.planned) == (wanted.plain, wanted.planned)


def test_what_wraps_a_function_under_jit_is_no_part_of_it():
    """`jax.grad`, `jax.vmap`, wrappers of a user's and `sublinear` take over a function's attributes, not its work."""
    weights, data = params(), batch(8)
    jitted = jaxsub.jit(loss)
    gradient = jax.grad(loss)(weights, *data)
    for one in (jitted, jaxsub.sublinear(jitted, cache=False, progress=False)):
        value, found = jaxsub.jit(jax.value_and_grad(one))(weights, *data)
        chex.assert_trees_all_close((value, found), (loss(weights, *data), gradient), rtol=1e-5, atol=1e-7)
    square = jaxsub.jit(lambda x: (x**2).sum())
    assert jaxsub.jit(jax.vmap(square))(jnp.ones((3, 4))).tolist() == [4.0] * 3
    assert jaxsub.jit(jax.hessian(square))(jnp.ones(2)).tolist() == [[2.0, 0.0], [0.0, 2.0]]

    @functools.wraps(square)
    def more(x):
        return square(x) + 100.0

    assert (jaxsub.jit(more)(jnp.ones(2)), jaxsub.jit(jaxsub.jit(more))(jnp.ones(2))) == (102.0, 102.0)
    assert not hasattr(jax.grad(square), "lower")
    assert inspect.unwrap(jitted) is loss
    lowered = jitted.lower(weights, *data)
    assert lowered.compile().memory_analysis().argument_size_in_bytes > 0


def test_a_part_that_a_loop_calls_may_keep_its_arguments_alone():
    """A stage of a pipeline, in `jax.shard_map`: what the loop stacks is none of its own peak."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    weights, rows = params()[:2], jax.random.normal(jax.random.key(3), (8, 64, DIM))

    def stage(weights, x):
        for layer in weights:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return x

    def step_with(wrap):
        def body(weights, rows):
            _, made = lax.scan(lambda _, x: (None, wrap(stage)(weights, x)), None, rows)
            return lax.pmean((made**2).mean(), "d")

        mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        return lambda weights, rows: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(mapped)(weights, rows))

    def needed(step):
        used = step.lower(weights, rows).compile().memory_analysis()
        return used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes

    by_hand = jaxsub.jit(step_with(jax.checkpoint))
    assert needed(by_hand) < 0.6 * needed(jaxsub.jit(step_with(lambda f: f)))
    planned = step_with(functools.partial(jaxsub.sublinear, cache=False, progress=False))
    step = quiet(planned, memory=needed(by_hand), cache=False)
    assert needed(step) <= needed(by_hand)
    chex.assert_trees_all_close(step(weights, rows), by_hand(weights, rows), rtol=1e-5, atol=1e-6)


def test_what_must_run_once_is_in_no_region_of_a_part_either():
    """A stage that tells the host of its input, in a loop: regions stand around that."""
    weights, rows = params()[:2], jax.random.normal(jax.random.key(3), (8, 64, DIM))

    def stage(weights, x):
        jax.experimental.io_callback(lambda mean: None, None, lax.stop_gradient(x).mean())
        for layer in weights:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return x

    def step_with(wrap):
        def loss(weights, rows):
            _, made = lax.scan(lambda _, x: (None, wrap(stage)(weights, x)), None, rows)
            return (made**2).mean()

        return lambda weights, rows: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, rows))

    planned = step_with(functools.partial(jaxsub.sublinear, cache=False, progress=False))
    step = quiet(planned, memory=0.5, cache=False)
    wanted = jaxsub.jit(step_with(lambda f: f))(weights, rows)
    chex.assert_trees_all_close(step(weights, rows), wanted, rtol=1e-5, atol=1e-6)
    assert step.plan(weights, rows).sites[0].plan.planner == "by hand: full"
