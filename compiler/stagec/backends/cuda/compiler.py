"""NVIDIA devices: compile StableHLO with XLA:GPU for devices that are somewhere else.

XLA takes a description of the device (`nvidia`) and runs NVIDIA's ptxas, which needs none. Differences in XLA's own
bytes, and the fixes here:

- XLA stores the name of the CPU of the machine that builds: the topology names one (`_HOST`), and XLA takes that.
- XLA stores the folder of CUDA as it was given, by default ./cuda_sdk_lib: it is there, as a link in a scratch folder
  that is the current one while XLA compiles. So no path enters, and no other CUDA of the machine is found first.
- XLA stores addresses, and entries of hash tables in their order: `canonicalize`.
- Without a device XLA times no variants of a kernel; it takes its defaults, or the target's results of autotuning.
- The start and the end of a collective that runs beside others have a number in common, an address: they are counted
  (`canonicalize`).

The rest is the same in every process, folder and environment, on any number of cores.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile, CompiledModule, Hardware, cost, memory
from stagec.backends.cuda import container, kernels, nvidia, riegeli
from stagec.core.builds import releases
from stagec.core.builds.specs import CudaTarget
from stagec.core.data import wire
from stagec.core.messages import phases
from stagec.core.messages.errors import StagecError
from stagec.costs.links import Links, Switch
from stagec.hardware import autotuning, cuda_devices
from stagec.hardware.cuda_devices import Device
from stagec.jaxcache import jax_entries
from stagec.patches import known_builds
from stagec.pjrt import compatibility, cuda_calls
from stagec.pjrt.cuda_calls import MOSAIC
from stagec.pjrt.packages import folder

if TYPE_CHECKING:
    from jaxlib import _jax
    from jaxlib.mlir import ir

PLUGIN = plugins.of("cuda")
_EXTENSION = PLUGIN.kernels.replace("-", "_")
"""The package with the functions that custom calls name."""
_TOOLKIT = "nvidia.cu13"
_TOOLS = ("bin/ptxas", "bin/nvlink", "nvvm/libdevice/libdevice.10.bc")
"""The files of CUDA that XLA needs, from the wheels nvidia-cuda-nvcc and nvidia-nvvm."""
_SDK = "cuda_sdk_lib"
"""The value of XLA's option xla_gpu_cuda_data_dir, when none is given."""
_HOST = 'triple: "x86_64-unknown-linux-gnu" cpu: "x86-64-v2"'
"""The CPU that drives the device, as xla.cpu.TargetMachineOptionsProto: every x86-64 server since 2009."""
# XLA refuses to load an executable where a library is older than these. They are the oldest that the plugin works with:
# the CUDA that it was built with, the cuDNN that its wheel requires, the CUB in that CUDA.
_CUDA, _CUDNN, _CUB = "13.0.0", (9, 12, 0), "3.0.0"
(_PART,) = known_builds.CUDA.messages["xla.SplitProtoManifest"].values()
# Kinds of xla.gpu.ThunkProto, by field number, and where in their messages there are ...
_PAIRED = {path[0]: path[1] for path in known_builds.PAIRED.values()}
"""... the number that a start and its end have in common ..."""
_UNORDERED = {kind: (path, field) for kind, *path, field in known_builds.UNORDERED.values()}
"""... and entries that XLA takes from a hash table: the path of their message, and their field."""
_AUTOTUNING = "autotuning.textproto"
_COMPLETE = "xla_gpu_require_complete_aot_autotune_results"
_kept: list[str] = []
"""The results that XLA has read in this process, if any; it reads a file once, and keeps them."""


layers = container.layers


def environment(target: CudaTarget) -> dict[str, str]:
    """Return the variables that XLA reads when it compiles; they are the same for every target."""
    # A machine with a device must compile as one without, so XLA sees none.
    return {"CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": ""}


def prepare_process(target: CudaTarget) -> None:
    """Prepare this process to compile for NVIDIA devices; must run before jaxlib is imported."""
    plugins.prepare_process(
        {**environment(target), "TF_CPP_MIN_LOG_LEVEL": "3"}, ("CUDA_", "MOSAIC_", "NVIDIA_", "XLA_", "PJRT_", "TF_")
    )


def hardware(target: CudaTarget) -> Hardware:
    """Return the hardware of `target`. Raises CannotCompile when there is no such device or topology, or no plugin."""
    device, _ = _described(target)
    _toolkit()
    # ptxas and libdevice make the machine code, so their versions are inputs of it, like the plugin's.
    versions = {name: metadata.version(name) for name in ("nvidia-cuda-nvcc", "nvidia-nvvm")}
    return Hardware(
        device.name,
        versions={PLUGIN.distribution: plugins.version(PLUGIN), **versions},
        memory=device.device_memory_size,
        bandwidth=device.memory_bandwidth,
        flops=device.bf16_flops,
        links=_links(device, target.topology),
    )


def _links(device: Device, topology: str) -> Links:
    """NVLink connects a partition; without it, PCIe connects the devices of a host."""
    _, hosts, devices = cuda_devices.shape(topology)
    network = device.network_bandwidth or None
    if not device.active_links:
        return Links(Switch(device.pcie_bandwidth), devices, network)
    return Links(Switch(device.nvlink_bandwidth) if device.nvlink_bandwidth else None, hosts * devices, network)


def _described(target: CudaTarget) -> tuple[Device, int]:
    """Return the device, and the number of devices."""
    try:
        return cuda_devices.read(target.figures, key="figures"), cuda_devices.num_devices(target.topology)
    except StagecError as error:
        raise CannotCompile.from_error(error) from error


def compile_module(module: ir.Module, target: CudaTarget, mesh: Sequence[int], options: bytes = b"") -> CompiledModule:
    """Compile a StableHLO module, as `Backend` says. The current directory is another one while XLA compiles.

    Raises CannotCompile when the mesh does not fit the topology, when the plugin or a part of CUDA is missing or is
    another than this jaxlib's, when XLA refuses the module or an option, and when there are results of autotuning but
    none for one of the module's kernels.
    """
    device, available = _described(target)
    count = math.prod(mesh)
    plugins.check_count(count, available, target.topology)
    results = _results(target, device)
    register_custom_calls()
    # XLA finds results by the version of cuDNN too; the executable asks for that version when it is loaded.
    config = nvidia.target_config(device, autotuning.cudnn(results) or _CUDNN, _CUDA, _CUB)
    # XLA takes an empty name for a description that it does not have to look up.
    described = {"target_config": config, "topology": target.topology, "host_target_machine_options": _HOST}
    devices = plugins.topology_devices(PLUGIN, "", described)[:count]
    given = dict(target.compiler_options)
    with scratch():
        if results:
            Path(_AUTOTUNING).write_text(target.autotuning_results)
            given = {_COMPLETE: True, **given, "xla_gpu_load_autotune_results_from": _AUTOTUNING}
        try:
            executable = plugins.compile_for(
                PLUGIN, devices, module, given, serialized=options, examined=target.examined
            )
        except CannotCompile as error:
            raise _not_timed(error) or error from error.__cause__
    optimized = executable.hlo_modules()[0]
    canonical, program = canonicalize(executable.serialize()), optimized.to_string()
    return CompiledModule(
        executable=canonical,
        cost_analysis=_cost(executable),
        memory_analysis=memory(executable),
        hlo=program,
        device_ids=[device.id for device in devices],
        devices={**plugins.in_jax_keys(devices), jax_entries.PLATFORM: _platform()},
        optimized=optimized,
        kernels=kernels.of(canonical, device, program, count),
    )


@functools.cache
def _platform() -> bytes:
    """Return the platform part of JAX's keys on a device: the version of CUDA instead of the device."""
    from jaxlib import plugin_support

    versions = plugin_support.import_from_plugin("cuda", "_versions")
    version = f"cuda {versions.cuda_runtime_build_version()}" if versions else "cuda"
    # Clients of jaxlib 0.10.2 said so, and those of 0.11.2 do not.
    before = "PJRT C API\n" if compatibility.numbers() < (0, 11) else ""
    return f"gpu{before}{version}".encode()


def _results(target: CudaTarget, device: Device) -> list[autotuning.Result]:
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
    match = re.search(r"No cached config found for HLO instr: (%\S+ = \S+ [\w-]+)", f"{error}\n{error.__cause__}")
    if match is None:
        return None
    write = f"{autotuning.REFRESH}\nor let XLA choose without timing: compiler_options = {{ {_COMPLETE} = false }}"
    return CannotCompile(f"it has no result for {match[1]}", "autotuning", write)


def _toolkit() -> Path:
    """Return the folder of CUDA that XLA is to use. Raises CannotCompile when a part of it is missing."""
    where = folder(_TOOLKIT)
    missing = [name for name in _TOOLS if where is None or not (where / name).exists()]
    if where is None or missing:
        what = f"XLA needs {', '.join(missing)} of CUDA 13, which are not installed"
        write = plugins.to_lock("cuda", "nvidia-cuda-nvcc==13.0.* and nvidia-nvvm==13.0.*")
        raise CannotCompile(what, "platform", write)
    # XLA would silently take another CUDA of the machine.
    if not os.access(where / _TOOLS[0], os.X_OK):
        raise CannotCompile(f"{where / _TOOLS[0]} may not be run here", "platform")
    return where


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Work in an empty folder for a while, in which XLA finds CUDA and nothing else.

    Mosaic, which is in XLA's plugin, reads from variables where CUDA and its own library are.
    """
    # XLA stores the path of CUDA in an executable. A relative one, through a link in an empty folder, keeps the
    # machine's out of the bytes.
    links = {_SDK: _toolkit()}
    if (extension := folder(_EXTENSION)) is not None:
        links[MOSAIC] = extension / MOSAIC
    variables = {"CUDA_ROOT": f"./{_SDK}", "MOSAIC_GPU_RUNTIME_LIB_PATH": f"./{MOSAIC}"}
    with tempfile.TemporaryDirectory(prefix="stagec-") as empty:
        for name, path in links.items():
            (Path(empty) / name).symlink_to(path.absolute())
        os.environ.update(variables)
        try:
            with contextlib.chdir(empty):
                yield
        finally:
            for name in variables:
                del os.environ[name]


@functools.cache
def register_custom_calls() -> None:
    """Register with XLA the functions that JAX calls on NVIDIA devices: it compiles no other call."""
    if folder(_EXTENSION) is None:
        what = f"the functions that JAX calls on NVIDIA devices are not installed: {PLUGIN.kernels}"
        raise CannotCompile(what, "platform", plugins.to_lock("cuda", f"{PLUGIN.kernels}=={plugins.wanted(PLUGIN)}"))
    if not cuda_calls.register(plugins.load(PLUGIN)):
        what = f"{PLUGIN.kernels} is not for jaxlib {plugins.wanted(PLUGIN)}"
        raise CannotCompile(what, "platform", plugins.to_lock("cuda", f"{PLUGIN.kernels}=={plugins.wanted(PLUGIN)}"))


def _cost(executable: _jax.Executable) -> dict[str, float]:
    """Return XLA's estimates for the optimized program; the plugin has none, so they are made as for a CPU."""
    from jaxlib import _jax

    from stagec.pjrt import clients

    return cost(_jax.hlo_module_cost_analysis(clients.cpu_client(1), executable.hlo_modules()[0]))


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

        return riegeli.edit(file, change)

    def outer(_: int, record: bytes) -> bytes | None:
        edited = executable(record) if record.startswith(riegeli.SIGNATURE) else record
        return edited if edited != record else None

    head, body = wire.delimited(serialized)
    # The whole is a file of records since jaxlib 0.11.1, and before a message with such a file in it
    # (`container.parts`).
    if body.startswith(riegeli.SIGNATURE):
        return head + riegeli.edit(body, outer)
    return head + wire.edit(body, container.EXECUTABLE, executable)
