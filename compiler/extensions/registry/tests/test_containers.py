"""A container image that serves its bundle: a base, the packages of the server, and the files of the bundle."""

import contextlib
import gzip
import hashlib
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from stagec_registry import layout
from tests.building import checked, stagec as command
from tests.registries import Registry, needs_registry
from tests.signed import write_bundle_of

CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "created": "2026-11-24T00:00:00Z",
    "config": {"Env": ["PATH=/usr/bin", "PYTHONPATH=/base"], "Labels": {"of": "base"}, "Cmd": ["python3"]},
    "history": [{"created_by": "a base"}],
}


@pytest.fixture(scope="module")
def bundle(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(zoo, tmp_path_factory.mktemp("containers"), "loop")


def write_base(folder: Path, **changes: Any) -> Path:
    """Write the layout of an image with one compressed layer, as registries have them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        entry = tarfile.TarInfo("etc/base")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"base"))
    blobs: layout.Blobs = {}
    layer = layout.add(blobs, f"{layout.TAR}+gzip", gzip.compress(out.getvalue(), mtime=0))
    root = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(out.getvalue()).hexdigest()}"]}
    config = layout.add(
        blobs, "application/vnd.oci.image.config.v1+json", json.dumps({**CONFIG, "rootfs": root} | changes).encode()
    )
    image = layout.add_manifest(blobs, None, config, [layer])
    for path, content in layout.Layout(image, {}, blobs).files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(content, bytes)
        (folder / path).write_bytes(content)
    return folder


def write_packages(folder: Path) -> Path:
    files = {
        "stagec/__init__.py": b"",
        "stagec/native.so": b"ELF",
        "stagec-0.1.0.dist-info/METADATA": b"Name: stagec",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "stagec" / "native.so").chmod(0o755)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_server_is_on_its_base(bundle: Path, tmp_path: Path) -> None:
    base, packages = write_base(tmp_path / "base"), write_packages(tmp_path / "packages")
    words = ("image", bundle, "--container", "--base", base, "--packages", packages, "--output")
    checked(*words, tmp_path / "a")
    # Installed by somebody else, at another time, and used since.
    shutil.rmtree(packages)
    write_packages(packages)
    os.utime(packages / "stagec" / "__init__.py", (1, 1))
    (packages / "stagec" / "__init__.py").chmod(0o600)
    for name in ("stagec/__pycache__/__init__.cpython-311.pyc", "bin/stagec", "stagec-0.1.0.dist-info/RECORD"):
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text("#!/usr/bin/python3")
    checked(*words, tmp_path / "b")
    files = files_of(tmp_path / "a")
    assert files_of(tmp_path / "b") == files

    blobs = {path.rpartition("/")[2]: content for path, content in files.items() if path.startswith("blobs")}
    (listed,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blobs[listed["digest"][7:]])
    config = json.loads(blobs[manifest["config"]["digest"][7:]])
    below = json.loads(
        (
            base / "blobs" / "sha256" / json.loads((base / "index.json").read_bytes())["manifests"][0]["digest"][7:]
        ).read_bytes()
    )
    assert manifest["layers"][:1] == below["layers"]
    assert (config["architecture"], config["created"]) == ("amd64", "2026-11-24T00:00:00Z")
    assert config["config"] == {
        "Env": ["PATH=/usr/bin", "PYTHONPATH=/opt/stagec", "PYTHONDONTWRITEBYTECODE=1"],
        "Labels": {"of": "base", "org.opencontainers.image.title": "zoo", "org.opencontainers.image.version": "1"},
        "Entrypoint": ["python3", "-m", "stagec", "serve"],
        "Cmd": ["--host", "0.0.0.0", "--port", "8080", "/models/zoo.aot"],
        "ExposedPorts": {"8080/tcp": {}},
        "User": "65534",
    }
    assert [entry["created_by"] for entry in config["history"]] == ["a base", "stagec: /opt/stagec", "stagec: zoo.aot"]
    for layer, digest in list(zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True))[1:]:
        assert layer["digest"] == digest
    with tarfile.open(fileobj=io.BytesIO(blobs[manifest["layers"][1]["digest"][7:]])) as archive:
        modes = {entry.name: entry.mode for entry in archive if entry.isfile()}
    assert modes == {
        "opt/stagec/stagec-0.1.0.dist-info/METADATA": 0o444,
        "opt/stagec/stagec/__init__.py": 0o444,
        "opt/stagec/stagec/native.so": 0o555,
    }


def byte_code_in(image: Path) -> dict[str, bytes]:
    """Return the folders and files of byte code that an image has, by path."""
    files = {}
    for blob in (image / "blobs" / "sha256").iterdir():
        with contextlib.suppress(tarfile.ReadError), tarfile.open(blob, "r:") as archive:
            for entry in archive:
                content = archive.extractfile(entry)
                if "__pycache__" in entry.name:
                    files[entry.name] = content.read() if content else b""
    return files


def test_byte_code_of_the_image_s_python(bundle: Path, tmp_path: Path) -> None:
    """It is the same for all who compile with one Python, and only what an image can use is taken."""
    base, packages = write_base(tmp_path / "base"), write_packages(tmp_path / "packages")
    image_words = ("image", bundle, "--container", "--base", base, "--packages", packages, "--output")
    module = packages / "stagec" / "text.py"

    def image(name: str, *mode: str) -> dict[str, bytes]:
        module.write_text("def told():\n    return {'a', 'b', 'c'} if __file__ in {'d', 'e'} else 'f'\n")
        if mode:
            words = ("-q", "-x", "/tests/", "--invalidation-mode", *mode, packages.name)
            subprocess.run([sys.executable, "-I", "-m", "compileall", *words], cwd=tmp_path, check=True)
        checked(*image_words, tmp_path / name)
        return byte_code_in(tmp_path / name)

    assert image("none") == image("timestamp", "timestamp") == image("checked", "checked-hash", "-f") == {}
    known = image("first", "unchecked-hash", "-f")
    tag, folder = sys.implementation.cache_tag, "opt/stagec/stagec/__pycache__"
    assert sorted(known) == [folder, f"{folder}/__init__.{tag}.pyc", f"{folder}/text.{tag}.pyc"]
    assert known[f"{folder}/text.{tag}.pyc"][4:8] == b"\1\0\0\0"
    shutil.rmtree(packages / "stagec" / "__pycache__")
    assert image("again", "unchecked-hash") == known
    assert files_of(tmp_path / "again") == files_of(tmp_path / "first")
    # Left out: that of a module that has changed since or is gone, and a file that is not byte code.
    module.unlink()
    (packages / "stagec" / "__init__.py").write_text("changed = True\n")
    (packages / "stagec" / "__pycache__" / "text").write_text("")
    checked(*image_words, tmp_path / "changed")
    assert byte_code_in(tmp_path / "changed") == {}


@needs_registry
def test_a_server_is_pushed(bundle: Path, tmp_path: Path) -> None:
    base, packages = write_base(tmp_path / "base"), write_packages(tmp_path / "packages")
    more = ("--container", "--base", base, "--packages", packages)
    (tmp_path / "registry").mkdir()
    with contextlib.closing(Registry(tmp_path / "registry")) as registry:
        image = f"{registry.host}/zoo:1"
        pushed = checked("push", bundle, image, "--plain-http", *more).split()[-1].rpartition("@")[2]
        told = json.loads(checked("image", bundle, "--output", tmp_path / "image", *more, "--json"))
        assert told["digest"] == pushed
        done = command("pull", image, tmp_path / "pulled", "--plain-http")
        assert (done.returncode, "server's image is pulled" in done.stderr) == (2, True)


def test_what_is_not_a_server(bundle: Path, tmp_path: Path) -> None:
    base, packages = write_base(tmp_path / "base"), write_packages(tmp_path / "packages")
    out = tmp_path / "out"

    def refused(*options: str | Path) -> str:
        done = command("image", bundle, "--output", out, *options)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    both = ("--base", base, "--packages", packages)
    for options in (both, both[:2], ("--container", *both[2:])):
        assert refused(*options) == "an image that serves the bundle takes all of --container, --base and --packages\n"
    arm = write_base(tmp_path / "arm", architecture="arm64")
    assert refused("--container", "--base", arm, "--packages", packages) == (
        f"{arm}: it is for arm64, and the bundle for amd64\n"
        "  take the image of that architecture: skopeo --override-arch\n"
    )
    assert refused("--container", "--base", packages, "--packages", packages) == (
        f"{packages}/index.json: cannot be read: No such file or directory\n"
    )
    lacking = write_base(tmp_path / "lacking", rootfs={"type": "layers", "diff_ids": []})
    assert refused("--container", "--base", lacking, "--packages", packages) == (
        f"{lacking}: its config lists a different number of layers\n"
        "  write it so: skopeo copy docker://IMAGE oci:FOLDER:base\n"
    )
    (packages / "link").symlink_to("/etc/passwd")
    assert refused("--container", *both) == f"{packages}: {packages}/link is not a regular file\n"
    (packages / "link").unlink()
    assert not out.exists()
    # A layer of the base that is damaged is not written.
    largest = max((base / "blobs" / "sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    largest.write_bytes(largest.read_bytes()[:-1] + b"x")
    assert f"{largest}: its sha256 is " in refused("--container", *both)
    assert not list(out.rglob(largest.name))


WEB = ["click", "h11", "httptools", "orjson", "prometheus_client", "uvicorn"]
PACKAGES = ["flatbuffers", "jaxlib", "ml_dtypes", "numpy", "numpy.libs", "stagec", "stagec_serve", *WEB]
"""What stagec and its extension serve bring, without scipy, which jaxlib says that it needs, and no server imports."""


@pytest.mark.pinned  # the newest packages have no server among them
def test_the_packages_in_the_layer_are_all_that_a_server_needs(bundle: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    sites = [Path(entry) for entry in sys.path if (Path(entry) / "numpy.libs").is_dir()]
    for name in PACKAGES:
        spec = None if "." in name else importlib.util.find_spec(name)
        source = Path(spec.origin).parent if spec and spec.origin else sites[0] / name
        shutil.copytree(source, packages / name, copy_function=_link)
    checked(
        "image",
        bundle,
        "--container",
        "--base",
        write_base(tmp_path / "base"),
        "--packages",
        packages,
        "--output",
        tmp_path / "image",
    )
    root = tmp_path / "root"
    image = json.loads((tmp_path / "image" / "index.json").read_bytes())["manifests"][0]
    blobs = tmp_path / "image" / "blobs" / "sha256"
    manifest = json.loads((blobs / image["digest"][7:]).read_bytes())
    for layer in manifest["layers"]:
        root.mkdir(exist_ok=True)
        subprocess.run(["tar", "-C", root, "-xf", blobs / layer["digest"][7:]], check=True)
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())["config"]
    # Its command, with paths of the image below the folder, and with this Python, which has no packages of its own.
    environment = dict(variable.split("=", 1) for variable in config["Env"])
    environment["PYTHONPATH"] = str(root) + environment["PYTHONPATH"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    python, *words = config["Entrypoint"]
    assert python == "python3"
    *listen, served = [port if word == "8080" else word for word in config["Cmd"]]
    server = subprocess.Popen([sys.executable, "-S", "-s", *words, *listen, f"{root}{served}"], env=environment)
    try:
        for _ in range(600):
            assert server.poll() is None
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").close()
            except urllib.error.URLError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError("it is not ready")
    finally:
        server.kill()
        server.wait()


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
