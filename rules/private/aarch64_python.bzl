"""A Python for aarch64 and, on x86-64, the emulator that runs it."""

load("//rules:providers.bzl", "InterpreterInfo")
load("//rules/private:python_environment.bzl", "watched_path")

# LLVM and the loader read there what the CPU has. It is what the emulator's largest CPU has of what a core may require.
_CPUINFO = """processor\t: 0
Features\t: aes asimd asimddp asimdhp asimdrdm atomics crc32 dcpop fp fphp lrcpc pmull sha1 sha2 sha3 sha512
"""

# A program of the machine's may start it, and so may the interpreter itself (sys.executable).
_PROGRAM = """#!/bin/sh
here="$(dirname "$0")"
PYTHONHOME="$here/root/usr" exec "$here/qemu-aarch64" -0 "$0" -L "$here/root" "$here/root/usr/bin/python3.11" "$@"
"""

_BUILD = """load("@stagec//rules/private:aarch64_python.bzl", "emulated_python")

emulated_python(
    name = "interpreter",
    files = ["packages.lock", "python", "qemu-aarch64", "root"],
    packages = "packages.json",
    program = "python",
    version = "{version}",
    visibility = ["//visibility:public"],
)
"""

_WITHOUT = """
  %s
  write where Debian is: --repo_env=STAGEC_DEBIAN="https://mirror.example.com/debian https://mirror.example.com/debian-security",
  or declare a Python of your own for aarch64 (docs/aarch64.md)"""

def _archives(repository_ctx, script):
    """Where packages of Debian are: what the user says, else what apt-get is set to."""
    named = repository_ctx.os.environ.get("STAGEC_DEBIAN")
    if named:
        return named.split(" ")
    if not repository_ctx.which("apt-get"):
        fail("the Python that compiles for aarch64 is Debian's" + _WITHOUT % "this machine has no apt-get, which would say where that is")
    result = repository_ctx.execute(["bash", script, "archives"])
    if result.return_code != 0 or not result.stdout.strip():
        fail("the Python that compiles for aarch64 is Debian's" + _WITHOUT % (result.stderr.strip() or "apt-get is set to no archive of Debian"))
    return result.stdout.strip().split("\n")

def _fetch(repository_ctx, archives, lock):
    """Downloads the packages of a lock: a struct of their file names, of what `packages.json` lists, and of the path that is gone."""
    files, packages = [], []
    for line in lock.splitlines():
        if not line or line.startswith("#"):
            continue
        sha256, path = line.split(" ")
        file = path.rpartition("/")[2]
        if hasattr(repository_ctx, "report_progress"):
            repository_ctx.report_progress("fetching " + file)
        archive = path.partition("/")[0]
        urls = [one[:-len(archive)] + path.replace("+", "%2B") for one in archives if one.endswith("/" + archive)]
        if not urls or not repository_ctx.download(url = urls, output = file, sha256 = sha256, allow_fail = True).success:
            return struct(files = files, packages = packages, gone = path)
        files.append(file)
        name, version, _ = file.split("_")
        packages.append({"name": name, "version": version, "filename": file, "sha256": sha256})
    return struct(files = files, packages = packages, gone = None)

def _aarch64_python_impl(repository_ctx):
    unpack = watched_path(repository_ctx, repository_ctx.attr._unpack)
    interpreter = repository_ctx.read(repository_ctx.attr._interpreter).strip()
    lock = repository_ctx.read(watched_path(repository_ctx, repository_ctx.attr.lock))
    script = watched_path(repository_ctx, repository_ctx.attr._script)
    archives = _archives(repository_ctx, script)
    fetched = _fetch(repository_ctx, archives, lock)
    if fetched.gone:
        # Debian keeps the newest packages alone. Those have a digest that Debian signs.
        gone = fetched.gone
        for file in fetched.files:
            repository_ctx.delete(file)
        result = repository_ctx.execute(["bash", script, "lock"] + archives)
        lock = result.stdout
        fetched = _fetch(repository_ctx, archives, lock) if result.return_code == 0 else fetched
        if fetched.gone:
            fail("Debian has no %s with the digest of the lock" % gone + _WITHOUT % (result.stderr.strip() or "nor the one that is newest today"))
        print("Debian has no %s any more: its newest packages compile for aarch64, and not those of compiler/aarch64.lock" % gone)
    files = fetched.files
    python = [one["version"].split("-")[0] for one in fetched.packages if one["name"] == "python3.11-minimal"][0]
    result = repository_ctx.execute([interpreter, "-B", "-E", unpack] + files)
    if result.return_code != 0:
        fail(result.stderr)
    for file in files:
        repository_ctx.delete(file)
    repository_ctx.file("root/proc/cpuinfo", _CPUINFO, executable = False)
    repository_ctx.file("python", _PROGRAM)
    repository_ctx.file("packages.lock", lock, executable = False)
    repository_ctx.file("packages.json", json.encode({"python": python, "packages": fetched.packages}), executable = False)
    repository_ctx.file("BUILD", _BUILD.format(version = python), executable = False)

aarch64_python = repository_rule(
    implementation = _aarch64_python_impl,
    doc = "Downloads Debian's Python 3.11 for aarch64, and the emulator that runs it on x86-64, from where apt-get would or " +
          "where STAGEC_DEBIAN says. Where a package of the lock is gone, it takes those that are newest.",
    environ = ["STAGEC_DEBIAN"],
    attrs = {
        "lock": attr.label(
            doc = "A line for each package: its SHA-256, and its path in Debian's archives.",
            default = Label("//compiler:aarch64.lock"),
            allow_single_file = True,
        ),
        "_interpreter": attr.label(default = Label("@stagec_planning//:interpreter.txt")),
        "_script": attr.label(default = Label("//rules/private:debian_lock.sh")),
        "_unpack": attr.label(default = Label("//rules/private:debian_packages.py")),
    },
)

def _emulated_python_impl(ctx):
    return [InterpreterInfo(
        executable = ctx.file.program,
        files = depset(ctx.files.files),
        version = ctx.attr.version,
        packages = ctx.file.packages,
    )]

emulated_python = rule(
    implementation = _emulated_python_impl,
    doc = "A Python for another architecture. aarch64_python declares it in the repository that it makes.",
    attrs = {
        "files": attr.label_list(
            doc = "The program, the emulator, the file system of the interpreter, and the lock, which stands for " +
                  "what is in that.",
            allow_files = True,
        ),
        "packages": attr.label(doc = "The list of what it was unpacked from, as JSON.", allow_single_file = True),
        "program": attr.label(doc = "What starts the emulator with the interpreter.", allow_single_file = True),
        "version": attr.string(doc = "Its full version."),
    },
)
