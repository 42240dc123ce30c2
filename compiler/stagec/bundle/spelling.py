"""Read an index in stagec's own spelling by its parts: a call of one function reads little of a large index.

The entries of functions and the table of members are nearly all of an index. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stagec.core.data import strict_json

_FUNCTIONS, _WEIGHTS = b'"functions":{', b'},"weights":{'
"""The bytes before the functions of an index, and those after them."""
_FUNCTION, _VARIANT = '":{"function":"', '","variant":"'
"""The bytes before a function's entry in an index, except the name, and between its first two values."""
_MEMBERS, _END = b'"members":{', "}}\n"
"""The bytes before the table of members in an index, and those after it."""
_DIGEST, _PARTS = 5, 8
"""The position of the digest among the parts of a listed member between quotation marks, and their number."""
_OTHERS = bytes({*range(256)} - {*b'"\\{}'})
"""All bytes except those that start or end a string or an object."""
Encode = Callable[[Any], bytes]
"""Returns the one spelling of a value, with a newline at its end."""


class Members(dict[str, Any]):
    """A table of members in the right shape, because the reader has written it itself."""


class Functions(Mapping[str, Any]):
    """The entries of an index's functions; the first request for an entry reads it.

    variants: function and variant of each artifact, by its name.
    `[name]` raises ValueError for another spelling than stagec's, KeyError.
    """

    def __init__(self, entries: Mapping[str, str], variants: Mapping[str, tuple[str, str]], encode: Encode) -> None:
        """entries: the index's entry of each, as JSON."""
        self._entries, self.variants, self._encode = entries, variants, encode
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            text = f"{self._entries[name]}\n".encode()
            value = strict_json.spelled(text, len(text), self._encode)
            if value is None:
                raise ValueError(f"functions.{name}: it is not spelled as stagec writes it")
            self._read[name] = value
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def variants(functions: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    """Return function and variant of each artifact by its name, without reading more of `Functions`."""
    if isinstance(functions, Functions):
        return functions.variants
    return {name: (entry["function"], entry["variant"]) for name, entry in functions.items()}


def read(data: bytes, members: Sequence[tuple[str, int]], encode: Encode) -> dict[str, Any] | None:
    """Return the value of an index in the spelling of `encode`, with `Functions` and `Members`.

    None for any other: read all of it to find the fault.
    members: names and sizes of the members of the file. They determine the table of members except its digests: writing
    it takes less time than reading, checking and rewriting it.
    """
    start = data.rfind(_MEMBERS) + len(_MEMBERS)
    if not data[start:].isascii():
        return None
    table = data[start:].decode("ascii")
    digests = table.split('"')[_DIGEST::_PARTS]  # wherever they are: the whole table is compared below
    written = [(name, sha256, size) for (name, size), sha256 in zip(members, digests, strict=False)]
    listed = [f'"{name}":{{"sha256":"{sha256}","bytes":{size}}}' for name, sha256, size in written]
    if len(listed) != len(members) or table != ",".join(listed) + _END or not _are_digests(digests):
        return None
    try:
        rest, functions = _without_functions(data[:start], encode)
    except UnicodeDecodeError:
        return None
    text = rest + _END.encode()
    value = strict_json.spelled(text, len(text), encode)
    if not isinstance(value, dict) or [*value][-1:] != ["members"] or value["members"] != {}:
        return None  # the supposed table is a part of something else
    if functions is not None:
        if value.get("functions") != {}:
            return None  # so are the supposed functions
        value["functions"] = functions
    return {**value, "members": Members({name: {"sha256": sha256, "bytes": size} for name, sha256, size in written})}


def _without_functions(data: bytes, encode: Encode) -> tuple[bytes, Functions | None]:
    """Return the start of an index without its functions, and these; None if it cannot split them.

    An apparent start of a function may lie inside another one: then the first one, cut off there, has an open brace. It
    splits nothing if a string has a brace. Raises UnicodeDecodeError.
    """
    marks = data.translate(None, _OTHERS).replace(b'""', b"")
    start = data.find(_FUNCTIONS) + len(_FUNCTIONS)
    end = data.find(_WEIGHTS, start)
    before, *parts = data[start:end].decode("utf-8").split(_FUNCTION)
    if b'"' in marks or b"\\" in marks or before[:1] != '"':
        return data, None
    name, texts, variants = before[1:], {}, {}
    for number, part in enumerate(parts, start=1):
        entry, _, following = part.rpartition(',"') if number < len(parts) else (part, "", "")
        if entry.count("{") + 1 != entry.count("}"):
            return data, None
        function, _, more = entry.partition(_VARIANT)
        texts[name], variants[name] = _FUNCTION[2:] + entry, (function, more.partition('"')[0])
        name = following
    words = (word for name, both in variants.items() for word in (name, *both))
    if not parts or len(texts) < len(parts) or '"' in "".join(words):
        return data, None
    return data[:start] + data[end:], Functions(texts, variants, encode)


def _are_digests(texts: Sequence[str]) -> bool:
    """Whether each string is a SHA-256 in lower-case hex."""
    if {*map(len, texts)} - {64}:
        return False
    joined = "".join(texts)
    try:
        return bytes.fromhex(joined).hex() == joined
    except ValueError:
        return False
