"""XLA:CPU: compile StableHLO for a named instruction set, to the same bytes on every machine and every run.

Differences in XLA's own bytes, and the fixes here:

- Objects and symbols are stored in the order in which threads finished: both lists are sorted (`canonicalize`).
- XLA numbers the modules of a process: the number is left out, as it is for the first one (`canonicalize`).
- Tiny loops are hoisted into kernels whose arguments have the order of a hash table: its seed is fixed (`hash_seeds`).
- Code depends on the size of XLA's thread pool and on the cores that it may use: both are the target's `parallelism`
  (`prepare_process`, `cores`).
- Code follows the host's CPU: LLVM is shown the target's instead (`cpuid`, on aarch64 `cpuinfo`), and what XLA stored
  is checked afterwards.

docs/reproducibility.md has the measurements.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stagec.backends.compilation import CannotCompile, CompiledModule, Hardware, compile_options, cost, memory, refusal
from stagec.backends.cpu import defects
from stagec.core.builds.specs import EXAMINED_HERE, NOT_EXAMINED, AnyCpuTarget, CompilerOption, CpuTarget
from stagec.core.data import thunks, wire
from stagec.core.messages import phases
from stagec.hardware import aarch64, x86
from stagec.patches import cores, cpuid, cpuinfo, hash_seeds, known_builds, machine_code
from stagec.pjrt import host, probe, turns

if TYPE_CHECKING:
    from jaxlib import _jax
    from jaxlib.mlir import ir

_LIBRARY = "libjax_common.so"  # where jaxlib has LLVM and XLA

_RESULT = known_builds.EXECUTABLE["serialized_executable"]
_FIELDS = known_builds.JAXLIB.messages["xla.cpu.CompilationResultProto"]
_INFO, _NUMBER = known_builds.JAXLIB.messages["xla.cpu.ThunkProto"]["info.module_id"]
_SYMBOL_NAMES, _OBJECTS = _FIELDS["compiled_symbols.name"], _FIELDS["object_files"]
_CPU, _FEATURES = _FIELDS["target_machine_options.cpu"], _FIELDS["target_machine_options.features"]


def prepare_process(target: AnyCpuTarget) -> None:
    """Prepare this process to compile for `target`; must run before jaxlib makes its first client.

    It sets XLA's flags and pool size in the environment, so it is for the compile command only, never for a process
    that runs a model.
    """
    os.environ.update(environment(target))
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


def environment(target: AnyCpuTarget) -> dict[str, str]:
    """Return the variables that XLA reads when it compiles for `target`."""
    # XLA splits work by the size of its pool, so compiled bytes follow NPROC, else the cores that it sees. The variable
    # also sizes the pool of calls: so never in a process that runs a model. A user's XLA_FLAGS would be an input that
    # no key has.
    # XLA reads it when it makes a client: as an option of a compilation, it changes nothing.
    flags = ""
    if isinstance(target, CpuTarget) and target.examined == NOT_EXAMINED:
        flags = f"--xla_cpu_max_isa={target.isa}"
    return {"XLA_FLAGS": flags, "NPROC": str(target.parallelism)}


def _machine(target: AnyCpuTarget) -> x86.Isa | aarch64.Core:
    """Return the CPU that XLA is to see."""
    return x86.ISA[target.isa] if isinstance(target, CpuTarget) else aarch64.CORES[target.core]


def hardware(target: AnyCpuTarget) -> Hardware:
    """Return the CPU that `target` stands for."""
    seen = _machine(target)
    return Hardware(seen.cpu_name, tuple(sorted(seen.requires)))


@contextlib.contextmanager
def presented(target: AnyCpuTarget) -> Iterator[None]:
    """Let XLA see the CPU and the cores of `target`, and give its hash tables one seed, inside a `with` statement.

    jaxlib must be imported. It waits until no other thread compiles through stagec, and lets none begin. Compilations
    outside stagec, such as JAX's own, must not run meanwhile.
    A target that says `examined = "none"` gets the machine as it is.
    Raises machine_code.PatchError if this build of jaxlib is not known, or this system does not allow it.
    """
    if target.examined == NOT_EXAMINED:
        known_builds.check_messages(machine_code.loaded(_LIBRARY))
        with turns.for_this_machine():
            yield
        return
    # What LLVM sees is one for the process: a thread that compiles for this machine meanwhile would get the target's
    # code, and an illegal instruction where the target has more.
    with turns.for_another_machine(), machine_code.patched(changes(target)):
        yield


def changes(target: AnyCpuTarget, everywhere: bool = False) -> list[machine_code.Patch]:
    """Return the changes to jaxlib's code that `presented` makes.

    everywhere: whether all of jaxlib sees the CPU, and not LLVM alone. Raises as `presented`.
    """
    code, seen = machine_code.loaded(_LIBRARY), _machine(target)
    build = known_builds.known(code, "", target.examined)
    if isinstance(seen, x86.Isa):
        if everywhere:
            known_builds.check_sites(code, build, "every_cpuid")
        core = [*cpuid.patches(code, seen, everywhere)]
    else:
        core = cpuinfo.patches(code, seen)
    return [*core, *cores.patches(code, target.parallelism), *hash_seeds.patches(code)]


def find_code() -> None:
    """Find the sites that `presented` changes, for this process and its forks; jaxlib must be imported."""
    with contextlib.suppress(machine_code.PatchError):  # compiling will say so
        known_builds.known(machine_code.loaded(_LIBRARY), "", EXAMINED_HERE)


def compile_module(
    module: ir.Module, target: AnyCpuTarget, mesh: Sequence[int] = (), options: bytes = b""
) -> CompiledModule:
    """Compile a StableHLO module, as `Backend` says. An array without a sharding is whole on each device.

    Raises CannotCompile when XLA refuses the module or an option, or when this machine cannot build for the target.
    """
    from jaxlib import _jax, xla_client

    from stagec.pjrt import clients

    seen, num_devices = _machine(target), math.prod(mesh)
    unsuitable = probe.refusal() or clients.too_many(num_devices)
    if unsuitable:
        raise CannotCompile(unsuitable)
    _check_architecture(target)
    _check_machine(target)
    key, named = ("isa", target.isa) if isinstance(target, CpuTarget) else ("core", target.core)
    as_it_is = target.examined == NOT_EXAMINED

    def compiling(given: Mapping[str, CompilerOption]) -> Any:
        settings = compile_options(range(num_devices), given, options)
        with presented(target):
            # A client asks about the machine when it is made (`turns`): this one is for the target, and for no other
            # call.
            client: Any = xla_client.make_cpu_client(num_devices=num_devices)
            devices = _jax.DeviceList(tuple(client.local_devices()))
            return client.compile_and_load(module, devices, settings)

    try:
        executable, avoided = defects.around(compiling, target.compiler_options)
    except known_builds.UnknownBuild as error:
        raise CannotCompile(str(error), write=error.write) from error
    except machine_code.PatchError as error:
        raise CannotCompile(f"this machine cannot build for {named}: {error}", key, error.write) from error
    except _jax.JaxRuntimeError as error:
        raise refusal(str(error), target.compiler_options) from error
    raw = executable.serialize()
    # Another build of LLVM may ask in a way that no patch answers. What it found is in the result, so look there: a
    # wrong target must end here, and not as an illegal instruction on a server.
    other = _seen_instead(raw, seen, as_it_is)
    if other:
        write = _AS_IT_IS if as_it_is else ""
        raise CannotCompile(f"this machine cannot build for {named}: XLA compiled for {other}", key, write)
    canonical, this_machine = for_this_machine(raw) if as_it_is else (canonicalize(raw, seen.features), None)
    optimized = executable.hlo_modules()[0]
    return CompiledModule(
        executable=canonical,
        cost_analysis=cost(executable.cost_analysis()),
        memory_analysis=_memory(executable),
        hlo=optimized.to_string(),
        device_ids=range(num_devices),
        optimized=optimized,
        avoided=avoided,
        hardware=this_machine,
        examined=known_builds.said(machine_code.loaded(_LIBRARY), "", target.examined),
    )


def _memory(executable: _jax.LoadedExecutable) -> dict[str, int]:
    """Return XLA's counts, with a new peak: XLA's lacks temporaries, which a call allocates as one block."""
    sizes = memory(executable)
    results = sizes["output_size_in_bytes"] - sizes["alias_size_in_bytes"]
    # Results that lie in the memory of donated arguments take none of their own.
    peak = sizes["argument_size_in_bytes"] + results + sizes["temp_size_in_bytes"]
    return sizes | {"peak_memory_in_bytes": peak}


def for_this_machine(serialized: bytes) -> tuple[bytes, Hardware]:
    """Return the canonical bytes of an executable that XLA compiled for this machine as it is, and its CPU."""
    names: ModuleType = aarch64 if host.architecture() == aarch64.ARCHITECTURE else x86
    features = stored_features(serialized)
    requires = tuple(flag for flag in sorted(host.cpu_flags()) if names.llvm_names([flag]) <= features)
    # XLA stores preferences of the code generator as well, and calls them missing when the executable is loaded.
    canonical = canonicalize(serialized, names.BASELINE | names.llvm_names(requires))
    return canonical, Hardware(stored_cpu_name(serialized), requires)


@phases.phase("canonicalize")
def canonicalize(serialized: bytes, features: frozenset[str]) -> bytes:
    """Return the bytes of a serialized XLA:CPU executable with everything from the build machine in a fixed form.

    Objects and symbols are sorted. The module and the thunks have no number of the module: XLA shows it in traces.
    The features, LLVM's names, are those that XLA looks for on the machine that loads.
    Layout: a varint-delimited xla.ifrt.SerializedXlaExecutableMetadata, then xla.ExecutableAndOptionsProto.
    """
    head, body = wire.delimited(serialized)
    ordered = frozenset({_SYMBOL_NAMES[0], _OBJECTS[0]})
    # Where XLA finds AVX-512 in the list it adds tuning hints, and reports them as missing on every machine that loads.
    # The loader checks `requires` itself, before XLA reads the list.
    listed = ",".join(f"+{name}" for name in sorted(features) if "avx512" not in name).encode()

    def result(message: bytes) -> bytes:
        # XLA finds code by the names of symbols, so the order of objects and symbols means nothing.
        message = wire.without(wire.sort_repeated(message, ordered), _FIELDS["hlo_module.hlo_module.id"])
        message = wire.edit(message, _FIELDS["thunk_sequence.thunks"], _without_number)
        return wire.edit(message, _FEATURES, lambda _: listed)

    return head + wire.edit(body, _RESULT, result)


def _without_number(thunk: bytes) -> bytes:
    def edited(record: wire.Record) -> bytes:
        payload = record.payload
        if record.field == _INFO:
            payload = wire.without(payload, [_NUMBER])
        for first, *rest in thunks.NESTED.values():
            if record.field == first:
                payload = wire.edit(payload, rest, _without_number)
        return record._replace(payload=payload).encode()

    # A thunk has the number of its module, and so have those inside it: the body of a loop, the branches of a
    # conditional (`thunks.NESTED`). The second module of a process would differ from the first.
    return b"".join(map(edited, wire.records(thunk)))  # a large program has thousands


def stored_cpu_name(serialized: bytes) -> str:
    """Return LLVM's name of the CPU that a serialized executable was compiled for; "" when none is stored."""
    return next(_stored(serialized, _CPU), b"").decode("utf-8", "replace")


def stored_features(serialized: bytes) -> frozenset[str]:
    """Return LLVM's names of the features that a serialized executable was compiled with."""
    text = next(_stored(serialized, _FEATURES), b"").decode("utf-8", "replace")
    return frozenset(name[1:] for name in text.split(",") if name.startswith("+"))


def layers(serialized: bytes) -> Iterator[tuple[str, bytes, str]]:
    """Yield the parts of an executable; see `Backend`."""
    from jaxlib import xla_client

    module = next(_stored(serialized, _FIELDS["hlo_module.hlo_module"]), b"")
    yield "optimized HLO", module, xla_client.XlaComputation(module).as_hlo_text() if module else ""
    yield "buffer assignment", next(_stored(serialized, _FIELDS["buffer_assignment"]), b""), ""
    objects = list(_stored(serialized, _OBJECTS))
    listed = [f"{hashlib.sha256(file).hexdigest()} {len(file):,} bytes" for file in objects]
    symbols = [symbol.decode("utf-8", "replace") for symbol in _stored(serialized, _SYMBOL_NAMES)]
    yield "object code", b"".join(objects), "\n".join([*listed, *symbols])
    yield "container", serialized, ""


def _stored(serialized: bytes, path: Sequence[int]) -> Iterator[bytes]:
    """Yield the payloads at a path of fields below the CompilationResultProto."""
    return wire.find(wire.delimited(serialized)[1], (*_RESULT, *path))


def _check_architecture(target: AnyCpuTarget) -> None:
    """Raise CannotCompile if this process's jaxlib makes no code for the architecture of `target`."""
    wanted, here = ("x86_64" if isinstance(target, CpuTarget) else target.architecture), host.architecture()
    if wanted != here:
        write = f"compile it with jaxlib for {wanted}, on such a machine or under an emulator (docs/aarch64.md)"
        raise CannotCompile(f"jaxlib for {here} makes no code for {wanted}", "architecture", write)


def _check_machine(target: AnyCpuTarget) -> None:
    """Raise CannotCompile if a target that gets the machine as it is needs more than this machine has."""
    missing = host.cpu_refusal(_machine(target).requires, host.cpu_flags())
    if target.examined == NOT_EXAMINED and missing:
        key, named = ("isa", target.isa) if isinstance(target, CpuTarget) else ("core", target.core)
        raise CannotCompile(f'examined = "none" cannot build for {named} here: {missing}', key, _AS_IT_IS)


_AS_IT_IS = 'build it on a machine with the target\'s CPU, or take examined = "none" out of [manifest]'


def _seen_instead(serialized: bytes, wanted: x86.Isa | aarch64.Core, as_it_is: bool) -> str:
    """Name the CPU that XLA compiled for, if it differs from `wanted`; "" if not.

    as_it_is: for x86-64, whether it may be a newer CPU, with all that XLA's option does not hide.
    """
    name, features = stored_cpu_name(serialized), stored_features(serialized)
    # XLA adds hints, which are not features of a CPU.
    more = sorted(feature for feature in features - wanted.features if not feature.startswith("prefer-"))
    fewer = sorted(wanted.features - features)
    may_be_newer = as_it_is and isinstance(wanted, x86.Isa)
    if may_be_newer:
        more = [feature for feature in more if _is_hidden(feature, wanted.features)]
    if not more and not fewer and (may_be_newer or name == wanted.cpu_name):
        return ""
    return f"{name}, not for {wanted.cpu_name}" + "".join(
        f"; {word} {', '.join(names)}" for word, names in (("with", more), ("without", fewer)) if names
    )


def _is_hidden(feature: str, level: frozenset[str]) -> bool:
    """Whether XLA's option hides a feature where a level has none of its kind.

    XLA takes the option when the process makes its first client: after that, it would hide nothing.
    """
    kinds = [kind for kind in _VECTORS if feature.startswith(kind)]
    return any(not any(own.startswith(kind) for own in level) for kind in kinds)


_VECTORS = ("avx", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx", "amx-fp16")
"""How LLVM's names of features begin that are of the levels that the option has."""
