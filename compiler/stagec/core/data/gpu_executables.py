"""XLA's container of an executable for GPUs: its records, and what the runtime must have. Standard library only."""

from __future__ import annotations

import struct

from stagec.core.data import riegeli, wire

EXECUTABLE = (1,)
"""Where in an xla.ExecutableAndOptionsProto the platform's own message is."""
ABI_VERSION = (14,)
"""Where in an xla.gpu.GpuExecutableProto the versions are that its runtime must have; a test compares it with the
descriptor in XLA's plugin."""


def parts(serialized: bytes) -> list[bytes]:
    """Return the records of an executable: PTX, binary, what XLA splits off beside, and the rest of the message.

    Layout: a varint-delimited xla.ifrt.SerializedXlaExecutableMetadata, then xla.ExecutableAndOptionsProto, whose
    executable is a file of records: a manifest, and parts of an xla.gpu.GpuExecutableProto. Since jaxlib 0.11.1 the
    message around it is such a file too, and the executable one of its records. Raises ValueError for anything else.
    """
    try:
        _, body = wire.delimited(serialized)
        records = riegeli.records(body) if body.startswith(riegeli.SIGNATURE) else wire.find(body, EXECUTABLE)
        executable = next((record for record in records if record.startswith(riegeli.SIGNATURE)), None)
        if executable is None:
            raise ValueError("no executable")
        _manifest, *rest = riegeli.records(executable)
    except (LookupError, struct.error, MemoryError) as error:
        raise ValueError("an executable for GPUs that is damaged") from error
    if len(rest) < 3:
        raise ValueError("an executable in fewer parts than expected")
    return rest


def abi_version(serialized: bytes) -> bytes:
    """Return the stream_executor.ExecutableAbiVersionProto of an executable; empty if it has none.

    For CUDA that is the oldest CUDA toolkit, cuDNN and CUB that it runs with. Raises ValueError as `parts`.
    """
    *_, rest = parts(serialized)
    return next(wire.find(rest, ABI_VERSION), b"")
