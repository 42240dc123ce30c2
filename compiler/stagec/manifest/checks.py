"""Mistakes in a manifest that only show when its parts are seen together; `load.py` has those of a table alone."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from stagec.core.builds import frontends, naming
from stagec.core.builds.specs import Aarch64Target, TargetSpec
from stagec.core.messages.errors import Problem, nearest, show
from stagec.core.sizes.avals import FILES, Aval, AvalError, dimension_variables, evaluate_shape, holds, parse_aval
from stagec.core.sizes.bounds import contradiction
from stagec.core.sizes.partitions import Partition, parse
from stagec.core.sizes.size import DimensionError, parse_constraint
from stagec.core.trees import same
from stagec.hardware import catalog
from stagec.manifest.load import Manifest, key_path
from stagec.manifest.models import Function
from stagec.manifest.values import Shardings, Tree

MOST_EXECUTABLES = 10_000
"""The most executables of a manifest: planning them takes seconds, and one bundle needs no more."""
MOST_SHAPES = 500_000
"""The most symbolic shapes of arguments, each in all its buckets, of a manifest: checking them takes seconds."""
_Location: TypeAlias = tuple[str | int, ...]
_Report: TypeAlias = Callable[[_Location, str, str], Problem]
"""Makes the problem at a location below the function, from the fault and the correction."""
_X64 = {"i64": "i32", "u64": "u32", "f64": "f32", "c128": "c64"}


def problems(manifest: Manifest) -> list[Problem]:
    """Return the problems of a manifest; if it is too large to check, only that problem."""
    of_functions = (_check(manifest, name, function) for name, function in manifest.functions.items())
    every = itertools.chain(*of_functions, _collisions(manifest), _unused_machines(manifest), _axis_types(manifest))
    return [*_too_many(manifest)] or [*every]


def _check_committed(function: Function, problem: _Report) -> Iterator[Problem]:
    """Positions of arguments on a device that the function does not have."""
    positions = [(way, at) for way, listed in enumerate(function.jax_cache_committed) for at in listed]
    if positions and function.mesh:
        what = "the function has a mesh, and where its arguments lie follows from in_shardings"
        yield problem(("jax_cache_committed",), what, "leave it out")
    for way, at in positions if function.avals is None else ():
        if at >= len(function.args or ()):
            what = f"there is no argument {at}: the number of args is {len(function.args or ())}"
            yield problem(("jax_cache_committed", way), what, "count from 0")


def _check_explicit(function: Function, frontend: str, problem: _Report) -> Iterator[Problem]:
    """Explicit axes where they have no meaning, or JAX cannot do with them what the function asks for."""
    if frontend == "arrays":
        what = f"{function.mesh} has Explicit axes, which JAX alone has, and stagec itself traces the function"
        yield problem(("mesh",), what, "name a mesh without axis_types")
    if function.vjp_order:
        # "Custom VJP bwd rule must produce an output with the same type": those of the artifact name no device.
        what = f"{function.mesh} has Explicit axes, and JAX calls no derivative of an artifact over them"
        yield problem(("vjp_order",), what, "leave it out, and list the derivative as a function of its own")


def _axis_types(manifest: Manifest) -> Iterator[Problem]:
    """Meshes with another number of types than axes."""
    for name, mesh in manifest.meshes.items():
        if mesh.axis_types and len(mesh.axis_types) != len(mesh.axes):
            what = f"the number of types is {len(mesh.axis_types)}, and that of axes {len(mesh.axes)}"
            write = f"write a type for each of {', '.join(mesh.axes)}"
            yield Problem(manifest.file, key_path(("meshes", name, "axis_types")), what, write)


def _unused_machines(manifest: Manifest) -> Iterator[Problem]:
    """Machines of targets for which JAX's compilation cache has no entries."""
    targets = {name for f in manifest.functions.values() if manifest.has_jax_cache(f) for name in f.targets}
    for name in manifest.header.jax_cache_machines:
        if name not in targets:
            what = f'no function with jax_cache has the target "{name}"'
            key = key_path(("manifest", "jax_cache_machines", name))
            yield Problem(manifest.file, key, what, nearest(name, targets) or "leave it out")


def _too_many(manifest: Manifest) -> Iterator[Problem]:
    """Functions of more executables than a manifest may have: the sizes of buckets are multiplied."""
    total, fits = 0, True
    for name, function in manifest.functions.items():
        factors = [(len(sizes), f"sizes of {dim}") for dim, sizes in sorted(function.buckets.items())]
        factors += [(len(function.variants) or 1, "variants")]
        releases = sum(len(manifest.jaxlib.get(target, "1")) for target in function.targets)
        factors += [(releases, "targets" if releases == len(function.targets) else "targets and releases of jaxlib")]
        count = math.prod(factor for factor, _ in factors)
        if count > MOST_EXECUTABLES:
            product = " x ".join(f"{factor:,} {what}" for factor, what in factors if factor > 1)
            what = f"{product} are {count:,} executables, and a manifest may have {MOST_EXECUTABLES:,}"
            write = "list fewer sizes; where padding is declared, calls of other sizes run in the next larger one"
            yield Problem(manifest.file, key_path(("functions", name, "buckets")), what, write)
            fits = False
        else:
            total += count
    if total > MOST_EXECUTABLES:
        fits = False
        what = f"they have {total:,} executables in all, and a manifest may have {MOST_EXECUTABLES:,}"
        yield Problem(manifest.file, "functions", what, "write several manifests, or list fewer sizes")
    shapes = sum(map(_shapes, manifest.functions.values()))
    if fits and shapes > MOST_SHAPES:
        what = f"symbolic shapes of arguments x buckets are {shapes:,}, and a manifest may have {MOST_SHAPES:,}"
        yield Problem(manifest.file, "functions", what, "write several manifests, or list fewer sizes")


def _shapes(function: Function) -> int:
    """Count the checks for all buckets: the symbolic shapes of a function's arguments, and its constraints."""
    trees = itertools.chain(_leaves(function.args or (), ()), _leaves(function.kwargs or {}, ()))
    written = {leaf.partition("[")[2] for _, leaf in trees if not leaf.startswith(FILES)}
    symbolic = sum(any(map(str.isalpha, shape)) for shape in written)
    return (symbolic + len(function.constraints)) * math.prod(map(len, function.buckets.values()))


def _leaves(tree: Tree, location: _Location) -> Iterator[tuple[_Location, str]]:
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


def _check(manifest: Manifest, name: str, function: Function) -> Iterator[Problem]:
    """The problems of one function that only show when its parts are seen together."""
    where = ("functions", name)

    def problem(location: _Location, what: str, write: str) -> Problem:
        return Problem(manifest.file, key_path((*where, *location)), what, write)

    for index, target in enumerate(function.targets):
        platform = manifest.targets[target].platform
        if platform not in manifest.platforms_of(function):
            what = f'the platform of target "{target}" is {platform}, which is not in platforms'
            yield problem(("targets", index), what, f'add "{platform}" to platforms')
    for index, platform in enumerate(function.plugins):
        if platform not in manifest.platforms_of(function):
            what = f"the function is not for {platform}"
            yield problem(("plugins", index), what, f'leave it out, or add "{platform}" to platforms')
    for target in function.limits:
        if target not in function.targets:
            write = nearest(target, function.targets) or "leave the table out"
            yield problem(("limits", target), f'"{target}" is not in targets', write)
            continue
        platform = manifest.targets[target].platform
        for key in ("registers", "shared_memory", "spills"):
            if platform != "cuda" and getattr(function.limits[target], key) is not None:
                what = f'only executables for NVIDIA devices have kernels, and "{target}" is for {platform}'
                yield problem(("limits", target, key), what, "leave it out")
    frontend = frontends.of_entry(function.entry, function.frontend).name
    if function.jax_cache and frontend != "jax":
        what = "JAX does not trace this function, so no program has it in JAX's compilation cache"
        yield problem(("jax_cache",), what, "leave it out")
    elif function.jax_cache and not function.targets:
        what = "the compilation cache has executables, and this function has no targets"
        yield problem(("jax_cache",), what, 'write for example targets = ["cpu-avx2"]')
    for target in function.targets if manifest.has_jax_cache(function) else ():
        if isinstance(manifest.targets[target], Aarch64Target):
            what = f"{target} is for aarch64, and stagec knows the keys of JAX's compilation cache for x86-64 alone"
            yield problem(
                ("jax_cache",),
                what,
                "write jax_cache = false for this function, or name the target in another manifest",
            )
    yield from _check_committed(function, problem)
    yield from _check_variants(function, problem)
    yield from _check_bound(manifest, function, problem)
    yield from _check_golden(manifest, function, problem)
    mesh = manifest.meshes[function.mesh].axes if function.mesh else None
    if function.mesh and "Explicit" in manifest.meshes[function.mesh].axis_types:
        yield from _check_explicit(function, frontend, problem)
    for key, shardings in (("in_shardings", function.in_shardings), ("out_shardings", function.out_shardings)):
        yield from _check_axes(key, shardings, mesh, problem)
    for target in function.targets:
        yield from _check_count(manifest.targets[target], function.mesh, mesh or {}, problem)
        yield from _check_mesh(manifest.targets[target], function.mesh, mesh or {}, problem)
    if function.in_shardings is not None and function.kwargs:
        what = "JAX takes in_shardings for positional arguments only, and there are kwargs"
        yield problem(("in_shardings",), what, "move the kwargs into args")
    yield from _check_serve(function, problem)
    wrong = contradiction([*map(parse_constraint, function.constraints)])
    if wrong:
        yield problem(("constraints", wrong[0]), wrong[1], "change it, or leave it out")
    if function.avals is None:
        yield from _check_arguments(manifest, function, mesh, bool(wrong), problem)
    else:
        yield from _check_padding(function, None, problem)
        if function.constraints and not wrong:
            dims = ", ".join(
                sorted(
                    {name for constraint in map(parse_constraint, function.constraints) for name in constraint.names}
                )
            )
            what = f"{function.avals} makes the symbolic dimensions, with their constraints"
            write = f'write there for example symbolic_shape("{dims}", constraints={show(function.constraints)})'
            yield problem(("constraints",), what, write)


def _check_serve(function: Function, problem: _Report) -> Iterator[Problem]:
    """Two arrays of one name, and a state that is neither taken nor given."""
    for key in ("inputs", "outputs"):
        by_path = function.served.get(key, {})
        for path, name in by_path.items():
            first = next(other for other, same in by_path.items() if same == name)
            if path != first:
                yield problem(("serve", key, path), f'"{name}" is the name of {first}', "write another name")
    for name, state in function.served.get("state", {}).items():
        if not {"argument", "result"} & state.keys():
            write = f'write for example {name} = {{ argument = "cache", result = "result[1]" }}'
            yield problem(("serve", "state", name), "it has no argument and no result", write)


def _check_arguments(
    manifest: Manifest, function: Function, mesh: Mapping[str, int] | None, contradicted: bool, problem: _Report
) -> Iterator[Problem]:
    """What the arguments that the manifest writes decide; those of `avals` are known only after its call.

    contradicted: whether no sizes fulfil the constraints.
    """
    if mesh is not None and isinstance(function.in_shardings, str | tuple):
        yield from _check_division(function, mesh, problem)
    for index, position in enumerate(function.donate_argnums):
        if position >= len(function.args or ()):
            what = f"there is no argument {position}: the number of args is {len(function.args or ())}"
            yield problem(("donate_argnums", index), what, "count from 0")

    avals = {
        location: parse_aval(leaf)
        for location, leaf in itertools.chain(
            _leaves(function.args or (), ("args",)), _leaves(function.kwargs or {}, ("kwargs",))
        )
        if not leaf.startswith(FILES)
    }
    for location, aval in avals.items():
        if aval.dtype in _X64 and not manifest.tracing_of(function).get("enable_x64"):
            what = f"JAX turns {aval.dtype} into {_X64[aval.dtype]} as long as enable_x64 is false"
            yield problem(location, what, f"write {_X64[aval.dtype]}, or enable_x64 = true")
    dims = sorted({dim for aval in avals.values() for dim in dimension_variables(aval.shape)})
    missing = [dim for dim in dims if dim not in function.buckets]
    if function.targets and missing:
        names = ", ".join(f'"{dim}"' for dim in missing)
        what = f"no sizes for the symbolic dimension{'s' * (len(missing) > 1)} {names}"
        example = ", ".join(f"{dim} = [1, 8]" for dim in missing)
        yield problem(("buckets",), what, f"write for example buckets = {{ {example} }}")
    for dim in sorted(function.buckets.keys() - set(dims)):
        yield problem(("buckets", dim), f'no aval has a dimension "{dim}"', nearest(dim, dims) or "leave it out")
    yield from _check_padding(function, avals, problem)
    unknown = False
    for index, constraint in enumerate(function.constraints):
        for dim in sorted(parse_constraint(constraint).names - set(dims)):
            unknown = True
            what = f'"{constraint}": no aval has a dimension "{dim}"'
            yield problem(("constraints", index), what, nearest(dim, dims) or "leave it out")
    if not missing and not unknown and not contradicted:
        yield from _check_buckets(function, avals, problem)


def _check_buckets(
    function: Function,
    avals: Mapping[_Location, Aval],
    problem: _Report,
) -> Iterator[Problem]:
    """Buckets that break a constraint or give an argument an impossible shape. Every dimension has sizes here."""
    buckets = list(function.every_bucket()) if function.buckets else []
    symbolic = {location: aval for location, aval in avals.items() if dimension_variables(aval.shape)}
    for index, constraint in enumerate(function.constraints):
        broken = [naming.bucket(bucket) for bucket in buckets if not _holds(constraint, bucket)]
        if broken:
            what = f'"{constraint}" is not true for {"; ".join(broken)}'
            yield problem(("constraints", index), what, "change the sizes in buckets, or the constraint")
    faults: dict[tuple[object, ...], AvalError | None] = {}
    for location, aval in symbolic.items():
        if aval.shape not in faults:
            faults[aval.shape] = _fault(aval, buckets)
        if fault := faults[aval.shape]:
            yield problem(location, fault.what, fault.write)


def _fault(aval: Aval, buckets: Sequence[Mapping[str, int]]) -> AvalError | None:
    """Return the fault of an aval's shape in the first bucket with a fault."""
    for bucket in buckets:
        try:
            evaluate_shape(aval.shape, bucket)
        except AvalError as error:
            return error
    return None


def _check_padding(function: Function, avals: Mapping[_Location, Aval] | None, problem: _Report) -> Iterator[Problem]:
    """Padding along dimensions without buckets, with numbers that a dtype cannot hold, or with masks of other kinds.

    avals: None: only the export knows them.
    """
    for dim, table in function.padding.items():
        where = ("padding", dim)
        if dim not in function.buckets:
            write = nearest(dim, sorted(function.buckets)) or "leave it out"
            yield problem(where, f'buckets have no dimension "{dim}"', write)
        if dim not in function.buckets or avals is None:
            continue
        mask = avals.get(("kwargs", table.mask))
        kinds = f'"bool[{dim}]" or "i32[]"'
        if table.mask and mask is None:
            yield problem(
                (*where, "mask"), f'no keyword argument "{table.mask}"', f"write kwargs.{table.mask} = {kinds}"
            )
        elif mask is not None and str(mask) != f"bool[{dim}]" and (mask.shape or mask.dtype[0] not in "iu"):
            yield problem((*where, "mask"), f'"{table.mask}" is {mask}, which is not a size', f"write {kinds}")
        for location, aval in avals.items():
            if dim in aval.shape and location != ("kwargs", table.mask) and not holds(aval.dtype, table.fill):
                what = f"{key_path(location)} is {aval}, which cannot hold {table.fill}"
                yield problem((*where, "fill"), what, "write a number that it can, such as 0")


def _check_bound(manifest: Manifest, function: Function, problem: _Report) -> Iterator[Problem]:
    """Bound arguments that are donated, beyond the last, or of a file that is in the bundle and beside it.

    Names of parameters are only known when tracing.
    """
    bound = [weights for owner in manifest.functions.values() for weights in owner.bind.values()]
    outside = {weights.file for weights in bound if weights.external}
    for argument, weights in function.bind.items():
        where = ("bind", argument)
        if weights.file in outside and not weights.external:
            what = f"{weights.file} is external in another place of this manifest, and not here"
            yield problem(where, what, f'write {{ file = "{weights.file}", external = true }} everywhere')
        position = int(argument[5:-1]) if argument.startswith("args[") else None
        donated = argument in function.donate_argnames or position in function.donate_argnums
        kept = any(state.get("argument") == argument for state in function.served.get("state", {}).values())
        if donated and not kept:  # a state is bound only for the first call of a sequence, and that call has a copy
            what = "a bound argument is used by every call, and cannot be donated"
            yield problem(where, what, "take it out of donate_argnums and donate_argnames, or do not bind it")
        if function.args is not None and position is not None and position >= len(function.args):
            what = f"there is no argument {position}: the number of args is {len(function.args)}"
            yield problem(where, what, "count from 0")


def _check_golden(manifest: Manifest, function: Function, problem: _Report) -> Iterator[Problem]:
    """Golden inputs that come from two places, that are of no bucket, or that nothing could be checked with."""
    golden = function.golden
    if golden is None:
        return
    if not function.targets:
        yield problem(("golden",), "there is no executable to check", "add a target, such as cpu-avx2")
    if golden.optimized and all(manifest.targets[name].platform == "cpu" for name in function.targets):
        what = "none of its targets is a device, whose compiler decides something"
        yield problem(("golden", "optimized"), what, "add a target, such as h200 or v5e:2x2, or leave it out")
    if golden.inputs and "seed" in golden.model_fields_set:
        what = f"{golden.inputs} has the inputs, and none are generated"
        yield problem(("golden", "seed"), what, "leave out seed, or inputs")
    buckets = list(function.every_bucket())
    if golden.bucket and golden.bucket not in buckets:
        write = f"write for example bucket = {show(buckets[-1])}" if function.buckets else "leave it out: it has none"
        yield problem(("golden", "bucket"), f"{naming.sizes(golden.bucket)} is not a bucket of the function", write)


def _check_variants(function: Function, problem: _Report) -> Iterator[Problem]:
    """Variants that name other static arguments than the rest, or that are the same as another."""
    names = {variant: frozenset(static) for variant, static in function.combinations()}
    everything = frozenset().union(*names.values())
    seen: dict[Hashable, str] = {}
    for variant, static in function.combinations():
        if not variant:
            return
        where = ("variants", variant, "static")
        for name in sorted(everything - names[variant]):
            yield problem(where, f'no value for "{name}", which other variants have', f"write {name} = VALUE")
        for name in sorted(function.static.keys() & function.variants[variant].static.keys()):
            yield problem((*where, name), f'"{name}" is also in static of the function', "keep one of the two")
        other = seen.setdefault(same.key(static), variant)
        if other != variant:
            yield problem(where, f'the same values as in variant "{other}"', "keep one of the two variants")


def _check_count(target: TargetSpec, name: str | None, mesh: Mapping[str, int], problem: _Report) -> Iterator[Problem]:
    """A mesh with another number of devices than the target; one device of many is not a mistake."""
    hardware, count = catalog.hardware(target.platform), math.prod(mesh.values())
    available = hardware.num_devices(target)
    if available is None or count in (1, available):
        return
    what = f'mesh "{name}" ({naming.sizes(mesh)}) has {count} devices, and target "{target.name}" has {available}'
    fit = hardware.topologies_with(count, target)
    larger = f", or a target of {count}: topology = {' or '.join(map(show, fit))}" if fit else ""
    yield problem(("mesh",), what, f"write a mesh of {available}{larger}")


def _check_mesh(target: TargetSpec, name: str | None, mesh: Mapping[str, int], problem: _Report) -> Iterator[Problem]:
    """A mesh of all devices of the target that does not fit the target's hardware."""
    hardware = catalog.hardware(target.platform)
    if name is None or math.prod(mesh.values()) != hardware.num_devices(target):
        return
    if fault := hardware.mesh_problem(target, name, mesh):
        yield problem(("mesh",), *fault)


def _check_axes(key: str, shardings: Any, mesh: Mapping[str, int] | None, problem: _Report) -> Iterator[Problem]:
    """Specs without the mesh or the axis that they need."""
    if shardings is None:
        return
    if mesh is None:
        yield problem((key,), "there is no mesh to split over", 'write mesh = "NAME" and a table [meshes.NAME]')
        return
    for location, text in _leaves(shardings, (key,)):
        for axis in sorted({axis for axes in parse(text) or () for axis in axes} - mesh.keys()):
            yield problem(location, f'"{text}": the mesh has no axis "{axis}"', nearest(axis, mesh))


def _check_division(function: Function, mesh: Mapping[str, int], problem: _Report) -> Iterator[Problem]:
    """Specs of arguments that are not a prefix of the arguments, or that do not fit the shape of one."""
    pairs = _matched(function.in_shardings, function.args or (), ("in_shardings",), ("args",), problem)
    for item in pairs:
        if isinstance(item, Problem):
            yield item
            continue
        where, partition, path, leaf = item
        if leaf.startswith(FILES) or any(axis not in mesh for axes in partition for axis in axes):
            continue
        aval = parse_aval(leaf)
        if len(partition) > len(aval.shape):
            what = (
                f"{len(partition)} entries for {key_path(path)}, which is {aval} and has {len(aval.shape)} dimensions"
            )
            yield problem(where, what, "leave out the entries that are too many")
            continue
        for dim, axes in zip(aval.shape, partition, strict=False):
            parts = math.prod(mesh[axis] for axis in axes)
            if isinstance(dim, int) and dim % parts:
                what = f"{key_path(path)} is {aval}: {dim} is not divisible by {' * '.join(axes)} = {parts}"
                yield problem(where, what, "split another dimension, or change the mesh")


def _matched(
    shardings: Shardings, tree: Tree, where: _Location, path: _Location, problem: _Report
) -> Iterator[Problem | tuple[_Location, Partition, _Location, str]]:
    """Each spec with each of its arrays, and a problem if the trees differ."""
    match shardings, tree:
        case str(), _:
            partition = parse(shardings)
            for location, leaf in _leaves(tree, path) if partition is not None else ():
                yield where, partition or (), location, leaf
        case dict(), dict():
            for key in [key for key in tree if key not in shardings]:
                write = 'write a spec for it, such as "P()"'
                yield problem(where, f'no sharding for "{key}" of {key_path(path)}', write)
            for key, child in shardings.items():
                if key in tree:
                    yield from _matched(child, tree[key], (*where, key), (*path, key), problem)
                else:
                    what = f'{key_path(path)} has no "{key}"'
                    yield problem((*where, key), what, nearest(key, tree) or "leave it out")
        case tuple(), tuple() if len(shardings) == len(tree):
            for index, (child, node) in enumerate(zip(shardings, tree, strict=True)):
                yield from _matched(child, node, (*where, index), (*path, index), problem)
        case tuple(), tuple():
            what = f"{len(shardings)} shardings for {key_path(path)}, which has {len(tree)} elements"
            yield problem(where, what, "write one for each")
        case _, str() if tree.startswith(FILES):
            return
        case _:
            kind = {str: "an array of numbers", tuple: "an array", dict: "a table"}[type(tree)]
            yield problem(
                where, f"{key_path(path)} is {kind}", 'write the same kind of tree, or one spec such as "P()"'
            )


def _holds(constraint: str, bucket: Mapping[str, int]) -> bool:
    try:
        return parse_constraint(constraint).holds(bucket)
    except DimensionError:
        return False


def _collisions(manifest: Manifest) -> Iterator[Problem]:
    """Names that would give two artifacts one file name."""
    taken: dict[str, _Location] = {name.lower(): ("functions", name) for name in manifest.functions}
    for name, function in manifest.functions.items():
        for variant in function.variants:
            place: _Location = ("functions", name, "variants", variant)
            called = naming.artifact(name, variant)
            first = taken.setdefault(called.lower(), place)
            if first != place:
                what = f'its artifacts would be called "{called}", like those of {key_path(first)}'
                yield Problem(manifest.file, key_path(place), what, "give one of them another name")
    reserved = {"functions": ("aot",), "targets": ("exported", "golden", "profile")}
    targets = {written: target.name for written, target in manifest.targets.items()}
    for table, names in (("functions", {name: name for name in manifest.functions}), ("targets", targets)):
        seen: dict[str, str] = {}
        for written, name in names.items():
            location = key_path((table, name) if written == name else _first_with(manifest, written))
            if name in reserved[table]:
                what = f'"{name}" is the ending of files that stagec writes'
                yield Problem(manifest.file, location, what, f"give the {table.removesuffix('s')} another name")
            if table == "functions" and name in naming.MACRO_TARGETS:
                what = f'aot_manifest declares another target "{manifest.header.name}.{name}"'
                yield Problem(manifest.file, location, what, "give the function another name")
            other = seen.setdefault(name.lower(), written)
            if other != written and names[other] == name:
                what = f'artifacts for "{written}" would be called "{name}", like those for "{other}"'
                yield Problem(manifest.file, location, what, "keep one of the two")
            elif other != written:
                what = f'"{name}" and "{other}" differ only in case, and so do their files'
                yield Problem(manifest.file, location, what, "give one of them another name")


def _first_with(manifest: Manifest, target: str) -> _Location:
    """Where a function first names a target."""
    lists = ((name, function.targets) for name, function in manifest.functions.items() if target in function.targets)
    name, targets = next(lists)
    return "functions", name, "targets", targets.index(target)
