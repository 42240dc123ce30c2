"""`stagec inspect`: what it says of artifacts, of damaged ones, and of other files.

Modules: `audit/inspection.py`, `cli/inspect.py`.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from stagec.audit import comparison, explanation, inspection
from stagec.core.data import child
from stagec.core.messages.errors import StagecError
from stagec.core.trees.tree import Tree
from stagec.stages import serialization
from stagec.stages.exported import Exported
from tests.building import ROOT, checked, stagec
from tests.bundles import edited, only, whole_index, with_index


def test_inspect_a_bundle(zoo: Path) -> None:
    report = json.loads(checked("inspect", zoo, "--json"))
    assert (report["kind"], report["name"]) == ("bundle", "zoo")
    assert {"mlp", "attention", "from_file"} <= set(report["functions"])
    named = report["functions"]["named-cube"]
    assert (named["function"], named["variant"], named["static"]) == ("named", "cube", {"power": 3})
    text = checked("inspect", zoo)
    assert text.startswith("bundle zoo 0: ")
    assert "  mlp(params, x, /) -> f32[batch,4]\n    params.b  f32[4]\n    params.w  f32[16,4]\n    x     " in text
    assert (
        "  from_file([params], x, /) -> f32[3]\n    params               dict  bound to weights.safetensors\n" in text
    )
    flat = checked("inspect", zoo, "--flat")
    assert "  mlp(f32[4], f32[16,4], f32[batch,16]) -> f32[batch,4]\n" in flat
    lines = [line.split() for line in text.splitlines()]
    assert ["bytes", "flops", "peak", "bytes", "sha256"] in lines
    entry = next(one for one in report["functions"]["mlp"]["executables"] if one["bucket"] == {"batch": 4})
    member = report["members"][entry["executable"]]
    metrics = [f"{value:,.0f}" for value in (member["bytes"], entry["flops"], entry["peak_bytes"])]
    assert ["cpu", "batch", "=", "4", *metrics, member["sha256"][:12]] in lines
    assert len({line.rindex(" ") for line in flat.splitlines() if line.startswith("    ")}) == 1


def test_inspect_a_portable_artifact(zoo: Path) -> None:
    report = json.loads(checked("inspect", zoo.parent / "zoo.mlp.exported", "--json"))
    assert report["kind"] == "exported"
    assert report["platforms"] == ["cpu", "cuda", "tpu"]
    assert report["in_avals"] == ["f32[4]", "f32[16,4]", "f32[batch,16]"]
    assert report["vjp_order"] == 1
    assert checked("inspect", zoo.parent / "zoo.mlp.exported").startswith("exported artifact of mlp: ")


def test_inspect_lists_custom_calls_with_who_provides_them(zoo: Path) -> None:
    report = json.loads(checked("inspect", zoo.parent / "zoo.factorize.exported", "--json"))
    assert report["custom_calls"]["lapack_spotrf_ffi"] == "guaranteed"
    text = checked("inspect", zoo.parent / "zoo.factorize.exported")
    assert "\n  calls      lapack_spotrf_ffi (guaranteed)\n" in text
    description = json.loads((zoo.parent / "zoo.factorize.cpu.json").read_text())
    assert description["custom_calls"]["lapack_spotrf_ffi"] == "guaranteed"


def test_inspect_lists_effects(zoo: Path) -> None:
    artifact = zoo.parent / "zoo.effectful.exported"
    report = json.loads(checked("inspect", artifact, "--json"))
    assert (len(report["ordered_effects"]), len(report["unordered_effects"])) == (2, 1)
    text = checked("inspect", artifact)
    for line in ("Read (ordered)", "Write (ordered)", "Count (unordered)"):
        assert f"  effect     tests.zoo.effects.{line}\n" in text
    assert "effect " not in checked("inspect", zoo.parent / "zoo.mlp.exported")


def test_inspect_a_description(zoo: Path) -> None:
    file = zoo.parent / "zoo.mlp.cpu.batch4.json"
    assert json.loads(checked("inspect", file, "--json")) == json.loads(file.read_text())
    assert checked("inspect", file).startswith("executable of mlp for cpu (cpu AVX2)\n")


def test_a_description_of_a_sharded_function_tells_the_devices(zoo: Path) -> None:
    file = zoo.parent / "zoo.sharded.cpu.batch4.json"
    assert json.loads(file.read_text())["device_assignment"] == {
        "axis_names": ["data", "model"],
        "axis_sizes": [2, 2],
        "device_ids": [0, 1, 2, 3],
        "coords": [],
    }
    assert "  devices    4 (data = 2, model = 2), row by row: 0, 1, 2, 3\n" in checked("inspect", file)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"hello", "not a serialized jax.export.Exported ("),
        (b"PK\3\4rest", "not a bundle: it does not end as a zip file does"),
        (b"{}", "it does not describe an executable"),
        (b'{"kind": "executable", "format": 7}', "its format is 7, and this stagec reads 1: compile it again"),
        (b"{", "Expecting property name enclosed in double quotes"),
    ],
)
def test_inspect_something_else(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "file").write_bytes(content)
    done = stagec("inspect", "file", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"file: {what}")
    assert done.stderr.endswith(
        "\n  give a bundle (.aot), an executable (.xla) with its description beside it, an exported artifact "
        "(.exported), a description (.json), kernels (.ptx) or weights (.safetensors)\n"
    )


DAMAGED = {
    "2026-11-jax-0.10.1/factorize.exported": [(11052, "SIGSEGV"), (7209, "SIGABRT")],
    "2026-11-jax-0.10.1/psum.exported": [(6163, "took over 2 seconds")],
}
"""Bits of modules which, when they are flipped, end jaxlib 0.10.1 while it reads them, or never let it end."""


@pytest.mark.parametrize(("name", "bit", "end"), [(name, *end) for name, ends in DAMAGED.items() for end in ends])
def test_inspect_what_jaxlib_does_not_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bit: int, end: str
) -> None:
    data = bytearray((ROOT / "tests" / "corpus" / name).read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path = tmp_path / "damaged.exported"
    path.write_bytes(data)
    monkeypatch.setattr(child, "SECONDS", 2 if "took" in end else 20)
    try:
        inspection.inspect(str(path))
        told = ""
    except StagecError as refusal:
        told = str(refusal)
    if version("jaxlib") == "0.10.1":  # others read or refuse it, or end in another way
        assert told.startswith(f"{path}: ")
        assert end in told


def test_a_tree_that_is_nested_too_deeply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "DEEPEST", 1000)  # stagec writes none of them
    exported = Exported.deserialize((ROOT / "tests/corpus/2026-11-jax-0.10.1/loop.exported").read_bytes())
    for depth, refused in ((90, False), (120, True), (250, True)):
        tree = functools.reduce(lambda tree, _: Tree("list", (tree,)), range(depth), exported.out_tree)
        (tmp_path / "x").write_bytes(dataclasses.replace(exported, out_tree=tree).serialize())
        done = stagec("inspect", "x", cwd=tmp_path)
        assert ("a tree is nested deeper than 100 levels" in done.stderr) == refused
        assert done.returncode == (2 if refused else 0), done.stderr


def test_inspect_a_bundle_whose_descriptions_are_something_else(zoo: Path, tmp_path: Path) -> None:
    looks: tuple[Callable[[str], object], ...] = (
        inspection.inspect,
        lambda path: comparison.compare(path, path),
        lambda path: explanation.explain(path, path, (), ()),
    )
    described = "it does not describe an executable"
    texts = {
        "[]": ("expected an object, not []", described),
        '{"components": {}, "constants": [{}]}': ("the key 'donated' is missing", described),
        '{"components": {}, "constants": {}, "donated": [], "parameters": [], "serve": {}}': (
            "constants: expected an array, not {}",
            described,
        ),
        '{"components": 1, "kind": "exported", "format": 1}': (
            "the key 'constants' is missing",
            "the key 'function' is missing",
        ),
    }
    for text, (inspected, compared) in texts.items():

        def change(members: dict[str, bytes], text: str = text) -> None:
            index = whole_index(members)
            members[index["functions"]["loop"]["description"]] = text.encode()
            members.update(with_index(index, members))

        path = edited(only(zoo, tmp_path / "x.aot", "loop"), tmp_path / "y.aot", change)
        for look, told in zip(looks, (inspected, compared, compared), strict=True):
            if told:
                with pytest.raises(StagecError) as caught:
                    look(str(path))
                (problem,) = caught.value.problems
                assert (problem.file, problem.what) == (str(path), told)
                assert problem.write.startswith("give a bundle (.aot), ")
            else:
                look(str(path))


def test_what_a_file_says_does_not_reach_the_terminal_as_a_command(tmp_path: Path) -> None:
    exported = Exported.deserialize((ROOT / "tests/corpus/2026-11-jax-0.10.1/loop.exported").read_bytes())
    clear = "\x1b[2J\r\x9b1m"
    (tmp_path / "x").write_bytes(dataclasses.replace(exported, fun_name=f"f{clear}").serialize())
    text = checked("inspect", "x", cwd=tmp_path)
    assert text.startswith(r"exported artifact of f\x1b[2J\x0d\x9b1m: ")
    (tmp_path / "y").write_text(json.dumps({clear: 0, "kind": "executable", "format": 1}))
    done = stagec("inspect", "y", cwd=tmp_path)
    assert (done.returncode, done.stderr.replace("\n", "").isprintable()) == (2, True)
    done = stagec("inspect", clear, cwd=tmp_path)
    assert done.stderr == r"\x1b[2J\x0d\x9b1m: cannot be read: No such file or directory" + "\n"


def test_inspect_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = stagec("inspect", "none.aot", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "none.aot: cannot be read: No such file or directory\n")


def test_size_tells_what_takes_the_space(zoo: Path) -> None:
    size = zoo.stat().st_size
    lines = checked("inspect", zoo, "--sizes").splitlines()
    assert lines[0] == f"zoo: {size:,} bytes"
    assert any(line.endswith("executables of factorize") for line in lines)
    parts = json.loads(checked("inspect", zoo, "--sizes", "--json"))["parts"]
    assert sum(part["bytes"] for part in parts) == size
    assert checked("inspect", zoo, "--sizes", "--most", str(size)).startswith(
        f"zoo: {size:,} bytes, within the limit of {size:,} "
    )
    done = stagec("inspect", zoo, "--sizes", "--most", str(size - 1), "--rows", "1")
    assert done.returncode == 1
    assert done.stdout.startswith(
        f"FAILED  zoo: {size:,} bytes, over the limit of {size - 1:,} (manifest.bundle_size)\n"
    )


def test_size_shows_the_largest_first(zoo: Path) -> None:
    """Also where that is of no function: of many small ones, descriptions and the index take most."""
    parts = [part["bytes"] for part in json.loads(checked("inspect", zoo, "--sizes", "--json"))["parts"]]
    assert parts == sorted(parts, reverse=True)
    _, first, more = checked("inspect", zoo, "--sizes", "--rows", "1").splitlines()
    shown = checked("inspect", zoo, "--sizes", "--rows", str(len(parts))).splitlines()
    assert first.split() == shown[1].split()
    assert len(shown) == 1 + len(parts)
    assert more.endswith(f" {len(parts) - 1} more")
