"""Write a page about a bundle, or about two side by side: memory, operations, exchanges, limits, provenance."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer, digest, write_whole
from stagec.cli.options import add_inventory, add_lists


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("other", nargs="?", help="another bundle, to compare it with")
    parser.add_argument("--output", "-o", required=True, metavar="FILE.html", help="where to write the page")
    add_inventory(parser)
    keys = "a public key that is trusted"
    add_lists(parser, {"--times FILE": "profiles of a build, as stagec profile takes them", "--key": keys})
    parser.add_argument("--statement", metavar="FILE", help="the bundle's provenance, .intoto.json")
    parser.add_argument("--signature", metavar="FILE", help="the envelope (default: BUNDLE.dsse.json)")


def preload() -> None:
    import stagec.reports.overview
    import stagec.reports.webpage  # noqa: F401


def run(options: argparse.Namespace) -> Answer:
    from stagec.reports import overview, webpage
    from stagec.reports.overview import Sources

    beside = Sources(profiles=options.times, keys=options.key)
    first = Sources(options.inventory, options.times, options.statement, options.signature, options.key)
    collected = [overview.collect(options.bundle, first)]
    if options.other:
        collected.append(overview.collect(options.other, beside))
    page = webpage.as_html(collected).encode()
    write_whole(options.output, page)
    return Answer({"kind": "report", "output": options.output, **digest(page)})
