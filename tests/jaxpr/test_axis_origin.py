"""From which dimensions of a function's arguments those of a value come."""

import jax
import jax.numpy as jnp

from jaxsub.jaxpr.axis_origin import origins
from jaxsub.jaxpr.trace import trace

ROWS, WIDTH = 6, 4


def found(fun, primitive, *args):
    """For each dimension of the first result of a primitive, the arguments' dimensions that it comes from."""
    program = trace(fun, args, {})
    variable = next(e for e in program.eqns if e.primitive.name == primitive).outvars[0]
    names = {v: i for i, v in enumerate(program.invars)}
    dims = range(len(variable.aval.shape))
    return [[(names[v], where) for v, where in origins(program.eqns, variable, (dim,))] for dim in dims]


def test_a_conditional_is_looked_into():
    def fun(x, flag):
        return jax.lax.cond(flag, lambda x: jnp.sin(x).T, lambda x: x.T, x).sum()

    assert found(fun, "cond", jnp.ones((ROWS, WIDTH)), True) == [[(0, (1,))], [(0, (0,))]]


def test_a_solver_is_not():
    """The bodies of a linear solve read other values than the equation: nothing is said of what they are."""
    a, b = jnp.eye(WIDTH) * jnp.ones((ROWS, 1, 1)), jnp.ones((ROWS, WIDTH, WIDTH))
    for where in found(lambda a, b: jnp.linalg.solve(a, b).sum(), "custom_linear_solve", a, b):
        assert not where
