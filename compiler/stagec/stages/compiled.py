"""`Compiled`: an executable, with its description, that can be called. Compilation runs without JAX.

Fields and methods are those of `jax.stages.Compiled` (https://docs.jax.dev/en/latest/jax.stages.html).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlib import _jax, xla_client
from jaxlib.mlir import ir

from stagec.backends import analysis, compilation
from stagec.backends.compilation import CannotCompile, CompiledModule, DoesNotFit, Hardware
from stagec.backends.cpu import compiler as cpu
from stagec.backends.cpu import x86
from stagec.bundle import archive, index
from stagec.bundle.description import Description, DeviceAssignment, Target
from stagec.core import components, json_shapes, phases
from stagec.core.avals import Aval
from stagec.core.compiler_options import told
from stagec.core.errors import Problem, StagecError
from stagec.core.refusal import CallError, LoadError
from stagec.core.specs import CompilerOption, ExecutableSpec, Scalar, TargetSpec
from stagec.core.trees import Tree, argument_path
from stagec.core.version import VERSION
from stagec.pjrt import arrays, clients, compatibility, host, locations, turns
from stagec.pjrt.calling_convention import Signature
from stagec.pjrt.custom_calls import TOOLCHAIN, provider, register_custom_calls
from stagec.pjrt.executable import Executable
from stagec.pjrt.shardings import Sharding as OnDevices
from stagec.stages import abi, by_device, limits, mlir
from stagec.stages.exported import Exported, NotExported
from stagec.stages.lowered import CannotLower, Lowered, args_info, donate_argnums, lower_exported, out_info
from stagec.stages.shardings import (
    AXIS_TYPES,
    Format,
    GSPMDSharding,
    Layout,
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    named_sharding,
)

_EXECUTABLE, _DESCRIPTION = "executable.xla", "description.json"
_AXES = json_shapes.record(
    {
        "axis_sizes": json_shapes.array(json_shapes.count),
        "axis_names": json_shapes.array(json_shapes.text),
        "axis_types": json_shapes.array(json_shapes.constant(*AXIS_TYPES)),
    },
    rest=json_shapes.anything,
)
_INDEX = json_shapes.record(
    {
        "format": json_shapes.count,
        "kind": json_shapes.constant("compiled"),
        "mesh": json_shapes.either("a mesh, or nothing,", _AXES, json_shapes.constant(None)),
        "members": index.MEMBERS,
    }
)
"""Shape of the index of what `serialize` writes; its format is that of bundles."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """An executable and what is known of it.

    Methods are those of `jax.stages.Compiled` (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Compiled).

    executable: bytes that jaxlib's client loads; canonical ones if it was compiled for a named target.
    description: calling convention, target, costs and memory.
    hlo: the optimized program as text; None after `deserialize`, until you ask for it.
    mesh: the mesh over which its arrays are split; None if it is not known.
    stablehlo: the module that XLA compiled, in StableHLO's portable form; None unless it was built from a manifest.

    Call it with numpy arrays, in the structure and the shapes that it was compiled for. Results are numpy arrays in
    plain containers, or in objects of the model's types if their module is imported. Pass and read arrays on several
    devices as a whole. A PRNG key is its uint32 words. A 64-bit array may stand for a 32-bit one, unless JAX's
    `jax_enable_x64` is set. A call raises CallError if an argument does not fit.
    """

    executable: bytes = field(repr=False)
    description: Description
    hlo: str | None = field(default=None, repr=False)
    mesh: Mesh | None = None
    stablehlo: bytes | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Compiled({self.description.function}, target {self.description.target.name})"

    @property
    def nr_devices(self) -> int:
        """How many devices it runs on."""
        return self.description.nr_devices

    @property
    def in_tree(self) -> Tree:
        """Structure of `(args, kwargs)`."""
        return self.description.in_tree

    @property
    def out_tree(self) -> Tree:
        """Structure of the result."""
        return self.description.out_tree

    @property
    def args_info(self) -> Any:
        """An `ArgInfo` for each argument, in the structure `(args, kwargs)`."""
        return args_info(self.in_tree, self.description.in_avals, self.description.donated)

    @property
    def in_avals(self) -> Any:
        """The `Aval` of each argument, in the structure `(args, kwargs)`."""
        return self.in_tree.unflatten(self.description.in_avals)

    @property
    def out_info(self) -> Any:
        """An `OutInfo` for each result, in the structure of the result."""
        return out_info(self.out_tree, self.description.out_avals, self._output_formats())

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the donated arguments, among the leaves of the arguments."""
        return donate_argnums(self.description.donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the executable.

        Raises CallError ("structure", "dtype", "shape", "deleted") when an argument does not fit.
        """
        signature = self._signature
        return signature.unflatten(self._run(signature.flatten(args, kwargs)))

    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Run the executable; return the result, its leaves, and the leaves of the arguments.

        It raises what a call raises. JAX's is a static method and wants `Compiled._params` first; `Compiled.call(self,
        ...)` is the same here.
        """
        signature = self._signature
        leaves = signature.flatten(args, kwargs)
        results = self._run(leaves)
        return signature.unflatten(results), results, leaves

    @property
    def _params(self) -> Compiled:
        """What JAX's code passes to `Compiled.call` first."""
        return self

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the executable on the leaves of `(args, kwargs)`; return the leaves of the result.

        Raises CallError ("dtype", "shape", "deleted").
        """
        return self._run(self._signature.check_dtypes(leaves))

    def _run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        for leaf, aval, path in zip(leaves, self.description.in_avals, self._signature.paths, strict=True):
            if leaf.shape != aval.shape:
                given = Aval(aval.dtype, leaf.shape)
                raise CallError("shape", f"{self.description.function}: {path} is {given}, {aval} is wanted")
        return self._signature.call(leaves)

    @functools.cached_property
    def _signature(self) -> Signature:
        target = self.description.target
        if target.platform != "cpu":
            raise LoadError("platform", f"it is for {target.device_kind}; this process runs executables for CPUs only")
        signature = Signature(self.description.function, self.description)
        devices = clients.devices("cpu", self.nr_devices)
        signature.load(self.executable, tuple(self.description.custom_calls), devices, self.description.memory_kinds)
        return signature

    @property
    def _loaded(self) -> Executable:
        assert self._signature.executable is not None
        return self._signature.executable

    def as_text(self) -> str:
        """Return the optimized program as HLO text."""
        return self.hlo if self.hlo is not None else str(self.runtime_executable().hlo_modules()[0].to_string())

    def cost_analysis(self) -> dict[str, float]:
        """Return XLA's estimate for the optimized program, by XLA's names: "flops", "bytes accessed" and others."""
        return dict(self.runtime_executable().cost_analysis())

    def memory_analysis(self) -> _jax.CompiledMemoryStats:
        """Return XLA's sizes in bytes: `argument_size_in_bytes`, `temp_size_in_bytes` and others."""
        return self.runtime_executable().get_compiled_memory_stats()

    def runtime_executable(self) -> _jax.LoadedExecutable:
        """Return jaxlib's loaded executable."""
        return self._loaded.loaded

    @property
    def input_shardings(self) -> Any:
        """How each argument is split, in the structure `(args, kwargs)`; None for one that the program drops."""
        return self.in_tree.unflatten(self._inputs())

    @property
    def output_shardings(self) -> Any:
        """How each result is split, in the structure of the result."""
        return self.out_tree.unflatten(self._outputs())

    @property
    def input_formats(self) -> Any:
        """Layout and sharding of each argument, in the structure `(args, kwargs)`."""
        layouts = self._kept(list(map(_layout, self.runtime_executable().get_parameter_layouts())))
        return self.in_tree.unflatten(list(map(Format, layouts, self._inputs())))

    @property
    def output_formats(self) -> Any:
        """Layout and sharding of each result, in the structure of the result."""
        return self.out_tree.unflatten(self._output_formats())

    def _output_formats(self) -> list[Format]:
        layouts = map(_layout, self.runtime_executable().get_output_layouts())
        return list(map(Format, layouts, self._outputs()))

    def _inputs(self) -> list[Sharding | None]:
        taken = [self.description.in_avals[i] for i in self.description.kept_var_idx]
        return self._kept(self._shardings(self._loaded.parameter_shardings, taken))

    def _outputs(self) -> list[Sharding]:
        return self._shardings(self._loaded.output_shardings, self.description.out_avals)

    def _kept(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the arguments that the program takes, and None for the others."""
        by_index = dict(zip(self.description.kept_var_idx, values, strict=True))
        return [by_index.get(i) for i in range(len(self.description.in_avals))]

    def _shardings(self, found: Sequence[OnDevices], avals: Sequence[Aval]) -> list[Sharding]:
        result: list[Sharding] = []
        for one, aval in zip(found, avals, strict=True):
            if one.spec is None:
                result.append(SingleDeviceSharding(memory_kind=one.memory_kind))
                continue
            try:
                named = named_sharding(one.spec, len(aval.shape), self.mesh or Mesh((), ()))
                result.append(dataclasses.replace(named, memory_kind=one.memory_kind))
            except ValueError:
                result.append(GSPMDSharding(str(one.spec), one.memory_kind))
        return result

    def serialize(self) -> bytes:
        """Return bytes for `deserialize`, without pickle.

        They are for processes with this jaxlib, on machines that have what the target requires: the features of this
        machine's CPU where no target was named.
        """
        members = {_EXECUTABLE: self.executable, _DESCRIPTION: self.description.to_json().encode()}
        found = {
            "format": archive.FORMAT,
            "kind": "compiled",
            "mesh": dataclasses.asdict(self.mesh) if self.mesh else None,
            "members": archive.members_table(members),
        }
        return archive.encode({archive.INDEX: archive.encode_index(found), **dict(sorted(members.items()))})

    @staticmethod
    def deserialize(serialized: bytes) -> Compiled:
        """Read what `serialize` wrote.

        Raises LoadError when the bytes are something else, are damaged, or are for another jaxlib or CPU. XLA is given
        the executable at the first use.
        """
        name = "a serialized Compiled"
        found = archive.Archive(name, bytes(serialized), _INDEX)
        try:
            description = Description.from_json(found[_DESCRIPTION])
            axes = found.index["mesh"]
            mesh = _read_mesh(axes) if axes else None
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError("format", f"{name}: {error}") from error
        made_with, here = description.versions["jaxlib"], compatibility.version()
        if made_with != here:
            raise LoadError("jaxlib-version", f"{name}: it was compiled with jaxlib {made_with}, here is {here}")
        missing = host.missing_cpu_flags(description.target.requires)
        if missing:
            raise LoadError("cpu-feature", f"{name}: this machine's CPU cannot run it: it lacks {', '.join(missing)}")
        return Compiled(found[_EXECUTABLE], description, None, mesh)


def compile_lowered(lowered: Lowered, options: Mapping[str, CompilerOption], target: TargetSpec | None) -> Compiled:
    """Compile for the CPU in front of us, or for a named target; see `Lowered.compile`."""
    refusal = compatibility.refusal()
    if refusal:
        raise CannotCompile(refusal)
    options = compilation.checked(options)
    platform = target.platform if target else "cpu"
    if lowered.platform != platform:
        raise CannotCompile(
            f"{lowered.fun_name} is lowered for {lowered.platform}; "
            f"{f'target {target.name} is for' if target else 'without a target, it is compiled for'} {platform}"
        )
    if target is None:
        return _compile_for_host(lowered, options)
    if platform == "cpu":
        register_custom_calls(lowered.custom_calls)
    backend = compilation.backend(platform)
    if any(os.environ.get(name) != value for name, value in backend.environment(target).items()):
        raise CannotCompile(
            f"this process is not prepared to compile for {target.name}: call prepare_process(target) of "
            f"stagec.backends.{platform} before jaxlib is first used, or compile for this machine (target=None)"
        )
    named = dataclasses.replace(target, compiler_options={**target.compiler_options, **options})
    hardware, mesh = backend.hardware(named), _mesh(lowered)
    sizes = mesh.axis_sizes if mesh else (lowered.nr_devices,) if lowered.nr_devices > 1 else ()
    with phases.phase("compile"), mlir.make_context():
        module = backend.compile_module(ir.Module.parse(lowered.module), named, sizes)
    description = _describe(
        lowered,
        Target(
            name=named.name,
            platform=named.platform,
            device_kind=hardware.device_kind,
            requires=hardware.requires,
            compiler_options=dict(sorted(told(named.compiler_options).items())),
            settings=_settings(named),
        ),
        module,
        hardware,
        mesh,
    )
    versions = {**description.versions, **(hardware.versions or {})}
    description = description._replace(versions=dict(sorted(versions.items())))
    return Compiled(module.executable, description, module.hlo, mesh)


def _settings(target: TargetSpec) -> dict[str, Scalar]:
    """Return the fields that only targets of this platform have."""
    common = ("name", "platform", "compiler_options")
    return {key: value for key, value in _fields(target).items() if key not in common}


def _fields(target: TargetSpec) -> dict[str, Any]:
    """Return the fields of a target, with a digest in the place of a whole file."""
    fields = dataclasses.asdict(target)
    fields["compiler_options"] = told(target.compiler_options)
    if fields.get("autotuning_results"):
        fields["autotuning_results"] = hashlib.sha256(fields["autotuning_results"].encode()).hexdigest()
    return fields


def _compile_for_host(lowered: Lowered, options: Mapping[str, CompilerOption]) -> Compiled:
    loaded = load_lowered(lowered, options, clients.devices("cpu", lowered.nr_devices))
    serialized = bytes(loaded.loaded.serialize())
    hlo = str(loaded.loaded.hlo_modules()[0].to_string())
    features = cpu.stored_features(serialized)
    requires = tuple(flag for flag in sorted(host.cpu_flags()) if x86.llvm_names([flag]) <= features)
    # XLA stores preferences of the code generator as well, and calls them missing when the executable is loaded.
    raw = cpu.canonicalize(serialized, x86.BASELINE | x86.llvm_names(requires))
    target = Target(
        name="host",
        platform="cpu",
        device_kind=cpu.stored_cpu_name(serialized),
        requires=requires,
        compiler_options=dict(sorted(told(options).items())),
        settings={"isa": "", "parallelism": os.cpu_count() or 1},
    )
    figures = compilation.cost(loaded.loaded.cost_analysis()), compilation.memory(loaded.loaded)
    module, mesh = CompiledModule(raw, *figures, hlo, range(lowered.nr_devices)), _mesh(lowered)
    description = _describe(lowered, target, module, Hardware(target.device_kind), mesh)
    compiled = Compiled(raw, description, hlo, mesh)
    signature = Signature(lowered.fun_name, description)
    signature.executable = loaded
    compiled.__dict__["_signature"] = signature
    return compiled


def _mesh(lowered: Lowered) -> Mesh | None:
    """Return the mesh of the module's shardings: the named one, which knows types of axes, or the declared one."""
    if lowered.nr_devices == 1:
        return None
    named = [s.mesh for s in (*lowered.in_shardings, *lowered.out_shardings) if isinstance(s, NamedSharding)]
    with mlir.make_context():
        axes = mlir.mesh(ir.Module.parse(lowered.module)) or {}
    declared = Mesh(tuple(axes.values()), tuple(axes))
    return next((mesh for mesh in (*named, declared) if mesh.size == lowered.nr_devices), None)


def load_lowered(lowered: Lowered, options: Mapping[str, CompilerOption], devices: Sequence[_jax.Device]) -> Executable:
    """Compile for devices of this process with JAX's own settings: XLA chooses shardings where none is given.

    devices: as many as the module is lowered for. Raises CannotCompile when XLA refuses the module or an option.
    """
    if lowered.platform == "cpu":
        register_custom_calls(lowered.custom_calls)
    count = lowered.nr_devices
    settings = xla_client.CompileOptions()
    settings.num_replicas, settings.num_partitions = 1, count
    build = settings.executable_build_options
    build.use_spmd_partitioning = True
    kept = [lowered.in_shardings[i] for i in lowered.kept_var_idx]
    build.allow_spmd_sharding_propagation_to_parameters = [s is None for s in kept]
    build.allow_spmd_sharding_propagation_to_output = [s is None for s in lowered.out_shardings]
    compilation.set_options(settings, options)
    with mlir.make_context():
        module = ir.Module.parse(lowered.module)
        # Exports from before Shardy have no mesh, and shardings in the older form.
        build.use_shardy_partitioner = count == 1 or mlir.mesh(module) is not None
        settings.device_assignment = clients.assignment([device.id for device in devices])
        try:
            with turns.for_this_machine():
                loaded = devices[0].client.compile_and_load(module, _jax.DeviceList(tuple(devices)), settings)
        except _jax.JaxRuntimeError as error:
            raise compilation.refusal(str(error), options) from error
    parameters, results = (
        [(tuple(map(int, aval.shape)), arrays.dtype_of(aval)) for aval in avals]
        for avals in ([lowered.flat_in_avals[i] for i in lowered.kept_var_idx], lowered.flat_out_avals)
    )
    kinds = {number: kind for number, kind in enumerate(lowered.in_memory_kinds) if kind}
    try:
        return Executable(loaded, parameters, results, devices, kinds)
    except ValueError as error:
        raise CannotCompile(f"{lowered.fun_name} cannot be called: {error}") from error


@phases.phase("analyze")
def _describe(
    lowered: Lowered,
    target: Target,
    module: CompiledModule,
    hardware: Hardware,
    mesh: Mesh | None,
) -> Description:
    """Describe an executable that comes from no manifest."""
    return Description(
        manifest="",
        function=lowered.fun_name,
        variant="",
        target=target,
        bucket={},
        in_tree=lowered.in_tree,
        in_avals=lowered.flat_in_avals,
        out_tree=lowered.out_tree,
        out_avals=lowered.flat_out_avals,
        nr_devices=lowered.nr_devices,
        device_assignment=_assignment(module, mesh),
        kept_var_idx=lowered.kept_var_idx,
        donated=lowered.donated,
        # XLA adds calls of its own and drops dead ones: the optimized program is what runs.
        custom_calls={name: _provider(lowered, name) for name in sorted(_custom_calls(module.hlo))},
        cost_analysis=module.cost_analysis,
        memory_analysis=module.memory_analysis,
        analysis=analysis.of_module(module, hardware),
        versions={"jaxlib": compatibility.version(), "stagec": VERSION},
        abi=abi.of_module(lowered, module.hlo),
        exported_sha256="",
        stablehlo_sha256="",
        executable_sha256=hashlib.sha256(module.executable).hexdigest(),
        executable_bytes=len(module.executable),
        components={},
    )


def _assignment(module: CompiledModule, mesh: Mesh | None) -> DeviceAssignment | None:
    if len(module.device_ids) == 1:
        return None
    axes = (mesh.axis_names, mesh.axis_sizes) if mesh else ((), ())
    return DeviceAssignment(*axes, tuple(module.device_ids), tuple(map(tuple, module.coords)))


def compile_exported(serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"") -> Compiled:
    """Specialize a serialized `Exported` to a bucket and compile it for a target, as `spec` says.

    lowered_for: what JAX lowers for devices, where that is another module (`by_device`): an executable is made of that.
    The process must have been prepared by the platform's backend. Raises StagecError when it cannot be lowered or
    compiled, or is over a limit.
    """
    exported, lowered = lower(serialized, spec, lowered_for)
    compiled = _compile(exported, lowered, spec)
    stablehlo = mlir.to_portable(lowered.module)
    description = compiled.description._replace(
        manifest=spec.manifest,
        function=spec.function,
        variant=spec.variant,
        bucket=dict(sorted(spec.bucket.items())),
        exported_sha256=hashlib.sha256(serialized).hexdigest(),
        stablehlo_sha256=hashlib.sha256(stablehlo).hexdigest(),
        components=_made_from(exported, lowered, spec),
    )
    hardware = compilation.backend(spec.target.platform).hardware(spec.target)
    problems = list(limits.exceeded(description, compiled.as_text(), hardware, exported, spec))
    if problems:
        raise StagecError(*problems)
    return dataclasses.replace(compiled, description=description, stablehlo=stablehlo)


def optimized_hlo(serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"") -> str:
    """Return what XLA makes of the program of `compile_exported`, as HLO text; also where that is over a limit.

    The process must have been prepared by the platform's backend. Raises StagecError when it cannot be lowered or
    compiled.
    """
    return _compile(*lower(serialized, spec, lowered_for), spec).as_text()


def _compile(exported: Exported, lowered: Lowered, spec: ExecutableSpec) -> Compiled:
    try:
        return lowered.compile(target=spec.target)
    except DoesNotFit as error:
        raise StagecError(limits.does_not_fit(error, exported, lowered, spec)) from error
    except CannotCompile as error:
        raise problem(error, spec, _how_to_locate(error, lowered)) from error


def made_from(serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"") -> components.Table:
    """Return the components of the executable that `compile_exported` makes of the same, without compiling.

    Raises StagecError when it cannot be lowered.
    """
    return _made_from(*lower(serialized, spec, lowered_for), spec)


@phases.phase("refine")
def lower(serialized: bytes, spec: ExecutableSpec, lowered_for: bytes = b"") -> tuple[Exported, Lowered]:
    """Specialize a serialized `Exported` as `spec` says; return it, or that for the target's device, too.

    Raises StagecError when it cannot be.
    """
    try:
        exported = Exported.deserialize(by_device.read(lowered_for, spec.target) or serialized)
        return exported, lower_exported(exported, spec.target.platform, spec.bucket)
    except (NotExported, CannotLower) as error:
        raise StagecError(Problem(spec.manifest, spec.key, str(error))) from error


def _made_from(exported: Exported, lowered: Lowered, spec: ExecutableSpec) -> components.Table:
    backend = compilation.backend(spec.target.platform)
    try:
        hardware = backend.hardware(spec.target)
    except CannotCompile as error:
        raise problem(error, spec) from error
    paths = [*map(argument_path, lowered.in_tree.paths()), *(f"result{path}" for path in lowered.out_tree.paths())]
    shardings = (*lowered.in_shardings, *lowered.out_shardings)
    return components.of_executable(
        {
            "function": spec.function,
            "target": {
                **_fields(spec.target),
                "device_kind": hardware.device_kind,
                "requires": list(hardware.requires),
            },
            "bucket": dict(sorted(spec.bucket.items())),
            "in_tree": lowered.in_tree.to_json(),
            "in_avals": list(map(str, lowered.flat_in_avals)),
            "out_tree": lowered.out_tree.to_json(),
            "out_avals": list(map(str, lowered.flat_out_avals)),
            "donated": lowered.donated,
            "kept_var_idx": lowered.kept_var_idx,
            "shardings": {path: _told(sharding) for path, sharding in zip(paths, shardings, strict=True) if sharding},
            "versions": {"jaxlib": compatibility.version(), "stagec": VERSION, **(hardware.versions or {})},
        },
        exported.mlir_module_serialized,
        backend.environment(spec.target),
    )


def problem(error: CannotCompile, spec: ExecutableSpec, write: str = "") -> StagecError:
    """Return the error of an executable with its place in the manifest. write: what to do, where `error` has none."""
    key = f"targets.{spec.target.name}.{error.key}" if error.key else spec.key
    return StagecError(Problem(spec.manifest, key, str(error), error.write or write))


def _how_to_locate(error: CannotCompile, lowered: Lowered) -> str:
    """Say how to find the lines of the model that XLA's message is about; "" where it is about no operation."""
    with mlir.make_context():
        operations = locations.of_module(ir.Module.parse(lowered.module))
    found = locations.locate(str(error.__cause__ or error), operations)
    names = list(dict.fromkeys(operation.name or operation.target or operation.opcode for operation in found))
    if not names:
        return ""
    return (
        f"it is about {', '.join(names)}; to see the lines, build the function with --output_groups=debug and write\n"
        f"stagec locate FILE.debug.mlir {shlex.quote(names[0])}"
    )


def _told(sharding: Any) -> str:
    """Return a sharding as text for a reader."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    mesh = ", ".join(f"{name} = {size}" for name, size in sharding.mesh.shape.items())
    return f"{sharding.spec} over {mesh}"


def _read_mesh(axes: Mapping[str, Any]) -> Mesh:
    return Mesh(tuple(axes["axis_sizes"]), tuple(axes["axis_names"]), tuple(axes["axis_types"]))


def _provider(lowered: Lowered, name: str) -> str:
    """Return who provides a custom call of the optimized program: XLA's compiler itself, where the module has none."""
    return provider(name) if name in lowered.custom_calls or lowered.platform == "cpu" else TOOLCHAIN


def _custom_calls(hlo: str) -> set[str]:
    return set(re.findall(r'custom_call_target="([^"]+)"', hlo))


def _layout(layout: _jax.PjRtLayout) -> Layout:
    found = layout._xla_layout()
    tiling = tuple(map(tuple, found.tiling()))
    return Layout(tuple(found.minor_to_major()[::-1]), tiling, found.element_size_in_bits())
