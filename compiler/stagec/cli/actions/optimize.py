"""Show what XLA makes of a program for a target, within its limits or not."""

from __future__ import annotations

from stagec.cli.actions import compile as compile_action
from stagec.cli.files import Options, write_asked
from stagec.cli.options import PROGRAM, compiling, program

OPTIONS = {
    **PROGRAM,
    "[--hlo-after HLO_AFTER]": "where to write it as HLO text",
    "[--hlo-proto HLO_PROTO]": "where to write it as XLA's HloModuleProto, with the elements of constants",
    "[--ptx PTX]": "where to write its kernels for NVIDIA devices as PTX, of which XLA makes code",
}
preload = compile_action.preload


def run(options: Options) -> None:
    with compiling(options) as spec:
        from stagec.building import compilation

        compiled, ptx = compilation.optimize(*program(options, spec))
        write_asked(options.hlo_after, compiled.as_text().encode())
        write_asked(options.hlo_proto, compiled.optimized.as_serialized_hlo_module_proto())
        write_asked(options.ptx, ptx.encode())
