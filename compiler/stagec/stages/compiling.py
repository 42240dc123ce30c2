"""Compiling a program for a target, or for devices of this process with JAX's own settings; without JAX."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib import _jax
from jaxlib.mlir import ir

from stagec.backends import compilation
from stagec.backends.compilation import CannotCompile, CompiledModule, Hardware
from stagec.backends.cpu import compiler as cpu, defects
from stagec.bundle.description import Target
from stagec.core.builds.compiler_options import described
from stagec.core.builds.specs import CompilerOption, TargetSpec
from stagec.core.messages import phases
from stagec.hardware import aarch64
from stagec.pjrt import arrays, clients, host, probe, turns
from stagec.pjrt.custom_calls import register_custom_calls
from stagec.pjrt.executable import Executable, donation_refusal
from stagec.stages import mlir
from stagec.stages.compiled import Compiled
from stagec.stages.data import LoweredData
from stagec.stages.describing import describe, mesh_of, settings
from stagec.stages.shardings import Mesh


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
        return _compile_for_host(program, options)
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
    return _compiled(program, of_target, module, hardware, mesh)


def _compile_for_host(program: LoweredData, options: Mapping[str, CompilerOption]) -> Compiled:
    """Compile for this machine's CPU; the program may need all of its features."""
    loaded, avoided = load(program, options, clients.devices("cpu", program.nr_devices))
    hlo = str(loaded.loaded.hlo_modules()[0].to_string())
    on_aarch64 = host.architecture() == aarch64.ARCHITECTURE
    of_aarch64 = {"architecture": aarch64.ARCHITECTURE} if on_aarch64 else {}
    raw, hardware = cpu.for_this_machine(bytes(loaded.loaded.serialize()))
    target = Target(
        name="host",
        platform="cpu",
        device_kind=hardware.device_kind,
        requires=hardware.requires,
        compiler_options=dict(sorted(described(options).items())),
        settings={"isa": "", "parallelism": os.cpu_count() or 1, **of_aarch64},
    )
    properties = compilation.cost(loaded.loaded.cost_analysis()), compilation.memory(loaded.loaded)
    module = CompiledModule(raw, *properties, hlo, range(program.nr_devices), avoided=avoided)
    return _compiled(program, target, module, hardware, mesh_of(program), loaded)


def _compiled(
    program: LoweredData,
    target: Target,
    module: CompiledModule,
    hardware: Hardware,
    mesh: Mesh | None,
    loaded: Executable | None = None,
) -> Compiled:
    return Compiled(
        module.executable,
        describe(program, target, module, hardware, mesh),
        module.hlo,
        mesh,
        optimized=module.optimized,
        kernels=module.kernels,
        _parameters=program._parameters,
        _check_trees=program._check_trees,
        _executable=loaded,
    )


def load(
    program: LoweredData, options: Mapping[str, CompilerOption], devices: Sequence[_jax.Device]
) -> tuple[Executable, dict[str, str]]:
    """Compile for devices of this process with JAX's own settings: XLA chooses shardings that are not given.

    Return the executable, and the known defects of XLA that it would have (`defects.around`).
    devices: as many as the module is lowered for. Raises CannotCompile when XLA refuses the module or an option.
    """
    on_cpu = program.platform == "cpu"
    if on_cpu:
        register_custom_calls(program.custom_calls)
    count = program.nr_devices
    xla_options = clients.compile_options([device.id for device in devices])
    build = xla_options.executable_build_options
    build.use_spmd_partitioning = True
    kept = [program.in_shardings[i] for i in program.kept_var_idx]
    build.allow_spmd_sharding_propagation_to_parameters = [s is None for s in kept]
    build.allow_spmd_sharding_propagation_to_output = [s is None for s in program.out_shardings]
    with mlir.make_context():
        module = ir.Module.parse(program.module)
        # Exports from before Shardy have no mesh, and shardings in the older form.
        build.use_shardy_partitioner = count == 1 or mlir.mesh(module) is not None

        def compiling(given: Mapping[str, CompilerOption]) -> Any:
            compilation.set_options(xla_options, given)
            # LLVM may be shown another CPU at this moment, for a target that another thread compiles for.
            with turns.for_this_machine():
                return devices[0].client.compile_and_load(module, _jax.DeviceList(tuple(devices)), xla_options)

        try:
            loaded, avoided = defects.around(compiling, options) if on_cpu else (compiling(options), {})
        except _jax.JaxRuntimeError as error:
            raise compilation.refusal(str(error), options) from error
    parameters, results = (
        [(tuple(map(int, aval.shape)), arrays.dtype_of(aval)) for aval in avals]
        for avals in ([program.flat_in_avals[i] for i in program.kept_var_idx], program.flat_out_avals)
    )
    try:
        return Executable(loaded, parameters, results, devices, *program.memory_of_parameters()), avoided
    except ValueError as error:
        raise CannotCompile(f"{program.fun_name} cannot be called: {error}") from error
