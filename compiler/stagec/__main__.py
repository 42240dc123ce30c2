"""Runs the command line: `python .../stagec/__main__.py COMMAND ...` or `python -m stagec COMMAND ...`."""

import sys

if __name__ == "__main__":
    if sys.argv[2:] == ["--persistent_worker"]:  # it runs no command itself, and so imports none
        from stagec.worker.server import serve

        sys.exit(serve(sys.argv[1]))
    from stagec.cli import main

    sys.exit(main())
