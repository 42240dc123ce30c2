"""`import stagec.jax_cache`: JAX's compilation cache finds what stagec built for every machine that can run it.

On CPUs the key of an entry has a fingerprint of the machine's CPU: its model, and every instruction set it has. On
GPUs the fingerprint has the driver, and the slot of the device. The folder of `MANIFEST.jax_cache` has each
executable under a name without it, because no target has the fingerprint of a real machine. After this import JAX looks
there first, for the newest instruction set that this machine has, or for the kind of its devices. It never opens an
entry that needs instructions which this machine lacks. What JAX compiles itself, it keeps under its own key, as before:
under a name of ours, a machine with fewer instructions would read it. Import it before the first call of a function.
Where stagec is installed, JAX imports it itself, if its folder is one that stagec built (`stagec.jax_plugin`).

Each entry of that folder is compared with the digest in its index before XLA reads it. These variables say more:

- `STAGEC_MISSES_DIR`: a folder for what JAX compiles itself, so that the folder of `JAX_COMPILATION_CACHE_DIR` may be
  read-only. An entry has its digest at its end: one that was written in part is compiled again.
- `STAGEC_ON_MISS`: "log" warns of each program that was not built, with your line, and what of its key differs. "error"
  raises a `MissError`.
- `STAGEC_JAX_CACHE_KEYS`: paths of public keys, divided as in PATH. JAX then reads nothing from the folder if none of
  them signed it (`stagec sign FOLDER --model-signing`).
- `STAGEC_JAX_CACHE_METRICS`: a file that gets what `metrics` returns after each look-up.

`python -m stagec.jax_cache` prints the fingerprint, for the key `jax_cache_machines` of a manifest: with that, programs
on machines of the same kind need no import.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from stagec.core.data import reading, writing
from stagec.core.messages.errors import either, mistake
from stagec.core.messages.refusal import LoadError
from stagec.frontends.common import user_code
from stagec.frontends.jax import cache_keys
from stagec.hardware import x86
from stagec.jaxcache import jax_entries, jax_misses
from stagec.jaxcache.jax_entries import Entry, Key
from stagec.jaxcache.jax_misses import Lookup, Miss
from stagec.pjrt import host
from stagec.trust import attestation, model_signing

__all__ = ["MissError", "metrics"]

ON_MISS, MISSES, KEYS, METRICS = (
    f"STAGEC_{name}" for name in ("ON_MISS", "MISSES_DIR", "JAX_CACHE_KEYS", "JAX_CACHE_METRICS")
)
_LOGGER = logging.getLogger("jax.stagec")  # JAX_LOGGING_LEVEL is of it too
_ASKED = threading.local()
"""key: that of the program which JAX looks up in this thread."""
_KINDS = ("built", "kept", "damaged", "missing")
_COUNTS: Counter[str] = Counter()


class MissError(RuntimeError):
    """JAX was about to compile a program that was not built, and `STAGEC_ON_MISS` is "error"."""


def metrics() -> str:
    """Return the counters of this process in Prometheus' text format: what JAX found for the programs it looked up.

    `stagec_jax_cache_lookups_total` has the label `found`: "built" (in the folder that stagec built), "kept" (in the
    folder for misses), "damaged" (a file that is not what was built, so JAX compiles), "missing" (JAX compiles).

    >>> import stagec.jax_cache
    >>> print(stagec.jax_cache.metrics().splitlines()[2])
    stagec_jax_cache_lookups_total{found="built"} 0
    """
    name = "stagec_jax_cache_lookups_total"
    lines = [
        f"# HELP {name} Programs that JAX looked up in its compilation cache, by what it found.",
        f"# TYPE {name} counter",
    ]
    lines += [f'{name}{{found="{kind}"}} {_COUNTS[kind]}' for kind in _KINDS]
    return "\n".join(lines) + "\n"


def _choose(key: Key) -> str | None:
    """Return the name of the entry in the folder for a machine such as this one; None if there is none."""
    _ASKED.key = key
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        return None
    key = key.with_parts({jax_entries.COMPRESSION: cache_keys.compression().encode()})
    for topology in _topologies(key):
        name = key.with_parts({jax_entries.TOPOLOGY: topology}).name()
        if Path(folder, name + jax_entries.SUFFIX).exists():
            return name
    _LOGGER.debug("%s", jax_entries.NO_ENTRY_FOR_THIS_MACHINE)
    return None


def _topologies(key: Key) -> Iterator[bytes]:
    """Yield the topologies in names of entries that run here, the best first."""
    platform = key.parts.get(jax_entries.PLATFORM, b"")
    if platform.startswith(b"cpu"):
        flags = host.cpu_flags()
        yield from (
            jax_entries.any_cpu(isa) for isa in reversed(list(x86.ISA)) if flags.issuperset(x86.ISA[isa].requires)
        )
        return
    yield key.parts[jax_entries.TOPOLOGY]
    if platform.startswith(b"gpu"):
        kinds = {device.device_kind for device in jax.local_devices(backend="gpu")}
        yield from (jax_entries.any_device(kind) for kind in kinds if len(kinds) == 1)


class _Cache:
    """What JAX asks instead of its own cache of a folder that stagec built: its index was read once.

    own: JAX's cache of what it compiles itself; None if it keeps nothing. sealed: whether each of its entries ends with
    its digest, because others have none.
    """

    def __init__(self, path: str, entries: Sequence[Entry], own: Any, sealed: bool) -> None:
        self._path, self._entries, self._own, self._sealed = path, entries, own, sealed
        self._built: dict[str, tuple[Entry, str]] = {
            name: (entry, entry.sha256.get(compression, ""))
            for entry in entries
            for compression, names in entry.names.items()
            for name in names.values()
        }

    def get(self, name: str) -> bytes | None:
        """Return the file of an entry; None if JAX must compile. Raises MissError."""
        kind, content = "missing", None
        if name in self._built:
            try:
                kind, content = "built", self._read(name)
            except (OSError, ValueError) as error:
                kind = "damaged"
                _LOGGER.error("%s", error)
        elif content := self._kept(name):
            kind = "kept"
        _count(kind)
        if content is None and (policy := os.environ.get(ON_MISS)):
            miss = self._explain(name, getattr(_ASKED, "key", None))
            frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
            line = user_code.location(frames) or "an unknown line"
            told = f"compiled at {line}, because it was not built: {miss.as_text().rstrip()}"
            if policy == "error":
                raise MissError(told)
            _LOGGER.warning("%s", told)
        return content

    def _read(self, name: str) -> bytes:
        """Return the file of a built entry. Raises OSError; ValueError if its bytes are not those that were built."""
        entry, sha256 = self._built[name]
        content = reading.whole(Path(self._path, name + jax_entries.SUFFIX))
        if jax_entries.digest(content) != sha256:
            raise ValueError(f"{name}: the file of {entry.described} is not what was built")
        return content

    def _explain(self, name: str, key: Key | None) -> Miss:
        """Say why there is no entry. key: its parts; None if they are not known."""
        if key is None:
            return Miss(Lookup(name.rpartition("-")[0], name), "", [("", "the parts of its key are not known")])
        parts = {part: jax_entries.digest(value) for part, value in key.parts.items()}
        flags = [key.parts[jax_entries.FLAGS].decode(errors="replace")] if key.parts.get(jax_entries.FLAGS) else []
        # A key has the folder of XLA's own caches if they are on.
        caches = jax.config.values["jax_persistent_cache_enable_xla_caches"] not in ("none", "")
        folders = [self._path] if caches else []
        return jax_misses.explain(Lookup(key.module, name, False, parts, flags, folders, looked=True), self._entries)

    def put(self, name: str, content: bytes) -> None:
        """Keep what JAX compiled."""
        if self._own is not None and name not in self._built:
            self._own.put(name, content + _seal(content) if self._sealed else content)

    def _kept(self, name: str) -> bytes | None:
        content: bytes | None = self._own and self._own.get(name)
        if not content or not self._sealed:
            return content
        content, seal = content[:-_SEAL], content[-_SEAL:]
        if _seal(content) == seal:
            return content
        # A process was killed while it wrote, or the disk was full. JAX writes no file that is there.
        Path(os.environ[MISSES], name + jax_entries.SUFFIX).unlink(missing_ok=True)
        return None


_SEAL = 32
"""Bytes at the end of a file of the folder for misses. JAX's readers of frames pass over them."""


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _open(before: Callable[[str], Any], path: str) -> tuple[Any, str]:
    """Return what JAX asks for entries in the folder of its cache: its own cache, if stagec did not build the folder.

    Raises LoadError ("signature", "key", "cryptography") if keys are given and none has signed it, ValueError for an
    index that cannot be read.
    """
    keys = [key for key in os.environ.get(KEYS, "").split(os.pathsep) if key]
    index, misses = Path(path, jax_entries.INDEX), os.environ.get(MISSES, "")
    if not keys and not index.is_file():
        return before(path)  # type: ignore[no-any-return]
    vouching = attestation.Vouching(index, keys, 1, [f"{path}{model_signing.SUFFIX}"]) if keys else None
    try:
        content = reading.whole(index)
        if vouching:  # before it is parsed
            vouching(content, lambda: jax_entries.digest(content))
        entries = jax_entries.read(content.decode())
        # Nobody signed what lies in the folder itself and is not in its index.
        own = before(misses)[0] if misses else None if keys else before(path)[0]
    except (OSError, ValueError, LoadError) as error:
        _LOGGER.error("JAX compiles all programs itself: %s", error)
        raise
    return _Cache(path, entries, own, bool(misses)), path


def _count(kind: str) -> None:
    _COUNTS[kind] += 1
    if path := os.environ.get(METRICS):
        with contextlib.suppress(OSError):
            writing.named(path, [metrics().encode()])


def _start() -> None:
    """Put this between JAX and its cache. Raises StagecError for a variable that says something else."""
    if os.environ.get(ON_MISS, "") not in ("", *_POLICIES):
        raise mistake(f"{ON_MISS} is {os.environ[ON_MISS]!r}", f"set it to {either(_POLICIES)}")
    if os.environ.get(ON_MISS) == "error":
        # JAX warns of an error in its cache, and compiles; this lets the error through.
        jax.config.update("jax_raise_persistent_cache_errors", True)
    if os.environ.get(MISSES):
        # JAX keeps what took a second to compile, and a start has hundreds of programs that took less.
        for name, value in (("MIN_COMPILE_TIME_SECS", 0), ("MIN_ENTRY_SIZE_BYTES", -1)):
            if f"JAX_PERSISTENT_CACHE_{name}" not in os.environ:
                jax.config.update(f"jax_persistent_cache_{name.lower()}", value)
    if not cache_keys.choosing(_choose, _open) and os.environ.get(KEYS):
        jax.config.update("jax_enable_compilation_cache", False)  # or JAX would read what nobody signed


_POLICIES = ("log", "error")


if __name__ == "__main__":
    print(cache_keys.fingerprint())
else:
    _start()
