"""Mistakes in a manifest that only show when its parts are seen together; `load.py` has those of a table alone.

Each check is about one thing. `_OF_FUNCTION` lists those of one function, in the order of their problems.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeAlias

from stagec.core.builds import frontends, naming
from stagec.core.builds.platforms import GPUS
from stagec.core.builds.specs import NOT_EXAMINED, Aarch64Target, TargetSpec
from stagec.core.messages.errors import Problem, nearest, show
from stagec.core.sizes.avals import FILES, Aval, AvalError, dimension_variables, evaluate_shape, holds, parse_aval
from stagec.core.sizes.partitions import Partition, parse
from stagec.core.sizes.size import Constraint, DimensionError, parse_constraint
from stagec.core.trees import same
from stagec.hardware import catalog
from stagec.manifest.load import Manifest
from stagec.manifest.models import Function
from stagec.manifest.toml import Location, key_path
from stagec.manifest.values import Shardings, Tree

MOST_EXECUTABLES = 10_000
"""The most executables of a manifest: planning them takes seconds, and one bundle needs no more."""
MOST_SHAPES = 500_000
"""The most symbolic shapes of arguments, each in all its buckets, of a manifest: checking them takes seconds."""
_X64 = {"i64": "i32", "u64": "u32", "f64": "f32", "c128": "c64"}


class _Fault(NamedTuple):
    """A mistake: its location, what is wrong, and what to write instead."""

    location: Location
    what: str
    write: str


_Faults: TypeAlias = Iterator[_Fault]


@dataclass(frozen=True)
class _Case:
    """A function of a manifest, with the facts that several checks need."""

    manifest: Manifest
    function: Function

    @cached_property
    def targets(self) -> list[TargetSpec]:
        return [self.manifest.targets[name] for name in self.function.targets]

    @cached_property
    def frontend(self) -> str:
        return frontends.of_entry(self.function.entry, self.function.frontend).name

    @cached_property
    def mesh(self) -> Mapping[str, int] | None:
        """Size of each axis; None if the function has no mesh."""
        return self.manifest.meshes[self.function.mesh].axes if self.function.mesh else None

    @cached_property
    def avals(self) -> Mapping[Location, Aval] | None:
        """Those that the manifest writes, by location; None: a function of the model makes them, at the export."""
        if self.function.avals is not None:
            return None
        trees = ((self.function.args or (), "args"), (self.function.kwargs or {}, "kwargs"))
        leaves = itertools.chain(*(_leaves(tree, (key,)) for tree, key in trees))
        # What a file of weights has is only known where the file is: planning reads no file but the manifest.
        return {location: parse_aval(leaf) for location, leaf in leaves if not leaf.startswith(FILES)}

    @cached_property
    def dims(self) -> Sequence[str] | None:
        """The symbolic dimensions of the avals, sorted; None if the manifest does not write them."""
        if self.avals is None:
            return None
        return sorted({dim for aval in self.avals.values() for dim in dimension_variables(aval.shape)})

    @cached_property
    def constraints(self) -> list[Constraint]:
        return [*map(parse_constraint, self.function.constraints)]

    @cached_property
    def contradiction(self) -> tuple[int, str] | None:
        """The number of a constraint that no sizes fulfil together with the earlier ones, and why."""
        return contradiction(self.constraints)

    @cached_property
    def buckets(self) -> Sequence[Mapping[str, int]]:
        """Every combination of sizes; none as long as dimensions, buckets and constraints do not fit together."""
        if self.dims is None or self.contradiction or not self.function.buckets.keys() >= {*self.dims}:
            return ()
        named = {name for constraint in self.constraints for name in constraint.names}
        return list(self.function.every_bucket()) if self.function.buckets and named <= {*self.dims} else ()

    def beyond(self, position: int | None) -> tuple[str, str] | None:
        """The fault of a position that is beyond the last of the arguments that the manifest writes."""
        count = len(self.function.args or ())
        if self.function.avals is not None or position is None or position < count:
            return None
        return f"there is no argument {position}: the number of args is {count}", "count from 0"


def problems(manifest: Manifest) -> list[Problem]:
    """Return the problems of a manifest; if it is too large to check, only that problem."""
    of_manifest = _variants_of_one_name, _names, _unused_machines, _axis_types
    # Sizes are multiplied: three dimensions of 1,000 sizes are a line of TOML, and a billion executables. The checks of
    # buckets would not come back.
    faults = [*_too_many(manifest)] or [
        *_of_functions(manifest),
        *itertools.chain(*(check(manifest) for check in of_manifest)),
    ]
    return [Problem(manifest.file, key_path(location), what, write) for location, what, write in faults]


def _of_functions(manifest: Manifest) -> _Faults:
    for name, function in manifest.functions.items():
        case = _Case(manifest, function)
        for check in _OF_FUNCTION:
            for location, what, write in check(case):
                yield _Fault(("functions", name, *location), what, write)


def _too_many(manifest: Manifest) -> _Faults:
    """Functions of more executables than a manifest may have: the sizes of buckets are multiplied."""
    total, fits = 0, True
    for name, function in manifest.functions.items():
        factors = [(len(sizes), f"sizes of {dim}") for dim, sizes in sorted(function.buckets.items())]
        factors += [(len(function.variants) or 1, "variants")]
        # A target without releases of its own is compiled once, by the build's.
        releases = sum(len(manifest.jaxlib.get(target, "1")) for target in function.targets)
        factors += [(releases, "targets" if releases == len(function.targets) else "targets and releases of jaxlib")]
        count = math.prod(factor for factor, _ in factors)
        if count > MOST_EXECUTABLES:
            product = " x ".join(f"{factor:,} {what}" for factor, what in factors if factor > 1)
            what = f"{product} are {count:,} executables, and a manifest may have {MOST_EXECUTABLES:,}"
            write = "list fewer sizes; where padding is declared, calls of other sizes run in the next larger one"
            yield _Fault(("functions", name, "buckets"), what, write)
            fits = False
        else:
            total += count
    if total > MOST_EXECUTABLES:
        fits = False
        what = f"they have {total:,} executables in all, and a manifest may have {MOST_EXECUTABLES:,}"
        yield _Fault(("functions",), what, "write several manifests, or list fewer sizes")
    shapes = sum(map(_shapes, manifest.functions.values()))
    if fits and shapes > MOST_SHAPES:
        what = f"symbolic shapes of arguments x buckets are {shapes:,}, and a manifest may have {MOST_SHAPES:,}"
        yield _Fault(("functions",), what, "write several manifests, or list fewer sizes")


def _shapes(function: Function) -> int:
    """Count the checks for all buckets: the symbolic shapes of a function's arguments, and its constraints."""
    trees = itertools.chain(_leaves(function.args or (), ()), _leaves(function.kwargs or {}, ()))
    written = {leaf.partition("[")[2] for _, leaf in trees if not leaf.startswith(FILES)}
    symbolic = sum(any(map(str.isalpha, shape)) for shape in written)
    return (symbolic + len(function.constraints)) * math.prod(map(len, function.buckets.values()))


def _leaves(tree: Tree, location: Location) -> Iterator[tuple[Location, str]]:
    """Every leaf of a tree with its location."""
    match tree:
        case str():
            yield location, tree
        case tuple():
            for index, item in enumerate(tree):
                yield from _leaves(item, (*location, index))
        case _:
            for key, item in tree.items():
                yield from _leaves(item, (*location, key))


def _platforms(case: _Case) -> _Faults:
    """Targets of a platform that the function is not for, and those for which XLA must see another CPU."""
    for index, target in enumerate(case.targets):
        if isinstance(target, Aarch64Target) and target.examined == NOT_EXAMINED:
            what = (
                f'{case.function.targets[index]} is for aarch64, and examined = "none" is for x86-64 and accelerators'
            )
            write = "take examined out of [manifest], or name the target in another manifest"
            yield _Fault(("targets", index), what, write)
        if target.platform not in case.manifest.platforms_of(case.function):
            name = case.function.targets[index]
            what = f'the platform of target "{name}" is {target.platform}, which is not in platforms'
            yield _Fault(("targets", index), what, f'add "{target.platform}" to platforms')


def _plugins(case: _Case) -> _Faults:
    """Plugins of a platform that the function is not for."""
    for index, platform in enumerate(case.function.plugins):
        if platform not in case.manifest.platforms_of(case.function):
            what = f"the function is not for {platform}"
            yield _Fault(("plugins", index), what, f'leave it out, or add "{platform}" to platforms')


def _limits(case: _Case) -> _Faults:
    """Limits of targets that the function does not have, and of kernels where there are none."""
    function = case.function
    for name, limits in function.limits.items():
        if name not in function.targets:
            write = nearest(name, function.targets) or "leave the table out"
            yield _Fault(("limits", name), f'"{name}" is not in targets', write)
            continue
        platform = case.manifest.targets[name].platform
        for key in ("registers", "shared_memory", "spills"):
            if platform not in GPUS and getattr(limits, key) is not None:
                what = f'only executables for GPUs have kernels, and "{name}" is for {platform}'
                yield _Fault(("limits", name, key), what, "leave it out")


def _jax_cache(case: _Case) -> _Faults:
    """Entries of JAX's compilation cache that no program of JAX would look for."""
    function, where = case.function, ("jax_cache",)
    if function.jax_cache and case.frontend != "jax":
        what = "JAX does not trace this function, so no program has it in JAX's compilation cache"
        yield _Fault(where, what, "leave it out")
    elif function.jax_cache and not function.targets:
        what = "the compilation cache has executables, and this function has no targets"
        yield _Fault(where, what, 'write for example targets = ["cpu-avx2"]')
    for name, target in zip(function.targets, case.targets, strict=True):
        if isinstance(target, Aarch64Target) and case.manifest.has_jax_cache(function):
            what = f"{name} is for aarch64, and stagec knows the keys of JAX's compilation cache for x86-64 alone"
            write = "write jax_cache = false for this function, or name the target in another manifest"
            yield _Fault(where, what, write)
    if case.manifest.header.examined == NOT_EXAMINED and case.manifest.has_jax_cache(function):
        what = 'with examined = "none" what is built follows the machine that builds, which no key of JAX\'s has'
        yield _Fault(where, what, "write jax_cache = false, or take examined out of [manifest]")


def _committed(case: _Case) -> _Faults:
    """Positions of arguments on a device that the function does not have."""
    positions = [(way, at) for way, listed in enumerate(case.function.jax_cache_committed) for at in listed]
    if positions and case.function.mesh:
        what = "the function has a mesh, and where its arguments lie follows from in_shardings"
        yield _Fault(("jax_cache_committed",), what, "leave it out")
    for way, at in positions:
        if fault := case.beyond(at):
            yield _Fault(("jax_cache_committed", way), *fault)


def _variants(case: _Case) -> _Faults:
    """Variants that name other static arguments than the rest, or that are the same as another."""
    function = case.function
    names = {variant: frozenset(static) for variant, static in function.combinations()}
    # All variants name the same arguments: a call chooses one by the values that it passes, so a value that one of them
    # leaves out would fit none or two.
    everything = frozenset().union(*names.values())
    seen: dict[Hashable, str] = {}
    for variant, static in function.combinations() if function.variants else ():
        where = ("variants", variant, "static")
        for name in sorted(everything - names[variant]):
            yield _Fault(where, f'no value for "{name}", which other variants have', f"write {name} = VALUE")
        for name in sorted(function.static.keys() & function.variants[variant].static.keys()):
            yield _Fault((*where, name), f'"{name}" is also in static of the function', "keep one of the two")
        # By type and value, as the loader chooses: 1 and True are equal for Python, and two variants here.
        other = seen.setdefault(same.key(static), variant)
        if other != variant:
            yield _Fault(where, f'the same values as in variant "{other}"', "keep one of the two variants")


def _bound(case: _Case) -> _Faults:
    """Bound arguments that are donated, beyond the last, or of a file that is in the bundle and beside it.

    Names of parameters are only known when tracing.
    """
    function = case.function
    bound = [weights for owner in case.manifest.functions.values() for weights in owner.bind.values()]
    # A file is one member of the bundle or one file beside it, and functions share it.
    outside = {weights.file for weights in bound if weights.external}
    for argument, weights in function.bind.items():
        where = ("bind", argument)
        if weights.file in outside and not weights.external:
            what = f"{weights.file} is external in another place of this manifest, and not here"
            yield _Fault(where, what, f'write {{ file = "{weights.file}", external = true }} everywhere')
        position = int(argument[5:-1]) if argument.startswith("args[") else None
        donated = argument in function.donate_argnames or position in function.donate_argnums
        kept = any(state.get("argument") == argument for state in function.served.get("state", {}).values())
        if donated and not kept:  # a state is bound only for the first call of a sequence, and that call has a copy
            what = "a bound argument is used by every call, and cannot be donated"
            yield _Fault(where, what, "take it out of donate_argnums and donate_argnames, or do not bind it")
        if function.args is not None and (fault := case.beyond(position)):
            yield _Fault(where, *fault)


def _golden(case: _Case) -> _Faults:
    """Golden inputs that come from two places, that are of no bucket, or that nothing could be checked with."""
    function, golden = case.function, case.function.golden
    if golden is None:
        return
    if not function.targets:
        yield _Fault(("golden",), "there is no executable to check", "add a target, such as cpu-avx2")
    if golden.optimized and all(target.platform == "cpu" for target in case.targets):
        what = "none of its targets is a device, whose compiler decides something"
        yield _Fault(("golden", "optimized"), what, "add a target, such as h200 or v5e:2x2, or leave it out")
    if golden.inputs and "seed" in golden.model_fields_set:
        what = f"{golden.inputs} has the inputs, and none are generated"
        yield _Fault(("golden", "seed"), what, "leave out seed, or inputs")
    buckets = list(function.every_bucket())
    if golden.bucket and golden.bucket not in buckets:
        write = f"write for example bucket = {show(buckets[-1])}" if function.buckets else "leave it out: it has none"
        yield _Fault(("golden", "bucket"), f"{naming.sizes(golden.bucket)} is not a bucket of the function", write)


def _explicit(case: _Case) -> _Faults:
    """Explicit axes where they have no meaning, or JAX cannot do with them what the function asks for."""
    mesh = case.function.mesh
    if not mesh or "Explicit" not in case.manifest.meshes[mesh].axis_types:
        return
    if case.frontend == "arrays":
        what = f"{mesh} has Explicit axes, which JAX alone has, and stagec itself traces the function"
        yield _Fault(("mesh",), what, "name a mesh without axis_types")
    if case.function.vjp_order:
        # "Custom VJP bwd rule must produce an output with the same type": those of the artifact name no device.
        what = f"{mesh} has Explicit axes, and JAX calls no derivative of an artifact over them"
        yield _Fault(("vjp_order",), what, "leave it out, and list the derivative as a function of its own")


def _axes(case: _Case) -> _Faults:
    """Specs without the mesh or the axis that they need."""
    for key in ("in_shardings", "out_shardings"):
        shardings = getattr(case.function, key)
        if shardings is not None and case.mesh is None:
            what = "there is no mesh to split over"
            yield _Fault((key,), what, 'write mesh = "NAME" and a table [meshes.NAME]')
        elif shardings is not None and case.mesh is not None:
            for location, text in _leaves(shardings, (key,)):
                for axis in sorted({axis for axes in parse(text) or () for axis in axes} - case.mesh.keys()):
                    yield _Fault(location, f'"{text}": the mesh has no axis "{axis}"', nearest(axis, case.mesh))


def _devices(case: _Case) -> _Faults:
    """A mesh with another number of devices than a target, or that does not fit its hardware.

    One device of many is not a mistake.
    """
    name, mesh = case.function.mesh, case.mesh
    if name is None or mesh is None:
        return
    count = math.prod(mesh.values())
    for target in case.targets:
        hardware = catalog.hardware(target.platform)
        available = hardware.num_devices(target)
        if available is not None and count not in (1, available):
            what = (
                f'mesh "{name}" ({naming.sizes(mesh)}) has {count} devices, and target "{target.name}" has {available}'
            )
            fit = hardware.topologies_with(count, target)
            larger = f", or a target of {count}: topology = {' or '.join(map(show, fit))}" if fit else ""
            yield _Fault(("mesh",), what, f"write a mesh of {available}{larger}")
        if count == available and (fault := hardware.mesh_problem(target, name, mesh)):
            yield _Fault(("mesh",), *fault)


def _sharded_kwargs(case: _Case) -> _Faults:
    """Shardings of keyword arguments."""
    if case.function.in_shardings is not None and case.function.kwargs:
        what = "JAX takes in_shardings for positional arguments only, and there are kwargs"
        yield _Fault(("in_shardings",), what, "move the kwargs into args")


def _serve_names(case: _Case) -> _Faults:
    """Two arrays of one name."""
    for key in ("inputs", "outputs"):
        by_path = case.function.served.get(key, {})
        for path, name in by_path.items():
            first = next(other for other, same in by_path.items() if same == name)
            if path != first:
                yield _Fault(("serve", key, path), f'"{name}" is the name of {first}', "write another name")


def _serve_state(case: _Case) -> _Faults:
    """A state that is neither taken nor given."""
    for name, state in case.function.served.get("state", {}).items():
        if not {"argument", "result"} & state.keys():
            write = f'write for example {name} = {{ argument = "cache", result = "result[1]" }}'
            yield _Fault(("serve", "state", name), "it has no argument and no result", write)


def contradiction(constraints: Sequence[Constraint]) -> tuple[int, str] | None:
    """Return the first constraint of one name that no size fulfils together with those before it, and a sentence.

    Of several names, a contradiction shows in buckets, or at the export.
    """
    bounds: dict[str, tuple[Fraction | int, Fraction | float]] = {}
    for number, constraint in enumerate(constraints):
        difference, sign = constraint.left - constraint.right, constraint.sign
        match [term for term in difference.terms if term[0]]:
            case [((str(name),), times)]:
                low, high = bounds.get(name, (1, math.inf))
                equal = Fraction(-difference.compute({name: 0}), times)
                if sign == "==" or (sign == ">=") == (times > 0):
                    low = max(low, equal)
                if sign == "==" or (sign == "<=") == (times > 0):
                    high = min(high, equal)
                bounds[name] = low, high
                wrong = math.ceil(low) > high
            case []:  # numbers alone: names in it cancel each other
                wrong = not constraint.holds(dict.fromkeys(constraint.names, 1))
            case _:
                wrong = False
        if wrong:
            return number, f'no sizes fulfil "{constraint}"' + " and the constraints before it" * (number > 0)
    return None


def _contradicted(case: _Case) -> _Faults:
    """Constraints that no sizes fulfil."""
    if case.contradiction:
        number, what = case.contradiction
        yield _Fault(("constraints", number), what, "change it, or leave it out")


def _division(case: _Case) -> _Faults:
    """Specs of arguments that are not a prefix of the arguments, or that do not fit the shape of one."""
    function, mesh = case.function, case.mesh
    if mesh is None or case.avals is None or not isinstance(function.in_shardings, str | tuple):
        return
    for item in _matched(function.in_shardings, function.args or (), ("in_shardings",), ("args",)):
        if isinstance(item, _Fault):
            yield item
            continue
        where, partition, path, leaf = item
        if leaf.startswith(FILES) or any(axis not in mesh for axes in partition for axis in axes):
            continue
        aval = case.avals[path]
        if len(partition) > len(aval.shape):
            what = (
                f"{len(partition)} entries for {key_path(path)}, which is {aval} and has {len(aval.shape)} dimensions"
            )
            yield _Fault(where, what, "leave out the entries that are too many")
            continue
        for dim, axes in zip(aval.shape, partition, strict=False):
            parts = math.prod(mesh[axis] for axis in axes)
            if isinstance(dim, int) and dim % parts:
                what = f"{key_path(path)} is {aval}: {dim} is not divisible by {' * '.join(axes)} = {parts}"
                yield _Fault(where, what, "split another dimension, or change the mesh")


def _matched(
    shardings: Shardings, tree: Tree, where: Location, path: Location
) -> Iterator[_Fault | tuple[Location, Partition, Location, str]]:
    """Each spec with each of its arrays, and a fault if the trees differ."""
    match shardings, tree:
        case str(), _:
            partition = parse(shardings)
            for location, leaf in _leaves(tree, path) if partition is not None else ():
                yield where, partition or (), location, leaf
        case dict(), dict():
            for key in [key for key in tree if key not in shardings]:
                yield _Fault(
                    where, f'no sharding for "{key}" of {key_path(path)}', 'write a spec for it, such as "P()"'
                )
            for key, child in shardings.items():
                if key in tree:
                    yield from _matched(child, tree[key], (*where, key), (*path, key))
                else:
                    yield _Fault(
                        (*where, key), f'{key_path(path)} has no "{key}"', nearest(key, tree) or "leave it out"
                    )
        case tuple(), tuple() if len(shardings) == len(tree):
            for index, (child, node) in enumerate(zip(shardings, tree, strict=True)):
                yield from _matched(child, node, (*where, index), (*path, index))
        case tuple(), tuple():
            what = f"{len(shardings)} shardings for {key_path(path)}, which has {len(tree)} elements"
            yield _Fault(where, what, "write one for each")
        case _, str() if tree.startswith(FILES):
            return
        case _:
            kind = {str: "an array of numbers", tuple: "an array", dict: "a table"}[type(tree)]
            write = 'write the same kind of tree, or one spec such as "P()"'
            yield _Fault(where, f"{key_path(path)} is {kind}", write)


def _donated(case: _Case) -> _Faults:
    """Donated arguments that the function does not have."""
    for index, position in enumerate(case.function.donate_argnums):
        if fault := case.beyond(position):
            yield _Fault(("donate_argnums", index), *fault)


def _x64(case: _Case) -> _Faults:
    """64-bit arguments that JAX would make 32-bit ones."""
    for location, aval in (case.avals or {}).items():
        if aval.dtype in _X64 and not case.manifest.tracing_of(case.function).get("enable_x64"):
            what = f"JAX turns {aval.dtype} into {_X64[aval.dtype]} as long as enable_x64 is false"
            yield _Fault(location, what, f"write {_X64[aval.dtype]}, or enable_x64 = true")


def _sizes(case: _Case) -> _Faults:
    """Dimensions without sizes, and sizes of no dimension."""
    if case.dims is None:
        return
    buckets = case.function.buckets
    missing = [dim for dim in case.dims if dim not in buckets]
    if case.function.targets and missing:
        names = ", ".join(f'"{dim}"' for dim in missing)
        what = f"no sizes for the symbolic dimension{'s' * (len(missing) > 1)} {names}"
        example = ", ".join(f"{dim} = [1, 8]" for dim in missing)
        yield _Fault(("buckets",), what, f"write for example buckets = {{ {example} }}")
    for dim in sorted(buckets.keys() - {*case.dims}):
        yield _Fault(("buckets", dim), f'no aval has a dimension "{dim}"', nearest(dim, case.dims) or "leave it out")


def _padding(case: _Case) -> _Faults:
    """Padding along dimensions without buckets, with numbers that a dtype cannot hold, or with masks of other kinds."""
    avals, buckets = case.avals, case.function.buckets
    for dim, table in case.function.padding.items():
        where = ("padding", dim)
        if dim not in buckets:
            write = nearest(dim, sorted(buckets)) or "leave it out"
            yield _Fault(where, f'buckets have no dimension "{dim}"', write)
        if dim not in buckets or avals is None:
            continue
        mask = avals.get(("kwargs", table.mask))
        kinds = f'"bool[{dim}]" or "i32[]"'
        if table.mask and mask is None:
            what = f'no keyword argument "{table.mask}"'
            yield _Fault((*where, "mask"), what, f"write kwargs.{table.mask} = {kinds}")
        elif mask is not None and str(mask) != f"bool[{dim}]" and (mask.shape or mask.dtype[0] not in "iu"):
            yield _Fault((*where, "mask"), f'"{table.mask}" is {mask}, which is not a size', f"write {kinds}")
        for location, aval in avals.items():
            if dim in aval.shape and location != ("kwargs", table.mask) and not holds(aval.dtype, table.fill):
                what = f"{key_path(location)} is {aval}, which cannot hold {table.fill}"
                yield _Fault((*where, "fill"), what, "write a number that it can, such as 0")


def _constrained(case: _Case) -> _Faults:
    """Constraints of dimensions that no argument has."""
    if (dims := case.dims) is None:
        return
    for index, constraint in enumerate(case.constraints):
        for dim in sorted(constraint.names - {*dims}):
            what = f'"{case.function.constraints[index]}": no aval has a dimension "{dim}"'
            yield _Fault(("constraints", index), what, nearest(dim, dims) or "leave it out")


def _constrained_elsewhere(case: _Case) -> _Faults:
    """Constraints in the manifest of dimensions that a function of the model makes."""
    function = case.function
    if case.avals is None and function.constraints and not case.contradiction:
        dims = ", ".join(sorted({name for constraint in case.constraints for name in constraint.names}))
        what = f"{function.avals} makes the symbolic dimensions, with their constraints"
        write = f'write there for example symbolic_shape("{dims}", constraints={show(function.constraints)})'
        yield _Fault(("constraints",), what, write)


def _broken(case: _Case) -> _Faults:
    """Buckets that break a constraint."""
    for index, constraint in enumerate(case.constraints):
        broken = [naming.bucket(bucket) for bucket in case.buckets if not _holds(constraint, bucket)]
        if broken:
            what = f'"{case.function.constraints[index]}" is not true for {"; ".join(broken)}'
            yield _Fault(("constraints", index), what, "change the sizes in buckets, or the constraint")


def _holds(constraint: Constraint, bucket: Mapping[str, int]) -> bool:
    try:
        return constraint.holds(bucket)
    except DimensionError:
        return False


def _impossible(case: _Case) -> _Faults:
    """Buckets that give an argument an impossible shape."""
    # By shape: layers of a model repeat theirs, and each is computed in all buckets.
    faults: dict[tuple[object, ...], AvalError | None] = {}
    for location, aval in (case.avals or {}).items() if case.buckets else ():
        if dimension_variables(aval.shape):
            if aval.shape not in faults:
                faults[aval.shape] = _fault(aval, case.buckets)
            if fault := faults[aval.shape]:
                yield _Fault(location, fault.what, fault.write)


def _fault(aval: Aval, buckets: Sequence[Mapping[str, int]]) -> AvalError | None:
    """Return the fault of an aval's shape in the first bucket with a fault."""
    for bucket in buckets:
        try:
            evaluate_shape(aval.shape, bucket)
        except AvalError as error:
            return error
    return None


_OF_FUNCTION: tuple[Callable[[_Case], _Faults], ...] = (
    _platforms,
    _plugins,
    _limits,
    _jax_cache,
    _committed,
    _variants,
    _bound,
    _golden,
    _explicit,
    _axes,
    _devices,
    _sharded_kwargs,
    _serve_names,
    _serve_state,
    _contradicted,
    _division,
    _donated,
    _x64,
    _sizes,
    _padding,
    _constrained,
    _constrained_elsewhere,
    _broken,
    _impossible,
)


def _variants_of_one_name(manifest: Manifest) -> _Faults:
    """Variants that would give two artifacts one file name."""
    # In lower case: file systems of macOS and Windows take two such names for one file.
    taken: dict[str, Location] = {name.lower(): ("functions", name) for name in manifest.functions}
    for name, function in manifest.functions.items():
        for variant in function.variants:
            at: Location = ("functions", name, "variants", variant)
            called = naming.artifact(name, variant)
            first = taken.setdefault(called.lower(), at)
            if first != at:
                what = f'its artifacts would be called "{called}", like those of {key_path(first)}'
                yield _Fault(at, what, "give one of them another name")


def _names(manifest: Manifest) -> _Faults:
    """Functions and targets with names of other files, or of each other's."""
    reserved = {"functions": ("aot",), "targets": ("exported", "golden", "profile")}
    targets = {written: target.name for written, target in manifest.targets.items()}
    for table, names in (("functions", {name: name for name in manifest.functions}), ("targets", targets)):
        seen: dict[str, str] = {}
        for written, name in names.items():
            # A short name has no table in the manifest, so the fault is where a function first names it.
            location = (table, name) if written == name else _first_with(manifest, written)
            if name in reserved[table]:
                what = f'"{name}" is the ending of files that stagec writes'
                yield _Fault(location, what, f"give the {table.removesuffix('s')} another name")
            if table == "functions" and name in naming.MACRO_TARGETS:
                what = f'aot_manifest declares another target "{manifest.header.name}.{name}"'
                yield _Fault(location, what, "give the function another name")
            other = seen.setdefault(name.lower(), written)
            if other != written and names[other] == name:
                what = f'artifacts for "{written}" would be called "{name}", like those for "{other}"'
                yield _Fault(location, what, "keep one of the two")
            elif other != written:
                what = f'"{name}" and "{other}" differ only in case, and so do their files'
                yield _Fault(location, what, "give one of them another name")


def _first_with(manifest: Manifest, target: str) -> Location:
    """Where a function first names a target."""
    wanted = ((name, function.targets) for name, function in manifest.functions.items())
    return next(("functions", name, "targets", names.index(target)) for name, names in wanted if target in names)


def _unused_machines(manifest: Manifest) -> _Faults:
    """Machines of targets for which JAX's compilation cache has no entries."""
    targets = {name for f in manifest.functions.values() if manifest.has_jax_cache(f) for name in f.targets}
    for name in manifest.header.jax_cache_machines:
        if name not in targets:
            what = f'no function with jax_cache has the target "{name}"'
            yield _Fault(("manifest", "jax_cache_machines", name), what, nearest(name, targets) or "leave it out")


def _axis_types(manifest: Manifest) -> _Faults:
    """Meshes with another number of types than axes."""
    for name, mesh in manifest.meshes.items():
        if mesh.axis_types and len(mesh.axis_types) != len(mesh.axes):
            what = f"the number of types is {len(mesh.axis_types)}, and that of axes {len(mesh.axes)}"
            yield _Fault(("meshes", name, "axis_types"), what, f"write a type for each of {', '.join(mesh.axes)}")
