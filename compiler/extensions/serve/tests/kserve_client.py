"""Asks a server with KServe's clients: kserve_client.py HTTP GRPC. Prints a line of JSON for each answer."""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig


async def main(http: str, rpc: str) -> None:
    rest, grpc = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60)), InferenceGRPCClient(rpc, timeout=60)
    base = f"http://{http}"
    states = [
        await rest.is_server_live(base),
        await rest.is_server_ready(base),
        await rest.is_model_ready(base, "predict"),
    ]
    states += [await grpc.is_server_live(), await grpc.is_server_ready(), await grpc.is_model_ready("predict")]
    print(json.dumps(states))
    x = np.ones((3, 16), np.float32)
    for binary in (False, True):
        tensor = InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary)
        request = InferRequest(model_name="predict", infer_inputs=[tensor])
        for answer in (await rest.infer(base, request, model_name="predict"), await grpc.infer(request)):
            print(json.dumps({output.name: output.as_numpy().tolist() for output in answer.outputs}))
    tensor = InferInput("x", [3], "FP32")
    tensor.set_data_from_numpy(np.ones(3, np.float32), binary_data=False)
    for step in range(2):
        for sequence in (5, 6):
            parameters = {"sequence_id": sequence, "sequence_start": step == 0, "sequence_end": step == 1}
            request = InferRequest(model_name="add", infer_inputs=[tensor], parameters=parameters)
            answer = await (rest.infer(base, request, model_name="add") if sequence == 5 else grpc.infer(request))
            print(json.dumps(answer.outputs[0].as_numpy().tolist()))


asyncio.run(main(*sys.argv[1:]))
