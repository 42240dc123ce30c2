"""Call a function of a bundle, without JAX."""

from __future__ import annotations

import argparse
import io
import zipfile
from typing import Any

from stagec.cli.files import print_json, read, write_whole
from stagec.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("function", help="name of the function; of one of its variants, FUNCTION-VARIANT")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--inputs", metavar="FILE.npz", help="an array for each argument, named as in \"args[0]['w']\"")
    given.add_argument("--random", action="store_true", help="make arguments, for the function's first bucket")
    parser.add_argument("--bucket", nargs="+", metavar="DIM=SIZE", default=[], help="of --random: another bucket")
    parser.add_argument("--seed", type=int, default=0, help="of --random (default: 0)")
    parser.add_argument("--output", metavar="FILE.npz", help="where to write the results, named as in \"result['y']\"")
    parser.add_argument("--target", help="which of the bundle's targets to run (default: the best for this machine)")


def run(options: argparse.Namespace) -> None:
    import numpy as np

    from stagec.runtime import trials
    from stagec.runtime.refusal import Refusal
    from stagec.serving import load

    try:
        bundle = load(options.bundle, options.target)
        function = trials.find(bundle, options.function)
        if options.random:
            values = trials.random_arguments(trials.of_bucket(function, _bucket(options.bucket)), options.seed)
        else:
            values = _arrays(options.inputs)
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
        return
    print(f"{function.name} for {bundle.target}: first call {first:.3g} s, second {second:.3g} s")
    for path, figures in report.items():
        print(f"  {path}: {_told(figures)}")


def _bucket(words: list[str]) -> dict[str, int]:
    sizes = dict(word.partition("=")[::2] for word in words)
    if not all(size.isdecimal() for size in sizes.values()):
        raise StagecError(Problem("", "--bucket", "not the sizes of dimensions", "write for example --bucket batch=8"))
    return {name: int(size) for name, size in sizes.items()}


def _arrays(path: str) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(io.BytesIO(read(path)), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise StagecError(Problem(path, "", "not an .npz file of plain arrays", "write it with numpy.savez")) from error


def _told(figures: dict[str, Any]) -> str:
    aval = f"{figures['dtype']}[{','.join(map(str, figures['shape']))}]"
    parts = [f"{name} {figures[name]:.6g}" for name in ("minimum", "mean", "maximum") if figures[name] is not None]
    parts += [f"{figures['not_finite']} not finite"] if figures["not_finite"] else []
    return "  ".join([aval, ", ".join(parts)]).rstrip()
