"""The checked-in NVIDIA devices, by short names."""

from __future__ import annotations

from stagec.hardware.gpu_devices import GpuHardware

HARDWARE = GpuHardware("cuda")
device, devices = HARDWARE.device, HARDWARE.devices
