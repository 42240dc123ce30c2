"""Compare estimates of train steps with times that the vendors published, and write the table of docs/costs.md.

python -m benchmarks.published

It needs the packages of tests/requirements.lock, compiler/cuda.lock and compiler/tpu.lock, and no device. XLA takes
minutes for each step, and 20 for that of the TPUs, so nothing runs this regularly.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.building import ROOT, checked, write_specs

PAGE = ROOT / "docs" / "costs.md"
_BEGIN, _END = "<!-- published -->\n", "<!-- end -->\n"
_NVIDIA = "https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources"
_GOOGLE = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium"


class Published(NamedTuple):
    """A time of a step. what: model, devices and batch. source: where it is published."""

    what: str
    seconds: float
    source: str


TIMES = {
    "llama_2_70b.h100x64": Published(
        "Llama 2 70B, 64 H100, 128 sequences of 4,096 tokens",
        6.999,
        f"{_NVIDIA}/maxtext-llama2-70b-dgxc-benchmarking-c",
    ),
    "llama_3_70b.h100x128": Published(
        "Llama 3 70B, 128 H100, 256 sequences of 8,192 tokens",
        15.57,
        f"{_NVIDIA}/maxtext-llama3-70b-dgxc-benchmarking-d",
    ),
    "llama_2_70b_pod.v6ex256": Published(
        "Llama 2 70B, 256 v6e, 768 sequences of 4,096 tokens",
        9.052,
        f"{_GOOGLE}/Llama2-70B-MaxText",
    ),
}
"""By function and target of published.toml."""


def estimated(name: str, out: Path) -> tuple[float, float]:
    """Return the seconds of the roofline and of the timeline of an executable that was compiled into `out`."""
    roofline = json.loads((out / f"{name}.json").read_text())["analysis"]["roofline"]
    process = re.search(r"by peak rates: ([\d.]+) ms", (out / f"{name}.timeline.json").read_text())
    assert process is not None
    return roofline["seconds"], float(process[1]) / 1e3


def table(estimates: dict[str, tuple[float, float]]) -> str:
    """Return the table: published seconds, and each estimate with its ratio to them."""
    rows = [
        f"| {what} | [{seconds:.2f} s]({source}) | {roofline:.2f} s, {roofline / seconds:.2f} | "
        f"{timeline:.2f} s, {timeline / seconds:.2f} |"
        for (what, seconds, source), (roofline, timeline) in ((TIMES[name], both) for name, both in estimates.items())
    ]
    head = ["| step | published | roofline, ratio | timeline, ratio |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows, ""])


def main() -> int:
    """Compile, and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        plan = write_specs("benchmarks/published/published.toml", ROOT, out)
        for name in (export["name"] for export in plan["exports"]):
            words = (
                "--output",
                f"{name}.exported",
                "--description",
                f"{name}.exported.json",
                "--lowered",
                f"{name}.lowered",
            )
            checked("action", "export", "--spec", f"{name}.spec", *words, "--import-root", ROOT, cwd=out)
        for name, export in ((executable["name"], executable["export"]) for executable in plan["executables"]):
            given = ("--spec", f"{name}.spec", "--exported", f"{export}.exported", "--lowered", f"{export}.lowered")
            described = ("--description", f"{name}.json")
            checked("action", "compile", *given, "--output", f"{name}.xla", *described, cwd=out)
            checked("action", "optimize", *given, "--hlo-after", f"{name}.hlo", cwd=out)
            words = (f"{name}.hlo", "--spec", f"{name}.spec", *described, "--output", f"{name}.timeline.json")
            checked("action", "timeline", *words, cwd=out)
        made = table({name: estimated(f"published.{name}", out) for name in TIMES})
    before, _, rest = PAGE.read_text("utf-8").partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}{made}{_END}{rest.partition(_END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
