"""The Open Inference Protocol v2 over gRPC, and the parts of Triton's that its clients ask for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stagec.core.messages.errors import mistake
from stagec_grpc import messages
from stagec_serve import logs
from stagec_serve.encoding import Request
from stagec_serve.model import Arrays, Model
from stagec_serve.refusal import DIGEST, STATUS, RequestError
from stagec_serve.service import Service, maybe_in_thread
from stagec_serve.trust import Certificates

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    406: "INVALID_ARGUMENT",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "RESOURCE_EXHAUSTED",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""gRPC's status for HTTP's."""
_OPEN = ("ServerLive", "ServerReady")
"""Methods that need no token: probes."""
_QUIET = 0.2
"""A server that is ending stops after this many seconds without a call."""
_MOST_REFUSED = 5
"""The most seconds in which it refuses calls."""
_MOST_TEXT = 2000
"""Characters of an error: it is a header, and clients refuse long ones."""


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """Says whether requests can be answered: when it is asked, and to those who watch a moment after a change."""

    def __init__(self, service: Service, name: str) -> None:
        super().__init__()
        self._service, self._name = service, name

    async def keep(self) -> None:
        while True:
            await self._tell()
            await asyncio.sleep(_QUIET)

    async def _tell(self) -> None:
        kinds = health_pb2.HealthCheckResponse
        for name in ("", self._name):
            await self.set(name, kinds.SERVING if self._service.ready else kinds.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # as the protocol calls it
        await self._tell()
        return await super().Check(request, context)


class RpcServer:
    """A server that offers the models of a service. Make it in the thread of its event loop."""

    def __init__(self, service: Service, shared: bool = False) -> None:
        """shared: whether other processes listen at its port too."""
        milliseconds = max(1, int(service.options.timeout * 1000))
        self._service = service
        self._ending, self._calls, self._last = False, 0, 0.0
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", service.body),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", 2**14),
                ("grpc.so_reuseport", int(shared)),
                ("grpc.server_handshake_timeout_ms", milliseconds),
                ("grpc.max_connection_idle_ms", milliseconds),
                ("grpc.keepalive_time_ms", milliseconds),
                ("grpc.keepalive_timeout_ms", milliseconds),
            ],
            maximum_concurrent_rpcs=service.options.connections,
        )
        # Each call has one message each way. As a stream, we can limit the time of the first message.
        protocol = messages.service()
        handlers = {
            method: grpc.stream_stream_rpc_method_handler(functools.partial(self._called, method))
            for method in protocol.methods_by_name
        }
        # Probes of Kubernetes and Envoy ask the one service, and grpcurl the other one.
        self._health = _Health(service, protocol.full_name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        pool = protocol.file.pool
        pool.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
        reflection.enable_server_reflection((protocol.full_name, health.SERVICE_NAME), self._server, pool)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.full_name, handlers),))

    async def start(self, address: str, tls: Certificates | None = None) -> str:
        """Listen at `HOST:PORT`; return it with the port that it is. Raises StagecError.

        tls: None: there is none.
        """
        try:
            if tls:
                port = self._server.add_secure_port(address, _credentials(tls))
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise mistake(f"{address}: cannot listen there", "give another --host or --grpc-port") from None
        self._telling = asyncio.create_task(self._health.keep())
        await self._server.start()
        return f"{address.rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        """Answer the calls that came, and refuse others as UNAVAILABLE, which says that they did not run.

        grpc cancels calls that come when it stops, and their clients do not know whether they ran. So it stops when no
        call has come for a moment, or after a while.
        """
        self._ending = True
        loop = asyncio.get_running_loop()
        began = self._last = loop.time()
        while self._calls or loop.time() - self._last < _QUIET:
            if not self._calls and loop.time() - began > _MOST_REFUSED:
                break
            await asyncio.sleep(_QUIET / 10)
        self._telling.cancel()
        await self._server.stop(0)

    async def _called(self, method: str, _: object, context: Any) -> None:
        """Answer the one request of a call, or those of a stream, one after another.

        In a stream, an error is an answer too, and the stream goes on. The server's end waits for a request, and not
        for the next one. grpc's iterator of messages is in a cycle with the last one that it gave, which so lives until
        a garbage collection; `read` keeps nothing.
        """
        headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        in_stream = method == "ModelStreamInfer"
        body = await context.read() if in_stream else None
        while body is not grpc.aio.EOF:
            self._last = asyncio.get_running_loop().time()
            if self._ending:
                _refuse(context, "unavailable", "the server ends; this call did not run")
                return
            self._calls += 1
            try:
                with logs.request(method, context.peer(), headers), contextlib.ExitStack() as held:
                    logs.note(status="CANCELLED")
                    try:
                        if method not in _OPEN:
                            self._service.admit(headers)
                        body = await self._body(method, context) if body is None else body
                        self._service.hold(len(body), held)
                        response = await self._response(method, body, context, held)
                    except RequestError as error:
                        if not in_stream:
                            _refuse(context, error.code, str(error))
                            return
                        response = messages.make("ModelStreamInferResponse", error_message=str(error)[:_MOST_TEXT])
                        status = _STATUS[STATUS[error.code]]
                    else:
                        status = "OK"
                    del body
                    await context.write(response)
                    logs.note(status=status)
            finally:
                self._calls -= 1
            body = await context.read() if in_stream else grpc.aio.EOF

    async def _body(self, method: str, context: Any) -> bytes:
        seconds = self._service.options.timeout
        try:
            async with asyncio.timeout(seconds):
                body: bytes = await context.read()
        except TimeoutError:
            raise RequestError("slow", f"the message took over {seconds:g} seconds") from None
        if body is grpc.aio.EOF:
            raise RequestError("request", f"{method} needs a message")
        return body

    async def _response(self, method: str, body: bytes, context: Any, held: contextlib.ExitStack) -> bytes:
        service = self._service
        if method.endswith("Infer"):
            return await self._infer(body, context, held, method == "ModelStreamInfer")
        request = messages.parse(f"{method}Request", body)
        if method.startswith("RepositoryModel"):
            # KServe's message has the name in the first field, Triton's that of a repository.
            name, change = request.model_name or request.repository_name, method.removeprefix("RepositoryModel").lower()
            await service.change(name, change, messages.plain(request.parameters))
            return b""
        name, version, ready = (getattr(request, field, None) for field in ("name", "version", "ready"))
        try:
            fields = await service.told(method, name or "", version or None, bool(ready))
        except RequestError:
            if method != "ModelReady":
                raise
            fields = {"ready": False}
        if method == "ModelReady":
            fields.pop("name", None)
        return messages.make(f"{method}Response", **fields)

    async def _infer(self, body: bytes, context: Any, held: contextlib.ExitStack, in_stream: bool) -> bytes:
        service = self._service
        message = await maybe_in_thread(len(body), held, lambda: messages.parse("ModelInferRequest", body))
        name = message.model_name

        def write(model: Model, request: Request, results: Arrays) -> bytes:
            if not in_stream:
                context.set_trailing_metadata(((DIGEST, model.digest),))
            return messages.write(model, request, results, in_stream)

        with service.counted(name, message.model_version or None) as repository:
            read = functools.partial(messages.read, message, service.options.strict)
            return await service.answer(name, repository, len(body), held, read, write)


def _refuse(context: Any, code: str, text: str) -> None:
    """End a call with an error. `abort` of grpc raises, and its exception is in a cycle with all frames below it."""
    status = _STATUS[STATUS[code]]
    logs.note(status=status)
    context.set_code(getattr(grpc.StatusCode, status))
    context.set_details(text[:_MOST_TEXT])


def _credentials(tls: Certificates) -> Any:
    """Return a server's credentials, which change with the files of its certificate."""
    known = tls.pair

    def configuration() -> Any:
        certificate, key = tls.pair
        return grpc.ssl_server_certificate_configuration([(key, certificate)], tls.roots)

    def changed() -> Any:
        nonlocal known
        if known is tls.pair:
            return None
        known = tls.pair
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), changed, tls.roots is not None)
