"""The command line of stagec, in the environment that compiles for aarch64."""

import sys

from stagec.cli import main

sys.exit(main(sys.argv[1:]))
