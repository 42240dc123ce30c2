"""Say which entries of JAX's compilation cache a program missed, and what of their keys differs."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Answer, Options, read_text
from stagec.core.messages.errors import Problem, StagecError
from stagec.jaxcache import jax_entries

OPTIONS = {
    "log": "what the program writes to stderr with JAX_LOGGING_LEVEL=DEBUG",
    "folder": "the folder that aot_jax_cache wrote",
}


def run(options: Options) -> Answer:
    from stagec.jaxcache import jax_misses

    index = str(Path(options.folder, jax_entries.INDEX))
    try:
        entries = jax_entries.read(read_text(index))
    except ValueError as error:
        raise StagecError(Problem(index, "", str(error), "give a folder that aot_jax_cache wrote")) from error
    lookups = list(jax_misses.read(read_text(options.log)))
    if not lookups:
        what = "it has no keys of JAX's compilation cache"
        write = "run the program with JAX_LOGGING_LEVEL=DEBUG and JAX_COMPILATION_CACHE_DIR, and keep its stderr"
        raise StagecError(Problem(options.log, "", what, write))
    misses = [jax_misses.explain(lookup, entries) for lookup in lookups if not lookup.hit]
    hits = len(lookups) - len(misses)
    text = "".join(miss.as_text() for miss in misses) + f"{hits} of {len(lookups)} found\n"
    return Answer({"hits": hits, "misses": [miss.to_plain() for miss in misses]}, text, 1 if misses else 0)
