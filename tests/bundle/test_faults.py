"""Builds that are killed, disks that are full, folders that are read-only, readers beside writers.

There is never a part of an artifact under its name, and an error is one line that names the file.

Modules: `cli/files.py`, `core/data/writing.py`.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagec.bundle.archive import Archive
from stagec.cli.files import write_whole
from stagec.core.messages.errors import StagecError
from tests.building import COMPILER, stagec

WRITER = """
import sys
from stagec.cli.files import write_whole

path, *sources = sys.argv[1:]
contents = [open(source, "rb").read() for source in sources]
print("ready", flush=True)
while True:
    for content in contents:
        write_whole(path, content)
"""


@pytest.fixture(scope="module")
def bundles(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two bundles of several functions, with different contents."""
    folder, paths = tmp_path_factory.mktemp("faults"), []
    for version in ("1", "2"):
        paths.append(folder / f"{version}.aot")
        done = stagec(*bundle_command(zoo, paths[-1], version))
        assert done.returncode == 0, done.stderr
    return paths


def bundle_command(zoo: Path, output: Path, version: str = "1") -> list[str | Path]:
    stem = zoo.parent / "zoo.loop"
    words: list[str | Path] = ["action", "bundle", "--name", "zoo", "--version", version, "--output", output]
    words += ["--export", f"zoo.loop:{stem}.exported:{stem}.spec:{stem}.exported.json"]
    return [*words, "--executable", f"zoo.loop.cpu:{stem}.cpu.xla:{stem}.cpu.json:{stem}.cpu.stablehlo.mlirbc"]


def test_killed_while_writing(bundles: list[Path], tmp_path: Path) -> None:
    """kill -9 of a process that writes all the time, at 50 random moments: what lies there is whole."""
    output, rng, versions = tmp_path / "x.aot", random.Random(0), set()
    for _ in range(50):
        with writer(output, *bundles) as process:
            time.sleep(rng.random() / 50)
            process.send_signal(signal.SIGKILL)
        if output.exists():
            archive = Archive(output)
            archive.check_all()
            versions.add(archive.index["version"])
    assert versions == {"1", "2"}


def writer(output: Path, *sources: Path) -> "subprocess.Popen[str]":
    """Start a process that writes `sources` to `output` in turns; return when it has begun."""
    command = [sys.executable, "-S", "-c", WRITER, output, *sources]
    environment = {"PYTHONPATH": str(COMPILER)}
    process = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def test_readers_beside_writers(bundles: list[Path], tmp_path: Path) -> None:
    """Two processes write one path, threads read it: each reads one of the two bundles, whole."""
    output = tmp_path / "x.aot"
    output.write_bytes(bundles[0].read_bytes())
    versions: set[str] = set()
    faults: list[Exception] = []

    until = time.monotonic() + 60  # a busy machine starts the writers late

    def read() -> None:
        reads = 0
        while reads < 200 or (len(versions) < 2 and time.monotonic() < until):
            reads += 1
            try:
                archive = Archive(output)
                archive.check_all()
                versions.add(archive.index["version"])
            except Exception as error:  # noqa: BLE001
                faults.append(error)

    processes = [writer(output, *bundles) for _ in range(2)]
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.kill()
        process.communicate()
    assert faults == []
    assert versions == {"1", "2"}


def test_a_file_that_may_not_be_so_large(zoo: Path, bundles: list[Path], tmp_path: Path) -> None:
    """What a full disk does, without one: writing fails in the middle."""
    output = tmp_path / "x.aot"
    output.write_bytes(bundles[0].read_bytes())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        done = stagec(*bundle_command(zoo, output, "2"), env={})  # a new process has the limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{output}: cannot be written: File too large\n")
    assert [path.name for path in tmp_path.iterdir()] == ["x.aot"]
    assert output.read_bytes() == bundles[0].read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    command: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system takes root")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk(zoo: Path, small_disk: Path) -> None:
    (small_disk / "full").write_bytes(bytes(50_000))
    output = small_disk / "x.aot"
    done = stagec(*bundle_command(zoo, output))
    assert (done.returncode, done.stderr) == (2, f"{output}: cannot be written: No space left on device\n")
    assert [path.name for path in small_disk.iterdir()] == ["full"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StagecError) as error:
        write_whole(str(tmp_path / "file" / "x.aot"), b"")
    assert str(error.value) == f"{tmp_path}/file/x.aot: cannot be written: File exists"
    with pytest.raises(StagecError, match=r"/proc/x\.aot: cannot be written: No such file or directory"):
        write_whole("/proc/x.aot", b"")


def test_a_read_only_folder(zoo: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    output = small_disk / "x.aot"
    done = stagec(*bundle_command(zoo, output))
    assert (done.returncode, done.stderr) == (2, f"{output}: cannot be written: Read-only file system\n")


@pytest.mark.skipif("STAGEC_KILLS" not in os.environ, reason="takes minutes: STAGEC_KILLS=50 kills that many builds")
def test_killed_builds(zoo: Path, tmp_path: Path) -> None:
    """kill -9 of whole export, compile and bundle commands: no output, or a whole one."""
    rng, stem = random.Random(0), zoo.parent / "zoo.loop"
    root = ["--import-root", str(COMPILER.parent)]
    commands: list[list[str | Path]] = [
        ["action", "export", "--spec", f"{stem}.spec", "--output", tmp_path / "x.exported", *root],
        [
            *("action", "compile", "--spec", f"{stem}.cpu.spec", "--exported", f"{stem}.exported"),
            *("--output", tmp_path / "x.xla", "--description", tmp_path / "x.json"),
        ],
        bundle_command(zoo, tmp_path / "x.aot"),
    ]
    whole = {
        "x.exported": Path(f"{stem}.exported").read_bytes(),
        "x.xla": Path(f"{stem}.cpu.xla").read_bytes(),
        "x.json": Path(f"{stem}.cpu.json").read_bytes(),
    }
    seconds = []
    for command in commands:
        start = time.monotonic()
        assert stagec(*command).returncode == 0
        seconds.append(time.monotonic() - start)
    whole["x.aot"] = (tmp_path / "x.aot").read_bytes()
    killed = 0
    for number in range(int(os.environ["STAGEC_KILLS"])):
        for path in tmp_path.iterdir():
            path.unlink()
        run = textwrap.dedent("""
            import sys
            from tests.building import stagec
            sys.exit(stagec(*sys.argv[1:]).returncode)
        """)
        words = [sys.executable, "-c", run, *map(str, commands[number % 3])]
        paths = os.pathsep.join([str(COMPILER), str(COMPILER.parent), *sys.path])
        process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True)
        try:
            process.wait(rng.uniform(0.1, 1.1) * seconds[number % 3])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
        for path in tmp_path.iterdir():
            if not path.name.startswith("."):
                assert path.read_bytes() == whole[path.name]
    assert killed > int(os.environ["STAGEC_KILLS"]) // 2
