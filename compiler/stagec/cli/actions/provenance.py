"""Write what a bundle, or a layer with JAX's compilation cache, was built from."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Options, read, read_packages, read_text, split, write_whole
from stagec.core.messages.errors import blaming

OPTIONS = {
    "(--bundle BUNDLE | --layer LAYER)": ("the bundle (.aot)", "the layer (.tar) with a folder of JAX's cache"),
    "--output OUTPUT": "where to write the in-toto statement with SLSA provenance",
    "--sbom SBOM": "where to write the CycloneDX SBOM of the toolchain",
    "--manifest NAME:FILE": "the manifest, or the programs.toml; NAME is its path in the workspace",
    "[--spec NAME:FILE]...": "a spec; NAME is that of its artifact",
    "[--source NAME:FILE]...": "a file or folder that tracing could read; NAME is its path in the workspace",
    "[--examined FILE]...": "what `stagec action examine` wrote of a library that the project does not know",
    "[--packages FILE]...": "an environment's packages.json, as rules/private/python_environment.py writes it",
}


def preload() -> None:
    import stagec.trust.provenance
    import stagec.trust.sbom  # noqa: F401


def run(options: Options) -> None:
    from stagec.bundle.archive import Archive
    from stagec.trust import provenance, sbom
    from stagec.trust.attestation import Subject

    environments = read_packages(options.packages)
    if options.layer:
        with blaming(options.layer, of=(ValueError,)):
            subject = Subject.of_layer(options.layer)
    else:
        archive = Archive(options.bundle)
        subject = Subject.of(archive, archive.sha256())
    name, manifest = split(options.manifest, 2)
    specs = {artifact: read(path) for artifact, path in (split(text, 2) for text in options.spec)}
    sources = {source: provenance.digest_of(Path(path)) for source, path in (split(text, 2) for text in options.source)}
    examined = provenance.examined_in(map(read_text, options.examined))
    described = name, provenance.sha256(read(manifest))
    statement = provenance.statement(subject, described, specs, sources, environments, examined)
    write_whole(options.output, statement.encode())
    write_whole(options.sbom, sbom.bill_of_materials(subject, environments).encode())
