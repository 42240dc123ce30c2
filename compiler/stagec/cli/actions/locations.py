"""Trace a function and write its module with source locations, as text."""

from __future__ import annotations

from stagec.cli.actions import export
from stagec.cli.files import Options, write_whole
from stagec.cli.options import FUNCTION, tracing

OPTIONS = {**FUNCTION, "--output OUTPUT": "where to write the module"}
preload = export.preload


def run(options: Options) -> None:
    with tracing(options) as spec:
        from stagec.frontends.common.frontend import frontend

        write_whole(options.output, frontend(spec).export_with_locations(spec, options.import_root).encode())
