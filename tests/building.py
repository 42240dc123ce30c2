"""Build manifests with the command line, with processes and forks as Bazel has them, without Bazel."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stagec.core.builds.actions import ENVIRONMENT
from tests.forking import Template

ROOT = Path(__file__).absolute().parent.parent
COMPILER = ROOT / "compiler"
EXTENSIONS = [str(path.parent) for path in sorted(COMPILER.glob("extensions/*/stagec_*"))]
"""Where the packages of extensions are imported from."""
INSTALLER = ROOT / "rules" / "private" / "python_environment.py"
PYTHON = (sys.executable, "-B", "-s", "-S")
_READERS = [
    "baseline",
    "diff",
    "explain",
    "extract",
    "inspect",
    "report",
    "reproduce",
    "run",
    "strip",
    "stub",
    "verify",
]
# Commands that are forks, and the name of the template of each.
FORKING = {
    **{f"action {command}": command for command in ("bundle", "compile", "export", "golden")},
    **{f"action {command}": "compile" for command in ("jax-compile", "lower", "optimize")},
    **{f"action {command}": "export" for command in ("jax-key", "jaxpr")},
    **dict.fromkeys(("init", "action plan", "targets"), "plan"),
    **dict.fromkeys(_READERS, "readers"),
}


def action_environment() -> dict[str, str]:
    """The variables that the rules give an action."""
    site_packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    return {
        "PYTHONPATH": os.pathsep.join([*site_packages, str(COMPILER), *EXTENSIONS]),
        **ENVIRONMENT,
    }


@functools.cache
def another_release() -> tuple[str, str] | None:
    """Return the path and the version of another release of this Python with its ABI; None: this machine has none."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = {*map(Path, os.get_exec_path()), Path("/usr/bin"), Path("/usr/local/bin")}
    ask = "import importlib.machinery, sys; print(importlib.machinery.EXTENSION_SUFFIXES[0], sys.version.split()[0])"

    def answer(python: str) -> list[str]:
        return subprocess.run([python, "-c", ask], check=False, capture_output=True, text=True).stdout.split()

    abi, here = answer(sys.executable)
    for path in sorted(str(folder / name) for folder in folders if (folder / name).exists()):
        found = answer(path)
        if found[:1] == [abi] and found[1] != here:
            return path, found[1]
    return None


def stagec(
    *arguments: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of stagec with the environment that the rules give it.

    Commands that most tests run are forks (`Template`). env: more variables, for a new process; also where there are
    none, for a test that is about processes. path: where a fork looks for programs.
    """
    words = [str(argument) for argument in arguments]
    # Not `action locations`: they have whole call stacks, and those of a fork begin in the template.
    name = " ".join(words[: 2 if words[:1] == ["action"] else 1])
    if env is None and name in FORKING:
        return _template(FORKING[name]).run(words, cwd, path)
    command = [*PYTHON, str(COMPILER / "stagec" / "__main__.py"), *words]
    return subprocess.run(command, cwd=cwd, env={**action_environment(), **(env or {})}, capture_output=True, text=True)


@functools.cache
def _template(name: str) -> Template:
    return Template(name, PYTHON, action_environment())


def checked(*arguments: str | Path, cwd: Path = ROOT) -> str:
    """Run a command that must succeed; return its stdout."""
    done = stagec(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def _losing(lost: MutableMapping[str, str] | None, name: str) -> Iterator[None]:
    """Keep in `lost` why an action of an export failed. None: the failure goes on."""
    try:
        yield
    except AssertionError as failure:
        if lost is None:
            raise
        lost[name] = str(failure).strip()


def write_specs(manifest: str, root: Path, out: Path) -> dict[str, Any]:
    """Plan `manifest` (relative to `root`) and write every spec to `out`/NAME.spec; return the plan."""
    plan: dict[str, Any] = json.loads(checked("action", "plan", manifest, "--json", cwd=root))
    for artifact in [*plan["exports"], *plan["executables"]]:
        (out / f"{artifact['name']}.spec").write_text(json.dumps(artifact["spec"]))
    return plan


def build_zoo(folder: Path) -> Path:
    """Build tests/zoo/zoo.toml into `out` in a folder, from a copy of the sources; return the bundle's path."""
    root, out = folder / "source", folder / "out"
    shutil.copytree(ROOT / "tests" / "zoo", root / "tests" / "zoo")
    out.mkdir()
    return build("tests/zoo/zoo.toml", out, root)


def build_model(folder: Path, manifest: str, model: str) -> Path:
    """Write m.toml and model.py into a folder, and build the bundle there; return its path."""
    (folder / "m.toml").write_text(manifest)
    (folder / "model.py").write_text(model)
    return build("m.toml", folder, folder)


def build_jax_cache(
    manifest: str,
    out: Path,
    root: Path,
    import_roots: Sequence[Path] = (),
    compile_: Callable[..., object] | None = None,
    lost: MutableMapping[str, str] | None = None,
) -> Path:
    """Build the folder of JAX's compilation cache that `manifest` asks for, into `out`; return its path.

    import_roots: besides `root`. compile_, lost: as of `build`.
    """
    out.mkdir(exist_ok=True)
    plan = write_specs(manifest, root, out)
    specs = {executable["name"]: executable for executable in plan["executables"]}
    arguments: list[str | Path] = []
    for name, ways in plan["jax_cache"]["executables"].items():
        with _losing(lost, specs[name]["export"]):
            spec, traced = out / f"{name}.spec", out / f"{specs[name]['export']}.spec"
            files = {suffix: out / f"{name}.jax.{suffix}" for suffix in ("key", "json", "xla")}
            words = ["--output", files["key"], "--executable", spec, "--import-root", "."]
            words += [word for folder in import_roots for word in ("--import-root", folder)]
            committed = [word for way in ways for word in ("--committed", ",".join(map(str, way)) or "none")]
            checked("action", "jax-key", "--spec", traced, *words, *committed, cwd=root)
            machines = plan["jax_cache"]["machines"].get(specs[name]["spec"]["target"]["name"], [])
            named = [word for machine in machines for word in ("--machine", machine)]
            words = ["--key", files["key"], "--output", files["xla"], "--entry", files["json"], *named]
            on_cpu = specs[name]["spec"]["target"]["platform"] == "cpu"
            compiled = checked if compile_ is None or on_cpu else compile_
            compiled("action", "jax-compile", "--spec", spec, *words, cwd=root)
            arguments += ["--entry", f"{name}:{files['json']}:{files['xla']}"]
    checked(
        "action",
        "jax-cache",
        "--manifest",
        manifest,
        "--output",
        out / "jax_cache",
        "--layer",
        out / "jax_cache.tar",
        *arguments,
        cwd=root,
    )
    return out / "jax_cache"


def build(
    manifest: str,
    out: Path,
    root: Path = ROOT,
    import_roots: Sequence[Path] = (),
    only: Collection[str] = (),
    hlo: Collection[str] = (),
    compile_: Callable[..., object] | None = None,
    lost: MutableMapping[str, str] | None = None,
) -> Path:
    """Build the bundle of `manifest` into `out`; return its path.

    only: functions and executables to build, such as mlp and attention.h200; none: all. hlo: platforms whose optimized
    programs to write as well, to `out`/NAME.hlo_after.pb. compile_: what runs the actions that compile in place of
    `checked`, for executables of accelerators. lost: gets the exports that could not be built, and why; the bundle has
    the others. None: the first failure ends the build.
    """
    plan = write_specs(manifest, root, out)
    if only:
        starts = tuple(f"{plan['bundle']['name']}.{name}." for name in only)
        plan["executables"] = [row for row in plan["executables"] if f"{row['name']}.".startswith(starts)]
        exports = {row["export"] for row in plan["executables"]}
        plan["exports"] = [row for row in plan["exports"] if row["name"] in exports]
    folder = root / Path(manifest).parent

    def bound(*specs: Mapping[str, Any], external: bool | None = None) -> list[str]:
        tables = [weights for spec in specs for weights in spec["bind"].values()]
        files = {table["file"] for table in tables if external in (None, table["external"])}
        return [word for file in sorted(files) for word in ("--weights", f"{file}={folder / file}")]

    specs = [export["spec"] for export in plan["exports"]]
    arguments: list[str | Path] = [*bound(*specs, external=False)]
    for word in bound(*specs, external=True)[1::2]:
        file, path = word.split("=")
        checked("action", "describe-weights", path, "--output", out / f"{file}.json")
        arguments += ["--external-weights", f"{file}={out / file}.json"]
    made: list[tuple[str, list[str | Path]]] = []
    for export in plan["exports"]:
        name = export["name"]
        with _losing(lost, name):
            roots = [part for folder in (root, *import_roots) for part in ("--import-root", folder)]
            exported = out / f"{name}.exported"
            words: list[str | Path] = ["--output", exported, "--description", f"{exported}.json"]
            words += ["--lowered", out / f"{name}.lowered"]
            checked("action", "export", "--spec", out / f"{name}.spec", *words, *roots, cwd=root)
            made.append((name, ["--export", f"{name}:{exported}:{out / name}.spec:{exported}.json"]))
            if export["spec"]["golden"]:
                file = export["spec"]["golden"]["inputs"]
                given = [
                    "--exported",
                    exported,
                    "--description",
                    f"{exported}.json",
                    "--output",
                    out / f"{name}.golden",
                ]
                given += ["--inputs", folder / file] if file else []
                checked(
                    "action", "golden", "--spec", out / f"{name}.spec", *given, *bound(export["spec"]), *roots, cwd=root
                )
                made.append((name, ["--golden", f"{name}={out / name}.golden"]))
    for executable in plan["executables"]:
        if executable["export"] in (lost or ()):
            continue
        with _losing(lost, executable["export"]):
            stem = out / executable["name"]
            platform = executable["spec"]["target"]["platform"]
            compiled = checked if compile_ is None or platform == "cpu" else compile_
            program = ["--spec", f"{stem}.spec", "--exported", out / f"{executable['export']}.exported"]
            program += ["--lowered", out / f"{executable['export']}.lowered"]
            words = ["--output", f"{stem}.xla", "--description", f"{stem}.json"]
            words += ["--module", f"{stem}.stablehlo.mlirbc", "--inventory", f"{stem}.inventory.json"]
            compiled("action", "compile", *program, *words, cwd=root)
            if platform in hlo:
                compiled("action", "optimize", *program, "--hlo-proto", f"{stem}.hlo_after.pb", cwd=root)
            described = f"{executable['name']}:{stem}.xla:{stem}.json:{stem}.stablehlo.mlirbc"
            made.append((executable["export"], ["--executable", described]))
    arguments += [word for name, words in made if name not in (lost or ()) for word in words]
    bundle = out / f"{plan['bundle']['name']}.aot"
    checked(
        "action",
        "bundle",
        "--name",
        plan["bundle"]["name"],
        "--version",
        plan["bundle"]["version"],
        "--output",
        bundle,
        *arguments,
    )
    return bundle
