"""Where an action's packages are, if they are not inputs of it: rules/toolchain.bzl, `packages_are_inputs`."""

import os
import sys

_FINGERPRINT = "fingerprint.txt"


def find_packages() -> None:
    """Have this process, and those that it starts, import packages from where they are installed on this machine.

    An entry of PYTHONPATH that is not there gets replaced by the folder beside the file that the link to the packages'
    fingerprint leads to: the link is in Bazel's sandbox, or in a worker's own folder, and the packages are not.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for at, entry in enumerate(entries):
        folder, name = os.path.split(entry)
        fingerprint = os.path.join(folder, _FINGERPRINT)
        if not os.path.exists(entry) and os.path.exists(fingerprint):
            entries[at] = os.path.join(os.path.dirname(os.path.realpath(fingerprint)), name)
            known = (entry, os.path.abspath(entry))
            sys.path[:] = [entries[at] if path in known else path for path in sys.path]
            os.environ["PYTHONPATH"] = os.pathsep.join(entries)
