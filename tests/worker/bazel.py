"""Bazel's side of the worker protocol, for a worker in a process of its own."""

import itertools
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stagec.core.data import wire
from tests.building import COMPILER, action_environment
from tests.users import User, needs_isolation

OUTPUTS = (
    "--description",
    "--inventory",
    "--lowered",
    "--module",
    "--output",
    "--profile",
    "--sbom",
    "--stablehlo",
)
"""Options that name what a command writes."""
FUNCTIONS = """
[functions.solve]
entry = "models.f:solve"
args = ["f32[4,4]", "f32[4]"]
targets = ["cpu"]
[functions.loop]
entry = "models.f:loop"
args = ["f32[n,8]"]
buckets = { n = [2] }
targets = ["cpu"]
"""
"""Functions of `MODEL`, the file models/f.py, for a manifest with a target `cpu`."""
MODEL = """
import jax
import jax.numpy as jnp

def solve(a, b):
    return jnp.linalg.solve(a @ a.T + jnp.eye(4), b)

def loop(x):
    return jax.lax.fori_loop(0, 100, lambda i, x: jnp.sin(x) * 0.9 + i, x)
"""


class Worker:
    """A worker of one stagec command, in the execution root `root`: `with Worker("action export", root) as worker`."""

    def __init__(
        self,
        command: str,
        root: Path,
        user: User | None = None,
        before: Sequence[str] = (),
        packages: Path | None = None,
    ) -> None:
        """Start it. user: who runs it; None: the user of the tests. before: a command that runs it.

        packages: a folder of packages that it has besides those of the tests. Without a command `before`, skips the
        test where the system does not let a worker do its work.
        """
        user = user or User(None, sys.executable)
        if not before:
            needs_isolation(user)
        environment = {**action_environment(), "STAGEC_PYTHON_ABI": ""}  # "": that of this interpreter
        if packages:
            environment["PYTHONPATH"] += f":{packages}"
        words = ["-B", "-s", "-S", str(COMPILER / "stagec" / "__main__.py"), *command.split(), "--persistent_worker"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*before, user.python, *words],
            cwd=root,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            user=user.number,
            group=user.number,
            extra_groups=None if user.number is None else (),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, arguments: Sequence[str], inputs: Sequence[str] = (), **numbers: int) -> None:
        """Send a request, which declares its outputs as the rules do. numbers: of request_id, cancel and verbosity."""
        declared = [("--declared", path) for option, path in itertools.pairwise(arguments) if option in OUTPUTS]
        self.write(encode([*arguments, *itertools.chain(*declared)], inputs, **numbers))

    def write(self, data: bytes) -> None:
        """Write bytes to the worker's stdin."""
        assert self.process.stdin
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def receive(self) -> dict[int, int | str]:
        """Wait for a response and return its fields by number: 1 exit code, 2 output, 3 request id, 4 cancelled."""
        assert self.process.stdout
        message, size = b"", None
        while size is None or len(message) < size:
            assert select.select([self.process.stdout], [], [], 120)[0], "the worker does not answer"
            more = os.read(self.process.stdout.fileno(), 1 if size is None else size - len(message))
            assert more, "the worker is gone"
            message += more
            if size is None and more[0] < 0x80:
                size, message = wire.read_varint(message, 0)[0], b""
        return {
            record.field: record.payload.decode() if record.wire_type == 2 else wire.read_varint(record.payload, 0)[0]
            for record in wire.records(message)
        }

    def ask(self, arguments: Sequence[str], inputs: Sequence[str] = ()) -> tuple[int, str]:
        """Send a request and wait for its response: exit code and output."""
        self.send(arguments, inputs)
        response = self.receive()
        assert isinstance(response[1], int)
        return response[1], str(response[2])


def encode(arguments: Sequence[str], inputs: Sequence[str] = (), **numbers: int) -> bytes:
    """A blaze.worker.WorkRequest with its length before it; inputs have digests."""
    fields = {"request_id": 3, "cancel": 4, "verbosity": 5}
    records = [wire.Record(1, 2, word.encode()) for word in arguments]
    for path in inputs:
        pair = wire.Record(1, 2, path.encode()).encode() + wire.Record(2, 2, b"digest").encode()
        records.append(wire.Record(2, 2, pair))
    records += [wire.Record(fields[name], 0, wire.write_varint(value)) for name, value in numbers.items()]
    message = b"".join(record.encode() for record in records)
    return wire.write_varint(len(message)) + message
