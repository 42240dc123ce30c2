"""Show where the time of a build went, by actions and phases."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer, write_whole


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a .profile.json file, a folder with some, or what Bazel's --build_event_json_file wrote",
    )
    parser.add_argument("--trace", metavar="FILE", help="write the actions in time, as a trace that Perfetto opens")


def run(options: argparse.Namespace) -> Answer:
    from stagec.reports import profiles

    recorded = profiles.read(options.paths)
    if options.trace:
        write_whole(options.trace, profiles.as_trace(recorded).encode())
    report = profiles.report(recorded)
    return Answer(report, profiles.as_text(report))
