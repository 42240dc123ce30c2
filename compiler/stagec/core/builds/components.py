"""The inputs of an artifact, component by component with digests: they explain the reason for a rebuild.

A table maps the name of a component ("aval args[0]['w']", "target isa", "jaxlib") to its value as a string, for a
reader, and to the SHA-256 of name and content, each with its length before it, so that no two tables have the same
digests by moving a byte from one component to the next. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Table = dict[str, dict[str, str]]
"""Name of the component -> {"value": text, "sha256": hex digest}."""

INTERPRETER = "environment python"
"""The interpreter's full version. A bundle does not record it: no lock names it, and it does not change a bundle."""


def digest(*parts: bytes) -> str:
    """Return the SHA-256 (hex) of `parts`, each preceded by its length as eight bytes, big end first."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big") + part)
    return state.hexdigest()


def entry(name: str, value: object, content: bytes | None = None) -> dict[str, str]:
    """Return the row of a component.

    value: the string for a reader; other values become canonical JSON.
    content: the data of the digest, if it is more than the string.
    """
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return {"value": text, "sha256": digest(name.encode(), text.encode() if content is None else content)}


def table(values: Mapping[str, object]) -> Table:
    """Return a table of components that consist of only a string."""
    return {name: entry(name, value) for name, value in values.items()}


def source(function: str, stablehlo: bytes) -> Table:
    """Return the component for the source of `function`: the traced program."""
    name = f"source of {function}"
    return {name: entry(name, f"{len(stablehlo):,} bytes of StableHLO", stablehlo)}


def of_export(
    spec: Mapping[str, Any], stablehlo: bytes, avals: Mapping[str, str], versions: Mapping[str, str]
) -> Table:
    """Return the components of an exported artifact.

    spec: the function's spec. stablehlo: the module. avals: path of the argument -> aval.
    versions: of jax, jaxlib, stagec, python, and of the packages that tracing imported.
    """
    # Devices change none of its bytes, plugins have versions, the entry shows the frontend, the source its StableHLO.
    shown_otherwise = (
        *("name", "manifest", "args", "kwargs", "avals", "static", "enable_x64", "golden", "devices", "plugins"),
        *("frontend", "environment", "stablehlo"),
    )
    # A row for each argument: a reader wants to know which of hundreds has changed.
    values: dict[str, object] = {f"aval {path}": aval for path, aval in avals.items()}
    values |= {f"static argument {name}": value for name, value in sorted(spec["static"].items())}
    values |= {
        f"sharding {key}" if "sharding" in key or key in ("mesh", "axis_types") else f"key {key}": value
        for key, value in sorted(spec.items())
        if key not in shown_otherwise
    }
    values |= {f"environment variable {name}": text for name, text in sorted(spec["environment"].items())}
    values["environment enable_x64"] = spec["enable_x64"]
    values |= {
        name if name in ("jax", "jaxlib", "stagec") else f"environment {name}": version
        for name, version in sorted(versions.items())
    }
    return {**source(spec["name"], stablehlo), **table(values)}


def differences(first: Table, second: Table) -> list[tuple[str, str | None, str | None]]:
    """Return (component, value in the first, value in the second) where digests differ; None if one has none."""
    names = [*first, *(name for name in second if name not in first)]
    return [
        (name, first.get(name, {}).get("value"), second.get(name, {}).get("value"))
        for name in names
        if first.get(name, {}).get("sha256") != second.get(name, {}).get("sha256")
    ]
