"""Run a JAX program on devices that are not there, and list all that it compiles."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stagec.cli.files import Answer, Options
from stagec.cli.options import at_least, more_than_0, value

OPTIONS = {
    "program ...": "the program and its arguments, after --: -- python train.py --steps 3",
    "--device DEVICE": 'an NVIDIA device, as in stagec targets ("h100-sxm"), or "cpu"',
    "[--devices DEVICES]": value("how many of them the program sees (default: 1)", 1, at_least(1)),
    "[--output/-o OUTPUT]": value(
        "the folder for programs.toml and the programs' keys (default: rehearsal)", "rehearsal"
    ),
    "[--compare PROGRAMS]": "an earlier programs.toml: show what differs, and exit with status 1 if anything does",
    "[--seconds SECONDS]": value("end the program after this time", 0.0, more_than_0),
    "[--idle SECONDS]": value("end the program when it has compiled nothing for this time", 0.0, more_than_0),
}


def run(options: Options) -> Answer:
    from stagec_rehearse import programs, report, running

    output = Path(options.output)
    before = programs.read(options.compare) if options.compare else None
    budget = programs.budget(output / programs.NAME)
    programs.faults(programs.Rehearsal(options.device, options.devices, {}, (), budget))  # before a long run
    with tempfile.TemporaryDirectory(prefix="stagec-rehearsal-") as scratch:
        folder = Path(scratch)
        variables = running.environment(options.device, options.devices, folder)
        ended = running.run(options.program, variables, folder, options.seconds, options.idle)
        compiled, files = programs.observed(folder)
        versions = running.versions(folder)
    rehearsal = programs.Rehearsal(options.device, options.devices, versions, compiled, budget)
    programs.write(rehearsal, files, output)
    differences = programs.changes(before, rehearsal) if before else []
    faults = programs.faults(rehearsal)
    failed = bool(ended.status or faults or differences)
    said = report.text(rehearsal, ended, differences, faults)
    return Answer(report.plain(rehearsal, ended, differences, faults), said, int(failed))
