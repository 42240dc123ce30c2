"""Call a function of a bundle, without JAX."""

from __future__ import annotations

import argparse
import dataclasses
import io
from typing import Any

from stagec.cli.files import print_json, print_text, read_arrays, write_whole
from stagec.cli.options import add_weights
from stagec.core.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument(
        "function", nargs="?", help="name of the function; of one of its variants, FUNCTION-VARIANT; all with --golden"
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--inputs", metavar="FILE.npz", help="an array for each argument, named as in \"args[0]['w']\"")
    given.add_argument("--random", action="store_true", help="make arguments, for the function's first bucket")
    given.add_argument(
        "--golden", action="store_true", help="compare executables for CPUs with the inputs and outputs in the bundle"
    )
    parser.add_argument("--bucket", nargs="+", metavar="DIM=SIZE", default=[], help="of --random: another bucket")
    parser.add_argument("--seed", type=int, default=0, help="of --random (default: 0)")
    parser.add_argument("--output", metavar="FILE.npz", help="where to write the results, named as in \"result['y']\"")
    add_weights(parser)
    parser.add_argument("--target", help="which of the bundle's targets to run (default: the best for this machine)")


def run(options: argparse.Namespace) -> int | None:
    import numpy as np

    from stagec.core.progress import Progress
    from stagec.core.refusal import Refusal
    from stagec.loader import trials
    from stagec.loader.serving import load

    if options.golden:
        return _compare(options)
    if not options.function:
        raise StagecError(Problem("", "", "no function is given", "name one after the bundle"))
    progress = Progress("run", 1)
    try:
        bundle = load(options.bundle, options.target, weights=options.weights)
        function = trials.find(bundle, options.function)
        if options.random:
            description = trials.of_bucket(function, _bucket(options.bucket))
            values = trials.random_arguments(description, options.seed, function.weights)
        else:
            values = read_arrays(options.inputs)
        with progress:
            progress.step(f"calling {options.function}")
            results, seconds = trials.call(function, values)
    except Refusal as error:
        raise StagecError(Problem("", "", str(error))) from error
    if options.output:
        buffer = io.BytesIO()
        np.savez(buffer, **results)  # type: ignore[arg-type]
        write_whole(options.output, buffer.getvalue())
    report = {path: trials.summary(array) for path, array in results.items()}
    first, second = seconds
    if options.json:
        told = {"function": function.name, "target": bundle.target, "results": report}
        print_json({**told, "seconds": {"first": first, "second": second}})
        return None
    print(f"{function.name} for {bundle.target}: first call {first:.3g} s, second {second:.3g} s")
    for path, figures in report.items():
        print_text(f"  {path}: {_told(figures)}\n")
    return None


def _compare(options: argparse.Namespace) -> int:
    """Compare with golden outputs; the status is 1 where one differs."""
    from stagec.bundle.archive import Archive
    from stagec.core.progress import Progress
    from stagec.core.refusal import Refusal
    from stagec.loader import golden

    checks = []
    try:
        with Progress("run --golden") as progress:
            for check in golden.check(Archive(options.bundle), options.function, options.weights):
                checks.append(check)
                progress.step(f"{check.function} for {check.target}")
    except Refusal as error:
        raise StagecError(Problem("", "", str(error))) from error
    if not checks:
        of = f" of {options.function}" if options.function else ""
        what = f"no golden inputs{of} for what runs on this machine"
        raise StagecError(Problem(options.bundle, "", what, "write golden = {} for it in the manifest"))
    if options.json:
        print_json({"kind": "golden", "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        for check in checks:
            print_text(f"{check.as_text()}\n")
    return 0 if all(check.ok for check in checks) else 1


def _bucket(words: list[str]) -> dict[str, int]:
    sizes = dict(word.partition("=")[::2] for word in words)
    if not all(size.isdecimal() for size in sizes.values()):
        raise StagecError(Problem("", "--bucket", "not the sizes of dimensions", "write for example --bucket batch=8"))
    return {name: int(size) for name, size in sizes.items()}


def _told(figures: dict[str, Any]) -> str:
    aval = f"{figures['dtype']}[{','.join(map(str, figures['shape']))}]"
    parts = [f"{name} {figures[name]:.6g}" for name in ("minimum", "mean", "maximum") if figures[name] is not None]
    parts += [f"{figures['not_finite']} not finite"] if figures["not_finite"] else []
    return "  ".join([aval, ", ".join(parts)]).rstrip()
