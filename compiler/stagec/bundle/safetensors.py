"""Safetensors files: named arrays behind a header in JSON (https://github.com/huggingface/safetensors, "Format").

The check of a file's header is as strict as the format; nothing looks at the arrays' bytes. Standard library only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagec.bundle.members import Content, Part, content
from stagec.core.data import strict_json
from stagec.core.data.reading import RegularFile
from stagec.core.sizes.avals import Aval, num_bytes
from stagec.core.trees import json_shapes

LARGEST_HEADER = 100_000_000
"""Bytes of a header: the format's own limit."""
_MOST_DIMENSIONS = 64
"""Dimensions of an array: numpy's limit. The product of a hundred thousand sizes takes minutes."""
# Dtypes by the format's names. Those of less than a byte are left out: XLA stores them in another way.
_DTYPES = {
    "BOOL": "bool",
    **{f"I{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"f{bits}" for bits in (16, 32, 64)},
    "BF16": "bf16",
    "C64": "c64",
    "F8_E4M3": "f8_e4m3fn",
    "F8_E5M2": "f8_e5m2",
    "F8_E8M0": "f8_e8m0fnu",
}
_LENGTH = 8
_ENTRY = json_shapes.shape({"dtype": json_shapes.constant(*_DTYPES), "shape": [int], "data_offsets": [int]})
_HEADER = json_shapes.shape({"__metadata__?": {...: str}, ...: _ENTRY})


@dataclass(frozen=True)
class Tensor:
    """One array of a file. data: its bytes in little-endian, row-major order."""

    aval: Aval
    data: Content

    def read(self) -> bytes | memoryview:
        """Return its bytes, in memory. Raises ValueError when the file changed."""
        return content(self.data)


def head(file: RegularFile) -> bytes:
    """Return the bytes before the arrays of a file: the length of the header, and the header. Nothing is parsed.

    Raises OSError, and ValueError when there is no such header.
    """
    first = file.read(0, min(_LENGTH, file.size))
    length = int.from_bytes(first, "little")
    if _LENGTH + length > file.size:
        raise ValueError("the header runs over the end of the file")
    if length > LARGEST_HEADER:
        raise ValueError(f"the header has {length:,} bytes, over the limit of {LARGEST_HEADER:,}")
    text = file.read(_LENGTH, length)
    if not text.startswith(b"{"):
        raise ValueError("the header does not start with {")
    return first + text


def read(path: str | Path, opened: RegularFile | None = None, before: bytes | None = None) -> dict[str, Tensor]:
    """Return the arrays of the file at `path` by name, in the order of its header.

    opened: the file, where it is open already; before: its `head`, where that was read.
    Raises OSError, and ValueError when the header breaks the format's rules: arrays lie one after the other, from the
    header to the end of the file, without holes.
    """
    file = opened or RegularFile(path)
    text = head(file) if before is None else before
    start = len(text)
    header = strict_json.parse(text[_LENGTH:], LARGEST_HEADER)
    _HEADER(header)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if len(entry["shape"]) > _MOST_DIMENSIONS:
            raise ValueError(f"{name}: its shape has more than {_MOST_DIMENSIONS} dimensions")
    avals = {name: Aval(_DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}
    _check_offsets(header, avals, file.size - start)

    def tensor(name: str) -> Tensor:
        begin, end = header[name]["data_offsets"]
        return Tensor(avals[name], Part(f"{name} of {path}", lambda: file, start + begin, end - begin))

    return {name: tensor(name) for name in avals}


def start_of(tensor: Tensor) -> int:
    """Return the offset of an array of `read` in its file."""
    assert isinstance(tensor.data, Part)
    return tensor.data.start


def parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Return the parts of a file with these arrays, to be written one after the other.

    Raises ValueError for a dtype that the format does not have.
    """
    header, at = {}, 0
    names = {ours: theirs for theirs, ours in _DTYPES.items()}
    for name, tensor in tensors.items():
        if tensor.aval.dtype not in names:
            raise ValueError(f"{name} is {tensor.aval}, and safetensors files have no such dtype")
        end = at + len(tensor.data)
        shape = list(map(int, tensor.aval.shape))
        header[name] = {"dtype": names[tensor.aval.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    head = (len(text).to_bytes(_LENGTH, "little"), text)
    return itertools.chain(head, (tensor.read() for tensor in tensors.values()))


def _check_offsets(header: Mapping[str, Any], avals: Mapping[str, Aval], size: int) -> None:
    """Raise ValueError if arrays overlap, leave a hole, or do not have the number of bytes of their aval."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if len(entry["data_offsets"]) != 2 or entry["data_offsets"][0] != at:
            raise ValueError(f"{name}: its bytes do not start at {at}, where the array before it ends")
        count = num_bytes(avals[name])
        at += count
        if entry["data_offsets"][1] != at:
            raise ValueError(f"{name} is {avals[name]}, which takes {count:,} bytes, and its offsets say otherwise")
    if at != size:
        raise ValueError(f"its arrays end after {at:,} bytes, and the file has {size:,}")
