"""Who may talk to a server: certificates of clients, tokens, a port for control, and files that change meanwhile."""

import json
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http

from compiler.extensions.serve.tests.processes import (
    INFER,
    REQUEST,
    Server,
    certificate,
    inputs,
    refused,
    serving,
    until,
)
from stagec_grpc import messages

TOKENS = "f00dfeedf00dfeedf00d", "cafecafecafecafecafe"


def tls(folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    return certificate(folder)


def status(server: Server, context: ssl.SSLContext, path: str = "/v2/health/ready") -> int:
    with urllib.request.urlopen(f"https://{server.address}{path}", context=context) as answer:
        return int(answer.status)


def test_clients_need_a_certificate(served: Path, tmp_path: Path) -> None:
    (cert, key), (mine, my_key), (other, other_key) = (tls(tmp_path / name) for name in ("server", "client", "other"))
    options = ("--grpc-port", "0", "--tls-cert", str(cert), "--tls-key", str(key), "--tls-clients", str(mine))
    with serving(served, *options, "--probe-port", "0") as server:
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            status(server, context)
        context.load_cert_chain(mine, my_key)
        assert status(server, context) == 200
        wrong = ssl.create_default_context(cafile=cert)
        wrong.load_cert_chain(other, other_key)
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            status(server, wrong)
        known = {"root_certificates": str(cert), "private_key": str(my_key), "certificate_chain": str(mine)}
        with triton.InferenceServerClient(server.grpc, ssl=True, **known) as client:
            assert client.infer("predict", inputs()).as_numpy("result['label']").shape == (3,)
        with (
            triton.InferenceServerClient(server.grpc, ssl=True, root_certificates=str(cert)) as client,
            pytest.raises(triton.InferenceServerException),
        ):
            client.is_server_live()


def test_a_new_certificate_is_used(served: Path, tmp_path: Path) -> None:
    """Both protocols use it for new connections, and go on with the old one where the new file has no certificate."""
    old, new = tls(tmp_path / "old"), tls(tmp_path / "new")
    used = [shutil.copy(file, tmp_path / file.name) for file in old]
    with serving(served, "--grpc-port", "0", "--tls-cert", str(used[0]), "--tls-key", str(used[1])) as server:
        known = [ssl.create_default_context(cafile=pair[0]) for pair in (old, new)]

        def trusted() -> list[bool]:
            trusted = []
            for context, pair in zip(known, (old, new), strict=True):
                try:
                    trusted.append(status(server, context) == 200)
                except urllib.error.URLError:
                    trusted.append(False)
                credentials = grpc.ssl_channel_credentials(pair[0].read_bytes())
                # Channels of one process with the same arguments share a connection.
                unshared = [("grpc.use_local_subchannel_pool", 1)]
                with grpc.secure_channel(server.grpc, credentials, unshared) as channel:
                    call = channel.unary_unary(f"/{messages.service().full_name}/ServerLive")
                    try:
                        trusted.append(bool(call(b"", timeout=10)))
                    except grpc.RpcError:
                        trusted.append(False)
            return trusted

        assert trusted() == [True, True, False, False]
        (tmp_path / "part").write_text("no certificate")
        (tmp_path / "part").replace(used[0])
        wait_for(server, "ERROR stagec_serve: the certificate stays as it is: ")
        assert trusted() == [True, True, False, False]
        for source, file in zip(new, used, strict=True):
            shutil.copy(source, tmp_path / "part")
            (tmp_path / "part").replace(file)
        wait_for(server, "INFO stagec_serve: the certificate is that of a new file")
        assert trusted() == [False, False, True, True]


def wait_for(server: Server, text: str) -> None:
    """Wait until this is in a line of the log."""
    while text not in (line := server._errors.readline()):
        assert line


def test_requests_need_a_token(served: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("".join(f"{token}\n" for token in TOKENS))
    with (
        serving(served, "--grpc-port", "0", "--token-file", str(file), "--probe-port", "0") as server,
        triton.InferenceServerClient(server.grpc) as client,
        tritonclient.http.InferenceServerClient(server.address) as http,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert server.ask("GET", path)[0] == 200
        text = "the request has no token that the server knows: Authorization: Bearer TOKEN"
        for given in ({}, {"authorization": "Bearer x"}, {"authorization": TOKENS[0]}, {"authorization": "Bearer é"}):
            for method, path in (("POST", INFER), ("GET", "/metrics"), ("GET", "/v2"), ("GET", "/v2/models/predict")):
                assert server.ask(method, path, REQUEST, **given) == (401, {"error": text})
        with pytest.raises(triton.InferenceServerException) as error:
            client.infer("predict", inputs(), headers={"authorization": "Bearer none"})
        assert error.value.status() == "StatusCode.UNAUTHENTICATED"
        streamed: list[Any] = []
        client.start_stream(lambda result, error: streamed.append(error))
        client.async_stream_infer("predict", inputs())
        until(lambda: streamed)
        assert text in str(streamed[0])
        client.stop_stream()
        x = tritonclient.http.InferInput("x", [3, 16], "FP32")
        x.set_data_from_numpy(np.zeros((3, 16), np.float32))

        def answers(token: str) -> bool:
            headers = {"authorization": f"Bearer {token}"}
            asked = (
                (lambda: client.infer("predict", inputs(), headers=headers)),
                (lambda: http.infer("predict", [x], headers=headers)),
            )
            results = []
            for ask in asked:
                try:
                    results.append(ask().as_numpy("result['label']").shape == (3,))
                except triton.InferenceServerException:
                    results.append(False)
            assert len({*results}) == 1
            return results[0]

        assert all(map(answers, TOKENS))
        file.write_text("short")  # it is no token, and the others stay
        assert answers(TOKENS[0])
        (tmp_path / "new").write_text("0123456789abcdef0123\n")
        (tmp_path / "new").replace(file)
        assert answers("0123456789abcdef0123")
        assert not answers(TOKENS[0])


def test_files_that_are_none_are_named(served: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("secret")
    cert, key = tls(tmp_path / "server")
    both = ("--tls-cert", str(cert), "--tls-key", str(key))
    for options, text in (
        (("--token-file", str(short)), f"{short}: expected tokens of 16 characters or more, one a line\n  write for"),
        (("--token-file", "none"), "none: cannot be read: No such file or directory"),
        (("--tls-clients", str(cert)), "--tls-clients needs --tls-cert and --tls-key\n  give all three"),
        ((*both, "--tls-clients", str(short)), f"{short}: not certificates in PEM: "),
    ):
        assert text in refused(served, *options)


def test_control_has_a_port_of_its_own(served: Path) -> None:
    with (
        serving(served, "--control-port", "0", "--grpc-port", "0") as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        (address,) = (line.split("http://")[1] for line in server.told.splitlines() if line.startswith("control on"))
        text = "predict: this port does not unload models; --control-port does"
        assert server.ask("POST", "/v2/repository/models/predict/unload") == (501, {"error": text})
        with pytest.raises(triton.InferenceServerException, match=text):
            client.unload_model("predict")
        for change, status in (("unload", 503), ("load", 200)):
            url = f"http://{address}/v2/repository/models/predict/{change}"
            with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST")) as answer:
                assert json.loads(answer.read()) == {}
            assert server.ask("POST", INFER, REQUEST)[0] == status
