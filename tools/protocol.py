"""The descriptor of the server's messages, from compiler/extensions/grpc/stagec_grpc/inference.proto.

usage: .venv/bin/python tools/protocol.py

Writes inference.binpb beside it. compiler/extensions/grpc/tests/test_messages.py compares the two.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).resolve().parent.parent / "compiler" / "extensions" / "grpc" / "stagec_grpc" / "inference.proto"
FILE = SOURCE.with_suffix(".binpb")


def descriptor() -> bytes:
    """Return the file: a FileDescriptorSet of Protocol Buffers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, FILE.name)
        if protoc.main(["protoc", f"-I{SOURCE.parent}", f"--descriptor_set_out={out}", SOURCE.name]):
            raise SystemExit(f"{SOURCE}: protoc refuses it")
        return out.read_bytes()


if __name__ == "__main__":
    FILE.write_bytes(descriptor())
