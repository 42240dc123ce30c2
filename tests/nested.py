"""Bazel inside a test: a user's workspace with stagec checked out beside it."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tests.building import COMPILER, ROOT
from tests.users import User, link_tree

_WORKSPACE = """workspace(name = "NAME")

local_repository(
    name = "stagec",
    path = "../stagec",
)

load("@stagec//rules:repositories.bzl", "stagec_manifest", "stagec_offline_repositories", "stagec_repositories")

stagec_offline_repositories()

stagec_repositories()

stagec_manifest(
    name = "models_manifest",
    manifest = "//models:models.toml",
)
"""
_MODULE = """module(name = "NAME")

bazel_dep(name = "platforms", version = "0.0.11")
bazel_dep(name = "stagec", version = "0.1.0")
local_path_override(
    module_name = "stagec",
    path = "../stagec",
)

stagec = use_extension("@stagec//rules:extensions.bzl", "stagec")
stagec.manifest(
    name = "models_manifest",
    manifest = "//models:models.toml",
)
use_repo(stagec, "models_manifest")
"""

# The packages of the tests, instead of those that Bazel would fetch.
_ENVIRONMENT = """load("@stagec//rules/private:python_environment.bzl", "environment")

environment(
    name = "environment",
    abi = {abi!r},
    fingerprint = "fingerprint.txt",
    interpreter = {interpreter!r},
    packages = "packages.json",
    site_packages = "site-packages",
    version = {version!r},
    visibility = ["//visibility:public"],
)
"""


_SHORT_LIVED = [f"--host_jvm_args={option}" for option in ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")]
"""Options of a server that lives for a minute: it would spend most of it on optimizing its code."""


def workspace_files(name: str, jaxlibs: Sequence[str] = ()) -> dict[str, str]:
    """Return WORKSPACE and MODULE.bazel of a workspace with a manifest //models:models.toml, and stagec beside it.

    jaxlibs: names of other releases of jaxlib, each with a lock //:NAME.lock. The build's own is that of the tests.
    """
    own = 'lock = "@stagec//compiler:requirements.lock"'
    declared = ", ".join(f'"{jaxlib}": {{"lock": "//:{jaxlib}.lock"}}' for jaxlib in jaxlibs)
    tags = f"stagec.python({own})\n" if jaxlibs else ""
    tags += "".join(f'stagec.jaxlib(name = "{jaxlib}", lock = "//:{jaxlib}.lock")\n' for jaxlib in jaxlibs)
    repositories = "".join(f'"{jaxlib}", ' for jaxlib in jaxlibs)
    arguments = f"{own}, jaxlibs = {{{declared}}}" if jaxlibs else ""
    workspace = _WORKSPACE.replace("\nstagec_repositories()", f"\nstagec_repositories({arguments})")
    module = _MODULE.replace("use_repo(stagec, ", f"{tags}use_repo(stagec, {repositories}")
    return {file: text.replace("NAME", name) for file, text in {"WORKSPACE": workspace, "MODULE.bazel": module}.items()}


class NestedBazel:
    """A workspace in a temporary folder, and the Bazel that builds it.

    folder: where stagec's sources are copied to, as `stagec`, and where Bazel keeps its files.
    root: the workspace.
    user: who runs it, by number; None: the user of the tests. The folder is that user's.
    startup: options of its server.
    """

    def __init__(
        self, folder: Path, root: Path, user: int | None = None, startup: Sequence[str] = _SHORT_LIVED
    ) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "bazel-*", "*.egg-info", "build")
        for name in ("compiler", "rules"):
            shutil.copytree(ROOT / name, folder / "stagec" / name, ignore=ignored)
        for name in ("BUILD", "MODULE.bazel", "WORKSPACE", "bazelw"):
            shutil.copy(ROOT / name, folder / "stagec" / name)
        self.root, self.user = root, user
        # What Bazel unpacks of itself is the user's, and there already.
        start = [f"--output_base={folder / 'bazel'}", "--max_idle_secs=300", *startup]
        self._command = [str(folder / "stagec" / "bazelw"), *start]
        # Of the variables that a test of Bazel's has, those that describe that test are not the nested Bazel's.
        mine = re.compile(r"TEST|RUNFILES|PYTHON|BAZEL_|BUILD_|XML_|JAVA_RUNFILES|RUN_UNDER|GTEST|JAX_")
        self._env = {name: value for name, value in os.environ.items() if not mine.match(name)}
        if user is not None:
            self._env.update(HOME=str(folder), USER=str(user))

    def run(
        self, command: str, *arguments: str, before: Sequence[str] = (), cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Bazel. before: a command that runs it. cwd: where, if not in the workspace."""
        process = self.start(command, *arguments, before=before, cwd=cwd)
        output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(
        self, command: str, *arguments: str, before: Sequence[str] = (), cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command of Bazel. before: a command that runs it. cwd: where, if not in the workspace."""
        return subprocess.Popen(
            [*before, *self._command, command, "--color=no", *arguments],
            cwd=cwd or self.root,
            env=self._env,
            user=self.user,
            group=self.user,
            extra_groups=None if self.user is None else (),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetched(self) -> dict[str, Path]:
        """The folders of the repositories that Bazel has fetched, by their names."""
        external = Path(self.run("info", "output_base").stdout.strip()) / "external"
        # Bazel's own part of the name ends in ~ or +, where there is one.
        return {re.split("[+~]", path.name)[-1]: path for path in external.iterdir() if path.is_dir()}

    def with_packages(self, environment: Path) -> list[str]:
        """Options of a build with the packages of the repository `environment` instead of its own."""
        repositories = map(self._canonical, ("stagec_planning", "stagec_python"))
        return [f"--override_repository={name}={environment}" for name in repositories]

    def _canonical(self, repository: str) -> str:
        """Bazel's own name of one of stagec's repositories."""

        def names_of(module: str) -> dict[str, str]:
            done = self.run("mod", "dump_repo_mapping", module)
            names: dict[str, str] = {} if done.returncode else json.loads(done.stdout)  # Bazel 4 has no modules
            return names

        return names_of(names_of("").get("stagec", "")).get(repository, repository)


def environment(folder: Path, user: User) -> Path:
    """Write a repository with packages of the tests, which a user may read; return its folder.

    They are those of stagec's own lock: with a cache, or a log of executions, Bazel reads each file.
    """
    folder.mkdir()
    for name in ("WORKSPACE", "fingerprint.txt"):
        (folder / name).touch()
    (folder / "packages.json").write_text('{"python": "", "packages": []}\n')
    (folder / "interpreter.txt").write_text(user.python)
    # Not that of the tests: with a copy of an interpreter, another user may get another release of Python's library.
    ask = [user.python, "-E", "-c", "import platform; print(platform.python_version())"]
    version = subprocess.run(ask, check=True, capture_output=True, text=True, cwd="/", user=user.number).stdout.strip()
    abi = sysconfig.get_config_var("SOABI")
    build = _ENVIRONMENT.format(interpreter=os.path.realpath(user.python), version=version, abi=abi)
    (folder / "BUILD").write_text(build)
    packages, source = folder / "site-packages", next(Path(e) for e in sys.path if e.endswith("site-packages"))
    packages.mkdir()
    lock = (COMPILER / "requirements.lock").read_text("utf-8")
    for package in re.findall(r"^([\w-]+)==", lock, re.MULTILINE):
        files = importlib.metadata.files(package) or []
        for name in sorted({file.parts[0] for file in files} - {"..", "__pycache__"}):
            if (source / name).is_dir():
                link_tree(source / name, packages / name)
            else:
                shutil.copy2(source / name, packages / name)
    return folder


def telling(file: Path) -> list[str]:
    """Options of a build that tells in a file which actions it runs: `actions` reads it."""
    return [f"--build_event_json_file={file}", "--build_event_publish_all_actions"]


def actions(file: Path, mnemonics: Collection[str]) -> list[tuple[str, str]]:
    """Return (mnemonic, target's name) of the actions that ran, of these mnemonics, sorted."""
    events = [json.loads(line) for line in file.read_text().splitlines() if '"actionCompleted"' in line]
    found = [(event["action"]["type"], event["id"]["actionCompleted"]) for event in events if "action" in event]
    return sorted((kind, of["label"].rpartition(":")[2]) for kind, of in found if kind in mnemonics)


def runners(said: str) -> set[str]:
    """Return what ran the actions of a build that says `INFO: 3 processes: 1 internal, 2 worker.`"""
    summary = re.search(r"^INFO: \d+ process(?:es)?: (.*)\.$", said, re.MULTILINE)
    counts = summary[1].split(", ") if summary else []
    return {count.partition(" ")[2] for count in counts} - {"internal", "action cache hit"}


def spawns(log: Path, mnemonics: Collection[str]) -> list[dict[str, Any]]:
    """Return what a file of `--execution_log_json_file` says of the actions that ran, of these mnemonics.

    It lists each file of all packages for each of them.
    """
    decoder, text, at, found = json.JSONDecoder(), log.read_text(), 0, []
    while (at := text.find("{", at)) >= 0:
        spawn, at = decoder.raw_decode(text, at)
        if spawn["mnemonic"] in mnemonics:
            found.append(spawn)
    return found
