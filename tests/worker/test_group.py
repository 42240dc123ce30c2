"""The files of an action that has no namespaces, whatever is in them. test_attacks.py has what it can do."""

import os
from pathlib import Path

import pytest

from stagec.worker.group import link, remove


def test_links_lead_to_inputs_and_none_is_made_in_them(tmp_path: Path) -> None:
    root, working = tmp_path / "root", tmp_path / "work" / "root"
    for path in ("a/file", "a-b", "tree/there", "tree/deep/there", "../other/file"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    working.mkdir(parents=True)
    before = sorted(tmp_path.joinpath("root").rglob("*"))
    inputs = ["tree/deep/missing", "a/file", "tree", "tree/deep/there", "a-b", "../other/file", "nowhere/file"]
    targets = link(str(root), inputs, str(working))
    assert [os.path.relpath(target, root) for target in targets] == [
        *("../other/file", "a-b", "a/file", "nowhere/file", "tree")
    ]
    for path in ("a/file", "a-b", "tree/there", "tree/deep/there", "../other/file"):
        assert (working / path).read_text() == path
    assert not (working / "nowhere" / "file").exists()
    assert sorted(tmp_path.joinpath("root").rglob("*")) == before


@pytest.mark.parametrize("depth", [2, 3000])
def test_everything_is_removed(tmp_path: Path, depth: int) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    (kept / "inner").mkdir(parents=True)
    (kept / "file").touch()
    for path in ("first", "first/locked/inner", "second"):
        (folder / path).mkdir(parents=True)
    (folder / "first" / "link").symlink_to(kept)
    (folder / "second" / "file").touch()
    os.mkfifo(folder / "second" / "pipe")
    below = os.open(folder / "second", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deep", dir_fd=below)
        below, before = os.open("deep", os.O_RDONLY, dir_fd=below), below
        os.close(before)
    os.close(below)
    (folder / "first" / "locked").chmod(0)
    remove(str(folder))
    assert not folder.exists()
    assert sorted(path.name for path in kept.rglob("*")) == ["file", "inner"]
