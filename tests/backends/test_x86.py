"""Whether machine code keeps to an instruction set level; the code is what GNU as makes of the instruction named."""

import itertools
import struct

import pytest

from stagec.backends import x86

AVX2 = x86.ISA["AVX2"]


def elf(code: bytes) -> bytes:
    """A 64-bit ELF file with one executable section, and one of data that looks like code beyond every level."""
    data = bytes.fromhex("c4e3f1cec200")
    start = 64 + len(code) + len(data)
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, start, 0, 64, 0, 0, 64, 2, 0)
    )
    text = struct.pack("<IIQQQQIIQQ", 0, 1, 6, 0, 64, len(code), 0, 0, 1, 0)
    rodata = struct.pack("<IIQQQQIIQQ", 0, 1, 2, 0, 64 + len(code), len(data), 0, 0, 1, 0)
    return header + code + data + text + rodata


@pytest.mark.parametrize(
    ("feature", "code"),
    [
        ("gfni", "c4e3f1cec200"),  # vgf2p8affineqb $0,%xmm2,%xmm1,%xmm0
        ("gfni", "66450f38cfc8"),  # gf2p8mulb %xmm8,%xmm9
        ("gfni", "62d27548cfd4"),  # vgf2p8mulb %zmm12,%zmm1,%zmm2
        ("avxvnni", "c4e27152c2"),  # {vex} vpdpwssd %xmm2,%xmm1,%xmm0
        ("avx512vbmi", "62f275488dc2"),  # vpermb %zmm2,%zmm1,%zmm0
        ("avx512vpopcntdq", "62f27d4855c1"),  # vpopcntd %zmm1,%zmm0
        ("avx512bitalg", "62f27d4854d1"),  # vpopcntb %zmm1,%zmm2
        ("avx512vbmi2", "62f26d4871d9"),  # vpshldvd %zmm1,%zmm2,%zmm3
        ("avx512ifma", "62f2ed48b4d9"),  # vpmadd52luq %zmm1,%zmm2,%zmm3
        ("avx512fp16", "62f56c4858d9"),  # vaddph %zmm1,%zmm2,%zmm3
        ("sse4a", "660f79d1"),  # extrq %xmm1,%xmm2
        ("sse4a", "f2440f79c9"),  # insertq %xmm1,%xmm9
        ("fma4", "c4e3e168e120"),  # vfmaddps %xmm1,%xmm2,%xmm3,%xmm4
        ("xop", "8fe97090da"),  # vprotb %xmm1,%xmm2,%xmm3
    ],
)
def test_an_instruction_beyond_the_level(feature: str, code: str) -> None:
    enabled = AVX2.features | {feature}
    assert x86.difference(AVX2, enabled, [elf(bytes.fromhex(code))]) == x86.Difference((), (feature,), ())
    assert x86.difference(AVX2, enabled, [elf(bytes.fromhex("90c3"))]) is None  # nop, ret


def test_the_code_of_the_level_itself() -> None:
    code = elf(bytes.fromhex("62f2f5488dc2"))  # vpermw %zmm2,%zmm1,%zmm0: AVX512BW, one bit from vpermb
    avx512 = x86.ISA["AVX512"]
    assert x86.difference(avx512, avx512.features | {"avx512vbmi"}, [code]) is None


def test_features_that_no_code_uses_are_no_difference() -> None:
    assert x86.difference(AVX2, AVX2.features | {"adx", "clwb", "pku", "rtm", "vaes"}, []) is None


def test_features_that_are_missing_or_unknown() -> None:
    enabled = AVX2.features - {"movbe", "fma"} | {"brand-new"}
    assert x86.difference(AVX2, enabled, []) == x86.Difference(("fma", "movbe"), (), ("brand-new",))


def test_what_is_no_object_file() -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        x86.difference(AVX2, AVX2.features | {"gfni"}, [b"hello"])


def test_a_level_has_the_features_of_those_before_it() -> None:
    levels = list(x86.ISA.values())
    assert all(first.features < second.features for first, second in itertools.pairwise(levels))
