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
    "cli": _package(
        "the commands: argv, what they print, exit statuses",
        "backends backends.cpu backends.cuda bundle core frontends hardware loader manifest pjrt reports serving "
        "stages worker",
        "numpy",
    ),
    "worker": _package(
        "Bazel's persistent worker: its messages, the forks that do the actions, what a fork may see", "core"
    ),
    "reports": _package(
        "what people ask of artifacts: inspect, stub, diff, explain, profile, report, baseline, timeline, reproduce, "
        "autotune",
        "backends backends.cuda bundle core costs hardware manifest pjrt stages",
        "jaxlib",
    ),
    "manifest": _package(
        "TOML to checked models to a plan; the JSON Schema; a first manifest for somebody's function",
        "core hardware",
        "pydantic pydantic_core",
    ),
    "frontends": _package(
        "a function to an Exported; no other package imports JAX or runs a model's code",
        "arrays arrays.namespace arrays.primitives backends.cpu bundle core loader numpy pjrt stages",
        "jax jaxlib msgpack numpy orbax",
    ),
    "numpy": _package(
        "the face of `arrays/namespace`: `stagec.numpy`, and its `linalg` and `fft`", "arrays arrays.namespace"
    ),
    "arrays.namespace": _package(
        "the array API standard and parts of JAX's API, written with primitives: `stagec.numpy`, `lax`, `nn`, `random`",
        "arrays arrays.primitives core pjrt",
        "ml_dtypes numpy",
    ),
    "arrays.primitives": _package(
        "the table of primitives: rule of shapes, lowering and derivative of each", "arrays core", "jaxlib numpy"
    ),
    "arrays": _package(
        "functions of arrays traced without JAX: values, programs, tracing, lowering to StableHLO, execution",
        "core pjrt stages",
        "jaxlib ml_dtypes numpy",
    ),
    "serving": _package(
        "a server of bundles: the Open Inference Protocol v2 over HTTP and gRPC, and batches that fill buckets",
        "bundle core loader pjrt",
        "google grpc h11 jaxlib numpy opentelemetry prometheus_client triton_python_backend_utils uvicorn",
    ),
    "loader": _package(
        "`stagec.load`: chooses executables, calls them; compiles with `stages` only where none fits",
        "backends bundle core pjrt stages",
        "jaxlib numpy",
    ),
    "stages": _package(
        "Exported, Lowered, Compiled", "backends backends.cpu bundle core costs hardware pjrt", "flatbuffers jaxlib"
    ),
    "backends.cpu": _package("XLA's compiler for CPUs", "backends core costs hardware patches pjrt", "jaxlib"),
    "backends.cuda": _package(
        "XLA's compiler for NVIDIA devices", "backends core costs hardware patches pjrt", "jaxlib"
    ),
    "backends.tpu": _package("XLA's compiler for TPUs", "backends core costs hardware pjrt", "jaxlib"),
    "backends": _package(
        "what the compilers of all platforms have in common: `Backend`, options, plugins",
        "core costs patches pjrt",
        "jaxlib",
    ),
    "patches": _package("changes to XLA's machine code in memory, for builds of it that are known", "core hardware"),
    "pjrt": _package("what runs XLA: clients, arrays, executables, calls", "bundle core", "jaxlib ml_dtypes numpy"),
    "bundle": _package("the format of bundles, both sides; provenance and signatures", "core", "cryptography"),
    "costs": _package("what an optimized program costs, counted in its HLO", "core"),
    "hardware": _package("devices and topologies, from manifests/targets", "core"),
    "core": _package("the vocabulary: trees, sizes and avals, builds, data of others, messages to people"),
}


# The rooms inside a package, and which of its rooms each imports. Nobody else's table names them.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "core.builds": ("core.data", "core.sizes", "core.telling", "core.trees"),
    "core.telling": ("core.sizes", "core.trees"),
    "core.trees": ("core.data", "core.sizes"),
    "core.sizes": (),
    "core.data": (),
}


def modules(sources: Path = SOURCES) -> dict[str, Path]:
    """Return the file of each module by its name below stagec; a package's `__init__` has the package's name."""
    files = {}
    for path in sorted(sources.rglob("*.py")):
        parts = path.relative_to(sources).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def package(module: str) -> str:
    """Return which package a module is in: the folder that it lies in, without rooms, and "" for stagec's own face."""
    own = _folder(module)
    return own.rpartition(".")[0] if own in ROOMS else own


def _folder(module: str) -> str:
    return module if module in PACKAGES or module in ROOMS else module.rpartition(".")[0]


def imports(path: Path, known: Mapping[str, Path], running: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a file imports, wherever and however it does, and whether they are ours.

    Ours without "stagec.", others by their first name: `numpy` is both. A call of `importlib.import_module` with a name
    that is written there is an import; with a name that is computed, it is not.
    running: without what only a type checker imports.
    """
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    checked = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unused = {id(statement) for node in checked for statement in node.body} if running else set()
    for node in nodes:
        if id(node) in unused:
            continue
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
            if first != "stagec":
                yield first, False
            else:
                yield below if below in known else below.rpartition(".")[0], True


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


def graph(known: Mapping[str, Path], running: bool = False) -> dict[str, set[str]]:
    """Return which of our modules each of our modules imports. running: without what only a type checker imports."""
    return {
        name: {module for module, ours in imports(path, known, running) if ours and module in known} - {name}
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
    rows = ["| package | what it is about | imports of ours | of others |", "| --- | --- | --- | --- |"]
    for name, own in PACKAGES.items():
        others = ", ".join(sorted(own.others))
        rows.append(f"| `{name.replace('.', '/')}` | {own.about} | {', '.join(own.imports)} | {others} |")
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
    print(f"circles of modules when they run: {circles(graph(modules(), running=True)) or 'none'}")


if __name__ == "__main__":
    main()
