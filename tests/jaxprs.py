"""What a jaxpr holds, in the bodies of its calls, loops and regions too; plans and marks that several tests share."""

import pytest

from jaxsub.core.budget import Budget
from jaxsub.core.plan import Plan
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of


def equations(jaxpr):
    """All equations, each followed by those of its bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies_of(eqn):
            yield from equations(body)


def barriers(jaxpr):
    """What each optimization barrier holds."""
    return [list(eqn.invars) for eqn in equations(jaxpr) if eqn.primitive.name == "optimization_barrier"]


def count(jaxpr, primitive):
    """How many equations are of a primitive."""
    return sum(eqn.primitive.name == primitive for eqn in equations(jaxpr))


def is_region(eqn):
    """Whether an equation is a region of `jax.checkpoint`."""
    return compat.unwrapped(eqn)[0].name in compat.REGIONS


def regions(jaxpr):
    """The regions of a jaxpr, found by equation, outermost first."""
    return filter(is_region, equations(jaxpr))


def plan_of(program, *segments, barriers=()):
    """A plan of the given segments."""
    return Plan(program.fingerprint, Budget(), len(program.eqns), segments, tuple(barriers))


by_result = pytest.mark.skipif(
    compat.remat_flavour() == "remat3", reason="jax_remat3 sees no names inside of derivative rules: no result is known"
)
