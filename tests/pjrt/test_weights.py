"""Arguments that a bundle has the data of: built into it, left out of calls, shared by all functions.

Modules: `bundle/binding.py`, `frontends/declarations.py`.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagec
from stagec.bundle.archive import Archive
from tests.building import COMPILER, build, checked, stagec as command
from tests.bundles import edited_index

MANIFEST = """
[manifest]
name = "m"
version = "1"

[targets.cpu]
platform = "cpu"
isa = "AVX2"

[functions.apply]
entry = "model:apply"
args = [{ w = "f32[5,3]", b = ["f32[5]"] }, "f32[n,3]", "f32[]"]
bind = { params = "w.safetensors", scale = { file = "other.safetensors", prefix = "scales.1" } }
targets = ["cpu"]
buckets = { n = [1, 4] }
padding = { n = {} }

[functions.plus]
entry = "model:plus"
args = ["f32[5]"]
kwargs = { p = { w = "f32[5,3]" } }
bind = { p = "w.safetensors" }
targets = ["cpu"]

[functions.shift]
entry = "model:shift"
args = ["f32[5,3]", "f32[5]", "f32[]"]
bind = { w = "w.safetensors" }
targets = ["cpu"]

[functions.double]
entry = "double.mlir"
bind = { "args[0]" = { file = "w.safetensors", prefix = "w" } }
targets = ["cpu"]
"""
MODEL = """
def apply(params, x, scale):
    return x @ params["w"].T * scale + params["b"][0]


def plus(x, *, p):
    return x + p["w"].sum(axis=1)


def shift(w, x, by):
    return w.sum(axis=1) * x + by
"""
MODULE = """
func.func @main(%arg0: tensor<5x3xf32>) -> tensor<5x3xf32> {
  %0 = stablehlo.add %arg0, %arg0 : tensor<5x3xf32>
  return %0 : tensor<5x3xf32>
}
"""
W = np.arange(15, dtype=np.float32).reshape(5, 3)
B = np.full(5, 7, np.float32)
X = np.ones((4, 3), np.float32)


def sources(folder: Path, manifest: str = MANIFEST, **arrays: np.ndarray) -> None:
    (folder / "m.toml").write_text(manifest)
    (folder / "model.py").write_text(MODEL)
    (folder / "double.mlir").write_text(MODULE)
    save_file(arrays or {"w": W, "b.0": B}, folder / "w.safetensors")
    save_file({"scales.1": np.array(2, np.float32), "unused": B}, folder / "other.safetensors")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    sources(folder)
    return build("m.toml", folder, folder)


def test_explain_tells_what_is_bound(built: Path) -> None:
    text = checked("explain", built, "--function", "apply")
    assert text.splitlines()[-3:] == [
        "  args[0]['b'][0] is w.safetensors:b.0   f32[5]    20 bytes",
        "  args[0]['w'] is w.safetensors:w        f32[5,3]  60 bytes",
        "  args[2] is other.safetensors:scales.1  f32[]     4 bytes",
    ]
    (function,) = json.loads(checked("explain", built, "--function", "plus", "--json"))["functions"]
    wanted = {"path": "kwargs['p']['w']", "weight": "w.safetensors:w", "aval": "f32[5,3]", "bytes": 60}
    assert function["bound"] == [wanted]


def test_bound_arguments_are_left_out(built: Path) -> None:
    with stagec.load(built) as bundle:
        apply = bundle["apply"]
        np.testing.assert_array_equal(apply(X), X @ W.T * 2 + B)
        np.testing.assert_array_equal(apply(X[:3]), X[:3] @ W.T * 2 + B)
        np.testing.assert_array_equal(bundle["plus"](B), B + W.sum(axis=1))
        np.testing.assert_array_equal(bundle["double"](), 2 * W)
        assert bundle.select("apply", ["f32[4,3]"]).chosen is not None
        # Given all the same: the caller's is used.
        np.testing.assert_array_equal(apply({"w": -W, "b": [B]}, X, np.float32(1)), X @ -W.T + B)
        np.testing.assert_array_equal(bundle["plus"](B, p={"w": -W}), B - W.sum(axis=1))
        assert list(apply.weights) == ["args[0]['b'][0]", "args[0]['w']", "args[2]"]
    with pytest.raises(stagec.CallError) as refusal:
        apply(X)
    assert refusal.value.code == "closed"


def test_results_are_numpy_arrays_unless_the_caller_gives_device_arrays(built: Path) -> None:
    bundle = stagec.load(built)
    assert isinstance(bundle["apply"](X), np.ndarray)
    assert not isinstance(bundle["apply"](stagec.device_put(X)), np.ndarray)


def test_another_number_of_arguments(built: Path) -> None:
    with pytest.raises(stagec.CallError) as refusal:
        stagec.load(built)["apply"](X, X)
    what = "expected 1 positional arguments without the bound params, scale, or 3 with it; 2 are given"
    rows = """
  the call is apply([params], x, [scale], /) -> f32[n,5]
    params       dict  bound to w.safetensors
    params.b     list of 1
    params.b[0]  f32[5]
    params.w     f32[5,3]
    x            f32[n,3]
    scale        f32[]  bound to other.safetensors"""
    assert (refusal.value.code, str(refusal.value)) == ("structure", f"apply: {what}{rows}")


def test_an_array_is_stored_once_and_shared(built: Path) -> None:
    archive = Archive(built)
    assert [name for name in archive.index["members"] if name.startswith("weights/")] == sorted(
        {f"weights/{weight['member'].removeprefix('weights/')}" for weight in archive.index["weights"].values()}
    )
    assert {name: weight["aval"] for name, weight in archive.index["weights"].items()} == {
        "other.safetensors:scales.1": "f32[]",
        "w.safetensors:b.0": "f32[5]",
        "w.safetensors:w": "f32[5,3]",
    }
    bundle = stagec.load(built)
    shared = {id(bundle[name].weights[path]) for name, path in (("apply", "args[0]['w']"), ("double", "args[0]"))}
    assert len(shared) == 1


def test_a_number_beside_weights_is_that_of_its_call(built: Path) -> None:
    """Such calls are remembered by the kinds of their arguments, and not by a number's value or class."""
    shift = stagec.load(built)["shift"]
    for by in (1, 2.5, np.float32(3), np.asarray(4, np.float32), 5, True, 6.5):
        for x in (B, B + 1):
            np.testing.assert_array_equal(shift(x, by), W.sum(axis=1) * x + np.float32(by))
    with pytest.raises(stagec.CallError):
        shift(B, 1j)
    with pytest.raises(stagec.CallError):
        shift(B[:4], 1)


def test_the_portable_artifact_takes_them_too(built: Path, tmp_path: Path) -> None:
    def drop(index: dict[str, Any]) -> None:
        index["functions"]["plus"]["executables"] = []

    bundle = stagec.load(edited_index(built, tmp_path / "m.aot", drop))
    np.testing.assert_array_equal(bundle["plus"](B), B + W.sum(axis=1))


def test_the_command_line_knows_of_them(built: Path) -> None:
    assert "  weights: 3 arrays, 84 bytes\n" in checked("inspect", built)
    told = json.loads(checked("run", built, "double", "--random", "--json"))
    assert told["results"]["result"]["maximum"] == 28


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda index: index["weights"]["w.safetensors:w"].update(member="x"), "there is no member 'x'"),
        (
            lambda index: index["weights"]["w.safetensors:w"].update(aval="f32[5,4]"),
            "weights.w.safetensors:w: f32[5,4] takes 80 bytes, and the member has others",
        ),
        (
            lambda index: index["weights"]["w.safetensors:w"].update(aval="f32[3,5]"),
            "functions.apply.bind[1]: the argument is f32[5,3], the weight f32[3,5]",
        ),
        (lambda index: index["functions"]["apply"]["bind"].pop(0), "an argument is bound in part"),
        (lambda index: index["functions"]["apply"]["bind"].reverse(), "expected sorted numbers of 4 arguments"),
        (lambda index: index["functions"]["apply"]["bind"][2].update(leaf=4), "sorted numbers of 4 arguments"),
        (lambda index: index["functions"]["plus"]["bind"][0].update(weight="x"), "there is no weight 'x'"),
        (
            lambda index: index["functions"]["plus"].update(in_tree={"tuple": ["*", "*"]}),
            "in_tree is not of (args, kwargs)",
        ),
    ],
)
def test_an_index_that_binds_something_else(
    built: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], what: str
) -> None:
    with pytest.raises(stagec.LoadError) as refusal:
        Archive(edited_index(built, tmp_path / "m.aot", edit)).check_all()
    assert refusal.value.code == "format"
    assert what in str(refusal.value)


def test_a_damaged_weight_is_refused_at_the_first_call(built: Path, tmp_path: Path) -> None:
    data = built.read_bytes()
    at = data.index(W.tobytes())
    (tmp_path / "m.aot").write_bytes(data[:at] + b"\1" + data[at + 1 :])
    bundle = stagec.load(tmp_path / "m.aot")
    with pytest.raises(stagec.LoadError) as refusal:
        bundle["apply"](X)
    assert refusal.value.code == "digest"


MAPPED = """
import os, sys
import numpy as np
import stagec
from stagec.bundle.archive import Archive

path, map_weights, change = sys.argv[1], sys.argv[2] == "True", sys.argv[3]
bundle = stagec.load(path, map_weights=map_weights)
x = np.ones((4, 3), np.float32)
before = np.asarray(bundle["apply"](x))
archive = Archive(path)
if change == "replaced":  # as stagec and careful people do
    with open(path + ".new", "wb") as file:
        file.write(b"another bundle")
    os.replace(path + ".new", path)
elif change == "overwritten":
    with open(path, "r+b") as file:
        for weight in archive.index["weights"].values():
            entry = archive._entries[weight["member"]]
            file.seek(entry.start)
            file.write(np.full(entry.size // 4, 100, np.float32).tobytes())
else:
    os.truncate(path, 10)
print("same" if np.array_equal(before, np.asarray(bundle["apply"](x))) else "other")
"""


@pytest.mark.parametrize(
    ("map_weights", "change", "what"),
    [
        (True, "replaced", "same"),
        (True, "overwritten", "other"),
        (True, "cut off", "SIGBUS"),
        (False, "replaced", "same"),
        (False, "overwritten", "same"),
        (False, "cut off", "same"),
    ],
)
def test_a_file_that_changes_after_its_weights_were_checked(
    built: Path, tmp_path: Path, map_weights: bool, change: str, what: str
) -> None:
    """What docs/security.md promises: a file may be replaced; nobody may write into one whose weights are mapped."""
    bundle = shutil.copy(built, tmp_path)
    search = ":".join([str(COMPILER), *sys.path])
    words = [sys.executable, "-c", MAPPED, bundle, str(map_weights), change]
    done = subprocess.run(words, env={"PYTHONPATH": search}, capture_output=True, text=True)
    ended = signal.Signals(-done.returncode).name if done.returncode < 0 else done.stdout.strip()
    assert ended == what, done.stderr


def words(built: Path) -> list[str | Path]:
    """The arguments of the bundle command for the function `apply`, without its weights."""
    stem = built.parent / "m.apply"
    return ["--name", "m", "--version", "1", "--export", f"m.apply:{stem}.exported:{stem}.spec:{stem}.exported.json"]


def test_everything_that_is_wrong_with_weights_is_told(built: Path, tmp_path: Path) -> None:
    save_file({"w": W.T.copy(), "b": B, "c": B}, tmp_path / "w")
    save_file({"scales.1": np.array(2, np.float16)}, tmp_path / "o")
    given = ["--weights", f"w.safetensors={tmp_path / 'w'}", "--weights", f"other.safetensors={tmp_path / 'o'}"]
    done = command("action", "bundle", *words(built), *given, "--output", tmp_path / "m.aot")
    assert done.returncode == 2
    assert done.stderr == (
        "m.toml: functions.apply.bind.params: w of w.safetensors is f32[3,5]; expected f32[5,3]\n"
        "  save it with this dtype and shape, or change the aval\n"
        "m.toml: functions.apply.bind.params: w.safetensors lacks b.0 (f32[5])\n"
        "  save it under this name\n"
        "m.toml: functions.apply.bind.scale: scales.1 of other.safetensors is f16[]; expected f32[]\n"
        "  save it with this dtype and shape, or change the aval\n"
        "m.toml: functions.apply.bind.params: w.safetensors has b, c, and nothing is bound to that\n"
        "  leave it out of the file, or write a prefix\n"
    )


def test_files_that_are_no_weights(built: Path, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"x")
    for path, what in ((tmp_path / "w", "not a safetensors file: the header runs"), (tmp_path / "x", "cannot be read")):
        done = command(
            "action", "bundle", *words(built), "--weights", f"w.safetensors={path}", "--output", tmp_path / "m.aot"
        )
        assert (done.returncode, done.stderr.startswith(f"{path}: {what}")) == (2, True), done.stderr


def test_arguments_that_cannot_be_bound(tmp_path: Path) -> None:
    sources(tmp_path, MANIFEST.replace("{ params =", "{ parms =").replace("scale = {", '"args[1]" = {'))
    spec = json.loads(checked("action", "plan", "m.toml", "--json", cwd=tmp_path))["exports"][0]["spec"]
    spec |= {"donate_argnames": ["x"]}
    (tmp_path / "spec").write_text(json.dumps(spec))
    done = command("action", "export", "--spec", "spec", "--output", "out", "--import-root", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(  # after JAX's own warning
        "m.toml: functions.apply.bind.args[1]: a bound argument is used by every call, and cannot be donated\n"
        "  take it out of donate_argnums and donate_argnames, or do not bind it\n"
        "m.toml: functions.apply.bind.parms: model:apply has no argument 'parms'\n"
        '  did you mean "params"?\n'
    )


SCRIPT = """
import sys
import stagec

def anonymous():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024

bundle = stagec.load(sys.argv[1])
before = anonymous()
first = bundle["total"]()
print(anonymous() - before, float(first), float(bundle["total"]()))
"""


def test_a_large_array_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    # 100 MB: the device's memory on a CPU is the mapped file.
    header, _, _ = MANIFEST.partition("[functions.")
    function = 'entry = "model:total"\nargs = ["f32[25000000]"]\ntargets = ["cpu"]\nbind = { x = "large.safetensors" }'
    (tmp_path / "m.toml").write_text(f"{header}[functions.total]\n{function}\n")
    (tmp_path / "model.py").write_text("def total(x):\n    return x.sum()\n")
    save_file({"x": np.ones(25_000_000, np.float32)}, tmp_path / "large.safetensors")
    path = build("m.toml", tmp_path, tmp_path)
    search = ":".join([str(COMPILER), *sys.path])
    done = subprocess.run([sys.executable, "-c", SCRIPT, path], env={"PYTHONPATH": search}, capture_output=True)
    assert done.returncode == 0, done.stderr
    grown, first, second = done.stdout.split()
    assert int(grown) < 50e6  # XLA's own
    assert float(first) == float(second) == 25e6
