"""Whether an executable that another jaxlib made gives the right results with this one: `stagec add-jaxlib --reuse`.

XLA promises nothing about an executable's form to another release. Of 5,042 pairs of a program and two releases from
0.10.1 to 0.12.0.1, those of an older writer and a newer reader all ran, but with 0.9.2 as the writer some ended the
process, and bits differed in up to 19 of 170 programs: FFT, complex and bf16 products, large reductions. So each
executable is called once by the release that shall run it, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from stagec.bundle.archive import Archive
from stagec.checking import golden, trials
from stagec.core.sizes.avals import tolerance
from stagec.loader.bundle import Bundle
from stagec.loader.load import compile_exported
from stagec.loader.loaded import Settings


def difference(crossed: Archive, base: Archive, name: str, target: str, bucket: Mapping[str, int]) -> str:
    """Run an executable that says it is this jaxlib's, and return how its results differ; "" if they do not.

    They are compared with the function's golden outputs, by its tolerances. Where the bundle has none for the bucket,
    with what this jaxlib compiles from the exported artifact, on random arguments, by the tolerances of the dtypes.
    crossed: a bundle with the executable. base: the same bundle without it. name: of the signature, as in the index.
    Raises LoadError if this machine cannot run the target.
    """
    entry = crossed.index["functions"][name].get("golden")
    function = trials.find(Bundle(crossed, Settings(target, policy="executable_only")), name)
    description = trials.of_bucket(function, bucket)
    if entry and entry["bucket"] == bucket:
        inputs = {path: golden.array_of(crossed, row) for path, row in entry["inputs"].items()}
        wanted = {
            path: (golden.array_of(crossed, row), row["rtol"], row["atol"]) for path, row in entry["outputs"].items()
        }
    else:
        inputs = trials.random_arguments(description, 0, function.weights)
        compiled = trials.find(Bundle(base, Settings(target, compiler=compile_exported)), name, is_built=False)
        results, _ = trials.call(compiled, inputs, description)
        allowed = [tolerance(aval) for aval in description.out_avals]
        wanted = {path: (array, each, each) for (path, array), each in zip(results.items(), allowed, strict=True)}
    given, _ = trials.call(function, inputs)
    for path, (array, rtol, atol) in wanted.items():
        absolute, relative, ok = golden.errors(given.get(path), array, rtol, atol)
        if not ok:
            return f"{path} has a largest error of {absolute:.3g}, relative {relative:.3g}"
    return ""
