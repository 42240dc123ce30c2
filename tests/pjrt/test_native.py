"""The program in C of examples/native calls functions of a bundle, and gives what the loader gives.

Modules: `stages/abi.py`.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

import stagec
from stagec.bundle.description import Description
from stagec.checking import trials
from stagec.core.trees.tree import argument_path
from stagec.pjrt.arrays import dtype_of
from tests.building import ROOT
from tests.bundles import whole_index
from tests.zoo.inputs import cases

PLUGIN = "xla_plugins.xla_cpu_pjrt"
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("xla_plugins"), reason="xla-cpu-pjrt is not installed"),
    pytest.mark.skipif(not COMPILER, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def plugin() -> Path:
    found = importlib.util.find_spec(PLUGIN)
    assert found
    assert found.origin
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def program(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native") / "pjrt_run"
    source = ROOT / "examples" / "native" / "pjrt_run.c"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-isystem", str(plugin / "include")]
    done = subprocess.run([str(COMPILER), *flags, str(source), "-o", str(path), "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


def _paths(description: Description) -> list[str]:
    return list(map(argument_path, description.in_tree.paths()))


@pytest.mark.parametrize(
    ("case", "member"),
    [
        ("mlp_1", "mlp.cpu.batch1"),
        ("loop", "loop.cpu"),
        ("fourier", "fourier.cpu"),
        ("draw", "draw.cpu"),
        ("narrow", "narrow.cpu"),
        ("update", "update.cpu"),
        ("square", "named-square.cpu"),
        ("effectful_5", "effectful.cpu.n5"),
    ],
)
def test_a_function(zoo: Path, plugin: Path, program: Path, tmp_path: Path, case: str, member: str) -> None:
    with zipfile.ZipFile(zoo) as archive:
        description = json.loads(archive.read(f"{member}.json"))
        (tmp_path / "program").write_bytes(archive.read(f"{member}.stablehlo.mlirbc"))
    abi = description["abi"]
    _, args, kwargs = cases()[case]
    with stagec.load(zoo) as bundle:
        function = trials.find(bundle, member.partition(".")[0])
        found = next(one for one in function.descriptions if one.bucket == description["bucket"])
        given_kwargs = {name: value for name, value in kwargs.items() if name not in function.static}
        arguments = dict(zip(_paths(found), found.in_tree.flatten((args, given_kwargs)), strict=True))
        expected = found.out_tree.flatten(function(*args, **given_kwargs))
    words = []
    for number, row in enumerate(abi["parameters"]):
        values = np.asarray(arguments[row["path"]])
        assert values.shape == tuple(row["shape"])
        (tmp_path / f"in.{number}").write_bytes(values.tobytes())
        words.append(f"{row['dtype']}{json.dumps(row['shape'], separators=(',', ':'))}=in.{number}")
    library = str(plugin / "xla_cpu_pjrt.so")
    command = [str(program), library, "program", "out", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("out.*"))) == len(abi["results"]) == len(expected)
    for number, (row, aval, wanted) in enumerate(zip(abi["results"], found.out_avals, expected, strict=True)):
        given = np.frombuffer((tmp_path / f"out.{number}").read_bytes(), dtype_of(aval)).reshape(row["shape"])
        if given.dtype.kind in "biu":
            np.testing.assert_array_equal(given, wanted)
        else:
            wide = np.complex128 if given.dtype.kind == "c" else np.float64
            tolerance = 1e-2 if given.dtype.itemsize == 2 else 1e-5
            np.testing.assert_allclose(given.astype(wide), np.asarray(wanted).astype(wide), tolerance, tolerance)


def test_bound_weights_are_members(zoo: Path, plugin: Path, program: Path, tmp_path: Path) -> None:
    """Index and binary interface say which arguments the bundle has, and the members are what the program reads."""
    with zipfile.ZipFile(zoo) as archive:
        index = whole_index({name: archive.read(name) for name in ("index.json", "functions.jsonl")})
        function = index["functions"]["from_file"]
        (entry,) = function["executables"]
        (tmp_path / "program").write_bytes(archive.read(entry["stablehlo"]))
        description = json.loads(archive.read(entry["description"]))
        weights = {one["leaf"]: index["weights"][one["weight"]] for one in function["bind"]}
        x, words = np.arange(2, dtype=np.float32), []
        for leaf in description["kept_var_idx"]:
            values = archive.read(weights[leaf]["member"]) if leaf in weights else x.tobytes()
            (tmp_path / f"in.{leaf}").write_bytes(values)
            words.append(f"{function['in_avals'][leaf]}=in.{leaf}")
        assert len(words) == len(description["abi"]["parameters"]) == len(weights) + 1
    command = [str(program), str(plugin / "xla_cpu_pjrt.so"), "program", "out", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with stagec.load(zoo) as bundle:
        np.testing.assert_allclose(np.fromfile(tmp_path / "out.0", np.float32), bundle["from_file"](x), rtol=1e-6)


def test_arrays_in_other_layouts(plugin: Path, program: Path, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("""
        func.func @main(%x: tensor<4x3xf32> {mhlo.layout_mode = "{0,1}"}, %y: tensor<4x3xf32>)
            -> (tensor<4x3xf32> {mhlo.layout_mode = "{0,1}"}, tensor<4x3xf32>) {
          %0 = stablehlo.subtract %x, %y : tensor<4x3xf32>
          return %0, %0 : tensor<4x3xf32>, tensor<4x3xf32>
        }""")
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    (tmp_path / "x").write_bytes(x.T.tobytes())  # by columns, as the page says
    (tmp_path / "y").write_bytes((x**2).tobytes())
    words = [str(program), str(plugin / "xla_cpu_pjrt.so"), "program", "out", "f32[4,3]=x", "f32[4,3]=y"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_columns, by_rows = (np.fromfile(tmp_path / f"out.{number}", np.float32) for number in (0, 1))
    np.testing.assert_array_equal(by_columns.reshape(3, 4).T, x - x**2)
    np.testing.assert_array_equal(by_rows.reshape(4, 3), x - x**2)


def test_what_the_page_says(zoo: Path, plugin: Path, tmp_path: Path) -> None:
    _, (params, x), _ = cases()["mlp_4"]
    for name, values in (("b", params["b"]), ("w", params["w"]), ("x", x)):
        (tmp_path / f"{name}.bin").write_bytes(values.tobytes())
    (tmp_path / "zoo.aot").symlink_to(zoo)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = (ROOT / "docs" / "without-python.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    environment = {"PJRT": str(plugin), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-e", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = np.fromfile(tmp_path / "y.0", np.float32).reshape(4, 4)
    with stagec.load(zoo) as bundle:
        np.testing.assert_allclose(given, bundle["mlp"](params, x), rtol=1e-5, atol=1e-6)


def test_mistakes_are_told(plugin: Path, program: Path, tmp_path: Path) -> None:
    library = str(plugin / "xla_cpu_pjrt.so")
    (tmp_path / "program").write_bytes(b"no module")
    (tmp_path / "x").write_bytes(b"1234")

    def said(*words: str) -> str:
        done = subprocess.run([str(program), *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr

    assert said("x") == "pjrt_run: usage: pjrt_run PLUGIN.so PROGRAM OUT AVAL=FILE...\n"
    assert said("libc.so.6", "program", "out") == "pjrt_run: libc.so.6: not a PJRT plugin: it has no GetPjrtApi\n"
    assert said(library, "program", "out").startswith("pjrt_run: PJRT_Client_Compile: ")
