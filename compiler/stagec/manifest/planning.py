"""Turn a manifest into the list of artifacts to build, each with its spec: the parts of the manifest it depends on."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from stagec.core.builds import frontends, naming
from stagec.core.builds.specs import COMPUTED_ON, EXAMINED_HERE, ExecutableSpec, FunctionSpec, Limits, to_json
from stagec.core.messages.errors import StagecError
from stagec.manifest import checks
from stagec.manifest.load import Manifest
from stagec.manifest.models import Function, Tracing
from stagec.manifest.toml import key_path
from stagec.manifest.values import Static

FORMAT = 1
"""Version of the plan's JSON form. 1: the first one."""
_KEYS = {field.name for field in fields(FunctionSpec)} - Tracing.model_fields.keys()
"""What a spec has of a function, without what [manifest] says for all."""
_UNORDERED = ("allow_custom_calls", "disabled_checks", "donate_argnames", "donate_argnums")
"""Keys whose order says nothing."""


@dataclass(frozen=True)
class Export:
    """An exported artifact to build.

    name: `manifest.function`, or `manifest.function-variant`.
    """

    name: str
    spec: FunctionSpec


@dataclass(frozen=True)
class Executable:
    """An executable to build from an exported artifact.

    name: the exported artifact's name, then `.target` or `.target.bucket`.
    export: name of the exported artifact that it is compiled from.
    """

    name: str
    export: str
    spec: ExecutableSpec


@dataclass(frozen=True)
class Plan:
    """All artifacts of a manifest.

    name: name of the manifest, and of the bundle.
    exports: sorted by name.
    executables: sorted by name.
    bundle_size: bytes that the bundle's file may have; None: as many as it likes.
    jax_cache: names of the executables that JAX's compilation cache has entries for, sorted -> for each way of calling,
        the arguments that lie on a device.
    jax_cache_machines: fingerprints of machines that find them, by target.
    jaxlib: releases of jaxlib that compile for a target, by its name in specs; not those of the build's own alone.
    serves: releases of jaxlib, as `jaxlib==0.12.0`, that the bundle must have executables of.
    runs_on: newer releases of jaxlib that run the executables for CPUs as they are.
    tolerances: the allowed growth over the baseline, for functions that set it: function -> metric -> tolerance. They
        are beside the specs, so an edit of one builds nothing.
    """

    name: str
    version: str
    reproducible: bool
    exports: tuple[Export, ...]
    executables: tuple[Executable, ...]
    bundle_size: int | None
    tolerances: Mapping[str, Mapping[str, int | str]]
    jax_cache: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    jax_cache_machines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    jaxlib: Mapping[str, Sequence[str]] = field(default_factory=dict)
    serves: Sequence[str] = ()
    runs_on: Sequence[str] = ()

    def to_json(self) -> str:
        """Canonical JSON, one line: equal plans give equal strings."""
        document = {
            "format": FORMAT,
            "manifest": {"name": self.name, "version": self.version, "reproducible": self.reproducible},
            "exports": [asdict(export) for export in self.exports],
            "executables": [asdict(executable) for executable in self.executables],
            "bundle": {"name": self.name, "version": self.version},
            "bundle_size": self.bundle_size,
            "serves": self.serves,
            "runs_on": self.runs_on,
            "tolerances": self.tolerances,
            "jax_cache": {"executables": self.jax_cache, "machines": self.jax_cache_machines},
            "jaxlib": self.jaxlib,
        }
        return to_json(document) + "\n"


def plan(manifest: Manifest) -> Plan:
    """Lists the artifacts of a manifest. Raises StagecError with every problem found."""
    if problems := checks.problems(manifest):
        raise StagecError(*problems)
    # All or nothing: a plan of the sound half would leave targets out of a package, and Bazel would say that they are
    # not declared.
    exports: list[Export] = []
    executables: list[Executable] = []
    cached: dict[str, Sequence[Sequence[int]]] = {}
    for name, function in manifest.functions.items():
        # JAX compiles another program for each combination of static values, so each is an artifact by itself.
        for variant, static in function.combinations():
            traced = _function_spec(manifest, name, function, variant, static)
            export = Export(f"{manifest.header.name}.{traced.artifact}", traced)
            exports.append(export)
            for target, bucket in itertools.product(function.targets, list(function.every_bucket())):
                limits = _limits(function, name, target)
                spec = ExecutableSpec(name, manifest.file, manifest.targets[target], bucket, variant, limits)
                sizes = "_".join(f"{dim}{size}" for dim, size in bucket.items())
                parts = filter(None, [export.name, spec.target.name, sizes])
                executables.append(Executable(".".join(parts), export.name, spec))
                if manifest.has_jax_cache(function):
                    cached[executables[-1].name] = function.jax_cache_committed
    return Plan(
        manifest.header.name,
        manifest.header.version,
        manifest.header.reproducible,
        tuple(sorted(exports, key=lambda export: export.name)),
        tuple(sorted(executables, key=lambda executable: executable.name)),
        manifest.header.bundle_size,
        {name: f.baseline.model_dump(exclude_none=True) for name, f in manifest.functions.items() if f.baseline},
        dict(sorted(cached.items())),
        manifest.header.jax_cache_machines,
        {manifest.targets[name].name: releases for name, releases in manifest.jaxlib.items()},
        manifest.header.serves,
        manifest.header.runs_on,
    )


def describe(plan: Plan) -> str:
    """A table of the artifacts for a person: kind, name, and special properties of each. Ends with a newline."""
    rows = [("portable", export.name, ", ".join(export.spec.platforms)) for export in plan.exports]
    for executable in plan.executables:
        target, bucket = executable.spec.target, executable.spec.bucket
        releases = [f"jaxlib {release}" for release in plan.jaxlib.get(target.name, ())]
        details = [*target.summary(), naming.bucket(bucket), *releases]
        rows.append(("executable", executable.name, ", ".join(filter(None, details))))
    if plan.jax_cache:
        rows.append(("jax cache", f"{plan.name}.jax_cache", f"{len(plan.jax_cache)} executables"))
    rows.append(("bundle", plan.name, f"version {plan.version}"))
    width = max(len(name) for _, name, _ in rows)
    return "".join(f"{kind:<10}  {name:<{width}}  {details}\n" for kind, name, details in rows)


def _function_spec(
    manifest: Manifest, name: str, function: Function, variant: str, static: Mapping[str, Static]
) -> FunctionSpec:
    """A function's own values where the spec has the same key, and what the manifest makes of the others."""
    mesh = manifest.meshes[function.mesh] if function.mesh else None
    spelled = {key: value for key, value in function if key in _KEYS}
    # A key of its own only where it is not the default: most exports then have the key that they had.
    computed_on = {**COMPUTED_ON, "examined": manifest.header.examined}
    return FunctionSpec(
        **spelled
        # Sorted, so that another order in the file is the same key of an action.
        | {key: tuple(sorted(spelled[key])) for key in _UNORDERED}
        | {
            "name": name,
            "manifest": manifest.file,
            "args": function.args or (),
            "kwargs": function.kwargs or {},
            "platforms": manifest.platforms_of(function),
            "static": static,
            "variant": variant,
            "mesh": tuple(mesh.axes.items()) if mesh else (),
            "axis_types": mesh.axis_types if mesh and "Explicit" in mesh.axis_types else (),
            "padding": {dim: table.model_dump() for dim, table in sorted(function.padding.items())},
            "serve": function.served,
            "golden": _golden(function),
            "bind": {argument: weights.model_dump() for argument, weights in sorted(function.bind.items())},
            "devices": _devices(manifest, function),
            "frontend": frontends.of_entry(function.entry, function.frontend).name,
            "stablehlo": manifest.stablehlo_of(function),
        }
        | manifest.tracing_of(function)
        | ({"computed_on": computed_on} if manifest.header.examined != EXAMINED_HERE else {})
    )


def _devices(manifest: Manifest, function: Function) -> tuple[Mapping[str, Any], ...]:
    """The devices of a function's targets as JAX knows them, each once, in the order of the targets."""
    devices = (manifest.targets[name].jax_device() for name in function.targets)
    # By kind: JAX lowers by the kind of a device, so targets that differ in topology or options share what it lowers.
    return tuple({device["device_kind"]: device for device in devices if device}.values())


def _golden(function: Function) -> Mapping[str, Any]:
    if function.golden is None:
        return {}
    table = function.golden.model_dump()
    # The default is in the spec, and not left to the action: the bundle's index says for which sizes the outputs are.
    return {**table, "bucket": table["bucket"] or next(function.every_bucket())}


def _limits(function: Function, name: str, target: str) -> Limits:
    """The limits of one target, and their place in the manifest."""
    table = function.limits.get(target)
    return Limits(key_path(("functions", name, "limits", target)), **table.model_dump()) if table else Limits()
