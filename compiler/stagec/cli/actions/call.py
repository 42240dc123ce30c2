"""Call an executable on random arrays; with the results of the jaxlib that made it, describe it for this jaxlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.cli.files import Options, read, read_text, write_parts
from stagec.core.messages.errors import Problem, StagecError

if TYPE_CHECKING:
    from stagec.bundle.description import Description

OPTIONS = {
    "--executable EXECUTABLE": "for CPUs",
    "--description DESCRIPTION": "of it",
    "[--label LABEL]": "what errors begin with: the Bazel target",
    "[--results RESULTS]": "what the jaxlib that made it has given: another result is an error",
    "--output OUTPUT": "where to write what it gives; with --results, its description for this jaxlib",
}


def run(options: Options) -> None:
    from stagec.bundle.description import Description
    from stagec.bundle.index import numbers
    from stagec.checking import crossing

    described = Description.from_json(read_text(options.description))
    here_too = crossing.as_of_here(described)
    made_with, here = (each.versions["jaxlib"] for each in (described, here_too))
    # Bazel knows releases from locks alone: the packages of a hub may have another one.
    if options.results and numbers(made_with) >= numbers(here):
        what = f"jaxlib {made_with} made it, and here is {here}: a release runs what an older one made"
        raise _problem(described, what, f"leave this release out of runs_on: {here}").of(options.label)
    if not options.results and made_with != here:
        what = f"jaxlib {made_with} made it, and here is {here}: its results are those of the jaxlib that made it"
        raise _problem(described, what, f"call it with jaxlib {made_with}").of(options.label)
    try:
        results = crossing.called(read(options.executable), described)
        if not options.results:
            write_parts(options.output, [crossing.in_bytes(results)])
            return
        what = crossing.differs(results, described, read(options.results))
    except ValueError as error:
        what = str(error)
    if what:
        write = f'compile it for that release: jaxlib = ["{made_with}", "{here}"] (docs/fleet.md)'
        raise _problem(described, f"with jaxlib {here}: {what}", write).of(options.label)
    write_parts(options.output, [here_too.to_json().encode()])


def _problem(described: Description, what: str, write: str) -> StagecError:
    return StagecError(Problem(described.manifest, "manifest.runs_on", what, write))
