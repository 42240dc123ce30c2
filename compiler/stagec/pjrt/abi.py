"""XLA's own answer to whether the runtime on this machine fits an executable: PJRT's extension for ABI versions.

XLA does not ask itself: the plugin of 0.10.2, on CUDA 13.0, loads an executable that says it needs 13.9 without a word.
jaxlib's Python has no name for the extension, so this calls the plugin's C interface
(xla/pjrt/c/pjrt_c_api_abi_version_extension.h). That takes a client of its own, in a child process.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

from stagec.core.data import child, wire

_EXTENSION = 20  # PJRT_Extension_Type_AbiVersion
_CLIENT_VERSION, _FITS, _PLATFORM, _FROM_BYTES = 0, 4, 6, 11
"""The places of its functions, behind its size, its type and its successor."""
_MESSAGE, _INITIALIZE, _CREATE_CLIENT = 1, 3, 10
"""The places of functions in PJRT_Api, behind its size, its extensions and three words for its version."""
_HEADER, _API_HEADER = 24, 40
_BOOL = 4  # PJRT_NamedValue_kBool
_ADDRESSES = 1 << 46
"""What a child may map: CUDA takes addresses for all memory of the machine and of its devices."""


def refusal(plugin: str, version: bytes) -> str:
    """Return why an executable must not run on the runtime here; "" if XLA says that it fits.

    A child process makes a client for the devices of this machine, once for each version that XLA answers for.
    plugin: the path of XLA's library. version: the executable's, as `gpu_executables.abi_version` returns it.
    """
    if not version:
        return "it does not say which runtime it needs"
    try:
        why = _answered(plugin, version)
    except ValueError as error:
        return f"XLA cannot be asked whether its runtime here is new enough: {error}"
    return f"XLA refuses it: {why}" if why else ""


@functools.cache  # of answers alone: a device that was busy may answer the next time
def _answered(plugin: str, version: bytes) -> str:
    return str(child.call(answer, version, plugin, memory=_ADDRESSES))


def answer(version: bytes, plugin: str) -> str:
    """Return what XLA says against an executable of a version, in this process; "" for nothing.

    Raises ValueError where XLA fails.
    """
    library = ctypes.CDLL(plugin)
    library.GetPjrtApi.restype = ctypes.c_void_p
    start = library.GetPjrtApi()
    extension = next((at for at in _extensions(start) if ctypes.c_int.from_address(at + 8).value == _EXTENSION), 0)
    if not extension or _word(extension) < _HEADER + 8 * (_FROM_BYTES + 1):
        return "the plugin does not tell its runtime's version"
    api = functools.partial(_call, start + _API_HEADER, start)
    versions = functools.partial(_call, extension + _HEADER, start)
    # Memory is taken as it is needed: the process that loads the bundle has that of the devices already.
    name = b"preallocate"
    option = (ctypes.c_uint64 * 7)(56, 0, _address(name), len(name), _BOOL, 0, 1)
    try:
        api(_INITIALIZE, 0)
        client = api(_CREATE_CLIENT, 0, ctypes.addressof(option), 1, *[0] * 7)[8]
        runtime = versions(_CLIENT_VERSION, client, 0)[2]
        platform = versions(_PLATFORM, runtime, 0)[2]
        # An xla.PjRtExecutableAbiVersionProto.
        message = b"\x08" + wire.write_varint(platform) + wire.Record(2, 2, version).encode()
        executable = versions(_FROM_BYTES, _address(message), len(message), 0)[3]
    except _Failed as error:
        raise ValueError(str(error)) from error
    try:
        versions(_FITS, runtime, executable)
    except _Failed as error:
        return str(error)
    return ""


class _Failed(Exception):
    """XLA's message."""


def _call(functions: int, api: int, number: int, *words: int) -> list[int]:
    """Call a function of a table with a struct: its own size, and these words. Return the struct.

    functions, api: the addresses of the table and of PJRT_Api. Raises _Failed. What XLA makes lives as long as the
    process.
    """
    struct = (ctypes.c_uint64 * (1 + len(words)))(8 * (1 + len(words)), *words)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_word(functions + 8 * number))
    if error := function(ctypes.addressof(struct)):
        told = (ctypes.c_uint64 * 5)(40, 0, error)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_word(api + _API_HEADER + 8 * _MESSAGE))(ctypes.addressof(told))
        raise _Failed(ctypes.string_at(told[3], told[4]).decode("utf-8", "replace"))
    return [*struct]


def _extensions(api: int) -> Iterator[int]:
    at = _word(api + 8)
    while at:
        yield at
        at = _word(at + 16)


def _word(at: int) -> int:
    return ctypes.c_uint64.from_address(at).value


def _address(data: bytes) -> int:
    """Return where the bytes are; the caller keeps them."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
