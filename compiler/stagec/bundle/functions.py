"""The functions of a bundle: a member of its own, with a line of JSON for each, which is read when it is asked for.

The index has the start and the digest of each line. A process calls few of the functions of a large bundle: a start
with one of 1,000 reads one line. Standard library only.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stagec.bundle import index as bundle_index
from stagec.bundle.index import FUNCTIONS, LARGEST
from stagec.core.data import strict_json
from stagec.core.messages.refusal import LoadError

LISTED = ("function", "variant")
"""The keys of a function's entry that the index has, and the line has not: names need no line."""


class Functions(Mapping[str, Mapping[str, Any]]):
    """The entries of a bundle's functions, by name.

    `[name]` raises LoadError ("digest", "format") for a line that is not what the index says, or breaks its rules;
    KeyError. The limits of expressions hold for all entries that were read.
    """

    def __init__(self, index: Mapping[str, Any], read: Callable[[int, int], bytes], path: str) -> None:
        """index: as its member has it. read: returns bytes of `FUNCTIONS`, by start and size. path: for messages."""
        self._index, self._read, self._path = index, read, path
        self._listed: Mapping[str, Mapping[str, Any]] = index["functions"]
        # The end of a line is the start of the next: nothing can lie between two, or belong to both.
        starts = [*(listed["start"] for listed in self._listed.values()), index["members"][FUNCTIONS]["bytes"]]
        self._sizes = {name: end - at for name, (at, end) in zip(self._listed, itertools.pairwise(starts), strict=True)}
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._expressions = 0

    @property
    def variants(self) -> dict[str, tuple[str, str]]:
        """Function and variant of each entry, by its name; reads no line."""
        return {name: (listed["function"], listed["variant"]) for name, listed in self._listed.items()}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        if name not in self._entries:
            self._entries[name] = self._read_entry(name, self._listed[name])
        return self._entries[name]

    def _read_entry(self, name: str, listed: Mapping[str, Any]) -> Mapping[str, Any]:
        line = self._read(listed["start"], self._sizes[name])
        sha256 = hashlib.sha256(line).hexdigest()
        if sha256 != listed["sha256"]:
            what = f"{FUNCTIONS}: the line of {name} is not what the index says: its sha256 is {sha256}"
            raise LoadError("digest", f"{self._path}: {what}")
        try:
            written = strict_json.parse(line, LARGEST)
            # The digest does not say it: it covers any bytes that somebody put there.
            if not isinstance(written, dict) or strict_json.line(written) != line:
                raise ValueError(f"functions.{name}: it is not spelled as stagec writes it")
            entry = {**{key: listed[key] for key in LISTED}, **written}
            if len(entry) != len(written) + len(LISTED):
                raise ValueError(f"functions.{name}: the index has its {' and '.join(LISTED)}, not this line")
            self._expressions += bundle_index.check_function(self._index, name, entry, self._expressions)
        except ValueError as error:
            raise LoadError("format", f"{self._path}: {FUNCTIONS}: {error}") from error
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)
