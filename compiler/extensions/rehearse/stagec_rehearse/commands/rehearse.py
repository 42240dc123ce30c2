"""Run a JAX program on devices that are not there, and list all that it compiles."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stagec.cli.files import Answer, Options, write_below, write_whole
from stagec.cli.options import at_least, more_than_0, value
from stagec.core.messages.errors import mistake

OPTIONS = {
    "program ...": "the program and its arguments, after --: -- python train.py --steps 3",
    "--device DEVICE": 'a GPU or a TPU, as in stagec targets ("h100-sxm", "mi300x", "v5e"), or "cpu"',
    "[--devices DEVICES]": value("how many of them the program sees (default: 1)", 1, at_least(1)),
    "[--processes PROCESSES]": value(
        "how many processes run it, each with its devices, joined by jax.distributed.initialize(): for a slice of "
        "TPUs as many as it has hosts (default: 1)",
        1,
        at_least(1),
    ),
    "[--output/-o OUTPUT]": value(
        "the folder for programs.toml and the programs' keys (default: rehearsal)", "rehearsal"
    ),
    "[--compare PROGRAMS]": "an earlier programs.toml: show what differs, and exit with status 1 if anything does",
    "[--jax-cache FOLDER]": "what aot_programs built of an earlier run: show what the program does not find there, and "
    "exit with status 1 if that is anything",
    "[--report FILE.html]": "where to write a page with all programs and what there is to tell of them",
    "[--values VALUES]": value(
        "what a GPU computes: zeros, or cpu for what this machine's CPU computes instead (default: zeros)",
        "zeros",
        choices=("zeros", "cpu"),
    ),
    "[--seconds SECONDS]": value("end the program after this time", 0.0, more_than_0),
    "[--idle SECONDS]": value("end the program when it has compiled nothing for this time", 0.0, more_than_0),
}


def run(options: Options) -> Answer:
    from stagec.core.builds.platforms import GPUS
    from stagec_rehearse import page, programs, report, running

    device, devices = running.resolved(options.device, options.devices, options.processes)
    platform = running.platform(device)
    if options.values == running.CPU and (platform == "tpu" or (platform in GPUS and devices > 1)):
        raise mistake("--values cpu is for one GPU: leave it out, or rehearse with --device cpu")
    output = Path(options.output)
    index = programs.entries(options.jax_cache) if options.jax_cache else None
    compared = programs.read(options.compare) if options.compare else None
    earlier = programs.read(str(output / programs.NAME)) if (output / programs.NAME).exists() else None
    budget = earlier.budget if earlier else {}  # people write it, and it stays
    programs.faults(programs.Rehearsal(device, devices, {}, (), budget))  # before a long run
    with tempfile.TemporaryDirectory(prefix="stagec-rehearsal-") as scratch:
        folder = Path(scratch)
        variables = running.environment(device, devices, folder, options.jax_cache, options.values)
        each = running.joined(variables, options.processes)
        ended = running.run(options.program, each, folder, options.seconds, options.idle)
        compiled, keys = programs.observed(folder)
        versions = running.versions(folder)
    missing = running.missing(device, versions)
    rehearsal = programs.Rehearsal(device, devices, versions, compiled, budget, options.processes)
    if not missing:
        for digest, key in keys.items():
            write_below(options.output, programs.key_file(digest), [key])
        write_below(options.output, programs.NAME, [programs.to_toml(rehearsal).encode()])
        # Those of an earlier rehearsal alone: a file that ends with .key may be anything.
        for program in earlier.programs if earlier else ():
            if program.file and program.file not in keys:
                (output / programs.key_file(program.file)).unlink(missing_ok=True)
    differences = programs.changes(compared, rehearsal) if compared else []
    faults = programs.faults(rehearsal)
    misses = programs.misses(rehearsal, keys, index) if index is not None and not missing else None
    told = report.Told(rehearsal, ended, differences, faults, missing, misses)
    shown = report.of_rehearsal(told)
    if options.report:
        write_whole(options.report, page.as_html(shown).encode())
    failed = bool(ended.status or missing or faults or differences or misses)
    return Answer(report.plain(told), report.text(shown), int(failed))
