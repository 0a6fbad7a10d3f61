"""The README's code runs as it stands there, with a model that its reader might have."""

import ast
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxsub

ROOT = Path(jaxsub.__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LEFT_OUT = ("max_batch",)
"""What searches for minutes; its own doctest runs it."""


def run(block, names):
    """Execute a block's statements."""
    tree = ast.parse(block)
    tree.body = [s for s in tree.body if not any(word in ast.unparse(s) for word in LEFT_OUT)]
    exec(compile(tree, "README.md", "exec"), names)


def readers_models():
    """A Linen model with its variables, an NNX module of the same layers, and a batch."""
    x = jax.random.normal(jax.random.key(0), (512, 32))
    model = nn.Sequential([f for _ in range(12) for f in (nn.Dense(32), nn.tanh)])
    rngs = nnx.Rngs(0)
    module = nnx.Sequential(*[f for _ in range(12) for f in (nnx.Linear(32, 32, rngs=rngs), jnp.tanh)])
    return dict(model=model, variables=model.init(jax.random.key(1), x), module=module, x=x, nnx=nnx)


def test_the_code_in_the_readme_runs(capsys):
    """Copied and run from top to bottom: budgets are kept, gradients have the shapes of what they are taken of."""
    names = {"jaxsub": jaxsub}
    first, use, with_flax = BLOCKS
    run(first, names)
    run(use, names)
    plain, small = (jaxsub.measure(f, names["params"], names["x"]) for f in (names["loss"], names["small"]))
    assert small.temp_bytes <= 0.3 * plain.temp_bytes
    assert "30% of plain" in capsys.readouterr().out
    names |= readers_models()
    run(with_flax, names)
    assert jax.tree.structure(names["grads"]) == jax.tree.structure(nnx.state(names["module"], nnx.Param))
    assert "Dense: 12 modules" in capsys.readouterr().out
    for fun, args in (("linen_loss", "variables"), ("nnx_loss", "module")):
        plan = names[fun].plan(names[args], names["x"])
        assert plan.n_regions > 0 or plan.slices
        assert plan.measurement.temp_bytes <= 0.5 * plan.plain_measurement.temp_bytes


def test_a_block_that_fails_is_noticed():
    """Names that nobody defines are errors."""
    with pytest.raises(NameError, match="modell"):
        run("modell.apply(1)", {})


def test_both_commands_are_on_lines_of_their_own():
    """A newcomer copies them, and `.ci/run` looks for the second as it runs it."""
    asked = re.search(r"^readme_command='(.*)'$", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    commands = ['pip install -e ".[examples]" && python examples/quickstart.py', asked.group(1)]
    assert not set(commands) - set(README.splitlines())
