"""Installs a lock with pip, where uv cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any

from uv_installer import platforms_of

PIP = (sys.executable, "-E", "-P", "-m", "pip", "--disable-pip-version-check", "--no-input")


class Failed(Exception):
    """pip cannot install: the string is a message for the user."""


class NoWheel(Failed):
    """The indexes have no wheel of a package for this interpreter."""


def environment() -> dict[str, str]:
    """Return the variables that pip gets: without those of its settings that would send the files elsewhere."""
    elsewhere = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIREMENT", "PIP_DRY_RUN")
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return kept | {
        "PIP_USER": "0",
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_ROOT_USER_ACTION": "ignore",
        "LC_ALL": "C.UTF-8",
    }


def _installed(report: str) -> list[dict[str, str]]:
    """The wheels of pip's report, without their hosts (pip.pypa.io/en/stable/reference/installation-report).

    Raises ValueError, with the package's name, where the report has no sha256: an index gave pip another kind of hash.
    """
    wheels = []
    for item in json.loads(report)["install"]:
        download = item["download_info"]
        path = urllib.parse.urlsplit(download["url"]).path
        wheels.append(
            {
                "name": item["metadata"]["name"],
                "version": item["metadata"]["version"],
                "filename": urllib.parse.unquote(path.rpartition("/")[2]),
                "sha256": _sha256(download["archive_info"], item["metadata"]["name"]),
            }
        )
    return sorted(wheels, key=lambda wheel: wheel["filename"])


def _sha256(archive: dict[str, Any], package: str) -> str:
    """The digest of a wheel.

    Before 23.1, pip writes `hash` ("sha256=...") for every wheel and `hashes` only for some: Debian 12 has pip 23.0.1,
    which leaves `hashes` out for files of a folder (https://github.com/pypa/pip/issues/11948).
    """
    hashes: dict[str, str] = archive.get("hashes") or dict([archive.get("hash", "=").split("=", 1)])
    if "sha256" not in hashes:
        raise ValueError(package)
    return hashes["sha256"]


def _message(said: str, lock: str) -> str:
    """What pip says of a failed `pip install`, and where to look."""
    interpreter = f"{platform.python_implementation()} {platform.python_version()} on {sysconfig.get_platform()}"
    lines = [f"{lock}: pip cannot install the packages for {interpreter}", *said.splitlines()[-20:]]
    return "\n  ".join([*lines, "docs/troubleshooting.md of stagec has remedies; pip config list has pip's settings"])


def install(lock: Path, display: str, folder: Path, architecture: str) -> list[dict[str, str]]:
    """Install a lock into a folder; return name, version, file name and sha256 of the wheels. Raises Failed.

    architecture: that of the wheels, as `uname -m` has it.
    """
    if importlib.util.find_spec("pip") is None:
        raise Failed(f"{sys.executable} has no pip\n  install it (Debian: apt-get install python3-pip)")
    options = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--no-compile", "--progress-bar", "off"]
    if architecture != platform.machine():
        options += [word for tag in platforms_of(architecture) for word in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.json")
        command = [*PIP, "install", *options, "--retries", "2", "--report", str(report)]
        result = subprocess.run(
            [*command, "--target", str(folder), "--requirement", str(lock)],
            check=False,
            env=environment(),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if result.returncode != 0:
            # pip looks on where it cannot reach an index, and then says that there is none too.
            missing = "No matching distribution found" in result.stderr and "WARNING: Retrying" not in result.stderr
            raise (NoWheel if missing else Failed)(_message(result.stderr, display))
        try:
            return _installed(report.read_text(encoding="utf-8"))
        except ValueError as error:
            raise Failed(
                f"{display}: {error}: pip does not say the sha256 of its wheel, only another digest of the index\n"
                "  use an index whose links have #sha256=, or a folder of wheels (PIP_FIND_LINKS)"
            ) from error
