"""Random runs of random programs in slices of a random axis, and whether any derivative differs from the plain one."""

import jax
import numpy as np
from random_programs import NARROW_TOLERANCE, TOLERANCE, derivatives_of, has_tangents, is_narrow, wanted_of
from random_steps import UNARY, N, loss_of, random_steps
from zoo import smooth_abs

from jaxsub.emission.chunks import sliced
from jaxsub.jaxpr import compat
from jaxsub.jaxpr.axes import follow
from jaxsub.jaxpr.axis import NotIndependent
from jaxsub.jaxpr.trace import flatten_jaxpr, trace


def along(f, *args, seed=0, dim=0):
    """The axis of a function from one dimension of an argument on, and the function in slices of it."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    eqns, invars, outvars, consts = flatten_jaxpr(closed)
    axis = follow(eqns, invars, outvars, invars[len(consts) + seed], dim)

    def chunked(count):
        run = sliced(axis, invars, outvars, count)
        return lambda *xs: jax.tree.unflatten(jax.tree.structure(shapes), run(*consts, *xs))

    return axis, chunked


def run_of(program, start, stop):
    """What a run of equations reads, and what is read of it later."""
    eqns = program.eqns[start:stop]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = dict.fromkeys(a for eqn in eqns for a in eqn.invars if compat.is_var(a) and a not in made)
    later = [a for eqn in program.eqns[stop:] for a in eqn.invars]
    used = {a for a in (*later, *program.outvars) if compat.is_var(a)}
    return eqns, list(reads), [v for eqn in eqns for v in eqn.outvars if v in used]


def in_slices(program, start, stop, axis, count):
    """The program as a function of its inputs, one run of it in slices."""
    _, reads, returns = run_of(program, start, stop)
    chunk = sliced(axis, reads, returns, count)

    def call(*inputs):
        env = dict(zip(program.invars, (*program.consts, *inputs), strict=True))

        def run(eqns):
            for eqn in eqns:
                args = [env[a] if compat.is_var(a) else a.val for a in eqn.invars]
                invars = [compat.new_var(a.aval) for a in eqn.invars]
                outvars = [compat.new_var(v.aval) for v in eqn.outvars]
                alone = compat.make_jaxpr_of([eqn.replace(invars=invars, outvars=outvars)], invars, outvars)
                env.update(zip(eqn.outvars, jax.core.eval_jaxpr(alone, (), *args), strict=True))

        run(program.eqns[:start])
        env.update(zip(returns, chunk(*(env[v] for v in reads)), strict=True))
        run(program.eqns[stop:])
        return [env[a] if compat.is_var(a) else a.val for a in program.outvars]

    return call


def random_run(rng, program):
    """A run of a program, and an axis of it that is independent; `None` where the analysis says no to a few.

    Some of what it reads is said to have no tangents: that is a matter of what is taken out of the slices alone.
    """
    n = len(program.eqns)
    for _ in range(4):
        start, stop = sorted(rng.integers(0, n + 1, size=2).tolist())
        if stop - start < 2:
            continue
        eqns, reads, returns = run_of(program, start, stop)
        seeds = [(v, d) for v in reads for d, size in enumerate(v.aval.shape) if size > 1]
        if not seeds:
            continue
        seed, dim = seeds[rng.integers(len(seeds))]
        try:
            axis = follow(eqns, reads, returns, seed, dim, [v for v in reads if rng.random() < 0.3])
        except NotIndependent:
            continue
        return start, stop, axis, int(rng.integers(2, axis.length + 1))
    return None


def check(steps, seed):
    """A program's run in slices has the plain program's derivatives; says whether there was such a run."""
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        w, x, t = 0.7 * rng.normal(size=(3, N, N))
        arguments = w, x, t, np.stack([x, x + 0.25])
        loss = loss_of(steps)
        program = trace(loss, (w, x), {})
        found = random_run(rng, program)
        if found is None:
            return False
        turn = seed % 4 if has_tangents(program) else 1 + seed % 3
        if turn in (0, 3) and any(op == UNARY.index(smooth_abs) for op, *_ in steps):
            turn = 1  # JAX differentiates the primal in a scan, not the rule, when it differentiates twice
        run = in_slices(program, *found)
        got = derivatives_of(lambda w, x: run(w, x)[0], arguments, turn)
        wanted = wanted_of(loss, arguments, turn)
    tolerance = NARROW_TOLERANCE if is_narrow(program) else TOLERANCE
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        start, stop, axis, count = found
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max()), (
            f"{steps}, {seed}: {start}:{stop} in {count} slices of {[str(p) for _, p in axis.cut]}, turn {turn}"
        )
    return True


def check_number(number):
    """Program by number."""
    rng = np.random.default_rng(number)
    return check(random_steps(rng), int(rng.integers(2**31)))
