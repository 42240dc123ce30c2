"""Serve a bundle over HTTP with the Open Inference Protocol v2, until SIGTERM."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stagec.cli.files import Answer
from stagec.cli.options import add_weights, at_least, more_than_0

if TYPE_CHECKING:
    from stagec.serving.model import Model


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine alone, 127.0.0.1)")
    parser.add_argument("--port", type=at_least(0), default=8000, help="0: any that is free (default: 8000)")
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
        "--gather",
        metavar="DIM",
        default="batch",
        help='the padded dimension along which requests are gathered; "" for none (default: batch)',
    )
    parser.add_argument(
        "--delay", type=float, default=2, metavar="MS", help="how long a request waits for others (default: 2 ms)"
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


def run(options: argparse.Namespace) -> None:
    import asyncio
    import logging
    import sys

    from stagec.loader.serving import load
    from stagec.serving import server
    from stagec.serving.rest import Limits

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = server.listen(options.host, options.port)
    bundle = load(options.bundle, options.target, policy=options.policy, keys=options.key, weights=options.weights)
    models, left_out = server.models_of(bundle, options.gather, options.policy)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def ready() -> None:
        value = {
            name: {"version": model.version, "gathered": model.rows, "largest": model.largest, "alone": model.alone}
            for name, model in models.items()
        }
        text = "".join(f"{line}\n" for line in (*_lines(models, left_out), f"listening on {address}"))
        Answer({"kind": "serve", "address": address, "models": value, "left_out": left_out}, text).tell(options.json)
        sys.stdout.flush()

    limits = Limits(options.body * 2**20, options.memory * 2**20, options.timeout)
    how_it_runs = server.Options(
        options.delay / 1000,
        options.queue,
        options.threads,
        connections=options.connections,
        drain=options.drain,
        limits=limits,
    )
    asyncio.run(server.serve(models, left_out, listener, how_it_runs, ready))


def _lines(models: Mapping[str, Model], left_out: Mapping[str, str]) -> Iterator[str]:
    for name, model in models.items():
        how = f"gathered along {model.rows} to {model.largest}" if model.rows else f"not gathered: {model.alone}"
        yield f"{name} {model.version}: {how}"
    for name, why in left_out.items():
        yield f"{name}: left out: {why}"
