"""Serve a bundle over HTTP and gRPC with the Open Inference Protocol v2, until SIGTERM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options
from stagec.cli.options import WEIGHTS, at_least, more_than_0, value
from stagec.core.messages.errors import mistake

if TYPE_CHECKING:
    import socket

    from stagec_serve.model import Model

ENVIRONMENT = "STAGEC_SERVE_"
OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[--host HOST]": value("where to listen (default: this machine alone, 127.0.0.1)", "127.0.0.1"),
    "[--port PORT]": value("0: any that is free (default: 8000)", 8000, at_least(0)),
    "[--grpc-port PORT]": value("for gRPC too, with the extension grpc; 0: any that is free", None, at_least(0)),
    "[--probe-port PORT]": value("for probes and metrics too, in a thread of its own, without TLS", None, at_least(0)),
    "[--tls-cert FILE]": value("TLS: the certificate and those that signed it, in PEM", ""),
    "[--tls-key FILE]": value("the certificate's key, in PEM", ""),
    "[--tls-clients FILE]": value("clients, but for --probe-port, need a certificate that one of these has signed", ""),
    "[--token-file FILE]": value("requests, but for probes, need a token that is a line of this file", ""),
    "[--key KEY]...": "a public key that is trusted, in PEM; may be repeated. With one, the bundle must be signed",
    "[--policy {executable_only,allow_compile,measured_only,measured}]": value(
        "allow_compile: compile at the start what has no executable for this machine (default: executable_only); "
        "measured_only and measured: the same two, and run what an older jaxlib made where that was measured",
        "executable_only",
    ),
    "[--target TARGET]": "which of the bundle's targets to run (default: the best for this machine)",
    **WEIGHTS,
    "[--adapter NAME=FILE]...": "also serve the functions with the weights of this safetensors file, as FUNCTION.NAME",
    "[--adapter-of FILE]": "the file whose place adapters take, as the manifest names it (default: the only one)",
    "[--gather DIM]": value('the dimension to gather requests along; "" for none (default: batch)', "batch"),
    "[--delay MS]": value("for which a request waits for others (default: 2, and 0 where none runs)", None, float),
    "[--queue QUEUE]": value("requests of a model that may wait (default: 1000)", 1000, at_least(1)),
    "[--body MIB]": value("the largest body of a request (default: 64 MiB)", 64, at_least(1)),
    "[--memory MIB]": value("for all bodies at a time (default: 512 MiB)", 512, at_least(1)),
    "[--sequences SEQUENCES]": value("whose state is kept, of each state (default: 64)", 64, at_least(1)),
    "[--idle S]": value("after which a sequence ends, unless the manifest says it (default: 60)", 60, more_than_0),
    "[--own-ids]": "make the id of each sequence, which is a secret, and let clients choose none",
    "[--strict]": "refuse requests with parameters that the server does not know",
    "[--threads THREADS]": value("calls at a time (default: the cores that its cgroup may use)", 0, at_least(0)),
    "[--workers WORKERS]": value("processes, which keep no sequences if they are several (default: 1)", 1, at_least(1)),
    "[--connections CONNECTIONS]": value("at a time (default: 1000)", 1000, at_least(1)),
    "[--timeout S]": value("seconds for headers, body and answer of a request, each (default: 60)", 60, more_than_0),
    "[--keep-alive S]": value("seconds without a request after which a connection ends (default: 75)", 75, more_than_0),
    "[--drain S]": value("seconds after SIGTERM in which new requests are still answered (default: 5)", 5, at_least(0)),
    "[--watch]": "load the bundle again when its file is another one, without a pause",
    "[--json-logs]": "log a JSON object a line on stderr",
    "[--access-log]": "log a line for each request too",
    "[--control-port PORT]": value("as --control, and on this port alone; 0: any that is free", None, at_least(0)),
    "[--control]": "let clients load and unload models, and change weights",
}


def run(options: Options) -> None:
    import asyncio
    import copy
    import gc
    import re
    import sys
    from pathlib import Path

    from stagec.loader.load import load
    from stagec_serve import logs, server
    from stagec_serve.repository import Repository
    from stagec_serve.trust import identity
    from stagec_serve.workers import Workers

    if bool(options.tls_cert) != bool(options.tls_key):
        raise mistake("--tls-cert and --tls-key go together", "give both, or neither")
    if options.tls_clients and not options.tls_cert:
        raise mistake("--tls-clients needs --tls-cert and --tls-key", "give all three")
    adapters = dict(word.partition("=")[::2] for word in options.adapter)
    for name, file in adapters.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not file:
            given = f"{name}={file}" if file else name
            what = f"--adapter {given}: expected a name of letters, digits, _ and -, and a file"
            raise mistake(what, "write for example --adapter french=french.safetensors")
    count, keys = options.workers, options.key or None
    listeners = server.listeners(count, options.host, options.port)
    control, probes = (
        None if port is None else server.listen(options.host, port)
        for port in (options.control_port, options.probe_port)
    )
    shown = f"[{options.host}]" if ":" in options.host else options.host
    scheme = "https" if options.tls_cert else "http"
    address = f"{scheme}://{shown}:{listeners[0].getsockname()[1]}"
    others = [f"control on {scheme}://{shown}:{control.getsockname()[1]}"] if control else []
    others += [f"probes on http://{shown}:{probes.getsockname()[1]}"] if probes else []
    grpc = options.grpc_port
    if count > 1 and grpc is not None:
        (reserved,) = server.shared(server.listen(options.host, grpc))  # it never listens: the workers do
        grpc = reserved.getsockname()[1]
    rpc_address, own_probes = "" if grpc is None else f"{shown}:{grpc}", probes if count == 1 else None
    each = copy.copy(options)
    each.threads = options.threads or server.cores()
    for name in ("connections", "memory", "queue", "threads"):
        setattr(each, name, -(-getattr(each, name) // count))

    def opened(tell: server.Tell) -> tuple[Repository, Mapping[str, Model]]:
        tell(f"{options.bundle} is read")
        bundle = load(options.bundle, options.target, policy=options.policy, keys=keys, weights=options.weights)
        models, left_out = server.models_of(bundle, options.gather, options.policy, tell, count > 1)
        repository = Repository(bundle, left_out, options.weights or Path(options.bundle).parent, keys)
        return repository, {**models, **repository.adapted(models, adapters, options.adapter_of)}

    def ready(repository: Repository, grpc: str) -> None:
        models, left_out = {name: batcher.model for name, batcher in repository.batchers.items()}, repository.left_out
        lines = [*_lines(models, left_out)]
        lines += [f"listening on grpc://{grpc}"] if grpc else []
        told = {
            name: {"version": m.version, "gathered": m.rows, "trust": m.trust, "largest": m.largest, "alone": m.alone}
            for name, m in models.items()
        }
        answer = {"kind": "serve", "address": address, "grpc": grpc, "models": told, "left_out": left_out}
        Answer(answer, "".join(f"{line}\n" for line in (*lines, *others, f"listening on {address}"))).tell(options.json)
        sys.stdout.flush()

    def work(number: int, group: socket.socket | None = None) -> None:
        logs.log_to(sys.stderr, options.json_logs, options.access_log)
        for other in {*listeners, probes} - {listeners[number]} if group else ():
            if other is not None:
                other.close()
        listener = listeners[number]
        asyncio.run(server.serve(opened, listener, each, ready, rpc_address, own_probes, control, group))

    async def run_all() -> None:
        first, workers = identity(options.bundle), Workers(count, work)
        probing = probes and asyncio.create_task(server.probe(workers, probes, options))

        async def watch() -> None:
            if options.watch:
                await server.watch(options.bundle, first, workers.reload, workers.log)

        await workers.run([*listeners, *([control] if control else [])], watch)
        if probing:
            probing.cancel()

    gc.freeze()  # what is imported stays: no collection has to look at it again
    if count == 1:
        work(0)
    else:
        asyncio.run(run_all())


def _lines(models: Mapping[str, Model], left_out: Mapping[str, str]) -> Iterator[str]:
    for name, model in models.items():
        how = f"not gathered: {model.alone}"
        if model.rows:
            why = "as is proven" if model.trust == "proven" else "as the manifest declares"
            how = f"gathered along {model.rows} to {model.largest}: its rows are independent, {why}"
        yield f"{name} {model.version}: {how}"
    for name, why in left_out.items():
        yield f"{name}: left out: {why}"
