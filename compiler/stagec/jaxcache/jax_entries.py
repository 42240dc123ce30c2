"""Entries of JAX's persistent compilation cache: their names, which are keys, and their files. Standard library only.

JAX's key is the name of a module and a hash of several parts, one after the other: the module, jaxlib's version, flags
and options, the topology of devices. `Key` has the parts, so that code that knows another topology can name the same
entry for that. A file is an executable behind four bytes of a time, in a frame of zlib or zstandard: here of blocks
that are stored as they are, which every release of every library reads, and which are the same bytes everywhere. A
frame ends with a checksum of its content, because JAX checks nothing else: a damaged file is a miss.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from stagec.core.builds import naming
from stagec.core.data import strict_json
from stagec.core.trees import json_shapes

MODULE, OPTIONS, JAXLIB, PLATFORM, FLAGS, TOPOLOGY, COMPRESSION = (
    "computation",
    "compile_options",
    "jax_lib version",
    "backend version",
    "XLA flags",
    "accelerator_config",
    "compression",
)
"""Parts that stagec knows, by JAX's names: the module, XLA's options, versions, flags, devices, a file's frame."""
HOOK = "custom_hook"
"""A part that a program may add."""
_PARTS = (MODULE, JAXLIB, PLATFORM, FLAGS, OPTIONS, TOPOLOGY, COMPRESSION, HOOK)
"""All parts, in JAX's order: the hash is of their bytes in a row, without what divides them."""
TPU_FLAG = "--xla_tpu_use_enhanced_launch_barrier=true"
"""What JAX adds to LIBTPU_INIT_ARGS where there are TPUs (its _src/cloud_tpu_init.py), and so to each key there.

It changes no byte of what libtpu compiles (tests/backends/test_tpu.py)."""
COMPRESSIONS = ("zlib", "zstandard")
"""JAX uses the second if the process has the package of that name, or Python 3.14."""
SUFFIX, USED = "-cache", "-atime"
"""Ends of the names of an entry's file, and of the file with the time of its last use: JAX reads it to evict."""
INDEX = "stagec.json"
"""The file of a folder that lists the purposes of its entries."""
NO_ENTRY_FOR_THIS_MACHINE = "stagec.jax_cache: no entry for this program and a machine such as this one"
"""A program that imports `stagec.jax_cache` logs this before JAX reports a miss."""
_FORMAT = 1
_MOST = 1 << 26
"""Bytes of an index, and of what describes a key."""
_MODULE = json_shapes.matching(r"\w[\w.-]*", "the name of a module")
_NAME = json_shapes.matching(r"\w[\w.-]*-[0-9a-f]{64}", "the name of an entry")
_KEY = json_shapes.shape(
    {
        "module": _MODULE,
        "mesh": [int],
        "committed": [int],
        "ids": [int],
        "zlib": json_shapes.constant(*COMPRESSIONS),
        "parts": dict.fromkeys(_PARTS, int),
    }
)


@dataclass(frozen=True)
class Key:
    """The parts of an entry's name.

    module: the module's name, such as "jit_predict". parts: the inputs of JAX's hash, by JAX's names, in JAX's order.
    mesh: sizes of the axes over which the module splits arrays; no part of a name.
    committed: positions of the arguments that lie on a device that the program chose; no part of a name by itself.
    ids: the TPUs that the program chose, in its order; empty: as `jax.make_mesh` orders them. No part by itself either.
    zlib: how JAX packs files whose key says zlib: with Python 3.14 as zstandard does; no part of a name.
    """

    module: str
    parts: Mapping[str, bytes]
    mesh: Sequence[int] = ()
    committed: Sequence[int] = ()
    ids: Sequence[int] = ()
    zlib: str = "zlib"

    def name(self) -> str:
        """Return the entry's name, without the suffix of its file."""
        return f"{self.module}-{hashlib.sha256(b''.join(self.parts.values())).hexdigest()}"

    def with_parts(self, parts: Mapping[str, bytes]) -> Key:
        """Return the key with other values of some parts."""
        return replace(self, parts={**self.parts, **parts})

    def to_bytes(self) -> bytes:
        """Return the bytes that `read` reads: a line of JSON, and the parts."""
        parts = {name: len(part) for name, part in self.parts.items()}
        head = {
            "module": self.module,
            "mesh": list(self.mesh),
            "committed": list(self.committed),
            "ids": list(self.ids),
            "zlib": self.zlib,
            "parts": parts,
        }
        return b"".join([json.dumps(head).encode(), b"\n", *self.parts.values()])

    @staticmethod
    def read(data: bytes) -> list[Key]:
        """Read several keys from the bytes of `to_bytes`. Raises ValueError for anything else.

        An action writes them in which a model ran: whether a key is that of its program, `building/for_jax.py` checks.
        """
        keys, at = [], 0
        while at < len(data):
            end = data.find(b"\n", at)
            head = strict_json.parse(data[at:end] if end >= 0 else b"", _MOST)
            _KEY(head)
            # The hash is of the parts in a row, with nothing between them: in another order they would be another name.
            if list(head["parts"]) != list(_PARTS):
                raise ValueError("the parts of a key are not in JAX's order")
            at, parts = end + 1, {}
            for name, length in head["parts"].items():
                parts[name] = data[at : at + length]
                at += length
            keys.append(Key(head["module"], parts, head["mesh"], head["committed"], head["ids"], head["zlib"]))
        if not keys or at != len(data):
            raise ValueError(f"{len(data):,} bytes, not the {at:,} that it says")
        return keys


def any_cpu(isa: str) -> bytes:
    """Return the topology in names of entries for every CPU that has an instruction set (`stagec.jax_cache`)."""
    return f"stagec: any CPU with {isa}".encode()


def any_device(kind: str) -> bytes:
    """Return the same for every GPU of a kind: JAX's own has the driver, and the slot of the device."""
    return f"stagec: any {kind}".encode()


def fingerprint(number: str) -> bytes:
    """Return the topology in JAX's keys of one with that fingerprint, 16 hexadecimal digits. Raises ValueError."""
    if not re.fullmatch("[0-9a-f]{16}", number):
        raise ValueError(f'"{number}" has not 16 digits and letters a to f')
    return bytes.fromhex(number)


def file(executable: bytes, compression: str) -> bytes:
    """Return the file of an entry. JAX stores seconds of compiling there, which would differ in each build: zero."""
    return {"zlib": _zlib, "zstandard": _zstandard}[compression](bytes(4) + executable)


def _zlib(data: bytes) -> bytes:
    """RFC 1950 and 1951, in stored blocks."""
    blocks = list(_blocks(data, 65535))
    stored = (struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block for block, last in blocks)
    return b"\x78\x01" + b"".join(stored) + struct.pack(">I", zlib.adler32(data))


def _zstandard(data: bytes) -> bytes:
    """RFC 8878: one segment, whose size the head has in eight bytes, in raw blocks; at the end is a checksum."""
    blocks = (struct.pack("<I", len(block) << 3 | last)[:3] + block for block, last in _blocks(data, 1 << 17))
    checksum = struct.pack("<I", xxh64(data) & 0xFFFFFFFF)
    return b"\x28\xb5\x2f\xfd" + b"\xe4" + struct.pack("<Q", len(data)) + b"".join(blocks) + checksum


_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def xxh64(data: bytes) -> int:
    """Return the hash XXH64 with seed 0 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md)."""
    # Python has no XXH64, and a frame of zstandard ends with four bytes of it.
    prime1, prime2, prime3, prime4, prime5 = _PRIMES
    mask = (1 << 64) - 1

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> 64 - by) & mask

    def mixed(lane: int) -> int:
        return rotated(lane * prime2 & mask, 31) * prime1 & mask

    whole = len(data) & ~31
    state = prime5
    if whole:
        lanes = _lanes(data[:whole])
        state = sum(rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
        for lane in lanes:
            state = ((state ^ mixed(lane)) * prime1 + prime4) & mask
    state = (state + len(data)) & mask
    words = whole + (len(data) - whole & ~7)
    for (word,) in struct.iter_unpack("<Q", data[whole:words]):
        state = (rotated(state ^ mixed(word), 27) * prime1 + prime4) & mask
    if len(data) - words >= 4:
        state ^= int.from_bytes(data[words : words + 4], "little") * prime1 & mask
        state = (rotated(state, 23) * prime2 + prime3) & mask
        words += 4
    for byte in data[words:]:
        state = rotated(state ^ byte * prime5 & mask, 11) * prime1 & mask
    state = (state ^ state >> 33) * prime2 & mask
    state = (state ^ state >> 29) * prime3 & mask
    return state ^ state >> 32


def _lanes(data: bytes) -> list[int]:
    """Return the four sums of XXH64 over stripes of 32 bytes. One integer has all four: 2/3 of the time."""
    prime1, prime2, *_ = _PRIMES
    mask, gap = (1 << 64) - 1, bytes(8)  # behind each lane is room for a product

    def four(lanes: Sequence[int]) -> int:
        return sum(lane << 128 * i for i, lane in enumerate(lanes))

    masks = four([mask] * 4)
    state = four([prime1 + prime2 & mask, prime2, 0, -prime1 & mask])
    for first, second, third, last in struct.iter_unpack("8s8s8s8s", data):
        stripe = int.from_bytes(b"".join((first, gap, second, gap, third, gap, last)), "little")
        state = state + stripe * prime2 & masks
        state = (state << 31 | state >> 33) & masks
        state = state * prime1 & masks
    return [state >> 128 * i & mask for i in range(4)]


def _blocks(data: bytes, most: int) -> Iterator[tuple[bytes, bool]]:
    """Yield pieces of data (not empty), and whether each is the last one."""
    for at in range(0, len(data), most):
        yield data[at : at + most], at + most >= len(data)


@dataclass(frozen=True)
class Entry:
    """An executable under all its names.

    function, variant, target, bucket: what it is for, as in the manifest. module: its name in JAX.
    committed: positions of the arguments that lie on a device that the program chose.
    parts: digests of the parts of its key that all names have in common, as JAX logs them.
    said: the parts that are strings: the version of jaxlib, the platform, and flags.
    topologies: its devices, such as "any CPU with AVX2" or a fingerprint -> the digest of that part.
    names: of its entries, by the compression that their keys say, and by the same devices. zlib: as in `Key`.
    sha256: of its files, in hex, by the compression that their keys say; empty before they are written.
    """

    function: str
    variant: str
    target: str
    bucket: Mapping[str, int]
    committed: Sequence[int]
    module: str
    parts: Mapping[str, str]
    said: Mapping[str, str]
    topologies: Mapping[str, str]
    names: Mapping[str, Mapping[str, str]]
    zlib: str
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def described(self) -> str:
        """Its purpose, for a person: "predict for cpu-avx2, batch 8"."""
        what = f"{naming.artifact(self.function, self.variant)} for {self.target}"
        committed = f"arguments {', '.join(map(str, self.committed))} on a device" if self.committed else ""
        return ", ".join(filter(None, (what, naming.bucket(self.bucket), committed)))


def entry(
    key: Key, topologies: Mapping[str, bytes], function: str, variant: str, target: str, bucket: Mapping[str, int]
) -> Entry:
    """Return the names of the executable of `key`, for some devices."""

    def names(compression: str) -> dict[str, str]:
        parts = {COMPRESSION: compression.encode()}
        return {devices: key.with_parts({**parts, TOPOLOGY: part}).name() for devices, part in topologies.items()}

    common = {name: part for name, part in key.parts.items() if name not in (TOPOLOGY, COMPRESSION)}
    return Entry(
        function,
        variant,
        target,
        dict(sorted(bucket.items())),
        key.committed,
        key.module,
        {name: digest(part) for name, part in common.items()},
        {name: common[name].decode() for name in (JAXLIB, PLATFORM, FLAGS) if name in common},
        {devices: digest(part) for devices, part in topologies.items()},
        # A program that has zstandard looks for a file of it, and any other for one of zlib: each entry has both names.
        {compression: names(compression) for compression in COMPRESSIONS},
        key.zlib,
    )


def digest(part: bytes) -> str:
    """Return the SHA-256 of a part of a key, or of a file, in hex."""
    return hashlib.sha256(part).hexdigest()


def to_json(entries: Sequence[Entry]) -> str:
    """Return what `read` reads: of a folder, or of one entry."""
    document = {"format": _FORMAT, "entries": [asdict(entry) for entry in entries]}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def read(text: str) -> list[Entry]:
    """Read the JSON form of `to_json`. Raises ValueError, naming the key at fault, for anything else."""
    document = strict_json.parse(text, _MOST)
    if not isinstance(document, dict) or "entries" not in document:
        raise ValueError("not an index of entries of JAX's compilation cache")
    strict_json.check_format(document, _FORMAT, "build the folder again")
    _INDEX(document)
    return [Entry(**entry) for entry in document["entries"]]


_INDEX = json_shapes.shape(
    {
        "format": int,
        "entries": [
            {
                **dict.fromkeys(("function", "variant", "target"), str),
                "bucket": {...: int},
                "committed": [int],
                "module": _MODULE,
                "parts": {...: json_shapes.sha256},
                "said": {...: str},
                "topologies": {...: json_shapes.sha256},
                "names": {compression: {...: _NAME} for compression in COMPRESSIONS},
                "zlib": json_shapes.constant(*COMPRESSIONS),
                "sha256": {...: json_shapes.sha256},
            }
        ],
    }
)
