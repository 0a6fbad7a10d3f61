"""The forms in which a function is planned: with its own regions opened, and runs of inner gradients recomputed.

All other fields of a plan number the equations of that form.
"""

from __future__ import annotations

from jaxsub.core.decisions import Form
from jaxsub.core.errors import PlanMismatchError
from jaxsub.core.plan import Plan
from jaxsub.emission.clones import with_clones
from jaxsub.emission.own_regions import open_own_regions
from jaxsub.jaxpr.trace import Program


def program_in(program: Program, form: Form | Plan) -> Program:
    """The function in a form, or in that of a plan; `ValueError` if the form is not one of this function."""
    return with_clones(open_own_regions(program) if form.opened_regions else program, form.clones)


def planned_form(program: Program, plan: Plan) -> tuple[Program, Plan]:
    """The program whose equations a plan numbers, and the plan as one of that program.

    Raises:
        PlanMismatchError: If the plan has the program's fingerprint, but its form does not fit it.
    """
    if plan.fingerprint != program.fingerprint or not (plan.opened_regions or plan.clones):
        return program, plan
    try:
        found = program_in(program, plan)
    except ValueError as error:
        raise PlanMismatchError(
            f"The plan does not fit this function: {error}. Make a new plan with jaxsub.plan.",
            plan_fingerprint=plan.fingerprint,
            function_fingerprint=program.fingerprint,
        ) from error
    return found, plan.replace(fingerprint=found.fingerprint, opened_regions=0, clones=())


def numbering(program: Program, plan: Plan) -> Program:
    """The program whose equations plans like this one number, of another batch too; itself where they do not fit."""
    try:
        return program_in(program, plan)
    except ValueError:
        return program
