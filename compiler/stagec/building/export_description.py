"""The description of an exported artifact: the file `<name>.exported.json` beside it.

It has the names of parameters, and the donated arguments, so that messages can show a call as a person writes it. No
compile action reads it, and the loader reads it only for a message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stagec.bundle.description import EXPORTED_FORMAT
from stagec.core.builds import components
from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.calls import Call
from stagec.core.trees.tree import argument_path
from stagec.stages.exported import Exported


def describe(
    spec: FunctionSpec,
    serialized: bytes,
    versions: Mapping[str, str],
    bound: Mapping[str, str] | None = None,
    constants: Sequence[Mapping[str, Any]] = (),
    parameters: Sequence[str] = (),
    premises: Mapping[str, Any] | None = None,
) -> str:
    """Return the description of an exported artifact, as JSON.

    spec: the function's spec. serialized: the artifact.
    versions: of jax, of stagec, and of everything else that tracing imported.
    constants: its large ones, each with "name", "aval" and "bytes".
    bound: the paths of the arguments that the manifest binds to weights: name there -> `args[0]`.
    parameters: names of the function's parameters, as a `Call` has them.
    premises: what the trace took for granted (`frontends/jax/premises.py`); None if nobody can compare it.
    """
    exported = Exported.deserialize(serialized)
    paths = map(argument_path, exported.in_tree.paths())
    avals = {path: str(aval) for path, aval in zip(paths, exported.in_avals, strict=True)}
    trees = (exported.in_tree, exported.out_tree)
    made_from = components.of_export(asdict(spec), exported.mlir_module_serialized, avals, versions)
    for prefix, tree in zip(("", "result"), trees, strict=True):
        parts = ((f"static part {path if prefix else argument_path(path)}", t) for path, t in tree.static_parts(prefix))
        made_from |= {name: components.entry(name, *_cut(static)) for name, static in parts}
    values = {
        "format": EXPORTED_FORMAT,
        "kind": "exported",
        "manifest": spec.manifest,
        "function": spec.name,
        "variant": spec.variant,
        **exported.interface(),
        "parameters": list(parameters),
        "donated": _donated(spec, exported, parameters),
        "bound": dict(bound or {}),
        "serve": spec.serve,
        # Without the line: it changes when the program does not.
        "constants": [{key: constant[key] for key in ("name", "aval", "bytes")} for constant in constants],
        "exported_sha256": hashlib.sha256(serialized).hexdigest(),
        "components": made_from,
        **({"premises": premises} if premises else {}),
    }
    return json.dumps(values, indent=1) + "\n"


def _cut(static: str, longest: int = 200) -> tuple[str, bytes]:
    """Return a static part in a short form for a reader, and in full."""
    return static if len(static) <= longest else f"{static[:longest]}...", static.encode()


def _donated(spec: FunctionSpec, exported: Exported, parameters: Sequence[str]) -> list[str]:
    """Return the paths of the donated arguments, whose buffers a call consumes: `args[0]`."""
    call = Call("", exported.in_tree, exported.in_avals, exported.out_tree, exported.out_avals, parameters)
    given_away = {*spec.donate_argnames, *(f"args[{number}]" for number in spec.donate_argnums)}
    return [argument.path for argument in call.arguments if given_away & {argument.name, argument.path}]
