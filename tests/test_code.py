"""The code itself: style, types, and which room may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.building import COMPILER, ROOT

# From the top of the house to the bottom: a room imports from rooms below it, and from its own.
ROOMS = (
    "cli",
    "worker",
    "comparison",
    "explanation",
    "autotuning",
    "inputs",
    "reproducibility",
    "inspection",
    "profiles",
    "serving",
    "manifest",
    "frontends",
    "bundle",
    "stages",
    "backends",
    "runtime",
    "vocabulary",
)
VOCABULARY = (
    "avals",
    "components",
    "dimensions",
    "errors",
    "expressions",
    "hardware",
    "partitions",
    "phases",
    "reading",
    "specs",
    "trees",
    "version",
)
PACKAGES = {
    "cli": {"numpy"},
    "worker": set(),
    "comparison": set(),
    "explanation": set(),
    "autotuning": {"jaxlib"},
    "inputs": set(),
    "reproducibility": {"jaxlib"},
    "inspection": set(),
    "profiles": set(),
    "serving": set(),
    "manifest": {"pydantic", "pydantic_core"},
    "frontends": {"jax", "jaxlib", "numpy"},
    "bundle": {"cryptography"},
    "stages": {"jaxlib", "flatbuffers"},
    "backends": {"jaxlib"},
    "runtime": {"cryptography", "jaxlib", "numpy", "ml_dtypes"},
    "vocabulary": set(),
}


def _room(parts: tuple[str, ...]) -> str | None:
    """The room of a module below the package; None for the package's own __init__ and __main__."""
    if not parts or parts[0].startswith("__"):
        return None
    return "vocabulary" if parts[0] in VOCABULARY else parts[0]


def _imports(path: Path) -> set[tuple[str, ...]]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = tuple((node.module or "").split("."))
            found |= {(*module, alias.name) for alias in node.names} if module == ("stagec",) else {module}
    return found


MODULES = sorted((COMPILER / "stagec").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(COMPILER)))
def test_a_room_imports_from_rooms_below(path: Path) -> None:
    room = _room(path.relative_to(COMPILER / "stagec").with_suffix("").parts)
    if room is None:
        return
    for imported in _imports(path):
        if imported[0] == "stagec":
            target = _room(imported[1:])
            assert target is None or ROOMS.index(target) >= ROOMS.index(room), f"{room} imports {target}"
        elif imported[0] not in sys.stdlib_module_names:
            assert imported[0] in PACKAGES[room], f"{room} imports {imported[0]}"


def test_expressions_are_parsed_in_one_place() -> None:
    """Python 3.11's parser is safe for one thread at a time: `expressions` has the lock."""
    found = [path.name for path in MODULES if "ast.parse(" in path.read_text("utf-8")]
    assert found == ["expressions.py"]


def test_nothing_is_unpickled_or_evaluated() -> None:
    """What is read is data: docs/security.md."""
    for path in MODULES:
        assert not {"pickle", "marshal", "shelve", "copyreg"} & {imported[0] for imported in _imports(path)}, path
        calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        assert not {"eval", "exec"} & {function.id for function in calls if isinstance(function, ast.Name)}, path


def test_every_room_is_listed() -> None:
    rooms = {_room(path.relative_to(COMPILER / "stagec").with_suffix("").parts) for path in MODULES}
    assert rooms - {None} == set(ROOMS)


def test_files_of_tests_have_names_of_their_own() -> None:
    # One run of pytest cannot collect two files of one name.
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py") if "bazel-" not in str(path.relative_to(ROOT))]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--no-cache", "."),
        ("ruff", "format", "--no-cache", "--check", "."),
        ("mypy", "--cache-dir=/dev/null", "compiler/stagec", "rules"),
    ],
    ids=" ".join,
)
def test_style_and_types(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
