"""The description of a GPU in XLA's form: stream_executor.GpuTargetConfigProto, in text format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from stagec.core.messages.errors import show
from stagec.hardware import cuda, rocm
from stagec.hardware.gpu_devices import VENDORS, AmdDevice, Device

_MISSING = {
    "bf16_flops": "the peak of dense bfloat16 operations a second",
    "pcie_bandwidth": "bytes a second to the host",
}
"""Fields that a driver does not report for each device, and that follow from no other number."""
_ESTIMATES = ("bf16_flops", "nvlink_bandwidth", "infinity_fabric_bandwidth", "network_bandwidth")
"""Properties that XLA does not have: they are for estimates."""
_DESCRIBED: Sequence[list[str]] = (
    [],
    ["cuda_compute_capability"],
    ["rocm_compute_capability"],
    ["device_interconnect_info"],
)
"""Messages in XLA's message of a device that have fields of `Device`."""
FEATURES = {"": "NONE", "a": "ACCELERATED_FEATURES", "f": "FAMILY_COMPATIBLE_FEATURES"}
"""The features of a compute capability, by its last letter."""


def target_config(
    device: Device,
    platform: str,
    capability: str,
    names: Mapping[str, str],
    dnn: tuple[int, int, int],
) -> str:
    """Return the device as XLA reads it.

    platform: XLA's name of it. capability: the field with the compute capability. names: fields with strings, among
    them versions of libraries that the executable may rely on when it is loaded. dnn: the version of cuDNN, or MIOpen.
    """
    other = ("name", "compute_capability", "active_links", *_ESTIMATES)
    major, minor, patch = dnn
    named = {"name": device.name, **names, "dnn_version": f"{major}.{minor}.{patch}"}
    info = [
        *(f"{field.name}: {getattr(device, field.name)}" for field in fields(device) if field.name not in other),
        *(f'{key}: "{value}"' for key, value in named.items()),
        capability,
        f"device_interconnect_info {{ active_links: {device.active_links} }}",
        "device_address_bits: 64",
        "ecc_enabled: true",
    ]
    lines = [
        "gpu_device_info {",
        *(f"  {line}" for line in info),
        "}",
        f'platform_name: "{platform}"',
        f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}",
        f'device_description_str: "{device.name}"',
    ]
    return "\n".join(lines) + "\n"


def properties(config: str) -> dict[str, Any]:
    """Return the fields of a `Device` that XLA's description of one has; it has no peak, and no speed of links.

    config: a GpuTargetConfigProto in XLA's text format, one field a line.
    """
    info = dict(_fields_of(config))
    mark = next((mark for mark, name in FEATURES.items() if name == info.get("feature_extension")), "")
    processor = info.get("gcn_arch_name")
    reported: dict[str, Any] = {
        "compute_capability": (
            _string(processor) if processor else f"{info.get('major', 0)}.{info.get('minor', 0)}{mark}"
        ),
        "active_links": 0,  # a zero is not printed
    }
    read: dict[str, Callable[[str], Any]] = {"str": _string, "int": int, "float": float}
    vendor = VENDORS["rocm" if processor else "cuda"]
    for field in fields(vendor):
        if field.name in info and info[field.name] != "-1":  # the speed of PCIe, where the driver does not say it
            reported[field.name] = read[str(field.type)](info[field.name])
    return {field.name: reported[field.name] for field in fields(vendor) if field.name in reported}


def _fields_of(config: str) -> Iterator[tuple[str, str]]:
    """Yield the fields that say something of the whole device: what a unit of it does has fields of the same names."""
    inside: list[str] = []
    for line in map(str.strip, config.splitlines()):
        name, opens, _ = line.partition(" {")
        if opens:
            inside.append(name)
        elif line == "}":
            inside.pop()
        elif inside[:1] == ["gpu_device_info"] and inside[1:] in _DESCRIBED:
            yield name.partition(": ")[0], line.partition(": ")[2]


def _string(text: str) -> str:
    """Return a string in protobuf's syntax, which escapes more characters than JSON."""
    value: str = json.loads(text.replace("\\'", "'"))
    return value


def as_toml(reported: Mapping[str, Any]) -> str:
    """Return the result of `properties` as a file that a manifest can name.

    The peak, the speed of links, and fields missing from the driver come from the checked-in device of the same name.
    If there is none, the file lists the missing fields.
    """
    platform = "rocm" if AmdDevice.CAPABILITY.fullmatch(reported["compute_capability"]) else "cuda"
    known = {"cuda": cuda.devices, "rocm": rocm.devices}[platform]()
    driver, vendor = {"cuda": ("the CUDA driver", "NVIDIA"), "rocm": ("ROCm", "AMD")}[platform]
    same = [device for device in known.values() if device.name == reported["name"]]
    whole = {"doc": reported["name"], "source": f"what {driver} reports", **reported}
    missing = [
        field.name for field in fields(VENDORS[platform]) if field.default is MISSING and field.name not in reported
    ]
    if same:
        added = dict.fromkeys((*missing, *(name for name in _ESTIMATES if hasattr(same[0], name))))
        whole |= {name: getattr(same[0], name) for name in added}
        whole["source"] = f"{whole['source']}; {', '.join(added)}: {vendor}'s data sheets"
    lines = [f"{key} = {show(value)}" for key, value in whole.items()]
    lines += [
        f"# {name} = {_MISSING.get(name, 'what the driver does not say')}: see the device's data sheet."
        for name in missing
        if not same
    ]
    return "\n".join(lines) + "\n"
