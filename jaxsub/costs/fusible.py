"""Classify equations for fusion into kernels: see `jaxsub.costs.fusion`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of, is_costly
from jaxsub.jaxpr.late_zeros import SCATTER_ADDS
from jaxsub.jaxpr.random_bits import is_threefry
from jaxsub.jaxpr.trace import array_bytes, aval_bytes

VIEWS = frozenset(
    "reshape transpose squeeze expand_dims optimization_barrier name copy_p stop_gradient sharding_constraint".split()
)
SLOW = frozenset(
    "tanh exp exp2 log log1p log2 expm1 erf erfc erf_inv sin cos tan logistic pow rsqrt sqrt cbrt atan2".split()
)
"""Elementwise primitives that the compiler avoids to duplicate."""

RESHAPES = frozenset("reshape transpose squeeze expand_dims broadcast_in_dim".split())
TAKEN_IN = frozenset("add add_any sub mul div neg max min exp".split())
"""Elementwise primitives that a CPU's library call for a product fuses."""

PLAIN = TAKEN_IN.union(
    SLOW,
    "select_n broadcast_in_dim integer_pow convert_element_type iota pad slice concatenate sign abs square".split(),
    "eq ne lt le gt ge and or not".split(),
)
"""Frequent elementwise primitives."""

REDUCTIONS = ("reduce_", "argm", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod")
IN_PLACE = frozenset("scatter scatter-add scatter_add scatter-mul scatter-min scatter-max dynamic_update_slice".split())
SAME = frozenset("optimization_barrier name copy_p".split())
"""Primitives whose results are their operands."""

LOOPS = ("scan", "while", "cond")
WINDOWS = ("reduce_window_sum", "reduce_window_max", "select_and_scatter_add")


def is_view(eqn: Any) -> bool:
    """Tell whether an equation's result shares its operand's memory."""
    if eqn.primitive.name in ("broadcast_in_dim", "slice"):
        a, v = eqn.invars[0], eqn.outvars[0]
        return bool(compat.is_var(a)) and math.prod(a.aval.shape) == math.prod(v.aval.shape)
    return eqn.primitive.name in VIEWS


def is_fusible(eqn: Any, is_cpu: bool = True) -> bool:
    """Tell whether an equation is fused into its consumers."""
    return eqn.primitive.name in PLAIN or not (
        is_costly(eqn)
        or is_reduction(eqn)
        or any(not is_fusible(inner, is_cpu) for body in bodies_of(eqn) for inner in body.eqns)
        or eqn.primitive.name in LOOPS
        or (len(eqn.outvars) != 1 and eqn.primitive.name not in ("split", "threefry2x32"))
        or eqn.primitive.name.startswith("scatter")
        or eqn.primitive.name in WINDOWS
        or (is_cpu and threefry_bytes(eqn) > 0)
    )


def threefry_bytes(eqn: Any) -> int:
    """What the state of JAX's usual generator takes on a CPU while it draws: two words for each word that it returns.

    It is a loop there, which copies its state as it begins. Its result is never made: what reads it adds the words of
    the state up itself, so that the state lives as long as it is read (n words drawn: 3 n beside the result, measured).
    """
    if not is_threefry(eqn):
        return 0
    return int(2 * math.prod(eqn.outvars[0].aval.shape) * max(4, eqn.params.get("bit_width", 32) // 8))


def masked_bytes(eqn: Any) -> int:
    """What a product by groups of rows takes beside its result: JAX lowers it to one product on CPUs and GPUs.

    Operands are copied once for each group, with zeros in the other groups' rows: the left one, and the weights in
    another layout; where rows are summed, both (`_ragged_dot_general_impl` of JAX).
    """
    if eqn.primitive.name != "ragged_dot_general":
        return 0
    dims, (lhs, rhs, sizes) = eqn.params["ragged_dot_dimension_numbers"], (a.aval for a in eqn.invars[:3])
    (summed, _), (batched, _) = dims.dot_dimension_numbers
    (rows,), n_groups = dims.lhs_ragged_dimensions, sizes.shape[-1]
    if rows in batched:
        return 0
    left, right = aval_bytes(lhs), aval_bytes(rhs)
    return int(n_groups * (left + right) if rows in summed else n_groups * left + right)


def fuses_updates(eqn: Any, is_cpu: bool) -> bool:
    """Tell whether an equation is a scatter that is fused with the work on its updates: a GPU's is."""
    return not is_cpu and bool(eqn.primitive.name.startswith("scatter"))


def is_dear(eqn: Any) -> bool:
    """Tell whether an elementwise equation is too costly to be repeated for each element of something larger."""
    is_quotient = eqn.primitive.name == "div" and compat.is_var(eqn.invars[1])
    return is_quotient or eqn.primitive.name in SLOW


def is_expanded(v: Any, made: Iterable[Any]) -> bool:
    """Tell whether something larger is made of a value, so that each element is read more than once."""
    return any(math.prod(larger.aval.shape) > math.prod(v.aval.shape) for larger in made)


def leads_to(eqns: Sequence[Any], readers: Mapping[Any, Collection[int]], starts: Iterable[int], end: int) -> bool:
    """Tell whether an equation reads what some before it make, by way of others perhaps.

    Args:
        eqns: The equations.
        readers: The numbers of those that read each variable.
        starts: The numbers of the first.
        end: The number of the equation.
    """
    left, seen = list(starts), set[int]()
    while left:
        if (at := left.pop()) == end:
            return True
        if at < end and at not in seen:
            seen.add(at)
            left += [reader for v in eqns[at].outvars for reader in readers.get(v, ())]
    return False


def is_concatenation(eqn: Any) -> bool:
    """Tell whether an equation concatenates arrays."""
    return bool(eqn.primitive.name == "concatenate")


def is_reduction(eqn: Any) -> bool:
    """Tell whether an equation reduces or accumulates over axes."""
    return bool(eqn.primitive.name.startswith(REDUCTIONS))


def summed_columns(eqn: Any) -> tuple[int, ...] | None:
    """Return the axes that an equation reduces if the last is not among them; `None` for any other equation."""
    axes = eqn.params.get("axes", ()) if is_reduction(eqn) else ()
    return tuple(axes) if axes and eqn.invars[0].aval.ndim - 1 not in axes else None


def is_copied(eqn: Any, place: int) -> bool:
    """Tell whether a product or convolution needs a transposed copy of an operand."""
    if eqn.primitive.name == "conv_general_dilated":
        spec, ndim = eqn.params["dimension_numbers"][place], eqn.invars[place].aval.ndim
        inner = tuple(range(1, ndim - 1)) if place == 0 else tuple(range(ndim - 2))
        return tuple(spec) != ((0, ndim - 1, *inner) if place == 0 else (ndim - 1, ndim - 2, *inner))
    if eqn.primitive.name != "dot_general":
        return False
    summed, batched = (axes[place] for axes in eqn.params["dimension_numbers"])
    ndim, n = eqn.invars[place].aval.ndim, len(summed)
    first = ndim - n if place == 0 else len(batched)
    return n > 1 and tuple(summed) != tuple(range(first, first + n))


def flattened(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """List which of its operands that are variables, and its result, a product reshapes to two dimensions."""
    if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"][1][0]:
        return []
    return [v for v in (*ins, *eqn.outvars) if v.aval.ndim > 2]


def is_unary(eqn: Any) -> bool:
    """Tell whether an equation reads at most one array of its result's size, so that repeating it reads no more."""
    size, read = array_bytes(eqn.outvars[0]), set(filter(compat.is_var, eqn.invars))
    return not is_concatenation(eqn) and sum(array_bytes(a) >= size for a in read) <= 1


def broadcast_operands(eqn: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """List the operands that an elementwise equation broadcasts over some of its result's axes, with its shape."""
    if eqn.primitive.name == "broadcast_in_dim" or len(eqn.invars) < 2:
        return []
    shape = eqn.outvars[0].aval.shape
    return [(a, shape) for a in eqn.invars if compat.is_var(a) and 1 < math.prod(a.aval.shape) < math.prod(shape)
            and a.aval.ndim == len(shape)]  # fmt: skip


def scattered_last(eqns: Sequence[Any], alias: Mapping[Any, Any], outputs: Iterable[Any]) -> Sequence[Any]:
    """Reorder sums with scattered values as the compiler does: `a.at[i].add(u) + b` is `(a + b).at[i].add(u)`.

    So what is scattered into is the sum, with zeros for `a` just `b`, and neither zeros nor `b` stand beside it. That
    is done where nothing else reads the scattered values.

    Args:
        eqns: The equations, in order.
        alias: Variables that are other variables.
        outputs: Variables that are read at the end.
    """
    if not any(eqn.primitive.name in SCATTER_ADDS for eqn in eqns):
        return eqns
    same = dict(alias)
    for eqn in eqns:
        same.update(zip(eqn.outvars, eqn.invars, strict=True) if eqn.primitive.name in SAME else ())

    def base(atom: Any) -> Any:
        while compat.is_var(atom) and same.get(atom, atom) is not atom:
            atom = same[atom]
        return atom if compat.is_var(atom) else None

    working = [eqn for eqn in eqns if eqn.primitive.name not in SAME]
    uses = Counter(base(a) for a in (*(a for eqn in working for a in eqn.invars), *outputs))
    added = {base(a) for eqn in working if eqn.primitive.name in ("add", "add_any") for a in eqn.invars}
    ordered, waiting = list[Any](), dict[Any, Any]()
    for eqn in eqns:
        ins = [waiting.pop(base(a), None) for a in eqn.invars]
        if eqn.primitive.name in SAME:  # no sum moves past a barrier
            ordered.extend(filter(None, ins))
            ins = []
        if (scatter := next(filter(None, ins), None)) is not None:
            terms = [a if w is None else scatter.invars[0] for a, w in zip(eqn.invars, ins, strict=True)]
            ordered.append(eqn.replace(invars=terms, outvars=scatter.outvars))
            eqn = scatter.replace(invars=[*scatter.outvars, *scatter.invars[1:]], outvars=eqn.outvars)
        v = eqn.outvars[0] if eqn.primitive.name in SCATTER_ADDS else None
        if v is not None and uses[v] == 1 and v in added:
            waiting[v] = eqn
        else:
            ordered.append(eqn)
    return ordered


def erfc_reads_exp(eqns: Sequence[Any]) -> Sequence[Any]:
    """Let each `erfc(x)` read the `exp(-x²)` of its derivative: the compiler computes it from the same exponential.

    Args:
        eqns: The equations, in order. JAX's rule puts the derivative right behind.
    """
    if not any(eqn.primitive.name == "erfc" for eqn in eqns):
        return eqns
    found = list(eqns)
    for i, (eqn, square, minus, exp) in enumerate(zip(eqns, eqns[1:], eqns[2:], eqns[3:], strict=False)):
        if (eqn.primitive.name, minus.primitive.name, exp.primitive.name) != ("erfc", "neg", "exp"):
            continue
        is_square = square.primitive.name in ("square", "integer_pow") and square.params.get("y", 2) == 2
        if is_square and square.invars == eqn.invars and minus.invars == square.outvars and exp.invars == minus.outvars:
            found[i : i + 4] = square, minus, exp, eqn.replace(invars=[*eqn.invars, *exp.outvars])
    return found


BARRIER = "barrier"
"""With its first result, the key of what readers of a barrier wait for."""


def is_barrier(eqn: Any) -> bool:
    """Tell whether what reads one operand's result waits for other operands too."""
    return eqn.primitive.name == "optimization_barrier" and len(eqn.invars) > 1


def written_over(eqn: Any) -> list[tuple[Any, Any]]:
    """Results that are written over an operand, each with it: what a loop carries, what is updated."""
    if eqn.primitive.name in IN_PLACE:
        return [(eqn.outvars[0], eqn.invars[0])]
    return list(zip(eqn.outvars, eqn.invars[slice(*carried_by(eqn))], strict=False))


def carried_by(eqn: Any) -> tuple[int, int]:
    """The first of a loop's operands that it carries, and the one after the last; of other equations none."""
    if eqn.primitive.name != "scan":
        return 0, 0
    n_consts, n_carry = compat.scan_sizes(eqn)
    return n_consts, n_consts + n_carry


def barrier(eqn: Any) -> Any:
    """The buffer, of no bytes, that a barrier makes once all its operands are made."""
    return eqn.outvars[0], BARRIER


def union(known: Mapping[Any, frozenset[Any]], ins: Iterable[Any]) -> frozenset[Any]:
    """What is known of each of some variables, of all together."""
    found = [of for v in ins if (of := known.get(v))]
    return found[0] if len(found) == 1 else frozenset[Any]().union(*found)


COMPARED_BYTES = 2**16
"""Constants of more are equal where they are the same array."""


def literal_key(atom: Any) -> Any:
    """Make the key of an atom that is a constant: equal for equal scalars and small arrays, as XLA merges these."""
    value: Any = getattr(atom, "val", None)
    if isinstance(value, jax.core.Tracer):  # what a rule closes over
        return "literal", id(value)
    if getattr(value, "size", 1) == 1:
        return "literal", str(value)
    is_number = not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    if is_number and value.nbytes <= COMPARED_BYTES:
        return "literal", value.shape, str(value.dtype), np.asarray(value).tobytes()
    return "literal", id(value)


def equation_key(eqn: Any, ins: Sequence[Any]) -> Any:
    """Make the key of equal elementwise equations; `None` where parameters are not hashable."""
    key = (eqn.primitive.name, tuple(ins), tuple(v.aval.shape for v in eqn.outvars), tuple(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key
