"""The messages of gRPC: those of Triton's client, and what a request's bytes may be."""

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, strategies as st
from tritonclient.grpc import service_pb2

from stagec_grpc import messages
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError
from tools import protocol

X = np.arange(32, dtype=np.float32).reshape(2, 16)
SOURCE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def test_the_descriptor_is_that_of_the_source() -> None:
    """As messages, for protoc may write the same one in other bytes."""
    written, made = map(
        descriptor_pb2.FileDescriptorSet.FromString, (protocol.FILE.read_bytes(), protocol.descriptor())
    )
    assert written == made, "run: python tools/protocol.py"


def assert_part(mine: Any, theirs: Any) -> None:
    """A message has the name of the source's, and each of its fields the number, name, type and oneof."""
    assert mine.full_name == theirs.full_name
    assert mine.GetOptions().map_entry == theirs.GetOptions().map_entry
    for field in mine.fields:
        source = theirs.fields_by_number[field.number]
        same = ("name", "type", "is_repeated")
        assert [getattr(field, key) for key in same] == [getattr(source, key) for key in same], source.full_name
        choices = [entry.containing_oneof and entry.containing_oneof.name for entry in (field, source)]
        assert choices[0] == choices[1], source.full_name
        if field.message_type:
            assert_part(field.message_type, source.message_type)
        if field.enum_type:
            values = [{value.name: value.number for value in enum.enum_type.values} for enum in (field, source)]
            assert values[0] == values[1]


@pytest.mark.parametrize("method", messages.service().methods_by_name)
def test_messages_are_those_of_the_protocol(method: str) -> None:
    mine, source = messages.service().methods_by_name[method], SOURCE.methods_by_name[method]
    assert mine.full_name == source.full_name
    for name, kind in ("Request", "input_type"), ("Response", "output_type"):
        assert_part(getattr(mine, kind), getattr(source, kind))
        called = "ModelInferRequest" if (method, name) == ("ModelStreamInfer", "Request") else f"{method}{name}"
        assert getattr(mine, kind) == messages.classes()[called].DESCRIPTOR


def request(**fields: Any) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 16]}
    raw = {"raw_input_contents": [X.tobytes()]}
    return messages.classes()["ModelInferRequest"](**{"model_name": "predict", "inputs": [tensor], **raw, **fields})


def read(model: Model, message: Any) -> messages.Request:
    return messages.read(
        messages.parse("ModelInferRequest", message.SerializeToString()), True, lambda _: model.interface
    )


def test_raw_and_typed_contents_are_the_same(models: dict[str, Model]) -> None:
    typed = {"name": "x", "datatype": "FP32", "shape": [2, 16], "contents": {"fp32_contents": X.ravel()}}
    for message in (request(), request(inputs=[typed], raw_input_contents=[])):
        got = read(models["predict"], message)
        np.testing.assert_array_equal(got.arrays[0], X, strict=True)
        assert got.outputs == [(0, True), (1, True)]


INTEGERS = {"int_contents": ("INT8", "INT16", "INT32"), "uint_contents": ("UINT8", "UINT16", "UINT32")}


@pytest.mark.parametrize(("field", "name"), [(field, name) for field, names in INTEGERS.items() for name in names])
@given(st.data())
def test_a_typed_integer_that_its_dtype_cannot_hold(field: str, name: str, data: st.DataObject) -> None:
    from stagec.core.sizes.avals import Aval
    from stagec_serve.tensors import Interface, Tensor

    dtype = np.dtype(name.lower())
    low, high = (np.iinfo(np.int32) if field[0] == "i" else np.iinfo(np.uint32)).min, 2**31 - 1
    values = data.draw(st.lists(st.integers(int(low), high), max_size=3))
    tensor = Tensor("x", 0, Aval("any", ("n",)), name, dtype)
    given_ = {"name": "x", "datatype": name, "shape": [len(values)], "contents": {field: values}}
    message = messages.classes()["ModelInferRequest"](inputs=[given_])
    limits = np.iinfo(dtype)
    if all(limits.min <= value <= limits.max for value in values):
        (array,) = messages.read(message, True, lambda _: Interface((tensor,), ())).arrays
        assert (array.dtype, array.tolist()) == (dtype, values)
    else:
        with pytest.raises(RequestError, match=f"x: data has a number that {name} cannot hold"):
            messages.read(message, True, lambda _: Interface((tensor,), ()))


TENSOR: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2, 16]}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": []}, "1 raw_input_contents for 0 inputs"),
        ({"inputs": [{**TENSOR, "shape": [2**40, 16]}]}, "x: shape is [1099511627776, 16]; expected f32[batch,16]"),
        ({"raw_input_contents": [b""]}, "x: 0 bytes; shape [2, 16] takes 128"),
        ({"raw_input_contents": []}, "x: data does not have the 32 values that shape [2, 16] needs"),
        (
            {"inputs": [{**TENSOR, "contents": {"fp32_contents": [1]}}]},
            "x: expected either contents or raw_input_contents",
        ),
        (
            {"inputs": [{**TENSOR, "contents": {"fp64_contents": [1]}}], "raw_input_contents": []},
            "x: contents has fp64_contents; expected fp32_contents for FP32",
        ),
        ({"parameters": {"priority": {"string_param": "1"}}}, "priority is '1'; expected a whole number"),
        ({"inputs": [{**TENSOR, "parameters": {"a": {}}}]}, "x: no parameter 'a' is supported"),
        (
            {"parameters": {"binary_data_output": {"bool_param": False}}},
            "binary_data_output is false; answers over gRPC are raw_output_contents",
        ),
        (
            {"outputs": [{"name": "result['label']", "parameters": {"binary_data": {"string_param": "x"}}}]},
            "binary_data is 'x'; expected true or false",
        ),
    ],
)
def test_what_is_refused(models: dict[str, Model], fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as error:
        read(models["predict"], request(**fields))
    assert str(error.value) == text


def test_unknown_parameters_are_passed_over(models: dict[str, Model]) -> None:
    tensor = {**TENSOR, "parameters": {"a": {}}}
    message = request(inputs=[tensor], parameters={"b": {"bool_param": True}, "timeout": {"int64_param": 5}})
    interface = models["predict"].interface
    got = messages.read(message, False, lambda _: interface)
    assert (got.timeout, got.priority) == (5e-6, 0)
    shared = request(inputs=[{**TENSOR, "parameters": {"shared_memory_region": {"string_param": "a"}}}])
    with pytest.raises(RequestError, match="x: no parameter 'shared_memory_region' is supported"):
        messages.read(shared, False, lambda _: interface)


def test_a_datatype_without_typed_contents(models: dict[str, Model]) -> None:
    tensors = [
        {"name": "half", "datatype": "FP16", "shape": [3], "contents": {"fp32_contents": [1, 2, 3]}},
        {"name": "brain", "datatype": "BF16", "shape": [3]},
        {"name": "byte", "datatype": "UINT8", "shape": [2]},
        {"name": "flag", "datatype": "BOOL", "shape": [2]},
    ]
    message = request(inputs=tensors, raw_input_contents=[])
    with pytest.raises(RequestError, match="half: contents has fp32_contents; expected raw_input_contents for FP16"):
        read(models["narrow"], message)
    del tensors[0]["contents"]
    half, brain = np.array([1, 2, 3], np.float16), np.array([1, 2, 3], ml_dtypes.bfloat16)
    raw = [half.tobytes(), brain.tobytes(), b"\1\2", b"\1\0"]
    arrays = read(models["narrow"], request(inputs=tensors, raw_input_contents=raw)).arrays
    np.testing.assert_array_equal(arrays[1], brain, strict=True)
    assert arrays[3].tolist() == [True, False]


@pytest.mark.parametrize(
    "body",
    [
        b"\x2a\x00" * 20_000,  # inputs that are empty
        b"\x3a\x00" * 20_000,  # raw contents that are empty
        b"\x2a\x80\x80\x80\x04" + b"\x22\x00" * 2**22,  # one input with parameters that are empty
        b"\x0b" * 2**23,  # groups
    ],
)
def test_many_small_fields_are_not_read(body: bytes) -> None:
    with pytest.raises(RequestError, match="over 4,194,304 bytes beside raw_input_contents, or over 10,000") as error:
        messages.parse("ModelInferRequest", body)
    assert error.value.code == "too-large"


@given(st.binary(max_size=40))
def test_any_bytes(body: bytes) -> None:
    """They are a message, or refused."""
    with contextlib.suppress(RequestError):
        assert messages.parse("ModelInferRequest", body).IsInitialized()
