"""The reference of rules, macros and providers in docs/rules.md, from the `doc` strings of the `.bzl` files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.pages.starlark import Call, File, Function

_FILES = ("rules/defs.bzl", "rules/extensions.bzl", "rules/repositories.bzl", "rules/providers.bzl")
_MACRO = ("rules/private/manifest.bzl", "_DEFS")
"""The text of a manifest's own defs.bzl."""


def as_markdown(root: Path) -> str:
    """Return a section for each file that users load from, with what it offers."""
    return "\n\n".join(_sections(root)) + "\n"


def _sections(root: Path) -> Iterator[str]:
    path, name = _MACRO
    template = File(root, path).value(name).format(path="the manifest", name="as written in it", plan="{}")
    yield "## `@<name>//:defs.bzl`\n\nThe repository of a manifest: `stagec.manifest` and `stagec_manifest` make it."
    yield _function(File(root, "", template).value("aot_manifest"))
    for path in _FILES:
        file = File(root, path)
        label = f"@stagec//{path.rpartition('/')[0]}:{path.rpartition('/')[2]}"
        yield f"## `{label}`\n\n{file.doc}"
        for name, value in sorted(file.public().items()):
            match value:
                case Function():
                    yield _function(value)
                case Call(function="module_extension"):
                    yield f"### {name}\n\n{value.arguments['doc']}"
                    for tag, declared in value.arguments["tag_classes"].items():
                        yield _attributes(f"{name}.{tag}", declared.arguments)
                case Call(function="provider"):
                    yield _provider(name, value.arguments)
                case Call():
                    yield _attributes(name, value.arguments)


def _function(function: Function) -> str:
    """Return the section of a function whose docstring has a part `Args:`."""
    doc, _, listed = function.doc.partition("\nArgs:\n")
    meanings = dict(re.findall(r"^  (\S+): (.*(?:\n    .*)*)", listed, re.MULTILINE))
    rows = [
        (name, "", " ".join(meanings[name].split()), "required" if default is None and name[0] != "*" else default)
        for name, default in function.parameters.items()
    ]
    return _section(function.name, doc.strip(), rows)


def _attributes(name: str, rule: Mapping[str, Any]) -> str:
    rows = [
        (
            key,
            attribute.function.removeprefix("attr."),
            attribute.arguments["doc"],
            "required" if attribute.arguments.get("mandatory") else None,
        )
        for key, attribute in sorted(
            rule.get("attrs", {}).items(), key=lambda item: not item[1].arguments.get("mandatory")
        )
        if not key.startswith("_")
    ]
    return _section(name, rule["doc"], rows)


def _provider(name: str, provider: Mapping[str, Any]) -> str:
    rows = [(key, *text.split(": ", 1)) for key, text in provider["fields"].items()]
    table = ["| field | type | meaning |", "| --- | --- | --- |"]
    return "\n".join(
        [f"### {name}\n\n{provider['doc']}\n", *table, *(f"| `{a}` | {b} | {_cell(c)} |" for a, b, c in rows)]
    )


def _section(name: str, doc: str, rows: list[tuple[str, str, str, str | None]]) -> str:
    """Return the section of what has parameters: name, type ("" for a macro's), meaning, and default or "required"."""
    typed = any(kind for _, kind, _, _ in rows)
    lines = [f"| {'attribute' if typed else 'parameter'} | {'type | ' if typed else ''}meaning | default |"]
    lines.append("| --- | --- | --- |" + (" --- |" if typed else ""))
    for key, kind, meaning, default in rows:
        shown = "" if default is None else default if default == "required" else f"`{default}`"
        lines.append(f"| `{key}` | {f'{kind} | ' if typed else ''}{_cell(meaning)} | {shown} |")
    return "\n".join([f"### {name}\n\n{doc}", *(["", *lines] if rows else [])])


def _cell(text: str) -> str:
    """Return a text that may stand in a table: what looks like a tag of HTML is code, where it is not so already."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"<\w+>[^\s`]*[^\s`.,:;]", r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")
