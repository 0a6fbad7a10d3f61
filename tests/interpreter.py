"""A jaxpr's value, one equation after the other, without compiling it.

The commonest primitives are NumPy's; everything else is JAX's own, called eagerly, which compiles it once for each of
its shapes and parameters. Loops are run step by step, calls and `jax.checkpoint` regions by their bodies. Every result
has the shape and dtype that its equation says, or the interpreter fails.
"""

from string import ascii_letters

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters.partial_eval import dce_jaxpr

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", *compat.REGIONS)


def evaluate(closed, args):
    """The outputs of a closed jaxpr; what they do not depend on is left out, as a compiler would."""
    live, _ = dce_jaxpr(compat.open_jaxpr(closed), [True] * len(closed.out_avals), instantiate=True)
    with np.errstate(all="ignore"):
        return _evaluate(live, closed.consts, [_plain(a) for a in args])


def _evaluate(jaxpr, consts, args):
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(_plain, consts), *args), strict=True))

    def read(atom):
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, jex_core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        outs = _apply(eqn, [read(a) for a in eqn.invars])
        for var, out in zip(eqn.outvars, outs, strict=True):
            assert (out.shape, out.dtype) == (var.aval.shape, var.aval.dtype), (eqn, out.shape, out.dtype)
            env[var] = out
    return [read(a) for a in jaxpr.outvars]


def _body(closed, args):
    return _evaluate(compat.open_jaxpr(closed), getattr(closed, "consts", ()), args)


def _apply(eqn, args):
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return _body(bodies_of(eqn)[0], args)
    if name in CONTROL:
        return CONTROL[name](eqn, params, args)
    if name == "optimization_barrier":
        return args
    if not all(isinstance(a, np.ndarray) for a in args):
        return _bound(eqn, args)  # NumPy has no typed keys
    if name in UFUNCS:
        return [np.asarray(UFUNCS[name](*args))]
    if name in NUMPY and (out := NUMPY[name](params, *args)) is not NotImplemented:
        return out if eqn.primitive.multiple_results else [out]
    return _bound(eqn, args)


def _bound(eqn, args):
    """What JAX itself makes of it."""
    outs = eqn.primitive.bind(*args, **eqn.params)
    return [_plain(o) for o in (outs if eqn.primitive.multiple_results else (outs,))]


def _plain(x):
    """A NumPy array, but for what NumPy has not: typed keys."""
    is_typed = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return x if is_typed else np.asarray(x)


def _scan(eqn, params, args):
    n_consts, n_carry = compat.scan_sizes(eqn)
    consts, carry, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
    steps = range(params["length"])
    ys = [None] * len(steps)
    for i in reversed(steps) if params["reverse"] else steps:
        outs = _body(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
        carry, ys[i] = outs[:n_carry], outs[n_carry:]
    return [*carry, *(_stacked(rows) for rows in zip(*ys, strict=True))]


def _stacked(rows):
    return np.stack(rows) if isinstance(rows[0], np.ndarray) else jnp.stack(rows)


def _while(eqn, params, args):
    """Where `vmap` has made a loop of many, each goes on until its own condition is false."""
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body, values = args[:n_cond], args[n_cond : n_cond + n_body], args[n_cond + n_body :]
    while np.any(goes_on := _body(params["cond_jaxpr"], [*cond, *values])[0]):
        new = _body(params["body_jaxpr"], [*body, *values])
        masks = [goes_on.reshape(goes_on.shape + (1,) * (v.ndim - goes_on.ndim)) for v in values]
        values = [np.where(m, a, b) for m, a, b in zip(masks, new, values, strict=True)]
    return values


def _cond(eqn, params, args):
    return _body(params["branches"][np.clip(int(args[0]), 0, len(params["branches"]) - 1)], args[1:])


CONTROL = {"scan": _scan, "while": _while, "cond": _cond}


def _converted(params, x):
    dtype = params["new_dtype"]
    if not isinstance(dtype, np.dtype):
        return NotImplemented
    return (x if np.issubdtype(dtype, np.complexfloating) else x.real).astype(dtype)


def _broadcast(params, x, *sizes):
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return NotImplemented if sizes else np.broadcast_to(x.reshape(shape), params["shape"])


def _dot(params, x, y):
    (over_x, over_y), (batch_x, batch_y) = params["dimension_numbers"]
    letters = iter(ascii_letters)
    names_x, names_y = [next(letters) for _ in x.shape], [next(letters) for _ in y.shape]
    for a, b in zip((*over_x, *batch_x), (*over_y, *batch_y), strict=True):
        names_y[b] = names_x[a]
    free = [n for i, n in enumerate(names_x) if i not in (*over_x, *batch_x)]
    free += [n for i, n in enumerate(names_y) if i not in (*over_y, *batch_y)]
    out = [names_x[a] for a in batch_x] + free
    dtype = params["preferred_element_type"] or np.result_type(x, y)
    return np.einsum(f"{''.join(names_x)},{''.join(names_y)}->{''.join(out)}", x, y, dtype=dtype)


def _padded(params, x, fill):
    """Zeros, or others, between entries and around them, then what is cut off."""
    config = params["padding_config"]
    spread = [size + max(size - 1, 0) * inner for size, (_, _, inner) in zip(x.shape, config, strict=True)]
    around = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    out = np.full([size + low + high for size, (low, high) in zip(spread, around, strict=True)], fill, x.dtype)
    steps = zip(spread, config, around, strict=True)
    out[tuple(slice(low, low + size, inner + 1) for size, (_, _, inner), (low, _) in steps)] = x
    return out[tuple(slice(max(-low, 0), min(high, 0) or None) for low, high, _ in config)]


def _sliced(params, x):
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _window(x, starts, sizes):
    """Where a window of these sizes begins so that it stays inside, as JAX moves it."""
    return tuple(
        slice(at := min(max(int(s), 0), d - n), at + n) for s, d, n in zip(starts, x.shape, sizes, strict=True)
    )


def _updated(params, x, part, *starts):
    out = x.copy()
    out[_window(x, starts, part.shape)] = part
    return out


def _selected(params, which, *cases):
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.select([np.broadcast_to(which == i, cases[0].shape) for i in range(len(cases))], cases)


def _accumulated(ufunc):
    def run(params, x):
        way = np.flip if params["reverse"] else lambda x, axis: x
        return way(ufunc.accumulate(way(x, params["axis"]), params["axis"], dtype=x.dtype), params["axis"])

    return run


def _reduction(f):
    return lambda params, x: np.asarray(f(x, axis=tuple(params["axes"])), x.dtype)


UFUNCS = {
    **{
        name: getattr(np, name)
        for name in ("sin", "cos", "tan", "tanh", "sinh", "cosh", "exp", "log", "log1p", "expm1")
    },
    **{name: getattr(np, name) for name in ("sqrt", "square", "sign", "floor", "real", "imag", "abs")},
    "neg": np.negative,
    "asinh": np.arcsinh,
    "atan2": np.arctan2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "rem": np.fmod,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "is_finite": np.isfinite,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    **dict.fromkeys(("name", "stop_gradient", "copy"), np.asarray),
}
"""What NumPy computes from the inputs alone."""

NUMPY = {
    "div": lambda params, x, y: x / y if jnp.issubdtype(x.dtype, jnp.inexact) else NotImplemented,
    "integer_pow": lambda params, x: np.asarray(x ** params["y"], x.dtype),
    "cumsum": _accumulated(np.add),
    "cumprod": _accumulated(np.multiply),
    "cummax": _accumulated(np.maximum),
    "reduce_sum": _reduction(np.sum),
    "reduce_prod": _reduction(np.prod),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "reshape": lambda params, x, *sizes: x.transpose(params["dimensions"] or range(x.ndim)).reshape(
        params["new_sizes"]
    ),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
    "iota": lambda params: np.indices(params["shape"], params["dtype"])[params["dimension"]],
    "dynamic_slice": lambda params, x, *starts: x[_window(x, starts, params["slice_sizes"])],
    "dynamic_update_slice": _updated,
    "complex": lambda params, x, y: (x + 1j * y).astype(np.result_type(x, np.complex64)),
    "split": lambda params, x: np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"]),
    "convert_element_type": _converted,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "pad": _padded,
    "slice": _sliced,
    "select_n": _selected,
}
"""What it computes with parameters too; `NotImplemented` for those it is not taught."""
