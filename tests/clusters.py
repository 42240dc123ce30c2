"""A cluster of remote execution, which `tools/cluster` starts on this machine."""

import os
import re
import subprocess
import unittest
from pathlib import Path

from tests.building import ROOT

_PROGRAM = ROOT / "tools" / "cluster"


def cluster_problem() -> str | None:
    """Return why `tools/cluster` cannot run here; None where it can."""
    if os.geteuid() != 0:
        return "tools/cluster installs Debian packages and mounts folders: it needs root"
    release = Path("/etc/os-release")
    text = release.read_text() if release.exists() else ""
    if not ("ID=debian" in text and re.search(r'^VERSION_ID="?12"?$', text, re.MULTILINE)):
        return "tools/cluster needs a Debian 12"
    mounting = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "proc", "proc", "/proc"]
    done = subprocess.run(mounting, capture_output=True, text=True)
    return f"this system does not let root mount in a namespace: {done.stderr.strip()}" if done.returncode else None


def needs_cluster() -> None:
    """Skip the test where `tools/cluster` cannot run."""
    if problem := cluster_problem():
        raise unittest.SkipTest(problem)


class Cluster:
    """A cluster in a folder. Call it with the words of a command of `tools/cluster`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str) -> str:
        """Run a command; return what it prints."""
        env = {**os.environ, "STAGEC_CLUSTER": str(self.folder)}
        done = subprocess.run([_PROGRAM, *words], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def settings(self) -> dict[str, str]:
        """Return the ports and Pythons of the cluster."""
        return dict(line.split("=", 1) for line in (self.folder / "settings").read_text().splitlines())

    def upload(self, folder: Path) -> None:
        """Upload the files of a folder, before an action needs them."""
        url = f"--remote=http://127.0.0.1:{self.settings()['PORT_GRID']}"
        subprocess.run([self.folder / "bin" / "casupload", url, folder], check=True, stdout=subprocess.DEVNULL)

    def options(self, **properties: str) -> list[str]:
        """Return Bazel's options to build on it. properties: of the workers, where no platform has them."""
        lines = (self.folder / "bazelrc").read_text().splitlines()
        found = [line.removeprefix("build:cluster ") for line in lines if line.startswith("build:cluster ")]
        return found + [f"--remote_default_exec_properties={name}={value}" for name, value in properties.items()]

    def executed(self) -> int:
        """Return how many actions it has been asked for, and has answered."""
        calls = (self.folder / "logs" / "clients.calls").read_text()
        return len(re.findall(r"^POST \S+\.Execution/Execute ", calls, re.MULTILINE))

    def processes(self) -> list[int]:
        """Return the numbers of the processes that it has started; what they have started is theirs."""
        return [int(path.read_text()) for path in (self.folder / "run").glob("*.pid")]
