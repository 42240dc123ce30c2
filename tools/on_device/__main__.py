"""All that docs/hardware.md says of devices, in one command on a machine that has one.

    python3.12 tools/on_device prepare build/on_device --device h100-sxm h200 --jax 0.11.2
    python3 tools/on_device run build/on_device --output build/on_device_results

`prepare` runs anywhere. It builds a folder with a part for each device, and leaves out what can't be built. With
`--jax` it installs what it needs into an environment of its own, for the Python that runs it. Without, it takes the
packages of this Python. `run` needs this checkout, that folder, Python, and the jax, jaxlib and plugin that `prepare`
ran with, but no network. It takes the part that is for the device, goes on where a step fails, and ends within
`--minutes`. It writes four files: on_device.md (a table), on_device.json (the numbers), on_device.log, and device.toml
(what the device says of itself).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[2]
SOURCES = [str(ROOT), str(ROOT / "compiler"), *map(str, sorted((ROOT / "compiler" / "extensions").glob("[!.]*/")))]
"""Where stagec, its extensions and the tests' functions are imported from."""
sys.path[:0] = SOURCES

from stagec.core.messages.refusal import Refusal  # noqa: E402 - where it is known now
from tools.on_device import steps  # noqa: E402

USUAL = 8
"""The minutes that shares and limits of steps are for."""


def main(arguments: list[str] | None = None) -> int:
    """Do what the first argument says; return the exit status: 1 where a step failed or was not as expected."""
    parser = argparse.ArgumentParser(prog="on_device", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", allow_abbrev=False, help="build the folder, without a device")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument(
        "--device", required=True, nargs="+", help="names of `stagec targets`, or devices' .toml files"
    )
    preparing.add_argument("--jax", metavar="VERSION", help="install this release, and what else is needed")
    preparing.add_argument("--size", type=int, default=4096, help="rows of the arrays that are timed (default: 4096)")
    preparing.add_argument("--golden", nargs="*", help="functions of tests/accelerators/decided.toml (default: all)")
    preparing.add_argument(
        "--kernels", nargs="*", default=["triton", "mosaic"], help="Pallas kernels (default: triton mosaic)"
    )
    preparing.add_argument(
        "--programs",
        nargs="*",
        default=["paged_decode"],
        help="programs of the extension rehearse (default: paged_decode)",
    )
    running = commands.add_parser("run", help="do all steps, on a device")
    running.add_argument("folder", type=Path)
    running.add_argument("--output", type=Path, required=True, help="a folder")
    running.add_argument("--platform", default="cuda")
    running.add_argument("--minutes", type=float, default=USUAL, help="what all steps may take (default: 8)")
    running.add_argument("--steps", nargs="*", default=list(steps.STEPS), choices=list(steps.STEPS))
    stepping = commands.add_parser("step", help="do one step, as `run` does, and print its rows")
    stepping.add_argument("name", choices=list(steps.STEPS))
    stepping.add_argument("folder", type=Path)
    stepping.add_argument("scratch", type=Path)
    stepping.add_argument("parts", nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "prepare" and options.jax:
        return _installed(options.jax, _without(arguments or sys.argv[1:], "--jax", options.jax))
    if options.command == "prepare":
        from tools.on_device.preparing import prepare

        what = (options.size, options.golden, options.kernels, options.programs)
        size = prepare(options.folder, options.device, *what)
        for path in sorted(options.folder.glob("*/lost.json")):
            for name, why in json.loads(path.read_text()).items():
                print(f"{path.parent.name}: {name} is not in the folder: {why}")
        print(f"{options.folder}: {size / 2**20:.1f} MiB")
        return 0
    if options.command == "step":
        for told in steps.do(options.name, options.folder, options.scratch, options.parts):
            print(json.dumps({"part": told} if isinstance(told, str) else told._asdict(), default=str), flush=True)
        return 0
    return run(options.folder.absolute(), options.output.absolute(), options.platform, options.minutes, options.steps)


def _without(words: list[str], option: str, value: str) -> list[str]:
    joined = [word for word in words if word != f"{option}={value}"]
    at = joined.index(option) if option in joined else len(joined)
    return joined[:at] + joined[at + 2 :]


def _installed(version: str, words: list[str]) -> int:
    """Run a command of this program in a new environment that has a release of JAX with its plugin for CUDA."""
    pinned = [line.split()[0] for line in (ROOT / "compiler" / "cuda.lock").read_text().splitlines() if "==" in line]
    toolkit = [line for line in pinned if not line.startswith("jax-")]
    jax = [f"{name}=={version}" for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")]
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "bin", "python")
        for command in (
            [sys.executable, "-m", "venv", folder],
            [python, "-m", "pip", "install", "--quiet", *jax, *toolkit, "flatbuffers", "pydantic"],
            [python, Path(__file__).parent, *words],
        ):
            if status := subprocess.run(command, check=False).returncode:
                return status
    return 0


def run(folder: Path, output: Path, platform: str, minutes: float, names: list[str]) -> int:
    """Do the steps, each in processes of its own, and write the table after each.

    A step may take its share of the time, and what those before it left.
    """
    if not any(folder.glob("*/source/device.toml")):
        print(f"{folder} has no part that `prepare` built", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is running ends too
    names = list(dict.fromkeys(["describe", *names] if len(list(folder.glob("*/on_device.aot"))) > 1 else names))
    end, shares = time.monotonic(), 60 * minutes / sum(steps.STEPS[name].seconds for name in names)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, (output / "on_device.log").open("wb") as log:
        scratch = Path(temporary)
        environment = {**_environment(scratch), "ON_DEVICE_PLATFORM": platform}
        for name in names:
            started = time.monotonic()
            end += steps.STEPS[name].seconds * shares
            prepared = folder if name == "describe" else steps.chosen(folder, scratch)
            made: list[dict[str, Any]] = []
            try:
                made.extend(_step(name, prepared, scratch, environment, end, minutes / USUAL, log))
            finally:  # also where somebody ends this process: what came before that is in the list
                rows += [{"step": name, **row} for row in made]
                _write(output, rows, environment)
                if (scratch / steps.DEVICE).exists():
                    shutil.copy(scratch / steps.DEVICE, output)
            print(f"{name}: {time.monotonic() - started:.0f} s; {_counted(made)}", flush=True)
        lost = steps.chosen(folder, scratch) / "lost.json"
        for what, why in (json.loads(lost.read_text()) if lost.exists() else {}).items():
            rows.append({"step": "prepare", **_row(what, "built without a device", why, steps.FAILED)})
        _write(output, rows, environment)
    return 1 if any(row["verdict"] in (steps.FAILED, steps.WRONG) for row in rows) else 0


def _step(
    name: str, folder: Path, scratch: Path, environment: dict[str, str], end: float, pace: float, log: Any
) -> Iterator[dict[str, Any]]:
    """Do a step, in as many processes as it takes; yield its rows, with one for each process that ended early.

    end: when it must be over. pace: how many times what is usual a part may take.
    """
    step = steps.STEPS[name]
    try:
        left = list(step.parts(folder)) if step.parts else [""]
    except (OSError, Refusal) as error:  # there is no bundle, or a damaged one
        yield _row("the whole step", step.about, f"{type(error).__name__}: {error}", steps.FAILED)
        return
    if not left:
        yield _row("all", step.about, "the folder has nothing for it", steps.SKIPPED)
    hung = 0
    while left:
        if end - time.monotonic() < 1 or hung > 1:
            why = "two parts hung" if hung > 1 else "its time is over"
            yield _row(", ".join(left) or "all", step.about, why, steps.SKIPPED)
            return
        begun: list[str] = []
        process = _Process([name, str(folder), str(scratch), *left], environment, scratch, log)
        for told in process.told(end, step.silence and step.silence * pace):
            if "part" in told:
                begun.append(told["part"])
            else:
                yield told
        if process.ended:
            what = (begun or [""])[-1] or "the whole step"
            yield _row(what, step.about, "; ".join(filter(None, (process.ended, process.said()))), steps.FAILED)
        hung = hung + 1 if process.hung else 0
        left = left[len(begun) :] if begun else []


class _Process:
    """A process of a step. ended: why it ended early, "" if it did not. hung: whether it took too long."""

    def __init__(self, words: list[str], environment: dict[str, str], scratch: Path, log: Any) -> None:
        self.ended, self.hung, self._log = "", False, Path(log.name)
        log.write(f"== {words[0]} {' '.join(words[3:])}\n".encode())
        log.flush()
        self._begins = log.tell()
        command = [sys.executable, str(Path(__file__).parent), "step", *words]
        # A session of its own: what hangs in a driver is ended with all that it started.
        self._process = subprocess.Popen(
            command, env=environment, cwd=scratch, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )

    def told(self, end: float, silence: float | None) -> Iterator[dict[str, Any]]:
        """Yield what it prints, until it ends, or `end`, or a part took longer than `silence` seconds."""
        assert self._process.stdout is not None
        rest, heard = b"", time.monotonic()
        started = heard
        try:
            while True:
                until = min(end, heard + (silence or float("inf")))
                if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                    self.ended = f"it took longer than {until - (heard if silence else started):.0f} s"
                    self.hung = True
                    return
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    break
                *lines, rest = (rest + read).split(b"\n")
                for told in filter(None, map(_told, lines)):
                    heard = time.monotonic() if "part" in told else heard
                    yield told
            self._wait(5)
        finally:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._wait(5)  # one that hangs in the kernel does not end, and is left
        if self._process.returncode:
            self.ended = f"status {self._process.returncode}"

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def said(self) -> str:
        """Return the last line of its log."""
        with self._log.open(errors="replace") as log:
            log.seek(self._begins)
            return next(iter(log.read().strip().splitlines()[-1:]), "")[:300]


def _told(line: bytes) -> dict[str, Any] | None:
    """Return a row, or the name of a part, that a step printed; None for a line that a library printed."""
    with contextlib.suppress(ValueError):
        told = json.loads(line)
        if isinstance(told, dict) and ("part" in told or {*steps.Row._fields} <= told.keys()):
            return told
    return None


def _row(what: str, expected: str, measured: str, verdict: str) -> dict[str, Any]:
    return dict(steps.Row(what, expected, measured, verdict)._asdict())


def _counted(rows: list[dict[str, Any]]) -> str:
    verdicts = [row["verdict"] for row in rows]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)) or "nothing"


def _write(output: Path, rows: list[dict[str, Any]], environment: dict[str, str]) -> None:
    packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin", "libtpu", "numpy")
    versions = {name: version for name in packages if (version := _version(name))}
    driver = Path("/proc/driver/nvidia/version")
    machine = {
        "versions": versions,
        "python": sys.version.split()[0],
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
        "cores": os.cpu_count(),
    }
    (output / "on_device.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    lines = ["| step | what | expected | measured | verdict |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = (
            str(row[name]).replace("|", "\\|").replace("\n", " ")
            for name in ("what", "expected", "measured", "verdict")
        )
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    (output / "on_device.md").write_text("\n".join(lines) + "\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _environment(scratch: Path) -> dict[str, str]:
    """Return the environment of the steps: stagec of this checkout, and CUDA where XLA looks for it.

    Wheels have CUDA's libraries where XLA's plugin finds them, and other programs do not. Its compiler may be that of
    the machine: links to it stand where a wheel would have it.
    """
    from stagec.pjrt import packages

    paths = [*SOURCES, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    libraries = list(filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    for package in ("nvidia.cu13", "nvidia.cudnn", "nvidia.nccl"):
        folder = packages.folder(package)
        libraries += [str(folder / "lib")] if folder and (folder / "lib").is_dir() else []
    toolkit, wheel = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), packages.folder("nvidia.cu13")
    if not (wheel and (wheel / "bin" / "ptxas").exists()) and (toolkit / "bin" / "ptxas").exists():
        stand_in = scratch / "toolkit"
        for part in ("bin", "nvvm"):
            (stand_in / "nvidia" / "cu13").mkdir(parents=True, exist_ok=True)
            link = stand_in / "nvidia" / "cu13" / part
            link.symlink_to(toolkit / part)
        told = subprocess.run([toolkit / "bin" / "ptxas", "--version"], capture_output=True, text=True, check=False)
        version = told.stdout.rpartition(" V")[2].split()[0] if " V" in told.stdout else "0"
        for name in ("nvidia-cuda-nvcc", "nvidia-nvvm"):
            metadata = stand_in / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir(exist_ok=True)
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        paths.insert(0, str(stand_in))
    named = {"PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    # XLA takes what memory it needs, so that its numbers say how much that was.
    return {**os.environ, **named, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main())
