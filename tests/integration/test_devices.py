"""Over several devices, by `shard_map` or by sharded arguments, gradients are the plain ones."""

import textwrap

import chex
import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from processes import quickly
from six_layers import LOSS, W, X, in_a_process, loss, planned, predicted, same

import jaxsub


def split(f):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    body = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    return jax.jit(jax.grad(lambda w: body(w, X)))(W)


def test_shard_map():
    """Inside shard_map, with collectives round the function or in it."""
    inside = predicted(lambda w, x: lax.pmean(loss(w, x), "d"))
    plain = split(lambda w, x: lax.pmean(loss(w, x), "d"))
    for f in (lambda w, x: lax.pmean(planned(w, x), "d"), inside):
        same(split(f), plain)


def test_named_axes_cannot_be_measured():
    """A function with collectives is not compiled by itself: bytes are kept by prediction, and that is said."""
    f = jaxsub.sublinear(lambda w, x: lax.pmean(loss(w, x), "d"), budget="1GiB", cache=False, progress=False)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        chex.assert_trees_all_close(split(f), jax.grad(loss)(W, X), rtol=1e-5)
    strict = jaxsub.sublinear(lambda w, x: lax.pmean(loss(w, x), "d"), budget="1GiB", cache=False, verify=True)
    with pytest.raises(jaxsub.UnsupportedError, match="sublinear round"):
        split(strict)


def test_eight_devices():
    """Sharded arguments, and shard_map over eight devices, give the plain gradient."""
    code = """
    from jax.sharding import NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jaxsub.sublinear(loss, verify=False, cache=False)
    split = jax.device_put(x, NamedSharding(mesh, P("d")))
    assert jnp.allclose(jax.jit(jax.grad(f))(w, split), wanted, atol=1e-6)
    assert jnp.allclose(jax.grad(f)(w, split), wanted, atol=1e-6)
    body = jax.shard_map(lambda w, x: lax.pmean(f(w, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    assert jnp.allclose(jax.jit(jax.grad(body))(w, split), wanted, atol=1e-6)
    assert f.plan(jnp.zeros((16, 16)), jnp.zeros((64, 16))).n_regions > 0
    """
    in_a_process(LOSS + textwrap.dedent(code), **quickly(8))


def test_a_plan_that_cannot_know_of_the_devices_says_so():
    """Inside `jax.jit` no value says how it is split: slices of it would gather the whole of it on every device."""
    code = """
    import warnings
    from jax.sharding import NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(x, NamedSharding(mesh, P("d")))
    given = jax.tree.map(lambda a: NamedSharding(mesh, P(*("d",) * (a is split))), (w, split))
    budget = jaxsub.measure(loss, w, x).temp_bytes * 3 // 4  # of one device that holds all
    for shardings, n_told in ((None, 1), (given, 0)):
        f = jaxsub.sublinear(loss, budget=budget, cache=False, in_shardings=shardings)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compiled = jaxsub.jit(jax.value_and_grad(f)).lower(w, split).compile()
        assert sum("are on 8 devices, and nothing says how" in str(t.message) for t in told) == n_told, told
        assert compiled.memory_analysis().temp_size_in_bytes <= budget
        assert "all-gather" not in compiled.as_text()
    """
    in_a_process(LOSS + textwrap.dedent(code), **quickly(8))
