"""Members of a bundle as files.

Modules: `cli/extract.py`.
"""

import zipfile
from pathlib import Path

import pytest

from stagec.bundle.archive import Archive
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.members import bundle_members, encode
from tests.building import checked, stagec


def test_all_members_and_the_index(zoo: Path, tmp_path: Path) -> None:
    checked("extract", zoo, "--output", tmp_path / "all")
    with zipfile.ZipFile(zoo) as archive:
        wanted = {name: archive.read(name) for name in archive.namelist()}
    found = {str(path.relative_to(tmp_path / "all")): path for path in (tmp_path / "all").rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == wanted


def test_members_by_name(zoo: Path, tmp_path: Path) -> None:
    text = checked("extract", zoo, "loop.exported", "--output", tmp_path / "some")
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["loop.exported"]
    size = (tmp_path / "some" / "loop.exported").stat().st_size
    assert text == f"{size:>12,} bytes  loop.exported\n"


@pytest.fixture
def named(zoo: Path, tmp_path: Path) -> Path:
    """A bundle with members whose names are as long as names can be, in folders."""
    found = Archive(zoo)
    names = {"a" * 255, "b/" + "c" * 253, "/".join(["d"] * 128)}
    members = {"loop.exported": found["loop.exported"], **{name: name.encode() for name in names}}
    (tmp_path / "named.aot").write_bytes(
        encode(bundle_members({**found.index, "functions": {}, "weights": {}}, members))
    )
    return tmp_path / "named.aot"


def test_every_name_that_verifies_is_written(named: Path, tmp_path: Path) -> None:
    checked("extract", named, "--output", tmp_path / "out")
    for name in Archive(named).index["members"]:
        if name not in ("loop.exported", FUNCTIONS):
            assert (tmp_path / "out" / name).read_bytes() == name.encode()


def test_no_link_below_the_folder_is_followed(named: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for folder in (out, elsewhere):
        folder.mkdir()
    (elsewhere / "file").write_text("mine")
    (out / "b").symlink_to(elsewhere)
    (out / "loop.exported").symlink_to(elsewhere / "file")
    done = stagec("extract", named, "--output", out)
    name = "b/" + "c" * 253
    message = f"{out}/{name}: cannot be written: {out}/b is a link, which is not followed\n"
    assert (done.returncode, done.stderr) == (2, message)
    # A link instead of a file is replaced.
    checked("extract", named, "loop.exported", "--output", out)
    assert (out / "loop.exported").read_bytes() == Archive(named)["loop.exported"]
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"file": "mine"}


def test_of_a_damaged_bundle_nothing_is_written(named: Path, tmp_path: Path) -> None:
    with named.open("r+b") as file:
        file.seek(Archive(named)._entries["/".join(["d"] * 128)].start)
        file.write(b"x")
    done = stagec("extract", named, "--output", tmp_path / "out")
    assert (done.returncode, "is not what the index says" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_members_that_are_not_there(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "zoo.aot").symlink_to(zoo)
    done = stagec("extract", "zoo.aot", "loop.exportet", "loop.exported", "--output", "out", cwd=tmp_path)
    message = "zoo.aot: there is no member 'loop.exportet'\n  did you mean \"loop.exported\"?\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert not (tmp_path / "out").exists()
