"""Runs the command line: `python .../stagec/__main__.py COMMAND ...` or `python -m stagec COMMAND ...`."""

import os
import sys

_OTHER_VERSION = """the Python toolchain has Python {here} ({path}), stagec's packages are installed for {wanted}
  register a toolchain with Python {wanted}, or install them with this one: set STAGEC_PYTHON to its path
"""

if __name__ == "__main__":
    # Where Python puts the folder of this file on the path, `import numpy` would find stagec.numpy.
    sys.path[:] = [entry for entry in sys.path if entry != __file__.rpartition(os.sep)[0]]
    wanted, here = os.environ.get("STAGEC_PYTHON_VERSION"), sys.version.split()[0]
    if wanted not in (None, here):  # rules/toolchain.bzl sets it where the interpreter is a toolchain's
        sys.stderr.write(_OTHER_VERSION.format(here=here, wanted=wanted, path=sys.executable))
        sys.exit(2)
    if sys.argv[2:] == ["--persistent_worker"]:  # it runs no command itself, and so imports none
        from stagec.worker.server import serve

        sys.exit(serve(sys.argv[1]))
    from stagec.cli import main

    sys.exit(main())
