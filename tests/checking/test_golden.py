"""Golden inputs and outputs: made by JAX, stored, stripped, and compared with what executables give.

Modules: `bundle/writing.py`, `cli/actions/golden.py`, `cli/strip.py`, `frontends/jax/evaluation.py`,
`frontends/golden_arrays.py`, `checking/golden.py`, `core/sizes/tolerances.py`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from stagec.bundle.archive import Archive
from stagec.checking import golden
from stagec.core.sizes.tolerances import tolerances
from tests.building import COMPILER, build, checked, stagec as command
from tests.bundles import edited, edited_descriptions, whole_index, with_index

MANIFEST = """
[manifest]
name = "m"
version = "1"

[targets.cpu]
platform = "cpu"
isa = "AVX2"

[functions.draw]
entry = "model:draw"
args = ["key<fry>[]", { w = "f32[3]" }, "bf16[n,3]"]
bind = { params = "w.safetensors" }
targets = ["cpu"]
buckets = { n = [4, 1] }
golden = { seed = 3, atol = 1e-6 }

[functions.double]
entry = "double.mlir"
targets = ["cpu"]
golden = {}

[meshes.grid]
axes = { data = 2, model = 2 }

[functions.sharded]
entry = "model:sharded"
args = [{ w = "bf16[4,6]", b = "f32[6]" }, "f32[n,4]", "key<fry>[]"]
mesh = "grid"
in_shardings = [{ w = "P(None, model)", b = "P(model)" }, "P(data)", "P()"]
out_shardings = ["P(data, model)", "P()"]
targets = ["cpu"]
buckets = { n = [2, 4] }
constraints = ["n % 2 == 0"]
[functions.sharded.golden]
inputs = "inputs/sharded.npz"
bucket = { n = 4 }
"""
MODEL = """
import jax
from jax.sharding import PartitionSpec as P

AXES = ("data", "model")

def sharded(params, x, key):
    y = jax.lax.with_sharding_constraint(x @ params["w"] + params["b"], P("data", "model"))
    total = jax.shard_map(lambda part: jax.lax.psum(part.sum(), AXES), in_specs=P(*AXES), out_specs=P())
    return [y, total(y) + jax.random.uniform(key)]

def draw(key, params, x):
    return {"y": jax.random.normal(key, x.shape) + x * params["w"], "key": jax.random.split(key)[0]}
"""
INPUTS = {
    "args[0]['b']": np.arange(6, dtype=np.float32),
    "args[0]['w']": np.ones((4, 6), jax.numpy.bfloat16),
    "args[1]": np.eye(4, dtype=np.float32),
    "args[2]": np.array([0, 7], np.uint32),
}
MODULE = """
func.func @main(%arg0: tensor<2xi64>) -> tensor<2xi64> {
  %0 = stablehlo.add %arg0, %arg0 : tensor<2xi64>
  return %0 : tensor<2xi64>
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    (folder / "m.toml").write_text(MANIFEST)
    (folder / "model.py").write_text(MODEL)
    (folder / "double.mlir").write_text(MODULE)
    save_file({"w": np.full(3, 7, np.float32)}, folder / "w.safetensors")
    (folder / "inputs").mkdir()
    np.savez(folder / "inputs" / "sharded.npz", **INPUTS)
    return build("m.toml", folder, folder)


def test_they_are_in_the_index(built: Path) -> None:
    found = Archive(built).index["functions"]["draw"]["golden"]
    assert found["bucket"] == {"n": 1}
    assert {path: row["aval"] for path, row in found["inputs"].items()} == {"args[0]": "u32[2]", "args[2]": "bf16[1,3]"}
    outputs = {path: (row["aval"], row["atol"], "rtol" in row) for path, row in found["outputs"].items()}
    assert outputs == {"result['key']": ("u32[2]", 1e-6, False), "result['y']": ("f32[1,3]", 1e-6, False)}


@pytest.mark.parametrize(
    ("aval", "platform", "usual"),
    [
        ("u32[2]", "tpu", 0),
        ("f32[1,3]", "", 2**-11.5),
        ("f32[1,3]", "cpu", 2**-11.5),
        ("f32[1,3]", "cuda", 2**-5),  # TF32
        ("c64[1,3]", "cuda", 2**-5),
        ("f32[1,3]", "tpu", 2**-3.5),  # bfloat16
        ("f64[1,3]", "cuda", 2**-26),
        ("f16[1,3]", "tpu", 2**-5),
    ],
)
def test_what_a_device_rounds_is_allowed(aval: str, platform: str, usual: float) -> None:
    assert tolerances({"aval": aval}, platform) == (usual, usual)
    assert tolerances({"aval": aval, "rtol": 3.0}, platform) == (3.0, usual)


def test_executables_give_the_same(built: Path) -> None:
    told = checked("run", built, "--golden").splitlines()
    pattern = r"ok      (.*): largest error \S+, relative \S+; allowed .*"
    assert [re.sub(pattern, r"\1", line) for line in told] == [
        "double for cpu: result",
        "draw for cpu, n = 1: result['key']",
        "draw for cpu, n = 1: result['y']",
        "sharded for cpu, n = 4: result[0]",
        "sharded for cpu, n = 4: result[1]",
    ]
    assert len(checked("run", built, "double", "--golden").splitlines()) == 1


def test_inputs_are_those_of_the_file(built: Path) -> None:
    archive = Archive(built)
    found = archive.index["functions"]["sharded"]["golden"]
    assert found["bucket"] == {"n": 4}
    avals = {"args[0]['b']": "f32[6]", "args[0]['w']": "bf16[4,6]", "args[1]": "f32[4,4]", "args[2]": "u32[2]"}
    assert {path: row["aval"] for path, row in found["inputs"].items()} == avals
    for path, row in found["inputs"].items():
        assert bytes(archive[row["member"]]) == INPUTS[path].tobytes()
    first = np.frombuffer(archive[found["outputs"]["result[0]"]["member"]], np.float32).reshape(4, 6)
    np.testing.assert_array_equal(first, 1 + np.tile(np.arange(6), (4, 1)))


def refused(built: Path, tmp_path: Path, function: str, **arrays: np.ndarray) -> str:
    """Give `stagec action golden` a file of inputs for a function; return what it says."""
    np.savez(tmp_path / "given.npz", **arrays)
    name = built.with_name(f"m.{function}")
    spec = json.loads(Path(f"{name}.spec").read_text())
    spec["golden"]["inputs"] = "inputs/given.npz"
    (tmp_path / "spec").write_text(json.dumps(spec))
    options = ("--exported", f"{name}.exported", "--description", f"{name}.exported.json", "--output", tmp_path / "out")
    weights = ("--weights", f"w.safetensors={built.parent / 'w.safetensors'}") if spec["bind"] else ()
    done = command(
        "action", "golden", "--spec", tmp_path / "spec", *options, *weights, "--inputs", tmp_path / "given.npz"
    )
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    return done.stderr


def test_inputs_that_are_not_what_the_function_takes(built: Path, tmp_path: Path) -> None:
    arrays = INPUTS | {"args[0]['b']": np.zeros(5, np.float32), "args[1]": np.eye(4), "arg[2]": INPUTS["args[2]"]}
    del arrays["args[2]"]
    assert refused(built, tmp_path, "sharded", **arrays) == dedent("""\
        m.toml: functions.sharded.golden.inputs: args[0]['b'] of inputs/given.npz is f32[5]; expected f32[6]
          save it with this dtype and shape, or name another bucket
        m.toml: functions.sharded.golden.inputs: args[1] of inputs/given.npz is f64[4,4]; expected f32[4,4]
          save it with this dtype and shape, or name another bucket
        m.toml: functions.sharded.golden.inputs: inputs/given.npz lacks args[2] (u32[2])
          save it under this name
        m.toml: functions.sharded.golden.inputs: inputs/given.npz has arg[2], which is not an argument
          did you mean "args[2]"?
        """)
    bound = {"args[1]['w']": np.zeros(3, np.float32), "args[2]": np.zeros((1, 3), jax.numpy.bfloat16)}
    assert refused(built, tmp_path, "draw", **bound, **{"args[0]": np.zeros(2, np.uint32)}) == dedent("""\
        m.toml: functions.draw.golden.inputs: inputs/given.npz has args[1]['w'], which is bound to weights
          leave it out of the file
        """)
    pickled = refused(built, tmp_path, "double", **{"args[0]": np.array([{}, {}])})
    assert pickled == f"{tmp_path / 'given.npz'}: not an .npz file of plain arrays\n  write it with numpy.savez\n"


def change(members: dict[str, bytes]) -> None:
    """Have the golden result `y` differ by 1 in its first element."""
    index = whole_index(members)
    row = index["functions"]["draw"]["golden"]["outputs"]["result['y']"]
    values = np.frombuffer(members[row["member"]], np.float32).copy()
    values[0] += 1
    members[row["member"]] = values.tobytes()
    members.update(with_index(index, members))


def test_a_difference_is_told(built: Path, tmp_path: Path) -> None:
    done = command("run", edited(built, tmp_path / "m.aot", change), "draw", "--golden")
    assert done.returncode == 1
    found = done.stdout.splitlines()
    assert re.fullmatch(
        r"FAILED  draw for cpu, n = 1: result\['y'\]: largest error 1, relative \S+; "
        r"allowed 1e-06 \+ 0.000345 \* \|value\|",
        found[1],
    )
    assert re.fullmatch(r"          \[0, 0\] is \S+; expected \S+", found[2])
    assert len(found) == 3  # the other elements are equal


def test_a_target_of_another_machine_is_skipped(built: Path, tmp_path: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        description["target"]["requires"] = ["warp_drive"]

    foreign = edited_descriptions(built, tmp_path / "m.aot", "draw", change)
    done = command("run", foreign, "--golden")
    assert done.returncode == 2
    assert "SKIPPED double, draw, sharded for cpu: " in done.stderr
    skipped = checked("run", foreign, "--golden", "--allow-skipped")
    assert re.fullmatch(r"SKIPPED double, draw, sharded for cpu: .* warp_drive.*\n", skipped)
    (other,) = json.loads(checked("run", foreign, "--golden", "--allow-skipped", "--json"))["skipped"]
    assert (other["target"], other["functions"]) == ("cpu", ["double", "draw", "sharded"])
    assert command("run", built, "--golden", "--platform", "tpu", "--allow-skipped").returncode == 2


def test_bazel_gets_a_test_case_for_each_result(built: Path, tmp_path: Path) -> None:
    xml = tmp_path / "test.xml"
    done = command("run", edited(built, tmp_path / "m.aot", change), "--golden", env={"XML_OUTPUT_FILE": str(xml)})
    assert done.returncode == 1
    suite = ElementTree.parse(xml).getroot()
    assert (suite.tag, suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("testsuite", "5", "1", "0")
    (failed,) = suite.iter("failure")
    assert "[0, 0] is" in failed.get("message", "")


def test_a_result_has_its_own_tolerance(built: Path, tmp_path: Path) -> None:
    for name in ("model.py", "double.mlir", "w.safetensors"):
        (tmp_path / name).write_bytes((built.parent / name).read_bytes())
    own = """{ "result['y']" = { rtol = 0.5 }, "result['key']" = { atol = 3 } }"""
    text = MANIFEST.partition("[functions.double]")[0].replace("atol = 1e-6 }", f"atol = 1e-6, outputs = {own} }}")
    (tmp_path / "m.toml").write_text(text)
    found = Archive(build("m.toml", tmp_path, tmp_path)).index["functions"]["draw"]["golden"]["outputs"]
    outputs = {path: (row.get("rtol"), row["atol"]) for path, row in found.items()}
    assert outputs == {"result['key']": (None, 3), "result['y']": (0.5, 1e-6)}
    spec = json.loads((tmp_path / "m.draw.spec").read_text())
    spec["golden"]["outputs"] = {"result['x']": {"rtol": 1, "atol": None}}
    (tmp_path / "spec").write_text(json.dumps(spec))
    options = ("--exported", tmp_path / "m.draw.exported", "--description", tmp_path / "m.draw.exported.json")
    weights = ("--weights", f"w.safetensors={tmp_path / 'w.safetensors'}", "--output", tmp_path / "out")
    done = command("action", "golden", "--spec", tmp_path / "spec", *options, *weights)
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert done.stderr == (
        "m.toml: functions.draw.golden.outputs: there is no result['x']\n  did you mean \"result['y']\"?\n"
    )


def test_the_largest_deviations_have_their_indices() -> None:
    wanted = np.zeros((2, 3), np.float32)
    given = wanted + np.array([[0, 1, 4], [2, 3, 0]], np.float32)
    found = list(golden.deviations(given, wanted, 0, 1))
    assert [(one.index, one.given) for one in found] == [((0, 2), "4.0"), ((1, 1), "3.0"), ((1, 0), "2.0")]
    given[0, 0] = np.nan
    assert next(golden.deviations(given, wanted, 0, 1)).as_text() == "[0, 0] is nan; expected 0.0"
    first = np.array([2**62, 5], np.int64)
    (one,) = golden.deviations(first, first + np.array([1, 0]), 0, 0)
    assert one.as_text() == f"[0] is {2**62}; expected {2**62 + 1}"
    assert list(golden.deviations(wanted, wanted.copy(), 0, 0)) == []


def test_stripped_it_is_as_built_without(built: Path, tmp_path: Path) -> None:
    without = re.sub("golden = .*\n", "", MANIFEST.partition("[functions.sharded.golden]")[0])
    for name in ("model.py", "double.mlir", "w.safetensors"):
        (tmp_path / name).write_bytes((built.parent / name).read_bytes())
    (tmp_path / "m.toml").write_text(without)
    checked("strip", built, "--output", tmp_path / "stripped.aot")
    assert (tmp_path / "stripped.aot").read_bytes() == build("m.toml", tmp_path, tmp_path).read_bytes()
    done = command("run", tmp_path / "stripped.aot", "--golden")
    assert done.returncode == 2
    assert done.stderr == (
        f"{tmp_path / 'stripped.aot'}: no golden inputs for what runs on this machine\n"
        "  write golden = {} for it in the manifest\n"
    )


CUT_OFF = """
import os, sys
from stagec.bundle.safetensors import read
from stagec.bundle.writing import strip
from stagec.bundle.archive import Archive
from stagec.bundle.members import pieces

bundle, weights = sys.argv[1:]
members = strip(Archive(bundle))
os.truncate(bundle, os.path.getsize(bundle) // 2)
try:
    list(pieces(members))
except Exception as error:
    print(error)
(tensor,) = read(weights).values()
os.truncate(weights, os.path.getsize(weights) - 1)
try:
    list(pieces({"weights": tensor.data}))
except Exception as error:
    print(error)
"""


def test_files_that_are_cut_off_while_they_are_copied(built: Path, tmp_path: Path) -> None:
    """Mapped, they would end the process with SIGBUS."""
    files = [shutil.copy(path, tmp_path) for path in (built, built.parent / "w.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", CUT_OFF, *files],
        env={"PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{files[0]}: it was cut off while it was open",
        f"w of {files[1]} changed while it was read",
    ]


def test_of_a_damaged_bundle_no_stripped_one_is_written(built: Path, tmp_path: Path) -> None:
    archive = Archive(built)
    name = next(name for name in archive.index["members"] if name.endswith(".xla"))
    damaged = Path(shutil.copy(built, tmp_path / "damaged.aot"))
    with damaged.open("r+b") as file:
        file.seek(archive._entries[name].start)
        file.write(b"damaged")
    done = command("strip", damaged, "--output", tmp_path / "stripped.aot")
    assert (done.returncode, f"{name} is not what the index says" in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.aot"]


@pytest.mark.parametrize(
    ("given", "wanted", "ok"),
    [
        ([1, np.nan, np.inf], [1, np.nan, np.inf], True),
        ([1, np.nan, np.inf], [1, np.inf, np.nan], False),
        ([1, 2, np.nan], [1, 2, 3], False),
        ([1, 2, 3.0001], [1, 2, 3], True),
        ([1, 2, 3.1], [1, 2, 3], False),
        ([1, 2], [1, 2, 3], False),
        ([], [], True),
    ],
)
def test_what_is_the_same(given: list[float], wanted: list[float], ok: bool) -> None:
    errors = golden.errors(np.array(given, np.float32), np.array(wanted, np.float32), 1e-3, 1e-3)
    assert errors[2] is ok


def test_integers_are_equal_or_not() -> None:
    first, second = np.array([2**62], np.int64), np.array([2**62 + 1], np.int64)
    assert golden.errors(first, first.copy(), 0, 0)[2]
    assert not golden.errors(first, second, 0, 0)[2]
