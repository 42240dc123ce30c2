"""The command line, `stagec COMMAND ...`: one function for each command, and a table of the commands.

Every command imports what it needs when it runs, so that planning needs nothing but pydantic. Exit status: 0 when all
is well, 2 for a user's mistake (explained on stderr), 1 for anything else: `explain` found a difference, say.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stagec.errors import Problem, StagecError


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    summary: str
    """One line, for the list of commands."""
    arguments: Callable[[argparse.ArgumentParser], None]
    """Declares the command's options; `--json` is declared for all."""
    run: Callable[[argparse.Namespace], int | None]
    """Does the work and returns the exit status, None for 0; raises StagecError for a user's mistake."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (None: the process's) and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="stagec",
        description="Builds JAX functions ahead of time.",
        epilog="An argument @FILE stands for the arguments in FILE, one a line.",
        fromfile_prefix_chars="@",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, description=command.summary)
        subparser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
        command.arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        status: int | None = options.run(options)
    except StagecError as error:
        print(error, file=sys.stderr)
        return 2
    return status or 0


def write_whole(path: str, data: bytes) -> None:
    """Writes a file under a temporary name beside it, then renames it: readers never see half a file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", help="the manifest, a TOML file")
    parser.add_argument("--display-path", help="name of the manifest in messages and in the plan (default: as given)")
    parser.add_argument("--output", help="write the plan as JSON to this file")
    parser.add_argument(
        "--device-files", help="write the files of devices that the manifest names to this file, one a line"
    )


def _plan(options: argparse.Namespace) -> None:
    from stagec.manifest import describe, device_files, load_manifest, plan

    if options.device_files:
        write_whole(options.device_files, "".join(f"{file}\n" for file in device_files(options.manifest)).encode())
    planned = plan(load_manifest(options.manifest, options.display_path))
    if options.output:
        write_whole(options.output, planned.to_json().encode())
    if options.json:
        sys.stdout.write(planned.to_json())
    elif not options.output:
        sys.stdout.write(describe(planned))


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def _targets(options: argparse.Namespace) -> None:
    from stagec.hardware import catalog, listing

    if options.json:
        _print_json({"targets": [asdict(entry) for entry in catalog.entries()]})
    else:
        sys.stdout.write(listing.as_text(catalog.entries()))


def _describe_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", help="write the description to this file instead of stdout")


def _describe_device(options: argparse.Namespace) -> None:
    from stagec.backends import cuda, nvidia
    from stagec.backends.compilation import CannotCompile

    try:
        figures = nvidia.figures(cuda.describe_device())
    except CannotCompile as error:
        raise StagecError(Problem("", "", str(error), error.write)) from error
    if options.output:
        write_whole(options.output, nvidia.as_toml(figures).encode())
    if options.json:
        _print_json(figures)
    elif not options.output:
        sys.stdout.write(nvidia.as_toml(figures))


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", help="write the schema to this file instead of stdout")


def _schema(options: argparse.Namespace) -> None:
    from stagec.manifest import schema

    if options.output:
        write_whole(options.output, schema().encode())
    else:
        sys.stdout.write(schema())


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec", required=True, help="the function's slice of the plan, a JSON file")
    parser.add_argument("--output", help="where to write the portable artifact")
    parser.add_argument("--description", help="where to write what it was made from, a JSON file")
    parser.add_argument("--debug-output", help="where to write the module with source locations, as text")
    parser.add_argument(
        "--import-root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder below which the user's modules and files are found; may be repeated, the first wins",
    )


def _export(options: argparse.Namespace) -> None:
    from stagec import specs

    spec = specs.function_spec(_read_text(options.spec))
    frontend = importlib.import_module(f"stagec.frontends.{'stablehlo' if spec.is_module else 'jax'}")
    if options.debug_output:
        write_whole(options.debug_output, frontend.export_with_locations(spec, options.import_root).encode())
    if not options.output:
        return
    serialized: bytes = frontend.export(spec, options.import_root)
    write_whole(options.output, serialized)
    if options.description:
        from stagec import explanation

        description = explanation.describe_export(spec, serialized, frontend.versions())
        write_whole(options.description, description.encode())
    if options.json:
        _print_json({"function": spec.name, "output": options.output, **_digest(serialized)})


def _compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec", required=True, help="the executable's slice of the plan, a JSON file")
    parser.add_argument("--exported", required=True, help="the portable artifact to compile")
    parser.add_argument("--output", required=True, help="where to write the executable")
    parser.add_argument("--description", required=True, help="where to write its description, a JSON file")


def _compile(options: argparse.Namespace) -> None:
    from stagec import specs
    from stagec.backends.compilation import backend

    spec = specs.executable_spec(_read_text(options.spec))
    backend(spec.target.platform).prepare_process(spec.target)  # before anything of jaxlib's is imported
    from stagec.stages.compiled import compile_exported
    from stagec.stages.limits import advice

    started = time.monotonic()
    compiled = compile_exported(_read(options.exported), spec)
    late = advice(spec, time.monotonic() - started)
    if late:
        print(late, file=sys.stderr)
    write_whole(options.output, compiled.executable)
    write_whole(options.description, compiled.description.to_json().encode())
    if options.json:
        sys.stdout.write(compiled.description.to_json())


def _bundle_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="the manifest's name")
    parser.add_argument("--version", required=True, help="the manifest's version")
    parser.add_argument("--output", required=True, help="where to write the bundle")
    parser.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME=FILE=SPEC[=DESCRIPTION]",
        help="a portable artifact, the function's slice of the plan and what it was made from; may be repeated",
    )
    parser.add_argument(
        "--executable",
        action="append",
        default=[],
        metavar="NAME=FILE=DESCRIPTION",
        help="an executable and its description; may be repeated",
    )


def _bundle(options: argparse.Namespace) -> None:
    from stagec import specs
    from stagec.bundle.writing import Member, write_bundle

    given = [_split(text, 4 if text.count("=") > 2 else 3) for text in options.export]
    exports = {name: _read(path) for name, path, *_ in given}
    slices = {name: specs.function_spec(_read_text(path)) for name, _, path, *_ in given}
    descriptions = {name: _read(path) for name, _, _, *described in given for path in described}
    executables = [
        Member(name, _read(executable), _read(description))
        for name, executable, description in (_split(text, 3) for text in options.executable)
    ]
    try:
        bundle = write_bundle(options.name, options.version, exports, slices, executables, descriptions)
    except ValueError as error:
        raise StagecError(Problem(options.output, "", str(error))) from error
    write_whole(options.output, bundle)
    if options.json:
        _print_json({"name": options.name, "output": options.output, **_digest(bundle)})


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a bundle (.aot), a portable artifact (.exported) or a description (.json)")


def _inspect(options: argparse.Namespace) -> None:
    from stagec import inspection

    report = inspection.inspect(options.file, _read(options.file))
    if options.json:
        _print_json(report)
    else:
        sys.stdout.write(inspection.as_text(report))


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a bundle (.aot), executable (.xla), portable artifact (.exported) or description (.json)"
    parser.add_argument("first", help=f"{what}; or a manifest (.toml) for what would be built now")
    parser.add_argument("second", help="another of the same kind, a bundle that has such a one, or a manifest")
    parser.add_argument(
        "--import-root",
        action="append",
        metavar="FOLDER",
        help="of a manifest: folder below which modules and files are found; may be repeated (default: this folder)",
    )


def _explain(options: argparse.Namespace) -> int:
    from stagec import explanation

    report = explanation.explain(options.first, options.second, options.import_root or ["."])
    if options.json:
        _print_json(report)
    else:
        sys.stdout.write(explanation.as_text(report))
    return 0 if report["equal"] else 1


def _locate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="the module with source locations (.debug.mlir)")
    parser.add_argument("text", help="name of an operation, such as jit(f)/tanh, or the whole message of an error")


def _locate(options: argparse.Namespace) -> int:
    from stagec.runtime import locations

    try:
        found = locations.locate(options.text, locations.read(_read_text(options.file)))
    except ValueError as error:
        raise StagecError(Problem(options.file, "", str(error), "give a file of output group debug")) from error
    if options.json:
        _print_json({"operations": [asdict(operation) for operation in found]})
    elif found:
        sys.stdout.write(locations.as_text(found))
    else:
        print(f"{options.file}: no operation that the text speaks of", file=sys.stderr)
    return 0 if found else 1


def _reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME=SPEC=FILE=DESCRIPTION",
        help="a portable artifact; may be repeated",
    )
    parser.add_argument(
        "--executable",
        action="append",
        default=[],
        metavar="NAME=EXPORT=SPEC=FILE=DESCRIPTION",
        help="an executable, with the name of its export; may be repeated",
    )
    parser.add_argument("--import-root", action="append", default=[], metavar="FOLDER", help="as for export")
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="PLATFORM=FOLDER",
        help="packages that only compiling for the platform may import; may be repeated",
    )


def _reproduce(options: argparse.Namespace) -> int:
    from stagec.reproducibility import Executable, Export, reproduce

    exports, executables = [], []
    for name, *files in (_split(text, 4) for text in options.export):
        exports.append(Export(name, *(Path(file).absolute() for file in files)))
    for name, export, *files in (_split(text, 5) for text in options.executable):
        executables.append(Executable(name, export, *(Path(file).absolute() for file in files)))
    plugins = {platform: Path(folder).absolute() for platform, folder in (_split(text, 2) for text in options.plugin)}
    found, count = reproduce(exports, executables, options.import_root, plugins=plugins)
    if options.json:
        _print_json({"artifacts": count, "differences": found})
    else:
        print("\n".join([*found, f"{count} artifacts built twice again, {len(found)} differences"]))
    return 1 if found else 0


COMMANDS = {
    "plan": Command("List the artifacts that a manifest asks for.", _plan_arguments, _plan),
    "export": Command("Trace a function and write its portable artifact.", _export_arguments, _export),
    "compile": Command("Compile a portable artifact for a target.", _compile_arguments, _compile),
    "bundle": Command("Put artifacts and executables into one file.", _bundle_arguments, _bundle),
    "describe-device": Command(
        "Describe the NVIDIA device of this machine, for a target.", _describe_device_arguments, _describe_device
    ),
    "explain": Command("Tell what differs in what two artifacts are made from.", _explain_arguments, _explain),
    "inspect": Command("Tell what is in an artifact or a bundle.", _inspect_arguments, _inspect),
    "locate": Command("Tell which lines an operation or an error comes from.", _locate_arguments, _locate),
    "reproduce": Command("Build artifacts twice again and compare the bytes.", _reproduce_arguments, _reproduce),
    "schema": Command("Print the JSON Schema of manifests, for editors.", _schema_arguments, _schema),
    "targets": Command("List the hardware that manifests can name.", _no_arguments, _targets),
}


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StagecError(Problem(path, "", f"cannot be read: {error.strerror}")) from error


def _read_text(path: str) -> str:
    return _read(path).decode("utf-8")


def _split(text: str, parts: int) -> list[str]:
    values = text.split("=")
    if len(values) != parts:
        raise StagecError(Problem("", "", f"{text!r} has {len(values)} parts divided by '=', {parts} are wanted"))
    return values


def _digest(data: bytes) -> dict[str, object]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
