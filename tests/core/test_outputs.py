"""Files that commands write: whole, through links, and never instead of a pipe or a device.

Modules: `core/data/writing.py`.
"""

import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from stagec.core.data import writing
from tests.building import COMPILER, PYTHON, action_environment, stagec

COMMAND = [*PYTHON, str(COMPILER / "stagec" / "__main__.py"), "schema", "--output"]


@pytest.fixture(scope="module")
def schema() -> bytes:
    return stagec("schema").stdout.encode()


def run(output: str | Path, redirect: str = "") -> "subprocess.CompletedProcess[bytes]":
    """Run `schema` in a process of its own. redirect: what a shell does with stdout."""
    command = [*COMMAND, str(output)]
    if redirect:
        command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *command]
    return subprocess.run(command, env=action_environment(), capture_output=True)


@pytest.mark.parametrize("name", ["link", "/dev/fd/1", "/proc/self/fd/1"])
def test_names_of_an_open_descriptor(schema: bytes, tmp_path: Path, name: str) -> None:
    """The link is as /dev/stdout is, which root could lose in a test that fails."""
    output = tmp_path / name
    if name == "link":
        output.symlink_to("/proc/self/fd/1")
    done = run(output)
    assert (done.returncode, done.stdout, done.stderr) == (0, schema, b"")
    # Where a file is behind it, that file goes on: its name, its end, and the links to it stay.
    file = tmp_path / "log"
    file.write_text("before\n")
    inode = file.stat().st_ino
    assert run(output, redirect=f">> {file}").returncode == 0
    assert file.read_bytes() == b"before\n" + schema
    assert file.stat().st_ino == inode
    assert name != "link" or output.is_symlink()


def test_a_device_stays_one(schema: bytes, tmp_path: Path) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device takes root, outside Bazel's sandbox")
    assert run(null).returncode == 0
    assert stat.S_ISCHR(null.stat().st_mode)
    full = tmp_path / "full"
    os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    done = run(full)
    assert (done.returncode, done.stderr.decode()) == (2, f"{full}: cannot be written: No space left on device\n")
    assert stat.S_ISCHR(full.stat().st_mode)
    link = tmp_path / "link"
    link.symlink_to(null)
    assert run(link).returncode == 0
    assert stat.S_ISCHR(link.stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link", "null"]


def test_a_pipe_gets_what_is_written(schema: bytes, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    done = run(pipe)
    reader.join(60)
    assert (done.returncode, read) == (0, [schema])
    assert pipe.is_fifo()


def test_links_are_followed_and_stay(schema: bytes, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "schema.json"
    file.write_text("old")
    file.chmod(0o600)
    (tmp_path / "near").symlink_to("elsewhere/schema.json")
    (tmp_path / "far").symlink_to("near")
    (tmp_path / "new").symlink_to("elsewhere/new.json")  # leads to a file that is not there yet
    for name in ("far", "new"):
        assert run(tmp_path / name).returncode == 0
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == schema
    assert (tmp_path / "near").is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # as it was
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["new.json", "schema.json"]


def test_what_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    done = run(tmp_path / "a")
    assert (done.returncode, done.stderr.decode()) == (
        2,
        f"{tmp_path}/a: cannot be written: Too many levels of symbolic links\n",
    )
    done = run(tmp_path)
    assert (done.returncode, done.stderr.decode()) == (2, f"{tmp_path}: cannot be written: Is a directory\n")


def test_nothing_is_changed_where_the_content_fails(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("old")

    def parts() -> "list[bytes]":
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        writing.named(str(file), (one for _ in [0] for one in parts()))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert file.read_text() == "old"
