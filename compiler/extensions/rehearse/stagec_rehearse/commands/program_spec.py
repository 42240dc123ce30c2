"""Write the spec with which to compile the programs of a rehearsal."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from stagec.cli.files import Options, read, write_whole
from stagec.cli.options import value

OPTIONS = {
    "--programs PROGRAMS": "the programs.toml",
    "--target TARGET": "the target that they are for, as in stagec targets",
    "[--key FILE]...": "the file of a program's key",
    "--output OUTPUT": "where to write the spec of an executable, a JSON file",
    "[--label LABEL]": value("what messages call the programs: the label of a Bazel target", ""),
}


def run(options: Options) -> None:
    from stagec.core.builds import specs
    from stagec.core.builds.platforms import GPUS
    from stagec.core.messages.errors import Problem, StagecError
    from stagec.hardware import catalog
    from stagec_rehearse import programs, running

    rehearsal = programs.read(options.programs)
    target = catalog.target(options.target)
    if isinstance(target, specs.GpuTarget):
        target = dataclasses.replace(target, topology=f"1x{rehearsal.processes}x{rehearsal.devices}")
    name = options.target if target.platform in GPUS else target.platform
    if isinstance(target, specs.TpuTarget):
        name = target.topology
        if rehearsal.device == name:
            target = running.tpus(name, rehearsal.processes)
    problems = []
    if rehearsal.device != name:
        what = f"it was rehearsed on {rehearsal.device}, and the target is {options.target}"
        problems.append(Problem(options.programs, "device", what, "rehearse it again, with --device of the target"))
    if rehearsal.processes > 1 and target.platform == "cpu":
        what = "the keys of several processes on CPUs have numbers of devices that only those processes know"
        problems.append(Problem(options.programs, "processes", what, "rehearse one process, or GPUs"))
    given = {Path(path).stem: path for path in options.key}
    listed = {program.file for program in rehearsal.programs}
    for program in rehearsal.programs:
        where = f"{program.name} ({program.line})"
        if program.not_kept:
            continue
        if not program.file:
            what = f"the key of {where} is not known: {program.error}"
            problems.append(Problem(options.programs, "programs", what, "mend the program, or remove the row"))
        elif program.file not in given:
            what = f"the key of {where}, {programs.key_file(program.file)}, is not among the files"
            problems.append(Problem(options.programs, "programs", what, "check in the whole folder of the rehearsal"))
    for digest, path in sorted(given.items()):
        if digest not in listed:
            problems.append(Problem(path, "", "it is the key of no program", "remove the file, or rehearse again"))
        elif hashlib.sha256(read(path)).hexdigest() != digest:
            problems.append(Problem(path, "", "its content has another digest than its name", "rehearse again"))
    if problems:
        raise StagecError(*problems).of(options.label)
    spec = specs.ExecutableSpec("programs", options.programs, target, {}, "", specs.Limits())
    write_whole(options.output, specs.to_json(spec).encode())
