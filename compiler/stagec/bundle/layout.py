"""A bundle as an image of a registry: an OCI image layout in the terms of ModelPack, the same bytes everywhere.

Formats: https://github.com/opencontainers/image-spec (image-layout.md, manifest.md) and
https://github.com/modelpack/model-spec (docs/spec.md, docs/config.md). The bundle is one layer and each file of weights
beside it another, as they are and under their own digests, so that registries and nodes keep weights once. JAX's
compilation cache is a layer too, if there is one. What is said about the bundle (provenance, SBOM, signatures) are
manifests whose `subject` is the image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from stagec.bundle import referrers as naming
from stagec.bundle.archive import Archive
from stagec.bundle.attestation import SUFFIX, bundle_name
from stagec.bundle.referrers import SBOM_SUFFIX, STATEMENT_SUFFIX

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MODEL = "application/vnd.cncf.model.manifest.v1+json"
"""What kind of artifact the image is."""
_CONFIG = "application/vnd.cncf.model.config.v1+json"
CODE, _WEIGHTS = "application/vnd.cncf.model.code.v1.raw", "application/vnd.cncf.model.weight.v1.raw"
_TAR = "application/vnd.oci.image.layer.v1.tar"
_EMPTY = "application/vnd.oci.empty.v1+json"
TITLE, _FILEPATH = "org.opencontainers.image.title", "org.cncf.model.filepath"
"""Annotations of a layer with the path of its file: that of ORAS and CRI-O, and that of ModelPack."""
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
"""What is said about a bundle, by how the name of its file ends -> the type of the artifact and of its layer."""

Descriptor: TypeAlias = dict[str, Any]


class FileOf(NamedTuple):
    """A blob that is a file. path: where it is; sha256: hex digest, which is known; size: bytes."""

    path: str
    sha256: str
    size: int


class Layout(NamedTuple):
    """An image layout.

    image: descriptor of the image's manifest. referrers: those of what is said about it, by the name of its file.
    blobs: by digest (hex).
    """

    image: Descriptor
    referrers: Mapping[str, Descriptor]
    blobs: Mapping[str, bytes | FileOf]

    def files(self) -> dict[str, bytes | FileOf]:
        """Return the files of the layout's folder by path, in sorted order."""
        tagged = [{**self.image, "annotations": {REF_NAME: IMAGE}}]
        tagged += [{**referrer, "annotations": {REF_NAME: title}} for title, referrer in self.referrers.items()]
        files: dict[str, bytes | FileOf] = {f"blobs/sha256/{name}": blob for name, blob in self.blobs.items()}
        files |= {"index.json": index_of(tagged), "oci-layout": VERSION}
        return dict(sorted(files.items()))


def of_bundle(
    bundle: FileOf,
    archive: Archive,
    weights: Mapping[str, str],
    about: Mapping[str, Sequence[bytes]],
    caches: Mapping[str, FileOf] | None = None,
) -> Layout:
    """Return the layout of a bundle.

    weights: path of each file of weights beside it, by its name in the index. about: what is said about the bundle: the
    contents of files, by how their names end (`REFERRERS`). caches: folders of JAX's compilation cache, as
    .tar files, by name. Raises ValueError where weights are missing.
    """
    index = archive.index
    listed = index.get("weights_files", {})
    missing = sorted(listed.keys() - weights.keys())
    if missing:
        raise ValueError(f"the weights {', '.join(missing)} are not given")
    blobs: dict[str, bytes | FileOf] = {}
    name = bundle_name(archive)
    layers = [_file(blobs, CODE, name, bundle)]
    for path, file in sorted(listed.items()):
        layers.append(_file(blobs, _WEIGHTS, path, FileOf(weights[path], file["sha256"], file["bytes"])))
    layers += [_file(blobs, _TAR, path, file) for path, file in sorted((caches or {}).items())]
    config = {
        "descriptor": {"name": index["name"], "version": index["version"]},
        "modelfs": {"type": "layers", "diffIds": [layer["digest"] for layer in layers]},
        "config": {"format": "stagec"},
    }
    annotations = {TITLE: index["name"], "org.opencontainers.image.version": index["version"]}
    image = _manifest(blobs, MODEL, add(blobs, _CONFIG, _json(config)), layers, annotations=annotations)
    subject = {key: image[key] for key in ("mediaType", "digest", "size")}
    referrers = {}
    for suffix, kind in REFERRERS.items():
        for title, content in zip(naming.names(name, suffix), about.get(suffix, ()), strict=False):
            layer = {**add(blobs, kind, content), "annotations": {TITLE: title}}
            referrers[title] = _manifest(blobs, kind, add(blobs, _EMPTY, b"{}"), [layer], subject=subject)
    return Layout(image, referrers, blobs)


def referrers_tag(digest: str) -> str:
    """Return the tag of the list of what refers to an image, as registries without an API for that have it.

    https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#referrers-tag-schema
    """
    return digest.replace(":", "-")


def referrer_tag(image: str, referrer: str) -> str:
    """Return the tag of one referrer, by the digests of the image and of itself.

    A list under one tag loses what two write at once. So each has a tag of its own too, and nobody else writes that.
    """
    return f"{referrers_tag(image)}.{referrer.removeprefix('sha256:')[:32]}"


def index_of(manifests: Sequence[Descriptor]) -> bytes:
    """Return an image index."""
    return _json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(manifests)})


def _manifest(
    blobs: dict[str, bytes | FileOf], kind: str, config: Descriptor, layers: Sequence[Descriptor], **more: Any
) -> Descriptor:
    head = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": kind}
    content = _json({**head, "config": config, "layers": layers, **more})
    return {**add(blobs, MANIFEST_TYPE, content), "artifactType": kind}


def _file(blobs: dict[str, bytes | FileOf], kind: str, name: str, file: FileOf) -> Descriptor:
    blobs[file.sha256] = file
    described = {"mediaType": kind, "digest": f"sha256:{file.sha256}", "size": file.size}
    return {**described, "annotations": {_FILEPATH: name, TITLE: name}}


def add(blobs: dict[str, bytes | FileOf], kind: str, content: bytes) -> Descriptor:
    """Add a blob, and return its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
