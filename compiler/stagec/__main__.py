"""Runs the command line: `python .../stagec/__main__.py COMMAND ...` or `python -m stagec COMMAND ...`."""

import importlib.machinery
import os
import sys

_ANOTHER = """stagec: {path} is Python {here}, and this action is for Python {declared}
  if an image is stale, run the action where that Python is; if the declaration is, change it:
  stagec.python(interpreter_version = {version!r})
  if Python was updated on this machine, bazel clean --expunge lets stagec install its packages again
"""


_STALE = """stagec: {folder} does not have the packages of the lock ({problem})
  build that layer of the image again, from @stagec_python//:layer, and run the action where it is
"""


def _other_packages() -> "str | None":
    """What is wrong where the packages of an image are not those of the fingerprint, which is an action's input."""
    fingerprint = os.environ.get("STAGEC_FINGERPRINT")
    if not fingerprint or sys.argv[2:3] == ["--worker_template"]:  # its worker has looked
        return None
    from pathlib import Path

    folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).parent
    try:
        actual, expected = (path.read_text().strip() for path in (folder / "fingerprint.txt", Path(fingerprint)))
    except OSError as error:
        return _STALE.format(folder=folder, problem=error)
    if actual == expected:
        return None
    return _STALE.format(folder=folder, problem=f"its fingerprint is {actual[:16]}..., not {expected[:16]}...")


def _another_python() -> "str | None":
    """What is wrong where rules/toolchain.bzl declares another interpreter than this one, which may be an old one.

    Both facts are in the environment of an action, and so in its key. The release is there only if the action traces:
    3.11.2 and 3.11.7 compile a corpus to the same bytes (tests/reproducibility/corpus.py --pythons).
    """
    abi, version = importlib.machinery.EXTENSION_SUFFIXES[0].split(".")[1], sys.version.split()[0]
    declared_abi = os.environ.get("STAGEC_PYTHON_ABI") or abi
    declared = os.environ.get("STAGEC_PYTHON_VERSION") or (version if declared_abi == abi else "")
    if (declared_abi, declared) == (abi, version):
        return None
    wanted = f"{declared} ({declared_abi})".strip()
    return _ANOTHER.format(path=sys.executable, here=f"{version} ({abi})", declared=wanted, version=version)


if __name__ == "__main__":
    # Where Python puts the folder of a script on the path, or of what a link to it leads to, `import numpy` would find
    # stagec_arrays.numpy.
    if __spec__ is None and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    problem = _another_python() or _other_packages()
    if not problem:
        from stagec.worker.installed import find_byte_code, find_packages

        find_packages()
        find_byte_code()
    if sys.argv[-1] == "--persistent_worker":  # it runs no command itself, and so imports none
        from stagec.worker.server import serve

        sys.exit(serve(" ".join(sys.argv[1:-1]), problem))
    if problem:
        sys.stderr.write(problem)
        sys.exit(2)
    from stagec.cli import main

    # A Bazel action, without a worker: its arguments are in a file.
    command = sys.argv[1:3] if sys.argv[1:2] == ["action"] else sys.argv[1:2]
    if "STAGEC_PYTHON_ABI" in os.environ and sys.argv[1:-1] == command and sys.argv[-1].startswith("@"):
        from stagec.worker import alone

        sys.exit(alone.run(main))
    sys.exit(main())
