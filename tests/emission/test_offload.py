"""Values kept in host memory between the passes: the same gradients, less on the device, and only where it pays."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Loop, Segment, walk
from jaxsub.core.errors import InfeasibleBudgetError, PlannerError, UnsupportedError
from jaxsub.core.plan import Plan
from jaxsub.devices.aot import require_packages
from jaxsub.devices.targets import get_target
from jaxsub.emission import offload
from jaxsub.emission.emit import emit
from jaxsub.emission.offload import require_memory, settled
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.inner_programs import find_loops

W, X, KEY = jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(-1, 2, 12).reshape(3, 4), jax.random.key(3)


by_remat2 = pytest.mark.skipif(
    compat.remat_flavour() == "remat3", reason="jax_remat3 puts copies elsewhere, and has two more values on the device"
)


def net(w, x, key):
    """Layers with a residual, dropout, a mask of integers and a result that is no float."""
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    for _ in range(3):
        h = jnp.tanh(x @ w)
        x = x + jnp.sin(h @ w) * jnp.where(h > 0, 1, 2) * kept
    return jnp.sum(x**2), jnp.argmax(x)


def offloading(program):
    """A plan by hand: regions of a layer each, what they save in host memory, and what they read where they may."""
    graph = program.graph
    starts = [n.index for n in graph.nodes if n.primitive == "dot_general"][::2]
    segments = []
    for start, stop in zip(starts, [*starts[1:], starts[-1] + 4], strict=True):
        made = [v for v in graph.made_by(start, stop) if graph.values[v].dtype == "float32"][:2]
        entry = [v for v in graph.nodes[start].inputs if graph.values[v].producer is not None]
        saved = tuple(sorted({*entry, *made}))
        segments.append(Segment(start, stop, saved, offloaded=(*entry, made[1])))
    return Plan(program.fingerprint, Budget(), len(graph.nodes), tuple(segments), tuple(starts))


def planned():
    return jaxsub.sublinear(net, plan=offloading(trace(net, (W, X, KEY), {})))


def loss(f):
    return lambda w, x: f(w, x, KEY)[0]


TRANSFORMS = {
    "value_and_grad": lambda f: jax.value_and_grad(f, (0, 1))(W, X),
    "of the data alone": lambda f: jax.grad(f, 1)(W, X),
    "jvp": lambda f: jax.jvp(f, (W, X), (X.T @ X, X)),
    "linearize": lambda f: jax.linearize(f, W, X)[1](W, X),
    "hessian": lambda f: jax.hessian(f)(W, X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, jnp.stack([X, 2 * X])),
    "grad of vmap": lambda f: jax.grad(lambda w: jax.vmap(f, (None, 0))(w, jnp.stack([X, 2 * X])).sum())(W),
    "in a checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "in a scan": lambda f: jax.grad(lambda w: jax.lax.scan(lambda c, x: (c + f(w, x), None), 0.0, X[None] * 2)[0])(W),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_same_values_and_gradients(name):
    """What comes back from host memory is what went there, under every transform that JAX's own policy allows."""
    take = TRANSFORMS[name]
    chex.assert_trees_all_close(jax.jit(take, static_argnums=0)(loss(planned())), take(loss(net)), rtol=1e-4, atol=1e-4)


@by_remat2
def test_residuals_lie_where_the_plan_says():
    """The backward pass reads from host memory what is offloaded, and nothing else from there."""
    program = trace(net, (W, X, KEY), {})
    plan = offloading(program)
    run = emit(program, plan)

    def leaves(*floats):
        return jax.tree.leaves(jax.vjp(lambda w, x: run(w, x, KEY)[0], *floats)[1])

    avals = jax.make_jaxpr(leaves)(W, X).out_avals
    there = [a for a in avals if getattr(a, "memory_space", None) == jax.memory.Space.Host]
    assert len(there) == len({v for s in plan.segments for v in s.offloaded}) == 5


@by_remat2
def test_results_wait_for_the_copies():
    """A region that offloads returns its results from the barrier that its copies stand behind; others do not."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["y"], offload_src="device", offload_dst="pinned_host"
    )

    def region(x):
        return (jnp.sin(compat.checkpoint_name(x * x, "y")),)

    for policy_used, n_fenced in ((policy, 2), (None, 0)):
        fun = settled(compat.checkpoint(region, policy=policy_used))
        eqns = jax.make_jaxpr(lambda x, fun=fun: jax.vjp(fun, x))(X).eqns
        fences = [e for e in eqns if e.primitive.name == "optimization_barrier"]
        assert [len(e.invars) for e in fences] == ([n_fenced] if n_fenced else [])


def shapes(columns, rows, n_layers):
    """A chain of layers in bf16, as shapes."""
    weights = [jax.ShapeDtypeStruct((columns, columns), jnp.bfloat16)] * n_layers
    return weights, jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)


def chain(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def plan_of(args, budget, **settings):
    return jaxsub.plan(chain, *args, budget=budget, target="h100", cache=False, progress=False, chunks=False,
                       **settings)  # fmt: skip


def moved_bytes(plan):
    return sum(h.n_bytes * h.count for h in plan.holdings if h.is_offloaded)


@pytest.mark.parametrize(("columns", "is_quicker"), [(2048, False), (2**17, True)])
def test_time_decides(columns, is_quicker):
    """Layers of few columns are faster to recompute than to fetch over PCIe; of very many columns, to fetch."""
    args = shapes(columns, 4 * columns, 16)
    alone = plan_of(args, 0.5, verify=False, profile="roofline")
    both = plan_of(args, 0.5, verify=False, offload="pinned_host")
    assert bool(moved_bytes(both)) == is_quicker
    assert both.prediction.temp_bytes <= 0.5 * both.plain_prediction.temp_bytes
    assert (both.prediction.extra_seconds < alone.prediction.extra_seconds) == is_quicker
    assert is_quicker or both.segments == alone.segments


def test_transfers_are_priced_by_the_target():
    """Each value costs its bytes twice at the target's PCIe bandwidth, beside the recompute."""
    program, target = trace(chain, shapes(2048, 2**16, 4), {}), get_target("h100")
    unit = 2**16 * 2048 * 2
    start, stop = 2, 4
    found = offload.with_offloading(
        program.graph, start, stop, [offload.Option((0,), unit, saved_sizes=(unit,))], target
    )
    assert [(o.offloaded, o.saved_bytes // unit, o.saved_sizes) for o in found] == [
        ((), 1, (unit,)), ((-1, 0), -1, ()), ((0,), 0, ())
    ]  # fmt: skip
    assert [o.recompute_seconds for o in found] == pytest.approx([0.0, 4 * unit / 64e9, 2 * unit / 64e9])


def test_below_what_recomputation_reaches():
    """As predicted, with offloading a budget is met that recomputation alone cannot meet; the plan can be kept."""
    args = shapes(2048, 2**16, 32)
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan_of(args, 1, verify=False)
    budget = int(0.85 * refused.value.least_bytes)
    found = plan_of(args, budget, verify=False, offload="pinned_host")
    assert found.prediction.temp_bytes <= budget
    assert "offload " in str(found)
    assert "in host memory" in str(found)
    assert "in host memory" in found.to_html()
    assert Plan.from_json(found.to_json()) == found
    assert max(found.timeline.live_bytes) == found.prediction.temp_bytes
    with pytest.raises(InfeasibleBudgetError):
        plan_of(args, budget, verify=False)


def alone_at_its_least(args):
    """The plan that needs least, as recomputation alone goes."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan_of(args, 1, verify=False)
    return plan_of(args, refused.value.least_bytes, verify=False)


def measure(plan, args):
    return jaxsub.measure(jaxsub.sublinear(chain, plan=plan), *args, target="h100")


@by_remat2
def test_the_compiler_agrees():
    """For a GPU, offloading compiles to less of it than the least that recomputation alone finds."""
    require_targets()
    args, unit = shapes(1024, 2**16, 24), 2**16 * 1024 * 2
    program = trace(chain, args, {})
    starts, first = range(1, 2 * 24 - 1, 2), program.graph.first_value
    segments = tuple(Segment(s, s + 2, (first(s) - 1,), offloaded=(first(s) - 1,)) for s in starts)
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), segments, (*starts, segments[-1].stop))
    alone, both = measure(alone_at_its_least(args), args), measure(plan, args)
    assert both.temp_bytes < 3.2 * unit < 4.9 * unit < alone.temp_bytes
    assert both.host_temp_bytes == 23 * unit
    assert alone.host_temp_bytes == 0
    assert "in host memory" in str(both)
    assert "in host memory" not in str(alone)


@pytest.mark.exhaustive
def test_a_budget_that_only_offloading_meets():
    """Where recomputation alone cannot fit, the search finds a plan that does, and the compiler confirms it."""
    require_targets()
    args = shapes(1024, 2**16, 64)
    least = measure(alone_at_its_least(args), args).temp_bytes
    with pytest.raises(InfeasibleBudgetError):
        plan_of(args, int(0.9 * least))
    found = plan_of(args, int(0.9 * least), offload="pinned_host")
    assert found.measurement.temp_bytes <= 0.9 * least
    assert found.measurement.host_temp_bytes >= moved_bytes(found) > 0


def beside_a_loop(ws, stack, x):
    """Layers of what a loop over some of the rows has scaled."""
    y = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x[: max(3, len(x) // 16)], stack)[0]
    return chain(ws, x * jnp.mean(y))


def test_loops_keep_on_the_device_what_they_keep():
    """Beside a loop layers' inputs are offloaded, which meets a budget that recomputation alone cannot meet."""
    ws, x = shapes(1024, 2**16, 24)
    args = ws, jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16), x
    known = dict(target="h100", argnums=(0, 1), cache=False, progress=False, verify=False, chunks=False)
    with pytest.raises(InfeasibleBudgetError) as refused:
        jaxsub.plan(beside_a_loop, *args, budget=1, **known)
    budget = int(0.9 * refused.value.least_bytes)
    found = jaxsub.plan(beside_a_loop, *args, budget=budget, offload="pinned_host", **known)
    assert found.prediction.temp_bytes <= budget
    (node,) = find_loops(trace(beside_a_loop, args, {}, argnums=(0, 1)))
    assert not any(s.start <= node < s.stop for s in walk(found.segments) if s.offloaded)
    assert moved_bytes(found) > 0


def test_a_loop_among_offloading_regions_is_the_same_function():
    """Regions that offload before a loop that runs in blocks change no value and no gradient."""
    args = [0.5 * W] * 4, jnp.stack([W, W, W, W]), X
    program = trace(beside_a_loop, args, {}, argnums=(0, 1))
    (node,) = find_loops(program)
    starts = [n.index for n in program.graph.nodes if n.primitive == "dot_general"]
    assert node < starts[0]
    segments = [
        Segment(start, start + 2, entry, offloaded=entry)
        for start in starts[1:]
        for entry in [(program.graph.first_value(start) - 1,)]
    ]
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), tuple(segments), loops=(Loop(node, (2,), True),))
    f = jaxsub.sublinear(beside_a_loop, plan=plan, argnums=(0, 1))
    found, wanted = jax.jit(jax.grad(f, (0, 1)))(*args), jax.grad(beside_a_loop, (0, 1))(*args)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_planners_that_offload_agree():
    """The integer program finds no quicker plan with values in host memory than the dynamic program, and no slower."""
    layers = shapes(2**17, 2**19, 8)
    optimal, milp = (plan_of(layers, 0.5, verify=False, offload="pinned_host", planner=p) for p in ("optimal", "milp"))
    assert moved_bytes(optimal) == moved_bytes(milp) >= 4 * 2**19 * 2**17 * 2
    for found in (optimal, milp):
        assert found.prediction.extra_seconds == pytest.approx(2 * moved_bytes(found) / 64e9)


def steps(f, ws, x):
    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(f)(ws, x))


def test_steps_offload_where_they_may():
    """In a whole step too the CPU's own memory is refused, by the same words."""
    step = jaxsub.jit(functools.partial(steps, jaxsub.sublinear(chain, offload="pinned_host")), memory=0.9, cache=False)
    with pytest.raises(UnsupportedError, match="Leave offload out"):
        step([W] * 8, X)


@by_remat2
@pytest.mark.exhaustive
def test_a_whole_step_that_only_offloading_fits():
    """A train step in less memory than recomputation alone finds, its arguments counted, as the compiler confirms."""
    require_targets()
    args = shapes(1024, 2**16, 32)

    def sized(memory, **settings):
        step = functools.partial(steps, jaxsub.sublinear(chain, **settings))
        return jaxsub.jit(step, memory=memory, target="h100", cache=False, progress=False).report(*args)

    with pytest.raises(InfeasibleBudgetError) as refused:
        sized(2**20)
    found = sized(int(0.9 * refused.value.least_bytes), offload="pinned_host")
    assert found.step_bytes <= found.memory_bytes
    assert found.measurement.host_temp_bytes > 0


def require_targets():
    try:
        require_packages()
    except UnsupportedError as error:
        pytest.skip(str(error))


class _Device:
    """A device with a memory of its own and no other."""

    platform = "tpu"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "device"})]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (get_target("cpu"), "computes in that memory"),
        (jaxsub.targets.Target("v0", "tpu", 1, 1.0, (("float32", 1.0),), device=_Device()), "`v0` (tpu) has 'device'."),
    ],
    ids=["cpu", "without"],
)
def test_a_target_without_that_memory_is_refused(target, words):
    """Where nothing would be gained or there is no such memory, that is said, with what to do."""
    with pytest.raises(UnsupportedError, match="Leave offload out") as error:
        require_memory(target, "pinned_host")
    assert words in str(error.value)


def test_faults():
    """What cannot be read is refused by name; so is a plan that saves on the device what a region only reads."""
    with pytest.raises(ValueError, match="'pinned_host', got 'disk'"):
        jaxsub.sublinear(net, offload="disk")
    with pytest.raises(UnsupportedError, match="Leave offload out"):
        jaxsub.plan(net, W, X, KEY, offload="pinned_host", verify=False)
    with pytest.raises(ValueError, match="ask for one of them"):
        jaxsub.plan(net, W, X, KEY, offload="pinned_host", bound=True)
    with pytest.raises(ValueError, match="must be among what is saved"):
        Plan("f", Budget(), 4, (Segment(0, 4, (), offloaded=(3,)),))
    program = trace(net, (W, X, KEY), {})
    plan = offloading(program)
    on_device = plan.replace(segments=tuple(Segment(s.start, s.stop, s.saved) for s in plan.segments))
    with pytest.raises(PlannerError, match="host memory only"):
        emit(program, on_device)
