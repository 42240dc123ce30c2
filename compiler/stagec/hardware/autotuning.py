"""Results of autotuning: XLA's fastest variant of each kernel on a GPU.

XLA keeps them as xla.AutotuneResults (xla/autotune_results.proto, xla/autotuning.proto), here in protobuf's text format
(https://protobuf.dev/reference/protobuf/textformat-spec/). It looks one up by its kernel and its device,
and passes over all that it does not find or know; some values end the process. So a file is read here before XLA does.
Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from stagec.core.messages.errors import Problem, StagecError, nearest
from stagec.hardware.gpu_devices import Device, NvidiaDevice

VERSION = 3
"""Version of the whole file, as this XLA reads it (xla/service/gpu/autotuning/autotuner_util.cc)."""
REFRESH = "time them again on such a device: with stagec autotune, or for AMD xla_gpu_dump_autotune_results_to"
"""The advice for a wrong file."""
_KINDS = ("gemm", "triton", "algorithm", "other")
"""The possible choices of a result; XLA ignores older kinds, and failures."""
_MEASURED = ("run_time", "scratch_bytes")
_WARPS = ("num_warps", "num_ctas")
_TRITON = ("block_m", "block_n", "block_k", "num_stages", *_WARPS)
_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*)+ | (?P<string>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*') | (?P<name>[A-Za-z_]\w*)
    | (?P<number>-?[.\d][\w.+-]*) | (?P<type>\[[\w.-]+/[\w.]+\]) | (?P<mark>[{}<>:;,])""",
    re.VERBOSE,
)
_DEVICE = re.compile(r"(.*), DNN version: (\d+)\.(\d+)\.(\d+)")

_OTHER_FORM = (0, 11, 1)
"""From this jaxlib on, XLA has a second form of the file, `entries { key { target { ...`, by digests of kernels."""

Message: TypeAlias = "tuple[tuple[str, str | Message], ...]"
"""Fields in their order: name, and a message or a value as it is written (strings without quotes)."""


@dataclass(frozen=True)
class Result:
    """XLA's choice for one kernel.

    device: properties of the device, and the version of cuDNN. hlo: the kernel, escaped as in the file.
    version: XLA's version number for making kernels; None is the version of the XLA that reads it.
    chosen: one field of xla.AutotuneResult.
    """

    device: str
    hlo: str
    version: int | None
    chosen: Message


def form(jaxlib: tuple[int, ...]) -> dict[str, bool]:
    """Return the option with which XLA of a jaxlib reads and writes results as `read` does: by the text of kernels."""
    return {"xla_gpu_use_new_autotune_cache_format": False} if jaxlib >= _OTHER_FORM else {}


def read(text: str, file: str = "") -> list[Result]:
    """Read a file of results; an empty one has none.

    file: its name in messages. Raises StagecError with everything that XLA would not read, would pass over without a
    word, or that would end its process.
    """
    try:
        message, _ = _fields(_tokens(text), 0, "the end", 0)
    except _SyntaxError as error:
        raise StagecError(Problem(file, "", str(error), REFRESH)) from None
    results: list[Result] = []
    problems: list[Problem] = []

    def fault(key: str, what: str, write: str = REFRESH) -> None:
        problems.append(Problem(file, key, what, write))

    versions = [value for name, value in message if name == "version"]
    if message and versions != [str(VERSION)]:
        fault("version", f"results of version {', '.join(map(str, versions)) or 0}; this XLA reads {VERSION}")
    for name in dict.fromkeys(name for name, _ in message if name not in ("version", "results")):
        fault(name, "unknown field", nearest(name, ("version", "results")))
    for index, entry in enumerate(value for name, value in message if name == "results"):
        key = f"results[{index}]"
        result = _result(entry) if isinstance(entry, tuple) else "not a message"
        if isinstance(result, str):
            fault(key, result)
        elif (result.device, result.hlo, result.version) in [
            (other.device, other.hlo, other.version) for other in results
        ]:
            fault(key, "a second result for the same kernel")
        else:
            results.append(result)
    if problems:
        raise StagecError(*problems)
    return results


def check(results: Iterable[Result], device: Device, file: str = "") -> None:
    """Raise StagecError unless all results are of `device`, timed with one version of cuDNN: XLA finds no others."""
    wanted = _properties(device)
    problems = [
        Problem(file, f"results[{index}].device", f"timed on {result.device}, and {device.name} is {wanted}", REFRESH)
        for index, result in enumerate(results)
        if _timed_on(result)[0] != wanted
    ]
    versions = sorted({_timed_on(result)[1] for result in results})
    if len(versions) > 1:
        listed = " and ".join(".".join(map(str, version)) for version in versions)
        problems.append(Problem(file, "results", f"timed with cuDNN {listed}: XLA finds those of one", REFRESH))
    if problems:
        raise StagecError(*problems)


def cudnn(results: Iterable[Result]) -> tuple[int, int, int] | None:
    """Return the version of cuDNN that ran the timed kernels; None without results."""
    return next((_timed_on(result)[1] for result in results), None)


def merge(files: Iterable[Iterable[Result]], device: Device) -> list[Result]:
    """Return the results of several files as one, of `device`: sorted, and each kernel once.

    Drivers report a clock or a bandwidth that differs a little from the data sheet's, and XLA finds a result by them.
    So the properties of `device` replace those of the device that kernels were timed on.
    """
    properties = _properties(device)
    merged: dict[tuple[str, str, int], Result] = {}
    for result in (result for file in files for result in file):
        version = ".".join(map(str, _timed_on(result)[1]))
        renamed = replace(result, device=f"{properties}, DNN version: {version}")
        merged.setdefault((renamed.device, renamed.hlo, renamed.version or 0), renamed)
    return [merged[key] for key in sorted(merged)]


def write(results: Iterable[Result], comment: str) -> str:
    """Return a file of results, for `read` and for XLA. comment: its first line."""
    lines = [f"# {comment}", f"version: {VERSION}"]
    for result in results:
        lines += ["results {", f'  device: "{result.device}"', f'  hlo: "{result.hlo}"', "  result {"]
        lines += [f"    {line}" for line in _lines(result.chosen)]
        lines += ["  }", *([f"  version: {result.version}"] if result.version is not None else []), "}"]
    return "\n".join(lines) + "\n"


def _lines(message: Message) -> Iterator[str]:
    for name, value in message:
        if isinstance(value, tuple):
            yield f"{name} {{"
            yield from (f"  {line}" for line in _lines(value))
            yield "}"
        else:
            yield f"{name}: {value}"


def _properties(device: Device) -> str:
    """The properties of a device in XLA's words (xla/service/gpu/autotuning/autotune_cache_key.cc), without cuDNN's."""
    nvidia = isinstance(device, NvidiaDevice)
    capability = device.compute_capability.rstrip("af") if nvidia else device.compute_capability.partition(":")[0]
    bandwidth = (device.memory_bandwidth + 500_000_000) // 1_000_000_000
    return (
        f"{'CUDA' if nvidia else 'ROCM'}: {capability}, Cores: {device.core_count}, "
        f"GPU clock: {device.clock_rate_ghz:.6g} GHz, Memory bandwidth: {bandwidth:.6g} GB/s, "
        f"L2 cache: {device.l2_cache_size / (1 << 20):.6g} MB"
    )


def _timed_on(result: Result) -> tuple[str, tuple[int, int, int]]:
    match = _DEVICE.fullmatch(result.device)
    assert match is not None  # `read` looked
    return match[1], (int(match[2]), int(match[3]), int(match[4]))


def _result(entry: Message) -> Result | str:
    """The result of an entry, or its fault."""
    fields = dict(entry)
    unknown = [name for name in fields if name not in ("device", "hlo", "result", "version")]
    if unknown or len(fields) != len(entry):
        return f"unknown field {unknown[0]}" if unknown else "a field stands twice"
    device, hlo, result = (fields.get(name) for name in ("device", "hlo", "result"))
    version = fields.get("version")
    if not isinstance(device, str) or not _DEVICE.fullmatch(device[1:-1]):
        return "device does not say properties and a version of cuDNN, as XLA writes them"
    if not isinstance(hlo, str) or not isinstance(result, tuple):
        return "it has no hlo and result"
    if version is not None and not (isinstance(version, str) and version.isdecimal()):
        return "version is not a number"
    chosen = tuple((name, value) for name, value in result if name not in _MEASURED)
    names = [name for name, _ in chosen]
    if len(names) != 1 or names[0] not in _KINDS:
        return f"it chooses {', '.join(names) or 'nothing'}; XLA takes one of {', '.join(_KINDS)}"
    wrong = next(_wrong_numbers(chosen), "")
    return wrong or Result(device[1:-1], hlo[1:-1], int(version) if version is not None else None, chosen)


def _wrong_numbers(message: Message, name: str = "") -> Iterator[str]:
    """Numbers that end XLA's process, and sizes of tiles that are missing."""
    fields = dict(message)
    for field in _TRITON if name == "triton" else ():
        if field not in fields:
            yield f"triton has no {field}"
    for field, value in message:
        if isinstance(value, tuple):
            yield from _wrong_numbers(value, field)
        elif field in _WARPS or (name == "triton" and field in _TRITON):
            number = int(value) if value.isdecimal() else 0
            if number < 1 or (field != "num_stages" and number & (number - 1)):
                yield f"{field} is {value}, which is not {'positive' if field == 'num_stages' else 'a power of two'}"


class _SyntaxError(Exception):
    pass


def _tokens(text: str) -> list[tuple[str, str, int]]:
    """Kind, text and line of each token, then one of kind "end"."""
    tokens, at, line = [], 0, 1
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise _SyntaxError(f"line {line}: not protobuf's text format: {text[at : at + 20].splitlines()[0]}")
        if token.lastgroup:
            tokens.append((token.lastgroup, token[0], line))
        line += token[0].count("\n")
        at = token.end()
    return [*tokens, ("end", "the end", line)]


_CLOSING: Mapping[str, str] = {"{": "}", "<": ">"}
_DEEPEST = 20
"""How deep messages may lie in each other; XLA's have a depth of five."""


def _fields(tokens: list[tuple[str, str, int]], at: int, end: str, depth: int) -> tuple[Message, int]:
    """The fields from token `at` to `end`, and the position after it."""
    fields: list[tuple[str, str | Message]] = []
    while tokens[at][1] != end:
        kind, name, _ = tokens[at]
        if kind not in ("name", "type"):
            raise _unexpected(tokens[at])
        at += 1
        colon = tokens[at][1] == ":"
        at += colon
        kind, value, _ = tokens[at]
        if value in _CLOSING and kind == "mark" and depth < _DEEPEST:
            inner, at = _fields(tokens, at + 1, _CLOSING[value], depth + 1)
            fields.append((name, inner))
        elif colon and kind in ("string", "number", "name"):
            at += 1
            while kind == "string" and tokens[at][0] == "string":  # parts of one string
                value = value[:-1] + tokens[at][1][1:]
                at += 1
            fields.append((name, value))
        else:
            raise _unexpected(tokens[at])
        if tokens[at][0] == "mark" and tokens[at][1] in ",;":
            at += 1
    return tuple(fields), at + 1


def _unexpected(token: tuple[str, str, int]) -> _SyntaxError:
    return _SyntaxError(f"line {token[2]}: not protobuf's text format: {token[1]} is not expected here")
