"""x86-64 instruction sets as targets name them, and whether compiled code keeps to the one that was named.

XLA compiles for a named CPU, but with every feature of the build machine that its `xla_cpu_max_isa` does not know of
(gfni, avxvnni, avx512vbmi, sse4a, ...; xla/backends/cpu/codegen/cpu_features.cc). Those features are written into the
executable, and LLVM may use some of them. Here is what a level is, and a search of the object code for instructions
beyond it. Nothing here asks the machine that it runs on.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """An x86-64 instruction set level as XLA names it.

    cpu_name: the CPU that LLVM is told to compile for (xla/backends/cpu/codegen/cpu_features.cc).
    requires: flags of /proc/cpuinfo that a machine must have to run the code; a level includes the ones before it.
    emulated_by: a model of `qemu-x86_64 -cpu` on which XLA compiles for exactly this level; "" when there is none.
    """

    cpu_name: str
    requires: tuple[str, ...]
    emulated_by: str = ""

    @property
    def features(self) -> frozenset[str]:
        """LLVM's names of the features that code for this level may use."""
        return _BASELINE.union({_LLVM_NAMES.get(flag, flag.replace("_", "-")) for flag in self.requires})


# What every x86-64 machine with SSE4.2 has; /proc/cpuinfo has no flag for some of it.
_BASELINE = frozenset(("64bit", "cmov", "crc32", "cx8", "fxsr", "mmx", "sse", "sse2", "sse3"))
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

# BMI and MOVBE are younger than SSE4.2 and AVX, as F16C is than AVX, but XLA never switches them off, and LLVM
# uses them for ordinary shifts and loads: code that XLA makes for these levels needs them.
_SSE4_2 = ("abm", "bmi1", "bmi2", "cx16", "lahf_lm", "movbe", "popcnt", "sse4_1", "sse4_2", "ssse3")
_AVX = (*_SSE4_2, "avx", "f16c", "pclmulqdq", "xsave")
_AVX2 = (*_AVX, "avx2", "fma")
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
    "SSE4_2": Isa("nehalem", _SSE4_2, "Haswell"),
    "AVX": Isa("sandybridge", _AVX, "Haswell"),
    "AVX2": Isa("haswell", _AVX2, "Haswell"),
    "AVX512": Isa("skylake-avx512", _AVX512),
    "AVX512_VNNI": Isa("cascadelake", _AVX512_VNNI),
    "AVX512_BF16": Isa("cooperlake", _AVX512_BF16),
    "AMX": Isa("sapphirerapids", _AMX),
    "AMX_FP16": Isa("graniterapids", _AMX_FP16),
}
"""Instruction sets that a target may name, least demanding first."""

# Features whose instructions LLVM emits for intrinsics only, which XLA does not use: keys, hashes, caches, system
# calls. avx10.1 stands for others that are listed beside it; tuning hints ("prefer-...") follow the level.
# fmt: off
_UNUSED = frozenset((
    "adx", "aes", "avx10.1", "avx512vp2intersect", "cldemote", "clflushopt", "clwb", "clzero", "enqcmd", "evex512",
    "fsgsbase", "hreset", "invpcid", "kl", "lwp", "movdir64b", "movdiri", "mwaitx", "pclmul", "pconfig", "pku",
    "prefer-no-gather", "prefer-no-scatter", "prefetchi", "prfchw", "ptwrite", "rdpid", "rdpru", "rdrnd", "rdseed",
    "rtm", "serialize", "sgx", "sha", "sha512", "shstk", "sm3", "sm4", "tsxldtrk", "uintr", "usermsr", "vaes",
    "vpclmulqdq", "waitpkg", "wbnoinvd", "widekl", "xsave", "xsavec", "xsaveopt", "xsaves",
))
# fmt: on


def _byte(mask: int, value: int) -> bytes:
    """A character class: the bytes that have `value` in the bits of `mask`."""
    return b"[" + b"".join(b"\\x%02x" % byte for byte in range(256) if byte & mask == value) + b"]"


def _opcodes(codes: Iterable[int]) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % code for code in codes) + b"]"


def _vex(opcode_map: int, prefixes: Iterable[int], codes: Iterable[int]) -> bytes:
    """Three-byte VEX: C4, RXB and map, W vvvv L pp, opcode (Intel SDM, volume 2, section 2.3)."""
    simd = b"|".join(_byte(3, prefix) for prefix in prefixes)
    return b"\\xc4" + _byte(0x1F, opcode_map) + b"(?:" + simd + b")" + _opcodes(codes)


def _evex(opcode_map: int, codes: Iterable[int], prefix: int | None = 1, wide: bool | None = None) -> bytes:
    """EVEX: 62, map, W vvvv 1 pp, one more, opcode (Intel SDM, volume 2, section 2.7)."""
    mask, value = 4, 4
    if prefix is not None:
        mask, value = mask | 3, value | prefix
    if wide is not None:
        mask, value = mask | 0x80, value | 0x80 * wide
    return b"\\x62" + _byte(0x0F, opcode_map) + _byte(mask, value) + b"." + _opcodes(codes)


def _legacy(prefix: int, escape: bytes, codes: Iterable[int]) -> bytes:
    return b"\\x%02x[\\x40-\\x4f]?\\x0f" % prefix + escape + _opcodes(codes)


_ALL = range(256)
_XOP = b"\\x8f" + b"(?:" + b"|".join(_byte(0x1F, number) for number in (8, 9, 10)) + b")"
# Features that LLVM uses of its own accord, and what their instructions look like (Intel SDM and AMD APM, volume 2
# and 3 and 4). A hit is possible in the middle of another instruction or of two; a miss is certain.
_INSTRUCTIONS: Mapping[str, tuple[bytes, ...]] = {
    "avx512bitalg": (_evex(2, (0x54, 0x8F)),),
    "avx512fp16": (
        _evex(5, _ALL, None),
        _evex(6, _ALL, None),
        _evex(3, (0x08, 0x0A, 0x26, 0x27, 0x56, 0x57, 0x66, 0x67, 0xC2), 0),
    ),
    "avx512ifma": (_evex(2, (0xB4, 0xB5), wide=True),),
    "avx512vbmi": (_evex(2, (0x75, 0x7D, 0x8D), wide=False), _evex(2, (0x83,), wide=True)),
    "avx512vbmi2": (_evex(2, (0x62, 0x63, 0x70, 0x71, 0x72, 0x73)), _evex(3, (0x70, 0x71, 0x72, 0x73))),
    "avx512vpopcntdq": (_evex(2, (0x55,)),),
    "avxifma": (_vex(2, (1,), (0xB4, 0xB5)),),
    "avxneconvert": (_vex(2, (0, 1, 2, 3), (0x72, 0xB0, 0xB1)),),
    "avxvnni": (_vex(2, (1,), (0x50, 0x51, 0x52, 0x53)),),
    "avxvnniint16": (_vex(2, (0, 1, 2), (0xD2, 0xD3)),),
    "avxvnniint8": (_vex(2, (0, 2, 3), (0x50, 0x51)),),
    "fma4": (_vex(3, (1,), (*range(0x5C, 0x60), *range(0x68, 0x70), *range(0x78, 0x80))),),
    "gfni": (
        *(_vex(*code) for code in ((2, (1,), (0xCF,)), (3, (1,), (0xCE, 0xCF)))),
        *(_evex(*code) for code in ((2, (0xCF,)), (3, (0xCE, 0xCF)))),
        *(_legacy(0x66, *code) for code in ((b"\\x38", (0xCF,)), (b"\\x3a", (0xCE, 0xCF)))),
    ),
    "sse4a": (_legacy(0x66, b"", (0x78, 0x79)), _legacy(0xF2, b"", (0x2B, 0x78, 0x79)), _legacy(0xF3, b"", (0x2B,))),
    "tbm": (_XOP,),
    "xop": (_XOP,),
}


@dataclass(frozen=True)
class Difference:
    """How code may differ from that of another machine for the same level; features by LLVM's names, sorted.

    missing: of the level, and not on the machine that compiled.
    used: beyond the level, and perhaps in the code.
    unknown: beyond the level, and not known here.
    """

    missing: tuple[str, ...]
    used: tuple[str, ...]
    unknown: tuple[str, ...]


def difference(isa: Isa, enabled: frozenset[str], objects: Iterable[bytes]) -> Difference | None:
    """Say how code that XLA compiled with the features `enabled` may differ from what `isa` stands for.

    objects: the ELF object files. None when the code is that of every machine that can compile for the level.
    """
    extra = enabled - isa.features - _UNUSED
    missing = {feature for feature in isa.features - enabled if feature not in _UNUSED}
    used = set()
    if extra & set(_INSTRUCTIONS):
        code = b"".join(part for data in objects for part in _code(data))
        used = {f for f in extra & set(_INSTRUCTIONS) if any(re.search(p, code, re.DOTALL) for p in _INSTRUCTIONS[f])}
    unknown = extra - set(_INSTRUCTIONS)
    if not (missing or used or unknown):
        return None
    return Difference(*(tuple(sorted(names)) for names in (missing, used, unknown)))


def _code(data: bytes) -> Iterator[bytes]:
    """Yield the executable sections of a 64-bit ELF file. Raises ValueError when it is something else."""
    try:
        if data[:5] != b"\x7fELF\x02":
            raise ValueError("not a 64-bit ELF file")
        (start,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        for number in range(count):
            kind, flags, _, offset, length = struct.unpack_from("<4xIQQQQ", data, start + number * size)
            if flags & 4 and kind != 8:  # SHF_EXECINSTR; SHT_NOBITS holds nothing
                yield data[offset : offset + length]
    except struct.error as error:
        raise ValueError(f"a damaged ELF file: {error}") from error
