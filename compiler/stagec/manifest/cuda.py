"""Targets for NVIDIA devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stagec.manifest.gpu import DeviceName, GpuTarget


class CudaTarget(GpuTarget):
    """NVIDIA devices to compile for. You need none to build."""

    platform: Literal["cuda"] = Field(description="Kind of hardware.", examples=["cuda"])
    device: DeviceName = Field(examples=["h100-sxm", "devices/mine.toml"])
