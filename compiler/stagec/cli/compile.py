"""Compile a portable artifact for a target."""

from __future__ import annotations

import argparse
import sys
import time

from stagec.cli.files import read, read_text, write_whole


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec", required=True, help="the executable's slice of the plan, a JSON file")
    parser.add_argument("--exported", required=True, help="the portable artifact to compile")
    parser.add_argument("--output", required=True, help="where to write the executable")
    parser.add_argument("--description", required=True, help="where to write its description, a JSON file")


def run(options: argparse.Namespace) -> None:
    from stagec import specs
    from stagec.backends.compilation import backend

    spec = specs.executable_spec(read_text(options.spec))
    backend(spec.target.platform).prepare_process(spec.target)  # before anything of jaxlib's is imported
    from stagec.stages.compiled import compile_exported
    from stagec.stages.limits import advice

    started = time.monotonic()
    compiled = compile_exported(read(options.exported), spec)
    late = advice(spec, time.monotonic() - started)
    if late:
        print(late, file=sys.stderr)
    write_whole(options.output, compiled.executable)
    write_whole(options.description, compiled.description.to_json().encode())
    if options.json:
        sys.stdout.write(compiled.description.to_json())
