"""What a cache costs and saves: builds with `--disk_cache` and with an HTTP cache against builds with neither."""

from __future__ import annotations

import itertools
import shutil
import statistics
from collections.abc import Callable

from benchmarks import models
from benchmarks.measuring import Options, Row, ratio
from benchmarks.workspace import workspace
from tests.caches import http_cache

_TARGETS = {"small": "SSE4_2", "large": "AVX2"}
_HERE = "--extra_toolchains=@stagec//compiler:toolchain_here"
_MOST = 1.5


def measure(options: Options) -> list[Row]:
    """Return the rows of clean builds, null builds and edits with caches, and of a build in a second clone.

    The toolchain is the one that docs/remote.md names for caches. Raises RuntimeError when the second clone misses.
    """
    return [*_first_clone(options), *_second_clone(options)]


def _first_clone(options: Options) -> list[Row]:
    """A clean build fills an empty cache; a null build and an edit come after it, with the same cache.

    Without `toolchain_here` too: then Bazel looks at the files of all packages for each action.
    """
    count, numbers = options.sizes[1], itertools.count(1)
    seconds: dict[str, dict[str, list[float]]] = {}
    with (
        http_cache(options.folder / "http") as http,
        workspace(options.folder / "cached", models.small(count), {"large": "AVX2"}) as built,
    ):
        disk = options.folder / "disk"
        caches = {
            "no cache": [_HERE],
            "disk": [_HERE, f"--disk_cache={disk}"],
            "http": [_HERE, f"--remote_cache={http.url}"],
            "disk, all inputs": [f"--disk_cache={disk}"],
            "http, all inputs": [f"--remote_cache={http.url}"],
        }

        def clean(name: str) -> float:
            for folder in (disk, http.folder / "files" / "ac", http.folder / "files" / "cas"):
                shutil.rmtree(folder, ignore_errors=True)
            return built.clean_build(*caches[name])

        def edit(name: str) -> float:
            built.append("models/f0000.py", f"def f0000(w, x):\n    return layers.mlp(w, x, 1) + {next(numbers)}")
            return built.build(*caches[name])

        def null(name: str) -> float:
            return built.build(*caches[name])

        kinds: dict[str, Callable[[str], float]] = {"clean build": clean, "edit": edit, "null build": null}
        for _ in range(options.rounds):
            for name in caches:
                for kind, run in kinds.items():
                    seconds.setdefault(kind, {}).setdefault(name, []).append(run(name))
    named = {
        "clean build": f"clean build of {count} functions",
        "edit": f"edit one of {count}",
        "null build": f"null build of {count}",
    }
    return [
        Row(
            f"{named[kind]}, {cache}",
            "no cache",
            ratio(times, cache, "no cache"),
            None if kind == "clean build" else _MOST,
            {name: times[name] for name in (cache, "no cache")},
        )
        for kind, times in seconds.items()
        for cache in caches
        if cache != "no cache"
    ]


def _second_clone(options: Options) -> list[Row]:
    """One clone fills the cache; another, which has its packages and nothing else, builds from it."""
    functions, rows = models.small(options.sizes[2]), []
    with http_cache(options.folder / "shared") as cache:
        shared = [_HERE, f"--remote_cache={cache.url}"]
        with workspace(options.folder / "first", functions, _TARGETS) as first:
            first.build(*shared)
        built = sum(file.stat().st_size for file in cache.blobs) / 1e6
        what = f"second clone of {len(functions):,} functions x {len(_TARGETS)} targets"
        with workspace(options.folder / "second", functions, _TARGETS) as second:

            def restarted(*words: str) -> float:
                """Run a command with a new server, and nothing built; return the CPU seconds of that server."""
                second.run("clean")
                second.run("shutdown")
                seconds.append(second.build(*shared, *words))
                return second.cpu_seconds()

            seconds: list[float] = []
            analysis = [restarted("--nobuild") for _ in range(options.rounds)]
            for download, most, megabytes in (("minimal", 20.0, 50.0), ("toplevel", None, None)):
                cache.traffic()
                seconds = []
                cpu = [restarted(f"--remote_download_{download}") for _ in range(options.rounds)]
                moved = cache.traffic()
                if moved.misses:
                    raise RuntimeError(f"{moved.misses} actions were not in the cache")
                name, note = f"{what}, {download} download", "its packages are installed"
                size = (moved.sent + moved.received) / options.rounds / 1e6
                times = {"build": seconds}
                rows += [
                    Row(name, "", statistics.median(seconds), most, times, "s", note),
                    Row(f"{name}, CPU of Bazel", "", statistics.median(cpu), None, {"CPU": cpu}, "s", note),
                    Row(f"{name}, traffic", "", size, megabytes, unit="MB"),
                ]
    return [
        *rows,
        Row(f"{what}, CPU of Bazel before the first action", "", statistics.median(analysis), None, unit="s"),
        Row(f"{what}, all that is in the cache", "", built, None, unit="MB"),
    ]
