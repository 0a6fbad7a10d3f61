"""Policies: data with names, JAX's protocol where it suffices, and what is saved counted in the residuals."""

import dataclasses
import re

import chex
import equinox as eqx
import flax.linen as nn
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from jaxsub import policies
from jaxsub.core.errors import BudgetError, PolicyError, UnsupportedError
from jaxsub.core.plan import walk
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import trace

N, ROWS, DIM = 16, 64, 8
UNIT = ROWS * DIM * 4  # bytes of one activation
ALL = ["save_nothing", "save_all", "save_costly", "save_within(9KiB)", "sqrt", "recursive(1)", "recursive(3)"]
PROTOCOL = ["save_nothing", "save_all", "save_costly"]


def chain(weights, x):
    """16 times tanh(x @ w): activations f32[64, 8]."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def chain_args(layers=N):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    return [jax.random.normal(k, (DIM, DIM)) / 3 for k in keys[1:]], jax.random.normal(keys[0], (ROWS, DIM))


def kept(fun, *args):
    """How many activations the backward pass of a function is handed, its own input and output left out."""
    leaves = jax.eval_shape(lambda *a: jax.tree.leaves(jax.vjp(fun, *a)[1]), *args)
    return sum(leaf.shape == (ROWS, DIM) for leaf in leaves) - 1


def assert_same_gradient(wrapped, *args):
    def total(fun):
        return jax.grad(lambda *a: (fun(*a) ** 2).sum(), argnums=(0, 1))

    chex.assert_trees_all_close(total(wrapped)(*args), total(chain)(*args), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_policy_is_data(name):
    """Equal by value, hashable, printable, and read back from its own name."""
    policy = policies.get(name)
    assert policies.get(str(policy)) == policy
    assert hash(policies.get(name)) == hash(policy)
    assert type(policy).__name__ in repr(policy)
    with pytest.raises((AttributeError, TypeError)):
        policy.k = 3


@given(st.integers(1, 2**50))
def test_the_limit_of_save_within_is_exact_in_its_name(n_bytes):
    """No limit is rounded on the way into a config and back."""
    policy = policies.save_within(n_bytes)
    assert policies.get(str(policy)) == policy


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_remat3", [False, True])
def test_every_policy_leaves_results_and_gradients_alone(name, is_remat3, request):
    """The wrapped function is the same function, also with jax_remat3."""
    if is_remat3:
        request.getfixturevalue("remat3")
    wrapped = policies.checkpoint(chain, policy=name)
    args = chain_args()
    chex.assert_trees_all_equal(wrapped(*args), chain(*args))
    assert_same_gradient(wrapped, *args)


@pytest.mark.parametrize("is_remat3", [False, True])
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("save_nothing", 0, 0),
        ("save_costly", N, N),
        ("save_within(9KiB)", 4, 5),
        ("sqrt", 2, 8),
        ("recursive(1)", 3, 5),
    ],
)
def test_what_is_saved_is_what_the_policy_says(name, least, most, is_remat3, request):
    """Residuals are counted, the output perhaps with them: 4 of 16 for 4.5 activations, O(sqrt(16)), log2(16)."""
    if is_remat3:
        request.getfixturevalue("remat3")
    assert least <= kept(policies.checkpoint(chain, policy=name), *chain_args()) <= most


def test_a_policy_wraps_a_function():
    with pytest.raises(
        TypeError, match=r"jaxsub\.policies\.checkpoint takes a function, and options such as the policy"
    ):
        policies.checkpoint("save_all")


def test_save_all_saves_as_much_as_no_wrapper():
    """save_all changes nothing."""
    args = chain_args()
    assert kept(policies.checkpoint(chain, policy="save_all"), *args) == kept(chain, *args) >= N


@given(st.integers(1, 20 * UNIT))
def test_save_within_keeps_to_its_limit_and_uses_it(limit):
    """What is saved beside the output never exceeds the limit, and leaves less than one activation of it unused."""
    args = chain_args()
    n = kept(policies.checkpoint(chain, policy=policies.save_within(limit)), *args)
    assert (n - 1) * UNIT <= limit
    assert n >= min(N - 1, limit // UNIT)


def test_sqrt_saves_as_the_square_root():
    """Nine times as many layers, about three times as many segments, one more than activations saved between them."""
    weights, x = chain_args()
    few, many = (kept(policies.checkpoint(chain, policy="sqrt"), weights * n, x) + 1 for n in (1, 9))
    assert many <= 4 * few


@pytest.mark.parametrize(("k", "layers"), [(1, 16), (2, 27), (3, 64)])
def test_the_recursion_nests(k, layers):
    """recursive(k) nests regions, as deep as log_{k+1}(n); the innermost parts may store what their layers make."""
    program = trace(chain, chain_args(layers), {}, argnums=(0, 1))
    plan = policies.recursive(k).plan(program)
    assert max(plan.mirror_counts) >= 2
    assert max(plan.mirror_counts) <= np.log(layers) / np.log(k + 1) + 2
    assert any(s.children for s in walk(plan.segments))


@pytest.mark.parametrize("name", ["sqrt", "recursive(2)"])
def test_the_last_segment_of_a_loss_is_not_recomputed(name):
    """In a loss the backward pass starts at once where the forward ends; in a part of a network it does not."""
    args = chain_args()
    part = policies.get(name).plan(trace(chain, args, {}, argnums=(0, 1)))
    loss = policies.get(name).plan(trace(lambda *a: chain(*a).sum(), args, {}, argnums=(0, 1)))
    assert part.segments[-1].stop == part.n_nodes
    assert loss.segments[-1].stop < loss.n_nodes


@pytest.mark.parametrize("name", PROTOCOL)
def test_policies_by_protocol_work_in_jax_flax_and_equinox(name):
    """jax.checkpoint, linen, nnx and Equinox take the object as it is and save the same."""
    policy, x = getattr(policies, name), jnp.ones((4, 3))
    same = {"save_nothing": None, "save_all": checkpoint_policies.everything_saveable,
            "save_costly": checkpoint_policies.dots_saveable}[name]  # fmt: skip

    class Net(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jnp.sin(jnp.sin(self.layer(x)))

    linen, layer = nn.Dense(3), eqx.nn.Linear(3, 3, key=jax.random.key(0))
    variables = linen.init(jax.random.key(0), x)

    def by_jax(p):
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ x.T)).sum(), policy=p)

    def by_linen(p):
        return lambda x: nn.apply(nn.remat(lambda m, x: jnp.sin(jnp.sin(m(x))), policy=p), linen)(variables, x).sum()

    def by_nnx(p):
        return lambda x: nnx.remat(lambda m, x: m(x), policy=p)(Net(), x).sum()

    def by_equinox(p):
        return lambda x: eqx.filter_checkpoint(lambda m, x: jnp.sin(jnp.sin(jax.vmap(m)(x))), policy=p)(layer, x).sum()

    for wrap in (by_jax, by_linen, by_nnx, by_equinox):
        ours, theirs = (str(jax.make_jaxpr(jax.grad(wrap(p)))(x)) for p in (policy, same))
        assert ours.count(" sin ") == theirs.count(" sin ")
        assert ours.count("dot_general") == theirs.count("dot_general")


@pytest.mark.parametrize("policy", [policies.save_within("1MiB"), policies.sqrt, policies.recursive(2)], ids=str)
def test_policies_of_whole_functions_refuse_the_protocol(policy):
    """Handed to jax.checkpoint they say what to call instead; they are never silently something else."""
    with pytest.raises(UnsupportedError, match=r"jaxsub\.policies\.checkpoint"):
        jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=policy))(1.0)


def test_what_is_costly_can_be_overridden():
    """A primitive moves from one side to the other, by name."""
    args = chain_args()

    def executed(policy):
        wrapped = policies.checkpoint(chain, policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda *a: wrapped(*a).sum()))(*args)).count(" tanh ")

    assert (executed("save_costly"), executed("save_costly(+tanh)")) == (2 * N, N)
    assert kept(policies.checkpoint(chain, policy="save_costly(-dot_general)"), *args) == 0


def test_loops_over_costly_work_are_costly():
    """A loop is judged by what is in it."""
    eqns = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y, x))(jnp.ones((2, 2))).eqns
    loop = next(eqn for eqn in eqns if eqn.primitive.name in ("scan", "while"))
    assert policies.save_costly(loop.primitive, **loop.params)
    assert not policies.SaveCostly(cheap=["dot_general"])(loop.primitive, **loop.params)


def test_static_arguments_keywords_and_functions_pass_through():
    """Static arguments by place, keywords by name, and functions among the leaves of an argument."""

    def block(params, x, n, *, scale):
        for _ in range(n):
            x = params["activation"](x @ params["w"]) * scale
        return x

    params = {"w": jnp.eye(2), "activation": jnp.tanh}
    wrapped = policies.checkpoint(block, policy="save_within(1KiB)", static_argnums=2)
    x = jnp.ones((3, 2))
    chex.assert_trees_all_equal(wrapped(params, x, 3, scale=2.0), block(params, x, 3, scale=2.0))
    with pytest.raises(ValueError, match="argument 7"):
        policies.checkpoint(block, policy="sqrt", static_argnums=7)(params, x, 3, scale=2.0)


def test_a_function_of_integers_is_left_alone():
    """Where nothing flows back there is nothing to save."""
    assert policies.checkpoint(lambda n: n + 1, policy="sqrt")(jnp.arange(3)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("policy", ["save_costly", "save_within(1KiB)", "sqrt", "recursive(1)"])
def test_numbers_are_arguments_and_a_function_may_compute_nothing(policy):
    """A scale that is a Python number; dropout at inference, which returns what it is given."""
    w = jnp.linspace(0.1, 1.0, 12).reshape(4, 3)
    scaled = lambda w, scale: jnp.tanh(jnp.tanh(w @ w.T) @ w) * scale  # noqa: E731
    wrapped = policies.checkpoint(scaled, policy=policy)
    wanted, found = (jax.grad(lambda w, f=f: f(w, 2.0).sum())(w) for f in (scaled, wrapped))
    chex.assert_trees_all_close(found, wanted, rtol=1e-5)
    chex.assert_trees_all_equal(policies.checkpoint(lambda w: w, policy=policy)(w), w)


@pytest.mark.parametrize(
    ("name", "error", "word"),
    [
        ("save_everything", PolicyError, "save_costly"),
        ("sqrt(2)", PolicyError, "nothing in parentheses"),
        ("recursive(0)", PolicyError, "at least 1"),
        ("recursive(two)", PolicyError, "whole number"),
        ("recursive(\u00b2)", PolicyError, "whole number"),
        ("save_within", BudgetError, "GiB"),
        ("save_within(8 bananas)", BudgetError, "bananas"),
        ("save_costly(exp)", PolicyError, r"\+name"),
        ("save_costly(+exp, -exp)", PolicyError, "both|costly and as cheap"),
        (7, PolicyError, "a name"),
    ],
)
def test_wrong_policies_are_refused(name, error, word):
    """The message says what there is."""
    with pytest.raises(error, match=word):
        policies.get(name)


def test_save_within_takes_no_fraction():
    """A policy knows no whole to take a fraction of."""
    with pytest.raises(PolicyError, match=r"0\.5"):
        policies.save_within(0.5)


def by_jax(policy):
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ x.T)).sum(), policy=policy)


def by_linen(policy):
    layer = nn.remat(nn.Dense, policy=policy)(3)
    return lambda x: jnp.sin(layer.init_with_output(jax.random.key(0), x)[0]).sum()


def by_nnx(policy):
    return lambda x: nnx.remat(lambda m, x: jnp.sin(m(x)), policy=policy)(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), x).sum()


def by_equinox(policy):
    return lambda x: eqx.filter_checkpoint(lambda f, x: jnp.sin(f(x @ x.T)), policy=policy)(jnp.sin, x).sum()


@pytest.mark.parametrize("wrap", [by_jax, by_linen, by_nnx, by_equinox])
@pytest.mark.parametrize("name", ["save_all", "save_costly", "save_costly(+sin)"])
def test_where_jax_ignores_policies_ours_raise(wrap, name, request):
    """With jax_remat3 a policy of ours is applied or refused, however it is passed to JAX and whenever it was made."""
    policy, x = policies.get(name), jnp.ones((4, 3))
    request.getfixturevalue("remat3")
    wrapped = wrap(policy)
    saves_only_products = name == "save_costly" or (wrap is by_linen and name != "save_all")
    if saves_only_products and "dot_general" in compat.asked_by_remat3():
        assert jax.grad(wrapped)(x).shape == x.shape
        return
    for run in (wrapped, jax.grad(wrapped), jax.jit(jax.grad(wrapped))):
        with pytest.raises(UnsupportedError, match=rf"silently ignores the policy {re.escape(name)}"):
            run(x)


def test_what_jax_asks_about_is_saved_with_remat3_too(remat3):
    """Where JAX asks about products, save_costly saves them; where it does not, nothing is silently recomputed."""
    loss = jax.grad(by_jax(policies.save_costly))
    if "dot_general" in compat.asked_by_remat3():
        plain = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(jnp.sin(x @ x.T)).sum()))(jnp.ones((4, 3)))
        assert str(jax.make_jaxpr(loss)(jnp.ones((4, 3)))).count("dot_general") == str(plain).count("dot_general")
    else:
        with pytest.raises(UnsupportedError, match="recomputes dot_general"):
            loss(jnp.ones((4, 3)))


def test_a_region_that_saves_nothing_is_let_through_with_remat3(remat3):
    """What a policy does not want saved may be recomputed: no error where nothing is ignored."""
    for policy in (policies.save_nothing, policies.save_costly):
        assert jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=policy))(0.0) == 1.0


def test_names_of_integers_are_kept_with_remat3(remat3):
    """A mask that is named can be saved by its name: it has no gradient, but is no primitive to be expanded."""

    def masked(x):
        mask = jax.ad_checkpoint.checkpoint_name((x > 0).astype(jnp.int8), "mask")
        return jnp.where(mask > 0, jnp.tanh(x), 0.0).sum()

    assert "mask" in map(compat.given_name, trace(masked, [jnp.ones((4, 3))], {}).eqns)


def named_chain(weights, x):
    """As `chain`, every layer named; what a tanh is of is called `sum`."""
    for i, w in enumerate(weights):
        x = checkpoint_name(jnp.tanh(checkpoint_name(x @ w, "sum")), f"layer_{i % 4}")
    return x


def saves_tanh(primitive, *_, **__):
    """A policy that nobody knows."""
    return primitive.name == "tanh"


def saves_products(primitive, *_, **__):
    """JAX's `dots_saveable`, of which JAX does not know that it is one."""
    return primitive.name == "dot_general"


OTHERS = [
    checkpoint_policies.nothing_saveable,
    checkpoint_policies.everything_saveable,
    checkpoint_policies.dots_saveable,
    checkpoint_policies.dots_with_no_batch_dims_saveable,
    checkpoint_policies.save_only_these_names("layer_0"),
    checkpoint_policies.save_any_names_but_these("layer_0", "sum"),
    checkpoint_policies.save_from_both_policies(
        checkpoint_policies.save_only_these_names("layer_0"), checkpoint_policies.save_only_these_names("layer_2")
    ),
    checkpoint_policies.save_from_both_policies(saves_products, checkpoint_policies.save_only_these_names("layer_0")),
    saves_tanh,
]


@dataclasses.dataclass(frozen=True)
class Keeps:
    names: frozenset

    def __call__(self, primitive, *_, name=None, **__):
        return name in self.names


def test_a_set_of_names_is_told_in_the_same_words_in_every_process():
    """How a set prints differs from process to process, and workers that collect the same tests must agree."""
    assert policies.label(Keeps(frozenset("cab"))) == "Keeps(names=['a', 'b', 'c'])"


@pytest.mark.parametrize("policy", OTHERS, ids=lambda p: f"{OTHERS.index(p)}-{policies.label(p)}")
def test_where_jax_ignores_policies_others_are_carried_out(policy, request):
    """With jax_remat3 our wrapper saves as much under JAX's policies, and those of others, as JAX does without."""
    args = chain_args()
    wanted, without = kept(jax.checkpoint(named_chain, policy=policy), *args), kept(named_chain, *args)
    request.getfixturevalue("remat3")
    got = kept(policies.checkpoint(named_chain, policy=policy), *args)
    assert min(wanted, without) - 1 <= got <= wanted  # what the function returns need not be kept twice
    assert_same_gradient(policies.checkpoint(named_chain, policy=policy), *args)


def loop(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]


@pytest.mark.parametrize(
    ("policy", "fun", "word"),
    [
        (saves_tanh, loop, "saves_tanh for tanh inside loops"),
        (checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"), jnp.matmul, "another memory"),
    ],
    ids=["loop", "memory"],
)
def test_what_no_region_can_save_is_refused(policy, fun, word, remat3):
    """The error names the policy, not its address."""
    with pytest.raises(UnsupportedError, match=word) as error:
        policies.checkpoint(fun, policy=policy)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert " at 0x" not in str(error.value)


def test_ready_made_policies_are_data():
    """Without that flag nothing is ignored, and a name that is none raises."""
    assert not compat.ignores_policies()
    assert policies.save_all == policies.SaveAll()
    with pytest.raises(AttributeError, match="save_most"):
        _ = policies.save_most
