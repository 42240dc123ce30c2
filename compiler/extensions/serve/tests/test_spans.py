"""Spans of requests and calls, as OpenTelemetry's SDK gets them from a server over both protocols.

Modules: `stagec_serve/rest.py`, `stagec_serve/rpc.py`, `stagec_serve/batching.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import tritonclient.grpc as triton

from compiler.extensions.serve.tests.processes import INFER, REQUEST, Server, serving
from compiler.extensions.serve.tests.test_rpc import inputs
from stagec_serve import spans

# The SDK's exporter in memory, in a server, which writes at its end what the exporter has.
PROGRAM = """
import json, sys
sys.modules["jax"] = None
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stagec.cli import main

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
status = main(sys.argv[1:])
for span in exporter.get_finished_spans():
    print(json.dumps({
        "name": span.name, "trace": f"{span.context.trace_id:032x}", "span": f"{span.context.span_id:016x}",
        "above": span.parent and f"{span.parent.span_id:016x}", "kind": span.kind.name,
        "attributes": dict(span.attributes), "links": [f"{link.context.span_id:016x}" for link in span.links],
        "status": span.status.status_code.name,
    }))
sys.exit(status)
"""
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_requests_and_calls_are_spans(served: Path) -> None:
    traced = Server(served, "--grpc-port", "0", program=PROGRAM)
    header = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
    assert traced.ask("POST", INFER, REQUEST, **header)[0] == 200
    assert traced.ask("POST", INFER, {"inputs": []}, **header)[0] == 400
    with triton.InferenceServerClient(traced.grpc) as client:
        client.infer("predict", inputs(), headers=header)
        client.infer("predict", inputs())
    traced.end()
    assert traced.status == 0
    spans = [json.loads(line) for line in traced.rest.splitlines()]
    infers = [span for span in spans if span["name"] == "infer predict"]
    calls = [span for span in spans if span["name"] == "call predict"]
    assert len(spans) == len(infers) + len(calls) == 7
    assert [span["above"] for span in infers] == [ABOVE, ABOVE, ABOVE, None]
    assert [span["trace"] == TRACE for span in infers] == [True, True, True, False]
    assert {span["kind"] for span in infers} == {"SERVER"}
    assert [span["status"] for span in infers] == ["UNSET", "ERROR", "UNSET", "UNSET"]
    answered = [infers[0], *infers[2:]]
    for call, infer in zip(calls, answered, strict=True):
        assert (call["trace"], call["above"], call["links"]) == (infer["trace"], infer["span"], [infer["span"]])
        assert call["attributes"] == {"stagec.bucket": "batch = 8", "stagec.rows": 3, "stagec.requests": 1}


def test_nothing_happens_without_the_package() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from stagec_serve import spans
with spans.request("predict", {"traceparent": "x"}), spans.call("predict", [spans.context()]) as attributes:
    attributes["rows"] = 3
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_nobody_asks_for_spans(served: Path) -> None:
    """With the API alone, and no SDK, spans are not valid and no call has one."""
    assert spans.context() is None
    with serving(served) as server:
        assert server.ask("POST", INFER, REQUEST)[0] == 200
