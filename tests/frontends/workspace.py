"""Export one function of a small workspace with the command, as Bazel does."""

from pathlib import Path
from typing import Any

from stagec.core.builds import frontends
from stagec.core.builds.specs import FunctionSpec, to_json
from tests.building import stagec


def spec(**changes: Any) -> FunctionSpec:
    """A spec for a function of one array, with these keys instead."""
    values: dict[str, Any] = {
        "name": "f",
        "manifest": "pkg/m.toml",
        "entry": "pkg.model:double",
        "args": ["f32[2,3]"],
        "kwargs": {},
        "avals": None,
        "platforms": ["cpu"],
        "constraints": [],
        "static": {},
        "donate_argnums": [],
        "donate_argnames": [],
        "keep_unused": False,
        "inline": False,
        "enable_x64": False,
        "vjp_order": 0,
    }
    values |= changes
    return FunctionSpec(**{"frontend": frontends.of_entry(values["entry"]).name, **values})


def export(workspace: Path, function: FunctionSpec) -> tuple[int, str, Path]:
    """Return exit status, stderr and the output's path."""
    output = workspace / "out" / "f.exported"
    output.unlink(missing_ok=True)
    (workspace / "f.spec").write_text(to_json(function))
    done = stagec("action", "export", "--spec", "f.spec", "--output", output, "--import-root", ".", cwd=workspace)
    return done.returncode, done.stderr, output
