"""The preparation for tracing a Python function: its arguments, their names, and static ones."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxlib import _jax

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import Problem, StagecError
from stagec.core.sizes import partitions
from stagec.core.sizes.avals import FILES, Aval, parse_aval
from stagec.core.sizes.partitions import Partition
from stagec.core.sizes.size import names_in
from stagec.core.trees.tree import DEEPEST, is_too_deep
from stagec.frontends.common import checkpoints, packages, repeatable, updates, user_code
from stagec.pjrt.arrays import is_masked
from stagec.pjrt.calling_convention import NUMBERS

T = TypeVar("T")
_UNBOUND = {
    "missing a required argument": "name it in args, in kwargs or in what avals returns; other values, in static",
    "multiple values": "write the arguments behind it in kwargs",
}
"""The advice, by Python's message."""
_SHOWN = 5
"""Numbers that a message shows."""


def parameters(spec: FunctionSpec, import_roots: Sequence[str]) -> list[str]:
    """Return the names of the parameters of the function of `spec` that take positional arguments, in order.

    The last may be `*name`. Static arguments are not among them, because callers pass them by keyword.
    """
    user_code.add_import_roots(import_roots)
    return user_code.positional(_load(spec), spec.static)


def function_of(spec: FunctionSpec, import_roots: Sequence[str]) -> Callable[..., Any]:
    """Import the function of `spec`, and return it. Raises StagecError."""
    user_code.add_import_roots(import_roots)
    packages.check(spec, import_roots)
    function = _load(spec)
    if not callable(function):
        raise spec.problem("entry", f"{spec.entry} is not callable (a {type(function).__name__})")
    return cast(Callable[..., Any], function)


def _load(spec: FunctionSpec) -> Any:
    return user_code.load_entry(spec.entry, spec.manifest, f"{spec.key}.entry")


def traced(spec: FunctionSpec, trace: Callable[[], T], what: str, args: Any, kwargs: Any) -> T:
    """Return the result of `trace`, which traces the function for these arguments.

    Raises StagecError: that `what` raised, and possible faults of the arguments.
    """
    repeatable.again(spec.key)
    try:
        return user_code.run(trace, what, spec.manifest, spec.key)
    except StagecError as error:
        more = numbers(spec, error) if spec.avals else checkpoints.problems(spec, args, kwargs)
        raise StagecError(*error.problems, *more, *_sizes(spec, error, args, kwargs)) from error.__cause__


_COMPARED = re.compile(r"dimension comparison '(.*)'( [<>]=? )'(.*)' is inconclusive")


def _sizes(spec: FunctionSpec, error: StagecError, args: Any, kwargs: Any) -> list[Problem]:
    """Return the advice for sizes with names that the error of a trace is about."""
    leaves, _ = _jax.pytree.default_registry().flatten((args, kwargs))
    dims = {str(dim) for leaf in leaves for dim in getattr(leaf, "shape", ()) if not isinstance(dim, int)}
    said = str(error.__cause__)
    # As in "(8*h, 3)", "'h' >= '3'", "c // 1 != 3", and not in the middle of a sentence.
    named = [
        name
        for name in sorted({name for dim in dims for name in names_in(dim)})
        if re.search(rf"(?<![\w.]){name} ?(?:[],)'*/+-]|!=)", said)
    ]
    if not named or "divisible by" in said or "is partitioned" in said:  # for which a constraint is the advice
        return []
    write = "write a number instead of one that the function must know"
    if compared := _COMPARED.search(said):
        write += f', or constraints = ["{"".join(compared.groups())}"] if that holds for all'
    return [spec.problem("", f"sizes with names stand for all sizes: {', '.join(named)}", write).problems[0]]


def arguments(
    spec: FunctionSpec, struct: Callable[[Aval, str], Any], import_roots: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the abstract arguments that a manifest writes as avals.

    struct: makes the placeholder of an array from its aval and key. import_roots: the folders to search for files.
    Raises StagecError with all faults.
    """
    problems: list[Problem] = []

    def abstract(tree: Any, key: str) -> Any:
        if isinstance(tree, Mapping):
            return {name: abstract(child, f"{key}.{name}") for name, child in tree.items()}
        if isinstance(tree, Sequence) and not isinstance(tree, str):
            return [abstract(child, f"{key}[{i}]") for i, child in enumerate(tree)]
        if tree is None:
            return None
        try:
            return (
                abstract(checkpoints.avals(spec, tree, key, import_roots), key)
                if tree.startswith(FILES)
                else struct(parse_aval(tree), key)
            )
        except StagecError as error:
            problems.extend(error.problems)

    args = tuple(abstract(tree, f"args[{i}]") for i, tree in enumerate(spec.args))
    kwargs = {name: abstract(tree, f"kwargs.{name}") for name, tree in spec.kwargs.items()}
    if problems:
        raise StagecError(*problems)
    return args, kwargs


def arguments_of_callable(spec: FunctionSpec, struct: str) -> tuple[tuple[Any, ...] | dict[str, Any], str]:
    """Return the object `avals = "module:name"`, or the result of calling it, and the advice if it is wrong.

    struct: the class of an abstract array, for messages. Raises StagecError for anything but a tuple or a dict.
    """
    assert spec.avals is not None
    key = f"{spec.key}.avals"
    function = user_code.load_entry(spec.avals, spec.manifest, key)
    repeatable.again(key)
    if callable(function) and (missing := _required(function)):
        write = "it is called without arguments: give them defaults, or leave them out"
        raise spec.problem("avals", f"{spec.avals} has parameters: {', '.join(missing)}", write)
    # Example inputs may be there as they are.
    result = user_code.run(function, f"{spec.avals} raised", spec.manifest, key) if callable(function) else function
    advice = f"return the positional arguments as a tuple, or keyword arguments as a dict, of {struct}"
    if not isinstance(result, tuple | dict):
        raise spec.problem("avals", f"{spec.avals} returned a {type(result).__name__}", advice)
    # A dict has keys that cannot be sorted, or a class of the user's raised an error.
    registry = _jax.pytree.default_registry()
    _, structure = user_code.run(
        lambda: registry.flatten(result), f"a tree that {spec.avals} returned raised", spec.manifest, key
    )
    if is_too_deep(structure):
        what = f"{spec.avals} returned containers that are nested deeper than {DEEPEST} levels"
        raise spec.problem("avals", what, "write one list or dict for several levels")
    return result, advice


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the parameters that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return []
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variable
    ]


def bind(function: Callable[..., Any], static: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function with its static arguments bound: no frontend sees them as arguments."""

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, **static)

    with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
        signature = inspect.signature(function)
        # Frontends name the arguments of the module after these parameters.
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in static]
        bound.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return bound


def refusal(spec: FunctionSpec) -> updates.Refusal:
    """Return a function that makes errors about the behavior of a manifest's function."""
    return lambda what, write: spec.problem("entry", f"{spec.entry} {what}", write)


def partitions_of(
    spec: FunctionSpec,
    path: str,
    prefix: Any,
    node: Any,
    below: Callable[[Any], list[tuple[str, Any]] | None],
    leaves: Callable[[Any], int],
) -> list[Partition | None]:
    """Return how each leaf of a tree is split, from a prefix of the tree at a key path of the manifest.

    Arrays of the manifest stand for any sequence, tables for dicts and for classes with fields of these names.
    below: the children of a node by name; None for a leaf. leaves: the number of a node's leaves.
    """
    if isinstance(prefix, str):
        return [partitions.parse(prefix)] * leaves(node)
    children = below(node)
    named = children or []
    if isinstance(prefix, Mapping):
        named = [(name, child) for name, child in named if name in prefix or leaves(child)]  # nnx has parts without
        names = [name for name, _ in named]
        if sorted(names) != sorted(prefix):
            has = "is an array there" if children is None else f"has {', '.join(names) or 'nothing'} there"
            raise spec.problem(path, f"{', '.join(prefix)} are given, but the tree {has}", "write the same names")
        parts = [(prefix[name], f"{path}.{name}") for name in names]
    elif children is None or len(prefix) != len(named):
        what = f"{len(prefix)} shardings are given for {1 if children is None else len(named)} elements"
        raise spec.problem(path, what, "write one for each, or one for all")
    else:
        parts = [(part, f"{path}[{i}]") for i, part in enumerate(prefix)]
    pairs = zip(parts, named, strict=True)
    return [leaf for (part, at), (_, child) in pairs for leaf in partitions_of(spec, at, part, child, below, leaves)]


def check_names(spec: FunctionSpec, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments against the function's signature, so that an error about a wrong name comes before tracing.

    Raises StagecError with all faults.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin: tracing will tell
    problems = []
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for key, names in (("static", spec.static), ("donate_argnames", spec.donate_argnames), ("kwargs", kwargs)):
        for name in names:
            if name not in signature.parameters and not takes_any:
                known = ", ".join(signature.parameters) or "none"
                what = f"{spec.entry} has no parameter {name!r}"
                problems.append(Problem(spec.manifest, f"{spec.key}.{key}", what, f"its parameters: {known}"))
    for number in spec.donate_argnums:
        if number >= len(args):
            what = f"argument {number} does not exist: the function is given {len(args)} positional arguments"
            problems.append(Problem(spec.manifest, f"{spec.key}.donate_argnums", what))
    if not problems:
        try:
            signature.bind(*args, **kwargs, **spec.static)
        except TypeError as error:
            what = f"the arguments do not fit {spec.entry}{signature}: {error}"
            write = next((write for said, write in _UNBOUND.items() if said in str(error)), "")
            problems.append(Problem(spec.manifest, spec.key, what, write))
    if problems:
        raise StagecError(*problems)


def hashable(value: Any) -> Any:
    """Return a static value that has a hash: TOML's arrays become tuples."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def abstracted(
    spec: FunctionSpec, example: Any, abstract: Callable[[Any], Any], advice: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with placeholders for leaves: arrays by dtype and shape, numbers in their traced form.

    abstract: makes a leaf's placeholder. Raises StagecError for leaves that are neither, and numbers without a dtype.
    """
    pairs, structure = _jax.pytree.default_registry().flatten_with_path(example)
    abstracts, wrong, static = [], [], {}
    for path, leaf in pairs:
        where = "".join(map(str, path))
        if not is_example(leaf):
            wrong.append(f"{where} is a {type(leaf).__name__}")
            if len(path) == 1 and isinstance(leaf, str):
                static[path[0]] = leaf
            continue
        try:
            abstracts.append(abstract(leaf))
        except OverflowError as error:
            raise spec.problem("avals", f"{spec.avals}: {where}: {error}", "write enable_x64 = true") from None
        except TypeError as error:
            raise spec.problem("avals", f"{spec.avals}: {where}: {error}", advice) from None
    if wrong:
        advice += _in_static(spec, static) if static else ""
        raise spec.problem("avals", f"{spec.avals} returned leaves that are not avals: {', '.join(wrong)}", advice)
    result = structure.unflatten(abstracts)
    return (result, {}) if isinstance(result, tuple) else ((), result)


def _in_static(spec: FunctionSpec, values: Mapping[Any, str]) -> str:
    """Return the advice for strings among the arguments of an example, by the key in its tuple or dict."""
    function = user_code.load_entry(spec.entry, spec.manifest, f"{spec.key}.entry")
    names = user_code.positional(function)
    rows = []
    for key, value in values.items():
        number = getattr(key, "idx", len(names))
        name = getattr(key, "key", None) or (names[number] if number < len(names) else "NAME")
        rows.append(f"{name} = {json.dumps(value)}")
    write = f"write static = {{ {', '.join(rows)} }} in the manifest, and leave it out here"
    jitted = "; also what your jax.jit has in static_argnums" if hasattr(function, "lower") else ""
    return f"\n{write}{jitted}"


def is_example(leaf: Any) -> bool:
    """Say whether a leaf stands for an argument: it has shape and dtype, and no mask, or is a Python number."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_masked(leaf)) or isinstance(leaf, NUMBERS)


def numbers(spec: FunctionSpec, error: StagecError) -> list[Problem]:
    """Return the advice for numbers of an example that a function needs as constants, from the error of its trace."""
    assert spec.avals is not None
    if not isinstance(error.__cause__, TypeError | IndexError):  # of those that say that a value is not known
        return []
    example = user_code.load_entry(spec.avals, spec.manifest, f"{spec.key}.avals")
    pairs, _ = _jax.pytree.default_registry().flatten_with_path(example() if callable(example) else example)
    paths = [
        f"{''.join(map(str, path))} is {leaf!r}"
        for path, leaf in pairs
        if isinstance(leaf, NUMBERS) and not hasattr(leaf, "dtype")
    ]
    if not paths:
        return []
    more = [f"and {len(paths) - _SHOWN} more"] if len(paths) > _SHOWN else []
    what = f"numbers in what {spec.avals} returned are arguments, as in jax.jit: {', '.join([*paths[:_SHOWN], *more])}"
    write = (
        "one that must stay constant is a keyword argument in static, "
        'or a static field of its class (field(metadata={"static": True}))'
    )
    return [spec.problem("avals", what, write).problems[0]]
