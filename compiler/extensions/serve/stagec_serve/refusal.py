"""Why a request is refused: typed errors, each with the status that a client gets."""

from __future__ import annotations

from stagec.core.messages.refusal import Refusal

STATUS = {
    "request": 400,  # what the client sent is wrong
    "headers": 400,  # of HTTP: they are too long
    "token": 401,  # it has none that is known
    "not-found": 404,
    "method": 405,
    "not-json": 406,  # JSON has no NaN, no infinity, and not millions of numbers
    "slow": 408,  # the body took too long
    "conflict": 409,  # another request has the sequence
    "too-large": 413,
    "encoding": 415,
    "busy": 429,  # the queue, the memory for bodies or the sequences are at their limit
    "failed": 500,  # the function raised
    "unsupported": 501,
    "unavailable": 503,  # a model that cannot be served, or a server that loads or ends
    "crowded": 503,  # there are too many connections
    "timeout": 504,
}
"""The HTTP status of each code."""
DIGEST = "stagec-digest"
"""The header, metadata or parameter of an answer with the digest of the model that gave it."""


class RequestError(Refusal):
    """A request that the server does not answer. Its code is one of `STATUS`."""
