"""Weights beside a bundle: found, checked and mapped; the bundle has their digests and no byte of them.

Modules: `cli/actions/describe_weights.py`.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagec
from stagec.bundle import external
from stagec.bundle.archive import Archive
from stagec.core.data.reading import RegularFile
from tests.building import COMPILER, build, checked, stagec as command
from tests.bundles import build_large, edited_index
from tests.signed import write_keys, write_provenance

MANIFEST = """
[manifest]
name = "zoo"
version = "1"

[functions.apply]
entry = "model:apply"
args = [{ w = "f32[5,3]", b = "bf16[5]" }, "f32[n,3]"]
bind = { params = { file = "parts/w.safetensors", external = true } }
targets = ["cpu-avx2"]
buckets = { n = [1, 4] }

[functions.shift]
entry = "model:shift"
args = ["f32[3]", "f32[3]", "f32[3]"]
bind = { one = { file = "in.safetensors" }, two = { file = "two.safetensors", external = true } }
targets = ["cpu-avx2"]
golden = {}
"""
MODEL = """
def apply(params, x):
    return x @ params["w"].T + params["b"].astype("float32")


def shift(x, one, two):
    return x + one - two
"""
W = np.arange(15, dtype=np.float32).reshape(5, 3)
X = np.ones((4, 3), np.float32)


def save(folder: Path, w: np.ndarray = W) -> None:
    import ml_dtypes

    (folder / "parts").mkdir(exist_ok=True)
    # An odd number of bytes comes first: the float32 array that follows starts between multiples of its size.
    save_file({"w": w, "b": np.full(5, 7, ml_dtypes.bfloat16)}, folder / "parts" / "w.safetensors")
    save_file({"one": np.ones(3, np.float32)}, folder / "in.safetensors")
    save_file({"two": np.full(3, 2, np.float32)}, folder / "two.safetensors")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("external")
    (folder / "m.toml").write_text(MANIFEST)
    (folder / "model.py").write_text(MODEL)
    save(folder)
    return build("m.toml", folder, folder)


def deployed(built: Path, folder: Path) -> Path:
    """Copy bundle and weights to another folder."""
    folder.mkdir(exist_ok=True)
    (folder / "parts").mkdir()
    for name in ("parts/w.safetensors", "two.safetensors", "zoo.aot"):
        shutil.copy(built.parent / name, folder / name)
    return folder / "zoo.aot"


MEMORY = """
import json, sys
import numpy as np, stagec
mapped, path = sys.argv[1] == "mapped", sys.argv[2]
x = np.zeros(1, np.float32)

def sizes():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(lines[name].split()[0]) >> 10 for name in ("VmHWM", "VmRSS")}

bundle = stagec.load(path, map_weights=mapped, check_weights="use", policy="executable_only")
small = bundle["small"](x)
before = sizes()
total = bundle["large"](x)
after = sizes()
weight, = bundle["large"].weights.values()
print(json.dumps([after[name] - before["VmRSS"] for name in after] + [float(small[0]), float(total[0])]))
"""

WITHOUT_MEMORY = """
import resource, sys
import stagec

bundle = stagec.load(sys.argv[2], map_weights=sys.argv[1] == "mapped", check_weights="never")
weight, = bundle["large"].weights.values()
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
size = (int(lines["VmSize"].split()[0]) + 2**15) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size, size))
try:
    weight._read()
except stagec.LoadError as error:
    print(error)
"""


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("mapped", ["mapped", "read"])
def test_an_array_is_in_memory_once(tmp_path: Path, external: bool, mapped: str) -> None:
    bundle = build_large(tmp_path, 2**25, external, 8)  # it starts where no CPU uses it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])}
    command = [sys.executable, "-c", MEMORY, mapped, str(bundle)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    most, left, small, total = json.loads(done.stdout)
    assert (small, total) == (1, 1)
    assert 120 < most < 160, f"of 128 MiB, {most} MiB at most"
    assert 120 < left < 160, f"of 128 MiB, {left} MiB stay"
    command[2] = WITHOUT_MEMORY
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reasons = "cannot be read: (Cannot allocate memory|[0-9,]+ bytes of it are more than there is memory for)"
    assert re.search(reasons, done.stdout), done.stdout


def test_arrays_that_a_cpu_copies_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"a": np.ones(16, np.float32), "b": np.ones(1, np.float32), "c": np.ones(1, np.int8)}, file)
    text = file.read_bytes()
    size = int.from_bytes(text[:8], "little")
    header, data = text[8 : 8 + size].rstrip(), text[8 + size :]
    for shift, count in ((0, 1), (8, 3)):
        padded = header.ljust(len(header) + (-(8 + len(header)) % 64) + shift)
        file.write_bytes(len(padded).to_bytes(8, "little") + padded + data)
        done = command("action", "describe-weights", file, "--output", tmp_path / "w.json")
        assert done.returncode == 0, done.stderr
        what = f"{count} of 3 arrays do not start at a multiple of 64 bytes"
        assert done.stderr == f"{file}: {what}: a CPU copies them instead of sharing the file\n"
        head, *rows, last = checked("inspect", file).splitlines()
        assert head.startswith(f"weights: 3 arrays, {file.stat().st_size:,} bytes, sha256 ")
        assert sorted(rows) == ["  a  f32[16]", "  b  f32[1]", "  c  i8[1]"]
        assert last == f"{what}: a CPU copies them instead of sharing the file"


@pytest.mark.parametrize(("mebibytes", "shift", "told"), [(65, 8, 1), (65, 0, 0), (1, 8, 0)])
def test_many_bytes_that_are_copied_are_told_once(tmp_path: Path, mebibytes: int, shift: int, told: int) -> None:
    size, file = mebibytes << 20, tmp_path / "w.safetensors"
    file.write_bytes(bytes(64 + shift + size))
    weight = {"aval": f"u8[{size}]", "file": file.name, "start": 64 + shift}
    index = {"weights_files": {file.name: {"bytes": 64 + shift + size, "sha256": "0"}}, "weights": {"w": weight}}
    files = external.Files(str(tmp_path / "m.aot"), index, None, "never")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert len(files.array(file.name, 64 + shift, size, mapped=True)) == size
    what = f"{file}: 1 of 1 arrays, 65 MiB, do not start at a multiple of 64 bytes: they are copied into this process's"
    assert [str(one.message).startswith(what) for one in said] == [True] * told
    assert all(
        one.category is RuntimeWarning and "`stagec inspect` counts the others" in str(one.message) for one in said
    )


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.load(path, **options)
    assert refusal.value.code == "weights"
    return str(refusal.value)


def test_the_bundle_has_digests_and_no_byte_of_them(built: Path) -> None:
    index = Archive(built).index
    assert list(index["weights_files"]) == ["parts/w.safetensors", "two.safetensors"]
    data = (built.parent / "parts" / "w.safetensors").read_bytes()
    entry = index["weights"]["parts/w.safetensors:w"]
    assert data[entry["start"] :][: W.nbytes] == W.tobytes()
    assert W.tobytes() not in built.read_bytes()
    assert "member" in index["weights"]["in.safetensors:one"]
    text = checked("inspect", built)
    digest = index["weights_files"]["two.safetensors"]["sha256"][:12]
    assert "  weights: 1 arrays, 12 bytes\n" in text
    size = (built.parent / "two.safetensors").stat().st_size
    assert f"  weights beside the bundle: two.safetensors: 1 arrays, {size} bytes, sha256 {digest}\n" in text


@pytest.mark.parametrize("check", ["load", "use", "never"])
@pytest.mark.parametrize("mapped", [True, False])
def test_they_are_found_beside_it(built: Path, tmp_path: Path, check: Any, mapped: bool) -> None:
    path = deployed(built, tmp_path / "there")
    with stagec.load(path, check_weights=check, map_weights=mapped) as bundle:
        np.testing.assert_array_equal(bundle["apply"](X), X @ W.T + 7)
        np.testing.assert_array_equal(bundle["shift"](np.zeros(3, np.float32)), np.full(3, -1, np.float32))


def test_they_are_found_in_another_folder(built: Path, tmp_path: Path) -> None:
    path = deployed(built, tmp_path / "there")
    alone = tmp_path / "alone.aot"
    path.rename(alone)
    with stagec.load(alone, weights=tmp_path / "there") as bundle:
        np.testing.assert_array_equal(bundle["apply"](X), X @ W.T + 7)
    done = command("run", alone, "--golden", "--weights", tmp_path / "there")
    assert done.returncode == 0, done.stderr
    done = command("run", alone, "apply", "--random", "--weights", tmp_path / "there")
    assert done.returncode == 0, done.stderr


def test_weights_that_are_missing_or_others_are_one_error(built: Path, tmp_path: Path) -> None:
    path = deployed(built, tmp_path / "there")
    wanted = Archive(path).index["weights_files"]
    first, second = tmp_path / "there" / "parts" / "w.safetensors", tmp_path / "there" / "two.safetensors"
    first.unlink()
    second.write_bytes(b"short")
    text = refused(path)
    assert text.splitlines() == [
        f"{path}: weights beside the bundle are missing or are not the right ones:",
        f"  {first}: there is no such file; the bundle wants {wanted['parts/w.safetensors']['bytes']} bytes, "
        f"sha256 {wanted['parts/w.safetensors']['sha256']}",
        f"  {second}: it has 5 bytes; the bundle wants {wanted['two.safetensors']['bytes']} bytes, "
        f"sha256 {wanted['two.safetensors']['sha256']}",
    ]
    done = command("run", path, "apply", "--random")
    assert (done.returncode, done.stderr.splitlines()) == (2, text.splitlines())
    done = command("verify", path)
    assert done.returncode == 1
    assert (
        f"FAILED  weights     weights beside the bundle are missing or are not the right ones:\n  {first}"
        in done.stdout
    )


def test_the_digest_is_compared_when_it_is_asked_for(built: Path, tmp_path: Path) -> None:
    path = deployed(built, tmp_path / "there")
    save(tmp_path / "there", W + 1)  # of the same size
    assert "w.safetensors: its sha256 is " in refused(path)
    with stagec.load(path, check_weights="use") as bundle:
        bundle["shift"](np.zeros(3, np.float32))
        with pytest.raises(stagec.LoadError, match=r"w\.safetensors: its sha256 is "):
            bundle["apply"](X)
    with stagec.load(path, check_weights="never") as bundle:
        np.testing.assert_array_equal(bundle["apply"](X), X @ (W + 1).T + 7)
    with pytest.raises(ValueError, match="check_weights is 'now'; write 'load', 'use', 'never'"):
        stagec.load(path, check_weights="now")  # type: ignore[arg-type]


def test_a_folder_in_the_place_of_weights(built: Path, tmp_path: Path) -> None:
    path = deployed(built, tmp_path / "there")
    file = tmp_path / "there" / "two.safetensors"
    file.unlink()
    os.mkfifo(file)
    assert stat.S_ISFIFO(file.stat().st_mode)
    assert f"{file}: it cannot be read: it is not a regular file; " in refused(path)


def test_what_is_read_does_not_change(built: Path, tmp_path: Path) -> None:
    path = deployed(built, tmp_path / "there")
    file = tmp_path / "there" / "two.safetensors"
    with stagec.load(path, map_weights=False) as bundle:
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
        with pytest.raises(stagec.LoadError, match="it changed since"):
            bundle["shift"](np.zeros(3, np.float32))


@pytest.mark.parametrize("shown", range(1, 5))
def test_a_description_is_of_the_bytes_that_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """Somebody who can write into the file shows another one at one reading of it."""
    path, read, readings = tmp_path / "w.safetensors", RegularFile.read, [0]
    known, contents = {}, []
    for names in ("ab", "ba"):
        places = {name: [8 * place, 8 * place + 8] for place, name in enumerate(names)}
        entries = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in places.items()}
        header = json.dumps(entries).encode()
        contents.append(len(header).to_bytes(8, "little") + header + bytes(range(16)))
        path.write_bytes(contents[-1])
        known[hashlib.sha256(contents[-1]).hexdigest()] = external.describe(path)

    def reading(file: RegularFile, start: int, size: int) -> bytes:
        readings[0] += 1
        with path.open("r+b") as writer:
            writer.write(contents[readings[0] == shown])
        return read(file, start, size)

    monkeypatch.setattr(RegularFile, "read", reading)
    described = external.describe(path)
    assert known.get(described["sha256"], described) == described


def test_explaining_what_runs_needs_no_weights(built: Path, tmp_path: Path) -> None:
    alone = shutil.copy(built, tmp_path)
    assert "args[0]['w'] is parts/w.safetensors:w" in checked("explain", alone, "--function", "apply")


def test_signatures_and_provenance_name_them(built: Path, tmp_path: Path) -> None:
    path = deployed(built, tmp_path / "there")
    statement, sbom = write_provenance(path)
    data = json.loads(statement.read_text())
    digest = Archive(path).index["weights_files"]["two.safetensors"]["sha256"]
    assert {"name": "two.safetensors", "digest": {"sha256": digest}} in data["subject"]
    resolved = data["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {"name": "tests/two.safetensors", "digest": {"sha256": digest}} in resolved
    parts = json.loads(sbom.read_text())["metadata"]["component"]["components"]
    assert {(one["name"], one["hashes"][0]["content"]) for one in parts} >= {("two.safetensors", digest)}
    validators = pytest.importorskip("cyclonedx.validation.json")
    version = pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_7
    assert validators.JsonStrictValidator(version).validate_str(sbom.read_text()) is None
    private, public = write_keys(tmp_path, "key")
    checked("sign", path, "--statement", statement, "--key", private)
    verified = checked("verify", path, "--key", public)
    assert "ok      weights     2 files beside it, each with the digest that the index says\n" in verified
    with stagec.load(path, keys=[public]) as bundle:
        np.testing.assert_array_equal(bundle["apply"](X), X @ W.T + 7)
    save(path.parent, W + 1)
    assert "its sha256 is" in refused(path, keys=[public])


def test_strip_and_diff(built: Path, tmp_path: Path) -> None:
    path = deployed(built, tmp_path / "there")
    stripped = tmp_path / "there" / "stripped.aot"
    checked("strip", path, "--output", stripped)
    assert stagec.load(stripped)["apply"](X).shape == (4, 5)
    other = edited_index(path, tmp_path / "other.aot", _other_digest)
    done = command("diff", path, other)
    assert done.returncode == 1
    assert "weights\n  ~ two.safetensors\n      sha256: " in done.stdout


def _other_digest(index: dict[str, Any]) -> None:
    index["weights_files"]["two.safetensors"]["sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda i: i["weights"]["two.safetensors:two"].update(start=10**6), "behind the end of two.safetensors"),
        (lambda i: i["weights"]["two.safetensors:two"].update(file="x"), "there is no file 'x'"),
        (lambda i: i["weights_files"].update({"../x": i["weights_files"]["two.safetensors"]}), "a path of a"),
        (lambda i: i["weights_files"].update({"x.safetensors": i["weights_files"]["two.safetensors"]}), "array comes"),
        (lambda i: i["weights_files"]["two.safetensors"].pop("bytes"), "the key 'bytes' is missing"),
    ],
)
def test_an_index_with_wrong_files(built: Path, tmp_path: Path, edit: Any, what: str) -> None:
    with pytest.raises(stagec.LoadError) as refusal:
        Archive(edited_index(built, tmp_path / "x.aot", edit))
    assert refusal.value.code == "format"
    assert what in str(refusal.value)


def test_a_file_that_is_external_in_one_place_only(tmp_path: Path) -> None:
    both = MANIFEST.replace('one = { file = "in.safetensors" }', 'one = { file = "two.safetensors" }')
    (tmp_path / "m.toml").write_text(both)
    done = command("action", "plan", "m.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "m.toml: functions.shift.bind.one: "
        "two.safetensors is external in another place of this manifest, and not here\n"
        '  write { file = "two.safetensors", external = true } everywhere\n'
    )


def test_a_bundle_is_written_without_the_weights(tmp_path: Path) -> None:
    """From their descriptions: an edit of the code takes the time of the code."""
    (tmp_path / "m.toml").write_text(MANIFEST)
    (tmp_path / "model.py").write_text(MODEL)
    save(tmp_path)
    path = build("m.toml", tmp_path, tmp_path)
    first = path.read_bytes()
    for file in ("parts/w.safetensors", "two.safetensors"):
        (tmp_path / file).unlink()
    words = ["--name", "zoo", "--version", "1", "--output", path]
    for file in ("parts/w.safetensors", "two.safetensors"):
        words += ["--external-weights", f"{file}={tmp_path / file}.json"]
    words += ["--weights", f"in.safetensors={tmp_path / 'in.safetensors'}"]
    for name in ("zoo.apply", "zoo.shift"):
        exported = tmp_path / f"{name}.exported"
        words += ["--export", f"{name}:{exported}:{tmp_path / name}.spec:{exported}.json"]
    for stem in sorted(tmp_path.glob("zoo.*.xla")):
        base = stem.with_suffix("")
        words += ["--executable", f"{base.name}:{base}.xla:{base}.json:{base}.stablehlo.mlirbc"]
    words += ["--golden", f"zoo.shift={tmp_path / 'zoo.shift.golden'}"]
    checked("action", "bundle", *map(str, words))
    assert path.read_bytes() == first
