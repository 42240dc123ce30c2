"""Read XLA's container of an executable for GPUs: the program, and the kernels that it launches."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stagec.core.data import gpu_executables, wire
from stagec.patches import known_builds

FIELDS = known_builds.GPU["xla.gpu.GpuExecutableProto"]
NESTED = [(kind, path) for kind, *path in known_builds.NESTED.values()]
"""Kinds of xla.gpu.ThunkProto, by field number, and the paths of fields with other thunks in their messages."""
_INSTRUCTION = known_builds.INSTRUCTION["thunk_info.profile_annotation"]
_WITH_CODE = [
    list(paths.values())
    for paths in (known_builds.CUSTOM_KERNEL, known_builds.COLLECTIVE_KERNEL, known_builds.ALL_REDUCE_KERNEL)
]
_NAME, *_LAUNCH = known_builds.KERNEL.values()
(_STATE,) = known_builds.STATE.values()
_ELF, _CUBIN = b"\x7fELF", b"\x7fELF\x02\x01\x01\x41"
"""How an object file begins, and one for NVIDIA devices."""
_DEEPEST = 32
"""How many thunks may be in each other: each is read once for every one around it."""


class Launch(NamedTuple):
    """A kernel that an executable launches.

    instruction: the HLO instruction that it computes, or a part of it.
    function: its name in the code; "": all functions of the code. code: a cubin; None if it is in XLA's library.
    blocks, threads: the number of blocks, and of threads in each.
    shared: bytes of shared memory of a block that the launch adds to those of the code.
    These three are None if the host's code of Mosaic GPU decides them.
    """

    instruction: str
    function: str
    code: bytes | None
    blocks: int | None
    threads: int | None
    shared: int | None


def launches(serialized: bytes) -> list[Launch]:
    """Return the kernels that an executable launches, in its order.

    Calls of libraries are not among them. Raises ValueError when the bytes are not a serialized executable.
    """
    try:
        _, binary, *_, rest = gpu_executables.parts(serialized)
        return list(_launches(wire.find(rest, FIELDS["thunks"]), binary))
    except (LookupError, RecursionError, struct.error, UnicodeDecodeError, MemoryError) as error:
        raise ValueError("an executable for GPUs that is damaged") from error


def _launches(thunks: Iterable[bytes], binary: bytes, depth: int = 0) -> Iterator[Launch]:
    if depth > _DEEPEST:
        raise LookupError("thunks that are nested too deeply")
    for thunk in thunks:
        name = _text(thunk, _INSTRUCTION)
        for function, code, *launch in _WITH_CODE:
            if called := _text(thunk, function):
                yield Launch(name, called, next(wire.find(thunk, code), None), *_dims(thunk, launch))
        if called := _text(thunk, _NAME):
            yield Launch(name, called, binary, *_dims(thunk, _LAUNCH))
        for state in wire.find(thunk, _STATE):
            # The host's object file, with the device's inside.
            if (start := state.find(_CUBIN)) >= 0 and _ELF in state[:start]:
                yield Launch(name, "", state[start:], None, None, None)
        for kind, path in NESTED:
            yield from _launches(wire.find(thunk, (kind, *path)), binary, depth + 1)


def _dims(thunk: bytes, paths: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Return the number of blocks, of threads in a block, and bytes of shared memory."""
    blocks, threads, shared = paths
    sizes = [
        math.prod(
            wire.read_varint(record.payload, 0)[0]
            for message in wire.find(thunk, path)
            for record in wire.records(message)
            if record.wire_type == 0
        )
        for path in (blocks, threads)
    ]
    return sizes[0], sizes[1], sum(wire.read_varint(size, 0)[0] for size in wire.find(thunk, shared))


def _text(thunk: bytes, path: Sequence[int]) -> str:
    return next(wire.find(thunk, path), b"").decode("utf-8", "replace")


def layers(serialized: bytes) -> Iterator[tuple[str, bytes, str]]:
    """Yield the parts of an executable; see `Backend`."""
    from jaxlib import xla_client

    ptx, binary, *others, rest = gpu_executables.parts(serialized)
    module = next(wire.find(rest, FIELDS["hlo_module_with_config.hlo_module"]), b"")
    yield "optimized HLO", module, xla_client.XlaComputation(module).as_hlo_text() if module else ""
    yield "PTX", ptx, ptx.decode("utf-8", "replace")
    # jaxlib 0.10.1 has one binary for all kernels. Since 0.10.2 each kernel has its own, and PTX is not kept.
    kernels = [("", binary)] if binary else [(row.function, row.code) for row in launches(serialized) if row.code]
    lines = [f"{hashlib.sha256(code).hexdigest()} {len(code):,} bytes {name}".rstrip() for name, code in kernels]
    yield "binary", b"".join(code for _, code in kernels), "".join(f"{line}\n" for line in lines)
    yield "thunks and constants", b"".join([*others, rest]), ""
    yield "container", serialized, ""
