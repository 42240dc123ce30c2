"""Writing bundles.

Modules: `bundle/description.py`, `bundle/index.py`, `bundle/sources.py`, `cli/actions/bundle.py`.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagec as stagec_package
from stagec.bundle.archive import FORMAT, Archive
from stagec.bundle.expiry import readable_until
from stagec.bundle.members import OnDisk, encode
from stagec.bundle.writing import Export, Inconsistent, Member, gather
from stagec.core.builds.version import VERSION
from stagec.core.messages.refusal import LoadError
from stagec.pjrt import compatibility
from tests.building import COMPILER, checked, stagec
from tests.bundles import with_index
from tests.signed import export_of

FUNCTIONS = ("loop", "mlp")


def artifacts(zoo: Path) -> tuple[dict[str, Export], list[Member]]:
    """The exports, by the names of their functions, and the executables."""
    stems = [path.with_suffix("") for name in FUNCTIONS for path in sorted(zoo.parent.glob(f"zoo.{name}.*.xla"))]
    return {name: export_of(zoo, name) for name in FUNCTIONS}, [member(stem) for stem in stems]


def member(stem: Path, name: str = "") -> Member:
    """The files of a compile action, as a member called `name`."""
    files = (Path(f"{stem}{suffix}").read_bytes() for suffix in (".xla", ".json", ".stablehlo.mlirbc"))
    return Member(name or stem.name, *files)


def bundled(exports: dict[str, Export], members: list[Member], version: str = "1") -> bytes:
    return encode(gather("zoo", version, [*exports.values()], members))


def test_bytes_depend_on_the_content_alone(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    first = bundled(exports, members)
    assert bundled(dict(reversed(exports.items())), members[::-1]) == first
    assert bundled(exports, members, version="2") != first


def test_the_index(zoo: Path, tmp_path: Path) -> None:
    exports, members = artifacts(zoo)
    path = tmp_path / "zoo.aot"
    path.write_bytes(bundled(exports, members))
    index = Archive(path).index
    keys = ("format", "kind", "name", "version", "versions", "targets", "functions", "weights")
    assert tuple(index) == (*keys, "weights_files", "members")
    assert list(index["targets"]) == ["cpu"]
    assert index["targets"]["cpu"]["isa"] == "AVX2"
    assert index["functions"]["mlp"]["executables"] == [
        {
            "target": "cpu",
            "bucket": {"batch": size},
            "nr_devices": 1,
            "custom_calls": {},
            "versions": {"jaxlib": compatibility.version(), "stagec": VERSION},
            "executable": f"mlp.cpu.batch{size}.xla",
            "description": f"mlp.cpu.batch{size}.json",
            "stablehlo": f"mlp.cpu.batch{size}.stablehlo.mlirbc",
        }
        for size in (1, 4)
    ]
    assert sorted(index["members"]) == list(index["members"])
    assert len(index["members"]) == 1 + 2 * 2 + 3 * 3


def test_an_executable_of_another_export(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    mlp = exports["mlp"]
    exports["loop"] = dataclasses.replace(exports["loop"], content=mlp.content, description=mlp.description)
    with pytest.raises(Inconsistent, match=r"zoo\.loop\.cpu was compiled from another export of 'loop'"):
        bundled(exports, members)


def test_a_description_of_another_executable(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    members[0] = dataclasses.replace(members[0], executable=b"other")
    with pytest.raises(Inconsistent, match=r"zoo\.loop\.cpu: the description belongs to a different executable"):
        bundled(exports, members)


def test_a_description_of_another_module(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    members[0] = dataclasses.replace(members[0], stablehlo=b"other")
    with pytest.raises(Inconsistent, match=r"zoo\.loop\.cpu: the description belongs to a different StableHLO module"):
        bundled(exports, members)


def test_executables_that_machines_with_two_cpus_built(zoo: Path) -> None:
    exports, members = artifacts(zoo)

    def needing(member: Member, *more: str) -> Member:
        description = json.loads(member.description)
        description["target"] |= {"examined": "none", "requires": [*description["target"]["requires"], *more]}
        return dataclasses.replace(member, description=json.dumps(description).encode())

    members = [needing(members[0]), needing(members[1], "zzz")]
    with pytest.raises(Inconsistent) as refusal:
        bundled(exports, members)
    assert str(refusal.value).endswith(
        " other executables have another target 'cpu': with examined = \"none\" it has what the CPU has that built it; "
        "build all of them again on machines with one CPU"
    )


def test_an_executable_without_its_export(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    del exports["loop"]
    with pytest.raises(Inconsistent, match=r"zoo\.loop\.cpu is of function 'loop', which has no export here"):
        bundled(exports, members)


def test_the_command_says_what_does_not_fit(zoo: Path, tmp_path: Path) -> None:
    stem, mlp = zoo.parent / "zoo.loop.cpu", zoo.parent / "zoo.mlp.exported"
    output = tmp_path / "zoo.aot"
    done = stagec(
        *("action", "bundle", "--name", "zoo", "--version", "1", "--output", output),
        *("--export", f"zoo.loop:{mlp}:{zoo.parent / 'zoo.loop.spec'}:{mlp}.json"),
        *("--executable", f"zoo.loop.cpu:{stem}.xla:{stem}.json:{stem}.stablehlo.mlirbc"),
    )
    assert done.returncode == 2
    assert done.stderr == f"{output}: zoo.loop.cpu was compiled from another export of 'loop'\n"
    assert not output.exists()


def test_bundling_takes_no_package(zoo: Path, tmp_path: Path) -> None:
    """Descriptions have all that the index needs, so neither jaxlib nor numpy is imported."""
    stem, output = zoo.parent / "zoo.loop", tmp_path / "zoo.aot"
    done = stagec(
        *("action", "bundle", "--name", "zoo", "--version", "1", "--output", output),
        *("--export", f"zoo.loop:{stem}.exported:{stem}.spec:{stem}.exported.json"),
        *("--executable", f"zoo.loop.cpu:{stem}.cpu.xla:{stem}.cpu.json:{stem}.cpu.stablehlo.mlirbc"),
        env={"PYTHONPATH": str(COMPILER)},
    )
    assert not done.stderr or " warning: JAX promises " in done.stderr.splitlines()[0]
    Archive(output).check_all()


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda data: data.pop("in_tree"), "the key 'in_tree' is missing"),
        (lambda data: data.update(in_avals=["x"]), 'in_avals[0]: "x": unknown dtype "x"; write one of '),
        (lambda data: data["components"].update(x="y"), 'components.x: expected an object, not "y"'),
        (lambda data: data.update(format=3), "its format is 3, and this stagec reads 1: export it again"),
    ],
)
def test_a_description_of_another_shape(zoo: Path, edit: Callable[[dict[str, Any]], object], what: str) -> None:
    exports, _ = artifacts(zoo)
    data = json.loads(exports["loop"].description)
    edit(data)
    with pytest.raises(Inconsistent) as refusal:
        bundled({"loop": dataclasses.replace(exports["loop"], description=json.dumps(data).encode())}, [])
    assert str(refusal.value).startswith(f"zoo.loop: not the description of an exported artifact: {what}")


def test_a_file_that_changes_while_it_is_bundled(tmp_path: Path) -> None:
    path = tmp_path / "x.xla"
    path.write_bytes(b"first")
    member = OnDisk(str(path))
    assert encode({"x.xla": member}) == encode({"x.xla": b"first"})
    for write in (lambda: path.write_bytes(b"other"), path.unlink):
        write()
        with pytest.raises(ValueError, match=f"{path} changed while it was read"):
            encode({"x.xla": member})


def test_two_targets_for_which_the_code_is_the_same(zoo: Path, tmp_path: Path) -> None:
    """The executable and its module are stored once; each target has a description of them."""
    stem = zoo.parent / "zoo.loop"
    spec = json.loads(Path(f"{stem}.cpu.spec").read_text())
    spec["target"]["name"] = "twin"
    (tmp_path / "spec").write_text(json.dumps(spec))
    files = (
        *("--output", tmp_path / "x.xla", "--description", tmp_path / "x.json"),
        *("--module", tmp_path / "x.stablehlo.mlirbc"),
    )
    checked("action", "compile", "--spec", tmp_path / "spec", "--exported", f"{stem}.exported", *files)
    exports, members = artifacts(zoo)
    twin = member(tmp_path / "x", "zoo.loop.twin")
    archive = Archive("x", bundled(exports, [*members, twin]))
    archive.check_all()
    listed = archive.index["functions"]["loop"]["executables"]
    assert [entry["target"] for entry in listed] == ["cpu", "twin"]
    assert {entry["executable"] for entry in listed} == {"loop.cpu.xla"}
    assert {entry["stablehlo"] for entry in listed} == {"loop.cpu.stablehlo.mlirbc"}
    assert [entry["description"] for entry in listed] == ["loop.cpu.json", "loop.twin.json"]
    assert len(archive.index["members"]) == 1 + 2 * 2 + 3 * 3 + 1


def of_another_jaxlib(zoo: Path, jaxlib: str) -> Member:
    """The executable of `loop`, as if another jaxlib had made it."""
    first = member(zoo.parent / "zoo.loop.cpu")
    description = json.loads(first.description)
    description["versions"]["jaxlib"] = jaxlib
    text = json.dumps(description, indent=1) + "\n"
    return dataclasses.replace(first, name=f"zoo.loop.cpu.jaxlib-{jaxlib}", description=text.encode())


def test_executables_of_several_jaxlibs(zoo: Path, tmp_path: Path) -> None:
    """What is equal is stored once, and the loader takes the executable of its own jaxlib."""
    exports, members = artifacts(zoo)
    others = [of_another_jaxlib(zoo, jaxlib) for jaxlib in ("0.9.12", "0.9.2")]
    path = tmp_path / "zoo.aot"
    path.write_bytes(bundled(exports, [*members, *others]))
    assert path.read_bytes() == bundled(exports, [*others[::-1], *members])
    index = Archive(path).index
    assert index["format"] == FORMAT
    listed = index["functions"]["loop"]["executables"]
    assert [entry["versions"]["jaxlib"] for entry in listed] == ["0.9.2", "0.9.12", compatibility.version()]
    assert {(entry["executable"], entry["stablehlo"]) for entry in listed} == {
        ("loop.cpu.jaxlib-0.9.2.xla", "loop.cpu.jaxlib-0.9.2.stablehlo.mlirbc")
    }
    assert len({entry["description"] for entry in listed}) == 3
    bundle = stagec_package.load(path, policy="executable_only")
    assert bundle["loop"].descriptions[0].versions["jaxlib"] == compatibility.version()
    assert len(bundle["loop"](np.arange(8, dtype=np.float32))) == 2


def test_two_executables_of_one_name(zoo: Path) -> None:
    exports, members = artifacts(zoo)
    other = dataclasses.replace(of_another_jaxlib(zoo, "0.9.2"), name="zoo.loop.cpu")
    with pytest.raises(Inconsistent, match=r"loop\.cpu\.json: two members of different content have this name"):
        bundled(exports, [*members, other])


def test_two_signatures_with_the_same_export(zoo: Path) -> None:
    exports, _ = artifacts(zoo)
    loop = exports["loop"]
    specs = {f"zoo.loop-{n}": dataclasses.replace(loop.spec, variant=n, static={"n": n}) for n in ("a", "b")}
    given = {name: dataclasses.replace(loop, name=name, spec=spec) for name, spec in specs.items()}
    archive = Archive("x", bundled(given, []))
    assert [one["exported"] for one in archive.index["functions"].values()] == ["loop-a.exported"] * 2
    assert list(archive.index["members"]) == ["functions.jsonl", "loop-a.exported", "loop-a.exported.json"]


def test_what_the_index_says_of_an_export(zoo: Path) -> None:
    index = Archive(zoo).index
    entry = index["functions"]["factorize"]
    assert entry["custom_calls"]["lapack_spotrf_ffi"] == "guaranteed"
    assert entry["versions"]["stagec"] == VERSION
    assert entry["readable_until"] == readable_until(entry["versions"]["jax"])
    assert index["functions"]["from_file"]["readable_until"] == readable_until(
        index["functions"]["from_file"]["versions"].get("jax")
    )


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda index: index.update(x=1), "x: no such key is known"),
        (lambda index: index.pop("weights"), "the key 'weights' is missing"),
        (lambda index: index.update(kind="compiled"), 'kind: expected "bundle", not "compiled"'),
        (lambda index: index["targets"]["cpu"].pop("requires"), "targets.cpu: the key 'requires' is missing"),
        (
            lambda index: loop_entry(index).update(nr_devices="1"),
            'functions.loop.executables[0].nr_devices: expected a whole number, not "1"',
        ),
        (
            lambda index: loop_entry(index).update(bucket={"n": True}),
            "functions.loop.executables[0].bucket.n: expected a whole number, not true",
        ),
        (
            lambda index: loop_entry(index).update(target="h200"),
            "functions.loop.executables[0].target: there is no target 'h200'",
        ),
        (
            lambda index: loop_entry(index).update(executable="x"),
            "functions.loop.executables[0].executable: there is no member 'x'",
        ),
        (
            lambda index: index["functions"]["loop"]["executables"].append(loop_entry(index)),
            "functions.loop.executables[1]: there is another one for this target, bucket and jaxlib",
        ),
        (lambda index: index.pop("weights_files"), "the key 'weights_files' is missing"),
        (lambda index: index["functions"]["loop"].update(function="x"), "functions.loop: it belongs to x"),
        (
            lambda index: index["functions"]["loop"].update(in_avals=[]),
            "functions.loop.in_avals: the tree has a different number of leaves",
        ),
        (
            lambda index: index["functions"]["loop"].update(readable_until="soon"),
            'functions.loop.readable_until: expected a date such as "2026-11-18", or "unknown", not "soon"',
        ),
        (
            lambda index: index["functions"]["loop"].update(in_avals=["f32[ 8]"]),
            'functions.loop.in_avals[0]: expected an aval as stagec writes it, not "f32[ 8]"',
        ),
    ],
)
def test_an_index_of_another_shape(zoo: Path, edit: Callable[[dict[str, Any]], object], what: str) -> None:
    exports, members = artifacts(zoo)
    archive = Archive("x", bundled(exports, members))
    index = json.loads(json.dumps({**archive.index, "functions": dict(archive.index["functions"])}))
    edit(index)
    contents = {name: archive[name] for name in archive.index["members"]}
    with pytest.raises(LoadError) as refusal:
        Archive("x", encode(with_index(index, contents))).check_all()
    told = str(refusal.value).removeprefix("x: index.json: ").removeprefix("x: functions.jsonl: ")
    assert (refusal.value.code, told) == ("format", what)


def loop_entry(index: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = index["functions"]["loop"]["executables"][0]
    return entry
