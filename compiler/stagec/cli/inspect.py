"""Show what is in an artifact or a bundle."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flat", action="store_true", help="list arguments and results in the order of the leaves, without their paths"
    )
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--ptx", default="", metavar="KERNEL", help="print that kernel of PTX alone")
    code.add_argument("--sass", default="", metavar="KERNEL", help="print the instructions of a kernel, by nvdisasm")
    what = "a bundle (.aot), an executable (.xla), an exported artifact (.exported), a description (.json)"
    parser.add_argument("file", help=f"{what} or kernels for NVIDIA devices (.ptx)")


def run(options: argparse.Namespace) -> Answer:
    from stagec.reports import inspection

    report = inspection.inspect(options.file, options.ptx, options.sass)
    return Answer(report, report.get("code") or inspection.as_text(report, options.flat))
