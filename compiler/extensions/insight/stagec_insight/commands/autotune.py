"""Time kernels on the NVIDIA devices of this machine, for the targets of a manifest."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Answer, Options, write_whole
from stagec.cli.options import MANIFEST_IMPORT_ROOTS, value

OPTIONS = {
    "manifest": "the manifest (.toml), or the inputs that Bazel built for it",
    "[--root ROOT]": value("folder that the manifest's path is relative to (default: this one)", "."),
    **MANIFEST_IMPORT_ROOTS,
}


def run(options: Options) -> Answer:
    from stagec.core.messages.progress import Progress
    from stagec_insight import autotuning

    with Progress("autotune") as progress:
        files = autotuning.autotune(options.manifest, options.import_root or ["."], progress)
    for file, text in files.items():
        write_whole(str(Path(options.root, file)), text.encode("ascii"))
    return Answer({"files": list(files)}, "".join(f"wrote {file}\n" for file in files))
