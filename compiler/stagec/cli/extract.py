"""Write members of a bundle to files."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, Sums, write_below

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[member ...]": "name of a member, as inspect lists them (default: all, and the index)",
    "--output FOLDER": "folder to write them to",
}


def run(options: Options) -> Answer:
    from stagec.bundle import extraction
    from stagec.bundle.archive import Archive

    written = {}
    for name, pieces in extraction.select(Archive(options.bundle), options.member).items():
        written[name] = Sums()
        write_below(options.output, name, written[name].of(pieces))
    text = "".join(f"{sums.size:>12,} bytes  {name}\n" for name, sums in written.items())
    return Answer({name: sums.to_plain() for name, sums in written.items()}, text)
