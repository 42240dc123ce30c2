"""The JAX frontend: trace the Python function of a manifest and export it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.monitoring
import numpy as np
from jax._src import util

from stagec.building import by_device
from stagec.core.builds import compiler_options
from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import ExecutableSpec, FunctionSpec
from stagec.core.builds.version import VERSION
from stagec.core.messages import phases
from stagec.core.messages.errors import Problem, StagecError
from stagec.frontends.common import closures, entries, patched, repeatable, source_locations, user_code
from stagec.frontends.common.frontend import Export
from stagec.frontends.jax import (
    advice,
    arguments,
    cache_keys,
    callbacks,
    evaluation,
    exporting,
    filtering,
    forwarding,
    kernels,
    premises,
    pytrees,
    wholes,
)
from stagec.jaxcache.jax_entries import Key
from stagec.pjrt import custom_calls
from stagec.stages import mlir

named_arrays, parameters = closures.named_arrays, entries.parameters
T = TypeVar("T")

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
}
"""JAX's events for its listeners after each step (jax/_src/dispatch.py), and our names of the steps."""


@contextlib.contextmanager
def _effects_in_order() -> Iterator[None]:
    """Let JAX list a program's effects by the names of their classes."""

    def in_order(before: Callable[..., list[Any]], kinds: Any, effects: Any) -> list[Any]:
        listed = before(kinds, effects)
        return sorted(listed, key=lambda effect: (type(effect).__module__, type(effect).__qualname__))

    with contextlib.ExitStack() as changes:
        for patch in patched.EFFECTS:
            changes.enter_context(patch.by(in_order))
        yield


@contextlib.contextmanager
def _in_phases() -> Iterator[None]:
    """Record JAX's work by phases."""

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in _PHASES:
            phases.passed(_PHASES[event], duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def export(spec: FunctionSpec, import_roots: Sequence[str]) -> Export:
    """Trace, lower and export the function of `spec`, and say what the trace took for granted."""
    artifact, lowered, is_weak = _traced(spec, import_roots)
    return Export(artifact, lowered, premises.of(entries.function_of(spec, import_roots), is_weak))


@repeatable.clock_and_chance()
@_effects_in_order()
@_in_phases()
def _traced(spec: FunctionSpec, import_roots: Sequence[str]) -> tuple[bytes, bytes, bool]:
    """Return the artifact, JAX's differences by kind of device, and whether a result has a weak type."""
    with callbacks.handling(spec.host_callbacks):
        with contextlib.ExitStack() as device:
            staged = _portable(spec, import_roots, device)
            serialized = _serialize(spec, staged)
        lowered = by_device.write(_for_devices(spec, import_roots, staged))
        return serialized, lowered, any(aval.weak_type for aval in staged.exported.out_avals)


def _serialize(spec: FunctionSpec, staged: Staged) -> bytes:
    exported, jitted, args, kwargs, _ = staged
    trees = {"the arguments have": exported.in_tree, "the result has": exported.out_tree}
    pytrees.check(spec.manifest, spec.key, trees)
    try:
        # JAX keeps its functions under a mesh apart: the vector-Jacobian product is exported here.
        with _over_mesh(spec):
            return pytrees.serialize(exported, spec.vjp_order)
    except Exception as error:  # for a callback in the vector-Jacobian product, or one that has its effect alone
        with _over_mesh(spec):
            jaxpr = callbacks.vjp_jaxpr(jitted, args, kwargs, spec.vjp_order)
        if problems := callbacks.problems(spec, jaxpr):
            raise StagecError(*problems) from error
        raise spec.problem("", f"cannot be serialized: {user_code.displayed(str(error))}") from error


@repeatable.clock_and_chance()
@_effects_in_order()
def export_with_locations(spec: FunctionSpec, import_roots: Sequence[str]) -> str:
    """Return the module of `export` as StableHLO text in which every operation has its location in the user's sources.

    Paths are relative to the import root, or to the folder that holds installed packages.
    """
    with callbacks.handling(spec.host_callbacks), contextlib.ExitStack() as device:
        device.callback(jax.clear_caches)  # JAX would lower again from its cache, with these locations
        exported = _portable(spec, import_roots, device, frames=64).exported
    with mlir.make_context() as context:
        module = mlir.read_artifact(context, exported.mlir_module_serialized)
        source_locations.rewrite(module, import_roots)
        return str(module.operation.get_asm(enable_debug_info=True))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-FX]+")
"""The address of a function in a jaxpr. JAX replaces the digits of most by X, but their number still differs."""


@repeatable.clock_and_chance()
def jaxpr(spec: FunctionSpec, import_roots: Sequence[str]) -> str:
    """Return the jaxpr of the function of `spec`, as a string without addresses or locations in the sources."""
    with callbacks.handling(spec.host_callbacks), contextlib.ExitStack() as device:
        _, jitted, args, kwargs, _ = _portable(spec, import_roots, device)
        with _over_mesh(spec):
            text = jitted.trace(*args, **kwargs).jaxpr.pretty_print(use_color=False)
    return _ADDRESS.sub("", text) + "\n"


@repeatable.clock_and_chance()
def results(
    spec: FunctionSpec, import_roots: Sequence[str], serialized: bytes, values: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Return the result of the function itself under `jax.jit`, without the export."""

    def reference() -> tuple[Callable[..., Any], Any]:
        with callbacks.handling(spec.host_callbacks):
            staged = stage(spec, import_roots)

        def call(*args: Any, **kwargs: Any) -> Any:
            repeatable.again(spec.key)
            if spec.axis_types:
                args = jax.tree.map(functools.partial(_resharded, spec), args, staged.args)
            with callbacks.handling(spec.host_callbacks):
                return staged.jitted(*args, **kwargs)

        return call, jax.tree.structure((staged.args, staged.kwargs))

    def mesh() -> contextlib.AbstractContextManager[Any]:
        return jax.set_mesh(devices_mesh(spec)) if spec.mesh else contextlib.nullcontext()

    return evaluation.results(serialized, values, reference, mesh)


def versions(spec: FunctionSpec) -> dict[str, str]:
    """Return the versions that made an exported artifact: name -> version, of jax and of every imported package."""
    imported = {
        name: module.__version__
        for name, module in sys.modules.items()
        if "." not in name
        and "site-packages" in (getattr(module, "__file__", None) or "")
        and isinstance(getattr(module, "__version__", None), str)
    }
    # The package of the parts of JAX that lower kernels says no version.
    wheels = [plugin.kernels for platform in spec.plugins if (plugin := PLATFORMS[platform].plugin)]
    imported |= {wheel: metadata.version(wheel) for wheel in wheels}
    return {**imported, "jax": jax.__version__, "stagec": VERSION, "python": platform.python_version()}


class Staged(NamedTuple):
    """An exported function, and its trace: the function under `jax.jit` and its abstract arguments.

    depends_on_device: whether JAX may lower another module for a device than for an export.
    """

    exported: jax.export.Exported
    jitted: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    depends_on_device: bool


def _portable(spec: FunctionSpec, import_roots: Sequence[str], device: contextlib.ExitStack, frames: int = 0) -> Staged:
    """Return the result of `stage`. A function that asks for the device gets that of its first target.

    device: contexts to enter then; the caller leaves them after the last use of the result.
    """
    try:
        return stage(spec, import_roots, frames)
    except StagecError as error:
        wanted = kernels.asked_for(error, spec.devices)
        if wanted is None:
            raise
    device.enter_context(kernels.on(wanted))
    with kernels.naming_the_device(wanted):
        return stage(spec, import_roots, frames)


def _for_devices(spec: FunctionSpec, import_roots: Sequence[str], portable: Staged) -> dict[str, bytes]:
    """Return the artifact for each kind of device with another module than the exported artifact."""
    artifacts: dict[str, bytes] = {}
    if not portable.depends_on_device:
        return artifacts
    # An export has operations in a form that the JAX of last month reads, and kernels for one device. An executable is
    # for one compiler and one device, so it comes from what `jax.jit` would lower there.
    for described in spec.devices:
        alone = dataclasses.replace(spec, platforms=(described["platform"],), vjp_order=0)
        device = kernels.Device.from_spec(described)
        with kernels.on(device), kernels.newest():
            with kernels.naming_the_device(device):
                staged = stage(alone, import_roots)
            # Most functions are the same for all devices: then the file is empty, and nothing is compiled from it.
            another = staged.exported.mlir_module_serialized != portable.exported.mlir_module_serialized
            if staged.depends_on_device and another:
                artifacts[described["device_kind"]] = _serialize(alone, staged)
    return artifacts


def stage(spec: FunctionSpec, import_roots: Sequence[str], frames: int = 0) -> Staged:
    """Trace, lower and export. Raises StagecError for every mistake of the user's.

    frames: the most frames of the user's call stack in the module's locations.
    """

    def traced() -> Staged:
        _, entry, options, args, kwargs = prepared
        with _over_mesh(spec), _counting_its_devices():
            args = _split(spec, args, _mesh(spec)) if spec.axis_types else args
            jitted = _jitted(spec, entry, options, args, kwargs, _mesh(spec))
            jaxpr = _trace(spec, jitted, args, kwargs).jaxpr.jaxpr
            try:
                with kernels.noticing_forms() as forms:
                    exported = _export(spec, jitted, args, kwargs)  # JAX does not trace again
            except Exception as error:  # for one in lax.composite JAX has a KeyError
                if problems := callbacks.problems(spec, jaxpr):
                    raise StagecError(*problems) from error
                raise
            kernels.check_plugin(spec, exported.mlir_module_serialized)
            depends = bool(forms) or kernels.are_in(exported.mlir_module_serialized)
            if faults := advice.refused(exported):
                raise StagecError(*(Problem(spec.manifest, spec.key, *fault) for fault in faults.items()))
            return Staged(exported, jitted, args, kwargs, depends)

    with kernels.naming_the_plugin(spec):
        with advice.given(spec):
            prepared = _prepared(spec, import_roots, frames)
        return _running(spec, traced)


def _prepared(
    spec: FunctionSpec, import_roots: Sequence[str], frames: int
) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """Return the user's function, its replacement for `jax.jit`, options, and abstract arguments."""
    _configure(spec)
    # With no frames in locations the bytes do not depend on file names or line numbers; argument names stay.
    jax.config.update("jax_traceback_in_locations_limit", frames)
    function = entries.function_of(spec, import_roots)
    args, kwargs = arguments.arguments(spec, import_roots)
    entries.check_names(spec, function, args, kwargs)
    static = {name: entries.hashable(value) for name, value in spec.static.items()}

    options: dict[str, Any] = {
        "donate_argnums": tuple(spec.donate_argnums) or None,
        "donate_argnames": tuple(spec.donate_argnames) or None,
        "keep_unused": spec.keep_unused,
        "inline": spec.inline,
    }
    bound = entries.bind(function, static) if static else function
    called: Any = forwarding.watched(function, entries.refusal(spec))
    called = entries.bind(called, static) if static else called
    called.__name__ = util.fun_name(bound)  # the module contains it
    entry = wholes.opening(filtering.filtered(bound, (args, kwargs), called), (args, kwargs))
    return function, entry, options, args, kwargs


def _jitted(
    spec: FunctionSpec, entry: Callable[..., Any], options: Mapping[str, Any], args: Any, kwargs: Any, mesh: Any
) -> Any:
    """Return `entry` under `jax.jit`, with shardings over `mesh`. Over Explicit axes, arguments have their own."""
    shardings: dict[str, Any] = {}
    if spec.in_shardings is not None and not spec.axis_types:
        shardings["in_shardings"] = _expand(spec, "in_shardings", spec.in_shardings, args, mesh)
    if spec.out_shardings is not None:
        repeatable.again(spec.key)
        result = jax.eval_shape(entry, *args, **kwargs)
        shardings["out_shardings"] = _expand(spec, "out_shardings", spec.out_shardings, result, mesh)
    return jax.jit(entry, **options, **shardings)


def _split(spec: FunctionSpec, args: Any, mesh: Any) -> Any:
    """Return arguments with their shardings over `mesh`, as arrays of a program have them.

    Over Explicit axes, the split is a part of a type. `in_shardings` of `jax.jit` are not: JAX then traces other types.
    """
    if spec.in_shardings is None:
        return args
    leaves, structure = jax.tree.flatten(args)
    expanded = _expand(spec, "in_shardings", spec.in_shardings, args, mesh)
    shardings = jax.tree.leaves(expanded, is_leaf=lambda node: node is None)
    split = [
        leaf if sharding is None else leaf.update(sharding=sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, split)


def _resharded(spec: FunctionSpec, value: Any, placeholder: Any) -> Any:
    """Return an array with the type of its placeholder: split over Explicit axes. XLA splits it over the others."""
    if getattr(placeholder, "sharding", None) is None:
        return value
    explicit = {name for (name, _), kind in zip(spec.mesh, spec.axis_types, strict=True) if kind == "Explicit"}
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in placeholder.sharding.spec]
    parts = [tuple(name for name in entry if name in explicit) for entry in entries]
    return jax.sharding.reshard(value, jax.sharding.PartitionSpec(*(part or None for part in parts)))


def _trace(spec: FunctionSpec, jitted: Any, args: Any, kwargs: Any) -> Any:
    failed = f"staging {spec.entry} raised"
    return entries.traced(spec, lambda: jitted.trace(*args, **kwargs), failed, args, kwargs)


def _running(spec: FunctionSpec, traced: Callable[[], T]) -> T:
    with advice.given(spec):
        return user_code.run(traced, f"staging {spec.entry} raised", spec.manifest, spec.key)


@repeatable.clock_and_chance()
@_effects_in_order()
@_in_phases()
def jax_keys(
    spec: FunctionSpec, executable: ExecutableSpec, import_roots: Sequence[str], ways: Sequence[Sequence[int]]
) -> list[Key]:
    """Return the keys under which JAX looks up the executable of a function in its compilation cache.

    One part is the module in `jax.jit`'s lowering for the target. The devices are CPUs, as many as the mesh has: the
    compiler adds the key's parts for other devices. A function that JAX compiles already, such as one under `jax.jit`
    or `eqx.filter_jit`, is lowered unchanged. This must be the first use of JAX's devices.
    ways: for each key, positions of the arguments that lie on a device that the program chose.
    Raises StagecError for every mistake of the user's.
    """
    target = executable.target
    if spec.mesh:
        jax.config.update("jax_num_cpu_devices", math.prod(length for _, length in spec.mesh))
    device = next((d for d in spec.devices if d["platform"] == target.platform), None) if target.jax_device() else None
    fields, flags = compiler_options.split(compiler_options.checked(target.compiler_options))
    options = {**fields, **dict(flags)} or None
    keys = []
    with contextlib.ExitStack() as changes:
        if device:
            changes.enter_context(kernels.on(kernels.Device.from_spec(device)))
            changes.enter_context(kernels.newest())
        for way in ways:
            lowered = _running(spec, functools.partial(_lower_for_jax, spec, executable, import_roots, way))
            compile_ = functools.partial(lowered.compile, *([options] if options else []))
            key, calls_back = cache_keys.key_of(compile_)
            keys.append(dataclasses.replace(key, mesh=[length for _, length in spec.mesh], committed=list(way)))
    if calls_back:
        what = f"{spec.entry} calls back into Python, and JAX keeps no executable of such a function"
        raise spec.problem("jax_cache", what, "write jax_cache = false for this function, or take the callback out")
    return keys


def _lower_for_jax(
    spec: FunctionSpec, executable: ExecutableSpec, import_roots: Sequence[str], committed: Sequence[int]
) -> Any:
    """Return the function that `jax.jit` lowers, or another of JAX's ways to compile a function."""
    function, entry, options, args, kwargs = _prepared(spec, import_roots, 0)
    if too_large := [position for position in committed if position >= len(args)]:
        what = f"there is no argument {too_large[0]}: the function has {len(args)} positional arguments"
        raise spec.problem("jax_cache_committed", what, "count from 0")
    there = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    anywhere = functools.partial(arguments.in_bucket, executable, None)
    here = functools.partial(arguments.in_bucket, executable, there)
    placed = [here if i in committed else anywhere for i in range(len(args))]
    args = tuple(map(jax.tree.map, placed, args))
    kwargs = jax.tree.map(anywhere, kwargs)
    mesh = devices_mesh(spec) if spec.mesh else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        if spec.axis_types or hasattr(function, "lower"):
            args = _split(spec, args, mesh)
        if hasattr(function, "lower"):
            args, kwargs = filtering.opened(wholes.opened((args, kwargs)))
            if type(function).__module__.partition(".")[0] == "equinox":  # all but arrays is static there
                args, kwargs = jax.tree.map(arguments.zeros, (args, kwargs))
            repeatable.again(spec.key)
            return function.lower(*args, **kwargs, **spec.static)
        jitted = _jitted(spec, entry, options, args, kwargs, mesh)
        return _trace(spec, jitted, args, kwargs).lower(lowering_platforms=(executable.target.platform,))


def _export(spec: FunctionSpec, jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.export.Exported:
    """Export with the checks that the manifest leaves on, custom calls that this jaxlib provides allowed."""
    check = jax.export.DisabledSafetyCheck
    disabled = [check.platform()] if "platform" in spec.disabled_checks else []
    disabled += [check.custom_call(target) for target in spec.allow_custom_calls]

    def allow(calls: Sequence[str]) -> None:
        unknown = [name for name in calls if custom_calls.provider(name) == custom_calls.UNKNOWN]
        if unknown:
            raise spec.unknown_custom_calls(unknown)

    return exporting.export(jitted, args, kwargs, spec.platforms, disabled, allow)


def _mesh(spec: FunctionSpec) -> jax.sharding.AbstractMesh:
    """The mesh of a function: axes without devices; an empty one if it has none."""
    # Later versions of JAX have other types for axes unless told.
    types = tuple(jax.sharding.AxisType[kind] for kind in spec.axis_types or ("Auto",) * len(spec.mesh))
    names = tuple(name for name, _ in spec.mesh)
    return jax.sharding.AbstractMesh(tuple(size for _, size in spec.mesh), names, axis_types=types)


@contextlib.contextmanager
def _over_mesh(spec: FunctionSpec) -> Iterator[None]:
    """Trace and lower over the mesh of a function, but do not split sizes: who reads the artifact computes them."""

    def without(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), axis_types=())):
            return before(*args, **kwargs)

    with contextlib.ExitStack() as changes:
        for patch in patched.SIZES if spec.axis_types else ():
            changes.enter_context(patch.by(without))
        changes.enter_context(jax.sharding.use_abstract_mesh(_mesh(spec)))
        yield


@contextlib.contextmanager
def _counting_its_devices() -> Iterator[None]:
    """Lower for all devices of the mesh around, as `jax.jit` does under `jax.set_mesh`."""

    def context_mesh(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mesh, around = before(*args, **kwargs), jax.sharding.get_abstract_mesh()
        return around if mesh.empty and not around.empty else mesh

    with patched.CONTEXT_MESH.by(context_mesh):
        yield


def devices_mesh(spec: FunctionSpec) -> jax.sharding.Mesh:
    """Return the mesh of a function that has one, over the first devices of this process."""
    mesh = _mesh(spec)
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def _expand(spec: FunctionSpec, key: str, prefix: Any, tree: Any, mesh: Any) -> Any:
    """Return `tree` with a sharding instead of each leaf; `prefix` has them (`entries.partitions_of`)."""
    shardings = []
    for partition in entries.partitions_of(spec, key, prefix, tree, _below, lambda node: len(jax.tree.leaves(node))):
        axes = [names[0] if len(names) == 1 else names or None for names in partition or ()]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        shardings.append(None if partition is None else sharding)
    return jax.tree.unflatten(jax.tree.structure(tree), shardings)


def _below(node: Any) -> list[tuple[str, Any]] | None:
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)[0]
    named = [(jax.tree_util.keystr(steps, simple=True), child) for steps, child in below]
    return None if [name for name, _ in named] == [""] else named


def _configure(spec: FunctionSpec) -> None:
    """Apply the manifest's settings for tracing to the rest of this process, which traces one function."""
    os.environ.update(spec.environment)
    # An export starts a client. One of a device would take its memory, or wait for the process that has it.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", spec.enable_x64)
    jax.config.update("jax_default_matmul_precision", spec.matmul_precision)
    # Also where it is the default: a variable of the machine may say another one (JAX_DEFAULT_PRNG_IMPL).
    jax.config.update("jax_default_prng_impl", spec.prng_impl or "threefry2x32")
    # The user's own frames are picked out here; JAX's filter would add a note of its own to the exception.
    jax.config.update("jax_traceback_filtering", "off")
