"""Run on CPUs what compilers decided for devices, and compare the results with golden outputs."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, read
from stagec.cli.options import WEIGHTS

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[functions ...]": "names of functions with golden inputs (default: all)",
    "[--hlo EXECUTABLE=FILE]...": "the program of an executable that does not have it, such as mlp.v5e-2x2, as "
    "output group hlo_proto has it",
    "[--platform PLATFORM]": "executables for this platform alone, such as cuda",
    **WEIGHTS,
}


def run(options: Options) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.cli.run import compared
    from stagec_insight import decided

    programs = {name: read(file) for name, _, file in (word.partition("=") for word in options.hlo)}
    archive = Archive(options.bundle)
    outcomes = decided.check(archive, options.functions, options.platform, options.weights, programs)
    return compared(outcomes, "emulate", options.bundle, None, allow_skipped=False)
