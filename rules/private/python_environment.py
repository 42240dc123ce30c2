"""Installs one locked set of Python packages into a folder, for the repository rule `python_environment`.

It runs with the interpreter that the environment is for, before anything is installed: standard library only. On
success the folder it ran in holds

    site-packages/    the packages, byte-compiled with .pyc files that are never checked against a clock
    fingerprint.txt   one digest of what a package or the interpreter can change in an action's output
    packages.json     the interpreter's version, and of each package name, version, file name and sha256 of its wheel

On a mistake of the user's (a hash that does not match, no network, ...) it prints one message and exits with status 2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.parse
from pathlib import Path
from typing import Any, NoReturn

SITE_PACKAGES = "site-packages"
FINGERPRINT = "fingerprint.txt"
PACKAGES = "packages.json"
_REPORT = "report.json"


def normalized_pins(lock: str) -> list[str]:
    """The requirements of a lock file, one line each and sorted: comments, order and line breaks do not count."""
    joined = lock.replace("\\\r\n", " ").replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line) for line in joined.splitlines())
    pins = []
    for line in lines:
        words = line.split()
        if words:
            hashes = sorted(word for word in words if word.startswith("--hash="))
            pins.append(" ".join([word for word in words if not word.startswith("--hash=")] + hashes))
    return sorted(pins)


def lock_problems(lock: str, display: str) -> list[str]:
    """What keeps a lock file from naming exactly one set of files; pip itself lets some of it pass."""
    problems = []
    for pin in normalized_pins(lock):
        words = pin.split()
        package = words[0]
        if package.startswith("-"):
            if re.match(r"-[rce]|--(requirement|constraint|editable)\b", package):
                problems.append(f"{display}: {package} is not for lock files\n  write every package in this one")
        elif "==" not in pin.split(";")[0].split(" --hash")[0]:
            problems.append(f"{display}: {package} has no pinned version\n  pin it with == and give its hashes")
        elif "--hash=" not in pin:
            problems.append(
                f"{display}: {package} has no hash\n  generate the lock with hashes (uv pip compile --generate-hashes)"
            )
    return problems


def fingerprint(lock: str) -> str:
    """Digest of the pins and of the interpreter that imports them."""
    parts = [
        f"implementation {sys.implementation.name}",
        f"version {sys.version.split()[0]}",
        f"platform {sysconfig.get_platform()}",
        *normalized_pins(lock),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def installed(report: str) -> list[dict[str, str]]:
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


def python_description() -> str:
    """What this interpreter calls itself in messages."""
    return f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"


def pip_message(output: str, lock: str) -> str:
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
            f"{lock}: {missing[1]}: no wheel for {python_description()} on {sysconfig.get_platform()}\n"
            "  lock a version that has one, or name another interpreter in STAGEC_PYTHON"
        )
    invalid = re.search(r"^ERROR: (Invalid requirement.*|Could not open requirements file.*)", output, re.MULTILINE)
    if invalid:
        return f"{lock}: {invalid[1]}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-15:]
    return f"{lock}: pip could not install the locked packages\n" + "\n".join(f"  {line}" for line in errors)


def _give_up(message: str) -> NoReturn:
    """Ends with what is wrong, and leaves nothing behind."""
    shutil.rmtree(SITE_PACKAGES, ignore_errors=True)
    Path(_REPORT).unlink(missing_ok=True)
    print(message)
    raise SystemExit(2)


def install(lock: Path, display: str) -> None:
    """Fills the working directory."""
    text = lock.read_text(encoding="utf-8")
    problems = lock_problems(text, display)
    if problems:
        _give_up("\n".join(problems))
    Path(SITE_PACKAGES).mkdir()
    wheels: list[dict[str, str]] = []
    if normalized_pins(text):
        pip = [sys.executable, "-E", "-P", "-m", "pip", "--disable-pip-version-check", "--no-input"]
        options = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--no-compile", "--progress-bar", "off"]
        # pip reads its settings from the environment too: what would send the files elsewhere is taken out.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_DRY_RUN")
        }
        environment.update(PIP_USER="0", PIP_REQUIRE_VIRTUALENV="0", PIP_ROOT_USER_ACTION="ignore", LC_ALL="C.UTF-8")
        command = [*pip, "install", *options, "--retries", "2", "--report", _REPORT]
        command += ["--target", SITE_PACKAGES, "--requirement", str(lock)]
        result = subprocess.run(
            command,
            check=False,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if result.returncode != 0:
            if "No module named pip" in result.stdout:
                message = f"{python_description()} has no pip\n  install it (Debian: apt-get install python3-pip)"
            else:
                message = pip_message(result.stdout, display)
            _give_up(message)
        try:
            wheels = installed(Path(_REPORT).read_text(encoding="utf-8"))
        except ValueError as error:
            _give_up(
                f"{display}: {error}: pip does not say the sha256 of its wheel, only another digest of the index\n"
                "  use an index whose links have #sha256=, or a folder of wheels (PIP_FIND_LINKS)"
            )
        Path(_REPORT).unlink()
        # Unchecked: a .pyc that is compared with its source's clock would be stale or not by how files were copied. The
        # exit status is not looked at: packages ship test data that is not meant to compile.
        compile_all = [sys.executable, "-E", "-P", "-m", "compileall", "-qq", "-j", "2"]
        subprocess.run(
            [*compile_all, "--invalidation-mode", "unchecked-hash", SITE_PACKAGES],
            check=False,
            stdout=subprocess.DEVNULL,
        )
    packages = {"python": platform.python_version(), "packages": wheels}
    Path(PACKAGES).write_text(json.dumps(packages, indent=1) + "\n", encoding="utf-8")
    Path(FINGERPRINT).write_text(fingerprint(text) + "\n", encoding="ascii")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", type=Path, help="the lock file")
    parser.add_argument("display", help="what messages call the lock file")
    arguments = parser.parse_args()
    install(arguments.lock, arguments.display)
