"""Reading machine code for NVIDIA devices: the same as NVIDIA's tools say, and nothing untyped where it is damaged.

`spilling.sm_90a.cubin` is what ptxas 13.0.88 makes of `spilling("sm_90a")`.

Modules: `backends/gpu/cubins.py`, `backends/gpu/container.py`, `backends/gpu/kernels.py`, `audit/kernels.py`.
"""

import contextlib
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from stagec.audit import kernels as reports
from stagec.backends.gpu import cubins, kernels
from stagec.costs.totals import Runs
from stagec.hardware import cuda as gpus
from stagec.pjrt import packages
from tests.backends.deviceless import compile_again, installed, layer

with_plugin = installed(
    jax_cuda13_pjrt="jax_plugins.xla_cuda13",
    jax_cuda13_plugin="jax_cuda13_plugin",
    nvidia_cuda_nvcc="nvidia.cu13.bin",
    nvidia_nvvm="nvidia.cu13.nvvm",
)
PTXAS, CUOBJDUMP, NVDISASM = (packages.file("nvidia.cu13.bin", name) for name in ("ptxas", "cuobjdump", "nvdisasm"))
with_tools = pytest.mark.skipif(
    not (PTXAS and CUOBJDUMP and NVDISASM), reason="not installed: compiler/cuda_tools.lock"
)
CUBIN = (Path(__file__).parent / "spilling.sm_90a.cubin").read_bytes()
LIVE = 40
DEVICE = gpus.device("h200")


def spilling(target: str, registers: int = 24, local: bool = False) -> str:
    """A kernel with more values than registers, as PTX; local: which also has an array that it indexes at run time."""
    names = [f"%f{i}" for i in range(LIVE)]
    array = "  .local .align 4 .b8 depot[64];\n" if local else ""
    index = "  mov.u64 %rd3, depot;\n  add.s64 %rd3, %rd3, %rd2;\n"
    index += "  st.local.f32 [%rd3], %f1;\n  ld.local.f32 %f2, [%rd3+4];\n"
    loads = "".join(f"  ld.volatile.global.f32 {name}, [%rd1+{4 * i}];\n" for i, name in enumerate(names))
    stores = "".join(
        f"  fma.rn.f32 %f{i}, %f{i}, %f{(i * 7 + 3) % LIVE}, %f{LIVE - 1 - i};\n"
        f"  st.volatile.global.f32 [%rd1+{4 * i}], %f{i};\n"
        for i in reversed(range(LIVE))
    )
    return f""".version 9.0
.target {target}
.address_size 64
.visible .entry spilling(.param .u64 p)
.reqntid 128, 1, 1
.maxnreg {registers}
{{
  .shared .align 4 .b8 buffer[512];
{array}  .reg .f32 %f<{LIVE}>;
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd0, [p];
  cvta.to.global.u64 %rd1, %rd0;
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd2, %r0, 4;
  add.s64 %rd1, %rd1, %rd2;
{loads}{index if local else ""}  mov.u32 %r1, buffer;
  shl.b32 %r2, %r0, 2;
  add.s32 %r1, %r1, %r2;
  st.shared.f32 [%r1], %f3;
  bar.sync 0;
{stores}  ret;
}}
"""


def test_what_a_function_takes() -> None:
    assert cubins.read(CUBIN) == {
        "spilling": cubins.Function(registers=24, stack=200, spills=508, shared=512, barriers=1, threads=128)
    }


@with_tools
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("registers", [24, 40, 128])
def test_ptxas_and_cuobjdump_say_the_same(tmp_path: Path, target: str, registers: int) -> None:
    (tmp_path / "k.ptx").write_text(spilling(target, registers))
    command = [str(PTXAS), "-v", f"-arch={target}", "k.ptx", "-o", "k.cubin"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    stack, stored, loaded = map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", said))
    (read,) = cubins.read((tmp_path / "k.cubin").read_bytes()).values()
    assert (read.stack, read.spills) == (stack, stored + loaded)
    assert read.spills > 0 or registers > 24
    assert f"Used {read.registers} registers, used {read.barriers} barriers" in said
    told = subprocess.run(
        [str(CUOBJDUMP), "-res-usage", "k.cubin"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    of_system = 1024 if target >= "sm_90" or target.startswith("sm_10") else 0
    assert f"REG:{read.registers} STACK:{read.stack} SHARED:{read.shared + of_system} " in told


@with_tools
def test_an_array_that_is_indexed_is_no_spill_where_the_code_says_so(tmp_path: Path) -> None:
    spills = {target: cubins.read(reports.assemble(spilling(target, 128, True))) for target in ("sm_90a", "sm_100a")}
    assert (spills["sm_90a"]["spilling"].spills, spills["sm_90a"]["spilling"].stack) == (0, 64)
    assert spills["sm_100a"]["spilling"].spills == 8  # the most that they can be: docs/costs.md


@with_tools
def test_the_code_of_a_kernel() -> None:
    assert "STL" in reports.sass(CUBIN, "spilling")
    with pytest.raises(ValueError, match="nvdisasm shows no kernel other"):
        reports.sass(CUBIN, "other")
    with pytest.raises(ValueError, match=r"^nvdisasm refuses it: "):
        reports.sass(CUBIN[:2000], "spilling")
    with pytest.raises(ValueError, match=r"^ptxas refuses it: ptxas kernel.ptx, line \d+; "):
        reports.assemble(spilling("sm_90a").replace("bar.sync", "bar.sink"))


def test_what_is_no_machine_code_for_nvidia_devices() -> None:
    for damaged, what in [
        (b"", "it is not machine code for NVIDIA devices"),
        (b"\x7fELF\x02\x01\x01" + CUBIN[7:18] + b"\x3e" + CUBIN[19:], "it is not machine code for NVIDIA devices"),
        (CUBIN[:8] + b"\x07" + CUBIN[9:], "its layout is version 7, and this stagec reads 8"),
        (CUBIN[:4000], "machine code for NVIDIA devices that is damaged"),
    ]:
        with pytest.raises(ValueError, match=f"^{what}$"):
            cubins.read(damaged)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(CUBIN) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(CUBIN)))
def test_damaged_code_is_read_or_refused(edits: list[tuple[int, int]], size: int) -> None:
    data = bytearray(CUBIN)
    for at, byte in edits:
        data[at] = byte
    for code in (bytes(data), bytes(data[:size])):
        with contextlib.suppress(ValueError):
            for function in cubins.read(code).values():
                assert min(function.registers, function.stack, function.spills, function.shared) >= 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    """An executable for an H200, with its optimized HLO."""
    options = {"xla_gpu_enable_triton_gemm": True}  # for a product that is a kernel of XLA's
    compiled = compile_again(tmp_path_factory.mktemp("made"), "cuda", "h200", layer(), compiler_options=options)
    return compiled.executable, compiled.hlo


@with_plugin
def test_the_kernels_of_an_executable(made: tuple[bytes, str]) -> None:
    executable, program = made
    product, *_ = rows = kernels.of(executable, DEVICE, program)
    assert all(f"%{name} = " in program for row in rows for name in row["instructions"])
    assert product["name"].startswith("gemm_fusion_dot")
    assert product["blocks"] * product["threads"] > 0
    assert all(row["spills"] == 0 and 0 < row["registers"] <= 255 and 0 < row["occupancy"] <= 1 for row in rows)
    assert {row["bound"] for row in rows} <= {"launch", "memory", "compute", "occupancy"}
    assert all(row["runs"] == 1 for row in rows)
    code = {row["name"]: reports.code_of(executable, row["name"]) for row in rows}
    with pytest.raises(ValueError, match=f'it has no code of a kernel "none"; it has {", ".join(code)}$'):
        reports.code_of(executable, "none")
    assert {name: cubins.read(code[name])[name].registers for name in code} == {
        row["name"]: row["registers"] for row in rows
    }


@with_plugin
def test_a_damaged_executable_is_read_or_refused(made: tuple[bytes, str]) -> None:
    executable, _ = made

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, len(executable) - 1), st.binary(min_size=1, max_size=8), st.booleans())
    def damaged(at: int, content: bytes, cut: bool) -> None:
        data = executable[:at] + content + (b"" if cut else executable[at + len(content) :])
        with contextlib.suppress(ValueError):
            kernels.of(data, DEVICE)

    damaged()


def test_what_bounds_a_kernel() -> None:
    cores, clock = DEVICE.core_count, DEVICE.clock_rate_ghz * 1e9
    memory = Runs(1, 1e6, 1e8, 0)
    for run_, blocks, wanted in [
        (Runs(1, 10, 100, 0), 1, (1e-6, "launch")),
        (memory, 10_000, (1e8 / DEVICE.memory_bandwidth, "memory")),
        (Runs(1, 1e12, 1e6, 1e12), 10_000, (1e12 / DEVICE.bf16_flops, "compute")),
        # Operations that are not products have slower units.
        (Runs(1, 1e12, 1e6, 0), cores, (1e12 / (cores * 128 * 2 * clock), "compute")),
        # One multiprocessor of 132 has one block.
        (memory, 1, (1e8 / (32 * clock), "occupancy")),
        (Runs(1, 1e12, 1e6, 1e12), cores // 2, (2e12 / DEVICE.bf16_flops, "occupancy")),
        # The last block of 133 is alone.
        (Runs(1, 1e12, 1e6, 1e12), cores + 1, (1e12 / DEVICE.bf16_flops * cores * 2 / (cores + 1), "occupancy")),
    ]:
        told = kernels.bounds(run_, blocks, DEVICE)
        assert told is not None
        assert told == (pytest.approx(wanted[0], rel=0.01), wanted[1])
    assert kernels.bounds(dataclasses.replace(memory, flops=None), 1, DEVICE) is None


def test_modules_of_ptx() -> None:
    both = spilling("sm_90a") + spilling("sm_90a").replace("spilling", "other")
    assert {name: part.count(".entry") for name, part in reports.modules(both).items()} == {"spilling": 1, "other": 1}
    with pytest.raises(ValueError, match=r"^it has no kernel in PTX$"):
        reports.modules("// nothing")
    with pytest.raises(ValueError, match=r"^the PTX does not say for which device it is: "):
        reports.assemble(".version 9.0\n.entry x()")
