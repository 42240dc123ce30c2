"""The parts of an optimized program: its arrays, operations, exchanges and kernels, and its limits.

It is a file beside the executable that no bundle has, for reports and baselines; `stagec action compile`
writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagec.backends.analysis import UNKNOWN, buffers
from stagec.backends.compilation import Hardware
from stagec.building.limits import named
from stagec.bundle.description import LARGEST
from stagec.core.builds.specs import ExecutableSpec
from stagec.core.data import strict_json
from stagec.core.trees import json_shapes
from stagec.costs import collectives, totals
from stagec.costs.links import Seconds

if TYPE_CHECKING:
    from stagec.stages.compiled import Compiled

FORMAT = 1
"""Version of the JSON form."""
_ARRAYS = 60
"""How many arrays are listed one by one: the largest."""

Inventory = Mapping[str, Any]
"""The keys of `take`."""


def take(compiled: Compiled, hardware: Hardware, names: Sequence[str], spec: ExecutableSpec) -> dict[str, Any]:
    """Return the inventory of an executable.

    names: of the arguments that it takes.
    "executable_sha256": the digest of the executable. "operations": opcode -> "count" and "flops". "exchanges": rows of
    "kind", "axes" of the mesh, "count", "bytes", "sent_bytes" and "seconds". "arrays": the largest, rows of "kind"
    (argument, result, temporary), "name", "type" and "bytes" on one device; "more": "count" and "bytes" of the others.
    "kernels": rows of `backends.gpu.kernels`; none for other platforms.
    "hardware": "memory", "bandwidth" and "flops" of one device, null if they are not known. "limits": those of the
    manifest, by key. Counts are numbers of runs; "unknown" if they are not known.
    """
    # In the action that compiles: another one would have to compile again to see the optimized program.
    description, program = compiled.description, compiled.as_text()
    mesh = description.device_assignment
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)) if mesh else {}
    devices = description.nr_devices
    cost = totals.count(program, devices, Seconds(hardware.links, devices, mesh.coords if mesh else ()))
    exchanges: dict[tuple[str, str], dict[str, Any]] = {}
    for (kind, among), counts in cost.exchanges.items():
        row = exchanges.setdefault((kind, collectives.axes(kind, among, sizes)), {})
        for name, value in counts.items():
            row[name] = UNKNOWN if value is None or row.get(name) == UNKNOWN else row.get(name, 0) + value
    largest = buffers(program)
    limits = {name: value for name, value in vars(spec.limits).items() if value is not None and name not in _NO_LIMIT}
    return {
        "format": FORMAT,
        "kind": "inventory",
        "executable_sha256": description.executable_sha256,
        "operations": {
            opcode: {name: UNKNOWN if value is None else value for name, value in counts.items()}
            for opcode, counts in cost.opcodes.items()
        },
        "exchanges": [{"kind": kind, "axes": axes, **row} for (kind, axes), row in sorted(exchanges.items())],
        "arrays": [
            {"kind": buffer.kind, "name": buffer.name, "type": buffer.type, "bytes": buffer.bytes}
            for buffer in named(largest[:_ARRAYS], description, names)
        ],
        "more": {"count": len(largest[_ARRAYS:]), "bytes": sum(buffer.bytes for buffer in largest[_ARRAYS:])},
        "kernels": list(compiled.kernels),
        "hardware": {"memory": hardware.memory, "bandwidth": hardware.bandwidth, "flops": hardware.flops},
        "limits": limits,
    }


def to_json(inventory: Inventory) -> str:
    """Return the JSON form, with a newline at the end."""
    return json.dumps(inventory, indent=1) + "\n"


def from_json(text: bytes) -> dict[str, Any]:
    """Read the JSON form of `to_json`. Raises ValueError, naming the key at fault, when it is something else."""
    data = strict_json.parse(text, LARGEST)
    if not isinstance(data, dict) or data.get("kind") != "inventory":
        raise ValueError("it is not an inventory of an executable")
    strict_json.check_format(data, FORMAT, "compile its executable again")
    _INVENTORY(data)
    return dict(data)


_NO_LIMIT = ("key", "allow_unknown")
METRIC = json_shapes.either('a number or "unknown"', float, UNKNOWN)
_RATE = json_shapes.either("a number, or nothing,", float, None)
_LIMIT = json_shapes.either("a number, or a table of numbers,", float, {...: float})
_INVENTORY = json_shapes.shape(
    {
        "format": int,
        "kind": str,
        "executable_sha256": json_shapes.sha256,
        "operations": {...: {"count": METRIC, "flops": METRIC}},
        "exchanges": [{"kind": str, "axes": str, **dict.fromkeys(("count", "bytes", "sent_bytes", "seconds"), METRIC)}],
        "arrays": [{"kind": str, "name": str, "type": str, "bytes": int}],
        "more": {"count": int, "bytes": int},
        "kernels": [
            {
                "name": str,
                "instructions": [str],
                "limited_by": str,
                "bound": str,
                **dict.fromkeys(("blocks", "threads", "registers", "shared_memory", "spills", "stack"), METRIC),
                **dict.fromkeys(("occupancy", "runs", "seconds"), METRIC),
            }
        ],
        "hardware": dict.fromkeys(("memory", "bandwidth", "flops"), _RATE),
        "limits": {...: _LIMIT},
    }
)
