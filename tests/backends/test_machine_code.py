"""Compiling for a CPU that is not this machine's: each test in a process of its own, whose code is changed."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from stagec.backends import x86

PRELUDE = """
import ctypes, json, os, sys
os.environ["NPROC"] = "2"
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from stagec.backends import cpu, cpuid, hash_seeds, machine_code, x86
from stagec.specs import CpuTarget
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
    """Run a program that prints JSON; it imports no JAX."""
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
        "with machine_code.changed(cpuid.changes(code, x86.ISA['SSE4_2'])): inside = compile_for_host()\n"
        "after = compile_for_host()\n"
        "print(json.dumps([[cpu.stored_cpu_name(data), sorted(cpu.stored_features(data))]\n"
        "    for data in (before, after, inside)]))"
    )
    assert before == after
    assert inside[0] == "nehalem"
    assert set(inside[1]) == x86.ISA["SSE4_2"].features


def test_a_system_that_lets_no_process_change_its_code() -> None:
    """PR_SET_MDWE (Linux 6.3) refuses what SELinux may refuse as well."""
    found = run(
        "if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): print('null'); sys.exit()\n"
        "try: compile_for('AVX2')\n"
        "except cpu.CannotCompile as error: print(json.dumps([error.key, str(error)]))"
    )
    if found is None:
        pytest.skip("this kernel cannot refuse it")
    assert found == [
        "isa",
        "this machine cannot build for AVX2: this system does not let a process change its own code",
    ]


@pytest.mark.parametrize(
    ("module", "name", "where"),
    [
        ("cpuid", "_RARE", "LLVM asks for the CPU in this libjax_common.so; build on an x86-64 machine, with"),
        ("hash_seeds", "_NEXT", "hash tables get their seeds in this libjax_common.so; build with"),
    ],
)
def test_a_library_that_is_not_as_expected(module: str, name: str, where: str) -> None:
    found = run(
        f"{module}.{name} = bytes(range(200))\n"
        "try: compile_for('AVX2')\n"
        "except cpu.CannotCompile as error: print(json.dumps([error.key, str(error)]))"
    )
    what = f"stagec does not find where {where} a jaxlib that stagec is tested with"
    assert found == ["isa", f"this machine cannot build for AVX2: {what}"]


def test_a_library_that_is_not_there() -> None:
    found = run(
        "cpu._LIBRARY = 'libother.so'\n"
        "try: compile_for('AVX2')\n"
        "except cpu.CannotCompile as error: print(json.dumps(str(error)))"
    )
    assert found == "this machine cannot build for AVX2: this process has no libother.so"
