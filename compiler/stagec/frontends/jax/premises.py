"""What a trace took for granted: the sources, the settings of JAX, and the values that a function reaches by a name.

A build records them beside the artifact. A program that has a function compares them before it runs the executable
without tracing (`stagec.jax.jit`). They are not all that a trace may depend on, such as a clock or a file: so the
program also compares the module itself. Digests do not depend on comment lines, places, or the release of Python.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.util
import inspect
import logging
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import config

from stagec.frontends.jax import contexts

_COMPILING = (
    *("jax_compiler_enable_remat_pass", "jax_disable_most_optimizations", "jax_exec_time_optimization_effort"),
    *("jax_memory_fitting_effort", "jax_memory_fitting_level", "jax_optimization_level"),
)
"""Settings by which JAX compiles another executable of a program."""
_TEXT = re.compile(
    rb"""(?P<keep>
      (?P<quotes>\"\"\"|''')(?:\\.|.)*?(?P=quotes) | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
      | (?<=[^\s])[ \t]*\#[^\n]*
    ) | (?:^|\n)[ \t\f]*(?:\#[^\n]*)?(?=\n|\Z)""",
    re.DOTALL | re.VERBOSE,
)
"""A string or a comment behind code, which stay; or a line with nothing, or nothing but a comment."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, np.dtype)
_OPAQUE = (logging.Logger, type(np.add))
"""Objects whose name says what they are."""


class UnknownValueError(ValueError):
    """A function reaches a value that cannot be described."""


def of(function: Any, is_weak: bool) -> dict[str, Any]:
    """Return what a trace of `function` takes for granted, as plain values.

    function: its own name. jitted: whether `jax.jit` made what the manifest names: it is a function in the module then.
    weak: whether a result has a weak type, by which JAX chooses dtypes, and which no result of a bundle has.
    sources: digests of the user's modules that this process has imported. settings: JAX's that are on, as strings.
    values: the digest of what the function reaches; "" if it cannot be described, and `unknown` says what.
    """
    from stagec.frontends.common import user_code  # the build's

    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    users = sorted(name for name, file in files.items() if file and name != "__main__" and user_code.is_users(file))
    sources = {name: digest for name in users if (digest := _source(name))}
    named = {"function": name_of(function), "jitted": hasattr(function, "lower"), "weak": is_weak}
    return {**named, "sources": sources, "settings": settings(), **_values(function, sources)}


def differing(recorded: Mapping[str, Any], function: Any) -> str:
    """Say how this process, but for settings, differs from what `of` recorded in a build; "" if it does not."""
    if recorded["weak"]:
        return "its result has a weak type, which no result of a bundle has"
    if recorded["unknown"]:
        return f"it reaches {recorded['unknown']}"
    for name, sha256 in recorded["sources"].items():
        if _source(name) != sha256:
            return f"the source of {name} is not the one that was built"
    values = _values(function, recorded["sources"])
    if values["values"] != recorded["values"]:
        return values["unknown"] or "a value that it reaches by a name or closed over is not the one that was built"
    return ""


def differing_settings(recorded: Mapping[str, Any]) -> str:
    """Say which of JAX's settings here and now is another than in a build; "" if none is."""
    here, built = settings(), recorded["settings"]
    for name in sorted({*here, *built}):
        if here.get(name) != built.get(name):
            return f"{name} is {here.get(name, 'off')}, and it was built with {built.get(name, 'off')}"
    return ""


def settings() -> dict[str, str]:
    """Return JAX's settings here and now that are on and change a program: JAX itself says which, but for `BEYOND`."""
    traced = config.trace_context_names() if hasattr(config, "trace_context_names") else ()
    everywhere = jax.config.values  # an attribute is for this thread; flags of absl have none
    names = sorted({*traced, *contexts.BEYOND, *_COMPILING} & {*everywhere})
    values = {name: getattr(jax.config, name, everywhere[name]) for name in names}
    return {name: str(value) for name, value in values.items() if value}


def name_of(function: Any) -> str:
    """Return a function's own name, as in an entry of a manifest: "models.scale:scale"."""
    function = _inside(function)
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"


def _inside(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _source(name: str) -> str:
    """Return the digest of a module's source; "" if it has none here."""
    try:
        module: Any = sys.modules.get(name) or importlib.util.find_spec(name)
        content = Path(getattr(module, "__file__", None) or module.origin).read_bytes()
    except (AttributeError, ImportError, OSError, TypeError, ValueError):
        return ""
    bare = _TEXT.sub(lambda match: match["keep"] or b"", content.replace(b"\r\n", b"\n"))
    return hashlib.sha256(bare.lstrip(b"\n")).hexdigest()


def _values(function: Any, sources: Collection[str]) -> dict[str, str]:
    if not hasattr(config, "trace_context_names"):
        return {"values": "", "unknown": "settings that JAX before 0.10.2 does not list"}
    try:
        return {"values": _digest(_inside(function), sources), "unknown": ""}
    except UnknownValueError as error:
        return {"values": "", "unknown": str(error)}
    except Exception as error:  # noqa: BLE001 - an object of the user's may raise anything when it is looked at
        return {"values": "", "unknown": f"an object that raises {type(error).__name__}, which stagec cannot compare"}


def _digest(value: Any, sources: Collection[str]) -> str:
    digest = hashlib.sha256()
    for part in _described(value, "", sources, {}):
        digest.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _described(value: Any, path: str, sources: Collection[str], seen: dict[int, Any]) -> Iterator[str]:
    """Yield strings that are others for another value: of its type, its parts, and of what its functions reach.

    path: for messages. seen: each object by its id, in the order in which they came.
    """
    kind = type(value)
    below = functools.partial(_described, sources=sources, seen=seen)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, enum.Enum):
        yield value.name
    elif isinstance(value, _PLAIN):
        yield value.hex() if isinstance(value, float) else repr(value)
    elif isinstance(value, np.ndarray | np.generic | jax.Array) and value.dtype != object and not _is_traced(value):
        array: Any = value
        words = jax.random.key_data(array) if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        yield f"{value.dtype}{value.shape}{hashlib.sha256(np.asarray(words).tobytes()).hexdigest()}"
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | types.WrapperDescriptorType):
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        if isinstance(value, type) and value.__module__ in sources and id(value) not in seen:
            seen[id(value)] = value
            for base in value.__mro__[1:]:
                yield from below(base, path)
            members = getattr(value, "__members__", {}) if issubclass(value, enum.Enum) else {}
            yield from below({name: member.value for name, member in members.items()}, path)
            for name, member in sorted(vars(value).items()):
                is_code = isinstance(_inside(member), types.FunctionType | staticmethod | classmethod | property)
                # Other descriptors, as of slots and the fields of a named tuple, say where an object has a value.
                is_value = not name.startswith("__") and not inspect.isdatadescriptor(member)
                # Of an enum, each Python has other members beside those.
                is_value = is_value and not (issubclass(value, enum.Enum) and (name[0] == "_" or name in members))
                if is_code or (is_value and name != "_abc_impl"):
                    yield name
                    yield from below(member, f"{path}.{name}")
    elif id(value) in seen:
        yield str([*seen].index(id(value)))
    elif isinstance(value, _OPAQUE):
        yield value.__name__ if hasattr(value, "__name__") else value.name
    else:
        seen[id(value)] = value
        for name, part in _parts(value, path, sources):
            yield name
            yield from below(part, f"{path}.{name}" if path else name)


def _parts(value: Any, path: str, sources: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield what an object consists of, with names. Raises UnknownValueError."""
    match value:
        case types.FunctionType():
            yield f"{value.__module__}.{value.__qualname__}", None
            yield from _reached(value, sources)
        case types.MethodType():
            yield from (("__self__", value.__self__), ("__func__", value.__func__))
        case functools.partial():
            yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        case staticmethod() | classmethod():
            yield "__func__", value.__func__
        case property():
            yield "fget", value.fget
        case functools.cached_property():
            yield "func", value.func
        case Mapping():
            yield from ((f"[{i}]", pair) for i, pair in enumerate(value.items()))
        case tuple() | list():
            yield from ((f"[{i}]", part) for i, part in enumerate(value))
        case set() | frozenset():
            yield from ((part, None) for part in sorted(_digest(part, sources) for part in value))
        case re.Pattern():
            yield from (("pattern", value.pattern), ("flags", value.flags))
        case _ if hasattr(value, "__wrapped__"):  # under jax.jit, say
            yield "__wrapped__", value.__wrapped__
        case _ if dataclasses.is_dataclass(value) or type(value).__module__ in sources:
            yield "class", type(value)
            yield from sorted(getattr(value, "__dict__", {}).items())
            yield from (
                (name, getattr(value, name)) for name in getattr(value, "__slots__", ()) if hasattr(value, name)
            )
        case _:
            raise UnknownValueError(f"{path or 'itself'}, a {type(value).__qualname__}, which stagec cannot compare")


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _reached(function: types.FunctionType, sources: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function closed over, its defaults, and those that the user's code reaches by a name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty yet
            continue
    yield from (("defaults", function.__defaults__), ("keywords", function.__kwdefaults__))
    if function.__module__ not in sources:
        return
    names = sorted(set(_names(function.__code__)))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType):
            yield from _members(value, name, names, sources, set())


def _members(
    module: types.ModuleType, path: str, names: Collection[str], sources: Collection[str], passed: set[str]
) -> Iterator[tuple[str, Any]]:
    """Yield what the user's code may reach in a module, and in the user's modules below it. passed: those before."""
    passed.add(module.__name__)
    top = module.__name__.partition(".")[0]
    for inner in names:
        member = vars(module).get(inner)
        # A package's own members are those of its version, unless somebody has put another there.
        replaced = str(getattr(_inside(member), "__module__", top)).partition(".")[0] != top
        if module.__name__ in sources or (replaced and isinstance(_inside(member), types.FunctionType)):
            yield f"{path}.{inner}", member
        if not isinstance(member, types.ModuleType) or member.__name__ in passed:
            continue
        if member.__name__ in sources or not getattr(member, "__file__", None):  # a package without a source has none
            yield from _members(member, f"{path}.{inner}", names, sources, passed)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code, and functions inside it, may look for: also those that `getattr` may get."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
