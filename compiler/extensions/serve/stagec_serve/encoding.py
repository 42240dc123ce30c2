"""Requests and answers of the Open Inference Protocol v2 over HTTP: JSON, and tensors as bytes behind it.

The extension for binary tensors puts the bytes of tensors after the JSON. The header `Inference-Header-Content-Length`
says where the JSON ends, `binary_data_size` how many bytes each tensor has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from stagec.core.data import strict_json
from stagec.core.trees import json_shapes
from stagec_serve.refusal import RequestError
from stagec_serve.sequences import PARAMETERS, Step, flag, step_of
from stagec_serve.tensors import Interface, Tensor

MOST_JSON = 2**24
"""Bytes of JSON in a request, without binary tensors: a value takes up to fifty times as much memory as its JSON."""
_MOST_VALUES, _MOST_CONTAINERS = 2**20, 2**16
"""Values of JSON in a request, keys among them, and arrays and objects: more would hold other threads up."""
_BYTES_A_VALUE = 100
"""Bytes of memory that a value or a key of JSON takes while it is read, at most, beside its text."""
_MOST_WRITTEN = 2**20
"""Numbers of an answer that are written as JSON: a million of them takes 20 MB, and other threads wait for 40 ms."""
_MOST_SMALL = 2**16
"""Bytes of a request for the index, or to load or unload a model."""
_SHORT = 2**10
"""Bytes of JSON before the bytes of a request that are kept, at most: to read them takes an eighth of its CPU time."""
_MINUS_0 = re.compile(rb"-0(?<![eE]-0)(?![0-9.eE])")  # it begins with what is sought, which is four times as fast
# A string without an end goes to the end of the text. To look for one again at each of its quotes is quadratic: it took
# six seconds for 32 kB.
_OR_STRING = re.compile(rb'("(?:[^"\\]|\\.)*+"?)|' + _MINUS_0.pattern, re.DOTALL)
_COLONS = (b":", b"\\u003a", b"\\u003A")
_OF_ALL = (*PARAMETERS, "priority", "timeout", "binary_data_output")
_NEEDED = ("classification", "shared_memory")
"""How parameters begin without which an answer is another one, or a request makes no sense."""
HEADER_LENGTH = "inference-header-content-length"

_PARAMETERS = {...: object}
INDEX = json_shapes.shape({"ready?": bool, "name?": str})
"""The form of a request for the index."""
CHANGE = json_shapes.shape({"parameters?": _PARAMETERS})
"""The form of a request to load or unload a model."""
_REQUEST = json_shapes.shape(
    {
        "inputs": [{"name": str, "shape": object, "datatype": str, "parameters?": _PARAMETERS, "data?": object}],
        "id?": str,
        "model_name?": str,  # KServe's client repeats it
        "parameters?": _PARAMETERS,
        "outputs?": [{"name": str, "parameters?": _PARAMETERS}],
    }
)


class Request(NamedTuple):
    """A request that was read.

    request_id: the client's, or None. arrays: one for each input, in the order of the interface.
    outputs: the number of each output that the client asks for, and whether it wants its bytes.
    step: of a sequence; None: it is in none. priority: 1 is the first to run, 0 the last.
    timeout: seconds that its answer may take; 0: as long as the server allows.
    """

    request_id: str | None
    arrays: list[NDArray[Any]]
    outputs: list[tuple[int, bool]]
    step: Step | None = None
    priority: int = 0
    timeout: float = 0


InterfaceOf = Callable[[Step | None], Interface]
"""Returns the interface for a request: a sequence may use models that other requests do not get any more."""
Values = Callable[[Mapping[str, Any], Mapping[str, Any], Tensor, tuple[int, ...]], NDArray[Any]]
"""Reads the elements of an input: its table, its parameters, and its tensor and shape, which are right."""


def request_of(
    table: Mapping[str, Any], values: Values, interface_of: InterfaceOf, strict: bool, as_bytes: bool, *known: str
) -> Request:
    """Return the request of a table as JSON has it, in both protocols, with every name, datatype and shape checked.

    as_bytes: whether answers have nothing but bytes. known: parameters, beside those of both protocols.
    strict: whether unknown parameters are refused. Raises RequestError ("request", "unsupported").
    """
    parameters = known_parameters("the request", table.get("parameters", {}), strict, *_OF_ALL, *known)
    default = _binary(parameters, "binary_data_output", as_bytes, as_bytes)
    priority, timeout = _whole(parameters, "priority"), _whole(parameters, "timeout")
    step = step_of(parameters)
    inputs, outputs = interface_of(step)
    of = {tensor.name: tensor for tensor in inputs}
    arrays: dict[str, NDArray[Any]] = {}
    for each in table["inputs"]:
        name = each["name"]
        _check_name(name, of, arrays, "input")
        shape = of[name].checked_shape(each["shape"], each["datatype"])
        given = known_parameters(name, each.get("parameters", {}), strict, "binary_data_size")
        arrays[name] = values(each, given, of[name], shape)
    if missing := next((name for name in of if name not in arrays), ""):
        raise RequestError("request", f"{missing} is missing; the inputs are {', '.join(of)}")
    numbers = {tensor.name: number for number, tensor in enumerate(outputs)}
    chosen: dict[str, bool] = {}
    for each in table.get("outputs", ()):
        name = each["name"]
        given = known_parameters(name, each.get("parameters", {}), strict, "binary_data")
        _check_name(name, numbers, chosen, "output")
        chosen[name] = _binary(given, "binary_data", default, as_bytes)
    wanted = [(numbers[name], binary) for name, binary in (chosen or dict.fromkeys(numbers, default)).items()]
    return Request(table.get("id"), [arrays[name] for name in of], wanted, step, priority, timeout / 10**6)


def _check_name(name: str, known: Collection[str], seen: Collection[str], what: str) -> None:
    """Raise RequestError ("request") for the name of no tensor, or of one that a request has named before."""
    if name not in known or name in seen:
        why = "appears twice" if name in seen else f"is not an {what}"
        raise RequestError(
            "request", f"{strict_json.shown(name)!r} {why}; the {what}s are {', '.join(known) or 'none'}"
        )


def _binary(parameters: Mapping[str, Any], name: str, default: bool, as_bytes: bool) -> bool:
    value = flag(parameters, name, default)
    if as_bytes and not value:
        raise RequestError("unsupported", f"{name} is false; answers over gRPC are raw_output_contents")
    return value


def known_parameters(whose: str, parameters: Mapping[str, Any], strict: bool, *known: str) -> Mapping[str, Any]:
    """Return the parameters of a part of a request.

    Raises RequestError ("unsupported") for one that would change the answer, and where it is strict for any other.
    """
    unknown = [name for name in parameters if name not in known and (strict or name.startswith(_NEEDED))]
    if unknown:
        what = f"{strict_json.shown(whose)}: no parameter {strict_json.shown(unknown[0])!r} is supported"
        raise RequestError("unsupported", what)
    return parameters


def _whole(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < 2**63:
        raise RequestError("request", f"{name} is {strict_json.shown(repr(value))}; expected a whole number")
    return value


def memory(body: bytes, header_length: str | None) -> int:
    """Return the bytes that reading the JSON of a request takes, beside those of its body.

    header_length: as for `read`. Raises RequestError ("request", "too-large") as it does.
    """
    end = len(body)
    if header_length is not None:
        given = header_length
        if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= end):
            expected = f"expected a number up to the {end:,} bytes of the body"
            raise RequestError("request", f"the header {HEADER_LENGTH} is {given[:40]!r}; {expected}")
        end = int(given)
    if end > MOST_JSON:
        raise RequestError("too-large", f"{end:,} bytes of JSON are over the limit of {MOST_JSON:,}: send bytes")
    containers = body.count(b"[", 0, end) + body.count(b"{", 0, end)
    values = body.count(b",", 0, end) + body.count(b":", 0, end) + containers
    for count, most, what in ((values, _MOST_VALUES, "values"), (containers, _MOST_CONTAINERS, "arrays and objects")):
        if count > most:
            raise RequestError("too-large", f"over {most:,} {what} of JSON: send bytes (binary_data_size)")
    is_wide = not body.isascii() or body.find(b"\\u", 0, end) >= 0  # one such character, and each has four bytes
    return values * _BYTES_A_VALUE + end * (5 if is_wide else 1)


def read(
    body: bytes, header_length: str | None, interface_of: InterfaceOf, model: str, strict: bool = False
) -> Request:
    """Return the request in a body, as `request_of` does.

    model: the name of the model in the path, with which one in the body must be equal.
    header_length: the value of the header `Inference-Header-Content-Length`; None: the body is JSON alone. `memory`
    has checked both.
    """
    end = len(body) if header_length is None else int(header_length)
    is_short = header_length is not None and end <= _SHORT
    request = _same(body[:end]) if is_short else _parsed(body, end, _REQUEST)
    rest = memoryview(body)[end:]
    if request.get("model_name", model) != model:
        what = f"model_name is {strict_json.shown(repr(request['model_name']))}; the path names {model}"
        raise RequestError("request", what)

    def values(
        table: Mapping[str, Any], parameters: Mapping[str, Any], tensor: Tensor, shape: tuple[int, ...]
    ) -> NDArray[Any]:
        nonlocal rest
        if ("data" in table) == ("binary_data_size" in parameters):
            raise RequestError("request", f"{tensor.name}: expected either data or the parameter binary_data_size")
        if "data" in table:
            return tensor.from_numbers(table["data"], shape)
        size = parameters["binary_data_size"]
        if type(size) is not int or not 0 <= size <= len(rest):
            what = f"binary_data_size is {strict_json.shown(repr(size))}; {len(rest):,} bytes are left"
            raise RequestError("request", f"{tensor.name}: {what}")
        data, rest = rest[:size], rest[size:]
        return tensor.from_bytes(data, shape)

    asked = request_of(request, values, interface_of, strict, False)
    if len(rest):
        raise RequestError("request", f"{len(rest):,} bytes follow the last tensor")
    return asked


@functools.lru_cache(64)
def _same(text: bytes) -> Any:
    """Return the JSON before a request's bytes, which nobody changes: a client sends the same again and again."""
    return _parsed(text, len(text), _REQUEST)


def _parsed(body: bytes, end: int, shape: json_shapes.Shape) -> Any:
    """Return the JSON that a body begins with. Raises RequestError ("request") if it does not have a shape."""
    text: memoryview | bytes = memoryview(body)[:end]
    try:
        value = orjson.loads(text)
        if _MINUS_0.search(text):  # the parser takes it for 0
            value = orjson.loads(_OR_STRING.sub(lambda match: match[1] or b"-0.0", text))
        shape(value)
        # Of two equal keys the parser takes the last one, and a proxy may have looked at the first one. In data,
        # numbers alone are taken.
        inputs = [{**each, "data": 0} if "data" in each else each for each in value.get("inputs", ())]
        if _colons(orjson.dumps({**value, "inputs": inputs})) != _colons(body, end) + ("inputs" not in value):
            raise ValueError("a key appears twice in an object, or data has text")
    except (ValueError, TypeError, RecursionError) as error:
        why = error if isinstance(error, ValueError) else "it is nested too deeply"
        raise RequestError("request", f"the request is not one of the protocol: {why}") from None
    return value


def _colons(text: bytes, end: int | None = None) -> int:
    """Return how many colons JSON has, those of strings among them."""
    return sum(text.count(colon, 0, end) for colon in _COLONS)


def read_small(body: bytes, form: Callable[[Any], None]) -> Mapping[str, Any]:
    """Return the JSON of a small request. form: `INDEX` or `CHANGE`. Raises RequestError ("request", "too-large")."""
    if len(body) > _MOST_SMALL:
        raise RequestError("too-large", f"{len(body):,} bytes of JSON are over the limit of {_MOST_SMALL:,}")
    request: Mapping[str, Any] = _parsed(body or b"{}", len(body) or 2, form)
    return request


def write(
    model: str, version: str, request: Request, results: Sequence[NDArray[Any]], interface: Interface
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the end of its JSON; None: it is only JSON.

    Raises RequestError ("not-json") for a NaN or an infinity in an output that the client wants as JSON, and for too
    many numbers.
    """
    outputs, after = [], []
    written = sum(results[number].size for number, binary in request.outputs if not binary)
    if written > _MOST_WRITTEN:
        what = f"the answer has {written:,} numbers, and as JSON {_MOST_WRITTEN:,} at most"
        raise RequestError("not-json", f"{what}: ask for bytes (binary_data_output)")
    for number, binary in request.outputs:
        tensor, array = interface.outputs[number], np.ascontiguousarray(results[number])
        table: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": results[number].shape}
        if binary:
            after.append(array.tobytes())
            table["parameters"] = {"binary_data_size": len(after[-1])}
        else:
            if array.dtype.kind not in "biu":
                array = array.astype(np.promote_types(np.float32, array.dtype), copy=False)
                if not np.isfinite(array).all():
                    why = "has a NaN or an infinity, and JSON has neither: ask for its bytes (binary_data)"
                    raise RequestError("not-json", f"{tensor.name} {why}")
            table["data"] = array.ravel()
        outputs.append(table)
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.request_id is not None:
        answer["id"] = request.request_id
    if request.step is not None and request.step.made:
        answer["parameters"] = {"sequence_id": request.step.sequence}
    header = orjson.dumps(answer | {"outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([header, *after]), len(header) if after else None
