"""The update inside the backward scan: the same step, one layer's gradients at a time, what cannot move is named."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax, random

import jaxsub
from jaxsub.core.decisions import Loop
from jaxsub.devices.aot import require_packages
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import trace
from jaxsub.step.fused_update import Findings, donated_leaves, with_fused_updates

LAYERS, WIDTH, BATCH = 12, 32, 16
STACK_BYTES = 4 * LAYERS * WIDTH * WIDTH * 4
KEYS = random.split(random.key(0), 4)
TOKENS = random.randint(KEYS[3], (BATCH,), 0, 50)


def params():
    return {
        "embedding": random.normal(KEYS[0], (50, WIDTH)),
        "layers": {
            "up": random.normal(KEYS[1], (LAYERS, WIDTH, 4 * WIDTH)) / 16,
            "down": random.normal(KEYS[2], (LAYERS, 4 * WIDTH, WIDTH)) / 32,
            "scale": jnp.ones((LAYERS, WIDTH)),
        },
    }


def loss(params, tokens):
    @jax.checkpoint
    def layer(x, p):
        return x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, params["embedding"][tokens], params["layers"])
    return jnp.mean(x**2)


def masked():
    return optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p))


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": masked,
    "lion": lambda: optax.lion(1e-3),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-1e-2)),
}
REFUSED = {
    "clip_by_global_norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), "clip_fn"),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(1e-2), 3), "`cond`"),
    "accumulation": (lambda: optax.MultiSteps(optax.adam(1e-2), 4), "`cond`"),
}


def step_of(optimizer, loss=loss, metric=False):
    def step(params, state, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradient, state, params)
        more = (jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient))),) if metric else ()
        return optax.apply_updates(params, updates), state, value, *more

    return step


def compiled(step, args, donate=(0, 1), **options):
    lowered = jax.jit(step, donate_argnums=donate).lower(*args)
    return lowered.compile({**compat.cpu_compiler_options(), **options} or None)


def fused(step, donate=(0, 1)):
    findings = Findings()
    return with_fused_updates(step, donated_leaves(donate, ()), findings), findings


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_the_same_and_gradients_stand_for_one_layer(name):
    """Weights and state are the plain step's to the bit, all aliased, with a fraction of its temporaries."""
    optimizer = OPTIMIZERS[name]()
    args = params(), optimizer.init(params()), TOKENS
    step, findings = fused(step_of(optimizer))
    # without fused multiply-adds: which of two products LLVM contracts with their sum is not the step's to say
    exact = {"xla_cpu_max_isa": "AVX"}
    plain, ours = compiled(step_of(optimizer), args, **exact), compiled(step, args, **exact)
    (scan,) = findings.fused
    assert (scan.steps, scan.n_gradients, scan.copied_bytes) == (LAYERS, 3, 0)
    assert scan.gradient_bytes == 2 * STACK_BYTES + 4 * LAYERS * WIDTH
    before, after = plain.memory_analysis(), ours.memory_analysis()
    assert after.alias_size_in_bytes == before.alias_size_in_bytes
    assert after.temp_size_in_bytes < before.temp_size_in_bytes - scan.gradient_bytes / 2
    expected = found = args
    for _ in range(3):
        expected = (*plain(*copied(expected[:2]), TOKENS),)
        found = (*ours(*copied(found[:2]), TOKENS),)
        if name == "schedule":  # XLA multiplies by the rate, which is no constant, before or after something else
            chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)
        else:
            chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_gradients_first_is_named(name):
    """The step stays as it is; the bytes of the gradients that stand whole, and who reads them, are said."""
    make, word = REFUSED[name]
    args = params(), make().init(params()), TOKENS
    step, findings = fused(step_of(make()))
    lowered = [jax.jit(f, donate_argnums=(0, 1)).lower(*args).as_text() for f in (step, step_of(make()))]
    assert lowered[0] == lowered[1]
    assert findings.fused == ()
    (stands,) = findings.whole
    assert stands.n_bytes == 2 * STACK_BYTES + 4 * LAYERS * WIDTH
    assert word in stands.reason
    assert "needs all of them" in stands.reason


def test_a_logged_norm_is_summed_in_the_scan():
    """A metric that reads all gradients and that no update reads does not keep them whole."""
    optimizer = optax.adam(1e-2)
    args = params(), optimizer.init(params()), TOKENS
    step, findings = fused(step_of(optimizer, metric=True))
    ours, plain = compiled(step, args), compiled(step_of(optimizer, metric=True), args)
    assert len(findings.fused) == 1
    assert ours.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes - STACK_BYTES
    chex.assert_trees_all_close(ours(*copied(args)), plain(*copied(args)), rtol=1e-5)


def test_gradients_added_up_over_micro_batches_stand_whole():
    """A scan that accumulates them is named with its count and bytes; one that trains in each step is not."""
    weights, micro = params(), TOKENS.reshape(4, -1)
    optimizer = optax.adam(1e-2)
    plain = step_of(optimizer)

    def accumulating(params, state, micro):
        add = lambda total, tokens: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, tokens)), None)  # noqa: E731
        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), micro)
        updates, state = optimizer.update(total, state, params)
        return optax.apply_updates(params, updates), state

    def training(params, state, micro):
        return lax.scan(lambda carry, tokens: (plain(*carry, tokens)[:2], None), (params, state), micro)[0]

    args = weights, optimizer.init(weights), micro
    new, findings = fused(accumulating)
    chex.assert_trees_all_equal(jax.jit(new)(*args), jax.jit(accumulating)(*args))
    (stands,) = findings.whole
    assert stands.n_bytes == sum(x.nbytes for x in jax.tree.leaves(weights))
    assert "adds them up over 4 steps" in stands.reason
    new, findings = fused(training)
    jax.eval_shape(new, *args)
    assert findings.whole == ()


def test_returned_gradients_stand_whole():
    """A step that returns its gradients keeps them, and is left as it is."""

    def step(params, tokens):
        gradient = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), gradient

    run, findings = fused(step, donate=(0,))
    chex.assert_trees_all_equal(jax.jit(run)(params(), TOKENS), jax.jit(step)(params(), TOKENS))
    assert findings.fused == ()


def test_only_gradients_that_an_equation_reads_stand_whole():
    """What forbids it may stand inside another equation: gradients that neither reads are updated in the scan."""

    def step(params, tokens, is_mixed):
        gradient = jax.grad(loss)(params, tokens)
        layers = gradient["layers"]
        layers["up"] = lax.cond(is_mixed, lambda g: g[::-1], lambda g: g, layers["up"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    args = params(), TOKENS, True
    run, findings = fused(step, donate=(0,))
    chex.assert_trees_all_close(jax.jit(run)(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-7)
    (scan,), (stands,) = findings.fused, findings.whole
    assert scan.n_gradients == 2
    assert stands.n_bytes == STACK_BYTES
    assert "`rev` at test_fused_update.py" in stands.reason


def test_every_scan_is_fused_and_prints_stay():
    """Encoder and decoder, each a scan: both update as they go; what `jax.debug.print` reports is printed once."""

    def step(params, tokens):
        def both(params):
            return loss(params["encoder"], tokens) + loss(params["decoder"], tokens)

        value, gradient = jax.value_and_grad(both)(params)
        jax.debug.print("loss {}", value)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    args = {"encoder": params(), "decoder": params()}, TOKENS
    run, findings = fused(step, donate=(0,))
    lowered = jax.jit(run, donate_argnums=0).lower(*args)
    assert lowered.as_text().count("callback") == jax.jit(step).lower(*args).as_text().count("callback") > 0
    assert [scan.n_gradients for scan in findings.fused] == [3, 3]
    chex.assert_trees_all_close(jax.jit(run)(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-7)
    before = jax.jit(step, donate_argnums=0).lower(*args).compile(compat.cpu_compiler_options() or None)
    after = lowered.compile(compat.cpu_compiler_options() or None)
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (before, after)]
    assert sizes[1] < sizes[0] - 2 * STACK_BYTES


def test_results_in_another_order_than_arguments():
    """A state returned before the parameters is written where JAX has it lie; values stay right."""
    optimizer = optax.adam(1e-2)

    def step(params, state, tokens):
        new, state, value = step_of(optimizer)(params, state, tokens)
        return state, new, value

    args = params(), optimizer.init(params()), TOKENS
    run, findings = fused(step)
    assert jax.tree.structure(jax.eval_shape(run, *args)) == jax.tree.structure(jax.eval_shape(step, *args))
    assert len(findings.fused) == 1
    chex.assert_trees_all_close(compiled(run, args)(*copied(args)), jax.jit(step)(*args), rtol=1e-5, atol=1e-7)


def test_what_is_not_donated_is_said_with_its_bytes():
    """Without donation the scan updates copies: said in bytes, and the same values."""
    step, findings = fused(step_of(optax.sgd(1e-2)), donate=())
    args = params(), optax.sgd(1e-2).init(params()), TOKENS
    chex.assert_trees_all_close(jax.jit(step)(*args), jax.jit(step_of(optax.sgd(1e-2)))(*args), rtol=1e-5)
    assert findings.fused[0].copied_bytes == findings.fused[0].gradient_bytes


@pytest.mark.parametrize("donate", [(0, 1), (0,), ()])
def test_weights_that_are_returned_as_they_were_are_not_written_over(donate):
    """A heavy ball returns the weights before beside the new ones, which lie where the ones before those did."""

    def step(params, before, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        new = jax.tree.map(lambda p, q, g: p - 0.1 * g + 0.9 * (p - q), params, before, gradient)
        return new, params, value

    args = params(), jax.tree.map(lambda x: 0.9 * x, params()), TOKENS
    run, findings = fused(step, donate)
    plain, ours = compiled(step, args, donate), compiled(run, args, donate)
    (scan,) = findings.fused
    if 1 in donate:
        assert scan.copied_bytes == 0
        spared = plain.memory_analysis().temp_size_in_bytes - ours.memory_analysis().temp_size_in_bytes
        assert spared > scan.gradient_bytes / 3
    chex.assert_trees_all_close(ours(*copied(args)), plain(*copied(args)), rtol=1e-5, atol=1e-6)


def test_half_precision_weights_with_master_copies():
    """Weights in bf16 with masters in f32: both are updated layer by layer."""

    def step(masters, weights, tokens):
        gradient = jax.grad(lambda w: loss(w, tokens).astype(jnp.float32))(weights)
        masters = jax.tree.map(lambda m, g: m - 0.1 * g.astype(m.dtype), masters, gradient)
        return masters, jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)

    args = params(), jax.tree.map(lambda m: m.astype(jnp.bfloat16), params()), TOKENS
    run, findings = fused(step)
    chex.assert_trees_all_close(jax.jit(run)(*args), jax.jit(step)(*args), rtol=2e-2, atol=2e-3)
    assert findings.fused[0].n_gradients == 3


def test_a_step_in_memory_says_what_became_of_its_updates():
    """`jit(memory=)` fuses; its report says so, or names what keeps gradients whole; `fuse_updates=False` leaves it."""
    planned = jaxsub.sublinear(loss)
    reports = {}
    for name, make, fuses in [
        ("fused", optax.adam, None),
        ("off", optax.adam, False),
        ("clipped", lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)), None),
    ]:
        optimizer = make(1e-2)
        args = params(), optimizer.init(params()), TOKENS
        step = jaxsub.jit(step_of(optimizer, planned), memory="1GiB", donate_argnums=(0, 1), fuse_updates=fuses)
        reports[name] = step.report(*args)
        chex.assert_trees_all_close(step(*copied(args)), jax.jit(step_of(optimizer))(*args), rtol=1e-4, atol=1e-6)
    assert "update     inside the backward scan" in str(reports["fused"])
    assert f"stand one of {LAYERS} layers at a time" in str(reports["fused"])
    assert "update" not in str(reports["off"])
    assert "gradients stand whole" in str(reports["clipped"])
    assert reports["fused"].step_bytes < reports["off"].step_bytes - STACK_BYTES


def test_without_a_budget_the_update_is_fused_when_asked():
    """`jit(fuse_updates=True)` is `jax.jit` with the update inside; static arguments stay static."""

    def step(params, tokens, rate):
        gradient = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient)

    run = jaxsub.jit(step, fuse_updates=True, donate_argnums=0, static_argnames="rate")
    plain = jaxsub.jit(step, donate_argnums=0, static_argnames="rate")
    sizes = [f.lower(params(), TOKENS, rate=0.1).compile().memory_analysis().temp_size_in_bytes for f in (run, plain)]
    assert sizes[0] < sizes[1] - STACK_BYTES
    chex.assert_trees_all_close(run(params(), TOKENS, rate=0.1), plain(params(), TOKENS, rate=0.1), rtol=1e-5)


def unrolled(params, tokens):
    layers = [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(LAYERS)]
    return {**params, "layers": layers}, tokens


def unrolled_loss(params, tokens):
    x = params["embedding"][tokens]
    for p in params["layers"]:
        x = jax.checkpoint(lambda x, p: x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"])(x, p)
    return jnp.mean(x**2)


def test_unrolled_layers_are_left_to_the_compiler_of_a_cpu():
    """Nothing is changed, not a line of what is lowered; gradients stand no more than where layers are scanned."""
    optimizer = optax.adam(1e-2)
    scanned = params(), optimizer.init(params()), TOKENS
    weights, _ = unrolled(params(), TOKENS)
    args = weights, optimizer.init(weights), TOKENS
    run, findings = fused(step_of(optimizer, unrolled_loss))
    assert findings.fused == findings.whole == ()
    lowered = [
        jax.jit(f, donate_argnums=(0, 1)).lower(*args).as_text() for f in (run, step_of(optimizer, unrolled_loss))
    ]
    assert lowered[0].replace("jit_run", "jit_step") == lowered[1]
    most = compiled(fused(step_of(optimizer))[0], scanned).memory_analysis().temp_size_in_bytes
    assert compiled(run, args).memory_analysis().temp_size_in_bytes < most


@pytest.mark.parametrize("name", ["adam", "adamw", "clip"])
def test_barriers_put_updates_right_behind_their_gradients(name):
    """Ordered updates change no value and no alias; a clip by the norm of all gradients leaves nothing to order."""
    optimizer = OPTIMIZERS[name]() if name in OPTIMIZERS else REFUSED["clip_by_global_norm"][0]()
    weights, _ = unrolled(params(), TOKENS)
    args = weights, optimizer.init(weights), TOKENS
    findings = Findings(orders_at=1)
    step = with_fused_updates(step_of(optimizer, unrolled_loss), donated_leaves((0, 1), ()), findings)
    if name == "clip":
        jax.eval_shape(step, *args)
        assert findings.ordered is None
        return
    ours, plain = compiled(step, args), compiled(step_of(optimizer, unrolled_loss), args)
    assert findings.ordered.n_barriers >= LAYERS
    assert findings.ordered.gradient_bytes > 0.9 * 2 * STACK_BYTES
    assert ours.memory_analysis().alias_size_in_bytes == plain.memory_analysis().alias_size_in_bytes
    assert ours.memory_analysis().temp_size_in_bytes <= 1.1 * plain.memory_analysis().temp_size_in_bytes
    chex.assert_trees_all_close(ours(*copied(args)), plain(*copied(args)), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_updates_of_unrolled_layers_are_ordered_for_a_gpu():
    """For an H100 that is not there gradients of unrolled layers no longer stand together, and the report says so."""
    try:
        require_packages()
    except jaxsub.UnsupportedError as missing:
        pytest.skip(str(missing))
    wide = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct([s * (1 if s == 50 else 8) for s in a.shape], a.dtype),
        unrolled(params(), TOKENS)[0],
    )
    optimizer = optax.adam(1e-2)
    reports = [
        jaxsub.jit(step_of(optimizer, unrolled_loss), memory="8GiB", target="h100", donate_argnums=(0, 1),
                   progress=False, fuse_updates=fuses).report(wide, jax.eval_shape(optimizer.init, wide), TOKENS)
        for fuses in (False, True)
    ]  # fmt: skip
    order = reports[1].ordered
    assert f"right behind its gradient, by {order.n_barriers} barriers" in str(reports[1])
    assert reports[1].measurement.temp_bytes < min(reports[0].measurement.temp_bytes, order.gradient_bytes / 8)
    assert reports[1].measurement.alias_bytes == reports[0].measurement.alias_bytes


TWICE = {
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2)),
    "adaptive_norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(1e-2, momentum=0.9)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}


@pytest.mark.parametrize("name", TWICE)
def test_what_needs_all_gradients_may_run_the_backward_scan_twice(name):
    """In two passes the values are the same, and the gradients stand for one layer."""
    optimizer = TWICE[name]()
    args = params(), optimizer.init(params()), TOKENS
    findings = Findings(passes=2)
    step = with_fused_updates(step_of(optimizer), donated_leaves((0, 1), ()), findings)
    plain, ours = compiled(step_of(optimizer), args), compiled(step, args)
    (scan,) = findings.fused
    assert scan.n_gradients == 3
    assert "needs all of them" in scan.twice
    assert findings.whole == ()
    assert ours.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes - STACK_BYTES
    assert ours.memory_analysis().alias_size_in_bytes == plain.memory_analysis().alias_size_in_bytes
    expected = found = args
    for _ in range(3):
        expected = (*plain(*copied(expected[:2]), TOKENS)[:2], TOKENS)
        found = (*ours(*copied(found[:2]), TOKENS)[:2], TOKENS)
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_runs_its_backward_scan_twice_only_where_nothing_else_fits():
    """`jit(memory=)` names what keeps gradients whole while it fits, then runs the scan twice, then refuses."""
    optimizer = TWICE["clip_by_global_norm"]()
    args = params(), optimizer.init(params()), TOKENS

    def made(memory):
        return jaxsub.jit(
            step_of(optimizer, jaxsub.sublinear(loss)), memory=memory, donate_argnums=(0, 1), progress=False
        )

    ample = made("1GiB").report(*args)
    assert ample.fused == ()
    assert "gradients stand whole" in str(ample)
    tight = made(ample.step_bytes - STACK_BYTES)
    report = tight.report(*args)
    assert report.step_bytes <= report.memory_bytes == ample.step_bytes - STACK_BYTES
    assert "it runs twice, for `div` at _clipping.py" in str(report)
    chex.assert_trees_all_close(tight(*copied(args)), jax.jit(step_of(optimizer))(*args), rtol=1e-4, atol=1e-6)
    kept = jaxsub.StepPlan.from_json(tight.plan(*args).to_json())
    step = step_of(optimizer, jaxsub.sublinear(loss))
    again = jaxsub.jit(step, plan=kept, donate_argnums=(0, 1), progress=False).report(*args)
    assert again.step_bytes == report.step_bytes
    with pytest.raises(jaxsub.InfeasibleBudgetError):
        made(ample.step_bytes // 2).report(*args)


def deep_loss(params, tokens):
    """A loop of layers between a table and a head of many classes, both far larger than a layer."""
    x = params["table"][tokens]
    x, _ = lax.scan(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None), x, params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens).mean()


def deep_args(optimizer, width=64, classes=2048, tokens=512):
    stacked = random.normal(KEYS[0], (24, width, width)) / 64
    params = {"table": jnp.ones((classes, width)), "head": jnp.ones((width, classes)) / 64,
              "layers": {"up": stacked, "down": jnp.copy(stacked)}}  # fmt: skip
    return params, optimizer.init(params), jnp.arange(tokens)


def under(loop, fuse_updates):
    """The step with its loop so, and gradient barriers round it: its temporary bytes, and what it returns."""
    optimizer = optax.adamw(1e-2)
    args = deep_args(optimizer)
    plan = jaxsub.plan(deep_loss, args[0], args[2], budget="1GiB", progress=False)
    (node,) = (i for i, eqn in enumerate(trace(deep_loss, (args[0], args[2]), {}).eqns) if eqn.primitive.name == "scan")
    plan = plan.replace(loops=(dataclasses.replace(loop, node=node),), barriers=(node, node + 1))
    planned = step_of(optimizer, jaxsub.sublinear(deep_loss, plan=plan, progress=False))
    step = jaxsub.jit(planned, fuse_updates=fuse_updates, donate_argnums=(0, 1)).lower(*args).compile()
    return step.memory_analysis().temp_size_in_bytes, step(*copied(args[:2]), args[2])


GRADIENT_BYTES = 2 * 24 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("loop", "is_fused"), [(Loop(0), True), (Loop(0, is_recomputed=True), True), (Loop(0, (6,)), False),
                           (Loop(0, (5,)), False), (Loop(0, kept_steps=12), False)]
)  # fmt: skip
def test_barriers_of_a_plan_keep_no_update_out_of_the_scan(loop, is_fused):
    """Behind them gradients are finished, as they are in a scan that updates. Loops in blocks are left as they are."""
    (plain, expected), (ours, found) = under(loop, False), under(loop, True)
    print(f"{loop}: {plain / 2**20:.2f} MiB temporary, {ours / 2**20:.2f} with the update in the scan where it can be")
    assert ours <= plain - is_fused * 0.9 * GRADIENT_BYTES
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_loops_in_blocks_are_named_where_gradients_stand_whole():
    """XLA would copy weights that are updated in one block and read in the next."""
    optimizer, findings = optax.sgd(1e-2), Findings()
    args = deep_args(optimizer)
    plan = jaxsub.plan(deep_loss, args[0], args[2], budget="1GiB", progress=False)
    (node,) = (i for i, eqn in enumerate(trace(deep_loss, (args[0], args[2]), {}).eqns) if eqn.primitive.name == "scan")
    loss = jaxsub.sublinear(deep_loss, plan=plan.replace(loops=(Loop(node, (6,)),)), progress=False)
    step = with_fused_updates(step_of(optimizer, loss), donated_leaves((0, 1), ()), findings)
    jax.eval_shape(step, *args)
    (whole,) = findings.whole
    assert (whole.n_bytes, findings.fused) == (GRADIENT_BYTES, ())
    assert whole.reason.startswith("`scan`")
    assert whole.reason.endswith("runs in blocks, which read the weights of all layers")


def test_barriers_of_a_plan_keep_no_scan_of_several_from_updating():
    """A scan behind barriers of another one's gradients is looked at as well."""

    def two_loops(params, tokens):
        x = params["table"][tokens]
        for name in ("layers", "more"):
            x, _ = lax.scan(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None), x, params[name])
        return jnp.mean(x**2)

    optimizer, findings = optax.adamw(1e-2), Findings()
    params, _, tokens = deep_args(optimizer)
    params["more"] = copied(params["layers"])
    args = params, optimizer.init(params), tokens
    eqns = trace(two_loops, (params, tokens), {}).eqns
    nodes = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "scan"]
    plan = jaxsub.plan(two_loops, params, tokens, budget="1GiB", progress=False)
    plan = plan.replace(barriers=tuple(sorted({i + after for i in nodes for after in (0, 1)})))
    planned = step_of(optimizer, jaxsub.sublinear(two_loops, plan=plan, progress=False))
    jax.eval_shape(with_fused_updates(planned, donated_leaves((0, 1), ()), findings), *args)
    assert [fused.gradient_bytes for fused in findings.fused] == [GRADIENT_BYTES] * 2


def test_a_step_prefers_plans_that_keep_its_update_in_the_scan():
    """Those that unroll its loop, or run it in blocks, hold all gradients; the head in slices recomputes nothing."""
    optimizer = optax.adamw(1e-2)
    args = deep_args(optimizer, 256, 4096, 192)

    def chunked(params, tokens):
        x = params["table"][tokens]
        layer = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None))
        x, _ = lax.scan(layer, x, params["layers"])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        some = jax.checkpoint(lambda total, xy: (total + cross_entropy(xy[0] @ params["head"], xy[1]).sum(), None))
        return lax.scan(some, 0.0, (x.reshape(16, -1, x.shape[-1]), tokens.reshape(16, -1)))[0] / len(tokens)

    by_hand = jaxsub.jit(step_of(optimizer, chunked), fuse_updates=True, donate_argnums=(0, 1)).lower(*args).compile()
    analysis = by_hand.memory_analysis()
    memory = (analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
              - analysis.alias_size_in_bytes)  # fmt: skip
    ours = jaxsub.jit(step_of(optimizer, jaxsub.sublinear(deep_loss)), memory=memory, donate_argnums=(0, 1),
                      progress=False, cache=False)  # fmt: skip
    found = ours.report(*args)
    assert found.step_bytes <= memory
    assert sum(fused.gradient_bytes for fused in found.fused) == 16 * GRADIENT_BYTES
    print(f"{found.step_bytes / 2**20:.1f} of {memory / 2**20:.1f} MiB by hand, {found.extra:.2f} recomputed")
    assert found.extra < 0.5  # of a forward pass; by hand all of it is recomputed
    chex.assert_trees_all_close(ours(*copied(args[:2]), args[2])[2], by_hand(*copied(args[:2]), args[2])[2], rtol=1e-5)
