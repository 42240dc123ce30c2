"""Call a function of a bundle, without JAX."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from stagec.cli.files import Answer, Options, read_arrays, write_whole
from stagec.cli.options import WEIGHTS, value
from stagec.core.messages.errors import Problem, StagecError, mistake

if TYPE_CHECKING:
    from stagec.checking import golden

    Outcome: TypeAlias = golden.Check | golden.Skipped | golden.Refused

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[function]": "name of the function; of one of its variants, FUNCTION-VARIANT; all with --golden",
    "(--inputs FILE.npz | --random | --golden)": (
        "an array for each argument, named as in \"args[0]['w']\"",
        "make arguments, for the function's first bucket",
        "compare what runs on this machine with the inputs and outputs in the bundle",
    ),
    "[--platform PLATFORM]": "of --golden: compare executables for this platform alone, such as cuda",
    "[--allow-skipped]": "of --golden: no mistake if this machine can run nothing of it",
    "[--bucket DIM=SIZE ...]": value("of --random: another bucket", []),
    "[--seed SEED]": value("of --random (default: 0)", 0, int),
    "[--output FILE.npz]": "where to write the results, named as in \"result['y']\"",
    **WEIGHTS,
    "[--target TARGET]": "which of the bundle's targets to run (default: the best for this machine)",
}


def run(options: Options) -> Answer:
    import numpy as np

    from stagec.checking import trials
    from stagec.core.messages.progress import Progress
    from stagec.loader.load import load

    if options.golden:
        return _compare(options)
    if not options.function:
        raise mistake("no function is given", "name one after the bundle")
    progress = Progress("run", 1)
    bundle = load(options.bundle, options.target, weights=options.weights)
    function = trials.find(bundle, options.function)
    if options.random:
        description = trials.of_bucket(function, bucket(options.bucket))
        values = trials.random_arguments(description, options.seed, function.weights)
    else:
        values = read_arrays(options.inputs)
    with progress:
        progress.step(f"calling {options.function}")
        results, seconds = trials.call(function, values)
    if options.output:
        buffer = io.BytesIO()
        np.savez(buffer, **results)  # type: ignore[arg-type]
        write_whole(options.output, buffer.getvalue())
    report = {path: trials.summary(array) for path, array in results.items()}
    first, second = seconds
    told = {"function": function.name, "target": bundle.target, "results": report}
    lines = [f"{function.name} for {bundle.target}: first call {first:.3g} s, second {second:.3g} s"]
    lines += [f"  {path}: {_told(figures)}" for path, figures in report.items()]
    return Answer({**told, "seconds": {"first": first, "second": second}}, "\n".join([*lines, ""]))


def _compare(options: Options) -> Answer:
    """Compare with golden outputs; the status is 1 where one differs."""
    from stagec.bundle.archive import Archive
    from stagec.checking import golden

    outcomes = golden.check(Archive(options.bundle), options.function, options.platform, options.weights)
    return compared(outcomes, "run --golden", options.bundle, options.function, options.allow_skipped)


def compared(
    outcomes: Iterable[Outcome], command: str, bundle: str, function: str | None, allow_skipped: bool
) -> Answer:
    """Return the answer of a command that compares with golden outputs; the status is 1 where one differs.

    function: the only one; None: all. Where Bazel runs a test, its file of results is written too. Raises StagecError
    where nothing was compared; with `allow_skipped`, skipped targets are not a mistake.
    """
    from stagec.checking import golden
    from stagec.core.messages.progress import Progress

    rows: list[Outcome] = []
    with Progress(command) as progress:
        for outcome in outcomes:
            rows.append(outcome)
            if isinstance(outcome, golden.Check):
                progress.step(f"{outcome.function} for {outcome.target}")
    checks = [row for row in rows if isinstance(row, golden.Check)]
    skipped = [row for row in rows if isinstance(row, golden.Skipped)]
    refused = [row for row in rows if isinstance(row, golden.Refused)]
    if not checks and not refused and not (skipped and allow_skipped):
        of = f" of {function}" if function else ""
        what = f"no golden inputs{of} for what runs on this machine"
        write = "\n".join(target.as_text() for target in skipped) or "write golden = {} for it in the manifest"
        raise StagecError(Problem(bundle, "", what, write))
    if "XML_OUTPUT_FILE" in os.environ:
        write_whole(os.environ["XML_OUTPUT_FILE"], _as_junit(checks, skipped, refused))
    text = "".join(f"{row.as_text()}\n" for part in (checks, skipped, refused) for row in part)
    first, left, without = ([dataclasses.asdict(row) for row in part] for part in (checks, skipped, refused))
    told = {"kind": "golden", "checks": first, "skipped": left, **({"refused": without} if refused else {})}
    return Answer(told, text, 0 if not refused and all(check.ok for check in checks) else 1)


def _as_junit(
    checks: Sequence[golden.Check], skipped: Sequence[golden.Skipped], refused: Sequence[golden.Refused]
) -> bytes:
    """Return the file that Bazel and CI show: a test case for each result, and for what was skipped or refused."""
    from xml.etree import ElementTree

    suite = ElementTree.Element("testsuite", name="golden")
    cases = [
        (f"{check.function} for {check.target}: {check.path}", "" if check.ok else "failure", check.as_text())
        for check in checks
    ]
    cases += [(f"{program.function} for {program.target}", "failure", program.as_text()) for program in refused]
    cases += [(f"target {target.target}", "skipped", target.why) for target in skipped]
    for name, kind, message in cases:
        case = ElementTree.SubElement(suite, "testcase", name=name, classname="golden")
        if kind:
            ElementTree.SubElement(case, kind, message=message)
    for name, kind in {"tests": "testcase", "failures": "failure", "skipped": "skipped"}.items():
        suite.set(name, str(len(list(suite.iter(kind)))))
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text


def bucket(words: list[str]) -> dict[str, int]:
    """Return the sizes that `--bucket` names. Raises StagecError."""
    sizes = dict(word.partition("=")[::2] for word in words)
    if not all(size.isdecimal() for size in sizes.values()):
        raise StagecError(Problem("", "--bucket", "not the sizes of dimensions", "write for example --bucket batch=8"))
    return {name: int(size) for name, size in sizes.items()}


def _told(figures: dict[str, Any]) -> str:
    aval = f"{figures['dtype']}[{','.join(map(str, figures['shape']))}]"
    parts = [f"{name} {figures[name]:.6g}" for name in ("minimum", "mean", "maximum") if figures[name] is not None]
    parts += [f"{figures['not_finite']} not finite"] if figures["not_finite"] else []
    return "  ".join([aval, ", ".join(parts)]).rstrip()
