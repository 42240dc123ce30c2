"""Write what the functions of a bundle take and give, as types for editors and type checkers."""

from __future__ import annotations

import re
from pathlib import Path

from stagec.cli.files import Answer, Options, write_whole
from stagec.core.messages.errors import Problem, StagecError, blaming

OPTIONS = {
    "bundle": "a bundle (.aot)",
    "[--output FILE.pyi]": "the stub to write (default: print it)",
}


def run(options: Options) -> Answer:
    from stagec.audit import measurements, stubs

    output = options.output
    if output and (not output.endswith(".pyi") or not Path(output).stem.isidentifier()):
        stem = re.sub(r"\W+", "_", Path(output).name.partition(".")[0]) or "bundle"
        what = "a stub is imported by its name, and this file's name is not a module name"
        raise StagecError(Problem(output, "", what, f"write for example --output {Path(output).with_name(stem)}.pyi"))
    archive = measurements.open_bundle(options.bundle)
    with blaming(options.bundle, "give a bundle (.aot)"):
        text = stubs.stub(archive, Path(output).stem if output else f"{archive.index['name']}_types")
    if output:
        write_whole(output, text.encode())
    value = {"bundle": options.bundle, "output": output, "functions": list(archive.index["functions"])}
    return Answer(value, "" if output else text)
