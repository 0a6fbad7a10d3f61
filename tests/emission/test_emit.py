"""From a plan back to a function: regions, names, barriers, what is shared, and what is refused."""

import functools
from dataclasses import replace
from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jaxprs import barriers, count, is_region, plan_of, regions

import jaxsub
from jaxsub.core.decisions import Inside, Loop, walk
from jaxsub.core.errors import PlannerError, UnsupportedError
from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.devices.compile import measure_compiled
from jaxsub.devices.targets import get_target
from jaxsub.emission.emit import emit, keep_out
from jaxsub.emission.scan_unrolling import unrolled
from jaxsub.emission.scans import body_program, branch_programs
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.cuts import find_crossings
from jaxsub.partition.inner_programs import find_loops
from jaxsub.search import call_sites
from jaxsub.search.verify import gradient

W, X = jnp.eye(4) * 0.9, jnp.ones((3, 4))


def chain(w, x):
    """Eight layers, two equations each."""
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def traced(program, plan):
    return jax.make_jaxpr(emit(program, plan))(*program.avals())


def residual_shapes(program, plan):
    """Shapes of what the backward pass of an emitted function reads, arguments left out."""
    run = emit(program, plan)
    forward = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(lambda *a: run(*a)[0], *a)[1]))(*program.avals())
    jaxpr = getattr(forward, "jaxpr", forward)
    given = set(jaxpr.invars)
    return sorted({v: v.aval.shape for v in jaxpr.outvars if not hasattr(v, "val") and v not in given}.values())


def test_one_region_a_segment_nested_alike():
    """As many regions as segments, nested in the same way."""
    program = trace(chain, (W, X), {})
    nest = Segment(4, 12, (), (Segment(4, 6), Segment(8, 12, (), (Segment(10, 12),))))
    plan = plan_of(program, Segment(0, 4), nest)
    found = list(regions(traced(program, plan)))
    assert len(found) == plan.n_regions == 5
    outer = [eqn for eqn in traced(program, plan).eqns if is_region(eqn)]
    assert len(outer) == 2
    assert len(list(regions(bodies_of(outer[1])[0]))) == 3


def test_alike_segments_share_one_function():
    """Segments of the same equations, wired alike, are one body; of other wiring they are not."""
    program = trace(chain, (W, X), {})
    alike = plan_of(program, Segment(0, 4), Segment(4, 8), Segment(8, 12))
    assert len({id(bodies_of(r)[0]) for r in regions(traced(program, alike))}) == 1
    other = plan_of(program, Segment(0, 4), Segment(4, 8, (program.graph.first_value(5),)), Segment(9, 13))
    assert len({id(bodies_of(r)[0]) for r in regions(traced(program, other))}) == 3


def test_what_closes_over_other_things_is_not_alike():
    """Rules with one code that close over different numbers are not taken for one another, equal ones are shared."""

    def scaled(c):
        rule = jax.custom_jvp(jnp.sin)
        rule.defjvp(lambda primals, tangents: (jnp.sin(*primals), c * tangents[0]))
        return rule

    def fun(x):
        for c in (1.0, 1.0, 2.0):
            x = scaled(c)(x)
        return x

    program = trace(fun, (0.5,), {})
    plan = plan_of(program, Segment(0, 1), Segment(1, 2), Segment(2, 3))
    assert jax.grad(lambda x: emit(program, plan)(x)[0])(0.5) == 2.0
    assert len({id(bodies_of(r)[0]) for r in regions(traced(program, plan))}) == 2


def test_segments_inside_others_save_values():
    """Their saved values are not recomputed: of eight products two less than where they save nothing.

    With `jax_remat3` JAX would recompute them, and the plan is refused.
    """
    program = trace(chain, (W, X), {})
    first, products = program.graph.first_value, []
    for saved in ((), ((first(2),), (first(10),))):
        inner = [Segment(0, 6, *saved[:1]), Segment(8, 14, *saved[1:])]
        plan = plan_of(program, Segment(0, 15, (), tuple(inner)), barriers=(8,))
        function = jax.value_and_grad(jaxsub.sublinear(chain, plan=plan))
        products.append(count(jax.make_jaxpr(function)(W, X), "dot_general"))
        chex.assert_trees_all_close(function(W, X), jax.value_and_grad(chain)(W, X), rtol=1e-6)
    assert products[0] - products[1] == 2


@pytest.mark.skipif(
    compat.version_of(jax.__version__) < (0, 11), reason="jax_remat3 makes no region of ours before JAX 0.11"
)
def test_what_remat3_would_make_again_is_refused(remat3):
    """A plan made without `jax_remat3` that saves values inside nests, of loops' bodies too; and what is planned."""

    def loss(ws, x):
        return jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x) ** 2)

    program = trace(chain, (W, X), {})
    nested = Segment(0, 15, (), (Segment(0, 6, (program.graph.first_value(2),)),))
    scanned = trace(lambda w, x: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=9)[0].sum(), (W, X), {})
    loop = Loop(find_loops(scanned)[0], (3,), inside=Inside((Segment(0, 2, (2,)),)))
    for refused, plan, named in (
        (program, plan_of(program, nested), "0:6"),
        (scanned, replace(plan_of(scanned), loops=(loop,)), "0:2"),
        (scanned, replace(plan_of(scanned), loops=(replace(loop, inside=Inside(saved=(0,)), is_recomputed=True),)),
         f"steps of loop {loop.node}"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=rf"save inside other regions: {named}\. Make a new plan"):
            emit(refused, plan)
    found = jaxsub.plan(loss, [W] * 12, jnp.ones((256, 4)), budget=0.4, verify=False, cache=False, progress=False)
    assert not [s for outer in found.segments for s in walk(outer.children) if s.saved]


def test_saved_values_are_the_residuals():
    """A region keeps what its segment saves and nothing else that it makes."""
    program = trace(chain, (W, X), {})
    product = program.graph.first_value(2)
    none, some = plan_of(program, Segment(0, 15)), plan_of(program, Segment(0, 15, (product, product + 4)))
    assert residual_shapes(program, none).count((3, 4)) + 2 == residual_shapes(program, some).count((3, 4))


def test_barriers_tie_activations_to_weights():
    """In front of a barrier's node stands one barrier, over the activation and the weight that are read after it."""
    program = trace(chain, (W, X), {}, argnums=(0, 1))
    found = [
        e for e in traced(program, plan_of(program, barriers=[4])).eqns if e.primitive.name == "optimization_barrier"
    ]
    assert [[v.aval.shape for v in e.outvars] for e in found] == [[(3, 4), (4, 4)]]
    assert not [e for e in traced(program, plan_of(program)).eqns if e.primitive.name == "optimization_barrier"]


def with_report(w, x):
    """The chain, and the mean of its first layer, taken after the last."""
    first = x = jnp.tanh(x @ w)
    for _ in range(7):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2), jnp.mean(first)


def test_what_only_reports_on_a_value_does_not_keep_it():
    """A metric of an early value holds it neither behind later barriers nor across cuts: no zeros stand for it."""
    program = trace(with_report, (W, X), {})
    first = program.graph.nodes[1].outputs[0]
    assert (program.graph.last_uses()[first], program.graph.gradient_uses()[first]) == (18, 2)
    assert find_crossings(program.graph, (0, 2, 4, len(program.eqns)))[0].last == 1
    jaxpr = traced(program, plan_of(program, Segment(0, 4), barriers=(4, 8, 12)))
    fences = [len(eqn.invars) for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    assert fences == [2, 2, 2]


def test_emitting_changes_nothing():
    """Emitting twice gives the same jaxpr, and a function emitted from an emitted one the same values and gradients."""
    program = trace(chain, (W, X), {})
    plan = plan_of(program, Segment(2, 8, (), (Segment(4, 6),)), Segment(8, 12), barriers=(2, 8))
    assert str(traced(program, plan)) == str(traced(program, plan))
    once = jaxsub.sublinear(chain, plan=plan)
    twice = jaxsub.sublinear(once, verify=False, cache=False)
    wanted = jax.jit(jax.value_and_grad(chain))(W, X)
    for f in (once, twice):
        chex.assert_trees_all_close(jax.jit(jax.value_and_grad(f))(W, X), wanted, rtol=1e-6)


def halves(start, stop):
    """Segments that halve a run of nodes, and their halves, and so on."""
    middle = (start + stop) // 2
    return tuple(Segment(a, b, (), halves(a, b)) for a, b in ((start, middle), (middle, stop)) if b > a + 1)


@pytest.mark.parametrize(("n", "again"), [(4, 2), (8, 8), (16, 24)])
def test_evaluations_of_recursive_halving(n, again):
    """Nesting by halves evaluates sines again as often as JAX's own tests say, which is the sum of m(v)."""

    def sines(x):
        for _ in range(n):
            x = jnp.sin(x)
        return x

    program = trace(sines, (jnp.float32(1),), {})
    plan = plan_of(program, *halves(0, n))
    gradient = jax.make_jaxpr(jax.grad(lambda x: emit(program, plan)(x)[0]))(jnp.float32(1))
    assert count(gradient, "sin") == n + again


def test_what_runs_once_is_refused_in_a_segment():
    """All equations that may not be recomputed are listed with their lines; keep_out makes such a plan fit."""

    def fun(w):
        for _ in range(2):
            w = jnp.sin(w)
            io_callback(lambda x: None, None, lax.stop_gradient(w))
        return jnp.sum(jnp.cos(w))

    program = trace(fun, (W,), {})
    whole = plan_of(program, Segment(0, len(program.eqns)))
    with pytest.raises(jaxsub.UnsupportedError, match=r"io_callback.*test_emit.py:\d+.*io_callback"):
        emit(program, whole)
    pinned = [n.index for n in program.graph.nodes if not n.can_recompute]
    kept = keep_out(whole, pinned)
    assert kept.n_regions == 3
    chex.assert_trees_all_close(jax.grad(lambda w: emit(program, kept)(w)[0])(W), jax.grad(fun)(W))


def test_keep_out_of_nests():
    """A nest round a node that runs once falls apart into what is left of it; others stay."""
    nest = Segment(0, 9, (), (Segment(1, 3), Segment(3, 8, (), (Segment(4, 6),))))
    plan = Plan("f", Budget(), 12, (nest, Segment(10, 12)))
    starts = [(s.start, s.stop) for s in keep_out(plan, [5]).segments]
    assert starts == [(0, 1), (1, 3), (3, 4), (4, 5), (6, 8), (8, 9), (10, 12)]
    assert keep_out(plan, [9]) is plan


def test_another_program():
    """A plan of another program is refused, and says both fingerprints."""
    program, other = trace(chain, (W, X), {}), trace(chain, (W, X[:2]), {})
    with pytest.raises(jaxsub.PlanMismatchError, match=other.fingerprint) as refused:
        emit(program, plan_of(other))
    assert refused.value.function_fingerprint == program.fingerprint


def test_complex_values_are_not_named():
    """A plan that saves a complex number, which JAX cannot, recomputes it."""

    def fun(w):
        return jnp.sum(jnp.abs(jnp.fft.fft(jnp.sin(jnp.fft.fft(w)))) ** 2)

    program = trace(fun, (W,), {})
    n = len(program.eqns)
    plan = plan_of(program, Segment(0, n - 1, tuple(program.graph.made_by(0, n - 1))))
    chex.assert_trees_all_close(jax.grad(lambda w: emit(program, plan)(w)[0])(W), jax.grad(fun)(W), rtol=1e-5)


@pytest.mark.parametrize(
    ("segment", "barriers", "words"),
    [
        (Segment(0, 6, (3,), (Segment(0, 3),)), (), r"Segment 0:6 saves values and has segments inside"),
        (Segment(0, 6, (3,)), (2,), r"Segment 0:6 saves values and has barriers inside"),
        (Segment(0, 2, (99,)), (), r"Segment 0:2 saves the values \[99\], which it does not make"),
    ],
)
def test_saved_values_that_would_be_ignored_are_refused(segment, barriers, words):
    """A region that could not save what its plan says is refused, with what to do."""

    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x.sum()

    program = trace(loss, [jnp.eye(2), jnp.ones((3, 2))], {})
    with pytest.raises(PlannerError, match=words):
        emit(program, Plan(program.fingerprint, Budget(), len(program.eqns), (segment,), barriers))


def narrowing(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


@pytest.mark.parametrize("is_step", [False, True], ids=["function", "step"])
@pytest.mark.parametrize(("target", "shapes"), [("h100", [(6, 5), (7, 6), (3, 7)]), ("cpu", [(3, 7), (7, 6), (6, 5)])])
def test_barriers_for_gpus_hold_first_what_is_made_first(target, shapes, is_step):
    """The weight that is read last first, activations behind: whatever names the GPU, the function or a whole step."""
    ws, x = [jnp.ones((8 - i, 7 - i)) for i in range(3)], jnp.ones((3, 8))
    program = trace(narrowing, (ws, x), {}, argnums=0)
    second = next(n.index for n in program.graph.nodes if 1 in n.inputs)
    plan = plan_of(program, barriers=[second])
    run = jaxsub.sublinear(narrowing, plan=plan, target=None if is_step else target, verify=False)
    if is_step:
        run = call_sites.tried(run, call_sites.Trial(get_target(target)))
    held = [[v.aval.shape for v in values] for values in barriers(jax.make_jaxpr(run)(ws, x))]
    assert held == [shapes]


def test_barriers_in_loops_stand_in_the_order_of_the_program():
    """What is known of the device is known of a loop's body too, of its steps written out, and of branches."""
    shapes = [jax.ShapeDtypeStruct((4, 2, 5, 5), jnp.float32), jax.ShapeDtypeStruct((3, 5), jnp.float32)]

    def loss(ws, x):
        x = lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None), x, ws)[0]
        return jnp.sum(lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x))

    program = replace(trace(loss, shapes, {}, argnums=0), platform="cuda")
    nodes = {n.primitive: n.index for n in program.graph.nodes}
    body = body_program(program, nodes["scan"])
    derived = (body, unrolled(body, 0, 1, 4, reverse=False),
               *branch_programs(program, nodes["cond"]))  # fmt: skip
    assert [p.platform for p in derived] == ["cuda"] * 4


def two_at_a_time(ws, x):
    """A recurrent network of two layers, a loss at each of six steps."""
    low = high = x
    total = 0.0
    for _ in range(6):
        low = jnp.tanh(low @ ws[0])
        high = jnp.tanh((high + low) @ ws[1])
        total += jnp.sum(high)
    return total


def test_sums_of_gradients_stay_in_the_places_of_their_outputs():
    """Where a region reads two weights that others read too, one product at a time stands beside the outputs."""
    shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2, jax.ShapeDtypeStruct((2, 256), jnp.float32)
    program = trace(two_at_a_time, shapes, {})
    starts = [n.index for n in program.graph.nodes if n.is_costly][::2]
    regions_of_two = (Segment(a, b) for a, b in pairwise(starts))
    plan = plan_of(program, *regions_of_two, barriers=starts[1:])
    found = measure_compiled(*gradient(program, emit(program, plan)))
    assert found.temp_bytes < 1.5 * 256 * 256 * 4
