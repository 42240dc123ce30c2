"""Run a program on devices that are not there, and end it when nothing new comes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import stagec
from stagec.core.builds.specs import TpuTarget
from stagec.core.messages.errors import either, mistake, near
from stagec.hardware import cuda, rocm, tpu
from stagec.hardware.tpu_topologies import Topology, parse_topology, topologies
from stagec.jaxcache import jax_entries
from stagec_rehearse import FOLDER, driver

CPU = "cpu"
"""The device that is JAX's own CPU client, as many devices as asked for."""
_NEEDED = {
    "cuda": (("jax-cuda13-plugin", "jax-cuda12-plugin"), "jax[cuda13]"),
    "rocm": (("jax-rocm7-plugin", "jax-rocm10-plugin"), "jax[rocm7-local] and jax-rocm7-pjrt"),
    "tpu": (("libtpu",), "jax[tpu]"),
}
"""The packages without all of which a platform's devices are not rehearsed, and what installs the first with JAX."""
_STEP = 0.2
"""Seconds between two looks at what a program has compiled."""
_GRACE = 10.0
"""Seconds that a program has to end after SIGTERM."""


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    status: its exit status; None: it was ended, because of `why`. line: where it ran then, the user's innermost.
    """

    status: int | None
    why: str = ""
    line: str = ""


def platform(device: str) -> str:
    """Return the platform of a device: "cpu", "cuda", "rocm" or "tpu". Raises StagecError for an unknown one."""
    if device in tpu.generations() or tpu.HARDWARE.target(device):
        return "tpu"
    known = {CPU: CPU, **dict.fromkeys(cuda.devices(), "cuda"), **dict.fromkeys(rocm.devices(), "rocm")}
    if device not in known:
        write = near(device, known) or "write cpu, or one that stagec targets lists"
        raise mistake(f'unknown device "{device}"', write)
    return known[device]


def resolved(device: str, devices: int, processes: int) -> tuple[str, int]:
    """Return the name of a device as programs.toml has it, and how many of them a process sees.

    device: "cpu", the short name of a GPU, a generation of TPUs ("v5e"), or a slice of them ("v5e:2x4").
    Raises StagecError for a slice that has another number of hosts than processes, or of devices, and for more GPUs
    than a virtual driver has.
    """
    if (kind := platform(device)) != "tpu":
        if kind != CPU and devices > driver.MOST_DEVICES:
            what = f"a virtual driver has {driver.MOST_DEVICES} devices at most, and --devices says {devices}"
            raise mistake(what, "write --processes for those of other machines")
        return device, devices
    if processes > 1:
        return _of_hosts(device, devices, processes)
    if chip := tpu.generations().get(device):
        hosts = {_target(name).topology: _devices(name) for name in topologies(chip) if _is_of_one_host(name)}
        named = next((name for name, count in hosts.items() if count == devices), None)
        if named is None:
            what = f"no host has {devices} devices of {device}"
            raise mistake(what, f"write --devices {either([str(count) for count in hosts.values()])}")
        return named, devices
    if not _is_of_one_host(device):
        what = f"{device} has more than one host, and each has a process"
        raise mistake(what, f"write --processes {_slice(device).num_hosts}")
    if devices not in (1, _devices(device)):
        raise mistake(f"{device} has {_devices(device)} devices, not {devices}", "leave out --devices")
    return _target(device).topology, _devices(device)


def _of_hosts(device: str, devices: int, processes: int) -> tuple[str, int]:
    """Return the same for a slice of several hosts, of four chips each."""
    if device in tpu.generations():
        names = topologies(tpu.generations()[device])
        example = next((name for name in names if _slice(name).num_hosts == processes), names[-1])
        raise mistake(f"{device} is not a slice of {processes} hosts", f"write one, such as {example}")
    hosts, count = _slice(device).num_hosts, _devices(device) // processes
    if hosts != processes:
        what = f"{device} has {hosts} {'host' if hosts == 1 else 'hosts'}, and each has a process"
        raise mistake(what, f"write --processes {hosts}" if hosts > 1 else "leave out --processes")
    if devices not in (1, count):
        raise mistake(f"a host of {device} has {count} devices, not {devices}", "leave out --devices")
    return _target(device).topology, count


def tpus(device: str, processes: int) -> TpuTarget:
    """Return the target of a slice of TPUs, as a rehearsal has it: with one process, all chips are of one host."""
    target = _target(device)
    if processes > 1:
        return target
    return dataclasses.replace(target, chips_per_host="x".join(map(str, _slice(target.topology).shape)))


def _target(device: str) -> TpuTarget:
    target = tpu.HARDWARE.target(device)
    assert target is not None, device
    return target


def _devices(device: str) -> int:
    return tpu.HARDWARE.num_devices(_target(device))


def _is_of_one_host(device: str) -> bool:
    """Whether Google Cloud has hosts with these chips: four, or one, and eight of v5e and v6e."""
    chip, shape = _slice(device).generation, _slice(device).shape
    most = [2, 4] if len(chip.pod) == 2 and chip.cores == 1 else [2, 2]
    return sorted(size for size in shape if size > 1) in ([], [2, 2], most)


def _slice(device: str) -> Topology:
    return parse_topology(device, tpu.generations())


def environment(device: str, devices: int, folder: Path, cache: str, values: str) -> dict[str, str]:
    """Return the variables in which a program finds the devices, and writes its rows into `folder`.

    device: as `resolved` returns it. cache: the folder for JAX's compilation cache in which it is to find all; "" for
    none. values: "cpu" for those of a GPU, or "zeros".
    """
    own = [str(Path(file).parents[1]) for file in (__file__, stagec.__file__) if file]
    path = [str(Path(__file__).with_name("start")), *filter(None, [os.environ.get("PYTHONPATH")]), *own]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), FOLDER: str(folder)}
    # What JAX has kept of another run is not compiled in this one.
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "true" if cache else "false"
    if cache:
        variables |= {
            "JAX_COMPILATION_CACHE_DIR": str(Path(cache).resolve()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",  # to read it, and write nothing
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        }
    variables.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of shardings of the programs that stand in
    if device == CPU:
        return {**variables, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), f"{FOLDER}_PLATFORM": "cpu"}
    if platform(device) == "tpu":
        from stagec.backends.tpu import compiler

        own_variables = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # the program's, and parts of JAX's keys
        told = {
            name: value for name, value in compiler.environment(_target(device)).items() if name not in own_variables
        }
        flags = os.environ.get("LIBTPU_INIT_ARGS", "")
        if jax_entries.TPU_FLAG.partition("=")[0] not in flags:  # as JAX does where there are TPUs
            told["LIBTPU_INIT_ARGS"] = f"{flags} {jax_entries.TPU_FLAG}"
        return {
            **variables,
            **told,
            "JAX_PLATFORMS": "tpu,cpu",
            f"{FOLDER}_PLATFORM": "tpu",
            f"{FOLDER}_DEVICE": device,
        }
    gpu = platform(device)
    described = {"cuda": cuda, "rocm": rocm}[gpu].device(device)
    if devices > 1:
        # An allocator that takes most of a device's memory at the start takes 1/32 as much of this machine's for its
        # lists: 36 GiB for eight MI300X. Otherwise it takes what is asked for, up to the same limit.
        variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    libraries = folder / "driver"
    libraries.mkdir()
    driver.install(described, libraries)
    return {
        **variables,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")])),
        "JAX_PLATFORMS": f"{gpu},cpu",
        # JAX asks NVIDIA's libraries for their versions, and the virtual ones have none.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "STAGEC_VIRTUAL_DEVICES": str(devices),
        **({"STAGEC_VIRTUAL_VALUES": "1", f"{FOLDER}_VALUES": values} if values == CPU else {}),
        f"{FOLDER}_PLATFORM": gpu,
    }


def joined(variables: Mapping[str, str], processes: int) -> list[dict[str, str]]:
    """Return the variables of each of a program's processes: where JAX joins them, and where a slice of TPUs does."""
    if processes == 1:
        return [{**variables}]
    with socket.socket() as program, socket.socket() as slice_:
        addresses = []
        for free in (program, slice_):
            free.bind(("localhost", 0))
            addresses.append(f"localhost:{free.getsockname()[1]}")
    of_all = f"{' '.join(addresses)} {processes}"
    return [{**variables, f"{FOLDER}_JOINED": f"{of_all} {number}"} for number in range(processes)]


def run(command: Sequence[str], each: Sequence[Mapping[str, str]], folder: Path, seconds: float, idle: float) -> Ended:
    """Run a program until it ends, or for that many seconds, or until it has compiled nothing for `idle` seconds.

    each: the variables of each of its processes. seconds, idle: 0 for as long as it takes. If one of several processes
    fails, the others end. Raises StagecError if the program cannot be started.
    """
    try:
        processes = [subprocess.Popen(command, env=variables, start_new_session=True) for variables in each]
    except OSError as error:
        raise mistake(f"{command[0]} cannot be started: {error.strerror}") from error
    began = newest = time.monotonic()
    size = 0
    try:
        while any(process.poll() is None for process in processes):
            if failed := next(filter(None, (process.poll() for process in processes)), None):
                _stop(processes)
                return Ended(failed)
            time.sleep(_STEP)
            now, before, size = time.monotonic(), size, _rows(folder)
            newest = now if size != before else newest
            if seconds and now - began > seconds:
                return _end(processes, folder, f"it ran for {seconds:g} s")
            if idle and size and now - newest > idle:
                return _end(processes, folder, f"it compiled nothing for {idle:g} s")
    except BaseException:
        for process in processes:
            _signal(process, signal.SIGKILL)
        raise
    return Ended(next((process.returncode for process in processes if process.returncode), 0))


def _rows(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.rows"))


def _end(processes: Sequence[subprocess.Popen[bytes]], folder: Path, why: str) -> Ended:
    """End a program and all that it started, after it has said where it is."""
    own = [process.pid for process in processes]
    stacks = sorted(folder.glob("*.stack"), key=lambda path: int(path.stem) not in own)
    for path in stacks:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(path.stem)) in own:  # not a process of others that has its number by now
                os.kill(int(path.stem), signal.SIGUSR2)  # faulthandler's
    time.sleep(_STEP)
    _stop(processes)
    return Ended(None, why, next(filter(None, (_innermost(path.read_text()) for path in stacks)), ""))


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    until = time.monotonic() + _GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _innermost(stack: str) -> str:
    """Return the innermost line of a stack, as faulthandler writes it, that is in no library."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack)
    mine = [(path, line) for path, line in frames if "/site-packages/" not in path and "/lib/python" not in path]
    path, line = next(iter(mine or frames), ("", ""))
    return f"{os.path.relpath(path)}:{line}" if path else ""


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of the packages that decide what is compiled, as the program's processes told them."""
    for path in sorted(folder.glob("*.versions")):
        packages: dict[str, str] = json.loads(path.read_text("utf-8"))
        return packages
    return {}


def missing(device: str, told: Mapping[str, str]) -> list[str]:
    """Return why a program was not rehearsed. told: those that its processes told."""
    if not told:
        what = "no process of the program has imported JAX where it could be observed"
        return [f"{what}: python -I, -E and -S leave out what observes it"]
    if (needed := _NEEDED.get(platform(device))) and not {*needed[0]} & told.keys():
        return [f"the program's Python has no {needed[0][0]}: install {needed[1]} there"]
    return []
