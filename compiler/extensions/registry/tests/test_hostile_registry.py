"""A registry that is hostile, and what somebody else pushed: one error and the status 2, or it is left out.

Modules: `stagec_registry/referrers.py`, `stagec_registry/client.py`.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stagec
from stagec_registry import containers, layers as tar, layout
from tests.building import checked, stagec as command
from tests.registries import Hostile, needs_registry
from tests.signed import write_bundle_of, write_keys, write_provenance

pytestmark = needs_registry


@pytest.fixture(scope="module")
def bundle(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with its statement, and an envelope of ann."""
    folder = tmp_path_factory.mktemp("hostile")
    bundle = write_bundle_of(zoo, folder, "loop")
    statement, _ = write_provenance(bundle)
    private, _ = write_keys(folder, "ann")
    checked("sign", bundle, "--statement", statement, "--key", private)
    return bundle


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    registry = Hostile()
    yield registry
    registry.close()


def refused(registry: Hostile, folder: Path, *more: str) -> str:
    """Pull what cannot be; return the one line that says so."""
    done = command("pull", f"{registry.host}/x:1", folder, "--plain-http", *more)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    first, *rest = done.stderr.splitlines()
    assert all(line.startswith("  ") for line in rest)
    assert done.stderr.replace("\n", "").isprintable()
    assert len(first) < 1500
    if folder.exists():
        assert [path.name for path in folder.iterdir()] == [".stagec-pull"]
    return first.replace(registry.host, "HOST")


@pytest.mark.parametrize("status", [401, 403, 404, 429, 400, 500])
def test_what_it_says_does_not_reach_the_terminal(hostile: Hostile, tmp_path: Path, status: int) -> None:
    words = "\x1b[2J\x07\x0b\u202e\ninjected: all is well\r" + "long " * 10_000
    hostile.status = status
    hostile.answer = json.dumps({"errors": [{"code": "DENIED", "message": words}]}).encode()
    refused(hostile, tmp_path / "x")


def edits(change: Callable[[dict[str, Any]], None], what: str) -> Any:
    return pytest.param(change, what, id=what.rpartition(":")[2].strip()[:40])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        edits(lambda m: m["layers"][0].update(urls=["http://127.0.0.1:1/x"]), "it has `urls`"),
        edits(lambda m: m["config"].update(urls=["http://127.0.0.1:1/x"]), "it has `urls`"),
        edits(lambda m: m["layers"].clear(), "its first layer is not of type application/vnd.cncf.model.code.v1.raw"),
        edits(lambda m: m["layers"].pop(0), "its first layer is not of type application/vnd.cncf.model.code.v1.raw"),
        edits(
            lambda m: m["layers"][1]["annotations"].update({layout.TITLE: "zoo.aot"}), "two layers are named zoo.aot"
        ),
        edits(lambda m: m["layers"][1]["annotations"].update({layout.TITLE: "zoo.aot/w"}), "zoo.aot is a file, and a "),
        edits(lambda m: m["layers"][1]["annotations"].update({layout.TITLE: "w" * 256}), "does not name a file in "),
        edits(
            lambda m: m["layers"][1]["annotations"].update({layout.TITLE: "w/" * 600 + "w"}), "does not name a file in "
        ),
        edits(lambda m: m["layers"][1]["annotations"].update({layout.TITLE: "a\x1b[2J"}), "does not name a file in "),
        edits(
            lambda m: m["layers"][1]["annotations"].update({layout.TITLE: "a\n7a38bf81f383  /srv/zoo.aot"}),
            "does not name a file in the folder: a\\n7a38bf81f383  /srv/zoo.aot",
        ),
        edits(lambda m: m["layers"][1]["annotations"].clear(), "a layer does not name a file in the folder: "),
        edits(lambda m: m["layers"][1].update(digest="sha256:../../x"), "expected a digest, sha256:..."),
        edits(lambda m: m.update(mediaType="application/x"), "mediaType: "),
        edits(lambda m: m.update(mediaType=layout.INDEX_TYPE), "the key 'manifests' is missing"),
        edits(lambda m: m.update(mediaType=layout.INDEX_TYPE, manifests=[]), "it is an index of no images"),
        edits(lambda m: m.update(artifactType="\x1b[2J" * 1000), "its artifactType is '\\x1b[2J"),
        edits(lambda m: m.update(config=None), "config: expected an object"),
        edits(lambda m: m["layers"][1].update(size=-1), "size: expected a whole number"),
    ],
)
def test_manifests(hostile: Hostile, tmp_path: Path, change: Callable[[dict[str, Any]], None], what: str) -> None:
    manifest = hostile.image(hostile.layer("zoo.aot", b"zoo"), hostile.layer("w", b"w", "application/x"))
    change(manifest)
    hostile.add(manifest, "1")
    assert what in refused(hostile, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def container(registry: Hostile, *files: tuple[str, bytes]) -> dict[str, Any]:
    """Return the manifest of a container image, with files in layers by their paths."""
    layers = [registry.layer(path, content, layout.TAR) for path, content in files]
    manifest = registry.image(*layers, config={**registry.blob(b"{}"), "mediaType": containers.CONTAINER})
    del manifest["artifactType"]
    return manifest


def tar_of(path: str, content: bytes) -> tuple[str, bytes]:
    return path, tar.head(path, len(content)) + content + tar.tail(len(content))


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ([], "its first layer is not that of a file *.aot"),
        ([tar_of("w.safetensors", b"w")], "its first layer is not that of a file *.aot"),
        ([tar_of("zoo.aot", b"zoo"), tar_of("../x", b"x")], "a layer does not name a file in the folder: ../x"),
        ([tar_of("zoo.aot", b"zoo"), ("w", b"w")], "w: its layer is not a tar of this one file, /models/w, as"),
        ([tar_of("zoo.aot", b"zoo"), ("w", tar_of("x", b"x")[1])], "w: its layer is not a tar of this one file"),
        ([("zoo.aot", tar_of("zoo.aot", b"zoo")[1] + bytes(512))], "zoo.aot: its layer is not a tar of this one file"),
    ],
)
def test_container_images(hostile: Hostile, tmp_path: Path, files: list[tuple[str, bytes]], what: str) -> None:
    """`test_layers.py` has all that a layer may be; here nothing is written when one of them is not right."""
    hostile.add(container(hostile, *files), "1")
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / ".stagec-pull").mkdir()
    assert what in refused(hostile, folder)


def test_the_image_of_a_server(hostile: Hostile, tmp_path: Path) -> None:
    """Its first layers are those of its base, which name no file."""
    manifest = container(hostile, ("base", b"base"), tar_of("zoo.aot", b"zoo"))
    del manifest["layers"][0]["annotations"]
    digest = hostile.add(manifest, "1")
    what = "is not a bundle: a layer names no file, as in the image of a server"
    assert refused(hostile, tmp_path / "x") == f"HOST/x@{digest} {what}"


def test_an_index_that_leads_elsewhere(hostile: Hostile, tmp_path: Path) -> None:
    index = {"schemaVersion": 2, "mediaType": layout.INDEX_TYPE, "manifests": [{"digest": "sha256:../../x"}]}
    hostile.add(index, "1")
    assert "expected a digest, sha256:..." in refused(hostile, tmp_path / "x")
    # An index of an index.
    own = hostile.add({**index, "manifests": [{"digest": f"sha256:{'0' * 64}"}]})
    hostile.add({**index, "manifests": [{"digest": own}]}, "1")
    assert "not the manifest of an image: the key 'config' is missing" in refused(hostile, tmp_path / "x")
    # What lies there is something else.
    hostile.manifests[own] = b"{}"
    assert "the registry has something else there" in refused(hostile, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "Expecting value"),
        (b"[]", "expected an object, not []"),
        (b"\xff", "can't decode byte 0xff"),
        (b"{" * 1000, "Expecting property name"),
        (b'{"layers": 1e999}', "the number 1e999 is not finite"),
    ],
)
def test_what_is_no_manifest(hostile: Hostile, tmp_path: Path, content: bytes, what: str) -> None:
    hostile.manifests["1"] = content
    digest = hashlib.sha256(content).hexdigest()
    start, _, end = refused(hostile, tmp_path / "x").partition(
        ": what the registry has is not the manifest of an image: "
    )
    assert start == f"HOST/x@sha256:{digest}"
    assert what in end


def test_a_manifest_that_is_too_large(hostile: Hostile, tmp_path: Path) -> None:
    hostile.manifests["1"] = bytes(2**23)
    assert refused(hostile, tmp_path / "x").startswith("HOST/x:1: exceeded maximum allowed size of ")


def test_one_that_does_not_answer(hostile: Hostile, tmp_path: Path) -> None:
    hostile.silent = True
    start = time.monotonic()
    line = refused(hostile, tmp_path / "x", "--timeout", "2")
    assert line == "HOST/x:1: the registry has sent and taken less than 64 KiB in 2 seconds"
    assert time.monotonic() - start < 30


def test_one_that_sends_more_than_it_says(hostile: Hostile, tmp_path: Path) -> None:
    """1,200 MiB for five bytes: few of them are taken, and none is kept under a name."""
    one = hostile.layer("zoo.aot", b"12345")
    hostile.blobs[one["digest"][7:]] = 1200 << 20
    hostile.add(hostile.image(one), "1")
    line = refused(hostile, tmp_path / "x")
    assert line.endswith("the registry sends more than the 7 bytes that it says")
    assert hostile.sent < 600 << 20


def test_one_that_sends_something_else(hostile: Hostile, tmp_path: Path) -> None:
    one = hostile.layer("zoo.aot", b"12345")
    hostile.blobs[one["digest"][7:]] = b"54321"
    hostile.add(hostile.image(one), "1")
    assert "sha256:" in refused(hostile, tmp_path / "x")


def say(registry: Hostile, subject: str, kind: str, title: str, content: bytes, **more: Any) -> dict[str, Any]:
    """Serve a referrer; return its descriptor."""
    described = registry.blob(content) | {"mediaType": kind, "annotations": {layout.TITLE: title}} | more
    about = {"mediaType": layout.MANIFEST_TYPE, "digest": subject, "size": 1}
    digest = registry.add({**registry.image(described), "artifactType": kind, "subject": about})
    return {"mediaType": layout.MANIFEST_TYPE, "digest": digest, "size": len(registry.manifests[digest])}


def test_what_others_say_replaces_nothing(hostile: Hostile, bundle: Path, tmp_path: Path) -> None:
    """The image is pinned by its digest. A referrer names no file, and is taken if it is about the bundle."""
    envelope_kind, statement_kind = layout.REFERRERS[".dsse.json"], layout.REFERRERS[".intoto.json"]
    right = Path(f"{bundle}.dsse.json").read_bytes()
    layers = hostile.layer("zoo.aot", bundle.read_bytes()), hostile.layer("w.safetensors", b"w", "application/x")
    digest = hostile.add(hostile.image(*layers), "1")
    listed = [
        say(hostile, digest, envelope_kind, title, content)
        for title, content in {
            "zoo.aot": b"evil",
            "w.safetensors": b"evil weights",
            "../x": b"outside",
            ".stagec-pull/lock": b"lock",
            "zoo.aot.dsse.json": b"-----BEGIN PRIVATE KEY-----",
            "w.safetensors.dsse.json": right,
        }.items()
    ]
    listed.append(
        say(hostile, digest, statement_kind, "zoo.intoto.json", bundle.with_suffix(".intoto.json").read_bytes())
    )
    listed.append(say(hostile, digest, statement_kind, "zoo.intoto.json", right))  # an envelope is not a statement
    listed.append(say(hostile, digest, envelope_kind, "x", b"elsewhere", urls=["http://127.0.0.1:1/"]))
    listed.append({**listed[0], "digest": f"sha256:{'0' * 64}"})  # is not there
    hostile.manifests[layout.referrers_tag(digest)] = layout.index_of(listed)
    folder = tmp_path / "x"
    words = ("pull", f"{hostile.host}/x@{digest}", folder, "--plain-http")
    told = json.loads(checked(*words, "--json"))
    expected = {
        "zoo.aot": bundle.read_bytes(),
        "w.safetensors": b"w",
        "zoo.aot.dsse.json": right,
        "zoo.intoto.json": bundle.with_suffix(".intoto.json").read_bytes(),
    }
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
    assert told["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in expected.items()}
    assert len(told["left_out"]) == 8
    reasons = " ".join(told["left_out"].values())
    for reason in (
        "not a DSSE envelope",
        "not one file of",
        "the registry does not have it",
        "not the provenance of a bundle",
    ):
        assert reason in reasons
    public = bundle.parent / "ann.pub.pem"
    stagec.load(folder / "zoo.aot", keys=[public]).close()
    text = checked(*words)
    assert "\nleft out      sha256 " in text
    assert text.isprintable() or "\x1b" not in text


def test_what_is_said_of_another_bundle_is_left_out(hostile: Hostile, bundle: Path, zoo: Path, tmp_path: Path) -> None:
    other = write_bundle_of(zoo, tmp_path, "loop", version="2")
    statement, sbom = write_provenance(other)
    digest = hostile.add(hostile.image(hostile.layer("zoo.aot", bundle.read_bytes())), "1")
    listed = [
        say(hostile, digest, layout.REFERRERS[suffix], f"zoo{suffix}", path.read_bytes())
        for suffix, path in ((".intoto.json", statement), (".sbom.json", sbom))
    ]
    hostile.manifests[layout.referrers_tag(digest)] = layout.index_of(listed)
    told = json.loads(checked("pull", f"{hostile.host}/x:1", tmp_path / "x", "--plain-http", "--json"))
    assert list(told["files"]) == ["zoo.aot"]
    assert [*told["left_out"].values()] == ["it is about another bundle"] * 2


def test_as_many_as_somebody_likes_to_say(hostile: Hostile, bundle: Path, tmp_path: Path) -> None:
    """Envelopes that nobody signs are rubbish: of those that are about the bundle, no more are taken than are read."""
    right = json.loads(Path(f"{bundle}.dsse.json").read_text())
    digest = hostile.add(hostile.image(hostile.layer("zoo.aot", bundle.read_bytes())), "1")
    kind = layout.REFERRERS[".dsse.json"]
    listed = [say(hostile, digest, kind, "x", json.dumps({**right, "number": number}).encode()) for number in range(35)]
    hostile.manifests[layout.referrers_tag(digest)] = layout.index_of(listed)
    told = json.loads(checked("pull", f"{hostile.host}/x:1", tmp_path / "x", "--plain-http", "--json"))
    assert len(told["files"]) == 33
    assert [*told["left_out"].values()] == ["there are too many of its kind"] * 3


def test_a_push_to_one_that_does_not_answer(hostile: Hostile, bundle: Path) -> None:
    hostile.silent = True
    done = command("push", bundle, f"{hostile.host}/x:1", "--plain-http", "--timeout", "2")
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[0]
        == f"{hostile.host}/x:1: the registry has sent and taken less than 64 KiB in 2 seconds"
    )
