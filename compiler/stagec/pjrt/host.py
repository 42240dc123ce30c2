"""Find out what this machine and this process can run."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple


class Platform(NamedTuple):
    """The facts about one platform.

    refusal: the reason that nothing for it runs here; "" if there is none.
    device_kinds: the name of each device's kind; None for CPUs.
    num_devices: the number of devices; None for CPUs if there can be any number.
    processes: the number of their processes.
    versions: of its plugin, by the name of the wheel.
    """

    refusal: str = ""
    device_kinds: Sequence[str] | None = None
    versions: Mapping[str, str] = MappingProxyType({})
    num_devices: int | None = None
    processes: int = 1


class Host(NamedTuple):
    """The facts that selection uses.

    jaxlib: its version. cpu_flags: of /proc/cpuinfo. platforms: by name.
    architecture: of the CPU that this process runs on, as `uname -m` has it.
    """

    jaxlib: str
    cpu_flags: frozenset[str]
    platforms: Mapping[str, Platform]
    architecture: str


class _Platforms(dict[str, Platform]):
    """Platforms by name, examined at the first request, because a client takes most of an accelerator's memory."""

    def __init__(self, devices: Sequence[Any]) -> None:
        super().__init__()
        self._devices = devices

    def __missing__(self, name: str) -> Platform:
        self[name] = platform = _platform(name, self._devices)
        return platform


def describe(devices: Sequence[Any] = ()) -> Host:
    """Return the facts about this process; a question about a present accelerator makes a client for it.

    devices: those that the caller names; then no others count.
    """
    from stagec.pjrt import compatibility

    return Host(compatibility.version(), cpu_flags(), _Platforms(devices), architecture())


def _platform(name: str, devices: Sequence[Any]) -> Platform:
    from stagec.core.messages.refusal import LoadError
    from stagec.pjrt import clients

    named = {clients.platform_of(device) for device in devices}
    if named and name not in named:
        return Platform(f"the devices that were named are for {', '.join(sorted(named))}, not for {name}")
    if name == "cpu":
        if devices or not clients.are_of_several_processes():
            return Platform()
        every = clients.devices(name)
        return Platform(num_devices=len(every), processes=clients.num_processes(every))
    from stagec.pjrt import accelerators

    refusal = accelerators.refusal(name)
    if refusal:
        return Platform(refusal)
    try:
        here = devices or clients.devices(name)
    except LoadError as error:
        return Platform(str(error))
    kinds = [device.device_kind for device in here]
    return Platform("", kinds, accelerators.versions(name), processes=clients.num_processes(here))


def architecture() -> str:
    """Return the architecture of the CPU that this process runs on: "x86_64", "aarch64", as `uname -m` has it."""
    return os.uname().machine


def architecture_refusal(wanted: str, here: str) -> str:
    """Return why machine code for CPUs of one architecture does not run on another; "" if it does.

    wanted: "" for code that needs none.
    """
    return "" if wanted in ("", here) else f"its machine code is for {wanted}, and this machine is {here}"


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of /proc/cpuinfo (ARM calls them features); empty if it is not there or has none."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def cpu_refusal(required: Iterable[str], flags: frozenset[str]) -> str:
    """Return why a CPU with these flags does not run code with these requirements; "" if it does."""
    missing = sorted(set(required) - flags)
    if not missing:
        return ""
    if not flags:
        return (
            f"it needs {', '.join(missing)}, and what this machine's CPU has cannot be read: "
            "/proc/cpuinfo is not there or has no flags; mount /proc"
        )
    return f"this machine's CPU has no {', '.join(missing)}"
