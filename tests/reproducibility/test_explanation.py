"""`stagec explain`: which components of two artifacts, or of an artifact and the current inputs, differ.

Modules: `cli/explain.py`, `cli/actions/components.py`, `core/builds/components.py`, `audit/explanation.py`,
`audit/inputs.py`, `building/export_description.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

import jaxlib
import pytest

from stagec.core.builds import components
from tests.building import ROOT, build, checked, stagec, write_specs
from tests.reproducibility.conftest import MANIFEST, MODEL, write

NAMES = {"exported": "m.f.exported", "xla": "m.f.cpu.batch3.xla"}


def again(folder: Path, model: str = MODEL, manifest: str = MANIFEST) -> Path:
    """Build the model once more, changed; return the folder of its artifacts."""
    folder.mkdir(exist_ok=True)
    build("m.toml", folder, write(folder / "source", model, manifest))
    return folder


def explain(first: Path, second: Path, *more: str | Path, cwd: Path = ROOT) -> tuple[int, str]:
    done = stagec("explain", first, second, *more, cwd=cwd)
    assert done.stderr == ""
    return done.returncode, done.stdout


def edited(folder: Path, model: str = MODEL, manifest: str = MANIFEST) -> Path:
    """Write the model's sources, changed; return their folder, whose manifest is m.toml."""
    return write(folder / "edited", model, manifest)


def describe(folder: Path, root: Path, **changes: Any) -> Path:
    """Export `f` with its description beside it; return the artifact."""
    spec = json.loads((root.parent / "m.f.spec").read_text()) | changes
    folder.mkdir()
    (folder / "spec").write_text(json.dumps(spec))
    out = folder / "f.exported"
    words: list[str | Path] = ["--output", out, "--description", f"{out}.json", "--import-root", root]
    checked("action", "export", "--spec", folder / "spec", *words)
    return out


@pytest.mark.parametrize("suffix", ["aot", *NAMES])
def test_equal_artifacts(small: Path, suffix: str) -> None:
    file = small / ("m.aot" if suffix == "aot" else NAMES[suffix])
    assert explain(file, file) == (0, f"{file} and {file} are made from the same components\n")


def test_why_it_is_built_again_whenever_a_file_is_added(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.f.exported"
    file.write_bytes((small / "m.f.exported").read_bytes())
    same = f"{file} and {file} are made from the same components\n"
    unread = tmp_path / "m.f.exported.unread"
    unread.write_text("models/other.py\nbazel-out/names.txt\n")
    assert explain(file, file) == (0, same)
    unread.write_text("models/other.py\n# built again whenever a file is added: it starts a process: true\n")
    assert explain(file, file) == (
        0,
        f"{file} is built again whenever a file is added: it starts a process: true\n{same}",
    )


@pytest.mark.parametrize(
    ("key", "does"),
    [
        (f'jaxlib = ["{jaxlib.__version__}", "9.9.9"]', f"compiles it, and here is {jaxlib.__version__}"),
        ('runs_on = ["9.9.9"]', "runs what an older one compiles"),
    ],
)
def test_an_executable_for_another_jaxlib_is_not_compared_without_it(
    small: Path, tmp_path: Path, key: str, does: str
) -> None:
    assert 'version = "1"' in MANIFEST
    source = edited(tmp_path, manifest=MANIFEST.replace('version = "1"', f'version = "1"\n{key}'))
    status, text = explain(small / "m.aot", source / "m.toml", "--import-root", source)
    why = f"not compared: jaxlib 9.9.9 {does}; bazel run m.explain compares it"
    assert (status, text.splitlines()[:2]) == (1, ["bits.cpu.jaxlib-9.9.9", f"  {why}"])
    assert text.count("\n") == 2 * text.count("not compared")


def test_a_static_argument_an_aval_and_a_key(small: Path, tmp_path: Path) -> None:
    first = describe(tmp_path / "a", small / "source")
    changes = {"static": {"power": 3}, "args": [{"k": "f32[5,2]"}, "f32[batch,5]"], "platforms": ["cpu", "tpu"]}
    second = describe(tmp_path / "b", small / "source", **changes)
    status, text = explain(first, second)
    assert status == 1
    source, *others = text.splitlines()
    assert re.fullmatch(r"source of f: [\d,]+ bytes of StableHLO -> [\d,]+ bytes of StableHLO", source)
    assert others == [
        "aval args[0]['k']: f32[4,2] -> f32[5,2]",
        "aval args[1]: f32[batch,4] -> f32[batch,5]",
        "static argument power: 2 -> 3",
        'key platforms: ["cpu"] -> ["cpu","tpu"]',
    ]


def test_a_target_and_an_option(small: Path, tmp_path: Path) -> None:
    changed = MANIFEST.replace('"AVX2"', '"SSE4_2"').replace(
        "parallelism = 2", "parallelism = 3\ncompiler_options = { xla_cpu_enable_fast_math = true }"
    )
    status, text = explain(small / NAMES["xla"], again(tmp_path / "b", manifest=changed) / NAMES["xla"])
    assert status == 1
    lines = text.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "target isa",
        "target parallelism",
        "target device_kind",
        "target requires",
        "environment NPROC",
        "compiler option xla_cpu_enable_fast_math",
    ]
    assert "target isa: AVX2 -> SSE4_2" in lines
    assert lines[-1] == "compiler option xla_cpu_enable_fast_math: (none) -> true"


PLUGIN = """
import importlib.util


def f(x):
    assert importlib.util.find_spec("brought_by_the_plugin") is None
    return x * 2
"""


def test_tracing_does_not_see_what_compiling_for_a_platform_takes(tmp_path: Path) -> None:
    head = MANIFEST.partition("[functions")[0]
    function = '[functions.f]\nentry = "pkg.model:f"\nargs = ["f32[8]"]\ntargets = ["v5e:1x1"]\n'
    write(tmp_path / "source", PLUGIN, head + function)
    folder = tmp_path / "plugin"
    (folder / "libtpu-1.2.3.dist-info").mkdir(parents=True)
    (folder / "libtpu-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 1.2.3\n")
    (folder / "brought_by_the_plugin.py").touch()
    status, text = explain(Path("m.toml"), Path("m.toml"), "--plugin", f"tpu={folder}", cwd=tmp_path / "source")
    assert (status, text) == (0, "m.toml and m.toml are made from the same components\n")


def test_bundles(small: Path, tmp_path: Path) -> None:
    manifest = MANIFEST.replace('version = "1"', 'version = "2"').replace("batch = [3]", "batch = [5]")
    other = again(tmp_path / "b", MODEL.replace("<< 3", "<< 2"), manifest) / "m.aot"
    report = json.loads(stagec("explain", "--json", small / "m.aot", other).stdout)
    assert report["equal"] is False
    rows = [(row["artifact"], row["component"], row.get("change")) for row in report["differences"]]
    assert rows == [
        ("bits (portable)", "source of bits", None),
        ("bits.cpu", "source of bits", None),
        ("bundle", "version", None),
        ("f.cpu.batch3", "artifact", "only in the first"),
        ("f.cpu.batch5", "artifact", "only in the second"),
    ]


def test_a_comment_is_no_difference(small: Path, tmp_path: Path) -> None:
    other = again(tmp_path / "b", "# A comment.\n\n" + MODEL)
    assert explain(small / "m.aot", other / "m.aot")[0] == 0
    assert (other / "m.aot").read_bytes() == (small / "m.aot").read_bytes()


def test_the_other_versions_that_made_it(small: Path, tmp_path: Path) -> None:
    portable, executable = small / "m.f.exported.json", small / "m.f.cpu.batch3.json"
    for file, names in (
        (portable, ("jax", "jaxlib", "stagec", "environment numpy", "environment python")),
        (executable, ("jaxlib", "stagec")),
    ):
        description = json.loads(file.read_text())
        here = {name: description["components"][name]["value"] for name in names}
        description["components"] |= components.table(dict.fromkeys(names, "0.1.2"))
        other = tmp_path / file.name
        other.write_text(json.dumps(description))
        lines = sorted(f"{name}: 0.1.2 -> {version}" for name, version in here.items())
        for second in (file, Path("m.toml")):
            status, text = explain(other, second, cwd=small / "source")
            assert (status, sorted(text.splitlines())) == (1, lines)


@pytest.mark.parametrize("file", ["m.aot", *NAMES.values(), "m.f.exported.json", "m.f.cpu.batch3.json"])
def test_an_artifact_of_the_current_inputs(small: Path, file: str) -> None:
    said = f"{small / file} and m.toml are made from the same components\n"
    assert explain(small / file, Path("m.toml"), cwd=small / "source") == (0, said)
    if file in ("m.aot", NAMES["exported"]):  # the other way round, of a bundle and of one artifact
        assert explain(Path("m.toml"), small / file, cwd=small / "source")[0] == 0


def test_an_artifact_and_a_comment_more(small: Path, tmp_path: Path) -> None:
    root = edited(tmp_path, "# A comment.\n\n" + MODEL)
    assert explain(small / "m.aot", root / "m.toml", "--import-root", root)[0] == 0


MESH = MANIFEST.replace(
    "[functions.f]",
    '[meshes.row]\naxes = { data = 2 }\n\n[functions.f]\nmesh = "row"\nin_shardings = ["P(data)", "unspecified"]',
).replace("batch = [3]", "batch = [4]")
"""The model over two devices."""


def test_a_bundle_and_the_current_inputs(tmp_path: Path) -> None:
    old = again(tmp_path / "old", manifest=MESH) / "m.aot"
    manifest = (
        MESH.replace('version = "1"', 'version = "2"\nenable_x64 = true')
        .replace('"P(data)"', '"P(None, data)"')
        .replace("power = 2", "power = 3")
        .replace("parallelism = 2", "parallelism = 3\ncompiler_options = { xla_cpu_enable_fast_math = true }")
        .replace('args = ["u8[64]"]', 'args = ["u8[32]"]')
    )
    root = edited(tmp_path, MODEL, manifest)
    done = stagec("explain", "--json", old, "m.toml", cwd=root)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert (report["equal"], report["first"], report["second"]) == (False, str(old), "m.toml")
    found: dict[str, dict[str, tuple[str | None, str | None]]] = {}
    for row in report["differences"]:
        found.setdefault(row["artifact"], {})[row["component"]] = (row["first"], row["second"])
    target = {
        "target parallelism": ("2", "3"),
        "compiler option xla_cpu_enable_fast_math": (None, "true"),
        "environment NPROC": ("2", "3"),
    }
    assert sorted(found) == ["bits (portable)", "bits.cpu", "bundle", "f (portable)", "f.cpu.batch4"]
    assert found["bundle"] == {"version": ("1", "2")}
    assert found["f (portable)"].keys() == {
        "source of f",
        "static argument power",
        "sharding in_shardings",
        "environment enable_x64",
    }
    assert found["f (portable)"]["static argument power"] == ("2", "3")
    assert found["f (portable)"]["environment enable_x64"] == ("false", "true")
    assert found["f (portable)"]["sharding in_shardings"] == (
        '["P(data)","unspecified"]',
        '["P(None, data)","unspecified"]',
    )
    assert found["f.cpu.batch4"].pop("source of f")
    assert found["f.cpu.batch4"] == {
        **target,
        "sharding args[0]['k']": ("P(data) over data = 2", "P(None, data) over data = 2"),
    }
    assert found["bits (portable)"].keys() == {"source of bits", "aval args[0]", "environment enable_x64"}
    assert found["bits.cpu"].pop("source of bits")
    assert found["bits.cpu"] == {**target, "aval args[0]": ("u8[64]", "u8[32]"), "aval result": ("u8[64]", "u8[32]")}


def test_an_executable_and_the_current_inputs(small: Path, tmp_path: Path) -> None:
    root = edited(tmp_path, manifest=MANIFEST.replace('"AVX2"', '"SSE4_2"'))
    status, text = explain(small / NAMES["xla"], Path("m.toml"), cwd=root)
    assert status == 1
    assert {line.partition(":")[0] for line in text.splitlines()} >= {
        "target isa",
        "target device_kind",
        "target requires",
    }
    assert "target isa: AVX2 -> SSE4_2\n" in text
    # What is compared with an executable is what would be compiled, to the letter.
    again(tmp_path / "built", manifest=MANIFEST.replace('"AVX2"', '"SSE4_2"'))
    assert explain(small / NAMES["xla"], tmp_path / "built" / NAMES["xla"]) == (1, text)


def test_a_bundle_and_one_artifact(small: Path, tmp_path: Path) -> None:
    assert explain(small / NAMES["xla"], small / "m.aot")[0] == 0
    other = again(tmp_path / "b", manifest=MANIFEST.replace("parallelism = 2", "parallelism = 1"))
    status, text = explain(other / "m.aot", small / NAMES["xla"])
    assert (status, text.splitlines()[0]) == (1, "target parallelism: 1 -> 2")


def test_a_portable_artifact_without_a_description(small: Path, tmp_path: Path) -> None:
    bare = tmp_path / NAMES["exported"]
    bare.write_bytes((small / NAMES["exported"]).read_bytes())
    described = small / NAMES["exported"]
    for other in (bare, described, described.with_name(f"{described.name}.json")):
        assert explain(bare, other) == (0, f"{bare} and {other} are made from the same components\n")
    assert explain(bare, Path("m.toml"), cwd=small / "source")[0] == 0
    root = edited(
        tmp_path,
        MODEL.replace("tanh", "sinh"),
        MANIFEST.replace("f32[batch,4]", "f32[rows,4]").replace("batch =", "rows ="),
    )
    status, text = explain(bare, Path("m.toml"), cwd=root)
    assert status == 1
    assert [line.partition(":")[0] for line in text.splitlines()] == ["source of f", "aval args[1]"]
    nameless = tmp_path / "old.exported"
    nameless.write_bytes(bare.read_bytes())
    done = stagec("explain", nameless, "m.toml", cwd=small / "source")
    assert (done.returncode, done.stderr) == (
        2,
        f"m.toml: it is not known which function {nameless} belongs to\n"
        f"  keep its description beside it, as {nameless}.json\n",
    )


def test_a_bundle_is_the_same_with_another_patch_release_of_the_interpreter(small: Path, tmp_path: Path) -> None:
    description = json.loads((small / "m.f.exported.json").read_text())
    description["components"] |= components.table({"environment python": "3.99.1"})
    (tmp_path / "other.json").write_text(json.dumps(description))
    bundles = []
    for number, described in enumerate((small / "m.f.exported.json", tmp_path / "other.json")):
        bundles.append(tmp_path / f"{number}.aot")
        words: list[str | Path] = [
            "--export",
            f"m.f:{small}/m.f.exported:{small}/m.f.spec:{described}",
            "--output",
            bundles[-1],
        ]
        checked("action", "bundle", "--name", "m", "--version", "1", *words)
    assert bundles[0].read_bytes() == bundles[1].read_bytes()
    again = stagec(
        "action",
        "bundle",
        "--name",
        "m",
        "--version",
        "1",
        "--output",
        tmp_path / "x.aot",
        "--export",
        f"m.f:{small}/m.f.exported:{small}/m.f.spec:{small}/m.bits.exported.json",
    )
    assert (again.returncode, again.stderr) == (
        2,
        f"{tmp_path}/x.aot: m.f: the description belongs to a different export\n",
    )


def test_what_bazel_writes_for_an_explain_target(small: Path, tmp_path: Path) -> None:
    plan = write_specs("m.toml", small / "source", tmp_path)
    for name in ("m.f.exported", "m.f.exported.json", "m.bits.exported", "m.bits.exported.json"):
        (tmp_path / name).write_bytes((small / name).read_bytes())
    names = [export["name"] for export in plan["exports"]]
    inputs = {
        "format": 1,
        "kind": "inputs",
        "name": "m",
        "version": "1",
        "exports": {
            name: {"spec": f"{name}.spec", "exported": f"{name}.exported", "description": f"{name}.exported.json"}
            for name in names
        },
        "executables": {
            one["name"]: {"export": one["export"], "spec": f"{one['name']}.spec"} for one in plan["executables"]
        },
    }
    file = tmp_path / "m.explain.json"
    file.write_text(json.dumps(inputs))
    for artifact in ("m.aot", *NAMES.values()):
        assert explain(small / artifact, file)[0] == 0
    file.write_text(json.dumps(inputs | {"version": "2"}))
    assert explain(small / "m.aot", file) == (1, "bundle\n  version: 1 -> 2\n")
    file.write_text(json.dumps(inputs | {"format": 2}))
    done = stagec("explain", small / "m.aot", file)
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        f"{file}: its format is 2, and this stagec reads 1: build the target again",
    )


@pytest.mark.parametrize(
    ("model", "manifest", "message"),
    [
        (MODEL, MANIFEST.replace("batch = [3]", "batch = [5]"), "m.toml: it has no artifact of f, cpu, batch = 3\n"),
        (MODEL, MANIFEST.replace("f32[4,2]", "f33[4,2]"), "m.toml: functions.f.args[0].k: "),
        (
            MODEL.replace("jnp.tanh", "jnp.tan_h"),
            MANIFEST,
            "m.toml: functions.f: staging pkg.model:f raised AttributeErr",
        ),
    ],
    ids=["no such artifact", "a mistake in the manifest", "a function that raises"],
)
def test_current_inputs_that_cannot_be_compared(
    small: Path, tmp_path: Path, model: str, manifest: str, message: str
) -> None:
    done = stagec("explain", small / NAMES["xla"], "m.toml", cwd=edited(tmp_path, model, manifest))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


def test_a_file_that_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = stagec("explain", "x.json", "x.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "x.json: it does not describe an executable\n"
        "  give a bundle (.aot), an executable (.xla), an exported artifact (.exported), a description (.json) "
        "or a manifest (.toml)\n"
    )


def test_digests_do_not_follow_where_a_part_ends() -> None:
    assert components.digest(b"ab", b"c") != components.digest(b"a", b"bc")
    assert components.digest(b"", b"") != components.digest(b"")
