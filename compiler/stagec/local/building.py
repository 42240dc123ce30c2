"""Build a manifest, or what was rehearsed, without Bazel: `stagec build`, and `stagec.build` in a notebook."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.core.data import reading, writing
from stagec.core.messages.errors import Problem, StagecError, blaming, mistake, nearest
from stagec.core.messages.progress import Progress
from stagec.local import actions, environment, examining
from stagec.local.actions import Paths
from stagec.local.environment import Workspace
from stagec.local.pool import Pool
from stagec.local.running import Outcome, Runner
from stagec.local.store import Digests, Store, default_folder, state

if TYPE_CHECKING:
    from stagec.loader.bundle import Bundle

MARKS = ("MODULE.bazel", "WORKSPACE", "WORKSPACE.bazel", "pyproject.toml", ".git")
"""What only the folder of a workspace has."""
_SPEC = ".spec.json"
_HERE = os.uname().machine
_JOBS = 4
"""The most actions at a time, unless somebody wants more: each has a process that imported JAX."""


@dataclass(frozen=True)
class Wanted:
    """What to build.

    manifest: its path, or that of the programs.toml of a rehearsal. root: the workspace; None: the nearest folder above
    it with one of `MARKS`, else this one. import_roots: more folders below which modules are found, relative to it.
    data: files and folders that tracing reads, besides sources. functions, targets: those to build; none: all.
    plugins: platform -> folder of packages.
    jax_cache: whether to build JAX's compilation cache too. name: of what is built of a rehearsal; "": the file's.
    remote_cache: address of a cache that machines share; "": none. uploads: whether results are sent there.
    """

    manifest: str
    root: str | None = None
    import_roots: Sequence[str] = ()
    data: Sequence[str] = ()
    functions: Sequence[str] = ()
    targets: Sequence[str] = ()
    plugins: Mapping[str, str] = field(default_factory=dict)
    jax_cache: bool = False
    name: str = ""
    remote_cache: str = ""
    uploads: bool = True


class Local:
    """A manifest that is planned, or a rehearsal, with what its actions are and what the store has of it.

    build: the actions. runner: what does them. inputs: the files that the plan was made of. sources: those that models
    may import and read; of a rehearsal, the files of keys. Both are relative to `root`, as `manifest`.
    output: the file to write, if nobody names one. packages: folders of packages, plugins' too.
    written: real paths of the files that `write` wrote.
    """

    def __init__(self, wanted: Wanted, pool: Pool, runs: bool = True) -> None:
        """Plan it. Raises StagecError with all that is wrong with the manifest, and with the request.

        runs: whether it will be built: then a worker starts while a manifest is planned for the first time.
        """
        self._store, self._pool = pool.store, pool
        self.root = _root(wanted)
        manifest = os.path.relpath(os.path.realpath(wanted.manifest), self.root)
        self.folder = os.path.dirname(manifest)
        name = hashlib.sha256(str(self.root).encode()).hexdigest()
        digests = self._store.digests(name)
        import_roots = [".", *(os.path.relpath(self.root / folder, self.root) for folder in wanted.import_roots)]
        packages = environment.packages([str(self.root / folder) for folder in import_roots])
        self._digests, self.manifest, self.is_rehearsal = digests, manifest, _is_rehearsal(wanted.manifest)
        # To read all lists of packages takes long, and of a manifest of which nothing is kept all is to be done.
        if runs and digests.are_new and not self.is_rehearsal:
            pool.expect(packages)
        facts = environment.facts(packages, digests)
        self.plan: dict[str, Any]
        if self.is_rehearsal:
            _check_rehearsal(wanted)
            keys = os.path.join(self.folder, "programs")
            self.sources = [f"{keys}/{key}" for key in environment.files_below(f"{self.root}/{keys}", (".key",))]
            called = wanted.name or os.path.basename(manifest).removesuffix(".toml")
            self.plan, self.inputs = {"bundle": {"name": called}, "exports": []}, [manifest, *self.sources]
            self.build = actions.programs(manifest, called, self.sources, list(dict.fromkeys(wanted.targets)))
        else:
            first = functools.partial(pool.expect, packages) if runs else None
            self.plan, self.inputs = _plan(self._store, digests, facts, self.root, manifest, first)
            _check(self.plan, wanted, manifest)
            self.sources = sorted({*_sources(self.root, wanted.data), *_named(self.plan, self.root, self.folder)})
            _check_names(self.sources)
            named = wanted.functions, wanted.targets, wanted.jax_cache
            self.build = actions.build(self.plan, self.folder, import_roots, self.sources, *named)
        paths = Paths(self.plan, self.folder)
        self.output = os.path.basename(self.build.bundle)
        self.written = set[str]()
        plugins, said = dict(wanted.plugins), list[str]()
        if not any("examined" in export["spec"]["computed_on"] for export in self.plan["exports"]):  # it is "here"
            platforms = ["cpu", *sorted({action.platform for action in self.build.actions} - {"cpu"})]
            for platform in platforms:
                of_plugin = list(filter(None, [plugins.get(platform)]))
                given = digests, platform, [*packages, *of_plugin], facts["packages"], runs
                folder, line = examining.row(self._store, *given)
                said.append(line)
                if folder and platform == "cpu":
                    packages = [*packages, folder]
                    facts = environment.facts(packages, digests)
                elif folder:
                    plugins[platform] = os.pathsep.join([*of_plugin, folder])
        workspace = Workspace(self.root, name, self.sources, packages, facts, plugins)
        used = {action.platform for action in self.build.actions}
        of_plugins = (folders.split(os.pathsep) for platform, folders in plugins.items() if platform in used)
        self.packages = [*packages, *(folder for folders in of_plugins for folder in folders)]
        remote = None
        if wanted.remote_cache:
            from stagec.local.remote import Remote  # it takes longer than the rest

            remote = Remote(wanted.remote_cache, self._store, wanted.uploads)
        self.runner = Runner(self.build, paths, workspace, self._store, digests, remote)
        self.runner.outcome.said.update(dict.fromkeys(filter(None, said)))

    def run(self, jobs: int | None = None, keep_going: bool = False) -> Outcome:
        """Do the actions that the store does not have, and show a line about them on a terminal."""
        with Progress("build") as progress:
            return self.runner.run(self._pool, jobs or min(_JOBS, len(os.sched_getaffinity(0))), keep_going, progress)

    def write(self, output: str, artifacts: str | None = None, jax_cache: str | None = None) -> None:
        """Write the bundle to a path, and the weights beside it; and all artifacts, and JAX's cache, below folders.

        Each file gets its name when it is whole; the bundle is the last. Raises StagecError.
        """
        made = self.runner.outcome.made
        start = f"{os.path.dirname(self.build.bundle)}/"
        files = {output: made[self.build.bundle][0]}
        if artifacts:
            others = made.keys() - self.build.written.keys()
            files = {f"{artifacts}/{path.removeprefix(start)}": made[path][0] for path in others} | files
        self.written |= {os.path.realpath(path) for path in files}
        if jax_cache:
            cached = _write_cache(jax_cache, self._store.read(made[self.build.jax_cache][0]))
            self.written |= {os.path.realpath(path) for path in cached}
        for file in self.build.beside:
            _link(self.root / self.folder / file, Path(os.path.dirname(output) or ".", file))
        for path, digest in files.items():
            self._store.write(digest, path)

    def watched(self) -> list[Path]:
        """Return the files that a build reads, the folders that the plan names, and what it names that is not there."""
        named = [path for path in _paths(self.plan, self.folder) if not (self.root / path).is_file()]
        return [self.root / path for path in (*self.inputs, *self.sources, *self.build.weights, *named)]

    def files(self) -> list[Path]:
        """Return what the bundle depends on, sorted."""
        return [self.root / path for path in sorted({*self.inputs, *self.runner.outcome.reads, *self.build.weights})]

    def specs(self) -> dict[str, bytes]:
        """Return the specs of artifacts, by their names."""
        texts = {path: text.encode() for path, text in self.build.written.items()}
        for action in self.build.actions:  # those of a rehearsal are made
            made = {path: self.runner.outcome.made[path][0] for path in action.outputs if path.endswith(_SPEC)}
            texts |= {path: self._store.read(digest) for path, digest in made.items()}
        named = {os.path.basename(path): text for path, text in texts.items() if path.endswith(_SPEC)}
        return {name.removesuffix(_SPEC): text for name, text in named.items()}

    def read(self) -> dict[str, dict[str, str]]:
        """Return the digests of the manifest, and of what models may read, by path: those in the keys of actions.

        Left out is what lies beside the bundle.
        """
        beside = {os.path.normpath(os.path.join(self.folder, file)) for file in self.build.beside}
        paths = sorted({self.manifest, *self.sources, *self.build.weights} - beside)
        digests = {}
        for path in paths:
            with blaming(path):
                digests[path] = {"sha256": self._digests.of(f"{self.root}/{path}")}
        return digests

    def examined(self) -> list[str]:
        """Return the files with the rows of libraries that nobody knew before (`examining`)."""
        from stagec.patches.known_builds import HERE

        return list(filter(os.path.isfile, (f"{folder}/{HERE}" for folder in self.packages)))

    def unlisted(self) -> dict[str, str]:
        """Return what is in the folders of packages and of no package, by names, with digests (`environment.unlisted`).

        Left out is what this build examined: `examined` has it.
        """
        from stagec.patches.known_builds import HERE

        tops = environment.unlisted(self.packages, self._digests)
        return {name: digest for name, digest in tops.items() if name != HERE}

    def depfile(self, output: str) -> str:
        """Return what the bundle depends on, as Make and Ninja read it. Paths are relative to this folder."""
        words = [os.path.relpath(path) for path in self.files()]
        escaped = [
            word.replace("\\", "\\\\").replace(" ", "\\ ").replace("#", "\\#").replace("$", "$$") for word in words
        ]
        # An empty rule for each: a source that is removed must not stop Make.
        listed = "".join(f" \\\n  {word}" for word in escaped)
        return f"{output}:{listed}\n" + "".join(f"\n{word}:\n" for word in escaped)


def build(
    manifest: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    functions: Sequence[str] = (),
    targets: Sequence[str] = (),
    root: str | os.PathLike[str] | None = None,
    import_roots: Sequence[str] = (),
    data: Sequence[str] = (),
    jobs: int | None = None,
) -> Bundle:
    """Build a manifest without Bazel, and load its bundle, as `stagec build` does. It needs JAX and pydantic.

    manifest: its path.
    output: where to write the bundle; None: NAME.aot in this folder.
    functions: names of those to build; all, if there is none.
    targets: the same of targets.
    root: the workspace, from which functions import; None: the nearest folder above the manifest that has MODULE.bazel,
        WORKSPACE, pyproject.toml or .git, else this folder.
    import_roots: more folders to import from, relative to the workspace.
    data: files and folders that tracing reads, relative to it.
    jobs: actions at a time; None: one for each core, up to 4.

    Raises StagecError with all that is wrong with the manifest and its functions.

    >>> import numpy as np
    >>> bundle = stagec.build("models/models.toml", targets=["cpu-avx2"])
    >>> params = {"w": np.ones((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    >>> bundle["predict"](params, np.zeros((32, 64), np.float32)).shape
    (32, 10)
    """
    from stagec.loader.load import load

    folder = None if root is None else os.fspath(root)
    with Pool(Store(default_folder())) as pool:
        local = Local(Wanted(os.fspath(manifest), folder, import_roots, data, functions, targets), pool)
        if local.is_rehearsal:
            raise mistake(f"{os.fspath(manifest)}: a rehearsal has no bundle to load", "build it with stagec build")
        outcome = local.run(jobs)
    if outcome.failed:
        raise mistake("".join(outcome.failed).rstrip())
    path = local.output if output is None else os.fspath(output)
    local.write(path)
    return load(path)


def states(wanted: Wanted, files: Iterable[str | Path] = ()) -> dict[str, tuple[int, ...]]:
    """Return the states of what a build of a manifest may read: sources, manifests and targets, data, and `files`.

    The state of one that is not there is (), and of a folder too: the files in it are beside it.
    """
    known, paths = dict[str, tuple[int, ...]](), [*files]
    with contextlib.suppress(StagecError):  # the manifest is not there
        root = _root(wanted)
        paths += [root / name for name in environment.files_below(str(root), (".py", ".toml"))]
        for name in wanted.data:
            with contextlib.suppress(StagecError):
                paths += [root / file for file in _files(root, name, name)]
    for path in map(str, (os.path.realpath(wanted.manifest), *paths)):
        known[path] = ()
        for file in (
            [path] if not os.path.isdir(path) else (f"{path}/{n}" for n in environment.files_below(path, ("",)))
        ):
            with contextlib.suppress(OSError):
                known[file] = tuple(state(file))
    return known


def _root(wanted: Wanted) -> Path:
    if not os.path.isfile(wanted.manifest):
        with blaming(wanted.manifest):
            os.stat(wanted.manifest)
        raise StagecError(Problem(wanted.manifest, "", "it is not a file", "name a manifest, a .toml file"))
    manifest = Path(os.path.realpath(wanted.manifest))
    if wanted.root is not None:
        root = Path(os.path.realpath(wanted.root))
        if root not in manifest.parents:
            raise mistake(
                f"--root {wanted.root}: {wanted.manifest} is not below it", "name the folder of the workspace"
            )
        return root
    for folder in manifest.parents:
        if any((folder / mark).exists() for mark in MARKS):
            return folder
    here = Path.cwd()
    return here if here in manifest.parents else manifest.parent


def _plan(
    store: Store,
    digests: Digests,
    facts: Mapping[str, str],
    root: Path,
    manifest: str,
    first: Callable[[], object] | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the plan of a manifest, which the store may have, and the files that it was made of.

    To import pydantic and to plan takes most of the time of a build in which nothing has changed.
    first: is called if none of this manifest is kept.
    """
    key = hashlib.sha256(json.dumps(["plan", manifest, facts], sort_keys=True).encode()).hexdigest()
    kept = store.find(key)
    if not kept and first:
        first()
    for made in kept:
        try:
            same = all(digests.of(f"{root}/{path}") == digest for path, digest in made.reads.items())
        except OSError:
            continue
        if same and store.has(made):
            return json.loads(store.read(made.outputs["plan"][0])), list(made.reads)
    from stagec.manifest import load_manifest, plan, target_files

    path = f"{root}/{manifest}"
    read = [manifest, *(os.path.join(os.path.dirname(manifest), file) for file in target_files(path))]
    with blaming(manifest):
        before = {file: digests.of(f"{root}/{file}") for file in read if os.path.exists(f"{root}/{file}")}
    planned = plan(load_manifest(path, manifest)).to_json()
    with store.execution_root() as scratch:
        (scratch / "plan").write_text(planned)
        if changed := digests.changed([f"{root}/{file}" for file in before]):
            names = ", ".join(os.path.relpath(path, root) for path in changed)
            raise mistake(f"{names} changed while {manifest} was planned", "build again")
        store.keep(key, scratch, ["plan"], before)
    return json.loads(planned), read


def _check(plan: Mapping[str, Any], wanted: Wanted, manifest: str) -> None:
    """Raise StagecError for a request, or a manifest, that cannot be built so."""
    problems = []
    names = {row["name"]: row["spec"]["name"] for row in plan["exports"]}
    cached = {
        names[row["export"]]
        for row in plan["executables"]
        if row["name"] in plan["jax_cache"]["executables"]
        and (not wanted.targets or row["spec"]["target"]["name"] in wanted.targets)
    }
    if wanted.jax_cache and (cached or not plan["jax_cache"]["executables"]):
        what, write = "it has nothing for JAX's compilation cache", "write jax_cache = true in it (docs/with-jax.md)"
        lacking = [f"functions.{name}.jax_cache" for name in wanted.functions if name in {*names.values()} - cached]
        problems += [Problem(manifest, key, what, write) for key in (lacking if cached else ["jax_cache"])]
    known = {
        "function": (wanted.functions, {*names.values()}),
        "target": (wanted.targets, {row["spec"]["target"]["name"] for row in plan["executables"]}),
    }
    for what, (asked, there) in known.items():
        problems += [
            Problem(manifest, f"{what}s", f'there is no {what} "{name}"', nearest(name, there))
            for name in asked
            if name not in there
        ]
    for name, target in {row["spec"]["target"]["name"]: row["spec"]["target"] for row in plan["executables"]}.items():
        if wanted.targets and name not in wanted.targets:
            continue
        others = [release for release in plan["jaxlib"].get(name, ()) if release != _version("jaxlib")]
        if others or target.get("architecture", _HERE) != _HERE:
            what = f"jaxlib {', '.join(others)}" if others else f"code for {target['architecture']}"
            write = "build it with Bazel, which installs that (docs/fleet.md), or leave it out: --target"
            problems.append(Problem(manifest, f"targets.{name}", f"{what} takes another Python environment", write))
    if plan["runs_on"]:
        what = f"jaxlib {', '.join(plan['runs_on'])} takes another Python environment"
        write = "build it with Bazel, which installs that (docs/fleet.md), or leave it out"
        problems.append(Problem(manifest, "manifest.runs_on", what, write))
    if problems:
        raise StagecError(*problems)


def _is_rehearsal(path: str) -> bool:
    """Return whether a file is the programs.toml of a rehearsal: it has a format, which no manifest has."""
    with blaming(path):
        head = re.split(rb"^\[", reading.whole(path), maxsplit=1, flags=re.MULTILINE)[0]
    return re.search(rb"^format\s*=", head, re.MULTILINE) is not None


def _check_rehearsal(wanted: Wanted) -> None:
    """Raise StagecError for a request that is not for the programs of a rehearsal."""
    problems = []
    if not wanted.targets:
        write = "name what it was rehearsed for: --target cpu-avx2, --target h100-sxm or --target v5e:2x4"
        problems.append(Problem(wanted.manifest, "", "a rehearsal names no targets", write))
    given = {"function": wanted.functions, "import-root": wanted.import_roots, "data": wanted.data}
    problems += [
        Problem(wanted.manifest, "", f"--{name} is for a manifest, and this is a rehearsal", "leave it out")
        for name, values in given.items()
        if values
    ]
    if problems:
        raise StagecError(*problems)


def _check_names(sources: Sequence[str]) -> None:
    """Raise StagecError for files whose names cannot be written down."""
    shown = {path: path.encode(errors="backslashreplace").decode() for path in sources}
    what, write = "its name is not UTF-8", "rename it"
    if problems := [Problem(text, "", what, write) for path, text in shown.items() if path != text]:
        raise StagecError(*problems)


def _version(package: str) -> str:
    from importlib import metadata  # it takes longer than the rest

    return metadata.version(package)


def _sources(root: Path, data: Sequence[str]) -> Iterator[str]:
    """Yield what models may import and read: all Python sources of the workspace, and the data that was named."""
    yield from environment.files_below(str(root), (".py",))
    for name in data:
        yield from _files(root, name, f"--data {name}")


def _named(plan: Mapping[str, Any], root: Path, folder: str) -> Iterator[str]:
    """Yield the files that the functions of a plan name."""
    for path in _paths(plan, folder):
        if (root / path).exists():
            yield from _files(root, path, path)


def _paths(plan: Mapping[str, Any], folder: str) -> Iterator[str]:
    """Yield what may name a file or a folder in the functions of a plan, relative to the workspace."""
    for export in plan["exports"]:
        spec = {key: value for key, value in export["spec"].items() if key not in ("bind", "golden", "manifest")}
        for name in actions.files_of(spec):
            path = os.path.normpath(os.path.join(folder, name))
            if not path.startswith("..") and path != ".":
                yield path


def _files(root: Path, name: str, said: str) -> Iterator[str]:
    path = os.path.normpath(root / name)
    if not path.startswith(f"{root}/"):
        raise mistake(f"{said}: it is not below the workspace {root}", "copy or link it there")
    if os.path.isdir(path):
        yield from (os.path.relpath(f"{path}/{file}", root) for file in environment.files_below(path, ("",)))
    elif os.path.exists(path):
        yield os.path.relpath(path, root)
    else:
        raise mistake(f"{said}: there is no such file or folder below {root}")


def _write_cache(folder: str, tar: bytes) -> list[str]:
    """Write JAX's compilation cache, and return its files. Files that only the previous index lists are removed."""
    from stagec.jaxcache import jax_entries

    index, old = f"{folder}/{jax_entries.INDEX}", set[str]()
    with contextlib.suppress(OSError, ValueError):
        entries = jax_entries.read(Path(index).read_text())
        keys = [key for entry in entries for names in entry.names.values() for key in names.values()]
        old = {f"{folder}/{key}{suffix}" for key in keys for suffix in (jax_entries.SUFFIX, jax_entries.USED)}
    written = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as files:
        for file in files:
            content = files.extractfile(file)
            assert content
            written[f"{folder}/{os.path.basename(file.name)}"] = content.read()
    for path in sorted(written, key=index.__eq__):  # the index is the last
        writing.named(path, [written[path]])
    for path in old - written.keys():
        with contextlib.suppress(OSError):
            os.unlink(path)
    return [*written]


def _link(source: Path, target: Path) -> None:
    """Let weights lie beside a bundle, where a loader looks for them."""
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".stagec.{os.urandom(8).hex()}")
    temporary.symlink_to(source.resolve())
    temporary.replace(target)
