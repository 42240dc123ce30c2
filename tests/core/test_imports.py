"""What sources say that they look for, and what is another answer when a file is added."""

import json

import pytest

from stagec.core.builds.imports import Files, Looked, from_json

FILES = {
    "models/net.py": "from models import layers\nfrom . import optional_part\nfrom .blocks import attention as at, mlp",
    "models/layers.py": "import numpy as np\ntry:\n    import fast\nexcept ImportError:\n    pass\n",
    "models/blocks/__init__.py": "def late():\n    from ..tables import *\n",
    "models/blocks/attention.py": "from .. import net\n",
    "models/tables/one.py": "",
    "models/other.py": "import models.unseen\n",
    "models/broken.py": "def f(:\n",
    "models/named.py": "import importlib\nimportlib.import_module('models.tables')\nimport models.broken\n",
    "models/data.txt": "",
    "../other/lib/part.py": "",
    "src/lib/part.py": "",
}
ROOTS = (".", "src", "bazel-out/bin", "../other")


def looked_for(module: str, *more: str, without: str = "") -> Looked:
    """What a module looks for among FILES and more, which are empty."""
    sources = {**FILES, **dict.fromkeys(more, "")}
    sources.pop(without, None)
    files = Files(sources, ROOTS, lambda path: sources[path].encode())
    return from_json(files.looked_for([module]).to_json())


OTHER = [  # what Python would import, list or take in another way
    *(
        "models/net/__init__.py",
        "models/net/any.py",
        "models/net.cpython-311-x86_64-linux-gnu.so",
        "models/__init__.py",
    ),
    *("models/__pycache__/net.cpython-311.pyc", "models/blocks/__pycache__/__init__.cpython-311.pyc", "models/net.pyc"),
    *("models/optional_part.py", "models/optional_part/deep/file.py", "models/blocks/mlp.py", "models/blocks.py"),
    *("models/tables/two.py", "models/tables/one/__init__.py", "models/tables/__init__.py", "models/layers/x.py"),
    *("fast.py", "numpy/__init__.py", "bazel-out/bin/models/layers.py", "src/models/net.py", "../other/new/file.py"),
]
SAME = [
    "models/new.py",
    "models/blocks/new.py",
    "models/unseen.py",
    "src/lib/new.py",
    "models/data2.txt",
    "models/a/b/c.py",
]


@pytest.mark.parametrize("file", OTHER)
def test_a_file_that_it_may_look_for_is_another_answer(file: str) -> None:
    before = looked_for("models.net")
    assert looked_for("models.net", file) != before


@pytest.mark.parametrize("file", SAME)
def test_any_other_file_is_not(file: str) -> None:
    assert looked_for("models.net", file).to_json() == looked_for("models.net").to_json()


def test_a_file_that_is_gone_is_another_answer() -> None:
    before = looked_for("models.net")
    assert looked_for("models.net", without="models/blocks/attention.py") != before
    assert looked_for("models.net", without="models/other.py") == before


def test_names_in_strings_are_folders_that_may_be_listed() -> None:
    before = looked_for("models.named")
    assert looked_for("models.named", "models/tables/file.txt") != before
    assert looked_for("models.named", "models/blocks/file.txt") == before  # and a source that is broken has no imports


@pytest.mark.parametrize(
    ("folder", "name", "known"),
    [
        ("models", "layers", True),
        ("models", "optional_part", True),
        ("models", "mystery", False),
        ("models/tables", "anything", True),
        (".", "tensorflow", True),  # all names of a root are known
        (".", "src", False),  # but not whether it is a file
        ("src/models", "layers", True),  # a folder that is not there
        ("src/lib", "part", False),
    ],
)
def test_what_it_knows_of(folder: str, name: str, known: bool) -> None:
    assert looked_for("models.net").has(folder, name) == known


@pytest.mark.parametrize(
    ("path", "known"),
    [
        (".", True),
        ("src", True),
        ("jaxlib/mlir/file.py", True),
        ("bazel-out/bin/models", True),
        ("models", False),
        ("models/data.json", False),
        ("models/tables", True),
        ("models/tables/file.txt", True),
        ("models/__pycache__/layers.cpython-311.pyc", True),
        ("models/blocks/__pycache__/__init__.cpython-311.pyc", True),
        ("models/__pycache__/mystery.cpython-311.pyc", False),
        ("../other/lib/x", False),
        ("../other/new/x", True),
        ("../another/x", False),
    ],
)
def test_which_paths_it_knows_of(path: str, known: bool) -> None:
    assert looked_for("models.net").has_path(path) == known


def test_it_is_the_same_text_for_the_same() -> None:
    files = Files(reversed([*FILES]), ROOTS, lambda path: FILES[path].encode())
    text = files.looked_for(["models.net"]).to_json()
    assert text == looked_for("models.net").to_json()
    assert set(json.loads(text)) == {"names", "roots"}
