"""Write members of a bundle to files."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, Sums, write_below
from stagec.core.messages.errors import Problem, StagecError, nearest

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[member ...]": "name of a member, as inspect lists them (default: all, and the index)",
    "--output FOLDER": "folder to write them to",
}


def run(options: Options) -> Answer:
    from stagec.bundle.archive import INDEX, Archive

    archive = Archive(options.bundle)
    members = [INDEX, *archive.index["members"]]
    wanted = options.member or members
    problems = [
        Problem(archive.path, "", f"there is no member {name!r}", nearest(name, members))
        for name in wanted
        if name not in members
    ]
    if problems:
        raise StagecError(*problems)
    wanted = sorted(dict.fromkeys(wanted), key=INDEX.__ne__)
    for name in wanted:
        if name != INDEX:
            archive.check(name)
    written = {name: Sums() for name in wanted}
    for name, sums in written.items():  # checked again while they are read
        write_below(options.output, name, sums.of([archive[INDEX]] if name == INDEX else archive.pieces(name)))
    text = "".join(f"{sums.size:>12,} bytes  {name}\n" for name, sums in written.items())
    return Answer({name: sums.to_plain() for name, sums in written.items()}, text)
