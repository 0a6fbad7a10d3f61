"""Plan a function in the form in which least is recomputed: own regions opened, runs of inner gradients recomputed.

Regions of the function's own recompute the same whatever the budget: they are opened. Runs of an inner forward pass
that are recomputed add their FLOPs to any plan, and spare what no plan without them can. So these forms are planned
only where the function without either recomputes more than they add, or does not fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import jax

from jaxsub.core.decisions import Form
from jaxsub.core.errors import InfeasibleBudgetError
from jaxsub.core.figures import recomputed_share
from jaxsub.core.plan import Plan
from jaxsub.core.tuning import TUNING
from jaxsub.emission.emit import emit
from jaxsub.emission.forms import program_in
from jaxsub.emission.own_regions import n_own_regions
from jaxsub.jaxpr.flops import jaxpr_flops
from jaxsub.jaxpr.trace import Program, remembered
from jaxsub.partition.inner_gradients import find_clones
from jaxsub.search.compile_worth import Elsewhere
from jaxsub.search.verify import gradient, note, untouched


def best_of_forms(program: Program, planned: Callable[[Program, Elsewhere], Plan],
                  predicted: Callable[[Program], Plan], is_far: Callable[[Program], bool]) -> Plan:  # fmt: skip
    """Plan a program in the form in which least is recomputed.

    Args:
        program: The program.
        planned: Plans it in a form, where nothing better is expected elsewhere.
        predicted: Plans a form by prediction alone.
        is_far: Whether a form is predicted to need far more than the budget: such a form comes after the others.

    Raises:
        InfeasibleBudgetError: If it fits in no form; it names the lowest least.
    """
    best: Plan | None = None
    refusals: list[InfeasibleBudgetError] = []
    first, *others = forms_of(program)
    is_last = bool(others and others[0].clones) and is_far(program_in(program, first))
    left = [*others[:1], first, *others[1:]] if is_last else [first, *others]
    postponed = {first} if is_last else set[Form]()
    while left:
        form = left.pop(0)
        if best is not None and (form in postponed or not _may_gain(program, form, best)):
            continue
        clones = [] if best or form in postponed else [other for other in left if other.clones]
        elsewhere = Elsewhere(is_better=partial(_is_better, program, clones, predicted))
        try:
            plan = in_form(program, form, planned(program_in(program, form), elsewhere))
        except InfeasibleBudgetError as refused:
            if refused.least_bytes:
                refusals.append(refused.with_plan(partial(in_form, program, form)))
            else:  # another form is expected to do better
                postponed.add(form)
                left.append(form)
            continue
        best = plan if best is None or _share(program, plan) < _share(program, best) else best
    if best is None:
        raise min(refusals, key=lambda refused: refused.least_bytes) from None
    return best


def _is_better(program: Program, forms: Iterable[Form], predicted: Callable[[Program], Plan], error: float,
               share: float) -> bool:  # fmt: skip
    """Whether a form is predicted to fit, and to recompute clearly less than a share; how others err says nothing."""
    for form in (form for form in forms if _added_share(program, form) < share):
        with contextlib.suppress(InfeasibleBudgetError):
            plan = in_form(program, form, predicted(program_in(program, form)))
            if _share(program, plan) <= share - TUNING.little_recompute:
                return True
    return False


@remembered
def forms_of(program: Program) -> tuple[Form, ...]:
    """The forms to plan a program in; in the first one only what a plan says is recomputed."""
    return tuple(_forms_of(program))


def _forms_of(program: Program) -> Iterator[Form]:
    bare = Form(n_own_regions(program))
    yield bare
    if program.differentiated and (clones := find_clones(program_in(program, bare).graph)):
        cloned = replace(bare, clones=clones)
        shares = _added_share(program, cloned) / len(clones)
        yield replace(bare, clones=tuple(replace(clone, extra_share=shares) for clone in clones))
    if bare != Form():
        yield Form()


def in_form(program: Program, form: Form, plan: Plan) -> Plan:
    """A plan of a program in a form as a plan of the program."""
    if form == Form():
        return plan
    there = plan.replace(fingerprint=program.fingerprint, opened_regions=form.opened_regions, clones=form.clones)
    if form.clones and plan.prediction is not None:  # shares are of the forward pass without clones
        shown, bare = (_node_flops(program_in(program, f)) for f in (form, replace(form, clones=())))
        forward_flops = plan.prediction.forward_flops * bare / max(shown, 1.0)
        there = there.replace(prediction=replace(plan.prediction, forward_flops=forward_flops))
    return there.replace(note=note(program, there))


def _node_flops(program: Program) -> float:
    return sum(node.flops for node in program.graph.nodes)


@remembered
def added_flops(program: Program, form: Form) -> float:
    """What a form adds to the gradient of a program without its own regions, in FLOPs."""
    bare = Form(n_own_regions(program))
    return (
        0.0 if form == bare else _gradient_flops(program_in(program, form)) - _gradient_flops(program_in(program, bare))
    )


def _share(program: Program, plan: Plan) -> float:
    """What a plan recomputes, own regions that stay included, as a share of a forward pass."""
    is_kept = n_own_regions(program) > 0 and not plan.opened_regions
    return recomputed_share(plan) + (_added_share(program, Form()) if is_kept else 0.0)


def _may_gain(program: Program, form: Form, best: Plan) -> bool:
    """Whether a plan in a form may recompute less than the best one."""
    return _share(program, best) > max(TUNING.partition_gain, _added_share(program, form))


def _added_share(program: Program, form: Form) -> float:
    bare = program_in(program, Form(n_own_regions(program)))
    return added_flops(program, form) / max(_node_flops(bare), 1.0)


@remembered
def _gradient_flops(program: Program) -> float:
    function, shapes = gradient(program, emit(program, untouched(program)))
    return jaxpr_flops(jax.make_jaxpr(function)(*shapes).jaxpr).weighted
