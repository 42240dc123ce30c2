"""The actions of a plan, with their command lines: those that rules/private/*.bzl declare to Bazel for `aot_manifest`.

A test compares the two, word by word (tests/test_e2e.py). For the programs of a rehearsal, they are those of
`aot_programs`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec.hardware import catalog

OUT = "stagec-out"
"""The folder of an execution root with everything that is made, as bazel-out is Bazel's."""


@dataclass(frozen=True)
class Action:
    """One run of a command of stagec. Paths are relative to the execution root.

    name: of the artifact. command: such as "action export". arguments: of it, but for the outputs that a worker is
    told of. inputs: files that it reads, made by other actions or not. outputs: files that it writes.
    runs_model: whether it may read the sources too, and lists those that it did not read in `unread`.
    platform: whose compiler it needs. in_worker: whether a worker does it; what reads no more than data needs none.
    """

    name: str
    command: str
    arguments: Sequence[str]
    inputs: Sequence[str]
    outputs: Sequence[str]
    runs_model: bool = False
    platform: str = "cpu"
    in_worker: bool = True

    @property
    def unread(self) -> str:
        """The file with the sources that it did not read."""
        return f"{self.outputs[0]}.unread"


@dataclass(frozen=True)
class Build:
    """All actions of a bundle, each after those whose outputs it reads.

    actions: of the bundle, and of what else was asked for. written: the content of files that are inputs: specs.
    bundle: its path; of programs, that of JAX's compilation cache. jax_cache: the path of that, a .tar file. beside:
    files of weights that lie beside the bundle, relative to the manifest's folder. weights: all such files that actions
    read, relative to the execution root.
    """

    actions: Sequence[Action]
    written: Mapping[str, str]
    bundle: str
    jax_cache: str
    beside: Sequence[str]
    weights: Sequence[str]


class Paths:
    """Where the files of a manifest's artifacts are. folder: of the manifest, relative to the workspace."""

    def __init__(self, plan: Mapping[str, Any], folder: str) -> None:
        self.name: str = plan["bundle"]["name"]
        self._folder = f"{folder}/" if folder else ""

    def made(self, name: str) -> str:
        """Return the path of something that is made. Its folder has no colons: those are between paths in words."""
        return f"{OUT}/{self._folder.replace(':', '-')}{name}"

    def source(self, name: str) -> str:
        """Return the path of a file that the manifest names."""
        return f"{self._folder}{name}"

    @property
    def names(self) -> str:
        """The file with the names of all sources."""
        return self.made(f"{self.name}.imports/names.txt")

    @property
    def jax_cache(self) -> str:
        """The folder of JAX's compilation cache, in a .tar file."""
        return self.made(f"{self.name}.jax_cache.tar")

    def looked(self, export: str) -> str:
        """Return the file with what a function's modules look for."""
        return self.made(f"{self.name}.imports/{export}.json")


def build(
    plan: Mapping[str, Any],
    folder: str,
    import_roots: Sequence[str],
    sources: Sequence[str],
    functions: Collection[str] = (),
    targets: Collection[str] = (),
    jax_cache: bool = False,
) -> Build:
    """Return the actions of a plan.

    plan: as `Plan.to_json` has it. folder: of the manifest, relative to the workspace; "" for that itself.
    import_roots, sources: relative to it. functions, targets: names of those to build; none: all.
    jax_cache: whether to build JAX's compilation cache too.
    """
    paths = Paths(plan, folder)
    exports = [artifact for artifact in plan["exports"] if not functions or artifact["spec"]["name"] in functions]
    names = {artifact["name"] for artifact in exports}
    executables = [
        artifact
        for artifact in plan["executables"]
        if artifact["export"] in names and (not targets or artifact["spec"]["target"]["name"] in targets)
    ]
    roots = [f"--import-root={root}" for root in import_roots]
    written = {
        f"{paths.made(artifact['name'])}.spec.json": _to_json(artifact["spec"]) for artifact in (*exports, *executables)
    }
    written[paths.names] = "".join(f"{path}\n" for path in sources)
    lowered = {artifact["name"] for artifact in exports if artifact["spec"]["devices"]}
    actions = [_imports(paths, exports, roots, sources), *(_export(paths, export, roots) for export in exports)]
    actions += [_compile(paths, executable, executable["export"] in lowered, folder) for executable in executables]
    actions += [_golden(paths, export, roots) for export in exports if export["spec"]["golden"]]
    weights = {w["file"]: w["external"] for artifact in exports for w in artifact["spec"]["bind"].values()}
    beside = [file for file, external in weights.items() if external]
    actions += [_describe(paths, file) for file in beside]
    actions.append(_bundle(paths, plan, exports, executables, weights))
    if jax_cache:
        actions += _jax_cache(paths, plan, exports, executables, roots)
    read = [paths.source(file) for file in weights]
    read += [
        paths.source(artifact["spec"]["golden"]["inputs"])
        for artifact in exports
        if artifact["spec"]["golden"].get("inputs")
    ]
    return Build(actions, written, paths.made(f"{paths.name}.aot"), paths.jax_cache, beside, read)


def programs(path: str, name: str, keys: Sequence[str], targets: Sequence[str]) -> Build:
    """Return the actions of the programs of a rehearsal.

    path: of its programs.toml, relative to the workspace, as `keys` are: the files of programs' keys.
    name: of what is built. targets: as `aot_programs` has them.
    """
    paths = Paths({"bundle": {"name": name}}, os.path.dirname(path))
    folder = paths.jax_cache.removesuffix(".tar")
    actions: list[Action] = []
    entries: list[str] = []
    costs: dict[str, str] = {}
    for target in targets:
        platform = catalog.target(target).platform
        called = target.replace(":", "-")
        spec = f"{folder}.{called}.spec.json"
        words = ["--programs", path, f"--target={target}", "--output", spec]
        words += [word for key in keys for word in ("--key", key)]
        actions.append(Action(f"{name}.{called}", "action program-spec", words, [path, *keys], [spec], in_worker=False))
        for key in keys:
            digest = os.path.basename(key).removesuffix(".key")
            cost = f"{folder}.parts/{called}.{digest}.costs.json"
            costs[cost] = f"{digest}:{cost}:{target}"
            more = ["--costs", cost, f"--series={path} {target}"]
            actions.append(_compile_for_jax(folder, f"{called}.{digest}", spec, key, platform, more, [cost], entries))
    words = [*_flat({"--programs": path, "--output": paths.made(f"{name}.report.html")})]
    words += [f"--costs={each}" for each in costs.values()]
    page = Action(f"{name}.report", "action program-report", words, [path, *costs], [words[3]], in_worker=False)
    actions += [_jax_cache_folder(paths, path, entries), page]
    return Build(actions, {}, paths.jax_cache, paths.jax_cache, [], [])


def modules_of(spec: Mapping[str, Any]) -> list[str]:
    """Return the modules that a function's spec names; none where the function is a file."""
    named = [value for value in spec.values() if isinstance(value, str)]
    return [value.partition(":")[0] for value in named if ":" in value and "/" not in value and "?" not in value]


def files_of(spec: object) -> Iterator[str]:
    """Yield what may name a file or a folder in a function's spec, relative to the manifest's folder."""
    if isinstance(spec, str):
        path = spec.partition("?")[0]
        if "." in path or "/" in path or path != spec:
            yield path
    elif isinstance(spec, Mapping):
        for value in spec.values():
            yield from files_of(value)
    elif isinstance(spec, Sequence):
        for value in spec:
            yield from files_of(value)


def _to_json(spec: object) -> str:
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _imports(
    paths: Paths, exports: Sequence[Mapping[str, Any]], roots: Sequence[str], sources: Sequence[str]
) -> Action:
    words = ["--names", paths.names, *roots]
    for export in exports:
        words += ["--function", paths.looked(export["name"]), ",".join(modules_of(export["spec"]))]
    looked = [paths.looked(export["name"]) for export in exports]
    return Action(f"{paths.name}.imports", "action imports", words, [paths.names, *sources], looked, in_worker=False)


def _model(
    paths: Paths,
    name: str,
    command: str,
    words: Sequence[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    export: str,
    plugins: Sequence[str],
) -> Action:
    """Return an action that runs a model."""
    looked = ["--names", paths.names, "--imports", paths.looked(export), "--unread", f"{outputs[0]}.unread"]
    platform = "cuda" if "cuda" in plugins else "cpu"
    return Action(name, command, [*words, *looked], inputs, outputs, runs_model=True, platform=platform)


def _export(paths: Paths, export: Mapping[str, Any], roots: Sequence[str]) -> Action:
    name = export["name"]
    stem = paths.made(name)
    written = {"--output": f"{stem}.exported", "--description": f"{stem}.exported.json"}
    if export["spec"]["devices"]:
        written["--lowered"] = f"{stem}.lowered"
    words = [*_flat(written), "--spec", f"{stem}.spec.json", *roots]
    inputs = [f"{stem}.spec.json"]
    return _model(paths, name, "action export", words, inputs, [*written.values()], name, export["spec"]["plugins"])


def _compile(paths: Paths, executable: Mapping[str, Any], lowered: bool, folder: str) -> Action:
    name, spec = executable["name"], executable["spec"]
    stem, exported = paths.made(name), paths.made(executable["export"])
    platform = spec["target"]["platform"]
    inputs = [f"{stem}.spec.json", f"{exported}.exported"]
    words = [f"--label={name}", "--spec", inputs[0], "--exported", inputs[1]]
    if lowered and platform != "cpu":
        inputs.append(f"{exported}.lowered")
        words += ["--lowered", inputs[-1]]
    suffixes = {
        "--output": "xla",
        "--description": "json",
        "--module": "stablehlo.mlirbc",
        "--inventory": "inventory.json",
    }
    written = {option: f"{stem}.{suffix}" for option, suffix in suffixes.items()}
    words += _flat(written)
    if platform == "cpu":
        words.append(f"--series={folder} {spec['manifest']} {_to_json(spec['target'])}")
    return Action(name, "action compile", words, inputs, [*written.values()], platform=platform)


def _golden(paths: Paths, export: Mapping[str, Any], roots: Sequence[str]) -> Action:
    name, spec = export["name"], export["spec"]
    stem = paths.made(name)
    inputs = [f"{stem}.spec.json", f"{stem}.exported", f"{stem}.exported.json"]
    output = f"{stem}.golden.safetensors"
    words = [
        *_flat(dict(zip(("--spec", "--exported", "--description"), inputs, strict=True))),
        "--output",
        output,
        *roots,
    ]
    for weights in dict.fromkeys(weights["file"] for weights in spec["bind"].values()):
        words += ["--weights", f"{weights}={paths.source(weights)}"]
        inputs.append(paths.source(weights))
    if spec["golden"]["inputs"]:
        inputs.append(paths.source(spec["golden"]["inputs"]))
        words.append(f"--inputs={inputs[-1]}")
    return _model(paths, f"{name}.golden", "action golden", words, inputs, [output], name, spec["plugins"])


def _describe(paths: Paths, file: str) -> Action:
    output = _described(paths, file)
    words = [f"./{paths.source(file)}", "--output", output]
    return Action(file, "action describe-weights", words, [paths.source(file)], [output])


def _described(paths: Paths, file: str) -> str:
    return paths.made(f"{paths.name}.weights/{file}.json")


def _bundle(
    paths: Paths,
    plan: Mapping[str, Any],
    exports: Sequence[Mapping[str, Any]],
    executables: Sequence[Mapping[str, Any]],
    weights: Mapping[str, bool],
) -> Action:
    output = paths.made(f"{paths.name}.aot")
    words = ["--name", paths.name, "--version", plan["bundle"]["version"], "--output", output]
    for requirement in plan["serves"]:
        words += ["--serves", requirement]
    inputs: list[str] = []
    for option, artifacts, suffixes in (
        ("--export", exports, ("exported", "spec.json", "exported.json")),
        ("--executable", executables, ("xla", "json", "stablehlo.mlirbc")),
    ):
        for artifact in artifacts:
            files = [f"{paths.made(artifact['name'])}.{suffix}" for suffix in suffixes]
            words += [option, ":".join([artifact["name"], *files])]
            inputs += files
    for export in exports:
        if export["spec"]["golden"]:
            inputs.append(f"{paths.made(export['name'])}.golden.safetensors")
            words += ["--golden", f"{export['name']}={inputs[-1]}"]
    for option, wanted in (("--weights", False), ("--external-weights", True)):
        for file in [file for file, external in weights.items() if external == wanted]:
            inputs.append(_described(paths, file) if wanted else paths.source(file))
            words += [option, f"{file}={inputs[-1]}"]
    return Action(paths.name, "action bundle", words, inputs, [output])


def _jax_cache(
    paths: Paths,
    plan: Mapping[str, Any],
    exports: Sequence[Mapping[str, Any]],
    executables: Sequence[Mapping[str, Any]],
    roots: Sequence[str],
) -> Iterator[Action]:
    """Yield the actions of JAX's compilation cache, the last of which makes the folder."""
    folder = paths.jax_cache.removesuffix(".tar")
    specs = {artifact["name"]: artifact["spec"] for artifact in (*exports, *executables)}
    of = {executable["name"]: executable["export"] for executable in executables}
    entries: list[str] = []
    for name, ways in plan["jax_cache"]["executables"].items():
        if name not in of:  # not asked for
            continue
        stem, spec, target = f"{folder}.parts/{name}", f"{paths.made(name)}.spec.json", specs[name]["target"]
        key = f"{stem}.key"
        inputs = [f"{paths.made(of[name])}.spec.json", spec]
        words = ["--output", key, "--executable", spec, "--spec", inputs[0]]
        for way in ways:
            words += ["--committed", ",".join(map(str, way)) or "none"]
        plugins = specs[of[name]]["plugins"]
        yield _model(paths, name, "action jax-key", [*words, *roots], inputs, [key], of[name], plugins)
        words = []
        for machine in plan["jax_cache"]["machines"].get(target["name"], ()):
            words += ["--machine", machine]
        yield _compile_for_jax(folder, name, spec, key, target["platform"], words, [], entries)
    yield _jax_cache_folder(paths, exports[0]["spec"]["manifest"], entries)


def _compile_for_jax(
    folder: str,
    name: str,
    spec: str,
    key: str,
    platform: str,
    more: Sequence[str],
    outputs: Sequence[str],
    entries: list[str],
) -> Action:
    """Return the action that compiles for JAX's cache, and add its words to those of the folder."""
    executable, entry = (f"{folder}.parts/{name}.{suffix}" for suffix in ("xla", "json"))
    words = [f"--label={name}", "--spec", spec, "--key", key, "--output", executable, "--entry", entry, *more]
    entries += ["--entry", ":".join([name, entry, executable])]
    return Action(name, "action jax-compile", words, [spec, key], [executable, entry, *outputs], platform=platform)


def _jax_cache_folder(paths: Paths, manifest: str, entries: Sequence[str]) -> Action:
    inputs = [path for word in entries[1::2] for path in word.split(":")[1:]]
    folder = paths.jax_cache.removesuffix(".tar")
    words = [f"--manifest={manifest}", "--output", folder, "--layer", paths.jax_cache, *entries]
    return Action(f"{paths.name}.jax_cache", "action jax-cache", words, inputs, [paths.jax_cache], in_worker=False)


def _flat(options: Mapping[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair]
