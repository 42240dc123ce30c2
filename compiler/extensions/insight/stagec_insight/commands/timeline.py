"""Estimate what a device does when in a call of an executable, as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Options, read_text, write_whole

OPTIONS = {
    "hlo": "the optimized program, as HLO text (output group hlo_after)",
    "--spec SPEC": "the executable's spec, a JSON file",
    "--description DESCRIPTION": "the executable's description, a JSON file",
    "--output/-o OUTPUT": "where to write the trace",
}


def run(options: Options) -> None:
    from stagec.backends.compilation import backend
    from stagec.bundle.description import Description
    from stagec.core.builds import naming
    from stagec.core.builds.specs import executable_spec
    from stagec_insight import timelines

    spec = executable_spec(read_text(options.spec))
    name = f"{naming.artifact(spec.function, spec.variant)} for {spec.target.name}"
    name = ", ".join(filter(None, (name, naming.bucket(spec.bucket))))
    description = Description.from_json(read_text(options.description))
    hardware = backend(spec.target.platform).hardware(spec.target)
    trace = timelines.of(name, Path(options.hlo).read_text("utf-8"), description, hardware)
    write_whole(options.output, trace.encode())
