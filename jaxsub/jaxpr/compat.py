"""What differs between JAX versions: the only file that asks for one or touches `jax._src`; functions say for which."""
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.ad_checkpoint import checkpoint_name as jax_checkpoint_name
from jax.interpreters.partial_eval import dce_jaxpr

try:
    from jax._src import ad_checkpoint, source_info_util
    from jax._src import config as jax_config
    from jax._src import core as jax_core
except ImportError:  # private: may go in any version
    ad_checkpoint = jax_config = jax_core = source_info_util = None  # type: ignore[assignment]

# Any of these files means that an NVIDIA driver is installed: on Linux, on Linux under Windows, on Jetson.
NVIDIA_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))


def version_of(text: str) -> tuple[int, ...]:
    """Read the leading numbers of a version: `"0.11.0.dev3"` is `(0, 11, 0)`."""
    return tuple(map(int, itertools.takewhile(str.isdigit, text.split("."))))


def cpu_compiler_options(version: str = jax.__version__) -> dict[str, str]:
    """Options for a compile on the CPU that keep rematerialisation; 0.10.0 to 0.11.0 need one, later ones none.

    Those versions expand optimization barriers before a later pass merges equal expressions, so every straight-line
    recomputation is merged away. What it merges may be a copy that an update in place needs: values can then be wrong
    (`dynamic_update_slice` of what a barrier lets through, tests/devices/test_compile.py).
    Other backends refuse to compile without that pass: never give them this option.

    Args:
        version: The JAX version to decide for.

    Returns:
        Options for `jax.stages.Lowered.compile`.

    Example:
        >>> cpu_compiler_options("0.10.2")
        {'xla_disable_hlo_passes': 'cse_barrier_expander'}
        >>> cpu_compiler_options("0.11.2")
        {}
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if (0, 10) <= version_of(version) <= (0, 11, 0) else {}


def cpu_measuring_options() -> dict[str, Any]:
    """Options for a compile on the CPU whose program is never run, only its memory read.

    Buffers are assigned before machine code is made, so code that is not optimised says the same of memory and of
    FLOPs, and is there in two thirds of the processor time (`tests/devices/test_compile.py` compares the two).

    Example:
        >>> cpu_measuring_options()["xla_backend_optimization_level"]
        0
    """
    return {**cpu_compiler_options(), "xla_backend_optimization_level": 0}


def remat_flavour(version: str = jax.__version__) -> str:
    """Which of JAX's two `jax.checkpoint`s makes our regions; what was measured with one says nothing of the other.

    That is the one in use, but before JAX 0.11 always the older: there `jax_remat3` puts no barrier in a region's
    backward pass, so that regions save no memory, and cannot map (vmap) what they save.
    """
    return "remat3" if getattr(jax.config, "jax_remat3", False) and version_of(version) >= (0, 11) else "remat2"


def saves_in_nests() -> bool:
    """Whether a region inside another saves what its policy names; `jax_remat3` makes it again."""
    return remat_flavour() == "remat2"


def _of_our_flavour() -> contextlib.AbstractContextManager[Any]:
    """Where regions and names are made: the flag is turned off where it is on and `remat_flavour` is the older one."""
    is_other = getattr(jax.config, "jax_remat3", False) and remat_flavour() == "remat2"
    flag = getattr(jax_config, "remat3", None) if is_other else None
    return flag(False) if flag is not None else contextlib.nullcontext()


def checkpoint(fun: Callable[..., Any], *, policy: Any = None, prevent_cse: bool = True) -> Callable[..., Any]:
    """`jax.checkpoint` of our flavour."""
    with _of_our_flavour():
        return jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)


def checkpoint_name(x: Any, name: str) -> Any:
    """`jax.ad_checkpoint.checkpoint_name` of our flavour; `jax_remat3` in 0.11 rounds only the saved copy, this all."""
    is_narrow = x.dtype.name in ("bfloat16", "float16")
    if is_narrow and remat_flavour() == "remat3" and version_of(jax.__version__) < (0, 12):
        x = jax.lax.reduce_precision(x, (info := jax.numpy.finfo(x.dtype)).nexp, info.nmant)
    with _of_our_flavour():
        return jax_checkpoint_name(x, name)


def ignores_policies() -> bool:
    """Whether `jax.checkpoint` now recomputes some results without asking the policy: with `jax_remat3`."""
    return bool(getattr(jax.config, "jax_remat3", False)) and "sin" not in asked_by_remat3()


def ignores_our_policies() -> bool:
    """Whether `checkpoint` here does so."""
    return remat_flavour() == "remat3" and ignores_policies()


@functools.cache
def asked_by_remat3() -> frozenset[str]:
    """The primitives that `jax_remat3` asks a policy about: none before 0.12, then products, convolutions and names.

    All else is recomputed silently; so a policy is watched for what it is asked. Call it with the flag on.
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
    """Whether `jax_remat3` carries out a policy by its class, without asking it; so did 0.10 with some of JAX's own."""
    known = (
        getattr(ad_checkpoint, name, None) for name in ("DotsSaveable", "SaveOnlyTheseNames", "SaveAnyNamesButThese")
    )
    return isinstance(policy, tuple(kind for kind in known if isinstance(kind, type)))


def unwrapped(eqn: Any) -> tuple[Any, dict[str, Any]]:
    """An equation's primitive and parameters, those of names and regions as they are without `jax_remat3`.

    With it, both are parameters of one primitive, whose classes are private; without those nothing is unwrapped.
    """
    inner = eqn.params.get("_prim")
    if type(inner).__name__ == "CheckpointName" and hasattr(ad_checkpoint, "name_p"):
        return ad_checkpoint.name_p, {"name": inner.params["name"]}
    if type(inner).__name__ == "RematTraced" and hasattr(ad_checkpoint, "remat_p"):
        return ad_checkpoint.remat_p, inner.params
    return eqn.primitive, eqn.params


def given_name(eqn: Any) -> str | None:
    """What `checkpoint_name` calls an equation's result, with `jax_remat3` or without; `None` of other equations."""
    primitive, params = unwrapped(eqn)
    return str(params["name"]) if primitive.name == "name" else None


def watch_regions(look: Callable[[Any, Any], None]) -> None:
    """Call `look` with the policy and the jaxpr of every region that `jax_remat3` makes, whoever asked for it.

    It neither hashes nor compares a policy, so that a policy that is never called cannot notice. Its class of regions
    leaves a method to be overridden that sees each region as it is made. Without that class nothing is watched.

    Args:
        look: What is called; it may raise.
    """
    region = getattr(ad_checkpoint, "RematTraced", None)
    if region is not None:
        region.check = lambda self, *_: look(self.policy, open_jaxpr(self.jaxpr))


REGIONS = ("checkpoint", "remat", "remat2")
"""What `jax.checkpoint`'s primitive is called, by version."""


def new_var(aval: Any) -> Any:
    """A fresh variable; `jax.extend.core.Var` is semi-public, its constructor takes an aval first in every version."""
    return jex_core.Var(aval)


def is_var(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a variable rather than a literal."""
    return not isinstance(atom, jex_core.Literal)


def make_jaxpr_of(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any = None) -> Any:
    """A jaxpr without constants over given equations; effects on references made inside stay inside.

    Args:
        eqns: Its equations, in order.
        invars: Its inputs.
        outvars: Its outputs, variables or literals.
        like: A jaxpr whose debug information it carries on; `None` if it is only looked at.
    """
    effects = frozenset(e for eqn in eqns for e in eqn.effects if getattr(e, "input", None) in (None, *invars))
    why, where = (like.debug_info.traced_for, like.debug_info.func_src_info) if like else ("jaxsub", "jaxsub")
    debug = jex_core.DebugInfo(why, where, ("",) * len(invars), ("",) * len(outvars))
    return jex_core.Jaxpr((), tuple(invars), tuple(outvars), list(eqns), effects=effects, debug_info=debug)


def needed_for(results: Sequence[Any], eqns: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Equations as far as some results need them; of loops only what they carry or stack for those.

    Args:
        results: Variables or literals.
        eqns: Equations, in order, that make them.
        inputs: What else the equations read.
    """
    jaxpr = make_jaxpr_of(eqns, inputs, results)
    return list(dce_jaxpr(jaxpr, [True] * len(results))[0].eqns)


def sliced_where_used(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Equations in which an array is taken apart by slices, each where it is read first.

    From 0.12 on JAX takes an array that is iterated over apart by one equation, `unstack`; before by slices. All its
    parts would then cross every cut between what stands before and what stands after the equation.
    """
    if not any(eqn.primitive.name == "unstack" for eqn in eqns):
        return list(eqns)
    parts: dict[Any, tuple[Any, int]] = {}
    found: list[Any] = []

    def take(atoms: Sequence[Any]) -> None:
        for var in dict.fromkeys(a for a in atoms if is_var(a)):
            if var in parts:
                eqn, i = parts.pop(var)
                take(eqn.invars)
                found.extend(_slice_eqns(eqn, i, var))

    for eqn in eqns:
        if eqn.primitive.name == "unstack":
            parts.update((var, (eqn, i)) for i, var in enumerate(eqn.outvars))
        else:
            take(eqn.invars)
            found.append(eqn)
    take(outvars)
    return found


def _slice_eqns(eqn: Any, i: int, var: Any) -> list[Any]:
    """The equations that make one part of what an `unstack` takes apart."""
    axis = eqn.params["axis"]
    traced = jax.make_jaxpr(lambda x: jax.lax.index_in_dim(x, i, axis, keepdims=False))(shape_of(eqn.invars[0].aval))
    jaxpr = open_jaxpr(traced)
    names = {jaxpr.invars[0]: eqn.invars[0], jaxpr.outvars[0]: var}
    return [
        inner.replace(
            invars=[names.get(a, a) if is_var(a) else a for a in inner.invars],
            outvars=[names.get(v, v) for v in inner.outvars],
            source_info=eqn.source_info,
        )
        for inner in jaxpr.eqns
    ]


def open_jaxpr(closed: Any) -> Any:
    """The open jaxpr of a closed one, an open one itself; one class from 0.11 on, where `.jaxpr` is the same object."""
    return getattr(closed, "jaxpr", closed)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype, and inside `shard_map` the axes that it varies over, which JAX checks."""
    manual = getattr(aval, "manual_axis_type", None)
    varies = {"manual_axis_type": manual, "sharding": aval.sharding} if getattr(manual, "varying", ()) else {}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **varies)


def fence(values: Sequence[Any]) -> list[Any]:
    """Put values behind one barrier; in `shard_map`, where JAX 0.10 would change their types, one for each kind."""
    types = [jax.typeof(x) for x in values]
    fenced = list(jax.lax.optimization_barrier(list(values)))
    if [jax.typeof(x) for x in fenced] == types:
        return fenced
    axes = [frozenset(t.manual_axis_type.varying) for t in types]
    for kind in dict.fromkeys(axes):
        places = [i for i, a in enumerate(axes) if a == kind]
        for i, x in zip(places, jax.lax.optimization_barrier([values[i] for i in places]), strict=True):
            fenced[i] = x
    return fenced


def names_axes(jaxpr: Any) -> bool:
    """Whether a jaxpr means something only under named axes: those of `shard_map`, or of `vmap` with collectives."""
    varies = (getattr(getattr(v.aval, "manual_axis_type", None), "varying", ()) for v in open_jaxpr(jaxpr).invars)
    return any(type(e).__name__ == "NamedAxisEffect" for e in jaxpr.effects) or any(varies)


def axes_in_scope() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What names axes now, inside `shard_map` or `vmap`, as a context to trace in later, when that is over.

    The sizes of named axes have no public counterpart; without them only the mesh is entered again.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = tuple(jax_core.get_axis_env().axis_sizes.items()) if hasattr(jax_core, "get_axis_env") else ()

    checked = getattr(jax_config, "_check_vma", None)  # whether `shard_map` looks at the axes that values vary over
    is_checked = checked.value if checked is not None else False

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        named = jax_core.extend_axis_env_nd(sizes) if sizes else contextlib.nullcontext()
        looked_at = checked(is_checked) if checked is not None else contextlib.nullcontext()
        with jax.sharding.use_abstract_mesh(mesh), named, looked_at:
            yield

    return again


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are carried.

    The parameters are `num_consts` and `num_carry` up to 0.10, from 0.11 on the trees `ft_in` and `ft_out`.
    """
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def inlined_body(eqn: Any) -> Any | None:
    """The closed jaxpr of a call that may be inlined without changing what it means, or `None`.

    `jit` with shardings, layouts or compiler options of its own stays whole, and so does everything that carries
    a differentiation rule. The primitive is called `pjit` before 0.7 and `jit` since; `core_call` goes after 0.10.
    """
    if eqn.primitive.name in ("closed_call", "core_call"):
        return eqn.params.get("call_jaxpr")
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    params = eqn.params
    marks = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in marks) or params.get("compiler_options_kvs"):
        return None
    if any(x is not None for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ()))):
        return None
    return params["jaxpr"]


def within(eqn: Any, caller: Any) -> Any:
    """The source information of an inlined equation, in its caller's scopes; the caller's line where it has none."""
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
    """Have what is traced inside stand at an equation's line and in its scopes; has no public counterpart."""
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


# The CUDA plugin on a machine without a GPU


def quiet_cuda_plugin(drivers: Sequence[str] = NVIDIA_DRIVERS) -> None:
    """Spare a user without a GPU the traceback that JAX prints at its first use once `jaxsub[targets]` is installed.

    The extra brings JAX's CUDA plugin, to compile with. Where there is no driver (none of the files `drivers`) it
    cannot start, and JAX prints why, at length, unless a platform was chosen. Then, and only then, it is not started:
    the device in use stays the CPU. Call it before JAX's first use.
    """
    if any(map(os.path.exists, drivers)):
        return
    for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        try:
            plugin: Any = importlib.import_module(name)
        except ImportError:
            continue
        if not hasattr(plugin.initialize, "__wrapped__"):
            plugin.initialize = _only_if_asked(plugin.initialize)


def _only_if_asked(initialize: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(initialize)
    def initialize_if_asked() -> None:
        if getattr(jax.config, "jax_platforms", None):
            initialize()

    return initialize_if_asked
