"""Which kernels a compiler makes of equations: what is stored, and what is read inside the kernel that reads it.

The compiler does not store most values of a jaxpr: elementwise chains are computed inside the kernel that reads them.
A value is *stored* if a product, a convolution, a gather or a loop makes or reads it, if a reduction makes it, or if it
goes out. Every other value is *virtual*: its reader reads the stored values that it is made of, and prolongs their
lives. Reshapes, transposes and barriers are views; equations that are the same are one.

On a CPU more is stored. Elementwise work that is slow, such as tanh, is done once where several kernels need it. Sums
and products are calls of a library, which takes in the elementwise work before a sum only as far as nothing else reads
it, and reads what is spread over rows, beside a product, as a whole array. A product that sums over several axes reads
a transposed copy.

Sources: OpenXLA, `xla/service/instruction_fusion.cc` (what is duplicated), `xla/service/cpu/cpu_instruction_fusion.cc`,
`xla/backends/cpu/transforms/library_rewriter.cc`, `xla/service/dot_decomposer.cc`; and programs that it compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxsub import compat
from jaxsub.flops import bodies_of, is_costly
from jaxsub.kernels import Kernel, peak_bytes, schedule
from jaxsub.program import aval_bytes

VIEWS = frozenset("reshape transpose squeeze expand_dims optimization_barrier name copy_p stop_gradient".split())
SLOW = frozenset(
    "tanh exp exp2 log log1p expm1 erf erfc erf_inv sin cos tan logistic pow rsqrt sqrt cbrt atan2".split()
)
"""Elementwise primitives that the compiler does not like to do twice."""

LARGE = 2**20
"""Elements of the products that a CPU's library joins with sums of them: by trial, between 0.8 and 1.2 million."""

RESHAPES = frozenset("reshape transpose squeeze expand_dims broadcast_in_dim".split())
TAKEN_IN = frozenset("add add_any sub mul div neg max min exp".split())
"""Elementwise primitives that a library call for a product takes in on a CPU."""

PLAIN = TAKEN_IN.union(
    SLOW,
    "select_n broadcast_in_dim integer_pow convert_element_type iota pad slice concatenate sign abs square".split(),
    "eq ne lt le gt ge and or not".split(),
)
"""Elementwise primitives that are met often."""

REDUCTIONS = ("reduce_", "argm", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod")
IN_PLACE = frozenset("scatter scatter-add scatter_add dynamic_update_slice".split())
LOOPS = ("scan", "while", "cond")
WINDOWS = ("reduce_window_sum", "reduce_window_max", "select_and_scatter_add")


@dataclass(slots=True, eq=False)
class Lives:
    """The kernels of a run of equations.

    Attributes:
        eqns: The equations, in order.
        given: Variables that stand at the start.
        outputs: Variables that must stand at the end.
        alias: Variables that are other variables.
        is_cpu: Whether to compile for a CPU rather than a GPU.
        stored: The variables that kernels make.
        kernels: The kernels, in the order of the equations.
    """

    eqns: Sequence[Any]
    given: Sequence[Any]
    outputs: Sequence[Any]
    alias: dict[Any, Any]
    is_cpu: bool = True
    stored: set[Any] = field(init=False, default_factory=set)
    kernels: list[Kernel] = field(init=False, default_factory=list)
    _bases: dict[Any, Any] = field(init=False, default_factory=dict)
    _readers: dict[Any, set[int]] = field(init=False, default_factory=dict)
    _through: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _plain: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _wholes: dict[Any, int] = field(init=False, default_factory=dict)
    _beside: dict[Any, list[Any]] = field(init=False, default_factory=dict)
    _remade: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _reshaped: set[Any] = field(init=False, default_factory=set)
    _flat: set[Any] = field(init=False, default_factory=set)
    _direct: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _spread: dict[Any, set[int]] = field(init=False, default_factory=dict)
    _makers: dict[Any, Any] = field(init=False, default_factory=dict)
    _elementwise: dict[int, bool] = field(init=False, default_factory=dict)
    _work: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._bases.update((v, r) for v, r in self.alias.items() if v is not r)
        self._merge()
        if self.is_cpu:
            self._absorb()
        self._store()
        self._fuse()

    def base(self, atom: Any) -> Any:
        """The variable that an atom is, or is a view of."""
        found = self._bases.get(atom)
        while found is not None:
            atom, found = found, self._bases.get(found)
        return atom

    def ends(self) -> set[Any]:
        """The buffers of the outputs."""
        return {self.base(v) for v in self.outputs if compat.is_var(v)}

    def reads(self, eqn: Any) -> frozenset[Any]:
        """The stored variables that an equation reads, through what is fused with it."""
        return self._roots(self._through, eqn)

    def _roots(self, roots: dict[Any, frozenset[Any]], eqn: Any) -> frozenset[Any]:
        return frozenset().union(*(roots.get(self.base(a), ()) for a in eqn.invars if compat.is_var(a)))

    def stores(self, eqn: Any) -> bool:
        """Whether an equation makes something that is stored, rather than read inside the kernel that reads it."""
        return any(v in self.stored and self.base(v) is v for v in eqn.outvars)

    def _merge(self) -> None:
        """Find views, and equations that are the same; note who reads what."""
        seen: dict[Any, Any] = {}
        for position, eqn in enumerate(self.eqns):
            ins = [self.base(a) if compat.is_var(a) else _literal(a) for a in eqn.invars]
            if is_view(eqn):
                for v, atom, base in zip(eqn.outvars, eqn.invars, ins, strict=False):
                    if compat.is_var(atom):
                        self._bases[v] = base
                        if eqn.primitive.name in RESHAPES or self.alias.get(atom, atom) in self._reshaped:
                            self._reshaped.add(v)
                continue
            self._elementwise[position] = is_elementwise = is_fusible(eqn, self.is_cpu)
            if is_elementwise and (key := _key(eqn, ins)) is not None:
                if key in seen:
                    self._bases.update(zip(eqn.outvars, seen[key], strict=True))
                    continue
                seen[key] = eqn.outvars
            self._work.append(position)
            self._makers.update((v, eqn) for v in eqn.outvars)
            self._flat.update(_flattened(eqn, ins))
            for v in filter(compat.is_var, ins):
                self._readers.setdefault(v, set()).add(position)
            for w, shape in _spread_operands(eqn) if is_elementwise and self.is_cpu else ():
                self._spread.setdefault((self.base(w), shape), set()).add(position)

    def _absorb(self) -> None:
        """Let products take in what alone is made of them element by element: it takes their place."""
        ends, gone = self.ends(), set[int]()
        for position in self._work:
            eqn = self.eqns[position]
            if eqn.primitive.name != "dot_general":
                continue
            product = eqn.outvars[0]
            while eqn.outvars[0] not in ends:
                made = eqn.outvars[0]
                readers = self._readers.get(made, set())
                works = [p for p in readers if not is_reduction(self.eqns[p])]
                eqn = self.eqns[works[0]] if len(works) == 1 else None
                if eqn is None or eqn.primitive.name not in TAKEN_IN or eqn.outvars[0].aval.shape != made.aval.shape:
                    break
                gone.add(works[0])
                self._bases[eqn.outvars[0]] = product
                self._beside.setdefault(product, []).extend(a for a in eqn.invars if compat.is_var(a))
                later = self._readers.get(eqn.outvars[0], set())
                self._readers[product] = (self._readers[product] - {works[0]}) | later
        self._work = [p for p in self._work if p not in gone]

    def _store(self) -> None:
        """Decide what is stored, the last equations first."""
        self.stored |= self.ends() | set(self.given)
        absorbed: set[Any] = set()
        homes: dict[Any, frozenset[int]] = {}
        for position in reversed(self._work):
            eqn = self.eqns[position]
            ins = [self.base(a) for a in eqn.invars if compat.is_var(a)]
            if not self._elementwise[position]:
                self.stored.update(eqn.outvars)
                if not is_reduction(eqn):
                    self.stored.update(ins)
                elif self.is_cpu:
                    absorbed.update(ins)
                continue
            v = eqn.outvars[0]
            at = frozenset[int]().union(*(self._home(r, homes) for r in self._readers.get(v, ())))
            is_shared = v in absorbed and len(self._readers.get(v, ())) > 1
            is_slow = (eqn.primitive.name in SLOW and len(at) > 1) or (_is_dear(eqn) and self._is_spread(v))
            if self.is_cpu and (is_shared or is_slow) and v.aval.shape:
                self.stored.add(v)
            elif v in absorbed and v not in self.stored:
                absorbed.update(ins)
            homes[v] = at

    def _is_spread(self, v: Any) -> bool:
        """Whether something larger is made of a value, each of its elements read more than once."""
        readers = (self.eqns[p].outvars[0].aval for p in self._readers.get(v, ()) if self._elementwise[p])
        return any(math.prod(aval.shape) > math.prod(v.aval.shape) for aval in readers)

    def _home(self, position: int, homes: dict[Any, frozenset[int]]) -> frozenset[int]:
        """The kernels that an equation ends up in."""
        made = self.eqns[position].outvars  # none where an equation only has an effect
        is_own = not made or made[0] in self.stored
        return frozenset([position]) if is_own else homes.get(made[0], frozenset())

    def _fuse(self) -> None:
        """Make the kernels."""
        for v in self.given:
            self._through[v] = self._direct[v] = self._plain[v] = frozenset([v])
        for position in self._work:
            eqn = self.eqns[position]
            if self._elementwise[position]:
                self._fuse_elementwise(position, eqn)
                continue
            for v in eqn.outvars:
                self._through[v] = self._direct[v] = frozenset([v])
                self._plain[v] = frozenset() if v in self._flat else frozenset([v])
            if is_reduction(eqn):
                self._add(eqn.outvars, self._roots(self._direct if self.is_cpu else self._through, eqn), position)
            else:
                self._call(position, eqn)
        for v, shape in sorted(self._wholes, key=lambda whole: self._wholes[whole]):
            self._spread_out(self._wholes[v, shape], v, shape)

    def _call(self, position: int, eqn: Any) -> None:
        """Add a product, or what else is no elementwise work, and what it takes in."""
        product = eqn.outvars[0] if eqn.outvars else None
        beside = [self._through.get(self.base(a), frozenset()) for a in self._beside.get(product, ())]
        wholes = self._awaited(product)
        self._wholes.update((whole, position) for whole in wholes if whole not in self._wholes)
        over = [self.base(eqn.invars[0])] if eqn.primitive.name in IN_PLACE else []
        reads = frozenset(self._laid_out(position, eqn)).union(*beside) - set(eqn.outvars)
        self._add(eqn.outvars, reads | wholes, position, wholes | frozenset(over))

    def _fuse_elementwise(self, position: int, eqn: Any) -> None:
        """Fuse an elementwise equation with its readers; of what is stored, a reader may do again what is unary."""
        v, reads, direct = eqn.outvars[0], self.reads(eqn), self._roots(self._direct, eqn)
        is_stored = v in self.stored
        is_remade = not is_stored or (is_unary(eqn) and eqn.primitive.name not in SLOW)
        plain = self._plain_roots(eqn)
        self._remade[v] = frozenset([v]) if eqn.primitive.name in SLOW else reads
        self._plain[v] = frozenset([v]) if is_stored else plain
        self._direct[v] = frozenset([v]) if is_stored else direct
        self._through[v] = reads if is_remade else frozenset([v])
        if is_stored:
            self._add([v], reads, position, frozenset() if self.is_cpu and v in self._flat else plain & reads)

    def _plain_roots(self, eqn: Any) -> frozenset[Any]:
        """The stored variables of the same shape that an elementwise equation reads element by element."""
        shape = eqn.outvars[0].aval.shape
        ins = [self.alias.get(a, a) for a in eqn.invars if compat.is_var(a) and a.aval.shape == shape]
        return frozenset().union(*(self._plain.get(self.base(v), ()) for v in ins if v not in self._reshaped))

    def _add(self, made: Sequence[Any], reads: frozenset[Any], position: int,
             over: frozenset[Any] = frozenset()) -> None:  # fmt: skip
        eqn, sizes = self.eqns[position], tuple(_bytes(v) for v in made)
        inner = inner_peak(eqn, self.is_cpu)
        is_late = self._elementwise[position] and all(
            self.base(a) in self.stored for a in eqn.invars if compat.is_var(a)
        )
        self.kernels.append(Kernel(position, tuple(made), reads, sizes, inner, over, is_late))

    def _laid_out(self, position: int, eqn: Any) -> Iterable[Any]:
        """The buffers that a product reads: some of its operands are copied for it."""
        for place, atom in enumerate(eqn.invars):
            if not compat.is_var(atom):
                continue
            v = self.base(atom)
            is_shared = len(self._readers[v]) > 1 or v not in self._remade
            if self.is_cpu and is_copied(eqn, place) and is_shared:
                reads = self._remade.get(v, frozenset([v]))
                self.kernels.append(Kernel(position, ((v, position),), reads, (_bytes(v),)))
                yield (v, position)
            else:
                yield v

    def _awaited(self, product: Any) -> frozenset[Any]:
        """What is spread over rows beside a product and elsewhere too: the library reads it as a whole array."""
        if not self.is_cpu or not self._is_product(product) or math.prod(product.aval.shape) < LARGE:
            return frozenset()
        readers = sorted(self._readers.get(product, ()))
        return frozenset((self.base(w), shape) for r in readers for w, shape in _spread_operands(self.eqns[r])
                         if len(self._spread[self.base(w), shape]) > 1)  # fmt: skip

    def _spread_out(self, position: int, v: Any, shape: tuple[int, ...]) -> None:
        """Make a whole array of what is spread over rows, as soon as it is there."""
        size = math.prod(shape) * v.aval.dtype.itemsize
        self.kernels.append(Kernel(position, ((v, shape),), self._through.get(v, frozenset()), (size,)))

    def _is_product(self, v: Any) -> bool:
        """Whether a product makes a value, and only elementwise work reads it."""
        is_product = v in self._makers and self._makers[v].primitive.name == "dot_general"
        return is_product and all(self._elementwise[p] for p in self._readers.get(v, ()))


def is_view(eqn: Any) -> bool:
    """Whether an equation makes no new values: its result lies where its operand lies."""
    if eqn.primitive.name == "broadcast_in_dim":
        a, v = eqn.invars[0], eqn.outvars[0]
        return bool(compat.is_var(a)) and math.prod(a.aval.shape) == math.prod(v.aval.shape)
    return eqn.primitive.name in VIEWS


def is_fusible(eqn: Any, is_cpu: bool = True) -> bool:
    """Whether an equation is fused with what reads its result."""
    return eqn.primitive.name in PLAIN or not (
        is_costly(eqn)
        or is_reduction(eqn)
        or any(not is_fusible(inner, is_cpu) for body in bodies_of(eqn) for inner in body.eqns)
        or eqn.primitive.name in LOOPS
        or len(eqn.outvars) != 1
        or eqn.primitive.name.startswith("scatter")
        or eqn.primitive.name in WINDOWS
        or (eqn.primitive.name == "gather" and not is_cpu)
    )


def _is_dear(eqn: Any) -> bool:
    """Whether an elementwise equation is not done again for each element of something larger."""
    is_quotient = eqn.primitive.name == "div" and compat.is_var(eqn.invars[1])
    return is_quotient or eqn.primitive.name in SLOW


def is_reduction(eqn: Any) -> bool:
    """Whether an equation sums, or the like, over axes."""
    return bool(eqn.primitive.name.startswith(REDUCTIONS))


def is_copied(eqn: Any, place: int) -> bool:
    """Whether a product or convolution reads a transposed copy: it does not read the operand as it lies."""
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


def _flattened(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """What a product reads or makes in two dimensions, whatever it has in the program."""
    if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"][1][0]:
        return []
    return [v for v in (*ins, *eqn.outvars) if compat.is_var(v) and v.aval.ndim > 2]


def is_unary(eqn: Any) -> bool:
    """Whether an equation reads no more than one array of its result's size: to do it again reads nothing more."""
    size = _bytes(eqn.outvars[0])
    return sum(_bytes(a) >= size for a in set(filter(compat.is_var, eqn.invars))) <= 1


def inner_peak(eqn: Any, is_cpu: bool) -> int:
    """What the programs inside an equation allocate."""
    if not (bodies := bodies_of(eqn)) or not is_costly(eqn):
        return 0
    peaks = []
    for body in bodies:
        outputs = [v for v in compat.open_jaxpr(body).outvars if compat.is_var(v)]
        lives = Lives(body.eqns, (), outputs, {}, is_cpu)
        peaks.append(peak_bytes(schedule(lives.kernels, (), is_cpu), {}, lives.ends(), set()))
    return max(peaks)


def _spread_operands(eqn: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Operands of an elementwise equation that are spread over some of its result's axes, and the result's shape."""
    if eqn.primitive.name == "broadcast_in_dim" or len(eqn.invars) < 2:
        return []
    shape = eqn.outvars[0].aval.shape
    return [(a, shape) for a in eqn.invars if compat.is_var(a) and 1 < math.prod(a.aval.shape) < math.prod(shape)
            and a.aval.ndim == len(shape)]  # fmt: skip


def _literal(atom: Any) -> Any:
    value = getattr(atom, "val", None)
    return ("literal", str(value)) if getattr(value, "size", 1) == 1 else atom


def _key(eqn: Any, ins: Sequence[Any]) -> Any:
    """What tells two elementwise equations apart; `None` where that cannot be said."""
    key = (eqn.primitive.name, tuple(ins), tuple(v.aval.shape for v in eqn.outvars), tuple(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _bytes(v: Any) -> int:
    return aval_bytes(v.aval) if hasattr(v.aval, "dtype") else 0
