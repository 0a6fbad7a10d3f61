"""What `explain` says of slices: which runs may be executed so, along which argument's axis, and what ends them."""

import jax
import jax.numpy as jnp
import pytest

import jaxsub
from jaxsub.jaxpr.trace import trace
from jaxsub.search.sliceable import axis_words

W, X = jax.ShapeDtypeStruct((64, 8192), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
DECODER = {
    "tokens": jax.ShapeDtypeStruct((4, 65), jnp.int32),
    "table": jax.ShapeDtypeStruct((100, 16), jnp.float32),
    "layers": jax.ShapeDtypeStruct((3, 16, 16), jnp.float32),
    "hidden": jax.ShapeDtypeStruct((16, 5000), jnp.float32),
}


def mlp(w, x):
    """Independent along its rows and along its hidden units."""
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def norm(w, x):
    """A head along whose rows batch statistics are taken."""
    with jax.named_scope("logits"):
        logits = x @ w
    mean = logits.mean(0)
    return jnp.mean((jax.nn.softmax(logits - mean)) ** 2)


def contrast(w, x):
    """A contrastive loss over the batch."""
    z = jnp.repeat(x @ w[:, :16], 4, 0)
    with jax.named_scope("pairs"):
        return -jnp.diag(jax.nn.log_softmax(z @ z.T)).mean()


def pooled(w, x):
    """A wide layer whose rows are mixed behind it."""
    with jax.named_scope("wide"):
        x = jax.nn.softmax(x @ w) @ w.T
    x = jnp.cumsum(x @ x.T, 0)
    return x.mean()


def decoder(params):
    """Embeddings, layers in a loop, a wide layer over batch and tokens in one axis."""
    x = params["table"][params["tokens"][:, :-1]]
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.tanh(x.reshape(-1, 16) @ params["hidden"]).mean()


def told(fun, *args):
    """The lines of an explanation that speak of slices, each run's on one line."""
    text = str(jaxsub.explain(fun, *args))
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text[text.index("runs may be in slices:") :].split())


def test_the_whole_function_is_named_with_the_axis_of_its_argument():
    """A loss that is independent along its batch says so, in how many slices, of which argument's axis."""
    assert "whole function: up to 16 slices of 32 along axis 0 of `arg1`" in told(mlp, W, X)
    assert "out of reach" not in str(jaxsub.explain(mlp, W, X))


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (pooled, ["wide: up to 16 slices of 32 along axis 0 of `arg1`, ended by `dot_general` at test_sliceable.py:",
                  "(pooled): it multiplies every part of the axis with every other"]),
        (norm, ["whole function along its batch: never. `sub` at test_sliceable.py:",
                "(norm): it reads a total over the axis, and what carries the axis"]),
        (contrast, ["pairs: never. `gather` at test_sliceable.py:", "(contrast): it takes elements along the axis"]),
    ],
)  # fmt: skip
def test_what_ends_a_run_is_named(fun, words):
    """The equation that ends a run, or forbids it, stands beside it with its source line and the reason."""
    for word in words:
        assert word in told(fun, W, X)
        assert word in " ".join(jaxsub.explain(fun, W, X)._repr_html_().split())


def test_a_program_without_runs_says_nothing_of_slices():
    """Where nothing is wide, the least budget is out of reach and no run is named."""
    text = str(jaxsub.explain(lambda w, x: jnp.tanh(x @ w).sum(), jnp.ones((2, 2)), jnp.ones(2)))
    assert "slices" not in text
    assert "out of reach" in text


@pytest.mark.parametrize(("dim", "words"), [(0, "axes 0 and 1 of `arg0['tokens']`"), (1, "axis 1 of `arg0['hidden']`")])
def test_an_axis_is_named_by_where_it_comes_from(dim, words):
    """Through look-ups, loops and reshapes an axis is led back to the argument that has it, data before weights."""
    program = trace(decoder, (DECODER,), {})
    hidden = next(v for v in program.graph.values if v.shape == (256, 5000))
    assert axis_words(program, (), hidden.index, dim) == words


def test_an_axis_in_a_body_is_named_by_where_it_comes_from():
    """Axes inside of a loop's body are named by the operands of the loop, stacked ones by their own dimension."""
    program = trace(decoder, (DECODER,), {})
    node = next(n.index for n in program.graph.nodes if n.primitive == "scan")
    body = jaxsub.emission.bodies.bodies_of_node(program, node)[0]
    product = next(n.outputs[0] for n in body.graph.nodes if n.primitive == "dot_general")
    assert axis_words(program, ((node, 0),), product, 0) == "axis 0 of `arg0['tokens']`"
    assert axis_words(program, ((node, 0),), product, 2) == "axis 2 of `arg0['layers']`"


def test_an_axis_that_comes_from_no_argument_has_no_name():
    """An axis that an equation makes is not guessed."""
    program = trace(lambda w: (jnp.arange(8.0)[:, None] * w).sum(), (jnp.ones(4),), {})
    made = next(v for v in program.graph.values if v.shape == (8, 4))
    assert axis_words(program, (), made.index, 0) == ""


def test_state_before_the_batch_does_not_hide_it():
    """The batch is the argument that the widest value comes from, wherever it stands among the arguments."""

    def with_state(w, count, mean, scale, x):
        return (jnp.tanh((x - mean) * scale @ w) ** 2).mean() + count.sum()

    state = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3,), (64,), (64,))]
    assert "whole function: up to 16 slices of 32 along axis 0 of `arg4`" in told(with_state, W, *state, X)


def test_constants_do_not_hide_the_batch():
    """Masks of stacked weights that a function closes over stand before its arguments, and are not its batch."""
    masks = [jnp.tril(jnp.ones((8, 512, 512))), jnp.triu(jnp.ones((8, 512, 512))), jnp.ones((8, 512))]

    def masked(ws, x):
        layer = lambda x, m: (jnp.tanh(x @ m[0] + x @ m[1] + m[2]), None)  # noqa: E731
        return (jax.lax.scan(layer, x, (ws * masks[0], ws * masks[1], masks[2]))[0] ** 2).mean()

    ws, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 512, 512), (1024, 512)))
    assert "along axis 0 of `arg1`" in told(masked, ws, x)
