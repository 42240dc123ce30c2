"""aarch64 cores as targets name them, and the /proc/cpuinfo of a machine that has exactly one of them.

Nothing here asks the machine that it runs on. Sources: Linux, Documentation/arch/arm64/elf_hwcaps.rst (names of flags)
and arch/arm64/include/asm/cputype.h (numbers of cores); llvm/lib/TargetParser/Host.cpp, which turns both into names;
the cores' technical reference manuals (developer.arm.com).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ARCHITECTURE = "aarch64"


@dataclass(frozen=True)
class Core:
    """An aarch64 core.

    cpu_name: LLVM's name of the core that XLA makes code for.
    part: its number among Arm's (MIDR_EL1.PartNum); None for no particular one.
    requires: flags of /proc/cpuinfo that a machine must have to run the code, sorted.
    sve: whether the core has SVE. XLA makes none of its code, and where it sees it, makes code for a neoverse-n1.
    """

    cpu_name: str
    part: int | None
    requires: tuple[str, ...]
    sve: bool = False

    @functools.cached_property
    def features(self) -> frozenset[str]:
        """LLVM's names of the features that it finds on a machine with these flags."""
        return llvm_names(self.requires)

    @functools.cached_property
    def cpuinfo(self) -> bytes:
        """The /proc/cpuinfo of a machine with one core of this kind, and nothing else."""
        flags = " ".join([*self.requires, *(["sve"] if self.sve else [])])
        lines = ["processor\t: 0", f"Features\t: {flags}"]
        if self.part is not None:
            lines += ["CPU implementer\t: 0x41", "CPU architecture: 8", f"CPU part\t: {self.part:#05x}"]
        return ("\n".join(lines) + "\n\n").encode()


def llvm_names(flags: Iterable[str]) -> frozenset[str]:
    """Return LLVM's names of the features that it finds where /proc/cpuinfo lists `flags`: it looks for few of them."""
    flags = frozenset(flags)
    return frozenset(name for name, needed in _LLVM_NAMES.items() if needed <= flags)


_LLVM_NAMES: Mapping[str, frozenset[str]] = {
    "aes": frozenset(("aes", "pmull")),
    "crc": frozenset(("crc32",)),
    "fp-armv8": frozenset(("fp",)),
    "lse": frozenset(("atomics",)),
    "neon": frozenset(("asimd",)),
    "sha2": frozenset(("sha1", "sha2")),
    "sha3": frozenset(("sha3",)),
    "sm4": frozenset(("sm4",)),
}
BASELINE = llvm_names(("asimd", "fp"))
"""The features of every aarch64 machine that runs Linux."""

_V8_0 = ("asimd", "fp")
_A72 = ("asimd", "crc32", "fp")
# fmt: off
_N1 = (
    "aes", "asimd", "asimddp", "asimdhp", "asimdrdm", "atomics", "crc32", "dcpop", "fp", "fphp", "lrcpc", "pmull",
    "sha1", "sha2",
)
# fmt: on
_SHA3 = (*_N1, "sha3", "sha512")

CORES: Mapping[str, Core] = {
    "generic": Core("generic", None, _V8_0),
    "cortex-a72": Core("cortex-a72", 0xD08, _A72),
    "neoverse-n1": Core("neoverse-n1", 0xD0C, _N1),
    "neoverse-v1": Core("neoverse-n1", 0xD40, _SHA3, sve=True),
    "neoverse-v2": Core("neoverse-n1", 0xD4F, _SHA3, sve=True),
}
"""Cores that a target may name, least demanding first; the names are those of LLVM's and GCC's `-mcpu`."""
