"""The doctor: each planted fault is found, with what it costs and how to mend it; clean programs have none."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxsub
from jaxsub.devices.compile import measure_compiled

LAYERS, BATCH, WIDTH, WORDS = 6, 256, 16, 512
WS, X = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH, jnp.ones((BATCH, WIDTH))
ACTIVATION = BATCH * WIDTH * 4
policies = jax.checkpoint_policies
offload = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["nobody"],
    offload_src="device",
    offload_dst="pinned_host",
)


def layer(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def under(policy):
    """A loss whose layers are regions of a policy."""
    block = jax.checkpoint(layer, policy=policy)

    def loss(ws, x):
        for w in ws:
            x = block(x, w)
        return (x**2).mean()

    return loss


def scanned(body):
    """A loss that scans a body over layers."""

    def loss(ws, x):
        x, more = lax.scan(jax.checkpoint(body), x, ws)
        return (x**2).mean() + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(more))

    return loss


@jax.custom_vjp
def secretive(x):
    return jnp.tanh(x)


secretive.defvjp(lambda x: (jnp.tanh(x), (jnp.cosh(x), jnp.sinh(x))), lambda kept, g: (g / kept[0] ** 2 + 0 * kept[1],))


@jax.custom_vjp
def frugal(x):
    return jnp.tanh(x)


frugal.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g / jnp.cosh(x) ** 2,))


def with_rule(rule):
    def loss(ws, x):
        for w in ws:
            x = rule(x @ w)
        return x.mean()

    return loss


def cast_in_loop(ws, x):
    def body(x, w):
        wide = x.astype(jnp.float32)
        return (x @ w.astype(x.dtype)) * jnp.mean(wide * wide, -1, keepdims=True).astype(x.dtype), None

    return lax.scan(body, x.astype(jnp.bfloat16), ws)[0].astype(jnp.float32).mean()


def masked_loop(ws, x):
    mask = jnp.broadcast_to(jnp.arange(WIDTH) < WIDTH // 2, x.shape).astype(x.dtype)
    return lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) * mask, None)), x, ws)[0].mean()


SAME_ROWS = np.broadcast_to(np.arange(WIDTH, dtype=np.float32), (BATCH, WIDTH)).copy()


def closes_over(ws, x):
    return (scanned(lambda x, w: (jnp.tanh(x @ w), None))(ws, x) * (x * SAME_ROWS)).mean()


def language_model(params, tokens):
    x = params["embedding"][tokens]
    logits = jnp.tanh(x @ params["layer"]) @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


LM = {
    "embedding": jnp.ones((WORDS, WIDTH)),
    "layer": jnp.ones((WIDTH, WIDTH)) / WIDTH,
    "head": jnp.ones((WIDTH, WORDS)),
}
TOKENS = jnp.arange(BATCH) % WORDS
LOOP = scanned(lambda x, w: (jnp.tanh(x @ w), None))


STACK = jnp.ones((64, WIDTH, WIDTH)) / WIDTH
OPTIMIZER = optax.adamw(1e-3)


def adamw(state, x):
    params, moments = state
    loss, gradients = jax.value_and_grad(LOOP)(params, x)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


STATE = (STACK, OPTIMIZER.init(STACK))

FAULTS = {
    "a policy that saves all": (under(policies.everything_saveable), (WS, X), "checkpoint saves nothing"),
    "a region round everything": (jax.checkpoint(LOOP), (WS, X), "checkpoint saves nothing"),
    "an offload of no name": (under(offload), (WS, X), "offload moves nothing"),
    "no donation": (jax.jit(adamw), (STATE, X), "not donated"),
    "a scan that stacks its input": (scanned(lambda x, w: (jnp.tanh(x @ w), w)), (WS, X), "scan returns its input"),
    "a scan that stacks a constant": (scanned(lambda x, w: (jnp.tanh(x @ w), X)), (WS, X), "scan returns its input"),
    "a cast in a loop": (cast_in_loop, (WS, X), "wide copy"),
    "a rule with residuals": (with_rule(secretive), (WS, X), "opaque residuals"),
    "a mask before a loop": (masked_loop, (WS, X), "broadcast"),
    "a constant of equal rows": (closes_over, (WS, X), "broadcast"),
    "logits": (language_model, (LM, TOKENS), "whole logits"),
    "an update after the gradients": (jax.jit(adamw, donate_argnums=0), (STATE, X), "whole gradients"),
    "no plan": (under(policies.everything_saveable), (WS, X), "a plan saves"),
}


@pytest.mark.parametrize(("fun", "args", "kind"), FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_found(fun, args, kind):
    """The fault is told with its bytes, a fix of one line, and where it is measured."""
    found = jaxsub.doctor(fun, *args)
    finding = next(f for f in found.findings if f.kind == kind)
    assert finding.fix
    assert "\n" not in finding.fix
    assert kind in str(found)


MENDED = {
    "a policy": (under(policies.everything_saveable), under(None), (WS, X), "checkpoint saves nothing"),
    "donation": (jax.jit(adamw), jax.jit(adamw, donate_argnums=0), (STATE, X), "not donated"),
    "the update": (
        jax.jit(adamw, donate_argnums=0),
        jaxsub.jit(adamw, fuse_updates=True, donate_argnums=0),
        (STATE, X),
        "whole gradients",
    ),
}


@pytest.mark.parametrize(("faulty", "mended", "args", "kind"), MENDED.values(), ids=MENDED.keys())
def test_the_fix_saves_what_was_told(faulty, mended, args, kind):
    """What is measured of a fault is what the compiler allocates less once it is mended."""
    is_step = hasattr(faulty, "trace")
    measure = measure_compiled if is_step else lambda fun, args: jaxsub.measure(fun, *args)
    before, after = (measure(fun, args).step_bytes for fun in (faulty, mended))
    (finding,) = (f for f in jaxsub.doctor(faulty, *args).findings if f.kind == kind)
    assert finding.is_measured
    assert finding.n_bytes == pytest.approx(before - after, rel=0.02)
    assert before - after > 0.01 * before


def test_what_every_layer_does_wrong_is_told_once():
    """Equal faults are one finding, with their bytes together: each rule keeps two arrays of an activation's size."""
    (finding,) = (f for f in jaxsub.doctor(with_rule(secretive), WS, X).findings if f.kind == "opaque residuals")
    assert (finding.count, finding.n_bytes) == (LAYERS, LAYERS * 2 * ACTIVATION)
    assert "`secretive`" in finding.what


def test_a_diagnosis_is_a_card():
    """HTML has a row for each finding, with its bytes and its fix as text."""
    found = jaxsub.doctor(with_rule(secretive), WS, X)
    card = found._repr_html_()
    assert card.count("<code>") == len(found.findings) > 1
    assert "`secretive`" in card
    assert "No fault was found." in jaxsub.doctor(regression, WS[0], X)._repr_html_()


def test_nothing_is_compiled_unless_asked():
    """`verify=False` tells what the traced program shows, and says what was left out."""
    found = jaxsub.doctor(under(policies.everything_saveable), WS, X, verify=False)
    assert found.measurement is None
    assert "verify=False" in found.not_looked_at[0]


def test_a_number_broadcast_before_a_loop_is_no_fault():
    """XLA moves the broadcast of a number into a loop; of anything else it does not."""

    def loss(before):
        def of(ws, x):
            more = before(x)
            return lax.scan(lambda x, w: (x @ w + more, None), x, ws)[0].mean()

        return of

    kinds, bytes_ = {}, {}
    for name, before in {"number": jnp.zeros_like, "mask": lambda x: jnp.broadcast_to(x.sum(), x.shape)}.items():
        kinds[name] = [f.kind for f in jaxsub.doctor(loss(before), WS, X, verify=False).findings]
        bytes_[name] = measure_compiled(loss(before), (WS, X)).temp_bytes
    assert kinds == {"number": [], "mask": ["broadcast"]}
    assert bytes_["mask"] - bytes_["number"] == pytest.approx(ACTIVATION, rel=0.1)


def test_loops_over_slices_are_none_of_the_users():
    """What a planned loss in slices reads whole, in a step, is not the user's to move into a loop."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step_of(loss):
        def step(ws, x):
            return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws, x), strict=True)]

        return step

    args, of = ([jnp.eye(32)] * 8, jnp.ones((256, 32))), dict[str, list[str]]()
    planned = jaxsub.sublinear(loss, chunks={0: 8}, cache=False, progress=False)
    assert planned.plan(*args).slices
    for name, made in {"plain": loss, "planned": planned}.items():
        found = jaxsub.doctor(jax.jit(step_of(made), donate_argnums=0), *args, verify=False)
        of[name] = [finding.kind for finding in found.findings]
    assert of["plain"] == of["planned"]


def test_a_step_says_what_only_its_loss_shows():
    """A step has its gradients already: what cannot be seen in it is named."""
    found = jaxsub.doctor(jax.jit(adamw), STATE, X)
    assert found.is_step
    assert "Pass the loss itself" in found.not_looked_at[0]


def test_an_argument_that_a_loop_carries_is_one_to_donate():
    """An update inside the backward scan, or in a scan over batches, is an update; positions leave statics out."""
    fused = jaxsub.jit(adamw, fuse_updates=True)
    assert "donate_argnums=0)" in jaxsub.doctor(fused, STATE, X).findings[0].fix

    epoch = jax.jit(lambda n, state, xs: lax.scan(adamw, state, xs), static_argnums=0)
    (finding,) = jaxsub.doctor(epoch, 2, STATE, X[None]).findings
    assert finding.fix.startswith("jax.jit(step, donate_argnums=0), counted without static arguments")


def test_a_loss_that_returns_more_is_a_loss():
    """Statistics that a loss returns updated make no step of it: it has no backward pass."""

    def loss(params, statistics, x):
        return jnp.mean((x @ params) ** 2), {"mean": statistics["mean"] + x.mean(0)}

    found = jaxsub.doctor(loss, WS[0], {"mean": X[0]}, X)
    assert not found.is_step


def regression(w, x):
    return jnp.mean((x @ w) ** 2)


CLEAN = {
    "a regression": (regression, (WS[0], X)),
    "a plan": (jaxsub.sublinear(LOOP, verify=False), (WS, X)),
    "the update inside the scan": (jaxsub.jit(adamw, memory=1.0, donate_argnums=0), (STATE, X)),
    "the same without a budget": (jaxsub.jit(adamw, fuse_updates=True, donate_argnums=0), (STATE, X)),
    "gradients, which are no updates": (jax.jit(jax.value_and_grad(LOOP)), (STACK, X)),
    "a frugal rule": (with_rule(frugal), (WS[:1], X)),
    "each layer a region that saves": (jaxsub.sublinear(under(None), verify=False), (WS, X)),
}


@pytest.mark.parametrize(("fun", "args"), CLEAN.values(), ids=CLEAN.keys())
def test_a_clean_program_has_no_finding(fun, args):
    """Nothing is told where nothing is wrong."""
    found = jaxsub.doctor(fun, *args)
    assert found.findings == (), str(found)
    assert "No fault was found." in str(found)


def test_a_rule_that_closes_over_a_value():
    """What a `custom_vjp` closes over has no gradient by its rule, and none is asked for."""

    def loss(ws, x, scale):
        @jax.custom_vjp
        def rule(x):
            return jnp.tanh(x * scale)

        rule.defvjp(lambda x: (jnp.tanh(x * scale), jnp.cosh(x * scale)), lambda kept, g: (g * scale / kept**2,))
        return with_rule(rule)(ws, x)

    found = jaxsub.doctor(loss, WS, X, jnp.float32(2))
    assert [f for f in found.findings if f.kind == "opaque residuals"]


def equinox_step(model, x):
    """It returns a model, and so activations."""
    grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    return eqx.apply_updates(model, grads)


def nnx_step(model, optimizer, x):
    """It returns a loss, and changes the others in place."""
    value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return value


MLP = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))


@pytest.mark.parametrize("jitted", [lambda f: f, eqx.filter_jit, jaxsub.equinox.filter_jit])
def test_a_step_of_equinox_is_one(jitted):
    """Under `eqx.filter_jit`, ours, or as it is."""
    assert jaxsub.doctor(jitted(equinox_step), MLP, X).is_step


@pytest.mark.parametrize("jitted", [lambda f: f, nnx.jit])
def test_a_step_of_nnx_is_one(jitted):
    """What it changes in place is what it updates; a loss under `nnx.jit` is a loss."""
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    found = jaxsub.doctor(jitted(nnx_step), model, optimizer, X)
    assert found.is_step
    assert "arguments (0, 1) updated" in str(found)
    assert not jaxsub.doctor(jitted(lambda m, x: jnp.mean(m(x) ** 2)), model, X).is_step


def test_arguments_that_are_no_arrays_are_named():
    """As `jaxsub.plan` names them: an internal function of the doctor's says a user nothing."""
    loss = lambda w, x, mode: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    with pytest.raises(jaxsub.UnsupportedError, match="arg2 is a str"):
        jaxsub.doctor(loss, jnp.eye(8), jnp.ones((32, 8)), "train")


def test_a_loss_under_jit_may_have_static_arguments():
    """They are named to `jax.jit`, and nowhere else."""
    loss = jax.jit(lambda w, x, mode: jnp.mean(jnp.tanh(x @ w) ** 2), static_argnums=2)
    assert not jaxsub.doctor(loss, WS[0], X, "squared").is_step
