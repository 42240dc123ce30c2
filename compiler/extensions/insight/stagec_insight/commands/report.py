"""Write a page about a bundle, or about two side by side."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, digest, write_whole
from stagec.cli.options import INVENTORY

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[other]": "another bundle, to compare it with",
    "--output/-o FILE.html": "where to write the page",
    **INVENTORY,
    "[--times FILE]...": "profiles of a build, as stagec profile takes them",
    "[--key KEY]...": "a public key that is trusted",
    "[--statement FILE]": "the bundle's provenance, .intoto.json",
    "[--signature FILE]": "the envelope (default: BUNDLE.dsse.json)",
}


def preload() -> None:
    import stagec_insight.overview
    import stagec_insight.webpage  # noqa: F401


def run(options: Options) -> Answer:
    from stagec_insight import overview, webpage
    from stagec_insight.overview import Sources

    beside = Sources(profiles=options.times, keys=options.key)
    first = Sources(options.inventory, options.times, options.statement, options.signature, options.key)
    collected = [overview.collect(options.bundle, first)]
    if options.other:
        collected.append(overview.collect(options.other, beside))
    page = webpage.as_html(collected).encode()
    write_whole(options.output, page)
    return Answer({"kind": "report", "output": options.output, **digest(page)})
