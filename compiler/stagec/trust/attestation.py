"""Who signed a bundle: DSSE envelopes around its in-toto statement.

An envelope (https://github.com/secure-systems-lab/dsse, protocol.md and envelope.md) has the statement and any number
of signatures; the statement (https://github.com/in-toto/attestation, spec/v1/statement.md) has the digests of the
bundle and of each member. An envelope may also come from a Sigstore bundle, around a statement of OpenSSF's Model
Signing (`trust/model_signing.py`).

The subjects of a statement are the bundle and each member. So the loader compares their digests with those of the
index, and checks a member as usual when it reads it. No build action has a key: signing is a program of its own.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stagec.bundle.archive import INDEX, Archive
from stagec.core.data import reading, strict_json
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes
from stagec.trust import model_signing
from stagec.trust.dsse import LARGEST, PAYLOAD_TYPE, Envelope, pae
from stagec.trust.keys import Key, is_signed, read_keys
from stagec.trust.model_signing import SignedModel

if TYPE_CHECKING:
    from stagec.bundle.additions import Indexed
    from stagec.trust.keys import PublicKey

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
"""The type of a statement about how its subjects were built. Signatures of other types do not count."""
BUILD_TYPE = "urn:stagec:build:bazel:1"
"""The meaning of the predicate's parameters: docs/build-type.md."""
ADDITION_TYPE = "urn:stagec:build:add-jaxlib:1"
"""The same for a bundle that `stagec add-jaxlib` made from another."""
LAYER = ".tar"
"""What the file of a layer with JAX's compilation cache ends with."""
SUFFIX = ".dsse.json"
"""An envelope lies beside its bundle: `models.aot` and `models.aot.dsse.json`."""

MOST_ENVELOPES = 32
"""The most envelopes of one bundle that stagec looks for."""
_STATEMENT = json_shapes.shape(
    {
        "_type": STATEMENT_TYPE,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": json_shapes.constant(BUILD_TYPE, ADDITION_TYPE),
                "externalParameters": {"name": str, "version": str, ...: object},
                ...: object,
            },
            ...: object,
        },
        "subject": [{"name": str, "digest": {"sha256": json_shapes.sha256, ...: str}}],
        ...: object,
    }
)


class Statement(NamedTuple):
    """A signed statement: the bundle and its members by their digests, and how they were built.

    name, version: of the bundle. subjects: `<bundle>.aot` and `<bundle>.aot/<member>` -> SHA-256 (hex).
    """

    name: str
    version: str
    subjects: Mapping[str, str]

    @staticmethod
    def read(payload: bytes, path: str | Path) -> Statement | SignedModel:
        """Read a statement, in the file at `path`. Raises LoadError ("signature") if it is not stagec's.

        The same key may have signed other statements of the same subjects, a failed test for example: they vouch for
        nothing.
        """
        try:
            data = strict_json.parse(payload, LARGEST)
            if isinstance(data, dict) and data.get("predicateType") == model_signing.PREDICATE_TYPE:
                return SignedModel.of(data)
            _STATEMENT(data)
            listed = [(subject["name"], subject["digest"]["sha256"]) for subject in data["subject"]]
            subjects = dict(listed)
            if len(subjects) != len(listed):
                raise ValueError("a subject appears twice")
        except ValueError as error:
            what = f"what is signed is not the provenance of a bundle: {error}"
            raise LoadError("signature", f"{path}: {what}") from error
        parameters = data["predicate"]["buildDefinition"]["externalParameters"]
        return Statement(parameters["name"], parameters["version"], subjects)

    def check_index(self, index: bytes, whole: Callable[[], str], path: str | Path, bundle: str | Path) -> None:
        """Check that the bytes of a bundle's index were signed, before anything parses them.

        whole: returns the SHA-256 (hex) of the bundle's file. path: the envelope's, for messages. bundle: path of the
        bundle's file, which may have been renamed. Raises LoadError ("signature").
        """
        wanted = self.subjects.get(f"{self.name}.aot/{INDEX}")
        if hashlib.sha256(index).hexdigest() != wanted:
            raise LoadError("signature", f"{path}: another bundle was signed: {INDEX} differs")

    def check(self, archive: Indexed, path: str | Path, digest: str | None = None) -> None:
        """Check that the subjects are the bundle and exactly its members.

        path: the envelope's, for messages. digest: SHA-256 (hex) of the bundle's file; None if the digests of its
        members are enough. Raises LoadError ("signature").
        """
        self.check_subject(Subject.of(archive, digest or self.subjects.get(bundle_name(archive), "")), path)

    def check_subject(self, subject: Subject, path: str | Path) -> None:
        """Check that it is about this, and nothing else. path: the envelope's. Raises LoadError ("signature")."""
        wanted = subject.digests
        differing = sorted(
            subject for subject in {*self.subjects, *wanted} if self.subjects.get(subject) != wanted.get(subject)
        )
        if not differing and (self.name, self.version) != (subject.name, subject.version):
            differing = [f"{self.name} {self.version}"]
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            shown = strict_json.shown(differing[0])
            raise LoadError("signature", f"{path}: another {subject.kind} was signed: {shown}{more} differs")


class Subject(NamedTuple):
    """What a statement is about: a bundle, or the layer with a folder of JAX's compilation cache.

    kind: "bundle" or "layer". name, version: a bundle's, as in its index; a layer has no version.
    digests: SHA-256 (hex) of the file, the first, of all that is in it, and of the files of weights beside it.
    weights: those, as in the index.
    """

    kind: str
    name: str
    version: str
    digests: Mapping[str, str]
    weights: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(archive: Indexed, digest: str) -> Subject:
        """Return a bundle's. digest: SHA-256 (hex) of its file."""
        index = archive.index
        digests = {bundle_name(archive): digest, **subjects(archive)}
        return Subject("bundle", index["name"], index["version"], digests, index["weights_files"])

    @staticmethod
    def of_layer(path: str | Path) -> Subject:
        """Return that of the layer at `path`, which may have been renamed. Raises ValueError if it is none."""
        data = reading.whole(path)
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                members = archive.getmembers()
                # Others are links, or say that they are larger than the layer.
                files = [member for member in members if member.isreg() and not member.issparse()]
                contents = ((member.name, archive.extractfile(member)) for member in files)
                digests = {name: hashlib.sha256(file.read()).hexdigest() for name, file in contents if file}
        except tarfile.TarError as error:
            raise ValueError(f"not a layer: {error}") from error
        names = {name.partition("/")[0] for name in digests}
        if len(names) != 1 or len(digests) != len(members):
            raise ValueError("not a layer with one folder of files")
        (name,) = names
        return Subject("layer", name, "", {f"{name}.tar": hashlib.sha256(data).hexdigest(), **digests}, {})


class Vouching:
    """The evidence for a bundle: envelopes that enough of the trusted keys signed.

    Each builder of the same bundle has a statement, and so an envelope. An envelope for another bundle, or a damaged
    one, counts for nothing and does not harm the others: anybody may have put it there.
    keys: by keyid. threshold: how many must have signed. signed: keyids of the keys that signed an envelope, after the
    check. paths: of the envelopes.
    """

    signed: tuple[str, ...] = ()

    def __init__(
        self, bundle: str | Path, keys: Iterable[Key], threshold: int, paths: Sequence[str | Path] = ()
    ) -> None:
        """bundle: path of its file. keys: the public keys that are trusted. threshold: how many must have signed.

        paths: of the envelopes; none: those of `envelopes_of`. Raises LoadError: "key", "cryptography".
        """
        if isinstance(keys, str | bytes | os.PathLike):
            raise LoadError("key", "keys is one key; write a list of them: keys=[...]")
        self.keys = read_keys(keys)
        if not self.keys:
            raise LoadError("key", "no key is given, and nothing would be checked; say which ones you trust")
        if not 1 <= threshold <= len(self.keys):
            raise LoadError("key", f"{threshold} signatures cannot come from {len(self.keys)} different keys")
        self.threshold, self.paths, self._bundle = threshold, tuple(envelopes_of(bundle, paths)), bundle
        self._counted: dict[str | Path, tuple[Statement | SignedModel, list[str]]] = {}
        self._refused: list[LoadError] = []

    def __call__(self, index: bytes, whole: Callable[[], str]) -> None:
        """Check that the bytes of a bundle's index were signed; `whole` returns the digest of its file.

        It ignores an envelope that none of the keys signed. Raises LoadError ("signature").
        """
        whole = functools.cache(whole)  # of one file, for all envelopes
        self._count_those(lambda statement, path: statement.check_index(index, whole, path, self._bundle))

    def check_layer(self, subject: Subject) -> None:
        """Check that this layer was signed. Raises LoadError ("signature")."""

        def check(statement: Statement | SignedModel, path: str | Path) -> None:
            if not isinstance(statement, Statement):
                raise LoadError("signature", f"{path}: a model was signed, and not a layer")
            statement.check_subject(subject, path)

        self._count_those(check)

    def _count_those(self, check: Callable[[Statement | SignedModel, str | Path], None]) -> None:
        """Read the envelopes that one of the keys signed, and count those that pass the check."""
        signers: set[str] = set()
        for path in self.paths:
            try:
                envelope = Envelope.read(path)
                signed = signed_by(envelope, self.keys)
                if not signed:
                    continue
                # Before the statement is read: `stagec verify` tells another bundle's signature from none (`signed`).
                signers |= {*signed}
                statement = Statement.read(envelope.payload, path)
                check(statement, path)
            except LoadError as error:
                self._refused.append(error)
            else:
                self._counted[path] = statement, signed
        if len(signers) >= self.threshold:
            self.signed = tuple(name for name in self.keys if name in signers)
        self._count()

    def check(self, archive: Indexed, digest: str | None = None) -> None:
        """Check that exactly this bundle was signed, as `Statement.check` does."""
        for path, (statement, _) in [*self._counted.items()]:
            try:
                statement.check(archive, path, digest)
            except LoadError as error:
                self._refused.append(error)
                del self._counted[path]
        self._count()

    def _count(self) -> None:
        """Check that enough keys signed statements about this bundle."""
        right = {name for _, signed in self._counted.values() for name in signed}
        if len(right) >= self.threshold:
            self.signed = tuple(name for name in self.keys if name in right)
            return
        # With one envelope, its own fault says more than a count of keys.
        if len(self.paths) == len(self._refused) == 1:
            raise self._refused[0]
        what = f"{len(right)} of {len(self.keys)} keys signed it, {self.threshold} must"
        whys = "".join(f"; {error}" for error in self._refused)
        raise LoadError("signature", f"{', '.join(map(str, self.paths))}: {what}{whys}")


def envelopes_of(bundle: str | Path, given: Sequence[str | Path] = ()) -> list[str | Path]:
    """Return the paths of a bundle's envelopes: those `given`, or those that lie beside it.

    They are `<bundle>.dsse.json`, and `<bundle>.2.dsse.json` and so on for statements of other builders. A number may
    be missing: somebody removed that one.
    """
    names: list[str | Path] = [*numbered(str(bundle), SUFFIX)]
    # Where there is none, the first name: the message then says where a signature belongs.
    return [*given] or [path for path in names if os.path.lexists(path)] or names[:1]


def numbered(stem: str, suffix: str) -> Iterator[str]:
    """Yield the names of files of one kind: `models.aot.dsse.json`, then `models.aot.2.dsse.json`, and so on."""
    yield f"{stem}{suffix}"
    yield from (f"{stem}.{number}{suffix}" for number in range(2, MOST_ENVELOPES + 1))


def open_signed(
    path: str | Path,
    keys: Iterable[Key],
    threshold: int = 1,
    signature: str | Path | Sequence[str | Path] | None = None,
) -> Archive:
    """Open a bundle that enough of `keys` signed. Before the check, it reads only the places of the members.

    The signed statement has the digest of the index and of every member. So the archive hands out only signed bytes: it
    compares each member with the digest in the index.
    keys, threshold: as for `Vouching`. signature: the envelope, or several; None: those of `envelopes_of`.
    Raises LoadError: "signature" when a signature is missing, wrong or for other content; "key" when a key cannot be
    read; "cryptography" when that package is not installed; and the errors of `Archive`.
    """
    given = (signature,) if isinstance(signature, str | Path) else signature or ()
    vouching = Vouching(path, keys, threshold, given)
    archive = Archive(path, vouch=vouching)
    vouching.check(archive)
    return archive


def signed_by(envelope: Envelope, keys: Mapping[str, PublicKey]) -> list[str]:
    """Return the keyids of those of `keys` that signed the envelope's payload, each once, in the order of `keys`."""
    message = pae(PAYLOAD_TYPE, envelope.payload)
    # An envelope may repeat one signature, and each costs a verification with each key.
    different = list(dict.fromkeys(signature for _, signature in envelope.signatures))
    # Each key tries each signature: a keyid is a hint that anybody may write (DSSE, envelope.md).
    return [name for name, key in keys.items() if any(is_signed(key, signature, message) for signature in different)]


def subjects(archive: Indexed) -> dict[str, str]:
    """Return the subjects that a statement of the bundle must name besides the bundle: name -> SHA-256.

    Its members are `<bundle>/<member>`; files of weights beside it have their names in the index.
    """
    members = {name: entry["sha256"] for name, entry in archive.index["members"].items()}
    # The index lists all members but itself: it cannot have its own digest.
    digests = {INDEX: hashlib.sha256(archive.encoded_index).hexdigest(), **members}
    inside = {f"{bundle_name(archive)}/{name}": digest for name, digest in digests.items()}
    return inside | {name: file["sha256"] for name, file in archive.index["weights_files"].items()}


def bundle_name(archive: Indexed) -> str:
    """Return the name of the bundle in a statement; its file may have been renamed since."""
    return f"{archive.index['name']}.aot"
