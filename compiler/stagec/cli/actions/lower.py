"""Show what XLA compiles for a target, as text."""

from __future__ import annotations

from stagec.cli.actions import compile as compile_action
from stagec.cli.files import Options, write_asked
from stagec.cli.options import PROGRAM, compiling, program

OPTIONS = {
    **PROGRAM,
    "[--stablehlo STABLEHLO]": "where to write it as StableHLO",
    "[--hlo-before HLO_BEFORE]": "where to write it as HLO, before XLA optimizes it",
}
preload = compile_action.preload


def run(options: Options) -> None:
    with compiling(options) as spec:
        from stagec.building import compilation

        _, lowered = compilation.lower(*program(options, spec))
        write_asked(options.stablehlo, lowered.as_text("stablehlo").encode())
        write_asked(options.hlo_before, lowered.as_text("hlo").encode())
