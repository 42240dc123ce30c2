"""Targets for CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from stagec.core.builds import specs
from stagec.hardware.cpu import PARALLELISM
from stagec.manifest.tables import CompilerOptions, Table

Isa: TypeAlias = Literal["SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX", "AMX_FP16"]


class CpuTarget(Table):
    """A CPU to compile for. The description is complete: the machine that builds does not matter."""

    platform: Literal["cpu"] = Field(description="Kind of hardware.", examples=["cpu"])
    isa: Isa = Field(
        description="The newest instruction set that the executable may use, by XLA's name.", examples=["AVX2"]
    )
    parallelism: int = Field(
        PARALLELISM,
        ge=1,
        description="Number of partitions into which XLA may split the work of one operation (for CPUs: threads).",
        examples=[8],
    )
    compiler_options: CompilerOptions = {}

    FILES: ClassVar[dict[str, str]] = {}
    """Keys that name files beside the manifest, and how those end."""
    PATTERNS: ClassVar[dict[str, str]] = {}
    """Patterns of its values, and what a message says about a string that does not match."""

    def describe(self, name: str, file: str, folder: Path) -> specs.CpuTarget:
        """Return the target in full. file: what messages call the manifest; folder: where it is."""
        return specs.CpuTarget(name, self.isa, self.parallelism, self.compiler_options)
