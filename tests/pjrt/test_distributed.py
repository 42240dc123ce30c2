"""Several processes that run one program, beside as many processes of JAX.

`one_of_several.py` is what each of them does.

Modules: `pjrt/making.py`.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import stagec
from tests.building import COMPILER, ROOT, build
from tests.bundles import without_executables
from tests.caches import free_port

TIMEOUT = 300
"""Seconds: many times what it takes on a busy machine."""
WAYS = [(2, 2), (4, 1)]
"""Processes, and the CPU devices of each."""

_OF_GLOO = re.compile(r"\[Gloo\]|peer ranks|^[\s\d:.]*$")
"""Lines in which gloo's threads say on stdout, one between the words of another, who is connected."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("spmd")
    (root / "tests" / "pjrt").mkdir(parents=True)
    for file in ("tests/pjrt/spmd.py", "tests/pjrt/spmd.toml"):
        shutil.copyfile(ROOT / file, root / file)
    return build("tests/pjrt/spmd.toml", root, root)


class Started:
    """Processes that were started together; they are killed at the end."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, count: int, each: int, *words: Any, port: int = 0, only: int | None = None) -> None:
        """Start `count` processes with a role, or one of them. {} in a word is the number of the process."""
        port = port or free_port()
        for number in range(count) if only is None else [only]:
            given = (str(word).format(number) for word in words)
            self.run(ROOT / "tests" / "pjrt" / "one_of_several.py", role, port, number, count, each, *given)

    def run(self, script: Path, *words: Any) -> None:
        """Start one process."""
        path = os.pathsep.join([str(COMPILER), str(ROOT), *sys.path])
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        process = subprocess.Popen(
            [sys.executable, script, *map(str, words)],
            env={**environment, "PYTHONPATH": path, "XLA_FLAGS": "", "NPROC": "1", "TF_CPP_MIN_LOG_LEVEL": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)

    def printed(self) -> list[str]:
        """Wait for all; each must succeed."""
        done = [(process, *process.communicate(timeout=TIMEOUT)) for process in self.processes]
        assert [process.returncode for process, _, _ in done] == [0] * len(done), [error for _, _, error in done]
        self.processes.clear()
        return ["".join(line for line in out.splitlines(True) if not _OF_GLOO.search(line)) for _, out, _ in done]


@pytest.fixture
def started() -> Iterator[Started]:
    it = Started()
    yield it
    for process in it.processes:
        process.kill()
        process.communicate()


def files(folder: Path, name: str, count: int) -> list[bytes]:
    return [(folder / f"{name}-{number}").read_bytes() for number in range(count)]


@pytest.mark.pinned(but=2)
@pytest.mark.parametrize(("count", "each"), WAYS)
def test_twenty_steps_are_those_of_jax(count: int, each: int, bundle: Path, started: Started, tmp_path: Path) -> None:
    """To the last bit, with the loader's own runtime and on the client of JAX."""
    started.start("train_by_jax", count, each, tmp_path / "jax-{}")
    started.printed()
    started.start("train", count, each, bundle, tmp_path / "own-{}")
    started.printed()
    started.start("train_in_jax", count, each, bundle, tmp_path / "in-{}")
    printed = started.printed()
    expected = files(tmp_path, "jax", count)
    assert files(tmp_path, "own", count) == expected
    assert files(tmp_path, "in", count) == expected
    assert {len(part) for part in expected} == {4 * 20 + each * 4 * 64 * 8 // (count * each // 2)}
    says = "this process called jax.distributed.initialize; leave out stagec.distributed: JAX's devices do"
    assert printed == [f"distributed {says}\n"] * count


def test_arrays_that_no_process_has_whole(bundle: Path, started: Started, tmp_path: Path) -> None:
    started.start("arrays", 2, 1, bundle, without_executables(bundle, tmp_path / "portable.aot"))
    whole = (
        "addressable an array of shape (32, 8) is not whole in this process: this process has 1 of its 2 devices; "
        "read the parts that it has, array.addressable_shards"
    )
    for number, printed in enumerate(started.printed()):
        assert printed.splitlines() == [
            *[whole] * 3,
            "shape dimension 0 of the data has 5 elements; "
            "the devices of this process hold 16 of the 32 of the whole array",
            "shape the data has 2 dimensions, and global_shape (32,) has 1",
            "shape shape (9, 64) does not divide into 2x1 parts",
            "shape 1 devices of this process hold the array, 2 parts are given",
            f"device-count process {number} has none of the devices that it is to run on; "
            "name its own, or those of all processes: devices=[...]",
        ]


def test_the_example_of_the_documentation(zoo: Path, tmp_path: Path, started: Started) -> None:
    section = (ROOT / "docs" / "loading.md").read_text("utf-8").partition("## Several processes\n")[2]
    script = section.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "both.py").write_text(script.replace("zoo.aot", str(zoo)).replace("29500", str(free_port())))
    for number in range(2):
        started.run(tmp_path / "both.py", number)
    total = "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]\n"
    assert started.printed() == [
        "cpu:0 (slice(0, 2, None), slice(0, 3, None)) [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]\n" + total,
        "cpu:2048 (slice(2, 4, None), slice(0, 3, None)) [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]\n" + total,
    ]


def test_the_mesh_has_more_devices_than_the_processes(bundle: Path, started: Started) -> None:
    started.start("too_few", 2, 1, bundle)
    for printed in started.printed():
        first, second = printed.splitlines()
        assert first.startswith("device-count ")
        assert "step_of_four cannot run here; cpu: it runs on 4 devices, 2 are in the 2 processes" in first
        assert second == "device-count 5 devices are asked for, the 2 processes have 2 of cpu"


def test_beside_jax(started: Started) -> None:
    started.start("beside_jax", 2, 2)
    started.printed()


@pytest.mark.parametrize("number", [1, 0])
def test_a_process_that_is_killed_ends_the_others(number: int, bundle: Path, started: Started, tmp_path: Path) -> None:
    """No call of theirs gives a result after that, and no file is half there. All of them started again give all."""
    port = free_port()
    started.start("train", 2, 1, bundle, tmp_path / "own-{}", "stop", port=port)
    killed, survivor = started.processes[number], started.processes[1 - number]
    steps = []
    for process in (killed, survivor):
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        steps.append([next(line for line in lines if line.startswith(f"step {step} ")) for step in range(5)])
    assert steps[0] == steps[1]
    killed.send_signal(signal.SIGKILL)
    killed.wait(TIMEOUT)
    out, error = survivor.communicate("go on\n", timeout=TIMEOUT)
    assert survivor.returncode != 0
    assert "step 5" not in out
    assert re.search("RunError|distributed service detected fatal errors", error), error
    assert list(tmp_path.iterdir()) == []
    started.processes.clear()
    started.start("train", 2, 1, bundle, tmp_path / "again-{}", port=port)
    (printed, _) = started.printed()
    assert printed.splitlines(True)[:5] == steps[0]
    assert len({*files(tmp_path, "again", 2)}) == 1


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (
            0,
            "not all of the 2 processes came to {} in 2 seconds: each calls stagec.distributed with this coordinator "
            "and this num_processes, and a process_id of its own",
        ),
        (
            1,
            "no coordinator answers at {} in 2 seconds: "
            "start process 0, or check that its port can be reached from here",
        ),
    ],
)
def test_the_others_do_not_come(number: int, why: str, started: Started) -> None:
    port = free_port()
    started.start("waiting", 2, 1, port=port, only=number)
    (printed,) = started.printed()
    where = f"127.0.0.1:{port}"
    assert printed.splitlines() == [
        f"distributed {why.format(where)}",
        f"distributed this process called stagec.distributed before, for {where}; do so once, in a new process",
    ]


def test_process_0_leaves_before_all_have_come(started: Started) -> None:
    """As it does when another has not come: those who still wait must not look for a coordinator."""
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        coordinator.settimeout(TIMEOUT)
        port = coordinator.getsockname()[1]
        started.start("waiting", 3, 1, 4, port=port, only=1)
        asked = b"PRI"
        while (
            asked
        ):  # XLA's client sends what HTTP/2 begins with; who only looks whether somebody listens sends nothing
            connection, _ = coordinator.accept()
            with connection:
                asked = connection.recv(3)
    (printed,) = started.printed()
    assert printed.splitlines()[0] == (
        f"distributed process 0 has left 127.0.0.1:{port} before all of the 3 processes came: "
        "start all of them again, within its initialization_timeout"
    )


def test_processes_that_were_told_different_numbers(started: Started) -> None:
    port = free_port()
    for number, count in ((0, 2), (1, 3)):
        started.start("waiting", count, 1, 60, port=port, only=number)
    for printed in started.printed():
        assert printed.splitlines()[0] == (
            f"distributed num_processes differs between the processes at 127.0.0.1:{port}: "
            "2 in process 0, 3 in process 1; write the same in each"
        )


def test_a_port_that_is_taken(started: Started) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        started.start("waiting", 2, 1, port=taken.getsockname()[1], only=0)
        (printed,) = started.printed()
    assert re.match(
        r"distributed process 0 cannot listen on port \d+: .*Address already in use; choose another port\n", printed
    )


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        (("here", 0, 2), {}, "coordinator is 'here'; write a host and a port, for example \"10.0.0.1:1234\""),
        ((":1234", 0, 2), {}, "coordinator is ':1234'; write a host"),
        (("here:0", 0, 2), {}, "coordinator is 'here:0'; write a host"),
        (("here:65536", 0, 2), {}, "coordinator is 'here:65536'; write a host"),
        ((None, 0, 2), {}, "coordinator is None; write a host"),
        (
            ("localhost:1234", 2, 2),
            {},
            "process_id is 2; write a number from 0 to 1, another one in each of the 2 proc",
        ),
        (("localhost:1234", -1, 2), {}, "process_id is -1; write a number from 0 to 1"),
        (("localhost:1234", True, 2), {}, "process_id is True; write a number from 0 to 1"),
        (("localhost:1234", "0", 2), {}, "process_id is '0'; write a number from 0 to 1"),
        (("localhost:1234", 0, 0), {}, "num_processes is 0; write how many processes there are, 1 or more"),
        (("localhost:1234", 0, 1.0), {}, "num_processes is 1.0; write how many"),
        (("localhost:1234", 0, 1), {"num_cpu_devices": 0}, "num_cpu_devices is 0; write how many devices the CPU bec"),
        (("localhost:1234", 0, 1), {"collectives": "nccl"}, "collectives is 'nccl'; write 'gloo' or 'mpi'"),
        (("localhost:1234", 0, 1), {"collectives": "mpi"}, "jaxlib finds MPI by MPITRAMPOLINE_LIB, which is not set"),
        (("no-such-host.invalid:1234", 0, 1), {}, "this process has used devices of cpu already; call stagec.distrib"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: Sequence[Any], options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPITRAMPOLINE_LIB", raising=False)
    stagec.devices("cpu")
    with pytest.raises(stagec.LoadError, match=re.escape(why)) as refusal:
        stagec.distributed(*arguments, **options)
    assert refusal.value.code == "distributed"


def test_more_devices_than_a_cpu_becomes() -> None:
    with pytest.raises(stagec.LoadError, match="10,000 devices are asked for") as refusal:
        stagec.distributed("localhost:1234", 0, 1, num_cpu_devices=10000)
    assert refusal.value.code == "device-count"
