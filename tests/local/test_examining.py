"""A build with a jaxlib that stagec does not know: it examines that itself, once, or says what is different.

Modules: `building/examination.py`, `cli/actions/examine.py`, `local/examining.py`.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from stagec.building import examination
from stagec.core.builds import specs
from stagec.core.data import elf
from stagec.hardware import catalog
from stagec.patches import hash_seeds, known_builds, machine_code
from stagec.stages import describing
from tests.local.test_building import Workspace
from tests.users import needs_isolation

GNU_STACK = 0x6474E551
SOURCES = {
    "models/m.toml": """
[manifest]
name = "m"
version = "1"

[targets.cpu]
platform = "cpu"
isa = "AVX2"

[functions.shift]
entry = "models.g:shift"
args = ["f32[3]"]
targets = ["cpu"]
""",
    "models/g.py": "def shift(x):\n    return x + 1\n",
    "pyproject.toml": "",
}


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    needs_isolation()


def with_jaxlib(folder: Path, edit: Callable[[Path], None]) -> Workspace:
    """A workspace whose jaxlib is a copy of the one that is installed, with an edited library."""
    library = examination.library("cpu")

    def copy(source: str, target: str) -> None:
        if Path(source).name != library.name:
            with contextlib.suppress(OSError):  # another disk
                os.link(source, target)
                return
        shutil.copy(source, target)

    packages = folder / "site-packages"
    shutil.copytree(library.parent, packages / "jaxlib", copy_function=copy)
    edit(packages / "jaxlib" / library.name)
    workspace = Workspace(folder, SOURCES)
    workspace.environment["PYTHONPATH"] = f"{packages}:{workspace.environment['PYTHONPATH']}"
    return workspace


def rename(library: Path) -> None:
    """Give a library another build-id: by an address in its headers that nobody reads."""
    with library.open("r+b") as file:
        header = file.read(64)
        (start,), (count,) = struct.unpack_from("<Q", header, 0x20), struct.unpack_from("<H", header, 0x38)
        for at in range(start, start + 56 * count, 56):
            file.seek(at)
            if struct.unpack("<I", file.read(4))[0] == GNU_STACK:
                file.seek(at + 24)
                file.write(struct.pack("<Q", 0x1234))


def move_a_site(library: Path) -> None:
    rename(library)
    with machine_code.mapped(library) as code:
        places = [address - code.start for address in hash_seeds.sites(code)]
    hash_seeds.sites.cache_clear()
    with library.open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(b"\x90")


def test_it_examines_it_once(tmp_path: Path) -> None:
    usual, other = Workspace(tmp_path / "usual", SOURCES), with_jaxlib(tmp_path / "other", rename)
    usual.build("--artifacts", "all")
    done = other.run("--artifacts", "all")
    with elf.opened(tmp_path / "other" / "site-packages" / "jaxlib" / "libjax_common.so") as file:
        build_id = file.build_id
    line = f"libjax_common.so {build_id} is not known to stagec: this build has examined it (docs/install.md)\n"
    assert done.returncode == 0
    assert done.stderr.startswith(line)

    made, same = (workspace.root / "all" / "m.shift.cpu.xla" for workspace in (other, usual))
    assert made.read_bytes() == same.read_bytes()
    described, expected = (json.loads(path.with_suffix(".json").read_text()) for path in (made, same))
    said = described["versions"].pop("libjax_common.so")
    assert said == f"{build_id} (examined by this build, not by the project)"
    assert described == expected
    assert "libjax_common.so" in usual.shell("stagec inspect ../../other/workspace/all/m.shift.cpu.json").stdout

    again = other.run()
    assert "examined" not in again.stderr
    assert "0 actions ran" in again.stdout
    (folder,) = (other.cache / "stagec" / "examined").glob(f"{build_id}-*")
    (row,) = json.loads((folder / known_builds.HERE).read_text())
    assert row["made"] == next(known.made for known in known_builds.rows() if known.version == row["version"])
    (folder / known_builds.HERE).write_text(json.dumps([row], indent=1))  # the row is in the keys
    assert other.build() > {"action export m.shift", "action compile m.shift.cpu"}

    other.replace("models/m.toml", "[manifest]\n", '[manifest]\nexamined = "project"\n')
    refused = other.run()
    assert refused.returncode
    assert f"libjax_common.so, of jaxlib {row['version']}, is not known: build-id {build_id}" in refused.stderr


@pytest.mark.parametrize("examined", ["here", "project", "none"])
def test_what_compiles_for_a_bundle_later_takes_the_same(examined: str) -> None:
    """Such as `add-jaxlib`, which has a target from a description."""
    target = dataclasses.replace(catalog.target("cpu-avx2"), examined=examined)
    assert specs.target_spec(describing.fields(target)) == target


def test_a_damaged_library_is_refused(tmp_path: Path) -> None:
    refusal = with_jaxlib(tmp_path, lambda library: library.write_bytes(b"no library")).refusal()
    assert "libjax_common.so cannot be read: " in refusal
    assert "Traceback" not in refusal


def test_what_is_not_as_known_is_refused(tmp_path: Path) -> None:
    refusal = with_jaxlib(tmp_path, move_a_site).refusal()
    assert " is not known: build-id " in refusal
    assert "libjax_common.so is not as those that are known: no site of hash_seeds" in refusal
    assert 'with examined = "none" in [manifest], it exports and compiles, without a change of its code' in refusal
