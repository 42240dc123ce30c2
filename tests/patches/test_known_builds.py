"""The builds that are known: the table, those that are installed here, and what is refused.

Modules: `patches/descriptors.py`, `core/data/elf.py`, `patches/hash_seeds.py`, `patches/places.py`,
`pjrt/compatibility.py`.
"""

import ctypes
import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stagec.building import examination
from stagec.core.builds import releases
from stagec.core.data import elf
from stagec.patches import hash_seeds, known_builds, machine_code, places
from stagec.pjrt import compatibility
from tests.backends.deviceless import installed
from tests.building import COMPILER, ROOT
from tests.patches.test_machine_code import run

ROWS = known_builds.rows()
PLACES = json.loads(places.TABLE.read_text("ascii"))
PLATFORMS = [
    "cpu",
    pytest.param(
        "cuda",
        marks=installed(
            jax_cuda13_pjrt="jax_plugins.xla_cuda13",
            jax_cuda13_plugin="jax_cuda13_plugin",
            nvidia_cuda_nvcc="nvidia.cu13.bin",
            nvidia_nvvm="nvidia.cu13.nvvm",
        ),
    ),
    pytest.param("tpu", marks=installed(libtpu="libtpu")),
]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_build_that_is_installed_is_as_its_row_says(platform: str) -> None:
    found = known_builds.examined(examination.library(platform))
    row = next(row for row in ROWS if row.build_id == found.build_id)
    assert (found.library, found.sites, found.lacks) == (row.library, row.sites, row.lacks)
    assert examination.made(platform, row) == (row.made, row.follows_seed)


@pytest.mark.parametrize("platform", PLATFORMS[:2])
def test_where_a_library_has_its_sites_is_what_a_search_says(platform: str) -> None:
    path = examination.library(platform)
    with machine_code.mapped(path) as code:
        finds = known_builds.LIBRARIES[path.name].sites[code.architecture]
        for change, known in PLACES.get(code.build_id(), {}).items():
            assert known == [address - code.address for address in finds[change](code)], change


def test_places_are_of_builds_that_are_known() -> None:
    of = {row.build_id: row for row in ROWS}
    for build_id, changes in PLACES.items():
        row = of[build_id]
        assert {change: len(known) for change, known in changes.items()} == {
            change: row.sites[change] for change in places.CHANGES if change in row.sites
        }


@pytest.mark.pinned
def test_nobody_searches_a_library_of_our_own_locks() -> None:
    with elf.opened(examination.library("cpu")) as file:
        assert file.build_id in PLACES, "write them with tools/known_builds.py places"


def test_every_row_is_whole() -> None:
    assert len({row.build_id for row in ROWS}) == len(ROWS)
    assert len({(known_builds.wheel(row), row.version, row.python, row.architecture) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        library = known_builds.LIBRARIES[row.library]
        assert re.fullmatch(r"[0-9a-f]{32}", row.build_id)
        assert re.fullmatch(r"[0-9a-f]{32}", row.made)
        assert set(row.sites) == set(library.sites[row.architecture])
        assert all(number > 0 for number in row.sites.values())
        assert set(row.lacks) <= {names for fields in library.messages.values() for names in fields}
        assert re.match(r"CPython \d+\.\d+\.\d+", row.tested)
        assert bool(re.fullmatch(r"cp3\d+t?", row.python)) == (library is known_builds.JAXLIB)


def test_every_release_of_jaxlib_makes_the_same_with_every_python() -> None:
    libraries = [row for row in ROWS if row.library == "libjax_common.so"]
    for release, architecture in {(row.version, row.architecture) for row in libraries}:
        rows = [row for row in libraries if (row.version, row.architecture) == (release, architecture)]
        assert len({(row.made, *row.sites.values()) for row in rows}) == 1
        assert architecture == "aarch64" or {row.python for row in rows} >= {"cp312", "cp313", "cp314"}


def test_the_table_has_what_is_accepted() -> None:
    versions = {row.version for row in ROWS if row.library == "libjax_common.so"}
    numbers = [tuple(int(part) for part in version.split(".")) for version in releases.known()]
    assert (numbers[0], numbers) == (compatibility.OLDEST, sorted(numbers))
    assert numbers[-1] < compatibility.BEFORE
    assert versions == {row.version for row in ROWS if row.library == "xla_cuda_plugin.so"}
    assert versions == releases.known().keys()
    plugins = [row.version for row in ROWS if row.library == "libtpu.so"]
    fitting = {release.wheels["libtpu"] for release in releases.known().values()}
    assert fitting == {".".join(version.split(".")[:3]) for version in plugins}
    names = "requirements.lock cuda.lock cuda12.lock rocm.lock tpu.lock"
    names += " newest/requirements.lock newest/cuda.lock newest/cuda12.lock newest/tpu.lock"
    locks = [COMPILER / name for name in names.split()] + [ROOT / "tests" / "newest.lock"]
    for line in [line.split()[0] for lock in locks for line in lock.read_text().splitlines() if "==" in line]:
        package, version = line.split("==")
        rows = [row for row in ROWS if known_builds.wheel(row) == package]
        assert not rows or version in {row.version for row in rows}


@pytest.mark.parametrize(
    ("folder", "plugins"),
    [("", ("cuda", "cuda12", "rocm", "tpu")), ("newest", ("cuda", "cuda12", "tpu"))],
    ids=["oldest Python", "newest"],
)
def test_the_locks_of_plugins_are_for_the_jaxlib_beside_them(folder: str, plugins: Sequence[str]) -> None:
    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^(\S+)==(\S+)", (COMPILER / folder / f"{name}.lock").read_text(), re.MULTILINE))

    jaxlib = pins("requirements")["jaxlib"]
    assert pins("requirements")["jax"] == jaxlib
    for name in plugins:
        fitting = {"libtpu": releases.release(jaxlib).wheels["libtpu"]}
        for package, version in pins(name).items():
            if package.startswith(("jax", "libtpu")):
                assert f"{version}.".startswith(f"{fitting.get(package, jaxlib)}."), package
    if folder == "newest":
        assert jaxlib == list(releases.known())[-1]
        assert f"jaxlib=={jaxlib} " in (ROOT / "tests" / "newest.lock").read_text(), "with which all tests run"


REFUSED = """
try: compile_for('AVX2')
except cpu.CannotCompile as error: print(json.dumps([error.key, str(error), error.write]))
"""


def test_a_build_that_is_not_known(tmp_path: Path) -> None:
    rows = known_builds.TABLE.read_text().splitlines()
    here = known_builds.examined(examination.library("cpu"))
    table = tmp_path / "known_builds.json"
    table.write_text("\n".join(row for row in rows if here.build_id not in row).replace("},\n]", "}\n]"))
    key, what, write = run(f"from pathlib import Path\nknown_builds.TABLE = Path({str(table)!r})\n{REFUSED}")
    version = compatibility.version()
    assert key == ""
    assert what == (f"this build of libjax_common.so, of jaxlib {version}, is not known: build-id {here.build_id}")
    known, *works, add = write.splitlines()
    assert works == [
        "its code and its messages are as in those that are known",
        'it loads what it has compiled itself; with examined = "none" in [manifest], it exports and compiles, without '
        "a change of its code",
    ]
    tag = known_builds.python_tag()
    others = [row.version for row in ROWS if row.python == tag and row.architecture == here.architecture]
    others.remove(version)
    assert known == f"wheels for x86-64 and {tag} that are known: jaxlib {' or '.join(others)}"
    assert add == "to add this one, in a checkout of stagec: python tools/known_builds.py add WHEEL"


EXAMINED = """
sys.path.append({folder!r})
refused = []
code = machine_code.loaded(cpu._LIBRARY)
try: known_builds.known(code, "", "project")
except known_builds.UnknownBuild as error: refused = [str(error), error.write]
print(json.dumps([known_builds.said(code, "", "here"), known_builds.said(code, "", "none"), *refused]))
"""


def test_a_build_that_a_build_examined(tmp_path: Path) -> None:
    """It is known, and said to be so, unless the project alone counts."""
    row = next(row for row in ROWS if row.build_id == known_builds.examined(examination.library("cpu")).build_id)
    known_builds.write(tmp_path / known_builds.HERE, [row])
    here, none, what, write = run(f"known_builds.rows = list\n{EXAMINED.format(folder=str(tmp_path))}")
    assert here == {row.library: f"{row.build_id} (examined by this build, not by the project)"}
    assert none == {row.library: f"{row.build_id} (not examined)"}
    library = f"this build of libjax_common.so, of jaxlib {row.version},"
    assert what == f"{library} is examined by this build, not by the project: build-id {row.build_id}"
    assert write.splitlines() == [
        f"wheels for {row.architecture.replace('_', '-')} and {row.python} that are known: none of jaxlib",
        'to let a build examine others itself, take examined = "project" out of [manifest]',
    ]
    assert run(EXAMINED.format(folder=str(tmp_path))) == [{}, {}]  # the table comes first


@pytest.mark.parametrize("content", [None, "", "[1]", '[{"library": "libjax_common.so"}]', '{"a": 1}'])
def test_a_table_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    table = tmp_path / "known_builds.json"
    if content is not None:
        table.write_text(content)
    key, what, write = run(f"from pathlib import Path\nknown_builds.TABLE = Path({str(table)!r})\n{REFUSED}")
    assert key == "isa"
    assert what.startswith("this machine cannot build for AVX2: known_builds.json cannot be read: ")
    assert write == "install stagec again"


@pytest.mark.parametrize("change", ["cpuid", "hash_seeds"])
def test_a_build_with_other_sites_than_were_tested(change: str) -> None:
    """One of the places is as another compiler would have written it."""
    row = next(row for row in ROWS if row.build_id == known_builds.examined(examination.library("cpu")).build_id)
    found = run(
        "code = machine_code.loaded(cpu._LIBRARY)\n"
        f"site = {change}.sites(code)[0]\n"
        f"{change}.sites.cache_clear()\n"
        "other = machine_code.Patch(site, ctypes.string_at(site, 8), b'\\x90' * 8)\n"
        f"with machine_code.patched([other]):{REFUSED.replace(chr(10), chr(10) + '    ')}"
    )
    wanted = row.sites[change]
    what = f"is not as it was tested: {wanted - 1} sites of {change} instead of {wanted}"
    assert found == [
        "",
        f"this build of libjax_common.so, of jaxlib {compatibility.version()}, {what}",
        "install its wheel again",
    ]


def test_a_library_that_has_a_build_id_is_known_by_it() -> None:
    """As Debian's libraries have."""
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so" in line)
    content = Path(libc).read_bytes()
    note = re.search(rb"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0(.{20})", content, re.DOTALL)
    assert note is not None
    with elf.opened(Path(libc)) as file:
        assert file.build_id == note[1].hex()
        assert file.section("no such section") == b""


MESSAGES = "xla.cpu.CompilationResultProto"


@pytest.mark.parametrize(
    ("messages", "lacks", "refused"),
    [
        ({MESSAGES: {"object_files": (8,)}}, [], ""),
        ({MESSAGES: {"compiled_symbols.no_such": (7, 99)}}, ["compiled_symbols.no_such"], ""),
        ({MESSAGES: {"no_such.name": (99, 1)}}, ["no_such.name"], ""),
        ({MESSAGES: {"object_files": (9,)}}, [], f"{MESSAGES} has object_files at (8,), not at (9,)"),
        (
            {MESSAGES: {"target_machine_options.cpu": (9, 3)}},
            [],
            "has target_machine_options.cpu at (9, 2), not at (9, 3)",
        ),
        ({MESSAGES: {"no_such": (8,)}}, [], f"{MESSAGES} has no_such at (), not at (8,)"),
        ({MESSAGES: {"object_files.no_such": (8, 1)}}, [], "has object_files.no_such at (8,), not at (8, 1)"),
        ({"xla.ShapeProto": {"tuple_shapes": (4,)}}, [], "xla.ShapeProto has another at layout.physical_shape"),
        ({"no.such.Message": {"name": (1,)}}, ["name"], ""),
    ],
)
def test_a_library_whose_messages_are_others(
    monkeypatch: pytest.MonkeyPatch, messages: Any, lacks: list[str], refused: str
) -> None:
    """The library is the one that is here; what is expected of it is not."""
    path = examination.library("cpu")
    expected = dataclasses.replace(known_builds.JAXLIB, messages=messages)
    monkeypatch.setattr(known_builds, "LIBRARIES", {path.name: expected})
    if not refused:
        assert known_builds.examined(path).lacks == lacks
        return
    with pytest.raises(machine_code.PatchError) as caught:
        known_builds.examined(path)
    assert str(caught.value).startswith("libjax_common.so is not as those that are known: ")
    assert str(caught.value).endswith(refused)


def test_a_library_that_detects_the_host_twice(tmp_path: Path) -> None:
    """As one with two LLVMs would: it is not known which of them compiles."""
    path = Path(shutil.copy(examination.library("cpu"), tmp_path))
    with elf.opened(path) as file:
        end = file.code.offset + file.code.size
    questions = b"".join(b"\xb8" + leaf.to_bytes(4, "little") for leaf in (0x80000021, 0x14, 0x19))
    with path.open("r+b") as library:
        library.seek(end - len(questions))
        library.write(questions)
    with pytest.raises(machine_code.PatchError, match=r": LLVM detects the host in 2 places, not in one$"):
        known_builds.examined(path)
    with elf.opened(path) as file:
        build_id = file.build_id
    assert known_builds.UnknownBuild("it is not known", "known: none", path, build_id).write.splitlines() == [
        "known: none",
        "libjax_common.so is not as those that are known: LLVM detects the host in 2 places, not in one",
        'it loads what it has compiled itself; with examined = "none" in [manifest], it exports and compiles, without '
        "a change of its code",
    ]


def test_a_library_that_is_not_the_one_any_more(tmp_path: Path) -> None:
    path = Path(shutil.copy(examination.library("cpu"), tmp_path))
    refusal = known_builds.UnknownBuild("it is not known", "known: none", path, "another build-id")
    assert refusal.write == "known: none"
    path.write_bytes(b"x")
    assert refusal.write == "known: none"
    path.unlink()
    assert refusal.write == "known: none"


def test_a_library_whose_sites_are_others(tmp_path: Path) -> None:
    """As one that another compiler has made: each place has another instruction, and none is found."""
    path = Path(shutil.copy(examination.library("cpu"), tmp_path))
    with machine_code.mapped(path) as code:
        places = [address - code.start for address in hash_seeds.sites(code)]
    with path.open("r+b") as library:
        for place in places:
            library.seek(place)
            library.write(b"\x90")
    hash_seeds.sites.cache_clear()
    with pytest.raises(machine_code.PatchError, match=r" is not as those that are known: no site of hash_seeds$"):
        known_builds.examined(path)


def test_a_library_that_stagec_does_not_change(tmp_path: Path) -> None:
    with pytest.raises(machine_code.PatchError, match=r"^stagec changes no libno\.so$"):
        known_builds.examined(tmp_path / "libno.so")


# What LLVM makes of Abseil's step from one seed to the next, by its version.
SIXTEEN_BITS = "0fb702 0553adffff 668902 31c0"
EIGHT_BITS = "488d8830100000 ba53ad0000 48039030100000 48899030100000 31d1 884b01"
# ldrh w12, [x10]; mov w9, -0x52ad; mov x0, x19; add w9, w12, w9; orr w11, w9, 0x8000
AARCH64 = "4c014079 89558a12 e00313aa 8901090b 2b011132"
EXCHANGED = "488b75b8 b953ad0000 48038830100000 488d9030100000 48898830100000 31ca c1e208"


@pytest.mark.parametrize(
    ("architecture", "code", "changed"),
    [
        ("x86_64", SIXTEEN_BITS, SIXTEEN_BITS.replace("0553adffff", "b834120000")),
        ("x86_64", EIGHT_BITS, EIGHT_BITS.replace("31d1", "b134")),
        ("x86_64", EXCHANGED, EXCHANGED.replace("31ca", "b234")),
        ("aarch64", AARCH64, AARCH64.replace("8901090b", "89468252")),  # mov w9, 0x1234
    ],
    ids=["16 bits", "8 bits", "8 bits, exchanged", "aarch64"],
)
def test_a_seed_becomes_a_constant(tmp_path: Path, architecture: str, code: str, changed: str) -> None:
    before, after = (b"\x90" * 72 + bytes.fromhex(text.replace(" ", "")) + b"\x90" * 72 for text in (code, changed))
    memory = bytearray(before)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    library = machine_code.Code(tmp_path / "libtpu.so", start, start, len(memory), architecture, is_file=True)
    (change,) = hash_seeds.patches(library, 0x1234)
    at = change.address - start
    assert before[at : at + len(change.before)] == change.before
    memory[at : at + len(change.after)] = change.after
    assert bytes(memory) == after
