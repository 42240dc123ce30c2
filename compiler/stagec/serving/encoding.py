"""Requests and answers of the Open Inference Protocol v2 over HTTP: JSON, and tensors as bytes behind it.

The extension for binary tensors puts the bytes of tensors after the JSON. The header `Inference-Header-Content-Length`
says where the JSON ends, `binary_data_size` how many bytes each tensor has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagec.core.data import strict_json
from stagec.core.trees import json_shapes
from stagec.serving.refusal import RequestError
from stagec.serving.tensors import Interface, Tensor

MOST_JSON = 2**24
"""Bytes of JSON in a request, without binary tensors: a value takes up to twenty times as much memory as its text."""
HEADER_LENGTH = "inference-header-content-length"

_PARAMETERS = json_shapes.table(json_shapes.anything)
_REQUEST = json_shapes.record(
    {"inputs": json_shapes.array(json_shapes.table(json_shapes.anything))},
    optional={
        "id": json_shapes.text,
        "parameters": _PARAMETERS,
        "outputs": json_shapes.array(
            json_shapes.record({"name": json_shapes.text}, optional={"parameters": _PARAMETERS})
        ),
    },
)
_INPUT = json_shapes.record(
    {"name": json_shapes.text, "shape": json_shapes.anything, "datatype": json_shapes.text},
    optional={"parameters": _PARAMETERS, "data": json_shapes.anything},
)


class Request(NamedTuple):
    """A request that was read.

    request_id: the client's, or None. arrays: one for each input, in the order of the interface.
    outputs: the number of each output that the client asks for, and whether it wants its bytes.
    """

    request_id: str | None
    arrays: list[NDArray[Any]]
    outputs: list[tuple[int, bool]]


def read(body: bytes, header_length: str | None, interface: Interface) -> Request:
    """Return what a body asks for, with every name, datatype, shape and length checked.

    header_length: the value of the header `Inference-Header-Content-Length`; None: the body is JSON alone.
    Raises RequestError ("request", "too-large", "unsupported").
    """
    end = len(body) if header_length is None else _length(header_length, len(body))
    if end > MOST_JSON:
        raise RequestError("too-large", f"{end:,} bytes of JSON are over the limit of {MOST_JSON:,}: send bytes")
    try:
        request = strict_json.parse(body[:end], MOST_JSON)
        _REQUEST(request)
        for tensor in request["inputs"]:
            _INPUT(tensor)
    except ValueError as error:
        raise RequestError("request", f"the request is not one of the protocol: {error}") from None
    arrays = _arrays(request["inputs"], memoryview(body)[end:], interface.inputs)
    parameters = _parameters("the request", request, "binary_data_output")
    return Request(request.get("id"), arrays, _outputs(request, parameters, interface.outputs))


def _length(written: str, most: int) -> int:
    if not (written.isascii() and written.isdigit() and len(written) < 20 and int(written) <= most):
        what = f"the header {HEADER_LENGTH} is {written[:40]!r}; expected a number up to the {most:,} bytes of the body"
        raise RequestError("request", what)
    return int(written)


def _parameters(whose: str, table: Mapping[str, Any], *known: str) -> Mapping[str, Any]:
    """Return the parameters of a part of a request. Raises RequestError ("unsupported") for one that is not known."""
    parameters: Mapping[str, Any] = table.get("parameters", {})
    unknown = sorted(parameters.keys() - {*known})
    if unknown:
        raise RequestError("unsupported", f"{whose}: no parameter {strict_json.shown(unknown[0])!r} is supported")
    return parameters


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise RequestError("request", f"{name} is {strict_json.shown(repr(value))}; expected true or false")
    return value


def _arrays(given: Sequence[Mapping[str, Any]], rest: memoryview, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    known = {tensor.name: tensor for tensor in tensors}
    arrays: dict[str, NDArray[Any]] = {}
    for table in given:
        name = table["name"]
        if name not in known or name in arrays:
            why = "is there twice" if name in arrays else "is not an input"
            raise RequestError("request", f"{strict_json.shown(name)!r} {why}; the inputs are {_names(tensors)}")
        tensor, parameters = known[name], _parameters(name, table, "binary_data_size")
        shape = tensor.checked_shape(table["shape"], table["datatype"])
        if ("data" in table) == ("binary_data_size" in parameters):
            raise RequestError("request", f"{name}: expected either data or the parameter binary_data_size")
        if "data" in table:
            arrays[name] = tensor.from_numbers(table["data"], shape)
            continue
        size = parameters["binary_data_size"]
        if type(size) is not int or not 0 <= size <= len(rest):
            shown = strict_json.shown(repr(size))
            raise RequestError("request", f"{name}: binary_data_size is {shown}; {len(rest):,} bytes are left")
        arrays[name], rest = tensor.from_bytes(rest[:size], shape), rest[size:]
    if len(rest):
        raise RequestError("request", f"{len(rest):,} bytes follow the last tensor")
    missing = [tensor.name for tensor in tensors if tensor.name not in arrays]
    if missing:
        raise RequestError("request", f"{missing[0]} is missing; the inputs are {_names(tensors)}")
    return [arrays[tensor.name] for tensor in tensors]


def _outputs(
    request: Mapping[str, Any], parameters: Mapping[str, Any], tensors: Sequence[Tensor]
) -> list[tuple[int, bool]]:
    default = _flag(parameters, "binary_data_output", False)
    if not request.get("outputs"):
        return [(number, default) for number in range(len(tensors))]
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    chosen: dict[int, bool] = {}
    for table in request["outputs"]:
        name = table["name"]
        if name not in numbers or numbers[name] in chosen:
            why = "is not an output" if name not in numbers else "is there twice"
            raise RequestError("request", f"{strict_json.shown(name)!r} {why}; the outputs are {_names(tensors)}")
        chosen[numbers[name]] = _flag(_parameters(name, table, "binary_data"), "binary_data", default)
    return list(chosen.items())


def _names(tensors: Sequence[Tensor]) -> str:
    return ", ".join(tensor.name for tensor in tensors) or "none"


def write(
    model: str, version: str, request: Request, results: Sequence[NDArray[Any]], interface: Interface
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and where its JSON ends; None: it is JSON alone.

    Raises RequestError ("not-json") for a NaN or an infinity in an output that the client wants as JSON.
    """
    told, after = [], []
    for number, binary in request.outputs:
        tensor, array = interface.outputs[number], results[number]
        table: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(array.shape)}
        if binary:
            data = np.ascontiguousarray(array).tobytes()
            after.append(data)
            table["parameters"] = {"binary_data_size": len(data)}
        else:
            table["data"] = _numbers(tensor, array)
        told.append(table)
    answer = {"model_name": model, "model_version": version, "outputs": told}
    if request.request_id is not None:
        answer["id"] = request.request_id
    header = json.dumps(answer, separators=(",", ":")).encode()
    return b"".join([header, *after]), len(header) if after else None


def _numbers(tensor: Tensor, array: NDArray[Any]) -> list[Any]:
    values = array.ravel()
    if array.dtype.kind in "biu":
        return list(values.tolist())
    numbers: list[float] = values.astype(np.float64).tolist()
    if not all(map(math.isfinite, numbers)):
        what = f"{tensor.name} has a NaN or an infinity, and JSON has neither: ask for its bytes (binary_data)"
        raise RequestError("not-json", what)
    return numbers
