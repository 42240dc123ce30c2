"""Caches that several clones share, with nginx as the cache: what is hit, what is downloaded, and what damage does."""

import hashlib
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stagec.hardware import x86
from tests.caches import GrpcCache, HttpCache, block, free_port, grpc_cache, http_cache, install_buildgrid
from tests.nested import NestedBazel, environment, spawns, workspace_files
from tests.users import User, as_user

pytestmark = pytest.mark.pinned(but=1)  # all of them: only the suite other_versions has them
BUILD = """load("@models_manifest//:defs.bzl", "aot_manifest")
load("@stagec//rules:defs.bzl", "python_program")

aot_manifest(
    name = "models",
    function_deps = {
        "scale": ["scale.py"],
        "shift": ["shift.py"],
    },
)

python_program(
    name = "show",
    arguments = ["$(location :models)"],
    data = [":models"],
    environment = "@stagec_python//:environment",
    main = "show.py",
)
"""
FUNCTION = """[functions.{name}]
entry = "models.{name}:f"
args = ["f32[4]"]
targets = ["cpu-avx2"]
"""
FILES = {
    "BUILD": BUILD,
    "models.toml": '[manifest]\nname = "models"\nversion = "1"\nreproducible = false\n'
    + FUNCTION.format(name="shift")
    + FUNCTION.format(name="scale")
    + "golden = {}\n",
    "scale.py": "def f(x):\n    return x * 3\n",
    "shift.py": "def f(x):\n    return x + 1\n",
    "show.py": "import pathlib, sys\nprint(len(pathlib.Path(sys.argv[1]).read_bytes()), 'bytes')\n",
}
ISOLATION = """load("@stagec//rules/private:isolation.bzl", "isolation")

isolation(
    name = "isolation",
    visibility = ["//visibility:public"],
    works = False,
)
"""
ACTIONS = 6
"""Two exports, two executables, what JAX gives of one function, and the bundle."""
HERE = "--extra_toolchains=@stagec//compiler:toolchain_here"
ALL = "--remote_download_outputs=all"
TOLD_OF_TOOLS = block("build:remote --experimental_remote_mark_tool_inputs").split()[1:]
ONE_RETRY = "--remote_retries=1"  # Bazel 7 would try for a minute
MINIMAL, TOPLEVEL = "--remote_download_minimal", "--remote_download_toplevel"


class Clone(NestedBazel):
    """A clone of the workspace, with an output base and a HOME that no other has."""

    def __init__(self, folder: Path, user: User, cache: HttpCache) -> None:
        folder.mkdir()
        super().__init__(folder, folder / "workspace", user.number)
        self._env["HOME"] = str(folder)
        self.models = self.root / "models"
        self.models.mkdir(parents=True)
        for file, text in {**workspace_files("shared"), ".bazelrc": "build --nosandbox_debug\n"}.items():
            (self.root / file).write_text(text)
        with (self.root / "MODULE.bazel").open("a") as module:
            module.write('use_repo(stagec, "stagec_python")\n')
        for file, text in FILES.items():
            (self.models / file).write_text(text)
        if user.number is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user.number, user.number)
        packages = environment(folder / "environment", user)
        if user.number is not None:
            os.chown(packages, user.number, user.number)
        self.options = self.with_packages(packages)
        self.cache = f"--remote_cache={cache.url}"

    def call(self, command: str, *arguments: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command with the cache."""
        return self.run(command, *self.options, self.cache, *arguments, before=before)

    def build(self, *options: str, before: Sequence[str] = ()) -> str:
        """Build the bundle, and download all unless an option says otherwise; return what Bazel says."""
        done = self.call("build", ALL, *options, "//models", before=before)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def clean_build(self, *options: str, before: Sequence[str] = ()) -> str:
        """Build without what was built here before."""
        self.run("clean", before=before)
        return self.build(*options, before=before)

    def artifacts(self) -> dict[str, bytes]:
        """What was built and is on this machine."""
        folder, kinds = self.root / "bazel-bin" / "models", (".aot", ".exported", ".mlirbc", ".xla")
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in kinds}


@pytest.fixture(scope="module")
def cache() -> Iterator[HttpCache]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, http_cache(Path(folder, "http")) as started:
        yield started


@pytest.fixture(scope="module")
def clones(cache: HttpCache) -> Iterator[tuple[Clone, Clone]]:
    """Two clones, of two users where the tests are root's. Both have built the bundle, at the same time."""
    with (
        as_user("ordinary user") as user,
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name,
    ):
        Path(name).chmod(0o755)
        other = replace(user, number=user.number + 1) if user.number else user
        first, second = made = (Clone(Path(name, "first"), user, cache), Clone(Path(name, "second"), other, cache))
        try:
            builds = [one.start("build", *one.options, one.cache, ALL, "//models") for one in made]
            said = [build.communicate()[1] for build in builds]
            assert [build.returncode for build in builds] == [0, 0], "\n".join(said)[-4000:]
            assert first.artifacts() == second.artifacts()
            assert len(first.artifacts()) == 7
            cache.traffic()
            yield made
        finally:
            for one in made:
                one.run("shutdown")


@pytest.fixture(scope="module")
def clone(clones: tuple[Clone, Clone]) -> Clone:
    clones[0].clean_build(HERE)  # what was built with the other toolchain is as good for Bazel, and is not stored again
    return clones[0]


def test_another_clone_user_and_cpu_hits(clones: tuple[Clone, Clone], cache: HttpCache) -> None:
    """The other machine has another CPU, and a system that lets no worker isolate its actions."""
    first, second = clones
    wanted = first.artifacts()
    isolation, cpu = second.root.parent / "isolation", second.root.parent / "cpuinfo"
    isolation.mkdir()
    (isolation / "WORKSPACE").touch()
    (isolation / "BUILD").write_text(ISOLATION)
    flags = " ".join(sorted(x86.ISA["AVX2"].requires))  # the least with which a machine builds
    cpu.write_text(f"processor : 0\nvendor_id : AuthenticAMD\nmodel name : another\nflags : {flags}\n")
    in_userns = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    other = [*in_userns, 'mount --bind "$0" /proc/cpuinfo && exec "$@"', str(cpu)]
    second.run("shutdown")
    no_workers = [option.replace("stagec_python", "stagec_isolation") for option in second.options][-1]
    option = f"{no_workers.rpartition('=')[0]}={isolation}"
    try:
        second.clean_build(option, before=other)
        traffic = cache.traffic()
        assert (traffic.hits, traffic.misses) == (ACTIONS, 0)
        assert second.artifacts() == wanted
        # Packages that are not inputs are found in Bazel's sandbox too, and make the same bytes.
        said = second.clean_build(option, HERE, before=other)
        assert re.search(rf"{ACTIONS} \w+-sandbox", said), said
        assert cache.traffic().misses == ACTIONS
        assert second.artifacts() == wanted
    finally:
        second.run("shutdown")
    first.clean_build(HERE)
    assert cache.traffic().hits == ACTIONS
    assert first.artifacts() == wanted


def test_what_follows_the_cpu_is_not_shared(clone: Clone, cache: HttpCache) -> None:
    manifest = clone.models / "models.toml"
    before = manifest.read_text()
    manifest.write_text(before.replace("[manifest]\n", '[manifest]\nexamined = "none"\n'))
    try:
        clone.build(HERE)
        cache.traffic()
        clone.clean_build(HERE)
        assert cache.traffic().hits <= 1  # the bundle is the same, of the same executables
    finally:
        manifest.write_text(before)


def test_minimal_downloads(clone: Clone, cache: HttpCache) -> None:
    clone.build(HERE)
    wanted = clone.artifacts()["models.aot"]
    cache.traffic()
    clone.clean_build(HERE, MINIMAL)
    traffic = cache.traffic()
    assert (traffic.hits, traffic.misses) == (ACTIONS, 0)
    assert traffic.sent < 1500 * ACTIONS  # what each action has made, and none of it
    assert clone.artifacts() == {}
    done = clone.call("test", HERE, MINIMAL, "//models:models.golden_test")
    assert done.returncode == 0, done.stdout + done.stderr
    clone.clean_build(HERE, MINIMAL)
    done = clone.call("run", HERE, MINIMAL, "//models:show")
    if done.returncode:  # Bazel before 6
        assert "//models:show: shared/models/models.aot is not on this machine" in done.stderr
        assert "bazel run --remote_download_toplevel //models:show" in done.stderr
    settings = clone.root / ".bazelrc"
    before = settings.read_text()
    settings.write_text(before + block("build --remote_cache=").replace("http://cache.example.com:8080", cache.url))
    clone.run("clean")
    assert clone.run("build", *clone.options, "//models").returncode == 0
    assert clone.artifacts() == {}
    done = clone.run("run", *clone.options, "//models:show")
    assert (done.returncode, done.stdout) == (0, f"{len(wanted)} bytes\n"), done.stderr
    settings.write_text(before)
    clone.clean_build(HERE, TOPLEVEL)
    assert clone.artifacts() == {"models.aot": wanted}
    for command, target in (("test", "//models:models.golden_test"), ("run", "//models:show")):
        done = clone.call(command, HERE, TOPLEVEL, target)
        assert done.returncode == 0, done.stdout + done.stderr


def test_evicted_contents_are_built_again(clone: Clone, cache: HttpCache) -> None:
    clone.build(HERE)
    wanted = clone.artifacts()
    for file in cache.blobs:
        file.unlink()
    clone.clean_build(HERE)
    assert clone.artifacts() == wanted
    cache.traffic()
    clone.clean_build(HERE)
    assert cache.traffic().hits == ACTIONS


def test_contents_that_are_evicted_after_a_minimal_build(clone: Clone, cache: HttpCache) -> None:
    """Bazel takes them for granted until an action reads them."""
    clone.clean_build(HERE, MINIMAL)
    for file in cache.blobs:
        file.unlink()
    (clone.models / "scale.py").write_text("def f(x):\n    return x * 4\n")
    done = clone.call("build", HERE, MINIMAL, "//models")
    if done.returncode:
        assert "errors during bulk transfer" in done.stderr
        clone.build(HERE, ALL)
        clone.build(HERE, MINIMAL)


def test_damaged_contents_are_built_again(clone: Clone, cache: HttpCache) -> None:
    clone.build(HERE)
    wanted = clone.artifacts()
    for number, file in enumerate(cache.blobs):  # cut off, empty, of other bytes
        data = file.read_bytes()
        file.write_bytes((data[:-1], b"", bytes(len(data)))[number % 3])
    assert re.search("WARNING: (Reading from )?Remote Cache", clone.clean_build(HERE))
    assert clone.artifacts() == wanted
    used = {hashlib.sha256(content).hexdigest() for content in wanted.values()}
    damaged = {one.name for one in cache.blobs if hashlib.sha256(one.read_bytes()).hexdigest() != one.name}
    assert used <= {one.name for one in cache.blobs} - damaged


def test_damaged_results_of_actions(clone: Clone, cache: HttpCache) -> None:
    clone.build(HERE)
    wanted = clone.artifacts()
    for file in cache.actions:
        file.write_bytes(file.read_bytes()[:-3])
    assert re.search("WARNING: (Reading from )?Remote Cache", clone.clean_build(HERE))
    assert clone.artifacts() == wanted
    for file in cache.actions:  # an action that has made nothing
        file.write_bytes(b"")
    clone.run("clean")
    done = clone.call("build", HERE, ALL, "//models")
    if done.returncode:
        assert "did not create expected output file" in done.stderr
        clone.clean_build(HERE, "--noremote_accept_cached")
    clone.clean_build(HERE)
    assert clone.artifacts() == wanted


def test_a_result_that_names_other_contents_is_not_bundled(clone: Clone, cache: HttpCache) -> None:
    """Bazel cannot see it: the contents are what the result of the action says."""
    clone.build(HERE)
    wanted = clone.artifacts()
    name = "models.shift.cpu-avx2.xla"
    content = bytearray(wanted[name])
    content[len(content) // 2] ^= 1
    right, wrong = (hashlib.sha256(data).hexdigest() for data in (wanted[name], content))
    (cache.folder / "files" / "cas" / wrong).write_bytes(content)
    for file in cache.actions:
        file.write_bytes(file.read_bytes().replace(right.encode(), wrong.encode()))
    clone.run("clean")
    done = clone.call("build", HERE, ALL, "//models")
    assert done.returncode == 1
    assert f"{name.removesuffix('.xla')}: the description belongs to a different executable" in done.stderr
    clone.clean_build(HERE, "--noremote_accept_cached")
    clone.clean_build(HERE)
    assert clone.artifacts() == wanted


def test_an_unreachable_cache(clone: Clone) -> None:
    clone.build(HERE)
    wanted = clone.artifacts()
    closed = f"--remote_cache=http://127.0.0.1:{free_port()}"
    clone.clean_build(HERE, closed, ONE_RETRY)
    assert clone.artifacts() == wanted
    with socket.create_server(("127.0.0.1", 0)) as one:  # it accepts, and never answers
        silent = f"--remote_cache=http://127.0.0.1:{one.getsockname()[1]}"
        clone.clean_build(HERE, silent, "--remote_timeout=1", ONE_RETRY)
    assert clone.artifacts() == wanted


@pytest.fixture(scope="module")
def buildgrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = tmp_path_factory.mktemp("buildgrid") / "packages"
    install_buildgrid(packages)
    return packages


@pytest.fixture(scope="module")
def grpc(buildgrid: Path) -> Iterator[GrpcCache]:
    with grpc_cache(buildgrid.parent / "cache", buildgrid) as started:
        yield started


def test_a_cache_that_speaks_grpc(clone: Clone, grpc: GrpcCache) -> None:
    clone.build(HERE)
    wanted = clone.artifacts()
    option = f"--remote_cache={grpc.url}"
    clone.clean_build(HERE, option)
    said = clone.clean_build(HERE, option)
    assert re.search(rf"\b{ACTIONS} remote cache hit", said), said
    assert clone.artifacts() == wanted
    clone.clean_build(HERE, option, MINIMAL)
    assert clone.artifacts() == {}
    closed = f"--remote_cache=grpc://127.0.0.1:{free_port()}"
    done = clone.call("build", HERE, closed, ONE_RETRY, "//models")
    assert done.returncode == 0 or "Failed to query remote execution capabilities" in done.stderr
    clone.clean_build(HERE, closed, ONE_RETRY, "--remote_local_fallback")
    assert clone.artifacts() == wanted


def test_a_cache_that_speaks_an_older_version(clone: Clone, buildgrid: Path, tmp_path: Path) -> None:
    """Bazel says so and stores nothing. Bazel 7 then builds without that cache."""
    clone.build(HERE)
    wanted = clone.artifacts()
    clone.run("clean")
    with grpc_cache(tmp_path / "cache", buildgrid, versions="1.0.0-1.1.0") as old:
        done = clone.call("build", HERE, f"--remote_cache={old.url}", "//models")
        assert re.search(r"2\.0.* is not supported by the server\W.*1\.0", done.stderr), done.stderr
        assert not [blob for blob in old.blobs() if blob]
    clone.clean_build(HERE)
    assert clone.artifacts() == wanted


def test_engines_that_keep_processes_learn_what_a_tool_is(clone: Clone, grpc: GrpcCache, scratch: Path) -> None:
    """The tool's key changes with the compiler, and not with a model. Its files are marked, and no others."""
    if "mark_tool_inputs" not in clone.run("help", "build", "--long").stdout:
        pytest.skip("this Bazel has no --experimental_remote_mark_tool_inputs")
    log, known = scratch / "log.json", set[bytes]()
    scratch.chmod(0o777)
    options = [*TOLD_OF_TOOLS, f"--remote_cache={grpc.url}"]

    def new_keys() -> set[bytes]:
        clone.clean_build(HERE, *options)
        keys = {key for blob in grpc.blobs() for key in re.findall(rb"persistentWorkerKey\x12@([0-9a-f]{64})", blob)}
        new = keys - known
        known.update(keys)
        return new

    clone.run("clean")
    done = clone.call("build", *options, f"--execution_log_json_file={log}", "//models:models.scale.cpu-avx2")
    assert done.returncode == 0, done.stderr
    found = spawns(log, ["StagecExport", "StagecCompile"])
    assert len(found) == 2
    for spawn in found:
        marked = {one["path"] for one in spawn["inputs"] if one.get("isTool")}
        assert any(path.endswith("/stagec/__main__.py") for path in marked), spawn["inputs"][:3]
        tool = re.compile(r"/compiler/stagec/|/fingerprint\.txt$|/rules/private/start\.sh$")
        assert [path for path in marked if not tool.search(path)] == []
    assert new_keys()
    model = clone.models / "scale.py"
    compiler = clone.root.parent / "stagec" / "compiler" / "stagec" / "core" / "builds" / "version.py"
    model.write_text(model.read_text() + "\n\ndef g(x):\n    return x\n")
    assert not new_keys()
    compiler.write_text(compiler.read_text() + "# Another one.\n")
    assert new_keys()
