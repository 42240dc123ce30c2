"""Why a request is refused: typed errors, each with the status that a client gets."""

from __future__ import annotations

from stagec.core.messages.refusal import Refusal

_CODES = {
    "request": (400, "INVALID_ARGUMENT"),  # what the client sent is wrong
    "headers": (400, "INVALID_ARGUMENT"),  # of HTTP: they are too long
    "token": (401, "UNAUTHENTICATED"),  # it has none that is known
    "not-found": (404, "NOT_FOUND"),
    "method": (405, "UNIMPLEMENTED"),
    "not-json": (406, "INVALID_ARGUMENT"),  # JSON has no NaN, no infinity, and not millions of numbers
    "slow": (408, "DEADLINE_EXCEEDED"),  # the body took too long
    "conflict": (409, "ABORTED"),  # another request has the sequence
    "too-large": (413, "RESOURCE_EXHAUSTED"),
    "encoding": (415, "INVALID_ARGUMENT"),
    "busy": (429, "RESOURCE_EXHAUSTED"),  # the queue, the memory for bodies or the sequences are at their limit
    "failed": (500, "INTERNAL"),  # the function raised
    "unsupported": (501, "UNIMPLEMENTED"),
    "unavailable": (503, "UNAVAILABLE"),  # a model that cannot be served, or a server that loads or ends
    "crowded": (503, "UNAVAILABLE"),  # there are too many connections
    "timeout": (504, "DEADLINE_EXCEEDED"),
}
STATUS = {code: status for code, (status, _) in _CODES.items()}
"""The HTTP status of each code."""
GRPC_STATUS = {code: status for code, (_, status) in _CODES.items()}
"""The gRPC status of each code."""
DIGEST = "stagec-digest"
"""The header, metadata or parameter of an answer with the digest of the model that gave it."""


class RequestError(Refusal):
    """A request that the server does not answer. Its code is one of `STATUS`."""
