"""The private names of JAX and jaxlib that the package uses, and which of them the installed releases do not have.

    python tools/private_names.py [--write]

Prints each name of private_names.txt that is missing, and each patch (frontends/common/patched.py) that JAX may no
longer need. `--write` writes private_names.txt from the sources of the package. `tools/known_builds.py names VERSION`
does the first for other releases.

A name is private if it is below `jax._src`, `jax.extend` or `jaxlib`, or begins with an underscore. `Class.name` is an
attribute of objects: one that a class of `CLASSES_IN` has, and nothing else that the package uses. Attributes with
common names, such as `shape`, are not listed: the code does not say of which class they are.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
sys.path.insert(0, str(ROOT / "compiler"))

from stagec.frontends.common import patched  # noqa: E402  # found through the line above

SOURCES = (ROOT / "compiler" / "stagec", *sorted((ROOT / "compiler" / "extensions").glob("*/stagec_*")))
LIST = Path(__file__).with_suffix(".txt")
HEAD = """\
# The private names of JAX and jaxlib that stagec uses. `python tools/private_names.py --write` writes this file;
# `python tools/known_builds.py names VERSION` says which of them a release does not have. A release has one of
# `NAME or NAME`.
"""
SEVERAL = (
    ("jax._src.config.device_context", "jax._src.mesh.device_context"),
    ("jax._src.pallas.mosaic.tpu_info", "jax._src.tpu_info", "jax._src.pallas.triton.gpu_info"),
    ("jaxlib._hlo", "jaxlib._jax"),
)
"""Names of which each release has at least one. The package looks which."""
CLASSES_IN = ("jaxlib._jax", "jaxlib._hlo", "jaxlib.mlir.ir", "jaxlib.mlir.passmanager", "jax._src.core")
NO_OBJECTS_OF = frozenset(
    (
        *("AbstractFuture", "AbstractToken", "AbstractValue", "DropVar", "HloInstruction", "HloSchedule"),
        *("JaxprPpSettings", "Literal", "Ref", "ShardedToken", "SymbolTable", "Token", "Var"),
    )
)
"""Classes among these that stagec has no objects of, and that have an attribute in common with others."""
_PRIVATE = re.compile(r"(jax\._src|jax\.extend|jaxlib)\.\w|jax\.(\w+\.)*_(?!_)")


def used(sources: Sequence[Path] = SOURCES) -> dict[str, set[str]]:
    """Return the private names that the package uses, and the files that use each."""
    trees = {path: ast.parse(path.read_text("utf-8")) for folder in sources for path in sorted(folder.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in _defined(tree)} | _of_python()
    classes = _classes()
    users: dict[str, set[str]] = defaultdict(set)
    for patch in patched.PATCHES:
        users[f"{patch.owner.replace(':', '.')}.{patch.name}"].add("frontends/common/patched.py")
    for path, tree in trees.items():
        dotted, attributes = _names(tree)
        names = [*dotted]
        names += [
            f"{name}.{attribute}"
            for attribute in attributes - ours
            for name, kinds in classes.items()
            if any(_has(kind, attribute) for kind in kinds)
        ]
        for name in names:
            users[name].add(str(path.relative_to(ROOT / "compiler")))
    return {name: files for name, files in users.items() if _PRIVATE.match(name) or name.partition(".")[0] in classes}


def listed() -> list[str]:
    """Return the lines of the list."""
    return [line for line in LIST.read_text("utf-8").splitlines() if not line.startswith("#")]


def lines(names: Iterable[str]) -> list[str]:
    """Return the lines that the list has for names that the package uses."""
    several = {name for alternatives in SEVERAL[:2] for name in alternatives}
    return sorted({*names} - several - {"jaxlib._hlo"} | {" or ".join(alternatives) for alternatives in SEVERAL})


def missing(names: Iterable[str]) -> list[str]:
    """Return the lines of which the installed releases have no name."""
    classes = _classes()
    if "ClosedJaxpr" not in classes:  # JAX 0.12 has one class of both
        classes["ClosedJaxpr"] = classes["Jaxpr"]

    def there(name: str) -> bool:
        kind, _, attribute = name.partition(".")
        if kind in classes:
            return any(_has(known, attribute) for known in classes[kind])
        return _resolves(name)

    return [line for line in names if not any(map(there, line.split(" or ")))]


def superfluous() -> list[str]:
    """Return a sentence for each patch whose reason the installed JAX's sources do not show."""
    package = importlib.import_module("jax")
    texts = [path.read_text("utf-8") for path in Path(package.__path__[0]).rglob("*.py")]
    return [
        f"{patch.owner}.{patch.name} may need no patch: JAX has no `{patch.until}`"
        for patch in patched.PATCHES
        if patch.until and not any(patch.until in text for text in texts)
    ]


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            try:
                value = getattr(value, part)
            except AttributeError:
                return False
            except ValueError:  # such as `InsertionPoint.current`, where nothing is current
                return True
        return True
    return False


def _classes() -> dict[str, list[type]]:
    """Return the classes of `CLASSES_IN`, and of modules of C inside, by name."""
    classes: dict[str, list[type]] = defaultdict(list)
    for name in CLASSES_IN:
        try:
            module = importlib.import_module(name)
        except ImportError:  # an older jaxlib has no `_hlo`
            continue
        below = [value for value in vars(module).values() if isinstance(value, types.ModuleType)]
        for place in (module, *(value for value in below if value.__name__.startswith(f"{name}."))):
            for value in vars(place).values():
                own = isinstance(value, type) and value.__module__.partition(".")[0] in ("jax", "jaxlib")
                if own and value.__name__ not in NO_OBJECTS_OF and value not in classes[value.__name__]:
                    classes[value.__name__].append(value)
    return classes


def _has(kind: type, attribute: str) -> bool:
    return attribute in vars(kind) or attribute in vars(kind).get("__annotations__", ())


def _of_python() -> set[str]:
    """Return the attributes of the classes of Python and NumPy."""
    numpy = importlib.import_module("numpy")
    kinds = [value for value in vars(builtins).values() if isinstance(value, type)]
    kinds += [Path, re.Match, re.Pattern, types.FunctionType, types.CodeType, types.FrameType, types.TracebackType]
    kinds += [numpy.ndarray, numpy.dtype, importlib.import_module("contextvars").ContextVar]
    kinds += [importlib.import_module("functools").partial, importlib.import_module("struct").Struct]
    return {name for kind in kinds for name in dir(kind)} | {"_asdict", "_replace"}


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines or assigns, attributes too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the dotted names that a module writes out, of what it imports, and attributes of other values."""
    dotted, attributes, roots = set(), set(), dict(_imported(tree))
    dotted.update(name for name in roots.values())
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                inner.add(id(value))
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in roots:
                dotted.add(".".join([roots[value.id], *reversed(parts)]))
            else:
                attributes.update(parts)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"jax(lib)?(\.\w+)+(:\w+)?", str(node.value)):
            dotted.add(str(node.value).replace(":", "."))
    return dotted, {name for name in attributes if not name.startswith("__")}


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a module's imports bind, and what each stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    if arguments not in ([], ["--write"]):
        sys.exit(__doc__)
    if arguments:
        LIST.write_text(HEAD + "".join(f"{line}\n" for line in lines(used())), "utf-8")
    absent = missing(listed())
    print("\n".join([*(f"missing: {name}" for name in absent), *superfluous()]) or "nothing is missing")
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
