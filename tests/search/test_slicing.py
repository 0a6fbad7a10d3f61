"""Plans in slices: found where nothing else fits, asked for by name or axis, or refused by an equation."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from layers import tanh_layers

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.chain import Prediction
from jaxsub.core.decisions import Slices
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.measurement import Measurement
from jaxsub.core.plan import Plan
from jaxsub.costs.roofline import KERNEL_SECONDS
from jaxsub.costs.slice_time import NO_TIME, busy_rows, least_rows, product_dtype, slice_time
from jaxsub.devices.targets import get_target
from jaxsub.emission.folding import with_slices
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import jaxpr_flops
from jaxsub.jaxpr.trace import trace
from jaxsub.search import slicing
from jaxsub.search.compile_worth import NOTHING
from jaxsub.search.slice_search import sliced_or_whole
from jaxsub.search.sliced_program import least_gain
from jaxsub.search.slicing import ChunksError, find_runs

ROWS, WIDTH, CLASSES = 512, 32, 8192
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, CLASSES, ROWS))
HEAD = {
    "layers": [jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)) / 6, jnp.float32) for _ in range(3)],
    "head": jnp.asarray(RNG.normal(size=(WIDTH, CLASSES)) / 6, jnp.float32),
}
HIDDEN = [jnp.asarray(RNG.normal(size=s) / s[0] ** 0.5, jnp.float32) for s in ((WIDTH, CLASSES), (CLASSES, WIDTH))]
KERNELS = [jnp.asarray(RNG.normal(size=(3, 3, 3, 32)) / 6, jnp.float32)]
DIMS = ("NHWC", "HWIO", "NHWC")
IMAGES = jnp.asarray(RNG.normal(size=(16, 32, 32, 3)), jnp.float32)


def classify(params, x, y):
    """A loss over many classes behind a few layers."""
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        logits = x @ params["head"]
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return losses.mean()


def mlp(params, x, y):
    """Two layers with a hidden layer far wider than what goes in and out."""
    return jnp.mean((x + jnp.tanh(x @ params[0]) @ params[1]) ** 2)


def stem(params, x, y):
    """Convolutions of images with group norm between them, a mean loss."""
    for kernel in params:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        groups = x.reshape(*x.shape[:3], 4, -1)
        mean, var = groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True)
        x = jax.nn.relu(((groups - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape))
    return jnp.mean(jnp.sin(x))


def contrast(params, x, y):
    """A contrastive loss over the batch."""
    z = jnp.tanh(x @ params[0][:, :16])
    with jax.named_scope("pairs"):
        return -jnp.diag(jax.nn.log_softmax(z @ z.T)).mean()


def batch_norm(params, x, y):
    """An MLP with batch statistics in it."""
    h = x @ params[0]
    with jax.named_scope("norm"):
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean((jnp.tanh(h) @ params[1]) ** 2)


PROGRAMS = {
    "many classes": (classify, (HEAD, X, Y)),
    "wide MLP": (mlp, (HIDDEN, X, Y)),
    "stem": (stem, (KERNELS, IMAGES, Y)),
}


def test_a_fraction_is_planned_as_its_bytes():
    """The same plan, which names the fraction and what the program needs without it."""
    args = HEAD, X, Y
    n_bytes = jaxsub.measure(classify, *args).temp_bytes // 4
    shared, exact = (jaxsub.plan(classify, *args, budget=b, cache=False, progress=False) for b in (0.25, n_bytes))
    assert shared.slices == exact.slices
    assert shared.segments == exact.segments
    assert (str(shared.budget), shared.plain_measurement.temp_bytes // 4) == ("25% of plain", n_bytes)


@pytest.mark.parametrize("chunks", [True, {0: 4}], ids=["asked", "named"])
def test_slices_that_are_asked_for_are_made_in_all_of_the_memory_too(chunks):
    """A budget of what the program needs anyway does not make a user's `chunks=` void."""
    asked = dict(chunks=chunks, cache=False, progress=False)
    assert jaxsub.plan(classify, HEAD, X, Y, budget=1.0, **asked).slices
    assert not jaxsub.plan(classify, HEAD, X, Y, budget=1.0, cache=False, progress=False).slices


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_quarter_of_full_recomputation_is_met(name):
    """A quarter of what full recomputation needs is met, with the plain gradients to rounding."""
    loss, args = PROGRAMS[name]
    whole = jaxsub.measure(jax.checkpoint(loss), *args).temp_bytes
    smaller = jaxsub.sublinear(loss, budget=whole // 4)
    plan = smaller.plan(*args)
    assert plan.slices
    assert plan.measurement.temp_bytes <= whole // 4
    assert jaxsub.measure(smaller, *args).temp_bytes <= whole // 4
    got, wanted = (jax.jit(jax.value_and_grad(f))(*args) for f in (smaller, loss))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a - b).max() <= 3e-5 * max(1e-3, np.abs(b).max())


def test_a_head_in_slices_recomputes_nothing():
    """The plan of a loss head in slices says so: in how many, along what, and what it spares."""
    plan = jaxsub.plan(classify, HEAD, X, Y, budget="6MiB")
    assert "recompute  nothing outside of slices" in str(plan)
    assert "in slices  head: " in str(plan)
    assert " of 512 along axis 0 of `arg1`, spares up to " in " ".join(str(plan).split())
    assert jaxsub.measure(classify, HEAD, X, Y).temp_bytes > 4 * plan.measurement.temp_bytes


def test_slices_are_as_few_as_fit():
    """Slices read and write the weights each: under a larger budget there are fewer of them."""
    few, many = (jaxsub.plan(classify, HEAD, X, Y, budget=budget) for budget in ("16MiB", "6MiB"))
    assert 1 < few.slices[0].count < many.slices[0].count
    assert few.measurement.temp_bytes <= 16 * 2**20


@pytest.mark.parametrize("planner", ["optimal", "chen", "cheap", "recursive", "milp"])
def test_every_planner_uses_slices_where_it_is_asked_to(planner):
    """With `chunks=True` each planner executes the head in slices, without a budget too; else as the paper has it."""
    plans = [jaxsub.plan(classify, HEAD, X, Y, planner=planner, chunks=chunks, verify=False)
             for chunks in (True, "auto")]  # fmt: skip
    assert [len(plan.slices) for plan in plans] == [1, 0]
    sliced = jaxsub.sublinear(classify, plan=plans[0])
    assert 4 * jaxsub.measure(sliced, HEAD, X, Y).temp_bytes < jaxsub.measure(classify, HEAD, X, Y).temp_bytes


def test_convolutions_run_in_a_loop_on_a_cpu_only_where_nothing_else_fits():
    """XLA's CPU compiler makes gradients of convolutions slow in loops: recomputation that fits comes first."""
    kernels = [*KERNELS, *[jnp.asarray(RNG.normal(size=(3, 3, 32, 32)) / 9, jnp.float32)] * 3]
    natural = jaxsub.measure(jaxsub.sublinear(stem), kernels, IMAGES, Y)
    plan = jaxsub.plan(stem, kernels, IMAGES, Y, budget=natural.temp_bytes)
    assert plan.segments
    assert not plan.slices


def tiled(params, x, y, count):
    """The same loss as people chunk it by hand: its head's gradient made in the forward pass, a tile at a time."""

    def tile(x, w, y):
        logits = x @ w
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]).sum()

    def forward(x, w, y):
        def step(carry, tiles):
            total, dw = carry
            value, (dx, more) = jax.value_and_grad(tile, (0, 1))(tiles[0], w, tiles[1])
            return (total + value, dw + more), dx

        tiles = x.reshape(count, -1, WIDTH), y.reshape(count, -1)
        (total, dw), dx = jax.lax.scan(step, (jnp.zeros(()), jnp.zeros_like(w)), tiles)
        return total / len(y), (dx.reshape(x.shape) / len(y), dw / len(y))

    head = jax.custom_vjp(lambda x, w, y: forward(x, w, y)[0])
    head.defvjp(forward, lambda kept, c: (c * kept[0], c * kept[1], None))
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return head(x, params["head"], y)


@pytest.mark.parametrize("count", [4, 16])
def test_slices_are_as_good_as_tiles_by_hand(count):
    """In as many slices as a tiled loss by hand has tiles: memory within a tenth, as many FLOPs, the same gradients."""

    def by_hand(params, x, y):
        return tiled(params, x, y, count)

    sliced = jaxsub.sublinear(classify, budget="1GiB", chunks={"head": count})
    got, wanted = (jaxsub.measure(f, HEAD, X, Y).temp_bytes for f in (sliced, by_hand))
    assert got <= 1.1 * wanted
    flops = [jaxpr_flops(jax.make_jaxpr(jax.grad(f))(HEAD, X, Y)).arithmetic_flops for f in (sliced, by_hand)]
    assert flops[0] == flops[1]
    got, wanted = (jax.jit(jax.value_and_grad(f))(HEAD, X, Y) for f in (sliced, by_hand))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def residual(ws, x, y):
    """Layers that keep their width, over a batch of two long sequences."""
    for w in ws:
        x = x + jnp.tanh(jnp.tanh(x @ w) @ w)
    return jnp.mean((x - y) ** 2)


def test_a_slice_recomputes_where_it_must():
    """Where slices of the batch alone do not fit, each is planned itself and recomputes; gradients hold."""
    ws = [jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32) for _ in range(6)]
    x = jnp.asarray(RNG.normal(size=(2, 2048, WIDTH)), jnp.float32)
    alone = jaxsub.sublinear(residual, budget="8MiB", chunks={0: 2}).plan(ws, x, x * 0)
    assert alone.measurement.temp_bytes > 2**22
    smaller = jaxsub.sublinear(residual, budget="4MiB", chunks={0: 2})
    plan = smaller.plan(ws, x, x * 0)
    (run,) = plan.slices
    assert run.inside.segments
    assert not alone.slices[0].inside.segments
    assert 0 < run.extra_share < 2
    assert f"recomputes {run.extra_share:.0%} of a slice's forward pass: dot_general" in " ".join(str(plan).split())
    (opened,) = plan.steps
    assert (opened.kind, opened.length) == ("slices", 2)
    assert opened.recomputed_share == pytest.approx(run.extra_share, rel=0.05)
    assert plan.measurement.temp_bytes <= 2**22
    got, wanted = (jax.jit(jax.value_and_grad(f))(ws, x, x * 0) for f in (smaller, residual))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_slices_are_off_where_they_are_forbidden():
    """With `chunks=False` what only slices would meet is refused."""
    with pytest.raises(jaxsub.InfeasibleBudgetError):
        jaxsub.plan(classify, HEAD, X, Y, budget="6MiB", chunks=False)


def test_a_budget_that_fits_anyway_gets_no_slices():
    """Where the plain program fits nothing runs in slices."""
    assert jaxsub.plan(classify, HEAD, X, Y, budget="1GiB").slices == ()


@pytest.mark.parametrize("chunks", [{"head": 4}, {0: 5}, {np.int64(0): np.int64(5)}])
def test_slices_by_name_or_axis(chunks):
    """A named scope, or the whole function along the batch, runs in as many slices as asked."""
    smaller = jaxsub.sublinear(classify, verify=False, chunks=chunks)
    (found,) = smaller.plan(HEAD, X, Y).slices
    assert found.count == next(iter(chunks.values()))
    assert found.label == ("whole function" if 0 in chunks else "head")
    got, wanted = (jax.value_and_grad(f)(HEAD, X, Y) for f in (smaller, classify))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "chunks", "words"),
    [
        (
            contrast,
            {"pairs": 4},
            r"'pairs', which is not independent. `dot_general` at test_slicing.py:\d+ .*every part",
        ),
        (batch_norm, {0: 4}, r"dimension 0 of the batch, which is not independent. `sub` at test_slicing.py:\d+"),
        (batch_norm, {"tail": 4}, "no equation is in a named scope or function of that name. Scopes are 'norm'"),
        (batch_norm, {0: 1}, "must be an int of at least 2"),
        (batch_norm, {7: 2}, r"no argument that is read and not differentiated has it.* \(found `arg1` float32\["),
        (
            batch_norm,
            {1: 4},
            r"dimension 1 of the batch, which is not independent. `dot_general` at test_sl",
        ),
        (batch_norm, {-1: 2}, r"`dot_general` at test_slicing.py:\d+ .*: the axis ends there"),
        (mlp, {True: 2}, "no equation is in a named scope or function of that name"),
    ],
)
def test_what_cannot_be_sliced_is_said(loss, chunks, words):
    """An axis that is not independent is refused with the equation that forbids it and its line."""
    with pytest.raises(ChunksError, match=words):
        jaxsub.plan(loss, HIDDEN, X, Y, verify=False, chunks=chunks)


def test_chunks_takes_few_words():
    """Anything else that is given for `chunks` is refused at once."""
    with pytest.raises(ValueError, match='chunks is "auto", True, False or'):
        jaxsub.sublinear(classify, chunks="all")


def test_batch_statistics_are_never_sliced():
    """No run of a model with batch norm or a contrastive loss is sliced along its batch."""
    for loss, mixes in ((batch_norm, lambda n: n.scope == "norm" and n.primitive == "reduce_sum"), (contrast, bool)):
        program = trace(loss, (HIDDEN, X, Y), {})
        mixing = {n.index for n in program.graph.nodes if mixes(n)}
        found = [run for runs in find_runs(program, get_target(None), 2**16).sets() for run in runs]
        assert [run for run in found if run.length == ROWS and mixing <= set(range(run.start, run.stop))] == []


@pytest.mark.parametrize("is_quantized", [True, False])
def test_the_loss_alone_is_not_the_whole_function(is_quantized):
    """With a total over the batch in every layer, its labels and their errors are all that could be sliced."""

    def quantized(x):
        scale = jnp.max(jnp.abs(x))
        return x + lax.stop_gradient(jnp.round(x / scale) * scale - x)

    def loss(ws, x, y):
        for w in ws:
            x = x + jnp.tanh((quantized(x) if is_quantized else x) @ w) @ w.T
        return jnp.mean((x - y) ** 2)

    args = jnp.ones((6, 64, 256)), jnp.ones((2048, 64)), jnp.ones((2048, 64))
    program = trace(loss, args, {}, argnums=(0,))
    assert isinstance(slicing.batch_run(program, 2**40), slicing.NotIndependent) is is_quantized


def test_a_plan_in_slices_is_saved_and_loaded(tmp_path):
    """A plan in slices is the same after a file, and emits the same function."""
    plan = jaxsub.plan(classify, HEAD, X, Y, verify=False, chunks={"head": 4})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    again = jaxsub.sublinear(classify, plan=tmp_path / "plan.json")
    np.testing.assert_allclose(again(HEAD, X, Y), classify(HEAD, X, Y), rtol=1e-5)


def test_a_plan_in_slices_belongs_to_its_program():
    """A plan in slices is refused for another function."""
    plan = jaxsub.plan(classify, HEAD, X, Y, verify=False, chunks={"head": 4})
    with pytest.raises(jaxsub.PlanMismatchError):
        jaxsub.sublinear(mlp, plan=plan)(HIDDEN, X, Y)


def test_folding_twice_makes_the_same_program():
    """A program's runs in slices fold to the same equations every time, so that prices are found again."""
    program = trace(classify, (HEAD, X, Y), {})
    runs = jaxsub.plan(classify, HEAD, X, Y, verify=False, chunks={"head": 4}).slices
    assert with_slices(program, runs).fingerprint == with_slices(program, runs).fingerprint
    assert with_slices(program, runs).fingerprint != program.fingerprint
    assert with_slices(program, ()) is program


def test_second_derivatives_of_a_plan_in_slices():
    """Hessian products and tangents through a plan in slices are the plain program's."""
    params, x, y = {**HEAD, "head": HEAD["head"][:, :20]}, X[:24], Y[:24] % 20
    sliced = jaxsub.sublinear(classify, verify=False, chunks={"head": 4})
    products = (jax.jvp(jax.grad(lambda p, f=f: f(p, x, y)), (params,), (params,)) for f in (sliced, classify))
    got, wanted = products
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_classifier_of_few_rows_does_not_decide_how_many_slices():
    """Behind convolutions of many rows, a product of 64 rows and few FLOPs leaves 8 slices and more."""

    def loss(params, x):
        for kernel in params[0]:
            x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=DIMS))
        return jnp.mean(jnp.tanh(x.mean((1, 2)) @ params[1]) ** 2)

    shapes = [(3, 3, 3, 16), (3, 3, 16, 16)], (16, 1024), (64, 32, 32, 3)
    *params, x = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: isinstance(s[0], int)
    )
    program = trace(loss, (tuple(params), x), {})
    counts = {run.count for runs in find_runs(program, get_target(None), 1).sets() for run in runs if run.length == 64}
    assert max(counts) >= 8, counts


def test_the_least_of_a_whole_function_in_slices_recomputes_inside_each():
    """A budget of one byte is refused with the least of all plans inside slices, and that is met."""
    weights, x = [jnp.eye(64) * 0.9] * 24, jnp.ones((8192, 64))

    asked = dict(chunks={0: 8}, cache=False, progress=False)
    kept = jaxsub.plan(tanh_layers, weights, x, verify=False, **asked).prediction.temp_bytes
    with pytest.raises(jaxsub.InfeasibleBudgetError) as refused:
        jaxsub.plan(tanh_layers, weights, x, budget=1, verify=False, **asked)
    assert refused.value.least_bytes < 0.7 * kept
    plan = jaxsub.plan(tanh_layers, weights, x, budget=int(1.1 * refused.value.least_bytes), **asked)
    assert plan.slices[0].inside.segments
    assert plan.measurement.temp_bytes <= 1.1 * refused.value.least_bytes


def test_rows_of_a_slice_by_target():
    """As many rows as keep a device's arithmetic busy: 1,024 on an H100 in bfloat16, half as many in float32."""
    assert [least_rows(get_target("h100"), dtype) for dtype in ("bfloat16", "float32")] == [1024, 512]
    assert least_rows(get_target(None)) <= 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_in_loops_and_calls_have_the_dtype_of_most(dtype):
    """Most of the FLOPs are of the loop's products, whatever the head is in."""

    def loss(w, x):
        x = lax.scan(lambda x, w: (jax.jit(jnp.tanh)(x @ w), None), x, w)[0]
        return jnp.sum((x.astype("float16") @ w[0].astype("float16")).astype("float32"))

    args = jax.ShapeDtypeStruct((8, 32, 32), dtype), jax.ShapeDtypeStruct((64, 32), dtype)
    assert product_dtype(trace(loss, args, {})) == dtype


def test_where_nothing_else_fits_slices_have_a_tile_of_rows():
    """Each layer of an ensemble takes half of what is needed; its members or its rows are sliced all the same."""
    weights = [jax.ShapeDtypeStruct((8, 256, 256), "float32")] * 4
    members = jax.vmap(tanh_layers, (0, None))
    loss = lambda weights, x: jnp.mean(members(weights, x))  # noqa: E731
    args = weights, jax.ShapeDtypeStruct((1024, 256), "float32")
    plain = jaxsub.measure(loss, *args, target="h100").temp_bytes
    plan = jaxsub.plan(loss, *args, budget=plain // 4, target="h100", progress=False)
    assert plan.measurement.temp_bytes <= plain // 4
    assert plan.slices


@pytest.mark.parametrize("budget", [0.5, 0.1])
def test_small_programs_run_in_slices_where_nothing_else_fits(budget):
    """Slices of less than a mebibyte gain little; to a toy they are the difference between a plan and a refusal."""
    args = [jnp.eye(16)] * 6, jnp.ones((1024, 16))
    plan = jaxsub.plan(tanh_layers, *args, budget=budget, cache=False, progress=False)
    assert plan.slices
    assert plan.measurement.temp_bytes <= budget * plan.plain_measurement.temp_bytes


def test_slices_that_cost_more_time_than_recomputation_are_not_taken():
    """Half the batch at a time reads all weights twice and launches all kernels twice: little work is done again."""
    weights, shares = [jax.ShapeDtypeStruct((512, 512), "bfloat16")] * 16, {}
    for rows, budget in ((8192, 0.6), (2**20, 0.3)):
        args = weights, jax.ShapeDtypeStruct((rows, 512), "bfloat16")
        program = trace(tanh_layers, args, {}, argnums=0)
        (whole,) = next(runs for runs in find_runs(program, get_target("h100"), 2**16).sets() if runs[0].start == 0)
        shares[rows] = whole.slowed_share / (whole.count - 1)
        plan = jaxsub.plan(tanh_layers, *args, budget=budget, target="h100", verify=False, progress=False)
        assert bool(plan.slices) == (rows > 8192)
    assert shares[8192] > 10 * shares[2**20]


@pytest.mark.parametrize(("least", "is_first"), [(1.03, True), (1.5, False)])
def test_the_program_without_slices_comes_first_where_it_may_spare_much(least, is_first):
    """It is predicted a little too large, and to recompute less than plans in slices by more than a forward pass."""
    args = HEAD, X, Y
    program = trace(classify, args, {}, argnums=0)
    asked, budget = [], 2**20

    def whole(given, at_most, is_trusted, elsewhere=NOTHING):
        is_sliced = len(given.eqns) < len(program.eqns)
        needed = int(budget * (0.9 if is_sliced else least if is_trusted else 1.0))
        if not is_trusted:
            asked.append(is_sliced)
        if needed > at_most.n_bytes:
            raise InfeasibleBudgetError("", requested_bytes=at_most.n_bytes, least_bytes=needed)
        measured = None if is_trusted else Measurement(needed, 0, 0, 0, None, 0.0, "h100")
        prediction = Prediction(needed, 2.0 if is_sliced else 0.6, 1.0, 0, "by hand")
        return Plan("f", at_most, len(given.eqns), prediction=prediction, measurement=measured)

    plan = sliced_or_whole(program, get_target("h100"), Budget(budget), "auto", whole)
    assert asked[0] is not is_first
    assert not is_first or not plan.slices


@pytest.mark.parametrize(("sliced", "wanted"), [(0.9, [False, True]), (1.2, [False, True, False])])
def test_slices_that_are_expected_to_recompute_less_come_before_a_second_try(sliced, wanted):
    """Predictions were too low for the program without them; it is tried again where they do not fit either."""
    program = trace(classify, (HEAD, X, Y), {}, argnums=0)
    asked, budget = [], 2**20

    def whole(given, at_most, is_trusted, elsewhere=NOTHING):
        is_sliced = len(given.eqns) < len(program.eqns)
        needed = int(budget * ((0.5 if is_trusted else sliced) if is_sliced else 0.9))
        if not is_trusted:
            asked.append(is_sliced)
            if not is_sliced and elsewhere.is_better(1.3, 0.6):
                raise InfeasibleBudgetError("", requested_bytes=at_most.n_bytes, least_bytes=0)
        share = 0.0 if is_sliced else 0.04 if is_trusted and at_most.n_bytes == budget else 0.6
        plan = Plan("f", at_most, len(given.eqns), prediction=Prediction(needed, share, 1.0, 0, "by hand"))
        if needed > at_most.n_bytes:
            raise InfeasibleBudgetError("", requested_bytes=at_most.n_bytes, least_bytes=needed)
        return plan if is_trusted else plan.replace(measurement=Measurement(needed, 0, 0, 0, None, 0.0, "h100"))

    plan = sliced_or_whole(program, get_target("cpu"), Budget(budget), "auto", whole)
    assert bool(plan.slices) is (sliced < 1)
    assert [is_sliced for is_sliced, _ in itertools.groupby(asked)] == wanted


def test_slices_that_recompute_more_than_the_program_are_not_looked_at():
    """Where what a loop runs in slices is computed again, and the program as it stands costs less, none is planned."""

    def loss(ws, x):
        def step(x, w):
            return x + jnp.tanh(x @ w) @ w.T / jnp.sum(x), None

        return jnp.sum(jax.lax.scan(step, x, ws)[0] ** 2)

    program = trace(loss, (jnp.ones((4, 64, 4096)), jnp.ones((2048, 64))), {})
    seen = []

    def whole(given, at_most, is_trusted, elsewhere=NOTHING):
        seen.append(given is program)
        prediction = Prediction(2**20, 0.4, 1.0, 0, "analytic")
        return Plan("f", at_most, len(given.eqns), prediction=prediction)

    (runs, *_) = find_runs(program, get_target("cpu"), 2**20).sets()
    assert min(run.extra_share for run in runs) > 0.4
    assert not sliced_or_whole(program, get_target("cpu"), Budget(2**20), "auto", whole).slices
    assert all(seen)


@pytest.mark.parametrize(
    ("least", "predicted", "is_compiled"), [(0.95, 0.95, False), (0.5, 0.95, True), (0.95, 0.5, True)]
)
def test_slices_that_are_predicted_to_need_no_less_than_what_was_refused_are_not_compiled(
    least, predicted, is_compiled
):
    """The program as it is needs more than was predicted: slices help where they lower the predicted least.

    Where it needs far more, predictions say nothing.
    """
    program = trace(classify, (HEAD, X, Y), {}, argnums=0)
    asked, budget = [], 2**20

    def whole(given, at_most, is_trusted, elsewhere=NOTHING):
        is_sliced = len(given.eqns) < len(program.eqns)
        needed = int(budget * ((least if is_sliced else predicted) if is_trusted else 1.1))
        if not is_trusted:
            asked.append(is_sliced)
        if needed > at_most.n_bytes:
            raise InfeasibleBudgetError("", requested_bytes=at_most.n_bytes, least_bytes=needed)
        prediction = Prediction(needed, 0.5 if is_sliced else 0.0, 1.0, 0, "analytic")
        return Plan("f", at_most, len(given.eqns), prediction=prediction)

    with pytest.raises(InfeasibleBudgetError):
        sliced_or_whole(program, get_target("h100"), Budget(budget), "auto", whole)
    assert asked[0] is False
    assert any(asked) is is_compiled


def test_a_refusal_names_what_the_program_needs_without_slices():
    """Slices that need far more than was predicted say nothing of it: what it is predicted to need is compiled."""
    program = trace(classify, (HEAD, X, Y), {}, argnums=0)
    budget = 2**20

    def whole(given, at_most, is_trusted, elsewhere=NOTHING):
        needed = int(budget * (2.0 if len(given.eqns) == len(program.eqns) else 1.9 if is_trusted else 4.0))
        if needed > at_most.n_bytes:
            raise InfeasibleBudgetError("", requested_bytes=at_most.n_bytes, least_bytes=needed)
        return Plan("f", at_most, len(given.eqns), prediction=Prediction(needed, 0.5, 1.0, 0, "analytic"))

    with pytest.raises(InfeasibleBudgetError) as refused:
        sliced_or_whole(program, get_target("h100"), Budget(budget), "auto", whole)
    assert refused.value.least_bytes == 2 * budget


@pytest.mark.parametrize(("predicted", "n_priced", "n_compiled"), [(1.3, 4, 1), (2.1, 2, 0)])
def test_a_refusal_compiles_one_of_the_sets_that_are_expected_to_need_as_much(predicted, n_priced, n_compiled):
    """By how the first one erred the others need as much.

    Where more slices need no less than few, nor than the program without, no more are priced: the peak is elsewhere.
    """
    weights, x = [jax.ShapeDtypeStruct((256, 256), "float32")] * 6, jax.ShapeDtypeStruct((8192, 256), "float32")
    program = trace(tanh_layers, (weights, x), {}, argnums=0)
    priced, compiled, budget = set(), set(), 2**20

    def whole(given, at_most, is_trusted, elsewhere=NOTHING):
        is_sliced = len(given.eqns) < len(program.eqns)
        needed = int(budget * ((predicted if is_trusted else 1.2 * predicted) if is_sliced else 2.0))
        if is_sliced:
            (priced if is_trusted else compiled).add(given.fingerprint)
        plan = Plan("f", at_most, len(given.eqns), prediction=Prediction(needed, 0.5, 1.0, 0, "analytic"))
        if needed > at_most.n_bytes:
            least = None if is_trusted else plan.replace(prediction=Prediction(needed / 1.2, 0.5, 1.0, 0, "analytic"))
            raise InfeasibleBudgetError("", requested_bytes=at_most.n_bytes, least_bytes=needed, plan=least)
        return plan

    with pytest.raises(InfeasibleBudgetError):
        sliced_or_whole(program, get_target("h100"), Budget(budget), "auto", whole)
    assert (len(priced), len(compiled)) == (n_priced, n_compiled)


def test_a_slice_recomputes_as_little_as_the_budget_leaves_room_for():
    """In slices gradients are added to sums: they hold nothing until then, and wait for barriers to be added."""
    weights, x = [jnp.eye(64) * 0.9] * 24, jnp.ones((256, 64))
    asked = dict(chunks={0: 4}, cache=False, progress=False)
    shares, kept = [], jaxsub.plan(tanh_layers, weights, x, **asked, budget=2**30).measurement.temp_bytes
    for share in (0.8, 0.6, 0.45):
        plan = jaxsub.plan(tanh_layers, weights, x, **asked, budget=int(share * kept))
        assert plan.measurement.temp_bytes <= share * kept
        shares.append(plan.slices[0].extra_share)
    print(", ".join(f"{share:.2f}" for share in shares), "of a forward pass at .8, .6 and .45 of the memory")
    assert shares == sorted(shares)
    assert shares[0] < 0.4
    assert shares[-1] < 1


def scanned_layers(weights, x):
    """Layers of attention and an MLP in a scan."""

    def layer(x, w):
        h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = (h @ w[i] for i in range(3))
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / 6, -1) @ v
        return x + jax.nn.gelu(x @ w[3]) @ w[4], None

    return jnp.mean(lax.scan(layer, x, weights)[0] ** 2)


def test_what_one_slice_may_need_is_found_by_what_all_are_predicted_to_need(tmp_path):
    """What all slices need does not fall with what one is planned to need, byte for byte."""
    shapes = [(32, 32)] * 3 + [(32, 128), (128, 32)]
    weights, x = [random.normal(random.key(i), (8, *s)) / 8 for i, s in enumerate(shapes)], jnp.ones((8, 64, 32))
    asked = dict(chunks={0: 4}, cache=tmp_path, progress=False)
    shares, kept = [], jaxsub.plan(scanned_layers, weights, x, **asked, budget=2**30).measurement.temp_bytes
    for share in (0.4, 0.3):
        plan = jaxsub.plan(scanned_layers, weights, x, **asked, budget=int(share * kept))
        assert plan.measurement.temp_bytes <= share * kept
        shares.append(plan.slices[0].extra_share)
    print(", ".join(f"{share:.2f}" for share in shares), "of a forward pass at .4 and .3 of the memory")
    assert shares[0] < 0.3
    assert shares[1] < 0.7


@pytest.mark.parametrize(("rows", "is_even"), [(4096, True), (4093, False)])
def test_slices_are_of_one_size_where_the_axis_allows_it(rows, is_even):
    """What is left over would run beside the slices, with sums of gradients of its own."""
    program = trace(tanh_layers, ([jnp.ones((32, 32))] * 3, jnp.ones((rows, 32))), {}, argnums=0)
    counts = {run.count for runs in find_runs(program, get_target("cpu"), 1).sets() for run in runs if run.start == 0}
    assert max(counts) > 64
    assert (max(rows % count for count in counts) == 0) is is_even


def test_slices_are_of_one_size_only_where_they_hold_less():
    """Of 134 rows two slices would hold twice what four do, of which the last is smaller, and hold no copies."""
    program = trace(classify, (HEAD, X[:134], Y[:134]), {}, argnums=0)
    counts = {
        run.count for runs in find_runs(program, get_target("cpu"), 1).sets() for run in runs if run.label == "head"
    }
    assert 4 in counts
    assert 2 not in counts


def test_slices_of_one_size_need_less():
    """In 128 slices residual layers take less than .6 of what they do in 133, one of which is smaller."""

    def loss(blocks, x):
        for up, down in blocks:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    args = [(jnp.ones((32, 1024)), jnp.ones((1024, 32)))] * 3, jnp.ones((4096, 32))
    even, uneven = (jaxsub.plan(loss, *args, chunks={0: n}, verify=True, budget="8MiB", cache=False).measurement
                    for n in (128, 133))  # fmt: skip
    assert even.temp_bytes < 0.6 * uneven.temp_bytes


def test_a_slice_costs_its_weights_and_its_kernels():
    """As a share of a forward pass: the weights' traffic over the rows, and all kernels of three passes."""
    args = [jax.ShapeDtypeStruct((512, 512), "bfloat16")] * 16, jax.ShapeDtypeStruct((8192, 512), "bfloat16")
    h100 = get_target("h100")
    time = slice_time(trace(tanh_layers, args, {}, argnums=0), h100, "bfloat16")
    flops = 2.0 * 8192 * 512 * 512
    weights = flops / h100.rate("bfloat16", is_matmul=True) * busy_rows(h100) / 8192
    assert time.share(flops, 8192, 0) * time.forward_seconds == pytest.approx(3 * weights)
    assert time.share(0.0, 8192, 2) * time.forward_seconds == pytest.approx(3 * 2 * KERNEL_SECONDS)
    cpu = slice_time(trace(tanh_layers, args, {}, argnums=0), get_target("cpu"), "float32")
    enough = least_rows(get_target("cpu"), "float32")
    assert cpu.share(flops, 8 * enough, 2, 8) == 0.0
    assert cpu.share(flops, 8 * enough, 2, 16) > 0.0
    assert NO_TIME.share(flops, 8, 2) == 0.0


def test_axes_are_followed_from_the_wide_value(monkeypatch):
    """Of a long run only the dimensions that the wide value's come from are tried, not those of all weights."""
    layers = 300

    def loss(params, x):
        x = jnp.tanh(x @ HIDDEN[0]) @ HIDDEN[1]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.sum(x, 0) ** 2)  # not along the batch

    tried = []
    program = trace(loss, (HEAD["layers"][:1] * layers, X), {})
    follow = slicing.follow
    monkeypatch.setattr(slicing, "follow", lambda *args: tried.append(args[3:]) or follow(*args))
    assert find_runs(program, get_target(None), 2**20).runs
    assert 0 < len(tried) < layers / 2


def narrow_between(ws, x):
    """Layers whose hidden values are four times what they hand on, and labels beside that, from which none is free."""
    x, labels = x
    for up, down in ws:
        x = lax.cumsum(x) / ROWS  # mixes the rows
        x = jnp.sin(x) + jax.nn.gelu(x @ up) @ down
    return jnp.mean((jnp.sum(x, 1) - labels) ** 2)


def unrolled_shapes(depth):
    ws = [[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 256), (256, 64))]] * depth
    return ws, (jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.float32))


def test_each_layer_of_an_unrolled_network_is_a_run():
    """A quarter of a hidden value and some labels are alive between two layers: there a run ends.

    A run to the end of the program must carry most of what the program makes, not the first layer's hidden units only.
    """
    depth = 6
    program = trace(narrow_between, unrolled_shapes(depth), {})
    runs = find_runs(program, get_target("cpu"), 2**22).runs
    products = [[e.primitive.name for e in program.eqns[r.start : r.stop]].count("dot_general") for r in runs]
    assert products == [2] * depth


@pytest.mark.skipif(compat.joins_zeros_of_loops(), reason="one kernel makes the zeros of all layers' loops")
def test_each_layer_in_slices_needs_less_than_regions():
    args, options = unrolled_shapes(6), {"target": "h100", "progress": False, "cache": False}
    plain = jaxsub.measure(narrow_between, *args, target="h100").temp_bytes
    with pytest.raises(InfeasibleBudgetError) as refused:
        jaxsub.plan(narrow_between, *args, budget=1, chunks=False, **options)
    least = refused.value.least_bytes
    plan = jaxsub.plan(narrow_between, *args, budget=int(0.7 * least), **options)
    assert len(plan.slices) == 6
    needed = plan.measurement.temp_bytes
    print(f"{least / plain:.3f} of plain's memory is the least with regions, {needed / plain:.3f} needed in slices")


def test_two_batches_that_are_compared_are_sliced_together():
    """Preferences (DPO) between two batches of answers fit a quarter of plain's memory, and nothing is recomputed."""

    def log_probability(params, x, y):
        logits = jnp.tanh(x @ params["layers"][0]) @ params["head"]
        return (jnp.take_along_axis(logits, y[:, None], 1)[:, 0] - jax.nn.logsumexp(logits, -1)).reshape(32, -1).sum(1)

    def preferences(params, x, y, rejected, z):
        return -jax.nn.log_sigmoid(log_probability(params, x, y) - log_probability(params, rejected, z)).mean()

    plan = jaxsub.plan(preferences, HEAD, X, Y, jnp.sin(X), (Y + 1) % CLASSES, budget=0.25, cache=False)
    assert [run.extra_share for run in plan.slices] == [0.0]
    assert plan.planner == "plain"
    assert plan.measurement.temp_bytes <= 0.25 * plan.plain_measurement.temp_bytes


def network(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def summed_in_turn(ws, x, z):
    return (network(ws, x) ** 2).mean() + (network(ws, z) ** 2).mean()


def summed_at_the_end(ws, x, z):
    real, generated = network(ws, x).sum(1), network(ws, z).sum(1)
    return jax.nn.softplus(-real).mean() + jax.nn.softplus(generated).mean()


@pytest.mark.parametrize(("loss", "again"), [(summed_in_turn, [0, 0]), (summed_at_the_end, [0.5, 0])])
def test_each_of_two_batches_has_slices_of_its_own(loss, again):
    """Losses of two batches that are added up fit a tenth of plain's memory."""
    ws, x, z = [jnp.eye(32) * 0.9] * 8, jnp.asarray(RNG.normal(size=(4096, 32)), jnp.float32), jnp.ones((3000, 32))
    plain = jaxsub.measure(loss, ws, x, z).temp_bytes
    planned = jaxsub.sublinear(loss, budget=plain // 10, cache=False, progress=False)
    plan = planned.plan(ws, x, z)
    assert plan.measurement.temp_bytes <= plain // 10
    assert [round(run.extra_share, 1) for run in plan.slices] == pytest.approx(again, abs=0.11)
    chex.assert_trees_all_close(jax.grad(planned)(ws, x, z), jax.grad(loss)(ws, x, z), rtol=1e-4, atol=1e-7)


def test_as_a_last_resort_there_are_as_many_slices_as_the_budget_asks_for():
    """Not only as many as there are rows: in slices of one XLA copies all of the batch."""
    ws, x, z = [jnp.eye(32) * 0.9] * 8, jnp.asarray(RNG.normal(size=(4096, 32)), jnp.float32), jnp.ones((3000, 32))
    budget = jaxsub.measure(summed_at_the_end, ws, x, z).temp_bytes * 6 // 100
    plan = jaxsub.plan(summed_at_the_end, ws, x, z, budget=budget, cache=False, progress=False)
    assert plan.measurement.temp_bytes <= budget
    assert all(run.length // run.count > 1 for run in plan.slices)


def test_as_a_last_resort_little_is_kept_whole():
    """Where much of the budget is kept of a smaller batch, runs end in front of what reads both."""
    ws, x, z = [jnp.eye(32) * 0.9] * 8, jnp.ones((4096, 32)), jnp.ones((1500, 32))
    program, target, n_bytes = trace(summed_at_the_end, (ws, x, z), {}, argnums=0), get_target("cpu"), 4 * 2**20
    assert slicing.find_runs(program, target, n_bytes).kept_whole() > n_bytes // 4
    last = slicing.find_runs(program, target, n_bytes, is_last=True)
    assert last.runs
    assert last.kept_whole() <= n_bytes // 8


def language_model(params, tokens):
    """A scanned RNN over time-major tokens."""

    def step(h, token):
        h = jnp.tanh(params["table"][token] @ params["in"] + h @ params["hidden"])
        return h, h

    _, hs = lax.scan(step, jnp.zeros((tokens.shape[1], 64)), tokens)
    return (jax.nn.logsumexp(hs @ params["table"].T, -1) ** 2).mean()


RECURRENT = {"table": (120, 64), "in": (64, 64), "hidden": (64, 64)}


def recurrent():
    """Weights of `language_model`, and a batch of 32 sentences."""
    weights = {name: random.normal(random.key(i), shape) / 8 for i, (name, shape) in enumerate(RECURRENT.items())}
    return weights, random.randint(random.key(3), (24, 32), 0, 120)


@pytest.mark.parametrize("budget", [640_000, 560_000, 480_000])
def test_no_budget_is_refused_that_is_larger_than_one_that_is_met(budget):
    """The first of the sets of slices that are a last resort needs more than is predicted of it; another is tried."""
    plan = jaxsub.plan(language_model, *recurrent(), budget=budget, cache=False)
    assert plan.measurement.temp_bytes <= budget


def test_what_a_loop_reads_of_another_batch_is_sliced_with_it():
    """A decoder reads tokens of its own: made whole in each slice, their products would be computed eight times."""

    def translate(params, source, target):
        def step(h, token):
            h = jnp.tanh(params["table"][token] @ params["in"] + h @ params["hidden"])
            return h, h

        h, _ = lax.scan(step, jnp.zeros((source.shape[1], 64)), source)
        _, hs = lax.scan(step, h, target[:-1])
        return (jax.nn.logsumexp(hs @ params["table"].T, -1) ** 2).mean()

    weights, tokens = recurrent()
    planned = jaxsub.sublinear(translate, chunks={1: 8}, cache=False)
    flops = [
        jaxpr_flops(jax.make_jaxpr(jax.grad(f))(weights, tokens, tokens + 1).jaxpr).total for f in (translate, planned)
    ]
    print(f"{flops[1] / flops[0]:.2f} of plain's FLOPs")
    assert flops[1] < 1.4 * flops[0]


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_the_gradient_of_a_large_table_is_where_it_is_returned(target):
    """It is added up in the output's memory, and does not keep a loss from running in slices."""
    params = {"table": jnp.ones((50_000, 32)), "out": random.normal(random.key(1), (32, 1000)) / 8}
    tokens, labels = random.randint(random.key(2), (512, 20), 0, 500), random.randint(random.key(3), (512,), 0, 1000)

    def loss(params, tokens, labels):
        logits = jnp.tanh(params["table"][tokens].mean(1)) @ params["out"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    def by_hand(params, tokens, labels):
        rows = tokens.reshape(8, 64, 20), labels.reshape(8, 64)
        return lax.map(jax.checkpoint(lambda rows: loss(params, *rows)), rows).mean()

    arguments = params, tokens, labels
    budget = 2 * jaxsub.measure(by_hand, *arguments, target=target).temp_bytes
    plan = jaxsub.plan(loss, *arguments, budget=budget, cache=False, progress=False, target=target)
    assert plan.measurement.temp_bytes <= budget
    assert sum(run.extra_share for run in plan.slices) < 0.01


def test_more_slices_come_before_slices_that_recompute():
    """As few slices as may fit need a little more than predicted: twice as many do not, and recompute nothing."""

    def network(params, x):
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        return x @ params[-1]

    def loss(params, x, y, probe):
        error = lambda params: ((network(params, x) - y) ** 2).mean()  # noqa: E731
        curvature = jax.jvp(jax.grad(error), (params,), (probe,))[1]
        return error(params) + 1e-2 * sum((a * b).sum() for a, b in zip(probe, curvature, strict=True))

    def by_hand(params, x, y, probe):
        rows = x.reshape(8, 256, 32), y.reshape(8, 256, 1)
        return lax.map(jax.checkpoint(lambda rows: loss(params, *rows, probe)), rows).mean()

    shapes = (32, 96), (96, 96), (96, 96), (96, 1)
    params = [random.normal(random.key(i), shape) / 10 for i, shape in enumerate(shapes)]
    arguments = params, jnp.ones((2048, 32)), jnp.ones((2048, 1)), [jnp.sign(w) for w in params]
    budget = jaxsub.measure(by_hand, *arguments).temp_bytes
    plan = jaxsub.plan(loss, *arguments, budget=budget, cache=False, progress=False)
    assert plan.measurement.temp_bytes <= budget
    assert sum(run.extra_share for run in plan.slices) < 0.01


def regressed(params, x, y):
    """A ridge regression for each example, on features of a network."""
    h = jnp.tanh(jnp.tanh(x @ params["in"]) @ params["out"])
    system = jnp.einsum("bnd,bne->bde", h, h) / h.shape[1] + 0.1 * jnp.eye(12)
    solution = jnp.linalg.solve(system, jnp.einsum("bnd,bn->bd", h, y)[..., None] / h.shape[1])[..., 0]
    return ((jnp.einsum("bnd,bd->bn", h, solution) - y) ** 2).mean()


def whitened(params, x, y):
    """A Gaussian likelihood whose covariance all examples share."""
    h = jnp.tanh(jnp.tanh(x @ params["in"]) @ params["out"]).mean(1)
    factor = jnp.tril(params["out"][:12]) + 4 * jnp.eye(12)
    return (jax.vmap(lambda v: jax.scipy.linalg.solve_triangular(factor, v, lower=True))(h) ** 2).mean() + y.mean()


@pytest.mark.parametrize("loss", [regressed, whitened])
def test_linear_systems_run_in_slices(loss):
    """What chunks of the batch by hand need is met, and nothing is recomputed."""
    params = {"in": random.normal(random.key(0), (16, 64)) / 4, "out": random.normal(random.key(1), (64, 12)) / 8}
    x, y = random.normal(random.key(2), (128, 64, 16)), random.normal(random.key(3), (128, 64))

    def by_hand(params, x, y):
        rows = (x.reshape(8, 16, 64, 16), y.reshape(8, 16, 64))
        return lax.map(jax.checkpoint(lambda rows: loss(params, *rows)), rows).mean()

    budget = jaxsub.measure(by_hand, params, x, y).temp_bytes
    planned = jaxsub.sublinear(loss, budget=budget, cache=False, progress=False)
    plan = planned.plan(params, x, y)
    assert plan.measurement.temp_bytes <= budget
    assert sum(run.extra_share for run in plan.slices) == 0
    chex.assert_trees_all_close(jax.grad(planned)(params, x, y), jax.grad(loss)(params, x, y), rtol=1e-3, atol=1e-5)


def test_two_batches_with_terms_of_their_own_run_in_slices_together():
    """A penalty on the slope at real examples, and a term of fake ones: what microbatches by hand need is met."""

    def score(params, x):
        for w in params[:-1]:
            x = jax.nn.leaky_relu(x @ w, 0.2)
        return (x @ params[-1])[..., 0]

    def loss(params, real, fake):
        slope = jax.grad(lambda x: score(params, x).sum())(real)
        terms = jax.nn.softplus(-score(params, real)), jax.nn.softplus(score(params, fake)), jnp.sum(slope**2, -1)
        return sum(term.mean() for term in terms)

    def by_hand(params, real, fake):
        step = jax.checkpoint(lambda total, rows: (total + loss(params, *rows), None))
        return lax.scan(step, 0.0, (real.reshape(16, -1, 32), fake.reshape(16, -1, 32)))[0] / 16

    shapes = (32, 96), (96, 96), (96, 1)
    params = [random.normal(random.key(i), shape) / 8 for i, shape in enumerate(shapes)]
    batches = random.normal(random.key(3), (4096, 32)), random.normal(random.key(4), (4096, 32))
    budget = jaxsub.measure(by_hand, params, *batches).temp_bytes
    planned = jaxsub.sublinear(loss, budget=budget, cache=False, progress=False)
    plan = planned.plan(params, *batches)
    assert plan.measurement.temp_bytes <= budget
    assert sum(run.extra_share for run in plan.slices) < 0.01
    chex.assert_trees_all_close(
        jax.grad(planned)(params, *batches), jax.grad(loss)(params, *batches), rtol=1e-4, atol=1e-6
    )


def test_layers_in_front_of_a_loss_that_compares_examples_are_one_run():
    """Two towers, and similarities of all pairs: chunks of each whole tower by hand need less than those of layers."""

    def tower(weights, x):
        for up, down in weights:
            x = x + jax.nn.gelu(jax.nn.standardize(x, -1) @ up) @ down
        return x

    def make(run):
        def loss(params, images, texts, mask):
            a = run(params["images"], images).mean(1)
            b = (run(params["texts"], texts) * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
            scores = a @ b.T
            return -jnp.diag(jax.nn.log_softmax(scores, 1)).mean() - jnp.diag(jax.nn.log_softmax(scores, 0)).mean()

        return loss

    def in_chunks(weights, x):
        rows = x.reshape(16, -1, *x.shape[1:])
        return lax.map(jax.checkpoint(lambda rows: tower(weights, rows)), rows).reshape(x.shape)

    def layers(seed):
        keys = random.split(random.key(seed), 6)
        return [(random.normal(k, (32, 256)) / 6, random.normal(k, (256, 32)) / 16) for k in keys]

    params = {"images": layers(0), "texts": layers(1)}
    mask = (jnp.arange(8) < random.randint(random.key(2), (256, 1), 1, 9)).astype(jnp.float32)
    args = params, *(random.normal(random.key(i), (256, 8, 32)) for i in (3, 4)), mask
    budget = jaxsub.measure(make(in_chunks), *args).temp_bytes
    planned = jaxsub.sublinear(make(tower), budget=budget, cache=False, progress=False)
    assert planned.plan(*args).measurement.temp_bytes <= budget
    chex.assert_trees_all_close(jax.grad(planned)(*args), jax.grad(make(tower))(*args), rtol=1e-3, atol=1e-5)


def test_a_recurrent_network_is_not_sliced_into_rows():
    """Each step of a slice of few rows reads the weights for little: where regions fit they are taken, else slices."""

    def recurrent(w, xs):
        def step(h, x):
            a, b, c = jnp.split(x @ w + h @ w, 3, -1)
            h = jnp.tanh(a) * h + jax.nn.sigmoid(b) * jnp.sin(c)
            return h, jnp.sum(h**2)

        return jnp.mean(lax.scan(step, jnp.zeros_like(xs, shape=xs.shape[1:]), xs)[1])

    args = jax.ShapeDtypeStruct((256, 768), jnp.float32), jax.ShapeDtypeStruct((128, 64, 256), jnp.float32)
    program, cpu = trace(recurrent, args, {}, argnums=0), get_target("cpu")
    found, last = (
        {run for runs in find_runs(program, cpu, 1, is_last).sets() for run in runs} for is_last in (False, True)
    )
    assert {run.count for run in found} == {2}
    assert not any(run.slowed_share for run in found)
    assert {run.count for run in last} == {64}
    assert all(run.slowed_share > 1 for run in last)
    assert all(run.count <= 2 for run in jaxsub.plan(recurrent, *args, budget=0.5, cache=False).slices)


@pytest.mark.parametrize(("equations", "known", "is_worth"), [(100, 0.05, True), (5000, 0.2, False), (5000, 0.4, True)])
def test_the_longer_a_run_the_more_it_must_spare(equations, known, is_worth):
    """The gradients of a run in slices are traced only where enough recomputation is left to be spared."""
    assert (known > least_gain((Slices(0, equations, 0, 0, 2),))) == is_worth
    assert least_gain(()) == 0.0


def test_a_gradient_that_does_not_scale_is_paid_for():
    """Behind a rule that clips, a slice's gradient cannot be made in the forward pass: all of that is run again."""
    clipped = jax.custom_vjp(lambda x: x)
    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
    weights, x = [jnp.eye(64) * 0.9] * 8, jnp.ones((4096, 64))
    for rule, share in ((lambda x: x, 0.0), (clipped, 1.0)):
        loss = lambda ws, x, rule=rule: tanh_layers(ws, rule(x))  # noqa: E731
        (run,) = jaxsub.plan(loss, weights, x, chunks={0: 4}, verify=False, progress=False).slices
        assert run.extra_share == pytest.approx(share, abs=0.01)
        program = trace(loss, (weights, x), {}, argnums=0)
        (found,) = next(runs for runs in find_runs(program, get_target("cpu"), 2**16).sets() if runs[0].start == 0)
        assert found.extra_share == pytest.approx(share, abs=0.01)


def test_a_batch_of_no_rows_needs_nothing():
    """Products of arrays without elements cost nothing, whatever their rows are."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    ws, x = [jnp.eye(64)] * 12, jnp.zeros((0, 64))
    found = jax.grad(jaxsub.sublinear(loss, budget=0.9, cache=False))(ws, x)
    for got, plain in zip(found, jax.grad(loss)(ws, x), strict=True):
        np.testing.assert_array_equal(got, plain)
