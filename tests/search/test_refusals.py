"""Refusals: what they name, that it is met, and that they are remembered."""

import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.search.candidates import recomputed_share
from jaxsub.search.verify import Verifier


def test_where_nothing_helps_the_least_is_the_function_as_it_is():
    """One layer's gradient cannot be made smaller by recomputation: no larger plan is named as the least."""

    def layer(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    plain = jaxsub.measure(layer, *args).temp_bytes
    with pytest.raises(InfeasibleBudgetError, match=r"below what the function needs as it is, and no plan") as refused:
        jaxsub.plan(layer, *args, budget=plain // 3, chunks=False, progress=False)
    assert refused.value.least_bytes == plain
    assert recomputed_share(jaxsub.plan(layer, *args, budget=plain, chunks=False, progress=False)) < 0.03


def test_a_refusal_is_remembered(tmp_path, monkeypatch):
    """The second time it is told without any compile, in the same words."""

    def layer(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    said = []
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError) as refused:
            jaxsub.plan(layer, *args, budget=1000, cache=tmp_path, chunks=False, progress=False)
        said.append((str(refused.value), refused.value.least_bytes, refused.value.holders))
        monkeypatch.setattr(Verifier, "_compile", None)
    assert said[0] == said[1]
