"""What is read before anybody vouches for it takes time by its length: nobody can make a small file take long.

Most of these took minutes for a file of some megabytes. The seconds are those of the processor; a byte may take five
times what it takes on a machine of 2024 in the worst of them.

Modules: `bundle/description.py`, `bundle/dsse.py`, `bundle/index.py`, `core/data/strict_json.py`.
"""

import base64
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagec.bundle import index, safetensors
from stagec.bundle.archive import INDEX, LARGEST_INDEX, Archive, encode, encode_index, members_table
from stagec.bundle.attestation import signed_by
from stagec.bundle.description import Description
from stagec.bundle.dsse import MOST_SIGNATURES, PAYLOAD_TYPE, Envelope
from stagec.bundle.keys import read_keys
from stagec.core.data import strict_json
from stagec.core.telling.refusal import LoadError
from tests.signed import write_keys

SECONDS, SECONDS_A_BYTE = 1.0, 1.5e-6


def seconds(read: Callable[[bytes], Any], data: bytes) -> tuple[float, str]:
    """How long reading takes, and what it says."""
    started = time.process_time()
    try:
        read(data)
        said = ""
    except ValueError as error:
        said = str(error)
    return time.process_time() - started, said


def quick(read: Callable[[bytes], Any], data: bytes) -> str:
    taken, said = seconds(read, data)
    assert taken < SECONDS + SECONDS_A_BYTE * len(data), f"{taken:.1f} s for {len(data):,} bytes: {said}"
    assert len(said) < 2000
    return said


def read_index(data: bytes) -> None:
    index.check(strict_json.parse(data, LARGEST_INDEX))


def keys(count: int) -> bytes:
    """An object of that many keys, whose last appears twice."""
    names = [f"key {i}" for i in [*range(count), count - 1]]
    return ("{" + ",".join(f'"{name}":0' for name in names) + "}").encode()


@pytest.fixture(scope="module")
def bundle(zoo: Path) -> dict[str, Any]:
    return Archive(zoo).index


@pytest.mark.parametrize("read", [read_index, Description.from_json])
def test_a_key_that_is_there_twice(read: Callable[[bytes], Any]) -> None:
    assert quick(read, keys(40_000)) == "the key 'key 39999' appears twice"


def test_a_key_that_is_there_twice_in_a_header(tmp_path: Path) -> None:
    def read(header: bytes) -> None:
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
        safetensors.read(tmp_path / "x")

    assert quick(read, keys(40_000)) == "the key 'key 39999' appears twice"


def test_a_shape_of_many_dimensions(tmp_path: Path) -> None:
    """Their product would have hundreds of thousands of digits."""

    def read(header: bytes) -> None:
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
        safetensors.read(tmp_path / "x")

    header = {"a": {"dtype": "F32", "shape": [2**62] * 20_000, "data_offsets": [0, 0]}}
    assert quick(read, json.dumps(header).encode()) == "a: its shape has more than 64 dimensions"


def test_an_envelope_of_many_values() -> None:
    text = b'{"payload": "", "signatures": [' + b",".join([b"[[]]"] * 500_000) + b"]}"
    taken, said = seconds(Envelope.from_json, text)
    assert said == "it has more than 1,000 values"
    assert taken < 0.1


def test_the_largest_envelope_that_is_not_signed(tmp_path: Path) -> None:
    """Each signature takes a hash of the whole statement, for each key."""
    payload = base64.b64encode(bytes(47 << 20)).decode()
    signatures = [{"sig": base64.b64encode(bytes([i] * 64)).decode()} for i in range(MOST_SIGNATURES)]
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": payload, "signatures": signatures}
    (tmp_path / "x").write_text(json.dumps(envelope))
    _, public = write_keys(tmp_path, "ann")
    keys = read_keys([public])
    started = time.process_time()
    assert signed_by(Envelope.read(tmp_path / "x"), keys) == []
    assert time.process_time() - started < 10


def test_a_container_of_many_members(bundle: dict[str, Any]) -> None:
    members = {f"{'m' * 240}{i:05}": b"" for i in range(20_000)}
    data = encode({INDEX: encode_index({**bundle, "members": members_table(members)}), **members})
    started = time.process_time()
    with pytest.raises(LoadError, match="nobody signed it"):
        Archive("x", data, vouch=refuse)
    assert time.process_time() - started < 5


def refuse(data: bytes, whole: Callable[[], str]) -> None:
    raise LoadError("signature", "nobody signed it")


def test_a_message_is_short_whatever_it_is_about() -> None:
    long = "x" * 1_000_000
    for data in ({long: 0}, {"format": long}, {"functions": {long: 0}}, {"functions": {"f": {"in_tree": [long]}}}):
        quick(read_index, json.dumps(data).encode())
    assert len(quick(read_index, f'{{"{long}":0,"{long}":0}}'.encode())) < 100


def of_function(bundle: dict[str, Any], avals: list[str], count: int = 1, **more: Any) -> bytes:
    """An index with one function, of arguments `avals` and `count` executables, of buckets of one dimension."""
    function = copy.deepcopy(bundle["functions"]["mlp"])
    entry = function["executables"][0]
    function |= {
        "in_tree": {"tuple": [{"tuple": ["*"] * len(avals)}, {"dict": {}}]},
        "in_avals": avals,
        "out_tree": "*",
        "out_avals": ["f32[1]"],
        "executables": [{**entry, "bucket": {"batch": i}} for i in range(count)],
        **more,
    }
    return encode_index({**bundle, "functions": {"mlp": function}})


def test_many_expressions(bundle: dict[str, Any]) -> None:
    over = f"functions: avals with expressions for dimensions have over {index.MOST_EXPRESSIONS:,} characters"
    slow = [f"f32[{','.join(f'{i}*a^8*b^8*c^8' for i in range(2, 500))}]"]
    for avals in ([f"f32[{i}*batch^8]" for i in range(2, 100_000)], slow * 100):
        assert quick(read_index, of_function(bundle, avals)) == over
    assert quick(read_index, of_function(bundle, [f"f32[{i}*batch]" for i in range(2, 2000)])) == ""


def test_many_dimensions_of_many_executables(bundle: dict[str, Any]) -> None:
    more = "functions.mlp.executables: more than are checked of a function with so many dimensions"
    for avals in ([f"f32[{i}*batch]" for i in range(2, 2000)], [f"f32[n{i}]" for i in range(50_000)]):
        assert quick(read_index, of_function(bundle, avals, 1500)) == more
    names = of_function(bundle, [f"f32[n{i}]" for i in range(50_000)])
    assert quick(read_index, names) == "functions.mlp.executables[0].bucket: the size of n0 is missing"
    assert quick(read_index, of_function(bundle, ["f32[batch,2*batch,batch+1]"] * 9, 5000)) == ""


def test_many_bound_arguments(bundle: dict[str, Any]) -> None:
    name, weight = next(iter(bundle["weights"].items()))
    count = 20_000
    bind = [{"leaf": i, "weight": name} for i in range(count)]
    executables: list[Any] = []
    data = of_function(bundle, [weight["aval"]] * count, bind=bind, executables=executables)
    assert quick(read_index, data) == ""
    tree = {"tuple": [{"tuple": [["*", "*"]] * (count // 2)}, {"dict": {}}]}
    data = of_function(bundle, [weight["aval"]] * count, bind=bind[:-1], executables=executables, in_tree=tree)
    assert quick(read_index, data) == "functions.mlp.bind: an argument is bound in part"


def test_an_index_as_large_as_one_may_be(bundle: dict[str, Any]) -> None:
    function = bundle["functions"]["mlp"]
    size = len(json.dumps(function, separators=(",", ":"))) + 20
    names = [f"f{i}" for i in range((LARGEST_INDEX - 100_000) // size)]
    functions = {name: {**function, "function": name} for name in names}
    data = encode_index({**bundle, "functions": functions})
    assert LARGEST_INDEX - len(data) < 2_000_000
    assert quick(read_index, data) == ""
