"""NNX: whole training steps compiled by `jaxsub.flax.nnx.jit`, and what users of Flax reported of remat and memory."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxsub
from jaxsub.core.errors import UnsupportedError
from jaxsub.flax import nnx as jaxsub_nnx
from jaxsub.flax import policies

DIM = 8
X = jax.random.normal(jax.random.key(1), (64, DIM))
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Block(nnx.Module):
    """BatchNorm, a dense layer, dropout."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.layer = nnx.Linear(DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.gelu(self.layer(self.norm(x))))


class Net(nnx.Module):
    """Two blocks, one after the other."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, x):
    """A scalar loss."""
    return (model(x) ** 2).mean()


def step_of(loss):
    """A training step of a model and its optimizer."""

    def step(model, optimizer, x, *, scale=1.0):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return scale * value

    return step


def start(make=Net):
    model = make()
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def train(step, make=Net, n_steps=3, x=X):
    """Losses, and the state of model and optimizer afterwards, keys as numbers."""
    model, optimizer = start(make)
    losses = [float(step(model, optimizer, x)) for _ in range(n_steps)]
    states = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    return losses, [jax.random.key_data(s) if jnp.issubdtype(s.dtype, jax.dtypes.prng_key) else s for s in states]


def assert_same(got, wanted):
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def plain():
    """What Flax's own compiled step comes to."""
    return train(nnx.jit(step_of(loss)))


DONATED = jaxsub_nnx.jit(donate_argnums=(0, 1), static_argnames="scale")


@pytest.mark.parametrize("jit", [nnx.jit, jaxsub_nnx.jit, DONATED], ids=["flax", "ours", "donated"])
def test_an_optimizer_trains_the_same(jit, plain):
    """nnx.Optimizer: losses, parameters, statistics, streams and the optimizer's state are those of the plain loop."""
    step = jit(step_of(jaxsub_nnx.sublinear(loss, verify=False)))
    assert_same(train(step), plain)


def test_a_step_is_a_decorator_and_a_method():
    """With options and without, keywords included."""

    class Trainer:
        def __init__(self):
            self.model, self.optimizer = start()

        @jaxsub_nnx.jit
        def step(self, model, x, *, scale):
            return scale * loss(model, x)

    jax.tree_util.register_static(Trainer)
    trainer = Trainer()
    bound = trainer.step(trainer.model, X, scale=2.0)
    wanted = 2.0 * loss(Net(), X)
    chex.assert_trees_all_close(bound, wanted, rtol=1e-5)


def test_changes_in_modules_are_not_lost():
    """jaxsub.sublinear takes modules as pytrees: what would change in them is refused, unless it is returned."""
    planned = jaxsub.sublinear(loss, verify=False)
    with pytest.raises(UnsupportedError, match=r"`blocks/0/.*jaxsub\.flax\.nnx\.sublinear") as error:
        jax.grad(planned, allow_int=True)(Net(), X)
    assert "changes 6 variables" in str(error.value)

    with pytest.raises(UnsupportedError, match=r"jaxsub\.flax\.nnx\.jit instead of jaxsub\.jit"):
        jaxsub.jit(step_of(loss))(*start(), X)

    def returning(model, x):
        return loss(model, x), nnx.state(model)

    model = Net()
    wanted = loss(model, X)
    value, state = jaxsub.sublinear(returning, verify=False)(Net(), X)
    chex.assert_trees_all_close(value, wanted, rtol=1e-5)
    chex.assert_trees_all_close(state["blocks"][0]["norm"]["mean"][...], model.blocks[0].norm.mean[...], rtol=1e-5)
    model.eval()
    chex.assert_trees_all_close(planned(model, X), loss(model, X), rtol=1e-5)


def test_what_a_step_of_modules_does_not_take_is_refused():
    """Shardings, and a report without a memory: the errors say what to do instead."""
    with pytest.raises(UnsupportedError, match=r"no in_shardings and no out_shardings.*device_put"):
        jaxsub_nnx.jit(step_of(loss), in_shardings=None, out_shardings=None)
    with pytest.raises(ValueError, match=r"jit\(memory="):
        jaxsub_nnx.jit(step_of(loss)).report(*start(), X)


def chain():
    """Sixteen layers of tanh."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*[f for _ in range(16) for f in (nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs), jnp.tanh)])


def test_a_step_of_modules_in_a_memory():
    """The step fits what it is given, counted as for steps of arrays and of shapes alone, and learns the same."""
    step = jaxsub_nnx.jit(step_of(jaxsub_nnx.sublinear(loss)), memory=0.7, donate_argnums=(0, 1), progress=False)
    report = step.report(*nnx.eval_shape(lambda: start(chain)), jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert step.report(*start(chain), X) == report
    assert report.step_bytes <= report.memory_bytes < report.plain_bytes
    plan = step.plan(*start(chain), X)
    given = jaxsub_nnx.jit(step_of(jaxsub_nnx.sublinear(loss)), plan=plan, donate_argnums=(0, 1), progress=False)
    assert not given.plan(*start(chain), X).diff(plan)
    assert_same(train(step, chain), train(nnx.jit(step_of(loss)), chain))


@pytest.mark.parametrize("memory", [None, 0.7])
def test_a_step_that_is_compiled_ahead_of_time_takes_its_own_arguments(memory):
    """As of `nnx.jit`: modules go in and are changed."""
    step = jaxsub_nnx.jit(step_of(jaxsub_nnx.sublinear(loss)), memory=memory, **({"progress": False} if memory else {}))
    assert_same(train(step.lower(*start(chain), X).compile(), chain), train(nnx.jit(step_of(loss)), chain))


def test_a_step_of_modules_takes_no_more_than_one_of_arrays():
    """flax #5116: value_and_grad of modules took their parameters once more than that of arrays."""
    x = jnp.tile(X, (4, 1))
    graphdef, params = nnx.split(chain())

    @jaxsub.sublinear(planner="chen", verify=False)
    def loss_of_arrays(params, x):
        return loss(nnx.merge(graphdef, params), x)

    def step(params, opt_state, x):
        value, grads = jax.value_and_grad(loss_of_arrays)(params, x)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    of_modules = step_of(jaxsub_nnx.sublinear(loss, planner="chen", verify=False))
    small, arrays, plain = (
        lowered.compile().memory_analysis().temp_size_in_bytes
        for lowered in (
            jaxsub_nnx.jit(of_modules, donate_argnums=(0, 1)).lower(*start(chain), x),
            jaxsub.jit(step, donate_argnums=(0, 1)).lower(params, OPTIMIZER.init(params), x),
            jaxsub_nnx.jit(step_of(loss), donate_argnums=(0, 1)).lower(*start(chain), x),
        )
    )
    n_parameters = sum(p.size for p in jax.tree.leaves(params))
    assert small < arrays + n_parameters  # a quarter of their bytes: they are not there once more
    assert small < 0.6 * plain


class Attention(nnx.Module):
    """A block of a transformer in bfloat16, its attention masked; what it is called under is chosen from outside."""

    def __init__(self, wrap):
        half = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0, dropout=1)}
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, dropout_rate=0.1, **half)
        self.layer = nnx.Linear(DIM, DIM, **half)
        self.wrap = wrap

    def mix(self, x, *, mask):
        x = x + self.attention(x, mask=mask, deterministic=False)
        return x + nnx.gelu(self.layer(x))

    def __call__(self, x):
        return self.wrap(self.mix)(x, mask=nnx.make_causal_mask(x[..., 0]))


def test_a_transformer_learns_the_same_under_remat():
    """flax #4626: a transformer of modules whose blocks were recomputed came to other results."""

    def losses(wrap=lambda f: f):
        return train(nnx.jit(step_of(loss)), lambda: Attention(wrap), 4, X.reshape(8, 8, DIM))[0]

    wanted = losses()
    with policies({"MultiHeadAttention": "save_nothing"}):
        got = losses(jaxsub_nnx.remat(policy="save_costly"))
    assert wanted[-1] < wanted[0]
    chex.assert_trees_all_close(got, wanted, rtol=2e-2)


class Watched(nnx.Module):
    """What it has seen is noted by a method under remat."""

    def __init__(self):
        self.layer = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))
        self.largest = nnx.Variable(jnp.array(0.0))

    def __call__(self, x):
        return jaxsub_nnx.remat(self.block)(x)

    def block(self, x):
        self.largest[...] = jnp.maximum(self.largest[...], x.max())
        return jnp.tanh(self.layer(x))


def test_bound_methods_are_taken():
    """flax #5053: `nnx.remat(self.block)(x)` lost track of what the method changes in its module."""
    model = Watched()
    nnx.jit(nnx.grad(loss))(model, X)
    chex.assert_trees_all_close(model.largest[...], X.max())


def test_regions_in_loops_of_modules():
    """flax #4819: nnx.while_loop around modules whose blocks are recomputed."""
    model = Watched()

    def body(carry):
        model, x, n = carry
        return model, model(x), n - 1

    _, y, _ = nnx.while_loop(lambda carry: carry[2] > 0, body, (model, X, jnp.array(3)))
    wanted = X
    for _ in range(3):
        wanted = jnp.tanh(model.layer(wanted))
    chex.assert_trees_all_close(y, wanted, rtol=1e-5)
    chex.assert_trees_all_close(model.largest[...], X.max())


def test_what_nnx_remat_takes_is_taken_or_refused():
    """Its modes: as graphs, which is what jaxsub does; trees are refused with what to write instead."""
    wrapped = jaxsub_nnx.remat(lambda model, x: model(x), graph=True, graph_updates=None)
    chex.assert_trees_all_close(wrapped(Watched(), X), Watched()(X))
    for name in ("graph", "graph_updates"):
        with pytest.raises(UnsupportedError, match=f"{name}=False.*Leave {name}= out"):
            jaxsub_nnx.remat(policy="sqrt", **{name: False})
