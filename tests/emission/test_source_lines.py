"""Profiles, dumps and errors show the user's names and lines, as if there were no plan."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from six_layers import W, X, predicted

from jaxsub.jaxpr import compat


def test_names_and_lines_are_kept():
    """Profiles and dumps show the user's named scopes and lines, forward and backward, in regions too."""

    def f(w, x):
        for i in range(6):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    assert predicted(f).plan(W, X).n_regions > 0
    text = jax.jit(jax.grad(predicted(f))).lower(W, x=X).as_text(debug_info=True)
    assert [i for i in range(6) if not re.search(rf"\blayer_{i}\b", text)] == []
    again = "rematted_computation" if compat.remat_flavour() == "remat2" else r"segment_\d+\)*"
    assert re.search(rf"transpose\(.*{again}/layer_", text)
    assert Path(__file__).name in text


def test_an_error_points_to_the_users_line():
    """What is wrong in the function is JAX's error, raised in the user's file; in a derivative rule too."""

    def wrong(w):
        return jnp.sum(w @ jnp.ones(5))

    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (x @ jnp.ones(7),))
    for f, transform in ((wrong, lambda f: f), (lambda w: jnp.sum(rule(w)), jax.grad)):
        with pytest.raises(TypeError, match=r"dot_general|matmul") as refused:
            transform(predicted(f))(W)
        last = [entry for entry in refused.traceback if Path(str(entry.path)) == Path(__file__)][-1]
        assert "@ jnp.ones" in str(last.statement)
