"""Clients that need packages, or a system, of their own: KServe's, and Triton's perf_analyzer.

STAGEC_KSERVE names a program that runs compiler/extensions/serve/tests/kserve_client.py, as Bazel's target has it.
perf_analyzer is a package of PyPI for systems with glibc 2.38 or newer.

Modules: `stagec_serve/rest.py`, `stagec_grpc/rpc.py`, `stagec_serve/sequences.py`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stagec
from compiler.extensions.serve.tests.processes import Server, serving

KSERVE = os.environ.get("STAGEC_KSERVE", "")
PERF_ANALYZER = os.environ.get("STAGEC_PERF_ANALYZER", "perf_analyzer").split()


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[Server]:
    with serving(served, "--grpc-port", "0") as started:
        yield started


@pytest.mark.skipif(not KSERVE, reason="KServe's client is not installed: STAGEC_KSERVE names no program")
def test_kserve(server: Server, bundle: stagec.Bundle) -> None:
    words = [*KSERVE.split(), server.address, server.grpc]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    states, *answers = map(json.loads, done.stdout.splitlines())
    assert states == [True] * 6
    padded = np.zeros((8, 16), np.float32)
    padded[:3] = 1
    wanted = {f"result['{name}']": array[:3].tolist() for name, array in bundle["predict"](padded).items()}
    assert answers[:4] == [wanted] * 4
    assert answers[4:] == [[0, 0, 0], [0, 0, 0], [2, 2, 2], [2, 2, 2]]


@pytest.mark.skipif(not shutil.which(PERF_ANALYZER[0]), reason="perf_analyzer is not installed")
@pytest.mark.parametrize(
    "words",
    [
        ["-m", "predict", "-i", "http"],
        ["-m", "predict", "-i", "grpc", "-b", "4", "--async"],
        ["-m", "add", "-i", "grpc"],  # sequences
    ],
)
def test_perf_analyzer(server: Server, words: list[str]) -> None:
    address = server.grpc if "grpc" in words else server.address
    command = [*PERF_ANALYZER, *words, "-u", address, "--concurrency-range", "4", "--request-count", "100"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Request count: 10" in done.stdout
    assert "Throughput: " in done.stdout
