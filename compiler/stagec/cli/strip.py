"""Write a bundle without its golden inputs and outputs."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, Sums, write_parts

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "--output OUTPUT": "where to write the bundle without them",
}


def run(options: Options) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.bundle.members import pieces
    from stagec.bundle.writing import strip

    sums = Sums()
    write_parts(options.output, sums.of(pieces(strip(Archive(options.bundle)))))
    return Answer({"output": options.output, **sums.to_plain()})
