"""The names that the macro takes are those that a manifest refuses for functions."""

import json
from types import SimpleNamespace
from typing import Any

from stagec.core.builds.naming import MACRO_TARGETS
from tests.building import ROOT

MACRO = ROOT / "rules" / "private" / "manifest.bzl"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
SPEC = json.dumps({"golden": {"inputs": "", "optimized": True}, "bind": {}, "target": {"name": "t", "autotuning": "a"}})


class Declared(dict[str, Any]):
    """The names of a .bzl file: a rule from another file keeps the name of each target that it declares."""

    def __init__(self, **known: Any) -> None:
        super().__init__(known)
        self.targets: list[str] = []

    def __missing__(self, name: str) -> Any:
        if not name.startswith("aot_"):
            raise KeyError(name)
        return lambda *_, **attributes: self.targets.append(attributes["name"])


def test_the_macro_declares_these_targets() -> None:
    executables = [
        SimpleNamespace(
            name=f"m.f.{platform}",
            spec=SPEC,
            export="m.f",
            platform=platform,
            plugin=None,
            environment=None,
            suffix="",
            exec_properties=None,
        )
        for platform in PLATFORMS
    ]
    names = Declared(
        load=lambda *_: None,
        Label=str,
        attr=SimpleNamespace(label=lambda **_: None, label_list=lambda **_: None),
        repository_rule=lambda **_: None,
        native=SimpleNamespace(package_name=lambda: "", glob=lambda *_, **__: []),
        json=SimpleNamespace(decode=json.loads, encode=json.dumps),
        PLANNING=[],
        PLUGINS=dict.fromkeys(PLATFORMS),
        compiled_executables=lambda *_: SimpleNamespace(problems=[], executables=executables, crossing=[]),
    )
    exec(compile(MACRO.read_text("utf-8"), MACRO, "exec"), names)  # Starlark's syntax is Python's
    plan = {
        "path": "m.toml",
        "package": "",
        "folder": "",
        "bundle": ("m", "1"),
        "reproducible": True,
        "bundle_size": 1,
        "tolerances": {"f": {"flops": 1}},
        "jax_cache": {"executables": {"m.f.cpu": [[]]}, "machines": {}},
        "jaxlib": {},
        "serves": [],
        "exports": [("m.f", "f", SPEC)],
        "executables": [(one.name, "m.f", SPEC) for one in executables],
    }
    names["declare_manifest"](plan, [], "m.toml", "m", [], [], {}, [], "manifest", {})
    artifacts = {"m", "m.f", "m.f.golden", *(one.name for one in executables)}
    assert artifacts < {*names.targets}
    assert sorted({*names.targets} - artifacts) == [f"m.{name}" for name in MACRO_TARGETS]
