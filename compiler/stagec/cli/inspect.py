"""Show what is in an artifact or a bundle, what takes its space, or the lines that an operation comes from."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from stagec.cli.files import Answer, Options
from stagec.cli.options import at_least, only_with, value
from stagec.core.messages.errors import blaming

OPTIONS = {
    "file": "a bundle (.aot), an executable (.xla), an exported artifact (.exported), a description (.json), kernels "
    "for NVIDIA devices (.ptx), weights (.safetensors), or with --locate a module with source locations (.debug.mlir)",
    "[--flat]": "list arguments and results in the order of the leaves, without their paths",
    "[--ptx KERNEL | --sass KERNEL | --sizes | --locate TEXT]": (
        value("print that kernel of PTX alone", ""),
        value("print the instructions of a kernel, by nvdisasm", ""),
        "of a bundle, what takes its space; status 1 if it is larger than --most",
        (
            "show which lines an operation comes from, such as jit(f)/tanh, or all that the message of an error names; "
            "status 1 if there are none"
        ),
    ),
    "[--most BYTES]": value("with --sizes: how large the file may be (default: any size)", None, at_least(0)),
    "[--rows ROWS]": value("with --sizes: how many rows are shown (default: 10)", None, at_least(1)),
}


def run(options: Options) -> Answer:
    only_with("--sizes", options.sizes, options, "most", "rows")
    if options.sizes:
        return _sizes(options.file, options.most, options.rows or 10)
    if options.locate is not None:
        return _located(options.file, options.locate, options.json)
    from stagec.audit import inspection

    report = inspection.inspect(options.file, options.ptx, options.sass)
    return Answer(report, report.get("code") or inspection.as_text(report, options.flat))


def _sizes(bundle: str, most: int | None, count: int) -> Answer:
    from stagec.audit import measurements
    from stagec.building.limits import in_bytes

    archive = measurements.open_bundle(bundle)
    size = Path(bundle).stat().st_size
    rows = sorted(measurements.sizes(archive, size, None), key=lambda row: -row[2])
    ok = most is None or size <= most
    limit = "" if most is None else f", {'within' if ok else 'over'} the limit of {most:,} (manifest.bundle_size)"
    lines = [f"{'' if ok else 'FAILED  '}{archive.index['name']}: {size:,} bytes{limit}"]
    shown = rows[:count]
    width = max((len(in_bytes(taken)) for _, _, taken in shown), default=0)
    lines += [f"  {in_bytes(taken):>{width}}  {kind}{name and f' of {name}'}" for kind, name, taken in shown]
    if rest := rows[len(shown) :]:
        lines.append(f"  {in_bytes(sum(taken for *_, taken in rest)):>{width}}  {len(rest)} more")
    parts = [{"kind": kind, "of": name, "bytes": taken} for kind, name, taken in rows]
    value = {"kind": "size", "bytes": size, "most": most, "ok": ok, "parts": parts}
    return Answer(value, "\n".join([*lines, ""]), 0 if ok else 1)


def _located(file: str, text: str, as_json: bool) -> Answer:
    from stagec.stages import locations

    with blaming(file, "give a file of output group debug"):
        operations = locations.find(Path(file), text)
    if not operations and not as_json:
        print(f"{file}: no operation in this file matches the text", file=sys.stderr)
    value = {"operations": [asdict(operation) for operation in operations]}
    return Answer(value, locations.as_text(operations) if operations else "", 0 if operations else 1)
