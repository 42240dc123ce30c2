"""Compiling a program for a target, or for the CPU in front of us, without JAX."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from jaxlib.mlir import ir

from stagec.backends import compilation
from stagec.backends.compilation import CannotCompile
from stagec.bundle.description import Target
from stagec.core.builds.compiler_options import described
from stagec.core.builds.specs import CompilerOption, TargetSpec
from stagec.core.messages import phases
from stagec.pjrt import clients, probe
from stagec.pjrt.custom_calls import register_custom_calls
from stagec.pjrt.executable import donation_refusal
from stagec.stages import mlir
from stagec.stages.compiled import Compiled
from stagec.stages.data import LoweredData
from stagec.stages.describing import describe, mesh_of, settings
from stagec.stages.on_host import compile_for_host


def compile_program(program: LoweredData, options: Mapping[str, CompilerOption], target: TargetSpec | None) -> Compiled:
    """Compile for the CPU in front of us, or for a named target; see `Lowered.compile`."""
    refusal = probe.refusal()
    if refusal:
        raise CannotCompile(refusal)
    options = compilation.checked(options)
    platform = target.platform if target else "cpu"
    if program.platform != platform:
        raise CannotCompile(
            f"{program.fun_name} is lowered for {program.platform}; "
            f"{f'target {target.name} is for' if target else 'without a target, it is compiled for'} {platform}"
        )
    unsuitable = donation_refusal(platform, *program.memory_of_parameters())
    if platform == "cpu":
        unsuitable = unsuitable or clients.too_many(program.nr_devices)
    if unsuitable:
        raise CannotCompile(f"{program.fun_name} cannot be called: {unsuitable}")
    if target is None:
        return compile_for_host(program, options)
    if platform == "cpu":
        register_custom_calls(program.custom_calls)
    backend = compilation.backend(platform)
    if any(os.environ.get(name) != value for name, value in backend.environment(target).items()):
        raise CannotCompile(
            f"this process is not prepared to compile for {target.name}: call prepare_process(target) "
            f"of stagec.backends.{platform}.compiler before jaxlib is first used, "
            "or compile for this machine (target=None)"
        )
    named = dataclasses.replace(target, compiler_options={**target.compiler_options, **options})
    hardware, mesh = backend.hardware(named), mesh_of(program)
    sizes = mesh.axis_sizes if mesh else (program.nr_devices,) if program.nr_devices > 1 else ()
    with phases.phase("compile"), mlir.context():
        module = backend.compile_module(ir.Module.parse(program.module), named, sizes)
    hardware = module.hardware or hardware
    of_target = Target(
        name=named.name,
        platform=named.platform,
        device_kind=hardware.device_kind,
        requires=hardware.requires,
        compiler_options=dict(sorted(described(named.compiler_options).items())),
        settings=settings(named),
    )
    return Compiled(
        module.executable,
        describe(program, of_target, module, hardware, mesh),
        module.hlo,
        mesh,
        optimized=module.optimized,
        kernels=module.kernels,
        _parameters=program._parameters,
        _check_trees=program._check_trees,
    )
