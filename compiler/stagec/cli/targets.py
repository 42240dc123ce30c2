"""List the hardware that manifests can name."""

from __future__ import annotations

from dataclasses import asdict

from stagec.cli.files import Answer, Options

OPTIONS: dict[str, str] = {}


def run(options: Options) -> Answer:
    from stagec.hardware import catalog, listing

    entries = catalog.entries()
    return Answer({"targets": [asdict(entry) for entry in entries]}, listing.as_text(entries))
