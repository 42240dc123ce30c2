"""Write a page about the programs of a rehearsal that were built."""

from __future__ import annotations

from stagec.cli.files import Options, split, write_whole

OPTIONS = {
    "--programs PROGRAMS": "the programs.toml",
    "[--costs DIGEST:FILE:TARGET]...": "what stagec action jax-compile wrote of a program for a target; "
    "DIGEST is that of its key",
    "--output/-o FILE.html": "where to write the page",
}


def run(options: Options) -> None:
    from stagec_rehearse import page, programs, report

    parts = [split(text, 3) for text in options.costs]
    costs = {(target, key): programs.costs(path) for key, path, target in parts}
    shown = report.of_build(programs.read(options.programs), costs, options.programs)
    write_whole(options.output, page.as_html(shown).encode())
