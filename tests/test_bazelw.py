"""What bazelw chooses to run. Each test gives it a PATH of its own, with programs that record how they were called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

BAZELW = Path(__file__).parent.parent / "bazelw"
TOOLS = ("bash", "cat", "chmod", "env", "mktemp", "rm", "tail")


class Machine:
    """A folder of programs as the only PATH, and what they record."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "log"
        self.log.touch()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)
        self.program("id", "echo 1000", record=False)

    def program(self, name: str, then: str = "", record: bool = True) -> Path:
        path = self.bin / name
        line = f'echo "{name}${{*:+ $*}}" >> {self.log}\n' if record else ""
        path.write_text(f"#!{self.bin}/bash\n{line}{then}\n")
        path.chmod(0o755)
        return path

    def bazelw(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "TMPDIR": os.environ.get("TMPDIR", "/tmp"), **variables}
        return subprocess.run(
            [str(self.bin / "bash"), str(BAZELW), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_variable_comes_first(machine: Machine) -> None:
    machine.program("bazelisk")
    mine = machine.program("mine")
    result = machine.bazelw("build", "//...", BAZEL=str(mine))
    assert machine.calls == ["mine build //..."]
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_bazelisk_comes_before_bazel(machine: Machine) -> None:
    machine.program("bazel")
    machine.program("bazelisk")
    assert machine.bazelw("test", "//...").stderr == ""
    assert machine.calls == ["bazelisk test //..."]


def test_bazel_is_used_as_it_is(machine: Machine) -> None:
    machine.program("bazel", 'printf "%s|" "$@"; exit 7')
    result = machine.bazelw("run", "//:a b", "--", "-x", "")
    assert result.returncode == 7
    assert result.stdout == "run|//:a b|--|-x||"
    assert result.stderr == ""


def test_root_installs_the_package_of_debian(machine: Machine) -> None:
    machine.program("id", "echo 0", record=False)
    bazel = f"#!{machine.bin}/bash\necho bazel $* >> {machine.log}\n"
    machine.program(
        "apt-get",
        f"echo noise; [[ $1 == install ]] || exit 0; cat > {machine.bin}/bazel <<'END'\n{bazel}END\n"
        f"chmod +x {machine.bin}/bazel",
    )
    result = machine.bazelw("info")
    assert machine.calls == [
        "apt-get update --quiet",
        "apt-get install --yes --quiet --no-install-recommends bazel-bootstrap",
        "bazel info",
    ]
    assert result.stdout == ""
    assert result.stderr == "bazelw: installing Bazel (apt-get install bazel-bootstrap)\n"


def test_a_failed_installation_shows_its_log(machine: Machine) -> None:
    machine.program("id", "echo 0", record=False)
    machine.program("apt-get", "echo E: no such package; exit 100")
    result = machine.bazelw("info")
    assert result.returncode == 1
    assert "E: no such package\nbazelw: installing bazel-bootstrap failed.\nGet Bazel from" in result.stderr


def test_sudo_is_never_used_without_a_terminal(machine: Machine) -> None:
    machine.program("apt-get")
    machine.program("sudo")
    result = machine.bazelw("info")
    assert machine.calls == []
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 2
    assert "takes root" in result.stderr


def test_sudo_is_used_after_asking(machine: Machine) -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("no script(1) to make a terminal with")
    (machine.bin / "sh").symlink_to(machine.bin / "bash")
    machine.program("apt-get", "[[ $1 == update ]] || exit 3")
    machine.program("sudo", '"$@"')
    environment = {
        "PATH": str(machine.bin),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "SHELL": str(machine.bin / "sh"),
    }
    result = subprocess.run(
        [script, "--quiet", "--return", "--command", f"bash {BAZELW} info", "/dev/null"],
        env=environment,
        input="y\n",
        capture_output=True,
        text=True,
    )
    assert "Install Debian's (sudo apt-get install bazel-bootstrap)? [y/N]" in result.stdout
    assert machine.calls[:2] == ["sudo apt-get update --quiet", "apt-get update --quiet"]
    assert machine.calls[2].startswith("sudo env DEBIAN_FRONTEND=noninteractive apt-get install")


def test_without_apt_it_says_how_to_get_bazel(machine: Machine) -> None:
    result = machine.bazelw("info")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "bazelw: there is no bazel or bazelisk on PATH, and no apt-get to install one with.",
        "Get Bazel from https://bazel.build/install (bazelisk is best), or name one: BAZEL=/path/to/bazel ./bazelw ...",
    ]
