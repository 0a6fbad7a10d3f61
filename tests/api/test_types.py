"""Types as a user's checker sees them: signatures stay, right uses are clean, each wrong one is an error."""

import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import jaxsub

pytestmark = pytest.mark.once
RIGHT = """\
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxsub

Params = dict[str, jax.Array]


@jaxsub.sublinear(budget="8GiB", static_argnames="train")
def loss(params: Params, batch: jax.Array, *, train: bool = True) -> jax.Array:
    h = jnp.tanh(batch @ params["w"])
    return jnp.mean(h**2) if train else jnp.sum(h)


@jaxsub.sublinear
def bare(params: Params, batch: jax.Array) -> tuple[jax.Array, int]:
    return jnp.mean(batch @ params["w"]), 3


called = jaxsub.sublinear(lambda x: x * 2.0, budget=0.5)


@jaxsub.jit(memory="24GiB", donate_argnums=0)
def step(params: Params, batch: jax.Array) -> Params:
    grads = jax.grad(loss)(params, batch)
    new: Params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return new


@jaxsub.jit
def plain_step(params: Params) -> Params:
    return params


@jaxsub.jit(static_argnums=0)
def plain_step_with_options(n: int, params: Params) -> Params:
    return params


@jaxsub.equinox.filter_jit(memory="24GiB", donate="all")
def module_step(params: Params, batch: jax.Array) -> Params:
    return params


@jaxsub.equinox.filter_jit
def plain_module_step(params: Params) -> Params:
    return params


class Trainer:
    @jaxsub.sublinear(static_argnums=0)
    def loss(self, params: Params, batch: jax.Array) -> jax.Array:
        return jnp.mean(batch @ params["w"])


params: Params = {"w": jnp.eye(4)}
batch = jnp.ones((2, 4))
value: jax.Array = loss(params, batch, train=False)
pair: tuple[jax.Array, int] = bare(params, batch)
plan: jaxsub.Plan = loss.plan(params, jax.eval_shape(lambda: batch), train=True)
measured: jaxsub.Measurement = loss.measure(params, batch)
shown = (loss.frontier(params, batch).points, loss.explain(params, batch).total_bytes)
made: jaxsub.Plan = jaxsub.plan(loss, params, batch, budget="1GiB")
found: jaxsub.Measurement = jaxsub.measure(loss, params, batch)
params = step(params, batch)
params = plain_step(params)
params = plain_module_step(module_step(params, batch))
params = plain_step_with_options(3, params)
report = step.report(params, batch)
text: str = step.lower(params, batch).as_text()
text = plain_step.lower(params).as_text()
method: jax.Array = Trainer().loss(params, batch)
keeps: Callable[[Params, jax.Array], tuple[jax.Array, int]] = bare
"""

WRONG = """\
import jax
import jax.numpy as jnp

import jaxsub


@jaxsub.sublinear(budget="8GiB")
def loss(w: jax.Array, x: jax.Array, scale: float = 1.0) -> jax.Array:
    return jnp.mean(x @ w) * scale


@jaxsub.sublinear
def bare(w: jax.Array) -> jax.Array:
    return w


@jaxsub.jit(memory="24GiB")
def step(w: jax.Array) -> jax.Array:
    return w


@jaxsub.equinox.filter_jit(memory="24GiB")
def module_step(w: jax.Array) -> jax.Array:
    return w


@jaxsub.jit
def plain(w: jax.Array) -> jax.Array:
    return w


w = jnp.eye(4)
loss(w)  # wrong: too few
loss(w, w, scale="2")  # wrong: a str
loss(w, w, scael=2.0)  # wrong: no such name
result: str = loss(w, w)  # wrong: no str
bare(w, w)  # wrong: too many
step("w")  # wrong: a str
module_step("w")  # wrong: a str
jaxsub.equinox.filter_jit(plain, donate="first")  # wrong: no such donation
plain(w, w)  # wrong: too many
jaxsub.sublinear(budgte="8GiB")  # wrong: no such option
jaxsub.sublinear(planner=3)  # wrong: no planner
"""

LIBRARY = Path(jaxsub.__file__).parent
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context",
             "--config-file", str(LIBRARY.parent / "pyproject.toml")],
    "pyright": [str(Path(sys.executable).with_name("basedpyright")), "--level", "error",
                "--pythonpath", sys.executable],
}  # fmt: skip
"""How types are checked; 15 s of processor time with mypy, 25 s with pyright, most of it for JAX's own sources."""

SETTINGS = f'{{"typeCheckingMode": "standard", "extraPaths": ["{LIBRARY.parent}"]}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder with a file that is right and one that is wrong."""
    place = tmp_path_factory.mktemp("user")
    (place / "right.py").write_text(RIGHT)
    (place / "wrong.py").write_text(WRONG)
    (place / "pyrightconfig.json").write_text(SETTINGS)
    return place


@pytest.mark.parametrize("checker", CHECKERS)
def test_types_of_the_library_and_of_a_user(folder, checker):
    """The library is clean and so is a file that uses it; each line that is marked wrong is an error, no other."""
    command = CHECKERS[checker]
    if shutil.which(command[0]) is None or (checker == "mypy" and find_spec("mypy") is None):
        pytest.skip(f"{checker} is not installed")
    found = subprocess.run(
        [*command, "right.py", "wrong.py", str(LIBRARY)],
        cwd=folder, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    at = set(re.findall(r"([\w/]+)\.py:(\d+)\S* (?:- )?error", found.stdout.replace(f"{folder}/", "")))
    wanted = {("wrong", str(i)) for i, line in enumerate(WRONG.splitlines(), 1) if "# wrong" in line}
    assert at == wanted, found.stdout + found.stderr


def test_what_is_typed_runs(folder):
    """The file that is right for a checker is right when it runs."""
    assert runpy.run_path(str(folder / "right.py"))["plan"].n_nodes
