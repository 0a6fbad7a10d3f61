"""Costs on GPUs without a compiler: products in parts, kernels that are joined, orders, and what the compiler says."""

import jax
import jax.numpy as jnp
import pytest

from jaxsub.costs.fusion import Lives
from jaxsub.costs.live_ranges import counted, kept_bytes
from jaxsub.costs.multi_output_fusion import joined
from jaxsub.costs.scheduler import Kernel, depth_first, greedy, peak_bytes
from jaxsub.costs.split_k import n_parts
from jaxsub.devices.targets import get_target
from jaxsub.jaxpr.trace import trace
from jaxsub.partition.traced_run import trace_run

H100 = get_target("h100")


def eqns_of(function, *shapes, dtype="float32"):
    """The jaxpr of a function of arrays."""
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)).jaxpr


@pytest.mark.parametrize(
    ("rows", "columns", "summed", "parts"),
    [
        (256, 256, 512, 8),
        (256, 256, 8192, 32),
        (64, 1024, 306, 4),
        (64, 64, 64, 1),
        (1024, 256, 256, 1),
        (1024, 512, 1024, 4),
        (1024, 1024, 1024, 1),
        (768, 192, 3136, 8),
    ],
)
def test_parts_are_those_that_the_compiler_makes(rows, columns, summed, parts):
    """Each as compiled for an H100: the first result's leading axis in the compiled program's text."""
    eqn = eqns_of(jnp.matmul, (rows, summed), (summed, columns)).eqns[0]
    assert n_parts(eqn, H100) == parts
    assert n_parts(eqn, get_target("cpu")) == 1


def test_integers_are_not_split():
    """Of whole numbers a GPU's compiler makes each product at once."""
    assert n_parts(eqns_of(jnp.matmul, (256, 512), (512, 256), dtype="int32").eqns[-1], H100) == 1


def kernels_of(function, *shapes):
    """Bytes of what each kernel makes, on an H100."""
    program = trace(function, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), {})
    run = trace_run(program, 0, len(program.eqns))
    lives = Lives(run.forward, run.inputs, run.returned, {}, False, H100)
    return [kernel.n_bytes for kernel in lives.kernels]


def test_slow_work_is_done_once_where_that_is_faster():
    """A gate and its derivative: a GPU stores `sin(x)`, repeats `exp(x)`, and on an A100 repeats both."""

    def stored(f, name, dtype=jnp.float32):
        eqns = eqns_of(lambda x, y: (x * f(x), y * f(x)), (4096, 4096), (4096, 4096), dtype=dtype)
        lives = Lives(eqns.eqns, eqns.invars, eqns.outvars, {}, False, get_target(name))
        return len(lives.kernels) > 2

    assert stored(jnp.sin, "h100")
    assert not stored(jnp.sin, "a100")
    assert not stored(jnp.exp, "h100")
    assert stored(jnp.tanh, "h100", jnp.bfloat16)
    assert not stored(jax.lax.erf, "h100", jnp.bfloat16)


def test_parts_are_added_up_by_what_reads_them():
    """A product in 8 parts: no kernel makes the sum, unless it goes out, is an operand, or is summed again."""
    shapes, size = ((256, 512), (512, 256)), 256 * 256 * 4
    assert kernels_of(lambda a, b: jnp.tanh(a @ b), *shapes) == [(8 * size,), (size,)]
    assert kernels_of(lambda a, b: a @ b, *shapes) == [(8 * size,), (size,)]
    assert kernels_of(lambda a, b: jnp.sum(jnp.tanh(a @ b), 1), *shapes) == [(8 * size,), (size,), (1024,)]
    by_itself = kernels_of(lambda a, b: (a @ b) @ b[:256, :8], *shapes)
    assert by_itself[:2] == [(8 * size,), (size,)]


def test_operands_are_padded_where_parts_do_not_divide():
    """306 in 4 parts of whole 16 bytes are 320: both operands are copied."""
    assert kernels_of(lambda a, b: a @ b, (64, 306), (306, 1024))[:2] == [(64 * 320 * 4,), (320 * 1024 * 4,)]


def test_a_product_does_unary_work_itself():
    """Of tanh(x) @ w a GPU stores no tanh; of (x + y) @ w the sum."""
    shapes, size = ((1024, 256), (256, 256)), 1024 * 256 * 4
    assert kernels_of(lambda x, w: jnp.tanh(x) @ w, *shapes) == [(size,)]
    assert kernels_of(lambda x, y, w: (x + y) @ w, shapes[0], *shapes) == [(size,), (size,)]


def test_a_product_reads_a_narrower_copy():
    """Of f32 arrays a bf16 product reads copies in bf16, as the compiler's products take in no narrowing conversion."""
    half = lambda a: a.astype(jnp.bfloat16)  # noqa: E731
    sizes = kernels_of(lambda x, w: half(x) @ half(w), (1024, 256), (256, 256))
    assert sizes == [(1024 * 256 * 2,), (256 * 256 * 2,), (1024 * 256 * 2,)]


def head(dtype, loss):
    """A loss over 32,000 words, the last token of each row left out."""

    def of(w, scale, x, tokens):
        y = x.astype(jnp.float32)
        y = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(dtype)
        return jnp.mean(loss((y @ w.astype(dtype)).astype(jnp.float32)[:, :-1], tokens[:, 1:, None]))

    return of


def cross_entropy(logits, labels):
    """logsumexp less the label's logit."""
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels, -1)[..., 0]


def smoothed(logits, labels):
    """With label smoothing and a z-loss."""
    whole = jax.nn.logsumexp(logits, -1)
    return 0.9 * cross_entropy(logits, labels) + 0.1 * (whole - jnp.mean(logits, -1)) + 1e-4 * whole**2


def by_softmax(logits, labels):
    """The label's log softmax."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, -1)[..., 0]


@pytest.mark.parametrize(
    ("dtype", "loss", "mib"),
    [
        (jnp.bfloat16, cross_entropy, 375.8),
        (jnp.float32, cross_entropy, 500.8),
        (jnp.bfloat16, smoothed, 375.8),
        (jnp.bfloat16, by_softmax, 515.3),
    ],
)
def test_a_loss_head_needs_what_the_compiler_allocates(dtype, loss, mib):
    """Within 4 % of what its gradient takes as compiled for an H100 by jax 0.12; logits are 250 MiB in f32."""
    shapes = ((256, 32_000), "float32"), ((256,), "float32"), ((2, 1024, 256), "bfloat16"), ((2, 1024), "int32")
    program = trace(head(dtype, loss), tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {})
    run = trace_run(program, 0, len(program.eqns))
    assert counted("last", run, (), at_once=True, gpu=H100) / 2**20 == pytest.approx(mib, rel=0.04)


def test_slices_and_look_ups_are_made_where_they_are_read():
    """Of an array that is split, and of one in which few elements are looked up, nothing is stored but the results."""
    shape = (64, 1024)
    assert kernels_of(lambda x: [a * b for a, b in [jnp.split(jnp.tanh(x), 2, 1)]], shape) == [(64 * 512 * 4,)]
    index = jnp.arange(64)[:, None]
    few = kernels_of(lambda x: jnp.take_along_axis(x * x, index, 1, mode="clip"), shape)
    assert max(size for sizes in few for size in sizes) <= 64 * 8


def kernel(position, made, read, over="", shape=(8,)):
    """A kernel that makes one buffer of 8 bytes."""
    return Kernel(position, (made,), frozenset(read), (8,), over=frozenset(over), shape=shape)


def test_readers_of_one_array_are_joined():
    """Two that read one array become one kernel where the later was; none that wait for each other do."""
    apart = [kernel(0, "a", "x"), kernel(1, "p", "y", shape=None), kernel(2, "b", "xp")]
    made = [k.makes for k in joined(apart, "xy", "ab")]
    assert made == [("p",), ("a", "b")]
    waiting = [kernel(0, "a", "x"), kernel(1, "p", "a", shape=None), kernel(2, "b", "xp")]
    assert [k.makes for k in joined(waiting, "x", "b")] == [("a",), ("p",), ("b",)]
    other = [kernel(0, "a", "x"), kernel(1, "b", "x", shape=(2, 4))]
    assert [k.makes for k in joined(other, "x", "ab")] == [("a",), ("b",)]


def test_a_maker_is_joined_with_its_reader():
    """What a product and other work read is made with that work, if the product does not stand between them."""
    alone = [kernel(0, "a", "x"), kernel(1, "p", "a", shape=None), kernel(2, "b", "a")]
    assert [k.makes for k in joined(alone, "x", "pb")] == [("a", "b"), ("p",)]
    between = [kernel(0, "a", "x"), kernel(1, "p", "a", shape=None), kernel(2, "b", "ap")]
    assert [k.makes for k in joined(between, "x", "b")] == [("a",), ("p",), ("b",)]


def test_sums_are_joined_that_sum_alike():
    """Sums over the same axes of arrays of one shape are one kernel, over others not."""
    by_axes = {
        axes: Kernel(axes[0], (axes,), frozenset("x"), (8,), shape=(8, 8, 8), axes=axes) for axes in [(0,), (1,)]
    }
    alike = Kernel(2, ("c",), frozenset("x"), (8,), shape=(8, 8, 8), axes=(0,))
    assert sorted(len(k.makes) for k in joined([*by_axes.values(), alike], "x", [(0,), (1,), "c"])) == [1, 2]


def test_what_is_made_together_stands_together():
    """Of two joined kernels each writes over what it alone reads, and over nothing that both read."""
    both = joined([kernel(0, "a", "xy", "xy"), kernel(1, "b", "x", "x")], "xy", "ab")
    assert len(both) == 1
    assert peak_bytes(both, {"x": 8, "y": 8}, set("ab"), set()) == 24
    assert peak_bytes([kernel(0, "a", "xy", "xy"), kernel(1, "b", "x", "x")], {"x": 8, "y": 8}, set("ab"), set()) == 16


def test_orders_by_hand():
    """One order goes by the live bytes after each kernel, one by the operands of the first output."""
    large = Kernel(0, ("large",), frozenset("x"), (9,))
    small = Kernel(1, ("s",), frozenset("x"), (2,))
    last = Kernel(2, ("out",), frozenset(["large", "s"]), (1,))
    assert [k.makes[0] for k in greedy([large, small, last], {}, {"out"}, set("x"))] == ["s", "large", "out"]
    assert [k.makes[0] for k in depth_first([small, large, last], ["out"])] == ["large", "s", "out"]


def test_parts_are_kept_in_place_of_a_product():
    """Between the passes of sin(x @ w) with a product in 8 parts stand the parts: the derivative adds them up again."""
    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 512), (512, 256)))
    run = trace_run(trace(lambda x, w: jnp.sum(jnp.sin(x @ w)), args, {}), 0, 2)
    assert [kept_bytes(run, gpu=gpu) for gpu in (None, H100)] == [256 * 256 * 4, 8 * 256 * 256 * 4]


@pytest.mark.parametrize("written", [["late", "early"], ["early", "late"]], ids=["late first", "early first"])
def test_counting_goes_the_same_way_each_time(written):
    """Of places alike that which is written first hosts, whatever their hashes: prices are alike in every process."""
    order = [
        Kernel(0, ("held",), frozenset(), (8,)),
        Kernel(1, ("long",), frozenset(["held"]), (8,)),
        Kernel(2, ("early",), frozenset(["long"]), (8,)),
        Kernel(3, ("late",), frozenset(), (8,)),
    ]
    assert peak_bytes(order, {}, {"late", "early"}, {"late", "early"}, written) == 0
