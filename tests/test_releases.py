"""A release from Bazel: weights beside the bundle, its image in a registry, and a second builder.

One small workspace, which needs no JAX to trace, serves all tests.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

import stagec
from stagec.bundle.archive import Archive
from stagec.core.builds.version import VERSION
from tests.building import ROOT, checked, stagec as command
from tests.nested import NestedBazel, actions, environment, telling, workspace_files
from tests.registries import Registry, needs_registry
from tests.signed import write_keys
from tests.users import User

MANIFEST = """
[manifest]
name = "models"
version = "1.0.0"

[functions.scale]
entry = "models.scale:scale"
frontend = "arrays"
args = ["f32[4]", "f32[4]"]
bind = { x = { file = "parts/w.safetensors", external = true } }
targets = ["cpu-avx2"]
"""
SCALE = "import stagec_arrays.numpy\n\n\ndef scale(x, y):\n    return x * y\n"
BUILD = """load("@models_manifest//:defs.bzl", "aot_manifest")

aot_manifest(name = "models", deps = ["scale.py"])
"""
W = np.arange(4, dtype=np.float32)
MINE = {name: value for name, value in os.environ.items() if name in ("HOME", "JAVA_HOME", "PATH", "USER")}
"""What Bazel needs of the tests' variables."""
STAGES = ("StagecExport", "StagecCompile", "StagecBundle", "StagecDescribeWeights", "StagecProvenance", "StagecImage")


class Workspace(NestedBazel):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "user")
        self.models, self.events = self.root / "models", folder / "events.json"
        (self.models / "parts").mkdir(parents=True)
        save_file({"x": W}, self.models / "parts" / "w.safetensors")
        packages = environment(folder / "packages", User(None, sys.executable))
        overrides = "".join(f"build {option}\n" for option in self.with_packages(packages))
        for path, text in {
            **{self.root / file: text for file, text in workspace_files("user").items()},
            self.root / ".bazelrc": f"build --nosandbox_debug\n{overrides}",
            self.models / "BUILD": BUILD,
            self.models / "scale.py": SCALE,
            self.models / "models.toml": MANIFEST,
        }.items():
            path.write_text(text)

    def build(self, *targets: str) -> list[str]:
        """Build; return the mnemonics of the actions that ran."""
        done = self.run("build", *targets, *telling(self.events))
        assert done.returncode == 0, done.stderr
        return [kind for kind, _ in actions(self.events, STAGES)]

    def output(self, name: str) -> Path:
        return self.root / "bazel-bin" / "models" / name


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("releases"))
    try:
        workspace.build("//models", "//models:models.provenance")
        yield workspace
    finally:
        workspace.run("shutdown")


def test_weights_lie_beside_the_bundle_and_are_not_read_again(workspace: Workspace) -> None:
    with stagec.load(workspace.output("models.aot")) as bundle:
        np.testing.assert_array_equal(bundle["scale"](np.full(4, 2, np.float32)), 2 * W)
    statement = json.loads(workspace.output("models.intoto.json").read_text())
    digest = hashlib.sha256((workspace.models / "parts" / "w.safetensors").read_bytes()).hexdigest()
    resolved = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {"name": "models/parts/w.safetensors", "digest": {"sha256": digest}} in resolved
    # An edit of the code.
    (workspace.models / "scale.py").write_text(SCALE.replace("x * y", "x * y + 1"))
    ran = workspace.build("//models", "//models:models.provenance")
    assert ran == ["StagecBundle", "StagecCompile", "StagecExport", "StagecProvenance"]
    (workspace.models / "scale.py").write_text(SCALE)
    # Other weights: the code is not compiled again.
    save_file({"x": W + 1}, workspace.models / "parts" / "w.safetensors")
    ran = workspace.build("//models")
    save_file({"x": W}, workspace.models / "parts" / "w.safetensors")
    assert {"StagecBundle", "StagecDescribeWeights"} <= {*ran}
    workspace.build("//models", "//models:models.provenance")


@needs_registry
def test_the_image_is_pushed_by_bazel_run(workspace: Workspace, tmp_path: Path) -> None:
    images = {"image": (), "container": ("--container",)}
    assert workspace.build(*(f"//models:models.{name}" for name in images)) == ["StagecImage"] * 2
    (tmp_path / "registry").mkdir()
    registry = Registry(tmp_path / "registry")
    try:
        for kind, options in images.items():
            image = f"{registry.host}/models:{kind}"
            done = workspace.run("run", "//models:models.push", "--", image, "--plain-http", *options)
            assert done.returncode == 0, done.stderr
            # The same image as in the layout, which skopeo reads.
            words = ("skopeo", "inspect", "--raw", f"oci:{workspace.output(f'models.{kind}')}:image")
            raw = subprocess.run(words, check=True, capture_output=True)
            assert registry.get(f"models/manifests/{kind}") == raw.stdout
            folder = tmp_path / kind
            checked("pull", image, folder, "--plain-http")
            for name in ("models.aot", "parts/w.safetensors", "models.intoto.json", "models.sbom.json"):
                assert (folder / name).read_bytes() == workspace.output(name).read_bytes()
            with stagec.load(folder / "models.aot") as bundle:
                np.testing.assert_array_equal(bundle["scale"](W), W * W)
    finally:
        registry.close()


def test_the_registry_tries_a_python_of_rules_python(tmp_path: Path) -> None:
    """What its commands make of the workspace; `tools/bazel7` has none of rules_python's modules."""
    shutil.copytree(ROOT / "tests" / "e2e", tmp_path, dirs_exist_ok=True)
    presubmit = (ROOT / ".bcr" / "presubmit.yml").read_text()
    commands = re.findall(r"^        - ((?:sed|cat) .*)$", presubmit, re.MULTILINE)
    assert len(commands) == 2
    for words in commands:
        subprocess.run(["bash", "-c", words], cwd=tmp_path, check=True)
    made = (tmp_path / "MODULE.bazel").read_text()
    assert 'stagec.python(lock = "//:requirements.lock", python = "@python_3_12_host//:python")\n' in made
    assert 'use_repo(python, "python_3_12_host")\n' in made


def test_a_second_builder(workspace: Workspace, tmp_path: Path) -> None:
    """Two keys for one bundle: of who built it, and of who built it again in another checkout."""
    release, checkout = tmp_path / "release", tmp_path / "second" / "user"
    release.mkdir()
    for name in ("models.aot", "models.intoto.json"):
        shutil.copy(workspace.output(name), release)
    (release / "parts").mkdir()
    shutil.copy(workspace.output("parts/w.safetensors"), release / "parts")
    ignored = shutil.ignore_patterns("bazel-*")
    shutil.copytree(workspace.root, checkout, ignore=ignored)
    (tmp_path / "second" / "stagec").symlink_to(workspace.root.parent / "stagec")
    bazel = str(workspace.root.parent / "stagec" / "bazelw")
    words = ("rebuild", release / "models.aot", "--statement", release / "models.intoto.json", "--bazel", bazel)
    own = tmp_path / "models.rebuilt.intoto.json"

    done = command(*words, "--root", checkout, "--output", own, env=MINE)
    assert done.returncode == 0, done.stderr
    count = len(Archive(release / "models.aot").index["members"])
    assert done.stdout.splitlines() == [
        f"{release}/models.aot: built again, and the same: {count} members, byte for byte",
        "made from the same",
        f"wrote {own}: sign it with your key",
    ]
    (a, a_public), (b, b_public) = write_keys(tmp_path, "a"), write_keys(tmp_path, "b")
    checked("sign", release / "models.aot", "--statement", release / "models.intoto.json", "--key", a)
    second = release / "models.aot.2.dsse.json"
    checked("sign", release / "models.aot", "--statement", own, "--key", b, "--output", second)
    both = ("--key", a_public, "--key", b_public, "--threshold", "2")
    assert "2 of 2 keys signed, 2 must" in checked("verify", release / "models.aot", *both)

    # A checkout with another source is refused before anything is built.
    (checkout / "models" / "scale.py").write_text(SCALE + "# edited\n")
    done = command(*words, "--root", checkout)
    statement = release / "models.intoto.json"
    assert (done.returncode, done.stderr) == (
        2,
        f"{checkout}: this checkout differs from the one in {statement}: models/scale.py\n"
        "  check out the sources of that release, without changes\n",
    )
    # A statement about another bundle.
    other, digest = tmp_path / "other.intoto.json", hashlib.sha256((release / "models.aot").read_bytes()).hexdigest()
    other.write_text(statement.read_text().replace(digest, "0" * 64))
    done = command(*words[:3], other, "--root", checkout)
    assert done.returncode == 2
    assert "other.intoto.json: another bundle was signed: models.aot differs" in done.stderr


def test_a_rebuild_that_gives_another_bundle(workspace: Workspace, tmp_path: Path) -> None:
    """What is released is not what these sources give: the members that differ are named, and nothing is signed."""
    release = tmp_path / "release"
    release.mkdir()
    (workspace.models / "scale.py").write_text(SCALE.replace("x * y", "x * y + 1"))
    workspace.build("//models", "//models:models.provenance")
    for name in ("models.aot", "models.intoto.json"):
        shutil.copy(workspace.output(name), release)
    (workspace.models / "scale.py").write_text(SCALE)
    # Somebody who wants to pass the edit off as the release says that the sources were the usual ones.
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (SCALE.replace("x * y", "x * y + 1"), SCALE)]
    statement = release / "models.intoto.json"
    statement.write_text(statement.read_text().replace(*digests))
    bazel = str(workspace.root.parent / "stagec" / "bazelw")
    words = ("rebuild", release / "models.aot", "--statement", statement, "--bazel", bazel, "--root", workspace.root)
    done = command(*words, "--output", tmp_path / "own.json", env=MINE)
    assert done.returncode == 1, done.stderr
    assert f"{release}/models.aot: built again, and another\n" in done.stdout
    assert "  ~ scale.exported\n" in done.stdout
    assert not (tmp_path / "own.json").exists()


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def script(checkout: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith("site-packages"))
    command = [sys.executable, str(checkout / "tools" / "release.py"), *map(str, words)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def _signed(statement: bytes) -> str:
    """Return a DSSE envelope (https://github.com/secure-systems-lab/dsse)."""
    kind = b"application/vnd.in-toto+json"
    signature = Ed25519PrivateKey.generate().sign(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement))
    payload, signed = (base64.b64encode(part).decode() for part in (statement, signature))
    return json.dumps({"payloadType": kind.decode(), "payload": payload, "signatures": [{"sig": signed}]}) + "\n"


def _attest(checkout: Path, release: Path, source: Mapping[str, str]) -> None:
    """Name signed provenance in the entry for the Bazel Central Registry, as its own checks want it."""
    entry = release / "bcr" / "modules" / "stagec" / "0.99.7"
    archive = "stagec-0.99.7.tar.gz"
    statement = (release / "stagec-0.99.7.intoto.json").read_bytes()
    done = script(checkout, "attest", release)
    assert done.returncode == 1
    assert done.stderr.count("it is missing: sign the .intoto.json of the release") == 3
    kept = (entry / "source.json").read_bytes()
    for text, told in (
        (b"[]", "source.json: it does not say where the archive is: TypeError("),
        (b"{}", "source.json: it does not say where the archive is: KeyError('url')"),
        (b"\xff", "source.json: it does not say where the archive is: UnicodeDecodeError("),
        (kept.replace(b".tar.gz", b".zip"), "stagec-0.99.7.zip: it cannot be read: No such file or directory"),
    ):
        (entry / "source.json").write_bytes(text)
        done = script(checkout, "attest", release)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert told in done.stderr
        assert done.stderr.endswith(": name the folder that build wrote\n")
    (entry / "source.json").write_bytes(kept)
    done = script(checkout, "attest", checkout)
    told = f"{checkout}: it has 0 files bcr/modules/stagec/*/source.json, and a release has one: name the folder that "
    assert (done.returncode, done.stderr) == (1, f"{told}build wrote\n")
    (release / "source.json.intoto.jsonl").mkdir()
    assert "source.json.intoto.jsonl: it cannot be read: Is a directory\n" in script(checkout, "attest", release).stderr
    (release / "source.json.intoto.jsonl").rmdir()
    other = statement.replace(hashlib.sha256((release / archive).read_bytes()).hexdigest().encode(), b"0" * 64)
    unsigned = json.dumps({**json.loads(_signed(statement)), "signatures": []})
    texts = {archive: _signed(other), "source.json": unsigned, "MODULE.bazel": statement.decode()}
    for name, text in texts.items():
        (release / f"{name}.intoto.jsonl").write_text(text)
    said = script(checkout, "attest", release).stderr
    assert f"{archive}.intoto.jsonl: another file was signed: none of its subjects has sha256 " in said
    assert "source.json.intoto.jsonl: it is not signed provenance of SLSA: sign the .intoto.json" in said
    assert "MODULE.bazel.intoto.jsonl: it is not a DSSE envelope or a bundle of Sigstore: KeyError: 'payload'" in said
    assert not (entry / "attestations.json").exists()
    for name in texts:
        text = _signed(statement)
        if name == archive:
            kind = "application/vnd.dev.sigstore.bundle.v0.3+json"
            text = json.dumps({"mediaType": kind, "dsseEnvelope": json.loads(text)})
        (release / f"{name}.intoto.jsonl").write_text(text)
    done = script(checkout, "attest", release)
    assert done.returncode == 0, done.stderr
    values = json.loads((entry / "attestations.json").read_text())
    assert values.pop("mediaType") == "application/vnd.build.bazel.registry.attestation+json;version=1.0.0"
    prefix = source["url"].removesuffix(archive)
    assert values == {
        "attestations": {
            name: {
                "url": f"{prefix}{name}.intoto.jsonl",
                "integrity": "sha256-"
                + base64.b64encode(hashlib.sha256((release / f"{name}.intoto.jsonl").read_bytes()).digest()).decode(),
            }
            for name in texts
        }
    }


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_release_of_stagec(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Made end to end by the script, and built with by a workspace that names the archive and its hash."""
    folder = tmp_path_factory.mktemp("release")
    checkout = folder / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "bazel-*", "*.egg-info", "build")
    for name in (".bcr", "compiler", "rules"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    (checkout / "tools").mkdir()
    for name in (
        "BUILD",
        "CHANGELOG.md",
        "LICENSE",
        "MODULE.bazel",
        "README.md",
        "WORKSPACE",
        "bazelw",
        "tools/release.py",
    ):
        shutil.copy(ROOT / name, checkout / name)
    git(checkout, "init", "--quiet")
    git(checkout, "add", "-A")
    git(checkout, "commit", "--quiet", "-m", "Before")

    # What is wrong is said before anything is written.
    done = script(checkout, "build", "--output", folder / "out")
    assert (done.returncode, done.stderr) == (
        1,
        f"CHANGELOG.md: its first section is not {VERSION} with a date: run prepare {VERSION}\n",
    )
    done = script(checkout, "prepare", "next")
    assert (done.returncode, done.stderr) == (1, "next is not a semantic version: write for example 0.2.0\n")
    done = script(checkout, "prepare", "0.0.1")
    assert (done.returncode, done.stderr) == (1, f"0.0.1 does not come after {VERSION}\n")
    done = script(checkout, "build", "--output", folder / "out", "--maintainer", "octocat")
    assert "octocat is not LOGIN:ID: write for example octocat:583231\n" in done.stderr

    done = script(checkout, "prepare", "0.99.7", "--date", "2026-12-01")
    assert done.returncode == 0, done.stderr
    assert 'compiler/stagec/core/builds/version.py: VERSION = "0.99.7"\n' in done.stdout
    done = script(checkout, "build", "--output", folder / "out")
    assert "not committed" in done.stderr
    assert not (folder / "out").exists()
    git(checkout, "commit", "--quiet", "-a", "-m", "Release")
    for name in ("out", "again"):
        words = ("--repository", "some/stagec", "--maintainer", "octocat:583231")
        done = script(checkout, "build", "--output", folder / name, *words)
        assert done.returncode == 0, done.stderr
    files = sorted(str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*") if path.is_file())
    assert files == [
        "SHA256SUMS",
        "WORKSPACE.txt",
        "bcr/modules/stagec/0.99.7/MODULE.bazel",
        "bcr/modules/stagec/0.99.7/presubmit.yml",
        "bcr/modules/stagec/0.99.7/source.json",
        "bcr/modules/stagec/metadata.json",
        "notes.md",
        "stagec-0.99.7-py3-none-any.whl",
        "stagec-0.99.7.cdx.json",
        "stagec-0.99.7.intoto.json",
        "stagec-0.99.7.tar.gz",
        *(
            f"stagec_{name}-0.99.7-py3-none-any.whl"
            for name in ("arrays", "grpc", "insight", "registry", "rehearse", "serve")
        ),
    ]
    for name in files:
        assert (folder / "out" / name).read_bytes() == (folder / "again" / name).read_bytes(), name
    assert (folder / "out" / "notes.md").read_text().startswith("## 0.99.7 (2026-12-01)\n")
    archive = folder / "out" / "stagec-0.99.7.tar.gz"
    digest = hashlib.sha256(archive.read_bytes())
    source = json.loads((folder / "out" / "bcr/modules/stagec/0.99.7/source.json").read_text())
    assert source["integrity"] == f"sha256-{base64.b64encode(digest.digest()).decode()}"
    metadata = json.loads((folder / "out" / "bcr/modules/stagec/metadata.json").read_text())
    assert metadata["maintainers"] == [{"github": "octocat", "github_user_id": 583231}]
    assert metadata["versions"] == ["0.99.7"]
    assert 'version = "0.99.7"' in (folder / "out" / "bcr/modules/stagec/0.99.7/MODULE.bazel").read_text()

    # Who checks the statement has checked all files, and the commit.
    statement = json.loads((folder / "out" / "stagec-0.99.7.intoto.json").read_text())
    said = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    assert said == {
        name: hashlib.sha256((folder / "out" / name).read_bytes()).hexdigest()
        for name in files
        if name not in ("SHA256SUMS", "stagec-0.99.7.intoto.json")
    }
    _attest(checkout, folder / "out", source)
    (commit,) = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert commit["digest"]["gitCommit"] == git(checkout, "rev-parse", "HEAD").strip()
    text = (folder / "out" / "stagec-0.99.7.cdx.json").read_text()
    validators = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_7
    assert validators.JsonStrictValidator(schema).validate_str(text) is None
    sbom = json.loads(text)
    depends = {one["ref"]: one["dependsOn"] for one in sbom["dependencies"]}
    assert depends["stagec"] == ["cryptography", "flatbuffers", "jax", "jaxlib", "numpy", "pydantic"]
    assert "grpcio" in depends["stagec-grpc"]
    assert "grpcio" not in depends["stagec-serve"]
    assert {one["name"] for one in sbom["components"]} >= {"stagec-grpc", "stagec-serve", "numpy"}

    # A user's workspace, in which the archive is the whole of stagec.
    user = Workspace(folder)
    text = (folder / "out" / "WORKSPACE.txt").read_text().replace(source["url"], archive.as_uri())
    local = re.compile(r"local_repository\(.*?\)\n", re.DOTALL)
    (user.root / "WORKSPACE").write_text(local.sub(lambda _: text, (user.root / "WORKSPACE").read_text(), count=1))
    try:
        user.build("//models")
        assert Archive(user.output("models.aot")).index["versions"] == {"stagec": "0.99.7"}
    finally:
        user.run("shutdown")
