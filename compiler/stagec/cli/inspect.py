"""Show what is in an artifact or a bundle."""

from __future__ import annotations

from stagec.cli.files import Answer, Options
from stagec.cli.options import value

OPTIONS = {
    "[--flat]": "list arguments and results in the order of the leaves, without their paths",
    "[--ptx KERNEL | --sass KERNEL]": (
        value("print that kernel of PTX alone", ""),
        value("print the instructions of a kernel, by nvdisasm", ""),
    ),
    "file": "a bundle (.aot), an executable (.xla), an exported artifact (.exported), a description (.json) or kernels "
    "for NVIDIA devices (.ptx)",
}


def run(options: Options) -> Answer:
    from stagec.audit import inspection

    report = inspection.inspect(options.file, options.ptx, options.sass)
    return Answer(report, report.get("code") or inspection.as_text(report, options.flat))
