"""`stagec rebuild` with statements that somebody damaged: one error each, and nothing is read that it must not.

Modules: `cli/rebuild.py`, `audit/rebuilding.py`.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagec.audit import rebuilding
from stagec.bundle.archive import Archive
from stagec.trust import provenance
from stagec.trust.attestation import Subject
from tests.building import stagec

MANIFEST = b"[manifest]\n"
SOURCE = {"name": "models/f.py", "digest": {"sha256": hashlib.sha256(b"source").hexdigest()}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout: a manifest, a source and a FIFO."""
    root = tmp_path / "checkout"
    (root / "models").mkdir(parents=True)
    (root / "models" / "m.toml").write_bytes(MANIFEST)
    (root / "models" / "f.py").write_bytes(b"source")
    (root / "models" / "BUILD").touch()
    os.mkfifo(root / "models" / "fifo")
    return root


def rebuild(bundle: Path, root: Path, edit: Callable[[dict[str, Any]], object]) -> str:
    """What the command says of a statement whose build definition is edited."""
    archive = Archive(bundle)
    manifest = "models/m.toml", hashlib.sha256(MANIFEST).hexdigest()
    statement = json.loads(provenance.statement(Subject.of(archive, archive.sha256()), manifest, {}, {}, []))
    build = statement["predicate"]["buildDefinition"]
    build["resolvedDependencies"].append(dict(SOURCE))
    edit(build)
    file = root.parent / "s.intoto.json"
    file.write_text(json.dumps(statement))
    words = ("rebuild", bundle, "--statement", file.name, "--root", root, "--bazel", "/bin/false")
    done = stagec(*words, cwd=root.parent)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.replace(f"{root}", "ROOT")


def test_one_that_is_whole_is_built(zoo: Path, root: Path) -> None:
    assert rebuild(zoo, root, lambda build: None) == "//models:zoo: the build failed:\n\n"


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no sources": (lambda build: build.pop("resolvedDependencies"), ": the key 'resolvedDependencies' is missing"),
    "no manifest": (
        lambda build: build["externalParameters"].pop("manifest"),
        ".externalParameters: the key 'manifest' is missing",
    ),
    "a manifest without a name": (
        lambda build: build["externalParameters"].update(manifest="models/m.toml"),
        ".externalParameters.manifest: expected an object",
    ),
    "an absolute manifest": (
        lambda build: build["externalParameters"].update(manifest={"name": "/etc/passwd"}),
        ".externalParameters.manifest.name: '/etc/passwd' is not a path below the folder: it is absolute",
    ),
    "a manifest elsewhere": (
        lambda build: build["externalParameters"].update(manifest={"name": "models/../../m.toml"}),
        ".externalParameters.manifest.name: 'models/../../m.toml' is not a path below the folder: one of its names is ",
    ),
    "no Python": (lambda build: build.pop("internalParameters"), ": the key 'internalParameters' is missing"),
    "numbers for Python": (
        lambda build: build["internalParameters"].update(python=[3]),
        ".internalParameters.python[0]: expected a string, not",
    ),
    "a source that is a text": (
        lambda build: build["resolvedDependencies"].append("models/f.py"),
        ".resolvedDependencies[2]: expected an object",
    ),
    "a source without a digest": (
        lambda build: build["resolvedDependencies"].append({"name": "models/f.py"}),
        ".resolvedDependencies[2]: the key 'digest' is missing",
    ),
    "a digest that is a text": (
        lambda build: build["resolvedDependencies"].append({"name": "models/f.py", "digest": "00"}),
        ".resolvedDependencies[2].digest: expected a digest",
    ),
    "an empty digest": (
        lambda build: build["resolvedDependencies"].append({"name": "models/f.py", "digest": {}}),
        ".resolvedDependencies[2].digest: expected a digest",
    ),
    "an absolute source": (
        lambda build: build["resolvedDependencies"].append({**SOURCE, "name": "/etc/shadow"}),
        ".resolvedDependencies[2].name: expected a relative path, or the name of a package",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_statement_is_told(zoo: Path, root: Path, damage: str) -> None:
    edit, what = DAMAGES[damage]
    said = rebuild(zoo, root, edit)
    assert said.startswith(f"s.intoto.json: predicate.buildDefinition{what}")
    assert said.endswith("\n  give the .intoto.json of the build\n")


@pytest.mark.parametrize("name", ["models/fifo", "models/" + "x" * 300, "models/f.py/below"])
def test_a_source_that_is_none(zoo: Path, root: Path, name: str) -> None:
    def edit(build: dict[str, Any]) -> None:
        build["resolvedDependencies"].append({**SOURCE, "name": name})

    differs = f"ROOT: this checkout differs from the one in s.intoto.json: {name}"
    assert rebuild(zoo, root, edit).startswith(("//models:zoo: the build failed", differs))


def made_from(python: list[str], **digests: str) -> dict[str, Any]:
    """The build definition of a statement, as far as it is compared."""
    dependencies = [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()]
    return {"internalParameters": {"python": python}, "resolvedDependencies": dependencies}


def test_versions_are_whole_and_digests_are_cut() -> None:
    first = made_from(["3.11.2", "3.12.10", "3.13.0rc1"], jaxlib="a" * 64, numpy="b" * 64)
    second = made_from(["3.11.2", "3.12.11", "3.13.0rc1"], jaxlib="c" * 64, numpy="b" * 64, scipy="d" * 64)
    assert rebuilding._made_from(first, second) == [
        f"- jaxlib {'a' * 12}",
        f"+ jaxlib {'c' * 12}",
        "- python 3.11.2, 3.12.10, 3.13.0rc1",
        "+ python 3.11.2, 3.12.11, 3.13.0rc1",
        f"+ scipy {'d' * 12}",
    ]
    assert rebuilding._made_from(first, first) == []
