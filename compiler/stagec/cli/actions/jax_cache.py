"""Write a folder that JAX uses as its persistent compilation cache."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

from stagec.cli.files import Options, read, read_text, split, write_below, write_whole
from stagec.cli.options import value
from stagec.core.messages.errors import Problem, StagecError, blaming
from stagec.jaxcache import jax_entries

OPTIONS = {
    "[--manifest MANIFEST]": value("what messages call the manifest", ""),
    "[--entry NAME:ENTRY:EXECUTABLE]...": "an executable of the manifest, and the two files that stagec action "
    "jax-compile wrote",
    "[--layer FILE]": "where to write the folder as a .tar file, for an image",
    "--output FOLDER": "the folder to write",
}


def _tar(folder: Path, name: str) -> bytes:
    """Return the files of a folder, which has no others, in a tar that is the same bytes everywhere."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            member = tarfile.TarInfo(f"{name}/{path.name}")
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def run(options: Options) -> None:
    owners: dict[str, str] = {}
    entries = []
    Path(options.output).mkdir(parents=True, exist_ok=True)
    for name, described, executable in (split(text, 3) for text in options.entry):
        with blaming(described, "let stagec action jax-compile write it again"):
            listed = jax_entries.read(read_text(described))
        if not any(entry.names.get(compression) for entry in listed for compression in jax_entries.COMPRESSIONS):
            what = f"{name} has no entry, and a program that calls it would compile"
            raise StagecError(Problem(options.manifest, "jax_cache", what, "build its key and its entry again"))
        data = read(executable)
        packed = {"zlib": listed[0].zlib, "zstandard": "zstandard"}
        contents = {frame: jax_entries.file(data, frame) for frame in dict.fromkeys(packed.values())}
        sums = {compression: jax_entries.digest(contents[frame]) for compression, frame in packed.items()}
        entries += [replace(entry, sha256=sums) for entry in listed]
        for compression in jax_entries.COMPRESSIONS:
            content = contents[packed[compression]]
            for key in [key for entry in listed for key in entry.names[compression].values()]:
                if owners.setdefault(key, name) != name:
                    what = f"{owners[key]} and {name} are one entry to JAX, whose key has nothing in which they differ"
                    raise StagecError(Problem(options.manifest, "jax_cache", what, "leave one of them out"))
                write_below(options.output, key + jax_entries.SUFFIX, [content])
                write_below(options.output, key + jax_entries.USED, [bytes(8)])
    write_below(options.output, jax_entries.INDEX, [jax_entries.to_json(entries).encode()])
    if options.layer:
        write_whole(options.layer, _tar(Path(options.output), Path(options.layer).stem))
