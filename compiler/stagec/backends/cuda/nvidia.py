"""The description of an NVIDIA device in XLA's form: stream_executor.GpuTargetConfigProto, as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from stagec.core.telling.errors import show
from stagec.hardware import cuda
from stagec.hardware.cuda_devices import CAPABILITY, Device

_ESTIMATES = ("bf16_flops", "nvlink_bandwidth", "network_bandwidth")
"""Properties that XLA does not have: they are for estimates."""
_FEATURES = {"": "NONE", "a": "ACCELERATED_FEATURES", "f": "FAMILY_COMPATIBLE_FEATURES"}


def target_config(device: Device, cudnn: tuple[int, int, int], cuda: str, cub: str) -> str:
    """Return the device as XLA reads it.

    cudnn, cuda, cub: versions of these libraries that the executable may count on where it is loaded.
    """
    match = CAPABILITY.fullmatch(device.compute_capability)
    assert match is not None
    other = ("name", "compute_capability", "active_links", *_ESTIMATES)
    major, minor, patch = cudnn
    names = {
        "name": device.name,
        "device_vendor": "NVIDIA Corporation",
        "platform_version": f"Compute Capability {device.compute_capability}",
        "driver_version": cuda,
        "runtime_version": cuda,
        "compile_time_toolkit_version": cuda,
        "dnn_version": f"{major}.{minor}.{patch}",
        "cub_version": cub,
    }
    capability = f"major: {match[1]} minor: {match[2]} feature_extension: {_FEATURES[match[3]]}"
    info = [
        *(f"{field.name}: {getattr(device, field.name)}" for field in fields(Device) if field.name not in other),
        *(f'{key}: "{value}"' for key, value in names.items()),
        f"cuda_compute_capability {{ {capability} }}",
        f"device_interconnect_info {{ active_links: {device.active_links} }}",
        "device_address_bits: 64",
        "ecc_enabled: true",
    ]
    lines = [
        "gpu_device_info {",
        *(f"  {line}" for line in info),
        "}",
        'platform_name: "CUDA"',
        f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}",
        f'device_description_str: "{device.name}"',
    ]
    return "\n".join(lines) + "\n"


def properties(config: str) -> dict[str, Any]:
    """Return the fields of `Device` that XLA's description of a device has; it has no peak, and no speed of NVLink.

    config: a GpuTargetConfigProto as text, one field a line, as XLA prints it.
    """
    info = dict(re.findall(r"^ *(\w+): (.+)$", config.partition("dnn_version_info {")[0], re.MULTILINE))
    mark = next((mark for mark, name in _FEATURES.items() if name == info.get("feature_extension")), "")
    reported: dict[str, Any] = {
        "compute_capability": f"{info.get('major', 0)}.{info.get('minor', 0)}{mark}",
        "active_links": 0,  # a zero is not printed
    }
    read: dict[str, Callable[[str], Any]] = {"str": json.loads, "int": int, "float": float}
    for field in fields(Device):
        if field.name in info:
            reported[field.name] = read[str(field.type)](info[field.name])
    return {field.name: reported[field.name] for field in fields(Device) if field.name in reported}


def as_toml(reported: Mapping[str, Any]) -> str:
    """Return what `properties` returned as a file that a manifest can name.

    The peak, and the speed of links, are those of the checked-in device of the same name. Where there is none, the file
    says that the peak is missing.
    """
    same = [device for device in cuda.devices().values() if device.name == reported["name"]]
    whole = {"doc": reported["name"], "source": "what the CUDA driver reports", **reported}
    if same:
        whole |= {name: getattr(same[0], name) for name in _ESTIMATES}
        whole["source"] = f"{whole['source']}; {', '.join(_ESTIMATES)}: NVIDIA's data sheets"
    lines = [f"{key} = {show(value)}" for key, value in whole.items()]
    if not same:
        lines.append("# bf16_flops = the peak of dense bfloat16 operations a second: see the device's data sheet.")
    return "\n".join(lines) + "\n"
