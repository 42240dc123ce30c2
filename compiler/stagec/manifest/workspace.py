"""Write the files that a Bazel workspace needs to build a function, for `stagec init`.

`init` writes new files, and adds lines at the end of those that exist. It prints the lines that belong elsewhere in a
file, and those that bring stagec into an existing MODULE.bazel or WORKSPACE: it may have some of them in other words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagec.core.builds import distributions
from stagec.core.builds.version import VERSION
from stagec.core.data import reading, writing
from stagec.core.messages.errors import Problem, StagecError
from stagec.manifest import toml
from stagec.manifest.inference import Function

MODULE, WORKSPACE = "MODULE.bazel", "WORKSPACE"
SETTINGS = """\
# Java's second compiler would take more time than it saves: docs/performance.md of stagec has numbers.
startup --host_jvm_args=-XX:TieredStopAtLevel=1
# Debian's Bazel prints the log of its sandbox.
build --nosandbox_debug
"""
"""Options of Bazel for a workspace that has only stagec. Others may have larger builds, and options of their own."""
ENTRY_POINTS = (MODULE, WORKSPACE, "WORKSPACE.bazel")
_BUILDS = ("BUILD.bazel", "BUILD")
QUESTION = "#?"
"""How a line of requirements.in begins that asks for a package. It is a comment to pip; rules/private/lock.py stops."""
_SIZES = {"batch": (1, 32), "b": (1, 32), "n": (1, 32)}
"""Sizes to start with, by the name of the dimension; others get one size."""


@dataclass
class Changes:
    """The needs of a function in its workspace. Paths are relative to the workspace.

    added: file -> the lines to write at its end; for a new file, all of its content.
    paste: file -> the lines for its owner to add.
    advice: other steps before the build.
    lock: label of the lock that the entry points must declare; "" if the function needs none.
    """

    added: dict[str, str] = field(default_factory=dict)
    paste: dict[str, str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    lock: str = ""

    def add(self, path: str, text: str) -> None:
        """Add lines at the end of a file."""
        before = self.added.get(path, "")
        self.added[path] = before + ("\n" if before else "") + text

    def ask(self, path: str, text: str) -> None:
        """Have the owner of a file add lines to it."""
        self.paste[path] = self.paste.get(path, "") + text


def check(root: Path, functions: Sequence[Function]) -> None:
    """Raise StagecError if a manifest has one of the functions already, or two of them would be one table."""
    entries: dict[tuple[str, str], object] = {}
    for function in functions:
        manifest, _, tables = _manifest(root, function.files[0].parent)
        key = function.key.lower()  # files of two names would be one where case does not count
        table = next((table for name, table in tables.items() if name.lower() == key), None)
        other = entries.get((manifest, key)) or (table and table.get("entry", "of another entry"))
        entries[manifest, key] = function.entry
        if not other:
            continue
        what = f'the manifest has a function "{function.key}" already'
        write = "change it there"
        if other != function.entry:
            what, write = (
                f"{what}, {other}",
                f"give this one another name: --name {function.other_name}",
            )
        raise StagecError(Problem(manifest, f"functions.{function.key}", what, write))


def plan(root: Path, function: Function, arguments: str, stagec: str, modules: bool | None) -> tuple[Changes, str]:
    """Return the needs of a workspace to build a function, and the label of the bundle.

    root: the workspace. arguments: of the function, as a manifest writes them in `args`; "": as its file says.
    stagec: path of stagec's checkout, relative to the workspace. modules: whether its Bazel reads MODULE.bazel; None:
    it has no Bazel, and the path of the manifest is returned in place of the label.
    `check` has found that the function is in no manifest.
    """
    changes = Changes()
    folder = function.files[0].parent
    package = "" if folder == root else folder.relative_to(root).as_posix()
    manifest, name, _ = _manifest(root, folder)
    changes.add(manifest, _function_table(root, manifest, name, function, arguments, changes))
    if modules is None:
        return changes, manifest
    _build(root, package, name, function, changes)
    _libraries(root, function, changes)
    label = f"//{package}:{Path(manifest).name}"
    if not any((root / file).exists() for file in (*ENTRY_POINTS, ".bazelrc")):
        changes.add(".bazelrc", SETTINGS)
        if "bazel-" not in _text(root / ".gitignore"):
            changes.add(".gitignore", "/bazel-*\n")
    for file in (MODULE, WORKSPACE):
        if modules == (file == MODULE) or "stagec" in _text(root / file):
            _entry_point(root, file, name, label, stagec, changes)
    return changes, f"//{package}:{name}" if Path(package).name != name else f"//{package}"


def root_of(folder: Path, marks: Sequence[str]) -> Path:
    """Return the workspace that a folder is in: the nearest folder with one of these files or folders, else itself."""
    parents = (folder, *folder.parents)
    return next((path for path in parents if any((path / name).exists() for name in marks)), folder)


def _manifest(root: Path, folder: Path) -> tuple[str, str, Mapping[str, Any]]:
    """Return the path of a folder's manifest, relative to the workspace, its name, and the functions that it has."""
    for file in sorted(folder.glob("*.toml")):
        path, text = file.relative_to(root).as_posix(), _text(file)
        if "[manifest]" in text:
            try:
                tables = toml.parse(text)
                return path, tables["manifest"]["name"], tables.get("functions", {})
            except (KeyError, TypeError, ValueError) as error:
                raise StagecError(Problem(path, "", f"not a manifest: {error}", "fix it first")) from None
    name = re.sub(r"[^A-Za-z0-9_]", "_", folder.name) or "models"
    name = f"_{name}" if name[0].isdigit() else name
    if f'"{name}"' in _text(_build_file(folder)):
        name += "_aot"
    return (folder / f"{name}.toml").relative_to(root).as_posix(), name, {}


def _function_table(root: Path, manifest: str, name: str, function: Function, arguments: str, changes: Changes) -> str:
    """Return the part of the manifest that is about the function, with the head of a new one."""
    head = "" if (root / manifest).is_file() else f'[manifest]\nname = "{name}"\nversion = "0.1.0"\n\n'
    lines = [f"[functions.{function.key}]", f'entry = "{function.entry}"']
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
    yield f"# Or name a function of {file} that returns them, as jax.eval_shape does. Numbers in it are"
    yield "# arguments too, as in jax.jit; what must stay constant goes into static:"
    yield f'# avals = "{function.module}:{function.plain}_avals"'


def _guess(name: str) -> str:
    if re.search(r"param|weight|state|variables|model", name):
        return '{ kernel = "f32[784,10]", bias = "f32[10]" }'
    return '"key<fry>[]"' if re.fullmatch(r"(prng_?)?(key|rng)s?", name) else '"f32[batch,784]"'


def _toml(tree: object) -> str:
    return f"[{', '.join(map(_toml, tree))}]" if isinstance(tree, list) else f'"{tree}"'


def _build(root: Path, package: str, name: str, function: Function, changes: Changes) -> None:
    """Declare the targets of the manifest, with the function's imports."""
    folder = root / package
    inside = [path for path in function.files if path.is_relative_to(folder)]
    deep = any(path.parent != folder for path in inside)
    files = f'glob(["{"**/" * deep}*.py"])'
    labels = [_label(root, path, changes) for path in sorted({*function.files}.difference(inside))]
    data = [_label_in(root, folder, path, changes) for path in sorted(function.data)]
    imports = f"imports = {_toml([os.path.relpath(top, folder) for top in function.roots])}"
    file = _build_file(folder)
    path = file.relative_to(root).as_posix()
    text = _text(file)
    if f"@{name}_manifest//" in text:
        deps = [files] if deep and files not in text else []
        new = [label for label in labels if f'"{label}"' not in text]
        deps += [_toml(new)] if new else []
        lacks = [f"deps = ... + {' + '.join(deps)}"] if deps else []
        lacks += [imports] if function.roots and imports not in text else []
        new = [label for label in data if f'"{label}"' not in text]
        lacks += [f"data = ... + {_toml(new)}"] if new else []
        if lacks:
            changes.ask(path, f"{', '.join(lacks)}  # in aot_manifest\n")
        return
    deps = [files, *([_toml(labels)] if labels else [])]
    rule = f'name = "{name}", deps = {" + ".join(deps)}{f", {imports}" if function.roots else ""}'
    rule += f", data = {_toml(data)}" if data else ""
    # A file cannot load two macros under one name.
    macro, loaded = "aot_manifest", '"aot_manifest"'
    if macro in text:
        macro = f"{name}_targets"
        loaded = f"{macro} = {loaded}"
    changes.add(path, f'load("@{name}_manifest//:defs.bzl", {loaded})\n{macro}({rule})\n')


def _label_in(root: Path, folder: Path, path: Path, changes: Changes) -> str:
    """Return the label of a file as the package of a folder writes it."""
    between = [parent for parent in path.parents if parent.is_relative_to(folder) and parent != folder]
    mine = path.is_relative_to(folder) and not any(_build_file(parent).is_file() for parent in between)
    return path.relative_to(folder).as_posix() if mine else _label(root, path, changes)


def _label(root: Path, path: Path, changes: Changes) -> str:
    """Return the label of a file of another package, and see to it that this may be used."""
    parents = [folder for folder in path.parents if folder.is_relative_to(root)]
    package = next((folder for folder in parents if _build_file(folder).is_file()), path.parent)
    name, below = path.relative_to(package).as_posix(), package.relative_to(root).as_posix()
    file, text = _build_file(package), _text(_build_file(package))
    module = path.suffix == ".py"
    if not file.is_file():
        exported = 'glob(["*.py"])' if module else _toml([name])
        line = f"exports_files({exported})\n"
        before = changes.added.get(file.relative_to(root).as_posix(), "")
        if line not in before:
            changes.added[file.relative_to(root).as_posix()] = before + line
    elif "exports_files(" not in text or (f'"{name}"' not in text and not (module and "exports_files(glob(" in text)):
        changes.ask(file.relative_to(root).as_posix(), f'exports_files(["{name}"])\n')
    return f"//{'' if below == '.' else below}:{name}"


def _build_file(folder: Path) -> Path:
    return next((folder / name for name in _BUILDS if (folder / name).is_file()), folder / "BUILD")


def _libraries(root: Path, function: Function, changes: Changes) -> None:
    """Write the models' imports into requirements.in, or name the packages that a lock lacks.

    If no package is known to have a module, the file asks, because anybody may own the package of that name. A line
    with the package and the module behind # is the answer; `lock` stops at a question.
    """
    if not (function.libraries or function.strangers):
        return
    changes.lock = next(
        filter(None, (_locked(_text(root / name)) for name in (MODULE, WORKSPACE))), "//:requirements.lock"
    )
    lock = changes.lock.removeprefix("//").replace(":", "/").lstrip("/")
    source = str(Path(lock).with_suffix(".in"))
    locked = _text(root / lock)
    written = _text(root / source)
    missing = [package for package in function.libraries if not distributions.provided(package, locked)]
    asked = {
        module: file
        for module, file in function.strangers.items()
        if not distributions.provided(distributions.normalized(module), f"{locked}\n{written}")
    }
    answered = [module for module in asked if re.search(rf"^[A-Za-z0-9].*# *{module}\b", written, re.MULTILINE)]
    questions = {module: file for module, file in asked.items() if module not in answered}
    if questions:
        modules = ", ".join(questions)
        changes.advice.append(f"{source}: write which package brings {modules}, as the file says")
    if missing or asked:
        new = [package for package in missing if not distributions.provided(package, written)]
        new += [
            f'{QUESTION} {module}: {file} imports it. Write here "PACKAGE  # {module}", the package that brings it; '
            "for a module of your own, delete this line, and name its files in deps of aot_manifest"
            for module, file in questions.items()
            if f"{QUESTION} {module}:" not in written
        ]
        if new:
            changes.add(source, "\n".join(new) + "\n")
        # By default, the command writes *.lock beside *.in.
        output = "" if lock.endswith(".lock") else f" --output {lock}"
        changes.advice.insert(0, f"{distributions.LOCK_COMMAND} {source}{output}")
    if lock == "requirements.lock" and not _build_file(root).is_file() and _build_file(root).name not in changes.added:
        changes.added["BUILD"] = ""


def _locked(text: str) -> str:
    """Return the label of the lock that an entry point declares for models; "" if it declares none."""
    match = re.search(r'(?:^\w+\.python|\bstagec_repositories)\([^)]*?(?<!\w)lock\s*=\s*"([^"]*)"', text, re.MULTILINE)
    return match[1] if match else ""


def _entry_point(root: Path, file: str, name: str, manifest: str, stagec: str, changes: Changes) -> None:
    """Declare stagec, the lock and a manifest in MODULE.bazel or WORKSPACE."""
    text = _text(root / file)
    lock = f'lock = "{changes.lock}"' if changes.lock else ""
    repository = f'name = "{name}_manifest", manifest = "{manifest}"'
    if file == MODULE:
        uses = re.search(r'^(\w+) *= *use_extension\(\s*"@stagec//', text, re.MULTILINE)
        extension = uses[1] if uses else "stagec"
        head = [
            'bazel_dep(name = "platforms", version = "0.0.11")',
            f'bazel_dep(name = "stagec", version = "{VERSION}")',
            f'local_path_override(module_name = "stagec", path = "{stagec}")',
            'stagec = use_extension("@stagec//rules:extensions.bzl", "stagec")',
        ]
        packages = f"{extension}.python"
        declaration = [f"{extension}.manifest({repository})", f'use_repo({extension}, "{name}_manifest")']
    else:
        rules = ("stagec_manifest", "stagec_offline_repositories", "stagec_repositories")
        head = [
            f'workspace(name = "{re.sub("[^A-Za-z0-9_]", "_", root.name) or "models"}")' if not text else "",
            f'local_repository(name = "stagec", path = "{stagec}")',
            f'load("@stagec//rules:repositories.bzl", {", ".join(map(_toml, rules))})',
            "stagec_offline_repositories()",
        ]
        packages = "stagec_repositories"
        declaration = [f"stagec_manifest({repository})"]
    used = ('"@stagec//rules:' if file == MODULE else '"stagec_manifest"') in text
    lines = [] if used else [line for line in head if line.partition(", version")[0] not in text]
    lacks_lock = bool(lock) and not _locked(text)
    if f"{packages}(" not in text and (lacks_lock or (not used and file == WORKSPACE)):
        lines.append(f"{packages}({lock})")
    elif lacks_lock:
        changes.ask(file, f"{lock},  # in {packages}(...)\n")
    lines += [] if f'"{name}_manifest"' in text else declaration
    if lines:
        (changes.ask if text and not used else changes.add)(file, "\n".join(lines) + "\n")


def _text(path: Path) -> str:
    """Return a file as a string, to search for names in it; "" if there is none. Bytes that are not UTF-8 go."""
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def write(root: Path, changes: Changes) -> dict[str, str]:
    """Write new files and add lines to others; return the action for each: "written" or "added to".

    Raises StagecError, naming the file, if that is not possible, and for links: it writes nothing elsewhere.
    """
    done = {}
    for path, text in changes.added.items():
        name = path.rpartition("/")[2]
        try:
            with writing.folder(root) as top, writing.made(top, path) as folder:
                before, mode = _there(name, folder)
                gap = b"\n" * (2 - before.endswith(b"\n")) if before else b""
                writing.file(folder, name, [before or b"", gap, text.encode()], mode)
        except OSError as error:
            if error.filename == name:
                error.filename = path
            what = f"cannot be written: {writing.reason(error, root)}"
            raise StagecError(Problem(path, "", what)) from error
        done[path] = "written" if before is None else "added to"
    return done


def _there(name: str, folder: int) -> tuple[bytes | None, int]:
    """Return the content of a file in an open folder (None if there is none), and the permissions that it keeps."""
    try:
        file = reading.RegularFile(name, folder)
    except FileNotFoundError:
        return None, 0o644
    return file.read(0, file.size), os.fstat(file.descriptor).st_mode & 0o777


def relative(stagec: Path, root: Path) -> str:
    """Return the path of stagec's checkout for the workspace's files: a relative path if both are near."""
    return str(stagec) if os.path.commonpath([stagec, root]) == "/" else os.path.relpath(stagec, root)
