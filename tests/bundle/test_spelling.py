"""An index that is read by its parts says what one says that is read whole."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stagec.bundle import spelling
from stagec.bundle.archive import INDEX, Archive, encode, encode_index
from stagec.core.messages.refusal import LoadError
from stagec.trust import attestation


def changed(archive: Archive, change: Callable[[str], str]) -> bytes:
    """A bundle with another index."""
    members = {name: archive[name] for name in archive.index["members"]}
    text = change(archive[INDEX].decode())
    return encode({INDEX: text.encode(), **members})


def of_function(text: str, change: Callable[[dict[str, Any]], object]) -> str:
    """An index with another entry of its first function, spelled as stagec spells it."""
    index = json.loads(text)
    change(next(iter(index["functions"].values())))
    return encode_index(index).decode()


def test_a_function_is_read_when_it_is_asked_for(zoo: Path) -> None:
    whole, archive = Archive(zoo), Archive(zoo, whole=False)
    functions = archive.index["functions"]
    assert type(functions) is spelling.Functions
    assert [*functions] == [*whole.index["functions"]]
    assert spelling.variants(functions) == spelling.variants(whole.index["functions"])
    assert not functions._read
    name = [*functions][1]
    assert archive.function(name) == whole.index["functions"][name]
    assert [*functions._read] == [name]
    assert archive.index == whole.index
    assert archive[INDEX] == whole[INDEX] == encode_index(whole.index)
    with pytest.raises(KeyError):
        archive.function("nobody")


def every_function(data: bytes) -> None:
    """Read a bundle by its parts. Raises LoadError."""
    archive = Archive("x", data, whole=False)
    for name in archive.index["functions"]:
        archive.function(name)


def test_signatures_need_no_function(zoo: Path) -> None:
    """What was signed is the bytes of the index, so a function that is not spelled so is refused when it is called."""
    archive = Archive(zoo, whole=False)
    assert attestation.subjects(archive) == attestation.subjects(Archive(zoo))
    assert not archive.index["functions"]._read
    archive = Archive("x", changed(archive, lambda text: text.replace('"static":', '"static" :', 1)), whole=False)
    name = f"{archive.index['name']}.aot/{INDEX}"
    assert attestation.subjects(archive)[name] == hashlib.sha256(archive[INDEX]).hexdigest()
    assert b'"static" :' in archive[INDEX]
    with pytest.raises(LoadError, match="not spelled as stagec writes it"):
        archive.function(next(iter(archive.index["functions"])))


STATIC: list[Mapping[str, Any]] = [
    {"cfg": {"function": "cfg", "variant": ""}},
    {"a": {}, "cfg": {"function": "cfg", "variant": ""}},
    {"a": {"b": "}}"}, "cfg": {"function": "cfg", "variant": "", "c": "{{"}},
    {"a": '"},"cfg":{"function":"cfg","variant":"'},
    {"a": {}, "weights": {"b": {}}},
    {"functions": {"function": "f", "variant": "v"}},
    {"a": "\u00e9"},
]


@pytest.mark.parametrize("static", STATIC)
@pytest.mark.parametrize("first", [True, False])
def test_what_looks_like_a_function_inside_another(zoo: Path, static: Mapping[str, Any], first: bool) -> None:
    data = encode_index_with(Archive(zoo), static, first)
    archive = Archive("x", data, whole=False)
    assert archive.index == Archive("x", data).index
    for name in archive.index["functions"]:
        archive.function(name)


def encode_index_with(archive: Archive, static: Mapping[str, Any], first: bool) -> bytes:
    def change(text: str) -> str:
        index = json.loads(text)
        entries = [*index["functions"].values()]
        entries[0 if first else -1]["static"] = static
        return encode_index(index).decode()

    return changed(archive, change)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=8)
    | st.sampled_from(["function", "variant", "}", "{", '"', "weights", "\\", ","]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["function", "variant", "weights", "functions", "members", "a", "}"]), inner)
    ),
    max_leaves=12,
)
NAMES = st.from_regex(re.compile("[A-Za-z_][A-Za-z0-9_-]{0,4}", re.ASCII), fullmatch=True)


def test_weights_that_are_called_so() -> None:
    functions = {name: {"function": name, "variant": ""} for name in ("f", "g")}
    index = {"functions": functions, "weights": {"a": {}, "weights": {"b": 1}}, "members": {}}
    value = spelling.read(encode_index(index), [], encode_index)
    assert value == index
    assert type(value["functions"]) is spelling.Functions


TABLES = st.dictionaries(
    st.sampled_from(["a", "weights", "functions", "members"]), st.dictionaries(st.sampled_from(["a", "function"]), JSON)
)


@given(st.dictionaries(NAMES, st.dictionaries(st.sampled_from(["static", "a", "weights"]), JSON)), TABLES, TABLES)
def test_drawn_indices(functions: Mapping[str, Mapping[str, Any]], targets: Any, weights: Any) -> None:
    """Whatever functions hold, they are split where JSON splits them, or the index is read whole."""
    entries = {name: {"function": name, "variant": "", **more} for name, more in functions.items()}
    index = {"targets": targets, "functions": entries, "weights": weights, "members": {}}
    value = spelling.read(encode_index(index), [], encode_index)
    assert value is None or value == index
    if value is not None and isinstance(value["functions"], spelling.Functions):
        assert encode_index({**value, "functions": {**value["functions"]}}) == encode_index(index)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"functions":{"', '"functions":{x"'),
        lambda text: text.replace('"functions":{"', '"functions":{},"functions":{"'),
        lambda text: text.replace('"functions":{"', '"functions": {"'),
        lambda text: text.replace('"variant":""', '"variant": ""', 1),
        lambda text: text.replace('"variant":""', '"variant":"v"', 1),
        lambda text: text.replace('"variant":""', '"variant":"","variant":""', 1),
        lambda text: text.replace('"variant":"",', "", 1),
        lambda text: text.replace('"static":', '"static":{},"static":', 1),
        lambda text: text.replace('"static":', '"more":', 1),
        lambda text: text.replace('"static":', '"static" :', 1),
        lambda text: text.replace('"nr_devices":1', '"nr_devices":01', 1),
        lambda text: text.replace('"nr_devices":1', f'"nr_devices":{10**30}', 1),
        lambda text: text.replace('"nr_devices":1', '"nr_devices":NaN', 1),
        lambda text: re.sub(r'"functions":\{"(\w+)":\{', r'"functions":{"\1":{},"\1":{', text),
        lambda text: re.sub(r'"functions":\{"(\w+)":\{', r'"functions":{"other":{', text),
        lambda text: re.sub(r'"functions":\{"(\w+)":\{', r'"functions":{"":{', text),
        lambda text: re.sub(r'"functions":\{"(\w+)"(:\{"function":)"\w+"', r'"functions":{"1a"\2"1a"', text),
        lambda text: re.sub(r'"functions":\{"(\w+)"(:\{"function":)"\w+"', r'"functions":{"é"\2"é"', text),
        lambda text: text.replace('},"weights":{', '}},"weights":{', 1),
        lambda text: text.replace('},"weights":{', '},"x":{},"weights":{', 1),
        lambda text: of_function(text, lambda function: function.pop("executables")),
        lambda text: of_function(text, lambda function: function.update(in_avals=["f32[01]"])),
        lambda text: of_function(text, lambda function: function.update(exported="nothing")),
        lambda text: of_function(text, lambda function: function.update(static=json.loads("[" * 300 + "]" * 300))),
    ],
)
def test_what_is_refused_is_refused_however_much_is_read(zoo: Path, change: Callable[[str], str]) -> None:
    """At once, or when the function is asked for; the others can be called."""
    archive = Archive(zoo)
    assert change(text := archive[INDEX].decode()) != text
    data = changed(archive, change)
    with pytest.raises(LoadError) as whole:
        Archive("x", data)
    with pytest.raises(LoadError) as by_parts:
        every_function(data)
    told, expected = str(by_parts.value), str(whole.value)
    assert by_parts.value.code == whole.value.code == "format"
    assert told == expected or re.fullmatch(
        r"x: index\.json: functions\.\w+: it is not spelled as stagec writes it", told
    )
