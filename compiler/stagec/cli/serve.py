"""Serve a bundle over HTTP and gRPC with the Open Inference Protocol v2, until SIGTERM."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stagec.cli.files import Answer
from stagec.cli.options import add_weights, at_least, more_than_0
from stagec.core.telling.errors import Problem, StagecError

if TYPE_CHECKING:
    from stagec.serving.model import Model


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine alone, 127.0.0.1)")
    parser.add_argument("--port", type=at_least(0), default=8000, help="0: any that is free (default: 8000)")
    parser.add_argument(
        "--grpc-port",
        type=at_least(0),
        metavar="PORT",
        help="listen for gRPC on this port too; 0: any that is free (default: no gRPC)",
    )
    parser.add_argument(
        "--socket", metavar="PATH", default="", help="listen at this Unix socket, instead of --host and --port"
    )
    parser.add_argument(
        "--grpc-socket", metavar="PATH", default="", help="listen for gRPC at this Unix socket, instead of --grpc-port"
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", default="", help="TLS: the certificate and those that signed it, in PEM"
    )
    parser.add_argument("--tls-key", metavar="FILE", default="", help="the certificate's key, in PEM")
    parser.add_argument(
        "--key",
        action="append",
        help="a public key that is trusted, in PEM; may be repeated. With one, the bundle must be signed",
    )
    parser.add_argument(
        "--policy",
        choices=("executable_only", "allow_compile"),
        default="executable_only",
        help="allow_compile: compile at the start what has no executable for this machine (default: executable_only)",
    )
    parser.add_argument("--target", help="which of the bundle's targets to run (default: the best for this machine)")
    add_weights(parser)
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="also serve the functions with the weights of this safetensors file, as FUNCTION.NAME; may be repeated",
    )
    parser.add_argument(
        "--adapter-of",
        metavar="FILE",
        help="the file whose place adapters take, as the manifest names it (default: the only one)",
    )
    parser.add_argument(
        "--gather",
        metavar="DIM",
        default="batch",
        help='the padded dimension along which requests are gathered; "" for none (default: batch)',
    )
    parser.add_argument(
        "--delay",
        type=float,
        metavar="MS",
        help="how long a request waits for others (default: 2 ms, and not at all where none runs)",
    )
    parser.add_argument(
        "--queue", type=at_least(1), default=1000, help="requests of a model that may wait (default: 1000)"
    )
    parser.add_argument(
        "--body", type=at_least(1), default=64, metavar="MIB", help="the largest body of a request (default: 64 MiB)"
    )
    parser.add_argument(
        "--memory", type=at_least(1), default=512, metavar="MIB", help="for all bodies at a time (default: 512 MiB)"
    )
    parser.add_argument(
        "--sequences",
        type=at_least(1),
        default=64,
        help="sequences whose state is kept at a time, of each state of the manifest (default: 64)",
    )
    parser.add_argument(
        "--idle",
        type=more_than_0,
        default=60,
        metavar="S",
        help="seconds without a request after which a sequence ends, where the manifest does not say it (default: 60)",
    )
    parser.add_argument(
        "--threads", type=at_least(0), default=0, help="calls that run at a time (default: as many as there are cores)"
    )
    parser.add_argument("--connections", type=at_least(1), default=1000, help="at a time (default: 1000)")
    parser.add_argument(
        "--timeout",
        type=more_than_0,
        default=60,
        metavar="S",
        help="seconds for headers, body and answer of a request, each (default: 60)",
    )
    parser.add_argument(
        "--drain",
        type=at_least(0),
        default=5,
        metavar="S",
        help="seconds after SIGTERM in which new requests are still answered (default: 5)",
    )
    parser.add_argument(
        "--watch", action="store_true", help="load the bundle again when its file is another one, without a pause"
    )
    parser.add_argument("--json-logs", action="store_true", help="log a JSON object a line on stderr")
    parser.add_argument("--control", action="store_true", help="let clients load and unload models, and change weights")


def run(options: argparse.Namespace) -> None:
    import asyncio
    import re
    import sys
    from pathlib import Path

    from stagec.loader.serving import load
    from stagec.serving import server
    from stagec.serving.service import Limits
    from stagec.serving.swapping import Swapping, adapted

    server.log_to(sys.stderr, options.json_logs)
    if bool(options.tls_cert) != bool(options.tls_key):
        raise StagecError(Problem("", "", "--tls-cert and --tls-key go together", "give both, or neither"))
    adapters = dict(word.partition("=")[::2] for word in options.adapter)
    for name, file in adapters.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not file:
            given = f"{name}={file}" if file else name
            what = f"--adapter {given}: expected a name of letters, digits, _ and -, and a file"
            raise StagecError(Problem("", "", what, "write for example --adapter french=french.safetensors"))
    listener = server.listen(options.host, options.port, options.socket)

    def opened() -> server.Loaded:
        bundle = load(options.bundle, options.target, policy=options.policy, keys=options.key, weights=options.weights)
        models, left_out = server.models_of(bundle, options.gather, options.policy)
        more = adapted(bundle, models, adapters, options.adapter_of, options.key)
        folder = options.weights or Path(options.bundle).parent
        swapping = Swapping(bundle, folder, options.key, more.bundles)

        def close() -> None:
            for each in (*more.bundles.values(), bundle):
                each.close()

        return server.Loaded({**models, **more.models}, left_out, swapping, close)

    host, port = (options.host, 0) if options.socket else listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if options.tls_cert else "http"
    address = f"{scheme}+unix://{options.socket}" if options.socket else f"{scheme}://{shown}:{port}"

    def ready(loaded: server.Loaded, grpc: str) -> None:
        models, left_out = loaded.models, loaded.left_out
        value = {
            name: {"version": model.version, "gathered": model.rows, "largest": model.largest, "alone": model.alone}
            for name, model in models.items()
        }
        rpc = [f"listening on grpc://{grpc}"] if grpc else []
        text = "".join(f"{line}\n" for line in (*_lines(models, left_out), *rpc, f"listening on {address}"))
        told = {"kind": "serve", "address": address, "grpc": grpc, "models": value, "left_out": left_out}
        Answer(told, text).tell(options.json)
        sys.stdout.flush()

    limits = Limits(options.body * 2**20, options.memory * 2**20, options.timeout)
    how_it_runs = server.Options(
        None if options.delay is None else options.delay / 1000,
        options.queue,
        options.threads,
        connections=options.connections,
        drain=options.drain,
        tls=(options.tls_cert, options.tls_key) if options.tls_cert else (),
        control=options.control,
        watch=options.bundle if options.watch else "",
        sequences=options.sequences,
        idle=options.idle,
        limits=limits,
    )
    rpc = "" if options.grpc_port is None else f"{shown}:{options.grpc_port}"
    rpc = f"unix:{options.grpc_socket}" if options.grpc_socket else rpc
    asyncio.run(server.serve(opened, listener, how_it_runs, ready, rpc))


def _lines(models: Mapping[str, Model], left_out: Mapping[str, str]) -> Iterator[str]:
    for name, model in models.items():
        how = f"gathered along {model.rows} to {model.largest}" if model.rows else f"not gathered: {model.alone}"
        yield f"{name} {model.version}: {how}"
    for name, why in left_out.items():
        yield f"{name}: left out: {why}"
