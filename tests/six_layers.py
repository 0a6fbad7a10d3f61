"""A loss of six layers, the same loss planned, and how tests compare what comes of the two."""

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
from processes import quickly

import jaxsub

ROOT = Path(__file__).parent.parent
predicted = functools.partial(jaxsub.sublinear, verify=False, cache=False, progress=False)
W, X, XS = jnp.eye(4) * 0.9 + 0.1, jnp.ones((3, 4)), jnp.linspace(0, 1, 24).reshape(3, 2, 4)
# The loss and its gradient again, for `in_a_process`.
LOSS = """
def loss(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

w, x = jnp.eye(16) * .9 + .01, jnp.linspace(0, 1, 512 * 16).reshape(512, 16)
wanted = jax.grad(loss)(w, x)
"""


def loss(w, x):
    """Six layers, of which a plan recomputes some."""
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


planned = predicted(loss)


def same(got, wanted, *, rtol=2e-6, atol=2e-6):
    """Equal trees, shapes, dtypes and weak types, and values within a few roundings of f32."""
    got, wanted = jax.tree.map(jnp.asarray, (got, wanted))
    chex.assert_trees_all_equal_structs(got, wanted)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)
    assert list(map(jax.typeof, jax.tree.leaves(got))) == list(map(jax.typeof, jax.tree.leaves(wanted)))
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=atol)


def in_a_process(code, timeout=300, **env):
    """Run code in a process of its own, warnings being errors."""
    start = "import jax, jax.numpy as jnp, functools, jaxsub\nfrom jax import lax\n"
    command = [sys.executable, "-W", "error", "-c", start + textwrap.dedent(code)]
    path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **quickly()}
    done = subprocess.run(command, env={**path, **env}, capture_output=True, text=True, timeout=timeout, check=False)
    print(done.stdout, end="")
    assert done.returncode == 0, done.stderr[-3000:]
