"""Requests and answers as HTTP has them: JSON, and bytes behind it."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from stagec_serve import encoding
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError
from stagec_serve.tensors import Interface

X = np.arange(32, dtype=np.float32).reshape(2, 16)
INPUT = {"name": "x", "shape": [2, 16], "datatype": "FP32"}
AS_JSON = {"inputs": [{**INPUT, "data": X.ravel().tolist()}]}
AS_BYTES = {"inputs": [{**INPUT, "parameters": {"binary_data_size": 128}}]}


@pytest.fixture(scope="module")
def interface(models: dict[str, Model]) -> Interface:
    return models["predict"].interface


def read(request: Any, interface: Interface, data: bytes = b"") -> encoding.Request:
    header = json.dumps(request).encode()
    return encoding.read(header + data, str(len(header)), lambda _: interface, "predict", strict=True)


def test_json_and_bytes_are_the_same_request(interface: Interface) -> None:
    by_json = encoding.read(json.dumps({**AS_JSON, "id": "7"}).encode(), None, lambda _: interface, "predict")
    by_bytes = read({**AS_BYTES, "id": "7", "parameters": {"binary_data_output": True}}, interface, X.tobytes())
    for request, binary in ((by_json, False), (by_bytes, True)):
        assert request.request_id == "7"
        assert request.outputs == [(0, binary), (1, binary)]
        (array,) = request.arrays
        assert array.dtype == X.dtype
        np.testing.assert_array_equal(array, X)
    # tritonclient says where the JSON ends even if nothing follows it
    assert len(read(AS_JSON, interface).arrays) == 1
    assert len(read({**AS_JSON, "model_name": "predict"}, interface).arrays) == 1


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({**AS_JSON, "model_name": "other"}, "model_name is 'other'; the path names predict"),
        ([], "the request is not one of the protocol: expected an object"),
        ({}, "the request is not one of the protocol: the key 'inputs' is missing"),
        ({**AS_JSON, "id": 1}, "the request is not one of the protocol: id: expected a string"),
        ({"inputs": []}, "x is missing; the inputs are x"),
        ({"inputs": AS_JSON["inputs"] * 2}, "'x' appears twice; the inputs are x"),
        ({"inputs": [{**INPUT, "name": "y", "data": []}]}, "'y' is not an input; the inputs are x"),
        ({"inputs": [INPUT]}, "x: expected either data or the parameter binary_data_size"),
        ({**AS_JSON, "parameters": {"prioriti": 1}}, "the request: no parameter 'prioriti' is supported"),
        ({**AS_JSON, "parameters": {"priority": -1}}, "priority is -1; expected a whole number"),
        ({**AS_JSON, "parameters": {"timeout": 1.5}}, "timeout is 1.5; expected a whole number"),
        ({**AS_JSON, "parameters": {"binary_data_output": 1}}, "binary_data_output is 1; expected true or false"),
        ({**AS_JSON, "outputs": [{"name": "z"}]}, "'z' is not an output; the outputs are result"),
        (
            {**AS_JSON, "outputs": [{"name": "result['label']"}] * 2},
            "\"result['label']\" appears twice; the outputs are result['label'], result['logits']",
        ),
        (
            {**AS_JSON, "outputs": [{"name": "result['label']", "parameters": {"classification": 2}}]},
            "result['label']: no parameter 'classification' is supported",
        ),
        (
            {"inputs": [{**INPUT, "parameters": {"binary_data_size": 129}}]},
            "x: binary_data_size is 129; 128 bytes are left",
        ),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": -1}}]}, "x: binary_data_size is -1; 128 bytes"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": True}}]}, "x: binary_data_size is True; 128 bytes"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": 124}}]}, "x: 124 bytes; shape [2, 16] takes 128"),
        (AS_JSON, "128 bytes follow the last tensor"),
    ],
)
def test_what_is_wrong_is_named(request_: Any, text: str, interface: Interface) -> None:
    with pytest.raises(RequestError) as error:
        read(request_, interface, X.tobytes() if "follow" in text or "bytes" in text else b"")
    assert str(error.value).startswith(text), str(error.value)


@pytest.mark.parametrize(
    ("body", "length", "code", "text"),
    [
        (b"{}", "3", "request", "is '3'; expected a number up to the 2 bytes of the body"),
        (b"{}", "-1", "request", "is '-1'; expected"),
        (b"{}", "1" * 5000, "request", "expected a number"),
        (b"{}", "\u0661", "request", "expected a number"),
        (b'{"inputs": NaN}', None, "request", "unexpected character, expected a JSON value: line 1 column 12"),
        (b"[" * 10_000, None, "request", "depth limit exceeded"),
        (b'{"inputs":[],"id":' + b"[" * 1020 + b"]" * 1020 + b"}", None, "request", "it is nested too deeply"),
        (b'{"inputs":[],"parameters":{"a":' + b"[" * 300 + b"]" * 300 + b"}}", None, "request", "nested too deeply"),
        (b'{"inputs":[{"data":{"a":1,"a":2}}]}', None, "request", "'datatype' is missing"),
        (b'{"inputs":[{"name":"x","shape":[],"datatype":"","data":[":"]}]}', None, "request", "data has text"),
        (b"[" + b"[]," * 2**16, None, "too-large", "over 65,536 arrays and objects of JSON"),
        (b"[" + b"0," * 2**20, None, "too-large", "over 1,048,576 values of JSON"),
        (b'{"inputs":[],"inputs":[]}', None, "request", "a key appears twice"),
        (b'{"inputs":[],"inputs":[],"id":"\\u003a"}', None, "request", "a key appears twice"),
        (b'{"inputs":[],"inputs":[],"id":"\\u003A:"}', None, "request", "a key appears twice"),
        (b"\xff", None, "request", "not valid UTF-8"),
        (b" " * (encoding.MOST_JSON + 1), None, "too-large", "bytes of JSON are over the limit"),
    ],
)
def test_a_body_that_is_no_request(body: bytes, length: str | None, code: str, text: str, interface: Interface) -> None:
    def checked() -> None:
        encoding.memory(body, length)
        encoding.read(body, length, lambda _: interface, "predict")

    with pytest.raises(RequestError) as error:
        checked()
    assert error.value.code == code
    assert text in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KEYS = ("name", "shape", "datatype", "data", "parameters", "binary_data_size", "id", "inputs", "outputs")


@given(st.data())
def test_any_other_request_is_refused_with_a_type(interface: Interface, data: st.DataObject) -> None:
    """Part of a good request is replaced by anything: it is answered, or refused, and nothing else is raised."""
    request: Any = json.loads(json.dumps({**AS_BYTES, "outputs": [{"name": "result['label']", "parameters": {}}]}))
    places: list[tuple[Any, Any]] = []
    level = [request]
    for part in level:
        pairs = part.items() if isinstance(part, dict) else enumerate(part)
        for key, value in pairs:
            places.append((part, key))
            level += [value] if isinstance(value, dict | list) else []
    part, key = data.draw(st.sampled_from(places))
    part[key] = data.draw(JSON | st.sampled_from([AS_JSON["inputs"], 2**31, [0, 16], [2**31 - 1, 16]]))
    if isinstance(part, dict) and data.draw(st.booleans()):
        part[data.draw(st.sampled_from(KEYS))] = data.draw(JSON)
    rest = data.draw(st.binary(max_size=8)) if data.draw(st.booleans()) else X.tobytes()
    refusals, arrays = [], []
    try:
        arrays = read(request, interface, rest).arrays
    except RequestError as error:
        refusals.append(error)
    assert all(error.code in ("request", "unsupported") and len(str(error)) < 1000 for error in refusals)
    assert refusals or [array.shape[1:] for array in arrays] == [(16,)]


def test_an_answer_has_what_was_asked_for(interface: Interface) -> None:
    results = [np.array([1, 2], np.int32), np.array([[0.1] * 5] * 2, np.float32)]
    request = encoding.Request("a", [], [(1, True), (0, False)])
    body, end = encoding.write("predict", "1", request, results, interface)
    assert json.loads(body[:end]) == {
        "model_name": "predict",
        "model_version": "1",
        "id": "a",
        "outputs": [
            {
                "name": "result['logits']",
                "datatype": "FP32",
                "shape": [2, 5],
                "parameters": {"binary_data_size": 40},
            },
            {"name": "result['label']", "datatype": "INT32", "shape": [2], "data": [1, 2]},
        ],
    }
    assert body[end:] == results[1].tobytes()
    body, end = encoding.write("predict", "1", encoding.Request(None, [], [(1, False)]), results, interface)
    assert end is None
    answer = json.loads(body)
    assert "id" not in answer
    np.testing.assert_array_equal(np.float32(answer["outputs"][0]["data"]), results[1].ravel())


def test_json_has_no_nan(interface: Interface) -> None:
    results = [np.zeros(1, np.int32), np.array([[np.nan] * 5], np.float32)]
    with pytest.raises(RequestError, match=r"result\['logits'\] has a NaN or an infinity") as error:
        encoding.write("predict", "1", encoding.Request(None, [], [(1, False)]), results, interface)
    assert error.value.code == "not-json"
    _, end = encoding.write("predict", "1", encoding.Request(None, [], [(1, True)]), results, interface)
    assert end is not None


def test_what_is_written_as_json(interface: Interface) -> None:
    """The same numbers, whatever the pieces; and not millions of them."""
    label = np.arange(20_000, dtype=np.int32)
    logits = np.random.default_rng(0).standard_normal((4000, 5)).astype(np.float32)
    request = encoding.Request(None, [], [(0, False), (1, False)])
    body, end = encoding.write("predict", "1", request, [label, logits], interface)
    told = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    assert end is None
    assert told["result['label']"] == label.tolist()
    assert np.float32(told["result['logits']"]).tobytes() == logits.tobytes()
    with pytest.raises(RequestError, match=r"1,048,580 numbers, and as JSON 1,048,576 at most: ask for bytes") as error:
        encoding.write("predict", "1", request, [label[:0], np.zeros((209_716, 5), np.float32)], interface)
    assert error.value.code == "not-json"


def test_unknown_parameters_are_passed_over(interface: Interface) -> None:
    """But for those without which the answer is another one."""
    more = {"parameters": {"a": [{}], "timeout": 2_000_000, "priority": 3}}
    output = {"name": "result['label']", "parameters": {"b": 1}}
    request = {"inputs": [{**AS_JSON["inputs"][0], "parameters": {"c": None}}], "outputs": [output], **more}
    got = encoding.read(json.dumps(request).encode(), None, lambda _: interface, "predict")
    assert (got.timeout, got.priority, got.outputs) == (2, 3, [(0, False)])
    output["parameters"] = {"classification": 3}
    with pytest.raises(RequestError, match=r"result\['label'\]: no parameter 'classification' is supported"):
        encoding.read(json.dumps(request).encode(), None, lambda _: interface, "predict")


def test_a_minus_before_0(interface: Interface, models: dict[str, Model]) -> None:
    """Go writes -0.0 in this way; in text and in exponents it is something else."""
    for written, value in (("-0", -0.0), ("-0.0", -0.0), ("1e-0", 1.0), ("-1", -1.0), ("-0e0", -0.0)):
        tensor = json.dumps({**INPUT, "shape": [1, 16]})[:-1] + ', "data": [' + ", ".join([written] * 16) + "]}"
        body = '{"id": "a -0, \\"-0,", "inputs": [' + tensor + "]}"
        request = encoding.read(body.encode(), None, lambda _: interface, "predict")
        assert request.arrays[0].tobytes() == np.full((1, 16), value, np.float32).tobytes(), written
        assert request.request_id == 'a -0, "-0,'
    ids = models["structured"].interface.inputs[1:2]
    table = {"name": "ids", "datatype": "INT32", "shape": [1, 2], "data": [0, 7]}
    body = json.dumps({"inputs": [table]}).replace("[0, 7]", "[-0, 7]").encode()
    read_ids = encoding.read(body, None, lambda _: Interface(ids, ()), "structured").arrays[0]
    assert read_ids.tolist() == [[0, 7]]


@pytest.mark.parametrize("text", ['[-0,"' + '\\"' * 2**20, '["' * 2**20 + "-0", "-0," * 2**19, "-0" + '"' * 2**20])
def test_text_that_is_no_json_is_soon_refused(interface: Interface, text: str) -> None:
    began = time.process_time()
    with pytest.raises(RequestError):
        encoding.read(text.encode(), None, lambda _: interface, "predict")
    assert time.process_time() - began < 5


def test_text_with_colons_is_one_key(interface: Interface) -> None:
    for text in ("a:b", "::", "\u003a", "é:"):
        for body in (json.dumps({**AS_JSON, "id": text}), json.dumps({**AS_JSON, "id": text}, ensure_ascii=False)):
            assert encoding.read(body.encode(), None, lambda _: interface, "predict").request_id == text


READS = """
import sys
import time
from pathlib import Path
import orjson
from stagec_serve import encoding

def most():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

body = eval(sys.argv[1])
kept = [[] for _ in range(10**5)]  # they take the memory that imports have used and left
Path("/proc/self/clear_refs").write_text("5")  # the most memory is what there is now
before = most()
value = orjson.loads(body)
print(most() - before, encoding.memory(body, None))
"""


@pytest.mark.parametrize(
    "body",
    [
        "b'[' + b'0.123456789,' * 10**6 + b'0]'",
        "b'[' + b'1000,' * 10**6 + b'0]'",
        "b'[' + b'[],' * 65_000 + b'0]'",
        "b'[' + b'{\"abcdef\":0},' * 65_000 + b'0]'",
        "b'{' + b','.join(b'\"k%d\":0' % i for i in range(500_000)) + b'}'",
        "b'[' + b'\"abcd\",' * 10**6 + b'0]'",
        "('[\"' + 'x' * (2**24 - 100) + '\\U0001f600\"]').encode()",
        "b'[\"' + b'x' * (2**24 - 100) + b'\\\\ud83d\\\\ude00\"]'",
    ],
)
def test_json_takes_no_more_memory_than_is_counted(body: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", READS, body]
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    taken, counted = map(int, done.stdout.split())
    assert counted / 5 < taken < counted + 2**21, f"{taken / counted:.2f} of what is counted"


def test_json_takes_more_memory_than_its_bytes() -> None:
    body = json.dumps({"data": [0.5] * 1000}).encode()
    assert encoding.memory(body, None) > 10 * len(body)
    assert encoding.memory(b"{}" + bytes(b"," * 10**6), "2") < 200  # what follows is bytes
