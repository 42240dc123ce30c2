"""Bundles that differ from one that was built: what a damaged, old or foreign one looks like."""

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from stagec.bundle.archive import INDEX
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.members import bundle_members, encode
from tests.building import build


def whole_index(members: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the index of a bundle's members with the entries of its functions, to be edited. It checks nothing."""
    index: dict[str, Any] = json.loads(members[INDEX])
    for name, line in zip(index["functions"], members[FUNCTIONS].splitlines(), strict=True):
        listed = index["functions"][name]
        index["functions"][name] = {key: listed[key] for key in ("function", "variant")} | json.loads(line)
    return index


def with_index(index: Mapping[str, Any], members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the members of a bundle with this index: its functions and all digests are written again."""
    others = {name: data for name, data in members.items() if name not in (INDEX, FUNCTIONS)}
    return bundle_members(index, others)  # type: ignore[return-value]  # all are bytes


def reindexed(members: dict[str, bytes], edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the index of a bundle's members."""
    edit(index := whole_index(members))
    new = with_index(index, members)
    members.clear()
    members.update(new)


def edited(bundle: Path, out: Path, edit: Callable[[dict[str, bytes]], object]) -> Path:
    """Write a bundle with the members of `bundle`, edited; the index is left as it is."""
    with zipfile.ZipFile(bundle) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    out.write_bytes(encode(members))
    return out


def edited_index(bundle: Path, out: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    return edited(bundle, out, lambda members: reindexed(members, edit))


def edited_descriptions(bundle: Path, out: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Write a bundle in which the descriptions of function `name`'s executables are edited, index and all."""

    def apply(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        for entry in index["functions"][name]["executables"]:
            member = entry["description"]
            description = json.loads(members[member])
            edit(description)
            entry |= {key: description[key] for key in ("nr_devices", "custom_calls", "versions")}
            hardware = description["target"].items()
            index["targets"][entry["target"]] = {k: v for k, v in hardware if k not in ("name", "compiler_options")}
            members[member] = json.dumps(description).encode()
        members.update(with_index(index, members))

    return edited(bundle, out, apply)


def without_executables(bundle: Path, out: Path) -> Path:
    """Write a bundle of which nothing runs as it is: every function has its exported artifact only."""

    def apply(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        for function in index["functions"].values():
            for executable in function["executables"]:
                for key in ("executable", "description", "stablehlo"):
                    members.pop(executable[key], None)
            function["executables"] = []
        members.update(with_index(index, members))

    return edited(bundle, out, apply)


def only(bundle: Path, out: Path, name: str) -> Path:
    """Write a bundle of one function."""

    def apply(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        function = index["functions"][name]
        index["functions"] = {name: function}
        entries = [function, *function["executables"]]
        named = {entry.get(key) for entry in entries for key in ("exported", "executable", "description", "stablehlo")}
        bound = {entry["weight"] for entry in function["bind"]}
        index["weights"] = {weight: entry for weight, entry in index["weights"].items() if weight in bound}
        files = {weight.get("file") for weight in index["weights"].values()}
        index["weights_files"] = {name: file for name, file in index["weights_files"].items() if name in files}
        golden = function.get("golden", {"inputs": {}, "outputs": {}})
        arrays = (index["weights"], golden["inputs"], golden["outputs"])
        named |= {entry["member"] for table in arrays for entry in table.values()}
        kept = with_index(index, {member: members[member] for member in named & members.keys()})
        members.clear()
        members.update(kept)

    return edited(bundle, out, apply)


LARGE = """
[manifest]
name = "m"
version = "1"
[functions.small]
entry = "model:add"
args = ["f32[2]", "f32[1]"]
bind = { w = { file = "small.safetensors" } }
targets = ["cpu-avx2"]
[functions.large]
entry = "model:add"
args = ["f32[%d]", "f32[1]"]
bind = { w = { file = "large.safetensors", external = %s } }
targets = ["cpu-avx2"]
"""


def build_large(folder: Path, size: int, external: bool, shift: int = 0) -> Path:
    """Build a bundle whose function `large` has an array of that many ones, in large.safetensors of the folder.

    `small` has two; both add the largest to their argument. external: whether the file stays beside the bundle.
    shift: bytes from a multiple of 64 to the start of the large array.
    """
    (folder / "m.toml").write_text(LARGE % (size, str(external).lower()))
    (folder / "model.py").write_text("def add(w, x):\n    return x + w.max()\n")
    save_file({"w": np.ones(2, np.float32)}, folder / "small.safetensors")
    header = json.dumps({"w": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
    header = header.ljust(len(header) + (-(8 + len(header))) % 64 + shift)
    data = np.ones(size, np.float32).tobytes()
    (folder / "large.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return build("m.toml", folder, folder)
