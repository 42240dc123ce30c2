"""Write what a bundle was built from."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Answer, Options, digest, read, read_text, split, write_whole
from stagec.core.messages.errors import blaming

OPTIONS = {
    "--bundle BUNDLE": "the bundle (.aot)",
    "--output OUTPUT": "where to write the in-toto statement with SLSA provenance",
    "--sbom SBOM": "where to write the CycloneDX SBOM of the toolchain",
    "--manifest NAME:FILE": "the manifest; NAME is its path in the workspace",
    "[--spec NAME:FILE]...": "a spec; NAME is that of its artifact",
    "[--source NAME:FILE]...": "a file or folder that tracing could read; NAME is its path in the workspace",
    "[--packages FILE]...": "an environment's packages.json, as rules/private/python_environment.py writes it",
}


def preload() -> None:
    import stagec.trust.provenance
    import stagec.trust.sbom  # noqa: F401


def run(options: Options) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.trust import provenance, sbom

    environments = []
    for path in options.packages:
        with blaming(path, what="not a list of packages: ", of=(ValueError,)):
            environments.append(provenance.read_environment(read_text(path)))
    archive = Archive(options.bundle)
    sha256 = archive.sha256()
    name, manifest = split(options.manifest, 2)
    specs = {artifact: read(path) for artifact, path in (split(text, 2) for text in options.spec)}
    sources = {source: Path(path) for source, path in (split(text, 2) for text in options.source)}
    statement = provenance.statement(archive, sha256, (name, read(manifest)), specs, sources, environments)
    write_whole(options.output, statement.encode())
    write_whole(options.sbom, sbom.bill_of_materials(archive, sha256, environments).encode())
    return Answer({"output": options.output, **digest(statement.encode())})
