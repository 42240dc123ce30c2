"""Show how two bundles differ."""

from __future__ import annotations

from stagec.cli.files import Answer, Options

OPTIONS = {
    "first": "a bundle (.aot)",
    "second": "another",
}


def run(options: Options) -> Answer:
    from stagec.audit import comparison

    report = comparison.compare(options.first, options.second)
    return Answer(report, comparison.as_text(report), 0 if report["equal"] else 1)
