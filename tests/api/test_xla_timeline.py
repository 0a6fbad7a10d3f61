"""What is read of the compiler's schedule agrees with what the compiler allocates."""

from types import SimpleNamespace

import jax
import matplotlib as mpl
import pytest
import zoo

import jaxsub
from jaxsub.api.xla_timeline import _covered, _fields, _ids, read_timeline, xla_timeline
from jaxsub.core.errors import PlanMismatchError, UnsupportedError

mpl.use("Agg")
from matplotlib.figure import Figure


@pytest.mark.parametrize("name", ["chain", "branches", "scan", "cond"])
def test_what_lives_is_what_is_allocated(name):
    """At its peak nearly all temporary memory holds something alive, and never more than there is."""
    loss, args = zoo.BY_NAME[name].toy()
    found = xla_timeline(loss, *args)
    assert found.temp_bytes == jaxsub.measure(loss, *args).temp_bytes
    assert 0.9 * found.temp_bytes <= max(found.live_bytes) <= found.temp_bytes
    assert len(found.live_bytes) == len(found.instructions)


def test_what_a_barrier_holds_lives_no_longer_than_it_is_read():
    """Values behind one barrier live each as long as it is read, not as long as any of them: towards the end few do."""
    loss, args = zoo.BY_NAME["chain"].toy()
    found = xla_timeline(loss, *args, plan=jaxsub.plan(loss, *args, planner="barriers", verify=False))
    late = found.live_bytes[int(0.95 * len(found.instructions))]
    assert 0 < late < 0.2 * max(found.live_bytes)


def test_a_plan_lowers_what_the_compiler_schedules():
    """With a plan the scheduled peak is lower, and what lives then has JAX's names."""
    loss, args = zoo.BY_NAME["chain"].toy()
    plan = jaxsub.plan(loss, *args, verify=False)
    plain, planned = xla_timeline(loss, *args), xla_timeline(loss, *args, plan=plan)
    assert max(planned.live_bytes) < 0.6 * max(plain.live_bytes)
    alive = planned.alive(planned.live_bytes.index(max(planned.live_bytes)))
    assert [b.n_bytes for b in alive] == sorted((b.n_bytes for b in alive), reverse=True)
    assert any("segment" in b.label for b in alive)


def test_a_schedule_is_drawn():
    """A schedule is drawn on the axes it is given, over all its instructions."""
    loss, args = zoo.BY_NAME["chain"].toy()
    found, ax = xla_timeline(loss, *args), Figure().subplots()
    assert found.plot(ax) is ax
    ax.figure.canvas.draw()
    assert ax.get_xlim()[1] >= len(found.instructions)


def test_a_plan_of_another_function_is_refused():
    """A plan is followed only by its own function."""
    loss, args = zoo.BY_NAME["chain"].toy()
    other, other_args = zoo.BY_NAME["branches"].toy()
    with pytest.raises(PlanMismatchError):
        xla_timeline(loss, *args, plan=jaxsub.plan(other, *other_args, verify=False))


@pytest.mark.parametrize(
    "memory", [None, SimpleNamespace(serialized_buffer_assignment_proto=b"", temp_size_in_bytes=0)]
)
def test_a_compiler_that_does_not_say(memory):
    """Without an account of buffers there is no timeline, and that is said."""
    with pytest.raises(UnsupportedError, match="does not say"):
        read_timeline(SimpleNamespace(memory_analysis=lambda: memory))


@pytest.mark.parametrize(
    ("places", "covered"),
    [([], 0), ([(0, 4), (0, 4)], 4), ([(0, 4), (2, 6)], 6), ([(8, 9), (0, 1)], 2), ([(0, 9), (2, 3), (5, 8)], 9)],
)
def test_what_lies_at_one_place_counts_once(places, covered):
    """Bytes that several buffers share are counted once."""
    assert _covered(places) == covered


def test_messages_are_read_by_field_numbers():
    """Integers, bytes, packed and single repeated integers are read, fixed-width numbers skipped."""
    message = bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x05, 0x07, 0x1D, 0, 0, 0, 0, 0x10, 0x09, 0x19, *range(8)])
    assert list(_fields(message)) == [(1, 150), (2, b"\x05\x07"), (2, 9)]
    assert _ids(message, 2) == [5, 7, 9]


def test_shapes_are_enough():
    """Nothing is allocated to read a schedule."""
    loss, args = zoo.BY_NAME["chain"].toy()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    assert xla_timeline(loss, *shapes).temp_bytes == xla_timeline(loss, *args).temp_bytes
