"""List the artifacts that a manifest asks for."""

from __future__ import annotations

import sys

from stagec.cli.files import Options, write_whole

OPTIONS = {
    "manifest": "the manifest, a TOML file",
    "[--display-path DISPLAY_PATH]": "name of the manifest in messages and in the plan (default: as given)",
    "[--output OUTPUT]": "write the plan as JSON to this file",
    "[--target-files TARGET_FILES]": "write the files that the manifest's targets name to this file, one a line",
}


def run(options: Options) -> None:
    from stagec.manifest import describe, load_manifest, plan, target_files

    if options.target_files:
        write_whole(options.target_files, "".join(f"{file}\n" for file in target_files(options.manifest)).encode())
    planned = plan(load_manifest(options.manifest, options.display_path))
    if options.output:
        write_whole(options.output, planned.to_json().encode())
    if options.json:
        sys.stdout.write(planned.to_json())
    elif not options.output:
        sys.stdout.write(describe(planned))
