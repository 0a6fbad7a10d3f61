"""Flax's own example models under budgets, imported from a checkout of Flax as their authors wrote them.

    git clone https://github.com/google/flax
    python examples/flax_models.py --flax-examples flax/examples            # small networks, trained for 20 steps
    python examples/flax_models.py --flax-examples flax/examples --full     # their own sizes, compiled but not run

The ResNet-50 of `imagenet` (Linen, BatchNorm over the axis `batch`), the decoder of `lm1b` (Linen, dropout, bfloat16)
and Gemma (NNX, local and global attention, bfloat16). Nothing of them is edited: one line, such as
`jaxsub.flax.linen.sublinear`, goes round the loss. Beside it stands what can be had by hand: blocks under `nn.remat`,
each or every second one, with the policies of `jax.checkpoint_policies`, put there by `jaxsub.flax.policies`. For every
policy by hand that no other one beats, jaxsub is given the memory that it takes. The data are random, of the right
shape. Without `--flax-examples` the networks of `flax_policies.py`, of the same architectures, stand in.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.core import meta

import jaxsub
import jaxsub.flax

sys.path.insert(0, str(Path(__file__).parent))
import flax_policies

MIB = 2**20
POLICIES = jax.checkpoint_policies
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """A model with its loss, and arguments of the right shape.

    Attributes:
        name: What it is called.
        block: The class of its blocks.
        blocks: The name or path of each block, as `jaxsub.flax.policies` takes it.
        build: Makes the loss `(params, state, batch, key) -> (loss, state)`, its inmost function wrapped.
        sublinear: What wraps that function: the one line.
        init: Makes params and state from a key.
        batch: Makes a batch.
        optimizer: How it is trained.
    """

    name: str
    block: str
    blocks: tuple[str, ...]
    build: Callable[[Wrap], Callable[..., Any]]
    sublinear: Callable[..., Any]
    init: Callable[[jax.Array], tuple[Any, Any]]
    batch: Callable[[], Any]
    optimizer: optax.GradientTransformation

    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the loss's arguments."""
        return (*jax.eval_shape(self.init, jax.random.key(0)), jax.eval_shape(self.batch), jax.random.key(1))


@dataclass(frozen=True)
class How:
    """How ways are compared: steps of training, whether plans are compiled and measured, and for which device."""

    steps: int
    verify: bool
    target: str | None


@dataclass(frozen=True)
class Row:
    """What one way of training comes to."""

    model: str
    way: str
    temp_bytes: int
    flops: float | None
    budget_bytes: int | None = None
    losses: tuple[float, ...] = ()


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Import modules from one example's folder; several of them have one called `models`."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(folder):
                del sys.modules[name]


def authors(examples: Path, folder: str, module: str) -> ModuleType:
    """A module of one of Flax's examples."""
    where = (examples / folder).resolve()
    if not (where / f"{module}.py").exists():
        raise SystemExit(f"{where} has no {module}.py: --flax-examples takes the folder examples of a checkout.")
    with importing_from(where):
        return importlib.import_module(module)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def imagenet(examples: Path, size: str) -> Case:
    """ResNet-50; its authors run it under `pmap` over the axis `batch`, here that axis has one replica."""
    models = authors(examples, "imagenet", "models")
    n, pixels, filters, classes = {"full": (32, 224, 64, 1000), "small": (8, 64, 8, 10), "toy": (4, 16, 2, 10)}[size]
    model = models.ResNet50(num_classes=classes, num_filters=filters)
    if size == "toy":
        model = models.ResNet(stage_sizes=[2], block_cls=models.BottleneckResNetBlock, num_classes=10, num_filters=2)

    def loss(params: Any, stats: Any, batch: Any, key: jax.Array) -> Any:
        def on_replica(images: jax.Array, labels: jax.Array) -> Any:
            variables = {"params": params, "batch_stats": stats}
            logits, changed = model.apply(variables, images, mutable=["batch_stats"])
            return mean_loss(logits, labels), changed["batch_stats"]

        value, changed = jax.vmap(on_replica, axis_name="batch")(*jax.tree.map(lambda x: x[None], batch))
        return value[0], jax.tree.map(lambda x: x[0], changed)

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = model.init(key, jnp.ones((1, pixels, pixels, 3)))
        return variables["params"], variables["batch_stats"]

    def batch() -> Any:
        rng = np.random.default_rng(0)
        images = rng.normal(size=(n, pixels, pixels, 3)).astype(np.float32)
        return images, rng.integers(0, classes, n).astype(np.int32)

    block = "BottleneckResNetBlock"
    return Case("imagenet ResNet-50", block, tuple(f"{block}_{i}" for i in range(sum(model.stage_sizes))),
                lambda wrap: wrap(loss), jaxsub.flax.linen.sublinear, init, batch,
                optax.sgd(0.02, momentum=0.9, nesterov=True))  # fmt: skip


def words(n: int, length: int, size: int) -> np.ndarray:
    """Random words, none of them 0, which pads."""
    return np.random.default_rng(0).integers(1, size, (n, length)).astype(np.int32)


def lm1b(examples: Path, size: str) -> Case:
    """The decoder of lm1b with its default configuration."""
    models = authors(examples, "lm1b", "models")
    n, length, vocabulary = {"full": (32, 128, 30_000), "small": (8, 64, 256), "toy": (2, 16, 32)}[size]
    changes = {
        "full": dict(dtype=jnp.bfloat16),
        "small": dict(emb_dim=64, num_heads=4, qkv_dim=64, mlp_dim=256),
        "toy": dict(emb_dim=16, num_heads=2, qkv_dim=16, mlp_dim=32, num_layers=2),
    }[size]
    config = models.TransformerConfig(vocabulary, vocabulary, max_len=512, **changes)
    model = models.TransformerLM(config)

    def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        return mean_loss(model.apply({"params": params}, batch, rngs={"dropout": key}), batch), state

    def init(key: jax.Array) -> tuple[Any, Any]:
        fixed = models.TransformerLM(config.replace(deterministic=True))
        return meta.unbox(fixed.init(key, jnp.ones((1, length), jnp.int32)))["params"], ()

    names = tuple(f"encoderdecoderblock_{i}" for i in range(config.num_layers))
    return Case("lm1b decoder", "EncoderDecoder1DBlock", names, lambda wrap: wrap(loss),
                jaxsub.flax.linen.sublinear, init, partial(words, n, length, vocabulary),
                optax.adamw(1e-3, weight_decay=0.1))  # fmt: skip


def gemma(examples: Path, size: str) -> Case:
    """Gemma 3 270M with the vocabulary of its configuration here, or a smaller one with its pattern of attention."""
    module = authors(examples, "gemma", "transformer")
    n, length, vocabulary = {"full": (16, 1024, 35_008), "small": (4, 64, 256), "toy": (2, 16, 32)}[size]
    changes = {
        "full": dict(dtype=jnp.bfloat16),
        "small": dict(num_layers=6, embed_dim=64, hidden_dim=256, head_dim=32, sliding_window_size=32),
        "toy": dict(num_layers=2, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8, sliding_window_size=8),
    }[size]
    config = module.TransformerConfig.gemma3_270m(num_embed=vocabulary, **changes)

    def objective(model: Any, batch: Any) -> jax.Array:
        mask = batch > 0
        logits, _ = model(batch, module.build_positions_from_mask(mask), None, module.make_causal_attn_mask(mask))
        return mean_loss(logits[:, :-1], batch[:, 1:])

    def parts(key: jax.Array) -> tuple[Any, Any, Any]:
        return nnx.split(module.Transformer(config, rngs=nnx.Rngs(key)), nnx.Param, ...)

    structure = nnx.eval_shape(lambda: module.Transformer(config, rngs=nnx.Rngs(0)))
    graphdef = nnx.split(structure, nnx.Param, ...)[0]

    def build(wrap: Wrap) -> Callable[..., Any]:
        wrapped = wrap(objective)

        def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
            model = nnx.merge(graphdef, params, state)
            return wrapped(model, batch), nnx.split(model, nnx.Param, ...)[2]

        return loss

    names = tuple(f"layers/{i}" for i in range(config.num_layers))
    return Case("Gemma", "Block", names, build, jaxsub.flax.nnx.sublinear, lambda key: parts(key)[1:],
                partial(words, n, length, vocabulary), optax.adamw(1e-3, weight_decay=0.1))  # fmt: skip


def ways_by_hand(case: Case) -> dict[str, dict[str, Any]]:
    """What can be had by `nn.remat` or `nnx.remat` on blocks: for each way the policies on the modules."""
    every_second = case.blocks[::2]
    return {
        "each block, nothing": {case.block: POLICIES.nothing_saveable},
        "each block, dots_saveable": {case.block: POLICIES.dots_saveable},
        "each block, dots_with_no_batch_dims": {case.block: POLICIES.dots_with_no_batch_dims_saveable},
        "each block, products and convolutions": {case.block: "save_costly"},
        "each block, everything": {case.block: POLICIES.everything_saveable},
        "every 2nd block, nothing": dict.fromkeys(every_second, POLICIES.nothing_saveable),
        "every 2nd block, dots_saveable": dict.fromkeys(every_second, POLICIES.dots_saveable),
    }


def measured(case: Case, way: str, loss: Callable[..., Any], how: How, budget: int | None = None) -> Row:
    """Compile the gradient of a loss, read what it takes, and train with it."""
    if how.target:
        found = jaxsub.measure(loss, *case.shapes(), target=how.target)
        return Row(case.name, way, found.temp_bytes, found.flops, budget)
    gradient = jaxsub.jit(jax.value_and_grad(loss, has_aux=True)).lower(*case.shapes()).compile()
    flops = (gradient.cost_analysis() or {}).get("flops")
    losses = trained(case, gradient, how.steps) if how.steps else ()
    return Row(case.name, way, gradient.memory_analysis().temp_size_in_bytes, flops, budget, losses)


def trained(case: Case, gradient: Callable[..., Any], steps: int) -> tuple[float, ...]:
    """The losses of some steps of training."""

    @jax.jit
    def update(params: Any, grads: Any, opt_state: Any) -> Any:
        updates, opt_state = case.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    batch, (params, state) = case.batch(), jax.jit(case.init)(jax.random.key(0))
    opt_state, losses = case.optimizer.init(params), []
    for i in range(steps):
        (value, state), grads = gradient(params, state, batch, jax.random.key(i))
        params, opt_state = update(params, grads, opt_state)
        losses.append(float(value))
    return tuple(losses)


def by_hand(case: Case, way: str, how: How) -> Row:
    """The loss with its blocks under policies."""
    with jaxsub.flax.policies(ways_by_hand(case)[way]):
        return measured(case, way, case.build(lambda loss: loss), how)


def ours(case: Case, budget: int, how: How) -> Row | None:
    """The loss under a budget."""
    loss = case.build(partial(case.sublinear, budget=budget, target=how.target, verify=how.verify))
    try:
        return measured(case, f"jaxsub in {budget / MIB:.2f} MiB", loss, how, budget)
    except jaxsub.InfeasibleBudgetError as error:
        print(f"{case.name}: {error}")
        return None


def unbeaten(rows: list[Row]) -> list[Row]:
    """The rows that no other one beats in memory and in FLOPs."""
    cost = [(r.temp_bytes, r.flops or 0.0) for r in rows]
    beaten = [any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in cost) for a in cost]
    chosen = {c: r for c, r, is_beaten in zip(cost, rows, beaten, strict=True) if not is_beaten}
    return list(chosen.values())


def compare(case: Case, ways: list[str], how: How) -> Iterator[Row]:
    """Plain, by hand, and with jaxsub in the memory of each way by hand that no other one beats."""
    plain = measured(case, "plain", case.build(lambda loss: loss), how)
    yield plain
    rows = []
    for way in ways:
        rows.append(by_hand(case, way, how))
        yield rows[-1]
    for row in unbeaten(rows):
        if (mine := ours(case, row.temp_bytes, how)) is not None:
            yield mine
            assert np.allclose(mine.losses, plain.losses, rtol=2e-3), "a plan changed the losses"


def show(row: Row) -> None:
    """Print one line of the table."""
    flops = "" if row.flops is None else f"{row.flops / 1e9:.3f}"
    first, last = (f"{row.losses[i]:.4f}" if row.losses else "" for i in (0, -1))
    print(f"{row.model:<20} {row.way:<38} {row.temp_bytes / MIB:9.2f} {flops:>10} {first:>10} {last:>10}", flush=True)


def main() -> None:
    """Compare and print a table; write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flax-examples", type=Path, help="the examples folder of a checkout of Flax")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--toy", action="store_true", help="tiny networks, three steps")
    size.add_argument("--full", action="store_true", help="the authors' sizes: compiled, not run")
    parser.add_argument("--target", help="the device to compile for, such as h200; this one if left out")
    parser.add_argument("--only", choices=list(CASES), nargs="+", default=list(CASES), help="some of the models")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    chosen = parser.parse_args()
    if chosen.full and not chosen.flax_examples:
        parser.error("--full is for the authors' models: give --flax-examples")
    scale = "toy" if chosen.toy else "full" if chosen.full else "small"
    how = How({"toy": 3, "small": 20, "full": 0}[scale], not chosen.toy, chosen.target)
    jax.config.update("jax_disable_most_optimizations", chosen.toy)  # it is compiled for longer than it runs
    print(__doc__.split("\n\n")[0], flush=True)
    print(f"\n{'':<20} {'':<38} {'MiB':>9} {'GFLOPs':>10} {'first loss':>10} {'last loss':>10}")
    rows: list[Row] = []
    for name in chosen.only:
        theirs, like_theirs = CASES[name]
        found = chosen.flax_examples
        case = theirs(found, scale) if found else stand_in(like_theirs, scale)
        ways = list(ways_by_hand(case))
        for row in compare(case, ways[:1] if chosen.toy else ways, how):
            show(row)
            rows.append(row)
            if chosen.out:
                chosen.out.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", "utf-8")


def stand_in(make: Callable[..., Any], size: str) -> Case:
    """A network of `flax_policies.py`."""
    task = make(flax_policies.TOY if size == "toy" else flax_policies.Size())
    return Case(task.name, task.block, task.blocks, lambda wrap: wrap(task.loss), jaxsub.sublinear,
                lambda key: (task.params, task.state), lambda: task.batch, optax.sgd(0.05, momentum=0.9))  # fmt: skip


CASES = {
    "imagenet": (imagenet, flax_policies.resnet),
    "lm1b": (lm1b, flax_policies.lm1b),
    "gemma": (gemma, flax_policies.gemma),
}

if __name__ == "__main__":
    main()
