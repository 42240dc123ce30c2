"""What is read before anybody vouches for it takes time by its length: nobody can make a small file take long.

Most of these took minutes for a file of some megabytes. The seconds are those of the processor; a byte may take five
times what it takes on a machine of 2024 in the worst of them.

Modules: `backends/gpu/container.py`, `backends/gpu/cubins.py`, `core/data/gpu_executables.py`,
`core/data/riegeli.py`, `bundle/description.py`, `trust/dsse.py`, `bundle/index.py`, `core/data/strict_json.py`,
`core/sizes/expressions.py`.
"""

import base64
import copy
import dataclasses
import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagec.audit import kernels
from stagec.backends.gpu import container, cubins
from stagec.bundle import archive, index, safetensors
from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from stagec.bundle.members import bundle_members, encode
from stagec.core.builds.imports import Files
from stagec.core.data import gpu_executables, riegeli, wire
from stagec.core.messages.refusal import LoadError
from stagec.core.sizes import expressions
from stagec.hardware import cuda as gpus
from stagec.trust.attestation import signed_by
from stagec.trust.dsse import MOST_SIGNATURES, PAYLOAD_TYPE, Envelope
from stagec.trust.keys import read_keys
from tests.backends.test_riegeli import SIGNATURE
from tests.signed import write_keys

IN_MLP = "x: functions.jsonl: functions.mlp"
SECONDS, SECONDS_A_BYTE = 1.0, 1.5e-6


def seconds(read: Callable[[bytes], Any], data: bytes) -> tuple[float, str]:
    """How long reading takes, and what it says."""
    started = time.process_time()
    try:
        read(data)
        said = ""
    except (ValueError, LoadError) as error:
        said = str(error)
    return time.process_time() - started, said


def quick(read: Callable[[bytes], Any], data: bytes) -> str:
    taken, said = seconds(read, data)
    assert taken < SECONDS + SECONDS_A_BYTE * len(data), f"{taken:.1f} s for {len(data):,} bytes: {said}"
    assert len(said) < 2000
    return said


def read_index(data: bytes) -> None:
    archive.read_index(data, index.check, "x", {})


def read_functions(data: bytes) -> None:
    """Read all functions of a bundle."""
    [*Archive("x", data).index["functions"].values()]


def keys(count: int) -> bytes:
    """An object of that many keys, whose last appears twice."""
    names = [f"key {i}" for i in [*range(count), count - 1]]
    return ("{" + ",".join(f'"{name}":0' for name in names) + "}").encode()


@pytest.fixture(scope="module")
def bundle(zoo: Path) -> dict[str, Any]:
    """The index, and under "contents" the members that there are."""
    found = Archive(zoo)
    return {"index": found.index, "contents": {name: found[name] for name in found.index["members"]}}


@pytest.mark.parametrize("read", [read_index, Description.from_json])
def test_a_key_that_is_there_twice(read: Callable[[bytes], Any]) -> None:
    said = quick(read, keys(40_000)).removeprefix("x: index.json: ")
    assert said == "the key 'key 39999' appears twice"


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
    data = encode(bundle_members(bundle["index"], members))
    started = time.process_time()
    with pytest.raises(LoadError, match="nobody signed it"):
        Archive("x", data, vouch=refuse)
    assert time.process_time() - started < 5


def refuse(data: bytes, whole: Callable[[], str]) -> None:
    raise LoadError("signature", "nobody signed it")


def test_a_message_is_short_whatever_it_is_about() -> None:
    long = "x" * 1_000_000
    known = {"format": archive.FORMAT, "members": {}}
    for data in ({long: 0}, {"format": long}, {**known, "functions": {long: 0}}, {**known, "members": {"x": long}}):
        quick(read_index, json.dumps(data).encode())
    assert len(quick(read_index, f'{{"{long}":0,"{long}":0}}'.encode())) < 100


def of_function(bundle: dict[str, Any], avals: list[str], count: int = 1, **more: Any) -> bytes:
    """A bundle with one function, of arguments `avals` and `count` executables, of buckets of one dimension."""
    function = copy.deepcopy(bundle["index"]["functions"]["mlp"])
    entry = function["executables"][0]
    function |= {
        "in_tree": {"tuple": [{"tuple": ["*"] * len(avals)}, {"dict": {}}]},
        "in_avals": avals,
        "out_tree": "*",
        "out_avals": ["f32[1]"],
        "executables": [{**entry, "bucket": {"batch": i}} for i in range(count)],
        **more,
    }
    return encode(bundle_members({**bundle["index"], "functions": {"mlp": function}}, bundle["contents"]))


def test_many_expressions(bundle: dict[str, Any]) -> None:
    over = f"{IN_MLP}: avals with expressions for dimensions have over {index.MOST_EXPRESSIONS:,} characters"
    slow = [f"f32[{','.join(f'{i}*a^8*b^8*c^8' for i in range(2, 500))}]"]
    for avals in ([f"f32[{i}*batch^8]" for i in range(2, 100_000)], slow * 100):
        assert quick(read_functions, of_function(bundle, avals)) == over
    assert quick(read_functions, of_function(bundle, [f"f32[{i}*batch]" for i in range(2, 2000)])) == ""


def test_many_expressions_of_many_functions(bundle: dict[str, Any]) -> None:
    """The limit is one of the bundle: what was read of the functions before counts."""
    few = Archive("x", of_function(bundle, [f"f32[{i}*batch]" for i in range(2, 6000)])).index["functions"]["mlp"]
    functions = {name: {**few, "function": name} for name in ("f", "g", "h")}
    data = encode(bundle_members({**bundle["index"], "functions": functions}, bundle["contents"]))
    over = f"avals with expressions for dimensions have over {index.MOST_EXPRESSIONS:,} characters"
    assert quick(read_functions, data) == f"x: functions.jsonl: functions.h: {over}"
    assert Archive("x", data).index["functions"]["h"] == functions["h"]


def test_many_dimensions_of_many_executables(bundle: dict[str, Any]) -> None:
    more = f"{IN_MLP}.executables: more than are checked of a function with so many dimensions"
    for avals in ([f"f32[{i}*batch]" for i in range(2, 2000)], [f"f32[n{i}]" for i in range(50_000)]):
        assert quick(read_functions, of_function(bundle, avals, 1500)) == more
    names = of_function(bundle, [f"f32[n{i}]" for i in range(50_000)])
    assert quick(read_functions, names) == f"{IN_MLP}.executables[0].bucket: the size of n0 is missing"
    assert quick(read_functions, of_function(bundle, ["f32[batch,2*batch,batch+1]"] * 9, 5000)) == ""


def test_many_bound_arguments(bundle: dict[str, Any]) -> None:
    name, weight = next(iter(bundle["index"]["weights"].items()))
    count = 20_000
    bind = [{"leaf": i, "weight": name} for i in range(count)]
    executables: list[Any] = []
    data = of_function(bundle, [weight["aval"]] * count, bind=bind, executables=executables)
    assert quick(read_functions, data) == ""
    tree = {"tuple": [{"tuple": [["*", "*"]] * (count // 2)}, {"dict": {}}]}
    data = of_function(bundle, [weight["aval"]] * count, bind=bind[:-1], executables=executables, in_tree=tree)
    assert quick(read_functions, data) == f"{IN_MLP}.bind: an argument is bound in part"


def test_functions_as_large_as_they_may_be(bundle: dict[str, Any]) -> None:
    function = bundle["index"]["functions"]["mlp"]
    size = len(json.dumps(function, separators=(",", ":")))
    names = [f"f{i}" for i in range((index.LARGEST - 100_000) // size)]
    functions = {name: {**function, "function": name} for name in names}
    members = bundle_members({**bundle["index"], "functions": functions}, bundle["contents"])
    assert index.LARGEST - len(members[index.FUNCTIONS]) < 2_000_000
    assert quick(read_functions, encode(members)) == ""
    more = {f"{name}{i}": {**function, "function": f"{name}{i}"} for name in names for i in range(2)}
    with pytest.raises(LoadError, match=r"functions\.jsonl has .* bytes, over the limit of 16,777,216"):
        Archive("x", encode(bundle_members({**bundle["index"], "functions": more}, bundle["contents"])))


def varint(number: int) -> bytes:
    return wire.write_varint(number)


def compressed(sizes: bytes, values: bytes, count: int) -> bytes:
    """A Riegeli file of one chunk with these streams of Snappy. count: of records, as its header says."""
    streams = [varint(0) + stream for stream in (sizes, values)]
    data = b"s" + varint(len(streams[0])) + b"".join(streams)
    header = struct.pack("<5Q", 0, len(data), 0, ord("r") | count << 8, 0)
    return riegeli._assemble([SIGNATURE, header + data.ljust(count, b"\0")])


def literal(content: bytes) -> bytes:
    return bytes([63 << 2]) + (len(content) - 1).to_bytes(4, "little") + content


def copies(offset: int, count: int) -> bytes:
    """That many copies of 64 bytes from `offset` bytes before."""
    return (bytes([63 << 2 | 3]) + offset.to_bytes(4, "little")) * count


def read_records(data: bytes) -> None:
    for _ in riegeli.records(data):
        pass


def test_copies_from_far_away() -> None:
    """Each took as long as what lies between: 10 MB took minutes."""
    size = 1_000_000
    whole = varint(size + 64 * 500_000)
    stream = whole + literal(bytes(size)) + copies(size, 500_000)
    sizes = varint(len(whole)) + literal(whole)
    assert quick(read_records, compressed(sizes, stream, 1)) == ""


def test_more_records_than_a_chunk_says() -> None:
    stream = varint(1 + 64 * 200_000) + literal(b"\0") + copies(1, 200_000)
    said = quick(read_records, compressed(stream, varint(0), 7))
    assert said == "more records than the header of their chunk says"
    assert quick(read_records, compressed(varint(0), varint(0), 7)[:-1]) == "truncated chunk"


def executable(thunks: bytes) -> bytes:
    """An executable for NVIDIA devices: the least that XLA writes, around these thunks."""
    records = [b"manifest", b"", b"", thunks]
    file = riegeli._assemble([SIGNATURE, riegeli._plain(records)])
    return varint(0) + wire.Record(gpu_executables.EXECUTABLE[0], 2, file).encode()


def nested(field: int, path: list[int], content: bytes) -> bytes:
    for number in [*reversed(path), field]:
        content = wire.Record(number, 2, content).encode()
    return content


def thunk(content: bytes) -> bytes:
    (field,) = container.FIELDS["thunks"][:1]
    return nested(field, list(container.FIELDS["thunks"][1:]), content)


def test_thunks_in_thunks() -> None:
    (kind, path) = container.NESTED[0]
    content = nested(*container._NAME[:1], list(container._NAME[1:]), b"k" * 1_000_000)
    for _ in range(400):
        content = nested(kind, path, content)
    assert quick(container.launches, executable(thunk(content))) == "an executable for GPUs that is damaged"


def cubin(sections: list[tuple[int, int, int, int, int]], body: bytes) -> bytes:
    """Machine code: the bytes of its sections, and for each its name, kind, offset, size and link."""
    start, out = 64 + len(body), bytearray(64)
    out[:9] = b"\x7fELF\x02\x01\x01\x41\x08"
    struct.pack_into("<H", out, 0x12, 190)
    struct.pack_into("<Q", out, 0x28, start)
    struct.pack_into("<I", out, 0x30, 90 << 8)
    struct.pack_into("<HH", out, 0x3C, len(sections), 0)
    rows = [
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, size, link, 0, 0, 0) for name, kind, at, size, link in sections
    ]
    return bytes(out) + body + b"".join(rows)


DAMAGED = "machine code for NVIDIA devices that is damaged"


def test_sections_that_share_their_content() -> None:
    """93 KB took 15 seconds: each of many sections has all attributes."""
    count, attributes = 700, struct.pack("<BBH", 1, 0, 0) * 12_000
    names = b"\0.text.k\0.nv.info.k\0.nv.info\0"
    symbol = struct.pack("<IIQQ", 7, 0, 0, 0)  # named "k"
    parts = [names, symbol, struct.pack("<BBHII", 4, 0x2F, 8, 0, 24), attributes]
    at = [64 + sum(map(len, parts[:i])) for i in range(len(parts))]
    fixed = [
        (0, 3, at[0], len(names), 0),
        (1, 1, at[0], 1, 0),
        (0, 2, at[1], 24, 0),
        (20, 1, at[2], len(parts[2]), 2),
    ]
    body = b"".join(parts)
    assert cubins.read(cubin([*fixed, (9, 1, at[3], len(attributes), 0)], body))["k"].registers == 24
    shared = cubin([*fixed, *[(9, 1, at[3], len(attributes), 0)] * count], body)
    assert len(shared) < 95_000
    assert quick(cubins.read, shared) == DAMAGED
    # Nor may they have one name: each would count the instructions of its function.
    several = [(9, 1, at[3] + 4 * i, 4, 0) for i in range(count)]
    assert quick(cubins.read, cubin([*fixed, *several], body)) == DAMAGED


@pytest.mark.parametrize("of_symbols", [False, True])
def test_names_that_begin_in_each_other(of_symbols: bool) -> None:
    """4 MB took 959 MiB: names of 16 KiB, each a byte later than the one before."""
    count, text = 16_000, b"n" * 32_000 + b"\0.nv.info\0"
    names = (0, 3, 64, len(text), 0)
    if of_symbols:
        symbols = b"".join(struct.pack("<IIQQ", i + 16_000, 0, 0, 0) for i in range(count))
        attributes = b"".join(struct.pack("<BBHII", 4, 0x2F, 8, i, 24) for i in range(count))
        table = (32_000, 2, 64 + len(text), len(symbols), 0)
        info = (32_001, 1, 64 + len(text) + len(symbols), len(attributes), 1)
        code = cubin([names, table, info], text + symbols + attributes)
    else:
        code = cubin([names, *[(i + 15_700, 8, 64, 0, 0) for i in range(count)]], text)
    tracemalloc.start()
    try:
        assert quick(cubins.read, code) == DAMAGED
        assert tracemalloc.get_traced_memory()[1] < 20 * len(code)
    finally:
        tracemalloc.stop()


def test_a_name_of_many_parts() -> None:
    """Python's parser joins them one by one."""
    source = b"import " + b".".join([b"a"] * 200_000)
    assert quick(lambda data: expressions.module(data.decode()), source).startswith("not Python that is read")
    files = Files(["m.py"], ["."], lambda path: source)
    assert quick(lambda module: files.looked_for([module.decode()]), b"m") == ""
    assert expressions.module("x = 1.5\n" * 2000 + "import a.b.c").body


def test_native_formats_are_read_in_a_child_process(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reading them takes, the command goes on: also for an executable in a bundle."""

    def here(data: bytes) -> Any:
        raise AssertionError("it is read in the process of the command")

    for module, reader in ((gpu_executables, "parts"), (container, "launches"), (container, "layers")):
        monkeypatch.setattr(module, reader, here)
    figures = dataclasses.asdict(gpus.device("h200"))
    described = Description.from_json(Archive(zoo)["mlp.cpu.batch4.json"])
    described = described._replace(target=described.target._replace(platform="cuda", settings={"figures": figures}))
    assert kernels.of_executable(executable(b""), described) == []
    assert quick(lambda data: kernels.of_executable(data, described), b"\0") == "no executable"
    none = 'it has no code of a kernel "k"; it has none'
    assert quick(lambda data: kernels.code_of(data, "k"), executable(b"")) == none
