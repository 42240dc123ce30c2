"""Reads a manifest file, and reports everything that is wrong with it in the words of the manifest.

Two passes over the same data find the problems: pydantic checks each value against its model, then references between
tables are checked. pydantic's own messages never reach the user.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stagec.core.builds import frontends, naming, releases
from stagec.core.builds.frontends import Frontend
from stagec.core.builds.specs import TargetSpec
from stagec.core.data import reading
from stagec.core.messages.errors import Problem, StagecError, nearest, show
from stagec.hardware import catalog
from stagec.hardware.tpu_topologies import TOPOLOGY
from stagec.manifest import gpu, models, toml
from stagec.manifest.tables import NAME, RELEASE, SHAPE
from stagec.manifest.targets import resolve
from stagec.manifest.toml import Location, key_path
from stagec.manifest.values import abbreviate, no_file

_TABLES: Mapping[str, tuple[type[BaseModel], ...]] = {
    "manifest": (models.Header,),
    "targets": tuple(models.TARGETS.values()),
    "meshes": (models.Mesh,),
    "functions": (models.Function,),
}

TARGETS_SAY = 'list targets of the manifest instead, for example targets = ["cpu"]'

_STATIC = (
    "a static argument needs a value ahead of time",
    "bind values by name under static, for example static = { temperature = 1.0 }; for several, write variants",
)

REFUSED: Mapping[str, tuple[str, str]] = {
    "device": ("a device of the build machine has no meaning ahead of time", TARGETS_SAY),
    "backend": ("a backend of the build machine has no meaning ahead of time", TARGETS_SAY),
    "lowering_platforms": (
        "jax.export's lowering platforms have another name here",
        'write platforms = ["cpu", "cuda"]',
    ),
    "abstracted_axes": ("JAX removed abstracted axes", 'name the dimension in the aval, as in "f32[batch,64]"'),
    "override_lowering_rules": (
        "lowering rules are code and cannot be written in a manifest",
        "register the rule with jax.interpreters.mlir in the module of the entry",
    ),
    "static_argnums": _STATIC,
    "static_argnames": _STATIC,
}
"""Keys that a reader of JAX's documentation may try -> the reason for the refusal, and the correction."""


@dataclass(frozen=True)
class Manifest:
    """A manifest whose tables are well-formed and refer to each other correctly.

    file: the path that messages and specs name: relative to the workspace.
    targets: the names that functions may use: tables of the manifest, and the short names and TPU topologies in use.
    jaxlib: releases of jaxlib that compile for a target, by the names in `targets` of functions; without an entry, the
    build's own.
    """

    file: str
    header: models.Header
    targets: Mapping[str, TargetSpec]
    meshes: Mapping[str, models.Mesh]
    functions: Mapping[str, models.Function]
    jaxlib: Mapping[str, Sequence[str]]

    def platforms_of(self, function: models.Function) -> tuple[str, ...]:
        """The platforms that a function is lowered for: those it names, else those of its targets."""
        if function.platforms is not None:
            return function.platforms
        return tuple(sorted({self.targets[name].platform for name in function.targets}))

    def stablehlo_of(self, function: models.Function) -> str | None:
        """The newest version of StableHLO that each jaxlib of its targets reads; None if they name none."""
        named = (release for target in function.targets for release in self.jaxlib.get(target, ()))
        return releases.stablehlo_for([*named])

    def has_jax_cache(self, function: models.Function) -> bool:
        """Whether the manifest asks for entries of JAX's compilation cache for a function; JAX must trace it."""
        said = (asked for asked in (function.jax_cache, self.header.jax_cache) if asked is not None)
        # One that JAX does not trace and that asks for itself goes on to `checks`, which names its key; what [manifest]
        # asks for all passes it over.
        traced = frontends.of_entry(function.entry, function.frontend).name == "jax"
        return next(said, False) and (traced or bool(function.jax_cache))

    def tracing_of(self, function: models.Function) -> dict[str, Any]:
        """The settings for tracing a function that are given: its own, else those of [manifest].

        A file is not traced.
        """
        # So an edit of a setting in [manifest] is in no key of a function that it cannot change.
        is_traced = not frontends.of_entry(function.entry).endings
        tables: list[models.Tracing] = [self.header, function] if is_traced else [function]
        given = [(key, getattr(table, key)) for table in tables for key in models.Tracing.model_fields]
        variables = dict(item for table in tables for item in table.environment.items())
        said = {key: value for key, value in given if value is not None}
        return {**said, "environment": dict(sorted(variables.items()))}


def load_manifest(path: str | Path, display_path: str | None = None) -> Manifest:
    """Reads the manifest in `path`.

    display_path: the name of the file in messages and in the plan; None: `path` as given.
    Raises StagecError with every problem of the file, and of files that describe devices.
    """
    file = display_path if display_path is not None else str(path)
    data = _read(Path(path), file)
    try:
        # A fault in one table must not hide those in others: `_references` reads the data as they were written,
        # whatever pydantic says of them.
        document = models.Document.model_validate(_with_tuples(data))
        problems = []
    except ValidationError as error:
        document = None
        problems = [problem for details in error.errors() for problem in _translate(details, file)]
    targets, unfit = resolve(document, file, Path(path).parent) if document else ({}, [])
    problems += [*unfit, *_references(data, file)]
    if problems or document is None:
        raise StagecError(*problems)
    targets = {name: replace(target, examined=document.manifest.examined) for name, target in targets.items()}
    named = {name: getattr(document.targets.get(name), "jaxlib", None) or document.manifest.jaxlib for name in targets}
    jaxlib = {name: given for name, given in named.items() if given}
    return Manifest(file, document.manifest, targets, document.meshes, document.functions, jaxlib)


def _read(path: Path, file: str) -> dict[str, Any]:
    try:
        text = reading.whole(path, toml.LARGEST).decode()
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is not UTF-8 text"
        raise StagecError(Problem(file, "", what, "save the file as UTF-8")) from None
    except OSError as error:
        what = f"cannot read the manifest: {(error.strerror or str(error)).lower()}"
        raise StagecError(Problem(file, "", what, "give the path of a TOML file")) from None
    try:
        return toml.parse(text)
    except tomllib.TOMLDecodeError as error:
        raise StagecError(Problem(file, "", *toml.explained(error, text))) from None
    except ValueError as error:
        raise StagecError(Problem(file, "", str(error))) from None


def _with_tuples(value: object) -> Any:
    """The same data with tuples for arrays, as strict, immutable models require."""
    match value:
        case dict():
            return {key: _with_tuples(item) for key, item in value.items()}
        case list():
            return tuple(_with_tuples(item) for item in value)
    return value


def _references(data: Mapping[str, Any], file: str) -> Iterator[Problem]:
    """Problems between tables. The data may have any form: other checks report wrong forms."""
    targets = data.get("targets", {})
    meshes = data.get("meshes", {})
    functions = data.get("functions", {})
    if not all(isinstance(table, dict) for table in (functions, targets, meshes)):
        return
    for name, function in functions.items():
        if not isinstance(function, dict):
            continue
        where = ("functions", name)
        wanted = function.get("targets", [])
        for index, target in enumerate(wanted if isinstance(wanted, list) else []):
            # A table of the manifest goes before a short name: so a device that stagec learns later changes no plan.
            if isinstance(target, str) and target not in targets:
                try:
                    catalog.target(target, tuple(targets))
                except StagecError as error:
                    fault = error.problems[0]
                    yield Problem(file, key_path((*where, "targets", index)), fault.what, fault.write)
        mesh = function.get("mesh")
        if isinstance(mesh, str) and mesh not in meshes:
            write = nearest(mesh, meshes) or f"add a table [meshes.{key_path((mesh,))}]"
            yield Problem(file, key_path((*where, "mesh")), f'unknown mesh "{mesh}"', write)
        yield from _meaningless_keys(function, where, file)
        written = [key for key in ("args", "kwargs") if key in function]
        if _frontend(function).endings:
            pass
        elif "avals" in function and written:
            what = f"{' and '.join(written)} and avals both say what the arguments are"
            yield Problem(file, key_path(where), what, "keep one of the two")
        elif "avals" not in function and not written:
            write = 'write for example args = ["f32[batch,64]"], or args = [] for a function without arguments'
            yield Problem(file, key_path(where), "nothing says what the arguments are", write)
        if not function.get("targets") and "platforms" not in function:
            write = 'write targets = ["NAME"] for executables, or platforms = ["cpu"] for the exported artifact alone'
            yield Problem(file, key_path(where), "neither targets nor platforms", write)
        kwargs = function.get("kwargs", {})
        for location, static in _static_tables(function):
            if isinstance(static, dict) and isinstance(kwargs, dict):
                for key in sorted(static.keys() & kwargs.keys()):
                    what = f'"{key}" is also one of the kwargs'
                    yield Problem(file, key_path((*where, *location, key)), what, "keep one of the two")


def _frontend(function: Mapping[str, Any]) -> Frontend:
    entry, name = function.get("entry"), function.get("frontend")
    return frontends.of_entry(entry if isinstance(entry, str) else "", name if isinstance(name, str) else None)


def _meaningless_keys(function: Mapping[str, Any], where: tuple[str, str], file: str) -> Iterator[Problem]:
    """Keys that have no meaning for the function's frontend: a file is not traced, arrays not by JAX."""
    frontend = _frontend(function)
    for key in frontend.meaningless:
        if key in function:
            what = f"{function['entry']} is {frontend.what}"
            yield Problem(file, key_path((*where, key)), what, f"leave {key} out; {frontend.because}")


def _static_tables(function: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every table of static values in a function, with its location."""
    yield ("static",), function.get("static")
    variants = function.get("variants")
    for name, variant in variants.items() if isinstance(variants, dict) else ():
        if isinstance(variant, dict):
            yield ("variants", name, "static"), variant.get("static")


def _translate(error: ErrorDetails, file: str) -> Iterator[Problem]:
    """The problems that one of pydantic's errors stands for."""
    location = error["loc"]
    value = error["input"]
    context = error.get("ctx", {})
    if error["type"] == "refused":
        for refusal in context["refusals"]:
            yield Problem(file, key_path((*_written(location), *refusal.path)), refusal.what, refusal.write)
        return
    if location[-1] == "[key]":
        location = location[:-1]
    what, write = _explain(error["type"], location, value, context)
    yield Problem(file, key_path(_written(location)), what, write)


def _written(location: Location) -> Location:
    """The keys that lead to a location in the file: pydantic adds the platform of a target."""
    return (*location[:_PLATFORM], *location[_PLATFORM + 1 :]) if location[0] == "targets" else location


def _explain(kind: str, location: Location, value: object, context: Mapping[str, Any]) -> tuple[str, str]:
    """The fault and the correction, for one of pydantic's error types."""
    shown = abbreviate(value)
    example = _example(location)
    match kind:
        case "missing":
            return "missing key" if len(location) > 1 else "missing table", example
        case "extra_forbidden":
            return _unknown_key(location)
        case "string_pattern_mismatch":
            return f"{shown} {_PATTERNS[context['pattern']]}", _module_of(value, str(location[-1])) or example
        case "union_tag_not_found":
            return "missing key platform", 'write for example platform = "cpu"'
        case "union_tag_invalid":
            platforms = ", ".join(f'"{platform}"' for platform in models.TARGETS)
            return f'platform "{context["tag"]}" is not supported', f"write one of {platforms}"
        case "literal_error":
            choices = context["expected"].replace(" or ", ", ").replace("'", '"')
            return f"unknown value {shown}", f"write one of {choices}"
        case "greater_than_equal":
            return f"{shown} is less than {context['ge']}", example
        case "too_short" if len(location) > 1:
            return "an empty table" if isinstance(value, dict) else "an empty array", example
        case "too_short":
            return "no functions", 'write a table such as [functions.predict] with entry = "package.module:function"'
    return f"{shown} is not {_TYPES.get(kind, 'of the right form')}", example


def _module_of(value: object, key: str) -> str:
    """The correction of an entry that names a Python file, as `stagec init` takes it; "" for anything else."""
    path, _, attribute = str(value).removeprefix("./").partition(".py:")
    entry = f"{path.replace('/', '.')}:{attribute}"
    return f'write {key} = "{entry}"' if re.fullmatch(models.ENTRY, entry) else ""


_PATTERNS = {
    NAME: "is not a name: letters, digits, _ and -, not starting with a digit or -",
    models.IDENTIFIER: "is not a Python name",
    models.ENTRY: "is not of the form package.module:attribute",
    models.MODULE_OR_ENTRY: f"is not of the form package.module:attribute, and {no_file('.mlir')}",
    models.ARGUMENT: "is not an argument: a Python name, or args[0] in quotes",
    models.WEIGHTS: f"is {no_file('.safetensors')}",
    models.INPUTS: f"is {no_file('.npz')}",
    SHAPE: "is not a shape: sizes with x between them",
    RELEASE: "is not a release: numbers with . between them",
    naming.JAXLIB: "is not a release of jaxlib, as jaxlib==0.12.0 is",
    gpu.DEVICE: f"is not the short name of a device, and {no_file('.toml')}",
    gpu.AUTOTUNING: f"is {no_file('.textproto')}",
    TOPOLOGY: "is not a TPU topology: a generation, and chips along each axis",
    models.TENSOR_NAME: "is not a name of an array: letters, digits and _ . / -, the first no . / or -, at most 200",
    models.FINGERPRINT: "is not a fingerprint: 16 digits and letters a to f, as python -m stagec.jax_cache prints it",
    models.VERSION: "is not a version: letters, digits and . + _ -",
}
"""The words of a message after a string that does not match a pattern."""
_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "bool_type": "true or false",
    "tuple_type": "an array",
    "dict_type": "a table",
    "model_type": "a table",
}


_PLATFORM = 2
"""Where pydantic puts the platform into the location of a target's key: targets, NAME, PLATFORM, key."""


def _field_location(location: Location) -> tuple[type[BaseModel], str]:
    """The model and the field of a location: the models know their keys that are tables, and the models of these."""
    model: type[BaseModel] = models.Document
    rest = list(location)
    while True:
        key = str(rest.pop(0))
        field = model.model_fields.get(key)
        names, tables = _tables(field.annotation) if field else (0, [])
        tagged = len(tables) > 1
        if not tables or len(rest) <= names + tagged:
            return model, key
        del rest[:names]
        model = models.TARGETS[str(rest.pop(0))] if tagged else tables[0]


def _tables(annotation: Any) -> tuple[int, list[type[BaseModel]]]:
    """The number of names from a key to a table, and the possible models of the table; none if it is not a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return 0, [annotation]
    if get_origin(annotation) is dict:
        names, tables = _tables(get_args(annotation)[1])
        return names + 1, tables
    if get_origin(annotation) in (Annotated, Union, UnionType):
        parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
        all_tables = [_tables(part) for part in parts]
        return max(names for names, _ in all_tables), [table for _, tables in all_tables for table in tables]
    return 0, []


def _example(location: Location) -> str:
    """A line with an example of the field at a location."""
    model, key = _field_location(location)
    examples = model.model_fields[key].examples if key in model.model_fields else None
    if not examples:
        return ""
    if model is models.Document:
        if key == "manifest":
            return 'write a table [manifest] with name = "digits" and version = "1.0.0"'
        return _table_example(key, examples[0])
    if model is models.Function and key in ("variants", "limits", "padding"):
        return _table_example(f"functions.NAME.{key}", examples[0])
    return f"write for example {key} = {show(examples[0])}"


def _table_example(path: str, example: Mapping[str, Mapping[str, object]]) -> str:
    name, table = next(iter(example.items()))
    key, value = next(iter(table.items()))
    return f"write a table such as [{path}.{name}] with {key} = {show(value)}"


def _unknown_key(location: Location) -> tuple[str, str]:
    key = str(location[-1])
    model = _field_location(location)[0]
    if key in REFUSED and model not in models.TARGETS.values():
        return REFUSED[key]
    if model in models.TARGETS.values():
        for platform, other in models.TARGETS.items():
            if key in other.model_fields:
                return "unknown key", f'{key} belongs in a target with platform = "{platform}"'
    for table, others in _TABLES.items():
        if model not in others and any(key in other.model_fields for other in others):
            header = "manifest" if table == "manifest" else f"{table}.NAME"
            return "unknown key", f"{key} belongs in a table [{header}]"
    return "unknown key", nearest(key, list(model.model_fields))
