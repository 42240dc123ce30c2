"""x86-64 instruction sets as targets name them, and how a CPU that has exactly one of them answers `cpuid`.

Nothing here asks the machine that it runs on. Sources: Intel's Software Developer's Manual, volume 2A (CPUID) and
volume 1, section 13.3 (XCR0); llvm/lib/TargetParser/Host.cpp, which turns the answers into names.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Answers = Mapping[tuple[int, int | None], tuple[int, ...]]
"""The answers of cpuid: (leaf, subleaf) -> (eax, ebx, ecx, edx). A subleaf of None stands for every one."""


@dataclass(frozen=True)
class Isa:
    """An x86-64 instruction set level.

    cpu_name: LLVM's name of the first CPU that had it: code is scheduled for that one.
    model: number of that CPU in Intel's family 6.
    requires: flags of /proc/cpuinfo that a machine must have to run the code; a level includes the ones before it.
    """

    cpu_name: str
    model: int
    requires: tuple[str, ...]

    @functools.cached_property
    def features(self) -> frozenset[str]:
        """LLVM's names of the features that code for this level may use."""
        return BASELINE | llvm_names(self.requires)

    @functools.cached_property  # asked for at each site where LLVM asks the CPU
    def answers(self) -> Answers:
        """The answers of cpuid on a CPU with only this level; all zeros for a leaf that is not here."""
        signature = 6 << 8 | (self.model & 15) << 4 | (self.model >> 4) << 16
        # The operating system saves the wide registers (OSXSAVE); `xcr0` says which.
        saves = (1 << 27) * ("xsave" in self.requires)
        return {
            (0, None): (7, *(int.from_bytes(text, "little") for text in (b"Genu", b"ntel", b"ineI"))),
            (1, None): (signature, 0, self._bits(1, 0, "ecx") | saves, self._bits(1, 0, "edx")),
            (7, 0): (1, *(self._bits(7, 0, register) for register in ("ebx", "ecx", "edx"))),
            (7, 1): (self._bits(7, 1, "eax"), 0, 0, 0),
            (0x80000000, None): (0x80000001, 0, 0, 0),
            (0x80000001, None): (0, 0, self._bits(0x80000001, 0, "ecx"), self._bits(0x80000001, 0, "edx")),
        }

    @property
    def xcr0(self) -> int:
        """The registers that the operating system saves: bits as in XCR0."""
        widths = {"avx": 0b100, "avx512f": 0b1110_0000, "amx_tile": 0b11 << 17}
        return 0b11 | sum(bits for flag, bits in widths.items() if flag in self.requires)

    def _bits(self, *bits: *tuple[int, int, str]) -> int:
        """The register of that leaf and subleaf."""
        return sum(1 << bit for bit in {bit for name, bit in _BITS[bits].items() if name in self.features})


def llvm_names(flags: Iterable[str]) -> frozenset[str]:
    """Return LLVM's names of features that /proc/cpuinfo has under the names `flags`."""
    return frozenset(_LLVM_NAMES.get(flag, flag.replace("_", "-")) for flag in flags)


# The features of every x86-64 machine with SSE4.2; /proc/cpuinfo has no flag for some of them.
BASELINE = frozenset(("64bit", "cmov", "crc32", "cx8", "fxsr", "mmx", "sse", "sse2", "sse3"))
_LLVM_NAMES = {
    "abm": "lzcnt",
    "avx512_bf16": "avx512bf16",
    "avx512_bitalg": "avx512bitalg",
    "avx512_fp16": "avx512fp16",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_vnni": "avx512vnni",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx_vnni": "avxvnni",
    "bmi1": "bmi",
    "lahf_lm": "sahf",
    "pclmulqdq": "pclmul",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
}


# LLVM's names of features by where cpuid has them: (leaf, subleaf, register) -> name -> bit.
# fmt: off
_BITS: Mapping[tuple[int, int, str], Mapping[str, int]] = {
    (1, 0, "edx"): {"cx8": 8, "cmov": 15, "mmx": 23, "fxsr": 24, "sse": 25, "sse2": 26},
    (1, 0, "ecx"): {
        "sse3": 0, "pclmul": 1, "ssse3": 9, "fma": 12, "cx16": 13, "sse4.1": 19, "sse4.2": 20, "crc32": 20,
        "movbe": 22, "popcnt": 23, "aes": 25, "xsave": 26, "avx": 28, "f16c": 29,
    },
    (7, 0, "ebx"): {
        "bmi": 3, "avx2": 5, "bmi2": 8, "avx512f": 16, "avx512dq": 17, "rdseed": 18, "adx": 19, "avx512ifma": 21,
        "clwb": 24, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31,
    },
    (7, 0, "ecx"): {
        "avx512vbmi": 1, "avx512vbmi2": 6, "gfni": 8, "avx512vnni": 11, "avx512bitalg": 12, "avx512vpopcntdq": 14,
    },
    (7, 0, "edx"): {"amx-bf16": 22, "avx512fp16": 23, "amx-tile": 24, "amx-int8": 25},
    (7, 1, "eax"): {"avxvnni": 4, "avx512bf16": 5, "amx-fp16": 21},
    (0x80000001, 0, "ecx"): {"sahf": 0, "lzcnt": 5},
    (0x80000001, 0, "edx"): {"64bit": 29},
}
# fmt: on

_SSE4_2 = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")
_AVX = (*_SSE4_2, "avx", "pclmulqdq", "xsave")
_AVX2 = (*_AVX, "abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_AVX512 = (*_AVX2, "adx", "aes", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "clwb", "rdseed")
_AVX512_VNNI = (*_AVX512, "avx512_vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "avx512_bf16")
# fmt: off
_AMX = (
    *_AVX512_BF16, "amx_bf16", "amx_int8", "amx_tile", "avx512_bitalg", "avx512_fp16", "avx512_vbmi2",
    "avx512_vpopcntdq", "avx512ifma", "avx512vbmi", "avx_vnni", "gfni",
)
# fmt: on
_AMX_FP16 = (*_AMX, "amx_fp16")

ISA: Mapping[str, Isa] = {
    "SSE4_2": Isa("nehalem", 0x1A, _SSE4_2),
    "AVX": Isa("sandybridge", 0x2A, _AVX),
    "AVX2": Isa("haswell", 0x3C, _AVX2),
    "AVX512": Isa("skylake-avx512", 0x55, _AVX512),
    "AVX512_VNNI": Isa("cascadelake", 0x55, _AVX512_VNNI),
    "AVX512_BF16": Isa("cooperlake", 0x55, _AVX512_BF16),
    "AMX": Isa("sapphirerapids", 0x8F, _AMX),
    "AMX_FP16": Isa("graniterapids", 0xAD, _AMX_FP16),
}
"""Instruction sets that a target may name, least demanding first; the names are those of XLA's `xla_cpu_max_isa`."""
