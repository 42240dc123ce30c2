"""Compiling for named CPUs: the same bytes every time, and what is refused.

Modules: `backends/cpu/compiler.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from stagec.backends.cpu import compiler as cpu
from stagec.core.builds import naming
from stagec.hardware import x86
from stagec.manifest.cpu import Isa
from stagec.pjrt import compatibility, host
from tests.building import action_environment, stagec
from tests.patches.test_machine_code import run

FUNCTIONS = ("loop", "factorize", "draw", "mlp")


def compile_again(zoo: Path, out: Path, name: str, **changes: Any) -> tuple[int, str, Path, Path]:
    """Compile an executable of the zoo into `out`, its target changed; return status, stderr and both outputs."""
    spec = json.loads((zoo.parent / f"{name}.spec").read_text())
    spec["target"] |= changes
    (out / "spec").write_text(json.dumps(spec))
    function = spec["function"]
    xla, description = out / "x.xla", out / "x.json"
    done = stagec(
        *("action", "compile", "--spec", out / "spec", "--exported", zoo.parent / f"zoo.{function}.exported"),
        *("--output", xla, "--description", description),
        env={"TZ": "Asia/Tokyo", "HOME": str(out), "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
    )
    return done.returncode, done.stderr, xla, description


@pytest.mark.parametrize("name", ["zoo.loop.cpu", "zoo.factorize.cpu", "zoo.draw.cpu", "zoo.mlp.cpu.batch4"])
def test_a_second_build_gives_the_same_bytes(zoo: Path, tmp_path: Path, name: str) -> None:
    status, stderr, xla, description = compile_again(zoo, tmp_path, name)
    assert (status, stderr) == (0, "")
    assert xla.read_bytes() == (zoo.parent / f"{name}.xla").read_bytes()
    assert description.read_bytes() == (zoo.parent / f"{name}.json").read_bytes()


ONE_AFTER_ANOTHER = """
import gc, json, sys
from stagec.cli import main
for arguments in json.load(sys.stdin):
    assert main(arguments) == 0
    gc.collect()
"""


def test_one_process_gives_the_bytes_of_many(zoo: Path, tmp_path: Path) -> None:
    """XLA numbers the modules of a process."""
    names, actions = [path.stem for path in sorted(zoo.parent.glob("zoo.*.xla"))], []
    specs = {name: json.loads((zoo.parent / f"{name}.spec").read_text()) for name in names}
    names = [name for name in names if specs[name]["target"]["name"] == "cpu"]
    for name in names:
        exported = f"zoo.{naming.artifact(specs[name]['function'], specs[name]['variant'])}.exported"
        words = ["--spec", f"{zoo.parent}/{name}.spec", "--exported", f"{zoo.parent}/{exported}"]
        actions.append(
            [
                "action",
                "compile",
                *words,
                "--output",
                f"{tmp_path}/{name}.xla",
                "--description",
                f"{tmp_path}/{name}.json",
            ]
        )
    subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER],
        input=json.dumps(actions),
        env={**os.environ, **action_environment()},
        check=True,
        text=True,
    )
    assert len(names) > 10
    for name in names:
        for end in ("xla", "json"):
            assert (tmp_path / f"{name}.{end}").read_bytes() == (zoo.parent / f"{name}.{end}").read_bytes(), name


def test_the_isa_decides_the_code(zoo: Path, tmp_path: Path) -> None:
    _, _, xla, description = compile_again(zoo, tmp_path, "zoo.loop.cpu", isa="SSE4_2")
    target = json.loads(description.read_text())["target"]
    assert (target["isa"], target["device_kind"]) == ("SSE4_2", "nehalem")
    assert cpu.stored_cpu_name(xla.read_bytes()) == "nehalem"
    assert cpu.stored_cpu_name((zoo.parent / "zoo.loop.cpu.xla").read_bytes()) == "haswell"


def test_what_the_build_machine_has_besides_is_not_stored(zoo: Path) -> None:
    stored = cpu.stored_features((zoo.parent / "zoo.loop.cpu.xla").read_bytes())
    assert stored == x86.ISA["AVX2"].features


def test_an_executable_for_avx512_loads_without_a_word(zoo: Path, tmp_path: Path) -> None:
    if "avx512vl" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("XLA tells machines that lack AVX-512 so, and rightly")
    status, stderr, xla, _ = compile_again(zoo, tmp_path, "zoo.loop.cpu", isa="AVX512")
    assert (status, stderr) == (0, "")
    load = (
        "import sys; from jaxlib import _jax, xla_client; client = xla_client.make_cpu_client(num_devices=1); "
        "devices = _jax.DeviceList((client.local_devices()[0],)); "
        "client.deserialize_executable(open(sys.argv[1], 'rb').read(), devices)"
    )
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", load, str(xla)], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_description_says_what_it_costs(zoo: Path) -> None:
    description = json.loads((zoo.parent / "zoo.mlp.cpu.batch4.json").read_text())
    assert description["cost_analysis"]["flops"] > 2 * 4 * 16 * 4
    assert description["memory_analysis"]["argument_size_in_bytes"] >= 4 * (16 * 4 + 4 + 4 * 16)
    assert sorted(json.loads((zoo.parent / "zoo.factorize.cpu.json").read_text())["custom_calls"]) == [
        "lapack_sgesdd_ffi",
        "lapack_sgetrf_ffi",
        "lapack_spotrf_ffi",
        "lapack_ssyevd_ffi",
        "lapack_strsm_ffi",
    ]


def test_an_option_that_xla_does_not_know(zoo: Path, tmp_path: Path) -> None:
    status, stderr, xla, _ = compile_again(zoo, tmp_path, "zoo.loop.cpu", compiler_options={"xla_cpu_no_such": True})
    assert status == 2
    assert stderr.startswith("tests/zoo/zoo.toml: targets.cpu.compiler_options.xla_cpu_no_such: ")
    assert not xla.exists()


def test_an_option_that_xla_knows(zoo: Path, tmp_path: Path) -> None:
    options = {"xla_cpu_enable_fast_math": True}
    status, stderr, xla, _ = compile_again(zoo, tmp_path, "zoo.mlp.cpu.batch4", compiler_options=options)
    assert (status, stderr) == (0, "")
    assert xla.read_bytes() != (zoo.parent / "zoo.mlp.cpu.batch4.xla").read_bytes()


def test_hardware_that_is_not_here(zoo: Path, tmp_path: Path) -> None:
    status, stderr, xla, description = compile_again(zoo, tmp_path, "zoo.loop.cpu", isa="AMX_FP16")
    assert (status, stderr) == (0, "")
    assert cpu.stored_cpu_name(xla.read_bytes()) == "graniterapids"
    assert "amx_fp16" in json.loads(description.read_text())["target"]["requires"]


AS_IT_IS = """
import dataclasses
def refuse(*_): raise AssertionError("code is changed")
machine_code.patched = refuse
known_builds.rows = list
def as_it_is(isa):
    target = CpuTarget("t", isa, 2, {}, examined="none")
    os.environ.update(cpu.environment(target))
    with mlir.make_context():
        return cpu.compile_module(ir.Module.parse(TEXT), target)
"""


def test_none_takes_a_build_that_nobody_knows() -> None:
    found = run(f"""{AS_IT_IS}
from stagec.pjrt import clients
import numpy as np
from stagec.pjrt.executable import Executable
made = as_it_is("AVX2")
x = np.arange(64, dtype=np.uint8)
spec = (x.shape, x.dtype)
loaded = Executable.load(made.executable, [spec], [spec], [], clients.devices())
(y,) = loaded.run([loaded.put(0, x)])
print(json.dumps([made.hardware.device_kind, y.numpy().tolist()]))
""")
    kind, values = found
    assert kind == "haswell" or kind.startswith("znver")  # XLA's option hides what is newer, but not whose CPU it is
    assert values == [number << 3 & 255 for number in range(64)]


@pytest.mark.parametrize(
    ("isa", "more", "refused"),
    [
        ("AVX2", ["avxvnni", "gfni", "vaes"], []),
        ("AVX2", ["gfni", "avx512f", "amx-tile"], ["amx-tile", "avx512f"]),
        ("AVX", ["avx2", "avxvnni"], ["avx2"]),
        ("AVX512", ["avx512fp16", "avx512vnni"], ["avx512vnni"]),
        ("AMX", ["amx-complex", "amx-fp16"], ["amx-fp16"]),
    ],
)
def test_none_refuses_what_the_option_of_xla_should_have_hidden(
    isa: str, more: list[str], refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = x86.ISA[isa]
    monkeypatch.setattr(cpu, "stored_cpu_name", lambda _: "newer")
    monkeypatch.setattr(cpu, "stored_features", lambda _: wanted.features | {*more})
    what = f"newer, not for {wanted.cpu_name}; with {', '.join(refused)}" if refused else ""
    assert cpu._seen_instead(b"", wanted, as_it_is=True) == what


def test_none_refuses_a_build_with_other_messages() -> None:
    found = run(f"""{AS_IT_IS}
other = {{**known_builds.JAXLIB.messages, "xla.cpu.CompilationResultProto": {{"object_files": (9,)}}}}
known_builds.LIBRARIES = {{cpu._LIBRARY: dataclasses.replace(known_builds.JAXLIB, messages=other)}}
try: as_it_is("AVX2")
except cpu.CannotCompile as error: print(json.dumps([error.key, str(error), error.write]))
""")
    assert found == [
        "",
        f"this build of libjax_common.so, of jaxlib {compatibility.version()}, writes other messages than those that "
        "are known",
        "xla.cpu.CompilationResultProto has object_files at (8,), not at (9,)",
    ]


LACKING = [name for name, isa in x86.ISA.items() if host.cpu_refusal(isa.requires, host.cpu_flags())]


@pytest.mark.skipif(not LACKING, reason="this machine's CPU has all instruction sets")
def test_none_refuses_the_cpu_of_another_machine() -> None:
    isa = LACKING[0]
    found = run(f"""{AS_IT_IS}
try: as_it_is("{isa}")
except cpu.CannotCompile as error: print(json.dumps([error.key, str(error), error.write]))
""")
    missing = ", ".join(sorted({*x86.ISA[isa].requires} - host.cpu_flags()))
    what = f'examined = "none" cannot build for {isa} here: this machine\'s CPU has no {missing}'
    write = 'build it on a machine with the target\'s CPU, or take examined = "none" out of [manifest]'
    assert found == ["isa", what, write]


def test_the_manifest_knows_the_same_instruction_sets() -> None:
    assert get_args(Isa) == tuple(x86.ISA)
