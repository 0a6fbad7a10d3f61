"""NNX: remat under every policy, losses of modules under a plan, and policies put on a model that nobody edits."""

from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies
from jaxprs import regions

from jaxsub.core.errors import PlanMismatchError, PolicyError, UnsupportedError
from jaxsub.flax import nnx as jaxsub_nnx
from jaxsub.flax import policies

ALL = ["save_nothing", "save_all", "save_costly", "save_within(2KiB)", "sqrt", "recursive(2)", None]
DIM = 8
X = jax.random.normal(jax.random.key(1), (16, DIM))


class Block(nnx.Module):
    """BatchNorm, dropout, a counter, and a layer that all blocks share."""

    def __init__(self, shared, rngs):
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.layer = nnx.Linear(DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.shared = shared
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x, scale=1.0, *, residual=True):
        self.calls[...] += 1
        y = self.shared(self.dropout(self.layer(nnx.relu(self.norm(x)))))
        return x + scale * y if residual else y


class Net(nnx.Module):
    """Three blocks."""

    def __init__(self, wrap=None):
        rngs = nnx.Rngs(0, dropout=1)
        shared = nnx.Linear(DIM, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(shared, rngs) for _ in range(3)])
        self.wrap = wrap

    def __call__(self, x):
        for block in self.blocks:
            x = self.wrap(lambda block, x: block(x, 0.5))(block, x) if self.wrap else block(x, 0.5, residual=True)
        return x


def loss(model, x):
    """A scalar loss."""
    return (model(x) ** 2).mean()


def two_steps(model, loss=loss):
    """Losses and gradients of two calls, and the state after them: statistics, counters and streams included."""
    results = [nnx.value_and_grad(loss)(model, X) for _ in range(2)]
    return jax.tree.leaves(results), jax.tree.leaves(nnx.state(model))


def assert_same(got, wanted):
    def numbers(leaves):
        return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]

    for g, w in zip(got, wanted, strict=True):
        chex.assert_trees_all_close(numbers(g), numbers(w), rtol=1e-5, atol=1e-6)


def n_regions(model, loss=loss):
    graphdef, state = nnx.split(model)
    gradient = jax.grad(lambda s: loss(nnx.merge(graphdef, s), X), allow_int=True)
    return len(list(regions(jax.make_jaxpr(gradient)(state))))


@pytest.fixture(scope="module")
def plain():
    """The plain model's two steps."""
    return two_steps(Net())


@pytest.mark.parametrize(
    "policy", [*ALL, checkpoint_policies.dots_saveable], ids=lambda p: getattr(p, "__name__", str(p))
)
def test_remat_changes_nothing_but_memory(policy, plain):
    """Statistics are updated once, streams advance once, the shared layer stays one, gradients are the same."""
    model = Net(lambda f: jaxsub_nnx.remat(f, policy=policy))
    assert_same(two_steps(model), plain)
    assert [int(b.calls[...]) for b in model.blocks] == [2, 2, 2]
    assert all(b.shared is model.blocks[0].shared for b in model.blocks)


def test_remat_takes_methods_and_static_arguments():
    """A bound method, a method's decorator, static arguments by place, keywords."""

    class Decorated(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))

        @jaxsub_nnx.remat(policy="save_costly", static_argnums=2)
        def __call__(self, x, n, *, scale):
            for _ in range(n):
                x = jnp.sin(self.layer(x)) * scale
            return x

    model = Decorated()
    again = jaxsub_nnx.remat(lambda model, x: model(x, 2, scale=0.5))(model, X)
    bound = jaxsub_nnx.remat(model.layer.__call__)(X)
    chex.assert_trees_all_close(model(X, 2, scale=0.5), again)
    chex.assert_trees_all_close(bound, model.layer(X))
    assert n_regions(model, lambda m, x: m(x, 1, scale=1.0).sum()) > 0


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_loss_of_modules_under_a_plan(wrap, plain):
    """Same losses, gradients, statistics, counters and streams; the second step neither traces nor plans."""
    planned = jaxsub_nnx.sublinear(loss, verify=False)
    model, results = Net(), []
    step = wrap(lambda model: nnx.value_and_grad(planned)(model, X))
    for _ in range(2):
        results.append(step(model))
    assert_same((jax.tree.leaves(results), jax.tree.leaves(nnx.state(model))), plain)
    assert n_regions(Net(), planned) > 0
    assert planned.plan(model, X) == planned.plan(model, X)


def test_a_plan_leaves_the_model_as_it_is():
    """Asking for a plan advances nothing."""
    model = Net()
    before = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))
    jaxsub_nnx.sublinear(loss, verify=False).plan(model, X)
    chex.assert_trees_all_equal(jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey))), before)


def test_several_results_and_static_names():
    """A pair (loss, aux), auxiliary modules and static names go through."""

    def with_aux(model, x, *, n):
        y = model(x)
        return (y**n).mean(), {"last": y[0, 0], "n": jnp.array(n)}

    planned = jaxsub_nnx.sublinear(with_aux, verify=False, static_argnames="n")
    got, wanted = (
        nnx.value_and_grad(lambda m, x, f=f: f(m, x, n=2), has_aux=True)(Net(), X) for f in (planned, with_aux)
    )
    assert_same([jax.tree.leaves(got)], [jax.tree.leaves(wanted)])


def test_variables_made_inside_come_out():
    """A variable that a module makes inside a region is there afterwards."""

    class Noting(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))

        def __call__(self, x):
            y = self.layer(x)
            self.mean = nnx.Intermediate(y.mean())
            return jnp.sin(y)

    by_remat, by_plan, by_hand = Noting(), Noting(), Noting()
    jaxsub_nnx.remat(lambda m, x: m(x), policy="sqrt")(by_remat, X)
    jaxsub_nnx.sublinear(loss, verify=False)(by_plan, X)
    by_hand(X)
    chex.assert_trees_all_close(by_remat.mean[...], by_hand.mean[...])
    chex.assert_trees_all_close(by_plan.mean[...], by_hand.mean[...])


@pytest.mark.parametrize("is_planned", [True, False], ids=["plan", "policies"])
def test_what_modules_sow_comes_out(is_planned):
    """nnx.capture in a loss: each module's value once, though regions run it twice."""

    class Sowing(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(DIM, DIM, rngs=nnx.Rngs(i)) for i in range(6)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
                self.sow(nnx.Intermediate, "means", x.mean())
            return x

    def sowing_loss(model, x):
        y, sown = nnx.capture(model, nnx.Intermediate)(x)
        return (y**2).mean(), sown

    wanted = nnx.value_and_grad(sowing_loss, has_aux=True)(Sowing(), X)
    planned = jaxsub_nnx.sublinear(sowing_loss, planner="chen", verify=False) if is_planned else sowing_loss
    with nullcontext() if is_planned else policies({"Linear": "save_nothing"}):
        got = nnx.value_and_grad(planned, has_aux=True)(Sowing(), X)
    chex.assert_trees_all_close(jax.tree.leaves(got), jax.tree.leaves(wanted), rtol=1e-5, atol=1e-6)
    assert len(jax.tree.leaves(got[0][1])) == 6


def test_remat_inside_scan_and_vmap():
    """Stacked modules: a loop over layers, and an ensemble."""

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return nnx.Linear(DIM, DIM, rngs=rngs)

    def layer(model, x):
        return jnp.sin(model(x))

    def loops(f):
        scan = nnx.scan(lambda x, m: (f(m, x), None), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        return nnx.grad(lambda m: (scan(X, m)[0] ** 2).sum())(stacked(nnx.Rngs(0)))

    def ensembles(f):
        return nnx.grad(lambda m: (nnx.vmap(f, in_axes=(0, None))(m, X) ** 2).sum())(stacked(nnx.Rngs(0)))

    for of in (loops, ensembles):
        for policy in ("save_costly", "save_within(1KiB)"):
            got, wanted = of(jaxsub_nnx.remat(layer, policy=policy, prevent_cse=False)), of(layer)
            chex.assert_trees_all_close(jax.tree.leaves(got), jax.tree.leaves(wanted), rtol=1e-5, atol=1e-6)


class Towers(nnx.Module):
    """Four stacked blocks with statistics, keys and a counter, called in a loop or all at once."""

    def __init__(self, is_loop):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(nnx.Linear(DIM, DIM, rngs=rngs), rngs)

        self.blocks, self.is_loop = make(nnx.Rngs(0, dropout=1)), is_loop

    def __call__(self, x):
        if self.is_loop:
            scan = nnx.scan(lambda x, block: (block(x), None), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
            return scan(x, self.blocks)[0]
        return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(self.blocks, x)


@pytest.mark.parametrize("is_loop", [True, False], ids=["scan", "vmap"])
def test_a_loss_of_stacked_modules_under_a_plan(is_loop):
    """nnx.scan and nnx.vmap inside a planned loss: each layer's statistics, counters and streams change once a call."""
    planned = jaxsub_nnx.sublinear(loss, verify=False, planner="cheap")  # the loop itself runs otherwise
    model = Towers(is_loop)
    assert_same(two_steps(model, planned), two_steps(Towers(is_loop)))
    assert model.blocks.calls[...].tolist() == [2, 2, 2, 2]
    assert n_regions(Towers(is_loop), planned) > 0


@pytest.mark.parametrize("policy", ["save_costly", checkpoint_policies.nothing_saveable], ids=["ours", "jax"])
def test_one_module_class_under_policies_chosen_at_run_time(policy):
    """The same class with a policy on one instance and none on another, keywords included (flax #4626, #4778)."""
    rngs = nnx.Rngs(0, dropout=1)
    shared = nnx.Linear(DIM, DIM, rngs=rngs)
    wrapped, plain = (Block(shared, nnx.Rngs(0, dropout=1)) for _ in range(2))

    def both(call):
        return nnx.value_and_grad(lambda block, x: (call(block)(x, scale=0.5, residual=False) ** 2).sum())

    got = both(lambda block: jaxsub_nnx.remat(block.__call__, policy=policy, static_argnames="residual"))(wrapped, X)
    wanted = both(lambda block: block)(plain, X)
    assert_same([jax.tree.leaves(got)], [jax.tree.leaves(wanted)])
    assert_same([jax.tree.leaves(nnx.state(wrapped))], [jax.tree.leaves(nnx.state(plain))])
    assert int(wrapped.calls[...]) == 1


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        ({"Block": "save_costly"}, {"blocks/0", "blocks/1", "blocks/2"}),
        ({Block: "save_within(2KiB)"}, {"blocks/0", "blocks/1", "blocks/2"}),
        ({"blocks.[02]": "sqrt"}, {"blocks/0", "blocks/2"}),
        ({"blocks/1": "save_nothing", "blocks/1/layer": "save_nothing"}, {"blocks/1", "blocks/1/layer"}),
        ({nnx.Module: None}, None),
    ],
    ids=lambda p: str(sorted(p)) if isinstance(p, set) else str(p),  # the same order in every process
)
def test_policies_on_a_model_that_nobody_edits(patterns, paths, plain):
    """By name, type or path; results and states stay, regions appear and are listed, classes are put back."""
    call = Block.__call__
    with policies(patterns) as swap:
        assert_same(two_steps(Net()), plain)
        assert n_regions(Net()) > 0
    assert paths is None or {m.path for m in swap.matched} == paths
    assert all(str(m) in str(swap) for m in swap.matched[:5])
    assert Block.__call__ is call
    assert n_regions(Net()) == 0


class Stacked(nnx.Module):
    """Four blocks as a loop over stacked parameters, inside a module."""

    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key):
            return nnx.Linear(DIM, DIM, rngs=nnx.Rngs(key))

        self.layers = make(jax.random.split(jax.random.key(0), 4))
        self.head = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(1))

    def __call__(self, x):
        def step(x, layer):
            return jnp.tanh(layer(x)), None

        scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        return self.head(scan(x, self.layers)[0])


@pytest.mark.parametrize("pattern", ["Linear", nnx.Linear, "head"], ids=["name", "type", "path"])
def test_policies_inside_nnx_scan(pattern):
    """Modules in a loop are matched by class, those outside by path too; the gradient stays."""
    model = Stacked()
    wanted = nnx.grad(loss)(model, X)
    with policies({pattern: "save_nothing"}) as swap:
        got = nnx.grad(loss)(model, X)
        assert n_regions(model) == (1 if pattern == "head" else 2)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert "head" in {m.path for m in swap.matched}


def test_a_pattern_that_matches_nothing_is_an_error():
    """The error lists what was called; classes are put back all the same."""
    call = Block.__call__
    with pytest.raises(PolicyError, match="blocks/0 Block"), policies({"Block": None, "attention": "save_costly"}):
        loss(Net(), X)
    assert Block.__call__ is call


def test_a_plan_of_another_model_is_refused(tmp_path):
    """A plan saved to a file is taken back for the same model and refused for another."""
    plan = jaxsub_nnx.sublinear(loss, verify=False).plan(Net(), X)
    plan.save(tmp_path / "plan.json")
    again = jaxsub_nnx.sublinear(loss, plan=tmp_path / "plan.json")
    assert again.plan(Net(), X) == plan
    with pytest.raises(PlanMismatchError):
        again(Net(), X[:8])


def test_a_state_to_differentiate_is_given_as_wrt():
    """`nnx.DiffState` belongs to `nnx.grad`; the message names the option that says the same here."""
    with pytest.raises(TypeError, match=r"pass wrt=LoRAParam to jaxsub\.flax\.nnx\.sublinear"):
        jaxsub_nnx.sublinear(lambda model: model, argnums=nnx.DiffState(0, nnx.LoRAParam))


def test_one_sharding_stands_for_a_module():
    """A sharding for each variable of a module is refused with what to do instead; one for all of them is taken."""
    mesh = jax.make_mesh((1,), ("d",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    shardings = jax.tree.map(lambda _: whole, state)
    for each in (shardings, nnx.merge(nnx.graphdef(model), shardings)):
        with pytest.raises(UnsupportedError, match=r"nnx\.split the module and pass its state"):
            jaxsub_nnx.sublinear(lambda m, x: m(x).sum(), in_shardings=(each, whole))
    loss = jaxsub_nnx.sublinear(lambda m, x: m(x).sum(), in_shardings=(whole, whole), verify=False)
    assert jax.tree.leaves(nnx.grad(loss)(model, jnp.ones((1, 3))))[1].shape == (3, 2)
