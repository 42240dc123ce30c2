"""The messages of the Open Inference Protocol v2 over gRPC, and of Triton's extensions of it, as Protocol Buffers.

They are in a pool of their own: in the default one, the same names of two packages of one process exclude each other,
and clients have them too. Sources: `open_inference_grpc.proto` of KServe and `grpc_service.proto` of Triton.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from stagec.serving.encoding import Given, InterfaceOf, Request, arrays_of, flag, known_parameters, outputs_of
from stagec.serving.refusal import RequestError
from stagec.serving.sequences import PARAMETERS, step_of
from stagec.serving.tensors import Interface, Tensor

SERVICE = "inference.GRPCInferenceService"
METHODS = {
    **dict.fromkeys(("ServerLive", "ServerReady", "ServerMetadata"), ""),
    **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig"), "1 name string, 2 version string"),
    "ModelInfer": (
        "1 model_name string, 2 model_version string, 3 id string, 4 parameters map, 5 inputs InputTensor*, "
        "6 outputs RequestedOutput*, 7 raw_input_contents bytes*"
    ),
    "RepositoryIndex": "1 repository_name string, 2 ready bool",
    **dict.fromkeys(
        ("RepositoryModelLoad", "RepositoryModelUnload"),
        "1 repository_name string, 2 model_name string, 3 parameters repository_map",
    ),
}
"""The fields of the request of each method that a server has."""
_MESSAGES = {
    **{f"{method}Request": fields for method, fields in METHODS.items()},
    "ServerLiveResponse": "1 live bool",
    "ServerReadyResponse": "1 ready bool",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions string*",
    "ModelReadyResponse": "1 ready bool",
    "ModelMetadataResponse": (
        "1 name string, 2 versions string*, 3 platform string, 4 inputs TensorMetadata*, 5 outputs TensorMetadata*"
    ),
    "TensorMetadata": "1 name string, 2 datatype string, 3 shape int64*",
    "ModelConfigResponse": "1 config ModelConfig",
    "ModelConfig": (
        "1 name string, 2 platform string, 4 max_batch_size int32, 5 input ConfigTensor*, 6 output ConfigOutput*, "
        "11 dynamic_batching DynamicBatching, 13 sequence_batching SequenceBatching, 17 backend string"
    ),
    "ConfigTensor": "1 name string, 2 data_type DataType, 4 dims int64*",
    "ConfigOutput": "1 name string, 2 data_type DataType, 3 dims int64*",
    "SequenceBatching": "1 max_sequence_idle_microseconds uint64",
    "DynamicBatching": "1 preferred_batch_size int32*, 2 max_queue_delay_microseconds uint64",
    "InputTensor": "1 name string, 2 datatype string, 3 shape int64*, 4 parameters map, 5 contents Contents",
    "Contents": (
        "1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*, 4 uint_contents uint32*, "
        "5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*, 8 bytes_contents bytes*"
    ),
    "RequestedOutput": "1 name string, 2 parameters map",
    "Parameter": (
        "1 bool_param bool, 2 int64_param int64, 3 string_param string, 4 double_param double, 5 uint64_param uint64"
    ),
    "RepositoryParameter": "1 bool_param bool, 2 int64_param int64, 3 string_param string, 4 bytes_param bytes",
    "ModelInferResponse": (
        "1 model_name string, 2 model_version string, 3 id string, 5 outputs OutputTensor*, "
        "6 raw_output_contents bytes*"
    ),
    "OutputTensor": "1 name string, 2 datatype string, 3 shape int64*",
    "RepositoryIndexResponse": "1 models ModelIndex*",
    "ModelIndex": "1 name string, 2 version string, 3 state string, 4 reason string",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadResponse": "",
}
"""Messages and their fields: number, name, type; `*` is repeated; `_MAPS` has maps from text.

On the wire the names of messages do not count, so one stands for several of the sources that have equal fields. The
fields of parameters exclude each other. What a server never writes, or ignores, is left out.
"""
_RAW = 7
_MOST_FIELDS = 10_000
_MOST_TYPED = 2**22
"""Bytes of a request without its raw contents: they take many times as much memory as messages."""
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""The field of `Contents` for a datatype; the others are raw alone."""
_WIDE = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}
_DATA_TYPES = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)


_FINAL = "triton_enable_empty_final_response"
"""A parameter of Triton's clients for streams, which perf_analyzer always sends: here each answer is the only one."""
_MAPS = {"map": "Parameter", "repository_map": "RepositoryParameter"}


@functools.cache
def classes() -> Mapping[str, Any]:
    """Return the class of each message, by name: those of `METHODS` end with Request and Response."""
    file = descriptor_pb2.FileDescriptorProto(name="stagec/inference.proto", package="inference", syntax="proto3")
    values = [{"name": f"TYPE_{name}", "number": number} for number, name in enumerate(_DATA_TYPES)]
    file.enum_type.add(name="DataType", value=values)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _MAPS.values():
            message.oneof_decl.add(name="parameter_choice")
        for number, field, kind, repeated in _fields(fields):
            entry = message.field.add(name=field, number=number, label=3 if repeated or kind in _MAPS else 1)
            if name in _MAPS.values():
                entry.oneof_index = 0
            if kind in _MAPS:
                _add_map(message, f"{field.title()}Entry", _MAPS[kind])
                entry.type, entry.type_name = 11, f".inference.{name}.{field.title()}Entry"
            elif kind[0].isupper():
                entry.type, entry.type_name = 14 if kind == "DataType" else 11, f".inference.{kind}"
            else:
                entry.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    described = (pool.FindMessageTypeByName(f"inference.{name}") for name in _MESSAGES)
    return {descriptor.name: message_factory.GetMessageClass(descriptor) for descriptor in described}


def parse(name: str, body: bytes) -> Any:
    """Return the message of this name. Raises RequestError ("request", "too-large").

    The fields are counted before they are read: one that takes two bytes may take a hundred in memory.
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


def read(message: Any, interface_of: InterfaceOf) -> Request:
    """Return what a ModelInferRequest asks for, with every name, datatype, shape and length checked.

    Raises RequestError ("request", "unsupported").
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RequestError("request", f"{len(raw):,} raw_input_contents for {len(message.inputs):,} inputs")
    raw = raw or [None] * len(message.inputs)
    given = (
        Given(tensor.name, tensor.datatype, [*tensor.shape], functools.partial(_values, tensor, data))
        for tensor, data in zip(message.inputs, raw, strict=True)
    )
    known = "binary_data_output", _FINAL, *PARAMETERS
    parameters = known_parameters("the request", plain(message.parameters), *known)
    _raw_alone(parameters, "binary_data_output")
    flag(parameters, _FINAL, True)
    step = step_of(parameters)
    interface = interface_of(step)
    arrays = arrays_of(given, interface.inputs)
    for output in message.outputs:
        _raw_alone(known_parameters(output.name, plain(output.parameters), "binary_data"), "binary_data")
    wanted = ((output.name, True) for output in message.outputs)
    return Request(message.id, arrays, outputs_of(wanted, True, interface.outputs), step)


def _values(given: Any, raw: bytes | None, tensor: Tensor, shape: tuple[int, ...]) -> NDArray[Any]:
    known_parameters(tensor.name, plain(given.parameters), "binary_data_size")  # clients of KServe send it
    fields = [field.name for field, _ in given.contents.ListFields()]
    if raw is not None:
        if fields:
            raise RequestError("request", f"{tensor.name}: expected either contents or raw_input_contents")
        return tensor.from_bytes(memoryview(raw), shape)
    field = _CONTENTS.get(tensor.datatype)
    if field is None or fields not in ([], [field]):
        have, want = ", ".join(fields) or "nothing", field or "raw_input_contents"
        raise RequestError("request", f"{tensor.name}: contents has {have}; expected {want} for {tensor.datatype}")
    return tensor.from_values(np.array(getattr(given.contents, field), _WIDE[field]), shape)


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a map of Parameters."""
    chosen = ((name, value, value.WhichOneof("parameter_choice")) for name, value in parameters.items())
    return {name: getattr(value, choice) if choice else None for name, value, choice in chosen}


def _raw_alone(parameters: Mapping[str, Any], name: str) -> None:
    if not flag(parameters, name, True):
        raise RequestError("unsupported", f"{name} is false; answers over gRPC are raw_output_contents")


def write(model: str, version: str, request: Request, results: Sequence[NDArray[Any]], interface: Interface) -> bytes:
    """Return a ModelInferResponse."""
    tensors = [(interface.outputs[number], results[number]) for number, _ in request.outputs]
    outputs = [{"name": t.name, "datatype": t.datatype, "shape": array.shape} for t, array in tensors]
    response = classes()["ModelInferResponse"](
        model_name=model,
        model_version=version,
        id=request.request_id,
        outputs=outputs,
        raw_output_contents=[np.ascontiguousarray(array).tobytes() for _, array in tensors],
    )
    data: bytes = response.SerializeToString()
    return data


def _fields(written: str) -> Iterator[tuple[int, str, str, bool]]:
    for number, name, kind, repeated in re.findall(r"(\d+) (\w+) (\w+)(\*?)", written):
        yield int(number), name, kind, bool(repeated)


def _add_map(message: descriptor_pb2.DescriptorProto, name: str, of: str) -> None:
    entry = message.nested_type.add(name=name, options={"map_entry": True})
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=f".inference.{of}")
