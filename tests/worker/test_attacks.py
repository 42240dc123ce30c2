"""What a model that wants to do harm can do in a worker, as root and as an ordinary user. It may be native code.

Modules: `worker/filters.py`, `worker/isolation.py`, `worker/landlock.py`, `worker/namespaces.py`, `worker/outputs.py`,
`worker/jail.py`, `worker/root.py`, `worker/syscalls.py`.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stagec.worker import landlock, work
from tests.building import COMPILER, write_specs
from tests.users import USERS, WAYS, User, as_user, isolation, needs_isolation, refusing, where
from tests.worker.bazel import Worker

MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.evil]
entry = "models.evil:f"
args = ["f32[4]"]
platforms = ["cpu"]
[functions.good]
entry = "models.good:f"
args = ["f32[4]"]
platforms = ["cpu"]
"""
# What a model has at hand: `do` does something and keeps what came of it, `call` makes a system call.
TOOLS = """
import contextlib, ctypes, json, mmap, os, signal, socket, stat, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
told = {}
def do(name, action):
    try:
        told[name] = action()
    except BaseException as error:
        told[name] = type(error).__name__ + ": " + str(error)
def call(*arguments):
    result = libc.syscall(*arguments)
    return -ctypes.get_errno() if result < 0 else result
def f(x):
    print("told " + json.dumps(told))
    return x
"""


class Attacked:
    """A worker, and the repository that it works for.

    user: who runs it. before: a command that runs it. way: what isolates its actions, one of WAYS.
    """

    def __init__(self, folder: Path, user: User, before: Sequence[str] = (), way: str = "namespaces") -> None:
        self.way = way
        self.root = folder / "root"
        (self.root / "models").mkdir(parents=True)
        (self.root / "bazel-out").mkdir()
        (self.root / "models" / "m.toml").write_text(MANIFEST)
        (self.root / "models" / "good.py").write_text("def f(x):\n    return x + 1\n")
        (self.root / "models" / "evil.py").write_text(TOOLS)
        (self.root / "models" / "data.txt").write_text("data")
        write_specs("models/m.toml", self.root, self.root / "bazel-out")
        if user.number is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user.number, user.number)
        self.worker = Worker("action export", self.root, user, before)

    def good(self) -> tuple[int, str]:
        """Export a function of somebody else's."""
        return self.worker.ask(_export("good"), ["models/good.py", "bazel-out/m.good.spec"])

    def evil(self, source: str, *more: str) -> tuple[int, str]:
        """Export one of a model that does this when it is imported. more: arguments of the action."""
        (self.root / "models" / "evil.py").write_text(TOOLS + source)
        inputs = ["models/evil.py", "models/data.txt", "bazel-out/m.evil.spec"]
        return self.worker.ask([*_export("evil"), *more], inputs)

    def told(self, source: str) -> dict[str, Any]:
        """What a model keeps in `told`; the action is successful."""
        status, output = self.evil(source)
        assert status == 0, output
        told: dict[str, Any] = json.loads(output.splitlines()[-1].removeprefix("told "))
        return told

    def not_promised_without(self, way: str) -> None:
        """Skip a test of what is not promised where actions are isolated less than in this way."""
        if [*WAYS].index(self.way) > [*WAYS].index(way):
            pytest.skip(f"not promised without {way}, as test_what_is_not_promised shows")

    def files(self) -> Mapping[Path, bytes]:
        """All files of the repository but for outputs."""
        return {
            path: path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and path.suffix not in (".exported", ".json") and path.name != "evil.py"
        }


def _export(name: str) -> list[str]:
    stem = f"bazel-out/m.{name}"
    words = ["--output", f"{stem}.exported", "--description", f"{stem}.exported.json"]
    return [*words, "--spec", f"{stem}.spec", "--import-root", "."]


@pytest.fixture(
    scope="module",
    params=[*itertools.product(USERS, ("namespaces", "Landlock")), ("ordinary user", "filter")],
    ids="-".join,
)
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    name, way = request.param
    with as_user(name) as user, tempfile.TemporaryDirectory(dir="/tmp") as name:
        needs_isolation(user, way=way)
        attacked = Attacked(Path(name), user, where(way, user), way)
        with attacked.worker:
            assert attacked.good() == (0, "")
            yield attacked


ANSWERS = """
open_ = [fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{fd}")]
pipes = [fd for fd in open_ if stat.S_ISFIFO(os.fstat(fd).st_mode) or stat.S_ISSOCK(os.fstat(fd).st_mode)]
worker, action = os.getppid(), os.getpid()
if not os.fork():
    with contextlib.suppress(OSError):
        os.setsid()
    os.chdir("/")
    if os.fork():
        os._exit(0)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(action, 0)
            time.sleep(0.02)
    time.sleep(0.2)  # what it said before would be the action's own word
    with contextlib.suppress(OSError):
        if worker:
            os.kill(worker, signal.SIGSTOP)
    for fd in pipes:
        with contextlib.suppress(OSError):
            os.write(fd, bytes([4, 8, 0, 18, 0]))  # success
    os._exit(0)
os.wait()
"""


def test_it_does_not_answer_for_the_worker(attacked: Attacked) -> None:
    attacked.not_promised_without("Landlock")
    exported = attacked.root / "bazel-out" / "m.good.exported"
    wanted = exported.read_bytes()
    exported.unlink()
    assert attacked.evil(ANSWERS)[0] == 0
    time.sleep(0.5)
    assert Path(f"/proc/{attacked.worker.process.pid}/stat").read_text().split()[2] == "S"
    assert attacked.good() == (0, "")
    assert exported.read_bytes() == wanted


def test_it_has_no_descriptor_but_its_own(attacked: Attacked) -> None:
    told = attacked.told("""
for fd in os.listdir("/proc/self/fd"):
    do(fd, lambda: [os.readlink(f"/proc/self/fd/{fd}"), os.fstat(int(fd)).st_ino])
""")
    process = attacked.worker.process
    assert process.stdin
    assert process.stdout
    assert process.stderr
    ours = {os.fstat(one.fileno()).st_ino for one in (process.stdin, process.stdout, process.stderr)}
    there = {fd: found for fd, found in told.items() if isinstance(found, list)}  # but for the folder that was listed
    assert ours.isdisjoint(inode for _, inode in there.values())
    assert there["0"][0] == "/dev/null"
    assert there["1"] == there["2"]
    assert [found[0].partition(":")[0] for fd, found in there.items() if int(fd) > 2] == ["socket"]  # of its report


def test_it_has_no_privilege(attacked: Attacked) -> None:
    told = attacked.told("""
status = lambda text: dict(line.split(":\\t") for line in text.splitlines() if ":\\t" in line)
do("own", lambda: status(open("/proc/self/status").read()))
do("program's", lambda: status(subprocess.check_output(["cat", "/proc/self/status"], text=True)))
do("core", lambda: __import__("resource").getrlimit(4))
do("become", lambda: os.setresuid(1, 1, 1))
""")
    for process in ("own", "program's"):
        capabilities = {name: value for name, value in told[process].items() if name.startswith("Cap")}
        assert set(capabilities) == {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
        del capabilities["CapBnd"]  # what nobody gets who has no new privileges
        assert {int(value, 16) for value in capabilities.values()} == {0}
        assert (told[process]["NoNewPrivs"], told[process]["Seccomp"]) == ("1", "2")
    assert told["core"] == [1, 1]
    assert told["become"].startswith(("PermissionError", "OSError: [Errno 22]"))  # an ordinary user knows no other


def test_it_sees_no_process_but_its_own(attacked: Attacked) -> None:
    attacked.not_promised_without("Landlock")
    told = attacked.told(f"""
do("parent", os.getppid)
do("self", os.getpid)
do("processes", lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
for process in (1, {attacked.worker.process.pid}, os.getppid()):
    for name in ("root", "cwd", "exe", "fd/0", "mem", "environ", "ns/mnt"):
        do(f"{{process}} {{name}}", lambda: os.open(f"/proc/{{process}}/{{name}}", os.O_RDONLY))
do("worker", lambda: os.kill({attacked.worker.process.pid}, 9))
do("first", lambda: os.kill(1, 9))
do("all", lambda: os.kill(-1, 19))
""")
    looks = {name: told.pop(name) for name in [*told] if " " in name}
    assert {text.split(":")[0] for text in looks.values()} <= {"PermissionError", "FileNotFoundError"}
    assert {text.split(":")[0] for name, text in looks.items() if name.startswith("1 ")} == {"PermissionError"}
    # There is nobody else; and the kernel says no error where each of many is not for this process.
    assert str(told.pop("all")).startswith(("ProcessLookupError", "PermissionError", "None"))
    worker, first = told.pop("worker"), told.pop("first")
    if attacked.way == "namespaces":
        assert worker.startswith("ProcessLookupError")
        assert first is None  # the kernel takes no such signal from within
        assert told == {"parent": 0, "self": 2, "processes": [1, 2]}
    else:
        assert (worker.split(":")[0], first.split(":")[0]) == ("PermissionError", "PermissionError")
    assert attacked.good() == (0, "")


# Numbers of x86-64.
CALLS = {
    "ptrace": (101, 0, 0, 0, 0),
    "modify_ldt": (154, 0, 0, 0),
    "pivot_root": (155, b".", b"."),
    "chroot": (161, b"/"),
    "acct": (163, None),
    "mount": (165, b"none", b"/", None, 1 << 5, None),
    "umount2": (166, b"/proc", 2),
    "reboot": (169, 0, 0, 0, None),
    "init_module": (175, None, 0, b""),
    "quotactl": (179, 0, None, 0, None),
    "kexec_load": (246, 0, 0, None, 0),
    "add_key": (248, b"user", b"k", b"v", 1, -3),
    "keyctl": (250, 0, -3, 1),
    "unshare": (272, 1 << 17),
    "perf_event_open": (298, None, 0, -1, -1, 0),
    "open_by_handle_at": (304, 0, None, 0),
    "setns": (308, 0, 0),
    "process_vm_readv": (310, 1, None, 0, None, 0, 0),
    "process_vm_writev": (311, 1, None, 0, None, 0, 0),
    "kcmp": (312, 1, 2, 0, 0, 0),
    "kexec_file_load": (320, -1, -1, 0, None, 0),
    "bpf": (321, 0, None, 0),
    "userfaultfd": (323, 0),
    "io_uring_setup": (425, 1, None),
    "open_tree": (428, -100, b"/", 1),
    "move_mount": (429, -100, b"/", -100, b"/proc", 0),
    "fsopen": (430, b"tmpfs", 0),
    "fsmount": (432, 0, 0, 0),
    "pidfd_getfd": (438, 0, 0, 0),
    "mount_setattr": (442, -100, b"/", 0, bytes(32), 32),
    "quotactl_fd": (443, 0, 0, 0, None),
    "clone for a user namespace": (56, 17 | 1 << 28, None, None, None, 0),
    "clone for a time namespace": (56, 17 | 1 << 7, None, None, None, 0),
    "getpid of x32": (0x40000000 | 39,),
    "semget": (64, 0, 1, 0o1600),
    "msgget": (68, 0, 0o1600),
    "shmat": (30, 0, None, 0),
}
CALLS_IN_GROUP = {
    "truncate": (76, b"models/data.txt", 1),
    "setsid": (112,),
    "setpgid": (109, 0, 0),
    "open to truncate": (2, b"models/data.txt", os.O_TRUNC, 0),
    "open to truncate, to read and write nothing": (2, b"models/data.txt", os.O_TRUNC | 3, 0),
    "openat to truncate": (257, -100, b"models/data.txt", os.O_TRUNC, 0),
    "openat2": (437, -100, b"models/data.txt", bytes(24), 24),
    "chattr": (16, 0, 0x40086602, bytes(8)),
    "limits of others": (302, 1, 7, None, None),
}
DEVICES = {"full", "null", "random", "urandom", "zero"}
SOCKETS = {
    "unix": (41, 1, 1, 0),
    "inet": (41, 2, 1, 0),
    "netlink": (41, 16, 3, 0),
    "packet": (41, 17, 3, 0),
    "alg": (41, 38, 5, 0),
    "vsock": (41, 40, 1, 0),
    "datagrams": (53, 1, 2, 0, bytes(8)),
    "datagrams, inherited by nobody": (53, 1, 2 | 1 << 19, 0, bytes(8)),
    "raw": (53, 1, 3, 0, bytes(8)),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter of system calls is for x86-64")
def test_it_cannot_ask_the_kernel_for_what_undoes_isolation(attacked: Attacked) -> None:
    calls = CALLS if attacked.way == "namespaces" else {**CALLS, **CALLS_IN_GROUP}
    told = attacked.told(f"""
for name, arguments in {calls!r}.items():
    do(name, lambda: call(*arguments) or os._exit(0))  # in a child of clone, and where a call is not refused
do("clone3", lambda: call(435, struct.pack("11Q", *[0] * 11), 88))
for name, arguments in {SOCKETS!r}.items():
    do(name, lambda: call(*arguments))
do("streams", lambda: [one.close() for one in socket.socketpair()])
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, 20; int 0x80; ret: getpid of a 32-bit program
do("getpid of i386", ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code))))
""")
    assert {name: told[name] for name in calls} == dict.fromkeys(calls, -1)
    assert {name: told[name] for name in SOCKETS} == dict.fromkeys(SOCKETS, -97)
    assert (told["clone3"], told["getpid of i386"], told["streams"]) == (-38, -1, [None, None])


def test_it_writes_to_nothing_of_the_machine(attacked: Attacked) -> None:
    """What is tried changes nothing where it is possible, but for files that are made."""
    attacked.not_promised_without("Landlock")
    packages = next(entry for entry in sys.path if entry.endswith("site-packages"))
    code = Path(COMPILER, "stagec", "core", "builds", "version.py").resolve().parent
    there = [
        *("models/data.txt", "models/evil.py", "bazel-out/m.evil.spec", f"{code}/version.py", "/etc/passwd"),
        *("/proc/self/oom_score_adj", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/exe"),
        *("/sys/devices/system/cpu/cpu0/uevent", "/sys/devices/system/cpu/online"),
    ]
    kept = [*there[:5], "/proc/self/exe", "/dev/null", "/usr/bin", packages, str(code)]
    made = [Path(folder, "planted") for folder in (packages, code, "/usr", "/etc", "/dev", "/var", "/")]
    before = attacked.files()
    try:
        told = attacked.told(f"""
for path in filter(os.path.exists, {there!r}):
    do(path, lambda: open(path, "ab").close())
for path in {list(map(str, made))!r}:
    do(path, lambda: open(path, "xb").close())
for path in {kept!r}:
    now = os.stat(path)
    do("mode of " + path, lambda: os.chmod(path, stat.S_IMODE(now.st_mode)))
    do("mode of opened " + path, lambda: os.fchmod(os.open(path, os.O_RDONLY), stat.S_IMODE(now.st_mode)))
    do("time of " + path, lambda: os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns)))
    do("owner of " + path, lambda: os.chown(path, os.getuid(), os.getgid()))
    do("attribute of " + path, lambda: os.setxattr(path, "user.planted", b""))
do("mode of stdin", lambda: os.fchmod(0, stat.S_IMODE(os.fstat(0).st_mode)))
""")
        assert {name: text for name, text in told.items() if not isinstance(text, str)} == {}
        assert {name: text for name, text in told.items() if not text.startswith(("OSError", "PermissionError"))} == {}
        assert [path for path in made if path.exists()] == []
        assert attacked.files() == before
    finally:
        for path in filter(Path.exists, made):
            path.unlink()


def test_it_sees_nothing_of_the_users(attacked: Attacked) -> None:
    attacked.not_promised_without("Landlock")
    told = attacked.told(f"""
for path in ("/", "/etc", "/dev", "/var", "/action", "..", "."):
    do(path, lambda: sorted(os.listdir(path)))
do("repository", lambda: os.listdir({str(attacked.root)!r}))
do("models", lambda: sorted(os.listdir("models")))
do("shadow", lambda: open("/etc/shadow").read())
for path in {[str(attacked.root / "models" / name) for name in ("good.py", "data.txt")]!r}:
    do(os.path.basename(path), lambda: open(path).read())
do("link", lambda: os.link({str(attacked.root / "models" / "good.py")!r}, "good.py"))
""")
    assert (told["models"], told["."]) == (["data.txt", "evil.py"], ["bazel-out", "models"])
    hidden = "FileNotFoundError" if attacked.way == "namespaces" else "PermissionError"
    for name in ("repository", "shadow", "good.py", "link"):
        assert told[name].startswith((hidden, "OSError: [Errno 18]")), name
    if attacked.way == "namespaces":
        assert told["data.txt"].startswith(hidden)
        assert set(told["/"]) >= {"action", "dev", "etc", "proc", "sys", "tmp", "usr", "var"}
        assert "run" not in told["/"]
        assert set(told["/dev"]) <= {*DEVICES, "fd", "shm", "stderr", "stdin", "stdout"}
        assert (told["/var"], told["/action"]) == (["tmp"], ["shm", "tmp", "work"])
    else:
        assert told["data.txt"] == "data"  # of an input, it sees where it is
        assert {told[path].split(":")[0] for path in ("/", "/etc", "/dev", "/var")} == {hidden}


def test_it_reaches_nobody(attacked: Attacked) -> None:
    folder = attacked.root.parent
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
    ):
        for listening, name in ((unix, f"{folder}/socket"), (abstract, f"\0{folder}"), (log, f"{folder}/log")):
            listening.bind(name)
        for name in ("socket", "log"):
            (folder / name).chmod(0o777)
        unix.listen()
        abstract.listen()
        log.setblocking(False)
        told = attacked.told(f"""
do("tcp", lambda: socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), 5))
do("unix", lambda: socket.socket(socket.AF_UNIX).connect("{folder}/socket"))
do("internet", lambda: socket.create_connection(("192.0.2.1", 80), 5))
do("of a pair", lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"evil", "{folder}/log"))
do("of streams", lambda: socket.socketpair()[0].connect("{folder}/socket"))
open_ = [fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{{fd}}")]
(report,) = [fd for fd in open_ if stat.S_ISSOCK(os.fstat(fd).st_mode)]
do("of its report", lambda: socket.socket(fileno=os.dup(report)).connect("\\0{folder}"))
""")
        with pytest.raises(BlockingIOError):
            log.recv(4)
    connected = ("OSError: [Errno 106]", "PermissionError")  # to the worker, or to itself
    assert told.pop("of its report").startswith(connected)
    assert told.pop("of streams").startswith((*connected, "FileNotFoundError"))
    assert {text.partition("]")[0] for text in told.values()} == {"OSError: [Errno 97"}


BEYOND = """
do("processes", lambda: len([name for name in os.listdir("/proc") if name.isdigit()]) > 2)
do("commands", lambda: "worker" in open("/proc/{worker}/cmdline").read())
do("sizes", lambda: os.stat({good!r}).st_size > 0)
do("files", lambda: "return" in open({good!r}).read())
do("writing", lambda: open({good!r}, "a").close() is None)
do("signals", lambda: os.kill({worker}, 0) is None)
do("looking", lambda: open("/proc/{worker}/environ").close() is None)
"""


def test_what_is_not_promised(attacked: Attacked) -> None:
    """docs/security.md has this list."""
    good = str(attacked.root / "models" / "good.py")
    told = attacked.told(BEYOND.format(good=good, worker=attacked.worker.process.pid))
    possible = {name for name, result in told.items() if result is True}
    with_landlock = {"processes", "commands", "sizes", *(["signals"] if landlock.version() < 6 else [])}
    assert possible == {"namespaces": set(), "Landlock": with_landlock, "filter": {*told}}[attacked.way]


STAYS = """
if not os.fork():
    do("session", os.setsid)
    do("group", lambda: os.setpgid(0, 0))
    if not os.fork():
        os.execvp("sleep", ["sleep", "77777"])
    os._exit(0)
os.wait()
for folder in ("/tmp", "/dev/shm", "/var/tmp"):
    do(folder, lambda: open(folder + "/left", "w").close())
do("segment", lambda: libc.shmget(0x57A6EC, 4096, 0o1600))
do("queue", lambda: libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o600, None))
"""
LEFT = """
do("files", lambda: [folder for folder in ("/tmp", "/dev/shm", "/var/tmp") if os.path.exists(folder + "/left")])
do("segment", lambda: libc.shmget(0x57A6EC, 4096, 0o600))
do("queue", lambda: libc.mq_open(b"/left", os.O_RDWR))
do("temporary", lambda: os.environ.get("TMPDIR"))
"""


def processes(command: bytes) -> list[Path]:
    """Those whose command line has this in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if command in path.read_bytes():
                found.append(path)
    return found


def test_it_leaves_nothing(attacked: Attacked) -> None:
    told = attacked.told(STAYS)
    assert (told["segment"], told["queue"]) == (-1, -1)
    assert processes(b"sleep\x0077777") == []
    left = attacked.told(LEFT)
    assert (left["segment"], left["queue"]) == (-1, -1)
    for folder in left["files"]:
        Path(folder, "left").unlink()
    assert bool(left["files"]) == (attacked.way == "filter")
    if attacked.way != "namespaces":  # each action has a folder below the worker's
        assert not list(Path(left["temporary"]).parents[1].iterdir())


RUNS_AWAY = """
if not os.fork():
    libc.prctl(15, b"runs-away")
    while True:
        if os.fork():
            os._exit(0)
time.sleep(0.5)
"""


def test_it_does_not_run_away_from_its_end(attacked: Attacked) -> None:
    """As a process that is always a new one, which nobody could kill by its number."""
    assert attacked.evil(RUNS_AWAY)[0] == 0
    assert [path for path in Path("/proc").glob("[0-9]*/comm") if _text(path) == "runs-away\n"] == []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_undeclared_files_stay_where_they_are(attacked: Attacked) -> None:
    before = attacked.files()
    status, _ = attacked.evil(
        """
os.rename("bazel-out", "other")  # with the mounts of the inputs in it
os.mkdir("bazel-out")
open("bazel-out/m.evil.spec", "w").write(open("other/m.evil.spec").read().replace("evil", "good"))
os.makedirs("planted")
open("planted/here", "w").close()
open("bazel-out/m.good.exported", "w").write("evil")
""",
        *("--import-root", "planted/here"),
    )
    assert status == 0
    assert attacked.files() == before
    assert not (attacked.root / "planted").exists()
    assert (attacked.root / "bazel-out" / "m.good.exported").read_bytes() != b"evil"


OTHER_FILES = {
    "a link to a file": "os.symlink('/etc/passwd', path)",
    "a link to a folder": "os.rename('bazel-out', 'x'); os.symlink('/usr', 'bazel-out')",
    "a pipe": "os.mkfifo(path)",
    "a folder": "os.mkdir(path)",
    "a socket": "os.mknod(path, stat.S_IFSOCK | 0o600)",
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_an_output_is_a_plain_file(attacked: Attacked, kind: str) -> None:
    output = attacked.root / "bazel-out" / "m.evil.exported"
    output.unlink(missing_ok=True)
    ends = f"""
path = "bazel-out/m.evil.exported"
def at_the_end():
    if os.path.lexists(path):
        os.unlink(path)
    {OTHER_FILES[kind]}
real = os._exit
def leave(status):
    at_the_end()
    real(status)
os._exit = leave
"""
    status, said = attacked.evil(ends)
    assert (status, said.splitlines()[-1].partition(" cannot be taken from the action: ")[0]) == (
        1,
        "stagec: bazel-out/m.evil.exported",
    )
    assert not output.exists()


def test_an_input_is_no_output(attacked: Attacked) -> None:
    said = "is an input of this action: it cannot be an output"
    before = attacked.files()
    assert attacked.evil("", "--lowered", "models/data.txt") == (1, f"stagec: models/data.txt {said}\n")
    status, told = attacked.evil("", "--lowered", "../out")
    assert (status, told) == (1, "stagec: ../out: an output is a path below the working directory\n")
    assert attacked.files() == before


@pytest.mark.parametrize(
    "word", ['{"status": 0', "[]", '{"status": "0", "missed": 7}', '{"status": 1e999}', "\\xff" * 99999]
)
def test_its_last_word_is_not_believed(attacked: Attacked, word: str) -> None:
    speaks = f"""
(word,) = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists("/proc/self/fd/" + fd)]
os.write(word, b'{word}'[:60000])
os._exit(0)
"""
    status, said = attacked.evil(speaks)
    assert status == 1
    assert "the process of this action ended with exit(0) in the middle of its work" in said
    assert attacked.good() == (0, "")


def test_its_last_word_is_not_believed_when_it_dies(attacked: Attacked) -> None:
    speaks = """
(word,) = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists("/proc/self/fd/" + fd)]
os.write(word, b'{"status": 0, "missed": []}')
os.kill(os.getpid(), 11)
"""
    status, said = attacked.evil(speaks)
    assert status == 1
    assert "the process of this action died of SIGSEGV" in said


def test_it_makes_no_process_that_its_own_end_does_not_end(attacked: Attacked) -> None:
    """Nobody would end a child of its parent, and its PID namespace would never end."""
    clone_parent = 0x8000
    told = attacked.told(f"""
def child():
    process = call(56, {clone_parent} | signal.SIGCHLD, 0, 0, 0, 0)
    if process == 0:
        os._exit(0)
    return process
do("child", child)
""")
    assert told == {"child": -1}
    assert attacked.good() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 6, signal.SIGXFSZ])
def test_whatever_signal_it_dies_of_the_worker_goes_on(attacked: Attacked, number: int) -> None:
    status, said = attacked.evil(f"signal.signal({number}, signal.SIG_DFL); os.kill(os.getpid(), {number})")
    assert status == 1
    assert "stagec: the process of this action died of " in said
    assert attacked.good() == (0, "")


def test_an_output_with_holes_takes_no_more_of_the_disk(attacked: Attacked) -> None:
    source = """
with open("bazel-out/holes", "wb") as file:
    file.seek(1 << 30)
    file.write(b"data")
    file.truncate(3 << 30)
"""
    assert attacked.evil(source, "--declared", "bazel-out/holes")[0] == 0
    made = attacked.root / "bazel-out" / "holes"
    state = made.stat()
    assert (state.st_size, state.st_blocks * 512 < 1 << 20) == (3 << 30, True)
    with made.open("rb") as file:
        assert file.read(4) == bytes(4)
        file.seek((1 << 30) - 2)
        assert file.read(8) == b"\0\0data\0\0"
    made.unlink()


def test_a_file_larger_than_any_is_told(attacked: Attacked) -> None:
    source = "open('bazel-out/large', 'wb').truncate((1 << 63) - 4096)"
    status, said = attacked.evil(source, "--declared", "bazel-out/large")
    if attacked.way == "namespaces" or status == 1:
        assert (status, said.splitlines()[-1]) == (1, "stagec: bazel-out/large cannot be written: File too large")
    else:  # it wrote to the same disk
        assert "File too large" in said
    assert not [path.name for path in (attacked.root / "bazel-out").iterdir() if "large" in path.name]
    assert attacked.good() == (0, "")


@pytest.mark.parametrize("name", USERS)
def test_a_full_disk_is_told(name: str) -> None:
    mounts = "mkdir bazel-out/full && mount -t tmpfs -o size=64k none bazel-out/full"
    before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mounts} && exec "$0" "$@"']
    with as_user(name) as user, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        needs_isolation(user, way="namespaces")  # what mounts the disk needs one, too
        attacked = Attacked(Path(folder), user, before)
        with attacked.worker:
            source = "os.makedirs('bazel-out/full'); open('bazel-out/full/data', 'wb').write(b'data' * (1 << 18))"
            status, said = attacked.evil(source, "--declared", "bazel-out/full/data")
            assert status == 1
            assert said.splitlines()[-1] == "stagec: bazel-out/full/data cannot be written: No space left on device"
            assert attacked.good() == (0, "")


def test_names_that_it_looks_for_are_not_looked_at(attacked: Attacked) -> None:
    page = str(COMPILER.parent / "README.md")  # which is there, and not for it
    hidden = [] if attacked.way == "filter" or page.startswith(work._OF_THE_MACHINE) else [page]
    looked_for = ["../../root/.ssh/id", "/data/weights.npz", "models/good.py", "models/nothing", "/usr/bin/env", page]
    status, said = attacked.evil(f"""
for path in {looked_for!r}:
    with contextlib.suppress(OSError):
        open(path)
raise ValueError("the end")
""")
    hints = [line for line in said.splitlines() if line.endswith(" is not an input of this action")]
    assert status == 2
    assert [hint.split(" ")[0] for hint in hints] == sorted(["/data/weights.npz", "models/good.py", *hidden])


LAYERS = """
import ctypes, json, os, struct, sys
sys.path[:0] = [sys.argv[1]]
from stagec.worker import namespaces, syscalls
def tried(action):
    try:
        action()
    except OSError as error:
        return error.errno
def remount():
    syscalls.change_mount("/", off=syscalls.MOUNT_ATTR_RDONLY, below=True)
def in_a_namespace_below():
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    remount()
def in_an_action(take):
    ours, theirs = os.pipe()
    with whole.new_files() as files, whole.action("/", (), files) as (_, (processes, mounts)):
        syscalls.setns(processes, syscalls.CLONE_NEWPID)
        child = os.fork()
        if not child:
            syscalls.setns(mounts)
            take()
            told = [tried(remount), tried(in_a_namespace_below), tried(lambda: open("/usr/planted", "w"))]
            told += [tried(lambda: open("/action/planted", "w")), tried(lambda: os.listdir("/proc/1/root"))]
            os.write(theirs, json.dumps(told).encode())
            os._exit(0)
        os.waitpid(child, 0)
    return json.loads(os.read(ours, 1000))
whole = namespaces.Namespaces()
whole.start(["-c", "import os, sys; os.read(int(sys.argv[1]), 1)"], in_place=False)
print(json.dumps(in_an_action(lambda: syscalls.set_capabilities(0))))
"""


@pytest.mark.parametrize("name", USERS)
def test_it_is_isolated_wherever_the_system_lets_it(name: str) -> None:
    """The other tests are skipped where `isolation_problem` finds one: it finds none where unshare(1) finds none."""
    namespaces = ("--user", "--map-root-user", "--mount", "--net", "--ipc", "--pid", "--fork", "--mount-proc")
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 12) or not shutil.which("unshare"):
        pytest.skip("no mount_setattr, or no unshare")
    with as_user(name) as user:
        if not user.can("unshare", *namespaces, "true"):
            pytest.skip("this system does not let this user have namespaces")
        assert isolation(user)[0] == "namespaces"


@pytest.mark.parametrize("name", USERS)
def test_namespaces_alone_keep_it(name: str) -> None:
    """Without the filter of system calls, and without Landlock."""
    with as_user(name) as user:
        needs_isolation(user, way="namespaces")
        command = [user.python, "-B", "-c", LAYERS, str(COMPILER)]
        done = subprocess.run(command, user=user.number, group=user.number, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, 1, 30, None, 13]


LANDLOCK = """
import json, os, sys
sys.path[:0] = [sys.argv[1]]
from stagec.worker import filters, landlock, syscalls
def tried(action):
    try:
        action()
    except OSError as error:
        return error.errno
version, read, written, outside = int(sys.argv[2]), *sys.argv[3:]
landlock.restrict([written, "/dev/null"], [read], version)
filters.install(filters.of_template(in_group=True))
attempts = {
    "written": lambda: open(written + "/new", "w").close(),
    "moved": lambda: os.rename(written + "/new", written + "/folder/new"),
    "made": lambda: os.mkdir(written + "/made"),
    "device": lambda: open("/dev/null", "w").close(),
    "read": lambda: open(read + "/there").close(),
    "listed": lambda: os.listdir(read),
    "written to what is read": lambda: open(read + "/there", "a").close(),
    "read outside": lambda: open(outside + "/there").close(),
    "listed outside": lambda: os.listdir(outside),
    "written outside": lambda: open(outside + "/there", "a").close(),
    "made outside": lambda: open(outside + "/new", "w").close(),
    "removed outside": lambda: os.unlink(outside + "/there"),
    "linked outside": lambda: os.link(outside + "/there", written + "/there"),
    "cut off outside": lambda: os.truncate(outside + "/there", 0),
    "cut off outside as it opens": lambda: os.open(outside + "/there", os.O_RDONLY | os.O_TRUNC),
    "cut off what it reads": lambda: os.open(read + "/there", os.O_RDONLY | os.O_TRUNC),
    "looked into": lambda: os.open(f"/proc/{os.getppid()}/environ", os.O_RDONLY),
    "signalled": lambda: os.kill(os.getppid(), 0),
}
print(json.dumps({name: tried(attempt) for name, attempt in attempts.items()}))
"""
_EPERM, _EACCES, _EXDEV = 1, 13, 18


@pytest.mark.parametrize("version", range(1, 8))
def test_landlock_alone_keeps_it(tmp_path: Path, version: int) -> None:
    """As its early versions do too, with what the filter refuses where they let it."""
    if landlock.version() < version:
        pytest.skip(f"this kernel has not Landlock {version}")
    folders = [tmp_path / name for name in ("read", "written", "outside")]
    for folder in folders:
        folder.mkdir()
        (folder / "there").write_text("there")
    (tmp_path / "written" / "there").unlink()
    (tmp_path / "written" / "folder").mkdir()
    command = [sys.executable, "-B", "-c", "import ctypes; ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)" + LANDLOCK]
    done = subprocess.run([*map(str, (*command, COMPILER, version, *folders))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told.pop("moved"), told.pop("linked outside")) == ((_EXDEV if version == 1 else None), _EXDEV)
    assert told.pop("signalled") == (_EPERM if version >= 6 else None)
    assert [told.pop(name) for name in ("written", "made", "device", "read", "listed")] == [None] * 5
    assert {told.pop(name) for name in [*told] if name.startswith("cut off")} <= {_EPERM, _EACCES}
    assert set(told.values()) == {_EACCES}
    assert [(folder / "there").read_text() for folder in (folders[0], folders[2])] == ["there", "there"]


def test_a_system_that_does_not_let_it_is_told(tmp_path: Path) -> None:
    with Worker("action export", tmp_path, before=refusing(None, "272=1", "317=1")) as worker:
        for _ in range(2):
            status, said = worker.ask(["--output", "x"])
            assert status == 1
            assert said.splitlines() == [
                "stagec: a worker cannot isolate its actions on this system (unshare: Operation not permitted, "
                "seccomp: Operation not permitted)",
                "  run bazel shutdown: the next build sees it, and runs each action in a Bazel sandbox",
            ]
