"""What pip is set to, in uv's words: so that uv takes packages from where pip would.

pip has settings in files and in variables (https://pip.pypa.io/en/stable/topics/configuration); `pip config list` joins
them. uv reads none of them. A setting for which it has no word raises NoWord: then pip installs.
"""

from __future__ import annotations

import ast
import os
import ssl
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What the installer's own words to pip decide, what pinned versions decide, and what is about pip's output.
_WITHOUT_EFFECT = frozenset(
    (
        *("break-system-packages", "build", "cache-dir", "check-build-dependencies", "compile", "config-file"),
        *("config-settings", "debug", "disable-pip-version-check", "dry-run", "exists-action"),
        *("force-reinstall", "global-option", "ignore-installed", "log", "log-file", "no-binary"),
        *("no-build-isolation", "no-cache-dir", "no-clean", "no-color", "no-compile", "no-dependencies"),
        *("no-deps", "no-input", "no-warn-conflicts", "no-warn-script-location", "only-binary", "pre"),
        *("prefer-binary", "prefix", "progress-bar", "quiet", "report", "require-hashes", "require-virtualenv"),
        *("resume-retries", "retries", "root", "root-user-action", "src", "target", "upgrade"),
        *("upgrade-strategy", "use-pep517", "user", "verbose"),
    )
)
_FALSE = ("n", "no", "f", "false", "off", "0")


class NoWord(Exception):
    """uv has no word for one of pip's settings: the message says which."""


@dataclass
class Words:
    """What uv is started with: flags, those of finding wheels alone, and variables."""

    flags: list[str] = field(default_factory=list)
    finding: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def of_pip(pip: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Ask pip for what `pip install` is set to, by the name of its option ("index-url").

    As pip does, it takes a variable before the section [install] before [global], and passes over what is empty. Raises
    NoWord where pip cannot read its own files.
    """
    command = [*pip, "config", "list"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        raise NoWord(f"pip config list: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.partition(".")
        if section in sections and (text := str(ast.literal_eval(value)).strip()):
            sections[section][option] = text
    return sections["global"] | sections["install"] | sections[":env:"]


def to_uv(settings: Mapping[str, str]) -> Words:
    """Say pip's settings in uv's words. Raises NoWord."""
    words = Words()
    several = {"extra-index-url": "--index", "trusted-host": "--allow-insecure-host"}
    certificates = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or ""
    own_certificates = False
    for option, value in sorted(settings.items()):
        if option in several:
            words.flags += [word for item in value.split() for word in (several[option], item)]
        elif option == "constraint":
            words.finding += [word for file in value.split() for word in ("--constraints", file)]
        elif option == "find-links":
            # pip passes over folders that do not exist, where uv ends.
            places = [place if "://" in place else str(Path(place).expanduser()) for place in value.split()]
            there = [place for place in places if "://" in place or Path(place).exists()]
            words.flags += [word for place in there for word in ("--find-links", place)]
        elif option in ("index-url", "pypi-url"):
            words.flags += ["--default-index", value]
        elif option == "no-index":
            words.flags += ["--no-index"] if is_true(value) else []
        elif option == "cert":
            certificates = value
        elif option == "client-cert":
            words.variables["SSL_CLIENT_CERT"] = value
        elif option == "proxy":
            words.variables |= dict.fromkeys(("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"), value)
            words.variables |= dict.fromkeys(("all_proxy", "http_proxy", "https_proxy"), value)
        elif option in ("timeout", "default-timeout"):
            words.variables["UV_HTTP_TIMEOUT"] = str(max(1, round(float(value))))
        elif option == "keyring-provider" and value in ("auto", "disabled", "subprocess"):
            words.flags += ["--keyring-provider", "subprocess"] if value == "subprocess" else []
        elif option in ("use-feature", "use-deprecated") and set(value.split()) <= {"legacy-certs", "truststore"}:
            own_certificates = "legacy-certs" in value
        elif option not in _WITHOUT_EFFECT:
            raise NoWord(f"uv has no word for pip's setting {option}")
    if certificates and Path(certificates).is_dir():
        words.variables["SSL_CERT_DIR"] = certificates
    elif certificates:
        words.flags += ["--cert", certificates]
    elif _machine_has_certificates() and not own_certificates:
        words.flags += ["--system-certs"]
    return words


def cache_folder(settings: Mapping[str, str]) -> Path | None:
    """Return the folder in which uv keeps wheels: UV_CACHE_DIR, else in pip's if that is set, else uv's own.

    None: pip is to keep nothing, or the folder is somebody else's, where pip would keep nothing either.
    """
    if is_true(settings.get("no-cache-dir", "no")):
        return None
    if named := os.environ.get("UV_CACHE_DIR"):
        folder = Path(named)
    elif "cache-dir" in settings:
        folder = Path(settings["cache-dir"]).expanduser() / "uv"
    else:
        home = os.environ.get("HOME", "")
        folder = Path(os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")) / "uv"
    if not folder.is_absolute():
        return None
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    mine = there.is_dir() and os.access(there, os.W_OK | os.X_OK) and (os.geteuid() != 0 or there.stat().st_uid == 0)
    return folder if mine else None


def is_true(value: str) -> bool:
    """Read a yes or no as pip does."""
    return value.lower() not in _FALSE


def _machine_has_certificates() -> bool:
    paths = ssl.get_default_verify_paths()
    return bool(paths.cafile) or bool(paths.capath and any(Path(paths.capath).iterdir()))
