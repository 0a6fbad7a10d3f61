"""Prices that the compiler is asked for: probes in, bytes out, several compiled at once, each remembered on disk.

Of a GPU that is not there one choice is made for a whole program: XLA writes kernels for products itself, with what
stands before and behind them, and where it finds no tiles for one of them, cuBLAS runs all (`aot_worker`).
Then what they read and write stands in memory. A probe is a small part of a program, so it may miss the product that
has no tiles; hence, once any probe of a program has its products left to cuBLAS, all have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from jaxsub.core.disk_cache import Store, key_of
from jaxsub.costs.probes import Probe
from jaxsub.devices.compile import compile_for, measurement
from jaxsub.devices.targets import Target
from jaxsub.jaxpr import compat

PROBES = 7  # raise it when a probe changes: prices that are stored come from another one
LEFT = "products left to cuBLAS"

MakeProbe = Callable[[], Probe]


@dataclass(slots=True, eq=False)
class Asker:
    """Asks the compiler for prices of one program, for one target.

    Attributes:
        target: What to compile for.
        store: Where prices are remembered between processes, or `None`.
        progress: Called with each label as something is priced.
        workers: Compiles that run at once.
        said: Prices by key, in bytes.
    """

    target: Target
    store: Store | None = None
    progress: Callable[[str], None] = lambda label: None
    workers: int = 2
    said: dict[Any, int] = field(init=False, default_factory=dict)
    _makers: dict[Any, MakeProbe] = field(init=False, default_factory=dict)

    @property
    def leaves_products(self) -> bool:
        """Whether all products are left to cuBLAS."""
        return not self.target.writes_products

    def ask(self, makers: Mapping[Any, MakeProbe]) -> int:
        """Recall or compile what is not known yet; return how many were new.

        Args:
            makers: For each key what makes the probe, should it have to be compiled.
        """
        fresh = {key: maker for key, maker in makers.items() if key not in self.said}
        self._makers |= fresh
        if self._ask(fresh) and not self.leaves_products:
            self.leave_products()
        return len(fresh)

    def leave_products(self) -> None:
        """Ask anew for all that was asked for, products left to cuBLAS."""
        self.target = replace(self.target, writes_products=False)
        self.said.clear()
        self._ask(self._makers)

    def _ask(self, makers: Mapping[Any, MakeProbe]) -> bool:
        """Recall or compile; say whether products of any probe were left to cuBLAS."""
        found = {key: told for key in makers if (told := self._recall(key)) is not None}
        probed = {key: make() for key, make in makers.items() if key not in found}
        with ThreadPoolExecutor(self.workers) as pool:
            # settings made by a context manager, such as jax.enable_x64, hold in one thread only
            is_alike = not probed or pool.submit(compat.trace_context).result() == compat.trace_context()
            prices = (pool.map if is_alike else map)(self._compile, probed.values())
            for key, told in zip(probed, prices, strict=True):
                found[key] = told
                self.progress(f"{key[0]} of a stage")
                self._remember(key, *told)
        self.said |= {key: n_bytes for key, (n_bytes, _) in found.items()}
        return any(is_left for _, is_left in found.values())

    def _recall(self, key: Any) -> tuple[int, bool] | None:
        found = self.store.get(self._text(key), int) if self.store is not None else None
        if self.store is None or found is None or found < 0:
            return None
        return found, not self.target.is_present and bool(self.store.get(self._text((LEFT, key)), bool))

    def _remember(self, key: Any, n_bytes: int, is_left: bool) -> None:
        if self.store is not None:
            if is_left:  # first, for other processes: a price that is there is known as a whole
                self.store.put(self._text((LEFT, key)), True)
            self.store.put(self._text(key), n_bytes)

    def _text(self, key: Any) -> str:
        where = self.target.name, self.target.spec or "", *([] if self.target.writes_products else [LEFT])
        return key_of("price", compat.remat_flavour(), *where, repr(key), schema=PROBES)

    def _compile(self, probe: Probe) -> tuple[int, bool]:
        compiled = compile_for(probe.call, probe.args, self.target, donate_argnums=probe.donated)
        n_bytes = measurement(compiled, self.target, seconds=0.0).temp_bytes - probe.ballast_bytes
        return max(0, n_bytes), getattr(compiled, "leaves_products", False)
