"""The reference of the manifest's keys in docs/manifest.md, from the JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_NAMES = {
    "bind": "<argument>",
    "functions": "<function>",
    "limits": "<target>",
    "meshes": "<mesh>",
    "outputs": "<result>",
    "padding": "<dimension>",
    "state": "<name>",
    "targets": "<target>",
    "variants": "<variant>",
}
"""A table whose keys the user chooses -> what stands for such a key."""


def as_markdown(schema: Schema) -> str:
    """Return a section for each table of a manifest, with one for each of its keys.

    The anchor of a key is its path without the names that the user chooses: `functions.golden.atol`. In a table for one
    platform, the platform stands in place of the target's name: `targets.cpu.isa`.
    """
    sections = [_section(schema, *table) for table in _tables(schema, (), (), schema)]
    return "\n\n".join([*sections, *_values(schema)]) + "\n"


def _tables(
    schema: Schema, path: tuple[str, ...], anchor: tuple[str, ...], table: Schema
) -> Iterator[tuple[str, str, Schema]]:
    """Yield each table with its heading and its anchor, the ones inside another after it."""
    if path:
        yield f"[{'.'.join(path)}]", ".".join(anchor), table
    for key, described in sorted(table["properties"].items(), key=lambda item: (item[0] == "functions", item[0])):
        for is_named, references in _inside(described):
            options = [schema["$defs"][reference.removeprefix("#/$defs/")] for reference in references]
            tables = [option for option in options if "properties" in option]
            names = (key, _NAMES[key]) if tables and is_named else (key,)
            for inner in tables:
                if len(tables) == 1:
                    yield from _tables(schema, (*path, *names), (*anchor, key), inner)
                else:
                    platform = inner["properties"]["platform"]["const"]
                    heading = f'[{".".join((*path, *names))}], platform = "{platform}"'
                    yield heading, ".".join((*anchor, key, platform)), inner


def _inside(described: Schema) -> Iterator[tuple[bool, list[str]]]:
    """Yield the tables that a key holds: whether the user names them, and references to what they are."""
    if "$ref" in described:
        yield False, [described["$ref"]]
    for named in [*described.get("patternProperties", {}).values(), described.get("additionalProperties")]:
        if isinstance(named, Mapping):
            options = named.get("oneOf") or named.get("anyOf") or [named]
            yield True, [option["$ref"] for option in options if "$ref" in option]


def _section(schema: Schema, heading: str, anchor: str, table: Schema) -> str:
    required = table.get("required", ())
    keys = dict(sorted(table["properties"].items(), key=lambda item: item[0] not in required))
    index = ", ".join(f"[`{key}`](#{anchor}.{key})" for key in keys)
    parts = [f"### `{heading}`", table["description"], f"Keys: {index}."]
    for key, described in keys.items():
        sentences = [
            "Required." if key in required else "",
            _description(schema, described),
            _default(described),
            _examples(key, described),
        ]
        parts += [f'<a id="{anchor}.{key}"></a>', f"#### `{key}`", " ".join(filter(None, sentences))]
    return "\n\n".join(parts)


def _description(schema: Schema, described: Schema) -> str:
    """Return what a key means and, where there are few of them, its values."""
    target = schema["$defs"].get(described.get("$ref", "").removeprefix("#/$defs/"), {})
    text: str = described.get("description") or target["description"]
    if "enum" in described:
        values = (json.dumps(value) for value in described["enum"])
        text += f" One of {', '.join(f'`{value}`' for value in values)}."
    return text


def _default(described: Schema) -> str:
    if described.get("default") in (None, [], {}, ""):
        return ""
    return f"Default: `{_toml(described['default'])}`."


def _examples(key: str, described: Schema) -> str:
    examples = [f"`{key} = {_toml(example)}`" for example in described.get("examples", ())]
    return f"Example: {' or '.join(examples)}." if examples else ""


def _values(schema: Schema) -> Iterator[str]:
    """Yield a section for each value that has its own syntax."""
    for name in ("Tree", "Shardings"):
        value = schema["$defs"][name]
        examples = ", ".join(f"`{json.dumps(example)}`" for example in value["anyOf"][0]["examples"])
        yield f"### {value['title']}\n\n{value['description']} Examples: {examples}."


def _toml(value: object) -> str:
    """Return a value as TOML writes it in one line; the names of the examples need no quotes, except TPU topologies."""
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
        case list():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)
