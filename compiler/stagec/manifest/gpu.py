"""Targets for GPUs, of both vendors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import Field, StringConstraints

from stagec.core.builds import specs
from stagec.core.messages.errors import Problem, StagecError
from stagec.hardware import autotuning, catalog
from stagec.hardware.gpu_devices import Device, GpuHardware, num_devices, read
from stagec.manifest import tables, toml
from stagec.manifest.tables import NAME, SHAPE, CompilerOptions, Jaxlib, Table
from stagec.manifest.values import file_pattern

DEVICE = rf"({NAME})|({file_pattern('toml')})"
"""The short name of a device, or a file."""
DeviceName: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=DEVICE),
    Field(
        description="Short name of the device: `stagec targets` lists them. Or a file that describes another "
        "device, by its path relative to the manifest's folder: `stagec describe-device` writes such a file."
    ),
]
AUTOTUNING = file_pattern("textproto")
"""A file of results of autotuning."""
FILES = {"device": "toml", "autotuning": "textproto"}
"""Keys of a target that name files beside the manifest, and the ends of the files' names."""


class GpuTarget(Table):
    """What the tables of both platforms have in common."""

    platform: Literal["cuda", "rocm"]
    device: DeviceName
    topology: Annotated[str, StringConstraints(pattern=SHAPE)] = Field(
        "1x1x1",
        description="Partitions that NVLink or Infinity Fabric connects, hosts of each, devices of each host.",
        examples=["1x1x8"],
    )
    autotuning: Annotated[str, StringConstraints(pattern=AUTOTUNING)] = Field(
        "",
        description="File with results of autotuning on such a device, by its path relative to the manifest's "
        "folder. Begin with an empty file; `bazel run` of `<manifest>.autotune` writes it on a machine with the "
        "NVIDIA device. For AMD devices, take what XLA writes there with xla_gpu_dump_autotune_results_to.",
        examples=["kernels.autotune.textproto"],
    )
    jaxlib: Jaxlib = None
    compiler_options: CompilerOptions = {}

    def describe(self, name: str, file: str, folder: Path) -> specs.GpuTarget:
        """Return the target in full. file: the manifest's name in messages; folder: its folder.

        Raises StagecError with keys of this table, or for one of the files.
        """
        num_devices(self.topology)
        device = _device(self.platform, self.device, file, folder)
        results = _autotuning(self.autotuning, device, file, folder)
        described = self.device, self.topology, asdict(device), self.compiler_options
        return specs.GpuTarget(name, *described, self.autotuning, results, self.platform)


class CudaTarget(GpuTarget):
    """NVIDIA devices to compile for. You need none to build."""

    platform: Literal["cuda"] = Field(description="Kind of hardware.", examples=["cuda"])
    device: DeviceName = Field(examples=["h100-sxm", "devices/mine.toml"])


class RocmTarget(GpuTarget):
    """AMD devices to compile for. You need none to build."""

    platform: Literal["rocm"] = Field(description="Kind of hardware.", examples=["rocm"])
    device: DeviceName = Field(examples=["mi300x", "devices/mine.toml"])


def _device(platform: str, name: str, file: str, folder: Path) -> Device:
    """The device of a short name, or of a file."""
    if not name.endswith(".toml"):
        return cast(GpuHardware, catalog.hardware(platform)).device(name)
    write = "stagec describe-device writes such a file for the device in front of it"
    shown, content = tables.read("device", name, file, folder, write)
    try:
        description = toml.parse(content.decode("utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise StagecError(Problem(shown, "", f"not TOML: {error}", "see https://toml.io for the syntax")) from None
    return read(platform, description, shown)


def _autotuning(name: str, device: Device, file: str, folder: Path) -> str:
    """The results of autotuning for `device` in a file; "" without one."""
    if not name:
        return ""
    write = "begin with an empty file; stagec autotune writes it on a machine with the NVIDIA device"
    shown, content = tables.read("autotuning", name, file, folder, write)
    try:
        text = content.decode("ascii")
    except ValueError as error:
        write = "save it in protobuf's text format, as XLA writes it into a file whose name ends so"
        raise StagecError(Problem(shown, "", f"not text: {error}", write)) from None
    autotuning.check(autotuning.read(text, shown), device, shown)
    return text
