"""Add executables for this environment's jaxlib to a bundle, without its sources."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options, Sums, read_packages, write_parts, write_whole
from stagec.cli.options import REPORT, STATEMENT, WEIGHTS, only_with
from stagec.core.messages.errors import Problem, StagecError, blaming

if TYPE_CHECKING:
    from stagec.trust.provenance import Environment

OPTIONS = {
    "bundle": "the bundle (.aot); it stays as it is",
    "--output OUTPUT": "where to write the bundle with more executables",
    "[--target NAME]...": "a target to compile for (default: all that the bundle has executables for)",
    "[--reuse]": "call each executable of an older jaxlib once, take those with the right results, compile the others",
    **WEIGHTS,
    "[--key FILE]...": "a public key that is trusted: with one, the bundle must be signed",
    "[--signature FILE]...": "an envelope, or a signature of Model Signing (default: those beside the bundle)",
    **STATEMENT,
}


def run(options: Options) -> Answer:
    from stagec.audit import adding
    from stagec.bundle import writing
    from stagec.bundle.archive import Archive
    from stagec.bundle.members import pieces
    from stagec.core.messages.progress import Progress
    from stagec.pjrt import compatibility
    from stagec.trust import attestation, provenance, sbom

    only_with("--reuse", options.reuse, options, "weights")
    environments = read_packages(options.packages)
    if options.statement or options.sbom:
        _check_packages(environments)
    if options.key:
        archive = attestation.open_signed(options.bundle, options.key, signature=options.signature)
    else:
        archive = Archive(options.bundle)
    archive.check_all()
    with Progress("add-jaxlib") as progress, blaming(options.bundle, of=(ValueError,)):
        executables = adding.added(archive, options.target, options.reuse, progress, options.weights)
    sums, members = Sums(), [each.member for each in executables]
    with blaming(options.bundle, of=(ValueError,)):
        write_parts(options.output, sums.of(pieces(writing.extend(archive, members))))
    made = Archive(options.output)
    if options.statement:
        statement = provenance.statement_of_addition(made, sums.sha256(), environments)
        write_whole(options.statement, statement.encode())
    if options.sbom:
        write_whole(
            options.sbom, sbom.bill_of_materials(attestation.Subject.of(made, sums.sha256()), environments).encode()
        )
    here, names = compatibility.version(), [member.name for member in members]
    text = f"{options.output}: {len(names)} executables of jaxlib {here} added\n"
    reused = [each.member.name for each in executables if each.reused]
    if options.reuse:
        text = f"{options.output}: {len(names)} executables for jaxlib {here} added; {len(reused)} of them were there\n"
        text += "".join(f"{each.member.name} is compiled: {each.why}\n" for each in executables if each.why)
    value = {"output": options.output, "jaxlib": here, "executables": names, "reused": reused, **sums.to_plain()}
    return Answer(value, text)


def _check_packages(environments: Sequence[Environment]) -> None:
    """Raise StagecError unless the lists of packages have this Python, and the jaxlib that compiles."""
    from stagec.pjrt import compatibility

    here = f"Python {platform.python_version()} and jaxlib {compatibility.version()}"
    wheels = {(wheel.name, wheel.version) for environment in environments for wheel in environment.wheels}
    pythons = {environment.python for environment in environments}
    if platform.python_version() in pythons and ("jaxlib", compatibility.version()) in wheels:
        return
    what = f"a statement and an SBOM list the packages that compile, {here}"
    what += ", and the lists given are of others" if environments else ", and no list of them is given"
    raise StagecError(Problem("", "--packages", what, REPORT))
