"""Compare what the executables of a bundle take with the baseline that was accepted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from stagec.cli.files import Answer, Options, read, write_whole
from stagec.cli.options import INVENTORY, value
from stagec.core.messages.errors import Problem, StagecError

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "baseline": "the baseline, a JSON file beside the manifest",
    "[--update]": "write the baseline instead: accept what they take now",
    **INVENTORY,
    "[--tolerances JSON]": value('by how much metrics may grow, such as {"predict": {"peak_memory": "2%%"}}', "{}"),
    "[--accept COMMAND]": "the command that messages name (default: --update)",
    "[--display-path PATH]": "what messages call the baseline",
}


def run(options: Options) -> Answer:
    from stagec.audit import baselines, measurements

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
