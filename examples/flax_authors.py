"""Flax's own example models, with their authors' losses, imported from Flax's source distribution as it is.

The ResNet-50 of `imagenet` (Linen, BatchNorm over the axis `batch`), the decoder of `lm1b` (Linen, dropout) and
Gemma 3 270M (NNX, local and global attention). Flax's wheel leaves its examples out, its source distribution on PyPI
does not: `examples_folder` fetches the one of the installed version with pip, once. Models are imported; of `train.py`,
which reads data with TensorFlow, only the losses are taken. The data are random, of the right shape.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import platformdirs
from flax import nnx
from flax.core import meta
from flax.training import common_utils

import jaxsub.flax

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

SIZES = {
    "toy": "tiny networks of the same architecture",
    "trained": "the authors' architecture in float32; batches of 4 images of 224 pixels (ResNet-50), "
    "8 x 128 words (lm1b), 2 x 128 words (Gemma)",
    "full": "the authors' architecture and types; 32 images of 224 pixels a device (ResNet-50), "
    "32 x 128 words (lm1b), 16 x 1024 words (Gemma)",
}
"""What is run, by name. Sizes of batches are those of the authors' configurations only in `full`."""


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
        optimizer: How it is trained: as by its authors, at a constant rate.
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


def examples_folder(given: Path | None = None) -> Path:
    """The folder of Flax's examples: the one given, or that of the installed version, fetched once.

    Args:
        given: The folder `examples` of a checkout of Flax.

    Raises:
        SystemExit: If there is no such folder, or nothing can be fetched; it says what to do.
    """
    if given is not None:
        if not (given / "lm1b" / "models.py").exists():
            raise SystemExit(f"{given} has no lm1b/models.py: --flax-examples takes the folder examples of a checkout.")
        return given
    name = f"flax=={version('flax')}"
    kept = Path(platformdirs.user_cache_dir("jaxsub-examples", appauthor=False)) / name.replace("==", "-")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        print(f"fetching Flax's examples, which its source distribution holds: pip download {name} (16 MB, once)")
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            _fetch(name, Path(folder)).rename(kept)
    return kept


def _fetch(name: str, folder: Path) -> Path:
    """Download a source distribution and unpack its examples."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "flax", name]
    ran = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    archives = list(folder.glob("flax-*.tar.gz"))
    if ran.returncode or not archives:
        raise SystemExit(
            f"pip could not download the source distribution of {name}:\n{ran.stderr.strip()[-600:]}\n"
            "Without it, clone Flax and give the folder: --flax-examples flax/examples."
        )
    with tarfile.open(archives[0]) as archive:
        inside = [member for member in archive if member.name.split("/")[1:2] == ["examples"]]
        # a keyword argument from Python 3.11.4 on; before that there are no filters
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(folder, inside)
    return next(folder.glob("flax-*/examples"))


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
    with importing_from((examples / folder).resolve()):
        return importlib.import_module(module)


def authors_function(file: Path, name: str, **names: Any) -> Callable[..., Any]:
    """One function of a file that cannot be imported; `names` are what it needs of the file's own."""
    tree = ast.parse(file.read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    namespace = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "common_utils": common_utils, **names}
    exec(compile(tree, str(file), "exec"), namespace)
    return namespace[name]


def imagenet(examples: Path, size: str) -> Case:
    """ResNet-50; its authors run it under `pmap` over the axis `batch`, here that axis has one replica."""
    models = authors(examples, "imagenet", "models")
    n, pixels, classes = {"full": (32, 224, 1000), "trained": (4, 224, 1000), "toy": (4, 16, 10)}[size]
    model = models.ResNet50(num_classes=classes)
    if size == "toy":
        model = models.ResNet(stage_sizes=[2], block_cls=models.BottleneckResNetBlock, num_classes=10, num_filters=2)
    cross_entropy = authors_function(examples / "imagenet" / "train.py", "cross_entropy_loss", NUM_CLASSES=classes)

    def loss(params: Any, stats: Any, batch: Any, key: jax.Array) -> Any:
        def on_replica(images: jax.Array, labels: jax.Array) -> Any:
            variables = {"params": params, "batch_stats": stats}
            logits, changed = model.apply(variables, images, mutable=["batch_stats"])
            penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return cross_entropy(logits, labels) + 0.0001 * 0.5 * penalty, changed["batch_stats"]

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
                optax.sgd(0.1 * n / 256, momentum=0.9, nesterov=True))  # fmt: skip


def words(n: int, length: int, size: int) -> np.ndarray:
    """Random words, none of them 0, which pads."""
    return np.random.default_rng(0).integers(1, size, (n, length)).astype(np.int32)


def adamw(rate: float | optax.Schedule) -> optax.GradientTransformation:
    """The optimizer of lm1b and Gemma."""
    return optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)


def warmed_up(rate: float) -> optax.Schedule:
    """How their learning rate begins. Without it Gemma's losses jump, and rounding grows with every step."""
    return optax.linear_schedule(0.0, rate, 1000)


def lm1b(examples: Path, size: str) -> Case:
    """The decoder of lm1b with its default configuration."""
    models = authors(examples, "lm1b", "models")
    n, length, vocabulary = {"full": (32, 128, 30_000), "trained": (8, 128, 30_000), "toy": (2, 16, 32)}[size]
    changes = {
        "full": dict(dtype=jnp.bfloat16),
        "trained": {},
        "toy": dict(emb_dim=16, num_heads=2, qkv_dim=16, mlp_dim=32, num_layers=2),
    }[size]
    config = models.TransformerConfig(vocabulary, vocabulary, max_len=512, **changes)
    model = models.TransformerLM(config)
    their_loss = authors_function(examples / "lm1b" / "train.py", "compute_weighted_cross_entropy", nn=nn)

    def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        weights = jnp.where(batch > 0, 1, 0).astype(jnp.float32)
        total, n_words = their_loss(model.apply({"params": params}, batch, rngs={"dropout": key}), batch, weights)
        return total / n_words, state

    def init(key: jax.Array) -> tuple[Any, Any]:
        fixed = models.TransformerLM(config.replace(deterministic=True))
        return meta.unbox(fixed.init(key, jnp.ones((1, length), jnp.int32)))["params"], ()

    names = tuple(f"encoderdecoderblock_{i}" for i in range(config.num_layers))
    return Case("lm1b decoder", "EncoderDecoder1DBlock", names, lambda wrap: wrap(loss),
                jaxsub.flax.linen.sublinear, init, partial(words, n, length, vocabulary), adamw(0.0016))  # fmt: skip


def gemma(examples: Path, size: str) -> Case:
    """Gemma 3 270M with the vocabulary of its configuration here, or a smaller one with its pattern of attention."""
    module = authors(examples, "gemma", "transformer")
    n, length, vocabulary = {"full": (16, 1024, 35_008), "trained": (2, 128, 35_008), "toy": (2, 16, 32)}[size]
    changes = {
        "full": dict(dtype=jnp.bfloat16),
        "trained": dict(dtype=jnp.float32),
        "toy": dict(num_layers=2, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8, sliding_window_size=8),
    }[size]
    config = module.TransformerConfig.gemma3_270m(num_embed=vocabulary, **changes)
    their_loss = authors_function(examples / "gemma" / "train.py", "compute_weighted_cross_entropy", nnx=nnx)

    def objective(model: Any, batch: Any) -> jax.Array:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        mask = inputs > 0
        logits, _ = model(inputs, module.build_positions_from_mask(mask), None, module.make_causal_attn_mask(mask))
        return their_loss(logits, targets, mask.astype(jnp.float32)).mean()

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
    return Case("Gemma 3 270M", "Block", names, build, jaxsub.flax.nnx.sublinear, lambda key: parts(key)[1:],
                partial(words, n, length + 1, vocabulary), adamw(warmed_up(0.0016)))  # fmt: skip


CASES = {"imagenet": imagenet, "lm1b": lm1b, "gemma": gemma}
