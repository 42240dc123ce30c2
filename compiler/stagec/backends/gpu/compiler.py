"""GPUs of NVIDIA and AMD: compile StableHLO with XLA:GPU for devices that are somewhere else.

XLA takes a description of the device (`descriptions`). What a vendor has of its own is in the module of its name.
Differences in XLA's own bytes, and the fixes here:

- XLA stores the name of the CPU of the machine that builds: the topology names one (`_HOST`), and XLA takes that.
- XLA stores addresses, and entries of hash tables in their order: `canonicalize`.
- Without a device XLA times no variants of a kernel: it takes the target's results of autotuning, or what `_UNTIMED`
  says, and `convolutions`.
- The start and the end of a collective that runs beside others have a number in common, an address: they are counted
  (`canonicalize`).
- Behind a code object for AMD devices, XLA writes the time and a random number, so no two are equal. Instead, there is
  a digest of the executable (`canonicalize`): two that differ in other parts still have code objects that differ.

The rest is the same in every process, folder and environment, on any number of cores.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile, CompiledModule, Hardware, cost, memory
from stagec.backends.gpu import amd, code_objects, container, kernels, nvidia
from stagec.core.builds import releases
from stagec.core.builds.platforms import Plugin
from stagec.core.builds.specs import CompilerOption, GpuTarget
from stagec.core.data import gpu_executables, riegeli, wire
from stagec.core.messages import phases
from stagec.core.messages.errors import StagecError
from stagec.costs.links import Links, Switch
from stagec.hardware import autotuning, gpu_devices
from stagec.hardware.gpu_devices import Device
from stagec.patches import known_builds
from stagec.pjrt import compatibility

if TYPE_CHECKING:
    from jaxlib import _jax
    from jaxlib.mlir import ir


class Vendor(Protocol):
    """What differs between vendors: a module of this package for each.

    PLUGIN: XLA's plugin. PREFIXES: of the variables that it and the vendor's libraries read. ENVIRONMENT: settings.
    """

    PLUGIN: Plugin
    PREFIXES: Sequence[str]
    ENVIRONMENT: Mapping[str, str]

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that make code besides the plugin, by name; raises CannotCompile."""

    def target_config(self, device: Device, dnn: tuple[int, int, int] | None = None) -> str:
        """Return the device as XLA reads it. dnn: the version of cuDNN or MIOpen that kernels were timed with."""

    def scratch(self) -> contextlib.AbstractContextManager[None]:
        """Work in an empty folder for a while, in which XLA finds what it needs of the vendor, and nothing else."""

    def register_custom_calls(self) -> None:
        """Register with XLA the functions that JAX calls on the vendor's devices: it compiles no other call."""

    def in_jax_keys(self, devices: Sequence[Any]) -> dict[str, bytes]:
        """Return the parts of JAX's cache keys that describe the devices of a topology, by name."""


_VENDORS: Mapping[str, Vendor] = {"cuda": nvidia, "rocm": amd}
"""By platform."""
_HOST = 'triple: "x86_64-unknown-linux-gnu" cpu: "x86-64-v2"'
"""The CPU that drives the device, as xla.cpu.TargetMachineOptionsProto: every x86-64 server since 2009."""
(_PART,) = known_builds.GPU["xla.SplitProtoManifest"].values()
# Kinds of xla.gpu.ThunkProto, by field number, and where in their messages there are ...
_PAIRED = {path[0]: path[1] for path in known_builds.PAIRED.values()}
"""... the number that a start and its end have in common ..."""
_UNORDERED = {kind: (path, field) for kind, *path, field in known_builds.UNORDERED.values()}
"""... and entries that XLA takes from a hash table: the path of their message, and their field."""
_BINARY = 2
"""The record with the code of all kernels, behind the manifest and PTX (`gpu_executables.parts`)."""
_AUTOTUNING = "autotuning.textproto"
_UNTIMED = {"xla_gpu_enable_triton_gemm": False}
"""Options without results of autotuning: cuBLAS or hipBLASLt chooses a kernel for a product when it runs.

Otherwise XLA takes the first tile of Triton that it would time, and compares no results: 16x8x16, or 32x16 on AMD
devices. On an H100 (docs/hardware.md), a product of bf16[4096,4096] took 8.9 ms so, and 0.18 ms by cuBLAS; a product of
i8 was wrong.
"""
_UNTIMED_CONVOLUTIONS = {"xla_gpu_autotune_level": 0}
"""Options besides, for a module with convolutions that `convolutions` leaves: cuDNN's first engine.

Otherwise XLA asks for the engine of number -1, and cuDNN refuses to run that. With it XLA gives cuBLAS no room for
products of TF32, which took 1.7 times as long on an H100: so other modules do without. For AMD devices, it asks MIOpen
for algorithm 0 with it and without.
"""
_NO_ENGINE = '"algo_id":"-1"'
_COMPLETE = "xla_gpu_require_complete_aot_autotune_results"
_kept: list[str] = []
"""The results that XLA has read in this process, if any; it reads a file once, and keeps them."""


layers = container.layers


def environment(target: GpuTarget) -> dict[str, str]:
    """Return the variables that XLA reads when it compiles; they are the same for every target."""
    return {**_VENDORS[target.platform].ENVIRONMENT, "XLA_FLAGS": ""}


def prepare_process(target: GpuTarget) -> None:
    """Prepare this process to compile for GPUs; must run before jaxlib is imported."""
    prefixes = (*_VENDORS[target.platform].PREFIXES, "XLA_", "PJRT_", "TF_")
    plugins.prepare_process({**environment(target), "TF_CPP_MIN_LOG_LEVEL": "3"}, prefixes)


def hardware(target: GpuTarget) -> Hardware:
    """Return the hardware of `target`. Raises CannotCompile when there is no such device or topology, or no plugin."""
    device, _ = _described(target)
    vendor = _VENDORS[target.platform]
    versions = vendor.versions()
    return Hardware(
        device.name,
        versions={vendor.PLUGIN.distribution: plugins.version(vendor.PLUGIN), **versions},
        memory=device.device_memory_size,
        bandwidth=device.memory_bandwidth,
        flops=device.bf16_flops,
        links=_links(device, target.topology),
    )


def _links(device: Device, topology: str) -> Links:
    """NVLink or Infinity Fabric connects a partition; without, PCIe connects the devices of a host."""
    _, hosts, devices = gpu_devices.shape(topology)
    network = device.network_bandwidth or None
    if not device.active_links:
        return Links(Switch(device.pcie_bandwidth), devices, network)
    return Links(Switch(device.links_bandwidth) if device.links_bandwidth else None, hosts * devices, network)


def _described(target: GpuTarget) -> tuple[Device, int]:
    """Return the device, and the number of devices."""
    try:
        return gpu_devices.read(target.platform, target.figures, key="figures"), gpu_devices.num_devices(
            target.topology
        )
    except StagecError as error:
        raise CannotCompile.from_error(error) from error


def compile_module(module: ir.Module, target: GpuTarget, mesh: Sequence[int], options: bytes = b"") -> CompiledModule:
    """Compile a StableHLO module, as `Backend` says. The current directory is another one while XLA compiles.

    Without results of autotuning, convolutions become products (`convolutions`).
    Raises CannotCompile when the mesh does not fit the topology, when the plugin or a part of CUDA is missing or is
    another than this jaxlib's, when XLA refuses the module or an option, when there are results of autotuning but
    none for one of the module's kernels, and when a convolution would not run.
    """
    from stagec.backends.gpu import convolutions  # it imports jaxlib, which `prepare_process` comes before

    device, available = _described(target)
    count = math.prod(mesh)
    plugins.check_count(count, available, target.topology)
    results, vendor = _results(target, device), _VENDORS[target.platform]
    vendor.register_custom_calls()
    config = vendor.target_config(device, autotuning.cudnn(results))
    # XLA takes an empty name for a description that it does not have to look up.
    described = {"target_config": config, "topology": target.topology, "host_target_machine_options": _HOST}
    devices = plugins.topology_devices(vendor.PLUGIN, "", described)[:count]
    given = dict(target.compiler_options)
    if results:
        given = {_COMPLETE: True, **autotuning.form(compatibility.numbers()), **given}
    else:
        left = convolutions.as_products(module, count)
        given = {**_UNTIMED, **(_UNTIMED_CONVOLUTIONS if left else {}), **given}
    with vendor.scratch():
        if results:
            Path(_AUTOTUNING).write_text(target.autotuning_results)
            given["xla_gpu_load_autotune_results_from"] = _AUTOTUNING
        try:
            executable = plugins.compile_for(
                vendor.PLUGIN, devices, module, given, serialized=options, examined=target.examined
            )
        except CannotCompile as error:
            raise _not_timed(error) or error from error.__cause__
    optimized = executable.hlo_modules()[0]
    program = optimized.to_string()
    if _NO_ENGINE in program:
        what = f"a convolution would fail when it runs: it asks cuDNN for an engine that there is not ({_NO_ENGINE})"
        write = f"write compiler_options = {{ {_written(_UNTIMED_CONVOLUTIONS)} }} to take cuDNN's first engine"
        raise CannotCompile(what, "compiler_options", write)
    canonical = canonicalize(executable.serialize())
    return CompiledModule(
        executable=canonical,
        cost_analysis=_cost(executable),
        memory_analysis=memory(executable),
        hlo=program,
        device_ids=[device.id for device in devices],
        devices=vendor.in_jax_keys(devices),
        optimized=optimized,
        kernels=kernels.of(canonical, device, program, count),
        examined=plugins.examined(vendor.PLUGIN, target.examined),
    )


def _results(target: GpuTarget, device: Device) -> list[autotuning.Result]:
    """Return the results of autotuning that a target has."""
    try:
        results = autotuning.read(target.autotuning_results)
        autotuning.check(results, device)
    except StagecError as error:
        problem = error.problems[0]
        what = f"{problem.key}: {problem.what}" if problem.key else problem.what
        raise CannotCompile(what, "autotuning", problem.write) from error
    wanted = releases.release(compatibility.version()).kernels
    for index, result in enumerate(results if wanted is not None else ()):
        if result.version not in (None, wanted):
            what = f"results[{index}].version: timed by an XLA of version {result.version}; this one is {wanted}"
            raise CannotCompile(what, "autotuning", autotuning.REFRESH)
    # XLA reads a file of results once in a process. A second target would get the kernels of the first without a word.
    if _kept and _kept != [target.autotuning_results]:
        what = "this process has compiled with other results of autotuning, which XLA keeps"
        raise CannotCompile(what, "autotuning", "compile in a separate process, as stagec action compile does")
    _kept.extend([target.autotuning_results] if results and not _kept else [])
    return results


def _not_timed(error: CannotCompile) -> CannotCompile | None:
    """Translate XLA's error about a kernel without a result to one of the target; None for any other error."""
    # Of several kernels XLA names one, below the line that an error of ours keeps.
    pattern = r"No cached config found for HLO instr: (%\S+ = (?:\(.*?\)|\S+) [\w-]+)(.*)"
    match = re.search(pattern, f"{error}\n{error.__cause__}")
    if match is None:
        return None
    convolved = _UNTIMED_CONVOLUTIONS if "__cudnn$conv" in match[2] else {}
    options = _written({_COMPLETE: False, **_UNTIMED, **convolved})
    write = f"{autotuning.REFRESH}\nor let a library choose without timing: compiler_options = {{ {options} }}"
    return CannotCompile(f"it has no result for {match[1]}", "autotuning", write)


def _written(options: Mapping[str, CompilerOption]) -> str:
    """Return options as a manifest has them in a table."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())


def _cost(executable: _jax.Executable) -> dict[str, float]:
    """Return XLA's estimates for the optimized program; the plugin has none, so they are made as for a CPU."""
    from jaxlib import _jax

    from stagec.pjrt import clients

    return cost(_jax.hlo_module_cost_analysis(clients.cpu_client(1), executable.hlo_modules()[0]))


def _marked(file: bytes) -> bytes:
    """Return the records of an executable with a digest of them behind its code object, if it has one.

    Another record may look like a code object: a constant of the model, which stays as it is.
    """
    bare = list(riegeli.records(file))
    bare[_BINARY] = bare[_BINARY][: code_objects.size(bare[_BINARY])]
    mark = hashlib.sha256(b"".join(hashlib.sha256(record).digest() for record in bare)).digest()

    def change(i: int, record: bytes) -> bytes | None:
        return bare[i] + mark[: len(record) - len(bare[i])] if len(record) > len(bare[i]) else None

    return riegeli.edit(file, change)


@phases.phase("canonicalize")
def canonicalize(serialized: bytes) -> bytes:
    """Return the bytes of a serialized XLA:GPU executable with everything that varies between runs in a fixed form.

    There are numbers from 1 where XLA stored addresses, and entries of hash tables are sorted.
    """
    # An address is the same wherever it stands, so its number is too: a start still finds its end.
    numbers: dict[bytes, bytes] = {}
    varying: list[int] = []  # kinds of the thunks that were found to differ from run to run

    def number(address: bytes) -> bytes:
        return numbers.setdefault(address, wire.write_varint(len(numbers) + 1))

    def thunk(message: bytes) -> bytes:
        return b"".join(map(wire.Record.encode, map(kind, wire.records(message))))

    def kind(record: wire.Record) -> wire.Record:
        message = record.payload
        if record.field in _PAIRED:
            varying.append(record.field)
            paired = _PAIRED[record.field]
            message = b"".join(
                (wire.Record(r.field, 0, number(r.payload)) if (r.field, r.wire_type) == (paired, 0) else r).encode()
                for r in wire.records(message)
            )
        if record.field in _UNORDERED:
            varying.append(record.field)
            path, field = _UNORDERED[record.field]
            message = wire.edit(message, path, lambda inner: wire.sort_repeated(inner, frozenset({field})))
        for path in [path for kind, path in container.NESTED if kind == record.field]:
            message = wire.edit(message, path, thunk)
        return wire.Record(record.field, record.wire_type, message)

    def executable(file: bytes) -> bytes:
        manifest = next(riegeli.records(file))
        described = [next(wire.records(record)).field for record in wire.find(manifest, _PART[:1])]
        # Record 0 is the manifest; the others are a field's value, or the rest of the message.
        # The value of a field may look like a message, such as the machine code of a kernel: only messages are edited.
        messages = {i for i, field in enumerate(described, 1) if field == _PART[1]}

        def change(i: int, record: bytes) -> bytes | None:
            before = len(varying)
            edited = wire.edit(record, container.FIELDS["thunks"], thunk) if i in messages else record
            # None leaves a record as it is: a chunk that is written again loses its compression.
            return edited if len(varying) > before else None

        return _marked(riegeli.edit(file, change))

    def outer(_: int, record: bytes) -> bytes | None:
        edited = executable(record) if record.startswith(riegeli.SIGNATURE) else record
        return edited if edited != record else None

    head, body = wire.delimited(serialized)
    # The whole is a file of records since jaxlib 0.11.1, and before a message with such a file in it
    # (`gpu_executables.parts`).
    if body.startswith(riegeli.SIGNATURE):
        return head + riegeli.edit(body, outer)
    return head + wire.edit(body, gpu_executables.EXECUTABLE, executable)
