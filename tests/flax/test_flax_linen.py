"""Linen: remat under every policy, lifted losses, and policies put on a model that nobody edits."""

import functools
from inspect import signature
from itertools import pairwise

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_policies
from jaxprs import regions

import jaxsub
from jaxsub.core.errors import PolicyError, UnsupportedError
from jaxsub.flax import linen, policies
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.cuts import find_cuts, kind_of

ALL = ["save_nothing", "save_all", "save_costly", "save_within(2KiB)", "sqrt", "recursive(2)", None]
DIM, KEY = 8, jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (16, DIM))


class Block(nn.Module):
    """BatchNorm, dense, dropout, a sown value: everything that a region can get wrong."""

    @nn.compact
    def __call__(self, x, train):
        y = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        y = nn.Dense(DIM)(y)
        self.sow("intermediates", "mean", y.mean())
        y = nn.Dropout(0.5, deterministic=not train)(y)
        return x + nn.Dense(DIM, name="out")(y)


class Net(nn.Module):
    """Three blocks, one of them used twice."""

    wrap: object = None

    @nn.compact
    def __call__(self, x, train):
        block = self.wrap(Block) if self.wrap else Block
        shared = block(name="shared")
        for i in range(2):
            x = block(name=f"block_{i}")(x, train)
            x = shared(x, train)
        return x


class Scanned(nn.Module):
    """Four blocks as a loop over stacked parameters."""

    wrap: object = None

    @nn.compact
    def __call__(self, x, train):
        block = self.wrap(Block) if self.wrap else Block

        def step(block, x, _):
            return block(x, train), None

        axes = {"params": 0, "batch_stats": 0, "intermediates": 0}
        scan = nn.scan(step, variable_axes=axes, split_rngs={"params": True, "dropout": True}, length=4)
        return scan(block(name="block"), x, None)[0]


def compiled(model):
    """Loops are compiled anyhow, best with all around them; what is called op by op is compiled once for all tests."""
    return jax.jit if isinstance(model, Scanned) else lambda f: f


def init(model):
    return compiled(model)(lambda: model.init({"params": KEY, "dropout": jax.random.key(2)}, X, True))()


def gradient(model, variables, transform=lambda loss: loss):
    """Loss, mutated collections and gradient of one training step."""
    state = {k: v for k, v in variables.items() if k not in ("params", "intermediates")}

    def loss(params, x):
        rngs, collections = {"dropout": jax.random.key(3)}, ["batch_stats", "intermediates"]
        y, changed = model.apply({"params": params, **state}, x, True, rngs=rngs, mutable=collections)
        return (y**2).mean(), changed

    return compiled(model)(jax.value_and_grad(transform(loss), has_aux=True))(variables["params"], X)


@functools.cache
def plain_step(net):
    """A network's variables, and its plain step from them: what all others are compared with, made once."""
    variables = init(net())
    return variables, gradient(net(), variables)


def assert_same(got, wanted):
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


def n_regions(fun, *args):
    return len(list(regions(jax.make_jaxpr(fun)(*args))))


@pytest.mark.parametrize(
    ("net", "policy"),
    [(Net, policy) for policy in (*ALL, checkpoint_policies.dots_saveable)]
    + [(Scanned, "save_costly"), (Scanned, "sqrt")],
    ids=lambda p: getattr(p, "__name__", str(p)),  # no addresses: the same in every process
)
def test_remat_changes_nothing_but_memory(net, policy):
    """Parameters and their names, statistics, sown values, dropout and gradients are those of the plain model."""
    model = net(lambda block: linen.remat(block, policy=policy, static_argnums=(2,)))
    variables, wanted = plain_step(net)
    assert_same(init(model), variables)
    assert_same(gradient(model, variables), wanted)


def test_remat_takes_what_nn_remat_takes():
    """Collections and methods are lifted by name; other methods stay as they are."""

    class Two(nn.Module):
        def setup(self):
            self.layer = nn.Dense(DIM)

        def encode(self, x):
            return jnp.sin(self.layer(x))

        def __call__(self, x):
            return self.encode(x)

    model = linen.remat(Two, variables=True, rngs=("params",), policy="save_within(1KiB)", methods=["encode"])()
    variables = model.init(KEY, X)
    assert_same(model.apply(variables, X), Two().apply(variables, X))
    assert n_regions(jax.grad(lambda v: model.apply(v, X, method="encode").sum()), variables) > 0


def test_what_nn_remat_has_given_up_is_refused():
    """`concrete` stands where nn.remat has it; true, it is refused with what to write instead."""
    model = linen.remat(nn.Dense, True, True, False, True, (), "sqrt")(DIM)
    assert_same(model.init(KEY, X), nn.Dense(DIM).init(KEY, X))
    assert list(signature(linen.remat).parameters) == list(signature(nn.remat).parameters)
    with pytest.raises(UnsupportedError, match=r"concrete=True.*static_argnums=\(1,\)"):
        linen.remat(nn.Dense, concrete=True)


def test_remat_wraps_functions_and_methods():
    """As a decorator on a method, and on a function of a module."""

    class Decorated(nn.Module):
        @linen.remat
        @nn.compact
        def __call__(self, x):
            return jnp.sin(nn.Dense(DIM)(x))

    def call(module, x):
        return jnp.sin(module(x))

    variables = Decorated().init(KEY, X)
    assert n_regions(jax.grad(lambda v: Decorated().apply(v, X).sum()), variables) > 0
    wrapped = nn.apply(linen.remat(call, policy="sqrt"), Decorated())
    assert_same(wrapped(variables, X), jnp.sin(Decorated().apply(variables, X)))


def test_a_wrong_policy_is_refused_where_it_is_written():
    """Not at the first call."""
    with pytest.raises(PolicyError, match="save_dots"):
        linen.remat(Block, policy="save_dots")


@pytest.mark.parametrize(
    ("net", "transform"),
    [(Net, linen.sublinear), (Net, linen.sublinear(planner="chen")), (Scanned, linen.sublinear)],
    ids=["auto", "chen", "scan"],
)
def test_a_loss_of_variables_under_a_plan(net, transform):
    """Statistics and sown values come out as from the plain loss, gradients too, those of nn.scan as well."""
    variables, wanted = plain_step(net)
    assert_same(gradient(net(), variables, lambda loss: transform(loss, verify=False)), wanted)


def test_a_loss_of_a_bound_module_under_a_plan():
    """Inside a module the loss of a submodule is lifted: its statistics change once, its gradient is the plain one."""

    class Outer(nn.Module):
        is_planned: bool

        @nn.compact
        def __call__(self, x):
            block = Block(name="block")

            def loss(block, x):
                return (block(x, True) ** 2).mean(), {"last": x[0, 0]}

            loss = linen.sublinear(loss, verify=False) if self.is_planned else loss
            return nn.value_and_grad(loss, block, x, has_aux=True)

    rngs = {"dropout": jax.random.key(3)}
    variables = init(_Block())
    got, wanted = (Outer(p).apply(variables, X, rngs=rngs, mutable=["batch_stats"]) for p in (True, False))
    assert_same(got, wanted)


class _Block(nn.Module):
    """A block as a child, so that its variables stand under `block`."""

    @nn.compact
    def __call__(self, x, train):
        return Block(name="block")(x, train)


def test_a_train_state_is_an_argument_like_any_other():
    """Its static fields, functions and optimizers, are no hindrance."""
    optax = pytest.importorskip("optax")
    model = nn.Dense(DIM)
    state = TrainState.create(apply_fn=model.apply, params=model.init(KEY, X), tx=optax.sgd(0.1))

    def loss(params, state, x):
        return (state.apply_fn(params, x) ** 2).mean()

    planned = jax.grad(linen.sublinear(loss, verify=False))(state.params, state, X)
    assert_same(planned, jax.grad(loss)(state.params, state, X))


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        ({"Block": "save_costly"}, {"block_0", "block_1", "shared"}),
        ({Block: "save_nothing"}, {"block_0", "block_1", "shared"}),
        ({"block_*": "save_within(1KiB)"}, {"block_0", "block_1"}),
        ({"shared.out": "sqrt"}, {"shared/out"}),
        ({"shared": "save_costly", "*/out": "sqrt"}, {"shared", "block_0/out", "block_1/out", "shared/out"}),
        ({"*": None}, None),
    ],
    ids=lambda p: str(sorted(p)) if isinstance(p, set) else str(p),  # the same order in every process
)
def test_policies_on_a_model_that_nobody_edits(patterns, paths):
    """By name, type or path; results, statistics, dropout and gradients stay, regions appear, and are listed."""
    variables, wanted = plain_step(Net)
    with policies(patterns) as swap:
        chex.assert_trees_all_equal(init(Net()), variables)
        got = gradient(Net(), variables)
        assert n_regions(lambda v: gradient(Net(), v), variables) > 0
    assert_same(got, wanted)
    assert paths is None or {m.path for m in swap.matched} == paths
    assert all(m.path in str(swap) for m in swap.matched[:5])
    assert n_regions(lambda v: gradient(Net(), v), variables) == 0


@pytest.mark.parametrize("pattern", ["Block", "block", "block.out"])
def test_policies_inside_nn_scan(pattern):
    """A module in a loop is matched by its class, its name and its path, once, and its regions are in the body."""
    variables, wanted = plain_step(Scanned)
    with policies({pattern: "save_nothing"}) as swap:
        got = gradient(Scanned(), variables)
        assert n_regions(lambda v: gradient(Scanned(), v), variables) > 0
    assert_same(got, wanted)
    assert {m.path for m in swap.matched} == {"block/out" if "out" in pattern else "block"}
    with pytest.raises(PolicyError, match=r"Called were: .*block Block"), policies({"block_7": "save_nothing"}):
        jax.eval_shape(lambda v: gradient(Scanned(), v), variables)


def test_what_matched_is_shown_by_names_of_policies():
    """JAX's policies by name, not by address."""
    variables, _ = plain_step(Net)
    jax_policies = {"block_0": checkpoint_policies.dots_saveable, "block_1": checkpoint_policies.nothing_saveable}
    names = checkpoint_policies.save_only_these_names("attention")
    both = checkpoint_policies.save_from_both_policies(checkpoint_policies.dots_saveable, names)
    with policies({**jax_policies, "shared": both}) as swap:
        jax.eval_shape(lambda v: gradient(Net(), v), variables)
    assert [m.policy for m in swap.matched] == ["dots_saveable", "save_from_both_policies", "nothing_saveable"]
    assert " at 0x" not in str(swap)


def test_inner_policies_hold_inside_outer_ones():
    """A module that saves nothing inside one that saves costly results: only its own products are recomputed."""
    variables, _ = plain_step(Net)

    def products():
        return str(jax.make_jaxpr(lambda v: gradient(Net(), v)[1])(variables)).count(" dot_general[")

    plain = products()
    with policies({"Block": "save_costly"}):
        outer = products()
    with policies({"Block": "save_costly", "Dense_0": "save_nothing"}):
        both = products()
    with policies({"Block": "save_nothing"}):
        nothing = products()
    assert plain == outer <= both < nothing


def test_a_pattern_that_matches_nothing_is_an_error():
    """The error says what was called, and what may have been meant."""
    variables, _ = plain_step(Net)
    with pytest.raises(PolicyError, match="Did you mean 'Block'") as error, policies({"Blok": "save_costly"}):
        jax.eval_shape(lambda v: gradient(Net(), v), variables)
    assert "block_0 Block" in str(error.value)
    step = jax.jit(lambda v: gradient(Net(), v))
    step(variables)
    with pytest.raises(PolicyError, match="compiled before"), policies({"Block": "save_costly"}):
        step(variables)


def test_an_error_inside_is_not_covered_by_another():
    """What went wrong inside comes out, and the model is as it was."""
    with pytest.raises(ZeroDivisionError), policies({"Blok": "save_costly"}):
        _ = 1 / 0
    for patterns in ({}, ["Block"], "Block"):
        with pytest.raises(PolicyError, match=r"a mapping of patterns, at least one, to policies.* got"):
            policies(patterns)
    with pytest.raises(PolicyError, match="module class or text"):
        policies({3: "save_costly"})


class Dropping(nn.Module):
    """Like layers, each with dropout of its own."""

    @nn.compact
    def __call__(self, x):
        for _ in range(6):
            x = x + nn.Dropout(0.5, deterministic=False)(nn.Dense(DIM)(nn.gelu(nn.Dense(4 * DIM)(x))))
        return x


def test_layers_that_differ_in_their_dropout_keys_alone_are_priced_once():
    """Linen folds a number of its own into every layer's key: data, which makes no stage another kind of stage."""
    model = Dropping()
    variables = model.init({"params": KEY, "dropout": KEY}, X)
    program = trace(lambda v, key: (model.apply(v, X, rngs={"dropout": key}) ** 2).sum(), (variables, KEY), {})
    folds = [i for i, n in enumerate(program.graph.nodes) if n.primitive == "random_fold_in"]
    assert len({program.signatures[i] for i in folds}) > 1
    cuts = find_cuts(program.graph)
    kinds = [kind_of(program.graph, program.signatures, a, b) for a, b in pairwise(cuts)]
    assert len(kinds) >= 6
    assert len(set(kinds)) <= len(kinds) // 2 + 1


def test_flax_is_optional():
    """`jaxsub.flax` is imported when it is asked for."""
    assert jaxsub.flax.linen is linen
    with pytest.raises(AttributeError, match="torch"):
        _ = jaxsub.torch
