"""Make a release of stagec: `prepare VERSION` edits what names the version, `build --output FOLDER` writes the rest.

    python3 tools/release.py prepare 0.2.0          then look at it, and commit
    python3 tools/release.py build --output /tmp/release --repository OWNER/stagec
    python3 tools/release.py attest /tmp/release    if you have signed the provenance

FOLDER gets the wheels of stagec and of its extensions, the source archive, SHA256SUMS, what to write into a WORKSPACE,
the changelog of the version, the entry for the Bazel Central Registry, made of the templates in .bcr, an SBOM of the
wheels, and unsigned provenance of all these files. Nothing is uploaded. `build` takes the commit that is checked out,
and gives the same bytes each time with the same Python. It needs git, and the packages build, setuptools and wheel,
whose versions are in the provenance. `attest` takes the signed provenance of the archive, of source.json and of
MODULE.bazel from FOLDER, each as NAME.intoto.jsonl, and writes the entry's attestations.json.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-[0-9A-Za-z.-]+)?")
"""https://semver.org, without metadata of builds."""
_VERSION = Path("compiler/stagec/core/builds/version.py")
_CHANGELOG = Path("CHANGELOG.md")
_SECTION = re.compile(r"^## (\S+) \((.+)\)$", re.MULTILINE)


def main(arguments: list[str] | None = None) -> None:
    """Run a command line; None: the process's. Raises SystemExit with a message for a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: the script's)")
    commands = parser.add_subparsers(required=True)
    preparing = commands.add_parser("prepare", help="edit the files that name the version")
    preparing.add_argument("version")
    preparing.add_argument("--date", default=datetime.date.today().isoformat(), help="of the release (default: today)")
    preparing.set_defaults(run=lambda given: prepare(given.root, given.version, given.date))
    making = commands.add_parser("build", help="write a release into a folder")
    making.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    making.add_argument("--repository", default="OWNER/stagec", help="the repository on GitHub (default: OWNER/stagec)")
    making.add_argument(
        "--maintainer",
        type=_maintainer,
        action="append",
        default=[],
        metavar="LOGIN:ID",
        help="who answers for the module in the Bazel Central Registry: the account on GitHub and its number, which "
        "https://api.github.com/users/LOGIN has; several times for several",
    )
    making.set_defaults(run=lambda given: build(given.root, given.output, given.repository, given.maintainer))
    attesting = commands.add_parser("attest", help="name signed provenance in the entry for the registry")
    attesting.add_argument("folder", type=Path, help="the release, with NAME.intoto.jsonl for each of three files")
    attesting.set_defaults(run=lambda given: attest(given.folder))
    given = parser.parse_args(arguments)
    given.run(given)


def current(root: Path) -> str:
    """Return the version that the sources have."""
    match = re.search(r'^VERSION = "(.+)"$', (root / _VERSION).read_text(), re.MULTILINE)
    assert match
    return match[1]


def prepare(root: Path, version: str, date: str) -> None:
    """Write the version into every file that names it, and the date into the changelog."""
    old = current(root)
    _check(version)
    if version != old and _order(version) <= _order(old):
        raise SystemExit(f"{version} does not come after {old}")
    changelog = (root / _CHANGELOG).read_text()
    first = _SECTION.search(changelog)
    if not first or first[2] != "unreleased":
        raise SystemExit(
            f"{_CHANGELOG}: its first section is not unreleased: write what is new, below ## {version} (unreleased)"
        )
    (root / _CHANGELOG).write_text(changelog.replace(first[0], f"## {version} ({date})", 1))
    for path, line in _named(root, old):
        text = (root / path).read_text()
        (root / path).write_text(text.replace(line, line.replace(old, version)))
        print(f"{path}: {line.replace(old, version)}")


def _maintainer(text: str) -> dict[str, object]:
    login, _, number = text.rpartition(":")
    if not re.fullmatch(r"[A-Za-z0-9-]+", login) or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not LOGIN:ID: write for example octocat:583231")
    return {"github": login, "github_user_id": int(number)}


def build(root: Path, output: Path, repository: str, maintainers: Sequence[Mapping[str, object]]) -> None:
    """Write a release of the commit that is checked out. maintainers: those of the module, as the registry has them."""
    version = current(root)
    _check(version)
    if _git(root, "status", "--porcelain").strip():
        raise SystemExit("there are changes that are not committed: a release is of a commit")
    sections = list(_SECTION.finditer(changelog := (root / _CHANGELOG).read_text()))
    if not sections or sections[0][1] != version or sections[0][2] == "unreleased":
        raise SystemExit(f"{_CHANGELOG}: its first section is not {version} with a date: run prepare {version}")
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise SystemExit(f"{output}: there are files in it: name a new folder")
    name = f"stagec-{version}"
    tar = subprocess.run(
        ["git", "archive", "--format=tar", f"--prefix={name}/", "HEAD"], cwd=root, check=True, capture_output=True
    ).stdout
    (output / f"{name}.tar.gz").write_bytes(gzip.compress(tar, mtime=0))
    seconds = _git(root, "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            archive.extractall(scratch, filter="data")
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output.resolve())]
        core = Path(scratch, name, "compiler")
        env = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
        for project in (core, *(file.parent for file in sorted(core.glob("extensions/*/pyproject.toml")))):
            done = subprocess.run(command, check=False, cwd=project, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"the wheel of {project.name} was not built:\n{done.stdout}{done.stderr}")
        module = Path(scratch, name, "MODULE.bazel").read_text()
    end = sections[1].start() if len(sections) > 1 else len(changelog)
    (output / "notes.md").write_text(changelog[sections[0].start() : end].strip() + "\n")
    _write_bazel(root, output, name, repository, version, module, maintainers)
    (output / f"{name}.cdx.json").write_text(_sbom(sorted(output.glob("*.whl")), version, int(seconds)))
    (output / f"{name}.intoto.json").write_text(_provenance(root, output, repository, version))
    files = sorted(path for path in output.rglob("*") if path.is_file())
    sums = "".join(f"{_sha256(path).hex()}  {path.relative_to(output)}\n" for path in files)
    (output / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def attest(folder: Path) -> None:
    """Write attestations.json, as https://github.com/bazelbuild/bazel-central-registry/blob/main/docs/attestations.md.

    Who signed, and with what, is for the registry to verify. Here it is checked that the right files were signed.
    """
    pattern, write = "bcr/modules/stagec/*/source.json", "name the folder that build wrote"
    entries = sorted(folder.glob(pattern))
    if len(entries) != 1:
        raise SystemExit(f"{folder}: it has {len(entries)} files {pattern}, and a release has one: {write}")
    (entry,) = entries
    try:
        base, _, archive = json.loads(entry.read_text())["url"].rpartition("/")
        files = {"source.json": entry, "MODULE.bazel": entry.with_name("MODULE.bazel"), archive: folder / archive}
        digests = {name: _sha256(file).hex() for name, file in files.items()}
    except OSError as error:
        raise SystemExit(f"{error.filename}: it cannot be read: {error.strerror}: {write}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"{entry}: it does not say where the archive is: {error!r}: {write}") from error
    attestations, problems = {}, []
    for name, digest in digests.items():
        signed = folder / f"{name}.intoto.jsonl"
        if problem := _fault(signed, digest):
            problems.append(f"{signed}: {problem}")
            continue
        integrity = f"sha256-{base64.b64encode(_sha256(signed)).decode()}"
        attestations[name] = {"url": f"{base}/{signed.name}", "integrity": integrity}
    if problems:
        raise SystemExit("\n".join(problems))
    values = {
        "mediaType": "application/vnd.build.bazel.registry.attestation+json;version=1.0.0",
        "attestations": attestations,
    }
    entry.with_name("attestations.json").write_text(json.dumps(values, indent=4) + "\n")


def _fault(signed: Path, digest: str) -> str:
    """Return what is wrong with a signed statement about a file; "" if nothing is."""
    try:
        envelope = json.loads(signed.read_text())
        envelope = envelope.get("dsseEnvelope", envelope)  # in a bundle of Sigstore
        statement = json.loads(base64.b64decode(envelope["payload"], validate=True))
        is_provenance = statement["predicateType"].startswith("https://slsa.dev/provenance/")
        if not envelope["signatures"] or envelope["payloadType"] != "application/vnd.in-toto+json" or not is_provenance:
            return "it is not signed provenance of SLSA: sign the .intoto.json of the release"
        digests = [subject["digest"].get("sha256") for subject in statement["subject"]]
    except FileNotFoundError:
        return "it is missing: sign the .intoto.json of the release, and name the envelope so"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it is not a DSSE envelope or a bundle of Sigstore: {type(error).__name__}: {error}"
    return "" if digest in digests else f"another file was signed: none of its subjects has sha256 {digest}"


def _sbom(wheels: Sequence[Path], version: str, seconds: int) -> str:
    """Return the CycloneDX SBOM of wheels: the wheels, and what they require, in the versions that they allow."""
    required: dict[str, list[str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
            lines = archive.read(metadata).decode("utf-8").partition("\n\n")[0].splitlines()
        required[wheel.name] = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    own = {wheel.name: wheel.name.partition("-")[0].replace("_", "-") for wheel in wheels}
    wanted = {text: _package(text) for texts in required.values() for text in texts}
    components: list[dict[str, object]] = [
        {
            "type": "library",
            "bom-ref": own[wheel.name],
            "name": own[wheel.name],
            "version": version,
            "hashes": [{"alg": "SHA-256", "content": _sha256(wheel).hex()}],
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        }
        for wheel in wheels
    ]
    components += [
        {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "purl": f"pkg:pypi/{name}",
            "scope": "optional" if all("extra ==" in text for text in wanted if wanted[text] == name) else "required",
            "properties": [
                {"name": "stagec:requires", "value": text}
                for text, package in sorted(wanted.items())
                if package == name
            ],
        }
        for name in sorted({*wanted.values()}.difference(own.values()))
    ]
    values = {
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {"type": "framework", "bom-ref": "release", "name": "stagec", "version": version},
        },
        "components": components,
        "dependencies": [
            {"ref": "release", "dependsOn": sorted(own.values())},
            *(
                {"ref": own[wheel], "dependsOn": sorted({wanted[text] for text in texts})}
                for wheel, texts in required.items()
            ),
        ],
    }
    head = {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(values, sort_keys=True)).urn,
    }
    return json.dumps(head | values, indent=1) + "\n"


def _package(requirement: str) -> str:
    """Return the normalized name of a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def _provenance(root: Path, output: Path, repository: str, version: str) -> str:
    """Return an in-toto statement with SLSA provenance of the files of a release: the commit, and what built them."""
    files = sorted(path for path in output.rglob("*") if path.is_file())
    source = f"https://github.com/{repository}"
    values = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": str(path.relative_to(output)), "digest": {"sha256": _sha256(path).hex()}} for path in files
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{source}/blob/v{version}/tools/release.py",
                "externalParameters": {"repository": repository, "version": version},
                "resolvedDependencies": [
                    {
                        "uri": f"git+{source}@refs/tags/v{version}",
                        "digest": {"gitCommit": _git(root, "rev-parse", "HEAD").strip()},
                    }
                ],
            },
            "runDetails": {
                "builder": {
                    "id": f"{source}/blob/v{version}/tools/release.py",
                    "version": {
                        "python": platform.python_version(),
                        **{name: importlib.metadata.version(name) for name in ("build", "setuptools", "wheel")},
                    },
                }
            },
        },
    }
    return json.dumps(values, indent=1) + "\n"


def _write_bazel(
    root: Path,
    output: Path,
    name: str,
    repository: str,
    version: str,
    module: str,
    maintainers: Sequence[Mapping[str, object]],
) -> None:
    """Write what users of WORKSPACE copy, and the entry for the Bazel Central Registry."""
    owner, _, repo = repository.partition("/")
    words = {"{OWNER}": owner, "{REPO}": repo, "{VERSION}": version, "{TAG}": f"v{version}"}

    def template(file: str) -> dict[str, object]:
        text = (root / ".bcr" / f"{file}.template.json").read_text()
        for word, value in words.items():
            text = text.replace(word, value)
        return dict(json.loads(text))

    digest = _sha256(output / f"{name}.tar.gz")
    source = template("source") | {"integrity": f"sha256-{base64.b64encode(digest).decode()}"}
    lines = [
        'load("@bazel_tools//tools/build_defs/repo:http.bzl", "http_archive")',
        "",
        "http_archive(",
        '    name = "stagec",',
        f'    sha256 = "{digest.hex()}",',
        f'    strip_prefix = "{name}",',
        f'    url = "{source["url"]}",',
        ")",
    ]
    (output / "WORKSPACE.txt").write_text("\n".join(lines) + "\n")
    entry = output / "bcr" / "modules" / "stagec"
    (entry / version).mkdir(parents=True)
    (entry / version / "MODULE.bazel").write_text(module)
    (entry / version / "source.json").write_text(json.dumps(source, indent=4) + "\n")
    (entry / version / "presubmit.yml").write_text((root / ".bcr" / "presubmit.yml").read_text())
    metadata = template("metadata") | ({"maintainers": maintainers} if maintainers else {}) | {"versions": [version]}
    (entry / "metadata.json").write_text(json.dumps(metadata, indent=4) + "\n")


def _named(root: Path, version: str) -> list[tuple[str, str]]:
    """Return the path of each file that names the version of stagec, and what of it does."""
    lines = (
        f'VERSION = "{version}"',
        f'bazel_dep(name = "stagec", version = "{version}")',
        f'module(\n    name = "stagec",\n    version = "{version}",\n)',
        f"This is version {version}.",
        f'version = "{version}"\ndescription',  # of an extension
    )
    named = []
    for path in _git(root, "ls-files", "-z").split("\0"):
        if path.endswith((".py", ".bazel", ".md", "pyproject.toml")) and not (root / path).is_symlink():
            text = (root / path).read_text()
            named += [(path, line) for line in lines if line in text]
    return named


def _check(version: str) -> None:
    if not _SEMANTIC.fullmatch(version):
        raise SystemExit(f"{version} is not a semantic version: write for example 0.2.0")


def _order(version: str) -> tuple[list[int], bool, str]:
    """Return what versions are ordered by: a pre-release comes before its release."""
    numbers, _, before = version.partition("-")
    return [int(number) for number in numbers.split(".")], not before, before


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


if __name__ == "__main__":
    main()
