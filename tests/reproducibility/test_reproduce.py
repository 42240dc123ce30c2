"""`stagec reproduce`: what it says of artifacts that can be built again, and of those that cannot.

Modules: `cli/reproduce.py`, `audit/reproducibility.py`.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stagec.audit.reproducibility import first_difference
from stagec.backends.cpu import eager
from stagec.hardware import x86
from stagec.patches import another_cpu
from stagec.pjrt import host
from tests.building import build, checked, stagec
from tests.reproducibility.conftest import MANIFEST, MODEL, write

EXPORTS = ("f", "bits")
EXECUTABLES = {"f.cpu.batch3": "f", "bits.cpu": "bits"}
"""Names of executables, and of what they are made of."""
ARTIFACTS = len(EXPORTS) + len(EXECUTABLES)
NO_OTHER_CPU = "this machine can show a build no other CPU: what follows the CPU was not looked for\n"


def reproduce(
    artifacts: Path,
    root: Path,
    *more: str,
    exports: Sequence[str] = EXPORTS,
    executables: Sequence[str] = tuple(EXECUTABLES),
) -> subprocess.CompletedProcess[str]:
    """Reproduce artifacts of the small model: name few, because each is built twice, in new processes."""
    words = []
    for name in exports:
        stem = artifacts / f"m.{name}"
        words += ["--export", f"m.{name}:{stem}.spec:{stem}.exported:{stem}.exported.json"]
    for name in executables:
        stem = artifacts / f"m.{name}"
        words += ["--executable", f"m.{name}:m.{EXECUTABLES[name]}:{stem}.spec:{stem}.xla:{stem}.json"]
    done = stagec("reproduce", *words, "--import-root", root, *more)
    if not eager.can_be_another_machine():  # such as on CPUs of AMD; it is said in a line of its own
        done.stdout = done.stdout.replace(NO_OTHER_CPU, "")
    return done


def test_what_was_built_can_be_built_again(small: Path, tmp_path: Path) -> None:
    """From a checkout with Bazel's links, also to what is gone."""
    root = tmp_path / "source"
    shutil.copytree(small / "source", root)
    (root / "bazel-out").symlink_to(root)
    (root / "gone").symlink_to("nowhere")
    done = reproduce(small, root)
    assert (done.stdout, done.stderr) == (f"{ARTIFACTS} artifacts built twice again, 0 differences\n", "")
    assert done.returncode == 0


def test_another_environment_builds_executables_alone(small: Path, tmp_path: Path) -> None:
    """It cannot trace: the model is not even there."""
    done = reproduce(small, tmp_path, "--executables-only", executables=["bits.cpu"])
    assert (done.stdout, done.stderr) == ("1 artifacts built twice again, 0 differences\n", "")
    assert done.returncode == 0


@pytest.mark.parametrize(
    "value", ["os.getpid()", "open('/dev/urandom', 'rb').read(1)[0] + 0.5", "hash('seed') % 1000 + 0.25"]
)
def test_a_model_that_bakes_in_its_circumstances(small: Path, tmp_path: Path, value: str) -> None:
    model = "import os\n\n" + MODEL.replace("** power", f"** power + jnp.float32({value})")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "model.py").write_text(model)
    done = reproduce(small, tmp_path, exports=["f"], executables=())
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    what = "the built artifact and the first build here differ; the first layer that differs is the StableHLO"
    assert lines[0] == f"m.f.exported: {what}"
    assert any(line.startswith("    +    %cst = stablehlo.constant dense<") for line in lines)
    assert lines[-1] == "1 artifacts built twice again, 1 differences"


def test_a_description_that_is_another(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "copy")
    file = tmp_path / "copy" / "m.f.exported.json"
    file.write_text(file.read_text().replace('"stagec"', '"stage"'))
    done = reproduce(tmp_path / "copy", small / "source", exports=["f"], executables=())
    assert done.returncode == 1
    assert done.stdout.startswith("m.f.exported.json: the built artifact and the first build here differ; ")
    assert '    -  "stage": {\n    +  "stagec": {\n' in done.stdout


def test_an_executable_of_other_code(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "copy")
    spec = json.loads((small / "m.f.cpu.batch3.spec").read_text())
    spec["target"]["compiler_options"] = {"xla_cpu_enable_fast_math": True}
    (tmp_path / "spec").write_text(json.dumps(spec))
    stem = tmp_path / "copy" / "m.f.cpu.batch3"
    checked(
        *("action", "compile", "--spec", tmp_path / "spec", "--exported", small / "m.f.exported"),
        *("--output", f"{stem}.xla", "--description", f"{stem}.json"),
    )
    done = reproduce(tmp_path / "copy", small / "source", "--json", exports=["f"], executables=["f.cpu.batch3"])
    assert done.returncode == 1
    differences = json.loads(done.stdout)["differences"]
    assert differences[0].startswith(
        "m.f.cpu.batch3.xla: the built artifact and the first build here differ; the first"
    )
    assert "compiler_options" in differences[1]


def test_the_layers_of_an_executable(small: Path) -> None:
    whole = (small / "m.f.cpu.batch3.xla").read_bytes()

    def compared(other: bytes) -> tuple[str, list[str]]:
        return first_difference(whole + other, len(whole), "cpu")

    layer, lines = compared((small / "m.bits.cpu.xla").read_bytes())
    assert layer == "optimized HLO"
    assert any(line.startswith("-HloModule jit_f") for line in lines)
    at = whole.rindex(b"\x7fELF") + 0x120
    layer, lines = compared(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert layer == "object code"
    assert any(line.startswith("-") and line.endswith("bytes") for line in lines)
    layer, lines = compared(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert layer == "container"
    assert lines[0].startswith(f"{len(whole):,} and {len(whole):,} bytes, the first that differs is at ")


def test_a_model_that_can_no_longer_be_built(small: Path, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "model.py").write_text("raise RuntimeError('broken')\n")
    done = reproduce(small, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "m.f: building it again in 'a' failed\n  m.toml: functions.f.entry: importing pkg.model"
    )


CPUID = """\
import ctypes
import mmap

# push rbx; mov eax, 7; xor ecx, ecx; cpuid; mov eax, ebx; pop rbx; ret
PAGE = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
PAGE.write(bytes.fromhex("53 b807000000 31c9 0fa2 89d8 5b c3"))
FEATURES = float(ctypes.CFUNCTYPE(ctypes.c_uint32)(ctypes.addressof(ctypes.c_char.from_buffer(PAGE)))())
"""
TABLE = "\n\nTABLE = jnp.tanh(jnp.arange(2.0))\n\n\ndef f"


@pytest.mark.skipif(not another_cpu.possible(), reason="this machine can show a process no other CPU")
def test_what_follows_the_cpu_is_found_and_named(small: Path, tmp_path: Path) -> None:
    """As a library that chooses kernels by itself: here a scalar. What JAX computes is the same on all machines."""
    source = f"{CPUID}{MODEL}".replace("\n\ndef f", TABLE, 1).replace('w["k"])', 'w["k"] * TABLE) * FEATURES')
    root, out = write(tmp_path / "source", source), tmp_path / "out"
    out.mkdir()
    build("m.toml", out, root)
    done = reproduce(out, root, exports=["f"], executables=())
    assert done.returncode == 1, done.stdout + done.stderr
    line = 1 + source[: source.index("return jnp.tanh")].count("\n")
    assert f"\n    the constant tensor<f32>, of pkg/model.py:{line}, was computed to other numbers\n" in done.stdout
    assert done.stdout.startswith("m.f.exported: the built artifact and the second build here differ; ")
    assert done.stdout.count("was computed to other numbers\n    they follow the CPU: ") == 1


def test_what_nobody_promised_is_said(tmp_path: Path) -> None:
    """XLA runs as it is, with its own option for the instruction set: the executable needs what this machine has."""
    model = "import os\n\n" + MODEL.replace("** power", "** power + jnp.float32(os.getpid())")
    manifest = MANIFEST.replace("[manifest]\n", '[manifest]\nexamined = "none"\n')
    root, out = write(tmp_path / "source", model, manifest), tmp_path / "out"
    out.mkdir()
    bundle = build("m.toml", out, root)
    said = 'examined = "none": XLA ran as it is; another machine, or another run, may make other bytes'
    description = out / "m.bits.cpu.json"
    target = json.loads(description.read_text())["target"]
    assert (target["name"], target["isa"], target["examined"]) == ("cpu", "AVX2", "none")
    assert {*x86.ISA["AVX2"].requires} <= {*target["requires"]} <= host.cpu_flags()
    assert not any(flag.startswith(("avx512", "amx")) for flag in target["requires"])
    assert f"  unpromised {said}\n" in checked("inspect", description)
    shown = checked("inspect", bundle)
    assert f"  target cpu: cpu AVX2\n    {said}\n" in shown
    assert re.search(rf"    portable: cpu .*\n      {re.escape(said)}\n", shown)
    done = reproduce(out, root, executables=["bits.cpu"])
    assert done.stderr == ""
    first, *_, last = done.stdout.splitlines()
    assert done.returncode == 0
    assert first == 'nobody promised the same of these: examined = "none"'
    assert done.stdout.count("nobody promised") == 1
    assert last.startswith("3 artifacts built twice again, 0 differences of what is promised, ")
    assert last.endswith('of what examined = "none" built')
    assert "m.f.exported: the built artifact and the first build here differ" in done.stdout
