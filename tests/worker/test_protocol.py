"""Messages between Bazel and a worker."""

import os
import threading

import pytest

from stagec.worker.protocol import Request, Requests, Response
from tests.worker.bazel import encode


def received(*chunks: bytes) -> list[Request]:
    """What a worker takes from chunks that come one after another, until there are no more."""
    reader, writer = os.pipe()

    def write() -> None:
        for chunk in chunks:
            os.write(writer, chunk)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    requests, found = Requests(reader), []
    try:
        while request := requests.next():
            found.append(request)
    finally:
        thread.join()
        os.close(reader)
    return found


FIRST = encode(["--output", "ü" * 200], ["models/f.py", "bazel-out/x"], verbosity=10)
SECOND = encode([], request_id=300, cancel=1)
WANTED = [
    Request(("--output", "ü" * 200), ("models/f.py", "bazel-out/x")),
    Request(request_id=300, cancel=True),
]


def test_requests() -> None:
    assert received(FIRST + SECOND) == WANTED


def test_requests_in_pieces() -> None:
    whole = FIRST + SECOND
    assert received(*(whole[at : at + 1] for at in range(len(whole)))) == WANTED


def test_a_request_that_is_not_whole_is_none() -> None:
    assert received(FIRST + SECOND[:-1]) == WANTED[:1]


@pytest.mark.parametrize("data", [b"\xff" * 11, b"\x02\x0a\x09", b"\x02\x0f\x00"], ids=["length", "field", "wire type"])
def test_something_else(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"varint|truncated|wire type"):
        received(data)


def test_a_response_is_as_the_schema_says() -> None:
    # Fields 1, 3 and 4 are numbers (tags 8, 24, 32), field 2 is text (tag 18).
    assert Response(3, "no\n", 300).encode() == bytes([12, 8, 3, 24, 172, 2, 32, 0, 18, 3]) + b"no\n"
    assert Response(0, was_cancelled=True).encode() == bytes([8, 8, 0, 24, 0, 32, 1, 18, 0])


def test_work_is_cancelled() -> None:
    reader, writer = os.pipe()
    requests = Requests(reader)
    assert not requests.cancelled(more=False)
    os.write(writer, encode([], cancel=1))
    assert requests.cancelled(more=True)
    os.write(writer, FIRST + SECOND)  # at once, as to a worker that is still starting
    assert requests.next() == WANTED[0]
    assert requests.cancelled(more=False)
    os.write(writer, FIRST[:5])
    assert not requests.cancelled(more=True)
    os.write(writer, FIRST[5:])
    with pytest.raises(ValueError, match="a second request before the first was answered"):
        requests.cancelled(more=True)
    os.close(writer)
    assert requests.cancelled(more=True)  # Bazel is gone
    os.close(reader)
