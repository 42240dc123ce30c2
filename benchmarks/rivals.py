"""A server as a person writes it: FastAPI, and one call for each request. rivals.py jax|onnx MODEL PORT."""

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from benchmarks import served_models

kind, model, port = sys.argv[1:]


def jitted():
    """Return a function that JAX compiles."""
    import jax

    params = jax.device_put(served_models.weights(model))
    if model == "decode":
        step = jax.jit(served_models.decode, donate_argnums=1)

        def decode(x, sequence):
            caches.setdefault(sequence, served_models.empty_cache())
            logits, caches[sequence] = step(params, caches[sequence], x)
            return np.asarray(logits)

        return decode
    compiled = jax.jit(getattr(served_models, model))
    return lambda x, sequence: np.asarray(compiled(params, x))


def session():
    """Return a function that onnxruntime runs."""
    import onnxruntime

    made = onnxruntime.InferenceSession(served_models.onnx_model(model), providers=["CPUExecutionProvider"])
    return lambda x, sequence: made.run(None, {"x": x})[0]


caches = {}
call = {"jax": jitted, "onnx": session}[kind]()
app = FastAPI()


@app.post("/predict")
async def predict(request: Request, sequence: str = ""):
    """Return the bytes of the result for the bytes of an array."""
    x = np.frombuffer(await request.body(), dtype).reshape(-1, *served_models.SHAPES[model])
    return Response((await run_in_threadpool(call, x, sequence)).tobytes(), media_type="application/octet-stream")


dtype = served_models.DTYPES[model]
call(np.zeros((1, *served_models.SHAPES[model]), dtype), "")
uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
