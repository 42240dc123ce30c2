"""A build after an edit, against the plain script with JAX's persistent compilation cache of what was not edited."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import host_target, workspace


def measure(options: Options) -> list[Row]:
    """Return the rows of an edit of one function, of a comment in its file, and of one in the file that all share.

    The script meets the same edit. Raises RuntimeError when other actions ran than must.
    """
    count = options.sizes[1]
    with workspace(options.folder / "edits", models.mixed(count), host_target()) as built:
        built.build()
        cache, numbers = options.folder / "cache", itertools.count(1)
        built.plain_script(cache)

        def edited(file: str, text: str, actions: int) -> Callable[[], float]:
            def build() -> float:
                built.append(file, text.format(next(numbers)))
                seconds = built.build()
                if built.actions != actions:
                    raise RuntimeError(f"{built.actions} actions ran, not {actions}, after an edit of {file}")
                return seconds

            return build

        def script() -> float:
            return built.plain_script(cache)

        # An edit is exported, compiled and bundled; a comment is exported.
        redefined = "def f000(w, x):\n    return layers.mlp(w, x, 1) + {}"
        program = interleaved(options.rounds, {"build": edited("models/f000.py", redefined, 3), "script": script})
        comment = interleaved(options.rounds, {"build": edited("models/f000.py", "# {}", 1), "script": script})
        shared = interleaved(options.rounds, {"build": edited("models/layers.py", "# {}", count), "script": script})
    against = "the script, its compilation cache warm"
    nothing = "0 compile actions"
    return [
        Row(f"edit one of {count} functions", against, ratio(program, "build", "script"), 0.2, program),
        Row(f"comment in one of {count}", against, ratio(comment, "build", "script"), 0.1, comment, note=nothing),
        Row(f"comment in a file of all {count}", against, ratio(shared, "build", "script"), None, shared, note=nothing),
    ]
