"""Read the facts about a function from its Python file without running anything, for `stagec init`.

Parameters from its signature; what they are from a function or a value that describes the arguments, or from
annotations (jaxtyping's, https://docs.kidger.site/jaxtyping/api/array/); libraries from what the file imports.
"""

from __future__ import annotations

import ast
import functools
import keyword
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stagec.core.builds import distributions, naming
from stagec.core.data import reading
from stagec.core.messages.errors import Problem, StagecError, nearest
from stagec.core.sizes import expressions
from stagec.core.sizes.avals import AvalError, dimension_variables, parse_aval

DESCRIBING = ("{}_avals", "{}_example_inputs", "{}_example_args", "avals", "example_inputs", "example_args")
"""Names of values that describe the arguments of a function, in the order of the search."""

_DTYPES = {
    **{f"{kind}{bits}": f"{short}{bits}" for kind, short in (("Int", "i"), ("UInt", "u")) for bits in (8, 16, 32, 64)},
    **{f"Float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **dict.fromkeys(("Float", "Inexact", "Real", "Num", "Shaped"), "f32"),
    "BFloat16": "bf16",
    "Complex": "c64",
    "Complex64": "c64",
    "Complex128": "c128",
    "Bool": "bool",
    "Int": "i32",
    "Integer": "i32",
    "UInt": "u32",
    "Key": "key<fry>",
}
"""jaxtyping's names, and JAX's default dtypes for them."""
_SCALARS = {"float": "f32[]", "int": "i32[]", "bool": "bool[]", "complex": "c64[]", "PRNGKeyArray": "key<fry>[]"}
_LONGEST_NAME = 255
"""Bytes of a path that may name a file."""
_MOST_PARTS = 20
"""The most parts of a path that is written as an expression."""
_LARGEST = 1 << 24
"""Bytes of a Python file (16 MiB)."""
_KNOWN = {"jax", "jaxlib", "numpy", "stagec"}
"""Packages that the environment of the rules always has."""


@dataclass(frozen=True)
class Function:
    """The facts about a function in its Python file.

    module: as it is imported. name: of the function, `object.method` for one of an object. called: in the manifest; "":
    as `key` says.
    avals: name of the object in the same module that describes all arguments; "" without.
    arguments: name of each positional argument -> its tree of avals; None if the file does not describe it.
    by_keyword: the same for keyword-only parameters without a default.
    dimensions: names of symbolic dimensions.
    libraries: the packages from an index that the file and its imports in the workspace need, by distribution, sorted.
    strangers: modules that are neither the workspace's nor known to be of a package, each with a file that imports it.
    files: the files of the workspace that it imports, itself included. roots: folders of the workspace, besides the
    workspace itself, that modules are imported from, as a script imports the files beside it. data: the files of the
    workspace that strings of these modules name.
    """

    module: str
    name: str
    avals: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    by_keyword: Mapping[str, object] = field(default_factory=dict)
    dimensions: Sequence[str] = ()
    libraries: Sequence[str] = ()
    strangers: Mapping[str, Path] = field(default_factory=dict)
    files: Sequence[Path] = ()
    roots: Sequence[Path] = ()
    data: Sequence[Path] = ()
    called: str = ""

    @property
    def plain(self) -> str:
        """Its name, without that of an object."""
        return self.name.rpartition(".")[2]

    @property
    def key(self) -> str:
        """The name of its table in the manifest: its own, but where `aot_manifest` has another target of that name."""
        reserved = self.plain in (*naming.MACRO_TARGETS, "aot")
        return self.called or (self.other_name if reserved else self.plain)

    @property
    def other_name(self) -> str:
        """A name for a manifest that has another function of its name."""
        return f"{self.module.rpartition('.')[2]}_{self.name.replace('.', '_')}"

    @property
    def entry(self) -> str:
        """The manifest's `entry`."""
        return f"{self.module}:{self.name}"

    @property
    def unknown(self) -> list[str]:
        """The parameters without a description."""
        pairs = {**self.arguments, **self.by_keyword}.items()
        return [] if self.avals else [name for name, tree in pairs if tree is None]


def function(root: Path, file: str, name: str) -> Function:
    """Read the function `name` of a Python file. root: the workspace; file: relative to it.

    Raises StagecError, with one problem, if there is no such file or function, or it cannot be imported.
    """
    tree = _parsed(root, file)
    defined = _defined(tree)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    first, of_object, method = name.partition(".")
    if first not in (defined | classes if of_object else defined):
        known = [other for other in defined if not other.startswith("_")]
        write = nearest(first, known) or "name a function that stands at the top level of the file"
        raise StagecError(Problem(file, "", f'no {"object" if of_object else "function"} "{first}"', write))
    module, top = _importable(root, file)
    imports = _Imports(root, top)
    files = imports.reached_from(root / file)
    common = Function(
        module,
        name,
        libraries=sorted(imports.libraries),
        strangers=imports.strangers,
        files=files,
        roots=[*imports.roots],
        data=[*imports.data],
    )
    describing = next(
        (candidate for candidate in (pattern.format(common.plain) for pattern in DESCRIBING) if candidate in defined),
        "",
    )
    if describing:
        return replace(common, avals=describing, dimensions=_symbolic(defined[describing]))
    signature = _method(defined, classes, first, method) if of_object else _signature(defined, name)
    if signature is None:
        return replace(common, arguments={"each argument": None} if of_object else {})
    positional = [*signature.posonlyargs, *signature.args]
    required = positional[: len(positional) - len(signature.defaults)]
    named = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    arguments = {parameter.arg: _tree(parameter.annotation) for parameter in required}
    by_keyword = {parameter.arg: _tree(parameter.annotation) for parameter, default in named if default is None}
    symbolic = dimensions([*arguments.values(), *by_keyword.values()])
    return replace(common, arguments=arguments, by_keyword=by_keyword, dimensions=symbolic)


def _importable(root: Path, file: str) -> tuple[str, Path]:
    """Return the name to import a file, and the folder that it is imported from: the workspace, in general.

    A module of Python's own library hides a folder of its name, so modules below are imported from that folder. Raises
    StagecError if the file has no name.
    """
    parts = Path(file).with_suffix("").parts
    hidden = next((at for at, part in enumerate(parts, 1) if part not in sys.stdlib_module_names), len(parts)) - 1
    wrong = [part for part in parts if not part.isidentifier() or keyword.iskeyword(part)]
    if wrong:
        what = f'"{wrong[0]}" cannot be imported: it is not a name in Python'
        raise StagecError(Problem(file, "", what, f'call it "{re.sub(r"[^0-9A-Za-z_]", "_", wrong[0])}"'))
    if parts[hidden] in sys.stdlib_module_names:
        what = f'"{parts[hidden]}" cannot be imported: Python has a module of this name'
        raise StagecError(Problem(file, "", what, "give the file another name"))
    return ".".join(parts[hidden:]), root.joinpath(*parts[:hidden])


def _parsed(root: Path, file: str) -> ast.Module:
    if not file.endswith(".py"):
        raise StagecError(
            Problem(file, "", "not a Python file", "write FILE.py:FUNCTION, such as models/net.py:predict")
        )
    try:
        return _module(root / file)
    except OSError as error:
        near = sorted(str(path.relative_to(root)) for path in (root / file).parent.glob("*.py"))
        write = nearest(file, near) or f"write the path of a Python file, relative to {root}"
        raise StagecError(Problem(file, "", f"cannot be read: {error.strerror}", write)) from None
    except ValueError as error:
        raise StagecError(Problem(file, "", str(error))) from None


def _module(file: Path) -> ast.Module:
    """Return the syntax tree of a Python file. Raises OSError, also for a file that is not regular, and ValueError."""
    return expressions.module(reading.whole(file, _LARGEST).decode("utf-8"))


def _defined(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.expr]:
    """Return the definitions at the top level of a module: functions, and the values of names."""
    defined: dict[str, ast.FunctionDef | ast.expr] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef():
                defined[node.name] = node
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                defined[name] = value
    return defined


def _signature(defined: Mapping[str, ast.FunctionDef | ast.expr], name: str) -> ast.arguments | None:
    """Return the parameters of a function, also of `name = jax.jit(function)`; None if they are not written here."""
    for _ in range(len(defined)):
        match defined.get(name):
            case ast.FunctionDef(args=parameters):
                return parameters
            case ast.Call(args=[ast.Name(id=name), *_]) | ast.Name(id=name):
                continue
        break
    return None


def _method(
    defined: Mapping[str, ast.AST], classes: Mapping[str, ast.ClassDef], name: str, method: str
) -> ast.arguments | None:
    """Return the parameters of a method of an object or a class, without the object; None if they are not here."""
    match defined.get(name):
        case ast.Call(func=ast.Name(id=of_class)) if of_class in classes:
            bound, scope = True, classes[of_class]
        case None if name in classes:
            bound, scope = False, classes[name]
        case _:
            return None
    for node in scope.body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            kinds = {kind.id for kind in node.decorator_list if isinstance(kind, ast.Name)}
            skipped = "classmethod" in kinds or (bound and "staticmethod" not in kinds)
            before = node.args.posonlyargs[skipped:]
            after = node.args.args if node.args.posonlyargs else node.args.args[skipped:]
            return ast.arguments(
                before, after, None, node.args.kwonlyargs, node.args.kw_defaults, None, node.args.defaults
            )
    return None


def _symbolic(node: ast.AST) -> list[str]:
    """Return the symbolic dimensions that are written in calls of `jax.export.symbolic_shape`."""
    dims = []
    for call in ast.walk(node):
        match call:
            case ast.Call(func=ast.Name(id="symbolic_shape") | ast.Attribute(attr="symbolic_shape"), args=[first, *_]):
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    dims += _names(f"f32[{first.value}]")
    return list(dict.fromkeys(dims))


def _tree(annotation: ast.expr | None) -> object:
    """Return the tree of avals that an annotation stands for; None if it does not say."""
    match annotation:
        case ast.Constant(value=str(text)):
            try:
                return _tree(expressions.parse(text))
            except ValueError:
                return None
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _SCALARS.get(name)
        case ast.Subscript(
            value=ast.Name(id=kind) | ast.Attribute(attr=kind),
            slice=ast.Tuple(elts=[_, ast.Constant(value=str(shape))]),
        ) if kind in _DTYPES:
            return _aval(_DTYPES[kind], shape)
        case ast.Subscript(
            value=ast.Name(id="tuple" | "Tuple") | ast.Attribute(attr="Tuple"), slice=ast.Tuple(elts=parts)
        ):
            children = [_tree(part) for part in parts]
            return None if None in children else children
    return None


def _aval(dtype: str, shape: str) -> str | None:
    """Return the aval of a shape as jaxtyping writes it; None for one of any rank, or without a name."""
    dims = [word.partition("=")[2] or word for word in (word.lstrip("#?") for word in shape.split())]
    if any(dim in ("...", "_") or dim.startswith(("*", "_")) for dim in dims):
        return None
    try:
        return str(parse_aval(f"{dtype}[{','.join(dims)}]"))
    except AvalError:
        return None


def dimensions(tree: object) -> list[str]:
    """Return the symbolic dimensions of a tree of avals, each once."""
    return list(dict.fromkeys(_names(tree)))


def _names(tree: object) -> list[str]:
    if isinstance(tree, dict | list):
        return [name for child in (tree.values() if isinstance(tree, dict) else tree) for name in _names(child)]
    try:
        return list(dimension_variables(parse_aval(str(tree)).shape)) if tree else []
    except AvalError:
        return []


class _Imports:
    """Collects the imports of a workspace's files, one file after the other.

    libraries, strangers: as `Function` has them. roots, data: the same, each once; keys of a dict.
    """

    def __init__(self, root: Path, top: Path) -> None:
        self._root = root
        self.libraries: set[str] = set()
        self.strangers: dict[str, Path] = {}
        self.roots = {} if top == root else {top: None}
        self.data: dict[Path, None] = {}

    def reached_from(self, file: Path) -> list[Path]:
        """Return the files of the workspace that a file imports, and those that these import, itself included."""
        known = {file: None}
        for current in (waiting := [file]):  # it grows
            new = [other for other in self._read(current) if other not in known]
            known.update(dict.fromkeys(new))
            waiting += dict.fromkeys(new)
        return list(known)

    def _read(self, file: Path) -> list[Path]:
        """Return the files of the workspace that a file imports."""
        try:
            tree = _module(file)
        except (OSError, ValueError):  # the build will say so
            return []
        self.data |= dict.fromkeys(self._named(tree, file))
        names = _imported(tree, file.relative_to(self._root))
        return [imported for name in names if (imported := self._resolve(name, file))]

    def _resolve(self, name: str, file: Path) -> Path | None:
        """Find the target of an import: a file of the workspace, one beside the file, or a library.

        A module of the workspace is never looked for on an index, where somebody else may have its name.
        """
        parts = name.split(".")
        # Python looks in its own library first, so a folder of that name in the workspace is never imported.
        if parts[0] in sys.stdlib_module_names or parts[0] in _KNOWN:
            return None
        for folder in (self._root, *self.roots, file.parent, *self._below.get(parts[0], ())):
            # From the longest name: of `from a import b`, b may be a module of a, or a name in it.
            for end in range(len(parts), 0, -1):
                below = folder.joinpath(*parts[:end])
                module_file = next(
                    (module for module in (below.with_suffix(".py"), below / "__init__.py") if module.is_file()), None
                )
                if module_file:
                    if folder != self._root:
                        self.roots[folder] = None
                    return module_file
        if package := distributions.of_import(name):
            self.libraries.add(package)
        elif parts[0] not in self._below:
            self.strangers.setdefault(parts[0], file.relative_to(self._root))
        return None

    def _named(self, tree: ast.Module, file: Path) -> Iterator[Path]:
        """Yield the files of the workspace, besides modules, that strings of a module name: it may read them."""
        for parts in filter(None, map(_path_in, ast.walk(tree))):
            for folder in (file.parent, self._root):
                named = Path(os.path.normpath(folder.joinpath(*parts)))
                if named.is_relative_to(self._root) and named.suffix != ".py" and named.is_file():
                    yield named
                    break

    @functools.cached_property
    def _below(self) -> Mapping[str, Sequence[Path]]:
        """The folders of the workspace that have a module, or a folder with modules, of a name; the nearest first."""
        parents: dict[str, dict[Path, None]] = {}
        for path, folders, files in os.walk(self._root):
            folder = Path(path)
            folders[:] = sorted(name for name in folders if _may_have_modules(folder / name))
            modules = [name.removesuffix(".py") for name in files if name.endswith(".py")]
            for name in modules:
                parents.setdefault(name, {})[folder] = None
            while modules and folder != self._root:
                parents.setdefault(folder.name, {})[folder.parent] = None
                folder = folder.parent
        return {name: sorted(folders, key=lambda folder: len(folder.parts)) for name, folders in parents.items()}


def _may_have_modules(folder: Path) -> bool:
    """Return whether a folder may have the workspace's own modules: not what was built or installed there."""
    if folder.name.startswith((".", "bazel-")) or folder.name in ("build", "dist", "node_modules", "site-packages"):
        return False
    return not any((folder / name).is_file() for name in ("pyvenv.cfg", "rules/private/manifest.bzl"))


def _path_in(node: ast.AST) -> list[str]:
    """Return the parts of a path that an expression may be: `"a/b"`, `folder / "a" / "b"`, `join(folder, "a", "b")`."""
    given: list[ast.AST] = [node]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join" and node.args:
        given = [*node.args]
    while isinstance(given[0], ast.BinOp) and isinstance(given[0].op, ast.Div) and len(given) < _MOST_PARTS:
        given[:1] = [given[0].left, given[0].right]
    texts = [part.value for part in given if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    path = "/".join(texts)
    return texts if path.isprintable() and 0 < len(path.encode()) <= _LONGEST_NAME else []


def _imported(tree: ast.Module, file: Path) -> Iterator[str]:
    """Yield the names that a module imports when it runs; for `from a import b` both `a.b` and `a`."""
    skipped = {id(inner) for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = file.parts[:-level] if level else ()
                base = [*above, *([module] if module else [])]
                yield from (".".join([*base, name.name]) for name in names)


def _is_for_types(node: ast.AST) -> bool:
    """Return whether a statement is `if TYPE_CHECKING:`."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
    return False
