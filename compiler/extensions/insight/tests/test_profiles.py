"""`stagec profile`: a table and a trace of what actions recorded.

Modules: `stagec_insight/commands/profile.py`, `stagec_insight/traces.py`.
"""

import json
from pathlib import Path
from typing import Any

from stagec_insight import profiles
from tests.building import checked, stagec

PROFILES: list[dict[str, Any]] = [
    {
        "command": "export",
        "artifact": "m.f",
        "started": 100.0,
        "seconds": 1.0,
        "max_rss": 200 << 20,
        "phases": [["import", 0.0, 0.25], ["trace", 0.25, 0.5], ["other", 0.75, 0.25]],
    },
    {
        "command": "compile",
        "artifact": "m.f.cpu.batch<8",
        "started": 101.5,
        "seconds": 2.5,
        "max_rss": 1300 << 20,
        "phases": [["refine", 0.0, 0.5], ["compile", 0.5, 1.5], ["refine", 2.0, 0.25], ["other", 2.25, 0.25]],
    },
]
TEXT = """\
artifact         command  seconds  import  trace  refine  compile  other    MiB
m.f.cpu.batch<8  compile     2.50       -      -    0.75     1.50   0.25  1,300
m.f              export      1.00    0.25   0.50       -        -   0.25    200
all 2                        3.50    0.25   0.50    0.75     1.50   0.50  1,300
4.00 s from the first start to the last end, 0.9 actions at a time
"""


def written(folder: Path) -> list[Path]:
    paths = [folder / "a b" / "m.f.profile.json", folder / "m.f.cpu.profile.json"]
    for path, profile in zip(paths, PROFILES, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"format": 1, "kind": "profile", **profile}))
    return paths


def test_the_table_is_the_same_of_files_folders_and_build_events(tmp_path: Path) -> None:
    paths = written(tmp_path)
    files = [{"name": path.name, "uri": path.as_uri()} for path in (*paths, tmp_path / "m.aot")]
    events = tmp_path / "events.json"
    lines = [{"id": {"started": {}}}, *({"namedSetOfFiles": {"files": [file]}} for file in files)]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for given in (paths, [tmp_path], [events], [*paths, tmp_path / "m.f.cpu.profile.json"]):
        assert checked("profile", *given) == TEXT
    report = json.loads(checked("profile", tmp_path, "--json"))
    assert (report["wall"], report["seconds"], report["phases"]["compile"]) == (4.0, 3.5, 1.5)
    assert [row["artifact"] for row in report["actions"]] == ["m.f.cpu.batch<8", "m.f"]


def test_the_trace_has_every_action_in_its_place(tmp_path: Path) -> None:
    written(tmp_path)
    checked("profile", tmp_path, "--trace", tmp_path / "build.json")
    events = json.loads((tmp_path / "build.json").read_text())["traceEvents"]
    slices = {(one["cat"], one["name"], one["ts"]): one["dur"] for one in events if one["ph"] == "X"}
    assert slices == {
        ("action", "export m.f", 0): 1_000_000,
        ("phase", "import", 0): 250_000,
        ("phase", "trace", 250_000): 500_000,
        ("phase", "other", 750_000): 250_000,
        ("action", "compile m.f.cpu.batch<8", 1_500_000): 2_500_000,
        ("phase", "refine", 1_500_000): 500_000,
        ("phase", "compile", 2_000_000): 1_500_000,
        ("phase", "refine", 3_500_000): 250_000,
        ("phase", "other", 3_750_000): 250_000,
    }
    assert {one["tid"] for one in events if one["ph"] == "X"} == {0}


def test_actions_that_overlap_have_tracks_of_their_own() -> None:
    starts = [0.0, 0.5, 1.0, 1.2]
    found = [{**PROFILES[0], "artifact": f"m.{i}", "started": start} for i, start in enumerate(starts)]
    events = json.loads(profiles.as_trace(found))["traceEvents"]
    tracks = {one["args"]["artifact"]: one["tid"] for one in events if one.get("cat") == "action"}
    assert tracks == {"m.0": 0, "m.1": 1, "m.2": 0, "m.3": 2}


def test_what_is_no_profile_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[manifest]\n")
    (tmp_path / "m.profile.json").write_text("{}")
    (tmp_path / "none").mkdir()
    told = [
        (
            ["m.toml", "m.profile.json", "gone"],
            "m.toml: is neither a profile nor a file of Bazel's build events\n"
            "  give *.profile.json files, folders with them, or a file of --build_event_json_file\n"
            "gone: cannot be read: No such file or directory\n"
            "m.profile.json: is not a profile of format 1\n",
        ),
        (["none"], "none: lists no profile\n  build with --output_groups=+profile\n"),
    ]
    for given, said in told:
        done = stagec("profile", *given, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
