"""Differences between JAX versions, each with its versions: no other file checks a version or uses `jax._src`."""
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as jax_checkpoint_name
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType

from jaxsub.jaxpr.hi_primitives import expanded
from jaxsub.jaxpr.policy_calls import careful

try:
    from jax._src import ad_checkpoint, source_info_util
    from jax._src import api_util as jax_api_util
    from jax._src import callback as jax_callback
    from jax._src import config as jax_config
    from jax._src import core as jax_core
except ImportError:  # private: any version may remove them
    ad_checkpoint = jax_api_util = jax_callback = jax_config = jax_core = source_info_util = None  # type: ignore[assignment]

NOT_FINITE: Any = getattr(jax_api_util, "InternalFloatingPointError", ())
"""What `jax_debug_nans` raises of a compiled call whose equations it does not run one by one."""
CLOSED_OVER: Any = getattr(getattr(ad_checkpoint, "ad", None), "CustomVJPException", ())
"""What JAX raises of the gradient by what a `jax.custom_vjp` closes over."""
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
NO_MESH = AbstractMesh((), ())
LEFT_OUT: ContextVar[bool] = ContextVar("callbacks_left_out", default=False)
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))


def version_of(text: str) -> tuple[int, ...]:
    """Read the leading numbers of a version: `"0.11.0.dev3"` is `(0, 11, 0)`."""
    return tuple(map(int, itertools.takewhile(str.isdigit, text.split("."))))


def cpu_compiler_options(version: str = jax.__version__) -> dict[str, str]:
    """Return options that make a CPU compile keep rematerialisation; 0.10.0 to 0.11.0 need one, later ones none.

    Those versions expand barriers before a later pass merges equal expressions, so straight-line recomputation is
    merged away, and copies that updates in place need: values can then be wrong (tests/devices/test_compile.py). Of
    loops of a kilobyte they make one kernel, in which a barrier would abort XLA. Never pass this to other backends.

    Example:
        >>> cpu_compiler_options("0.10.2")
        {'xla_disable_hlo_passes': 'cse_barrier_expander,small-while-loop-hoisting'}
        >>> cpu_compiler_options("0.11.2")
        {}
    """
    passes = "cse_barrier_expander,small-while-loop-hoisting"
    return {"xla_disable_hlo_passes": passes} if (0, 10) <= version_of(version) <= (0, 11, 0) else {}


def cpu_measuring_options() -> dict[str, Any]:
    """Return options for a CPU compile whose program is only measured, never run.

    Buffers are assigned before machine code is made: unoptimised code has the same memory and FLOPs, sooner.

    Example:
        >>> cpu_measuring_options()["xla_backend_optimization_level"]
        0
    """
    return {**cpu_compiler_options(), "xla_backend_optimization_level": 0}


def remat_flavour(version: str = jax.__version__) -> str:
    """Tell which of JAX's two `jax.checkpoint`s makes our regions; measurements of one do not hold for the other.

    That is the one in use, but before JAX 0.11 always the older: there `jax_remat3` puts no barrier in a region's
    backward pass, so that regions save no memory, and cannot `vmap` saved values.
    """
    return "remat3" if getattr(jax.config, "jax_remat3", False) and version_of(version) >= (0, 11) else "remat2"


def saves_in_nests() -> bool:
    """Tell whether a region inside another saves the values that its policy names; `jax_remat3` recomputes them."""
    return remat_flavour() == "remat2"


def _of_our_flavour() -> contextlib.AbstractContextManager[Any]:
    """Make the context for our regions and names: it turns the flag off where `remat_flavour` is the older one."""
    is_other = getattr(jax.config, "jax_remat3", False) and remat_flavour() == "remat2"
    flag = getattr(jax_config, "remat3", None) if is_other else None
    return flag(False) if flag is not None else contextlib.nullcontext()


def checkpoint(fun: Callable[..., Any], *, policy: Any = None, prevent_cse: bool = True) -> Callable[..., Any]:
    """`jax.checkpoint` of our flavour; `jax_remat3` knows some policies by their class, and calls them for little."""
    with _of_our_flavour():
        policy = policy if remat_flavour() == "remat3" else careful(policy)
        return jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)


def checkpoint_name(x: Any, name: str) -> Any:
    """`jax.ad_checkpoint.checkpoint_name` of our flavour; `jax_remat3` in 0.11 rounds only the saved copy, this all."""
    is_narrow = x.dtype.name in ("bfloat16", "float16")
    if is_narrow and remat_flavour() == "remat3" and version_of(jax.__version__) < (0, 12):
        x = jax.lax.reduce_precision(x, (info := jax.numpy.finfo(x.dtype)).nexp, info.nmant)
    with _of_our_flavour():
        return jax_checkpoint_name(x, name)


def ignores_policies() -> bool:
    """Tell whether `jax.checkpoint` now recomputes some results without calling the policy: with `jax_remat3`."""
    return bool(getattr(jax.config, "jax_remat3", False)) and "sin" not in asked_by_remat3()


def ignores_our_policies() -> bool:
    """Tell whether `checkpoint` here does so."""
    return remat_flavour() == "remat3" and ignores_policies()


@functools.cache
def asked_by_remat3() -> frozenset[str]:
    """Find the primitives that `jax_remat3` calls a policy for: none before 0.12, then products, convolutions, names.

    It silently recomputes all others; so this records the calls of a policy. Call it with the flag on.
    """
    asked: set[str] = set()

    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        asked.add(primitive.name)
        return False

    def fun(x: Any) -> Any:
        y = jax_checkpoint_name(jax.numpy.sin(x @ x), "y")
        return jax.lax.conv_general_dilated(y[None, None], y[None, None], (1, 1), "SAME").sum()

    jax.make_jaxpr(jax.grad(jax.checkpoint(fun, policy=policy)))(jax.numpy.ones((2, 2)))
    return frozenset(asked)


def is_known_to_remat3(policy: Any) -> bool:
    """Tell whether `jax_remat3` applies a policy by its class, without calling it, as 0.10 did with some of JAX's."""
    return type(policy).__name__ in ("DotsSaveable", "SaveOnlyTheseNames", "SaveAnyNamesButThese")


def unwrapped(eqn: Any) -> tuple[Any, dict[str, Any]]:
    """Return an equation's primitive and parameters, for names and regions as without `jax_remat3`.

    With it, both are parameters of one primitive, whose classes are private; without those nothing is unwrapped.
    """
    inner = eqn.params.get("_prim")
    if type(inner).__name__ == "CheckpointName" and hasattr(ad_checkpoint, "name_p"):
        return ad_checkpoint.name_p, {"name": inner.params["name"]}
    if type(inner).__name__ == "RematTraced" and hasattr(ad_checkpoint, "remat_p"):
        return ad_checkpoint.remat_p, inner.params
    return eqn.primitive, eqn.params


def given_name(eqn: Any) -> str | None:
    """Return the name that `checkpoint_name` gives an equation's result; `None` for other equations."""
    primitive, params = unwrapped(eqn)
    return str(params["name"]) if primitive.name == "name" else None


def watch_regions(look: Callable[[Any, Any], None]) -> None:
    """Call `look` with the policy and the jaxpr of every region that `jax_remat3` makes, ours or not; it may raise.

    It neither hashes nor compares a policy, so a policy that is never called cannot notice. Its class of regions has a
    method to override that sees each region as it is made. Without that class no region is watched.
    """
    region = getattr(ad_checkpoint, "RematTraced", None)
    if region is not None:
        region.check = lambda self, *_: look(self.policy, open_jaxpr(self.jaxpr))


def joins_zeros_of_loops() -> bool:
    """Tell whether one kernel makes the zeros in which a GPU's loops stack values; from JAX 0.12 on none does."""
    return version_of(jax.__version__) < (0, 12)


INLINE = {"inline": getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)}  # of a `jit` equation: up to 0.11 a flag
REGIONS = ("checkpoint", "remat", "remat2")
"""Names of `jax.checkpoint`'s primitive, by version."""


def new_var(aval: Any) -> Any:
    """Make a fresh variable; the constructor of the semi-public `jax.extend.core.Var` takes an aval first."""
    return jex_core.Var(aval)


def is_var(atom: Any) -> bool:
    """Tell whether an atom of a jaxpr is a variable rather than a literal."""
    return not isinstance(atom, jex_core.Literal)


def make_jaxpr_of(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any = None) -> Any:
    """Make a jaxpr without constants from equations; effects on references made inside stay inside.

    It takes over the debug information of the jaxpr `like`, which may be left out where it is not evaluated.
    """
    effects = frozenset(e for eqn in eqns for e in eqn.effects if getattr(e, "input", None) in (None, *invars))
    why, where = (like.debug_info.traced_for, like.debug_info.func_src_info) if like else ("jaxsub", "jaxsub")
    debug = jex_core.DebugInfo(why, where, ("",) * len(invars), ("",) * len(outvars))
    return jex_core.Jaxpr((), tuple(invars), tuple(outvars), list(eqns), effects=effects, debug_info=debug)


def needed_for(results: Sequence[Any], eqns: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Drop equations that results do not need, also what loops carry or stack without need."""
    jaxpr = make_jaxpr_of(eqns, inputs, results)
    return list(dce_jaxpr(jaxpr, [True] * len(results))[0].eqns)


def open_jaxpr(closed: Any) -> Any:
    """Return the open jaxpr of a closed or open one; from 0.11 on there is one class, and `.jaxpr` is itself."""
    return getattr(closed, "jaxpr", closed)


def stores_in(held: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Find JAX's stores (`linear_util.Store`), of what a function returns beside its results, in what that closes over.

    None where a version has others: a store is what can be `reset`; its own functions hold `stores`, and others in `f`.
    """
    seen = set() if seen is None else seen
    if id(held) in seen or type(held).__module__.partition(".")[0] not in ("jax", "builtins", "jaxsub"):
        return
    seen.add(id(held))
    if hasattr(held, "reset") and hasattr(held, "store"):
        yield held
    elif hasattr(held, "stores"):
        for part in (*held.stores, getattr(held, "f", None)):
            yield from stores_in(part, seen)
    elif isinstance(held, FunctionType) and held.__module__.partition(".")[0] == "jax":
        for cell in held.__closure__ or ():
            yield from stores_in(cell.cell_contents, seen)


def shape_of(aval: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Make a shape with what JAX checks: axes of `shard_map` it varies over, explicit ones if it is its own shape."""
    manual, sharding = (getattr(aval, name, None) for name in ("manual_axis_type", "sharding"))
    is_typed = varying(aval) or AxisType.Explicit in getattr(sharding, "mesh", NO_MESH).axis_types
    own = sharding if shape is None or varying(aval) else None
    types: dict[str, Any] = {"manual_axis_type": manual, "sharding": own} if is_typed else {}
    return jax.ShapeDtypeStruct(aval.shape if shape is None else tuple(shape), aval.dtype, **types)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Trace as outside of the user's `jax.set_mesh`; inside `jax.shard_map` its mesh stays."""
    context: contextlib.AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(_manual_mesh())
    return context


def _manual_mesh() -> Any:
    here = jax.sharding.get_abstract_mesh()
    return here if here.manual_axes else NO_MESH


def on_mesh_here(eqn: Any) -> Any:
    """An equation to evaluate on the mesh in use here, which may have other types than the one it was traced on."""
    here = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(here):
        return eqn.replace(ctx=type(eqn.ctx)())


def names_axes(jaxpr: Any) -> bool:
    """Tell whether a jaxpr depends on named axes: those of `shard_map`, or of `vmap` with collectives."""
    return has_collectives(jaxpr) or any(varying(v.aval) for v in open_jaxpr(jaxpr).invars)


def has_collectives(jaxpr: Any) -> bool:
    """Tell whether equations of a jaxpr work along named axes."""
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects)


def varying(aval: Any) -> tuple[str, ...]:
    """The axes of `shard_map` over which a value varies, in the same order in every process."""
    return tuple(sorted(getattr(getattr(aval, "manual_axis_type", None), "varying", ()), key=str))


def axes_in_scope() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Capture the named axes of `shard_map` or `vmap` as a context to trace in later, outside them.

    The sizes of named axes have no public counterpart; without them only the mesh of `shard_map` is re-entered.
    """
    mesh = _manual_mesh()
    sizes = tuple(jax_core.get_axis_env().axis_sizes.items()) if hasattr(jax_core, "get_axis_env") else ()

    checked = getattr(jax_config, "_check_vma", None)  # whether `shard_map` checks the axes that values vary over
    is_checked = checked.value if checked is not None else False

    @contextlib.contextmanager
    def reenter() -> Iterator[None]:
        named = jax_core.extend_axis_env_nd(sizes) if sizes else contextlib.nullcontext()
        checking = checked(is_checked) if checked is not None else contextlib.nullcontext()
        with jax.sharding.use_abstract_mesh(mesh), named, checking:
            yield

    return reenter


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Count a scan's constants and its carried values.

    The parameters are `num_consts` and `num_carry` up to 0.10, from 0.11 on the trees `ft_in` and `ft_out`.
    """
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def inlined_body(eqn: Any) -> Any | None:
    """Return the closed jaxpr of a call that can be inlined without changing its meaning, or `None`.

    `jit` with shardings, layouts or compiler options of its own stays whole, as do calls with a differentiation rule.
    The primitive is called `pjit` before 0.7 and `jit` since; `core_call` was removed after 0.10.
    """
    if eqn.primitive.name in ("closed_call", "core_call"):
        return eqn.params.get("call_jaxpr")
    if eqn.primitive.name not in ("jit", "pjit"):
        return expanded(eqn) if unwrapped(eqn)[0] is eqn.primitive else None
    params = eqn.params
    marks = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in marks) or params.get("compiler_options_kvs"):
        return None
    if any(x is not None for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ()))):
        return None
    return params["jaxpr"]


def within(eqn: Any, caller: Any) -> Any:
    """Make an inlined equation's source information: in its caller's scopes, at the caller's line if it has none."""
    info, outer = eqn.source_info, caller.source_info
    traceback = info.traceback if source_of(eqn) else outer.traceback
    return info.replace(name_stack=outer.name_stack + info.name_stack, traceback=traceback)


def source_of(eqn: Any, *, is_own: bool = False) -> str:
    """The user's line that made an equation, such as `model.py:48 (attention)`; empty where nobody knows.

    With `is_own` lines of installed packages do not count, where the user's own called them.
    `jax._src.source_info_util` has no public counterpart; without it lines are left out.
    """
    if source_info_util is None:
        return ""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if is_own:
        frames = source_info_util.user_frames(eqn.source_info.traceback)
        frame = next((f for f in frames if not f.file_name.startswith(INSTALLED)), frame)
    if frame is None or frame.file_name.startswith(OURS):
        return ""
    folder, file = os.path.split(frame.file_name)
    file = "notebook cell" if os.path.basename(folder).startswith("ipykernel_") else file
    return f"{file}:{frame.start_line} ({frame.function_name.rsplit('.', 1)[-1]})"


def standing_at(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """Give equations traced inside the line and scopes of an equation; there is no public counterpart."""
    if source_info_util is None:
        return contextlib.nullcontext()
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def trace_context() -> tuple[Any, ...]:
    """What the configuration adds to a trace's key: precision, x64, the mesh and so on; the most of it by hand."""
    if jax_config is not None and hasattr(jax_config, "trace_context"):
        context = jax_config.trace_context()
        return context if isinstance(context, tuple) else (context,)
    names = "enable_x64 default_matmul_precision numpy_dtype_promotion debug_nans".split()
    return tuple(getattr(jax.config, f"jax_{name}") for name in names)


def is_staged() -> bool:
    """Tell whether a call here becomes part of what JAX traces; under `vmap` and `jvp` alone it runs at once.

    Without the private traces it is taken to run at once, and JAX says what it does not like.
    """
    trace: Any = getattr(getattr(jax_core, "trace_ctx", None), "trace", None)
    while type(trace).__name__ in ("BatchTrace", "JVPTrace"):
        trace = trace.parent_trace
    return type(trace).__name__ not in ("EvalTrace", "NoneType")


@contextlib.contextmanager
def callbacks_left_out() -> Iterator[None]:
    """Lower host callbacks, in this thread, as their results in memory, which wait for the operands.

    For absent devices: JAX lowers callbacks, privately, for a started backend only. Without that they are refused.
    """
    lowered = getattr(jax_callback, "emit_python_callback", None)
    if lowered is not None and not hasattr(lowered, "__wrapped__"):
        jax_callback.emit_python_callback = _unless_left_out(lowered)
    before = LEFT_OUT.set(True)
    try:
        yield
    finally:
        LEFT_OUT.reset(before)


def _unless_left_out(lowered: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lowered)
    def lower(*args: Any, **kwargs: Any) -> Any:
        if not LEFT_OUT.get():
            return lowered(*args, **kwargs)
        ctx, _, token, operands, avals, found = args[:6]

        def results(*read: Any) -> Any:
            zeros = [jnp.zeros(v.shape, v.dtype) for v in found]
            return jax.lax.optimization_barrier([*zeros, *read])[: len(found)]

        here = ctx.replace(avals_in=tuple(avals), avals_out=tuple(found))
        return mlir.lower_fun(results, multiple_results=True)(here, *operands), token, None

    return lower
