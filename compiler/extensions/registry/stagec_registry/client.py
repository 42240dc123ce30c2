"""Move the images of bundles to registries and back, with skopeo (https://github.com/containers/skopeo).

skopeo checks every digest, skips blobs that are there already, and uses the credentials of docker and podman. So a
retry after a failure goes on with the first missing blob. (oras for Python reads a blob into memory to upload it, and
takes one kind of credentials.) skopeo reads and writes image layouts, so nothing here speaks the protocol of
registries. A registry may be anybody's: stagec checks the shape of its answers, and limits their time and size.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from stagec.core.data import paths, strict_json, writing
from stagec.core.messages.errors import StagecError, mistake
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes
from stagec.trust.dsse import LARGEST
from stagec_registry import containers, layout, pull_folder, referrers
from stagec_registry.layout import Descriptor, FileOf, Layout
from stagec_registry.pull_folder import Blob, Folder

_REFERENCE = re.compile(
    r"(?P<repository>[^/@:]+(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_PATH = re.compile(paths.PLAIN)
"""Paths of files in an image, below the folder; the rule is the same as for paths of weights in a manifest."""
_LONGEST_PATH, _LONGEST_NAME, _DEEPEST_PATH = 1000, 255, 33
_LARGEST = 2**22
"""Bytes of a manifest or index (4 MiB): registries must accept this size."""
_MOST_REFERRERS = 100
_ATTEMPTS = 4
_ROUNDS = 20
"""How often to write a list again if others write it at the same time."""
_SLOWEST = 2**16
"""If fewer bytes move in `timeout` seconds, the registry has stopped answering."""
_BESIDE = 2**26
"""Bytes that skopeo may read beside the blobs of an image (64 MiB): tokens, manifests, certificates."""
# skopeo 1.9.3 of Debian 12 ends with 1 for every failure, and only its log names the failure. (From 1.16 on it ends
# with 2 if something is absent. Its own `--retry-times` knows fewer broken connections than these.)
_BROKEN = re.compile("EOF|connection reset|closed network connection|broken pipe|timeout|50[0-9] ", re.IGNORECASE)
"""skopeo's messages for broken connections. A retry does not help after a refusal."""
_ABSENT = "manifest unknown", "name unknown", "not found", "404"
"""Messages of registries for a missing image."""
_FATAL = re.compile(r'level=fatal msg="((?:[^"\\]|\\.)*)"')
"""The last line of skopeo's log."""
_LONGEST_REASON = 1000
_IMAGES = json_shapes.shape(
    {
        "mediaType": layout.INDEX_TYPE,
        "manifests": [
            {
                "digest": layout.SHA256,
                "platform?": {"architecture": str, "os": str, ...: object},
                ...: object,
            }
        ],
        ...: object,
    }
)
_TAGS = json_shapes.shape({"Tags": [str], ...: object})


class Reference(NamedTuple):
    """An image of a registry. repository: with the registry; tag, digest: empty if they are not given."""

    repository: str
    tag: str
    digest: str

    @staticmethod
    def read(text: str) -> Reference:
        """Read `registry/repo:tag` or `registry/repo@sha256:...`. Raises StagecError."""
        match = _REFERENCE.fullmatch(text)
        if not match or not (match["tag"] or match["digest"]):
            write = "write for example registry.example.com/models/digits:1.0.0, or ...@sha256:... for a digest"
            raise mistake(f"{text!r} is not the name of an image in a registry", write)
        return Reference(match["repository"], match["tag"] or "", match["digest"] or "")

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


class Pulled(NamedTuple):
    """The result of a pull.

    files: digest (hex) of each file by its path. left_out: the reason to skip a file about the image, by the digest
    (hex) of the file, or of its manifest if it has no file. removed: paths of files about another bundle. missing: the
    first name of each kind of file about the image that the registry has none of.
    """

    files: dict[str, str]
    left_out: dict[str, str]
    removed: list[str]
    missing: list[str]


class _Image(NamedTuple):
    """The content of a manifest.

    files: blob by path; bundle: path of the bundle; size: bytes of all blobs; bases: as in `layout.BASES`.
    """

    files: dict[str, Blob]
    bundle: str
    size: int
    bases: list[str]


class Registry:
    """A client that moves images.

    plain_http: whether the registry has no TLS, like one on this machine.
    timeout: seconds in which a command must end, or a registry must send or take another 64 KiB.
    """

    def __init__(self, plain_http: bool = False, timeout: float = 60) -> None:
        """Raises StagecError if skopeo is not installed."""
        program = shutil.which("skopeo")
        if program is None:
            write = "apt-get install skopeo, dnf install skopeo or brew install skopeo"
            raise mistake("skopeo, which moves images, is not installed", write)
        self._program, self._verify, self._timeout = program, str(not plain_http).lower(), timeout

    def push(self, image: Layout, target: Reference) -> None:
        """Copy an image and the files about it to a registry, which keeps its other files.

        Files by others about the same image stay, even those that they push at the same time. Raises StagecError.
        """
        with tempfile.TemporaryDirectory(prefix="stagec-push-") as folder:
            write_links(Path(folder), image)
            every = ["--multi-arch=all"] if image.image["mediaType"] == layout.INDEX_TYPE else []
            self._copy(f"oci:{folder}:{layout.IMAGE}", f"docker://{target}", "--preserve-digests", *every)
            subject = image.image["digest"]
            for title, manifest in image.referrers.items():
                there = target._replace(tag=layout.referrer_tag(subject, manifest["digest"]), digest="")
                self._copy(f"oci:{folder}:{title}", f"docker://{there}", "--preserve-digests")
            if image.referrers:
                own = {referrer["digest"]: referrer for referrer in image.referrers.values()}
                self._list(target._replace(tag="", digest=subject), own)

    def remove(self, source: Reference, wanted: str) -> list[str]:
        """Remove a file about an image; return sentences about manifests that the registry keeps all the same.

        source: the image. wanted: how the SHA-256 (hex) of the file begins. Raises StagecError.
        """
        source = source._replace(tag="", digest=_digest(self._raw(source)))
        kept, gone = [], set()
        for digest in self._known(source):
            there = source._replace(digest=digest)
            try:
                layers = _parse(self._raw(there), layout.MANIFEST, str(there))["layers"]
            except StagecError:
                continue
            if any(layer["digest"].removeprefix("sha256:").startswith(wanted) for layer in layers):
                gone.add(digest)
        if not gone:
            raise mistake(f"{source}: no file about this image has the sha256 {wanted}...")
        tags = self._tags(source)
        for digest in gone:
            tag = layout.referrer_tag(source.digest, digest)
            if tag in tags:
                self._write(source._replace(tag=tag, digest=""), [])
        self._list(source, {}, gone)
        for digest in gone:
            there = source._replace(digest=digest)
            try:
                self._run(["delete", f"--tls-verify={self._verify}", f"docker://{there}"], str(there))
            except StagecError as error:
                kept.append(f"no list names it, but the registry did not delete it: {error}")
        return kept

    def pull(self, source: Reference, folder: Path) -> Pulled:
        """Copy the files of an image to a folder.

        It does not download a blob again that the folder has already, from this image or from a broken pull, if its
        digest is right. Complete files appear under their names when all files of the image are there; another pull to
        the same folder waits. Raises StagecError.
        """
        raw = self._raw(source)
        source = source._replace(tag="", digest=_digest(raw))  # a tag may move
        own = source
        if _is_index(raw):
            own = source._replace(digest=_own_image(raw, source))
            raw = self._raw(own)
        image = _image(raw, own)
        with pull_folder.locked(folder) as target:
            target.keep(image.files)
            self._copy(f"docker://{own}", f"oci:{target.layout}:{layout.IMAGE}", "--preserve-digests", size=image.size)
            files = target.contents(image.files)
            bundle = files[image.bundle]
            digests = {bundle, *image.bases}
            about, left_out = self._pull_referrers(source, image, digests, target)
            said = {path: Blob(digest) for path, digest in about.items()}
            removed = target.commit(image.files | said, image.bundle, digests)
        first_names = (next(referrers.names(image.bundle, suffix)) for suffix in layout.REFERRERS)
        return Pulled(files | about, left_out, removed, [name for name in first_names if name not in about])

    def _pull_referrers(
        self, source: Reference, image: _Image, digests: Collection[str], target: Folder
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Copy the files about an image; return digests by paths, and the reasons to skip others by digest.

        Anybody with push access can add a file. So it does not choose its own name, and must be about the bundle.
        digests: those (hex) of the bundle, and of its states before additions.
        """
        taken: dict[str, str] = {}
        left_out: dict[str, str] = {}
        suffixes = {kind: suffix for suffix, kind in layout.REFERRERS.items()}
        for number, listed in enumerate(self._known(source)):
            digest = listed.removeprefix("sha256:")
            if number >= _MOST_REFERRERS:
                left_out[digest] = f"more than {_MOST_REFERRERS} are said about the image"
                break
            there = source._replace(digest=listed)
            try:
                manifest = _parse(self._raw(there), layout.MANIFEST, str(there))
                suffix = suffixes.get(manifest.get("artifactType", ""))
                if suffix is None or manifest.get("subject", {}).get("digest") != source.digest:
                    continue  # somebody else's: a signature of cosign's, for example
                layers = manifest["layers"]
                if len(layers) != 1 or layers[0]["size"] > LARGEST or _foreign(manifest):
                    raise ValueError(f"it is not one file of {LARGEST:,} bytes at most in this registry")
                digest = layers[0]["digest"].removeprefix("sha256:")
                size = layers[0]["size"] + manifest["config"]["size"]
                self._copy(f"docker://{there}", f"oci:{target.layout}:x", "--preserve-digests", size=size)
                if not referrers.is_about(suffix, target.read(digest), "this file", digests):
                    raise ValueError("it is about another bundle")
            except StagecError as error:
                if not _is_absent(error):
                    raise
                left_out[digest] = "the registry does not have it, or has something else there"
                continue
            except (OSError, ValueError, LoadError) as error:
                left_out[digest] = str(error)
                continue
            name = target.name_of(image.bundle, suffix, digest, digests, {**image.files, **taken})
            if name is None:
                left_out[digest] = "there are too many of its kind"
            elif digest not in taken.values():
                taken[name] = digest
                target.keep_too(name, digest)
        return taken, left_out

    def _known(self, image: Reference) -> dict[str, Descriptor]:
        """Return the descriptors of an image's referrers by digest, from the list and from tags."""
        listed = self._listed(image._replace(tag=_list_tag(image), digest=""))
        return {**listed, **self._tagged(image, listed)}

    def _tagged(self, image: Reference, listed: Iterable[str]) -> dict[str, Descriptor]:
        """Return the referrers of an image that are not `listed`, by their own tags.

        Two clients that write the list at once have different lists. But each wrote a tag before, so the last one to
        write has seen both.
        """
        short = {digest.removeprefix("sha256:")[:32] for digest in listed}
        tagged: dict[str, Descriptor] = {}
        unlisted = [tag for tag in self._tags(image) if tag.rpartition(".")[2] not in short]
        for tag in unlisted[:_MOST_REFERRERS]:
            there = image._replace(tag=tag, digest="")
            with _nothing_if_absent():  # it was taken out
                raw = self._raw(there)
                manifest = _parse(raw, layout.MANIFEST, str(there))
                if tag == layout.referrer_tag(image.digest, _digest(raw)):
                    known: Descriptor = {key: manifest[key] for key in ("mediaType", "artifactType") if key in manifest}
                    tagged[_digest(raw)] = {**known, "digest": _digest(raw), "size": len(raw)}
        return tagged

    def _tags(self, image: Reference) -> list[str]:
        """Return the tags of an image's referrers; none if the registry lists no tags."""
        words = ["list-tags", f"--tls-verify={self._verify}", f"docker://{image.repository}"]
        raw = b'{"Tags": []}'
        with _nothing_if_absent():
            raw = self._run(words, image.repository)
        tags = _parse(raw, _TAGS, image.repository, _BESIDE)["Tags"]
        return [tag for tag in tags if tag.startswith(f"{_list_tag(image)}.")]

    def _list(self, image: Reference, own: Mapping[str, Descriptor], gone: Collection[str] = ()) -> None:
        """Write the list of an image's referrers until it has all of them except those in `gone`. Raises StagecError.

        It is for registries without an API for referrers, and for other clients. skopeo before 1.14 rewrites a
        list without artifactType.
        """
        tag = image._replace(tag=_list_tag(image), digest="")
        for _ in range(_ROUNDS):
            listed = self._listed(tag)
            known = {**listed, **own}
            known |= self._tagged(image, known)
            wanted = [descriptor for digest, descriptor in known.items() if digest not in gone]
            if len(wanted) == len(listed) == len(known):
                return
            self._write(tag, wanted)
        raise mistake(f"{tag}: other pushes keep changing this list", "push again")

    def _write(self, tag: Reference, listed: Sequence[Descriptor]) -> None:
        """Write a list under a tag."""
        with tempfile.TemporaryDirectory(prefix="stagec-push-") as folder:
            blobs: layout.Blobs = {}
            write_links(Path(folder), Layout(layout.add(blobs, layout.INDEX_TYPE, layout.index_of(listed)), {}, blobs))
            self._copy(f"oci:{folder}:{layout.IMAGE}", f"docker://{tag}", "--multi-arch=index-only")

    def _listed(self, tag: Reference) -> dict[str, Descriptor]:
        """Return the descriptors of a list of referrers by digest; none if the registry has no such tag."""
        raw = layout.index_of([])
        with _nothing_if_absent():
            raw = self._raw(tag)
        return {descriptor["digest"]: descriptor for descriptor in _parse(raw, layout.INDEX, str(tag))["manifests"]}

    def _raw(self, source: Reference) -> bytes:
        words = ["inspect", "--raw", f"--tls-verify={self._verify}", f"docker://{source}"]
        raw = self._run(words, str(source))
        if source.digest and _digest(raw) != source.digest:
            raise mistake(f"{source}: the registry has something else there, {_digest(raw)}")
        return raw

    def _copy(self, source: str, target: str, *options: str, size: int | None = None) -> None:
        """Copy an image. size: bytes of its blobs, if it comes from a registry."""
        sides = {"--src-tls-verify": source, "--dest-tls-verify": target}
        verify = [f"{name}={self._verify}" for name, side in sides.items() if side.startswith("docker:")]
        named = next(side for side in sides.values() if side.startswith("docker:")).removeprefix("docker://")
        words = ["copy", "--quiet", *verify, *options, source, target]
        self._run(words, named, None if source.startswith("oci:") else size or 0)

    def _run(self, words: Sequence[str], named: str, size: int | None = 0) -> bytes:
        """Run skopeo; return its output. size: the most bytes that it may read; None: no limit."""
        # skopeo's policy is about signatures of container images; stagec's signatures are of bundles.
        command = [self._program, "--insecure-policy", *words]
        for attempt in range(_ATTEMPTS):
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
                ended = self._wait(command, output, log, named, size)
                for file in (output, log):
                    file.seek(0)
                if ended == 0:
                    return output.read(_BESIDE)
                reason = _reason(log.read(_BESIDE).decode(errors="replace"))
            if not _BROKEN.search(reason):
                break
            time.sleep(0.25 * 2**attempt)
        raise mistake(f"{named}: {reason}")

    def _wait(self, command: Sequence[str], output: BinaryIO, log: BinaryIO, named: str, size: int | None) -> int:
        """Run a command; return its exit status. Raises StagecError if too few or too many bytes move."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=log)
        try:
            mark, since = 0, time.monotonic()
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(0.2, self._timeout))
                read, moved = _moved(process.pid)
                if size is not None and read > size + size // 8 + _BESIDE:
                    raise mistake(f"{named}: the registry sends more than the {size:,} bytes that it says")
                if moved - mark > _SLOWEST:
                    mark, since = moved, time.monotonic()
                if time.monotonic() - since > self._timeout:
                    what = f"{named}: the registry has sent and taken less than 64 KiB in {self._timeout:g} seconds"
                    raise mistake(what, "give it longer: --timeout SECONDS")
        finally:
            process.kill()
            process.wait()


def _moved(pid: int) -> tuple[int, int]:
    """Return the bytes that a process has read, and those that it has read and written, from files and sockets."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
    except (OSError, ProcessLookupError):
        return 0, 0
    counts = dict(line.split(": ") for line in lines)
    read = int(counts.get("rchar", 0))
    return read, read + int(counts.get("wchar", 0))


def write_links(folder: Path, image: Layout) -> None:
    """Write a layout with links to its files, for a program that reads it soon.

    It writes the layers of a container image, because no file has their bytes.
    """
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for path, content in image.files().items():
        if isinstance(content, bytes):
            (folder / path).write_bytes(content)
        elif isinstance(content, FileOf) and not content.head:
            (folder / path).symlink_to(Path(content.path).resolve())
        else:
            with writing.folder(folder) as top, writing.made(top, path) as parent:
                writing.file(parent, Path(path).name, content.pieces())


def _is_index(raw: bytes) -> bool:
    """Whether a manifest is an index of several images."""
    with contextlib.suppress(ValueError):
        parsed = strict_json.parse(raw, _LARGEST)
        return isinstance(parsed, dict) and parsed.get("mediaType") == layout.INDEX_TYPE
    return False


def _own_image(raw: bytes, source: Reference) -> str:
    """Return the digest of the image for this machine in an index, or of the first: all have the same files."""
    manifests = _parse(raw, _IMAGES, str(source))["manifests"]
    if not manifests:
        raise _no_bundle(source, "it is an index of no images")
    here = containers.ARCHITECTURES.get(os.uname().machine)
    own = [image for image in manifests if image.get("platform", {}).get("architecture") == here]
    return str((own or manifests)[0]["digest"])


def _image(raw: bytes, source: Reference) -> _Image:
    """Read the manifest of an image. Raises StagecError if it is not that of a bundle."""
    manifest = _parse(raw, layout.MANIFEST, str(source))
    layers = manifest["layers"]
    container = "artifactType" not in manifest and manifest["config"]["mediaType"] == containers.CONTAINER
    if not container and manifest.get("artifactType") != layout.MODEL:
        raise _no_bundle(source, f"its artifactType is {strict_json.shown(repr(manifest.get('artifactType')))}")
    if _foreign(manifest):
        raise _no_bundle(source, "it has `urls`, and what is there would come from elsewhere")
    files: dict[str, Blob] = {}
    for layer in layers:
        if container and layer["mediaType"] != layout.TAR:
            kind = strict_json.shown(layer["mediaType"])
            write = (
                "copy images with skopeo copy --preserve-digests, which compresses none; no server's image is pulled"
            )
            raise _no_bundle(source, f"a layer is of type {kind}, not of {layout.TAR}", write)
        if container and layout.TITLE not in layer.get("annotations", {}):
            what, write = "a layer names no file, as in the image of a server", "pull the image that `push` wrote of it"
            raise _no_bundle(source, what, write)
        path = _path_of(layer, source)
        if path in files:
            raise _no_bundle(source, f"two layers are named {strict_json.shown(path)}")
        # A compilation cache is an archive itself, so the file is the layer.
        files[path] = Blob(layer["digest"].removeprefix("sha256:"), container and not path.endswith(".tar"))
    for path in files:
        above = path
        while above := above.rpartition("/")[0]:
            if above in files:
                raise _no_bundle(source, f"{strict_json.shown(above)} is a file, and a folder with files")
    if container:
        if not layers or not next(iter(files)).endswith(".aot"):
            raise _no_bundle(source, "its first layer is not that of a file *.aot")
    elif not layers or layers[0]["mediaType"] != layout.CODE:
        raise _no_bundle(source, f"its first layer is not of type {layout.CODE}")
    size = sum(blob["size"] for blob in [*layers, manifest["config"]])
    return _Image(files, next(iter(files)), size, manifest.get("annotations", {}).get(layout.BASES, "").split(","))


def _no_bundle(source: Reference, why: str, write: str = "") -> StagecError:
    write = write or f"pull what `push` wrote: a container image, or one of type {layout.MODEL}"
    return mistake(f"{source} is not a bundle: {why}", write)


def _foreign(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest has blobs that come from other places than the registry."""
    return any("urls" in blob for blob in [*manifest["layers"], manifest["config"]])


def _list_tag(image: Reference) -> str:
    return layout.referrers_tag(image.digest)


@contextlib.contextmanager
def _nothing_if_absent() -> Iterator[None]:
    """Leave the block without an error if the registry does not have the requested image."""
    try:
        yield
    except StagecError as error:
        if not _is_absent(error):
            raise


def _is_absent(error: StagecError) -> bool:
    """Whether a registry has no such image, or has something there that is not a manifest."""
    text = str(error).lower()
    return isinstance(error.__cause__, ValueError) or any(words in text for words in _ABSENT)


def _path_of(layer: Mapping[str, Any], source: Reference) -> str:
    """Return the path of a layer's file. Raises StagecError if it has none below the folder."""
    path = layer.get("annotations", {}).get(layout.TITLE, "")
    names = path.split("/")
    too_long = len(path) > _LONGEST_PATH or len(names) > _DEEPEST_PATH or max(map(len, names)) > _LONGEST_NAME
    if too_long or not _PATH.fullmatch(path):
        raise mistake(f"{source}: a layer does not name a file in the folder: {strict_json.shown(path)}")
    return str(path)


def _parse(data: bytes, shape: json_shapes.Shape, named: str, most: int = _LARGEST) -> dict[str, Any]:
    try:
        parsed = strict_json.parse(data, most)
        shape(parsed)
    except ValueError as error:
        raise mistake(f"{named}: what the registry has is not the manifest of an image: {error}") from error
    return dict(parsed)


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _reason(text: str) -> str:
    """Return the last line of skopeo's log, the reason for the failure.

    It quotes the registry: control characters there are escapes, and stay escapes.
    """
    fatal = _FATAL.findall(text)
    last = re.sub(r'\\(["\\])', r"\1", fatal[-1]) if fatal else text.strip().rpartition("\n")[2]
    last = re.sub(r'^Error parsing image name "[^"]*": ', "", last)
    return last if len(last) <= _LONGEST_REASON else f"{last[:_LONGEST_REASON]}..."
