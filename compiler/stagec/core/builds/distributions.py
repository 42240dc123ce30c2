"""Find the package of an index that brings a module, with a table of packages that do not have the module's name.

An index has no list of modules, and importlib.metadata knows those of installed packages alone. Names of packages are
compared as indexes do (https://packaging.python.org/en/latest/specifications/name-normalization).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LOCK_COMMAND = "bazel run @stagec//:lock --"
"""The command that locks the packages of a file; its argument is the file."""

NAMES: Mapping[str, str] = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "gitpython",
    "google.cloud.storage": "google-cloud-storage",
    "google.protobuf": "protobuf",
    "haiku": "dm-haiku",
    "hydra": "hydra-core",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "orbax": "orbax-checkpoint",
    "orbax.export": "orbax-export",
    "ot": "pot",
    "pkg_resources": "setuptools",
    "pylab": "matplotlib",
    "pyro": "pyro-ppl",
    "pywt": "pywavelets",
    "ruamel.yaml": "ruamel-yaml",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "slugify": "python-slugify",
    "sonnet": "dm-sonnet",
    "tree": "dm-tree",
    "umap": "umap-learn",
    "usb": "pyusb",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Dotted name of a module -> the package that brings it, where they differ in more than case, `_` and `-`."""
_SAME: Mapping[str, tuple[str, ...]] = {
    "faiss-cpu": ("faiss-gpu",),
    "opencv-python-headless": ("opencv-contrib-python", "opencv-contrib-python-headless", "opencv-python"),
    "pycryptodome": ("pycrypto",),
    "tensorflow": ("tensorflow-cpu", "tensorflow-cpu-aws", "tf-nightly", "tf-nightly-cpu"),
    "tensorflow-probability": ("tfp-nightly",),
}
"""A package -> others that bring the same module; an environment has one of them."""


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def of_import(module: str) -> str:
    """Return the package that brings a module, by its dotted name: from the table, else the top module's name."""
    parts = module.split(".")
    known = (NAMES.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    return next(filter(None, known), None) or normalized(parts[0])


def provided(package: str, text: str) -> bool:
    """Return whether a file of requirements or a lock has a package, or another that brings the same module."""
    names = {normalized(name) for name in re.findall(r"^([A-Za-z0-9][\w.-]*)", text, re.MULTILINE)}
    return not names.isdisjoint((package, *_SAME.get(package, ())))
