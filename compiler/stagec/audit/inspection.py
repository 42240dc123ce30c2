"""`stagec inspect`: report on a file: a bundle, an exported artifact or a description of an executable."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagec.audit import kernels, measurements, processes
from stagec.bundle import additions, crossings, external
from stagec.bundle.archive import Archive
from stagec.bundle.calls import call_of, description_of, of_interface
from stagec.bundle.description import LARGEST, Description, architecture
from stagec.core.builds import naming
from stagec.core.builds.platforms import GPUS
from stagec.core.builds.specs import FOLLOWS_MACHINE, NOT_EXAMINED
from stagec.core.data import child, reading, thunks
from stagec.core.messages.errors import blaming

_START = 1000
"""The bytes at the start of a file that identify its kind."""
_IDS = 16
"""How many devices' ids a line shows."""


def inspect(path: str, ptx: str = "", sass: str = "") -> dict[str, Any]:
    """Return a report on the file at `path`; "kind" is its kind. Native code reads it only in a child process.

    ptx, sass: a kernel of an executable or of PTX, whose code the report then has, as PTX or SASS under "code".
    Raises StagecError when the file has another kind, or is damaged, or has no such kernel.
    """
    write = (
        "give a bundle (.aot), an executable (.xla) with its description beside it, an exported artifact (.exported), "
        "a description (.json), kernels (.ptx) or weights (.safetensors)"
    )
    if ptx or sass:
        with blaming(path):
            return {"kind": "code", "kernel": ptx or sass, "code": _code(path, ptx, sass)}
    with blaming(path, write):
        if path.endswith(".xla"):
            return _compiled(path)
        if path.endswith(".ptx"):
            return _ptx(reading.whole(path))
        if path.endswith(".safetensors"):
            return {"kind": "weights", **external.describe(path)}
        start = reading.start(path, _START)
        if start.startswith(b"PK"):
            return _bundle(Archive(path))
        if start.lstrip().startswith(b"{"):
            return _executable(reading.whole(path, LARGEST))
        return dict(child.call(exported, reading.whole(path)))


def as_text(report: dict[str, Any], flat: bool = False) -> str:
    """Return the report for a person to read.

    flat: arguments and results as a list of avals, in the order of the leaves, and not as a person writes a call.
    """
    match report["kind"]:
        case "bundle":
            return _bundle_text(report, flat)
        case "exported":
            return _exported_text(report, flat)
        case "weights":
            rows = [f"  {name}  {array['aval']}" for name, array in report["arrays"].items()]
            head = f"weights: {len(rows)} arrays, {report['bytes']:,} bytes, sha256 {report['sha256']}"
            return "\n".join(filter(None, [head, *rows, external.copied(report["arrays"])])) + "\n"
        case "ptx":
            return "\n".join(kernels.lines(report["kernels"])) + "\n"
    return _executable_text(report, flat)


def _bundle(archive: Archive) -> dict[str, Any]:
    """The index, the call of each function, and the operations and bytes of each executable."""
    archive.check_all()
    report = copy.deepcopy({**archive.index, "functions": dict(archive.index["functions"])})
    for name, function in report["functions"].items():
        function["call"] = call_of(archive, name).as_text()
        traced = description_of(archive, name)
        function["constants"] = traced["constants"]
        if FOLLOWS_MACHINE in traced["components"].get("key computed_on", {}).get("value", ""):
            function["examined"] = NOT_EXAMINED
        for executable in function["executables"]:
            text = archive.read(executable["description"], LARGEST)
            described = _executable(text)
            executable.update({name: described["analysis"][name] for name in ("flops", "peak_bytes")})
            executable.update({name: described[name] for name in ("processes", "avoided") if described.get(name)})
            if described["target"]["platform"] in GPUS:
                executable["kernels"] = kernels.in_bundle(archive, executable, Description.from_json(text))
    return report


def _compiled(path: str) -> dict[str, Any]:
    """Return a description that lies beside an executable, and its kernels. Raises ValueError, and OSError."""
    data = reading.whole(path)
    text = reading.whole(Path(path).with_suffix(".json"), LARGEST)
    description = Description.from_json(text)
    if hashlib.sha256(data).hexdigest() != description.executable_sha256:
        raise ValueError(f"{Path(path).with_suffix('.json').name} beside it describes another executable")
    report = {**_executable(text), "kernels": kernels.of_executable(data, description, timed=True)}
    if description.target.platform == "cpu":
        with contextlib.suppress(ValueError):  # one without results has no operations
            runs = sorted(thunks.kinds(data))
            made_with, where = crossings.described(description.versions), architecture(description.target.to_plain())
            report |= {"runs": runs, "measured": crossings.readers(runs, made_with, where)}
    return report


def _ptx(data: bytes) -> dict[str, Any]:
    """Return the result of ptxas for each kernel of PTX. Raises ValueError."""
    code = map(kernels.assemble, kernels.modules(data.decode("utf-8")).values())
    return {"kind": "ptx", "kernels": [row for cubin in code for row in kernels.of_code(cubin)]}


def _code(path: str, ptx: str, sass: str) -> str:
    """Return the PTX or SASS of a kernel. Raises ValueError, and OSError."""
    if not path.endswith((".ptx", ".xla")):
        raise ValueError("it has no kernels to show: PTX and SASS are those of an executable (.xla), or of PTX (.ptx)")
    data = reading.whole(path)
    if path.endswith(".ptx"):
        texts = kernels.modules(data.decode("utf-8"))
        if (ptx or sass) not in texts:
            raise ValueError(kernels.no_kernel(ptx or sass, texts))
        return texts[ptx] if ptx else kernels.sass(kernels.assemble(texts[sass]), sass)
    if ptx:
        raise ValueError("an executable does not keep PTX: build its output group ptx, and inspect that file")
    return kernels.sass(kernels.code_of(data, sass), sass)


def _executable(text: bytes) -> dict[str, Any]:
    """Return a description, with the parts of each process if there are several. Raises ValueError."""
    report = dict(json.loads(Description.from_json(text).to_json()))
    several = processes.processes(report)
    return report if several is None else {**report, "processes": several}


def exported(data: bytes) -> dict[str, Any]:
    """Return the report on an exported artifact. Raises ValueError for anything else; jaxlib may end the process."""
    from stagec.stages.exported import Exported

    artifact = Exported.deserialize(data)
    order, vjp = 0, artifact
    while vjp.has_vjp():
        order, vjp = order + 1, vjp.vjp()
    return {
        "kind": "exported",
        "fun_name": artifact.fun_name,
        "call": artifact._usage.as_text(),
        **artifact.interface(),
        "module_kept_var_idx": list(artifact.module_kept_var_idx),
        "ordered_effects": list(artifact.ordered_effects),
        "unordered_effects": list(artifact.unordered_effects),
        "disabled_safety_checks": list(artifact.disabled_safety_checks),
        "uses_global_constants": artifact.uses_global_constants,
        "vjp_order": order,
        "mlir_module_bytes": len(artifact.mlir_module_serialized),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def _bundle_text(report: dict[str, Any], flat: bool) -> str:
    members = report["members"]
    total = sum(member["bytes"] for member in members.values())
    lines = [f"bundle {report['name']} {report['version']}: {len(members)} members, {total:,} bytes"]
    if report["weights"]:
        stored = {weight["member"] for weight in report["weights"].values() if "member" in weight}
        size = sum(members[member]["bytes"] for member in stored)
        inside = sum("member" in weight for weight in report["weights"].values())
        lines += [f"  weights: {inside} arrays, {size:,} bytes"] if inside else []
    for name, file in report["weights_files"].items():
        count = sum(weight.get("file") == name for weight in report["weights"].values())
        what = f"{count} arrays, {file['bytes']:,} bytes, sha256 {file['sha256'][:12]}"
        lines.append(f"  weights beside the bundle: {name}: {what}")
    for name, target in report["targets"].items():
        lines.append(f"  target {name}: {measurements.hardware(target)}")
        lines += [f"    {line}" for line in measurements.unpromised(target)]
    several = additions.jaxlibs(report)
    if len(several) > 1:
        lines += [f"  jaxlib {release}: {count} executables" for release, count in several.items()]
    if "base" in report:
        lines.append(f"  executables were added to the bundle with the sha256 {report['base']['sha256'][:12]}")
    rows = [("", "bytes", "flops", "peak bytes", "sha256")]
    calls, after = {}, {}
    for name, function in report["functions"].items():
        flat_call = f"  {name}({', '.join(function['in_avals'])}) -> {', '.join(function['out_avals'])}"
        calls[len(rows)] = flat_call if flat else _indented(function["call"])
        entry = members[function["exported"]]
        platforms = f"portable: {', '.join(function['platforms'])}"
        after[len(rows)] = [f"      {line}" for line in measurements.unpromised(function)]
        rows.append((platforms, f"{entry['bytes']:,}", "", "", entry["sha256"][:12]))
        for constant in function["constants"]:
            what = f"constant: {constant['name'] or 'an array'} {constant['aval']}"
            rows.append((what, f"{constant['bytes']:,}", "", "", ""))
        for executable in function["executables"]:
            entry = members[executable["executable"]]
            flops, peak = (_figure(executable[name]) for name in ("flops", "peak_bytes"))
            made_with = f"jaxlib {executable['versions']['jaxlib']}" if len(several) > 1 else ""
            what = " ".join(filter(None, (executable["target"], naming.bucket(executable["bucket"]), made_with)))
            after[len(rows)] = _process_lines(executable, "      ")
            after[len(rows)] += [f"      {kernels.summary(executable['kernels'])}"] if "kernels" in executable else []
            after[len(rows)] += [f"      {line}" for line in measurements.avoided(executable.get("avoided", {}))]
            rows.append((what, f"{entry['bytes']:,}", flops, peak, entry["sha256"][:12]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, (what, *figures, digest) in enumerate(rows):
        lines += [calls[number]] if number in calls else []
        columns = [f"{figure:>{width}}" for figure, width in zip(figures, widths[1:-1], strict=True)]
        lines.append("  ".join([f"    {what:<{widths[0]}}", *columns, digest]))
        lines += after.get(number, [])
    return "\n".join(lines) + "\n"


def _figure(value: float | str) -> str:
    """A figure of an analysis: XLA does not say all of them."""
    return value if isinstance(value, str) else f"{value:,.0f}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _call_text(report: dict[str, Any], call: str, flat: bool) -> str:
    """How a person writes the call; flat: the avals of arguments and results, in the order of the leaves."""
    if not flat:
        return _indented(call)
    return f"  arguments  {', '.join(report['in_avals'])}\n  results    {', '.join(report['out_avals'])}"


def _exported_text(report: dict[str, Any], flat: bool) -> str:
    return (
        f"exported artifact of {report['fun_name']}: {report['bytes']:,} bytes, sha256 {report['sha256'][:12]}\n"
        f"  platforms  {', '.join(report['platforms'])}\n"
        f"{_call_text(report, report['call'], flat)}\n"
        f"  vjp order  {report['vjp_order']}\n"
        + "".join(f"  calls      {name} ({kind})\n" for name, kind in report["custom_calls"].items())
        + "".join(
            f"  effect     {_class_name(effect)} ({kind})\n"
            for kind in ("ordered", "unordered")
            for effect in report[f"{kind}_effects"]
        )
    )


def _class_name(text: str) -> str:
    """Return the class's name from JAX's stored form of an effect: `<class 'module.name'>`."""
    return text.removeprefix("<class '").removesuffix("'>")


def _executable_text(report: dict[str, Any], flat: bool) -> str:
    target = report["target"]
    bucket = naming.bucket(report["bucket"])
    call = replace(of_interface(report["function"], report), donated=report["donated"])
    lines = [
        f"executable of {report['function']} for {target['name']} ({measurements.hardware(target)})",
        f"  size       {report['executable_bytes']:,} bytes, sha256 {report['executable_sha256'][:12]}",
        *([f"  bucket     {bucket}"] if bucket else []),
        _call_text(report, call.as_text(), flat),
        *_assignment_lines(report["device_assignment"]),
        *_process_lines(report, "  "),
        *_analysis_lines(report["analysis"], report["cost_analysis"]),
        *_kernel_lines(report),
        f"  made with  {', '.join(f'{name} {version}' for name, version in report['versions'].items())}",
        *_crossing_lines(report),
        *(f"  unpromised {line}" for line in measurements.unpromised(target)),
        *(f"  defect     {line}" for line in measurements.avoided(report["avoided"])),
    ]
    return "\n".join(lines) + "\n"


def _kernel_lines(report: dict[str, Any]) -> list[str]:
    rows = report.get("kernels", [])
    if not rows:
        return []
    total = kernels.in_all(rows)
    after = [] if total is None else [f"    one after the other, they take at least {total:.3g} s"]
    return [f"  kernels    {kernels.summary(rows)}", *(f"    {line}" for line in kernels.lines(rows)), *after]


def _crossing_lines(report: dict[str, Any]) -> list[str]:
    """What an executable for a CPU runs, and which newer jaxlibs run that too, as measured."""
    if "runs" not in report:
        return []
    same = [reader for reader, why in report["measured"].items() if not why]
    others = [f"  measured   not with jaxlib {reader}: {why}" for reader, why in report["measured"].items() if why]
    measured = [f"  measured   the same bits with jaxlib {', '.join(same)}"] if same else []
    return [f"  runs       {', '.join(report['runs'])}", *measured, *others]


def _process_lines(report: dict[str, Any], indent: str) -> list[str]:
    return [indent + line for line in processes.as_lines(report["processes"])] if "processes" in report else []


def _assignment_lines(assignment: dict[str, Any] | None) -> list[str]:
    """The mesh, and the devices along it."""
    if assignment is None:
        return []
    axes = dict(zip(assignment["axis_names"], assignment["axis_sizes"], strict=True))
    mesh = naming.sizes(axes) or "no mesh"
    ids = list(map(str, assignment["device_ids"]))
    listed = ", ".join([*ids[:_IDS], *(["..."] if len(ids) > _IDS else [])])
    return [f"  devices    {len(ids)} ({mesh}), row by row: {listed}"]


def _analysis_lines(analysis: dict[str, Any], cost_analysis: dict[str, float]) -> list[str]:
    """Its costs on one device, and XLA's counts."""
    sizes = ", ".join(
        f"{name} {_figure(analysis[key])}"
        for name, key in (
            ("arguments", "argument_bytes"),
            ("outputs", "output_bytes"),
            ("aliases", "alias_bytes"),
            ("temporaries", "temporary_bytes"),
            ("code", "code_bytes"),
        )
    )
    calls = [
        f"{_figure(entry['count'])} {kind} ({_figure(entry['bytes'])} bytes, {_figure(entry['sent_bytes'])} sent)"
        for kind, entry in analysis["collectives"].items()
    ]
    roofline = analysis["roofline"]
    if not isinstance(roofline, str):
        parts = ", ".join(f"{name} {roofline[f'{key}_seconds']:.3g} s" for name, key in _BOUNDS.items())
        roofline = f"{roofline['seconds']:.3g} s, bound by {roofline['bound']} ({parts})"
    own = {name: _figure(cost_analysis.get(name, 0.0) if cost_analysis else "unknown") for name in _COUNTED}
    return [
        f"  peak       {_figure(analysis['peak_bytes'])} bytes on one device",
        f"  memory     {sizes}",
        f"  flops      {_figure(analysis['flops'])}",
        f"  accesses   {_figure(analysis['bytes_accessed'])} bytes",
        *([f"  exchanges  {', '.join(calls)}"] if calls else []),
        f"  roofline   {roofline}",
        f"  XLA says   flops {own['flops']}, accesses {own['bytes_accessed']} bytes, each loop once",
        *(f"  unknown    {reason}" for reason in analysis["unknown"]),
    ]


_BOUNDS = {"compute": "compute", "memory": "memory", "links": "link"}
_COUNTED = ("flops", "bytes_accessed")
