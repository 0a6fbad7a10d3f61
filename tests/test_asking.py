"""Prices that the compiler is asked for: remembered, and of one choice for a whole program."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jaxsub.asking import Asker
from jaxsub.pricing import Pricer
from jaxsub.probes import Probe
from jaxsub.program import trace
from jaxsub.store import Store
from jaxsub.targets import get_target
from jaxsub.verify import cut_choices

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
    monkeypatch.setattr("jaxsub.asking.compile_for", compiler)
    store, names = Store(None), ("fused", "untiled", "later")
    asker = Asker(H100, store, workers=1)  # in order
    assert asked(asker, "fused") == {("fused",): 10}
    assert asked(asker, "fused", "untiled") == {("fused",): 1000, ("untiled",): 1000}
    assert asked(asker, "later")["later",] == 1000
    assert compiler.asked == ["fused", "untiled", "fused", "untiled", "later"]
    assert asked(Asker(H100, store), "fused") == {("fused",): 10}  # of another program, which has tiles for all
    monkeypatch.setattr("jaxsub.asking.compile_for", None)
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
    monkeypatch.setattr("jaxsub.asking.compile_for", compiler)
    Pricer(program, H100, workers=1).chain(cuts)
    for turn in (1, len(compiler.asked)):
        monkeypatch.setattr("jaxsub.asking.compile_for", Compiler(lambda self, turn=turn: len(self.asked) == turn))
        chain = Pricer(program, H100, workers=1).chain(cuts)
        assert {stage.forward_bytes for stage in chain.stages} == {1000}
        assert {option.transient_bytes for item in chain.items for option in item.options} >= {1000}
