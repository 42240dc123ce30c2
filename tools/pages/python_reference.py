"""The reference of the Python API: signatures and docstrings as griffe reads them in the sources.

A docstring is Markdown, except for two things: lines `name: text` are a list, and lines that begin with `>>>` are an
example.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import griffe

_INTERNAL = {
    "CannotCompile.from_error",
    "Exported.interface",
    "Function.add_variant",
    "Function.shapes_of",
    "Lowered.memory_of_parameters",
    "StagecError.of",
}
"""Members that other modules of stagec use, and nobody else."""

_SIGNATURE_WIDTH = 100
_PUBLIC = {"_jax.Device": "jax.Device", "_jax.LoadedExecutable": "jaxlib.xla_client.LoadedExecutable"}
"""The names by which people import classes that the sources take from `jaxlib._jax`."""


def as_markdown(root: Path, names: Sequence[str]) -> str:
    """Return a section for each of these public names of the package."""
    objects = map(_public(root).__getitem__, names)
    sections = [_class(item) if isinstance(item, griffe.Class) else _function(item, "##") for item in objects]
    return "\n\n".join(sections) + "\n"


@functools.cache
def _public(root: Path) -> Mapping[str, griffe.Class | griffe.Function]:
    """Return the public names of stagec and of stagec_arrays with what they are."""
    folders = [root / "compiler", root / "compiler" / "extensions" / "arrays"]
    loader = griffe.GriffeLoader(search_paths=folders, allow_inspection=False)
    named: dict[str, griffe.Class | griffe.Function] = {}
    for package in map(loader.load, ("stagec", "stagec_arrays")):
        assert isinstance(package, griffe.Module)
        imported = {name: member for name, member in package.members.items() if isinstance(member, griffe.Alias)}
        ours = {name: alias for name, alias in imported.items() if alias.target_path.startswith(f"{package.name}.")}
        targets = {name: _target(alias) for name, alias in ours.items()}
        named |= {name: item for name, item in targets.items() if isinstance(item, griffe.Class | griffe.Function)}
    return named


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def _class(kind: griffe.Class) -> str:
    bases = ", ".join(_bases(kind))
    sections = [f"## `{kind.name}`\n\n```python\nclass {kind.name}{f'({bases})' if bases else ''}\n```", _text(kind)]
    for member in _members(kind):
        if isinstance(member, griffe.Function):
            sections.append(_function(member, "###", f"{kind.name}."))
        else:
            sections.append(f"### `{kind.name}.{member.name}`")
            if member.annotation is not None:
                sections.append(f"```python\n{member.name}: {member.annotation}\n```")
            sections.append(_text(member))
    return "\n\n".join(section for section in sections if section)


def _bases(kind: griffe.Class) -> Iterator[str]:
    """Yield the base classes; a base class of stagec is replaced by its own."""
    ours = {base.canonical_path: base for base in kind.mro()}
    for base in kind.bases:
        path = base.canonical_path if isinstance(base, griffe.Expr) else str(base)
        if path in ours and path.startswith("stagec."):
            yield from _bases(ours[path])
        elif not path.startswith("typing.Generic"):
            yield str(base)


def _members(kind: griffe.Class) -> Iterator[griffe.Function | griffe.Attribute]:
    """Yield the documented public members, those of base classes in stagec too, in the order of the sources."""
    seen: set[str] = set()
    for base in (kind, *(base for base in kind.mro() if base.path.startswith("stagec."))):
        for name, member in base.members.items():
            is_public = f"{kind.name}.{name}" not in _INTERNAL and (not name.startswith("_") or name == "__call__")
            known = isinstance(member, griffe.Function | griffe.Attribute)
            if known and is_public and member.docstring and name not in seen:
                seen.add(name)
                yield member


def _function(function: griffe.Function, heading: str, owner: str = "") -> str:
    parameters, starred = [], False
    for parameter in function.parameters:
        if parameter.name == "self" or parameter.name == "cls":
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not starred:
            parameters.append("*")
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        starred = starred or star == "*" or kind is griffe.ParameterKind.keyword_only
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not star else ""
        parameters.append(f"{star}{parameter.name}{annotation}{default}")
    shown = f"{function.name}({', '.join(parameters)})" + (f" -> {function.returns}" if function.returns else "")
    if len(shown) > _SIGNATURE_WIDTH:
        head, end = shown.split("(", 1)[0], shown[shown.rindex(")") :]
        shown = f"{head}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + end
    for private, public in _PUBLIC.items():
        shown = shown.replace(private, public)
    decorators = "".join(
        f"@{decorator.value}\n"
        for decorator in function.decorators
        if str(decorator.value) in ("staticmethod", "classmethod")
    )
    return f"{heading} `{owner}{function.name}`\n\n```python\n{decorators}{shown}\n```\n\n{_text(function)}"


def _text(documented: griffe.Object) -> str:
    """Return a docstring as Markdown. Raises ValueError for a list whose lines are not indented below its items."""
    if documented.docstring is None:
        return ""
    prose, prompt, example = documented.docstring.value.partition(">>> ")
    lines: list[str] = []
    for line in prose.rstrip().splitlines():
        item = re.match(r"(?:- )?([\w`]+(?:(?:, | and )[\w`]+)*): (.*)", line)
        in_list = bool(lines) and lines[-1].startswith(("- ", "  "))
        if item and (line.startswith("- ") or not item[1][0].isupper()):
            if lines and lines[-1] and not in_list:
                lines.append("")
            names = item[1] if "`" in item[1] else re.sub(r"\w+(?=,|$)", r"`\g<0>`", item[1])
            if re.search(r"[.;] [a-z_]+: ", item[2]):
                raise ValueError(f"{documented.path}: two items of a list are in one line: {line}")
            lines.append(f"- {names}: {item[2]}")
        elif line.startswith("    ") and in_list:
            lines.append(f"  {line.strip()}")
        else:
            if line and in_list:
                if not re.match(r"[A-Z`]", line):
                    raise ValueError(f"{documented.path}: indent what belongs to an item of a list: {line}")
                lines.append("")
            lines.append(line)
    text = "\n".join(lines)
    return f"{text}\n\n{_example(prompt + example)}" if prompt else text


def _example(doctest: str) -> str:
    """Return a doctest as a program that can be pasted, formatted as ruff does: what it prints becomes comments."""
    lines = [
        line[4:] if line.startswith((">>> ", "... ")) else f"# {line}" for line in doctest.rstrip().splitlines() if line
    ]
    spaced: list[str] = []
    inside_definition = False
    for before, line in itertools.pairwise(["", *lines]):
        starts, is_decorated = line.startswith(("def ", "class ", "@")), before.startswith("@")
        ends = before.startswith("    ") and not line.startswith((" ", ")", "#"))
        ends_imports = "import " in before and "import " not in line
        if before and not is_decorated and (starts or (ends and inside_definition)):
            spaced += ["", ""]
        elif ends or ends_imports:
            spaced.append("")
        spaced.append(line)
        inside_definition = starts or (inside_definition and line.startswith(" "))
    return "\n".join(["```python", *spaced, "```"])
