"""Arguments as users give them: which is differentiated, names that collide, budgets and options misread."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxsub

W, X = jnp.full((8, 8), 0.1), jnp.ones((4, 8))
make = functools.partial(jaxsub.sublinear, cache=False, progress=False, verify=False)


def layers(w, x, n=4):
    for _ in range(n):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


FIRST = {
    "integer": (lambda step, w, x: layers(w, x) * step, jnp.int32(2)),
    "Python's int": (lambda step, w, x: layers(w, x) * step, 2),
    "key": (lambda key, w, x: layers(w, x + jax.random.normal(key, x.shape)), jax.random.key(0)),
    "raw key": (lambda key, w, x: layers(w, x + jax.random.normal(key, x.shape)), jax.random.PRNGKey(0)),
    "nothing": (lambda nothing, w, x: layers(w, x), None),
    "flags": (lambda flags, w, x: layers(w, x) * flags["on"], {"on": True}),
}


@pytest.mark.parametrize("kind", FIRST)
def test_the_first_argument_need_not_be_differentiated(kind):
    """With an integer, a key or nothing in front, values and gradients are JAX's, and the next argument is planned."""
    fun, first = FIRST[kind]
    loss = make(fun)
    got = loss(first, W, X), jax.grad(loss, (1, 2))(first, W, X)
    np.testing.assert_allclose(got[0], fun(first, W, X), rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got[1], jax.grad(fun, (1, 2))(first, W, X))
    assert loss.plan(first, W, X) == make(fun, argnums=1).plan(first, W, X)


def test_a_static_first_argument_is_passed_over():
    """With a static argument in front the next one is planned; naming it is an error that says so."""
    loss = make(lambda n, w, x: layers(w, x, n), static_argnums=0)
    assert jax.grad(loss, 1)(3, W, X).shape == W.shape
    with pytest.raises(jaxsub.UnsupportedError, match="argument 0 is static and cannot be differentiated"):
        make(lambda n, w, x: layers(w, x, n), static_argnums=0, argnums=0)(3, W, X)


def test_static_arguments_that_are_none_are_refused():
    """Positions that the function does not have; a method's own object is named in what its refusal says."""
    with pytest.raises(ValueError, match=r"static_argnums names \[5\], but the function takes 3 positional arguments"):
        make(layers, static_argnums=5)(W, X)
    assert make(lambda *args: layers(*args[:2]), static_argnums=5)(W, X).shape == ()

    class Model:
        @make
        def loss(self, x):
            return layers(W, x)

    with pytest.raises(jaxsub.UnsupportedError, match=r"Name static arguments, such as a method's self"):
        Model().loss(X)


def test_a_mirror_count_by_name_needs_its_count():
    with pytest.raises(ValueError, match=r"mirror= is the name 'h': give it a count, as in mirror=\{'h': 1\}"):
        make(layers, mirror="h").plan(W, X)


NOTHING = {
    "integers": (lambda x: x * 2, (3,)),
    "no arguments": (lambda: jnp.sin(W).sum(), ()),
    "a key": (jax.random.normal, (jax.random.key(0),)),
    "nothing at all": (lambda: 3.0, ()),
    "an integer result": (lambda x: jnp.argmax(x), (X,)),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_a_call_alone_never_raises(kind):
    """What has nothing to differentiate is left as it is, plain, under `jax.jit` and with a budget in bytes."""
    fun, args = NOTHING[kind]
    for loss in (make(fun), jaxsub.sublinear(fun, budget="1MiB", cache=False), jax.jit(make(fun))):
        np.testing.assert_allclose(loss(*args), fun(*args), rtol=1e-6)
    assert make(fun).plan(*args).n_regions == 0


def test_a_closure_is_differentiated():
    """Without arguments the gradient is that of the tracers closed over; an integer one is no trouble."""
    got = jax.grad(lambda w: make(lambda: layers(w, X))())(W)
    np.testing.assert_allclose(got, jax.grad(layers)(W, X), rtol=1e-5)
    assert jax.jit(lambda x: make(lambda: 2 * x)())(3) == 6


def test_what_is_measured_is_the_gradient_of_the_first_floating_argument():
    """A batch is no part of the measured gradient unless `argnums` says so."""
    first, both = (jaxsub.measure(layers, W, X, argnums=n).output_bytes for n in (None, (0, 1)))
    assert first == jaxsub.measure(layers, W, X, argnums=0).output_bytes
    assert first + X.nbytes <= both
    assert jaxsub.measure(lambda step, w, x: layers(w, x), 3, W, X).output_bytes == first


def test_nothing_to_measure_is_an_error():
    """`measure`, `explain`, `residuals` and `frontier` say so where nothing can be differentiated."""
    for ask in (jaxsub.measure, jaxsub.explain, jaxsub.residuals, jaxsub.frontier):
        with pytest.raises(jaxsub.UnsupportedError, match="Nothing to differentiate"):
            ask(lambda n: n * 2, 3)
    with pytest.raises(jaxsub.UnsupportedError, match=r"Nothing to differentiate.*int32"):
        make(lambda n, x: x * n, argnums=0)(3, X)


def aimed(w, x, target, budget=1.0):
    return ((layers(w, x) - target) ** 2).sum() * budget


def test_names_that_collide():
    """A name that is the function's and ours is refused with the way that leaves no doubt; that way takes all."""
    calls = {
        jaxsub.plan: ("target", "budget"), jaxsub.measure: ("target",), jaxsub.explain: ("target",),
        jaxsub.frontier: ("target", "budget"),
    }  # fmt: skip
    for call, names in calls.items():
        for name in names:
            told = rf"{name}= is a parameter of aimed and an option of jaxsub.{call.__name__}.*jaxsub.sublinear\(aimed"
            with pytest.raises(TypeError, match=told):
                call(aimed, W, X, **{name: 2.0})
    loss = make(aimed)
    given = {"target": 2.0, "budget": jnp.float32(3)}
    np.testing.assert_allclose(loss(W, X, **given), aimed(W, X, **given), rtol=1e-6)
    assert loss.plan(W, X, **given) == loss.plan(W, X, target=2.0, budget=jnp.float32(4))
    assert loss.measure(W, X, **given).target == "cpu"
    assert loss.frontier(W, X, **given).points
    assert loss.explain(W, X, **given).residuals


def test_an_option_is_one_where_the_parameter_has_its_argument():
    """Once the function's own parameter is filled by position, the keyword can only be our option."""
    assert jaxsub.plan(aimed, W, X, 2.0, target="cpu", verify=False).n_nodes
    assert jaxsub.measure(aimed, W, X, 2.0, target="cpu").target == "cpu"
    assert jaxsub.plan(lambda w, fun: layers(w, fun), W, fun=X, verify=False).n_nodes


def test_methods_are_the_functions():
    """`measure`, `frontier` and `explain` of a wrapped function say what the functions of that name say of it."""
    loss = make(layers, planner="recursive")
    assert loss.measure(W, X).temp_bytes == jaxsub.measure(loss, W, X).temp_bytes
    assert loss.frontier(W, X) == jaxsub.frontier(layers, W, X)
    assert loss.explain(W, X) == jaxsub.explain(layers, W, X)


class Model:
    """A loss that is a method."""

    scale = 2.0

    @functools.partial(make, static_argnums=0)
    def loss(self, w, x):
        return layers(w, x) * self.scale


def test_a_method_is_asked_of_its_instance():
    """Bound to an instance, a wrapped method tells its plan, its figures and the function that it was."""
    loss = Model().loss
    np.testing.assert_allclose(loss(W, X), 2 * layers(W, X), rtol=1e-6)
    assert loss.plan(W, X).n_nodes
    assert loss.measure(W, X).temp_bytes > 0
    assert loss.fun(W, X) == 2 * layers(W, X)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        loss.plam(W, X)


@pytest.mark.parametrize("given", ["x", "0", 1.0, True, (), (0, "x")])
def test_argnums_that_are_none(given):
    """What is no position is refused when the function is made, with its value."""
    for ask in (functools.partial(make, layers), functools.partial(jaxsub.measure, layers, W, X)):
        with pytest.raises(TypeError, match=r"argnums takes the positions of arguments.*got"):
            ask(argnums=given)


WRONG_OPTIONS = {
    "mirror": (1, "mirror= takes counts, by equation or by name, or a function; got 1"),
    "cache": (None, "cache= is True, False for in memory only, a directory or a store; got None"),
    "in_shardings": (3, "in_shardings= is a sharding, or a tuple with one for each positional argument.* got 3"),
    "static_argnums": (1.5, "static_argnums takes the positions of arguments.* got 1.5"),
    "static_argnames": (3, "static_argnames takes the names of arguments.* got 3"),
    "plan": (3, "this is 3, and no jaxsub plan; make a new one with jaxsub.plan"),
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_an_option_of_the_wrong_kind_is_named(option):
    """Each says what it takes and what it got, instead of what failed inside."""
    given, words = WRONG_OPTIONS[option]
    with pytest.raises((TypeError, ValueError), match=words):
        jaxsub.sublinear(layers, **{option: given})(W, X)


@pytest.mark.parametrize("name", ["plan", "measure", "frontier", "explain", "residuals", "doctor", "sublinear", "jit"])
def test_what_is_no_function_is_refused(name):
    """Every call says at once that it takes a function."""
    call, args = getattr(jaxsub, name), (X,) * (name not in ("sublinear", "jit"))
    with pytest.raises(TypeError, match=f"jaxsub.{name} takes a function, and options .* by name; got 3"):
        call(3, *args)


def test_a_step_of_no_function_is_refused_when_it_is_made():
    with pytest.raises(TypeError, match=r"jaxsub\.jit takes a function"):
        jaxsub.jit(memory=0.5)(3)


def test_positions_of_any_make():
    """NumPy's integers, lists and negative positions are positions."""
    assert make(layers, argnums=np.int64(1)).plan(W, X) == make(layers, argnums=[-1]).plan(W, X)


def test_a_plan_leaves_nothing_to_plan():
    """A plan beside what says how to make one is refused, and all of it is named."""
    plan = make(layers).plan(W, X)
    others = {"budget": "1GiB", "mirror": {"h": 1}, "planner": "chen", "chunks": {0: 2}, "offload": "pinned_host",
              "effort": "low", "max_seconds": 3, "profile": True}  # fmt: skip
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"plan= is made already; it needs no {name}=, which"):
            make(layers, plan=plan, **{name: value})
    with pytest.raises(ValueError, match="it needs no budget=, no effort=, which"):
        make(layers, plan=plan, budget="1GiB", effort="low")


def test_options_that_jit_does_not_take():
    """A misspelt option of `jit` is refused at once with what is close to it."""
    for memory in (None, "1GiB"):
        with pytest.raises(TypeError, match="takes no 'donate_args'; did you mean 'donate_argnums'"):
            jaxsub.jit(memory=memory, donate_args=0)
    with pytest.raises(TypeError, match="takes no 'memroy'; did you mean 'memory'"):
        jaxsub.jit(layers, memroy="1GiB")


def test_donated_arguments_that_are_not_there_are_named_as_such():
    step = jaxsub.jit(layers, memory="1GiB", donate_argnums=9)
    with pytest.raises(ValueError, match=r"donate_argnums names \[9\], but the function takes 3 positional"):
        step.report(W, X)


def test_symbolic_shapes():
    """`jax.export` with a symbolic batch is refused with what to do; at a known size it works."""
    loss = jax.jit(make(layers))
    (batch,) = export.symbolic_shape("b")
    with pytest.raises(jaxsub.UnsupportedError, match=r"arg1 has the dimension b.*once for each size"):
        export.export(loss)(W, jax.ShapeDtypeStruct((batch, 8), X.dtype))
    assert export.export(loss)(W, X).call(W, X) == pytest.approx(layers(W, X))


def test_a_result_that_is_no_loss_is_said():
    """A plan of a function without a scalar loss says what its budget is one of, in text and HTML."""
    told = "no scalar loss"
    plan = make(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)).plan(W, X)
    assert told in " ".join(str(plan).split())
    assert told in plan.to_html()
    assert told not in str(make(layers).plan(W, X))
    assert "nothing to differentiate" in " ".join(str(make(lambda n: n * 2).plan(3)).split())
    assert "nothing to differentiate" in " ".join(str(make(lambda w, x: jnp.argmax(x @ w)).plan(W, X)).split())


@pytest.mark.parametrize("value", [True, 3])
def test_a_number_that_control_flow_needs_is_named(value):
    """Where the function branches on an argument, or counts to it, a note names it and says what to do."""

    def loss(w, x, n):
        return layers(w, x, len(range(n)) if n is not True and n else 1)

    with pytest.raises(TypeError) as caught:
        make(loss)(W, X, value)
    assert any(f"`arg2` ({value!r}). Name" in note and "static_argnums=" in note for note in caught.value.__notes__)
    assert "the function loss at" in str(caught.value)
    assert "the argument n." in str(caught.value)
    assert np.isfinite(make(loss, static_argnums=2)(W, X, value))


@pytest.mark.parametrize("ask", [jaxsub.explain, jaxsub.frontier])
def test_a_function_that_computes_nothing_has_no_frontier(ask):
    """It returns what it is given; planned it is as it was."""
    with pytest.raises(jaxsub.UnsupportedError, match="computes nothing"):
        ask(lambda x: x, jnp.float32(1.0))
    assert jaxsub.sublinear(lambda x: x, budget=0.5, cache=False)(jnp.float32(1.0)) == 1.0
