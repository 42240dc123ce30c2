"""The description of one executable: JSON beside it, which the loader reads. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from stagec.core.builds import naming
from stagec.core.data import strict_json
from stagec.core.sizes.avals import Aval, parse_aval
from stagec.core.trees import json_shapes
from stagec.core.trees.tree import Tree

Scalar: TypeAlias = str | bool | int | float
FORMAT = 1
"""Version of the JSON form."""
EXPORTED_FORMAT = 1
"""Version of the JSON form of an exported artifact's description (`building/export_description.py`)."""
LARGEST = 2**24
"""Bytes of a description (16 MiB): one of a function with a hundred thousand arguments."""


class Target(NamedTuple):
    """The hardware that an executable is for.

    name: as in the manifest.
    platform: "cpu", "cuda", "rocm" or "tpu".
    device_kind: the hardware of the code: LLVM's name of the CPU ("haswell"), or the device's ("TPU v5 lite").
    requires: flags of /proc/cpuinfo without which the code must not run, sorted; empty for other platforms.
    compiler_options: XLA flags of the target, without dashes.
    settings: the other fields of the target, as in the manifest: isa, architecture and parallelism of a CPU, topology
        and the like.
    """

    name: str
    platform: str
    device_kind: str
    requires: tuple[str, ...]
    compiler_options: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form: one flat object."""
        fixed = self._asdict()
        settings = fixed.pop("settings")
        return {**fixed, "requires": list(self.requires), **settings}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Target:
        """Read what `to_plain` wrote. Raises KeyError if a field is missing."""
        fixed = {name: data[name] for name in Target._fields if name != "settings"}
        settings = {name: value for name, value in data.items() if name not in fixed}
        return Target(**{**fixed, "requires": tuple(fixed["requires"])}, settings=settings)


def architecture(target: Mapping[str, Any]) -> str:
    """Return the architecture of the CPU that runs a target's machine code, as `uname -m` has it; "" for accelerators.

    target: as in an index, or of `Target.to_plain`; one that names none is for x86-64.
    """
    return str(target.get("architecture", "x86_64")) if target["platform"] == "cpu" else ""


class DeviceAssignment(NamedTuple):
    """Which device runs which partition of a program for several devices, as it was compiled.

    The number of a partition, its logical id, is its position in the mesh, counted row by row: the last axis runs
    fastest. If a target has several slices, each has as many logical ids, one slice after the other.
    For 1,024 devices this is 20 KB of a description.

    axis_names, axis_sizes: of the mesh; empty if the program declares none.
    device_ids: for each logical id the device, in XLA's numbers for the target's topology.
    coords: for each logical id where its device is: x, y and z of the chip in its slice, and the core on the chip.
        TPUs only; empty for others.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    device_ids: tuple[int, ...]
    coords: tuple[tuple[int, ...], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form; coordinates are strings such as "0,1,0,0", a line for each."""
        values = {name: list(value) for name, value in self._asdict().items()}
        return {**values, "coords": [",".join(map(str, device)) for device in self.coords]}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> DeviceAssignment:
        """Read what `to_plain` wrote. Raises KeyError or ValueError if it is something else."""
        values = {name: tuple(data[name]) for name in DeviceAssignment._fields}
        return DeviceAssignment(**{**values, "coords": tuple(tuple(map(int, c.split(","))) for c in values["coords"])})


class Description(NamedTuple):
    """One executable: what it computes, how to call it, what it needs, what it costs.

    manifest: path of the manifest, relative to the workspace; function: its name there; variant: the name of the
        combination of its static arguments, "" if there is only one.
    target: the hardware it is for.
    bucket: the size of each dimension variable; empty when the function has none.
    in_tree: structure of `(args, kwargs)`; out_tree: of the result.
    in_avals, out_avals: flat and static, in the order of the trees' leaves.
    nr_devices: on how many devices of the platform it runs; the executable itself knows how arrays are split.
    device_assignment: the target's device for each partition; None if there is one device.
    kept_var_idx: sorted indices of the `in_avals` that the executable takes; callers do not pass the others.
    donated: for each of `in_avals`, whether the call consumes its buffer.
    custom_calls: name of each custom call in the optimized program -> who provides it ("guaranteed", "same toolchain",
        "unknown"; stagec/pjrt/custom_calls.py).
    cost_analysis, memory_analysis: XLA's counts (operations, bytes), by XLA's name with underscores.
    analysis: its costs on one device, from `backends.analysis.analyze`: bytes by use, "flops", "bytes_accessed",
        "collectives" by kind and "roofline"; "unknown" for an unknown value, with reasons under the key "unknown".
        XLA's own counts, with each loop once, are in `cost_analysis`.
    versions: "jaxlib", "stagec" and packages of the compiler that made the executable; of a library that the build
        examined itself, its build, by the file's name.
    abi: "parameters" and "results" as a program without Python passes them, in order (stages/abi.py,
        docs/without-python.md).
    exported_sha256, stablehlo_sha256, executable_sha256: hex digests of the exported artifact, of the StableHLO module
        made of it for this target and bucket, and of the executable.
    executable_bytes: size of the executable.
    components: the inputs of its build: name -> {"value", "sha256"} (stagec/core/builds/components.py).
    avoided: known defects of the compiler that the program would have: issue -> the option that avoids it, beside those
        of `target` (stagec/backends/cpu/defects.py).
    """

    manifest: str
    function: str
    variant: str
    target: Target
    bucket: Mapping[str, int]
    in_tree: Tree
    in_avals: tuple[Aval, ...]
    out_tree: Tree
    out_avals: tuple[Aval, ...]
    nr_devices: int
    device_assignment: DeviceAssignment | None
    kept_var_idx: tuple[int, ...]
    donated: tuple[bool, ...]
    custom_calls: Mapping[str, str]
    cost_analysis: Mapping[str, float]
    memory_analysis: Mapping[str, int]
    analysis: Mapping[str, Any]
    versions: Mapping[str, str]
    abi: Mapping[str, Sequence[Mapping[str, Any]]]
    exported_sha256: str
    stablehlo_sha256: str
    executable_sha256: str
    executable_bytes: int
    components: Mapping[str, Mapping[str, str]]
    avoided: Mapping[str, str] = MappingProxyType({})

    @property
    def artifact(self) -> str:
        """The name of this signature's artifacts: the function's name, and `-VARIANT` if it has one."""
        return naming.artifact(self.function, self.variant)

    @property
    def memory_kinds(self) -> dict[int, str]:
        """The memory of each parameter outside the device's own memory, by the parameter's number."""
        rows = enumerate(self.abi["parameters"])
        return {number: row["memory_kind"] for number, row in rows if "memory_kind" in row}

    def to_json(self) -> str:
        """Return the JSON form, with a newline at the end: keys in the order of the fields.

        It is indented, because `reproduce` and people compare two descriptions line by line.
        """
        values = self._asdict()
        values["target"] = self.target.to_plain()
        values["device_assignment"] = self.device_assignment and self.device_assignment.to_plain()
        values |= {name: values[name].to_json() for name in ("in_tree", "out_tree")}
        values |= {name: [str(aval) for aval in values[name]] for name in ("in_avals", "out_avals")}
        values["avoided"] = dict(self.avoided)
        return json.dumps({"format": FORMAT, "kind": "executable", **values}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> Description:
        """Read what `to_json` wrote.

        Raises ValueError, naming the key at fault, when it is something else or has another format version.
        """
        data = strict_json.parse(text, LARGEST)
        if not isinstance(data, dict) or data.get("kind") != "executable":
            raise ValueError("it does not describe an executable")
        strict_json.check_format(data, FORMAT, "compile it again")
        _DESCRIPTION(data)
        values = {name: data[name] for name in Description._fields}
        values["target"] = Target.from_plain(data["target"])
        assigned = values["device_assignment"]
        values["device_assignment"] = assigned and DeviceAssignment.from_plain(assigned)
        values |= {name: Tree.from_json(values[name]) for name in ("in_tree", "out_tree")}
        values |= {name: tuple(map(parse_aval, values[name])) for name in ("in_avals", "out_avals")}
        values |= {name: tuple(values[name]) for name in ("kept_var_idx", "donated")}
        description = Description(**values)
        description._check()
        return description

    def _check(self) -> None:
        """Raise ValueError if fields do not belong together."""
        count = len(self.in_avals)
        if self.in_tree.num_leaves != count or self.out_tree.num_leaves != len(self.out_avals):
            raise ValueError("trees and avals do not agree")
        if len(self.donated) != count:
            raise ValueError(f"donated: {len(self.donated)} arguments, there are {count}")
        if list(self.kept_var_idx) != sorted({index for index in self.kept_var_idx if index < count}):
            raise ValueError(f"kept_var_idx: expected sorted indices of {count} arguments")
        if len(self.abi["parameters"]) != len(self.kept_var_idx) or len(self.abi["results"]) != len(self.out_avals):
            raise ValueError("abi: it has other numbers of parameters and results than kept_var_idx and out_avals")
        if not self.nr_devices:
            raise ValueError("nr_devices: expected at least one")


_HARDWARE = {"platform": str, "device_kind": str, "requires": [str], "architecture?": str, ...: object}
TARGET = json_shapes.shape(_HARDWARE)
"""Shape of a target without its name: the hardware, and settings as in the manifest."""
_COUNT = json_shapes.either('a number or "unknown"', float, "unknown")
_ROOFLINE = {
    **dict.fromkeys(("compute_seconds", "memory_seconds", "link_seconds", "seconds"), float),
    "bound": json_shapes.constant("compute", "memory", "links"),
}
_BYTES = ("argument_bytes", "output_bytes", "alias_bytes", "temporary_bytes", "code_bytes", "peak_bytes")
_MOVED = ("count", "bytes", "sent_bytes")
_ASSIGNMENT = {
    "axis_names": [str],
    "axis_sizes": [int],
    "device_ids": [int],
    "coords": [json_shapes.matching("[0-9]{1,9}(,[0-9]{1,9})*", 'coordinates such as "0,1,0,0"')],
}
_ARRAY = {
    "path": str,
    "dtype": str,
    "shape": [int],
    "shard_shape": [int],
    "sharding": json_shapes.either("for each dimension its axes, or nothing,", None, [[str]]),
    "minor_to_major": [int],
    "tiles": [[int]],
    "unreduced?": [str],
    "memory_kind?": str,
}
_DIGEST = json_shapes.either("a SHA-256 in lower-case hex, or nothing,", json_shapes.sha256, "")
_DESCRIPTION = json_shapes.shape(
    {
        "format": int,
        "kind": str,
        "manifest": str,
        "function": str,
        "variant": str,
        "target": {"name": str, "compiler_options": {...: json_shapes.scalar}, **_HARDWARE},
        "bucket": {...: int},
        "in_tree": json_shapes.tree,
        "in_avals": [json_shapes.static_aval],
        "out_tree": json_shapes.tree,
        "out_avals": [json_shapes.static_aval],
        "nr_devices": int,
        "device_assignment": json_shapes.either("a device assignment, or nothing,", None, _ASSIGNMENT),
        "kept_var_idx": [int],
        "donated": [bool],
        "custom_calls": {...: str},
        "cost_analysis": {...: float},
        "memory_analysis": {...: float},
        "analysis": {
            **dict.fromkeys((*_BYTES, "flops", "bytes_accessed"), _COUNT),
            "collectives": {...: dict.fromkeys(_MOVED, _COUNT)},
            "roofline": json_shapes.either('a roofline or "unknown"', _ROOFLINE, "unknown"),
            "unknown": [str],
        },
        "versions": {...: str},
        "abi": {"parameters": [{**_ARRAY, "donated": bool}], "results": [_ARRAY]},
        # Of an executable that comes from no manifest, the export is not known.
        "exported_sha256": _DIGEST,
        "stablehlo_sha256": _DIGEST,
        "executable_sha256": json_shapes.sha256,
        "executable_bytes": int,
        "components": {...: {"value": str, "sha256": json_shapes.sha256}},
        "avoided": {...: str},
    }
)
