"""The reference of the Python API in docs/python.md: signatures and docstrings as griffe reads them in the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

_SIGNATURE_WIDTH = 100


def as_markdown(root: Path) -> str:
    """Return a section for each public name of the package: functions first, then classes, then exceptions."""
    package = griffe.load("stagec", search_paths=[root / "compiler"], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    public = [package[name] for name in package.exports or () if not str(name).startswith("_")]
    found = [one.final_target if isinstance(one, griffe.Alias) else one for one in public]
    functions = [one for one in found if isinstance(one, griffe.Function)]
    classes = [one for one in found if isinstance(one, griffe.Class)]
    errors = [one for one in classes if any(_is_error(base) for base in (one.path, *map(str, one.bases)))]
    parts = [
        ("Functions", [_function(one, "###") for one in functions]),
        ("Classes", [_class(one) for one in classes if one not in errors]),
        ("Exceptions", [_class(one) for one in errors]),
    ]
    return "\n\n".join(f"## {title}\n\n" + "\n\n".join(sections) for title, sections in parts) + "\n"


def _is_error(name: str) -> bool:
    return bool(re.search(r"(Error|Exception|Refusal)$", name))


def _class(kind: griffe.Class) -> str:
    bases = f"({', '.join(map(str, kind.bases))})" if kind.bases else ""
    sections = [f"### `{kind.name}`\n\n```python\nclass {kind.name}{bases}\n```", _text(kind)]
    for member in _members(kind):
        if isinstance(member, griffe.Function):
            sections.append(_function(member, "####", f"{kind.name}."))
        else:
            declared = f": {member.annotation}" if member.annotation is not None else ""
            sections.append(f"#### `{kind.name}.{member.name}{declared}`\n\n{_text(member)}")
    return "\n\n".join(section for section in sections if section)


def _members(kind: griffe.Class) -> Iterator[griffe.Function | griffe.Attribute]:
    """Yield the documented public members, those of base classes in stagec too, in the order of the sources."""
    seen: set[str] = set()
    for base in (kind, *(base for base in kind.mro() if base.path.startswith("stagec."))):
        for name, member in base.members.items():
            is_public = not name.startswith("_") or name == "__call__"
            known = isinstance(member, griffe.Function | griffe.Attribute)
            if known and is_public and member.docstring and name not in seen:
                seen.add(name)
                yield member


def _function(function: griffe.Function, heading: str, owner: str = "") -> str:
    parameters, starred = [], False
    for one in function.parameters:
        if one.name == "self" or one.name == "cls":
            continue
        if one.kind is griffe.ParameterKind.keyword_only and not starred:
            parameters.append("*")
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(one.kind, "")
        starred = starred or star == "*" or one.kind is griffe.ParameterKind.keyword_only
        annotation = f": {one.annotation}" if one.annotation is not None else ""
        default = f" = {one.default}" if one.default is not None and not star else ""
        parameters.append(f"{star}{one.name}{annotation}{default}")
    shown = f"{function.name}({', '.join(parameters)})" + (f" -> {function.returns}" if function.returns else "")
    if len(shown) > _SIGNATURE_WIDTH:
        head, end = shown.split("(", 1)[0], shown[shown.rindex(")") :]
        shown = f"{head}(\n" + "".join(f"    {one},\n" for one in parameters) + end
    decorators = "".join(
        f"@{one.value}\n" for one in function.decorators if str(one.value) in ("staticmethod", "classmethod")
    )
    return f"{heading} `{owner}{function.name}`\n\n```python\n{decorators}{shown}\n```\n\n{_text(function)}"


def _text(documented: griffe.Object) -> str:
    """Return a docstring as Markdown: lines `name: text` become a list, and what is indented below them goes on."""
    if documented.docstring is None:
        return ""
    lines: list[str] = []
    for line in documented.docstring.value.splitlines():
        item = re.match(r"(?:- )?([\w`]+(?:(?:, | and )[\w`]+)*): (.*)", line)
        if item and (line.startswith("- ") or not item[1][0].isupper()):
            if lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
                lines.append("")
            names = item[1] if "`" in item[1] else re.sub(r"\w+(?=,|$)", r"`\g<0>`", item[1])
            lines.append(f"- {names}: {item[2]}")
        elif line.startswith("    ") and lines and lines[-1].startswith(("- ", "  ")):
            lines.append(f"  {line.strip()}")
        else:
            if line and lines and lines[-1].startswith(("- ", "  ")):
                lines.append("")
            lines.append(line)
    return "\n".join(lines)
