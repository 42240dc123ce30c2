"""A folder that stagec built, as a process reads it: its index once, and each file against the index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stagec.core.data import reading
from stagec.jaxcache import jax_entries, jax_misses
from stagec.jaxcache.jax_entries import Entry, Key
from stagec.jaxcache.jax_misses import Lookup, Miss


class Built:
    """The entries of a folder."""

    def __init__(self, folder: str, vouch: Callable[[bytes], None]) -> None:
        """Read the index. vouch: is given its bytes before they are parsed; it raises for bytes that nobody signed.

        Raises OSError; ValueError if it is not an index.
        """
        self._folder = folder
        index = reading.whole(Path(folder, jax_entries.INDEX))
        vouch(index)
        self.entries = jax_entries.read(index.decode())
        self._files: dict[str, tuple[Entry, str]] = {
            name: (entry, entry.sha256.get(compression, ""))
            for entry in self.entries
            for compression, names in entry.names.items()
            for name in names.values()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> bytes:
        """Return the file of an entry. Raises OSError; ValueError if its bytes are not those that were built."""
        entry, sha256 = self._files[name]
        content = reading.whole(Path(self._folder, name + jax_entries.SUFFIX))
        if jax_entries.digest(content) != sha256:
            raise ValueError(f"{name}: the file of {entry.described} is not what was built")
        return content

    def explain(self, name: str, key: Key | None, folder: str) -> Miss:
        """Say why there is no entry. key: its parts; None if they are not known.

        folder: of XLA's own caches; "" if a key has none.
        """
        if key is None:
            return Miss(Lookup(name.rpartition("-")[0], name), "", [("", "the parts of its key are not known")])
        parts = {part: jax_entries.digest(value) for part, value in key.parts.items()}
        flags = [key.parts[jax_entries.FLAGS].decode(errors="replace")] if key.parts.get(jax_entries.FLAGS) else []
        folders = [folder] if folder else []
        return jax_misses.explain(Lookup(key.module, name, False, parts, flags, folders, looked=True), self.entries)
