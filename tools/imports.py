"""The import graph of the package: which packages there are, what each may import, and where it goes in circles.

usage: python3 tools/imports.py [--write]

Prints the graph in numbers, and every circle of modules. `--write` puts the table of packages into ARCHITECTURE.md.
tests/test_code.py holds the code against `PACKAGES`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "compiler" / "stagec"
EXTENSIONS = ROOT / "compiler" / "extensions"
PACKAGE_FOLDERS = [SOURCES, *sorted(EXTENSIONS.glob("*/stagec_*"))]
PAGE = ROOT / "ARCHITECTURE.md"


@dataclass(frozen=True)
class Package:
    """A package of stagec: what it is about, the packages of stagec that it imports, and those of others."""

    about: str
    imports: tuple[str, ...] = ()
    others: frozenset[str] = field(default_factory=frozenset)


def _package(about: str, imports: str = "", others: str = "") -> Package:
    return Package(about, tuple(imports.split()), frozenset(others.split()))


# From the top to the bottom. To add an import between packages, write it here, and say in the change why.
PACKAGES: Mapping[str, Package] = {
    "cli.actions": _package(
        "`stagec action`: what Bazel's actions run, a module for each",
        "backends.cpu building bundle checking cli core frontends frontends.common frontends.jax jaxcache manifest "
        "patches stages trust",
    ),
    "cli": _package(
        "the commands: argv, what they print, exit statuses",
        "audit backends backends.cpu backends.gpu building bundle checking core frontends.common hardware jaxcache "
        "loader local manifest pjrt stages trust worker",
        "numpy",
    ),
    "local": _package(
        "a build without Bazel: the actions of a plan, the workers that do them, and a store of what they made",
        "core hardware jaxcache loader manifest patches worker",
    ),
    "worker": _package(
        "Bazel's persistent worker: its messages, the forks that do the actions, what a fork may see",
        "core",
    ),
    "audit": _package(
        "what people ask of artifacts: inspect, stub, diff, explain, baseline, reproduce, rebuild",
        "backends backends.gpu building bundle core hardware manifest pjrt stages trust",
        "jaxlib",
    ),
    "manifest": _package(
        "TOML to checked models to a plan; the JSON Schema; a first manifest for somebody's function",
        "core hardware",
        "pydantic pydantic_core",
    ),
    "frontends": _package(
        "a function to an Exported; no other package imports JAX or runs a model's code",
        "bundle checking core frontends.common frontends.jax pjrt stages",
        "jax jaxlib numpy",
    ),
    "frontends.jax": _package(
        "JAX's frontend: a function that JAX traces to an Exported",
        "backends.cpu building core frontends.common jaxcache pjrt stages",
        "jax jaxlib numpy",
    ),
    "frontends.common": _package(
        "what all frontends use: entries and arguments, a model's code, `jit`",
        "bundle core pjrt stages",
        "jaxlib msgpack numpy orbax",
    ),
    "jaxcache": _package(
        "JAX's compilation cache: its entries, how they are built, and why one is missed",
        "core",
    ),
    "checking": _package(
        "golden outputs, random inputs and latencies of loaded functions",
        "bundle core loader pjrt stages",
        "numpy",
    ),
    "loader": _package(
        "`stagec.load`: chooses executables, calls them; compiles with `stages` only where none fits",
        "backends bundle core pjrt stages trust",
        "jaxlib numpy",
    ),
    "building": _package(
        "what a build writes beside an artifact: descriptions, inventories, limits, modules by device",
        "backends bundle core costs hardware jaxcache patches pjrt stages",
        "jaxlib",
    ),
    "stages": _package(
        "Exported, Lowered, Compiled",
        "backends backends.cpu bundle core costs hardware pjrt",
        "flatbuffers jaxlib",
    ),
    "backends.cpu": _package(
        "XLA's compiler for CPUs",
        "backends core costs hardware patches pjrt",
        "jaxlib",
    ),
    "backends.gpu": _package(
        "XLA's compiler for GPUs of NVIDIA and AMD",
        "backends core costs hardware patches pjrt",
        "jaxlib",
    ),
    "backends.tpu": _package(
        "XLA's compiler for TPUs",
        "backends core costs hardware pjrt",
        "jaxlib",
    ),
    "backends": _package(
        "what the compilers of all platforms have in common: `Backend`, options, plugins",
        "core costs jaxcache patches pjrt",
        "jaxlib",
    ),
    "patches": _package(
        "changes to XLA's machine code in memory, for builds of it that are known",
        "core hardware",
    ),
    "pjrt": _package(
        "what runs XLA: clients, arrays, executables, calls",
        "bundle core",
        "jaxlib ml_dtypes numpy",
    ),
    "trust": _package(
        "who made a bundle: provenance, SBOM, signatures, verification, additions",
        "bundle core",
        "cryptography",
    ),
    "bundle": _package(
        "the format of bundles, both sides",
        "core",
    ),
    "costs": _package(
        "what an optimized program costs, counted in its HLO",
        "core",
    ),
    "hardware": _package(
        "devices and topologies, from manifests/targets",
        "core",
    ),
    "core": _package(
        "the vocabulary: trees, sizes and avals, builds, data of others, messages to people",
        "",
    ),
    # Extensions: nothing above imports them.
    "stagec_serve.commands": _package(
        "`stagec serve`",
        "cli core loader stagec_serve",
    ),
    "stagec_serve": _package(
        "a server of bundles: the Open Inference Protocol v2 over HTTP, and batches that fill buckets",
        "checking core loader pjrt stages trust",
        "jaxlib numpy orjson prometheus_client uvicorn",
    ),
    "stagec_grpc": _package(
        "gRPC: that protocol, for the server; and Bazel's, for a cache of `stagec build`",
        "core local stagec_serve",
        "google grpc grpc_health grpc_reflection numpy",
    ),
    "stagec_registry.commands": _package(
        "`stagec image`, `push`, `pull`",
        "bundle cli core stagec_registry trust",
    ),
    "stagec_registry": _package(
        "bundles in OCI registries: images, layers, what refers to them",
        "bundle core trust",
    ),
    "stagec_insight.commands": _package(
        "`stagec report`, `profile`, `emulate`, `autotune`, `action timeline`",
        "backends bundle cli core stagec_insight",
    ),
    "stagec_insight": _package(
        "pages, profiles, timelines and autotuning; an emulator of device HLO",
        "audit backends backends.cpu backends.gpu building bundle checking core costs hardware loader pjrt "
        "stages trust",
        "jaxlib",
    ),
    "stagec_rehearse.commands": _package(
        "`stagec rehearse`, `action program-spec`, `action program-report`",
        "cli core hardware stagec_rehearse",
    ),
    "stagec_rehearse.start": _package(
        "what Python imports first in a program that is rehearsed",
        "stagec_rehearse",
    ),
    "stagec_rehearse": _package(
        "a program on devices that are not there: a virtual driver, a slice of TPUs, and what JAX compiles",
        "backends backends.gpu backends.tpu building core frontends.common frontends.jax hardware jaxcache manifest",
        "jax jaxlib numpy",
    ),
    "stagec_arrays.frontend": _package(
        "a function of arrays to an Exported, for manifests and for `stagec.jit`",
        "core frontends.common pjrt stagec_arrays stagec_arrays.namespace stagec_arrays.numpy "
        "stagec_arrays.primitives stages",
        "numpy",
    ),
    "stagec_arrays.numpy": _package(
        "the face of `namespace`: `stagec_arrays.numpy`, and its `linalg` and `fft`",
        "stagec_arrays stagec_arrays.namespace",
    ),
    "stagec_arrays.namespace": _package(
        "the array API standard and parts of JAX's API, written with primitives",
        "core pjrt stagec_arrays stagec_arrays.primitives",
        "ml_dtypes numpy",
    ),
    "stagec_arrays.primitives": _package(
        "the table of primitives: rule of shapes, lowering and derivative of each",
        "core stagec_arrays",
        "jaxlib numpy",
    ),
    "stagec_arrays": _package(
        "functions of arrays traced without JAX: values, programs, lowering to StableHLO, execution, and the frontend",
        "core pjrt stages",
        "jaxlib ml_dtypes numpy",
    ),
}


# The rooms inside a package, and which of its rooms each imports. Nobody else's table names them.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "core.builds": ("core.messages", "core.sizes"),
    "core.messages": ("core.sizes", "core.trees"),
    "core.trees": ("core.data", "core.sizes"),
    "core.sizes": (),
    "core.data": (),
}


FACES = frozenset({"", "stagec_arrays", "stagec_arrays.lax", "stagec_arrays.nn", "stagec_arrays.random"})
"""Modules that only give names of other modules to users."""


def modules(sources: Path = SOURCES, extensions: Path | None = EXTENSIONS) -> dict[str, Path]:
    """Return the file of each module: by its name below stagec, or by its whole name if it is an extension's.

    A package's `__init__` has the package's name.
    """
    files = {}
    beside = [folder for folder in PACKAGE_FOLDERS if extensions and folder.is_relative_to(extensions)]
    for folder, root in ((sources, sources), *((package, package.parent) for package in beside)):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def package(module: str) -> str:
    """Return which package a module is in: the folder that it lies in, without rooms, and "" for a face."""
    if module in FACES:
        return ""
    own = _folder(module)
    return own.rpartition(".")[0] if own in ROOMS else own


def _folder(module: str) -> str:
    return module if module in PACKAGES or module in ROOMS else module.rpartition(".")[0]


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a file imports, wherever and however it does, and whether they are ours.

    Ours without "stagec.", others by their first name: `numpy` is both. A call of `importlib.import_module` with a name
    that is written there is an import; with a name that is computed, it is not.
    """
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            names = _imported_by(node)
        else:
            continue
        for full in names:
            first, _, below = full.partition(".")
            if first == "stagec" or first.startswith("stagec_"):
                name = below if first == "stagec" else full
                yield name if name in known else name.rpartition(".")[0], True
            else:
                yield first, False


def _imported_by(call: ast.Call) -> list[str]:
    """Return the names written in a call of `import_module` or `__import__`, such as both of `"a" if new else "b"`."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__"):
        return []
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
    named: list[ast.expr] = []
    for name in given:
        named += [name.body, name.orelse] if isinstance(name, ast.IfExp) else [name]
    return [name.value for name in named if isinstance(name, ast.Constant) and isinstance(name.value, str)]


def graph(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which of our modules each of our modules imports."""
    return {
        name: {module for module, ours in imports(path, known) if ours and module in known} - {name}
        for name, path in known.items()
    }


def arrows(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return which packages each package imports."""
    imported: dict[str, set[str]] = {name: set() for name in PACKAGES}
    for name, others in edges.items():
        if own := package(name):
            imported[own] |= {package(other) for other in others} - {own, ""}
    return imported


def arrows_between_rooms(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return which rooms of its package each room imports."""
    between: dict[str, set[str]] = {room: set() for room in ROOMS}
    for name, others in edges.items():
        if (room := _folder(name)) in ROOMS:
            between[room] |= {_folder(other) for other in others if package(other) == package(name)} - {room}
    return between


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return what imports itself by way of others: sets of nodes that all reach each other, each sorted."""
    reached = {name: _reached(edges, name) for name in edges}
    together = {
        tuple(sorted(other for other in edges if other in reached[name] and name in reached[other])) for name in edges
    }
    return sorted(list(nodes) for nodes in together if nodes)


def _reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [*edges[start]]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += edges[name]
    return reached


def floors(packages: Mapping[str, set[str]]) -> dict[str, int]:
    """Return how many packages lie below each, on the longest way down. There must be no circle."""
    known: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in known:
            known[name] = max((floor(below) + 1 for below in packages[name]), default=0)
        return known[name]

    return {name: floor(name) for name in packages}


def table() -> str:
    """Return the table of packages for ARCHITECTURE.md."""
    rows = ["| package | what it is about | imports |", "| --- | --- | --- |"]
    rows += [
        f"| `{name.replace('.', '/')}` | {own.about} | {', '.join(own.imports)} |" for name, own in PACKAGES.items()
    ]
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """Return ARCHITECTURE.md with the table of today."""
    return re.sub(r"(<!-- packages -->\n).*?(?=<!-- end -->)", lambda start: start[1] + table(), text, flags=re.DOTALL)


def main() -> None:
    """Print the graph in numbers."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
        return
    edges = graph(modules())
    between = arrows(edges)
    round_and_round = circles(between)
    levels = "" if round_and_round else f" on {max(floors(between).values()) + 1} layers"
    print(f"{len(between)} packages{levels}, {sum(map(len, between.values()))} imports between them")
    print(f"{len(ROOMS)} rooms inside packages, {sum(map(len, ROOMS.values()))} imports between them")
    print(f"{len(edges)} modules, {sum(map(len, edges.values()))} imports between them")
    print(f"circles of packages: {round_and_round or 'none'}")
    print(f"circles of modules: {circles(edges) or 'none'}")


if __name__ == "__main__":
    main()
