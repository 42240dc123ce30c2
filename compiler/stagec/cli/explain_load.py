"""Show what of a bundle runs on this machine, and why the rest does not; and the weights that it has."""

from __future__ import annotations

from stagec.cli.files import Answer, Options
from stagec.core.messages.errors import Problem, StagecError

OPTIONS = {
    "bundle": "a bundle (.aot)",
    "[--function NAME]...": "one signature",
    "[--target NAME]": "the target to run, as for stagec.load",
    "[--executable-only]": "as policy='executable_only' of stagec.load: compile nothing",
}


def run(options: Options) -> Answer:
    from stagec.core.messages.refusal import LoadError
    from stagec.loader import load
    from stagec.loader.selection import Policy

    policy: Policy = "executable_only" if options.executable_only else "allow_compile"
    try:
        selections = load.explain(options.bundle, options.target, policy).selections()
    except LoadError as error:
        what = str(error).removeprefix(f"{options.bundle}: ")
        raise StagecError(Problem(options.bundle, "", f"{what} ({error.code})")) from error
    known = [selection.function for selection in selections]
    for name in options.function:
        if name not in known:
            raise StagecError(Problem(options.bundle, "", f"no function {name!r}", f"write one of {', '.join(known)}"))
    selections = [
        selection for selection in selections if not options.function or selection.function in options.function
    ]
    value = {"bundle": options.bundle, "functions": [selection.to_plain() for selection in selections]}
    text = "".join(selection.as_text() for selection in selections)
    return Answer(value, text, 0 if all(selection.chosen for selection in selections) else 1)
