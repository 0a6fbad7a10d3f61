"""Tell which equations are equal: by a digest of each, and by the functions and constants that no digest can hold.

`signature_of` digests an equation by everything but its position: primitive, parameters, types of inputs and outputs,
literals; jaxprs among the parameters by structure, and so what a derivative rule of its own computes. Addresses in a
parameter's text are left out and sets are sorted (a policy holds a set of names, in another order in every process), so
the digest is equal in every process, on every machine. `identity` compares functions and inner constants. Two
callbacks, or two derivative rules, with the same code but different closed-over objects differ; with equal ones they
are equal, although JAX wraps a rule in new objects at every use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.derivative_rules import RULED, traced_rule
from jaxsub.jaxpr.flops import bodies_of
from jaxsub.jaxpr.new_equations import is_over_slices
from jaxsub.jaxpr.policy_calls import bare
from jaxsub.jaxpr.rule_residuals import KeptRule

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_SET = re.compile(r"\{([^{}]*)\}")


SETTINGS = (
    "threefry_partitionable", "threefry_gpu_kernel_lowering", "default_matmul_precision", "compiler_enable_remat_pass",
    "use_shardy_partitioner", "optimization_level", "exec_time_optimization_effort", "memory_fitting_effort",
    "ragged_dot_use_ragged_dot_instruction",
)  # fmt: skip
"""JAX's settings that decide how a program is compiled and that no jaxpr shows."""


def of_jax() -> str:
    """Describe the settings that change plans and measurements, for keys on disk: JAX's, and flags given to XLA.

    Where XLA writes its dumps changes nothing.
    """
    settings = [getattr(jax.config, f"jax_{name}", None) for name in SETTINGS]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump")]
    return f"{compat.remat_flavour()} {jax.dtypes.canonicalize_dtype(float)} {settings} {sorted(flags)}"


def signatures_of(eqns: Iterable[Any]) -> tuple[bytes, ...]:
    """Digest equations, and the derivative rules of those that have their own."""
    rules: dict[Any, str] = {}
    return tuple(signature_of(eqn, rules) for eqn in eqns)


def signature_of(eqn: Any, rules: dict[Any, str] | None = None) -> bytes:
    """Digest an equation by everything but its position.

    Args:
        eqn: The equation.
        rules: Descriptions of derivative rules, of equations that are still there; more are added. `None` leaves rules
            out, as inside of rules: one may call its own function.

    Example:
        >>> import jax
        >>> one, other = jax.make_jaxpr(lambda x: (x + 1) + 1)(0.0).eqns
        >>> signature_of(one) == signature_of(other)
        True
    """
    digest = hashlib.blake2b(digest_size=12)
    digest.update(eqn.primitive.name.encode())
    is_ruled = eqn.primitive.name in RULED
    for key in sorted(eqn.params):
        digest.update(key.encode())
        if not (is_ruled and _is_function(eqn.params[key])):  # a rule is known by what it computes
            digest.update(_describe(eqn.params[key], rules).encode())
    if rules is not None and is_ruled and not is_over_slices(eqn):  # their rule follows from those inside
        digest.update(_describe_rule(eqn, rules).encode())
    for atom in (*eqn.invars, *eqn.outvars):
        digest.update((_aval_text(atom.aval) if compat.is_var(atom) else _describe(atom.val)).encode())
    return digest.digest()


@functools.lru_cache(maxsize=4096)
def _aval_text(aval: Any) -> str:
    """Format an aval; cached, since many equations share one."""
    return str(aval)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """Format a dtype; cached, since many values share one."""
    return str(dtype)


def _describe_rule(eqn: Any, rules: dict[Any, str]) -> str:
    """Describe what the derivative rule of an equation computes; one rule at the same shapes is traced once."""
    key = identity(eqn), *(_aval_text(a.aval) for a in eqn.invars)
    if key not in rules:
        rules[key] = "/".join(_describe_jaxpr(traced, None) for traced in traced_rule(eqn))
    return rules[key]


def _describe(param: Any, rules: dict[Any, str] | None = None) -> str:
    if param is None or isinstance(param, bool | int | float | str):
        return repr(param)
    if isinstance(param, np.dtype):
        return dtype_name(param)
    if isinstance(param, tuple | list):
        return "(" + ",".join(_describe(part, rules) for part in param) + ")"
    if hasattr(param, "eqns"):
        return _describe_jaxpr(param, rules)
    if hasattr(param, "shape") and hasattr(param, "tobytes"):
        return f"{param.dtype}{param.shape}" + hashlib.sha1(param.tobytes()).hexdigest()
    param = bare(param)
    if isinstance(param, functools.partial) or (callable(param) and hasattr(param, "__qualname__")):
        return _describe_function(param, ())
    return _SET.sub(lambda found: ", ".join(sorted(found[1].split(", "))), _ADDRESS.sub("", str(param)))


def _describe_function(x: Any, above: tuple[int, ...]) -> str:
    """Describe a function, such as a policy, by its name, its code, and plain values and functions it closes over.

    Sets are sorted, those in its code too: their order is another one in every process.
    """
    if id(x) in above:
        return "itself"
    above += (id(x),)
    if isinstance(x, functools.partial):
        return f"partial({', '.join(_describe_function(part, above) for part in (x.func, x.args, x.keywords))})"
    if isinstance(x, tuple | list):
        return f"[{', '.join(_describe_function(part, above) for part in x)}]"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{key}: {_describe_function(part, above)}' for key, part in x.items())}}}"
    if isinstance(x, set | frozenset):
        return f"{{{', '.join(sorted(_describe_function(part, above) for part in x))}}}"
    if isinstance(x, types.CodeType):
        return hashlib.sha1(x.co_code + _describe_function((x.co_names, x.co_consts), above).encode()).hexdigest()
    if not hasattr(x, "__qualname__"):
        return _describe(x) if _is_plain(x) or callable(x) else type(x).__qualname__
    name = f"{getattr(x, '__module__', '')}.{x.__qualname__}"
    if not isinstance(x, types.FunctionType):
        return name
    return f"{name}{_describe_function([x.__code__, *_closed_over(x)], above)}"


def _closed_over(x: types.FunctionType) -> Iterator[Any]:
    """What a function closes over, and its defaults."""
    for cell in x.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            yield cell.cell_contents
    yield x.__defaults__ or ()
    yield x.__kwdefaults__ or {}


def _describe_jaxpr(jaxpr: Any, rules: dict[Any, str] | None) -> str:
    """Describe a jaxpr by structure: equations' signatures, and the variables that connect them."""
    names: dict[Any, int] = {}
    parts = []
    for v in (*compat.open_jaxpr(jaxpr).constvars, *compat.open_jaxpr(jaxpr).invars):
        names[v] = len(names)
        parts.append(str(v.aval))
    for eqn in jaxpr.eqns:
        parts.append(signature_of(eqn, rules).hex() + str([names.get(a, -1) for a in eqn.invars if compat.is_var(a)]))
        for v in eqn.outvars:
            names[v] = len(names)
    parts.append(str([names.get(a, -1) if compat.is_var(a) else _describe(a.val)
                      for a in compat.open_jaxpr(jaxpr).outvars]))  # fmt: skip
    return ";".join(parts)


def identity(eqn: Any) -> tuple[Any, ...]:
    """Collect the functions and inner constants of an equation: equations equal in them and in signature are equal."""
    found = tuple(_root(p, ()) for key, p in sorted(eqn.params.items()) if _is_function(p) and key != "out_trees")
    for body in bodies_of(eqn):
        consts = tuple(map(id, getattr(body, "consts", ())))
        found += (consts, *(identity(inner) for inner in body.eqns))
    return tuple(part for part in found if part)


def _is_function(x: Any) -> bool:
    return not hasattr(x, "eqns") and not isinstance(x, type) and (callable(x) or _is_wrapped(x))


def _is_wrapped(x: Any) -> bool:
    """Tell whether this is JAX's own wrapped function: a function, transformations, their parameters."""
    return hasattr(x, "transforms") and hasattr(x, "f") and hasattr(x, "params")


def _root(x: Any, above: tuple[int, ...]) -> Any:
    """Make a key that is equal for functions of the same code that close over equal objects.

    JAX wraps a rule in new objects at every use; of its own closures only functions and plain values count.
    """
    if id(x) in above:
        return "itself"
    above += (id(x),)
    if isinstance(x, tuple | list):
        return tuple(_root(part, above) for part in x)
    if isinstance(x, dict):
        return tuple((key, _root(part, above)) for key, part in x.items())
    if isinstance(x, types.MethodType):
        return _root(x.__func__, above), id(x.__self__)
    if isinstance(x, KeptRule):
        return _root(x.thunk, above)
    if isinstance(x, functools.partial) or _is_wrapped(x):
        parts = (x.func, x.args, x.keywords) if isinstance(x, functools.partial) else (x.f, x.transforms, x.params)
        return _root(parts, above)
    if isinstance(x, types.FunctionType):
        is_jax = x.__module__.partition(".")[0] == "jax"
        return x.__code__, *(
            _root(part, above) for part in _closed_over(x) if not is_jax or _is_function(part) or _is_plain(part)
        )
    return (type(x), x) if _is_plain(x) or isinstance(x, jax.tree_util.PyTreeDef) else id(x)


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, bool | int | float | complex | str | bytes)
