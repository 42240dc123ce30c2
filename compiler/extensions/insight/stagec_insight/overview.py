"""`stagec report`: collect all facts about a bundle's executables, as plain values for a page.

Descriptions are in the bundle; inventories, profiles and the provenance lie beside it, and a report leaves out missing
ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagec.audit import measurements
from stagec.audit.measurements import Executable
from stagec.backends.analysis import UNKNOWN
from stagec.building import limits
from stagec.bundle.archive import Archive
from stagec.bundle.calls import call_of
from stagec.bundle.description import LARGEST, Description
from stagec.core.builds import naming
from stagec.core.data import reading, strict_json
from stagec.core.messages.errors import Problem, StagecError, blaming, mistake
from stagec.core.messages.refusal import LoadError
from stagec.core.sizes.avals import DTYPES
from stagec.core.trees.tree import argument_path
from stagec.trust import attestation, verification
from stagec.trust.dsse import Envelope
from stagec_insight import profiles

_SIZES = 60
"""How many functions the overview of the file's size lists."""
_METRICS = (
    *("peak_bytes", "argument_bytes", "output_bytes", "alias_bytes", "temporary_bytes", "code_bytes"),
    *("flops", "bytes_accessed", "unknown"),
)
_KERNEL = (
    *("name", "runs", "blocks", "threads", "registers", "shared_memory", "spills", "occupancy", "limited_by"),
    *("seconds", "bound"),
)
_KINDS = {**dict.fromkeys(limits.IN_BYTES, "bytes"), "compile_time": "seconds"}


@dataclass(frozen=True)
class Sources:
    """The inputs of a report besides the bundle: paths of existing files.

    inventories: of the executables; none: those beside the bundle. profiles: files, folders or build events, as
    `stagec profile` takes them. statement: the in-toto statement. signature: the envelope; None: `<bundle>.dsse.json`.
    keys: public keys that are trusted.
    """

    inventories: Sequence[str] = ()
    profiles: Sequence[str] = ()
    statement: str | None = None
    signature: str | None = None
    keys: Sequence[str] = ()


def collect(path: str, sources: Sources) -> dict[str, Any]:
    """Return the facts about the bundle at `path`.

    "bundle": its name, version, size, targets, the sizes of what is in it, seconds of the build, provenance and
    signatures; "functions": signature -> "call" and "executables", by name. Raises StagecError, naming the file, where
    one is missing or damaged.
    """
    archive = measurements.open_bundle(path)
    index = archive.index
    times = _times(sources.profiles)
    seconds = {name: total for name, command, total, _ in times if command == "compile"}
    functions: dict[str, Any] = {
        name: {"call": call_of(archive, name).as_text(), "executables": {}} for name in index["functions"]
    }
    for executable in measurements.executables(path, archive, sources.inventories):
        built = seconds.get(f"{index['name']}.{executable.name}")
        functions[executable.signature]["executables"][executable.name] = _executable(executable, built)
    size = Path(path).stat().st_size
    bundle = {
        "name": index["name"],
        "version": index["version"],
        "file": Path(path).name,
        "bytes": size,
        "members": len(index["members"]),
        "sha256": archive.sha256(),
        "targets": {name: measurements.hardware(target) for name, target in index["targets"].items()},
        "sizes": list(measurements.sizes(archive, size, _SIZES)),
        "times": times,
        "provenance": list(_provenance(archive, sources.statement)),
        "signatures": list(_signatures(path, sources)),
    }
    return {"bundle": bundle, "functions": functions}


def _executable(executable: Executable, seconds: float | None) -> dict[str, Any]:
    description, inventory = executable.description, executable.inventory
    analysis, mesh = description.analysis, description.device_assignment
    roofline = analysis["roofline"]
    table: dict[str, Any] = {key: analysis[key] for key in _METRICS}
    table |= {
        "size": description.executable_bytes,
        "hardware": f"{description.target.name}: {measurements.hardware(description.target.to_plain())}",
        "devices": description.nr_devices,
        "avoided": measurements.avoided(description.avoided),
        "mesh": naming.sizes(dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))) if mesh else "",
        "itemized": inventory is not None,
        "arrays": [[row["kind"], row["name"], row["type"], row["bytes"]] for row in inventory["arrays"]]
        if inventory
        else list(_arrays(description)),
        "limits": list(_limits(executable, seconds)),
    }
    if not isinstance(roofline, str):
        table |= {"roofline_seconds": roofline["seconds"], "bound": roofline["bound"]}
        if roofline["compute_seconds"] and roofline["memory_seconds"]:
            rates = {
                "flops": analysis["flops"] / roofline["compute_seconds"],
                "bandwidth": analysis["bytes_accessed"] / roofline["memory_seconds"],
            }
            table["roofline"] = rates
    if inventory:
        table["more"] = inventory["more"] if inventory["more"]["count"] else None
        table["operations"] = [[kind, row["count"], row["flops"]] for kind, row in inventory["operations"].items()]
        table["kernels"] = [[row[name] for name in _KERNEL] for row in inventory["kernels"]]
        table["exchanges"] = [
            [row["kind"], row["axes"], *(row[key] for key in ("count", "bytes", "sent_bytes", "seconds"))]
            for row in inventory["exchanges"]
        ]
    else:
        table["exchanges"] = [
            [kind, "unknown axes", row["count"], row["bytes"], row["sent_bytes"], UNKNOWN]
            for kind, row in analysis["collectives"].items()
        ]
    if seconds is not None:
        table["compile_seconds"] = seconds
    return table


def _arrays(description: Description) -> Iterator[list[Any]]:
    """The arguments and results on one device, and the temporaries as one: the arrays known without an inventory."""
    paths = [argument_path(path) for path in description.in_tree.paths()]
    kept = [paths[i] for i in description.kept_var_idx]
    results = [f"result{path}" for path in description.out_tree.paths()]
    for kind, names, rows in (("argument", kept, "parameters"), ("result", results, "results")):
        for name, row in zip(names, description.abi[rows], strict=True):
            shape = row["shard_shape"]
            bits = DTYPES[row["dtype"]].bits if row["dtype"] in DTYPES else 32
            size = -(-math.prod(shape) * bits // 8)
            yield [kind, name, f"{row['dtype']}[{','.join(map(str, shape))}]", size]
    size = description.analysis["temporary_bytes"]
    if size != UNKNOWN:
        yield ["temporary", "all temporaries", "", size]


def _limits(executable: Executable, seconds: float | None) -> Iterator[list[Any]]:
    """Rows of a limit's name, the present value, the limit, and the unit."""
    if executable.inventory is None:
        return
    memory = executable.inventory["hardware"]["memory"]
    if memory:
        yield ["memory of a device", executable.description.analysis["peak_bytes"], memory, "bytes"]
    for name, taken, limit in limits.compared(
        executable.inventory["limits"], executable.description, executable.inventory["kernels"]
    ):
        known = seconds if name == "compile_time" and seconds is not None else taken
        yield [name, known, limit, _KINDS.get(name, "")]


def _times(given: Sequence[str]) -> list[list[Any]]:
    """Rows of an artifact, a command, its seconds and those of its phases; the longest first."""
    if not given:
        return []
    report = profiles.report(profiles.read(given))
    return [[row["artifact"], row["command"], row["seconds"], row["phases"]] for row in report["actions"]]


def _provenance(archive: Archive, statement: str | None) -> Iterator[list[str]]:
    """Rows of inputs and outputs of the build, from the statement; without one, only the digests."""
    versions = {
        f"{name} {version}"
        for function in archive.index["functions"].values()
        for executable in function["executables"]
        for name, version in executable["versions"].items()
    }
    yield ["Made with", ", ".join(sorted(versions))]
    if statement is None:
        return
    not_provenance = "give the bundle's .intoto.json", "not a statement with provenance: "
    with blaming(statement, *not_provenance, (ValueError, KeyError, TypeError, AttributeError)):
        data = strict_json.parse(reading.whole(statement, LARGEST), LARGEST)
        try:
            about = attestation.Statement.read(json.dumps(data).encode(), statement)
            about.check(archive, statement, archive.sha256())
        except LoadError as error:
            raise mistake(str(error), "give the statement of this bundle") from error
        build = data["predicate"]["buildDefinition"]
        builder = data["predicate"].get("runDetails", {}).get("builder", {}).get("id", "")
        yield ["Built as", f"{build['buildType']}, by {builder}"]
        for name, value in build["externalParameters"].items():
            file = isinstance(value, dict) and value.keys() == {"name", "digest"}
            text = f"{value['name']}, sha256 {value['digest']['sha256']}" if file else json.dumps(value)
            yield [name, value if isinstance(value, str) else text]
        yield ["Sources and packages", f"{len(build.get('resolvedDependencies', ()))}, each with its digest"]


def _signatures(path: str, sources: Sources) -> Iterator[list[str]]:
    """Rows about signers; without a key, no signature counts."""
    given = [sources.signature] if sources.signature else []
    envelopes = attestation.envelopes_of(path, given)
    if sources.keys:
        report = verification.verify(path, sources.keys, 1, given)
        if report["verdict"] != verification.VERIFIED:
            failed = next(check for check in report["checks"] if not check["ok"])
            raise StagecError(
                Problem(path, "", f"{failed['check']}: {failed['summary']}", "give the bundle's signature")
            )
        yield from ([check["check"], check["summary"]] for check in report["checks"])
        return
    if sources.signature is None and not Path(envelopes[0]).exists():
        yield ["Signature", f"none was given. {verification.UNSIGNED}"]
        return
    for envelope in envelopes:
        try:
            signatures = Envelope.read(envelope).signatures
        except LoadError as error:
            if given:
                raise
            yield ["Signature", f"none: {error}"]  # anybody may have put it there
            continue
        for keyid, _ in signatures:
            yield ["Signature", f"key {keyid or 'without a name'}; not checked: no key was given"]
