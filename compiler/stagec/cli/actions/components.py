"""List what an executable is made from, and compile nothing."""

from __future__ import annotations

import json

from stagec.cli.files import Options, write_whole
from stagec.cli.options import PROGRAM, compiling, program

OPTIONS = {**PROGRAM, "--output OUTPUT": "where to write it, a JSON file"}


def run(options: Options) -> None:
    with compiling(options) as spec:
        from stagec.building.compilation import made_from

        write_whole(options.output, json.dumps(made_from(*program(options, spec))).encode())
