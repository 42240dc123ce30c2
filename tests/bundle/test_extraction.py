"""Members of a bundle as files."""

import zipfile
from pathlib import Path

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


def test_members_that_are_not_there(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "zoo.aot").symlink_to(zoo)
    done = stagec("extract", "zoo.aot", "loop.exportet", "loop.exported", "--output", "out", cwd=tmp_path)
    message = "zoo.aot: there is no member 'loop.exportet'\n  did you mean \"loop.exported\"?\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert not (tmp_path / "out").exists()
