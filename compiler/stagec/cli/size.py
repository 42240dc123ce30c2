"""Show what takes the space of a bundle, and whether it is larger than it may be."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Answer, Options
from stagec.cli.options import at_least, value

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[--most BYTES]": value("how large its file may be (default: any size)", None, at_least(0)),
    "[--rows ROWS]": value("how many rows are shown (default: 10)", 10, at_least(1)),
}


def run(options: Options) -> Answer:
    from stagec.audit import measurements
    from stagec.building.limits import in_bytes

    archive = measurements.open_bundle(options.bundle)
    size = Path(options.bundle).stat().st_size
    rows = sorted(measurements.sizes(archive, size, None), key=lambda row: -row[2])
    ok = options.most is None or size <= options.most
    limit = ""
    if options.most is not None:
        limit = f", {'within' if ok else 'over'} the limit of {options.most:,} (manifest.bundle_size)"
    lines = [f"{'' if ok else 'FAILED  '}{archive.index['name']}: {size:,} bytes{limit}"]
    shown = rows[: options.rows]
    width = max((len(in_bytes(taken)) for _, _, taken in shown), default=0)
    lines += [f"  {in_bytes(taken):>{width}}  {kind}{name and f' of {name}'}" for kind, name, taken in shown]
    if rest := rows[len(shown) :]:
        lines.append(f"  {in_bytes(sum(taken for *_, taken in rest)):>{width}}  {len(rest)} more")
    parts = [{"kind": kind, "of": name, "bytes": taken} for kind, name, taken in rows]
    value = {"kind": "size", "bytes": size, "most": options.most, "ok": ok, "parts": parts}
    return Answer(value, "\n".join([*lines, ""]), 0 if ok else 1)
