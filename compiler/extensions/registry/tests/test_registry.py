"""Images of bundles in Debian's docker-registry: pushed, pulled, and what happens when it misbehaves.

Modules: `stagec_registry/layout.py`, `stagec_registry/commands/image.py`, `stagec_registry/commands/pull.py`,
`stagec_registry/commands/push.py`.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagec
from stagec_registry import layout
from tests.building import build, checked, stagec as command
from tests.bundles import edited_index
from tests.registries import Registry, breaking, needs_registry
from tests.signed import write_keys, write_provenance

pytestmark = needs_registry

MANIFEST = """
[manifest]
name = "zoo"
version = "VERSION"

[functions.double]
entry = "double.mlir"
bind = { "args[0]" = { file = "parts/w.safetensors", prefix = "w", external = true } }
targets = ["cpu-avx2"]
"""
MODULE = """
func.func @main(%arg0: tensor<1000000xf32>) -> tensor<1000000xf32> {
  %0 = stablehlo.OPERATION %arg0, %arg0 : tensor<1000000xf32>
  return %0 : tensor<1000000xf32>
}
"""
W = np.random.default_rng(0).random(1_000_000, np.float32)
"""4 MB that no compression makes small."""


def built(folder: Path, version: str = "1", operation: str = "add") -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / "m.toml").write_text(MANIFEST.replace("VERSION", version))
    (folder / "double.mlir").write_text(MODULE.replace("OPERATION", operation))
    save_file({"w": W}, folder / "parts" / "w.safetensors")
    return build("m.toml", folder, folder)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions, with the same weights."""
    folder = tmp_path_factory.mktemp("images")
    return built(folder / "1"), built(folder / "2", "2", "multiply")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    folder = tmp_path / "registry"
    folder.mkdir()
    registry = Registry(folder)
    yield registry
    registry.close()


def push(bundle: Path, image: str, *more: str | Path) -> str:
    text = checked("push", bundle, image, "--plain-http", *more)
    return text.split()[-1].rpartition("@")[2]


def test_what_is_pulled_is_what_was_built(bundles: tuple[Path, Path], registry: Registry, tmp_path: Path) -> None:
    bundle = bundles[0]
    work = tmp_path / "work"
    shutil.copytree(bundle.parent, work)
    statement, sbom = write_provenance(work / "zoo.aot")
    private, public = write_keys(tmp_path, "key")
    checked("sign", work / "zoo.aot", "--statement", statement, "--key", private)
    image = f"{registry.host}/models/zoo"
    about = ("--statement", statement, "--sbom", sbom, "--signature", work / "zoo.aot.dsse.json")
    digest = push(work / "zoo.aot", f"{image}:1", *about)

    # The types of ModelPack, a layer for each file, under the file's own digest.
    manifest = json.loads(registry.get("models/zoo/manifests/1"))
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    names = ["zoo.aot", "parts/w.safetensors"]
    assert [layer["annotations"]["org.cncf.model.filepath"] for layer in manifest["layers"]] == names
    for name, kind, layer in zip(names, ("code", "weight"), manifest["layers"], strict=True):
        content = (work / name).read_bytes()
        assert layer["mediaType"] == f"application/vnd.cncf.model.{kind}.v1.raw"
        assert (layer["digest"], layer["size"]) == (f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))

    # By digest: bundle, weights, statement, SBOM and signature.
    folder = tmp_path / "pulled"
    pulled = json.loads(checked("pull", f"{image}@{digest}", folder, "--plain-http", "--json"))["files"]
    assert sorted(pulled) == sorted([*names, "zoo.intoto.json", "zoo.sbom.json", "zoo.aot.dsse.json"])
    assert sorted(path.name for path in folder.iterdir()) == sorted({Path(name).parts[0] for name in pulled})
    for name in pulled:
        assert (folder / name).read_bytes() == (work / name).read_bytes()
    with stagec.load(folder / "zoo.aot", keys=[public]) as loaded:
        np.testing.assert_array_equal(loaded["double"](), 2 * W)
    checked("verify", folder / "zoo.aot", "--key", public)

    # The list of what refers to it, as other clients look for it.
    tag = layout.referrers_tag(digest)
    listed = json.loads(registry.get(f"models/zoo/manifests/{tag}", layout.INDEX_TYPE))["manifests"]
    found = [json.loads(registry.get(f"models/zoo/manifests/{one['digest']}")) for one in listed]
    assert [one["artifactType"] for one in found] == list(layout.REFERRERS.values())
    assert {one["subject"]["digest"] for one in found} == {digest}


def test_a_signature_that_comes_later_is_added(bundles: tuple[Path, Path], registry: Registry, tmp_path: Path) -> None:
    work, image = tmp_path / "work", f"{registry.host}/zoo:1"
    shutil.copytree(bundles[0].parent, work)
    statement, sbom = write_provenance(work / "zoo.aot")
    push(work / "zoo.aot", image, "--statement", statement, "--sbom", sbom)
    for name in "ab":
        private, _ = write_keys(tmp_path, name)
        words = ("--key", private, "--output", tmp_path / f"{name}.dsse.json")
        checked("sign", work / "zoo.aot", "--statement", statement, *words)
        push(work / "zoo.aot", image, "--signature", tmp_path / f"{name}.dsse.json")
    checked("pull", image, tmp_path / "pulled", "--plain-http")
    names = sorted(path.name for path in (tmp_path / "pulled").glob("zoo.*"))
    assert names == ["zoo.aot", "zoo.aot.2.dsse.json", "zoo.aot.dsse.json", "zoo.intoto.json", "zoo.sbom.json"]


def test_a_copy_says_what_it_lacks_and_a_mirror_has_everything(
    bundles: tuple[Path, Path], registry: Registry, tmp_path: Path
) -> None:
    """skopeo copies an image without what refers to it; it takes a repository with all tags."""
    work, image = tmp_path / "work", f"{registry.host}/models/zoo:1"
    shutil.copytree(bundles[0].parent, work)
    statement, sbom = write_provenance(work / "zoo.aot")
    private, public = write_keys(tmp_path, "key")
    checked("sign", work / "zoo.aot", "--statement", statement, "--key", private)
    about = ("--statement", statement, "--sbom", sbom, "--signature", work / "zoo.aot.dsse.json")
    for more in ((), ("--container",)):
        push(work / "zoo.aot", image, *about, *more)
        plain = ["--src-tls-verify=false", "--dest-tls-verify=false", "--all", "--preserve-digests"]
        skopeo = ["skopeo", "--insecure-policy"]
        copied = ["copy", *plain, f"docker://{image}", f"docker://{registry.host}/copied/zoo:1"]
        sides = ["--src", "docker", "--dest", "docker"]
        mirrored = ["sync", *plain, *sides, image.removesuffix(":1"), f"{registry.host}/mirror"]
        for words in (copied, mirrored):
            subprocess.run([*skopeo, *words], check=True, capture_output=True)
        text = checked("pull", f"{registry.host}/copied/zoo:1", tmp_path / f"copied{len(more)}", "--plain-http")
        assert text.splitlines()[2:] == [
            "missing       zoo.intoto.json, zoo.sbom.json, zoo.aot.dsse.json: the registry has none about this image; "
            "skopeo copy leaves them behind, skopeo sync takes them"
        ]
        folder = tmp_path / f"mirror{len(more)}"
        told = json.loads(checked("pull", f"{registry.host}/mirror/zoo:1", folder, "--plain-http", "--json"))
        assert (len(told["files"]), told["missing"]) == (5, [])
        checked("verify", folder / "zoo.aot", "--key", public)


def test_a_second_version_moves_only_what_changed(
    bundles: tuple[Path, Path], registry: Registry, tmp_path: Path
) -> None:
    image, folder = f"{registry.host}/zoo", tmp_path / "pulled"
    push(bundles[0], f"{image}:1")
    assert registry.uploads() == 3  # bundle, weights and config
    push(bundles[1], f"{image}:2")
    assert registry.uploads() == 5
    push(bundles[1], f"{image}:latest")
    assert registry.uploads() == 5

    checked("pull", f"{image}:1", folder, "--plain-http")
    weights = hashlib.sha256((folder / "parts" / "w.safetensors").read_bytes()).hexdigest()
    registry.blob(weights).unlink()  # nobody asks for it again
    checked("pull", f"{image}:2", folder, "--plain-http")
    assert (folder / "zoo.aot").read_bytes() == bundles[1].read_bytes()
    np.testing.assert_array_equal(stagec.load(folder / "zoo.aot")["double"](), W * W)


def test_a_connection_that_breaks(bundles: tuple[Path, Path], registry: Registry, tmp_path: Path) -> None:
    """In the middle of the weights, each way: stagec goes on with what is missing."""
    with breaking(registry.port, 1_000_000, 1) as port:
        push(bundles[0], f"127.0.0.1:{port}/zoo:1")
    with breaking(registry.port, 1_000_000, 2) as port:
        checked("pull", f"127.0.0.1:{port}/zoo:1", tmp_path / "pulled", "--plain-http")
    for name in ("zoo.aot", "parts/w.safetensors"):
        assert (tmp_path / "pulled" / name).read_bytes() == (bundles[0].parent / name).read_bytes()


def test_a_connection_that_keeps_breaking_leaves_nothing_half_written(
    bundles: tuple[Path, Path], registry: Registry, tmp_path: Path
) -> None:
    push(bundles[0], f"{registry.host}/zoo:1")
    folder = tmp_path / "pulled"
    with breaking(registry.port, 1_000_000, 10**6) as port:
        done = command("pull", f"127.0.0.1:{port}/zoo:1", folder, "--plain-http")
    assert done.returncode == 2
    assert done.stderr.startswith(f"127.0.0.1:{port}/zoo@sha256:")
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in folder.iterdir()] == [".stagec-pull"]
    # The next pull goes on with what is missing: nobody asks for the bundle again.
    digest = hashlib.sha256(bundles[0].read_bytes()).hexdigest()
    assert digest in [path.name for path in (folder / ".stagec-pull" / "blobs" / "sha256").iterdir()]
    registry.blob(digest).unlink()
    checked("pull", f"{registry.host}/zoo:1", folder, "--plain-http")
    assert sorted(path.name for path in folder.iterdir()) == ["parts", "zoo.aot"]


def test_a_registry_that_lies(bundles: tuple[Path, Path], registry: Registry, tmp_path: Path) -> None:
    digest = push(bundles[0], f"{registry.host}/zoo:1")
    other = push(bundles[1], f"{registry.host}/zoo:2")
    weights = hashlib.sha256((bundles[0].parent / "parts" / "w.safetensors").read_bytes()).hexdigest()
    whole = registry.blob(weights).read_bytes()
    registry.blob(weights).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = command("pull", f"{registry.host}/zoo:1", tmp_path / "pulled", "--plain-http")
    assert done.returncode == 2
    assert f"expected sha256:{weights}, got sha256:" in done.stderr
    assert [path.name for path in (tmp_path / "pulled").iterdir()] == [".stagec-pull"]
    registry.blob(weights).write_bytes(whole)
    # Another manifest than the one that was asked for.
    shutil.copy(registry.blob(other[7:]), registry.blob(digest[7:]))
    done = command("pull", f"{registry.host}/zoo@{digest}", tmp_path / "other", "--plain-http")
    assert done.returncode == 2
    assert done.stderr == f"{registry.host}/zoo@{digest}: the registry has something else there, {other}\n"
    assert not (tmp_path / "other").exists()


def test_a_registry_that_refuses(bundles: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registry").mkdir()
    registry = Registry(tmp_path / "registry", password=True)
    try:
        image = f"{registry.host}/zoo:1"
        done = command("push", bundles[0], image, "--plain-http")
        assert done.returncode == 2
        assert done.stderr.startswith(f"{image}: ")
        assert "authentication required" in done.stderr
        done = command("pull", image, tmp_path / "pulled", "--plain-http")
        assert done.returncode == 2
        assert "authentication required" in done.stderr
        assert not (tmp_path / "pulled").exists()
        # The file that `docker login` writes.
        auth = base64.b64encode(b"ann:secret").decode()
        (tmp_path / "home" / ".docker").mkdir(parents=True)
        config = {"auths": {registry.host: {"auth": auth}}}
        (tmp_path / "home" / ".docker" / "config.json").write_text(json.dumps(config))
        env = {**os.environ, "HOME": str(tmp_path / "home")}
        for words in (("push", bundles[0], image), ("pull", image, tmp_path / "pulled")):
            done = command(*words, "--plain-http", env=env)
            assert done.returncode == 0, done.stderr
    finally:
        registry.close()


def test_no_registry_and_no_image(registry: Registry, tmp_path: Path) -> None:
    done = command("pull", "127.0.0.1:1/zoo:1", tmp_path / "x", "--plain-http")
    assert (done.returncode, "connection refused" in done.stderr) == (2, True)
    done = command("pull", f"{registry.host}/zoo:1", tmp_path / "x", "--plain-http")
    assert (done.returncode, "manifest unknown" in done.stderr) == (2, True)
    assert not (tmp_path / "x").exists()
    done = command("pull", "zoo", tmp_path / "x")
    assert (done.returncode, done.stderr) == (
        2,
        "'zoo' is not the name of an image in a registry\n"
        "  write for example registry.example.com/models/digits:1.0.0, or ...@sha256:... for a digest\n",
    )


def test_without_skopeo(tmp_path: Path) -> None:
    done = command("pull", "127.0.0.1:1/zoo:1", tmp_path / "x", env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (
        2,
        "skopeo, which moves images, is not installed\n"
        "  apt-get install skopeo, dnf install skopeo or brew install skopeo\n",
    )


def write_image(folder: Path, registry: Registry, manifest: dict[str, Any], files: dict[str, bytes]) -> str:
    """Push an image that stagec would not write; return its name."""
    blobs: dict[str, Any] = {}
    config = layout.add(blobs, "application/vnd.oci.empty.v1+json", b"{}")
    layers = [
        {**layout.add(blobs, "application/octet-stream", content), "annotations": {layout.TITLE: name}}
        for name, content in files.items()
    ]
    head = {"schemaVersion": 2, "mediaType": layout.MANIFEST_TYPE, "config": config, "layers": layers}
    entry = layout.add(blobs, layout.MANIFEST_TYPE, json.dumps({**head, **manifest}).encode())
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for name, content in blobs.items():
        (folder / "blobs" / "sha256" / name).write_bytes(content)
    (folder / "index.json").write_bytes(layout.index_of([{**entry, "annotations": {layout.REF_NAME: "x"}}]))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    words = ["skopeo", "--insecure-policy", "copy", "--preserve-digests", "--dest-tls-verify=false"]
    subprocess.run([*words, f"oci:{folder}:x", f"docker://{registry.host}/x:1"], check=True, capture_output=True)
    return f"{registry.host}/x:1"


def test_an_image_that_is_no_bundle(registry: Registry, tmp_path: Path) -> None:
    image = write_image(tmp_path / "layout", registry, {}, {})
    done = command("pull", image, tmp_path / "out", "--plain-http")
    assert done.returncode == 2
    assert "is not a bundle: its artifactType is None" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["../out.aot", "/tmp/out.aot", ".stagec-pull/x", ""])
def test_a_path_outside_of_the_folder(registry: Registry, tmp_path: Path, path: str) -> None:
    image = write_image(tmp_path / "layout", registry, {"artifactType": layout.MODEL}, {path: b"x"})
    done = command("pull", image, tmp_path / "folder", "--plain-http")
    assert done.returncode == 2
    assert done.stderr.endswith(f": a layer does not name a file in the folder: {path}\n")
    assert not (tmp_path / "folder").exists()
    assert not (tmp_path / "out.aot").exists()


def test_a_layout_is_what_skopeo_reads(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, folders = bundles[0], (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        checked("image", bundle, "--output", folder)
    files = [path.relative_to(folders[0]) for path in sorted(folders[0].rglob("*")) if path.is_file()]
    for path in files:
        assert (folders[0] / path).read_bytes() == (folders[1] / path).read_bytes()
        if path.parts[0] == "blobs":
            assert hashlib.sha256((folders[0] / path).read_bytes()).hexdigest() == path.name
    raw = subprocess.run(["skopeo", "inspect", "--raw", f"oci:{folders[0]}:image"], capture_output=True, check=True)
    assert json.loads(raw.stdout)["annotations"]["org.opencontainers.image.version"] == "1"


def test_the_compilation_cache_of_jax_is_a_layer(
    bundles: tuple[Path, Path], registry: Registry, tmp_path: Path
) -> None:
    layer = tmp_path / "zoo.jax_cache.tar"
    layer.write_bytes(b"a cache")
    checked("image", bundles[0], "--jax-cache", layer, "--output", tmp_path / "image")
    sums = {path.name for path in (tmp_path / "image" / "blobs" / "sha256").iterdir()}
    assert hashlib.sha256(b"a cache").hexdigest() in sums
    image = f"{registry.host}/zoo:1"
    push(bundles[0], image, "--jax-cache", layer)
    checked("pull", image, tmp_path / "pulled", "--plain-http")
    assert (tmp_path / "pulled" / layer.name).read_bytes() == b"a cache"
    assert (tmp_path / "pulled" / "zoo.aot").read_bytes() == bundles[0].read_bytes()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def both(bundle: Path, folder: Path) -> Path:
    """Write the bundle with a target for another architecture, beside the same weights."""
    shutil.copytree(bundle.parent / "parts", folder / "parts")

    def edit(index: dict[str, Any]) -> None:
        target = index["targets"]["cpu-avx2"]
        index["targets"]["neoverse"] = {**target, "architecture": "aarch64"}

    return edited_index(bundle, folder / "zoo.aot", edit)


def skopeo(*words: str | Path) -> bytes:
    done = subprocess.run(["skopeo", "--insecure-policy", *words], check=True, capture_output=True)
    return done.stdout


def test_a_container_image_has_each_file_in_a_layer(
    bundles: tuple[Path, Path], registry: Registry, tmp_path: Path
) -> None:
    bundle, folders = bundles[0], (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        checked("image", bundle, "--container", "--output", folder)
    assert files_of(folders[0]) == files_of(folders[1])
    image = f"{registry.host}/zoo:1"
    digest = push(bundle, image, "--container")
    raw = skopeo("inspect", "--raw", f"oci:{folders[0]}:image")
    assert registry.get("zoo/manifests/1") == raw
    assert digest == f"sha256:{hashlib.sha256(raw).hexdigest()}"
    manifest = json.loads(raw)
    assert "artifactType" not in manifest
    assert {layer["mediaType"] for layer in manifest["layers"]} == {"application/vnd.oci.image.layer.v1.tar"}
    config = json.loads(registry.get(f"zoo/blobs/{manifest['config']['digest']}"))
    assert (config["architecture"], config["os"]) == ("amd64", "linux")
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert len(config["history"]) == 2

    # The registry has layers as they are: another push moves none, and a copy has the same digest.
    uploads = registry.uploads()
    push(bundle, f"{registry.host}/zoo:2", "--container")
    assert registry.uploads() == uploads
    words = ("copy", "--preserve-digests", "--src-tls-verify=false", f"docker://{image}", f"oci:{tmp_path / 'copy'}:x")
    skopeo(*words)
    assert skopeo("inspect", "--raw", f"oci:{tmp_path / 'copy'}:x") == raw

    folder = tmp_path / "pulled"
    told = json.loads(checked("pull", image, folder, "--plain-http", "--json"))["files"]
    names = ["zoo.aot", "parts/w.safetensors"]
    assert told == {name: hashlib.sha256((bundle.parent / name).read_bytes()).hexdigest() for name in names}
    assert files_of(folder) == {name: (bundle.parent / name).read_bytes() for name in names}
    with stagec.load(folder / "zoo.aot") as loaded:
        np.testing.assert_array_equal(loaded["double"](), 2 * W)

    # What the folder has is not moved again.
    for layer in manifest["layers"]:
        registry.blob(layer["digest"][7:]).unlink()
    before = {path: path.stat().st_ino for path in folder.rglob("*")}
    checked("pull", image, folder, "--plain-http")
    assert {path: path.stat().st_ino for path in folder.rglob("*")} == before


@pytest.mark.skipif(not shutil.which("umoci"), reason="umoci is not installed: apt-get install umoci")
def test_umoci_unpacks_a_container_image(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    checked("image", bundles[0], "--container", "--output", tmp_path / "image")
    words = ("unpack", "--rootless", "--image", f"{tmp_path / 'image'}:image", tmp_path / "unpacked")
    subprocess.run(["umoci", *words], check=True, capture_output=True)
    with stagec.load(tmp_path / "unpacked" / "rootfs" / "models" / "zoo.aot") as loaded:
        np.testing.assert_array_equal(loaded["double"](), 2 * W)


CONTAINERD = """version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{socket}"
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("containerd"),
    reason="containerd, which only root runs, is not there: apt-get install containerd",
)
def test_containerd_mounts_a_container_image(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    folder, mounted = tmp_path / "containerd", tmp_path / "mounted"
    for path in (folder, mounted):
        path.mkdir()
    (tmp_path / "both").mkdir()
    checked("image", both(bundles[0], tmp_path / "both"), "--container", "--output", tmp_path / "image")
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "image", ".")
    # A socket's path has 108 bytes at the most, and the folders of a test in Bazel's sandbox have more.
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets, (folder / "log").open("wb") as log:
        socket = f"{sockets}/socket"
        (folder / "config.toml").write_text(CONTAINERD.format(folder=folder, socket=socket))
        ctr = ("ctr", "--address", socket, "--connect-timeout", "60s", "image")
        daemon = subprocess.Popen(["containerd", "--config", folder / "config.toml"], stdout=log, stderr=log)
        try:
            name, platform = "example.com/zoo:image", ("--platform", "linux/arm64")
            words = ("import", "--all-platforms", "--base-name", "example.com/zoo", str(tmp_path / "image.tar"))
            subprocess.run([*ctr, *words], check=True, capture_output=True)
            subprocess.run([*ctr, "mount", *platform, name, mounted], check=True, capture_output=True)
            try:
                with stagec.load(mounted / "models" / "zoo.aot") as loaded:
                    np.testing.assert_array_equal(loaded["double"](), 2 * W)
                with pytest.raises(OSError, match="Read-only"):
                    (mounted / "models" / "x").touch()
            finally:
                subprocess.run(["umount", mounted], check=True)
        finally:
            daemon.terminate()
            daemon.wait()


def test_one_tag_for_two_architectures(bundles: tuple[Path, Path], registry: Registry, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    bundle = both(bundles[0], work)
    statement, _ = write_provenance(bundle)
    private, public = write_keys(tmp_path, "key")
    checked("sign", bundle, "--statement", statement, "--key", private)
    image = f"{registry.host}/zoo:1"
    digest = push(bundle, image, "--container", "--statement", statement, "--signature", work / "zoo.aot.dsse.json")
    index = json.loads(registry.get("zoo/manifests/1", layout.INDEX_TYPE))
    platforms = [(image["platform"]["os"], image["platform"]["architecture"]) for image in index["manifests"]]
    assert platforms == [("linux", "arm64"), ("linux", "amd64")]
    images = [json.loads(registry.get(f"zoo/manifests/{image['digest']}")) for image in index["manifests"]]
    # One layer for the bundle and one for the weights, whose digest is that of the image for x86-64 alone.
    assert images[0]["layers"] == images[1]["layers"]
    push(bundles[0], f"{registry.host}/zoo:2", "--container")
    alone = json.loads(registry.get("zoo/manifests/2"))
    assert alone["layers"][1] == images[0]["layers"][1]
    for (_, architecture), found in zip(platforms, images, strict=True):
        config = json.loads(registry.get(f"zoo/blobs/{found['config']['digest']}"))
        assert config["architecture"] == architecture
        # Other clients choose by architecture.
        words = ("--override-arch", architecture, "copy", "--preserve-digests", "--src-tls-verify=false")
        skopeo(*words, f"docker://{image}", f"oci:{tmp_path / architecture}:x")
        assert json.loads(skopeo("inspect", "--raw", f"oci:{tmp_path / architecture}:x")) == found

    # A copy of the index, and of all its images, in another repository.
    words = ("copy", "--all", "--preserve-digests", "--src-tls-verify=false", "--dest-tls-verify=false")
    skopeo(*words, f"docker://{image}", f"docker://{registry.host}/mirror:1")
    assert registry.get("mirror/manifests/1", layout.INDEX_TYPE) == registry.get("zoo/manifests/1", layout.INDEX_TYPE)

    # What is said about it refers to the index, and a pull by the tag finds it.
    folder = tmp_path / "pulled"
    checked("pull", image, folder, "--plain-http")
    assert sorted(files_of(folder)) == ["parts/w.safetensors", "zoo.aot", "zoo.aot.dsse.json", "zoo.intoto.json"]
    checked("verify", folder / "zoo.aot", "--key", public)
    checked("pull", f"{registry.host}/zoo@{digest}", tmp_path / "by digest", "--plain-http")
    assert files_of(tmp_path / "by digest") == files_of(folder)
    with stagec.load(folder / "zoo.aot", keys=[public]) as loaded:
        np.testing.assert_array_equal(loaded["double"](), 2 * W)


def test_a_container_image_that_was_compressed(bundles: tuple[Path, Path], registry: Registry, tmp_path: Path) -> None:
    checked("image", bundles[0], "--container", "--output", tmp_path / "image")
    skopeo("copy", "--dest-tls-verify=false", f"oci:{tmp_path / 'image'}:image", f"docker://{registry.host}/zoo:1")
    done = command("pull", f"{registry.host}/zoo:1", tmp_path / "x", "--plain-http")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert "a layer is of type application/vnd.oci.image.layer.v1.tar+gzip, not of" in first
    write = "copy images with skopeo copy --preserve-digests, which compresses none; no server's image is pulled"
    assert second == f"  {write}"
    assert not (tmp_path / "x").exists()


def test_weights_that_an_image_does_not_get(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "w"
    other.write_bytes(b"x")
    given = f"parts/w.safetensors={other}"
    done = command("image", bundles[0], "--output", tmp_path / "out", "--weights-file", given)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{other}: it has 1 bytes; {bundles[0]} wants 4,000,")
    other.write_bytes(bytes((bundles[0].parent / "parts" / "w.safetensors").stat().st_size))
    for more in ((), ("--container",)):
        done = command("image", bundles[0], "--output", tmp_path / "out", "--weights-file", given, *more)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{other}: its sha256 is ")
        assert not list((tmp_path / "out").rglob("*safetensors*"))
