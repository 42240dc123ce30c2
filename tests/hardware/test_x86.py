"""Instruction set levels: what they have, and how a CPU of that level answers cpuid."""

import itertools

import pytest

from stagec.hardware import x86


def test_a_level_has_the_features_of_those_before_it() -> None:
    levels = list(x86.ISA.values())
    assert all(first.features < second.features for first, second in itertools.pairwise(levels))
    assert all(first.xcr0 | second.xcr0 == second.xcr0 for first, second in itertools.pairwise(levels))


def test_a_name_of_the_kernel_and_its_name_in_llvm() -> None:
    assert x86.llvm_names(["abm", "sse4_1", "amx_tile", "avx512_vnni", "fma"]) == {
        "lzcnt",
        "sse4.1",
        "amx-tile",
        "avx512vnni",
        "fma",
    }


@pytest.mark.parametrize("level", x86.ISA)
def test_every_feature_of_a_level_is_told(level: str) -> None:
    isa = x86.ISA[level]
    told = sum(value.bit_count() for values in isa.answers.values() for value in values)
    fixed = 3 + sum(int.from_bytes(text, "little").bit_count() for text in (b"Genu", b"ntel", b"ineI"))
    fixed += (
        isa.answers[1, None][0].bit_count() + 1 + 2 + ("xsave" in isa.requires)
    )  # signature, largest leaves, OSXSAVE
    assert told - fixed == len(isa.features) - 1  # sse4.2 and crc32 are one bit


def test_haswell() -> None:
    answers = x86.ISA["AVX2"].answers
    assert answers[1, None][0] == 0x306C0  # family 6, model 0x3C
    assert answers[7, 0] == (1, 1 << 3 | 1 << 5 | 1 << 8, 0, 0)  # BMI1, AVX2, BMI2
    assert x86.ISA["AVX2"].xcr0 == 0b111
