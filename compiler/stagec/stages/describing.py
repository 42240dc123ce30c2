"""The description of an executable that XLA made of a program."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

from jaxlib.mlir import ir

from stagec.backends import analysis
from stagec.backends.compilation import CompiledModule, Hardware
from stagec.bundle.description import Description, DeviceAssignment, Target
from stagec.core.builds.compiler_options import described
from stagec.core.builds.specs import EXAMINED_HERE, ExecutableSpec, Scalar, TargetSpec, target_spec
from stagec.core.builds.version import VERSION
from stagec.core.messages import phases
from stagec.pjrt import compatibility
from stagec.pjrt.custom_calls import TOOLCHAIN, provider
from stagec.stages import abi, mlir
from stagec.stages.data import LoweredData
from stagec.stages.shardings import Mesh, NamedSharding


@phases.phase("analyze")
def describe(
    program: LoweredData,
    target: Target,
    module: CompiledModule,
    hardware: Hardware,
    mesh: Mesh | None,
) -> Description:
    """Describe an executable that comes from no manifest."""
    calls = set(re.findall(r'custom_call_target="([^"]+)"', module.hlo))
    versions = {"jaxlib": compatibility.version(), "stagec": VERSION, **(hardware.versions or {}), **module.examined}
    return Description(
        manifest="",
        function=program.fun_name,
        variant="",
        target=target,
        bucket={},
        in_tree=program.in_tree,
        in_avals=program.flat_in_avals,
        out_tree=program.out_tree,
        out_avals=program.flat_out_avals,
        nr_devices=program.nr_devices,
        device_assignment=_assignment(module, mesh),
        kept_var_idx=program.kept_var_idx,
        donated=program.donated,
        # XLA adds calls and drops dead ones, so look at the optimized program.
        custom_calls={name: _provider(program, name) for name in sorted(calls)},
        cost_analysis=module.cost_analysis,
        memory_analysis=module.memory_analysis,
        analysis=analysis.of_module(module, hardware),
        versions=dict(sorted(versions.items())),
        abi=abi.of_module(program, module.hlo),
        exported_sha256="",
        stablehlo_sha256="",
        executable_sha256=hashlib.sha256(module.executable).hexdigest(),
        executable_bytes=len(module.executable),
        components={},
        avoided=module.avoided,
    )


def mesh_of(program: LoweredData) -> Mesh | None:
    """Return the mesh of the module's shardings: the named one (with types of axes), or the declared one."""
    if program.nr_devices == 1:
        return None
    named = [s.mesh for s in (*program.in_shardings, *program.out_shardings) if isinstance(s, NamedSharding)]
    with mlir.context():
        axes = mlir.mesh(ir.Module.parse(program.module)) or {}
    declared = Mesh(tuple(axes.values()), tuple(axes))
    return next((mesh for mesh in (*named, declared) if mesh.size == program.nr_devices), None)


def _assignment(module: CompiledModule, mesh: Mesh | None) -> DeviceAssignment | None:
    if len(module.device_ids) == 1:
        return None
    axes = (mesh.axis_names, mesh.axis_sizes) if mesh else ((), ())
    return DeviceAssignment(*axes, tuple(module.device_ids), tuple(map(tuple, module.coords)))


def settings(target: TargetSpec) -> dict[str, Scalar]:
    """Return the fields that only targets of this platform have."""
    common = ("name", "platform", "compiler_options")
    return {key: value for key, value in fields(target).items() if key not in common}


def fields(target: TargetSpec) -> dict[str, Any]:
    """Return the fields of a target, with a digest instead of a whole file; `examined` only if it is not "here"."""
    values = dataclasses.asdict(target)
    values["compiler_options"] = described(target.compiler_options)
    if values["examined"] == EXAMINED_HERE:
        del values["examined"]
    if values.get("autotuning_results"):
        values["autotuning_results"] = hashlib.sha256(values["autotuning_results"].encode()).hexdigest()
    return values


def spec_of(description: Description) -> ExecutableSpec:
    """Return the spec of an executable from its description, without limits.

    Raises ValueError if a description does not have all of it: of a file it has the digest alone.
    """
    target = description.target
    for name, fields_of in (("autotuning_results", target.settings), ("fdo_profile", target.compiler_options)):
        if fields_of.get(name):
            raise ValueError(f"it was compiled with a file that the bundle does not have: {name}")
    common = {"name": target.name, "platform": target.platform, "compiler_options": target.compiler_options}
    try:
        rebuilt = target_spec({**target.settings, **common})
    except ValueError:
        raise ValueError("another version of stagec described its target, with other fields") from None
    return ExecutableSpec(description.function, description.manifest, rebuilt, description.bucket, description.variant)


def _provider(program: LoweredData, name: str) -> str:
    """Return who provides a custom call of the optimized program: XLA's compiler, if the module has no such call."""
    return provider(name) if name in program.custom_calls or program.platform == "cpu" else TOOLCHAIN
