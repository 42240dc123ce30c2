"""Changes of artifacts, as values that Hypothesis draws: called with the bytes of a file, they return the changed ones.

They know the formats: which bytes are numbers, where records of the zip are, what has keys, and which checksums and
digests somebody who changes a bundle can compute again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypothesis import strategies as st

from stagec.bundle.archive import INDEX, Archive
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.members import digest, encode
from stagec.core.data import strict_json
from stagec.stages.exported import Exported

Change: TypeAlias = Callable[[bytes], bytes]
Changes: TypeAlias = st.SearchStrategy[Change]

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
"""Where one, two or four bytes of a number end."""
STEPS = (-64, -4, -1, 1, 4, 64)
RECORDS = {b"PK\3\4": 30, b"PK\1\2": 46, b"PK\5\6": 22}
"""The records of a zip: their signatures and sizes."""
WORDS = (
    b" ", b"NaN", b"1e999", b"-0", b"[" * 500, b'"\\ud800"', b'"x":1,', b"9" * 5000, b"\xff", b"\xef\xbb\xbf", b",",
)  # fmt: skip
"""What parsers of JSON disagree about."""
TOML = (
    b" ", b"nan", b"1e999", b"[" * 500, b"x." * 500, b"9" * 5000, b"-1", b"\xff", b"\n", b"[", b"]", b"'", b'"""', b"{",
    b"../x", b"$(x)", b"\0", b"0x1p3", b"1979-05-27", b"true", b"[[a]]\n", b"f32[9*(a+b)^8]", b"\\u0000",
)  # fmt: skip
"""What a manifest may have where stagec expects something else."""
VALUES: Sequence[Any] = (
    None, True, 0, 1, -1, 2**31, 2**63 - 1, 2**64, 1.5, "", "x", "unknown", "../x", "\ud800", "f32[" + "9" * 30 + "]",
    "f32[(a+b+c+d)^8]", [], {}, [[[[]]]], {"tuple": ["*"]},
)  # fmt: skip
"""What readers of our JSON may take for an aval, a path, a number or a tree."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@dataclass(frozen=True)
class Flip:
    """The bits of these numbers are flipped."""

    bits: Sequence[int]

    def __call__(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for bit in self.bits:
            changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)


@dataclass(frozen=True)
class Splice:
    """`new` replaces `cut` bytes at `at`."""

    at: int
    cut: int
    new: bytes

    def __call__(self, data: bytes) -> bytes:
        return data[: self.at] + self.new + data[self.at + self.cut :]


@dataclass(frozen=True)
class Edit:
    """In the list or dict at `path` of a JSON text, `cut` items at `key` are replaced by the values of `new`.

    A dict takes the first of them, for what is there or not; without one it loses the key.
    """

    path: Sequence[str | int]
    key: str | int
    cut: int
    new: Sequence[Any]

    def __call__(self, data: bytes) -> bytes:
        root = json.loads(data)
        node = functools.reduce(lambda node, key: node[key], self.path, root)
        if isinstance(node, list):
            assert isinstance(self.key, int)
            node[self.key : self.key + self.cut] = self.new
        elif self.new:
            node[self.key] = self.new[0]
        else:
            del node[self.key]
        return strict_json.line(root)


@dataclass(frozen=True)
class Exchange:
    """In the list or dict at `path` of a JSON text, two items change places, in a dict each with its key."""

    path: Sequence[str | int]
    first: int
    second: int

    def __call__(self, data: bytes) -> bytes:
        root = json.loads(data)
        node = functools.reduce(lambda node, key: node[key], self.path, root)
        items = list(node.items() if isinstance(node, dict) else node)
        items[self.first], items[self.second] = items[self.second], items[self.first]
        node.clear()
        (node.update if isinstance(node, dict) else node.extend)(items)
        return strict_json.line(root)


GROWN = 60_000
"""Bytes of what is repeated: enough to see that what reads it takes time by the square of them."""


@dataclass(frozen=True)
class Repeat:
    """The bytes from `at` on, `size` of them, are there many times, one after the other."""

    at: int
    size: int

    def __call__(self, data: bytes) -> bytes:
        part = data[self.at : self.at + self.size]
        return data[: self.at] + part * (GROWN // len(part)) + data[self.at :]


@dataclass(frozen=True)
class Grow:
    """In the list or dict at `path` of a JSON text, the item at `key` is there many times, in a dict under other keys.

    twice: whether the last of those keys appears twice.
    """

    path: Sequence[str | int]
    key: str | int
    twice: bool

    def __call__(self, data: bytes) -> bytes:
        root = json.loads(data)
        node = functools.reduce(lambda node, key: node[key], self.path, root)
        item = node[self.key]
        count = 1 + GROWN // (len(json.dumps(item)) + 10)
        if isinstance(node, list):
            node += [item] * count
            return strict_json.line(root)
        node |= {f"x{i}": item for i in range(count)}
        if self.twice:
            node["twice"] = item
        return strict_json.line(root).replace(b'"twice":', b'"x%d":' % (count - 1))


@dataclass(frozen=True)
class Repack:
    """A member of a bundle is changed, and checksums, and the index's digests where `digests`, are computed again."""

    member: tuple[str, Change]
    digests: bool

    def __call__(self, data: bytes) -> bytes:
        members, (name, change) = dict(_members(data)), self.member
        members[name] = change(members[name])
        if self.digests:
            index = json.loads(members[INDEX])
            members |= {INDEX: strict_json.line({**index, "members": _digests(members)})}
        return encode(members)


@dataclass(frozen=True)
class Rewrite:
    """The index of a bundle with its functions in it is changed, and these are written as a member again."""

    change: Change

    def __call__(self, data: bytes) -> bytes:
        members = dict(_members(data))
        index = json.loads(self.change(whole_index(members)))
        lines, start = [], 0
        functions = index.get("functions")
        for entry in functions.values() if isinstance(functions, dict) else ():
            if not isinstance(entry, dict) or "line" not in entry:
                continue
            line = strict_json.line(entry.pop("line"))
            entry |= {"start": start, "sha256": digest(line)}
            lines.append(line)
            start += len(line)
        members[FUNCTIONS] = b"".join(lines)
        return encode({**members, INDEX: strict_json.line({**index, "members": _digests(members)})})


def whole_index(members: Mapping[str, bytes]) -> bytes:
    """The index of a bundle, in which each function has its line."""
    index = json.loads(members[INDEX])
    for entry, line in zip(index["functions"].values(), members[FUNCTIONS].splitlines(), strict=True):
        entry["line"] = json.loads(line)
    return strict_json.line(index)


def _digests(members: Mapping[str, bytes]) -> dict[str, str]:
    return {name: digest(data) for name, data in sorted(members.items()) if name != INDEX}


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file is changed, and its length written again."""

    change: Change

    def __call__(self, data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = self.change(data[8 : 8 + size])
        return len(header).to_bytes(8, "little") + header + data[8 + size :]


@functools.lru_cache(maxsize=1)
def _members(bundle: bytes) -> Mapping[str, bytes]:
    archive = Archive("x", bundle)
    return {name: archive[name] for name in (INDEX, *archive.index["members"])}


def of_files(files: Mapping[str, bytes], changes: Callable[[bytes], Changes]) -> st.SearchStrategy[tuple[str, Change]]:
    """Return the names of files with changes of them."""
    return st.one_of([st.tuples(st.just(name), changes(data)) for name, data in files.items()])


def of_bytes(data: bytes) -> Changes:
    """Return changes of a file of any format."""
    size = len(data)
    # Not within padding, where one place is like another.
    places = [at for at in range(size) if any(data[at : at + 4])]
    sizes = st.sampled_from((1, 4, 16, 100, 4096))
    blocks = st.builds(lambda at, size: data[at : at + size], st.sampled_from(places), sizes)
    more = st.sampled_from((b"\0", b"PK\5\6" + bytes(18), data[:1000])) | st.binary(min_size=1, max_size=100)
    return st.one_of(
        _flips(data),
        st.integers(0, size - 1).map(lambda length: Splice(length, size - length, b"")),
        _numbers(data, places),
        st.builds(Splice, st.sampled_from(places), sizes, st.just(b"")),
        st.builds(Splice, st.sampled_from(places), st.just(0) | sizes, blocks),
        st.builds(Splice, st.sampled_from((0, size)), st.just(0), more),
        st.builds(Repeat, st.sampled_from(places), sizes),
    )


def _flips(data: bytes) -> Changes:
    return st.builds(Flip, st.lists(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=3, unique=True))


@st.composite
def _numbers(draw: st.DrawFn, data: bytes, places: Sequence[int]) -> Splice:
    """Draw another number for what may be one: lengths, offsets, counts and enumerations of 1 to 8 bytes."""
    at, width = draw(st.sampled_from(places)), draw(st.sampled_from((1, 2, 4, 8)))
    old = data[at : at + width]
    near = st.sampled_from(STEPS).map(lambda step: int.from_bytes(old, "little") + step)
    value = draw(st.sampled_from(NUMBERS) | near | st.integers(0, len(data)))
    return Splice(at, len(old), (value % (1 << 8 * len(old))).to_bytes(len(old), "little"))


def of_text(text: bytes) -> Changes:
    """Return changes of a JSON text where parsers disagree: keys twice, numbers, nesting, spaces."""
    places = [at for at, byte in enumerate(text) if byte in b'{}[],:"']
    return st.builds(Splice, st.sampled_from(places), st.integers(0, 1), st.sampled_from(WORDS))


def of_json(text: bytes) -> Changes:
    """Return changes of a JSON text as values: another value, a key or an item less, or more."""
    holders = list(_holders(json.loads(text), ()))
    items = [
        (path, key, value)
        for path, holder in holders
        for key, value in (holder.items() if isinstance(holder, dict) else enumerate(holder))
    ]
    item = st.sampled_from(items)
    value = st.sampled_from(VALUES) | item.map(lambda item: item[2]) | JSON
    dicts = st.sampled_from([path for path, holder in holders if isinstance(holder, dict)])
    cuts = st.integers(0, 1)
    keys = st.sampled_from(("", "x", "format")) | item.map(lambda item: f"{item[1]}x") | st.text()
    pairs = [(path, at) for path, holder in holders for at in range(len(holder) - 1)]
    return st.one_of(
        st.builds(lambda at: Exchange(at[0], at[1], at[1] + 1), st.sampled_from(pairs)),
        st.builds(lambda at, twice: Grow(at[0], at[1], twice), item, st.booleans()),
        st.builds(lambda at, cut, new: Edit(at[0], at[1], cut, new), item, cuts, st.lists(value, max_size=2)),
        st.builds(Edit, dicts, keys, st.just(0), st.tuples(value)),
    )


def _holders(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Return the lists and dicts of a JSON value, by their paths."""
    if isinstance(node, dict | list):
        yield path, node
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _holders(item, (*path, key))


def of_zip(bundle: bytes) -> Changes:
    """Return changes of a zip: of any bytes, and of the fields of local headers, of the directory and of the end."""
    fields = [
        found.start() + field
        for signature, size in RECORDS.items()
        for found in re.finditer(re.escape(signature), bundle)
        for field in range(size)
    ]
    return of_bytes(bundle) | _numbers(bundle, fields)


def of_members(bundle: bytes) -> Changes:
    """Return changes of a bundle's index and members that leave a zip as stagec writes it."""
    members = _members(bundle)
    index, others = members[INDEX], {name: data for name, data in members.items() if name != INDEX}
    descriptions = {name: data for name, data in others.items() if name.endswith(".json")}
    return st.one_of(
        st.builds(Repack, st.tuples(st.just(INDEX), of_json(index)), st.just(False)),
        st.builds(Repack, st.tuples(st.just(INDEX), of_text(index)), st.just(False)),
        st.builds(Repack, of_files(others, _flips), st.booleans()),
        st.builds(Repack, of_files(descriptions, of_json), st.just(True)),
        st.builds(Repack, st.tuples(st.just(FUNCTIONS), of_bytes(others[FUNCTIONS])), st.just(True)),
        of_json(whole_index(members)).map(Rewrite),
    )


def of_document(text: bytes) -> Changes:
    """Return changes of a JSON text: a description, an envelope, a statement."""
    return of_bytes(text) | of_text(text) | of_json(text)


def of_safetensors(data: bytes) -> Changes:
    """Return changes of a safetensors file: of any bytes, and of its header."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]

    return of_bytes(data) | (of_text(header) | of_json(header)).map(Header)


def of_manifest(text: bytes) -> Changes:
    """Return changes of a TOML text: of any bytes, of what its values are, and of lines that are repeated."""
    places = [at for at, byte in enumerate(text) if byte in b'{}[],:"=\n']
    return of_bytes(text) | st.builds(Splice, st.sampled_from(places), st.integers(0, 3), st.sampled_from(TOML))


def of_export(export: bytes) -> Changes:
    """Return changes of an exported artifact: of any bytes, and of those outside the module, which are few."""
    module = Exported.deserialize(export).mlir_module_serialized
    start = export.index(module)
    outside = [*range(start), *range(start + len(module), len(export))]
    return of_bytes(export) | _numbers(export, outside)
