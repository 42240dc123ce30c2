"""All that docs/hardware.md says of devices, in one command on a machine that has one.

    python tools/on_device prepare build/on_device --device h200
    python tools/on_device run build/on_device --output build/on_device_results

`prepare` runs anywhere, in an environment with the packages of compiler/cuda.lock and those of tests. It builds a
folder. `run` needs this checkout, that folder, Python, and the jax, jaxlib and plugin that `prepare` ran with; no
network. It writes on_device.md (a table), on_device.json (the numbers) and on_device.log, goes on where a step fails,
and ends within `--minutes`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[2]
SOURCES = [str(ROOT), str(ROOT / "compiler"), *map(str, sorted((ROOT / "compiler" / "extensions").glob("[!.]*/")))]
"""Where stagec, its extensions and the tests' functions are imported from."""
sys.path[:0] = SOURCES

from tools.on_device import steps  # noqa: E402 - where it is known now


def main(arguments: list[str] | None = None) -> int:
    """Do what the first argument says; return the exit status: 1 where a step failed or was not as expected."""
    parser = argparse.ArgumentParser(prog="on_device", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="build the folder, without a device")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("--device", required=True, help="a name of `stagec targets`, or a device's .toml file")
    preparing.add_argument("--size", type=int, default=4096, help="rows of the arrays that are timed (default: 4096)")
    preparing.add_argument("--golden", nargs="*", help="functions of tests/accelerators/decided.toml (default: all)")
    preparing.add_argument(
        "--kernels", nargs="*", default=["triton", "mosaic"], help="Pallas kernels (default: triton mosaic)"
    )
    running = commands.add_parser("run", help="do all steps, on a device")
    running.add_argument("folder", type=Path)
    running.add_argument("--output", type=Path, required=True, help="a folder")
    running.add_argument("--platform", default="cuda")
    running.add_argument("--minutes", type=float, default=9.5, help="what all steps may take (default: 9.5)")
    running.add_argument("--steps", nargs="*", default=list(steps.STEPS), choices=list(steps.STEPS))
    stepping = commands.add_parser("step", help="do one step, as `run` does, and print its rows")
    stepping.add_argument("name", choices=list(steps.STEPS))
    stepping.add_argument("folder", type=Path)
    stepping.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        from tools.on_device.preparing import prepare

        size = prepare(options.folder, options.device, options.size, options.golden, options.kernels)
        print(f"{options.folder}: {size / 2**20:.1f} MiB")
        return 0
    if options.command == "step":
        for row in steps.STEPS[options.name].run(options.folder, options.output):
            print(json.dumps(row._asdict(), default=str), flush=True)
        return 0
    return run(options.folder.absolute(), options.output.absolute(), options.platform, options.minutes, options.steps)


def run(folder: Path, output: Path, platform: str, minutes: float, names: list[str]) -> int:
    """Do the steps, each in a process of its own, and write the table after each."""
    output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    environment = {**_environment(output), "ON_DEVICE_PLATFORM": platform}
    rows: list[dict[str, Any]] = []
    with (output / "on_device.log").open("wb") as log:
        for name in names:
            step = steps.STEPS[name]
            limit = min(step.seconds, end - time.monotonic())
            started = time.monotonic()
            if limit < 1:
                made = [_row("all", step.about, f"{minutes} minutes are over", steps.SKIPPED)]
            else:
                made = _step(name, folder, output, environment, limit, log)
            seconds = time.monotonic() - started
            rows += [{"step": name, **row} for row in made]
            print(f"{name}: {seconds:.0f} s; {_counted(made)}", flush=True)
            _write(output, rows, environment)
    return 1 if any(row["verdict"] in (steps.FAILED, steps.WRONG) for row in rows) else 0


def _step(
    name: str, folder: Path, output: Path, environment: dict[str, str], limit: float, log: Any
) -> list[dict[str, Any]]:
    """Do a step; return its rows, with one for how it ended where that was early."""
    command = [sys.executable, str(Path(__file__).parent), "step", name, str(folder), str(output)]
    log.write(f"== {name}\n".encode())
    log.flush()
    # A session of its own: what hangs in a driver is ended with all that it started.
    process = subprocess.Popen(
        command, env=environment, cwd=output, stdout=subprocess.PIPE, stderr=log, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=limit)
        ended = f"status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        ended = f"it took longer than {limit:.0f} s"
    made = [json.loads(line) for line in printed.decode(errors="replace").splitlines() if line.startswith("{")]
    if ended:
        said = (output / "on_device.log").read_text(errors="replace").rpartition(f"== {name}\n")[2].strip().splitlines()
        reason = f"; {said[-1][:300]}" if said else ""
        made.append(_row("the whole step", steps.STEPS[name].about, f"{ended}{reason}", steps.FAILED))
    return made


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


def _environment(output: Path) -> dict[str, str]:
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
        stand_in = output / "toolkit"
        for part in ("bin", "nvvm"):
            (stand_in / "nvidia" / "cu13").mkdir(parents=True, exist_ok=True)
            link = stand_in / "nvidia" / "cu13" / part
            link.unlink(missing_ok=True)
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
