"""Targets for CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import ConfigDict, Field

from stagec.core.builds import specs
from stagec.core.messages.errors import Problem, StagecError
from stagec.hardware.cpu import PARALLELISM
from stagec.manifest.tables import CompilerOptions, Jaxlib, Table

Isa: TypeAlias = Literal["SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX", "AMX_FP16"]
Core: TypeAlias = Literal["generic", "cortex-a72", "neoverse-n1", "neoverse-v1", "neoverse-v2"]


class CpuTarget(Table):
    """A CPU to compile for. The description is complete: the machine that builds does not matter."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["isa"]}, {"required": ["architecture", "core"]}]}
    )

    platform: Literal["cpu"] = Field(description="Kind of hardware.", examples=["cpu"])
    architecture: Literal["x86_64", "aarch64"] = Field(
        "x86_64", description="Of its instructions, as `uname -m` has it.", examples=["aarch64"]
    )
    isa: Isa | None = Field(
        None,
        description="The newest instruction set that the executable may use, by XLA's name. x86-64 needs it.",
        examples=["AVX2"],
    )
    core: Core | None = Field(
        None,
        description='The core whose instructions the executable may use, by LLVM\'s name; "generic" is Armv8-A without '
        "extensions. aarch64 needs it.",
        examples=["neoverse-n1"],
    )
    parallelism: int = Field(
        PARALLELISM,
        ge=1,
        description="Number of partitions into which XLA may split the work of one operation (for CPUs: threads).",
        examples=[8],
    )
    jaxlib: Jaxlib = None
    compiler_options: CompilerOptions = {}

    def describe(self, name: str, file: str, folder: Path) -> specs.CpuTarget | specs.Aarch64Target:
        """Return the target in full. file: the manifest's name in messages; folder: its folder.

        Raises StagecError with keys of this table.
        """
        if self.architecture == "aarch64":
            if self.core is None or self.isa is not None:
                raise StagecError(*self._problems("core", "isa", "x86_64"))
            return specs.Aarch64Target(name, self.core, self.parallelism, self.compiler_options)
        if self.isa is None or self.core is not None:
            raise StagecError(*self._problems("isa", "core", "aarch64"))
        return specs.CpuTarget(name, self.isa, self.parallelism, self.compiler_options)

    def _problems(self, needed: str, other: str, architecture: str) -> Iterator[Problem]:
        """Yield the problems of missing keys, and of keys for another architecture."""
        (example,) = CpuTarget.model_fields[needed].examples or ("",)
        example = f'write for example {needed} = "{example}"'
        if getattr(self, other) is not None:
            yield Problem("", other, f'it is for architecture = "{architecture}"', f"take it out, or {example}")
        if getattr(self, needed) is None:
            yield Problem("", needed, "missing key", example)
