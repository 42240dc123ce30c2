"""Build for a manifest: make the executable of a target and a bucket from an exported artifact, within its limits."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from stagec.backends import compilation
from stagec.backends.compilation import CannotCompile, DoesNotFit
from stagec.building import by_device, inventory, limits
from stagec.core.builds import components, naming
from stagec.core.builds.specs import ExecutableSpec
from stagec.core.builds.version import VERSION
from stagec.core.messages import phases
from stagec.core.messages.errors import Problem, StagecError, nearest
from stagec.core.sizes.avals import dimension_variables
from stagec.core.trees.tree import argument_path
from stagec.hardware import autotuning
from stagec.pjrt import compatibility
from stagec.stages import locations, mlir
from stagec.stages.compiled import Compiled
from stagec.stages.describing import fields
from stagec.stages.errors import CannotLower, NotExported
from stagec.stages.exported import Exported
from stagec.stages.lowered import Lowered
from stagec.stages.lowering import lower_exported
from stagec.stages.shardings import NamedSharding

_CONVOLUTION = '"__cudnn$conv'
_EXPORT_WITH_AN_OLDER = "let the lock of the build have the oldest jax and jaxlib: newer ones read what it exports"


def compile_exported(
    serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"", itemized: bool = False
) -> Compiled:
    """Specialize a serialized `Exported` to a bucket and compile it for a target, as `spec` says.

    lowered_for: JAX's modules for devices, if they differ from the exported module (`by_device`). The executable then
        comes from them.
    itemized: whether to take its inventory.
    The process must have been prepared by the platform's backend. Raises StagecError when it cannot be lowered or
    compiled, or is over a limit.
    """
    with mlir.context():
        exported, lowered = lower(serialized, spec, lowered_for)
        compiled = _compile(exported, lowered, spec)
        stablehlo = mlir.to_portable(lowered.module)
        described = compiled.description._replace(
            manifest=spec.manifest,
            function=spec.function,
            variant=spec.variant,
            bucket=dict(sorted(spec.bucket.items())),
            exported_sha256=hashlib.sha256(serialized).hexdigest(),
            stablehlo_sha256=hashlib.sha256(stablehlo).hexdigest(),
            components=_made_from(exported, lowered, spec),
        )
        hardware = compilation.backend(spec.target.platform).hardware(spec.target)
        names = functools.partial(_names, exported, lowered)
        compiled = dataclasses.replace(compiled, description=described, stablehlo=stablehlo)
        problems = list(limits.exceeded(compiled, hardware, names, spec))
        if problems:
            raise StagecError(*problems)
        taken = inventory.take(compiled, hardware, names(), spec) if itemized else None
    return dataclasses.replace(compiled, inventory=taken)


def optimize(serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"") -> tuple[Compiled, str]:
    """Return XLA's result for the program of `compile_exported`, even if it is over a limit; and its kernels as PTX.

    PTX is "" for other platforms than cuda, and where XLA makes none: an executable does not keep it, so XLA writes it
    to a folder meanwhile.
    The process must have been prepared by the platform's backend. Raises StagecError when it cannot be lowered or
    compiled.
    """
    program = lower(serialized, spec, lowered_for)
    if spec.target.platform != "cuda":
        return _compile(*program, spec), ""
    with tempfile.TemporaryDirectory(prefix="stagec-") as scratch:
        dumped = {**spec.target.compiler_options, "xla_dump_to": scratch, "xla_dump_hlo_as_proto": False}
        target = dataclasses.replace(spec.target, compiler_options=dumped)
        compiled = _compile(*program, dataclasses.replace(spec, target=target))
        # Threads make them, in no order; where there is no more to make, a module is empty.
        return compiled, "\n".join(sorted(filter(None, (path.read_text() for path in Path(scratch).glob("*.ptx")))))


def _compile(exported: Exported, lowered: Lowered, spec: ExecutableSpec) -> Compiled:
    try:
        return lowered.compile(target=spec.target)
    except DoesNotFit as error:
        avals = [lowered.flat_in_avals[i] for i in lowered.kept_var_idx]
        message = limits.does_not_fit(error, _names(exported, lowered), avals, lowered.nr_devices, spec)
        raise StagecError(message) from error
    except CannotCompile as error:
        raise problem(error, spec, _how_to_locate(error, lowered)) from error


def made_from(serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"") -> components.Table:
    """Return the components of the executable that `compile_exported` makes of the same, without compiling.

    Raises StagecError when it cannot be lowered.
    """
    return _made_from(*lower(serialized, spec, lowered_for), spec)


@phases.phase("refine")
def lower(serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"") -> tuple[Exported, Lowered]:
    """Specialize a serialized `Exported` as `spec` says; return it, or that for the target's device, too.

    Raises StagecError when it cannot be.
    """
    try:
        exported = Exported.deserialize(by_device.read(lowered_for, spec.target) or serialized)
        _check_bucket(exported, spec)
        return exported, lower_exported(exported, spec.target.platform, spec.bucket)
    except (NotExported, CannotLower) as error:
        write = _EXPORT_WITH_AN_OLDER if isinstance(error.__cause__, mlir.TooNew) else ""
        raise StagecError(Problem(spec.manifest, spec.key, str(error), write)) from error


def _check_bucket(exported: Exported, spec: ExecutableSpec) -> None:
    """Refuse sizes of dimensions that no argument has; a manifest whose arguments Python makes cannot know them."""
    dims = {dim for aval in exported.in_avals for dim in dimension_variables(aval.shape)}
    unknown = sorted(spec.bucket.keys() - dims)
    if unknown:
        where = f"functions.{spec.function}.buckets"
        whats = {dim: f'no argument has a dimension "{dim}"' for dim in unknown}
        problems = (
            Problem(spec.manifest, f"{where}.{dim}", what, nearest(dim, dims) or "leave it out")
            for dim, what in whats.items()
        )
        raise StagecError(*problems)


def _made_from(exported: Exported, lowered: Lowered, spec: ExecutableSpec) -> components.Table:
    backend = compilation.backend(spec.target.platform)
    try:
        hardware = backend.hardware(spec.target)
    except CannotCompile as error:
        raise problem(error, spec) from error
    target, arguments = fields(spec.target), range(len(lowered.flat_in_avals))
    # A target's name is in no bytes of an executable: two names for one device must not look like a reason to build
    # again. The other two have a row for each of their entries.
    shown_otherwise = ("name", "compiler_options", "figures")
    paths = [*map(argument_path, lowered.in_tree.paths()), *lowered.out_tree.paths("result")]
    avals = zip(paths, (*lowered.flat_in_avals, *lowered.flat_out_avals), strict=True)
    shardings = zip(paths, (*lowered.in_shardings, *lowered.out_shardings), strict=True)
    values: dict[str, object] = {
        **{f"aval {path}": str(aval) for path, aval in avals},
        **{f"bucket {name}": size for name, size in sorted(spec.bucket.items())},
        "donated arguments": [i for i in arguments if lowered.donated[i]],
        "unused arguments": sorted({*arguments} - {*lowered.kept_var_idx}),
        **{f"sharding {path}": _told(sharding) for path, sharding in shardings if sharding},
        **{f"target {key}": value for key, value in target.items() if key not in shown_otherwise},
        "target device_kind": hardware.device_kind,
        "target requires": list(hardware.requires),
        **{f"target figure {key}": value for key, value in target.get("figures", {}).items()},
        **{f"compiler option {key}": value for key, value in target["compiler_options"].items()},
        "jaxlib": compatibility.version(),
        "stagec": VERSION,
        **(hardware.versions or {}),
        **{f"environment {name}": value for name, value in sorted(backend.environment(spec.target).items())},
    }
    source = components.source(spec.function, exported.mlir_module_serialized)
    return {**source, **components.table(values)}


def notices(spec: ExecutableSpec, avoided: Mapping[str, str], hlo: str) -> Iterator[Problem]:
    """Yield warnings about what was compiled: known defects of XLA, and convolutions that nobody has timed.

    avoided: the defects that it was compiled around, as `CompiledModule` has them. hlo: the optimized program.
    """
    if avoided:
        options = ", ".join(dict.fromkeys(avoided.values()))
        what = f"jaxlib {compatibility.version()} has a defect that this program meets ({', '.join(avoided)})"
        yield Problem(spec.manifest, spec.key, f"warning: {what}: it is compiled with {options}")
    target = spec.target
    if target.platform == "cuda" and _CONVOLUTION in hlo and not autotuning.read(target.autotuning_results):
        what = "warning: a convolution that nobody has timed takes cuDNN's first engine: one took 15 ms so, timed 0.06"
        yield Problem(spec.manifest, spec.key, what, "time it on such a device: docs/accelerators.md#autotuning")


def problem(error: CannotCompile, spec: ExecutableSpec, write: str = "") -> StagecError:
    """Return the error of an executable with its place in the manifest. write: the advice, if `error` has none."""
    key = f"targets.{spec.target.name}.{error.key}" if error.key else spec.key
    return StagecError(Problem(spec.manifest, key, str(error), error.write or write))


def _how_to_locate(error: CannotCompile, lowered: Lowered) -> str:
    """Explain how to find the lines of the model behind XLA's message; "" if it names no operation."""
    with mlir.make_context():
        operations = locations.of_module(ir.Module.parse(lowered.module))
    named = locations.locate(str(error.__cause__ or error), operations)
    names = list(dict.fromkeys(operation.name or operation.target or operation.opcode for operation in named))
    if not names:
        return ""
    return (
        f"it is about {', '.join(names)}; to see the lines, build the function with --output_groups=debug and write\n"
        f"stagec inspect FILE.debug.mlir --locate {shlex.quote(names[0])}"
    )


def _told(sharding: Any) -> str:
    """Return a sharding as a string for a reader."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    return f"{sharding.spec} over {naming.sizes(sharding.mesh.shape)}"


def _names(exported: Exported, lowered: Lowered) -> list[str]:
    """A person's name for each argument that the program takes: "params['w']", with the parameter's name.

    JAX stores this name in the module; without it, "args[0]['w']".
    """
    paths = list(exported.in_tree.paths())
    # The module lists only arguments that it uses, so a name belongs to one of `kept_var_idx`.
    stored = mlir.argument_names(exported.mlir_module_serialized, len(lowered.kept_var_idx))
    return [name or argument_path(paths[i]) for name, i in zip(stored, lowered.kept_var_idx, strict=True)]
