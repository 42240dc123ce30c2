"""Build a corpus of programs many times over, each time in other circumstances; print how many hashes each has.

    python tests/reproducibility/corpus.py [--builds 20] [--platform cpu] [--programs NAME ...] [--pythons PATH ...]

A build is two fresh processes, of the export and of the compilation of all programs, in a folder of its own, varied as
`stagec reproduce` varies its builds. For CPUs, a third exports the models that compute while they are imported
(models.py), every second time as on a machine with another CPU. Builds take turns with the interpreters, of which all
import the same packages.
Exit status 1 when a program has more than one hash.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent.parent / "compiler"))

from stagec.audit.reproducibility import VARIATIONS, Variation, run_varied  # noqa: E402  # found through the line above


def variation(number: int) -> Variation:
    """Return the variation of the build `number` of many; equal numbers have equal variations."""
    base = VARIATIONS[number % 2]
    env = {**base.env, "PYTHONHASHSEED": str(number * 7919 % 4294967296), "TZ": f"XXX{number % 24 - 12}"}
    clock = f"20{30 + number % 30}-01-{number % 27 + 1:02} 01:02:03" if base.clock else ""
    return Variation(f"{base.folder}{number}", env, base.umask, number % 3 + 1, clock, base.another_cpu)


def build(number: int, scratch: Path, platform: str, only: list[str], python: str) -> dict[str, str]:
    """Build all programs in the circumstances `number`; return artifact ("name.exported", "name.xla") -> SHA-256."""
    how = variation(number)
    folder = scratch / how.folder
    folder.mkdir(parents=True)
    for name in ("programs.py", "models.py", "build_programs.py"):
        shutil.copy(HERE / name, folder)
    # Not the file's first lines alone: the bytes must not follow the line numbers.
    source = (folder / "programs.py").read_text()
    (folder / "programs.py").write_text(source.replace("import jax\n", "# moved\n" * number + "import jax\n", 1))
    hashes = {}
    steps = [("exported", ["export", "."]), ("xla", ["compile", ".", "."])]
    steps += [("model", ["models", "."])] if platform == "cpu" and not only else []
    for suffix, arguments in steps:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [
                *(entry for entry in sys.path if entry.endswith("site-packages")),
                str(HERE.parent.parent / "compiler"),
                ".",
            ]
        )
        done = run_varied([python, "-B", "-s", "-S", "build_programs.py", platform, *arguments, *only], how, folder)
        if done.returncode:
            raise SystemExit(f"build {number}: {done.stderr}")
        hashes |= {f"{name}.{suffix}": digest for name, digest in map(str.split, done.stdout.splitlines())}
    return hashes


def corpus(builds: int, platform: str, only: list[str], pythons: list[str]) -> dict[str, set[str]]:
    """Build `builds` times; return artifact -> the hashes that it had."""
    found: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(builds):
            python = pythons[number % len(pythons)]
            for name, digest in build(number, Path(scratch), platform, only, python).items():
                found[name].add(digest)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=20)
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda", "tpu"))
    parser.add_argument("--programs", nargs="*", default=[])
    parser.add_argument("--pythons", nargs="*", default=[])
    options = parser.parse_args()
    found = corpus(options.builds, options.platform, options.programs, [sys.executable, *options.pythons])
    for name in sorted(found):
        print(f"{name:<28} {options.builds:>3} builds  {len(found[name])} hash{'es' if len(found[name]) > 1 else ''}")
    disorderly = [name for name, hashes in found.items() if len(hashes) > 1]
    print(f"{len(found)} artifacts, {len(disorderly)} with more than one hash")
    return 1 if disorderly else 0


if __name__ == "__main__":
    sys.exit(main())
