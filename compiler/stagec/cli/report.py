"""Write a page about a bundle, or about two side by side: memory, operations, exchanges, limits, provenance."""

from __future__ import annotations

import argparse

from stagec.cli.files import digest, print_json, write_whole
from stagec.cli.options import add_inventory


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("other", nargs="?", help="another bundle, to compare it with")
    parser.add_argument("--output", "-o", required=True, metavar="FILE.html", help="where to write the page")
    add_inventory(parser)
    parser.add_argument(
        "--times", action="append", default=[], metavar="FILE", help="profiles of a build, as stagec profile takes them"
    )
    parser.add_argument("--statement", metavar="FILE", help="the bundle's provenance, .intoto.json")
    parser.add_argument("--signature", metavar="FILE", help="the envelope (default: BUNDLE.dsse.json)")
    parser.add_argument("--key", action="append", default=[], help="a public key that is trusted; may be repeated")


def preload() -> None:
    import stagec.reports.overview
    import stagec.reports.webpage  # noqa: F401


def run(options: argparse.Namespace) -> None:
    from stagec.reports import overview, webpage
    from stagec.reports.overview import Sources

    beside = Sources(profiles=options.times, keys=options.key)
    first = Sources(options.inventory, options.times, options.statement, options.signature, options.key)
    collected = [overview.collect(options.bundle, first)]
    if options.other:
        collected.append(overview.collect(options.other, beside))
    page = webpage.as_html(collected).encode()
    write_whole(options.output, page)
    if options.json:
        print_json({"kind": "report", "output": options.output, **digest(page)})
