"""Builds without Bazel that share BuildGrid's cache.

Modules: `stagec_grpc/cache.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.caches import GrpcCache, grpc_cache, install_buildgrid
from tests.local.test_building import SOURCES, Workspace
from tests.users import needs_isolation

LARGE = """
[functions.large]
entry = "models.large:large"
args = ["f32[900000]"]
targets = ["cpu"]
"""


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    needs_isolation()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buildgrid") / "packages"
    install_buildgrid(folder)
    return folder


@pytest.fixture
def cache(packages: Path, tmp_path: Path) -> Iterator[GrpcCache]:
    with grpc_cache(tmp_path / "cache", packages) as started:
        yield started


def _sources() -> dict[str, str]:
    """Sources with a function whose executable is too large for a message."""
    large = "import numpy as np\n\nW = np.arange(900_000, dtype=np.float32)\n\n\ndef large(x):\n    return x + W\n"
    return {**SOURCES, "models/m.toml": SOURCES["models/m.toml"] + LARGE, "models/large.py": large}


def _fetched(workspace: Workspace, *words: str) -> tuple[list[str], int, str]:
    """Build; return which actions ran, how many were fetched, and what was told."""
    done = workspace.run("--json", *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["ran"], answer["fetched"], done.stderr


def test_another_machine_takes_what_one_made(cache: GrpcCache, tmp_path: Path) -> None:
    first, second = Workspace(tmp_path / "first", _sources()), Workspace(tmp_path / "second", _sources())
    words = ["--remote-cache", cache.url]
    ran = first.build(*words)
    assert "action export m.large" in ran
    assert max(map(len, cache.blobs())) > 3 << 20
    assert _fetched(second, *words) == ([], len(ran), "")
    assert second.sha256() == first.sha256()
    second.write("models/other.py", "TEN = 11\n")  # an edit that leaves the artifact as it was
    assert second.build(*words) == {"action imports m.imports"}
    second.write("models/g.py", "def shift(x):\n    return x + 2\n")
    assert "action export m.shift" in second.build(*words, "--no-upload")
    first.write("models/g.py", "def shift(x):\n    return x + 2\n")
    assert "action export m.shift" in first.build(*words)  # nobody sent it


def test_a_cache_with_damage_gives_no_wrong_result(cache: GrpcCache, tmp_path: Path) -> None:
    first, second = Workspace(tmp_path / "first"), Workspace(tmp_path / "second")
    first.build("--remote-cache", cache.url)
    for file in (cache.folder / "files" / "cas").rglob("*"):
        if file.is_file() and b"xla" in (content := file.read_bytes()):
            file.write_bytes(b"!" + content[1:])
    _, _, told = _fetched(second, "--remote-cache", cache.url)
    assert told.count("the remote cache was left out: ") == 1
    assert second.sha256() == first.sha256()


def test_a_server_that_cannot_be_used_fails_no_build(cache: GrpcCache, packages: Path, tmp_path: Path) -> None:
    """Nothing else writes to stderr."""
    workspace = Workspace(tmp_path / "workspace")
    workspace.build()
    with grpc_cache(tmp_path / "old", packages, versions="1.0.0-1.1.0") as old:
        for url, told in (
            (old.url, "it speaks versions 1 to 1 of the Remote Execution API, and stagec speaks 2"),
            (cache.url.replace("grpc:", "grpcs:"), "it does not answer: WRONG_VERSION_NUMBER"),
            (f"{cache.url}/another", "it answers INVALID_ARGUMENT to GetCapabilities"),
            ("grpc://127.0.0.1:9", "it does not answer: Connection refused"),
        ):
            workspace.write("models/other.py", f"URL = {url!r}\n")  # one action runs
            done = workspace.run("--remote-cache", url)
            assert done.returncode == 0
            assert done.stderr == (
                f"{url}: the remote cache was left out: {told}\n"
                "  the bundle is as without it; look at the server, or leave --remote-cache out\n"
            )
