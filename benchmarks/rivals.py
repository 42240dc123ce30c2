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
    compiled = jax.jit(getattr(served_models, model))
    return lambda x: np.asarray(compiled(params, x))


def session():
    """Return a function that onnxruntime runs."""
    import onnxruntime

    made = onnxruntime.InferenceSession(served_models.onnx_model(model), providers=["CPUExecutionProvider"])
    return lambda x: made.run(None, {"x": x})[0]


call = {"jax": jitted, "onnx": session}[kind]()
app = FastAPI()


@app.post("/predict")
async def predict(request: Request):
    """Return the bytes of the result for the bytes of an array."""
    x = np.frombuffer(await request.body(), np.float32).reshape(-1, *served_models.SHAPES[model])
    return Response((await run_in_threadpool(call, x)).tobytes(), media_type="application/octet-stream")


call(np.zeros((1, *served_models.SHAPES[model]), np.float32))
uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
