"""The folder that `pull` writes to: what others put there, several pulls at once, and what is pushed at once.

Modules: `stagec_registry/pull_folder.py`, `stagec_registry/referrers.py`, `stagec_registry/commands/pull.py`,
`stagec_registry/commands/push.py`.
"""

import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagec
from stagec_registry import layout
from tests.building import COMPILER, PYTHON, action_environment, checked, stagec as command
from tests.registries import Hostile, Registry, needs_registry
from tests.signed import write_bundle_of, write_keys, write_provenance

pytestmark = needs_registry

PARTS = {"zoo.aot": b"bundle" * 1000, "parts/a": b"same" * 1000, "parts/b": b"same" * 1000, "c": b"other"}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    (tmp_path / "registry").mkdir()
    registry = Registry(tmp_path / "registry")
    yield registry
    registry.close()


@pytest.fixture
def served() -> Iterator[Hostile]:
    """An image of a file and two equal ones, of a registry that tells what it sent."""
    registry = Hostile()
    registry.add(registry.image(*(registry.layer(name, content) for name, content in PARTS.items())), "1")
    yield registry
    registry.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pull(registry: Hostile, folder: Path) -> "subprocess.CompletedProcess[str]":
    return command("pull", f"{registry.host}/x:1", folder, "--plain-http")


def test_equal_files_are_files_of_their_own(served: Hostile, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    assert pull(served, folder).returncode == 0
    assert contents(folder) == PARTS
    assert (folder / "parts" / "a").stat().st_ino != (folder / "parts" / "b").stat().st_ino
    (folder / "parts" / "a").unlink()  # the other one is there
    assert pull(served, folder).returncode == 0
    assert contents(folder) == PARTS
    assert (folder / "parts" / "a").stat().st_nlink == 1


@pytest.mark.parametrize("damage", [b"", b"damaged", b"planted" * 1000])
def test_blobs_are_not_believed_by_their_names(served: Hostile, tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "x"
    blobs = folder / ".stagec-pull" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for content in PARTS.values():
        (blobs / hashlib.sha256(content).hexdigest()).write_bytes(damage)
    (blobs / ("0" * 64)).write_bytes(b"of another image")
    (folder / ".stagec-pull" / "index.json").write_bytes(damage)
    done = pull(served, folder)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == PARTS


def test_links_are_not_followed(served: Hostile, tmp_path: Path) -> None:
    folder, mine = tmp_path / "x", tmp_path / "mine"
    for path in (folder, mine):
        path.mkdir()
    secret, same = mine / "secret", mine / "same"
    secret.write_bytes(b"secret")
    same.write_bytes(PARTS["zoo.aot"])
    for path in (secret, same):
        path.chmod(0o600)
    # A link instead of a file is replaced; what it leads to stays, with its permissions.
    (folder / "zoo.aot").symlink_to(same)
    os.link(secret, folder / "c")
    # Links in the folder of work: to a blob, to what skopeo writes.
    blobs = folder / ".stagec-pull" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / hashlib.sha256(PARTS["zoo.aot"]).hexdigest()).symlink_to(same)
    os.link(same, blobs / hashlib.sha256(PARTS["parts/a"]).hexdigest())
    for name in ("index.json", "oci-layout", "moves"):
        (folder / ".stagec-pull" / name).symlink_to(secret)
    done = pull(served, folder)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == PARTS
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    for path, content in ((secret, b"secret"), (same, PARTS["zoo.aot"])):
        assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode), path.stat().st_nlink) == (content, 0o600, 1)


@pytest.mark.parametrize("name", ["parts", ".stagec-pull", ".stagec-pull/blobs"])
def test_a_folder_that_is_a_link(served: Hostile, tmp_path: Path, name: str) -> None:
    folder, mine = tmp_path / "x", tmp_path / "mine"
    mine.mkdir()
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(mine)
    done = pull(served, folder)
    if name == ".stagec-pull/blobs":  # it is removed, as all that is left there
        assert (done.returncode, contents(folder)) == (0, PARTS)
    else:
        assert done.returncode == 2
        words = {
            "parts": f"{folder}/parts/a: cannot be written: {folder}/parts is a link, which is not followed\n",
            ".stagec-pull": f"{folder}/.stagec-pull: it is not a folder, and links are not followed\n  remove it\n",
        }
        assert done.stderr == words[name]
        assert not (folder / "zoo.aot").exists()
    assert list(mine.iterdir()) == []


def test_all_files_or_none(served: Hostile, tmp_path: Path) -> None:
    """If one of them cannot be replaced, the others stay as they were."""
    folder = tmp_path / "x"
    (folder / "c").mkdir(parents=True)
    (folder / "zoo.aot").write_bytes(b"old")
    done = pull(served, folder)
    assert (done.returncode, done.stderr) == (2, f"{folder}/c: cannot be written: it is a folder\n")
    assert {path: content for path, content in contents(folder).items() if not path.startswith(".")} == {
        "zoo.aot": b"old"
    }
    # What was moved is kept: nobody sends it again.
    (folder / "c").rmdir()
    (served.blobs).update(dict.fromkeys(served.blobs, 1 << 20))
    served.blobs[hashlib.sha256(b"{}").hexdigest()] = b"{}"
    done = pull(served, folder)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == PARTS


@pytest.mark.skipif(os.geteuid() != 0, reason="a file that not even its owner renames takes root")
def test_what_was_replaced_is_put_back(served: Hostile, tmp_path: Path) -> None:
    """The last of the files cannot be replaced, which shows when the others have been."""
    folder = tmp_path / "x"
    folder.mkdir()
    for name in ("c", "zoo.aot"):
        (folder / name).write_bytes(b"old")
    mount = ["mount", "--bind", str(folder / "zoo.aot"), str(folder / "zoo.aot")]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        done = pull(served, folder)
    finally:
        subprocess.run(["umount", "-l", folder / "zoo.aot"], check=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{folder}/zoo.aot: cannot be written: ")
    left = {path: content for path, content in contents(folder).items() if not path.startswith(".")}
    assert left == {"zoo.aot": b"old", "c": b"old"}


def test_permissions_stay(served: Hostile, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for name, content in (("zoo.aot", b"old"), ("c", PARTS["c"])):
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    assert pull(served, folder).returncode == 0
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in PARTS}
    assert modes == {"zoo.aot": 0o600, "c": 0o600, "parts/a": 0o644, "parts/b": 0o644}


def processes(*commands: tuple[str | Path, ...]) -> list[tuple[int, str]]:
    """Run commands at once; return status and stderr of each."""
    words = [[*PYTHON, str(COMPILER / "stagec" / "__main__.py"), *map(str, one)] for one in commands]
    options = {"env": action_environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(one, **options) for one in words]  # type: ignore[call-overload]
    return [(process.wait(), process.communicate()[1]) for process in started]


def test_several_pulls_at_once(served: Hostile, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    words = ("pull", f"{served.host}/x:1", folder, "--plain-http")
    for _ in range(3):
        assert processes(*[words] * 6) == [(0, "")] * 6
        assert contents(folder) == PARTS
        (folder / "zoo.aot").unlink()


def test_builders_that_push_signatures_at_once(zoo: Path, registry: Registry, tmp_path: Path) -> None:
    bundle = write_bundle_of(zoo, tmp_path, "loop")
    statement, sbom = write_provenance(bundle)
    names, where = "abcde", f"{registry.host}/zoo:1"
    checked("push", bundle, where, "--plain-http", "--statement", statement, "--sbom", sbom)
    pushes = []
    for name in names:
        private, _ = write_keys(tmp_path, name)
        envelope = tmp_path / f"{name}.dsse.json"
        checked("sign", bundle, "--statement", statement, "--key", private, "--output", envelope)
        pushes.append(("push", bundle, where, "--plain-http", "--signature", envelope))
    assert processes(*pushes) == [(0, "")] * len(names)
    keys = [word for name in names for word in ("--key", tmp_path / f"{name}.pub.pem")]
    checked("pull", where, tmp_path / "x", "--plain-http")
    checked("verify", tmp_path / "x" / "zoo.aot", *keys, "--threshold", str(len(names)))
    # The list, which other clients read, has all of them too.
    digest = hashlib.sha256(registry.get("zoo/manifests/1")).hexdigest()
    tag = layout.referrers_tag(f"sha256:{digest}")
    listed = json.loads(registry.get(f"zoo/manifests/{tag}", layout.INDEX_TYPE))["manifests"]
    assert len({one["digest"] for one in listed}) == len(listed) == len(names) + 2


def test_another_version_takes_what_was_said_of_the_first_away(zoo: Path, registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    keys = write_keys(tmp_path, "ann"), write_keys(tmp_path, "bob")
    for version in "12":
        (tmp_path / version).mkdir()
        bundle = write_bundle_of(zoo, tmp_path / version, "loop", version=version)
        statement, sbom = write_provenance(bundle)
        words: list[str | Path] = ["push", bundle, f"{registry.host}/zoo:{version}", "--plain-http"]
        # The second has one signature, and no statement or SBOM.
        words += ["--statement", statement, "--sbom", sbom] if version == "1" else []
        for number, (private, _) in enumerate(keys[: 3 - int(version)]):
            envelope = tmp_path / version / f"{number}.dsse.json"
            checked("sign", bundle, "--statement", statement, "--key", private, "--output", envelope)
            words += ["--signature", envelope]
        checked(*words)
    checked("pull", f"{registry.host}/zoo:1", folder, "--plain-http")
    assert len(contents(folder)) == 5
    (folder / "notes.txt").write_text("mine")
    told = json.loads(checked("pull", f"{registry.host}/zoo:2", folder, "--plain-http", "--json"))
    assert sorted(contents(folder)) == ["notes.txt", "zoo.aot", "zoo.aot.dsse.json"]
    assert sorted(told["removed"]) == ["zoo.aot.2.dsse.json", "zoo.intoto.json", "zoo.sbom.json"]
    stagec.load(folder / "zoo.aot", keys=[keys[0][1]]).close()
    # What somebody here said about this bundle stays, under its name.
    checked("sign", folder / "zoo.aot", "--statement", statement, "--key", keys[1][0], "--output", tmp_path / "own")
    (folder / "zoo.aot.dsse.json").write_bytes((tmp_path / "own").read_bytes())
    checked("pull", f"{registry.host}/zoo:2", folder, "--plain-http")
    assert sorted(contents(folder)) == ["notes.txt", "zoo.aot", "zoo.aot.2.dsse.json", "zoo.aot.dsse.json"]
    checked("verify", folder / "zoo.aot", "--key", keys[0][1], "--key", keys[1][1], "--threshold", "2")


@pytest.fixture
def release(zoo: Path, tmp_path: Path) -> Path:
    bundle = write_bundle_of(zoo, tmp_path, "loop")
    write_provenance(bundle)
    return bundle


@pytest.mark.parametrize("kind", ["--statement", "--sbom", "--signature"])
@pytest.mark.parametrize("what", ["key", "other", "text"])
def test_what_is_not_about_the_bundle_is_not_published(
    release: Path, zoo: Path, registry: Registry, tmp_path: Path, kind: str, what: str
) -> None:
    private, _ = write_keys(tmp_path, "key")
    given = {"key": private, "text": tmp_path / "zoo.toml"}
    if what == "other":
        (tmp_path / "other").mkdir()
        other = write_bundle_of(zoo, tmp_path / "other", "loop", version="2")
        statement, sbom = write_provenance(other)
        checked("sign", other, "--statement", statement, "--key", private)
        given["other"] = {"--statement": statement, "--sbom": sbom, "--signature": Path(f"{other}.dsse.json")}[kind]
    for words in (
        ("push", release, f"{registry.host}/zoo:1", "--plain-http"),
        ("image", release, "--output", tmp_path / "layout"),
    ):
        done = command(*words, kind, given[what])
        assert done.returncode == 2
        first, second = done.stderr.splitlines()
        assert first.startswith(f"{given[what]}: ")
        assert second == "  nothing was published or written"
    assert registry.uploads() == 0
    assert not (tmp_path / "layout").exists()


def test_a_wrong_signature_is_taken_out(release: Path, zoo: Path, registry: Registry, tmp_path: Path) -> None:
    where, statement = f"{registry.host}/zoo:1", release.with_suffix(".intoto.json")
    envelopes = {}
    for name in ("right", "wrong"):
        private, _ = write_keys(tmp_path, name)
        envelopes[name] = tmp_path / f"{name}.dsse.json"
        checked("sign", release, "--statement", statement, "--key", private, "--output", envelopes[name])
        checked("push", release, where, "--plain-http", "--signature", envelopes[name])
    digest = hashlib.sha256(envelopes["wrong"].read_bytes()).hexdigest()
    text = checked("push", release, where, "--plain-http", "--remove", digest[:12])
    assert "no list names it, but the registry did not delete it: " in text  # this one is not set up to delete
    checked("pull", where, tmp_path / "x", "--plain-http")
    assert sorted(contents(tmp_path / "x")) == ["zoo.aot", "zoo.aot.dsse.json"]
    assert (tmp_path / "x" / "zoo.aot.dsse.json").read_bytes() == envelopes["right"].read_bytes()
    # It stays out when somebody pushes.
    checked("push", release, where, "--plain-http", "--statement", statement)
    checked("pull", where, tmp_path / "y", "--plain-http")
    assert sorted(contents(tmp_path / "y")) == ["zoo.aot", "zoo.aot.dsse.json", "zoo.intoto.json"]
    done = command("push", release, where, "--plain-http", "--remove", digest)
    assert done.returncode == 2
    assert f"no file about this image has the sha256 {digest}..." in done.stderr
    done = command("push", release, where, "--plain-http", "--remove", "abc")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "--remove: 'abc' is not a SHA-256")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
def test_a_disk_that_is_full(served: Hostile, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    served.add(served.image(served.layer("zoo.aot", os.urandom(200_000))), "1")
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        done = pull(served, folder)
        left = [path.name for path in folder.iterdir()]
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert (done.returncode, left) == (2, [".stagec-pull"])
    assert done.stderr.endswith(": no space left on device\n")
    assert len(done.stderr.splitlines()) == 1
