"""Write what a bundle was built from."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagec.cli.files import digest, print_json, read, read_text, write_whole
from stagec.core.telling.errors import Problem, StagecError

NAMED = ("NAME", "FILE")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, help="the bundle (.aot)")
    parser.add_argument("--output", required=True, help="where to write the in-toto statement with SLSA provenance")
    parser.add_argument("--sbom", required=True, help="where to write the CycloneDX SBOM of the toolchain")
    parser.add_argument(
        "--manifest", nargs=2, metavar=NAMED, required=True, help="the manifest; NAME is its path in the workspace"
    )
    parser.add_argument(
        "--spec",
        nargs=2,
        metavar=NAMED,
        action="append",
        default=[],
        help="a spec; NAME is that of its artifact; may be repeated",
    )
    parser.add_argument(
        "--source",
        nargs=2,
        metavar=NAMED,
        action="append",
        default=[],
        help="a file or folder that tracing could read; NAME is its path in the workspace; may be repeated",
    )
    parser.add_argument(
        "--packages",
        metavar="FILE",
        action="append",
        default=[],
        help="an environment's packages.json, as rules/private/python_environment.py writes it; may be repeated",
    )


def preload() -> None:
    import stagec.bundle.provenance
    import stagec.bundle.sbom  # noqa: F401


def run(options: argparse.Namespace) -> None:
    from stagec.bundle import provenance, sbom
    from stagec.bundle.archive import Archive

    environments = []
    for path in options.packages:
        try:
            environments.append(provenance.read_environment(read_text(path)))
        except (ValueError, KeyError, TypeError) as error:
            raise StagecError(Problem(path, "", f"not a list of packages: {error!r}")) from error
    archive = Archive(options.bundle)
    sha256 = archive.sha256()
    name, manifest = options.manifest
    specs = {artifact: read(path) for artifact, path in options.spec}
    sources = {source: Path(path) for source, path in options.source}
    statement = provenance.statement(archive, sha256, (name, read(manifest)), specs, sources, environments)
    write_whole(options.output, statement.encode())
    write_whole(options.sbom, sbom.bill_of_materials(archive, sha256, environments).encode())
    if options.json:
        print_json({"output": options.output, **digest(statement.encode())})
