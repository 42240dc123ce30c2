"""The builds of libraries that stagec knows: it changes their code and edits their messages.

A library is known by its build-id (`elf.File.build_id`). known_builds.json has a row for each build: how many sites
every change has in it, and which of the fields below it lacks. For another build nobody knows whether the patches work,
or whether a message still has the same meaning, so stagec compiles nothing with it. A range of versions is not enough:
one admitted releases whose field numbers and sites nobody had examined, and three of seven did not even run.

`tools/known_builds.py` examines a wheel, tests it, and writes its row. A build may examine one that has none itself
(`stagec action examine`): its actions find that row in a folder of packages, as `HERE`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import EXAMINED_HERE, NOT_EXAMINED, PROJECT
from stagec.core.data import elf, gpu_executables, thunks
from stagec.patches import cores, cpuid, cpuinfo, descriptors, hash_seeds
from stagec.patches.machine_code import Code, PatchError, mapped

TABLE = Path(__file__).with_suffix(".json")
"""The rows, one a line."""
HERE = "stagec_known_builds.json"
"""The file on `sys.path` with rows that the project does not have: of builds that a build examined itself."""

Paths = Mapping[str, tuple[int, ...]]
"""Names of fields, from message to message, with a dot between -> their numbers."""


class UnknownBuild(PatchError):
    """stagec does not know this build of a library; the message names it, and `write` names the known ones.

    file: of the library, if `write` is to say what is other in it, and what works. build_id: of what is not known.
    """

    def __init__(self, what: str, write: str, file: Path | None = None, build_id: str = "") -> None:
        super().__init__(what, write)
        self._file, self._build_id = file, build_id

    @property
    def write(self) -> str:
        """The advice. It reads the whole library, in seconds."""
        if self._file is None:
            return super().write
        more: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            works = [*_what_works(self._file)]
            with elf.opened(self._file) as file:  # somebody may have installed another, or removed it
                more = works if file.build_id == self._build_id else []
        return "\n".join([super().write, *more])


@dataclass(frozen=True)
class Library:
    """A library that is changed.

    package: the wheel that brings it. sites: by architecture, for each change, the function that finds them.
    messages: full name of a message that the library writes and stagec reads or edits -> the fields that it looks for.
    """

    package: str
    sites: Mapping[str, Mapping[str, Callable[[Code], Sequence[int]]]]
    messages: Mapping[str, Paths]


EXECUTABLE: Paths = {"serialized_executable": gpu_executables.EXECUTABLE}
"""Where in an xla.ExecutableAndOptionsProto the platform's own message is."""
NESTED: Paths = {
    "sequential_thunk.thunks": (2, 1),
    "conditional_thunk.branch_thunks.thunks": (6, 2, 1),
    "while_thunk.condition_thunk_sequence.thunks": (7, 2, 1),
    "while_thunk.body_thunk_sequence.thunks": (7, 3, 1),
    "dynamic_slice_thunk.embedded_thunk.thunks": (18, 1, 1),
    "collective_group_thunk.thunks": (47, 2),
    "async_start_thunk.thunks.thunks": (57, 3, 1),
    "dynamic_slice_fusion_thunk.embedded_thunks.thunks": (60, 6, 1),
}
"""Where in a thunk of XLA:GPU's there are others: all such fields, as `examined` checks."""
PAIRED: Paths = {
    "host_execute_start_thunk.async_events_unique_id": (16, 4),
    "host_execute_done_thunk.async_events_unique_id": (17, 1),
    "host_send_thunk.async_events_unique_id": (32, 6),
    "host_send_done_thunk.async_events_unique_id": (33, 3),
    "host_recv_thunk.async_events_unique_id": (34, 6),
    "host_recv_done_thunk.async_events_unique_id": (35, 3),
    "async_start_thunk.async_execution_id": (57, 1),
    "async_done_thunk.async_execution_id": (58, 1),
}
"""The number that the thunks of a start and of its end have in common, an address."""
UNORDERED: Paths = {
    "custom_call_thunk.attributes.attrs": (30, 6, 1),
    "host_send_thunk.frontend_attrs": (32, 4),
    "host_recv_thunk.frontend_attrs": (34, 4),
    "collective_permute_thunk.source_target_pairs": (43, 4),
    "send_thunk.source_target_pairs": (44, 4),
    "recv_thunk.source_target_pairs": (45, 4),
}
"""The fields that XLA:GPU fills from a hash table, entry by entry."""
INSTRUCTION: Paths = {"thunk_info.profile_annotation": (1, 1)}
"""Where a thunk has the name of the HLO instruction that it runs."""
CUSTOM_KERNEL: Paths = {
    "custom_kernel_thunk.custom_kernel.kernel_spec.kernel_name": (36, 3, 2, 4),
    "custom_kernel_thunk.custom_kernel.kernel_spec.cubin.data": (36, 3, 2, 2, 1),
    "custom_kernel_thunk.custom_kernel.block_dims.coordinates": (36, 3, 3, 2),
    "custom_kernel_thunk.custom_kernel.thread_dims.coordinates": (36, 3, 4, 1),
    "custom_kernel_thunk.custom_kernel.shared_memory_bytes": (36, 3, 6),
}
"""Where a thunk has a kernel: the name of its function, its machine code, how many blocks there are and how many
threads in each, and how many bytes of shared memory a launch adds to those of the code."""
COLLECTIVE_KERNEL: Paths = {
    "collective_kernel_thunk.kernel_name": (59, 6),
    "collective_kernel_thunk.cubin": (59, 10),
    "collective_kernel_thunk.launch_dimensions.block_counts.coordinates": (59, 7, 1, 2),
    "collective_kernel_thunk.launch_dimensions.thread_counts_per_block.coordinates": (59, 7, 2, 1),
    "collective_kernel_thunk.shmem_bytes": (59, 8),
}
"""The same of a kernel that exchanges arrays."""
ALL_REDUCE_KERNEL: Paths = {
    "all_reduce_thunk.kernel_name": (39, 7),
    "all_reduce_thunk.cubin": (39, 12),
    "all_reduce_thunk.launch_dimensions.block_counts.coordinates": (39, 10, 1, 2),
    "all_reduce_thunk.launch_dimensions.thread_counts_per_block.coordinates": (39, 10, 2, 1),
    "all_reduce_thunk.shmem_bytes": (39, 6),
}
"""The same for a kernel that runs instead of NCCL's if arrays are small."""
KERNEL: Paths = {
    "kernel_thunk.kernel_name": (8, 3),
    "kernel_thunk.launch_dimensions.block_counts.coordinates": (8, 4, 1, 2),
    "kernel_thunk.launch_dimensions.thread_counts_per_block.coordinates": (8, 4, 2, 1),
    "kernel_thunk.shmem_bytes": (8, 6),
}
"""The same for a kernel with code in the executable's only binary."""
STATE: Paths = {"custom_call_thunk.execution_state.state": (30, 8, 2)}
"""Where a thunk has what a custom call has prepared: a kernel of Mosaic GPU's has its machine code there."""

JAXLIB = Library(
    "jaxlib",
    {
        "x86_64": {
            "cores": cores.sites,
            "cpuid": cpuid.sites,
            "every_cpuid": cpuid.every_site,
            "hash_seeds": hash_seeds.sites,
        },
        "aarch64": {"cores": cores.sites, "cpuinfo": cpuinfo.sites, "hash_seeds": hash_seeds.sites},
    },
    {
        "xla.ExecutableAndOptionsProto": EXECUTABLE,
        "xla.cpu.CompilationResultProto": {
            "hlo_module.hlo_module": (1, 1),
            "hlo_module.hlo_module.id": (1, 1, 5),
            "buffer_assignment": (2,),
            "thunk_sequence.thunks": (6, 1),
            "compiled_symbols.name": (7, 2),
            "object_files": (8,),
            "target_machine_options.cpu": (9, 2),
            "target_machine_options.features": (9, 3),
        },
        "xla.cpu.ThunkProto": {**thunks.NESTED, "info.module_id": (2, 3)},
    },
)
GPU: Mapping[str, Paths] = {
    "xla.ExecutableAndOptionsProto": EXECUTABLE,
    "xla.SplitProtoManifest": {"records.proto_merge_record": (2, 2)},
    "xla.gpu.GpuExecutableProto": {
        "hlo_module_with_config.hlo_module": (1, 1),
        "thunks": (13,),
        "cpu_target_machine_options.cpu": (15, 2),
    },
    "xla.gpu.ThunkProto": {
        **NESTED,
        **PAIRED,
        **UNORDERED,
        **INSTRUCTION,
        **CUSTOM_KERNEL,
        **COLLECTIVE_KERNEL,
        **ALL_REDUCE_KERNEL,
        **KERNEL,
        **STATE,
    },
}
"""Messages of XLA:GPU, for every vendor."""
CUDA = Library("jax-cuda13-pjrt", {"x86_64": {"hash_seeds": hash_seeds.sites}}, GPU)
ROCM = Library("jax-rocm7-pjrt", {"x86_64": {"hash_seeds": hash_seeds.sites}}, GPU)
TPU = Library("libtpu", {"x86_64": {"hash_seeds": hash_seeds.sites}}, {})  # its messages are neither read nor edited
LIBRARIES: Mapping[str, Library] = {
    "libjax_common.so": JAXLIB,
    "xla_cuda_plugin.so": CUDA,
    "xla_rocm_plugin.so": ROCM,
    "libtpu.so": TPU,
}
"""By the name of the file."""


_OR_HERE = 'to let a build examine others itself, take examined = "project" out of [manifest]'
"""The advice where only the project's examination counts."""
_OF_MODELS = frozenset({"every_cpuid"})
"""Changes for what models compute: a compilation does not look for their sites, which takes longer than all others."""


@dataclass(frozen=True)
class Build:
    """A build of a library, by its build-id.

    version: that of the wheel.
    python: the tag of the Python that it is for, such as "cp313" or "cp314t"; "" where all have the same library.
    sites: the number of sites of every change. lacks: the fields of `Library.messages` that it does not have.
    made: start of the SHA-256 of its result for the test's program (building/examination.py).
    follows_seed: whether that follows the seed of hash tables.
    tested: the Python that made it, twice.
    architecture: that of its instructions, by the name of `uname -m`.
    package: the wheel that brings it, if that is another than the library's usual one.
    """

    library: str
    version: str
    python: str
    build_id: str
    sites: Mapping[str, int]
    lacks: Sequence[str] = ()
    made: str = ""
    follows_seed: bool = False
    tested: str = ""
    architecture: str = "x86_64"
    package: str = ""


class BuildHere(Build):
    """A library that is not in the table: a build examined it itself, for its actions."""


def wheel(build: Build) -> str:
    """Return the name of the wheel that brings a build."""
    return build.package or LIBRARIES[build.library].package


def package_of(path: Path) -> str:
    """Return the name of the wheel that brings a library: by the folder of its package, where several have the name."""
    plugins = (plugin for platform in PLATFORMS.values() for plugin in platform.plugins)
    of_folder = (plugin.distribution for plugin in plugins if plugin.package.rpartition(".")[2] == path.parent.name)
    return next(of_folder, LIBRARIES[path.name].package)


def rows() -> list[Build]:
    """Return all builds that are known, by library, version and Python. Raises PatchError when it cannot be read."""
    return _read(TABLE, Build, "install stagec again")


def rows_here() -> list[Build]:
    """Return those that a build examined itself, for its actions. Raises PatchError when a file cannot be read."""
    files = (Path(entry, HERE) for entry in sys.path if entry)
    return [row for file in files if file.is_file() for row in _read(file, BuildHere, f"remove {file}")]


def _read(file: Path, kind: type[Build], write: str) -> list[Build]:
    try:
        return [kind(**row) for row in json.loads(file.read_text("ascii"))]
    except (OSError, ValueError, TypeError) as error:
        raise PatchError(f"{file.name} cannot be read: {error}", write) from error


def write(file: Path, builds: Sequence[Build]) -> None:
    """Write rows as `rows_here` reads them."""
    file.write_text(json.dumps([dataclasses.asdict(build) for build in builds], ensure_ascii=True) + "\n", "ascii")


def identity(path: Path) -> tuple[str, bool]:
    """Return the build-id of a library, and whether the table has it. Raises PatchError when it cannot be read."""
    with mapped(path) as code:
        build_id = code.build_id()
        return build_id, _row(code.library, build_id, rows()) is not None


def said(code: Code, wanted: str, examined: str) -> dict[str, str]:
    """Return what a description says of a library that has compiled, if not the project examined it. See `known`."""
    if examined == NOT_EXAMINED:
        build_id = code.build_id()
        return {} if _row(code.library, build_id, rows()) else {code.library: f"{build_id} (not examined)"}
    if not isinstance(build := known(code, wanted, examined), BuildHere):
        return {}
    return {code.library: f"{build.build_id} (examined by this build, not by the project)"}


def _row(library: str, build_id: str, builds: Sequence[Build]) -> Build | None:
    return next((build for build in builds if (build.library, build.build_id) == (library, build_id)), None)


@functools.cache
def known(code: Code, wanted: str = "", examined: str = EXAMINED_HERE) -> Build:
    """Return the build of a library. Raises UnknownBuild, and PatchError when its file cannot be read.

    wanted: the version of its wheel that could be used here, or a prefix of it; "" if any could.
    examined: as targets have it; "project": rows of the table alone count.
    """
    build_id, table, here = code.build_id(), rows(), None
    build = _row(code.library, build_id, table)
    if build is None:
        here = _row(code.library, build_id, rows_here())
        build = here if examined != PROJECT else None
    if build is None:
        fit = [
            build
            for build in table
            if (build.library, wheel(build)) == (code.library, package_of(code.path))
            and build.python in ("", python_tag())
            and build.architecture == code.architecture
        ]
        versions = dict.fromkeys(
            build.version for build in fit if f"{build.version}.".startswith(f"{wanted}." * bool(wanted))
        )
        write = _write(code, list(versions))
        if examined == PROJECT:
            write = f"{write}\n{_OR_HERE}"
        if here:
            what = f"{_told(code)} is examined by this build, not by the project: build-id {build_id}"
            raise UnknownBuild(what, write)
        raise UnknownBuild(f"{_told(code)} is not known: build-id {build_id}", write, code.path, build_id)
    for change in LIBRARIES[code.library].sites[code.architecture].keys() - _OF_MODELS:
        check_sites(code, build, change)
    return build


def check_sites(code: Code, build: Build, change: str) -> None:
    """Raise UnknownBuild if a known build has another number of sites of a change than it had when it was tested."""
    number = len(LIBRARIES[code.library].sites[code.architecture][change](code))
    if number != build.sites[change]:
        sites = f"{number} sites of {change} instead of {build.sites[change]}"
        raise UnknownBuild(f"{_told(code)} is not as it was tested: {sites}", "install its wheel again")


def _told(code: Code) -> str:
    from importlib import metadata  # it takes longer than the rest, and is for errors

    package = package_of(code.path)
    try:
        return f"this build of {code.library}, of {package} {metadata.version(package)},"
    except metadata.PackageNotFoundError:
        return f"this build of {code.library}"


def _write(code: Code, versions: Sequence[str]) -> str:
    package = package_of(code.path)
    wheels = f"{package} {' or '.join(versions)}" if versions else f"none of {package}"
    return f"wheels for {code.architecture.replace('_', '-')} and {python_tag()} that are known: {wheels}"


def _what_works(file: Path) -> Iterator[str]:
    """Yield lines about a build without a row: what is not as in those that have one, and what it is good for."""
    add, works = "", "exports and compiles, without a change of its code"
    try:
        examined(file)
        yield "its code and its messages are as in those that are known"
        add = "to add this one, in a checkout of stagec: python tools/known_builds.py add WHEEL"
    except PatchError as error:
        yield f"{error}"
        if _fields(file)[1]:
            works = "exports, and compiles nothing"
    yield f'it loads what it has compiled itself; with examined = "none" in [manifest], it {works}'
    yield from filter(None, [add])


@functools.cache
def check_messages(code: Code) -> None:
    """Raise UnknownBuild if a library whose code stays as it is has other messages than those that are known."""
    build_id = code.build_id()
    if not any(build.build_id == build_id for build in rows()):
        _, others = _fields(code.path)
        if others:
            raise UnknownBuild(f"{_told(code)} writes other messages than those that are known", "; ".join(others))


def python_tag() -> str:
    """Return the tag of this process's Python in the names of wheels."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}{'t' * ('t' in sys.abiflags)}"


def examined(path: Path) -> Build:
    """Return the facts in the file of a library, without version, Python and test.

    Raises PatchError if it is another library, or differs from the known builds. All builds have the same field numbers
    (`Library.messages`): if one differs, look at the code that edits the message.
    """
    if path.name not in LIBRARIES:
        raise PatchError(f"stagec changes no {path.name}")
    library = LIBRARIES[path.name]
    with mapped(path) as code:
        if code.architecture not in library.sites:
            raise PatchError(f"stagec changes no {path.name} for {code.architecture}")
        sites = {change: len(find(code)) for change, find in library.sites[code.architecture].items()}
        hosts = len(list(cpuid.hosts(code))) if "cpuid" in sites else 0
        build_id = code.build_id()
    others = [f"no site of {change}" for change, number in sites.items() if not number]
    if hosts > 1:
        others.append(f"LLVM detects the host in {hosts} places, not in one")
    lacks, more = _fields(path)
    if others or more:
        raise PatchError(f"{path.name} is not as those that are known: {'; '.join([*others, *more])}")
    package = package_of(path)
    package = "" if package == library.package else package
    return Build(path.name, "", "", build_id, sites, lacks, architecture=code.architecture, package=package)


def _fields(path: Path) -> tuple[list[str], list[str]]:
    """Return the fields that a library's messages lack, and how its messages are not as those of the known builds."""
    library = LIBRARIES[path.name]
    with elf.opened(path) as file:
        messages = descriptors.read(file) if library.messages else {}
    lacks: list[str] = []
    others: list[str] = []
    for root, paths in library.messages.items():
        for names, numbers in paths.items():
            # A library that has dropped a field is fine, if no other field has its number now: stagec looks for it in
            # vain. A field with another number, or a number with another meaning, would be edited wrongly and in
            # silence.
            present = _numbers(messages, root, names.split("."))
            if present == numbers[: len(present)] and not _used(messages, root, numbers[: len(present) + 1]):
                lacks.append(names)
            elif present != numbers:
                others.append(f"{root} has {names} at {present}, not at {numbers}")
        # A new kind of thunk that holds others would keep what varies in those: all such fields must be in the table.
        others += [f"{root} has another at {names}" for names in _own(messages, root) if names not in paths]
    return lacks, others


def _numbers(messages: descriptors.Messages, root: str, names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of a path of names, as far as there are fields of these names."""
    field = messages.get(root, {}).get(names[0])
    if field is None:
        return ()
    return (field.number, *(_numbers(messages, field.type_name, names[1:]) if names[1:] else ()))


def _used(messages: descriptors.Messages, root: str, numbers: Sequence[int]) -> bool:
    """Whether there is a field at a path of numbers."""
    fields = [field for field in messages.get(root, {}).values() if field.number == numbers[0]]
    return bool(fields) and (not numbers[1:] or _used(messages, fields[0].type_name, numbers[1:]))


def _own(messages: descriptors.Messages, root: str) -> Iterator[str]:
    """Yield the paths from a message to others of its kind."""
    leading = {root}  # the messages that hold one, at whatever depth
    while more := {
        name
        for name, fields in messages.items()
        if name not in leading and any(field.type_name in leading for field in fields.values())
    }:
        leading |= more

    def walk(message: str, path: tuple[str, ...], seen: frozenset[str]) -> Iterator[str]:
        for name, field in messages.get(message, {}).items():
            if field.type_name == root:
                yield ".".join((*path, name))
            elif field.type_name in leading and field.type_name not in seen:
                yield from walk(field.type_name, (*path, name), seen | {field.type_name})

    yield from walk(root, (), frozenset())
