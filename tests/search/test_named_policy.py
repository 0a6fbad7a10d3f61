"""Plans as policies of names: the same residuals and memory under `jax.checkpoint`, or a reason why not."""

from collections import Counter
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Conditional, Inside, Loop, Segment, Slices
from jaxsub.core.errors import UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.jaxpr.trace import trace
from jaxsub.search.verify import finish

DIM, DEPTH, BATCH = 32, 8, 256
MARGIN = 0.02
"""By how much what the compiler gives the function under the policy may differ from what it gives the plan."""


def layer(w, x):
    """A block whose products have names."""
    h = checkpoint_name(x @ w["up"], "up")
    return x + checkpoint_name(jnp.sin(h) @ w["down"], "down")


def scanned(wrap=lambda f: f):
    def loss(ws, x):
        y, _ = jax.lax.scan(lambda x, w: (wrap(layer)(w, x), None), x, ws)
        return jnp.mean(jnp.sin(y) ** 2)

    return loss


def unrolled(wrap=lambda f: f):
    def loss(ws, x):
        for i in range(DEPTH):
            x = wrap(layer)(ws[i], x)
        return jnp.mean(jnp.sin(x) ** 2)

    return loss


def arguments(is_list=False):
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = ((DEPTH, DIM, 4 * DIM), (DEPTH, 4 * DIM, DIM))
    ws = {"up": jax.random.normal(keys[0], up) / 8, "down": jax.random.normal(keys[1], down) / 8}
    layers = [jax.tree.map(lambda w, i=i: w[i], ws) for i in range(DEPTH)]
    return layers if is_list else ws, jax.random.normal(keys[2], (BATCH, DIM))


STACKED, LISTED = arguments(), arguments(is_list=True)


def finished(fun, args, **decided):
    """A plan of what is decided, as planners finish it."""
    program = trace(fun, args, {})
    return finish(program, Plan(program.fingerprint, Budget(), len(program.eqns), **decided), Budget())


def kept(fun, args):
    """Bytes of each residual that is no argument, nor a scalar."""
    return Counter(r.n_bytes for r in jaxsub.residuals(fun, *args) if r.producer is not None and r.n_bytes > 4)


def same(by_hand, planned, plain, args):
    """Assert that two functions keep and take the same, and that all three have the same gradients."""
    assert kept(by_hand, args) == kept(planned, args)
    got, wanted, before = (jaxsub.measure(f, *args).temp_bytes for f in (by_hand, planned, plain))
    assert abs(got - wanted) <= MARGIN * wanted
    assert wanted < 0.7 * before
    for fun in (by_hand, planned):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
                     jax.grad(fun)(*args), jax.grad(plain)(*args))  # fmt: skip


def nodes(fun, primitive):
    return [n.index for n in trace(fun, LISTED, {}).graph.nodes if n.primitive == primitive]


@pytest.mark.parametrize("saves", [("up",), ()])
def test_a_loop_s_plan_as_a_policy(saves):
    """The body under the policy saves and takes what the plan does: one that a planner finds, and one of none saved."""
    if saves:
        plan = jaxsub.plan(scanned(), *STACKED, budget=0.8, chunks=False, cache=False, progress=False)
    else:
        plan = finished(scanned(), STACKED, loops=(SCAN,))
    assert plan.policy_names.saved == saves
    policy = plan.to_policy()
    by_hand = scanned(lambda f: jax.checkpoint(f, policy=policy, prevent_cse=False))
    same(by_hand, jaxsub.sublinear(scanned(), plan=plan), scanned(), STACKED)


@pytest.mark.parametrize("saves", [(), ("up",)])
def test_blocks_as_a_policy(saves):
    """Regions that are blocks, in a plan that was saved and loaded: each under the policy saves and takes the same."""
    graph = trace(unrolled(), LISTED, {}).graph
    edges = [0, *(n + 1 for n in nodes(unrolled(), "add"))]
    segments = tuple(
        Segment(a, b, tuple(v for v in graph.made_by(a, b) if graph.values[v].name in saves))
        for a, b in pairwise(edges)
    )
    plan = Plan.from_json(finished(unrolled(), LISTED, segments=segments).to_json())
    by_hand = unrolled(lambda f: jax.checkpoint(f, policy=plan.to_policy()))
    same(by_hand, jaxsub.sublinear(unrolled(), plan=plan), unrolled(), LISTED)
    places = {name: "device" if name in saves else "remat" for name in ("up", "down")}
    assert plan.to_policy("maxtext") == {"remat_policy": "custom", **places}


def test_offloaded_names():
    """What a region keeps in host memory is offloaded by name, and called so for MaxText."""
    graph = trace(unrolled(), LISTED, {}).graph
    up = next(v.index for v in graph.values if v.name == "up")
    segment = Segment(0, nodes(unrolled(), "add")[0] + 1, (up,), offloaded=(up,))
    plan = finished(unrolled(), LISTED, segments=(segment,))
    assert plan.to_policy("maxtext") == {"remat_policy": "custom", "up": "offload", "down": "remat"}
    named = jax.make_jaxpr(lambda x: checkpoint_name(x, "up"))(1.0).eqns[0]
    assert type(plan.to_policy()(named.primitive, **named.params)).__name__ == "Offloadable"


SCAN = Loop(0, is_recomputed=True)
SIN = tuple(n.outputs[0] for n in trace(unrolled(), LISTED, {}).graph.nodes if n.primitive == "sin")[:1]
UNSAID = {
    "nests": (unrolled(), LISTED, {"segments": (Segment(0, 12, (), (Segment(0, 6),)),)}, "inside regions"),
    "nothing": (unrolled(), LISTED, {}, "recomputes nothing"),
    "no name": (unrolled(), LISTED, {"segments": (Segment(0, 12, SIN),)}, "no name.*Name values"),
    "blocks": (scanned(), STACKED, {"loops": (Loop(0, (4,), True),)}, "blocks of steps"),
    "last steps": (scanned(), STACKED, {"loops": (Loop(0, is_recomputed=True, kept_steps=2),)}, "last steps are kept"),
    "written out": (scanned(), STACKED, {"loops": (Loop(0, is_unrolled=True),)}, "a loop is unrolled"),
    "inside": (
        scanned(),
        STACKED,
        {"loops": (Loop(0, inside=Inside((Segment(0, 2),))),)},
        "body has regions",
    ),
    "branches": (scanned(), STACKED, {"loops": (Conditional(0, (Inside(),)),)}, "conditional"),
    "barriers": (unrolled(), LISTED, {"segments": (Segment(0, 12),), "barriers": (4,)}, "gradient barriers"),
    "slices": (scanned(), STACKED, {"loops": (SCAN,), "slices": (Slices(0, 1, 0, 0, 2),)}, "runs in slices"),
}


@pytest.mark.parametrize("kind", UNSAID)
def test_what_no_policy_says_is_refused(kind):
    """The error says what of the plan a policy of names cannot say, and that the plan itself can be used."""
    fun, args, decided, words = UNSAID[kind]
    late = {"slices": decided.pop("slices")} if "slices" in decided else {}
    with pytest.raises(UnsupportedError, match=f"{words}.*sublinear\\(fun, plan=plan\\)"):
        finished(fun, args, **decided).replace(**late).to_policy()


def test_a_name_that_is_saved_once_and_recomputed_once():
    """One name in two regions that do not agree is no policy."""
    graph, ends = trace(unrolled(), LISTED, {}).graph, nodes(unrolled(), "add")
    up = next(v.index for v in graph.values if v.name == "up")
    segments = (Segment(0, ends[0] + 1, (up,)), Segment(ends[0] + 1, ends[1] + 1))
    with pytest.raises(UnsupportedError, match="'up' is saved in one place and not in another"):
        finished(unrolled(), LISTED, segments=segments).to_policy()


def test_a_named_tanh_is_refused():
    """JAX would run tanh again to know its derivative, which a plan that saves its result does not."""

    def loss(w, x):
        return (checkpoint_name(jnp.tanh(x @ w), "h") @ w).sum()

    w = jnp.eye(DIM)
    program = trace(loss, (w, w), {})
    (tanh,) = [n.outputs[0] for n in program.graph.nodes if n.primitive == "tanh"]
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), (Segment(0, len(program.eqns), (tanh,)),))
    with pytest.raises(UnsupportedError, match=r"`h float32.*has no name"):
        finish(program, plan, Budget()).to_policy()


def test_other_refusals():
    """A plan made by hand knows no names, and there are two forms."""
    plan = Plan("f", Budget(), 3)
    with pytest.raises(UnsupportedError, match=r"made by hand.*jaxsub.plan"):
        plan.to_policy()
    with pytest.raises(ValueError, match="\"maxtext\", got 'torch'"):
        plan.to_policy("torch")
