"""Compiling for the devices of this process, with JAX's own settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib import _jax
from jaxlib.mlir import ir

from stagec.backends import compilation
from stagec.backends.compilation import CannotCompile, CompiledModule
from stagec.backends.cpu import compiler as cpu, defects
from stagec.bundle.description import Target
from stagec.core.builds.compiler_options import described
from stagec.core.builds.specs import CompilerOption
from stagec.hardware import aarch64
from stagec.pjrt import arrays, clients, host, turns
from stagec.pjrt.custom_calls import register_custom_calls
from stagec.pjrt.executable import Executable
from stagec.stages import mlir
from stagec.stages.compiled import Compiled
from stagec.stages.data import LoweredData
from stagec.stages.describing import describe, mesh_of


def compile_for_host(program: LoweredData, options: Mapping[str, CompilerOption]) -> Compiled:
    """Compile for this machine's CPU; the program may need all of its features."""
    loaded, avoided = _load(program, options, clients.devices("cpu", program.nr_devices))
    serialized = bytes(loaded.loaded.serialize())
    hlo = str(loaded.loaded.hlo_modules()[0].to_string())
    on_aarch64 = host.architecture() == aarch64.ARCHITECTURE
    settings = {"architecture": aarch64.ARCHITECTURE} if on_aarch64 else {}
    raw, hardware = cpu.for_this_machine(serialized)
    target = Target(
        name="host",
        platform="cpu",
        device_kind=hardware.device_kind,
        requires=hardware.requires,
        compiler_options=dict(sorted(described(options).items())),
        settings={"isa": "", "parallelism": os.cpu_count() or 1, **settings},
    )
    properties = compilation.cost(loaded.loaded.cost_analysis()), compilation.memory(loaded.loaded)
    module = CompiledModule(raw, *properties, hlo, range(program.nr_devices), avoided=avoided)
    mesh = mesh_of(program)
    description = describe(program, target, module, hardware, mesh)
    return Compiled(
        raw,
        description,
        hlo,
        mesh,
        _parameters=program._parameters,
        _check_trees=program._check_trees,
        _executable=loaded,
    )


def load(program: LoweredData, options: Mapping[str, CompilerOption], devices: Sequence[_jax.Device]) -> Executable:
    """Compile for devices of this process with JAX's own settings: XLA chooses shardings that are not given.

    devices: as many as the module is lowered for. Raises CannotCompile when XLA refuses the module or an option.
    """
    return _load(program, options, devices)[0]


def _load(
    program: LoweredData, options: Mapping[str, CompilerOption], devices: Sequence[_jax.Device]
) -> tuple[Executable, dict[str, str]]:
    """Return the executable, and the known defects of XLA that it would have (`defects.around`)."""
    on_cpu = program.platform == "cpu"
    if on_cpu:
        register_custom_calls(program.custom_calls)
    count = program.nr_devices
    settings = clients.compile_options([device.id for device in devices])
    build = settings.executable_build_options
    build.use_spmd_partitioning = True
    kept = [program.in_shardings[i] for i in program.kept_var_idx]
    build.allow_spmd_sharding_propagation_to_parameters = [s is None for s in kept]
    build.allow_spmd_sharding_propagation_to_output = [s is None for s in program.out_shardings]
    with mlir.make_context():
        module = ir.Module.parse(program.module)
        # Exports from before Shardy have no mesh, and shardings in the older form.
        build.use_shardy_partitioner = count == 1 or mlir.mesh(module) is not None

        def compiling(given: Mapping[str, CompilerOption]) -> Any:
            compilation.set_options(settings, given)
            # LLVM may be shown another CPU at this moment, for a target that another thread compiles for.
            with turns.for_this_machine():
                return devices[0].client.compile_and_load(module, _jax.DeviceList(tuple(devices)), settings)

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
