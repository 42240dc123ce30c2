"""The Open Inference Protocol v2 over gRPC, and the parts of Triton's that its clients ask for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stagec.core.messages.errors import mistake
from stagec_serve import access, messages, spans
from stagec_serve.encoding import Request
from stagec_serve.model import Arrays, Model
from stagec_serve.refusal import DIGEST, GRPC_STATUS, RequestError
from stagec_serve.service import Service, maybe_in_thread
from stagec_serve.trust import Certificates

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

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        await self._tell()
        await super().Watch(request, context)


class RpcServer:
    """A server that offers the models of a service. Make it in the thread of its event loop."""

    def __init__(self, service: Service, connections: int, shared: bool = False) -> None:
        """connections: calls at a time. shared: whether other processes listen at its port too."""
        limits = service.limits
        milliseconds = max(1, int(limits.seconds * 1000))
        self._service = service
        self._ending = False
        self._calls, self._last = 0, 0.0
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.body),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", 2**14),
                ("grpc.so_reuseport", int(shared)),
                ("grpc.server_handshake_timeout_ms", milliseconds),
                ("grpc.max_connection_idle_ms", milliseconds),
                ("grpc.keepalive_time_ms", milliseconds),
                ("grpc.keepalive_timeout_ms", milliseconds),
            ],
            maximum_concurrent_rpcs=connections,
        )
        # Each call has one message each way. As a stream, we can limit the time of the first message.
        protocol = messages.service()
        handlers = {
            method: grpc.stream_stream_rpc_method_handler(functools.partial(self._counted, method))
            for method in protocol.methods_by_name
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        # Probes of Kubernetes and Envoy ask the one service, and grpcurl the other one.
        self._health = _Health(service, protocol.full_name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        pool = protocol.file.pool
        pool.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
        reflection.enable_server_reflection((protocol.full_name, health.SERVICE_NAME), self._server, pool)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.full_name, handlers),))

    async def start(self, address: str, tls: Certificates | None = None) -> str:
        """Listen at `HOST:PORT`, or `unix:PATH`; return it with the port that it is. Raises StagecError.

        tls: None: there is none.
        """
        try:
            if tls:
                port = self._server.add_secure_port(address, tls.of_grpc())
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise mistake(f"{address}: cannot listen there", "give another --host or --grpc-port") from None
        self._telling = asyncio.create_task(self._health.keep())
        await self._server.start()
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

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

    async def _counted(self, method: str, _: object, context: Any) -> None:
        self._last = asyncio.get_running_loop().time()
        if self._ending:
            _refuse(context, "unavailable", "the server ends; this call did not run")
            return
        self._calls += 1
        headers = _headers(context)
        try:
            with access.request(method, context.peer(), headers), contextlib.ExitStack() as held:
                access.note(status="CANCELLED")
                try:
                    if method not in _OPEN:
                        self._service.admit(headers)
                    response = await self._answer(method, context, headers, held)
                except RequestError as error:
                    _refuse(context, error.code, str(error))
                    return
                await context.write(response)
                access.note(status="OK")
        finally:
            self._calls -= 1

    async def _answer(self, method: str, context: Any, headers: Mapping[str, str], held: contextlib.ExitStack) -> bytes:
        """Return the response of one call.

        grpc's iterator of messages is in a cycle with the last one that it gave, which so lives until a garbage
        collection; `read` keeps nothing.
        """
        seconds = self._service.limits.seconds
        try:
            async with asyncio.timeout(seconds):
                body = await context.read()
        except TimeoutError:
            raise RequestError("slow", f"the message took over {seconds:g} seconds") from None
        if body is grpc.aio.EOF:
            raise RequestError("request", f"{method} needs a message")
        self._service.hold(len(body), held)
        return await self._response(method, body, context, headers, held)

    async def _response(
        self, method: str, body: bytes, context: Any, headers: Mapping[str, str], held: contextlib.ExitStack
    ) -> bytes:
        if method == "ModelInfer":
            return await self._infer(body, context, headers, held)
        request = messages.parse(f"{method}Request", body)
        if method.startswith("RepositoryModel"):
            # KServe's message has the name in the first field, Triton's that of a repository.
            name = request.model_name or request.repository_name
            parameters = messages.plain(request.parameters)
            await self._service.change(name, method.removeprefix("RepositoryModel").lower(), parameters)
            return b""
        return messages.make(f"{method}Response", **await self._told(method, request))

    async def _told(self, method: str, request: Any) -> dict[str, Any]:
        """Return the fields of a response."""
        service = self._service
        match method:
            case "ServerLive":
                return {"live": True}
            case "ServerReady":
                return {"ready": service.ready}
            case "ServerMetadata":
                return service.metadata(["model_repository"])
            case "RepositoryIndex":
                return {"models": service.index(request.ready)}
            case "ModelStatistics":
                return await service.statistics(request.name, request.version or None)
        try:
            batcher = service.batcher(request.name, request.version or None)
        except RequestError:
            if method == "ModelReady":
                return {"ready": False}
            raise
        if method == "ModelReady":
            return {"ready": True}
        return {"config": self._service.config(batcher)} if method == "ModelConfig" else batcher.model.metadata()

    async def _infer(
        self, body: bytes, context: Any, headers: Mapping[str, str], held: contextlib.ExitStack, in_stream: bool = False
    ) -> bytes:
        message = await maybe_in_thread(len(body), held, lambda: messages.parse("ModelInferRequest", body))
        name, version = message.model_name, message.model_version or None

        def write(model: Model, request: Request, results: Arrays) -> bytes:
            if not in_stream:
                context.set_trailing_metadata(((DIGEST, model.digest),))
            return messages.write(model, request, results, in_stream)

        with spans.request(name, headers), self._service.counted(name, version) as chosen:
            read = functools.partial(messages.read, message, self._service.limits.strict)
            return await self._service.answer(chosen, len(body), held, read, write)

    async def _stream(self, _: object, context: Any) -> None:
        """Answer the requests of a stream, one after another. An error is an answer too, and the stream goes on.

        The server's end waits for a request, and not for the next one.
        """
        headers = _headers(context)
        while (body := await context.read()) is not grpc.aio.EOF:
            self._last = asyncio.get_running_loop().time()
            if self._ending:
                _refuse(context, "unavailable", "the server ends; this request did not run")
                return
            self._calls += 1
            try:
                with access.request("ModelStreamInfer", context.peer(), headers), contextlib.ExitStack() as held:
                    try:
                        self._service.admit(headers)
                        self._service.hold(len(body), held)
                        response = await self._infer(body, context, headers, held, in_stream=True)
                        access.note(status="OK")
                    except RequestError as error:
                        access.note(status=GRPC_STATUS[error.code])
                        response = messages.make("ModelStreamInferResponse", error_message=str(error)[:_MOST_TEXT])
                    del body
                    await context.write(response)
            finally:
                self._calls -= 1


def _headers(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}


def _refuse(context: Any, code: str, text: str) -> None:
    """End a call with an error. `abort` of grpc raises, and its exception is in a cycle with all frames below it."""
    access.note(status=GRPC_STATUS[code])
    context.set_code(getattr(grpc.StatusCode, GRPC_STATUS[code]))
    context.set_details(text[:_MOST_TEXT])
