"""`stagec explain`: which components of two artifacts differ."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stagec import components
from tests.building import build, checked, stagec
from tests.reproducibility.conftest import MANIFEST, MODEL, write

NAMES = {"exported": "m.f.exported", "xla": "m.f.cpu.batch3.xla"}


def again(folder: Path, model: str = MODEL, manifest: str = MANIFEST) -> Path:
    """Build the model once more, changed; return the folder of its artifacts."""
    folder.mkdir(exist_ok=True)
    build("m.toml", folder, write(folder / "source", model, manifest))
    return folder


def explain(first: Path, second: Path) -> tuple[int, str]:
    done = stagec("explain", first, second)
    assert done.stderr == ""
    return done.returncode, done.stdout


def describe(folder: Path, root: Path, **changes: Any) -> Path:
    """Export `f` with its description beside it; return the artifact."""
    spec = json.loads((root.parent / "m.f.spec").read_text()) | changes
    folder.mkdir()
    (folder / "spec").write_text(json.dumps(spec))
    out = folder / "f.exported"
    words = ["--output", out, "--description", f"{out}.json", "--import-root", root]
    checked("export", "--spec", folder / "spec", *words)
    return out


@pytest.mark.parametrize("suffix", ["aot", *NAMES])
def test_equal_artifacts(small: Path, suffix: str) -> None:
    file = small / ("m.aot" if suffix == "aot" else NAMES[suffix])
    assert explain(file, file) == (0, f"{file} and {file} are made from the same components\n")


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
        "target cpu_name",
        "target requires",
        "target parallelism",
        "environment NPROC",
        "environment XLA_FLAGS",
        "compiler option xla_cpu_enable_fast_math",
    ]
    assert "target isa: AVX2 -> SSE4_2" in lines
    assert lines[-1] == "compiler option xla_cpu_enable_fast_math: (none) -> true"


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


def test_a_file_that_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = stagec("explain", "x.json", "x.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "x.json: it does not describe an executable\n"
        "  give a bundle (.aot), an executable (.xla), a portable artifact (.exported) or a description (.json)\n"
    )


def test_digests_do_not_follow_where_a_part_ends() -> None:
    assert components.digest(b"ab", b"c") != components.digest(b"a", b"bc")
    assert components.digest(b"", b"") != components.digest(b"")
