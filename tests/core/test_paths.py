"""`core/data/paths.py`: no path that a file names leads out of the folder, and every reader checks that."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stagec.bundle import index
from stagec.bundle.members import encode
from stagec.cli import files
from stagec.core.data import paths, writing
from stagec.core.messages.errors import StagecError
from stagec.core.trees import json_shapes
from stagec.jaxcache import jax_entries
from stagec.jaxcache.jax_entries import Entry, Key
from stagec.manifest import workspace
from stagec_registry import client, layout
from stagec_serve import repository

OUTSIDE = ["..", "../x", "a/../../x", "a/..", "/x", "//x", "a//x", "a/./x", "", ".", "a/", "a\0b", "a\nb", "a/\x1b[2Jb"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_it_leads_elsewhere_or_is_none(path: str) -> None:
    assert paths.fault(path)


@pytest.mark.parametrize("path", ["a", "a/b.c", ".bazelrc", "ein Modell/größe.toml", "...", "a..b", "-x"])
def test_it_stays_below(path: str) -> None:
    assert paths.fault(path) == ""


@given(st.text("./a\0\\\\ ", max_size=8))
def test_what_stays_below_is_below(path: str) -> None:
    if not paths.fault(path):
        below = Path("/folder", path)
        assert below.resolve().is_relative_to("/folder")
        assert below != Path("/folder")


def _made(name: str, folder: Path) -> None:
    with writing.folder(folder) as top, writing.made(top, name) as parent:
        writing.file(parent, name.rpartition("/")[2], [b"x"])


def _of_request(name: str, _: Path) -> None:
    if not repository._NAME.fullmatch(f"{name}.safetensors"):
        raise ValueError(name)


def _of_image(name: str, _: Path) -> None:
    client._path_of({"annotations": {layout.TITLE: name}}, client.Reference.read("registry/image:tag"))


def _of_key(name: str, _: Path) -> None:
    parts = ("computation", "jax_lib version", "backend version", "XLA flags", "compile_options", "accelerator_config")
    Key.read(Key(name, dict.fromkeys((*parts, "compression", "custom_hook"), b"")).to_bytes())


def _of_entry(name: str, _: Path) -> None:
    named = {"cpu": f"{name}-{64 * '0'}"}
    entry = Entry("f", "", "cpu", {}, [], "f", {}, {}, {}, dict.fromkeys(jax_entries.COMPRESSIONS, named), "zlib")
    jax_entries.read(jax_entries.to_json([entry]))


READERS: dict[str, Callable[[str, Path], object]] = {
    "a file below a folder": _made,
    "a file that a command writes": lambda name, folder: files.write_below(str(folder), name, [b"x"]),
    "a file of a workspace": lambda name, folder: workspace.write(folder, workspace.Changes({name: "text"})),
    "a member of a bundle": lambda name, _: encode({name: b"x"}),
    "weights beside a bundle": lambda name, _: index._FILE(f"{name}.safetensors"),
    "weights that a request names": _of_request,
    "a file of an image": _of_image,
    "a source of a statement": lambda name, _: json_shapes.path(name),
    "a program in JAX's cache": _of_key,
    "an entry of JAX's cache": _of_entry,
}
"""Whatever makes a path of a name in a file. A function that is not here opens what its user named."""


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("reader", READERS)
def test_each_reader_refuses_it(reader: str, path: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises((OSError, ValueError, StagecError)):
        READERS[reader](path, folder)
    assert [*tmp_path.rglob("*")] == [folder]


@pytest.mark.parametrize("reader", READERS)
def test_each_reader_takes_a_name(reader: str, tmp_path: Path) -> None:
    READERS[reader]("jit_f.x", tmp_path)


@pytest.mark.parametrize(
    "reader", [name for name in READERS if name.startswith("a file") and name != "a file of an image"]
)
def test_who_writes_follows_no_link(reader: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "a").symlink_to(elsewhere)
    with pytest.raises((OSError, StagecError)) as refused:
        READERS[reader]("a/x", folder)
    assert isinstance(refused.value, OSError) or f"{folder}/a is a link, which is not followed" in str(refused.value)
    assert [*elsewhere.iterdir()] == []


def test_the_message_says_why(tmp_path: Path) -> None:
    with pytest.raises(StagecError) as refused:
        files.write_below(str(tmp_path), "a/../../b", [b"x"])
    assert str(refused.value) == (
        f'{tmp_path}/a/../../b: cannot be written: it is not a path below the folder: one of its names is ".."'
    )
