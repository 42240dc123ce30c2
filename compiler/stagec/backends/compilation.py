"""The interface of the backends: one module for each platform, with the functions of `Backend`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from stagec.backends.options import suggestion
from stagec.core.builds import compiler_options as options
from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import CompilerOption
from stagec.core.messages.errors import StagecError
from stagec.costs.links import Links

if TYPE_CHECKING:
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir


class CannotCompile(ValueError):
    """XLA cannot compile this module for this target. The message says why.

    key: the field of the target that is wrong; "" if there is none.
    write: the correction; it may be empty. A traceback shows it as a note.
    """

    def __init__(self, what: str, key: str = "", write: str = "") -> None:
        super().__init__(what)
        self.key = key
        self.write = write
        if write:
            self.add_note(write)

    @staticmethod
    def from_error(error: StagecError) -> CannotCompile:
        """Return the first problem of a target as this error."""
        problem = error.problems[0]
        return CannotCompile(problem.what, problem.key, problem.write)


class DoesNotFit(CannotCompile):
    """The program needs more memory than the device has; `write` is XLA's own table of buffers, if it gave one."""


@dataclass(frozen=True)
class CompiledModule:
    """XLA's result for a module: canonical executable bytes and XLA's counts.

    executable: the bytes for `Client.deserialize_executable` of `jaxlib`.
    cost_analysis: "flops", "bytes_accessed", "transcendentals" and others as XLA estimates them; empty if it has no
        estimate of the whole.
    memory_analysis: bytes by use, such as "argument_size_in_bytes" and "peak_memory_in_bytes".
    hlo: the optimized HLO, as a string without the elements of large constants.
    device_ids: for each partition, the id of the device that it was assigned to.
    coords: for each partition, x, y, z and core of that device; empty if the platform has no coordinates.
    devices: parts of JAX's keys in its compilation cache that follow the device (`jax_entries`); empty for CPUs.
    optimized: jaxlib's HloModule of `hlo`, with those elements; None if nobody needs it.
    kernels: the facts about each kernel (`backends.gpu.kernels`); empty for other platforms.
    avoided: known defects of XLA that the program would have: issue -> the option that avoids it.
    hardware: what it was compiled for, if that is the machine as it is; None: the target's.
    examined: what to say of a library's build that this build examined, by the file's name; empty for those of the
        project, and where nobody examined it.
    """

    executable: bytes
    cost_analysis: Mapping[str, float]
    memory_analysis: Mapping[str, int]
    hlo: str
    device_ids: Sequence[int]
    coords: Sequence[Sequence[int]] = ()
    devices: Mapping[str, bytes] = field(default_factory=dict)
    optimized: Any = None
    kernels: Sequence[Mapping[str, Any]] = ()
    avoided: Mapping[str, str] = field(default_factory=dict)
    hardware: Hardware | None = None
    examined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """The hardware of a target.

    device_kind: the hardware of the code: LLVM's name of a CPU, or the name of an accelerator.
    requires: flags of /proc/cpuinfo without which the code must not run, sorted; empty for accelerators.
    versions: of the packages that the platform's compiler consists of, besides jaxlib.
    memory: bytes of one device; bandwidth: bytes a second from it; flops: peak bfloat16 operations a second. None if
        they are not known: an instruction set does not determine them.
    links: the connections of the devices; None if they are not known.
    """

    device_kind: str
    requires: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None
    memory: int | None = None
    bandwidth: float | None = None
    flops: float | None = None
    links: Links | None = None


class Backend(Protocol):
    """The compiler of a platform: a module of this package. `target` is a target of that platform."""

    def environment(self, target: Any) -> dict[str, str]:
        """Return the variables that the compiler reads, as they are when it compiles for `target`."""

    def prepare_process(self, target: Any) -> None:
        """Prepare this process to compile for `target`; must run before jaxlib is imported."""

    def hardware(self, target: Any) -> Hardware:
        """Return the hardware of `target`, without compiling. Raises CannotCompile when there is no such hardware."""

    def compile_module(
        self, module: ir.Module, target: Any, mesh: Sequence[int], options: bytes = b"", **ids: Sequence[int]
    ) -> CompiledModule:
        """Compile a StableHLO module, which this may change, in a process that `prepare_process` has prepared.

        mesh: sizes of the axes over which the module's shardings split arrays; empty for one device.
        options: XLA's CompileOptions of JAX for it, serialized; empty: those of an export.
        ids: for TPUs alone: the device of each partition, where it is not the one of `jax.make_mesh`.
        Raises CannotCompile when the compiler refuses the module, an option or the target.
        """

    def layers(self, serialized: bytes) -> Iterator[tuple[str, bytes, str]]:
        """Yield the parts of an executable, from the first stage of XLA to the last: (name, bytes, text).

        If there is no text for a reader it is "". Raises ValueError when the bytes are not an executable of this
        platform.
        """


def backend(platform: str) -> Backend:
    """Return the compiler of a platform: "cpu", "cuda", "rocm" or "tpu". jaxlib is not imported yet."""
    folder = PLATFORMS[platform].compiler or platform
    return cast(Backend, importlib.import_module(f"stagec.backends.{folder}.compiler"))


def checked(compiler_options: Mapping[str, Any]) -> dict[str, CompilerOption]:
    """Return options as plain values. Raises CannotCompile for a value that an option cannot have."""
    try:
        return options.checked(compiler_options)
    except options.InvalidOption as error:
        raise CannotCompile(str(error), f"compiler_options.{error.name}", error.write) from error


def set_options(settings: xla_client.CompileOptions, compiler_options: Mapping[str, CompilerOption]) -> None:
    """Set compiler options as `jax.jit` does: some are fields of ExecutableBuildOptions, the others are flags of XLA.

    Raises CannotCompile for a value that an option cannot have, and for a field that this jaxlib's XLA does not have.
    """
    build, flags = options.split(checked(compiler_options))
    for name, value in build.items():
        if not hasattr(settings.executable_build_options, name):
            raise _no_option(name)
        setattr(settings.executable_build_options, name, value)
    settings.env_option_overrides = flags


def _no_option(name: str) -> CannotCompile:
    what = f"this jaxlib's XLA has no option {name}"
    return CannotCompile(what, f"compiler_options.{name}", suggestion(name))


def compile_options(
    ids: Sequence[int], compiler_options: Mapping[str, CompilerOption], serialized: bytes = b""
) -> xla_client.CompileOptions:
    """Return XLA's options for a target: a partition for each device of `ids`, split as the module's shardings say.

    serialized: options to change that into, as `compile_module` has them.
    Raises CannotCompile when an option cannot have its value, or XLA has no such option.
    """
    from stagec.pjrt import clients

    options = clients.compile_options(ids)
    if serialized:
        from jaxlib import xla_client

        assigned = options.device_assignment
        options = xla_client.CompileOptions.ParseFromString(serialized)
        options.device_assignment = assigned
    else:
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.use_shardy_partitioner = True
    set_options(options, compiler_options)
    return options


def refusal(message: str, compiler_options: Iterable[str]) -> CannotCompile:
    """Translate XLA's status to an error that names the option at fault."""
    first = message.strip().splitlines()[0]
    for option in compiler_options:
        if option in first and "No such compile option" in first:
            return _no_option(option)
        if option in first:
            return CannotCompile(f"XLA refuses the option: {first}", f"compiler_options.{option}")
    return CannotCompile(f"XLA refuses the module: {first}")


def cost(counted: Mapping[str, float], idle: int = 0) -> dict[str, float]:
    """Return XLA's estimates by name, without those that it does not know.

    Entries such as "bytes accessed0{}" are per operand of each instruction: noise for a reader. XLA counts a custom
    call as -1 seconds and -1 operations: where there is one that it does not know, sums say nothing.
    idle: number of custom calls that are known to compute nothing.
    """
    named = {key.replace(" ", "_"): counted[key] for key in sorted(counted)}
    whole = {key: value for key, value in named.items() if key.isidentifier()}
    whole |= {key: whole[key] + idle for key in ("optimal_seconds", "flops") if key in whole}
    opaque = whole.get("optimal_seconds", 0) < 0 or whole.get("flops", 0) < 0
    return {} if opaque else whole


def memory(executable: _jax.LoadedExecutable | _jax.Executable) -> dict[str, int]:
    """Return XLA's counts in bytes; see `CompiledModule.memory_analysis`."""
    stats = executable.get_compiled_memory_stats()
    names = [name for name in dir(stats) if name.endswith("_in_bytes") and not name.startswith("host_")]
    return {name: getattr(stats, name) for name in sorted(names)}
