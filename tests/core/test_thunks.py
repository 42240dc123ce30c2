"""The kinds of operations in executables of this jaxlib, and what is said of bytes that are none."""

import dataclasses
from pathlib import Path

import pytest

from stagec.building import examination
from stagec.bundle.archive import Archive
from stagec.core.data import thunks, wire
from stagec.patches import known_builds


def test_the_numbers_of_fields_are_those_of_this_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    path = examination.library("cpu")
    messages = {
        "xla.cpu.CompilationResultProto": thunks.RESULT,
        "xla.cpu.ThunkProto": {**thunks.NESTED, **thunks.THUNK, **thunks.TYPES},
        "xla.HloComputationProto": thunks.COMPUTATION,
        "xla.HloInstructionProto": thunks.INSTRUCTION,
    }
    expected = dataclasses.replace(known_builds.JAXLIB, messages=messages)
    monkeypatch.setattr(known_builds, "LIBRARIES", {path.name: expected})
    assert known_builds.examined(path).lacks == []


def member(zoo: Path, name: str) -> bytes:
    return bytes(Archive(zoo)[name])


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mlp.cpu.batch1.xla", {"kernel"}),
        ("loop.cpu.xla", {"kernel", "copy", "symbol sinf"}),
        ("halves.cpu.xla", {"kernel", "collective all-reduce sum f32"}),
        ("fourier.cpu.xla", {"kernel", "fft fft c64 c64", "fft ifft c64 c64", "sort f32"}),
    ],
)
def test_what_an_executable_runs(zoo: Path, name: str, kinds: set[str]) -> None:
    assert thunks.kinds(member(zoo, name)) == kinds


def test_a_product_and_decompositions(zoo: Path) -> None:
    """A product is Eigen's or YNNPACK's, by release; LAPACK is called by name."""
    kinds = thunks.kinds(member(zoo, "factorize.cpu.xla"))
    assert {kind for kind in kinds if "lapack" in kind} == {
        f"custom-call lapack_{name}_ffi" for name in ("sgesdd", "sgetrf", "spotrf", "ssyevd", "strsm")
    }
    assert any(kind in kinds for kind in ("dot f32 f32 f32", "ynn-fusion dot:f32 of f32"))


def test_what_is_in_a_loop_counts() -> None:
    """Not however deep: reading it would take time with the square of the depth."""

    def nested(depth: int) -> bytes:
        thunk = wire.Record(1, 2, b"fft").encode()
        for _ in range(depth):
            loop = wire.Record(2, 2, wire.Record(1, 2, thunk).encode()).encode()
            thunk = wire.Record(1, 2, b"while").encode() + wire.Record(10, 2, loop).encode()
        result = wire.Record(6, 2, wire.Record(1, 2, thunk).encode()).encode()
        return b"\0" + wire.Record(1, 2, result).encode()

    assert thunks.kinds(nested(100)) == {"while", "fft"}
    with pytest.raises(ValueError, match=r"^operations in operations, more than 100 deep$"):
        thunks.kinds(nested(101))


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1])
def test_damaged_bytes_are_refused(zoo: Path, keep: int) -> None:
    with pytest.raises(ValueError, match=r"truncated|no operations|damaged|overlong"):
        thunks.kinds(member(zoo, "fourier.cpu.xla")[:keep])


def test_no_byte_that_differs_ends_in_another_error(zoo: Path) -> None:
    """A bundle is other people's bytes."""
    whole = member(zoo, "halves.cpu.xla")
    for at in range(0, len(whole), 37):
        try:
            thunks.kinds(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        except ValueError:
            continue
