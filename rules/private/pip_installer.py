"""Installs a lock with pip, where uv cannot, and says in one message what is wrong with a lock or with the network."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any

PIP = (sys.executable, "-E", "-P", "-m", "pip", "--disable-pip-version-check", "--no-input")


class Failed(Exception):
    """pip cannot install: the text is a message for the user."""


class NoWheel(Failed):
    """The indexes have no wheel of a package for this interpreter."""


def environment() -> dict[str, str]:
    """Return the variables that pip gets: without those of its settings that would send the files elsewhere."""
    elsewhere = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_DRY_RUN")
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
    for one in json.loads(report)["install"]:
        download = one["download_info"]
        path = urllib.parse.urlsplit(download["url"]).path
        wheels.append(
            {
                "name": one["metadata"]["name"],
                "version": one["metadata"]["version"],
                "filename": urllib.parse.unquote(path.rpartition("/")[2]),
                "sha256": _sha256(download["archive_info"], one["metadata"]["name"]),
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


def _python_description() -> str:
    """What this interpreter calls itself in messages."""
    return f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"


def _message(output: str, lock: str) -> str:
    """One message for a failed `pip install`: what is wrong with which package, and what to do."""
    mismatch = re.search(
        r"^\s*(\S+).*from (?:\S+).*:\s*\n\s*Expected sha256 (?P<expected>[0-9a-f]{64})"
        r"(?P<more>(?:\n\s*Expected\s+or [0-9a-f]{64})*)\n\s*Got\s+(?P<got>[0-9a-f]{64})",
        output,
        re.MULTILINE,
    )
    if mismatch:
        package = mismatch.group(1).split("==")[0]
        count = mismatch.group("more").count("\n") + 1
        expected = mismatch.group("expected") if count == 1 else f"one of {count} hashes, {mismatch['expected']} first"
        return (
            f"{lock}: {package}: the downloaded file does not have the locked sha256\n"
            f"  expected {expected}\n"
            f"  got      {mismatch['got']}\n"
            "  regenerate the lock if you meant to change this package; if not, do not trust the file you were sent"
        )
    unreachable = re.search(
        r"(NewConnectionError|ConnectTimeoutError|ReadTimeoutError|MaxRetryError|ProxyError|SSLError|"
        r"Connection (?:broken|reset|refused)|Temporary failure in name resolution)",
        output,
    )
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if unreachable:
        what = f" (it needs {missing[1]} first)" if missing else ""
        return (
            f"{lock}: the package index cannot be reached{what}: {unreachable[1]}\n"
            "  check the network and pip's index settings (pip config list), then build again"
        )
    if missing:
        return (
            f"{lock}: {missing[1]}: no wheel for {_python_description()} on {sysconfig.get_platform()}\n"
            "  lock a version that has one, or name another interpreter in STAGEC_PYTHON"
        )
    invalid = re.search(r"^ERROR: (Invalid requirement.*|Could not open requirements file.*)", output, re.MULTILINE)
    if invalid:
        return f"{lock}: {invalid[1]}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-15:]
    return f"{lock}: pip could not install the locked packages\n" + "\n".join(f"  {line}" for line in errors)


def install(lock: Path, display: str, folder: Path) -> list[dict[str, str]]:
    """Install a lock into a folder; return name, version, file name and sha256 of the wheels. Raises Failed."""
    options = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--no-compile", "--progress-bar", "off"]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.json")
        command = [*PIP, "install", *options, "--retries", "2", "--report", str(report)]
        result = subprocess.run(
            [*command, "--target", str(folder), "--requirement", str(lock)],
            check=False,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if "No module named pip" in result.stdout:
            raise Failed(f"{_python_description()} has no pip\n  install it (Debian: apt-get install python3-pip)")
        if result.returncode != 0:
            message = _message(result.stdout, display)
            raise NoWheel(message) if ": no wheel for " in message else Failed(message)
        try:
            return _installed(report.read_text(encoding="utf-8"))
        except ValueError as error:
            raise Failed(
                f"{display}: {error}: pip does not say the sha256 of its wheel, only another digest of the index\n"
                "  use an index whose links have #sha256=, or a folder of wheels (PIP_FIND_LINKS)"
            ) from error
