"""A server over gRPC, with Triton's client: what it answers, and what ends a call."""

import queue
import random
import signal
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import stagec
from compiler.extensions.serve.tests.processes import (
    INFER,
    REQUEST,
    Server,
    X,
    certificate,
    inputs,
    refused,
    serving,
    threads,
    until,
)
from compiler.extensions.serve.tests.test_server import changed, expected
from stagec.core.builds.version import VERSION
from stagec_grpc import messages, rpc
from stagec_serve import refusal


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[Server]:
    with serving(served, "--grpc-port", "0") as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc) as made:
        yield made


def test_tritonclient(client: Any, bundle: stagec.Bundle) -> None:
    wanted = [triton.InferRequestedOutput("result['logits']")]
    answer = client.infer("predict", inputs(), outputs=wanted, request_id="a 7")
    np.testing.assert_array_equal(answer.as_numpy("result['logits']"), expected(bundle, X, 8), strict=True)
    assert answer.as_numpy("result['label']") is None
    told = answer.get_response()
    assert (told.id, told.model_name, told.model_version) == ("a 7", "predict", "1.2.0")
    answer = client.infer("predict", inputs())
    np.testing.assert_array_equal(answer.as_numpy("result['label']"), bundle["predict"](X)["label"], strict=True)


def test_every_method_of_tritonclient(client: Any, server: Server) -> None:
    """Each is answered, or refused with a type: those of traces, logs and shared memory, which nobody has here."""
    answered: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("is_server_live", "is_server_ready", "get_server_metadata", "get_model_repository_index"), ()),
        **dict.fromkeys(("is_model_ready", "get_model_metadata", "get_model_config"), ("predict",)),
        "get_inference_statistics": (),
    }
    refused: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("load_model", "unload_model"), ("predict",)),  # there is no --control
        **dict.fromkeys(("get_trace_settings", "get_log_settings"), ()),
        **dict.fromkeys(("get_system_shared_memory_status", "get_cuda_shared_memory_status"), ()),
        **dict.fromkeys(("unregister_system_shared_memory", "unregister_cuda_shared_memory"), ("a",)),
        "update_trace_settings": ("predict", {"trace_rate": "1"}),
        "update_log_settings": ({"log_info": True},),
        "register_system_shared_memory": ("a", "/a", 1),
        "register_cuda_shared_memory": ("a", b"", 0, 1),
    }
    elsewhere = {"infer", "async_infer", "async_stream_infer", "start_stream", "stop_stream"}  # other tests have these
    here = {"close", "plugin", "register_plugin", "unregister_plugin", "generate_request_body", "parse_response_body"}
    with tritonclient.http.InferenceServerClient(server.address) as http:
        for each, given in ((client, inputs()), (http, [tritonclient.http.InferInput("x", [3, 16], "FP32")])):
            methods = {name for name in dir(each) if not name.startswith("_")}
            assert methods - elsewhere - here == answered.keys() | refused.keys()
            for name, words in answered.items():
                assert getattr(each, name)(*words), name
            for name, words in refused.items():
                with pytest.raises(triton.InferenceServerException) as error:
                    getattr(each, name)(*words)
                assert error.value.status() in ("StatusCode.UNIMPLEMENTED", "501", "404"), name
            given[0].set_data_from_numpy(X)
            pending = [each.async_infer("predict", given)] if each is http else []
            assert all(one.get_result().as_numpy("result['label']") is not None for one in pending)


def test_both_protocols_say_the_same(client: Any, server: Server) -> None:
    with tritonclient.http.InferenceServerClient(server.address) as http:
        assert client.is_server_live()
        assert client.is_server_ready()
        for model in (("predict",), ("predict", "1.2.0"), ("predict", "2"), ("turned",), ("none",)):
            assert client.is_model_ready(*model) == http.is_model_ready(*model) == (model[-1] in ("predict", "1.2.0"))
        assert client.get_server_metadata().version == http.get_server_metadata()["version"] == VERSION
        told = client.get_model_metadata("predict", as_json=True)
        assert told.pop("inputs") == [{"name": "x", "datatype": "FP32", "shape": ["-1", "16"]}]
        wanted = http.get_model_metadata("predict")
        assert told["outputs"][1] == {"name": "result['logits']", "datatype": "FP32", "shape": ["-1", "5"]}
        assert {key: told[key] for key in ("name", "versions", "platform")} == {
            key: wanted[key] for key in ("name", "versions", "platform")
        }
        rows = [(m.name, m.version, m.state, m.reason) for m in client.get_model_repository_index().models]
        index = http.get_model_repository_index()
        assert rows == [(row["name"], row.get("version", ""), row["state"], row["reason"]) for row in index]
        config = client.get_model_config("predict").config
        assert (config.max_batch_size, [*config.dynamic_batching.preferred_batch_size]) == (32, [1, 8, 32])
        assert config.dynamic_batching.max_queue_delay_microseconds == 2000
        assert http.get_model_config("predict")["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}]
        assert (config.input[0].name, config.input[0].data_type, [*config.input[0].dims]) == ("x", 11, [16])
        assert http.get_model_config("draw")["max_batch_size"] == 0


@pytest.mark.parametrize(
    ("ask", "code", "text"),
    [
        (lambda c: c.infer("none", inputs()), "NOT_FOUND", "there is no model none; the models are "),
        (lambda c: c.infer("predict", inputs(), model_version="2"), "NOT_FOUND", "predict has version 1.2.0 and no"),
        (lambda c: c.infer("turned", inputs()), "UNAVAILABLE", "z is c64[4], and the Open Inference Protocol"),
        (lambda c: c.infer("predict", inputs(name="y")), "INVALID_ARGUMENT", "'y' is not an input; the inputs are x"),
        (
            lambda c: c.infer("predict", inputs(), outputs=[triton.InferRequestedOutput("result['label']", 2)]),
            "UNIMPLEMENTED",
            "no parameter 'classification' is supported",
        ),
        (lambda c: c.infer("predict", inputs(), timeout=1), "DEADLINE_EXCEEDED", "predict took over 1e-06 seconds"),
        (
            lambda c: c.load_model("predict"),
            "UNIMPLEMENTED",
            "predict: this server does not load models for clients; start it with --control",
        ),
        (lambda c: c.get_model_config("none"), "NOT_FOUND", "there is no model none"),
        (lambda c: c.get_inference_statistics("none"), "NOT_FOUND", "there is no model none"),
        (lambda c: c.get_trace_settings(), "UNIMPLEMENTED", "Method not found!"),
    ],
)
def test_what_is_refused(client: Any, ask: Any, code: str, text: str) -> None:
    with pytest.raises(triton.InferenceServerException) as error:
        ask(client)
    assert error.value.status() == f"StatusCode.{code}"
    assert text in error.value.message()


def test_a_stream(client: Any, bundle: stagec.Bundle) -> None:
    """Answers in the order of requests, and an error is one of them."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number, name in enumerate(("x", "y", "x")):
        client.async_stream_infer(
            "predict", inputs(name=name), request_id=str(number), enable_empty_final_response=True
        )
    first, (none, error), last = (answers.get(timeout=60) for _ in range(3))
    for number, (result, nothing) in ((0, first), (2, last)):
        assert nothing is None
        told = result.get_response()
        assert told.id == str(number)
        assert told.parameters["triton_final_response"].bool_param
        assert told.parameters["stagec-digest"].string_param == bundle.digest
        np.testing.assert_array_equal(result.as_numpy("result['logits']"), expected(bundle, X, 8), strict=True)
    assert none is None
    assert "'y' is not an input; the inputs are x" in str(error)
    client.stop_stream()


def test_bytes_that_are_no_message_of_a_stream(server: Server) -> None:
    parsed = messages.classes()["ModelStreamInferResponse"].FromString
    answers = [parsed(body).error_message for body in raw_call(server, "ModelStreamInfer", iter([b"\xff\xff", b""]))]
    assert answers[0].startswith("the message is not a ModelInferRequest")
    assert answers[1].startswith("there is no model ;")


def test_the_end_does_not_wait_for_a_stream(served: Path) -> None:
    with serving(served, "--grpc-port", "0") as server, triton.InferenceServerClient(server.grpc) as client:
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("predict", inputs())
        assert answers.get(timeout=60)[1] is None
        server.end()
        client.stop_stream()


def test_statistics_of_both_protocols(served: Path) -> None:
    with (
        serving(served, "--grpc-port", "0", "--delay", "0") as server,
        triton.InferenceServerClient(server.grpc) as client,
        tritonclient.http.InferenceServerClient(server.address) as http,
    ):
        before = time.time() * 1000
        for _ in range(2):
            client.infer("predict", inputs())
        with pytest.raises(triton.InferenceServerException):
            client.infer("predict", inputs(name="y"))
        (row,) = http.get_inference_statistics("predict")["model_stats"]
        assert row == http.get_inference_statistics("predict", "1.2.0")["model_stats"][0]
        assert (row["inference_count"], row["execution_count"], row["version"]) == (6, 2, "1.2.0")
        assert before < row["last_inference"] < time.time() * 1000
        took = row["inference_stats"]
        counts = {kind: times["count"] for kind, times in took.items()}
        two = dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 2)
        assert counts == {**two, "fail": 1}
        parts = sum(took[kind]["ns"] for kind in two if kind != "success")
        assert 0 < parts < took["success"]["ns"] < 60 * 10**9
        assert row["batch_stats"] == [{"batch_size": 3, "compute_infer": took["compute_infer"]}]
        told = client.get_inference_statistics("predict", as_json=True)["model_stats"]
        assert told[0]["inference_stats"]["success"] == {key: str(value) for key, value in took["success"].items()}
        names = {row["name"] for row in http.get_inference_statistics()["model_stats"]}
        assert names == {row.name for row in client.get_inference_statistics().model_stats} > {"predict", "add"}


def test_probes_of_grpc(served: Path) -> None:
    """As Kubernetes and Envoy ask: once, or for all changes."""
    service = messages.service().full_name
    with serving(served, "--grpc-port", "0", "--drain", "2") as server, grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", service):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
        with pytest.raises(grpc.RpcError) as error:
            stub.Check(health_pb2.HealthCheckRequest(service="none"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60)
        assert next(watched).status == 1
        server.send(signal.SIGTERM)
        assert next(watched).status == 2
        assert stub.Check(health_pb2.HealthCheckRequest()).status == 2
        watched.cancel()


def test_what_grpcurl_asks(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {*database.get_services()} >= {messages.service().full_name, "grpc.health.v1.Health"}
        pool = DescriptorPool(database)
        described = pool.FindServiceByName(messages.service().full_name)
        assert {*described.methods_by_name} == {*messages.service().methods_by_name}
        assert pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]


def test_compressed_messages(client: Any, served: Path) -> None:
    for algorithm in ("gzip", "deflate"):
        answer = client.infer("predict", inputs(), compression_algorithm=algorithm)
        assert answer.as_numpy("result['logits']").shape == (3, 5)
    zeros = inputs(np.zeros((2**15, 16), np.float32))  # 2 MiB, which are 2 KiB
    with serving(served, "--grpc-port", "0", "--body", "1") as small:
        with triton.InferenceServerClient(small.grpc) as other, pytest.raises(triton.InferenceServerException) as error:
            other.infer("predict", zeros, compression_algorithm="gzip")
        assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def raw_call(server: Server, method: str, bodies: Any, timeout: float = 30) -> Any:
    """Call a method with bytes that need not be a message."""
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(f"/{messages.service().full_name}/{method}")
        return [*call(bodies, timeout=timeout)]


@pytest.mark.parametrize("method", sorted({*messages.service().methods_by_name} - {"ModelStreamInfer"}))
@pytest.mark.parametrize(("bodies", "text"), [([], "needs a message"), ([b"\xff\xff"], "the message is not a ")])
def test_bytes_that_are_no_message(server: Server, method: str, bodies: list[bytes], text: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        raw_call(server, method, iter(bodies))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text in error.value.details()


def test_an_answer_names_what_gave_it(server: Server, bundle: stagec.Bundle) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": X.shape}
    request = messages.classes()["ModelInferRequest"](
        model_name="predict", inputs=[tensor], raw_input_contents=[X.tobytes()]
    )
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(f"/{messages.service().full_name}/ModelInfer")
        _, call = ask.with_call(request.SerializeToString())
        assert dict(call.trailing_metadata())["stagec-digest"] == bundle.digest


def test_a_message_over_the_limit(served: Path) -> None:
    with serving(served, "--grpc-port", "0", "--body", "1") as server:
        with pytest.raises(grpc.RpcError) as error:
            raw_call(server, "ModelInfer", iter([bytes(2**20 + 1)]))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_queue_deadline_and_cancellation(served: Path) -> None:
    with (
        serving(served, "--grpc-port", "0", "--delay", "60000", "--queue", "1") as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        outcomes: list[Any] = []
        call = client.async_infer("predict", inputs(), lambda result, error: outcomes.append(error))
        server.waiting(1)
        with pytest.raises(triton.InferenceServerException) as error:
            client.infer("predict", inputs())
        assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert error.value.message() == "predict: 1 requests wait already; try again later"
        call.cancel()
        server.waiting(0)
        with pytest.raises(triton.InferenceServerException) as error:
            client.infer("predict", inputs(), client_timeout=0.2)
        assert error.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        server.waiting(0)
        until(lambda: server.counted('stagec_requests_total{.*"predict",status="499"') == 2)
        assert server.counted('stagec_requests_total{.*"predict",status="429"') == 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def opened(server: Server, method: str) -> socket.socket:
    """Return a connection on which a call was begun by hand."""
    path = f"/{messages.service().full_name}/{method}"
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    literal = b"".join(bytes([0, len(k), *k.encode(), len(v), *v.encode()]) for k, v in fields.items())
    host, _, port = server.grpc.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=15)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, literal))
    return connection


def frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, stream and payload of each frame, until the connection ends; PINGs and SETTINGS are answered."""
    reader = connection.makefile("rb")
    while head := reader.read(9):
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        payload = reader.read(int.from_bytes(head[:3], "big"))
        if kind in (4, 6) and not flags & 1:
            connection.sendall(frame(kind, 1, 0, payload if kind == 6 else b""))
        yield kind, stream, payload


def test_a_message_that_does_not_come(served: Path) -> None:
    """The call ends after the limit, with headers (1) that have its status."""
    live = bytes(5)  # a message of no bytes
    with serving(served, "--grpc-port", "0", "--timeout", "2") as server:
        for data in (b"", live[:3]):
            began = time.monotonic()
            with opened(server, "ServerLive") as connection:
                connection.sendall(frame(0, 0, 1, data))
                assert next(kind for kind, stream, _ in frames(connection) if stream == 1 and kind == 1)
            assert 1.5 < time.monotonic() - began < 20
        with opened(server, "ServerLive") as connection:
            connection.sendall(frame(0, 1, 1, live))
            told = next(payload for kind, stream, payload in frames(connection) if (kind, stream) == (0, 1))
            assert told == b"\0\0\0\0\2" + b"\x08\1"


def test_nothing_is_lost_when_the_server_ends(served: Path, bundle: stagec.Bundle) -> None:
    """Every call that was sent is answered, until the server says that it does not run it."""
    server = Server(served, "--grpc-port", "0")
    outcomes: Counter[str] = Counter()
    want = expected(bundle, X, 8).tobytes(), expected(bundle, X, 32).tobytes()

    def run() -> None:
        with triton.InferenceServerClient(server.grpc) as client:
            while True:
                try:
                    answer = client.infer("predict", inputs()).as_numpy("result['logits']").tobytes()
                except triton.InferenceServerException as error:
                    outcomes[str(error)] += 1
                    return
                outcomes["answered" if answer in want else "wrong"] += 1

    with threads(*[run] * 8):
        until(lambda: outcomes["answered"] > 32)
        server.end()
    assert server.status == 0
    refused = "[StatusCode.UNAVAILABLE] the server ends; this call did not run"
    assert outcomes.keys() == {"answered", refused}, outcomes


def test_no_message_ends_the_server(served: Path) -> None:
    """Requests that were changed at random: each has a typed status, and memory stays."""
    chance = random.Random(0)
    tensor = {"name": "x", "datatype": "FP32", "shape": X.shape}
    request = messages.classes()["ModelInferRequest"](
        model_name="predict", inputs=[tensor], raw_input_contents=[X.tobytes()]
    ).SerializeToString()
    codes: Counter[grpc.StatusCode] = Counter()
    with serving(served, "--grpc-port", "0") as server, grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(f"/{messages.service().full_name}/ModelInfer")
        for _ in range(2):
            before = server.memory()
            futures = [call.future(changed(request, chance), timeout=30) for _ in range(600)]
            codes.update(future.code() for future in futures)
        allowed = "OK INVALID_ARGUMENT NOT_FOUND UNAVAILABLE UNIMPLEMENTED RESOURCE_EXHAUSTED"
        assert {code.name for code in codes} <= {*allowed.split()}, codes
        assert codes[grpc.StatusCode.OK] > 20
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 200
        assert server.memory() - before < 2**25
        assert call(request, timeout=30)
        assert "Traceback" not in server.end(signal.SIGINT)


def test_tls_on_both_protocols(served: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with serving(served, "--grpc-port", "0", "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert f"listening on https://{server.address}\n" in server.told
        context = ssl.create_default_context(cafile=cert)
        with urllib.request.urlopen(f"https://{server.address}/v2/health/ready", context=context) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"https://{server.address}/v2/health/ready")
        with triton.InferenceServerClient(server.grpc, ssl=True, root_certificates=str(cert)) as client:
            assert client.infer("predict", inputs()).as_numpy("result['label']").shape == (3,)
        with (
            triton.InferenceServerClient(server.grpc) as client,
            pytest.raises(triton.InferenceServerException),
        ):
            client.is_server_live()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tls-cert", "key.pem"], "--tls-cert and --tls-key go together\n  give both, or neither\n"),
        (
            ["--tls-cert", "key.pem", "--tls-key", "key.pem"],
            "key.pem and key.pem: not a certificate and its key in PEM: ",
        ),
        (
            ["--tls-cert", "none.pem", "--tls-key", "key.pem"],
            "none.pem and key.pem: not a certificate and its key in PEM:",
        ),
    ],
)
def test_an_address_that_cannot_be(
    served: Path, tmp_path: Path, options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert text in refused(served, *options)


def test_an_address_that_is_taken(served: Path, server: Server) -> None:
    port = server.grpc.rpartition(":")[2]
    assert f":{port}: cannot listen there\n  give another --host or --grpc-port" in refused(served, "--grpc-port", port)


WITHOUT = "sys.modules.update(dict.fromkeys(['google', 'grpc', 'stagec_grpc']))"


def test_a_server_without_the_extension(served: Path) -> None:
    """It answers over HTTP, and says what gRPC needs."""
    program = f"import sys; {WITHOUT}; from stagec.cli import main; sys.exit(main())"
    with serving(served, program=program) as server:
        assert server.ask("POST", INFER, REQUEST)[0] == 200
    needs = "stagec serve --grpc-port needs the extension grpc, which is not installed"
    how = "in a clone of stagec, pip install ./compiler/extensions/grpc"
    for workers in "12":
        said = refused(served, "--grpc-port", "0", "--workers", workers, program=program)
        assert said.startswith(f"{needs}\n  {how}\n")


def test_each_error_has_a_status_of_grpc() -> None:
    assert set(rpc._STATUS) == set(refusal.STATUS.values())
    assert set(rpc._STATUS.values()) <= {status.name for status in grpc.StatusCode}
