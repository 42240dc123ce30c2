"""Build artifacts twice again and compare the bytes."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Answer, Options, pair, split
from stagec.cli.options import IMPORT_ROOTS, PLUGINS

OPTIONS = {
    "[--export NAME:SPEC:FILE:DESCRIPTION]...": "an exported artifact",
    "[--lowered NAME=FILE]...": "what JAX lowered for devices beside the exported artifact of that name",
    "[--executable NAME:EXPORT:SPEC:FILE:DESCRIPTION]...": "an executable, with the name of its export",
    "[--jax-entry NAME:SPEC:KEY:FILE]...": "an executable for JAX's compilation cache, with its key",
    "[--executables-only]": "trace nothing again, as the packages to do so are not here",
    **IMPORT_ROOTS,
    **PLUGINS,
}


def run(options: Options) -> Answer:
    from stagec.audit.reproducibility import CacheEntry, Executable, Export, reproduce
    from stagec.backends.cpu import eager
    from stagec.core.messages.progress import Progress

    exports, executables = [], []
    lowered = {name: Path(file).absolute() for name, file in map(pair, options.lowered)}
    for name, *files in (split(text, 4) for text in options.export):
        spec, exported, description = (Path(file).absolute() for file in files)
        exports.append(Export(name, spec, exported, description, lowered.get(name)))
    for name, export, *files in (split(text, 5) for text in options.executable):
        executables.append(Executable(name, export, *(Path(file).absolute() for file in files)))
    entries = [
        CacheEntry(name, *(Path(file).absolute() for file in files))
        for name, *files in (split(text, 4) for text in options.jax_entry)
    ]
    plugins = {platform: Path(folder).absolute() for platform, folder in map(pair, options.plugin)}
    retrace = not options.executables_only
    with Progress("reproduce", 2 * (len(exports) * retrace + len(executables) + len(entries))) as progress:
        differences, unpromised, count = reproduce(
            exports, executables, options.import_root, plugins, progress, retrace, entries
        )
    lines = [
        *differences,
        *(['nobody promised the same of these: examined = "none"'] if unpromised else []),
        *unpromised,
    ]
    lines.append(f"{count} artifacts built twice again, {len(differences)} differences")
    lines[-1] += f' of what is promised, {len(unpromised)} of what examined = "none" built' if unpromised else ""
    another = eager.can_be_another_machine()
    if retrace and not another:
        lines.append("this machine can show a build no other CPU: what follows the CPU was not looked for")
    answer = {
        "artifacts": count,
        "differences": differences,
        "unpromised": unpromised,
        "another_cpu": retrace and another,
    }
    return Answer(answer, "\n".join([*lines, ""]), 1 if differences else 0)
