"""The JSON Schema of manifests, from the models: editors complete keys and check values with it.

A manifest names it in its first line, `#:schema PATH/manifest.schema.json`, which TOML editors understand.
"""

import json
from typing import Any

from stagec.manifest.models import Document
from stagec.manifest.values import SHARDINGS_REFERENCE, SHARDINGS_SCHEMA, TREE_REFERENCE, TREE_SCHEMA


def schema() -> str:
    """The schema as JSON, draft 2020-12, indented, with a newline at the end."""
    generated = Document.model_json_schema()
    generated["$defs"] |= {"Tree": TREE_SCHEMA, "Shardings": SHARDINGS_SCHEMA}
    document = {
        **_for_toml(generated),
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stagec manifest",
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _for_toml(node: Any) -> Any:
    """Puts references to our own trees in, forbids badly named keys, and removes null, because TOML has none."""
    if isinstance(node, list | tuple):
        return [_for_toml(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _for_toml(value) for key, value in node.items() if not (key == "default" and value is None)}
    for reference, target in ((TREE_REFERENCE, "Tree"), (SHARDINGS_REFERENCE, "Shardings")):
        if reference.items() <= node.items():
            (key,) = reference
            del kept[key]
            kept["$ref"] = f"#/$defs/{target}"
    if "patternProperties" in kept:
        kept["additionalProperties"] = False
    options = kept.get("anyOf", [])
    if {"type": "null"} in options:
        del kept["anyOf"]
        (option,) = (option for option in options if option != {"type": "null"})
        kept = {**option, **kept}
    return kept
