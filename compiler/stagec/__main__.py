"""Runs the command line: `python .../stagec/__main__.py COMMAND ...` or `python -m stagec COMMAND ...`."""

import sys

from stagec.cli import main

if __name__ == "__main__":
    sys.exit(main())
