"""Writing bundles."""

import json
from pathlib import Path

import pytest

from stagec.bundle.writing import Inconsistent, Member, write_bundle
from stagec.runtime import jaxlib_lines
from stagec.runtime.archive import Archive
from stagec.specs import FunctionSpec, function_spec
from stagec.version import VERSION
from tests.building import stagec

FUNCTIONS = ("loop", "mlp")


def specs_of(zoo: Path) -> dict[str, FunctionSpec]:
    return {f"zoo.{name}": function_spec((zoo.parent / f"zoo.{name}.spec").read_text()) for name in FUNCTIONS}


def artifacts(zoo: Path) -> tuple[dict[str, bytes], list[Member]]:
    folder = zoo.parent
    exports = {f"zoo.{name}": (folder / f"zoo.{name}.exported").read_bytes() for name in FUNCTIONS}
    stems = [path.with_suffix("") for name in FUNCTIONS for path in sorted(folder.glob(f"zoo.{name}.*.xla"))]
    return exports, [
        Member(stem.name, Path(f"{stem}.xla").read_bytes(), Path(f"{stem}.json").read_bytes()) for stem in stems
    ]


def test_bytes_depend_on_the_content_alone(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    first = write_bundle("zoo", "1", exports, specs_of(zoo), members)
    backwards = dict(reversed(exports.items()))
    assert write_bundle("zoo", "1", backwards, specs_of(zoo), members[::-1]) == first
    assert write_bundle("zoo", "2", exports, specs_of(zoo), members) != first


def test_the_index(zoo: Path, tmp_path: Path) -> None:
    exports, members = artifacts(zoo)
    path = tmp_path / "zoo.aot"
    path.write_bytes(write_bundle("zoo", "1", exports, specs_of(zoo), members))
    index = Archive(path).index
    keys = ("format", "kind", "name", "version", "versions", "targets", "functions", "weights", "members")
    assert tuple(index) == keys
    assert list(index["targets"]) == ["cpu"]
    assert index["targets"]["cpu"]["isa"] == "AVX2"
    assert index["functions"]["mlp"]["executables"] == [
        {
            "target": "cpu",
            "bucket": {"batch": size},
            "nr_devices": 1,
            "custom_calls": {},
            "versions": {"jaxlib": jaxlib_lines.version(), "stagec": VERSION},
            "executable": f"mlp.cpu.batch{size}.xla",
            "description": f"mlp.cpu.batch{size}.json",
        }
        for size in (1, 4)
    ]
    assert sorted(index["members"]) == list(index["members"])
    assert len(index["members"]) == 2 + 2 * 3


def test_unzip_and_jq_can_read_it(zoo: Path) -> None:
    import zipfile

    with zipfile.ZipFile(zoo) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "index.json"
        assert json.loads(archive.read("index.json"))["name"] == "zoo"
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_an_executable_of_another_export(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    exports["zoo.loop"] = exports["zoo.mlp"]
    with pytest.raises(Inconsistent, match=r"zoo\.loop\.cpu was compiled from another export of 'loop'"):
        write_bundle("zoo", "1", exports, specs_of(zoo), members)


def test_a_description_of_another_executable(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    members[0] = Member(members[0].name, b"other", members[0].description)
    with pytest.raises(Inconsistent, match=r"zoo\.loop\.cpu: the description is of another executable"):
        write_bundle("zoo", "1", exports, specs_of(zoo), members)


def test_an_executable_without_its_export(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    del exports["zoo.loop"]
    with pytest.raises(Inconsistent, match=r"zoo\.loop\.cpu is of function 'loop', which has no export here"):
        write_bundle("zoo", "1", exports, specs_of(zoo), members)


def test_the_command_says_what_does_not_fit(zoo: Path, tmp_path: Path) -> None:
    stem = zoo.parent / "zoo.loop.cpu"
    output = tmp_path / "zoo.aot"
    done = stagec(
        *("bundle", "--name", "zoo", "--version", "1", "--output", output),
        *("--export", f"zoo.loop={zoo.parent / 'zoo.mlp.exported'}={zoo.parent / 'zoo.loop.spec'}"),
        *("--executable", f"zoo.loop.cpu={stem}.xla={stem}.json"),
    )
    assert done.returncode == 2
    assert done.stderr == f"{output}: zoo.loop.cpu was compiled from another export of 'loop'\n"
    assert not output.exists()
