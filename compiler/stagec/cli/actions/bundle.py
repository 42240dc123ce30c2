"""Put artifacts and executables into one file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagec.cli.files import Options, on_disk, pair, read, read_text, read_weights, split, write_parts
from stagec.core.messages.errors import Problem, StagecError, blaming

if TYPE_CHECKING:
    from stagec.bundle.external import Description
    from stagec.bundle.writing import Export

OPTIONS = {
    "--name NAME": "the manifest's name",
    "--version VERSION": "the manifest's version",
    "--output OUTPUT": "where to write the bundle",
    "[--export NAME:FILE:SPEC:DESCRIPTION]...": "an exported artifact, its function's spec and its description",
    "[--executable NAME:FILE:DESCRIPTION:MODULE]...": "an executable, its description and its StableHLO module",
    "[--weights NAME=FILE]...": "a safetensors file that arguments are bound to; NAME is its path in the manifest",
    "[--external-weights NAME=FILE.json]...": "one that stays beside the bundle: what describe-weights wrote",
    "[--serves jaxlib==VERSION]...": "a jaxlib of the fleet: without an executable of it, no bundle is written",
    "[--golden NAME=FILE]...": "golden inputs and outputs of the exported artifact NAME: what golden wrote",
}


def preload() -> None:
    import stagec.bundle.writing  # noqa: F401


def run(options: Options) -> None:
    from stagec.core.builds import specs
    from stagec.core.messages import phases

    with phases.phase("import"):
        from stagec.bundle.members import index_of, pieces
        from stagec.bundle.writing import Export, Member, gather

    golden = read_weights(options.golden)
    exports = [
        Export(name, on_disk(path), specs.function_spec(read_text(spec)), read(description), golden.get(name))
        for name, path, spec, description in (split(text, 4) for text in options.export)
    ]
    executables = [
        Member(name, on_disk(executable), read(description), on_disk(module))
        for name, executable, description, module in (split(text, 4) for text in options.executable)
    ]
    weights = read_weights(options.weights)
    external = _described(options.external_weights)
    try:
        members = gather(options.name, options.version, exports, executables, weights, external)
        index = index_of(members, options.output)
        if options.serves:
            _check_served(index, options.serves, exports)
        # Weights and executables are larger than memory may be: they are copied from file to file.
        write_parts(options.output, pieces(members))
    except ValueError as error:
        raise StagecError(Problem(options.output, "", str(error))) from error
    _warn_of_an_end(index, exports)


def _warn_of_an_end(index: Mapping[str, Any], exports: Sequence[Export]) -> None:
    """Say that JAX's promise to read the bundle's artifacts ends soon.

    It is said here because a bundle is made once after an edit, and an artifact of it for each function. The text has
    the day, and not how many are left: a cache says it again later. No byte of the bundle depends on today.
    """
    import datetime

    from stagec.bundle.expiry import ends_soon, newer_jax

    of_jax = (function for function in index["functions"].values() if "jax" in function["versions"])
    function = next(of_jax, None)  # all are of one environment
    if not function or not ends_soon(until := function["readable_until"], datetime.date.today()):
        return
    from stagec.patches import known_builds

    jax, tag = function["versions"]["jax"], known_builds.python_tag()
    here = {build.version for build in known_builds.rows() if build.python == tag}
    what = f"JAX promises that its releases until {until} read what jax {jax} exports; later ones may refuse it"
    manifest = next((export.spec.manifest for export in exports), "")
    print(Problem(manifest, "", f"warning: {what}", newer_jax(jax, here)), file=sys.stderr)


def _check_served(index: Mapping[str, Any], requirements: Sequence[str], exports: Sequence[Export]) -> None:
    """Raise StagecError if a bundle lacks executables of a jaxlib that its manifest names in `serves`."""
    from stagec.trust import fleet

    rows = fleet.serves(index, [fleet.release(requirement, "--serves") for requirement in requirements])
    manifest = next((export.spec.manifest for export in exports), "")
    problems = [
        Problem(
            manifest, "manifest.serves", f"jaxlib {jaxlib}: {fleet.summary(of_it)}", "name it in jaxlib = [...] too"
        )
        for jaxlib, of_it in fleet.by_jaxlib(rows).items()
        if not all(row["ok"] for row in of_it)
    ]
    if problems:
        raise StagecError(*problems)


def _described(given: list[str]) -> dict[str, Description]:
    """Return the descriptions of files of weights, given as NAME=FILE, by name."""
    from stagec.bundle.external import Description

    described = {}
    for name, path in map(pair, given):
        with blaming(path, what="not the description of a file of weights: "):
            described[name] = Description.from_json(read(path))
    return described
