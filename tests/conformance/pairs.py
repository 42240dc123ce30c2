"""The manifest's keys crossed: every two settings of different keys meet in a function.

What one key does may depend on another: under `enable_x64` the index of a platform has 64 bits, tokens of effects stand
before donated arguments. A function shows many pairs at once, so a few show all.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, TypeAlias

import jax
import jax.export

from tests.conformance import models
from tests.conformance.keys import Key, grid
from tests.conformance.programs import GRID

Case: TypeAlias = Mapping[str, str]
"""A setting of each key, or of some."""

Pair: TypeAlias = frozenset[tuple[str, str]]
"""Two keys, each with a setting."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "enable_x64": ("false", "true"),
    "platforms": ("cpu", "cpu, tpu", "tpu, cuda, cpu"),
    "dimensions": ("static", "symbolic", "constrained"),
    "vjp_order": ("0", "1", "2"),
    "shardings": ("none", "in", "in, out"),
    "effects": ("none", "unordered", "ordered"),
    "donation": ("none", "argnums", "argnames"),
    "static": ("none", "power"),
    "keep_unused": ("false", "true"),
}

IMPOSSIBLE: Mapping[Pair, str] = {
    frozenset({("shardings", shardings), ("effects", "ordered")}): "JAX orders no effects over several devices"
    for shardings in ("in", "in, out")
}
"""Pairs that no function can have, and why."""


def pairs() -> list[Pair]:
    """Return every pair of settings of two keys that a function can have."""
    every = (
        frozenset({(one, a), (other, b)})
        for one, other in combinations(SETTINGS, 2)
        for a in SETTINGS[one]
        for b in SETTINGS[other]
    )
    return [pair for pair in every if pair not in IMPOSSIBLE]


def met_in(case: Case) -> set[Pair]:
    """Return the pairs of settings that meet in a case."""
    return set(map(frozenset, combinations(case.items(), 2)))


def cases() -> list[Case]:
    """Return cases in which all pairs meet, always the same.

    Each begins with the first pair that is left and takes, key by key, the setting that brings most of the others.
    """
    left = pairs()
    found: list[Case] = []
    while left:
        case = dict(left[0])
        for key in [key for key in SETTINGS if key not in case]:
            tried = [{**case, key: setting} for setting in SETTINGS[key]]
            possible = [one for one in tried if not met_in(one) & IMPOSSIBLE.keys()]
            case = max(possible, key=lambda one: len(met_in(one) & {*left}))
        left = [pair for pair in left if pair not in met_in(case)]
        found.append({key: case[key] for key in SETTINGS})
    return found


def crossed() -> tuple[Key, ...]:
    """Return a function for each case."""
    return tuple(_key(f"pairs {number}", case) for number, case in enumerate(cases(), 1))


def _key(name: str, case: Case) -> Key:
    wide, symbolic = case["enable_x64"] == "true", case["dimensions"] != "static"
    short, dtype = ("f64", "float64") if wide else ("f32", "float32")
    rows = "2*n" if symbolic else "4"
    platforms = case["platforms"].split(", ")
    lines = [
        f'args = ["{short}[4]", "{short}[2]", "{short}[{rows},4]"]',
        f"platforms = {platforms}",
        f"vjp_order = {case['vjp_order']}",
        f"keep_unused = {case['keep_unused']}",
    ]
    static: tuple[int, ...] = ()
    constraints: tuple[str, ...] = ()
    jit: dict[str, Any] = {"keep_unused": case["keep_unused"] == "true"}
    if case["dimensions"] == "constrained":
        lines.append('constraints = ["n % 2 == 0", "n <= 8"]')
        constraints = ("mod(n,2) == 0", "n <= 8")
    if case["shardings"] != "none":
        lines += ['mesh = "grid"', 'in_shardings = ["P(model)", "unspecified", "P(data, model)"]']
        jit["in_shardings"] = (grid("model"), None, grid("data", "model"))
    if case["shardings"] == "in, out":
        lines.append('out_shardings = { most = "unspecified", state = "P()", total = "P(None, data)" }')
        jit["out_shardings"] = {"most": None, "state": grid(), "total": grid(None, "data")}
    if case["donation"] == "argnums":
        lines.append("donate_argnums = [0]")
        jit["donate_argnums"] = 0
    if case["donation"] == "argnames":
        lines.append('donate_argnames = ["state"]')
        jit["donate_argnames"] = "state"
    if case["static"] == "power":
        lines.append("static = { power = 3 }")
        static = (3,)
        jit["static_argnums"] = 3  # JAX takes no keyword arguments beside in_shardings
    functions = {
        "none": models.crossed,
        "unordered": models.crossed_unordered,
        "ordered": models.crossed_ordered,
    }
    scope = jax.export.SymbolicScope(constraints)
    shapes = (jax.export.symbolic_shape(shape, scope=scope) for shape in ("4", "2", f"{rows}, 4"))
    return Key(
        name,
        functions[case["effects"]],
        "\n".join(lines),
        (*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), *static),
        jit=jit,
        export={"platforms": platforms},
        sizes=({"n": 2},) if symbolic else ({},),
        vjp_order=int(case["vjp_order"]),
        enable_x64=wide,
        mesh=GRID if case["shardings"] != "none" else {},
        module="text" if static else "bytes",
    )


def as_markdown() -> list[str]:
    """Return the part of docs/conformance.md that lists the cases."""
    found = cases()
    impossible = (
        f"`{'` and `'.join(' '.join(setting) for setting in sorted(pair))}`: {why}" for pair, why in IMPOSSIBLE.items()
    )
    return [
        "## Pairs of keys",
        "",
        "The effect of a key may depend on another one. Any two settings of different keys meet in one of these",
        f"{len(found)} functions; the tests compare them as above. No function can have",
        "",
        *(f"- {one};" for one in impossible),
        "",
        f"| function | {' | '.join(SETTINGS)} |",
        f"| --- |{' --- |' * len(SETTINGS)}",
        *(f"| {number} | {' | '.join(case.values())} |" for number, case in enumerate(found, 1)),
        "",
    ]
