"""The checked-in AMD devices, by short names."""

from __future__ import annotations

from stagec.hardware.gpu_devices import GpuHardware

HARDWARE = GpuHardware("rocm")
device, devices = HARDWARE.device, HARDWARE.devices
