"""The JSON Schema of manifests: the checked-in copy, and what editors get from it."""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from stagec.core.sizes.avals import DTYPES, NOT_EXPORTABLE
from stagec.manifest import load_manifest, plan, schema
from stagec.manifest.models import (
    CpuTarget,
    CudaTarget,
    Document,
    Function,
    Header,
    Mesh,
    RocmTarget,
    TpuTarget,
    Variant,
)

ROOT = Path(__file__).absolute().parents[2]
EXAMPLES = sorted(
    path
    for folder in ("examples", "tests/e2e")
    for path in (ROOT / folder).rglob("*.toml")
    if "[manifest]" in path.read_text(encoding="utf-8")
)
SMALL: dict[str, Any] = {
    "manifest": {"name": "m", "version": "1"},
    "functions": {"f": {"entry": "a.b:c", "args": ["f32[n]", {"w": ["key<fry>", "~f32[]"]}]}},
}


def errors_in(data: object) -> list[str]:
    """The paths at which the schema finds a manifest wrong."""
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    return sorted(error.json_path for error in validator.iter_errors(data))


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema()))


def test_the_checked_in_copy_is_current() -> None:
    copy = (ROOT / "docs" / "manifest.schema.json").read_text(encoding="utf-8")
    assert copy == schema(), "run: stagec schema --output docs/manifest.schema.json"


def test_there_are_examples() -> None:
    assert ROOT / "examples/digits/digits.toml" in EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert errors_in(tomllib.loads(path.read_text(encoding="utf-8"))) == []
    plan(load_manifest(path))


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.is_relative_to(ROOT / "examples")])
def test_examples_name_the_schema_in_their_first_line(path: Path) -> None:
    match = re.match(r"#:schema (\S+)\n", path.read_text(encoding="utf-8"))
    assert match
    assert os.path.normpath(path.parent / match[1]) == str(ROOT / "docs" / "manifest.schema.json")


@pytest.mark.parametrize(
    "model", [Document, Header, CpuTarget, CudaTarget, RocmTarget, TpuTarget, Mesh, Function, Variant]
)
def test_every_key_is_explained(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        assert field.examples, name


def test_the_examples_of_keys_are_valid() -> None:
    for table, model, base in (
        ("targets", CpuTarget, {"platform": "cpu", "isa": "AVX"}),
        ("targets", CpuTarget, {"platform": "cpu", "architecture": "aarch64", "core": "neoverse-n1"}),
        ("targets", CudaTarget, {"platform": "cuda", "device": "h200"}),
        ("targets", RocmTarget, {"platform": "rocm", "device": "mi300x"}),
        ("targets", TpuTarget, {"platform": "tpu", "topology": "v5e:2x2"}),
        ("functions", Function, {"entry": "a:b"}),
        ("meshes", Mesh, {"axes": {"data": 2, "model": 2}}),
    ):
        for name, field in model.model_fields.items():
            for example in field.examples or []:
                assert errors_in(SMALL | {table: {"x": base | {name: example}}}) == []


def test_a_small_manifest_is_valid() -> None:
    assert errors_in(SMALL) == []


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - NOT_EXPORTABLE.keys()))
def test_avals_of_every_dtype_are_valid(dtype: str) -> None:
    for aval in (dtype, f"{dtype}[]", f"{dtype}[batch, 2*seq+1, max(a,b)]"):
        assert errors_in(SMALL | {"functions": {"f": {"entry": "a:b", "args": [aval]}}}) == []


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ({"functions": {}}, "$.functions"),
        ({"functions": {"a.b": {"entry": "a:b"}}}, "$.functions"),
        ({"functions": {"f": {"entry": "a"}}}, "$.functions.f.entry"),
        ({"functions": {"f": {"entry": "a:b", "args": ["float32"]}}}, "$.functions.f.args[0]"),
        ({"functions": {"f": {"entry": "a:b", "args": ["i2[3]"]}}}, "$.functions.f.args[0]"),
        ({"functions": {"f": {"entry": "a:b", "kwargs": {"x": ["f32", 3]}}}}, "$.functions.f.kwargs.x"),
        ({"functions": {"f": {"entry": "a:b", "kwargs": {"x y": "f32"}}}}, "$.functions.f.kwargs"),
        ({"functions": {"f": {"entry": "a:b", "avals": None}}}, "$.functions.f.avals"),
        ({"functions": {"f": {"entry": "a:b", "device": "x"}}}, "$.functions.f"),
        ({"functions": {"f": {"entry": "a:b", "in_shardings": ["P()", 3]}}}, "$.functions.f.in_shardings"),
        ({"functions": {"f": {"entry": "a:b", "variants": {"v": {}}}}}, "$.functions.f.variants.v"),
        ({"meshes": {"m": {"axes": {"x": 0}}}}, "$.meshes.m.axes.x"),
        ({"functions": {"f": {"entry": "a:b", "buckets": {"n": ["1"]}}}}, "$.functions.f.buckets.n[0]"),
        ({"targets": {"cpu": {"platform": "cpu"}}}, "$.targets.cpu"),
        ({"targets": {"cpu": {"platform": "cpu", "isa": "native"}}}, "$.targets.cpu"),
        ({"targets": {"cpu": {"platform": "cpu", "core": "neoverse-n1"}}}, "$.targets.cpu"),
        ({"targets": {"gpu": {"platform": "cuda", "device": "a/b"}}}, "$.targets.gpu"),
        ({"other": 1}, "$"),
    ],
)
def test_mistakes_are_found(table: dict[str, Any], path: str) -> None:
    assert errors_in(SMALL | table) == [path]


def _properties(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        yield from node.get("properties", {}).items()
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from _properties(item)


def test_editors_show_a_description_of_every_key() -> None:
    document = json.loads(schema())
    seen = dict(_properties(document))
    assert {"manifest", "args", "isa", "version"} <= seen.keys()
    for name, described in seen.items():
        target = document["$defs"].get(described.get("$ref", "").removeprefix("#/$defs/"), {})
        assert described.get("description") or target.get("description"), name
    assert '"null"' not in schema()
