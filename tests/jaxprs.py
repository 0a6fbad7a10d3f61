"""What a jaxpr holds, in the bodies of its calls, loops and regions too."""

from jaxsub.flops import bodies_of


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
