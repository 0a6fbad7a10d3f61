"""JAX's own tests of `jax.checkpoint`, asked of `sublinear`: what holds of a region holds of a planned function.

`tests/api_test.py` of JAX, class `RematTest`, was read; each of its tests has a counterpart of the same name in one of
the files `test_remat_*.py`, or a line in `ELSEWHERE` that says where the counterpart stands, or in `NOT_APPLICABLE`
that says why there is none. `jax_remat_tests.py` runs JAX's own tests as they stand; those that fail then have a reason
there.
"""

import re
from pathlib import Path

from jax_remat_tests import PLANNED, WHOLE

FOLDER = Path(__file__).parent

ELSEWHERE = {
    "test_remat_recursive_checkpoint_recompute_counts": (
        "../emission/test_emit.py::test_evaluations_of_recursive_halving"
    ),
    "test_remat_checkpoint_dots_with_no_batch_dims": "test_remat_saved.py::test_remat_checkpoint_dots",
    "test_saved_residuals_utility_jit": "test_remat_saved.py::test_saved_residuals_utility",
    "test_const_in_jvp_scan": "test_remat_loops.py::test_const_in_jvp",
    "test_const_in_jvp_cond": "test_remat_loops.py::test_const_in_jvp",
    "test_remat_of_while_loop_policy": "test_remat_loops.py::test_remat_of_while_loop",
    "test_concreteness_error_includes_user_code_with_static_argnums": (
        "test_remat_compiled.py::test_concreteness_error_includes_user_code"
    ),
    **dict.fromkeys(
        (
            "test_remat_custom_policy_save_cos",
            "test_remat_checkpoint_dots_outside_scan",
            "test_remat_of_scan_policy",
            "test_remat_of_scan_funky_custom_jvp",
            "test_remat_of_scan_funky_custom_jvp2",
            "test_remat_checkpoint_dots_inside_cond",
            "test_remat_checkpoint_dots_outside_cond",
            "test_remat_of_cond_policy",
            "test_remat_of_cond_funky_custom_jvp",
            "test_remat_of_cond_funky_custom_jvp2",
        ),
        "test_remat_loops.py::test_policies_round_loops_and_branches",
    ),
}
NOT_APPLICABLE = {
    "test_no_cse_widget_with_prevent_cse_false": "sublinear has no prevent_cse: without it a plan would save nothing",
    "test_remat_partial_cse_prevention": "sublinear has no prevent_cse, whole or by argument",
    "test_remat_partial_cse_prevention_all_false": "sublinear has no prevent_cse, whole or by argument",
    "test_remat_partial_cse_prevention_pytree": "sublinear has no prevent_cse, whole or by argument",
    "test_remat_residual_logging": "what is saved is told by the plan when it is printed, not by a log",
}
JAX_TESTS = """
test_remat_basic test_remat_freevars test_remat_grad_python_control_flow_static_argnums
test_remat_grad_python_control_flow_unhashable_static_argnums test_remat_retracing
test_remat_static_agnums_retracing test_remat_jit test_remat_vmap test_remat_vmap_not_leading_dim
test_remat_higher_order_autodiff test_remat_higher_order_ad_preserves_remat_primitive test_remat_scan
test_remat_no_redundant_flops test_remat_binomial_checkpointing test_remat_symbolic_zeros test_remat_jit2
test_remat_nontrivial_env test_remat_jit3 test_remat_scan2 test_remat_jit_static_argnum_omnistaging
test_remat_eval_counter test_remat_recursive_checkpoint_recompute_counts test_escaped_tracer_remat
test_no_cse_widget_on_primals test_no_cse_widget_with_prevent_cse_false test_remat_custom_policy
test_remat_custom_policy_save_cos test_remat_checkpoint_dots test_remat_checkpoint_dots_with_no_batch_dims
test_remat_checkpoint_dots_with_no_batch_dims2 test_remat_checkpoint_dots_jit
test_remat_checkpoint_dots_inside_scan test_remat_custom_jvp_policy test_remat_custom_vjp_policy
test_remat_dropvar_policy test_remat_custom_jvp_linear_policy test_constants_not_hoisted
test_name_saveable_input test_name_pytree test_name_denylist test_name_allowlist test_checkpoint_name_vmap
test_saved_residuals_utility test_saved_residuals_utility_jit test_checkpoint_dropvars
test_dce_keeps_eqns_with_used_outputs_but_no_used_inputs test_linearize_caching test_vjp_caching
test_vjp_caching_static_argnums test_fwd_caching test_fwd_caching_static_argnums test_remat_of_scan
test_remat_of_scan_unused_extensive_output_grad test_remat_of_jit_residual_forwarding
test_remat_offload_names_jaxpr test_remat_offload_names_of_scan_jaxpr
test_remat_offload_dot_with_no_batch_dims_jaxpr test_const_in_jvp_scan test_remat_checkpoint_dots_outside_scan
test_remat_of_scan_policy test_remat_of_scan_funky_custom_jvp test_remat_of_scan_funky_custom_jvp2
test_remat_of_cond test_const_in_jvp_cond test_remat_checkpoint_dots_inside_cond
test_remat_checkpoint_dots_outside_cond test_remat_of_cond_policy test_remat_of_cond_funky_custom_jvp
test_remat_of_cond_funky_custom_jvp2 test_remat_of_while_loop test_remat_of_while_loop_policy
test_remat_residual_logging test_excess_precision_hell test_concreteness_error_includes_user_code
test_concreteness_error_includes_user_code_with_static_argnums test_name_stack_annotation
test_remat_partial_cse_prevention test_remat_partial_cse_prevention_all_false
test_remat_partial_cse_prevention_pytree test_remat_grad_accum_refs
""".split()


def test_the_table_of_what_fails_as_it_stands_names_tests_of_jax():
    """Each of JAX's tests that fails with `sublinear` in the place of `jax.checkpoint` has its counterpart here."""
    assert set(PLANNED) <= set(JAX_TESTS)
    assert set(WHOLE) <= set(PLANNED)
    assert all(PLANNED.values())


def test_every_one_has_its_counterpart():
    """Each of JAX's tests is here under its name, or stands elsewhere, or has a reason; no line is about another."""
    here = {
        n for path in FOLDER.glob("test_remat_*.py") for n in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert [name for name in JAX_TESTS if (name in here) + (name in ELSEWHERE) + (name in NOT_APPLICABLE) != 1] == []
    assert set(ELSEWHERE) | set(NOT_APPLICABLE) <= set(JAX_TESTS)
    lost = [w for w in ELSEWHERE.values() if f"def {w.split('::')[1]}(" not in (FOLDER / w.split("::")[0]).read_text()]
    assert lost == []
