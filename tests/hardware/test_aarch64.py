"""aarch64 cores: what code for them needs, and what a machine that has nothing else says."""

import itertools

from stagec.hardware import aarch64
from stagec.pjrt import host


def test_a_core_has_the_features_of_those_before_it() -> None:
    for first, second in itertools.pairwise(aarch64.CORES.values()):
        assert set(first.requires) <= set(second.requires)
        assert list(second.requires) == sorted(second.requires)


def test_what_llvm_finds() -> None:
    assert aarch64.llvm_names(["fp", "asimd", "evtstrm", "aes", "sha1", "sha2"]) == {"fp-armv8", "neon", "sha2"}
    assert aarch64.llvm_names(["aes", "pmull", "atomics"]) == {"aes", "lse"}
    assert {"fp-armv8", "neon"} == aarch64.BASELINE


def test_the_cpuinfo_of_a_core() -> None:
    a72 = aarch64.CORES["cortex-a72"].cpuinfo.decode()
    assert "Features\t: asimd crc32 fp\n" in a72
    assert "CPU implementer\t: 0x41\n" in a72
    assert "CPU part\t: 0xd08\n" in a72
    v2 = aarch64.CORES["neoverse-v2"]
    assert " sha3 sha512 sve\n" in v2.cpuinfo.decode()
    assert "sve" not in (v2.cpu_name, *v2.requires, *v2.features)
    assert "part" not in aarch64.CORES["generic"].cpuinfo.decode()


def test_x86_has_no_flags_for_what_every_core_requires() -> None:
    """So loaders from before there was an architecture refuse such an executable too."""
    assert all({"asimd", "fp"} <= set(core.requires) for core in aarch64.CORES.values())
    assert host.architecture() != "x86_64" or not {"asimd", "fp"} & host.cpu_flags()
