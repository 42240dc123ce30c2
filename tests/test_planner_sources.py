"""The rules know which files planning depends on."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from stagec.core.builds.platforms import PLATFORMS

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, sys
from stagec.cli import main
status = [main(["action", "plan", path]) for path in sys.argv[1:]]
modules = {name: module.__file__ for name, module in sys.modules.items() if module and hasattr(module, "__file__")}
json.dump({"status": status, "modules": modules}, sys.stderr)
"""


def planning(*manifests: Path) -> tuple[list[int], dict[str, str]]:
    """Exit statuses of planning, and the modules that were imported for it with their files."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, manifests)],
        env={"PYTHONPATH": ":".join([str(ROOT / "compiler"), *sys.path])},
        capture_output=True,
        text=True,
    )
    done = json.loads(result.stderr.splitlines()[-1])
    return done["status"], done["modules"]


def test_the_list_in_the_rules_is_what_planning_imports(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text('[manifest]\nname = "x"\n[functions.f]\nentry = "a:b"\nargs = ["f33[2"]\nplatform = ""\n')
    status, modules = planning(ROOT / "examples" / "digits" / "digits.toml", broken)
    assert status == [0, 2]
    ours = {Path(file) for name, file in modules.items() if name.split(".")[0] == "stagec"}

    rules = (ROOT / "rules" / "private" / "manifest.bzl").read_text()
    start = rules.index("PLANNER_SOURCES = ") + len("PLANNER_SOURCES = ")
    sources = ast.literal_eval(rules[start : rules.index("]", start) + 1])
    assert sources == sorted({*sources})  # Bazel refuses a label twice
    listed = {ROOT / "compiler" / source for source in sources}
    listed |= {
        ROOT / "compiler" / f"stagec/{part}/{name}.py" for part in ("hardware", "manifest") for name in PLATFORMS
    }
    assert listed - {ROOT / "compiler" / "stagec" / "__main__.py"} == ours
    assert all(path.exists() for path in listed)


def test_planning_imports_nothing_heavy() -> None:
    _, modules = planning(ROOT / "examples" / "digits" / "digits.toml")
    assert {"jax", "jaxlib", "numpy"}.isdisjoint(name.split(".")[0] for name in modules)
