"""Prices that the compiler is asked for: remembered, and of one choice for a whole program."""

from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Segment
from jaxsub.core.disk_cache import Store
from jaxsub.core.plan import Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.costs.probe_compiles import Asker
from jaxsub.costs.probes import Probe
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.cuts import block_ends
from jaxsub.search.verify import cut_choices

H100 = get_target("h100")


class Compiler:
    """Says 10 bytes where XLA writes products' kernels, 1000 where cuBLAS runs them; some probes have no tiles."""

    def __init__(self, has_no_tiles):
        self.has_no_tiles = has_no_tiles
        self.asked = []

    def __call__(self, call, args, target, *, donate_argnums=()):
        self.asked.append(call)
        is_left = not target.writes_products or self.has_no_tiles(self)
        sizes = {f"{what}_size_in_bytes": 0 for what in ("argument", "output", "alias")}
        memory = SimpleNamespace(temp_size_in_bytes=1000 if is_left else 10, **sizes)
        return SimpleNamespace(
            memory_analysis=lambda: memory, cost_analysis=lambda: None, leaves_products=is_left
        )  # fmt: skip


def asked(asker, *names):
    asker.ask({(name,): lambda name=name: Probe(name, ()) for name in names})
    return asker.said


def test_products_are_left_to_cublas_in_all_probes_or_in_none(monkeypatch):
    """Once one probe has no tiles, what was asked before is asked anew; what comes later is asked so at once."""
    compiler = Compiler(lambda self: self.asked[-1] == "untiled")
    monkeypatch.setattr("jaxsub.costs.probe_compiles.compile_for", compiler)
    store, names = Store(None), ("fused", "untiled", "later")
    asker = Asker(H100, store, workers=1)  # in order
    assert asked(asker, "fused") == {("fused",): 10}
    assert asked(asker, "fused", "untiled") == {("fused",): 1000, ("untiled",): 1000}
    assert asked(asker, "later")["later",] == 1000
    assert compiler.asked == ["fused", "untiled", "fused", "untiled", "later"]
    assert asked(Asker(H100, store), "fused") == {("fused",): 10}  # of another program, which has tiles for all
    monkeypatch.setattr("jaxsub.costs.probe_compiles.compile_for", None)
    assert asked(Asker(H100, store), *names[:2]) == {(name,): 1000 for name in names[:2]}


def test_a_chain_holds_no_figures_of_before(monkeypatch):
    """Whenever it turns out that products are left to cuBLAS, all of a chain's figures are of that: in loops too."""

    def step(x, w):
        return jnp.tanh(x @ w), None

    def loss(w, ws, x):
        return jnp.sum(jax.lax.scan(step, jnp.tanh(x @ w), ws)[0] @ w)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8, 8), (16, 8))]
    program = trace(loss, shapes, {}, argnums=(0, 1))
    cuts = cut_choices(program)[0]
    compiler = Compiler(lambda self: False)
    monkeypatch.setattr("jaxsub.costs.probe_compiles.compile_for", compiler)
    Pricer(program, H100, workers=1).chain(cuts)
    for turn in (1, len(compiler.asked)):
        monkeypatch.setattr(
            "jaxsub.costs.probe_compiles.compile_for", Compiler(lambda self, turn=turn: len(self.asked) == turn)
        )
        chain = Pricer(program, H100, workers=1).chain(cuts)
        assert {stage.forward_bytes for stage in chain.stages} == {1000}
        assert {option.transient_bytes for item in chain.items for option in item.options} >= {1000}


def dense(params, x):
    """Blocks whose layers read all before them in the block."""
    for block in params:
        for w, v in block:
            x = jnp.concatenate([x, jnp.tanh(jnp.tanh(x @ w) @ v)], -1)
        x = jnp.tanh(x[..., :8])
    return jnp.sum(x**2)


@pytest.mark.parametrize(("most", "n_asked"), [(500, 2), (20, 1)])
def test_large_blocks_are_priced_once_a_plan_uses_them(monkeypatch, most, n_asked):
    """Of blocks of three and five layers the compiler is asked at once; or of the larger one only later."""
    monkeypatch.setattr("jaxsub.costs.probe_compiles.compile_for", Compiler(lambda self: False))
    monkeypatch.setattr("jaxsub.partition.cuts.REGION_EQUATIONS", most)
    layers = [[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8 + 4 * i, 16), (16, 4))] for i in range(5)]
    shapes = [layers[:3], layers, layers[:3]], jax.ShapeDtypeStruct((64, 8), jnp.float32)
    program = trace(dense, shapes, {}, argnums=0)
    cuts = cut_choices(program)[-1]
    pricer = Pricer(program, get_target("cpu"), workers=1)
    items = {(item.start, item.stop): item for item in pricer.chain(cuts).items}
    blocks = [run for run in pairwise(block_ends(program.graph, cuts)[:-1]) if run[1] - run[0] > 2]
    regions = [Segment(cuts[a], cuts[b]) for a, b in blocks]
    keys = [("backward", pricer._kind(region.start, region.stop), ()) for region in regions]
    assert len(blocks) == 2
    assert set(blocks) <= set(items)
    assert [key in pricer._asker.said for key in keys] == [i < n_asked for i in range(2)]
    plan = Plan(program.fingerprint, Budget(), len(program.eqns), (regions[1],), ())
    assert pricer.refine(plan) == (n_asked < 2)
    assert keys[1] in pricer._asker.said
