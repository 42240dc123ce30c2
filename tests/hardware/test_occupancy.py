"""Occupancy, as CUDA's own rules have it.

`cuda_occupancy.h` of nvidia-cuda-runtime 13.5.37 gave the numbers of blocks below. With this header and a C++ compiler,
many more cases are compared: `pip install --no-deps nvidia-cuda-runtime`.
"""

import dataclasses
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from stagec.hardware import cuda
from stagec.hardware.occupancy import occupancy
from stagec.pjrt import packages

# Device, threads of a block, registers of a thread, bytes of shared memory, barriers; blocks, and what limits them.
CASES = [
    ("a100-40gb", 128, 32, 40000, 0, 4, "shared memory"),
    ("a100-40gb", 32, 255, 0, 2, 8, "registers"),
    ("a100-40gb", 1024, 32, 0, 1, 2, "threads"),
    ("a100-40gb", 32, 32, 1024, 1, 32, "blocks"),
    ("a100-80gb", 32, 32, 100000, 8, 1, "shared memory"),
    ("a100-80gb", 64, 40, 0, 2, 24, "registers"),
    ("a100-80gb", 64, 32, 1024, 8, 32, "blocks"),
    ("a100-80gb", 128, 24, 1024, 2, 16, "threads"),
    ("l4", 64, 64, 1024, 8, 16, "registers"),
    ("l4", 64, 24, 40000, 8, 2, "shared memory"),
    ("l4", 64, 40, 1024, 8, 24, "blocks"),
    ("l4", 1024, 64, 40000, 1, 1, "threads"),
    ("l40s", 512, 255, 100000, 8, 0, "registers"),
    ("l40s", 1024, 32, 40000, 0, 1, "threads"),
    ("l40s", 128, 16, 200000, 0, 0, "shared memory"),
    ("l40s", 32, 168, 0, 2, 12, "registers"),
    ("h100-pcie", 256, 64, 100000, 1, 2, "shared memory"),
    ("h100-pcie", 64, 64, 0, 1, 16, "registers"),
    ("h100-pcie", 32, 64, 0, 0, 32, "blocks"),
    ("h100-pcie", 128, 16, 1024, 0, 16, "threads"),
    ("h100-sxm", 32, 64, 40000, 1, 5, "shared memory"),
    ("h100-sxm", 1024, 64, 100000, 1, 1, "registers"),
    ("h100-sxm", 1024, 32, 0, 8, 2, "threads"),
    ("h100-sxm", 64, 40, 1024, 8, 8, "barriers"),
    ("h200", 256, 128, 0, 8, 2, "registers"),
    ("h200", 64, 16, 40000, 0, 5, "shared memory"),
    ("h200", 1024, 32, 40000, 2, 2, "threads"),
    ("h200", 32, 64, 0, 0, 32, "blocks"),
    ("b200", 1024, 64, 200000, 1, 1, "shared memory"),
    ("b200", 128, 128, 0, 8, 4, "registers"),
    ("b200", 128, 16, 1024, 0, 16, "threads"),
    ("b200", 32, 40, 1024, 1, 32, "blocks"),
    ("gb200", 512, 24, 200000, 8, 1, "shared memory"),
    ("gb200", 32, 255, 0, 0, 8, "registers"),
    ("gb200", 256, 24, 0, 0, 8, "threads"),
    ("gb200", 64, 16, 0, 2, 32, "blocks"),
    ("b300", 256, 64, 8192, 1, 4, "registers"),
    ("b300", 128, 64, 0, 8, 4, "barriers"),
    ("b300", 512, 32, 1024, 8, 4, "threads"),
    ("b300", 256, 16, 100000, 1, 2, "shared memory"),
]
HEADER = packages.file("nvidia.cu13.include", "cuda_occupancy.h")
PROGRAM = r"""
#include <climits>
#include <cstdio>
#include <cuda_occupancy.h>

int main() {
  cudaOccDeviceProp p;
  cudaOccFuncAttributes a;
  int threads;
  size_t dynamic;
  p.warpSize = 32, p.numSms = 1, p.reservedSharedMemPerBlock = 1024;
  a.maxThreadsPerBlock = INT_MAX, a.sharedSizeBytes = 0;
  a.partitionedGCConfig = PARTITIONED_GC_OFF, a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  while (scanf("%d %d %d %d %d %d %zu %zu %zu %d %zu %d %d", &p.computeMajor, &p.computeMinor, &p.maxThreadsPerBlock,
               &p.maxThreadsPerMultiprocessor, &p.regsPerBlock, &p.regsPerMultiprocessor, &p.sharedMemPerBlock,
               &p.sharedMemPerMultiprocessor, &p.sharedMemPerBlockOptin, &a.numRegs, &dynamic, &a.numBlockBarriers,
               &threads) == 13) {
    cudaOccDeviceState s;
    cudaOccResult r;
    a.maxDynamicSharedSizeBytes = dynamic;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, dynamic);
    printf("%d\n", error ? -1 : r.activeBlocksPerMultiprocessor);
  }
}
"""


@pytest.mark.parametrize(("device", "threads", "registers", "shared", "barriers", "blocks", "limit"), CASES)
def test_blocks_on_a_multiprocessor(
    device: str, threads: int, registers: int, shared: int, barriers: int, blocks: int, limit: str
) -> None:
    told = occupancy(cuda.device(device), threads, registers, shared, barriers)
    assert told is not None
    assert (told.blocks, told.limit) == (blocks, limit)
    assert told.warps == blocks * threads // 32
    assert told.share == told.warps / (cuda.device(device).threads_per_core_limit // 32)


@pytest.mark.skipif(HEADER is None or shutil.which("c++") is None, reason="no cuda_occupancy.h, or no compiler")
def test_the_header_says_the_same(tmp_path: Path) -> None:
    assert HEADER is not None
    (tmp_path / "occupancy.cpp").write_text(PROGRAM)
    subprocess.run(["c++", f"-I{HEADER.parent}", "occupancy.cpp", "-o", "occupancy"], cwd=tmp_path, check=True)
    choose = random.Random(0)
    cases, rows = [], []
    for device in cuda.devices().values():
        for _ in range(1000):
            case = (choose.randint(1, 1100), choose.randint(1, 256), choose.choice([0, choose.randint(0, 240_000)]))
            barriers = choose.randint(0, 16)
            major, minor = device.compute_capability.rstrip("af").split(".")
            limits = (device.threads_per_block_limit, device.threads_per_core_limit, device.registers_per_block_limit)
            memory = (device.shared_memory_per_block, device.shared_memory_per_core)
            sizes = (*limits, device.registers_per_core_limit, *memory, device.shared_memory_per_block_optin)
            threads, registers, shared = case
            rows.append(" ".join(map(str, (major, minor, *sizes, registers, shared, barriers, threads))))
            cases.append((device, *case, barriers))
    told = subprocess.run([tmp_path / "occupancy"], input="\n".join(rows), capture_output=True, text=True, check=True)
    ours = [row.blocks if (row := occupancy(*case)) else None for case in cases]
    assert ours == list(map(int, told.stdout.split()))


def test_the_rules_of_an_unknown_capability_are_unknown() -> None:
    assert occupancy(dataclasses.replace(cuda.device("h200"), compute_capability="14.0a"), 128, 32, 0) is None
