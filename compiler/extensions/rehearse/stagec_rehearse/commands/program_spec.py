"""Write the spec with which to compile the programs of a rehearsal."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Options, write_whole
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
    from stagec.core.messages.errors import Problem, StagecError
    from stagec.hardware import catalog
    from stagec_rehearse import programs

    rehearsal = programs.read(options.programs)
    target = catalog.target(options.target)
    problems = []
    if rehearsal.device != (options.target if target.platform == "cuda" else target.platform):
        what = f"it was rehearsed on {rehearsal.device}, and the target is {options.target}"
        problems.append(Problem(options.programs, "device", what, "rehearse it again, with --device of the target"))
    given = {Path(path).stem for path in options.key}
    listed = {program.file: program for program in rehearsal.programs if program.file}
    for digest in sorted(listed.keys() - given):
        what = f"the key of {listed[digest].name} ({listed[digest].line}), {digest}.key, is not among the files"
        problems.append(
            Problem(options.programs, "programs", what, "check the whole folder in that stagec rehearse wrote")
        )
    for digest in sorted(given - listed.keys()):
        what = f"{digest}.key is the key of no program"
        problems.append(Problem(options.programs, "programs", what, "remove the file, or rehearse again"))
    if problems:
        raise StagecError(*problems).of(options.label)
    spec = specs.ExecutableSpec("programs", options.programs, target, {}, "", specs.Limits())
    write_whole(options.output, specs.to_json(spec).encode())
