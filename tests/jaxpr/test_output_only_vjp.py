"""Functions whose derivative is known from their result: the same numbers as JAX's, and the result alone is saved."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxprs import by_result, count

from jaxsub.core.plan import Budget, Plan, Segment
from jaxsub.emission.emit import emit
from jaxsub.jaxpr.flops import ELEMENTWISE_WEIGHT
from jaxsub.jaxpr.output_only_vjp import is_known_by_result, tagged
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.min_cut import choices
from jaxsub.partition.traced_run import trace_run

X = jnp.linspace(0.1, 2.0, 60, dtype=jnp.float32).reshape(3, 20)
W = jnp.eye(20) * 0.9


@by_result
@pytest.mark.parametrize("name", ["exp", "exp2", "logistic", "sqrt", "tanh"])
def test_derivatives_are_those_of_jax(name):
    """Values and gradients to the bit, second derivatives to rounding, under vmap and in forward mode."""
    plain = getattr(jax.lax, name)
    eqn = jax.make_jaxpr(plain)(X).eqns[0]
    assert is_known_by_result(eqn)

    def named(x):
        return tagged(eqn, x, lambda y, offset: checkpoint_name(y, f"{name}_{offset}"), 0)

    chex.assert_trees_all_equal(*(jax.vjp(f, X)[1](X) for f in (plain, named)))
    chex.assert_trees_all_equal(*(jax.jvp(f, (X,), (X,)) for f in (plain, named)))
    chex.assert_trees_all_equal(*(jax.vmap(f)(X) for f in (plain, named)))
    second = (jax.grad(lambda x, f=f: jnp.sum(jax.grad(lambda x: jnp.sum(f(x)))(x) ** 2))(X) for f in (plain, named))
    chex.assert_trees_all_close(*second, rtol=1e-5)


@pytest.mark.parametrize("function", [jnp.sin, jax.lax.rsqrt, lambda x: jnp.tanh(x + 1j), lambda x: x**2])
def test_other_functions_are_left_to_jax(function):
    """Other functions, and those of complex numbers, keep JAX's rules."""
    assert not any(map(is_known_by_result, jax.make_jaxpr(function)(X).eqns))


def layers(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


@by_result
def test_a_saved_result_spares_the_product_before_it():
    """A region that saves each tanh recomputes nothing; one that saves each product recomputes each tanh."""
    program = trace(layers, (W, X), {})

    def again(saved, name):
        plan = Plan(program.fingerprint, Budget(), len(program.eqns), (Segment(0, 6, saved),))
        f = emit(program, plan)
        jaxpr = jax.make_jaxpr(jax.grad(lambda *a: f(*a)[0], argnums=(0, 1)))(W, X)
        return count(jaxpr, name) - (9 if name == "dot_general" else 3)

    first = program.graph.first_value(0)
    results, products = range(first + 1, first + 6, 2), range(first, first + 6, 2)
    assert again(tuple(results), "dot_general") == again(tuple(results), "tanh") == 0
    assert again(tuple(products), "dot_general") == 0
    assert again(tuple(products), "tanh") > 0
    assert again((), "dot_general") > 0


@by_result
def test_what_goes_out_is_enough():
    """A run that ends in a tanh has an option that saves no bytes and recomputes nothing: it returns enough."""
    found = choices(trace_run(trace(layers, (W, X), {}), 0, 2))
    assert found[-1].saved_bytes == 0
    assert found[-1].recompute_flops <= ELEMENTWISE_WEIGHT * X.size
