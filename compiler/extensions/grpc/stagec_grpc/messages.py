"""The messages of the Open Inference Protocol v2 over gRPC, and of Triton's extensions of it, as Protocol Buffers.

They are in a pool of their own: in the default one, the same names of two packages of one process exclude each other,
and clients have them too. `inference.proto` has their fields, and names its sources.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from stagec_serve.encoding import InterfaceOf, Request, request_of
from stagec_serve.model import Model
from stagec_serve.refusal import DIGEST, RequestError
from stagec_serve.sequences import flag
from stagec_serve.tensors import Tensor

_RAW = 7
_MOST_FIELDS = 10_000
_MOST_TYPED = 2**22
"""Bytes of a request without its raw contents: they take many times as much memory as messages."""
_CONTENTS: Mapping[str, tuple[str, Any]] = {
    "BOOL": ("bool_contents", np.bool_),
    **dict.fromkeys(("INT8", "INT16", "INT32"), ("int_contents", np.int32)),
    "INT64": ("int64_contents", np.int64),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), ("uint_contents", np.uint32)),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}
"""The field of `InferTensorContents` for a datatype, and its dtype; the others are raw alone."""
_FINAL = "triton_enable_empty_final_response"
"""A parameter of Triton's clients for streams, which perf_analyzer always sends: here each answer is the only one."""


@functools.cache
def service() -> Any:
    """Return the descriptor of the service, with its methods.

    Its pool is not the default one: generated code registers names there that clients in this process have too.
    """
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("inference.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in descriptors.file:
        pool.Add(file)
    return pool.FindServiceByName("inference.GRPCInferenceService")


@functools.cache
def classes() -> Mapping[str, Any]:
    """Return the class of each message that is in no other, by name: those of methods end with Request and Response."""
    described = service().file.message_types_by_name
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in described.items()}


def parse(name: str, body: bytes) -> Any:
    """Return the message of this name. Raises RequestError ("request", "too-large").

    It counts the fields before it reads them: one of two bytes may take a hundred in memory.
    """
    others = 0
    for count, (number, size) in enumerate(_outermost(body), 1):
        others += 0 if number == _RAW else size
        if count > _MOST_FIELDS or others > _MOST_TYPED:
            what = f"over {_MOST_TYPED:,} bytes beside raw_input_contents, or over {_MOST_FIELDS:,} fields"
            raise RequestError("too-large", f"the message has {what}: send raw_input_contents")
    try:
        return classes()[name].FromString(body)
    except DecodeError as error:
        raise RequestError("request", f"the message is not a {name}: {error}") from None


def _outermost(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield number and bytes of each field of a message, without those inside it; end where it is not well formed.

    Source: https://protobuf.dev/programming-guides/encoding. What is not well formed, the parser refuses at that place.
    """
    place = 0
    with contextlib.suppress(IndexError):
        while place < len(body):
            start = place
            tag, place = _varint(body, place)
            match tag & 7:
                case 0:
                    _, place = _varint(body, place)
                case 1:
                    place += 8
                case 2:
                    length, place = _varint(body, place)
                    place += length
                case 5:
                    place += 4
                case _:
                    place = len(body)  # groups are in no message of the protocol: all that follows counts as one field
            yield tag >> 3, place - start


def _varint(body: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = body[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value, place


def read(message: Any, strict: bool, interface_of: InterfaceOf) -> Request:
    """Return the request in a ModelInferRequest, as `request_of` does."""
    raw = [*message.raw_input_contents]
    if raw and len(raw) != len(message.inputs):
        raise RequestError("request", f"{len(raw):,} raw_input_contents for {len(message.inputs):,} inputs")
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [*tensor.shape],
            "parameters": plain(tensor.parameters),
            "contents": (tensor.contents, data),
        }
        for tensor, data in zip(message.inputs, raw or [None] * len(message.inputs), strict=True)
    ]
    outputs = [{"name": output.name, "parameters": plain(output.parameters)} for output in message.outputs]
    parameters = plain(message.parameters)
    flag(parameters, _FINAL, True)
    table = {"id": message.id, "parameters": parameters, "inputs": inputs, "outputs": outputs}
    return request_of(table, _values, interface_of, strict, True, _FINAL)


def _values(table: Mapping[str, Any], _: object, tensor: Tensor, shape: tuple[int, ...]) -> NDArray[Any]:
    contents, raw = table["contents"]
    fields = [field.name for field, _ in contents.ListFields()]
    if raw is not None:
        if fields:
            raise RequestError("request", f"{tensor.name}: expected either contents or raw_input_contents")
        return tensor.from_bytes(memoryview(raw), shape)
    field, dtype = _CONTENTS.get(tensor.datatype, ("raw_input_contents", None))
    if dtype is None or fields not in ([], [field]):
        have = ", ".join(fields) or "nothing"
        raise RequestError("request", f"{tensor.name}: contents has {have}; expected {field} for {tensor.datatype}")
    return tensor.from_values(np.array(getattr(contents, field), dtype), shape)


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a map of Parameters."""
    chosen = ((name, value, value.WhichOneof("parameter_choice")) for name, value in parameters.items())
    return {name: getattr(value, choice) if choice else None for name, value, choice in chosen}


def write(model: Model, request: Request, results: Sequence[NDArray[Any]], in_stream: bool = False) -> bytes:
    """Return a ModelInferResponse. in_stream: one in a ModelStreamInferResponse, which says what metadata say else."""
    tensors = [(model.interface.outputs[number], results[number]) for number, _ in request.outputs]
    outputs = [{"name": t.name, "datatype": t.datatype, "shape": array.shape} for t, array in tensors]
    parameters: dict[str, dict[str, object]] = {}
    if request.step is not None and request.step.made:
        parameters["sequence_id"] = {"string_param": request.step.sequence}
    if in_stream:
        parameters |= {"triton_final_response": {"bool_param": True}, DIGEST: {"string_param": model.digest}}
    response = {
        "model_name": model.name,
        "model_version": model.version,
        "id": request.request_id,
        "parameters": parameters,
        "outputs": outputs,
        "raw_output_contents": [np.ascontiguousarray(array).tobytes() for _, array in tensors],
    }
    if in_stream:
        return make("ModelStreamInferResponse", infer_response=response)
    return make("ModelInferResponse", **response)


def make(name: str, /, **fields: Any) -> bytes:
    """Return the bytes of a message."""
    data: bytes = classes()[name](**fields).SerializeToString()
    return data
