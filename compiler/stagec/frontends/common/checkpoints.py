"""Avals of arguments that a file says: the header of a safetensors file, the metadata of a checkpoint of flax or orbax.

A leaf of `args` and `kwargs` names the file (`core.sizes.avals.FILES`). No weights are read. Libraries are imported
here when a function names a file of theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from stagec.bundle import safetensors
from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import Problem, nearest
from stagec.core.sizes.avals import FILES, SHORT_NAMES, Aval
from stagec.frontends.common import msgpack_headers

Tree: TypeAlias = Any
"""Dicts, lists and None, with avals as strings instead of arrays."""
_SHOWN = 8
_LEAVE_OUT = 'name a part without it with ?at=, or write avals = "package.module:function" that returns the arguments'
_ANOTHER = 'if the function takes another tree, write avals = "package.module:function" that returns it'


def avals(spec: FunctionSpec, leaf: str, key: str, roots: Sequence[str]) -> Tree:
    """Return the tree of avals that a leaf such as "safetensors:weights.safetensors?sep=." stands for.

    key: of the leaf, for messages. roots: folders that may contain the manifest's folder, first wins.
    Raises StagecError if there is no such file, if it has another kind or is incomplete, and if the library for it is
    not installed.
    """
    name, _, rest = leaf.partition(":")
    kind = _KINDS[name]
    file, _, query = rest.partition("?")
    option, _, value = query.partition("=")
    shown = Path(spec.manifest).parent / file
    paths = (Path(root, shown) for root in roots)
    path = next((path for path in paths if (path.is_dir() if kind.is_folder else path.is_file())), None)
    if path is None and kind.is_folder:
        write = f'name its files in data, as in data = glob(["{file}/**"]), relative to the manifest\'s folder'
        raise spec.problem(key, f"no folder {shown}", write)
    if path is None:
        raise spec.problem(key, f"no file {shown}", "name the file in data, relative to the manifest's folder")
    try:
        tree = kind.read(path)
        if option:
            tree = _nested(tree, value) if option == "sep" else _at(tree, value)
        return _texts(tree, "", spec.enable_x64)
    except ImportError as error:
        what = f"{shown} is read with {kind.library}, which cannot be imported: {error}"
        raise spec.problem(key, what, f"add {kind.library} to the lock of the Python environment") from error
    except _Misfit as error:
        what, write = error.args
        raise spec.problem(key, f"{shown}: {what}", write) from error
    except (ValueError, OSError) as error:
        write = _steps(path, file) if kind.is_folder else kind.write
        raise spec.problem(key, f"{shown} is not {kind.called}: {error}", write) from error


def problems(spec: FunctionSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Problem]:
    """Return the arrays of each argument from a file, for the error of a function that tracing failed for."""
    written = {f"args[{i}]": pair for i, pair in enumerate(zip(spec.args, args, strict=True))}
    written |= {f"kwargs.{name}": (tree, kwargs[name]) for name, tree in spec.kwargs.items()}
    return [
        Problem(spec.manifest, f"{spec.key}.{key}", f"{', '.join(files)} gave it {_shown(value)}", _ANOTHER)
        for key, (tree, value) in written.items()
        if (files := [leaf for _, leaf in _leaves(tree) if leaf.startswith(FILES)])
    ]


def _shown(tree: Any) -> str:
    """Return the arrays of a tree for a person, cut short if there are many."""
    rows = [f"{name} {leaf.dtype}[{','.join(map(str, leaf.shape))}]" for name, leaf in _leaves(tree)]
    more = [f"and {len(rows) - _SHOWN:,} more"] if len(rows) > _SHOWN else []
    return ", ".join([*rows[:_SHOWN], *more]) or "nothing"


def _leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of dicts and lists with their names, keys with dots between them, in the order of JAX."""
    match tree:
        case dict():
            children: Iterable[tuple[Any, Tree]] = sorted(tree.items())
        case list() | tuple():
            children = enumerate(tree)
        case None:
            return
        case _:
            yield name, tree
            return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


class _Misfit(Exception):
    """A file does not have a tree of avals: the fault, and the correction."""


def _nested(tensors: Mapping[str, safetensors.Tensor], separator: str) -> dict[str, Any]:
    """Return the arrays of a file nested: their names are paths."""
    tree: dict[str, Any] = {}
    for name, tensor in sorted(tensors.items()):
        *parents, leaf = name.split(separator)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise _Misfit(f"{name!r} is below another tensor", "leave out ?sep=")
        node[leaf] = tensor
    return tree


def _orbax(path: Path) -> Any:
    """Return the metadata of a checkpoint: orbax's entry of each leaf, instead of the leaves."""
    from orbax import checkpoint

    if not (path / "_METADATA").is_file():  # orbax tells of another file
        raise ValueError("it has no file _METADATA")
    try:
        logging.disable(logging.WARNING)  # it warns of files that not every checkpoint has
        with checkpoint.StandardCheckpointer() as checkpointer:
            metadata: Any = checkpointer.metadata(path.absolute())
    except Exception as error:  # for a damaged file, whatever its code comes upon
        raise ValueError(f"orbax raised {type(error).__name__}: {error}") from error
    finally:
        logging.disable(logging.NOTSET)
    metadata = getattr(metadata, "item_metadata", metadata)
    return getattr(metadata, "tree", metadata)


def _at(tree: Any, path: str) -> Any:
    """Return the subtree at a path such as `params.layers.0`."""
    done = ""
    for part in path.split("."):
        names = list(map(str, tree)) if isinstance(tree, Mapping) else []
        names = [str(index) for index in range(len(tree))] if isinstance(tree, list | tuple) else names
        if part not in names:
            at = f"at {done}" if done else "in it"
            what = f"there is no {part!r} {at}, only {', '.join(map(repr, names)) or 'an array'}"
            raise _Misfit(what, nearest(part, names) or "name a part that it has, or leave out ?at=")
        tree = list(tree.values())[names.index(part)] if isinstance(tree, Mapping) else tree[int(part)]
        done = f"{done}.{part}" if done else part
    return tree


def _texts(node: Any, path: str, wide: bool) -> Tree:
    """Return the same tree with avals as strings. wide: numbers of Python have 64 bits, as JAX makes them then."""
    if isinstance(node, Mapping):
        return {name: _texts(child, _join(path, name), wide) for name, child in node.items()}
    if isinstance(node, list | tuple):
        return [_texts(child, _join(path, index), wide) for index, child in enumerate(node)]
    if node is None:
        return None
    bits = "64" if wide else "32"
    if isinstance(node, bool):
        return "bool[]"
    if isinstance(node, int | float):
        return f"~{'i' if isinstance(node, int) else 'f'}{bits}[]"
    if type(node).__name__ == "ScalarMetadata":  # orbax gives a number of Python back
        return "bool[]" if node.dtype.kind == "b" else f"~{'f' if node.dtype.kind == 'f' else 'i'}{bits}[]"
    if isinstance(node, safetensors.Tensor):
        return str(node.aval)
    dtype = SHORT_NAMES.get(str(getattr(node, "dtype", "")))
    if dtype is None:
        kind = getattr(node, "dtype", None) or f"a {type(node).__name__}"
        raise _Misfit(f"{path or 'it'} is {kind}, which is not an array of JAX's", _LEAVE_OUT)
    return str(Aval(dtype, tuple(node.shape)))


def _join(path: str, part: object) -> str:
    return f"{path}.{part}" if path else str(part)


def _steps(path: Path, folder: str) -> str:
    """Return the advice for a folder that may have checkpoints below it."""
    below = sorted(file.parent.relative_to(path).as_posix() for file in path.glob("**/_METADATA"))
    return f'write for example "orbax:{folder}/{below[-1]}"' if below else "name the folder that has the file _METADATA"


class _Kind(NamedTuple):
    """A kind of file.

    called: its name in messages. library: the distribution that reads it. read: path -> a tree for `_texts`.
    write: the advice if it is something else. is_folder: whether it is a folder.
    """

    called: str
    library: str
    read: Callable[[Path], Any]
    write: str = ""
    is_folder: bool = False


_TO_BYTES = "write it with flax.serialization.to_bytes or msgpack_serialize"
_KINDS = {
    "safetensors": _Kind("a safetensors file that stagec can read", "", safetensors.read),
    "msgpack": _Kind("a checkpoint of flax.serialization", "msgpack", msgpack_headers.read, _TO_BYTES),
    "orbax": _Kind("a checkpoint of orbax", "orbax-checkpoint", _orbax, is_folder=True),
}
"""By the words that leaves begin with."""
