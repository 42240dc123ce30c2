"""Targets for AMD devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stagec.manifest.gpu import DeviceName, GpuTarget


class RocmTarget(GpuTarget):
    """AMD devices to compile for. You need none to build."""

    platform: Literal["rocm"] = Field(description="Kind of hardware.", examples=["rocm"])
    device: DeviceName = Field(examples=["mi300x", "devices/mine.toml"])
