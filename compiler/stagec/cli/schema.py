"""Print the JSON Schema of manifests, for editors."""

from __future__ import annotations

import sys

from stagec.cli.files import Options, write_whole

OPTIONS = {
    "[--output OUTPUT]": "write the schema to this file instead of stdout",
}


def run(options: Options) -> None:
    from stagec.manifest import schema

    if options.output:
        write_whole(options.output, schema().encode())
    else:
        sys.stdout.write(schema())
