"""Write a bundle as an image of a registry, an OCI image layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options, on_disk, pair, read, write_below
from stagec.core.messages.errors import Problem, StagecError, mistake

if TYPE_CHECKING:
    from stagec_registry.containers import Server
    from stagec_registry.layout import FileOf, Layout

CONTENT = {
    "bundle": "the bundle (.aot)",
    "[--weights-file NAME=FILE]...": "a file of weights beside the bundle, by its name in it (default: beside the "
    "bundle)",
    "[--statement STATEMENT]...": "its in-toto statement",
    "[--signature SIGNATURE]...": "an envelope",
    "[--jax-cache FILE]": "JAX's compilation cache: what jax-cache --layer wrote",
    "[--sbom SBOM]": "its SBOM",
}
"""What is in an image, of a command that makes one."""
CONTAINER = {
    "[--container]": "a container image, which every container runtime mounts and FROM takes "
    "(default: an image of ModelPack)",
    "[--base FOLDER]": "with --packages: the image layout that has Python, on which a container "
    "image is made that serves the bundle",
    "[--packages FOLDER]": "where stagec and its extension serve are installed: pip install --target FOLDER",
}
"""Which of the two images it is."""
OPTIONS = {**CONTENT, **CONTAINER, "--output FOLDER": "where to write the layout"}


def chosen(options: Options) -> Layout:
    """Return the image that the options of a command with `CONTAINER` describe. Raises StagecError."""
    from stagec_registry.containers import Base, Server
    from stagec_registry.layout import FolderOf

    if options.base is None and options.packages is None:
        return layout_of(options, options.container)
    if not (options.base and options.packages and options.container):
        raise mistake("an image that serves the bundle takes all of --container, --base and --packages")
    return layout_of(options, True, Server(Base.read(options.base), FolderOf.read(options.packages)))


def layout_of(options: Options, container: bool, server: Server | None = None) -> Layout:
    """Return the image that the options of `CONTENT` describe. Raises StagecError.

    container: whether it is a container image, not one of ModelPack. server: what serves the bundle in it, if any.
    """
    from stagec.bundle.archive import Archive
    from stagec.core.messages.refusal import LoadError
    from stagec.trust.attestation import MOST_ENVELOPES, SUFFIX
    from stagec.trust.dsse import LARGEST
    from stagec_registry import containers, layout, referrers

    archive = Archive(options.bundle)
    bundle = layout.FileOf(options.bundle, archive.sha256(), Path(options.bundle).stat().st_size)
    given = dict(map(pair, options.weights_file))
    listed = archive.index["weights_files"]
    weights = {name: given.get(name, str(Path(options.bundle).parent / name)) for name in listed}
    for name, path in weights.items():
        size = Path(path).stat().st_size if Path(path).is_file() else None
        if size != listed[name]["bytes"]:
            fault = "there is no such file" if size is None else f"it has {size:,} bytes"
            what = f"{fault}; {options.bundle} wants {listed[name]['bytes']:,} bytes, sha256 {listed[name]['sha256']}"
            raise StagecError(Problem(path, "", what, f"give the file: --weights-file {name}=FILE"))
    given_about = {
        referrers.STATEMENT_SUFFIX: options.statement,
        referrers.SBOM_SUFFIX: [options.sbom] if options.sbom else [],
        SUFFIX: options.signature,
    }
    about: dict[str, list[bytes]] = {}
    for suffix, paths in given_about.items():
        if len(paths) > MOST_ENVELOPES:
            raise mistake(f"{len(paths)} files *{suffix}: no more than {MOST_ENVELOPES} are read")
        for path in paths:
            content = read(path, LARGEST)
            try:
                referrers.check(suffix, content, path, options.bundle, archive, bundle.sha256)
            except LoadError as error:
                # A file that is published by mistake, a key for example, is public from then on.
                raise mistake(str(error), "nothing was published or written") from error
            about.setdefault(suffix, []).append(content)
    caches = {Path(path).name: _file_of(path) for path in ([options.jax_cache] if options.jax_cache else [])}
    if not container:
        return layout.of_bundle(bundle, archive, weights, about, caches)
    return containers.of_bundle(bundle, archive, weights, about, caches, server)


def _file_of(path: str) -> FileOf:
    """Return a file that no index describes. Raises StagecError if it cannot be read."""
    from stagec_registry.layout import FileOf

    content = on_disk(path)
    return FileOf(path, content.sha256, len(content))


def run(options: Options) -> Answer:
    image = chosen(options)
    for path, content in image.files().items():
        write_below(options.output, path, [content] if isinstance(content, bytes) else content.pieces())
    return Answer({"output": options.output, "digest": image.image["digest"]})
