#!/usr/bin/python3 -IS
"""Runs an action for buildbox-worker instead of buildbox-run-hosttools, and starts that.

It lets buildbox 1.4 run actions of Bazel before 6. That names outputs as version 2.0 of the API does (`output_files`,
`output_directories`), and buildbox reads `output_paths` alone, which later versions have: it would create no folders
for outputs, and return none. The messages are those of build/bazel/remote/execution/v2/remote_execution.proto
(https://github.com/bazelbuild/remote-apis).

Where the worker's folder has a file `delay`, an action waits for so many seconds first: `tools/cluster slow-worker`.

If the disk of the worker is full, buildbox 1.4 waits forever for the inputs of the action. Here it fails, and says so.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RUNNER = "buildbox-run-hosttools"

FULL = "the disk of the machine that should run this action is full: free it, or give it a larger one\n"

# Fields by number: of Action; of Digest; of Command; of ActionResult.
COMMAND_DIGEST = 1
HASH, SIZE_BYTES = 1, 2
OUTPUT_FILES, OUTPUT_DIRECTORIES, OUTPUT_PATHS = 3, 4, 7
EXIT_CODE, STDERR_RAW = 4, 7


def main(arguments: list[str]) -> None:
    """Run the runner, and end as it does. arguments: the runner's."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    action = given.get("--action")
    if action and "--validate-parameters" not in arguments:
        delay = Path(os.environ["STAGEC_WORKER_FOLDER"], "delay")
        if delay.is_file():
            time.sleep(float(delay.read_text()))
        changed = with_paths(Path(action).read_bytes(), given["--remote"])
        if changed:
            written = Path(f"{action}.paths")
            written.write_bytes(changed)
            arguments = [f"--action={written}" if word == f"--action={action}" else word for word in arguments]
    full, started = Path(os.environ["STAGEC_WORKER_FULL"]), time.time()
    runner = subprocess.Popen([RUNNER, *arguments])
    # What ends an action by a signal means all that it runs.
    signal.signal(signal.SIGTERM, lambda *_: runner.terminate())
    while True:
        try:
            sys.exit(runner.wait(1))
        except subprocess.TimeoutExpired:
            if full.exists() and full.stat().st_mtime > started:
                runner.kill()
                Path(given["--action-result"]).write_bytes(refusal(FULL))
                sys.exit(0)


def refusal(text: str) -> bytes:
    """Return an ActionResult of an action that ended with status 1 and said this."""
    return varint(EXIT_CODE << 3) + varint(1) + field(STDERR_RAW, text.encode())


def with_paths(action: bytes, remote: str) -> bytes | None:
    """Return an Action whose Command names its outputs as paths; None where it does. remote: URL of the CAS."""
    ((_, digest, _),) = (field for field in fields(action) if field[0] == COMMAND_DIGEST)
    blob = {number: value for number, value, _ in fields(digest)}
    with tempfile.TemporaryDirectory(prefix="runner") as folder:
        name = f"{blob[HASH].decode()}/{read_varint(blob[SIZE_BYTES], 0)[0]}"
        words = [f"--remote={remote}", f"--file-digest={name}", f"--destination-dir={folder}"]
        subprocess.run(["casdownload", *words], check=True, stdout=subprocess.DEVNULL)
        (file,) = (path for path in Path(folder).rglob("*") if path.is_file())
        command = list(fields(file.read_bytes()))
        outputs = sorted(value for number, value, _ in command if number in (OUTPUT_FILES, OUTPUT_DIRECTORIES))
        if not outputs or any(number == OUTPUT_PATHS for number, _, _ in command):  # Bazel 6 and 7 write both
            return None
        rest = [raw for number, _, raw in command if number not in (OUTPUT_FILES, OUTPUT_DIRECTORIES)]
        data = b"".join([*rest, *(field(OUTPUT_PATHS, path) for path in outputs)])
        file.write_bytes(data)
        subprocess.run(["casupload", f"--remote={remote}", file], check=True, stdout=subprocess.DEVNULL)
    digest = field(HASH, hashlib.sha256(data).hexdigest().encode()) + varint(SIZE_BYTES << 3) + varint(len(data))
    rest = [raw for number, _, raw in fields(action) if number != COMMAND_DIGEST]
    return b"".join([field(COMMAND_DIGEST, digest), *rest])


def fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield of each field of a message its number, its value (a number, bytes or a message) and all its bytes."""
    at = 0
    while at < len(message):
        key, start = read_varint(message, at)
        number, end = read_varint(message, start)
        if key & 7 == 2:  # bytes, with their length before them
            start, end = end, end + number
        yield key >> 3, message[start:end], message[at:end]
        at = end


def field(number: int, value: bytes) -> bytes:
    """Return a field that is bytes or a message."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    number = shift = 0
    while True:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at


def varint(number: int) -> bytes:
    """Return a number as it is in a message."""
    more, last = number >> 7, number & 127
    return bytes([last | 128]) + varint(more) if more else bytes([last])


if __name__ == "__main__":
    main(sys.argv[1:])
