"""Move the images of bundles to registries and back, with skopeo (https://github.com/containers/skopeo).

skopeo checks every digest on its way, passes over blobs that are there already, and knows credentials as docker and
podman have them. So what broke is asked for again, and goes on with the first blob that is missing. skopeo reads and
writes image layouts, so nothing here speaks the protocol of registries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stagec.bundle import layout
from stagec.bundle.layout import Descriptor, FileOf, Layout
from stagec.bundle.sources import sha256_of
from stagec.core import json_shapes, reading, strict_json
from stagec.core.errors import Problem, StagecError

_REFERENCE = re.compile(
    r"(?P<repository>[^/@:]+(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.+-]*/)*[A-Za-z0-9_][A-Za-z0-9_.+-]*")
"""Paths of files in an image: by the same rule as those of weights in a manifest, below the folder."""
_LARGEST = 2**22
"""Bytes of a manifest or index (4 MiB): what registries must take."""
_MOST_REFERRERS = 100
_ATTEMPTS = 4
_BROKEN = re.compile("EOF|connection reset|closed network connection|broken pipe|timeout|50[0-9] ", re.IGNORECASE)
"""What skopeo says of connections that broke. What a registry refuses, it refuses again."""
_FATAL = re.compile(r'level=fatal msg="((?:[^"\\]|\\.)*)"')
_DESCRIPTOR = json_shapes.record(
    {"mediaType": json_shapes.text, "digest": json_shapes.text, "size": json_shapes.count},
    {"annotations": json_shapes.table(json_shapes.text)},
    rest=json_shapes.anything,
)
_INDEX = json_shapes.record({"manifests": json_shapes.array(_DESCRIPTOR)}, rest=json_shapes.anything)
_MANIFEST = json_shapes.record(
    {"mediaType": json_shapes.text, "layers": json_shapes.array(_DESCRIPTOR)},
    {"artifactType": json_shapes.text, "subject": _DESCRIPTOR},
    rest=json_shapes.anything,
)


class Reference(NamedTuple):
    """An image of a registry. repository: with the registry; tag, digest: empty where they are not given."""

    repository: str
    tag: str
    digest: str

    @staticmethod
    def read(text: str) -> Reference:
        """Read `registry/repo:tag` or `registry/repo@sha256:...`. Raises StagecError."""
        found = _REFERENCE.fullmatch(text)
        if not found or not (found["tag"] or found["digest"]):
            write = "write for example registry.example.com/models/digits:1.0.0, or ...@sha256:... for a digest"
            raise StagecError(Problem("", "", f"{text!r} names no image of a registry", write))
        return Reference(found["repository"], found["tag"] or "", found["digest"] or "")

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


class Registry:
    """What moves images. plain_http: whether the registry has no TLS, as one on this machine."""

    def __init__(self, plain_http: bool = False) -> None:
        """Raises StagecError where skopeo is not installed."""
        program = shutil.which("skopeo")
        if program is None:
            write = "apt-get install skopeo, dnf install skopeo or brew install skopeo"
            raise StagecError(Problem("", "", "skopeo, which moves images, is not installed", write))
        self._program, self._verify = program, str(not plain_http).lower()

    def push(self, image: Layout, target: Reference) -> None:
        """Copy an image and what is said about it to a registry, which keeps what it has.

        What others say about the same image stays. Raises StagecError.
        """
        with tempfile.TemporaryDirectory(prefix="stagec-push-") as folder:
            write_links(Path(folder), image)
            self._copy(f"oci:{folder}:{layout.IMAGE}", f"docker://{target}", "--preserve-digests")
            if not image.referrers:
                return
            for title, manifest in image.referrers.items():
                there = target._replace(tag="", digest=manifest["digest"])
                self._copy(f"oci:{folder}:{title}", f"docker://{there}", "--preserve-digests")
            # For registries without an API for referrers. skopeo before 1.14 writes a list anew, without artifactType.
            tag = target._replace(tag=layout.referrers_tag(image.image["digest"]), digest="")
            known = {one["digest"]: one for one in self._listed(tag)}
            known |= {one["digest"]: one for one in image.referrers.values()}
            _write_list(Path(folder), layout.index_of(list(known.values())))
            self._copy(f"oci:{folder}:list", f"docker://{tag}", "--multi-arch=index-only")

    def pull(self, source: Reference, folder: Path) -> dict[str, str]:
        """Copy the files of an image to a folder; return the digest (hex) of each by its path.

        A blob that the folder has already, from this image or from what was left of a pull that broke, is not moved
        again. A file appears whole, under its name, when all of the image are there. Raises StagecError.
        """
        raw = self._raw(source)
        source = source._replace(tag="", digest=_digest(raw))  # a tag may move
        work = folder / ".stagec-pull"
        manifest = _parse(raw, _MANIFEST, str(source))
        if manifest.get("artifactType") != layout.MODEL:
            what = f"{source} is no bundle: its artifactType is {manifest.get('artifactType')!r}"
            raise StagecError(Problem("", "", what, f"pull what `push` wrote, of type {layout.MODEL}"))
        files = {_path_of(layer, source): layer["digest"].removeprefix("sha256:") for layer in manifest["layers"]}
        _make(work / "blobs" / "sha256")
        for path, digest in files.items():
            _keep(folder / path, digest, work)
        self._copy(f"docker://{source}", f"oci:{work}:{layout.IMAGE}", "--preserve-digests")
        files |= self._pull_referrers(source, work)
        for path, digest in files.items():
            target = folder / path
            _make(target.parent)
            blob = work / "blobs" / "sha256" / digest
            blob.chmod(0o644)
            blob.replace(target)
        shutil.rmtree(work)
        return files

    def _pull_referrers(self, source: Reference, work: Path) -> dict[str, str]:
        """Copy what is said about an image to the layout at `work`; return digests by paths."""
        found: dict[str, str] = {}
        tag = source._replace(tag=layout.referrers_tag(source.digest), digest="")
        for number, one in enumerate(self._listed(tag)[:_MOST_REFERRERS]):
            there = source._replace(tag="", digest=one["digest"])
            manifest = _parse(self._raw(there), _MANIFEST, str(there))
            kind, subject = manifest.get("artifactType"), manifest.get("subject", {}).get("digest")
            if kind not in layout.REFERRERS.values() or subject != source.digest or len(manifest["layers"]) != 1:
                continue  # somebody else's: a signature of cosign's, for example
            self._copy(f"docker://{there}", f"oci:{work}:referrer-{number}", "--preserve-digests")
            (layer,) = manifest["layers"]
            found[_free(_path_of(layer, there), found)] = layer["digest"].removeprefix("sha256:")
        return found

    def _listed(self, tag: Reference) -> list[Descriptor]:
        """Return the descriptors of a list of referrers; none where the registry has no such tag."""
        try:
            raw = self._raw(tag)
        except StagecError as error:
            if "manifest unknown" in str(error) or "not found" in str(error).lower():
                return []
            raise
        return list(_parse(raw, _INDEX, str(tag))["manifests"])

    def _raw(self, source: Reference) -> bytes:
        words = ["inspect", "--raw", f"--tls-verify={self._verify}", f"docker://{source}"]
        raw = self._run(words, str(source))
        if source.digest and _digest(raw) != source.digest:
            raise StagecError(Problem("", "", f"{source}: the registry has something else there, {_digest(raw)}"))
        return raw

    def _copy(self, source: str, target: str, *options: str) -> None:
        sides = {"--src-tls-verify": source, "--dest-tls-verify": target}
        verify = [f"{name}={self._verify}" for name, side in sides.items() if side.startswith("docker:")]
        named = next(side for side in sides.values() if side.startswith("docker:")).removeprefix("docker://")
        self._run(["copy", "--quiet", *verify, *options, source, target], named)

    def _run(self, words: Sequence[str], named: str) -> bytes:
        # Who may sign images of containers is another question: stagec's signatures are of bundles.
        command = [self._program, "--insecure-policy", *words]
        for attempt in range(_ATTEMPTS):
            done = subprocess.run(command, check=False, capture_output=True)
            if done.returncode == 0:
                return done.stdout
            reason = _reason(done.stderr.decode(errors="replace"))
            if not _BROKEN.search(reason):
                break
            time.sleep(0.25 * 2**attempt)
        raise StagecError(Problem("", "", f"{named}: {reason}"))


def write_links(folder: Path, image: Layout) -> None:
    """Write a layout in which files are links to where they are: for a program that reads it soon."""
    _make(folder / "blobs" / "sha256")
    for path, content in image.files().items():
        if isinstance(content, FileOf):
            (folder / path).symlink_to(Path(content.path).resolve())
        else:
            (folder / path).write_bytes(content)


def _write_list(folder: Path, listed: bytes) -> None:
    """Put a list into a layout, as `list`."""
    blobs: dict[str, bytes | FileOf] = {}
    entry = layout.add(blobs, layout.INDEX_TYPE, listed)
    for digest, content in blobs.items():
        (folder / "blobs" / "sha256" / digest).write_bytes(content if isinstance(content, bytes) else b"")
    tagged = {**entry, "annotations": {layout.REF_NAME: "list"}}
    (folder / "index.json").write_bytes(layout.index_of([tagged]))


def _keep(file: Path, digest: str, work: Path) -> None:
    """Give a layout the blob that is in the folder already, as a file of another pull."""
    blob = work / "blobs" / "sha256" / digest
    with contextlib.suppress(OSError):
        if not blob.exists() and sha256_of(reading.RegularFile(file)) == digest:
            blob.hardlink_to(file)


def _path_of(layer: Mapping[str, Any], source: Reference) -> str:
    """Return the path of a layer's file. Raises StagecError where it has none below the folder."""
    path = layer.get("annotations", {}).get(layout.TITLE, "")
    digest = re.fullmatch("sha256:[0-9a-f]{64}", layer["digest"])
    if not _PATH.fullmatch(path) or not digest:
        raise StagecError(
            Problem("", "", f"{source}: a layer names no file below the folder: {strict_json.shown(path)}")
        )
    return str(path)


def _free(path: str, taken: Mapping[str, str]) -> str:
    """Return a name that is not taken: `models.aot.dsse.json`, then `models.aot.2.dsse.json`."""
    suffix = next((suffix for suffix in layout.REFERRERS if path.endswith(suffix)), "")
    names = (f"{path.removesuffix(suffix)}.{number}{suffix}" for number in range(2, _MOST_REFERRERS + 2))
    return path if path not in taken else next(name for name in names if name not in taken)


def _parse(data: bytes, shape: json_shapes.Shape, named: str) -> dict[str, Any]:
    try:
        found = strict_json.parse(data, _LARGEST)
        shape(found)
    except ValueError as error:
        raise StagecError(
            Problem("", "", f"{named}: what the registry has is no manifest of an image: {error}")
        ) from error
    return dict(found)


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StagecError(Problem(str(folder), "", f"cannot be written: {error.strerror}")) from error


def _reason(text: str) -> str:
    """Return what skopeo says is wrong, which is the last line of its log."""
    found = _FATAL.findall(text)
    last = str(json.loads(f'"{found[-1]}"')) if found else text.strip().rpartition("\n")[2]
    return re.sub(r'^Error parsing image name "[^"]*": ', "", last)
