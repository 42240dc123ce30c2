"""PJRT plugins: the libraries to compile for hardware that this machine does not have.

jaxlib loads a plugin by its path and compiles for a topology, a description of devices; jax takes no part, and the
plugin's own Python package, which may import jax, is not imported. A process can load each plugin once, and reads the
environment then: `prepare_process` comes first.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import platform as machine
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.backends.compilation import CannotCompile, DoesNotFit, compile_options, refusal
from stagec.backends.options import suggestion
from stagec.core.builds import releases
from stagec.core.builds.platforms import PLATFORMS, Plugin
from stagec.core.builds.specs import EXAMINED_HERE, NOT_EXAMINED, CompilerOption
from stagec.jaxcache import jax_entries
from stagec.patches import hash_seeds, known_builds, machine_code
from stagec.pjrt import compatibility, gpu_calls, probe, turns
from stagec.pjrt.packages import library

if TYPE_CHECKING:
    from jaxlib import _jax
    from jaxlib.mlir import ir


# The look-behind stands after the first letters: Python finds a pattern that begins with letters 25 times as fast.
_OPTION = re.compile(rb"(xla_(?<![a-z0-9_]xla_)[a-z0-9_]{3,90})[\0\x18]")
"""A name of an option in a library: a whole string, or in the descriptor of xla.DebugOptions."""


def of(platform: str) -> Plugin:
    """Return the plugin of a platform that has one."""
    plugin = PLATFORMS[platform].plugin
    assert plugin is not None, platform
    return plugin


def version(plugin: Plugin) -> str:
    """Return the version of the wheel that is installed. Raises CannotCompile when none is."""
    try:
        return metadata.version(plugin.distribution)
    except metadata.PackageNotFoundError as error:
        raise _missing(plugin) from error


def path(plugin: Plugin) -> Path:
    """Return the path of the library. Raises CannotCompile when it is not installed."""
    file = library(plugin)
    if file is None:
        raise _missing(plugin)
    return file


def wanted(plugin: Plugin) -> str:
    """Return the version of the wheel that fits this jaxlib, or a prefix of it; "" when it is not known."""
    jaxlib = compatibility.version()
    return releases.release(jaxlib).wheels.get(plugin.distribution, "") if plugin.own_versions else jaxlib


def _pinned(plugin: Plugin) -> str:
    """Return the wheel as a requirement, with the version for this jaxlib if it is known."""
    fits = wanted(plugin)
    return f"{plugin.distribution}=={fits}{'.*' if plugin.own_versions else ''}" if fits else plugin.distribution


def _instead(plugin: Plugin) -> str:
    """Return the advice to lock the wheel for this jaxlib, or another jaxlib if builds for that one alone are known."""
    versions = [build.version for build in known_builds.rows() if known_builds.wheel(build) == plugin.distribution]
    if versions and not any(f"{version}.".startswith(f"{wanted(plugin)}.") for version in versions):
        others = " or ".join(versions)
        return f"of {plugin.distribution}, stagec knows {others}: lock jax and jaxlib {others} (docs/accelerators.md)"
    return to_lock(plugin.platform, _pinned(plugin))


def _missing(plugin: Plugin) -> CannotCompile:
    what = f"the plugin that compiles for {plugin.platform} is not installed: {plugin.distribution}"
    return CannotCompile(what, "platform", _instead(plugin))


def to_lock(platform: str, requirements: str) -> str:
    """Return the advice to lock packages of a platform's compiler, and where.

    requirements: the packages, with versions. Their lock is not the one of the models' packages.
    """
    return (
        f"write {requirements} to a lock of its own, with hashes, and name it {platform}_lock beside lock:\n"
        "in stagec.python(...) of MODULE.bazel, or in stagec_repositories(...) of WORKSPACE (docs/accelerators.md)"
    )


def prepare_process(variables: Mapping[str, str], prefixes: Sequence[str]) -> None:
    """Set the environment of this process for a plugin; must run before jaxlib is imported.

    variables: the plugin's settings. prefixes: every other variable with such a prefix is removed.
    """
    for name in [name for name in os.environ if name.startswith(tuple(prefixes))]:
        del os.environ[name]
    os.environ.update(variables)


@functools.cache
def load(plugin: Plugin) -> Any:
    """Load the plugin, once, and return its C interface as jaxlib holds it.

    Raises CannotCompile when it is missing, is not for this jaxlib or does not run here.
    """
    unsuitable = probe.refusal()
    if unsuitable:
        raise CannotCompile(unsuitable)
    where, installed, fits = path(plugin), version(plugin), wanted(plugin)
    # XLA's plugin interface accepts other versions, without promises about their results. Which libtpu is for a release
    # of jaxlib without a row, nothing says: the user's lock does.
    if fits and not f"{installed}.".startswith(f"{fits}."):
        what = f"{plugin.distribution} {installed} is not for jaxlib {compatibility.version()}"
        raise CannotCompile(what, "platform", _instead(plugin))
    if machine.machine() != "x86_64":
        raise CannotCompile(f"{plugin.distribution} runs on x86-64 machines only; this one is {machine.machine()}")
    from jaxlib import xla_client

    try:
        interface = xla_client.load_pjrt_plugin_dynamically(plugin.platform, str(where))
        xla_client.initialize_pjrt_plugin(plugin.platform)
    except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
        raise CannotCompile(f"{plugin.distribution} {installed} cannot be used on this machine: {error}") from error
    return interface


def register_custom_calls(plugin: Plugin) -> None:
    """Register with XLA the functions that JAX calls on GPUs: it compiles no other call. Raises CannotCompile."""
    devices = PLATFORMS[plugin.platform].listed
    write = to_lock(plugin.platform, f"{plugin.kernels}=={wanted(plugin)}")
    if gpu_calls.folder_of(plugin) is None:
        what = f"the functions that JAX calls on {devices} are not installed: {plugin.kernels}"
        raise CannotCompile(what, "platform", write)
    if not gpu_calls.register(plugin, load(plugin)):
        raise CannotCompile(f"{plugin.kernels} is not for jaxlib {wanted(plugin)}", "platform", write)


def topology_devices(plugin: Plugin, name: str, options: Mapping[str, Any]) -> list[Any]:
    """Return the devices of a topology that XLA knows or `options` describe; they can be compiled for, no more.

    Raises CannotCompile with XLA's words when it does not accept them.
    """
    load(plugin)
    from jaxlib import _jax

    try:
        topology = _jax.get_default_c_api_topology(plugin.platform, name, dict(options))
        return list(topology._make_compile_only_devices())
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise CannotCompile(f"XLA refuses the topology {name}: {first}".replace(" :", ":"), "topology") from error


def check_count(count: int, available: int, topology: str) -> None:
    """Raise CannotCompile unless `count` devices, those of a mesh, are all of the topology, or just one."""
    if count in (1, available):
        return
    what = f"the function's mesh has {count} devices, topology {topology} has {available}"
    raise CannotCompile(what, "topology", f"write a topology of {count} devices, or a mesh of {available}")


def compile_for(
    plugin: Plugin,
    devices: Sequence[Any],
    module: ir.Module,
    compiler_options: Mapping[str, CompilerOption],
    partitions: Sequence[Any] = (),
    serialized: bytes = b"",
    load: bool = False,
    examined: str = EXAMINED_HERE,
) -> _jax.Executable | _jax.LoadedExecutable:
    """Compile a StableHLO module.

    devices: of a topology of the plugin's; the module runs in as many partitions.
    partitions: for each partition, its device; empty: `devices` in their own order.
    serialized: XLA's options as JAX would have them; empty: those of an export.
    load: whether they are here, so that XLA loads the result.
    examined: as targets have it; "none": nothing of the plugin is changed.
    Raises CannotCompile when XLA refuses the module or an option, and when this build of the plugin is not known.
    """
    from jaxlib import _jax

    options = compile_options([device.id for device in partitions or devices], compiler_options, serialized)
    try:
        with turns.for_another_machine(), _changed(plugin, examined):
            client = devices[0].client
            compile_ = client.compile_and_load if load else client.compile
            return compile_(module, _jax.DeviceList(tuple(devices)), options)
    except known_builds.UnknownBuild as error:
        raise CannotCompile(str(error), write=error.write) from error
    except machine_code.PatchError as error:
        raise CannotCompile(f"this machine cannot build for {plugin.platform}: {error}", "", error.write) from error
    except _jax.JaxRuntimeError as error:
        message = str(error)
        refused = out_of_memory(message) or _unknown_option(plugin, message, compiler_options)
        raise refused or refusal(message, compiler_options) from error


def in_jax_keys(devices: Sequence[Any]) -> dict[str, bytes]:
    """Return the parts of JAX's cache keys that describe the devices of a topology, by name."""
    from jaxlib import _jax, xla_client

    client = devices[0].client
    try:
        topology = xla_client.get_topology_for_devices(list(devices)).fingerprint().to_bytes(8, "big")
    except _jax.JaxRuntimeError:  # JAX has the kinds of devices then
        topology = b"".join(device.device_kind.encode() for device in devices)
    platform = client.platform.strip() + client.platform_version.strip()
    return {jax_entries.PLATFORM: platform.encode(), jax_entries.TOPOLOGY: topology}


def gpus_in_jax_keys(devices: Sequence[Any], version: str) -> dict[str, bytes]:
    """Return the same for GPUs. version: of CUDA or ROCm; a device's client says it, and a topology's the device."""
    # Clients of jaxlib 0.10.2 said so, and those of 0.11.2 do not.
    before = "PJRT C API\n" if compatibility.numbers() < (0, 11) else ""
    return {**in_jax_keys(devices), jax_entries.PLATFORM: f"gpu{before}{version}".encode()}


def examined(plugin: Plugin, examined: str) -> dict[str, str]:
    """Return what a description says of a plugin that has compiled; see `known_builds.said`."""
    return known_builds.said(machine_code.loaded(plugin.library), wanted(plugin), examined)


@contextlib.contextmanager
def _changed(plugin: Plugin, examined: str) -> Iterator[None]:
    code = machine_code.loaded(plugin.library)
    if examined == NOT_EXAMINED:
        known_builds.check_messages(code)
        yield
        return
    known_builds.known(code, wanted(plugin), examined)
    with machine_code.patched(hash_seeds.patches(code)):
        yield


def _unknown_option(
    plugin: Plugin, message: str, compiler_options: Mapping[str, CompilerOption]
) -> CannotCompile | None:
    match = re.search(r"No such compile option: '(\w+)'", message)
    if not match or match[1] not in compiler_options:
        return None
    name = match[1]
    with path(plugin).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        known = {match[1].decode() for match in _OPTION.finditer(content)}
    what = f"{plugin.distribution} has no option {name}"
    return CannotCompile(what, f"compiler_options.{name}", suggestion(name, known))


def out_of_memory(message: str) -> DoesNotFit | None:
    """Return the error for a program that XLA found too large for the device, with XLA's table; None for others."""
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    lines = [line.rstrip() for line in message.strip().splitlines()]
    table = lines[1 : next((i for i, line in enumerate(lines) if line.startswith("See https://")), len(lines))]
    # As libtpu says it before 0.0.42, and since.
    used = re.search(r"Used (\S+) of (\S+) hbm", lines[0]) or re.search(
        r"total memory required for .*? \((\S+)\) exceeds available HBM \((\S+)\)", lines[0]
    )
    what = f"needs {used[1]}, has {used[2]}" if used else lines[0].partition(": ")[2].partition(" :: ")[0]
    write = "\n".join(table).strip("\n")
    return DoesNotFit(f"the program does not fit into the device's memory: {what}", write=write)
