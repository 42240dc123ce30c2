"""Call an executable on random arrays; with the results of the jaxlib that made it, describe it for this jaxlib."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, read, read_text, write_parts
from stagec.core.messages.errors import Problem, StagecError

OPTIONS = {
    "--executable EXECUTABLE": "for CPUs",
    "--description DESCRIPTION": "of it",
    "[--label LABEL]": "what errors begin with: the Bazel target",
    "[--results RESULTS]": "what the jaxlib that made it has given: another result is an error",
    "--output OUTPUT": "where to write what it gives; with --results, its description for this jaxlib",
}


def run(options: Options) -> Answer:
    from stagec.bundle.description import Description
    from stagec.checking import crossing

    described = Description.from_json(read_text(options.description))
    here_too = crossing.as_of_here(described)
    try:
        results = crossing.called(read(options.executable), described)
        if not options.results:
            write_parts(options.output, [crossing.in_bytes(results)])
            return Answer({"output": options.output})
        what = crossing.differs(results, described, read(options.results))
    except ValueError as error:
        what = str(error)
    if what:
        made_with, here = (each.versions["jaxlib"] for each in (described, here_too))
        write = f'compile it for that release: jaxlib = ["{made_with}", "{here}"] (docs/fleet.md)'
        problem = Problem(described.manifest, "manifest.runs_on", f"with jaxlib {here}: {what}", write)
        raise StagecError(problem).of(options.label)
    write_parts(options.output, [here_too.to_json().encode()])
    return Answer({"output": options.output})
