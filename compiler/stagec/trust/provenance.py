"""The inputs of a bundle's build: an in-toto statement with SLSA's provenance, the same bytes for the same inputs.

Formats: https://github.com/in-toto/attestation (spec/v1), https://slsa.dev/spec/v1.2/build-provenance;
docs/build-type.md explains each field. A statement does not depend on the machine: it has no path outside the
workspace, no host, no time. It names wheels, as pip says which it installed. So it belongs to one interpreter and
platform, even where others give the same bundle. A package whose wheel nobody knows is named by its RECORD, which also
has the scripts that an installer wrote for its environment: there, another environment gives another statement.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from stagec.bundle.additions import bases
from stagec.bundle.archive import Archive
from stagec.core.builds import extensions
from stagec.core.builds.frontends import FRONTENDS
from stagec.core.builds.version import VERSION
from stagec.core.data import strict_json
from stagec.core.messages.errors import mistake
from stagec.core.trees import json_shapes
from stagec.trust.attestation import ADDITION_TYPE, BUILD_TYPE, PREDICATE_TYPE, STATEMENT_TYPE, Subject, bundle_name
from stagec.trust.dsse import LARGEST

_CODE = ("**/*.py", "patches/*.json", "releases.toml")
"""What actions run and read of stagec: an installed one also has byte code and the checked-in hardware."""
BUILDER, ADDER = "urn:stagec:builder:bazel", "urn:stagec:builder:add-jaxlib"
LOCAL = "urn:stagec:builder:stagec-build"


@dataclass(frozen=True, order=True)
class Wheel:
    """An installed package: name and version as in its lock, file name and SHA-256 (hex) of the wheel.

    For an emulator and the interpreter that it runs, a Debian package. For a package whose wheel nobody knows, the file
    in site-packages that lists what is installed of it (`installed`). For what no package lists, its own file or folder
    there, with a digest of its sources; then the version is "".
    """

    name: str
    version: str
    filename: str
    sha256: str

    @property
    def is_file(self) -> bool:
        """Whether the digest is of the file that was installed."""
        return self.filename.endswith((".whl", ".deb"))

    @property
    def purl(self) -> str:
        """The universal name of the package (https://github.com/package-url/purl-spec)."""
        if not self.version:  # nobody published it
            return f"pkg:generic/{quote(self.name)}"
        if self.filename.endswith(".deb"):
            architecture = self.filename.removesuffix(".deb").rpartition("_")[2]
            return f"pkg:deb/debian/{quote(self.name)}@{quote(self.version)}?arch={architecture}"
        return package_url(self.name, self.version)


@dataclass(frozen=True)
class Environment:
    """Installed packages, as the repository rule python_environment lists them: the interpreter's version, wheels."""

    python: str
    wheels: tuple[Wheel, ...]


def package_url(name: str, version: str) -> str:
    """Return the URL of a package of the Python Package Index."""
    return f"pkg:pypi/{name.lower().replace('_', '-')}@{version.replace('+', '%2B')}"


_PACKAGES = json_shapes.shape(
    {"python": str, "packages": [{"name": str, "version": str, "filename": str, "sha256": json_shapes.sha256}]}
)
_REPORT = json_shapes.shape(
    {
        "environment": {"python_full_version": str, ...: object},
        "install": [
            {
                "metadata": {"name": str, "version": str, ...: object},
                "download_info": {
                    "url": str,
                    "archive_info": {"hashes?": {...: str}, "hash?": str, ...: object},
                    ...: object,
                },
                ...: object,
            }
        ],
        ...: object,
    }
)
"""Shapes of a Bazel environment's packages.json, and of a report of pip.

https://pip.pypa.io/en/stable/reference/installation-report. Before 23.1, pip writes only `hash` ("sha256=...") for some
wheels (https://github.com/pypa/pip/issues/11948).
"""


def read_environment(text: str) -> Environment:
    """Read what rules/private/python_environment.py writes, or `pip install --report`. Raises ValueError."""
    data = strict_json.parse(text, LARGEST)
    if not isinstance(data, dict) or "pip_version" not in data:
        _PACKAGES(data)
        return Environment(data["python"], tuple(Wheel(**wheel) for wheel in data["packages"]))
    _REPORT(data)
    wheels = []
    for item in data["install"]:
        named, origin = item["metadata"], item["download_info"]
        hashes = origin["archive_info"].get("hashes") or dict([origin["archive_info"].get("hash", "=").split("=", 1)])
        filename = unquote(urlsplit(origin["url"]).path.rpartition("/")[2])
        if not filename.endswith(".whl") or "sha256" not in hashes:
            raise ValueError(f"{named['name']} is not a wheel with a sha256")
        wheels.append(Wheel(named["name"], named["version"], filename, hashes["sha256"]))
    wheels.sort(key=lambda wheel: wheel.filename)
    return Environment(data["environment"]["python_full_version"], tuple(wheels))


def examined_in(rows: Iterable[str]) -> dict[str, str]:
    """Return the libraries that a build examined, by build-ids. rows: what `stagec action examine` wrote."""
    listed = sorted((row for text in rows for row in json.loads(text)), key=lambda row: row["build_id"])
    return {row["build_id"]: row["library"] for row in listed}


def installed(folders: Iterable[str]) -> list[Wheel]:
    """Return the packages in folders that are of no stagec, each by the file that lists what is installed of it.

    That is RECORD, which pip writes with the digest of each file, or else the package's metadata, where it has none.
    """
    ours = {*map(normalized, extensions.OURS)}
    wheels = []
    for info in (path for folder in folders for path in sorted(Path(folder).glob("*-info"))):
        described = next(filter(Path.is_file, (info / "METADATA", info / "PKG-INFO", info)), None)
        if described is None:  # of no package, as Python sees it
            continue
        distribution = metadata.Distribution.at(info)
        if not distribution.metadata["Name"] or not distribution.metadata["Version"]:
            raise mistake(f"{described}: it names no package and version", f"remove {info}, or install it again")
        listed = info / "RECORD" if (info / "RECORD").is_file() else described
        if normalized(distribution.name) not in ours:
            name = listed.relative_to(info.parent).as_posix()
            wheels.append(Wheel(distribution.name, distribution.version, name, sha256(listed.read_bytes())))
    return wheels


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub("[-_.]+", "-", name).lower()


def all_wheels(environments: Iterable[Environment]) -> list[Wheel]:
    """Return the wheels of environments, sorted, the same wheel once."""
    return sorted({wheel for environment in environments for wheel in environment.wheels})


def statement(
    subject: Subject,
    manifest: tuple[str, str],
    specs: Mapping[str, bytes],
    sources: Mapping[str, Mapping[str, str]],
    environments: Sequence[Environment],
    examined: Mapping[str, str] | None = None,
    builder: str = BUILDER,
) -> str:
    """Return the statement of what Bazel or `stagec build` built, as JSON.

    manifest: its path in the workspace, and SHA-256; that of a layer is its programs.toml. specs: by artifact.
    sources: digests (`digest_of`) of files and folders that tracing could read, by path in the workspace; of a layer,
        the keys.
    environments: the packages for planning, for staging, and for compiling for accelerators.
    examined: the libraries that the build examined, not the project: names of files by build-ids.
    """
    manifest_descriptor = {"name": manifest[0], "digest": {"sha256": manifest[1]}}
    resolved: list[dict[str, Any]] = [manifest_descriptor]
    resolved += [{"name": path, "digest": digest} for path, digest in sorted(sources.items())]
    folder = PurePosixPath(manifest[0]).parent
    resolved += [
        {"name": str(folder / weights), "digest": {"sha256": file["sha256"]}}
        for weights, file in subject.weights.items()
    ]
    resolved += _wheels(environments)
    variables = {artifact: json.loads(text).get("environment") for artifact, text in sorted(specs.items())}
    declared = {artifact: of_it for artifact, of_it in variables.items() if of_it}
    external = {"manifest": manifest_descriptor}
    internal = {
        "python": _interpreters(environments),
        "slices": {artifact: sha256(text) for artifact, text in sorted(specs.items())},
        **({"environment": declared} if declared else {}),
        **({"examined": examined} if examined else {}),
    }
    traced = {json.loads(text).get("frontend") for text in specs.values()}
    modules = [frontend.module for frontend in FRONTENDS if frontend.name in traced]
    return _statement(subject, BUILD_TYPE, builder, external, internal, resolved, modules)


def statement_of_addition(archive: Archive, digest: str, environments: Sequence[Environment]) -> str:
    """Return the statement of a bundle that `stagec add-jaxlib` made from another, as JSON.

    digest: SHA-256 (hex) of its file. environments: the packages of the compilers; none if nothing lists them.
    """
    before = bases(archive)[0]
    added: dict[str, list[str]] = {}
    for entries in before.added.values():
        for entry in entries:
            added.setdefault(entry["versions"]["jaxlib"], []).append(entry["executable"])
    base = {"name": bundle_name(before), "digest": {"sha256": before.sha256}}
    external = {"base": base, "jaxlib": sorted(added)}
    there = sorted({name for names in added.values() for name in names if name in before.index["members"]})
    internal = {"python": _interpreters(environments), "executables": added, "reused": there}
    resolved = [base, *_wheels(environments)]
    return _statement(Subject.of(archive, digest), ADDITION_TYPE, ADDER, external, internal, resolved)


def _interpreters(environments: Sequence[Environment]) -> list[str]:
    return sorted({environment.python for environment in environments})


def _wheels(environments: Sequence[Environment]) -> list[dict[str, Any]]:
    return [
        {"name": wheel.filename, "uri": wheel.purl, "digest": {"sha256": wheel.sha256}}
        for wheel in all_wheels(environments)
    ]


def _statement(
    subject: Subject,
    build_type: str,
    builder: str,
    external: Mapping[str, Any],
    internal: Mapping[str, Any],
    resolved: Sequence[Mapping[str, Any]],
    modules: Sequence[str] = (),
) -> str:
    """Return a statement; see `statement`. modules: of stagec that an action used, besides the core's."""
    packages = sorted({"stagec", *(module.partition(".")[0] for module in modules)})
    values = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subject.digests.items()],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": build_type,
                "externalParameters": {
                    "name": subject.name,
                    "version": subject.version,
                    **external,
                },
                "internalParameters": internal,
                "resolvedDependencies": resolved,
            },
            "runDetails": {
                "builder": {
                    "id": builder,
                    "version": {"stagec": VERSION},
                    "builderDependencies": list(map(_code, packages)),
                },
            },
        },
    }
    return json.dumps(values, indent=1) + "\n"


def _code(package: str) -> dict[str, Any]:
    """Describe a package of stagec. No index has an extension: there, its name may be somebody else's."""
    digest = {"dirHash": directory_hash(extensions.folder(package, "its provenance"), *_CODE)}
    uri = {"uri": package_url(package, VERSION)} if package == "stagec" else {}
    return {"name": package, **uri, "digest": digest}


def sha256(data: bytes) -> str:
    """Return the SHA-256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()


def directory_hash(folder: Path, *patterns: str) -> str:
    """Return in-toto's `dirHash` of the files in a folder that match a pattern, or of all: Go's Hash1, in hex."""
    matching = (file for pattern in patterns or ["**/*"] for file in folder.glob(pattern) if file.is_file())
    files = {file.relative_to(folder).as_posix(): file for file in matching}
    lines = (f"{sha256(file.read_bytes())}  {name}\n" for name, file in sorted(files.items()))
    return sha256("".join(lines).encode())


def digest_of(file: Path) -> dict[str, str]:
    """Return the digests of a file or a folder, as a statement has them."""
    return {"dirHash": directory_hash(file)} if file.is_dir() else {"sha256": sha256(file.read_bytes())}
