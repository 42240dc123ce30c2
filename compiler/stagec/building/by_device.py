"""JAX's modules for the devices of a function's targets, if they differ from the exported artifact's module.

It is the file that `stagec action export` writes beside the exported artifact: empty if JAX lowers the same for
all, and else a container like a bundle's (docs/bundle-format.md) with an `Exported` for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stagec.bundle import archive
from stagec.bundle.members import encode, members_table
from stagec.core.builds.specs import TargetSpec
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes
from stagec.stages.errors import NotExported

_INDEX = json_shapes.shape({"format": int, "kind": "lowered", "devices": {...: str}, "members": object})
"""Shape of the index: `devices` has the member of each kind of device."""


def write(by_kind: Mapping[str, bytes]) -> bytes:
    """Return the bytes of the file. by_kind: serialized `Exported` by the kind of device that it is for."""
    if not by_kind:
        return b""
    # Devices that JAX lowers alike share a member.
    numbers = {serialized: number for number, serialized in enumerate(dict.fromkeys(by_kind.values()))}
    members = {f"{number}.exported": serialized for serialized, number in numbers.items()}
    names = {kind: f"{numbers[serialized]}.exported" for kind, serialized in by_kind.items()}
    listed = {"format": archive.FORMAT, "kind": "lowered", "devices": names, "members": members_table(members)}
    return encode({archive.INDEX: archive.encode_index(listed), **dict(sorted(members.items()))})


def changed(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return the bytes of the file with `change` of each `Exported` in it."""
    if not data:
        return data
    container = archive.Archive("what JAX lowered for devices", data, _INDEX)
    return write({kind: change(container[member]) for kind, member in container.index["devices"].items()})


def read(data: bytes, target: TargetSpec) -> bytes | None:
    """Return the serialized `Exported` for the device of `target`; None if it is the exported artifact.

    Raises NotExported when the bytes are something else, or damaged.
    """
    device = target.jax_device()
    if not data or device is None:
        return None
    try:
        container = archive.Archive("what JAX lowered for devices", data, _INDEX)
        member = container.index["devices"].get(device["device_kind"])
        return container[member] if member else None
    except LoadError as error:
        raise NotExported(str(error)) from error
