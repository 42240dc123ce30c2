"""A server without limits, checks, queues or metrics: uvicorn and NumPy. `python -m benchmarks.bare PORT [BUNDLE]`.

It takes what `stagec serve` takes, for the model `small` alone, and answers the same. With a bundle, it calls the
executable in that in place of NumPy.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import uvicorn

import stagec
from benchmarks import served_models

WEIGHTS = served_models.weights("small")


def computed(x: Any) -> Any:
    """Return f32[batch,5] of f32[batch,16]."""
    return np.tanh(x @ WEIGHTS["w1"] + WEIGHTS["b1"]) @ WEIGHTS["w2"]


def of_bundle(path: str) -> Callable[[Any], Any]:
    """Return what calls the bundle's executable for one row."""
    function = stagec.load(path)["small"]
    flat = function.flat(np.zeros((1, 16), np.float32))
    weights = [function.weights[path] for path in flat.paths if path in function.weights]
    return lambda x: np.asarray(flat(*weights, x)[0])


compute: Callable[[Any], Any] = of_bundle(sys.argv[2]) if len(sys.argv) > 2 else computed


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer one request."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    end = int(dict(scope["headers"]).get(b"inference-header-content-length", len(body)))
    (given,) = orjson.loads(body[:end])["inputs"]
    is_json = "data" in given
    x = np.array(given["data"], np.float32) if is_json else np.frombuffer(body, np.float32, offset=end)
    result = compute(x.reshape(given["shape"]))
    values: Any = {"data": result.ravel().tolist()} if is_json else {"parameters": {"binary_data_size": result.nbytes}}
    output = {"name": "result", "datatype": "FP32", "shape": result.shape, **values}
    head = orjson.dumps({"model_name": "small", "model_version": "1", "outputs": [output]})
    data = head if is_json else head + result.tobytes()
    kind = b"application/json" if is_json else b"application/octet-stream"
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(data))]
    headers += [] if is_json else [(b"inference-header-content-length", b"%d" % len(head))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), http="httptools", loop="asyncio", access_log=False, log_level="warning")
