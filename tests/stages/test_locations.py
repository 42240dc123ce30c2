"""XLA's errors, when a bundle is loaded or called, name the lines of the model where `.debug.mlir` is at hand.

Modules: `cli/inspect.py`, `cli/actions/locations.py`, `frontends/common/source_locations.py`.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import stagec
from stagec.stages import locations
from tests.building import build, checked, stagec as command, write_specs
from tests.signed import write_keys, write_provenance

MODEL = """\
import jax
import jax.numpy as jnp


def ranked(x):
    return jnp.sort(jnp.arange(1 << 24, dtype=x.dtype)[:, None] * x, axis=0)


def big(x):
    return ranked(x) + 1


def twice(x):
    y = squashed(x)
    return squashed(y + 1)


def squashed(x):
    return jnp.tanh(x)


@jax.jit
def step(carry, x):
    return squashed(carry * x), carry


def scanned(x):
    return jax.lax.scan(step, x[0], x)[0]


def foreign(x, *, target):
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
"""
# Cholesky's custom call has two results: this module wants one of it, which XLA only finds out when it is run.
MODULE = """\
module @wrong {
  func.func public @main(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {
    %0 = stablehlo.custom_call @lapack_spotrf_ffi(%a) {
      api_version = 4 : i32, mhlo.backend_config = {uplo = 76 : ui8}
    } : (tensor<4x4xf32>) -> tensor<4x4xf32>
    return %0 : tensor<4x4xf32>
  }
}
"""
SEND = """\
module @sends {
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
    %t = stablehlo.create_token : !stablehlo.token
    %0 = "stablehlo.send"(%a, %t) {
      channel_handle = #stablehlo.channel_handle<handle = 5, type = 2>, is_host_transfer = true
    } : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
    return %a : tensor<4xf32>
  }
}
"""
HEADER = """\
[manifest]
name = "m"
version = "1"

[targets.cpu]
platform = "cpu"
isa = "AVX2"
parallelism = 2
"""
FUNCTION = '\n[functions.{name}]\nentry = "{entry}"\ntargets = ["cpu"]\n'
MANIFEST = (
    HEADER
    + FUNCTION.format(name="big", entry="pkg.model:big")
    + 'args = ["f32[16777216]"]\n'
    + FUNCTION.format(name="twice", entry="pkg.model:twice")
    + 'args = ["f32[batch]"]\nbuckets = { batch = [3] }\n'
    + FUNCTION.format(name="scanned", entry="pkg.model:scanned")
    + 'args = ["f32[8,3]"]\n'
    + FUNCTION.format(name="wrong", entry="wrong.mlir")
)


def debug(manifest: str, name: str, root: Path, out: Path) -> Path:
    """Export what the spec `name` in `out` says with its locations; return the file."""
    file = out / f"{name}.debug.mlir"
    checked("action", "locations", "--spec", out / f"{name}.spec", "--output", file, "--import-root", root, cwd=root)
    return file


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the bundle; the files of locations are in its folder `debug`."""
    out, root = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("source")
    (root / "pkg").mkdir()
    (root / "pkg" / "model.py").write_text(MODEL)
    (root / "wrong.mlir").write_text(MODULE)
    (root / "m.toml").write_text(MANIFEST)
    build("m.toml", out, root)
    (out / "debug").mkdir()
    for name in ("m.big", "m.twice", "m.scanned", "m.wrong"):
        debug("m.toml", name, root, out).rename(out / "debug" / f"{name}.debug.mlir")
    return out


@pytest.fixture
def bundle(artifacts: Path, tmp_path: Path) -> Path:
    """The bundle, with the locations of its functions beside it."""
    shutil.copytree(artifacts / "debug", tmp_path, dirs_exist_ok=True)
    return Path(shutil.copy(artifacts / "m.aot", tmp_path))


def test_memory_that_is_not_there_names_the_largest_arrays(bundle: Path) -> None:
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED: Out of memory") as raised:
        stagec.load(bundle)["big"](np.ones(1 << 24, np.float32))
    (note,) = raised.value.__notes__
    assert note.startswith("what it is about, by m.big.debug.mlir:\njit(big)/")
    assert "  pkg/model.py:6 in ranked\n  pkg/model.py:10 in big" in note


def test_a_custom_call_that_fails_names_its_place(bundle: Path) -> None:
    with pytest.raises(RuntimeError, match="Wrong number of results: expected 2 but got 1") as raised:
        stagec.load(bundle)["wrong"](np.eye(4, dtype=np.float32))
    (note,) = raised.value.__notes__
    assert note.splitlines()[:2] == [
        "what it is about, by m.wrong.debug.mlir:",
        "custom_call (custom call lapack_spotrf_ffi)",
    ]
    assert note.splitlines()[2] == "  wrong.mlir:3"


def test_the_largest_results_of_a_program() -> None:
    hlo = """\
HloModule jit_f
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4,1024]{1,0} parameter(0), metadata={op_name="x"}
  %huge = f32[9999,9999]{1,0} broadcast(%x), dimensions={0}
  %s = (f32[4,100]{1,0}, s32[4,100]{1,0}) sort(%x, %x), metadata={op_type="sort" op_name="jit(f)/sort"}
  %h = pred[1024]{0} compare(%s, %s), direction=EQ, metadata={op_name="jit(f)/eq"}
  ROOT %y = bf16[4,512]{1,0} fusion(%h), kind=kLoop, calls=%f, metadata={op_name="jit(f)/add"}
}
"""
    assert locations.largest(hlo) == ["jit(f)/add", "jit(f)/sort"]
    assert locations.largest(hlo.replace("4,512", "4,5")) == ["jit(f)/sort"]
    assert locations.largest("") == []


def test_without_the_file_there_is_no_note(artifacts: Path) -> None:
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        stagec.load(artifacts / "m.aot")["big"](np.ones(1 << 24, np.float32))
    assert not hasattr(raised.value, "__notes__")


def test_a_file_that_is_no_module_is_told(bundle: Path) -> None:
    file = bundle.with_name("m.big.debug.mlir")
    file.write_text("module {")
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        stagec.load(bundle)["big"](np.ones(1 << 24, np.float32))
    (note,) = raised.value.__notes__
    assert note.startswith(f"{file}: not a StableHLO module: ")


def test_a_file_that_ends_what_reads_it_ends_no_server(bundle: Path) -> None:
    # So deeply nested that MLIR's parser overflows its stack.
    file = bundle.with_name("m.big.debug.mlir")
    file.write_text("module {" * 100_000)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        stagec.load(bundle)["big"](np.ones(1 << 24, np.float32))
    assert raised.value.__notes__ == [f"{file}: what reads it ended with SIGSEGV"]


def test_with_keys_a_file_that_nobody_signed_is_not_read(bundle: Path) -> None:
    statement, _ = write_provenance(bundle)
    private, public = write_keys(bundle.parent, "ann")
    checked("sign", bundle, "--statement", statement, "--key", private)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        stagec.load(bundle, keys=[public])["big"](np.ones(1 << 24, np.float32))
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(("name", "shape"), [("twice", (3,)), ("scanned", (8, 3))])
def test_every_name_in_the_optimized_program_has_a_line(bundle: Path, name: str, shape: tuple[int, ...]) -> None:
    operations = locations.read(bundle.with_name(f"m.{name}.debug.mlir").read_text())
    function = stagec.load(bundle)[name]
    function(np.zeros(shape, np.float32))
    (signature,) = function._of[""]._signatures._values.values()
    assert signature.executable is not None
    program = signature.executable.loaded.hlo_modules()[0].to_string()
    names = {named for named in re.findall(r'op_name="([^"]*)"', program) if "/" in named}  # others are arguments
    assert len(names) >= 2
    for named in names:
        found = locations.locate(named, operations)
        assert {one.name for one in found} == {named}
        assert all(one.frames[-1].function == name for one in found)


def test_no_location_is_of_stagecs_own_files(artifacts: Path) -> None:
    for file in sorted((artifacts / "debug").iterdir()):
        frames = [frame for one in locations.read(file.read_text()) for frame in one.frames]
        module = file.name == "m.wrong.debug.mlir"
        assert {frame.file for frame in frames} == {"wrong.mlir" if module else "pkg/model.py"}
        assert {frame.function for frame in frames} <= {"", "ranked", "big", "twice", "squashed", "step", "scanned"}


def test_locate_tells_the_call_stacks(artifacts: Path) -> None:
    file = artifacts / "debug" / "m.twice.debug.mlir"
    said = """\
jit(twice)/tanh
  pkg/model.py:19 in squashed
  pkg/model.py:14 in twice
jit(twice)/tanh
  pkg/model.py:19 in squashed
  pkg/model.py:15 in twice
"""
    for text in ("jit(twice)/tanh", "INTERNAL: at %tanh.5 = f32[3]{0} tanh(%x)", "HLO opcode `tanh` is not supported"):
        assert checked("inspect", file, "--locate", text) == said
    report = json.loads(checked("inspect", "--json", file, "--locate", "jit(twice)/add"))
    assert report == {
        "operations": [
            {
                "name": "jit(twice)/add",
                "opcode": opcode,
                "target": "",
                "frames": [{"file": "pkg/model.py", "line": 15, "function": "twice"}],
            }
            for opcode in (operation["opcode"] for operation in report["operations"])
        ]
    }
    assert "add" in {operation["opcode"] for operation in report["operations"]}


def test_locate_finds_nothing(artifacts: Path) -> None:
    file = artifacts / "debug" / "m.twice.debug.mlir"
    for text in ("jit(twice)/ta", "jit(twice)/tanh/more", "tanh2", "the ge of it", "RESOURCE_EXHAUSTED: 12 bytes"):
        done = command("inspect", file, "--locate", text)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"{file}: no operation in this file matches the text\n"


def test_locate_in_a_file_that_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    done = command("inspect", "x", "--locate", "jit(f)/tanh", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("x: not a StableHLO module: ")
    assert done.stderr.endswith("\n  give a file of output group debug\n")


@pytest.mark.parametrize(
    ("entry", "keys", "name", "place"),
    [
        (
            "pkg.model:foreign",
            'args = ["f32[4]"]\nstatic = { target = "no_such" }\nallow_custom_calls = ["no_such"]\n',
            "jit(foreign)/ffi_call",
            "jit(foreign)/ffi_call (custom call no_such)\n  pkg/model.py:32 in foreign\n",
        ),
        ("send.mlir", "", "send", "send\n  send.mlir:4\n"),
    ],
)
def test_a_program_that_xla_refuses_to_compile(tmp_path: Path, entry: str, keys: str, name: str, place: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "model.py").write_text(MODEL)
    (tmp_path / "send.mlir").write_text(SEND)
    (tmp_path / "m.toml").write_text(HEADER + FUNCTION.format(name="f", entry=entry) + keys)
    write_specs("m.toml", tmp_path, tmp_path)
    checked("action", "export", "--spec", "m.f.spec", "--output", "f.exported", "--import-root", ".", cwd=tmp_path)
    words = ["--spec", "m.f.cpu.spec", "--exported", "f.exported", "--output", "f.xla", "--description", "f.json"]
    done = command("action", "compile", *words, cwd=tmp_path)
    assert done.returncode == 2
    what, about, how = done.stderr.splitlines()
    assert what.startswith("m.toml: functions.f: XLA refuses the module: ")
    assert about == f"  it is about {name}; to see the lines, build the function with --output_groups=debug and write"
    assert how.startswith("  stagec inspect FILE.debug.mlir --locate ")
    file = debug("m.toml", "m.f", tmp_path, tmp_path)
    # One of stagec's functions binds the static argument.
    assert not re.search(r"bound|user_code\.py|jax\.py|cli\.py", file.read_text())
    assert checked("inspect", file, "--locate", name) == place
    assert checked("inspect", file, "--locate", what) == place
