"""Builds tests/zoo with the packages that this runs with, into a file for all their tests: `zoo_archive.py OUT.tar`."""

import sys
import tarfile
import tempfile
from pathlib import Path

from tests.building import build_zoo


def main(file: str) -> None:
    """Write the bundle and its other artifacts into an archive. file: its path."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(file, "w") as archive:
        archive.add(build_zoo(Path(folder)).parent, ".")


if __name__ == "__main__":
    main(sys.argv[1])
