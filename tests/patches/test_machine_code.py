"""Compiling for a CPU that is not this machine's: each test in a process of its own, whose code is changed.

Modules: `patches/cores.py`, `patches/cpuid.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagec.hardware import x86
from stagec.patches import machine_code

PRELUDE = """
import ctypes, json, mmap, os, sys
os.environ["NPROC"] = "2"
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from stagec.backends.cpu import compiler as cpu
from stagec.hardware import x86
from stagec.patches import cpuid, hash_seeds, known_builds, machine_code
from stagec.core.builds.specs import CpuTarget
from stagec.stages import mlir

TEXT = '''func.func @main(%x: tensor<64xui8>) -> tensor<64xui8> {
  %c = stablehlo.constant dense<3> : tensor<64xui8>
  %y = stablehlo.shift_left %x, %c : tensor<64xui8>
  return %y : tensor<64xui8>
}'''

def compile_for(isa):
    with mlir.make_context():
        target = CpuTarget("t", isa, 2, {})
        return cpu.compile_module(ir.Module.parse(TEXT), target).executable

def compile_for_host():
    client = xla_client.make_cpu_client(num_devices=1)
    devices = _jax.DeviceList(tuple(client.local_devices()))
    with mlir.make_context():
        return client.compile_and_load(ir.Module.parse(TEXT), devices, xla_client.CompileOptions()).serialize()
"""


def run(program: str) -> Any:
    """Run a program that prints JSON."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run([sys.executable, "-c", PRELUDE + program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_level_can_be_compiled_for_on_every_machine() -> None:
    found = run(
        "made = {isa: compile_for(isa) for isa in x86.ISA}\n"
        "print(json.dumps({isa: [cpu.stored_cpu_name(data), sorted(cpu.stored_features(data))]\n"
        "    for isa, data in made.items()}))"
    )
    stored = {level: {f for f in isa.features if "avx512" not in f} for level, isa in x86.ISA.items()}
    assert found == {level: [isa.cpu_name, sorted(stored[level])] for level, isa in x86.ISA.items()}


def test_xla_sees_as_many_cores_as_the_target_has() -> None:
    """Of an operation that is bound by memory it makes as many parts as the square root of its cores."""
    one, all_cores, many, mask = run(
        "os.environ['NPROC'] = '64'\n"
        "TEXT = TEXT.replace('64xui8', '8000000xui8')\n"
        "def optimized(parallelism, cores):\n"
        "    os.sched_setaffinity(0, cores)\n"
        "    with mlir.make_context():\n"
        "        target = CpuTarget('t', 'AVX2', parallelism, {})\n"
        "        return cpu.compile_module(ir.Module.parse(TEXT), target).hlo\n"
        "cores = os.sched_getaffinity(0)\n"
        "first = {min(cores)}\n"
        "hlo = [optimized(2, first), optimized(2, cores), optimized(100, first)]\n"
        "print(json.dumps([*hlo, len(os.sched_getaffinity(0))]))"
    )
    assert one == all_cores
    assert one != many
    assert mask == 1


def test_the_machine_is_seen_again_afterwards() -> None:
    before, after, inside = run(
        "before = compile_for_host()\n"
        "code = machine_code.loaded(cpu._LIBRARY)\n"
        "with machine_code.patched(cpuid.patches(code, x86.ISA['SSE4_2'])): inside = compile_for_host()\n"
        "after = compile_for_host()\n"
        "print(json.dumps([[cpu.stored_cpu_name(data), sorted(cpu.stored_features(data))]\n"
        "    for data in (before, after, inside)]))"
    )
    assert before == after
    assert inside[0] == "nehalem"
    assert set(inside[1]) == x86.ISA["SSE4_2"].features


@pytest.mark.parametrize("what", ["lowered.compile()", "load(compiled.executable)", "clients.cpu_client(3)"])
def test_another_thread_asks_for_this_machine_afterwards(what: str) -> None:
    """While a thread compiles for a target, all of XLA in the process is shown the target's CPU."""
    beside, alone, order = run(
        "import threading\n"
        "import numpy as np, stagec\n"
        "from stagec.pjrt import clients\n"
        "from stagec.pjrt.executable import Executable\n"
        "def load(made): return Executable.load(made, *[[((64,), np.dtype(np.uint8))]] * 2, [], clients.devices())\n"
        "lowered = stagec.jit(lambda x: x << 3).lower(np.zeros(64, np.uint8))\n"
        "compiled = lowered.compile()\n"
        "load(compiled.executable)\n"
        "order, found = [], []\n"
        "def ask():\n"
        f"    found.append({what})\n"
        "    order.append('host')\n"
        "thread = threading.Thread(target=ask)\n"
        "with cpu.presented(CpuTarget('t', 'SSE4_2', 2, {})):\n"
        "    thread.start()\n"
        "    thread.join(1)\n"
        "    order.append('target')\n"
        "thread.join()\n"
        "seen = [getattr(one, 'executable', compiled.executable) for one in (*found, compiled)]\n"
        "print(json.dumps([*map(cpu.stored_cpu_name, seen), order]))"
    )
    assert beside == alone != "nehalem"
    assert order == ["target", "host"]


OWN = """
own = mmap.mmap(-1, mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(own))
def change(at, before, after): return machine_code.Patch(start + at, before, after)
def try_changes(*changes):
    try:
        with machine_code.patched(changes): return "changed", own[:4].decode()
    except machine_code.PatchError as error:
        return str(error), own[:4].decode()
own[:4] = b"abcd"
"""


def test_changes_are_undone_from_the_last_to_the_first() -> None:
    found = run(
        OWN + "print(json.dumps([*try_changes(change(0, b'ab', b'xy'), change(1, b'yc', b'zz')), own[:4].decode()]))"
    )
    assert found == ["changed", "xzzd", "abcd"]


def test_a_failure_in_the_middle_leaves_nothing_changed(tmp_path: Path) -> None:
    """A page of a file that was opened for reading cannot be made writable, whatever the process may do otherwise."""
    (tmp_path / "file").write_bytes(b"efgh" * 2000)
    program = (
        f"file = open({str(tmp_path / 'file')!r}, 'rb')\n"
        "fixed = machine_code._libc().mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)\n"
        "def at(address, before): return machine_code.Patch(address, before, b'z')\n"
        "print(json.dumps([\n"
        "    try_changes(change(0, b'a', b'x'), at(fixed, b'e'), change(1, b'b', b'x')),\n"
        "    try_changes(change(0, b'a', b'x'), at(8, b'e')),\n"
        "    try_changes(change(0, b'a', b'x'), change(1, b'c', b'x')),\n"
        "    try_changes(change(0, b'a', b'x')),\n"
        "]))"
    )
    assert run(OWN + program) == [
        ["this system does not let a process change its own code", "abcd"],
        ["this process has no memory at 0x8 that could be changed", "abcd"],
        ["the code is not as it was found: something else has changed it", "abcd"],
        ["changed", "xbcd"],
    ]


def test_a_target_within_a_target() -> None:
    found = run(
        "target = CpuTarget('t', 'AVX2', 2, {})\n"
        "with cpu.presented(target):\n"
        "    try: cpu.presented(target).__enter__()\n"
        "    except RuntimeError as error: print(json.dumps(str(error)))"
    )
    assert found == "this thread compiles for another machine already"


TRY = """
try: compile_for('AVX2')
except cpu.CannotCompile as error: print(json.dumps([error.key, str(error), error.write]))
"""
FORBIDDEN = ["isa", "this machine cannot build for AVX2: this system does not let a process change its own code", ""]


def test_a_system_that_lets_no_process_change_its_code() -> None:
    """PR_SET_MDWE (Linux 6.3) refuses what SELinux may refuse as well."""
    found = run("if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): print('null'); sys.exit()\n" + TRY)
    if found is None:
        pytest.skip("this kernel cannot refuse it")
    assert found == FORBIDDEN


def test_a_system_that_lets_no_process_have_memory_to_run() -> None:
    """As SELinux does without execmem: mmap of anonymous memory with PROT_EXEC is EACCES, here by seccomp."""
    rules = [
        (0x20, 0, 0, 0),  # the number of the call
        (0x15, 0, 5, 9),  # is it mmap?
        (0x20, 0, 0, 32),  # its protection
        (0x45, 0, 3, 4),  # has it PROT_EXEC?
        (0x20, 0, 0, 40),  # its flags
        (0x45, 0, 1, 0x20),  # have they MAP_ANONYMOUS?
        (0x06, 0, 0, 0x00050000 | 13),  # EACCES
        (0x06, 0, 0, 0x7FFF0000),  # allowed
    ]
    found = run(
        "import struct\n"
        f"rules = b''.join(struct.pack('<HBBI', *rule) for rule in {rules})\n"
        "rules = ctypes.create_string_buffer(rules)\n"
        "program = ctypes.create_string_buffer(struct.pack('<H6xQ', len(rules) // 8, ctypes.addressof(rules)))\n"
        "prctl = ctypes.CDLL(None).prctl\n"
        "if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(program)): print('null'); sys.exit()\n" + TRY
    )
    if found is None:
        pytest.skip("this system does not let a process restrict itself")
    assert found == FORBIDDEN


def test_a_process_that_can_open_no_more_files() -> None:
    found = run(
        "import resource\n"
        "code, (_, most) = machine_code.loaded(cpu._LIBRARY), resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))\n"
        "def refused(call, *given):\n"
        "    try: call(*given)\n"
        "    except machine_code.PatchError as error: return str(error), error.write\n"
        "def change(): machine_code.patched([machine_code.Patch(code.address, b'', b'')]).__enter__()\n"
        "found = [refused(machine_code.loaded, 'libother.so'), refused(known_builds.known, code), refused(change)]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "print(json.dumps(found))"
    )
    why = "[Errno 24] Too many open files: "
    memory = f"this process cannot see its own memory: {why}'/proc/self/maps'"
    library = f"libjax_common.so cannot be read: {why}"
    assert [memory, ""] == found[0] == found[2]
    assert found[1][0].startswith(library)


def test_a_library_that_is_not_there() -> None:
    found = run(f"cpu._LIBRARY = 'libother.so'\n{TRY}")
    assert found == ["isa", "this machine cannot build for AVX2: this process has no libother.so", ""]


@pytest.mark.parametrize(
    "content",
    [b"", b"no library", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(58), b"\x7fELF\x02\x01" + b"\xff" * 90],
    ids=["empty", "text", "short", "zeros", "ones"],
)
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libno.so"
    path.write_bytes(content)
    with pytest.raises(machine_code.PatchError, match=r"^libno\.so cannot be read: "), machine_code.mapped(path):
        pass
    code = machine_code.Code(path, 0, 0, 0)
    for read in (code.build_id, lambda: code.imported("sched_getaffinity")):
        with pytest.raises(machine_code.PatchError, match=r"^libno\.so cannot be read: "):
            read()


def test_a_library_without_an_import() -> None:
    assert run("print(json.dumps(machine_code.loaded(cpu._LIBRARY).imported('no_such_function')))") is None
