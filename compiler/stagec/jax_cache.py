"""`import stagec.jax_cache`: JAX's compilation cache finds what stagec built for every machine that can run it.

On CPUs the key of an entry has a fingerprint of the machine's CPU: its model, and every instruction set it has. On
NVIDIA devices the fingerprint has the driver, and the slot of the device. The folder of `MANIFEST.jax_cache` has each
executable under a name without it, because no target has the fingerprint of a real machine. After this import JAX looks
there first, for the newest instruction set that this machine has, or for the kind of its devices. It never opens an
entry that needs instructions which this machine lacks. What JAX compiles itself, it keeps under its own key, as before:
under a name of ours, a machine with fewer instructions would read it. Import it before the first call of a function.

`python -m stagec.jax_cache` prints the fingerprint, for the key `jax_cache_machines` of a manifest: with that, programs
on machines of the same kind need no import.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import jax

from stagec.frontends.jax import cache_keys
from stagec.hardware import x86
from stagec.jaxcache import jax_entries
from stagec.jaxcache.jax_entries import Key
from stagec.pjrt import host

__all__: list[str] = []

_LOGGER = logging.getLogger("jax.stagec")  # JAX_LOGGING_LEVEL is of it too


def _choose(key: Key) -> str | None:
    """Return the name of the entry in the folder for a machine such as this one; None if there is none."""
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


if __name__ == "__main__":
    print(cache_keys.fingerprint())
else:
    cache_keys.choosing(_choose)
