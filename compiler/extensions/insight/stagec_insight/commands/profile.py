"""Show where the time of a build went, by actions and phases."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, write_whole
from stagec.cli.options import value

OPTIONS = {
    "paths ...": value(
        "a .profile.json file, a folder with some, or what Bazel's --build_event_json_file wrote", metavar="PATH"
    ),
    "[--trace FILE]": "write the actions in time, as a trace that Perfetto opens",
}


def run(options: Options) -> Answer:
    from stagec_insight import profiles

    recorded = profiles.read(options.paths)
    if options.trace:
        write_whole(options.trace, profiles.as_trace(recorded).encode())
    report = profiles.report(recorded)
    return Answer(report, profiles.as_text(report))
