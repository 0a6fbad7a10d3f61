"""Whole steps over several devices whose losses run in slices: memory and batches are those of one device."""

import pytest
from jaxpr.test_shardings import on_eight_devices

STEP = """
from six_layers import same

keys = iter(jax.random.split(jax.random.key(0), 8))
normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[0] ** .5

def loss(blocks, x, y):
    for up, down in blocks:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean((x - y) ** 2)

blocks = [jax.device_put((normal(32, 1024), normal(1024, 32)), WEIGHTS) for _ in range(3)]
spread = jax.tree.map(lambda a: a.sharding, blocks)
data = lambda n: (jax.ShapeDtypeStruct((n, 32), "float32", sharding=split),) * 2
options = dict(memory="3MiB", out_shardings=(spread, None), donate_argnums=0, cache=False, progress=False)

def step_of(loss):
    def step(blocks, x, y):
        value, gradient = jax.value_and_grad(loss)(blocks, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, blocks, gradient), value
    return step

planned = step_of(jaxsub.sublinear(loss, in_shardings=(spread, split, split)))
"""


@pytest.mark.parametrize("weights", ["whole", "split"])
def test_a_step_in_slices_fits_each_device(weights):
    """Weights on all devices, or split over them: the step takes what is reported of each, and does the same."""
    on_eight_devices(
        STEP.replace("WEIGHTS", weights)
        + """
args = blocks, *(jax.device_put(normal(4096, 32), split) for _ in range(2))
plain = jax.jit(step_of(loss), out_shardings=(spread, None))
wanted = plain(*args)
step = jaxsub.jit(planned, **options)
report = step.report(*args)
assert report.step_bytes <= report.memory_bytes == 3 * 2**20 < report.plain_bytes / 2.5, report
assert ": whole function in " in str(report), report
memory = step.lower(*args).compile().memory_analysis()
taken = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
assert taken - memory.alias_size_in_bytes == report.step_bytes, memory
same(step(*args), wanted, rtol=1e-4, atol=1e-6)
"""
    )


def test_the_largest_batch_on_a_mesh_runs_in_slices_and_compiles_within_the_memory():
    """Small batches have no use for slices, large ones do: many times what fits plainly, and it is compiled to fit."""
    on_eight_devices(
        STEP.replace("WEIGHTS", "whole")
        + """
found = jaxsub.max_batch(lambda n: (planned, (blocks, *data(n))), multiple_of=512, **options)
assert found.planned > 20 * found.plain > 0, found
assert found.report.step_bytes <= 3 * 2**20, found.report
memory = jaxsub.jit(planned, **options).lower(blocks, *data(found.planned)).compile().memory_analysis()
taken = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
assert taken - memory.alias_size_in_bytes == found.report.step_bytes <= 3 * 2**20, memory
"""
    )


def test_a_step_uses_its_memory_where_nobody_says_how_arguments_are_split():
    """What a loss is predicted to need counts for all devices then; it recomputes one hidden layer, and not two."""
    on_eight_devices(
        STEP.replace("WEIGHTS", "whole")
        + """
options["memory"] = "6MiB"
report = jaxsub.jit(step_of(jaxsub.sublinear(loss)), **options).report(blocks, *data(4096))
assert report.step_bytes <= report.memory_bytes < 0.7 * report.plain_bytes, report
print(f"{report.extra:.2f} of a forward pass")
assert 0.3 < report.extra < 0.4, report
"""
    )


def test_a_refusal_says_how_a_loss_on_a_mesh_may_run_in_slices():
    """Without in_shardings= nobody knows along which axes rows are split: the refusal names the loss and the option."""
    on_eight_devices(
        STEP.replace("WEIGHTS", "split")
        + """
step = jaxsub.jit(step_of(jaxsub.sublinear(loss)), **options)
try:
    step.report(blocks, *data(4096))
    raise SystemExit("it fits")
except jaxsub.InfeasibleBudgetError as refused:
    assert "`loss` ran in no slices: inside jit nothing says how arguments are split over devices" in str(refused)
    assert "Pass in_shardings= to its jaxsub.sublinear." in str(refused)
"""
    )
