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
    "[--grpc-port PORT]": value(
        "listen for gRPC on this port too; 0: any that is free (default: no gRPC)", None, at_least(0)
    ),
    "[--socket PATH]": value("listen at this Unix socket, instead of --host and --port", ""),
    "[--grpc-socket PATH]": value("listen for gRPC at this Unix socket, instead of --grpc-port", ""),
    "[--probe-port PORT]": value(
        "answer probes and give metrics on this port too, in a thread of its own, without TLS; 0: any that is free "
        "(default: on --port alone)",
        None,
        at_least(0),
    ),
    "[--tls-cert FILE]": value("TLS: the certificate and those that signed it, in PEM", ""),
    "[--tls-key FILE]": value("the certificate's key, in PEM", ""),
    "[--tls-clients FILE]": value(
        "TLS: clients need a certificate that one of these has signed, in PEM; not for --probe-port", ""
    ),
    "[--token-file FILE]": value("requests, but for probes, need a token that is a line of this file", ""),
    "[--key KEY]...": "a public key that is trusted, in PEM; may be repeated. With one, the bundle must be signed",
    "[--policy {executable_only,allow_compile}]": value(
        "allow_compile: compile at the start what has no executable for this machine (default: executable_only)",
        "executable_only",
    ),
    "[--target TARGET]": "which of the bundle's targets to run (default: the best for this machine)",
    **WEIGHTS,
    "[--adapter NAME=FILE]...": "also serve the functions with the weights of this safetensors file, as FUNCTION.NAME",
    "[--adapter-of FILE]": "the file whose place adapters take, as the manifest names it (default: the only one)",
    "[--gather DIM]": value(
        'the padded dimension along which requests are gathered; "" for none (default: batch)', "batch"
    ),
    "[--delay MS]": value(
        "how long a request waits for others (default: 2 ms, and not at all where none runs)", None, float
    ),
    "[--queue QUEUE]": value("requests of a model that may wait (default: 1000)", 1000, at_least(1)),
    "[--body MIB]": value("the largest body of a request (default: 64 MiB)", 64, at_least(1)),
    "[--memory MIB]": value("for all bodies at a time (default: 512 MiB)", 512, at_least(1)),
    "[--sequences SEQUENCES]": value(
        "sequences whose state is kept at a time, of each state of the manifest (default: 64)", 64, at_least(1)
    ),
    "[--idle S]": value(
        "seconds without a request after which a sequence ends, where the manifest does not say it (default: 60)",
        60,
        more_than_0,
    ),
    "[--own-ids]": "make the id of each sequence, which is a secret, and let clients choose none",
    "[--strict]": "refuse requests with parameters that the server does not know",
    "[--threads THREADS]": value(
        "calls that run at a time (default: as many as there are cores, or its cgroup may use)", 0, at_least(0)
    ),
    "[--workers WORKERS]": value(
        "processes, which share --connections, --memory, --queue and --threads, and keep no sequences if they are "
        "several (default: 1)",
        1,
        at_least(1),
    ),
    "[--connections CONNECTIONS]": value("at a time (default: 1000)", 1000, at_least(1)),
    "[--timeout S]": value("seconds for headers, body and answer of a request, each (default: 60)", 60, more_than_0),
    "[--keep-alive S]": value("seconds without a request after which a connection ends (default: 75)", 75, more_than_0),
    "[--drain S]": value("seconds after SIGTERM in which new requests are still answered (default: 5)", 5, at_least(0)),
    "[--watch]": "load the bundle again when its file is another one, without a pause",
    "[--json-logs]": "log a JSON object a line on stderr",
    "[--access-log]": "log a line for each request too",
    "[--control-port PORT]": value(
        "as --control, and on this port alone, which takes other requests too; 0: any that is free", None, at_least(0)
    ),
    "[--control]": "let clients load and unload models, and change weights",
}


def run(options: Options) -> None:
    import asyncio
    import re
    import sys
    from pathlib import Path

    from stagec.loader.load import load
    from stagec_serve import logs, server
    from stagec_serve.service import Limits, Repository
    from stagec_serve.swapping import Swapping, adapted
    from stagec_serve.trust import Certificates, Tokens, identity
    from stagec_serve.workers import Workers

    count = options.workers
    if bool(options.tls_cert) != bool(options.tls_key):
        raise mistake("--tls-cert and --tls-key go together", "give both, or neither")
    if options.tls_clients and not options.tls_cert:
        raise mistake("--tls-clients needs --tls-cert and --tls-key", "give all three")
    tls = Certificates(options.tls_cert, options.tls_key, options.tls_clients) if options.tls_cert else None
    tokens = Tokens(options.token_file) if options.token_file else None
    adapters = dict(word.partition("=")[::2] for word in options.adapter)
    for name, file in adapters.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not file:
            given = f"{name}={file}" if file else name
            what = f"--adapter {given}: expected a name of letters, digits, _ and -, and a file"
            raise mistake(what, "write for example --adapter french=french.safetensors")
    if count > 1 and options.grpc_socket:
        raise mistake("--grpc-socket is one that --workers cannot share", "give --grpc-port")
    keys = options.key or None
    listeners = server.listeners(count, options.host, options.port, options.socket)
    control = None if options.control_port is None else server.listen(options.host, options.control_port)
    probes = None if options.probe_port is None else server.listen(options.host, options.probe_port)

    def opened(tell: server.Tell) -> server.Loaded:
        tell(f"{options.bundle} is read")
        bundle = load(options.bundle, options.target, policy=options.policy, keys=keys, weights=options.weights)
        models, left_out = server.models_of(bundle, options.gather, options.policy, tell, count > 1)
        more = adapted(bundle, models, adapters, options.adapter_of, keys)
        folder = options.weights or Path(options.bundle).parent
        swapping = Swapping(bundle, folder, keys, more.bundles)

        def close() -> None:
            for each in (*more.bundles.values(), bundle):
                each.close()

        return server.Loaded({**models, **more.models}, left_out, swapping, close)

    host, port = (options.host, 0) if options.socket else listeners[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if options.tls_cert else "http"
    ports = [f"control on {scheme}://{shown}:{control.getsockname()[1]}"] if control else []
    ports += [f"probes on http://{shown}:{probes.getsockname()[1]}"] if probes else []
    address = f"{scheme}+unix://{options.socket}" if options.socket else f"{scheme}://{shown}:{port}"

    def ready(repository: Repository, grpc: str) -> None:
        models, left_out = {name: batcher.model for name, batcher in repository.batchers.items()}, repository.left_out
        value = {
            name: {
                "version": model.version,
                "gathered": model.rows,
                "trust": model.trust,
                "largest": model.largest,
                "alone": model.alone,
            }
            for name, model in models.items()
        }
        rpc = [f"listening on grpc://{grpc}"] if grpc else []
        told = (*_lines(models, left_out), *rpc, *ports, f"listening on {address}")
        text = "".join(f"{line}\n" for line in told)
        answer = {"kind": "serve", "address": address, "grpc": grpc, "models": value, "left_out": left_out}
        Answer(answer, text).tell(options.json)
        sys.stdout.flush()

    limits = Limits(options.body * 2**20, options.memory * 2**20 // count, options.timeout, options.strict)
    how_it_runs = server.Options(
        None if options.delay is None else options.delay / 1000,
        -(-options.queue // count),
        -(-(options.threads or server.cores()) // count),
        connections=-(-options.connections // count),
        drain=options.drain,
        keep_alive=options.keep_alive,
        tls=tls,
        tokens=tokens,
        control=options.control or control is not None,
        watch=options.bundle if options.watch else "",
        sequences=options.sequences,
        idle=options.idle,
        own_ids=options.own_ids,
        limits=limits,
    )
    port = options.grpc_port
    if count > 1 and port is not None:
        (reserved,) = server.shared(server.listen(options.host, port))  # it never listens: the workers do
        port = reserved.getsockname()[1]
    rpc = "" if port is None else f"{shown}:{port}"
    rpc = f"unix:{options.grpc_socket}" if options.grpc_socket else rpc

    def log() -> None:
        logs.log_to(sys.stderr, options.json_logs, options.access_log)

    if count == 1:
        log()
        asyncio.run(server.serve(opened, listeners[0], how_it_runs, ready, rpc, probes, control))
        return

    def work(number: int, group: socket.socket) -> None:
        log()
        for other in {*listeners, *([probes] if probes else [])} - {listeners[number]}:
            other.close()
        serving = server.serve(opened, listeners[number], how_it_runs, ready, rpc, None, control, group)
        asyncio.run(serving)

    async def run_all() -> None:
        first = identity(options.bundle)
        workers = Workers(count, work)
        probing = probes and asyncio.create_task(server.probe(workers, probes, how_it_runs))

        async def watch() -> None:
            if options.watch:
                await server.watch(options.bundle, first, workers.reload, workers.log)

        shared = [*listeners, *([control] if control else [])]
        await workers.run(shared, watch)
        if probing:
            probing.cancel()

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
