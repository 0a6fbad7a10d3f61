"""A digest of an equation by all that makes it what it is but its place: equal in every process, on every machine.

Primitive, parameters, types of inputs and outputs, literals; jaxprs among the parameters by structure. Addresses in
what a parameter says of itself are left out.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any

import numpy as np

from jaxsub import compat

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def signature_of(eqn: Any) -> bytes:
    """The digest of an equation.

    Example:
        >>> import jax
        >>> one, other = jax.make_jaxpr(lambda x: (x + 1) + 1)(0.0).eqns
        >>> signature_of(one) == signature_of(other)
        True
    """
    digest = hashlib.blake2b(digest_size=12)
    digest.update(eqn.primitive.name.encode())
    for key in sorted(eqn.params):
        digest.update(key.encode())
        digest.update(_describe(eqn.params[key]).encode())
    for atom in (*eqn.invars, *eqn.outvars):
        digest.update((_aval_text(atom.aval) if compat.is_var(atom) else _describe(atom.val)).encode())
    return digest.digest()


@functools.lru_cache(maxsize=4096)
def _aval_text(aval: Any) -> str:
    """An aval in words, made once for all equations that have it."""
    return str(aval)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """A dtype in words, made once for all values that have it."""
    return str(dtype)


def _describe(param: Any) -> str:
    if param is None or isinstance(param, bool | int | float | str):
        return repr(param)
    if isinstance(param, np.dtype):
        return dtype_name(param)
    if isinstance(param, tuple | list):
        return "(" + ",".join(map(_describe, param)) + ")"
    if hasattr(param, "eqns"):
        return _describe_jaxpr(param)
    if hasattr(param, "shape") and hasattr(param, "tobytes"):
        return f"{param.dtype}{param.shape}" + hashlib.sha1(param.tobytes()).hexdigest()
    if callable(param) and hasattr(param, "__qualname__"):
        return f"{getattr(param, '__module__', '')}.{param.__qualname__}"
    return _ADDRESS.sub("", str(param))


def _describe_jaxpr(jaxpr: Any) -> str:
    """A jaxpr by structure: equations' signatures, and which variable goes where."""
    names: dict[Any, int] = {}
    parts = []
    for v in (*compat.open_jaxpr(jaxpr).constvars, *compat.open_jaxpr(jaxpr).invars):
        names[v] = len(names)
        parts.append(str(v.aval))
    for eqn in jaxpr.eqns:
        parts.append(signature_of(eqn).hex() + str([names.get(a, -1) for a in eqn.invars if compat.is_var(a)]))
        for v in eqn.outvars:
            names[v] = len(names)
    parts.append(str([names.get(a, -1) if compat.is_var(a) else _describe(a.val)
                      for a in compat.open_jaxpr(jaxpr).outvars]))  # fmt: skip
    return ";".join(parts)
