"""Random plans for random programs, and whether any derivative under a plan differs from the plain one.

Programs by number are checked without compiling them, odd ones in double precision, even ones in single. Each is
checked under a plan by number, and under plans for three budgets, which a process of its own reads back. With a path,
each hundred leaves a line of JSON there that says what code ran and what failed; a hundred that the same code has
checked is not run again, so that ranges add up over many runs:

    python tests/random_programs.py 0 1000 programs.jsonl
"""

import contextlib
import functools
import gc
import hashlib
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import random_steps as random_steps_module
from interpreter import evaluate
from jax.extend.core import jaxpr_as_fun
from random_steps import N, loss_of, random_steps

import jaxsub
from jaxsub.core.budget import Budget
from jaxsub.core.decisions import Segment
from jaxsub.core.disk_cache import code_digest
from jaxsub.core.plan import Plan
from jaxsub.costs.chain_builder import Pricer
from jaxsub.devices.targets import get_target
from jaxsub.emission.emit import emit, keep_out
from jaxsub.jaxpr.trace import trace
from jaxsub.planners import get
from jaxsub.search.pipeline import Settings, make_plan
from jaxsub.search.verify import cut_choices

TOLERANCE = 1e-9
"""Of the largest entry, in double precision: a plan changes no more than the order in which gradients are summed."""
TOLERANCE_F32 = 1e-3
"""The same in single precision, second derivatives of half a dozen layers among them."""
N_BUDGETS = 3
LARGE_N = 1024
"""Rows and columns of arrays of 2^20 elements."""
NARROW_TOLERANCE = 1e-2
"""The same where cotangents pass through half precision, which rounds their sums."""
FAULTS = (AssertionError, TypeError, ValueError, LookupError, jaxsub.JaxsubError)


def random_segments(rng, start, stop, depth):
    """Disjoint runs of nodes in order, up to three deep."""
    cuts = sorted(set(rng.integers(start, stop + 1, size=2 * rng.integers(1, 4)).tolist()))
    for a, b in zip(cuts[::2], cuts[1::2], strict=False):
        yield Segment(a, b, (), tuple(random_segments(rng, a, b, depth - 1)) if depth and b > a + 1 else ())


def random_plan(program, seed):
    """Any plan that holds together: segments, nests, saved values, and barriers where nothing is saved."""
    rng, graph = np.random.default_rng(seed), program.graph
    n = len(graph.nodes)
    segments = [s for s in random_segments(rng, 0, n, depth=2) if s.stop > s.start]
    for i, s in enumerate(segments):
        made = np.array(graph.made_by(s.start, s.stop))
        if not s.children and len(made):
            segments[i] = Segment(
                s.start, s.stop, tuple(sorted(rng.choice(made, rng.integers(len(made) + 1), replace=False).tolist()))
            )
    saving = [s for s in segments if s.saved]
    barriers = sorted(set(rng.integers(0, n, size=rng.integers(0, 6)).tolist()))
    barriers = tuple(b for b in barriers if not any(s.start < b < s.stop for s in saving))
    return Plan(program.fingerprint, Budget(), n, tuple(segments), barriers)


def planned(program, seed):
    """A planner's own plan for a program, at a random budget."""
    chain = Pricer(program, get_target(None)).chain(cut_choices(program)[seed % 2 - 1])
    planner = get(("auto", "chen", "cheap", "recursive(1)", "revolve", "barriers")[seed % 6])
    plain = get("plain")(chain, None).prediction.temp_bytes
    try:
        return planner(chain, None if seed % 4 == 0 else int(plain * (seed % 100 + 1) / 100) + 1)
    except jaxsub.InfeasibleBudgetError as refused:
        return planner(chain, refused.least_bytes)


def kept_out(program, plan):
    """The plan, from which what must run once is kept out."""
    return keep_out(plan, program.graph.pinned())


def has_tangents(program):
    """Whether a program can be differentiated forward: what has a backward pass of its own has no tangents."""
    return all(eqn.primitive.name != "custom_vjp_call" for eqn in program.eqns)


def is_narrow(program):
    """Whether anything in a program is rounded to fewer bits."""
    return any(
        eqn.primitive.name == "reduce_precision" or any(v.aval.dtype == jnp.float16 for v in eqn.outvars)
        for eqn in program.eqns
    )


def gradient_of(f, w, x):
    """A function whose first result is a scalar, and its value with its gradients, each traced once."""
    f = jax.make_jaxpr(f)(w, x)
    return f, jax.make_jaxpr(jax.value_and_grad(lambda *args: jaxpr_as_fun(f)(*args)[0], argnums=(0, 1)))(w, x)


def derivatives_of(f, arguments, turn):
    """Results and gradients of a function, and in turn a fourth more, by interpreting their jaxprs.

    0: tangents of value and gradients. 1: gradients under `vmap`. 2: the gradient of a function under `vmap`. 3: the
    gradient of gradients. The inner program is traced first and once, as JAX's transformations do it.
    """
    w, x, t, batch = arguments
    f, gradient = gradient_of(f, w, x)
    both = jaxpr_as_fun(gradient)

    def along(w, x, t):
        _, by_w, by_x = both(w, x)
        return jnp.sum(by_w * t) + jnp.sum(by_x * x)

    further, inputs = (
        (lambda w, x, t: jax.jvp(both, (w, x), (t, x)), (w, x, t)),
        (jax.vmap(both, (None, 0)), (w, batch)),
        (jax.grad(lambda w, batch: jnp.sum(jax.vmap(lambda x: jaxpr_as_fun(f)(w, x)[0])(batch))), (w, batch)),
        (jax.grad(along, argnums=(0, 1)), (w, x, t)),
    )[turn]
    metrics = evaluate(f, (w, x))[1:]
    return [*metrics, *evaluate(gradient, (w, x)), *evaluate(jax.make_jaxpr(further)(*inputs), inputs)]


def wanted_of(f, arguments, turn):
    """What `derivatives_of` should be; of a batch it is computed without `vmap`, from one gradient after the other."""
    if turn in (0, 3):
        return derivatives_of(f, arguments, turn)
    w, x, _, batch = arguments
    f, gradient = gradient_of(f, w, x)
    each = [evaluate(gradient, (w, x)) for x in batch]
    further = map(np.stack, zip(*each, strict=True)) if turn == 1 else [sum(by_w for _, by_w, _ in each)]
    return [*evaluate(f, (w, x))[1:], *each[0], *further]


@dataclass(frozen=True)
class Case:
    """A program by number: its loss, its arguments, its trace, and a seed for its plans. Every other one is in f32."""

    number: int
    steps: Any
    loss: Any
    arguments: Any
    program: Any
    seed: int

    @classmethod
    def of(cls, number):
        """The program of a number, traced; in double precision within `precision(number)`."""
        rng = np.random.default_rng(number)
        steps, seed = random_steps(rng), int(rng.integers(2**31))
        w, x, t = (0.7 * rng.normal(size=(3, N, N))).astype(float if number % 2 else np.float32)
        loss = loss_of(steps, has_metrics=bool(seed % 2))
        return cls(number, steps, loss, (w, x, t, np.stack([x, x + x.dtype.type(0.25)])), trace(loss, (w, x), {}), seed)

    def check(self, plans):
        """Under each plan all results and derivatives are the plain program's."""
        turn = self.seed % 4 if has_tangents(self.program) else 1 + self.seed % 3
        wanted = wanted_of(lambda *args: jax.tree.leaves(self.loss(*args)), self.arguments, turn)
        tolerance = NARROW_TOLERANCE if is_narrow(self.program) else TOLERANCE if self.number % 2 else TOLERANCE_F32
        for plan in plans:
            run = emit(self.program, plan)
            got = derivatives_of(lambda w, x, run=run: run(*self.program.consts, w, x), self.arguments, turn)
            for a, b in zip(got, wanted, strict=True):
                assert a.dtype == b.dtype
                worst = np.abs(np.subtract(a, b, dtype=float)).max()
                assert worst <= tolerance * max(1.0, np.abs(b).max()), (
                    f"Program {self.number}: {self.steps}, plan {plan.segments}, barriers {plan.barriers}, "
                    f"turn {turn}: {worst} off."
                )


def precision(number):
    """The context in which a program is traced: 64 bits for odd numbers, 32 for even ones, in one process."""
    return jax.enable_x64(bool(number % 2))


def check(number):
    """Program by number: under a plan by number its derivatives are the plain program's."""
    with precision(number):
        case = Case.of(number)
        plan = (planned if number % 4 == 0 else random_plan)(case.program, case.seed)
        case.check([kept_out(case.program, plan)])


def plans_by_budget(program, seed):
    """The plans for three budgets, as text; a refused one is planned for the least bytes that the refusal names."""
    texts = []
    for share in np.random.default_rng(seed).uniform(0.05, 0.95, N_BUDGETS):
        asked = Settings(Budget.parse(float(share)), verify=False, cache=False, progress=False)
        try:
            plan = make_plan(program, asked)
        except jaxsub.InfeasibleBudgetError as refused:
            plan = make_plan(program, replace(asked, budget=Budget(n_bytes=refused.least_bytes)))
        texts.append(plan.to_json())
    return texts


def check_texts(number, texts):
    """Plans that another process made of a program, read back: what is wrong with a derivative, or `None`."""
    try:
        with precision(number):
            Case.of(number).check(list(map(Plan.from_json, texts)))
    except FAULTS as fault:
        return f"{type(fault).__name__}: {fault}"
    return None


def check_budgets(number, reader):
    """Program by number, for three budgets: planned here, read back and checked by `reader`.

    Each eighth is planned for arrays of a million elements too, of which nothing is computed.
    """
    with precision(number):
        case = Case.of(number)
        texts = plans_by_budget(case.program, case.seed)
        reader(number, texts)
        if number % 8 < 2:
            check_large(case, number)


def check_large(case, number):
    """The program of arrays of 2^20 elements is planned, and its gradient traced: nothing is computed."""
    with mock.patch.object(random_steps_module, "N", LARGE_N):
        like = jax.ShapeDtypeStruct((LARGE_N, LARGE_N), float if number % 2 else np.float32)
        program = trace(loss_of(case.steps, has_metrics=bool(case.seed % 2)), (like, like), {})
        for text in plans_by_budget(program, case.seed):
            run = emit(program, Plan.from_json(text))
            loss = functools.partial(lambda run, w, x: run(*program.consts, w, x)[0], run)
            grads = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), like, like)
            assert [(g.shape, g.dtype) for g in grads] == [(like.shape, like.dtype)] * 2


@contextlib.contextmanager
def reader_process():
    """A process of its own that reads plans back; what fails there fails here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=settle_down) as pool:

        def read(number, texts):
            fault = pool.submit(check_texts, number, texts).result()
            assert fault is None, fault

        yield read


def settle_down():
    """Run on the CPU, and look for garbage seldom: what JAX keeps of traces is none, and takes long to look through."""
    jax.config.update("jax_platforms", "cpu")
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def fault_of(number, reader):
    """Why a program by number fails, under its own plan or under those for budgets, or `None`."""
    try:
        check(number)
        check_budgets(number, reader)
    except FAULTS as fault:
        return f"{type(fault).__name__}: {str(fault)[:400]}"
    return None


def code_that_ran():
    """Digests of the library and of what checks it, and the version of JAX."""
    here = Path(__file__).parent
    files = [here / f"{name}.py" for name in ("interpreter", "random_programs", "random_steps")]
    checks = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()
    return {"library": code_digest(), "checks": checks, "jax": jax.__version__}


def main(first, stop, path=None):
    """Check programs by number, a hundred after the other; say which fail, and why. Returns how many do."""
    code, done = code_that_ran(), []
    if path and path.exists():
        done = [row for row in map(json.loads, path.read_text().splitlines()) if row["code"] == code]
    known = {(row["first"], row["stop"]) for row in done}
    for start in range(first, stop, 100):
        hundred = start, min(start + 100, stop)
        if hundred in known:
            continue
        begun = time.process_time()
        with reader_process() as reader:
            failed = {str(n): fault for n in range(*hundred) if (fault := fault_of(n, reader))}
        spent = round(time.process_time() - begun, 1)
        for number, fault in failed.items():
            print(f"{number}: {fault}", flush=True)
        done.append({"first": hundred[0], "stop": hundred[1], "failed": failed, "seconds": spent, "code": code})
        if path:
            with path.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    ran = {n for row in done for n in range(row["first"], row["stop"])}
    n_failed = len({n for row in done for n in row["failed"]})
    each = sum(row["seconds"] for row in done) / max(sum(row["stop"] - row["first"] for row in done), 1)
    print(f"{len(ran)} programs by this code, {n_failed} failed; {each:.3f} s of processor time each", flush=True)
    return n_failed


if __name__ == "__main__":
    settle_down()
    sys.exit(min(main(int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:])), 1))
