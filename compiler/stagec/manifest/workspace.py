"""The files with which a Bazel workspace builds a function, for `stagec init`: new ones, and lines for those there.

Nothing that is there is changed or taken away: lines are added at the end of a file, or told where that cannot be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stagec.core.errors import Problem, StagecError
from stagec.core.version import VERSION
from stagec.manifest.inference import Function

_LOCK_COMMAND = "bazel run @stagec//:lock --"
MODULE, WORKSPACE = "MODULE.bazel", "WORKSPACE"
SETTINGS = """\
# Java's second compiler would take more time than it saves: docs/performance.md of stagec has numbers.
startup --host_jvm_args=-XX:TieredStopAtLevel=1
# Debian's Bazel prints the log of its sandbox.
build --nosandbox_debug
"""
"""Of Bazel, for a workspace of stagec's alone: others may have larger builds, and their people chose theirs."""
_ENTRY_POINTS = (MODULE, WORKSPACE, "WORKSPACE.bazel")
_LOCK = 'lock = "//:requirements.lock"'
_BUILDS = ("BUILD.bazel", "BUILD")
_SIZES = {"batch": (1, 32), "b": (1, 32), "n": (1, 32)}
"""Sizes to start with, by the name of the dimension; others get one."""


@dataclass
class Changes:
    """What is to be done. added: path, relative to the workspace -> text to write at its end; a new file's whole text.

    told: path -> lines for a person to add, which cannot be added at the end. advice: what else to do first.
    """

    added: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    needs_lock: bool = False

    def add(self, path: str, text: str) -> None:
        """Add lines at the end of a file."""
        before = self.added.get(path, "")
        self.added[path] = before + ("\n" if before else "") + text


def plan(root: Path, function: Function, arguments: str, stagec: str, modules: bool) -> tuple[Changes, str]:
    """Return what a workspace needs to build a function, and the label of the bundle.

    root: the workspace. arguments: of the function, as a manifest writes them in `args`; "": as its file says.
    stagec: path of stagec's checkout, relative to the workspace. modules: whether its Bazel reads MODULE.bazel.
    Raises StagecError where the function is in a manifest already.
    """
    changes = Changes()
    folder = function.files[0].parent
    package = "" if folder == root else folder.relative_to(root).as_posix()
    manifest, name = _manifest(root, folder)
    changes.add(manifest, _function_table(root, manifest, name, function, arguments, changes))
    _build(root, package, name, function, changes)
    _libraries(root, function, changes)
    label = f"//{package}:{Path(manifest).name}"
    if not any((root / one).exists() for one in (*_ENTRY_POINTS, ".bazelrc")):
        changes.add(".bazelrc", SETTINGS)
    _entry_points(root, name, label, stagec, modules, changes)
    return changes, f"//{package}:{name}" if Path(package).name != name else f"//{package}"


def root_of(folder: Path) -> Path:
    """Return the workspace that a folder is in: the nearest folder with Bazel's entry points, else itself."""
    parents = (folder, *folder.parents)
    return next((one for one in parents if any((one / name).is_file() for name in _ENTRY_POINTS)), folder)


def _manifest(root: Path, folder: Path) -> tuple[str, str]:
    """Return the path of the package's manifest, relative to the workspace, and the manifest's name."""
    for path in sorted(folder.glob("*.toml")):
        found = re.search(r'^\[manifest\]\s*(?:[^\[]*\n)?name\s*=\s*"([^"]+)"', _text(path), re.MULTILINE)
        if found:
            return path.relative_to(root).as_posix(), found[1]
    name = re.sub(r"[^A-Za-z0-9_]", "_", folder.name) or "models"
    name = f"_{name}" if name[0].isdigit() else name
    text = _text(_build_file(folder))
    if re.search(rf'\bname\s*=\s*"{name}"', text):
        name += "_aot"
    return (folder / f"{name}.toml").relative_to(root).as_posix(), name


def _function_table(root: Path, manifest: str, name: str, function: Function, arguments: str, changes: Changes) -> str:
    """Return the part of the manifest that is about the function, with the head of a new one."""
    head = "" if (root / manifest).is_file() else f'[manifest]\nname = "{name}"\nversion = "0.1.0"\n\n'
    if not head:
        text = _text(root / manifest)
        if re.search(rf"^\s*\[functions\.(\"?){re.escape(function.name)}\1\]", text, re.MULTILINE):
            what = f'the manifest has a function "{function.name}" already'
            raise StagecError(Problem(manifest, f"functions.{function.name}", what, "change it there"))
    lines = [f"[functions.{function.name}]", f'entry = "{function.module}:{function.name}"']
    lines += [f"args = {arguments}"] if arguments else list(_arguments(manifest, function, changes))
    if function.dimensions:
        sizes = ", ".join(f"{dim} = {list(_SIZES.get(dim, (16,)))}" for dim in function.dimensions)
        lines += ["# One executable for each of these sizes.", f"buckets = {{ {sizes} }}"]
    return head + "\n".join([*lines, 'targets = ["cpu-avx2"]']) + "\n"


def _arguments(manifest: str, function: Function, changes: Changes) -> Iterator[str]:
    if function.avals:
        yield f'avals = "{function.module}:{function.avals}"'
        return
    if not function.unknown:
        if function.arguments or not function.by_keyword:
            yield f"args = [{', '.join(map(_toml, function.arguments.values()))}]"
        if function.by_keyword:
            yield f"kwargs = {{ {', '.join(f'{name} = {_toml(tree)}' for name, tree in function.by_keyword.items())} }}"
        return
    unknown = ", ".join(function.unknown)
    file = f"{function.module.replace('.', '/')}.py"
    changes.advice.append(f"{manifest}: write dtypes and shapes of {unknown}: {file} does not say them")
    yield f"# {file} does not say what {unknown} {'is' if len(function.unknown) == 1 else 'are'}. Write dtype and shape"
    yield "# of each, or a table of them for a dict, and take the # away:"
    yield "# args = ["
    for name, tree in function.arguments.items():
        yield f"#   {_toml(tree) if tree else _guess(name)},  # {name}"
    yield "# ]"
    if function.by_keyword:
        rows = (f"{name} = {_toml(tree) if tree else _guess(name)}" for name, tree in function.by_keyword.items())
        yield f"# kwargs = {{ {', '.join(rows)} }}"
    if not function.dimensions:
        yield "# buckets = { batch = [1, 32] }"
    yield f"# Or name a function of {file} that returns them, as jax.eval_shape does:"
    yield f'# avals = "{function.module}:{function.name}_avals"'


def _guess(name: str) -> str:
    if re.search(r"param|weight|state|variables|model", name):
        return '{ kernel = "f32[784,10]", bias = "f32[10]" }'
    return '"key<fry>[]"' if re.fullmatch(r"(prng_?)?(key|rng)s?", name) else '"f32[batch,784]"'


def _toml(tree: object) -> str:
    return f"[{', '.join(map(_toml, tree))}]" if isinstance(tree, list) else f'"{tree}"'


def _build(root: Path, package: str, name: str, function: Function, changes: Changes) -> None:
    """Declare the targets of the manifest, with what the function imports."""
    folder = root / package
    inside = [path for path in function.files if path.is_relative_to(folder)]
    deep = any(path.parent != folder for path in inside)
    deps = [f'glob(["{"**/" * deep}*.py"])']
    others = sorted({path for path in function.files if path not in inside})
    if others:
        deps.append(_toml([_label(root, path, changes) for path in others]))
    imports = ', imports = ["."]' if function.beside else ""
    load = f'load("@{name}_manifest//:defs.bzl", "aot_manifest")\n'
    rule = f'aot_manifest(name = "{name}", deps = {" + ".join(deps)}{imports})\n'
    file = _build_file(folder)
    path = f"{package}/{file.name}" if package else file.name
    text = _text(file)
    if f"@{name}_manifest//" in text:
        return
    if "aot_manifest" in text:
        load, rule = (part.replace("aot_manifest", f"{name}_targets", 1) for part in (load, rule))
        load = load.replace(f'"{name}_targets"', f'{name}_targets = "aot_manifest"')
    changes.add(path, f"{load}{rule}")


def _label(root: Path, path: Path, changes: Changes) -> str:
    """Return the label of a file of another package, and see to it that this may be used."""
    package = next((one for one in path.parents if one.is_relative_to(root) and _build_file(one).is_file()), None)
    if package is None:
        package = path.parent
        changes.add((package / "BUILD").relative_to(root).as_posix(), 'exports_files(glob(["*.py"]))\n')
        below = package.relative_to(root).as_posix()
        return f"//{'' if below == '.' else below}:{path.name}"
    name, below = path.relative_to(package).as_posix(), package.relative_to(root).as_posix()
    file = _build_file(package).relative_to(root).as_posix()
    if not re.search(rf"exports_files\((.*\n)*?.*({re.escape(name)}|glob)", _text(_build_file(package))):
        changes.told[file] = changes.told.get(file, "") + f'exports_files(["{name}"])\n'
    return f"//{'' if below == '.' else below}:{name}"


def _build_file(folder: Path) -> Path:
    return next((folder / name for name in _BUILDS if (folder / name).is_file()), folder / "BUILD")


def _libraries(root: Path, function: Function, changes: Changes) -> None:
    """Write what the models import into requirements.in, or say what a lock lacks."""
    if not function.libraries:
        return
    texts = [_text(root / name) for name in (MODULE, WORKSPACE)]
    named = next((found for text in texts if (found := re.search(r'(?<!\w)lock\s*=\s*"//:?([^"]*)"', text))), None)
    lock = named[1].replace(":", "/").lstrip("/") if named else "requirements.lock"
    source = str(Path(lock).with_suffix(".in"))
    locked = _text(root / lock)
    written = _text(root / source)
    missing = [one for one in function.libraries if not re.search(rf"^{re.escape(one)}\b", locked, re.MULTILINE)]
    if missing:
        new = [one for one in missing if not re.search(rf"^{re.escape(one)}\b", written, re.MULTILINE)]
        if new:
            changes.add(source, "\n".join(new) + "\n")
        # The command writes *.lock beside *.in, if nothing else is said.
        output = "" if lock.endswith(".lock") else f" --output {lock}"
        changes.advice.insert(0, f"{_LOCK_COMMAND} {source}{output}")
    changes.needs_lock = named is None
    if named is None and not _build_file(root).is_file() and _build_file(root).name not in changes.added:
        changes.added["BUILD"] = ""


def _entry_points(root: Path, name: str, manifest: str, stagec: str, modules: bool, changes: Changes) -> None:
    """Declare the manifest in MODULE.bazel or WORKSPACE: in the one that Bazel reads, and in one that names stagec."""
    for file, lines_of in ((MODULE, _module), (WORKSPACE, _workspace)):
        text = _text(root / file)
        if (modules == (file == MODULE) or "stagec" in text) and f'"{name}_manifest"' not in text:
            lines = [line for line in lines_of(root, text, stagec, changes) if line]
            extension = re.search(r'^(\w+)\s*=\s*use_extension\(\s*"@stagec//', "\n".join([text, *lines]), re.MULTILINE)
            declared = f'name = "{name}_manifest", manifest = "{manifest}"'
            if extension:
                lines += [f"{extension[1]}.manifest({declared})", f'use_repo({extension[1]}, "{name}_manifest")']
            else:
                lines.append(f"stagec_manifest({declared})")
            changes.add(file, "\n".join(lines) + "\n")


def _module(root: Path, text: str, stagec: str, changes: Changes) -> Iterator[str]:
    """Yield what a MODULE.bazel lacks to use stagec."""
    if not re.search(r'bazel_dep\(\s*name\s*=\s*"platforms"', text):
        yield 'bazel_dep(name = "platforms", version = "0.0.11")'
    if not re.search(r'bazel_dep\(\s*name\s*=\s*"stagec"', text):
        yield f'bazel_dep(name = "stagec", version = "{VERSION}")'
        yield f'local_path_override(module_name = "stagec", path = "{stagec}")'
    variable = re.search(r'^(\w+)\s*=\s*use_extension\(\s*"@stagec//', text, re.MULTILINE)
    if not variable:
        yield 'stagec = use_extension("@stagec//rules:extensions.bzl", "stagec")'
    if changes.needs_lock:
        yield f"{variable[1] if variable else 'stagec'}.python({_LOCK})"


def _workspace(root: Path, text: str, stagec: str, changes: Changes) -> Iterator[str]:
    """Yield what a WORKSPACE lacks to use stagec."""
    if not text:
        yield f'workspace(name = "{re.sub("[^A-Za-z0-9_]", "_", root.name) or "models"}")'
    if '"stagec"' not in text:
        yield f'local_repository(name = "stagec", path = "{stagec}")'
    load = 'load("@stagec//rules:repositories.bzl", "stagec_manifest"'
    if "stagec_repositories(" not in text:
        yield f'{load}, "stagec_offline_repositories", "stagec_repositories")'
        yield "stagec_offline_repositories()"
        yield f"stagec_repositories({_LOCK if changes.needs_lock else ''})"
        return
    if '"stagec_manifest"' not in text:
        yield f"{load})"
    if changes.needs_lock:
        changes.told[WORKSPACE] = f"stagec_repositories({_LOCK})\n"


def _text(path: Path) -> str:
    """Return what is in a file; "" where there is none. It is searched for names: what is no UTF-8 does not matter."""
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def write(root: Path, changes: Changes) -> dict[str, str]:
    """Write new files and add lines to others; return what was done with each: "written" or "added to".

    Raises StagecError, naming the file, where that is not possible.
    """
    done = {}
    for path, text in changes.added.items():
        file = root / path
        there = file.is_file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            before = file.read_bytes() if there else b""
            with file.open("ab") as out:
                out.write(
                    (b"\n" if before and not before.endswith(b"\n") else b"") + (b"\n" * bool(before)) + text.encode()
                )
        except OSError as error:
            raise StagecError(Problem(path, "", f"cannot be written: {error.strerror}")) from error
        done[path] = "added to" if there else "written"
    return done


def relative(stagec: Path, root: Path) -> str:
    """Return the path of stagec's checkout as the workspace's files have it: relative, where they are near."""
    return str(stagec) if os.path.commonpath([stagec, root]) == "/" else os.path.relpath(stagec, root)
