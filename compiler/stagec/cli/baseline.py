"""Compare what the executables of a bundle take with the baseline that was accepted."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from stagec.cli.files import Answer, read, write_whole
from stagec.cli.options import add_inventory
from stagec.core.telling.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("baseline", help="the baseline, a JSON file beside the manifest")
    parser.add_argument("--update", action="store_true", help="write the baseline instead: accept what they take now")
    add_inventory(parser)
    parser.add_argument(
        "--tolerances",
        default="{}",
        metavar="JSON",
        help='by how much metrics may grow, such as {"predict": {"peak_memory": "2%%"}}',
    )
    parser.add_argument("--accept", metavar="COMMAND", help="the command that messages name (default: --update)")
    parser.add_argument("--display-path", metavar="PATH", help="what messages call the baseline")


def run(options: argparse.Namespace) -> Answer:
    from stagec.reports import baselines, measurements

    archive = measurements.open_bundle(options.bundle)
    manifest = archive.index["name"]
    shown = options.display_path or options.baseline
    accept = options.accept or shlex.join(["stagec", "baseline", options.bundle, options.baseline, "--update"])
    before = {}
    if not options.update:
        if not Path(options.baseline).exists():
            raise StagecError(Problem(shown, "", "there is no baseline", f"write the first one: {accept}"))
        before = baselines.from_json(read(options.baseline), shown, manifest, accept)
    measured = baselines.measure(measurements.executables(options.bundle, archive, options.inventory))
    if options.update:
        text = baselines.to_json(manifest, measured)
        write_whole(options.baseline, text.encode())
        value = {"kind": "baseline", "baseline": shown, "executables": len(measured)}
        return Answer(value, f"{shown}: {len(measured)} executables\n")
    changes = list(baselines.compare(before, measured, json.loads(options.tolerances)))
    gone = sorted(before.keys() - measured.keys())
    ok = all(change.ok for change in changes)
    rows = [
        {
            "executable": change.name,
            "ok": change.ok,
            "in_baseline": not change.missing,
            "metrics": {row.metric: {"before": row.before, "after": row.after, "ok": row.ok} for row in change.rows},
            "new": list(change.new),
        }
        for change in changes
    ]
    value = {"kind": "baseline", "ok": ok, "changes": rows, "gone": gone, "accept": accept}
    return Answer(value, baselines.as_text(changes, gone, manifest, len(measured), accept), 0 if ok else 1)
