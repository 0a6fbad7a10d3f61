"""Ask a policy about an equation, by JAX's protocol: `policy(primitive, *avals, **params)`.

JAX's own policies call their first argument `prim`, and so do Equinox's primitives one of their parameters. That one is
left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Careful:
    """A policy that may be called for equations with a parameter `prim`.

    Example:
        >>> import jax
        >>> Careful(jax.checkpoint_policies.save_only_these_names("x"))(jax.lax.sin_p, prim="vmapped")
        False
    """

    policy: Callable[..., Any]

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> Any:
        """Answer as the policy does."""
        return self.policy(primitive, *avals, **{name: p for name, p in params.items() if name != "prim"})


def careful(policy: Any) -> Any:
    """The policy made careful, unless it is already; none stays none."""
    return policy if policy is None or isinstance(policy, Careful) else Careful(policy)


def bare(policy: Any) -> Any:
    """The policy that a careful one holds; any other as it is."""
    return policy.policy if isinstance(policy, Careful) else policy


def answer(policy: Callable[..., Any], eqn: Any) -> Any:
    """What a policy says of an equation's results."""
    return Careful(policy)(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
