"""Specs: the part of a manifest that an action gets.

The planner writes them, actions read them, as canonical JSON. A spec holds what can change the bytes of its artifact
and nothing else, so that editing one function rebuilds that function alone. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

from stagec.core.builds import naming
from stagec.core.messages.errors import Problem, StagecError

Scalar = str | bool | int | float
CompilerOption = Scalar | bytes
"""The value of a compiler option; only `fdo_profile` has bytes."""
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
"""Operations with which devices exchange arrays, by XLA's names, sorted."""
COMPUTED_ON: Mapping[str, str | int] = {"isa": "AVX2", "core": "generic", "parallelism": 8}
"""The CPU on which a model computes while it is imported and traced, on every machine that builds.

Every machine must have it. jaxlib needs AVX, and with no more than that it cannot convert to bfloat16; on aarch64, all
machines have the core. The parallelism is that of a target by default.
"""
EXAMINED_HERE, PROJECT, NOT_EXAMINED = "here", "project", "none"
"""`examined` of a target, and of what a model computes: whose examination lets a compiler's code be changed.

"here": that of the project, or of the build itself where the project has none. "project": that alone. "none": no code
is changed, and results follow the machine. The `versions` of a description say where it was the build itself.
"""
FOLLOWS_MACHINE = f'"examined":"{NOT_EXAMINED}"'
"""What the JSON has of a spec, or of a part of it, whose results do; rules/toolchain.bzl looks for it too."""
T = TypeVar("T")


@dataclass(frozen=True)
class FunctionSpec:
    """The spec of an export action; the fields are the keys of `[functions.NAME]`.

    name: name of the function; several signatures of it have one name, and a variant each.
    manifest: path of the manifest, relative to the workspace; files that `args` names are relative to its folder.
    entry: `package.module:attribute`, or the path of a file relative to the manifest's folder.
    args: a tree of avals in canonical spelling for each positional argument; empty if `avals` is given.
    avals: `package.module:attribute` of the function that returns the arguments; None if they are written.
    platforms: platforms of the exported artifact, in the order of its platform index; never empty.
    constraints: constraints on symbolic dimensions, in the form that jax.export accepts.
    variant: name of the variant whose static values `static` has; "" for a function without variants.
    mesh: name and size of each axis of the mesh, in order; empty without a mesh.
    axis_types: JAX's name of the type of each axis; empty if all are Auto.
    in_shardings: a prefix of the tree of positional arguments whose leaves are strings for `partitions.parse`; None:
        not given.
    out_shardings: the same for the result.
    disabled_checks: safety checks of jax.export to switch off: "platform"; custom calls stand in `allow_custom_calls`.
    allow_custom_calls: targets of custom calls that the module may have although stagec does not know them.
    matmul_precision: a value of jax_default_matmul_precision; None: JAX's own default.
    padding: dimension -> "fill" and "mask", for the loader. It changes no byte of the artifact.
    bind: argument -> "file" and "prefix": the weights that a loader passes; "external": whether they stay outside the
        bundle. It changes no byte of the artifact.
    serve: "inputs" and "outputs", if there are any: path of an array -> its name in a server; "state" and "rows", as
        the manifest has them. It changes no byte of the artifact.
    golden: empty, or "seed", "inputs" (a file, or ""), "bucket", "rtol" and "atol" of inputs and outputs to store,
        "optimized" if programs of devices are run on CPUs, and
        "outputs": path of a result -> its own "rtol" and "atol". No byte of the artifact differs.
    devices: the devices of the targets that are not CPUs, each once, from `jax_device` of a target. JAX may lower
        another module for one of them than that of the exported artifact.
    plugins: platforms whose plugin has a part in lowering the function: "cuda", for kernels of Mosaic.
    prng_impl: a value of jax_default_prng_impl; None: JAX's own default.
    environment: variables that are set before the function's module is imported.
    host_callbacks: "refuse" or "drop", for callbacks into Python without results; those with results are refused.
    frontend: the name of the one of `frontends.FRONTENDS` that exports the entry.
    stablehlo: the newest version of StableHLO that each jaxlib which its targets name reads, such as "1.17.0"; None:
        they name none, and the JAX that exports chooses.
    computed_on: the CPU on which it computes while it is imported and traced: "isa", on aarch64 "core", and
        "parallelism", as targets have them. "examined" is that of the targets if it is not "here".
    """

    name: str
    manifest: str
    entry: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    avals: str | None
    platforms: Sequence[str]
    constraints: Sequence[str]
    static: Mapping[str, Any]
    donate_argnums: Sequence[int]
    donate_argnames: Sequence[str]
    keep_unused: bool
    inline: bool
    vjp_order: int
    enable_x64: bool = False
    variant: str = ""
    mesh: Sequence[Sequence[Any]] = ()
    axis_types: Sequence[str] = ()
    in_shardings: Any = None
    out_shardings: Any = None
    disabled_checks: Sequence[str] = ()
    allow_custom_calls: Sequence[str] = ()
    matmul_precision: str | None = None
    padding: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bind: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)
    golden: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[Mapping[str, Any]] = ()
    plugins: Sequence[str] = ()
    prng_impl: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    host_callbacks: str = "refuse"
    frontend: str = "jax"
    stablehlo: str | None = None
    computed_on: Mapping[str, str | int] = field(default_factory=lambda: dict(COMPUTED_ON))

    @property
    def artifact(self) -> str:
        """The name of the artifacts: the function's name, and `-VARIANT` if it has variants."""
        return naming.artifact(self.name, self.variant)

    @property
    def key(self) -> str:
        """The key of the function in its manifest, or of its variant."""
        return naming.key(self.name, self.variant)

    def problem(self, key: str, what: str, write: str = "") -> StagecError:
        """Return an error about `key` of this function; "" is the function itself."""
        table = self.key if not key or key.startswith("static") else f"functions.{self.name}"
        return StagecError(Problem(self.manifest, f"{table}{key and '.'}{key}", what, write))

    def unknown_custom_calls(self, names: Sequence[str]) -> StagecError:
        """Return the error for custom calls that nobody is known to provide."""
        what = f"custom calls that neither JAX nor jaxlib provides: {', '.join(names)}"
        listed = ", ".join(f'"{name}"' for name in names)
        write = f"write allow_custom_calls = [{listed}], and register them where the artifact is loaded"
        return self.problem("", what, write)


@dataclass(frozen=True)
class CpuTarget:
    """An x86-64 CPU to compile for: a `[targets.NAME]` table with platform "cpu".

    isa: the instruction set that the code may use, by XLA's name.
    parallelism: the most partitions into which XLA may split an operation.
    compiler_options: XLA flags without their dashes, and the others that `core.builds.compiler_options` knows.
    examined: whose examination of the compiler's build counts, as [manifest] has it; the same in all targets.
    """

    name: str
    isa: str
    parallelism: int
    compiler_options: Mapping[str, CompilerOption]
    platform: Literal["cpu"] = "cpu"
    examined: str = EXAMINED_HERE

    def summary(self) -> list[str]:
        """Return what a person wants to read of it."""
        return [f"cpu {self.isa}", f"parallelism {self.parallelism}"]

    def jax_device(self) -> None:
        """JAX lowers the same for every CPU."""


@dataclass(frozen=True)
class Aarch64Target:
    """An aarch64 CPU to compile for: a `[targets.NAME]` table with platform "cpu" and architecture "aarch64".

    core: the core whose instructions the code may use, by LLVM's name. The others are as of `CpuTarget`.
    """

    name: str
    core: str
    parallelism: int
    compiler_options: Mapping[str, CompilerOption]
    architecture: Literal["aarch64"] = "aarch64"
    platform: Literal["cpu"] = "cpu"
    examined: str = EXAMINED_HERE

    def summary(self) -> list[str]:
        """Return what a person wants to read of it."""
        return [f"cpu {self.architecture} {self.core}", f"parallelism {self.parallelism}"]

    def jax_device(self) -> None:
        """JAX lowers the same for every CPU."""


AnyCpuTarget: TypeAlias = CpuTarget | Aarch64Target
"""A CPU to compile for, of any architecture."""
_MEGACORE = frozenset({"TPU v4", "TPU v5"})
"""Kinds of TPUs that present both TensorCores of a chip as one device."""


@dataclass(frozen=True)
class TpuTarget:
    """TPUs to compile for: a `[targets.NAME]` table with platform "tpu".

    topology: generation and chips along each axis, such as "v5e:2x2".
    chips_per_host: chips of one host along each axis, such as "2x4"; "" is 2x2.
    slices: how many slices of that topology.
    figures: fields of `hardware.tpu_topologies.Generation`: the properties of a chip.
    """

    name: str
    topology: str
    chips_per_host: str
    slices: int
    figures: Mapping[str, Any]
    compiler_options: Mapping[str, CompilerOption]
    platform: Literal["tpu"] = "tpu"
    examined: str = EXAMINED_HERE

    def summary(self) -> list[str]:
        """Return what a person wants to read of it."""
        return [f"tpu {self.topology}", *([f"{self.slices} slices"] if self.slices > 1 else [])]

    def jax_device(self) -> dict[str, Any]:
        """Return the platform, and what JAX and kernels ask of a device, by the names of `jax.Device`."""
        kind = self.figures["device_kind"]
        return {"platform": self.platform, "device_kind": kind, "num_cores": 2 if kind in _MEGACORE else 1}


@dataclass(frozen=True)
class GpuTarget:
    """GPUs to compile for: a `[targets.NAME]` table with platform "cuda" (NVIDIA's) or "rocm" (AMD's).

    device: short name of the device, such as "h100-sxm", or the file that describes it.
    topology: partitions x hosts x devices of each host, such as "1x1x8".
    figures: fields of `hardware.gpu_devices.Device`: the device in full.
    autotuning: the file with results of autotuning, by its path relative to the manifest's folder; "" without one.
    autotuning_results: the content of that file (`hardware.autotuning`).
    """

    name: str
    device: str
    topology: str
    figures: Mapping[str, Scalar]
    compiler_options: Mapping[str, CompilerOption]
    autotuning: str = ""
    autotuning_results: str = ""
    platform: Literal["cuda", "rocm"] = "cuda"
    examined: str = EXAMINED_HERE

    def summary(self) -> list[str]:
        """Return what a person wants to read of it."""
        return [f"{self.platform} {self.device}", *([self.topology] if self.topology != "1x1x1" else [])]

    def jax_device(self) -> dict[str, Any]:
        """Return the platform, and what JAX and kernels ask of a device, by the names of `jax.Device`."""
        capability = str(self.figures["compute_capability"])
        return {
            "platform": self.platform,
            "device_kind": self.figures["name"],
            "core_count": self.figures["core_count"],
            # As clients of devices say it: without the features that code may use besides.
            "compute_capability": capability.rstrip("af") if self.platform == "cuda" else capability.partition(":")[0],
        }


TargetSpec: TypeAlias = AnyCpuTarget | TpuTarget | GpuTarget
"""Hardware to compile for."""
_TARGETS: Mapping[str, type[TargetSpec]] = {
    "cpu": CpuTarget,
    "tpu": TpuTarget,
    "cuda": GpuTarget,
    "rocm": GpuTarget,
}
"""By platform; one for CPUs that has an architecture is an `Aarch64Target`."""


@dataclass(frozen=True)
class Limits:
    """The limits of an executable; None: no limit. They change no byte of it.

    key: key path of the table in the manifest; "" without one.
    peak_memory: bytes on one device.
    collectives: the most exchanges of arrays between devices, in all or for some of `COLLECTIVES`.
    executable_size: bytes of the file.
    registers: of a thread of a kernel. shared_memory: bytes of a block of a kernel. spills: bytes that a thread of each
        kernel stores and loads because registers run out, added up. Executables for GPUs alone have kernels.
    compile_time: seconds; advice only.
    allow_unknown: whether a metric that is not known is within its limit.
    """

    key: str = ""
    peak_memory: int | None = None
    flops: int | None = None
    bytes_accessed: int | None = None
    collectives: int | Mapping[str, int] | None = None
    executable_size: int | None = None
    registers: int | None = None
    shared_memory: int | None = None
    spills: int | None = None
    compile_time: float | None = None
    allow_unknown: bool = False


@dataclass(frozen=True)
class ExecutableSpec:
    """The spec of a compile action.

    manifest: path of the manifest, relative to the workspace.
    bucket: a size for each symbolic dimension; empty for a function without buckets.
    variant: name of the variant; "" for a function without variants.
    """

    function: str
    manifest: str
    target: TargetSpec
    bucket: Mapping[str, int]
    variant: str = ""
    limits: Limits = Limits()

    @property
    def key(self) -> str:
        """The key of the function in its manifest, or of its variant."""
        return naming.key(self.function, self.variant)


def to_json(spec: object) -> str:
    """Return canonical JSON of a plain value or a dataclass: equal values give equal strings. No newline at the end."""
    value = asdict(spec) if hasattr(spec, "__dataclass_fields__") else spec  # type: ignore[call-overload]
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def function_spec(text: str) -> FunctionSpec:
    """Read the spec of an export action. Raises ValueError when the string is something else."""
    return _build(FunctionSpec, json.loads(text))


def executable_spec(text: str) -> ExecutableSpec:
    """Read the spec of a compile action. Raises ValueError when the string is something else."""
    data = json.loads(text)
    target = data.get("target") if isinstance(data, dict) else None
    if target:
        data = {**data, "target": target_spec(target), "limits": _build(Limits, data.get("limits"))}
    return _build(ExecutableSpec, data)


def target_spec(data: Any) -> TargetSpec:
    """Read a target by its platform. Raises ValueError when it is something else."""
    kind = _TARGETS.get(str(data.get("platform"))) if isinstance(data, dict) else None
    if kind is CpuTarget and "architecture" in data:
        kind = Aarch64Target
    if kind is None:
        raise ValueError("not a target")
    # A description leaves out the default, which most have.
    return _build(kind, {"examined": EXAMINED_HERE, **data})


def _build(kind: type[T], data: Any) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    # All fields or none: a spec of another version could mean something else by the same keys, and a default would hide
    # it.
    if not isinstance(data, dict) or set(data) != known:
        raise ValueError(f"not a {kind.__name__}")
    return kind(**data)
