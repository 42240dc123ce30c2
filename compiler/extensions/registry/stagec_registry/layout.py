"""A bundle as an image of a registry: an OCI image layout, the same bytes everywhere.

Formats: https://github.com/opencontainers/image-spec (image-layout.md, manifest.md) and
https://github.com/modelpack/model-spec (docs/spec.md, docs/config.md). The bundle is one layer and each file of weights
beside it another, so that registries and nodes keep weights once. JAX's compilation cache is a layer too, if there is
one. As ModelPack requires, a layer is the unchanged file; `stagec_registry/containers.py` makes container images.
Facts about the bundle (provenance, SBOM, signatures) are manifests whose `subject` is the image.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from stagec.bundle.additions import bases
from stagec.bundle.archive import Archive
from stagec.bundle.sources import in_pieces
from stagec.core.data.reading import RegularFile
from stagec.core.messages.errors import blaming
from stagec.core.trees import json_shapes
from stagec.trust.attestation import SUFFIX, bundle_name
from stagec_registry import layers as tar, referrers as naming
from stagec_registry.referrers import SBOM_SUFFIX, STATEMENT_SUFFIX

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MODEL = "application/vnd.cncf.model.manifest.v1+json"
"""The type of the image's artifact."""
_CONFIG = "application/vnd.cncf.model.config.v1+json"
CODE, _WEIGHTS = "application/vnd.cncf.model.code.v1.raw", "application/vnd.cncf.model.weight.v1.raw"
TAR = "application/vnd.oci.image.layer.v1.tar"
_EMPTY = "application/vnd.oci.empty.v1+json"
TITLE, _FILEPATH = "org.opencontainers.image.title", "org.cncf.model.filepath"
"""Annotations of a layer with the path of its file, for ORAS and CRI-O, and for ModelPack."""
BASES = "stagec/bases"
"""Annotation of an image whose bundle has additions: the SHA-256 (hex) of the bundle before each, with commas between.

Files about these are about the image too: the first bundle's signature still counts (`stagec verify --base-key`).
"""
VERSION = b'{"imageLayoutVersion":"1.0.0"}'
"""Content of a layout's file `oci-layout`."""
REF_NAME = "org.opencontainers.image.ref.name"
"""Annotation of an image in a layout: the tag."""
IMAGE = "image"
"""Name of the image in its layout; its tag in a registry is chosen when it is pushed."""
REFERRERS: Mapping[str, str] = {
    STATEMENT_SUFFIX: "application/vnd.in-toto+json",
    SBOM_SUFFIX: "application/vnd.cyclonedx+json",
    SUFFIX: "application/vnd.dsse.envelope.v1+json",
}
"""Files about a bundle: the end of the file's name -> the type of the artifact and of its layer."""

SHA256 = json_shapes.matching("sha256:[0-9a-f]{64}", "a digest, sha256:...")
DESCRIPTOR = json_shapes.shape(
    {"mediaType": str, "digest": SHA256, "size": int, "annotations?": {...: str}, ...: object}
)
INDEX = json_shapes.shape({"manifests": [DESCRIPTOR], ...: object})
MANIFEST = json_shapes.shape(
    {
        "mediaType": MANIFEST_TYPE,
        "config": DESCRIPTOR,
        "layers": [DESCRIPTOR],
        "artifactType?": str,
        "subject?": DESCRIPTOR,
        "annotations?": {...: str},
        ...: object,
    }
)
"""Shapes of a digest, of a descriptor, and of foreign indexes and manifests."""

Descriptor: TypeAlias = dict[str, Any]


class FileOf(NamedTuple):
    """A blob that is a file, maybe with bytes around it.

    path: where the file is. sha256: the known hex digest of the blob. size: its bytes. head, tail: the bytes of the
    blob before and after the file.
    """

    path: str
    sha256: str
    size: int
    head: bytes = b""
    tail: bytes = b""

    def pieces(self) -> Iterator[bytes]:
        """Yield the blob. Raises StagecError if it cannot be read, and at the end where its digest is another."""
        state = hashlib.sha256()
        with blaming(self.path):
            file = RegularFile(self.path)
            for piece in itertools.chain([self.head], in_pieces(file, 0, file.size), [self.tail]):
                state.update(piece)
                yield piece
            if state.hexdigest() != self.sha256:
                raise ValueError(f"its sha256 is {state.hexdigest()}; expected {self.sha256}")

    def in_tar(self, path: str) -> FileOf:
        """Return the layer in which this file is at `path`. Raises StagecError as `pieces` does: it reads the file."""
        layer = self._replace(head=tar.head(path, self.size), tail=tar.tail(self.size))
        state = hashlib.sha256(layer.head)
        for piece in self.pieces():
            state.update(piece)
        state.update(layer.tail)
        return layer._replace(sha256=state.hexdigest(), size=len(layer.head) + self.size + len(layer.tail))


class FolderOf(NamedTuple):
    """A blob: the layer with the packages in a folder. path: of the folder; sha256, size: as of `FileOf`."""

    path: str
    sha256: str
    size: int

    @staticmethod
    def read(path: str) -> FolderOf:
        """Read the folder. Raises StagecError if it cannot be read."""
        state, size = hashlib.sha256(), 0
        with blaming(path):
            for piece in tar.of_packages(path):
                state.update(piece)
                size += len(piece)
        return FolderOf(path, state.hexdigest(), size)

    def pieces(self) -> Iterator[bytes]:
        """Yield the blob. Raises StagecError if it cannot be read, and at the end where its digest is another."""
        state = hashlib.sha256()
        with blaming(self.path):
            for piece in tar.of_packages(self.path):
                state.update(piece)
                yield piece
            if state.hexdigest() != self.sha256:
                raise ValueError("it changed while it was read")


Content: TypeAlias = bytes | FileOf | FolderOf
Blobs: TypeAlias = dict[str, Content]
"""Contents by digest (hex)."""


class Layout(NamedTuple):
    """An image layout.

    image: descriptor of the image's manifest. referrers: descriptors of the manifests about it, by the name of the
    file.
    blobs: by digest (hex).
    """

    image: Descriptor
    referrers: Mapping[str, Descriptor]
    blobs: Mapping[str, Content]

    def files(self) -> dict[str, Content]:
        """Return the files of the layout's folder by path, in sorted order."""
        tagged = [{**self.image, "annotations": {REF_NAME: IMAGE}}]
        tagged += [{**referrer, "annotations": {REF_NAME: title}} for title, referrer in self.referrers.items()]
        files: dict[str, Content] = {f"blobs/sha256/{name}": blob for name, blob in self.blobs.items()}
        files |= {"index.json": index_of(tagged), "oci-layout": VERSION}
        return dict(sorted(files.items()))


def of_bundle(
    bundle: FileOf,
    archive: Archive,
    weights: Mapping[str, str],
    about: Mapping[str, Sequence[bytes]],
    caches: Mapping[str, FileOf] | None = None,
) -> Layout:
    """Return the layout of a bundle as an artifact of ModelPack.

    weights: path of each file of weights beside it, by its name in the index. about: the contents of files about the
    bundle, by the ends of their names (`REFERRERS`). caches: folders of JAX's compilation cache, as
    .tar files, by name. Raises ValueError if weights are missing.
    """
    blobs: Blobs = {}
    files = files_of(bundle, archive, weights)
    kinds = [CODE, *[_WEIGHTS] * (len(files) - 1)]
    layers = [add_file(blobs, kind, path, file) for kind, (path, file) in zip(kinds, files.items(), strict=True)]
    layers += [add_file(blobs, TAR, path, file) for path, file in sorted((caches or {}).items())]
    config = {
        "descriptor": {"name": archive.index["name"], "version": archive.index["version"]},
        "modelfs": {"type": "layers", "diffIds": [layer["digest"] for layer in layers]},
        "config": {"format": "stagec"},
    }
    added = add(blobs, _CONFIG, to_json(config))
    image = add_manifest(blobs, MODEL, added, layers, annotations=annotations_of(archive))
    return with_referrers(blobs, image, archive, about)


def files_of(bundle: FileOf, archive: Archive, weights: Mapping[str, str]) -> dict[str, FileOf]:
    """Return the bundle and the files beside it, by their paths, the bundle first. Raises ValueError as `of_bundle`."""
    listed = archive.index["weights_files"]
    missing = sorted(listed.keys() - weights.keys())
    if missing:
        raise ValueError(f"the weights {', '.join(missing)} are not given")
    beside = {path: FileOf(weights[path], file["sha256"], file["bytes"]) for path, file in sorted(listed.items())}
    return {bundle_name(archive): bundle, **beside}


def annotations_of(archive: Archive) -> dict[str, str]:
    """Return the annotations of a bundle's image."""
    earlier = ",".join(base.sha256 for base in bases(archive))
    more = {BASES: earlier} if earlier else {}
    return {TITLE: archive.index["name"], "org.opencontainers.image.version": archive.index["version"], **more}


def with_referrers(blobs: Blobs, image: Descriptor, archive: Archive, about: Mapping[str, Sequence[bytes]]) -> Layout:
    """Return the layout of an image with the files about its bundle, as `of_bundle` describes them."""
    subject = {key: image[key] for key in ("mediaType", "digest", "size")}
    referrers = {}
    for suffix, kind in REFERRERS.items():
        for title, content in zip(naming.names(bundle_name(archive), suffix), about.get(suffix, ()), strict=False):
            layer = {**add(blobs, kind, content), "annotations": {TITLE: title}}
            referrers[title] = add_manifest(blobs, kind, add(blobs, _EMPTY, b"{}"), [layer], subject=subject)
    return Layout(image, referrers, blobs)


def referrers_tag(digest: str) -> str:
    """Return the tag of the list of an image's referrers, for registries without an API for referrers.

    https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#referrers-tag-schema
    """
    return digest.replace(":", "-")


def referrer_tag(image: str, referrer: str) -> str:
    """Return the tag of one referrer, by the digests of the image and of itself.

    If two clients write a list at once, one entry is lost. So each referrer also has its own tag, which nobody else
    writes.
    """
    return f"{referrers_tag(image)}.{referrer.removeprefix('sha256:')[:32]}"


def index_of(manifests: Sequence[Descriptor], **more: Any) -> bytes:
    """Return an image index."""
    return to_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(manifests), **more})


def add_manifest(
    blobs: Blobs, kind: str | None, config: Descriptor, layers: Sequence[Descriptor], **more: Any
) -> Descriptor:
    """Add a manifest; return its descriptor. kind: the type of the artifact; None for a container image."""
    artifact = {} if kind is None else {"artifactType": kind}
    head = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, **artifact}
    content = to_json({**head, "config": config, "layers": layers, **more})
    return {**add(blobs, MANIFEST_TYPE, content), **artifact}


def add_file(blobs: Blobs, kind: str, name: str, file: FileOf) -> Descriptor:
    """Add a layer with a file, and return its descriptor. name: the path of the file in the image."""
    blobs[file.sha256] = file
    described = {"mediaType": kind, "digest": f"sha256:{file.sha256}", "size": file.size}
    return {**described, "annotations": {_FILEPATH: name, TITLE: name}}


def add(blobs: Blobs, kind: str, content: bytes) -> Descriptor:
    """Add a blob, and return its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


def to_json(value: object) -> bytes:
    """Return a value as JSON, in one line."""
    return json.dumps(value, separators=(",", ":")).encode()
