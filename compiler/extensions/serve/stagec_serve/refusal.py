"""Why a request is refused: typed errors, each with the status that a client gets."""

from __future__ import annotations

from stagec.core.messages.refusal import Refusal

STATUS = {
    "request": 400,
    "token": 401,
    "not-found": 404,
    "method": 405,
    "not-json": 406,
    "slow": 408,
    "conflict": 409,
    "too-large": 413,
    "encoding": 415,
    "busy": 429,
    "failed": 500,
    "unsupported": 501,
    "headers": 400,
    "unavailable": 503,
    "crowded": 503,
    "timeout": 504,
}
"""The HTTP status of each code."""

GRPC_STATUS = {
    "request": "INVALID_ARGUMENT",
    "token": "UNAUTHENTICATED",
    "not-found": "NOT_FOUND",
    "conflict": "ABORTED",
    "slow": "DEADLINE_EXCEEDED",
    "too-large": "RESOURCE_EXHAUSTED",
    "busy": "RESOURCE_EXHAUSTED",
    "failed": "INTERNAL",
    "unsupported": "UNIMPLEMENTED",
    "unavailable": "UNAVAILABLE",
    "timeout": "DEADLINE_EXCEEDED",
}
"""The gRPC status of each code that a request over gRPC can have."""


DIGEST = "stagec-digest"
"""The header, metadata or parameter of an answer with the digest of the model that gave it."""


class RequestError(Refusal):
    """A request that the server does not answer.

    Codes: "request" (what the client sent is wrong), "token" (it has none that is known), "not-found", "method",
    "not-json" (JSON has no NaN, no infinity, and not millions of numbers), "slow" (the body took too long), "conflict"
    (another request has the sequence), "too-large", "encoding", "headers" (of HTTP: too many, or two lengths),
    "crowded" (too many connections), "busy" (the queue, the memory for bodies or the number of sequences is at its
    limit), "failed" (the function raised), "unsupported", "unavailable" (a model that cannot be served, or a server
    that loads or ends), "timeout". `STATUS` has the HTTP status of each, `GRPC_STATUS` that of gRPC.
    """
