"""A bundle as a container image, the same bytes everywhere, which container runtimes mount and `FROM` takes.

Formats: https://github.com/opencontainers/image-spec (config.md, image-index.md). Each file is a layer
(`stagec_registry/layers.py`). If targets are for several architectures, each has an image with the same layers. With a
server there is one image, on a base image with Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagec.bundle.archive import Archive
from stagec.bundle.description import architecture
from stagec.core.data import reading, strict_json
from stagec.core.messages.errors import Problem, StagecError, blaming
from stagec.core.trees import json_shapes
from stagec_registry import layout
from stagec_registry.layers import FOLDER, PACKAGES
from stagec_registry.layout import Blobs, Descriptor, FileOf, FolderOf, Layout

CONTAINER = "application/vnd.oci.image.config.v1+json"
"""Type of a container image's config."""
ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
"""The name of an architecture in images, by its name in targets."""
PORT = 8080
LISTEN = ["--host", "0.0.0.0", "--port", str(PORT)]
"""Arguments with which `stagec serve` listens in a container."""
COMMAND = ["python3", "-m", "stagec", "serve"]
NOBODY = 65534
"""The number of the user who runs a server."""
_LARGEST = 2**22
"""Bytes of an index, a manifest and a config."""
_EPOCH = "1970-01-01T00:00:00Z"
_BASE = json_shapes.shape({"config": layout.DESCRIPTOR, "layers": [layout.DESCRIPTOR], ...: object})
"""Shape of a foreign manifest, which need not name its type."""
_BASE_CONFIG = json_shapes.shape(
    {
        "architecture": str,
        "os": str,
        "rootfs": {"type": "layers", "diff_ids": [layout.SHA256], ...: object},
        "config?": {"Env?": [str], "Labels?": {...: str}, ...: object},
        "history?": [object],
        ...: object,
    }
)


class Base(NamedTuple):
    """An image to build others on. config: its config; layers: descriptors; folder: the layout that has it."""

    config: dict[str, Any]
    layers: list[Descriptor]
    folder: str

    @staticmethod
    def read(folder: str) -> Base:
        """Read an image layout that has one image, of one architecture. Raises StagecError."""
        with blaming(folder, "write it so: skopeo copy docker://IMAGE oci:FOLDER:base"):
            listed = _read(f"{folder}/index.json", layout.INDEX)["manifests"]
            if len(listed) != 1:
                raise ValueError(f"it has {len(listed)} images, and one is the base")
            manifest = _read(_blob(folder, listed[0]), _BASE)
            config = _read(_blob(folder, manifest["config"]), _BASE_CONFIG)
            if len(config["rootfs"]["diff_ids"]) != len(manifest["layers"]):
                raise ValueError("its config lists a different number of layers")
        return Base(config, manifest["layers"], folder)


class Server(NamedTuple):
    """The parts of an image that serve its bundle.

    base: the image with Python. packages: the layer with stagec and its extension serve.
    """

    base: Base
    packages: FolderOf


def of_bundle(
    bundle: FileOf,
    archive: Archive,
    weights: Mapping[str, str],
    about: Mapping[str, Sequence[bytes]],
    caches: Mapping[str, FileOf] | None = None,
    server: Server | None = None,
) -> Layout:
    """Return the layout of a bundle as a container image, or an index of one for each architecture.

    The others are as for `layout.of_bundle`. server: the parts that serve the bundle; None: none. Raises ValueError if
    weights are missing, and StagecError if a file has another digest.
    """
    blobs: Blobs = {}
    files = layout.files_of(bundle, archive, weights)
    layers = [layout.add_file(blobs, layout.TAR, path, file.in_tar(path)) for path, file in files.items()]
    layers += [layout.add_file(blobs, layout.TAR, path, file) for path, file in sorted((caches or {}).items())]
    annotations = layout.annotations_of(archive)
    if server is not None:
        _check(server.base, archive)
        image = _image(blobs, *_served(blobs, server, next(iter(files))), layers, annotations)
    else:
        platforms = [
            {"architecture": ARCHITECTURES.get(machine, machine), "os": "linux"}
            for machine in architectures(archive.index)
        ]
        images = [
            {**_image(blobs, {"created": _EPOCH, **platform}, [], layers, annotations), "platform": platform}
            for platform in platforms
        ]
        several = layout.index_of(images, annotations=annotations)
        image = images[0] if len(images) == 1 else layout.add(blobs, layout.INDEX_TYPE, several)
    return layout.with_referrers(blobs, image, archive, about)


def architectures(index: Mapping[str, Any]) -> list[str]:
    """Return the architectures of the machines that a bundle is for, as targets call them, in sorted order.

    Executables for accelerators are for hosts with x86-64, and so is a bundle without executables.
    """
    return sorted({architecture(target) or "x86_64" for target in index["targets"].values()} or {"x86_64"})


def _image(
    blobs: Blobs,
    config: Mapping[str, Any],
    below: Sequence[Descriptor],
    layers: Sequence[Descriptor],
    annotations: Mapping[str, str],
) -> Descriptor:
    """Add an image; return its descriptor. config: without layers, but those `below`, which the image has first."""
    run, root = config.get("config", {}), config.get("rootfs", {"type": "layers", "diff_ids": []})
    history = [{"created": _EPOCH, "created_by": f"stagec: {layer['annotations'][layout.TITLE]}"} for layer in layers]
    whole = {
        **config,
        "config": {**run, "Labels": {**run.get("Labels", {}), **annotations}},
        "rootfs": {**root, "diff_ids": [*root["diff_ids"], *(layer["digest"] for layer in layers)]},
        "history": [*config.get("history", []), *history],
    }
    added = layout.add(blobs, CONTAINER, layout.to_json(whole))
    return layout.add_manifest(blobs, None, added, [*below, *layers], annotations=annotations)


def _served(blobs: Blobs, server: Server, name: str) -> tuple[dict[str, Any], list[Descriptor]]:
    """Add the layers below the bundle in an image that serves it; return the config without the bundle, and the layers.

    name: of the bundle's file.
    """
    base, packages = server
    for layer in base.layers:
        digest = layer["digest"].removeprefix("sha256:")
        blobs[digest] = FileOf(_blob(base.folder, layer), digest, layer["size"])
    blobs[packages.sha256] = packages
    layer = {"mediaType": layout.TAR, "digest": f"sha256:{packages.sha256}", "size": packages.size}
    run, root = base.config.get("config", {}), base.config["rootfs"]
    variables = [variable for variable in run.get("Env") or [] if not variable.startswith("PYTHONPATH=")]
    config = {
        **base.config,
        "config": {
            **run,
            "Env": [*variables, f"PYTHONPATH=/{PACKAGES}", "PYTHONDONTWRITEBYTECODE=1"],
            "Entrypoint": COMMAND,
            "Cmd": [*LISTEN, f"/{FOLDER}/{name}"],
            "ExposedPorts": {f"{PORT}/tcp": {}},
            "User": str(NOBODY),
        },
        "rootfs": {**root, "diff_ids": [*root["diff_ids"], layer["digest"]]},
        "history": [*base.config.get("history", []), {"created": _EPOCH, "created_by": f"stagec: /{PACKAGES}"}],
    }
    return config, [*base.layers, layer]


def _check(base: Base, archive: Archive) -> None:
    here = [ARCHITECTURES.get(machine, machine) for machine in architectures(archive.index)]
    if base.config["architecture"] not in here:
        what = f"it is for {strict_json.shown(base.config['architecture'])}, and the bundle for {', '.join(here)}"
        raise StagecError(Problem(base.folder, "", what, "take the image of that architecture: skopeo --override-arch"))


def _blob(folder: str, described: Descriptor) -> str:
    return f"{folder}/blobs/sha256/{described['digest'].removeprefix('sha256:')}"


def _read(path: str, shape: json_shapes.Shape) -> dict[str, Any]:
    value = strict_json.parse(reading.whole(path, _LARGEST), _LARGEST)
    shape(value)
    return dict(value)
