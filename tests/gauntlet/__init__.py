"""The gauntlet: programs of other libraries, as their documentation writes them.

`PROGRAMS` maps names to programs. Each is a module of `gauntlet.programs` with a function `build`, imported only when
it is asked for: a library that is missing costs its own programs alone. Benchmarks use the same table, with `tests` on
the path:

    from gauntlet import PROGRAMS
    built = PROGRAMS["keras_cnn"].build()
    jaxsub.plan(built.loss, *built.args, budget=0.5)

`run.py` runs them all and prints a table.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Built:
    """A program, ready to be differentiated.

    Attributes:
        loss: The function; its gradient is taken of the first argument.
        args: Its arguments.
        has_aux: Whether it returns a pair (loss, aux).
        value_and_grad: How its library takes gradients: `jax.value_and_grad` or its replacement.
        make_step: A function of a loss that returns the train step and its arguments; `None` for a step of Optax.
        rtol: How far a result may lie from the plain function's, as a share of the largest of its array.
    """

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    has_aux: bool = False
    value_and_grad: Callable[..., Any] = jax.value_and_grad
    make_step: Callable[[Callable[..., Any]], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None
    rtol: float = 1e-4


@dataclass(frozen=True)
class Program:
    """An entry of the table.

    Attributes:
        module: Its module in `gauntlet.programs`.
        libraries: What it is written with, beside JAX, as one imports them.
        about: What makes it different from the others.
    """

    module: str
    libraries: tuple[str, ...]
    about: str

    def missing(self) -> tuple[str, ...]:
        """The libraries that are not installed."""
        return tuple(library for library in self.libraries if importlib.util.find_spec(library) is None)

    def build(self) -> Built:
        """Import the program and make its arguments."""
        built: Built = importlib.import_module(f"gauntlet.programs.{self.module}").build()
        return built


def _table(*rows: tuple[str, str, str]) -> dict[str, Program]:
    return {module: Program(module, tuple(libraries.split()), about) for module, libraries, about in rows}


PROGRAMS = _table(
    ("keras_cnn", "keras", "batch normalisation, dropout and its seeds as state, Keras's optimizer"),
    ("haiku_lstm", "haiku", "an unrolled LSTM, dropout by next_rng_key"),
    ("haiku_resnet", "haiku", "residual blocks of convolutions, statistics as state"),
    ("equinox_stateful", "equinox", "statistics of vmapped examples, dropout, a module as argument"),
    ("flax_bf16_transformer", "flax", "bf16, attention, dropout in every layer"),
    ("nnx_mixer", "flax", "NNX split and merged, dropout streams"),
    ("penzai_transformer", "penzai", "named axes, a decoder with rotary embeddings"),
    ("diffrax_neural_ode", "diffrax equinox", "a while loop with its own adjoint, adaptive steps"),
    ("diffrax_sde", "diffrax equinox lineax", "a Brownian tree of keys, fixed steps"),
    ("numpyro_vae", "numpyro", "a trace of effect handlers, samples inside the loss"),
    ("rlax_impala", "rlax", "V-trace returns, an entropy bonus"),
    ("e3nn_forces", "e3nn_jax haiku", "spherical harmonics; forces, so a derivative inside the loss"),
    ("jraph_molecules", "jraph haiku", "a graph network, segment sums"),
    ("distrax_flow", "distrax haiku", "couplings with log determinants"),
    ("optimistix_deq", "optimistix", "a fixed point with an implicit derivative"),
    ("jaxopt_bilevel", "jaxopt", "an inner problem solved to its end, differentiated implicitly"),
    ("optax_ctc", "optax", "recurrent layers under a scan, the CTC loss"),
    ("jax_associative_scan", "", "a linear recurrence by associative_scan, complex numbers"),
    ("jax_fourier_operator", "", "fast Fourier transforms, spectral weights"),
    ("jax_maml", "", "gradient steps inside the loss"),
    ("jax_custom_root", "", "lax.custom_root with a linear solve"),
    ("jax_split_keys", "", "dropout with keys split and passed on, a metric after the loss"),
)

SMALL = "jax_split_keys jax_custom_root jax_fourier_operator jaxopt_bilevel rlax_impala".split()
"""Programs that take the least time to plan: what CI runs."""
