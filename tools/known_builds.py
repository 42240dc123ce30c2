"""The builds of jaxlib and its plugins that stagec knows: add one, and try again all that this Python has wheels for.

    python tools/known_builds.py add WHEEL [WHEEL ...]
    python tools/known_builds.py examine PACKAGE[==VERSION] [...]
    python tools/known_builds.py test [--wheels FOLDER] [PACKAGE[==VERSION] ...]
    python tools/known_builds.py names [VERSION ...]
    python tools/known_builds.py places WHEEL [WHEEL ...]

`add` examines wheels of jaxlib and of its plugins, compiles with each (`stagec/building/examination.py`), and writes
its row into compiler/stagec/patches/known_builds.json, and the row of a new release of jaxlib into
manifests/releases.toml. A build that is not as those that are known gets no row, and
it prints what is different. `examine` fetches wheels with pip, the newest unless you say a version, does the same for
those without a row, and prints the row. `test` fetches the wheels of rows with pip, does the same, and compares. Both
change nothing. `names` installs jax and jaxlib of each version into a folder, and prints the private names
(private_names.txt) that they do not have; without a version it looks at those that are installed. `places` writes into
compiler/stagec/patches/places.json where wheels with a row have the sites of changes, and those of no others.

A wheel of jaxlib needs the Python that it is for: run this with each. Where another stands in, `--under` says how. One
for aarch64 needs such a Python of the same version, with an emulator in front of it on another machine: `--python`
names a program that starts it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
sys.path.insert(0, str(ROOT / "compiler"))

from stagec.backends.gpu import nvidia  # noqa: E402  # found through the line above
from stagec.core.builds import platforms, releases  # noqa: E402
from stagec.patches import known_builds, places  # noqa: E402
from stagec.patches.known_builds import Build  # noqa: E402

PLATFORMS = {"jaxlib": "cpu"} | {
    plugin.distribution: platform.name for platform in platforms.PLATFORMS.values() for plugin in platform.plugins
}
LIBRARIES = {"jaxlib": "libjax_common.so"} | {
    plugin.distribution: plugin.library for platform in platforms.PLATFORMS.values() for plugin in platform.plugins
}
MANYLINUX = ("manylinux_2_27", "manylinux_2_28", "manylinux_2_31")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    add = commands.add_parser("add", help="examine and try wheels, and write their rows")
    add.add_argument("wheels", nargs="+", type=Path)
    test = commands.add_parser("test", help="try the rows again that this Python has wheels for")
    test.add_argument("which", nargs="*", help="such as jaxlib or libtpu==0.0.41 (default: all)")
    test.add_argument(
        "--for", dest="tag", default=known_builds.python_tag(), help="the tag of wheels (default: of here)"
    )
    test.add_argument("--wheels", type=Path, help="keep the wheels in this folder, and look there first")
    examine = commands.add_parser("examine", help="say which builds have no row, and which one they would get")
    examine.add_argument("which", nargs="+", help="such as jaxlib or libtpu==0.0.41")
    names = commands.add_parser("names", help="say which private names a release of jax and jaxlib does not have")
    names.add_argument("versions", nargs="*", help="such as 0.12.0 (default: what is installed)")
    names.set_defaults(run=run_names)
    placed = commands.add_parser("places", help="write where wheels have the sites of changes")
    placed.add_argument("wheels", nargs="+", type=Path)
    placed.set_defaults(run=run_places)
    for command, run in ((add, run_add), (examine, run_examine), (test, run_test)):
        command.add_argument("--python", default=sys.executable, help="the Python that compiles (default: this one)")
        command.add_argument("--under", default="", help="try wheels for another Python: how this one stands in for it")
        command.set_defaults(run=run)
    options = parser.parse_args()
    return int(options.run(options))


def run_add(options: argparse.Namespace) -> int:
    """Add wheels; return the exit status."""
    failed = 0
    for wheel in options.wheels:
        try:
            row = tried(wheel, described(wheel, options.under), options.python, options.under)
            write([*(other for other in known_builds.rows() if other.build_id != row.build_id), row])
            if package(row) == "jaxlib":
                write_release(row.version, released(wheel), stablehlo_of(wheel, options.python))
        except Unsuitable as error:
            failed += 1
            print(f"{wheel.name}: {error}", flush=True)
        else:
            print(f"{wheel.name}: added", flush=True)
    return 1 if failed else 0


def run_examine(options: argparse.Namespace) -> int:
    """Examine the wheels of packages; return the exit status: 1 if one has no row."""
    unknown = 0
    for requirement in options.which:
        with tempfile.TemporaryDirectory() as folder:
            try:
                pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, requirement)
                (wheel,) = Path(folder).glob("*.whl")
                row = described(wheel, options.under)
                if row.build_id in {row.build_id for row in known_builds.rows()}:
                    print(f"{wheel.name}: has a row", flush=True)
                    continue
                row = tried(wheel, row, options.python, options.under)
                print(f"{wheel.name}: has no row; `add` writes {json.dumps(dataclasses.asdict(row))}", flush=True)
            except Unsuitable as error:
                print(f"{requirement}: {error}", flush=True)
            unknown += 1
    return 1 if unknown else 0


def run_test(options: argparse.Namespace) -> int:
    """Try the wheels of rows again; return the exit status."""
    wanted = [row for row in known_builds.rows() if row.python in ("", options.tag)]
    if options.which:
        wanted = [row for row in wanted if {package(row), f"{package(row)}=={row.version}"} & {*options.which}]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for row in wanted:
            try:
                wheel = fetched(row, options.wheels or Path(scratch))
                build = dataclasses.replace(
                    tried(wheel, described(wheel, options.under), options.python, options.under), tested=""
                )
                if build != dataclasses.replace(row, tested=""):
                    raise Unsuitable(f"{build} instead of {row}")
            except Unsuitable as error:
                failed += 1
                print(f"{name(row)}: {error}", flush=True)
            else:
                print(f"{name(row)}: as known; {len(wanted)} in all", flush=True)
    print(f"{len(wanted)} builds, {failed} not as known")
    return 1 if failed else 0


def run_names(options: argparse.Namespace) -> int:
    """Say which private names are missing; return the exit status."""
    command = [sys.executable, "-s", str(ROOT / "tools" / "private_names.py")]
    if not options.versions:
        return subprocess.run(command, check=False).returncode
    failed = 0
    for version in options.versions:
        with tempfile.TemporaryDirectory() as folder:
            try:
                pip("install", "--target", folder, "--only-binary=:all:", f"jax=={version}", f"jaxlib=={version}")
            except Unsuitable as error:
                failed += 1
                print(f"{version}: {error}", flush=True)
                continue
            env = {**os.environ, "PYTHONPATH": folder}
            done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
        failed += bool(done.returncode)
        for line in (done.stdout + done.stderr).splitlines():
            print(f"{version}: {line}", flush=True)
    return 1 if failed else 0


def run_places(options: argparse.Namespace) -> int:
    """Write where wheels have the sites of changes; return the exit status."""
    known = {row.build_id for row in known_builds.rows()}
    table: dict[str, dict[str, list[int]]] = {}
    for wheel in sorted(options.wheels, key=lambda wheel: str(wheel.name)):
        with tempfile.TemporaryDirectory() as folder:
            path = library_of(wheel, folder)
            with known_builds.mapped(path) as code:
                if code.build_id() not in known:
                    print(f"{wheel.name}: has no row")
                    return 1
                finds = known_builds.LIBRARIES[path.name].sites[code.architecture]
                sought = {change: find(code) for change, find in finds.items() if change in places.CHANGES}
                table[code.build_id()] = {
                    change: [address - code.address for address in addresses] for change, addresses in sought.items()
                }
    lines = ",\n".join(f"{json.dumps(build_id)}: {json.dumps(rows)}" for build_id, rows in table.items())
    places.TABLE.write_text(f"{{\n{lines}\n}}\n", "ascii")
    return 0


class Unsuitable(Exception):
    """A wheel that gets no row, or is not as its row says."""


def described(wheel: Path, any_python: str) -> Build:
    """Examine a wheel, without trying it."""
    parts = re.fullmatch(r"(\w+)-([\w.]+)-(\w+)-(\w+)-[\w.]+(x86_64|aarch64)\.whl", wheel.name)
    distribution = parts[1].replace("_", "-") if parts else ""
    if not parts or distribution not in LIBRARIES:
        raise Unsuitable(f"it is not a wheel for x86-64 or aarch64 of {', '.join(LIBRARIES)}")
    tag = parts[4] if distribution == "jaxlib" else ""
    if tag not in ("", known_builds.python_tag()) and not any_python:
        raise Unsuitable(f"it is for {tag}; this is {known_builds.python_tag()}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            build = known_builds.examined(library_of(wheel, folder))
        except known_builds.PatchError as error:
            raise Unsuitable(f"{error}") from error
    return dataclasses.replace(build, version=parts[2], python=tag)


def library_of(wheel: Path, folder: str) -> Path:
    """Unpack the library of a wheel into a folder; return its path."""
    library = LIBRARIES[wheel.name.partition("-")[0].replace("_", "-")]
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(next(n for n in archive.namelist() if n.endswith("/" + library)), folder))


def tried(wheel: Path, row: Build, python: str, under: str) -> Build:
    """Compile with a wheel and a Python; return its row with what came of it. It changes no table."""
    platform_name = PLATFORMS[package(row)]
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        requirements = list(needed(row))
        pip("install", "--target", folder, "--no-deps", *wheels_of(row), *requirements)
        # It compiles with what it knows: a copy of stagec knows the wheel, so the table stays as it is.
        shutil.copytree(ROOT / "compiler" / "stagec", f"{folder}/stagec")
        others = [other for other in known_builds.rows() if other.build_id != row.build_id]
        write([*others, row], Path(folder, "stagec", "patches", known_builds.TABLE.name))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        for tool in Path(folder).glob("nvidia/cu*/bin/*"):
            tool.chmod(0o755)
        command = [python, "-s", "-m", "stagec.building.examination", platform_name]
        done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unsuitable(done.stderr.strip() or f"the process that compiles ended with {done.returncode}")
    build = Build(**json.loads(done.stdout))
    version = "import platform; print(platform.python_version())"
    done = subprocess.run([python, "-s", "-c", version], check=True, capture_output=True, text=True)
    made_with = f"CPython {done.stdout.strip()}{'t' * known_builds.python_tag().endswith('t')}"
    return dataclasses.replace(
        build, version=row.version, python=row.python, tested=made_with + (under and f", {under}")
    )


def released(wheel: Path) -> str:
    """Return the day of a wheel's files, which is that of the release: 2026-05-18."""
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo("jaxlib/__init__.py")
    return "{:04}-{:02}-{:02}".format(*member.date_time[:3])


def stablehlo_of(wheel: Path, python: str) -> str:
    """Return the newest version of StableHLO that a jaxlib reads."""
    ask = "from jaxlib.mlir.dialects import stablehlo; print(stablehlo.get_current_version())"
    with tempfile.TemporaryDirectory() as folder:
        pip("install", "--target", folder, "--no-deps", str(wheel), "numpy", "ml_dtypes")
        env = {**os.environ, "PYTHONPATH": folder}
        return subprocess.run([python, "-s", "-c", ask], check=True, capture_output=True, text=True, env=env).stdout[
            :-1
        ]


def write_release(version: str, day: str, stablehlo: str) -> None:
    """Write the row of a release, unless it is there."""
    if version not in releases.known():
        with releases.FILE.open("a", encoding="utf-8") as file:
            file.write(f'\n["{version}"]\nday = "{day}"\nstablehlo = "{stablehlo}"\n')


def needed(row: Build) -> Iterator[str]:
    """Yield what must be installed beside a wheel."""
    yield from ("numpy", "ml_dtypes")
    if PLATFORMS[package(row)] == "cuda":
        yield from (f"jaxlib=={row.version}", f"{package(row).removesuffix('-pjrt')}-plugin=={row.version}")
        yield from (f"{name}=={fits}" for name, fits in nvidia.TOOLKITS[package(row)].wheels.items())
    if PLATFORMS[package(row)] == "rocm":
        yield from (f"jaxlib=={row.version}", f"{package(row).removesuffix('-pjrt')}-plugin=={row.version}")
    if package(row) == "libtpu":
        of_jaxlib = {jaxlib: release.wheels.get("libtpu", "") for jaxlib, release in releases.known().items()}
        fits = [jaxlib for jaxlib, libtpu in of_jaxlib.items() if libtpu and f"{row.version}.".startswith(f"{libtpu}.")]
        if not fits:
            raise Unsuitable("it goes with no jaxlib: write which one into manifests/releases.toml")
        yield f"jaxlib=={fits[0]}"


def fetched(row: Build, folder: Path) -> Path:
    """Return the wheel of a row, from the folder or from where pip finds it."""
    pattern = (
        f"{package(row).replace('-', '_')}-{row.version}-*{row.python and f'-{row.python}-'}*{row.architecture}.whl"
    )
    if not list(folder.glob(pattern)):
        pip("download", "--no-deps", "--dest", str(folder), *wheels_of(row), f"{package(row)}=={row.version}")
    return next(folder.glob(pattern))


def wheels_of(row: Build) -> list[str]:
    """Return the words with which pip takes wheels for the Python and the architecture of a row."""
    words = ["--only-binary=:all:", *(f"--platform={system}_{row.architecture}" for system in MANYLINUX)]
    if row.python:
        major, minor = row.python[2], row.python[3:].rstrip("t")
        words += [f"--python-version={major}.{minor}", "--implementation=cp", f"--abi={row.python}"]
    return words


def pip(*words: str) -> None:
    """Run pip."""
    command = [sys.executable, "-m", "pip", "--quiet", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unsuitable(done.stderr.strip())


def package(row: Build) -> str:
    """Return the name of a row's wheel."""
    return known_builds.wheel(row)


def name(row: Build) -> str:
    """Return what a row is called."""
    words = [package(row), row.version, *(["for", row.python] if row.python else [])]
    return " ".join([*words, *(["on", row.architecture] if row.architecture != "x86_64" else [])])


def write(rows: Sequence[Build], table: Path = known_builds.TABLE) -> None:
    """Write a table, a row a line, in the order of packages, versions and Pythons."""

    def key(row: Build) -> tuple[int, list[int], int, str, bool]:
        version = [int(part) for part in row.version.split(".")]
        number = int("0" + row.python.strip("cpt"))
        return list(PLATFORMS).index(package(row)), version, number, row.python, row.architecture == "aarch64"

    plain = [dataclasses.asdict(row) for row in sorted(rows, key=key)]
    for row in plain:
        if row["architecture"] == "x86_64":  # as in all rows before there were others
            del row["architecture"]
        if not row["package"]:
            del row["package"]
    lines = [json.dumps(row, ensure_ascii=True) for row in plain]
    table.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n", "ascii")


if __name__ == "__main__":
    sys.exit(main())
