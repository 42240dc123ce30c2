"""Compiling for AMD devices on a machine without one, and without ROCm: devices, meshes, equal bytes, kernels.

Modules: `backends/gpu/amd.py`, `backends/gpu/stubs.py`, `backends/gpu/code_objects.py`.
"""

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import msgpack
import pytest

from stagec.backends.gpu import code_objects, compiler, container, cubins, kernels, stubs
from stagec.core.data import elf, gpu_executables, riegeli, wire
from stagec.hardware import gpu_devices, rocm
from tests.backends.deviceless import OVERLAPPING, compile_again, compile_elsewhere, installed, layer, run
from tests.backends.test_riegeli import SIGNATURE

with_plugin = installed(jax_rocm7_pjrt="jax_plugins.xla_rocm7", jax_rocm7_plugin="jax_rocm7_plugin")

MESH = {"data": 4, "model": 2}
TRITON = {"xla_gpu_enable_triton_gemm": True}
"""XLA's own kernels for products, where there are no results of autotuning."""


@with_plugin
@pytest.mark.parametrize("name", rocm.devices())
def test_a_function_for_one_device(tmp_path: Path, name: str) -> None:
    made = compile_again(tmp_path, "rocm", name, layer())
    assert made.refused == ("", "", "")
    device = rocm.device(name)
    assert (made.device, made.jax) == (device.name, False)
    assert made.cost is not None
    assert made.memory is not None
    assert re.search(r"custom_call_target=\"__cublas\$(lt\$matmul|gemm)\"", made.hlo)  # it has the flops
    assert made.memory["argument_size_in_bytes"] == 4 * (256 * 512 + 512 * 512)
    assert made.memory["peak_memory_in_bytes"] >= made.memory["argument_size_in_bytes"]
    parts = {part: (data, text) for part, data, text in compiler.layers(made.executable)}
    assert parts["optimized HLO"][1].startswith("HloModule jit_layer")
    for launch in container.launches(made.executable):
        assert launch.code is not None
        # What LLVM's linker writes of the processor: its name is a string of the note.
        assert device.compute_capability.encode() in launch.code
        assert code_objects.are_in(launch.code)


@with_plugin
def test_a_sharded_function_has_a_collective_and_its_part_of_the_arguments(tmp_path: Path) -> None:
    made = compile_again(tmp_path, "rocm", "mi300x", layer(MESH), tuple(MESH.values()), topology="1x1x8")
    assert made.refused == ("", "", "")
    assert "all-reduce" in made.hlo
    assert made.memory is not None
    assert made.memory["argument_size_in_bytes"] == 4 * (64 * 256 + 256 * 512)
    two_hosts = compile_again(tmp_path, "rocm", "mi355x", layer({"data": 8, "model": 2}), (8, 2), topology="1x2x8")
    assert (two_hosts.refused, "all-reduce" in two_hosts.hlo) == (("", "", ""), True)


@with_plugin
@pytest.mark.parametrize(
    ("module", "mesh"),
    [(layer(), ()), (layer(MESH), (4, 2)), (OVERLAPPING, (4, 2))],
    ids=["one", "eight", "overlapping"],
)
def test_another_process_makes_the_same_bytes(tmp_path: Path, module: str, mesh: tuple[int, ...]) -> None:
    env = {"ROCM_PATH": "/nowhere", "PATH": "/nowhere"}
    first = compile_elsewhere(tmp_path, "rocm", "mi300x", module, mesh, env=env, topology="1x1x8" if mesh else "1x1x1")
    assert compiler.canonicalize(first.executable) == first.executable


@with_plugin
def test_nothing_of_the_build_machine_is_stored(tmp_path: Path) -> None:
    made = compile_again(tmp_path, "rocm", "mi300x", layer())
    *_, rest = gpu_executables.parts(made.executable)
    (cpu,) = wire.find(rest, container.FIELDS["cpu_target_machine_options.cpu"])
    assert cpu == b"x86-64-v2"
    stored = b"".join(data for _, data, _ in compiler.layers(made.executable))
    for name in (os.fsencode(tmp_path), b"site-packages", b"stagec-", b"/tmp"):
        assert name not in stored


@with_plugin
def test_the_mark_behind_the_code_follows_the_whole_executable(tmp_path: Path) -> None:
    made = [compile_again(tmp_path, "rocm", "mi300x", layer(rows=rows)).executable for rows in (256, 512)]
    marks = []
    for executable in made:
        records = gpu_executables.parts(executable)
        (code,) = (record for record in records if code_objects.are_in(record))
        marks.append(code[code_objects.size(code) :])
        bare = [record[: code_objects.size(record)] for record in _records(executable)]
        digest = hashlib.sha256(b"".join(hashlib.sha256(record).digest() for record in bare)).digest()
        assert marks[-1] == digest[:16]
    assert marks[0] != marks[1]


def _records(executable: bytes) -> list[bytes]:
    """All records of an executable, the manifest among them."""
    _, body = wire.delimited(executable)
    (file,) = (one for one in wire.find(body, gpu_executables.EXECUTABLE) if one.startswith(riegeli.SIGNATURE))
    return list(riegeli.records(file))


@with_plugin
def test_the_kernels_of_an_executable(tmp_path: Path) -> None:
    made = compile_again(tmp_path, "rocm", "mi300x", layer(), compiler_options=TRITON)
    rows = kernels.of(made.executable, rocm.device("mi300x"), made.hlo)
    (gemm,) = (row for row in rows if "gemm" in row["name"])
    assert 0 < gemm["registers"] <= 512
    assert 0 < gemm["shared_memory"] <= 65536
    assert (gemm["spills"], gemm["stack"], gemm["runs"]) == (0, 0, 1)
    assert 0 < gemm["occupancy"] <= 1
    assert gemm["limited_by"] in ("registers", "shared memory", "threads")
    assert gemm["seconds"] > 0
    registers = {row["name"]: row["registers"] for row in rows}
    for launch in container.launches(made.executable):
        assert launch.code is not None
        taken = _descriptor(launch.code, launch.function)
        # LLVM takes more where shared memory lets fewer wavefronts run: they are free then.
        most = 512 if launch.function == gemm["name"] else registers[launch.function] + 8
        assert registers[launch.function] <= taken < most
        _compare(tmp_path, launch.code)


def _compare(folder: Path, code: bytes) -> None:
    """Compare what is read of a code object with what others read."""
    (note,) = (section for section in elf.sections(code) if section.name == ".note")
    content = code[note.content]
    name, size, _ = struct.unpack_from("<III", content)
    start = 12 + (name + 3 & ~3)
    theirs = msgpack.unpackb(content[start : start + size])["amdhsa.kernels"]
    assert {kernel[".name"]: _function(kernel) for kernel in theirs} == code_objects.read(code)
    if shutil.which("llvm-readobj"):
        (folder / "code").write_bytes(code)
        told = subprocess.run(
            ["llvm-readobj", "--notes", "code"], cwd=folder, capture_output=True, text=True, check=True
        )
        for key in (".vgpr_count", ".vgpr_spill_count", ".group_segment_fixed_size", ".private_segment_fixed_size"):
            numbers = [
                int(number) for number in re.findall(rf"^ *{re.escape(key)}: *(\d+)$", told.stdout, re.MULTILINE)
            ]
            assert numbers == [kernel[key] for kernel in theirs]


def _function(kernel: dict[str, int]) -> cubins.Function:
    spills, shared = 4 * kernel[".vgpr_spill_count"], kernel[".group_segment_fixed_size"]
    return cubins.Function(kernel[".vgpr_count"], kernel[".private_segment_fixed_size"], spills, shared, 0, None)


def _descriptor(code: bytes, name: str) -> int:
    """Return the vector registers of a kernel descriptor, what the hardware reads.

    https://llvm.org/docs/AMDGPUUsage.html#kernel-descriptor: bits 5:0 of compute_pgm_rsrc1, in units of 8 for gfx942.
    """
    sections = {section.name: section for section in elf.sections(code)}
    symbols, names = code[sections[".symtab"].content], code[sections[".strtab"].content]
    for title, _, _, _, value, _ in struct.iter_unpack("<IBBHQQ", symbols):
        if elf.text(names, title) == f"{name}.kd":
            (rsrc1,) = struct.unpack_from("<I", code, value + 0x30)  # .rodata lies where it does in the file
            return 8 * ((int(rsrc1) & 0x3F) + 1)
    raise LookupError(name)


_DESCRIBE = """
import sys
from stagec.backends import plugins
from stagec.backends.gpu import amd, compiler, descriptions
from stagec.hardware import catalog, rocm
compiler.prepare_process(catalog.target("mi300x"))
amd.register_custom_calls()
from jaxlib import _jax
described = {"target_config": amd.target_config(rocm.device(sys.argv[1])), "topology": "1x1x1"}
topology = _jax.get_default_c_api_topology("rocm", "", described)
sys.stdout.write(descriptions.as_toml(descriptions.properties(topology.target_config)))
"""


@with_plugin
@pytest.mark.parametrize("name", ["mi210", "mi355x", "rx9070"])
def test_what_xla_says_of_a_device_is_read_back(tmp_path: Path, name: str) -> None:
    done = run(_DESCRIBE, name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    described = tomllib.loads(done.stdout)
    assert described["source"].startswith("what ROCm reports; ")
    assert gpu_devices.read("rocm", described) == rocm.device(name)


@with_plugin
def test_there_is_no_library_of_mosaic(tmp_path: Path) -> None:
    ask = "\nimport os\nos.write(2, os.environ.get('MOSAIC_GPU_RUNTIME_LIB_PATH', 'none').encode())"
    done = run(f"{_DESCRIBE}{ask}", "mi210", cwd=tmp_path)
    assert done.stderr.endswith("none")


@with_plugin
@pytest.mark.parametrize("name", ["mi300x", "rx7900xtx"])
def test_without_results_hipblaslt_chooses(tmp_path: Path, name: str) -> None:
    made = compile_again(tmp_path, "rocm", name, layer(dtype="bf16"))
    assert "__cublas$lt$matmul" in made.hlo
    assert "triton" not in made.hlo


TIMED_ON = "ROCM: gfx942, Cores: 304, GPU clock: 2.1 GHz, Memory bandwidth: 5300 GB/s, L2 cache: 4 MB"
KERNEL = r"""{\n  tmp_0 = bf16[256,2,256]{2,1,0} parameter(0)\n  tmp_1 = bf16[2,256,512]{2,1,0} parameter(1)\n"""
KERNEL += r"""  ROOT tmp_2 = f32[2,256,512]{2,1,0} dot(bf16[256,2,256]{2,1,0} tmp_0, bf16[2,256,512]{2,1,0} tmp_1), """
KERNEL += r"""lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}\n}"""
TILES = "block_m: 64 block_n: 32 block_k: 32 num_stages: 3 num_warps: 4 num_ctas: 1"
RESULTS = f"""
version: 3
results {{ device: "{TIMED_ON}, DNN version: 3.5.0" hlo: "{KERNEL}" result {{ triton {{ {TILES} }} }} version: 45 }}
"""


@with_plugin
def test_results_of_autotuning_are_an_input(tmp_path: Path) -> None:
    module = layer(rows=256, dtype="bf16")
    incomplete = {"xla_gpu_require_complete_aot_autotune_results": False}
    timed = compile_again(tmp_path, "rocm", "mi300x", module, autotuning=RESULTS, compiler_options=incomplete)
    assert timed.refused == ("", "", "")
    assert '"output_tiles":[{"sizes":["1","64","32"]}]' in timed.hlo
    default = compile_again(tmp_path, "rocm", "mi300x", module, compiler_options=TRITON)
    assert '"output_tiles":[{"sizes":["1","32","16"]}]' in default.hlo
    assert timed.executable != default.executable
    what, key, _ = compile_again(tmp_path, "rocm", "mi300x", layer(rows=512, dtype="bf16"), autotuning=RESULTS).refused
    assert (what.startswith("it has no result for %"), key) == (True, "autotuning")
    what, key, _ = compile_again(tmp_path, "rocm", "mi355x", module, autotuning=RESULTS).refused
    assert (what.startswith(f"results[0].device: timed on {TIMED_ON}"), key) == (True, "autotuning")


def test_a_stub_is_a_library_whose_functions_fail(tmp_path: Path) -> None:
    (tmp_path / "libx.so").write_bytes(stubs.library("libsome.so.5", ["hipInit", "hipMalloc", "rocblas_x"]))
    made = ctypes.CDLL(str(tmp_path / "libx.so"))
    assert [getattr(made, name)() for name in ("hipInit", "hipMalloc", "rocblas_x")] == [100, 100, 100]
    assert not hasattr(made, "hipFree")
    (tmp_path / "none.so").write_bytes(stubs.library("libnone.so.1"))
    ctypes.CDLL(str(tmp_path / "none.so"))
    ctypes.CDLL("libsome.so.5")  # the loader knows one of this name now
    with pytest.raises(OSError, match="libsome"):
        ctypes.CDLL("libsome.so.6")


_LINKED = """
import ctypes, sys
from pathlib import Path
from stagec.backends.gpu import stubs
stubs.load(Path(sys.argv[1]))
print(ctypes.CDLL(sys.argv[1]).answer())
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="a C compiler makes the library")
def test_a_library_of_the_machine_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "dep.c").write_text("int value(void) { return 7; }\n")
    (tmp_path / "main.c").write_text("int value(void); int answer(void) { return value(); }\n")
    (tmp_path / "map").write_text("v1 { global: value; };\n")
    for command in (
        "gcc -shared -fPIC dep.c -Wl,-soname,libdep.so.1 -Wl,--version-script=map -o libdep.so.1",
        "gcc -shared -fPIC main.c -L. -l:libdep.so.1 -o libmain.so",
    ):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    library = str(tmp_path / "libmain.so")
    for _ in ("there", "missing"):
        done = run(_LINKED, library, cwd=tmp_path, env={"LD_LIBRARY_PATH": str(tmp_path)})
        assert (done.stdout, done.stderr) == ("100\n", "")
        (tmp_path / "libdep.so.1").unlink(missing_ok=True)


def test_no_machine_code_is_read_as_a_code_object() -> None:
    for code in (b"", b"\x7fELF", sys.executable.encode() * 9):
        assert not code_objects.are_in(code)
        assert code_objects.size(code) == len(code)
    start = b"\x7fELF\x02\x01\x01\x40" + bytes(8) + b"\x03\x00\xe0\x00"
    assert code_objects.are_in(start)
    for read in (lambda: code_objects.read(start + bytes(64)), lambda: code_objects.size(start)):
        with pytest.raises(ValueError, match="machine code for AMD devices that is damaged"):
            read()


def test_what_looks_like_a_code_object_stays_as_it_is() -> None:
    code = (Path(__file__).parent / "spilling.gfx1100.hsaco").read_bytes() + b"sixteen bytes!!!"
    records = [b"manifest", b"", code, b"", code]
    _, _, marked, _, constant = riegeli.records(
        compiler._marked(riegeli._assemble([SIGNATURE, riegeli._plain(records)]))
    )
    assert (marked[:-16], constant) == (code[:-16], code)
    assert marked != code


def test_more_metadata_than_any_code_has(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (Path(__file__).parent / "spilling.gfx1100.hsaco").read_bytes()
    assert len(code_objects.read(code)) == 1
    monkeypatch.setattr(code_objects, "_LARGEST", 100)
    with pytest.raises(ValueError, match="machine code for AMD devices that is damaged"):
        code_objects.read(code)


def test_a_damaged_code_object_is_refused(tmp_path: Path) -> None:
    code = (Path(__file__).parent / "spilling.gfx1100.hsaco").read_bytes()
    (function,) = code_objects.read(code).values()
    assert (function.registers, function.spills > 0) == (256, True)
    _compare(tmp_path, code)
    refused = 0
    for at in range(0, len(code), 7):
        for changed in (code[:at], code[:at] + b"\xff" * 4 + code[at + 4 :]):
            try:
                code_objects.read(changed)
            except ValueError:
                refused += 1
    assert refused > len(code) // 7
