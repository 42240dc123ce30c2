"""Layers of container images: what other programs read in them, and what is refused as a layer."""

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from stagec.core.data.reading import RegularFile
from stagec_registry import layers

CONTENT = b"a bundle" * 100
DEEP = "/".join(["folder-of-weights"] * 8) + "/w.safetensors"
"""A path of more characters than a record of a tar has room for."""


def layer(path: str, content: bytes = CONTENT) -> bytes:
    return layers.head(path, len(content)) + content + layers.tail(len(content))


def found(folder: Path, path: str, data: bytes) -> tuple[int, int]:
    (folder / "layer").write_bytes(data)
    return layers.find(path, RegularFile(folder / "layer"))


@pytest.mark.parametrize("path", ["zoo.aot", "parts/w.safetensors", DEEP])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513])
def test_a_layer_has_one_file(tmp_path: Path, path: str, size: int) -> None:
    content = CONTENT[:size]
    data = layer(path, content)
    start, length = found(tmp_path, path, data)
    assert data[start : start + length] == content
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        entries = archive.getmembers()
    folders = f"models/{path}".split("/")
    assert [entry.name for entry in entries] == ["/".join(folders[:n]) for n in range(1, len(folders) + 1)]
    assert {(entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) for entry in entries} == {(0, 0, "", "", 0)}
    assert [entry.mode for entry in entries] == [0o755] * (len(folders) - 1) + [0o444]
    # Debian's tar reads it too, and has nothing to say.
    subprocess.run(["tar", "-C", tmp_path, "-xf", tmp_path / "layer"], check=True, capture_output=True)
    assert (tmp_path / "models" / path).read_bytes() == content
    shutil.rmtree(tmp_path / "models")


def test_the_records_before_a_file_do_not_depend_on_its_size() -> None:
    """Also of one with more bytes than eleven octal digits count: 1 TiB."""
    large = layers.head("w.safetensors", 2**40)
    assert len(large) == len(layers.head("w.safetensors", 0))
    assert tarfile.TarInfo.frombuf(large[-512:], "ascii", "strict").size == 2**40


def entries(*members: tuple[str, bytes, bytes]) -> bytes:
    """Write a tar of members: name, type, content or what it links to."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o444
            if kind == tarfile.REGTYPE:
                member.size = len(content)
            else:
                member.linkname = content.decode()
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


FOLDER = ("models", tarfile.DIRTYPE, b"")
RIGHT = ("models/zoo.aot", tarfile.REGTYPE, CONTENT)


def overwritten(data: bytes, at: int, what: bytes) -> bytes:
    return data[:at] + what + data[at + len(what) :]


def with_size(data: bytes, size: int) -> bytes:
    """Return a layer of zoo.aot whose record says another size, with the checksum of that."""
    return layers.head("zoo.aot", size) + data[len(layers.head("zoo.aot", 0)) :]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(CONTENT, id="the file itself"),
        pytest.param(entries(FOLDER, RIGHT), id="other modes"),
        pytest.param(entries(FOLDER, ("models/zoo.aot", tarfile.SYMTYPE, b"/etc/passwd")), id="a link"),
        pytest.param(entries(FOLDER, ("models/zoo.aot", tarfile.LNKTYPE, b"/etc/passwd")), id="a hard link"),
        pytest.param(entries(FOLDER, ("models/zoo.aot", tarfile.CHRTYPE, b"")), id="a device"),
        pytest.param(entries(FOLDER, ("models/zoo.aot", tarfile.FIFOTYPE, b"")), id="a pipe"),
        pytest.param(entries(("models", tarfile.SYMTYPE, b"/etc"), RIGHT), id="a folder that is a link"),
        pytest.param(entries(FOLDER, ("models/../../x", tarfile.REGTYPE, CONTENT)), id="a path outside"),
        pytest.param(entries(FOLDER, RIGHT, RIGHT), id="twice"),
        pytest.param(entries(FOLDER, RIGHT, ("x", tarfile.REGTYPE, b"x")), id="another file"),
        pytest.param(layer("zoo.aot")[:-1], id="cut off"),
        pytest.param(layer("zoo.aot") + bytes(512), id="more zeros"),
        pytest.param(overwritten(layer("zoo.aot"), -1 % len(layer("zoo.aot")), b"x"), id="no zeros"),
        pytest.param(overwritten(layer("zoo.aot"), 512 + 124, b"00000000000"), id="no checksum"),
        *(
            pytest.param(with_size(layer("zoo.aot"), size), id=f"{size} bytes")
            for size in (0, len(CONTENT) - 1, len(CONTENT) + 512, 2**40)
        ),
        pytest.param(overwritten(layer("zoo.aot"), 512 + 124, b"\xff" * 12), id="less than nothing"),
    ],
)
def test_what_is_not_a_layer(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"its layer is not a tar of this one file, /models/zoo\.aot, as"):
        found(tmp_path, "zoo.aot", data)


def test_no_byte_around_the_file_may_change(tmp_path: Path) -> None:
    right = layer("zoo.aot", b"12345")
    start, size = found(tmp_path, "zoo.aot", right)
    for at in [*range(start), *range(start + size, len(right))]:
        with pytest.raises(ValueError, match="is not a tar"):
            found(tmp_path, "zoo.aot", overwritten(right, at, bytes([right[at] ^ 1])))
