"""Explain a program's misses in JAX's compilation cache, from its log and the index of a folder that stagec built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagec.jaxcache import jax_entries
from stagec.jaxcache.jax_entries import Entry

_PART = re.compile(r"get_cache_key hash of serialized (.+?): ([0-9a-f]{64})\s*$")
_FLAG = re.compile(r"Including XLA flag in cache key: (.*)$")
_FOLDER = re.compile(r"Enabling XLA \w+ cache at '(.*)'")
_COMPILING = re.compile(r"Compiling (?:jit\((\w+)\)|\S+) with global shapes and types \((.*)\)\. Argument mapping")
_SHAPE = re.compile(r"ShapedArray\((\w+\[.*?\])")
_DONE = re.compile(r"(PERSISTENT COMPILATION CACHE MISS|Persistent compilation cache hit) for '(.*)' with key '(.*)'")


@dataclass
class Lookup:
    """One look-up of an entry by a program.

    module: the module's name. key: the entry's name. parts: digests of the key's parts. flags: XLA's that are in it.
    shapes: those of the arguments, in JAX's form; "" if the log has none.
    folders: those of XLA's own caches; the key contains their paths.
    looked: whether `stagec.jax_cache` found nothing for a CPU such as this one.
    """

    module: str = ""
    key: str = ""
    hit: bool = False
    parts: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    shapes: str = ""
    looked: bool = False


@dataclass(frozen=True)
class Miss:
    """Why an entry was not found.

    nearest: the purpose of the nearest entry; "" if none has the module's name.
    reasons: one for each part that differs: its name by JAX, and a sentence.
    """

    lookup: Lookup
    nearest: str
    reasons: Sequence[tuple[str, str]]

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        reasons = [{"part": part, "why": why} for part, why in self.reasons]
        return {"module": self.lookup.module, "key": self.lookup.key, "nearest": self.nearest, "reasons": reasons}

    def as_text(self) -> str:
        """Return lines for a reader."""
        shapes = f" ({self.lookup.shapes})" if self.lookup.shapes else ""
        lines = [f"{self.lookup.module}{shapes}"]
        lines += [f"  nearest entry: {self.nearest}"] if self.nearest else []
        lines += [f"  {part}: {why}" if part else f"  {why}" for part, why in self.reasons]
        return "".join(f"{line}\n" for line in lines)


def read(log: str) -> Iterator[Lookup]:
    """Yield the look-ups of a program, in the order of its log; skip lines about anything else."""
    lookup = Lookup()
    for line in log.splitlines():
        if match := _COMPILING.search(line):
            lookup = Lookup(shapes=", ".join(_SHAPE.findall(match[2])))
        elif match := _PART.search(line):
            lookup.parts[match[1]] = match[2]
        elif match := _FLAG.search(line):
            lookup.flags.append(match[1])
        elif match := _FOLDER.search(line):
            lookup.folders.append(match[1])
        elif line.endswith(jax_entries.NO_ENTRY_FOR_THIS_MACHINE):
            lookup.looked = True
        elif match := _DONE.search(line):
            lookup.hit, lookup.module, lookup.key = match[1].startswith("Persistent"), match[2], match[3]
            if lookup.parts:
                yield lookup
            lookup = Lookup()


def explain(lookup: Lookup, entries: Sequence[Entry]) -> Miss:
    """Return why a program missed an entry of a folder."""
    same = [entry for entry in entries if entry.module == lookup.module]
    if not same:
        listed = ", ".join(sorted({entry.module for entry in entries})) or "none"
        why = f"no entry has this name; the folder has {listed}. An operation outside jax.jit is its own program"
        return Miss(lookup, "", [("", why)])
    entry = min(same, key=lambda entry: len(_different(lookup, entry)))
    reasons = [(part, _why(part, lookup, entry)) for part in _different(lookup, entry)]
    known = lookup.parts.get(jax_entries.TOPOLOGY) in entry.topologies.values()
    if not known and (not reasons or entry.said.get(jax_entries.PLATFORM) != "cpucpu"):
        reasons.append((jax_entries.TOPOLOGY, _why(jax_entries.TOPOLOGY, lookup, entry)))
    return Miss(lookup, entry.described, reasons or [("", "an entry has its key: is this the program's folder?")])


def _different(lookup: Lookup, entry: Entry) -> list[str]:
    """Return the parts of a key that differ from an entry's, ignoring devices."""
    apart = {jax_entries.TOPOLOGY, jax_entries.COMPRESSION}
    names = [name for name in {**lookup.parts, **entry.parts} if name not in apart]
    return [name for name in names if lookup.parts.get(name) != entry.parts.get(name)]


def _why(part: str, lookup: Lookup, entry: Entry) -> str:
    said: Mapping[str, str] = entry.said
    match part:
        case jax_entries.MODULE:
            return (
                "the program is another one: the function, shapes, dtypes, shardings, types of the mesh's axes "
                "(axis_types of [meshes]), static or donated arguments, arguments on a device (jax_cache_committed), "
                "or a setting of tracing such as jax_enable_x64"
            )
        case jax_entries.JAXLIB:
            return f"jaxlib is not {said[part]}, for which it was built"
        case jax_entries.PLATFORM:
            return f"the platform or its plugin is not the one that it was built for: {said[part]}"
        case jax_entries.FLAGS:
            flags = " ".join(dict.fromkeys(lookup.flags)) or "none"
            return f"flags of XLA that are in the key: {flags}; it was built with {said[part] or 'none'}"
        case jax_entries.OPTIONS if lookup.folders:
            return (
                f"the path of the folder is in the options ({lookup.folders[0]}): "
                "set JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES=none"
            )
        case jax_entries.OPTIONS:
            return (
                "options of XLA: compiler_options of jax.jit, jax_optimization_level, "
                "jax_disable_most_optimizations or the number of devices"
            )
        case jax_entries.TOPOLOGY if lookup.looked:
            return f"this machine's CPU runs none of {', '.join(entry.topologies)}"
        case jax_entries.TOPOLOGY if said.get(jax_entries.PLATFORM) == "cpucpu":
            return "the machine's CPU is in the key: import stagec.jax_cache, or name the machine in jax_cache_machines"
        case jax_entries.TOPOLOGY:
            return f"the devices are not those of {entry.target}: name them in jax_cache_machines"
    return "it is not what it was when the entry was built"
