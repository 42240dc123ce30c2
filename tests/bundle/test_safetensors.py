"""Reading safetensors files: what the library writes, and everything that is not as the format says."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from stagec.bundle import safetensors


def test_what_the_library_writes(tmp_path: Path) -> None:
    arrays = {
        "f": np.arange(6, dtype=np.float32).reshape(2, 3),
        "none": np.zeros((0, 4), np.int8),
        "scalar": np.array(7, np.uint64),
        "b": np.array([True, False]),
        "half": np.ones(3, ml_dtypes.bfloat16),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"format": "np"})
    found = safetensors.read(tmp_path / "x.safetensors")
    assert {name: str(tensor.aval) for name, tensor in found.items()} == {
        "f": "f32[2,3]",
        "none": "i8[0,4]",
        "scalar": "u64[]",
        "b": "bool[2]",
        "half": "bf16[3]",
    }
    assert {name: bytes(tensor.read()) for name, tensor in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "what"),
    [
        ("[]", 0, "the header does not start with {"),
        (" {}", 0, "the header does not start with {"),
        ('{"a":1,"a":2}', 0, "the key 'a' appears twice"),
        ({"a": {**entry(0, 4, [1]), "x": 1}}, 4, "a.x: no such key is known"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "a: the key 'data_offsets' is missing"),
        ({"a": entry(0, 4, [-1])}, 4, "a.shape[0]: expected a whole number, not -1"),
        ({"a": entry(0, 4, [2**62, 2**62])}, 4, "which takes 85,070,591,730,234,615,865,843,651,857,942,052,864 bytes"),
        ({"a": entry(0, 4, [1] * 65)}, 4, "a: its shape has more than 64 dimensions"),
        ({"a": entry(0, 4, [2])}, 4, "a is f32[2], which takes 8 bytes, and its offsets say otherwise"),
        ({"a": entry(4, 8, [1])}, 8, "a: its bytes do not start at 0, where the array before it ends"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, 8, "b: its bytes do not start at 8"),
        ({"a": entry(0, 4, [1])}, 8, "its arrays end after 4 bytes, and the file has 8"),
        ({"a": entry(0, 4, [1])}, 0, "its arrays end after 4 bytes, and the file has 0"),
        ({"a": {**entry(0, 4, [1]), "data_offsets": [0, 4, 8]}}, 4, "a: its bytes do not start at 0"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__.a: expected a string, not 1"),
    ],
)
def test_a_file_that_is_not_as_the_format_says(tmp_path: Path, header: Any, size: int, what: str) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  (the text is compared below)
        safetensors.read(tmp_path / "x")
    assert what in str(refusal.value)


@pytest.mark.parametrize("data", [b"", b"\2\0\0\0\0\0\0\0{", b"\xff" * 20])
def test_a_file_that_is_cut_off(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=r"^the header runs over the end of the file$"):
        safetensors.read(tmp_path / "x")
