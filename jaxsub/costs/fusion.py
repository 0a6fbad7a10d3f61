"""Predict the compiler's fusion: which kernels it makes of equations, and which values it stores.

The compiler does not store most values of a jaxpr: elementwise chains are computed inside the kernels that read them. A
value is *stored* if a product, a convolution or a loop makes or reads it, if a reduction makes it, or if it is an
output. Every other value is *virtual*: its readers read the stored values behind it, which are live until then.
Reshapes, transposes and barriers are views; equal equations are merged.

A CPU stores more. Slow elementwise work, such as tanh, is done once where several kernels need it. Reductions and
products are library calls (`jaxsub.costs.library_calls`), which fuse the elementwise work before a reduction only if
nothing else reads it, and which read what is broadcast outside of them too as a whole array. A product over several
axes reads a transposed copy. It computes with 16-bit floats in float32 (`jaxsub.costs.narrow_floats`). It stores every
concatenation.

On a GPU a product fuses unary work on its operands, unless that narrows them. Other slow work is done once where that
is faster (`jaxsub.costs.priority_fusion`). The parts of a split-K product (`jaxsub.costs.split_k`) are added up by each
reader, or once where reductions or products read the sum. Look-ups are repeated in their readers, and a scatter fuses
the work on what it scatters. A concatenation of concatenations is one; other work reads the stored one. What barriers
hold back is stored, and what is added to the result of a scatter-add is added before.

Sources: OpenXLA, `xla/service/instruction_fusion.cc` (what is duplicated), `xla/service/cpu/cpu_instruction_fusion.cc`,
`xla/backends/cpu/transforms/library_rewriter.cc`, `xla/service/dot_decomposer.cc`,
`xla/backends/gpu/transforms/gemm_fusion.cc`, `xla/service/gpu/triton_tiling_propagation.cc`, and compiled programs.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxsub.costs.fusible import (
    RESHAPES,
    TAKEN_IN,
    barrier,
    broadcast_operands,
    carried_by,
    equation_key,
    erfc_reads_exp,
    flattened,
    fuses_updates,
    is_barrier,
    is_concatenation,
    is_copied,
    is_dear,
    is_expanded,
    is_fusible,
    is_reduction,
    is_unary,
    is_view,
    leads_to,
    literal_key,
    masked_bytes,
    scattered_last,
    summed_columns,
    threefry_bytes,
    union,
    written_over,
)
from jaxsub.costs.library_calls import LEAST_ELEMENTS, library_calls
from jaxsub.costs.narrow_floats import is_slow, widened
from jaxsub.costs.priority_fusion import PriorityFusion
from jaxsub.costs.scheduler import Kernel, body_orders, peak_bytes
from jaxsub.costs.split_k import PARTS, kernels_in_parts, n_parts
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.flops import bodies_of, is_costly
from jaxsub.jaxpr.inline import flatten_closed
from jaxsub.jaxpr.new_equations import slice_eqn
from jaxsub.jaxpr.trace import array_bytes, remembered


@dataclass(slots=True, eq=False)
class Lives:
    """The kernels of a run of equations.

    Attributes:
        eqns: The equations, in order.
        given: Variables that are live at the start.
        outputs: Variables that are live at the end.
        alias: Variables that are other variables.
        is_cpu: Whether to compile for a CPU rather than a GPU.
        gpu: The GPU, for split-K products; `None` for no split-K.
        sizes: Bytes of variables that do not count as their shapes say.
        stored: The variables that kernels make.
        kernels: The kernels, in the order of the equations.
    """

    eqns: Sequence[Any]
    given: Sequence[Any]
    outputs: Sequence[Any]
    alias: dict[Any, Any]
    is_cpu: bool = True
    gpu: Target | None = None
    sizes: Mapping[Any, int] = field(default_factory=dict)
    stored: set[Any] = field(init=False, default_factory=set)
    kernels: list[Kernel] = field(init=False, default_factory=list)
    _bases: dict[Any, Any] = field(init=False, default_factory=dict)
    _readers: dict[Any, set[int]] = field(init=False, default_factory=dict)
    _through: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _plain: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _pieces: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _wholes: dict[Any, int] = field(init=False, default_factory=dict)
    _beside: dict[Any, list[Any]] = field(init=False, default_factory=dict)
    _remade: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _reshaped: set[Any] = field(init=False, default_factory=set)
    _flat: set[Any] = field(init=False, default_factory=set)
    _direct: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _broadcasts: dict[Any, set[int]] = field(init=False, default_factory=dict)
    _made_at: dict[Any, int] = field(init=False, default_factory=dict)
    _elementwise: dict[int, bool] = field(init=False, default_factory=dict)
    _parts: dict[Any, int] = field(init=False, default_factory=dict)
    _behind: dict[Any, frozenset[Any]] = field(init=False, default_factory=dict)
    _barriers: list[int] = field(init=False, default_factory=list)
    _work: list[int] = field(init=False, default_factory=list)
    _calls: dict[int, set[int]] = field(init=False, default_factory=dict)
    _kept: set[Any] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._bases.update((v, r) for v, r in self.alias.items() if v is not r)
        self.eqns = scattered_last(self.eqns, self.alias, filter(compat.is_var, self.outputs))
        self.eqns, places = widened(erfc_reads_exp(self.eqns)) if self.is_cpu else (self.eqns, range(len(self.eqns)))
        self._merge()
        if self.is_cpu:
            self._absorb()
            self._calls = library_calls(self.eqns, self._work, self._made_at, self._readers, self.ends(), self.base)
        self._store()
        self._fuse()
        for kernel in self.kernels:
            kernel.position = places[kernel.position]

    def base(self, atom: Any) -> Any:
        """Return the variable that an atom is, or is a view of."""
        found = self._bases.get(atom)
        while found is not None:
            atom, found = found, self._bases.get(found)
        return atom

    def _bytes(self, v: Any) -> int:
        return self.sizes.get(v) or array_bytes(v)

    def ends(self) -> set[Any]:
        """Return the buffers of the outputs."""
        return {self.base(v) for v in self.outputs if compat.is_var(v)}

    def _ins(self, eqn: Any) -> list[Any]:
        """The variables that an equation reads, those that they are views of instead of views."""
        return [self.base(a) for a in eqn.invars if compat.is_var(a)]

    def stores(self, eqn: Any) -> bool:
        """Tell whether the compiler stores a result of an equation."""
        return any(v in self.stored and self.base(v) is v for v in eqn.outvars)

    def _merge(self) -> None:
        """Find views and equal equations, and the readers of each value."""
        seen: dict[Any, Any] = {}
        for position, eqn in enumerate(self.eqns):
            ins = [self.base(a) if compat.is_var(a) else literal_key(a) for a in eqn.invars]
            if is_view(eqn):
                self._barriers += [position] * is_barrier(eqn)
                behind = frozenset([barrier(eqn)]) if is_barrier(eqn) else self._barriers_before(eqn)
                self._behind.update((v, behind) for v in eqn.outvars if behind)
                for v, atom, base in zip(eqn.outvars, eqn.invars, ins, strict=False):
                    if compat.is_var(atom):
                        self._bases[v] = base
                        if eqn.primitive.name in RESHAPES or self.alias.get(atom, atom) in self._reshaped:
                            self._reshaped.add(v)
                continue
            self._elementwise[position] = is_elementwise = is_fusible(eqn, self.is_cpu)
            known = self._waiting(eqn, ins)
            if is_elementwise and (key := equation_key(eqn, known)) is not None:
                if key in seen:
                    self._bases.update(zip(eqn.outvars, seen[key], strict=True))
                    continue
                seen[key] = eqn.outvars
            self._work.append(position)
            self._made_at.update((v, position) for v in eqn.outvars)
            self._flat.update(flattened(eqn, [v for a, v in zip(eqn.invars, ins, strict=True) if compat.is_var(a)]))
            if self.gpu is not None and (parts := n_parts(eqn, self.gpu)) > 1:
                self._parts[eqn.outvars[0]] = parts
            for v in filter(compat.is_var, ins):
                self._readers.setdefault(v, set()).add(position)
            for w, shape in broadcast_operands(eqn) if is_elementwise and self.is_cpu else ():
                self._broadcasts.setdefault((self.base(w), shape), set()).add(position)

    def _waiting(self, eqn: Any, ins: list[Any]) -> list[Any]:
        """What an equation reads, where that waits for a barrier by its own name."""
        if not self._behind:
            return ins
        return [a if compat.is_var(a) and a in self._behind else b for a, b in zip(eqn.invars, ins, strict=True)]

    def _absorb(self) -> None:
        """Fuse into products the elementwise work that alone reads them, but for sums and what waits for a barrier."""
        ends, fused = self.ends(), set[int]()
        for position in self._work:
            eqn = self.eqns[position]
            if eqn.primitive.name != "dot_general":
                continue
            product = eqn.outvars[0]
            while eqn.outvars[0] not in ends:
                made = eqn.outvars[0]
                sums = {p for p in self._readers.get(made, ()) if is_reduction(self.eqns[p])}
                works = [p for p in self._readers.get(made, ()) if p not in sums]
                eqn = self.eqns[works[0]] if len(works) == 1 else None
                if eqn is None or eqn.primitive.name not in TAKEN_IN or eqn.outvars[0].aval.shape != made.aval.shape:
                    break
                small = [p for p in sums if math.prod(self.eqns[p].outvars[0].aval.shape) < LEAST_ELEMENTS]
                is_held = any(a in self._behind and self.base(a) is made for a in eqn.invars if compat.is_var(a))
                if is_held or leads_to(self.eqns, self._readers, small, works[0]):  # or less its own mean
                    break
                fused.add(works[0])
                self._bases[eqn.outvars[0]] = product
                self._beside.setdefault(product, []).extend(a for a in eqn.invars if compat.is_var(a))
                later = self._readers.get(eqn.outvars[0], set())
                self._readers[product] = (self._readers[product] - {works[0]}) | later
        self._work = [p for p in self._work if p not in fused]
        spread, self._broadcasts = self._broadcasts, {}
        for (w, shape), positions in spread.items():  # a broadcast operand may be in a product's memory now
            self._broadcasts.setdefault((self.base(w), shape), set()).update(positions)

    def _store(self) -> None:
        """Decide which values are stored, from the last equation to the first."""
        self.stored |= self.ends() | set(self.given)
        self.stored |= {v for p in self._barriers for v in self._ins(self.eqns[p])}
        absorbed: set[Any] = set()
        homes: dict[Any, frozenset[int]] = {}
        for position in reversed(self._work):
            eqn = self.eqns[position]
            if not self._elementwise[position]:
                read = eqn.invars[:1] if fuses_updates(eqn, self.is_cpu) else eqn.invars
                ins = [self.base(a) for a in read if compat.is_var(a)]
                self.stored.update(v for v in eqn.outvars if v not in self._parts or v in absorbed)
                if not is_reduction(eqn):
                    self.stored.update(self._operand(eqn, v) for v in ins)
                elif self.is_cpu or self._parts:
                    absorbed.update(ins)
                continue
            v = eqn.outvars[0]
            readers = self._readers.get(v, ())
            at = frozenset[int]().union(*(self._home(r, homes) for r in readers))
            is_shared = v in absorbed and len(readers) > 1
            larger = [self.eqns[p].outvars[0] for p in readers if self._elementwise[p]]
            is_once = (is_slow(eqn, self.is_cpu) and len(at) > 1) or (is_dear(eqn) and is_expanded(v, larger))
            if self.is_cpu and (is_shared or is_once or is_concatenation(eqn)) and v.aval.shape:
                self.stored.add(v)
            elif v in absorbed and v not in self.stored:
                absorbed.update(self._ins(eqn))
            homes[v] = at
        if self.gpu is not None:
            made = {self.eqns[p].outvars[0]: p for p in self._work if self._elementwise[p]}
            places = {v: p for v, p in made.items() if v not in self.stored and len(self.eqns[p].outvars) == 1}
            fusion = PriorityFusion(self.eqns, places, self._readers, self.base, self._bytes, self.gpu, self._flat)
            self._kept = fusion.stored()
            self.stored |= self._kept

    def _operand(self, eqn: Any, v: Any) -> Any:
        """Find the value that a GPU's product reads: it fuses unary work, repeated if needed, that reads no more."""
        is_fused = eqn.primitive.name == "dot_general" and not self.is_cpu
        while is_fused and (v not in self.stored or v in self._kept) and v in self._made_at:
            maker = self.eqns[self._made_at[v]]
            reads = [a for a in maker.invars if compat.is_var(a)]
            if len(reads) != 1 or reads[0].aval.shape != v.aval.shape or not is_fusible(maker, False):
                break
            if array_bytes(reads[0]) > array_bytes(v):  # a narrowing conversion
                break
            v = self.base(reads[0])
        return v

    def _home(self, position: int, homes: dict[Any, frozenset[int]]) -> frozenset[int]:
        """Find the kernels that an equation is fused into."""
        made = self.eqns[position].outvars  # none where an equation only has an effect
        return homes.get(made[0], frozenset()) if made and made[0] not in self.stored else frozenset([position])

    def _fuse(self) -> None:
        """Make the kernels."""
        for v in self.given:
            self._through[v] = self._direct[v] = self._plain[v] = frozenset([v])
        for position in sorted((*self._work, *self._barriers)):
            first = len(self.kernels)
            self._make(position, self.eqns[position])
            if not is_barrier(self.eqns[position]):
                self._wait(first, self.eqns[position])
        for (v, shape), position in sorted(self._wholes.items(), key=lambda whole: whole[1]):
            size = math.prod(shape) * v.aval.dtype.itemsize  # materialised as soon as the operand is made
            self.kernels.append(Kernel(position, ((v, shape),), self._through.get(v, frozenset()), (size,)))

    def _make(self, position: int, eqn: Any) -> None:
        if is_barrier(eqn):
            waits = union(self._through, self._ins(eqn)) | self._barriers_before(eqn)
            self.kernels.append(Kernel(position, (barrier(eqn),), frozenset(), (0,), after=waits))
        elif self._elementwise[position]:
            self._fuse_elementwise(position, eqn)
        elif eqn.outvars and eqn.outvars[0] in self._parts:
            self._split(position, eqn)
        else:
            for v in eqn.outvars:
                self._through[v] = self._direct[v] = frozenset([v])
                self._plain[v] = frozenset() if v in self._flat else frozenset([v])
            if is_reduction(eqn) or fuses_updates(eqn, self.is_cpu):
                reads = union(self._direct if self.is_cpu else self._through, self._ins(eqn))
                self._add(eqn.outvars, reads | self._materialised(position), position)
            else:
                self._call(position, eqn)

    def _wait(self, first: int, eqn: Any) -> None:
        """Let the kernels of an equation, from a first one on, wait for the barriers before it."""
        barriers = self._barriers_before(eqn)
        if barriers and first == len(self.kernels):  # it is fused into what reads it
            self._behind.update((v, barriers) for v in eqn.outvars)
        for kernel in self.kernels[first:] if barriers else ():
            kernel.after = barriers

    def _barriers_before(self, eqn: Any) -> frozenset[Any]:
        """The barriers that an equation reads results of."""
        if not self._behind:
            return frozenset()
        read = {v for a in eqn.invars if compat.is_var(a) for v in (a, self.base(a))}
        return frozenset[Any]().union(*(self._behind.get(v, frozenset()) for v in read))

    def _call(self, position: int, eqn: Any) -> None:
        """Add the kernel of a product, or of other work that is not elementwise, with the work that it fuses."""
        product = eqn.outvars[0] if eqn.outvars else None
        beside = union(self._through, map(self.base, self._beside.get(product, ())))
        wholes = self._materialised(position)
        reads = (beside | set(self._laid_out(position, eqn))) - set(eqn.outvars)
        self._add(eqn.outvars, reads | wholes, position, wholes)

    def _split(self, position: int, eqn: Any) -> None:
        """Add a split-K product and the sum of its parts, which is fused into its readers unless it is stored."""
        v = eqn.outvars[0]
        reads = [self._operand(eqn, self.base(a)) for a in eqn.invars if compat.is_var(a)]
        self.kernels += kernels_in_parts(eqn, position, reads, self._parts[v])
        self._through[v] = self._direct[v] = roots = frozenset([(v, PARTS)])
        if v in self.stored:
            self.kernels.append(Kernel(position, (v,), roots, (self._bytes(v),), shape=v.aval.shape))
            self._through[v] = self._direct[v] = frozenset([v])
        self._plain[v] = frozenset([v]) if v in self.stored else frozenset()

    def _fuse_elementwise(self, position: int, eqn: Any) -> None:
        """Fuse an elementwise equation into its readers; a reader may repeat unary work on a stored value."""
        ins = self._ins(eqn)
        behind = ChainMap(self._pieces, self._through) if is_concatenation(eqn) else self._through  # they are merged
        reads, direct, plain = union(behind, ins), union(self._direct, ins), self._plain_roots(eqn)
        self._pieces.update((v, reads) for v in eqn.outvars if is_concatenation(eqn))
        for v in eqn.outvars:
            is_stored = v in self.stored
            is_remade = not is_stored or (v not in self._kept and is_unary(eqn) and not is_slow(eqn, self.is_cpu))
            self._remade[v] = frozenset([v]) if is_slow(eqn, self.is_cpu) else reads
            self._plain[v] = frozenset([v]) if is_stored else plain
            self._direct[v] = frozenset([v]) if is_stored else direct
            self._through[v] = reads if is_remade else frozenset([v])
            if is_stored:
                self._add([v], reads, position, frozenset() if self.is_cpu and v in self._flat else plain & reads)

    def _plain_roots(self, eqn: Any) -> frozenset[Any]:
        """Return the stored variables of the same shape that an elementwise equation reads element by element."""
        same = [a for a in eqn.invars if a.aval.shape == eqn.outvars[0].aval.shape]
        ins = [self.alias.get(a, a) for a in filter(compat.is_var, same)]
        return union(self._plain, [self.base(v) for v in ins if v not in self._reshaped])

    def _add(self, made: Sequence[Any], reads: frozenset[Any], position: int,
             over: frozenset[Any] = frozenset()) -> None:  # fmt: skip
        eqn, sizes = self.eqns[position], tuple(map(self._bytes, made))
        inner = inner_peak(eqn, self.is_cpu, self.gpu) + masked_bytes(eqn)
        if self.is_cpu and (state := threefry_bytes(eqn)):
            sizes, inner = (state, *(0 for _ in made[1:])), state
        is_late = self._elementwise[position] and self.stored.issuperset(self._ins(eqn))
        each = tuple(frozenset(map(self.base, filter(compat.is_var, [a]))) for _, a in written_over(eqn))
        axes = summed_columns(eqn)
        shape = (eqn.invars if axes else made)[0].aval.shape if axes or self._elementwise[position] else None
        self.kernels.append(Kernel(position, tuple(made), reads, sizes, inner, over, is_late, shape, axes, each))

    def _laid_out(self, position: int, eqn: Any) -> Iterable[Any]:
        """Yield the buffers that a product reads; some are copies in another layout."""
        for place, atom in enumerate(eqn.invars):
            if not compat.is_var(atom):
                continue
            v = self._operand(eqn, self.base(atom))
            is_shared = len(self._readers[v]) > 1 or v not in self._remade
            if self.is_cpu and is_copied(eqn, place) and is_shared:
                reads = self._remade.get(v, frozenset([v]))
                self.kernels.append(Kernel(position, ((v, position),), reads, (self._bytes(v),)))
                yield (v, position)
            else:
                yield v

    def _materialised(self, position: int) -> frozenset[Any]:
        """Find broadcast operands of a library call that are broadcast outside of it too: it reads whole arrays."""
        call, wholes = self._calls.get(position, set()), set[Any]()
        for p in filter(self._elementwise.get, sorted(call)):
            for a, shape in broadcast_operands(self.eqns[p]):
                whole = self.base(a), shape
                if not self._broadcasts[whole] <= call and self._made_at.get(whole[0]) not in call:
                    wholes.add(whole)
                    self._wholes.setdefault(whole, position)
        return frozenset(wholes)


def inner_peak(eqn: Any, is_cpu: bool, gpu: Target | None = None) -> int:
    """Predict the bytes that the inner programs of an equation allocate beside its results.

    What a loop carries is in one buffer from its start to its end: a step may write it where it read it. Of arrays that
    it iterates over a step takes a slice, in a buffer where what reads it is not fused with that. A region among
    the equations of a step is part of it. Results of other inner programs are in the buffers of the equation's.
    """
    bodies = bodies_of(eqn) if is_costly(eqn) else ()
    return max((_body_peak(body, eqn.primitive.name, carried_by(eqn), is_cpu, gpu) for body in bodies), default=0)


@remembered
def _body_peak(body: Any, name: str, carries: tuple[int, int], is_cpu: bool, gpu: Target | None) -> int:
    eqns, inputs, results = flatten_closed(body, compat.REGIONS)
    carried = {v: array_bytes(v) for v in inputs[slice(*carries)]}
    taken = [slice_eqn(v) for v in (inputs[carries[1] :] if name == "scan" else ())]
    given = (*carried, *(take.invars[0] for take in taken))
    lives = Lives((*taken, *eqns), given, [v for v in results if compat.is_var(v)], {}, is_cpu, gpu)
    ends, orders = lives.ends(), body_orders(lives.kernels, given, map(lives.base, lives.outputs), is_cpu)
    free = set() if name in ("scan", "while") else ends
    return max(0, min(peak_bytes(order, carried, ends, free) for order in orders) - sum(carried.values()))
