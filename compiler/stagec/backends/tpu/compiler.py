"""TPUs: compile StableHLO for a topology of chips that are somewhere else.

libtpu needs no chip to compile. What it makes is the same in every process, folder and environment, on any number of
cores, if its hash tables have one seed (`plugins.compile_for`). So its bytes are canonical as they are. What could
change them is its flags in the environment (`prepare_process` removes those) and how many chips a host has, which is
part of a topology.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile, CompiledModule, Hardware, cost, memory
from stagec.backends.tpu import mesh as tpu_mesh
from stagec.core.builds.specs import TpuTarget
from stagec.core.messages.errors import StagecError
from stagec.costs.links import Links, Torus
from stagec.hardware.tpu_topologies import Generation, Topology, parse_topology
from stagec.pjrt import host

if TYPE_CHECKING:
    from jaxlib.mlir import ir

PLUGIN = plugins.of("tpu")

_NEEDED_CPU_FLAGS = frozenset(
    ("aes", "avx", "cx16", "mmx", "pclmulqdq", "pni", "popcnt", "sse", "sse2", "sse4_1", "sse4_2", "ssse3")
)
"""Flags of /proc/cpuinfo for the instructions in libtpu; it checks them when it is loaded."""
_NEEDED_FILE = "sys/devices/system/cpu/possible"
"""The file with the number of cores for libtpu's allocator."""


def environment(target: TpuTarget) -> dict[str, str]:
    """Return the variables that libtpu and XLA read when they compile; they are the same for every target."""
    return {
        # Without it a second process at the same time is refused; it is meant for processes that use chips.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": "",
        # libtpu asks the machine for its chips, or else a server of Google's cloud. The answer changes no byte.
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # It writes logs to /tmp/tpu_logs.
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "XLA_FLAGS": "",
    }


def prepare_process(target: TpuTarget) -> None:
    """Prepare this process to compile for TPUs; must run before jaxlib is imported."""
    variables = {**environment(target), "TF_CPP_MIN_LOG_LEVEL": "3"}
    plugins.prepare_process(variables, ("TPU_", "LIBTPU_", "XLA_", "PJRT_", "CLOUD_TPU_"))


def hardware(target: TpuTarget) -> Hardware:
    """Return the hardware of `target`. Raises CannotCompile when there is no such topology, or libtpu is missing."""
    topology = slice_of(target)
    chip = topology.generation
    torus = Torus(topology.shape, topology.wraps, chip.link_bandwidth, chip.cores)
    return Hardware(
        chip.device_kind,
        versions={PLUGIN.distribution: plugins.version(PLUGIN)},
        memory=chip.memory // chip.cores,
        bandwidth=chip.bandwidth / chip.cores,
        flops=chip.flops / chip.cores,
        links=Links(torus, topology.num_devices // topology.slices, chip.network_bandwidth / chip.cores or None),
    )


def check_machine(root: Path = Path("/"), cpu_flags: frozenset[str] | None = None) -> None:
    """Raise CannotCompile if libtpu would end the process instead of raising an error.

    root: the folder with the machine's files. cpu_flags: those of its CPU; None: those of /proc/cpuinfo. If none are
    known, libtpu must find out itself.
    """
    try:
        counted = (root / _NEEDED_FILE).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        counted = ""
    if not counted:
        what = f"libtpu does not run on this machine: it needs /{_NEEDED_FILE}, which is missing here"
        write = "mount sysfs, as mount -t sysfs sysfs /sys does; a container or chroot may lack it"
        raise CannotCompile(what, write=write)
    flags = host.cpu_flags() if cpu_flags is None else cpu_flags
    missing = sorted(_NEEDED_CPU_FLAGS - flags) if flags else []
    if missing:
        what = f"libtpu does not run on this machine: its CPU lacks {', '.join(missing)}"
        raise CannotCompile(what, write="build for TPUs on a machine whose CPU has these; the bytes are the same")


_IDLE = 'custom_call_target="ConcatBitcast"'
"""libtpu copies a large array in slices; this custom call says that they are one array, and computes nothing."""


def slice_of(target: TpuTarget) -> Topology:
    """Return the slice of a target. Raises CannotCompile when there is no such topology."""
    generation = Generation(**target.figures)
    try:
        return parse_topology(target.topology, {generation.name: generation}, target.chips_per_host, target.slices)
    except StagecError as error:
        raise CannotCompile.from_error(error) from error


def compile_module(
    module: ir.Module, target: TpuTarget, mesh: Sequence[int], options: bytes = b"", ids: Sequence[int] = ()
) -> CompiledModule:
    """Compile a StableHLO module, as `Backend` says. The axes of a mesh lie on the topology as by `jax.make_mesh`.

    Raises CannotCompile when the mesh does not fit the topology, when libtpu is missing, is another than this jaxlib's
    or does not run here, when XLA refuses the module or an option, and when the program does not fit into the memory of
    a chip.
    """
    check_machine()
    count, topology = math.prod(mesh), slice_of(target)
    devices = plugins.topology_devices(PLUGIN, str(topology), topology.options())
    if ids:  # any of the slice's devices
        there = {device.id: device for device in devices}
        if missing := [number for number in ids if number not in there]:
            raise CannotCompile(f"{topology} has no device {missing[0]}", "topology")
        devices = partitions = [there[number] for number in ids]
    else:
        plugins.check_count(count, topology.num_devices, str(topology))
        devices = devices[:count]
        partitions = [devices[i] for i in tpu_mesh.order(devices, mesh)] if count > 1 else devices
    given = target.compiler_options
    executable = plugins.compile_for(PLUGIN, devices, module, given, partitions, options, examined=target.examined)
    optimized = executable.hlo_modules()[0]
    program = optimized.to_string()
    return CompiledModule(
        executable=executable.serialize(),
        cost_analysis=cost(executable.cost_analysis(), program.count(_IDLE)),
        memory_analysis=memory(executable),
        hlo=program,
        device_ids=[device.id for device in partitions],
        coords=[(*device.coords, device.core_on_chip) for device in partitions],
        devices=plugins.in_jax_keys(devices),
        optimized=optimized,
        examined=plugins.examined(PLUGIN, target.examined),
    )


def layers(serialized: bytes) -> Iterator[tuple[str, bytes, str]]:
    """Yield the parts of an executable: (name, bytes, text). libtpu's executables are opaque."""
    yield "container", serialized, ""
