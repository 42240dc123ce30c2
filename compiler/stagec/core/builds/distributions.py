"""Find the package of an index that is known to bring a module: by tables, or because it is installed here.

An index has no list of modules. The package with a module's name may be another's work. Where an index has no such
package, anyone can register one, and then it is installed wherever the module's name is taken for a package's. Names of
packages are compared as indexes do (https://packaging.python.org/en/latest/specifications/name-normalization).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

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
    "mujoco.mjx": "mujoco-mjx",
    "orbax": "orbax-checkpoint",
    "orbax.export": "orbax-export",
    "ot": "pot",
    "pkg_resources": "setuptools",
    "plum": "plum-dispatch",
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
_OF_ITS_NAME = """
accelerate aiohttp anndata ase astropy attrs augmax autograd axlearn beartype blackjax bokeh boto3 botorch
brainstate brainunit brax cachetools cattrs chex click cloudpickle clu colorama contextlib2 coordax craftax cupy
cvxpy cython cytoolz dask datasets decorator deepdiff diffrax diffusers dill distrax distributed dm-control dm-env
dm-pix duckdb dynamax e3nn-jax einops einshape einx equinox etils evaluate evosax fastapi filelock fire flashbax
flask flatbuffers flax flowjax fsspec gcsfs gensim geopandas gpjax gpytorch gradio grain graphviz gym gymnasium
gymnax h5netcdf h5py haliax httpx huggingface-hub hypothesis imageio immutabledict interpax ipython ipywidgets
jax-cosmo jax-dataclasses jax-md jax-triton jaxley jaxlie jaxopt jaxtyping jinja2 joblib jraph jsonschema jumanji
keras kfac-jax kornia levanter librosa lightgbm lightning lineax lmdb loguru lxml lz4 markdown markupsafe matplotlib
mctx ml-collections ml-dtypes mlflow monai more-itertools mpi4jax mpi4py msgpack mujoco multidict navix netcdf4
netket networkx nibabel nltk numba numexpr numpyro objax omegaconf onnx onnxruntime openpyxl opt-einsum optax
optimistix optree optuna orjson oryx packaging pandas patsy pennylane penzai pgx pint plotly polars psutil pyarrow
pydantic pydicom pyfftw pyhf pymc pyparsing pyproj pytensor pytest pytorch-lightning pytz pyvista quax qwix rasterio
ray redis regex requests rich rlax s3fs safetensors scanpy scipy seaborn sentencepiece seqio setuptools shap shapely
simplejson six sounddevice soundfile spacy sqlalchemy starlette statsmodels sympy sympy2jax tables tabulate tenacity
tensorboard tensorboardx tensorflow tensorflow-datasets tensorflow-hub tensorflow-probability tensorflow-text
tensorly tensorstore termcolor tf-keras threadpoolctl tifffile tiktoken timm tinygp tokamax tokenizers toml tomli
tomlkit toolz torch torch-geometric torchaudio torchmetrics torchvision tornado tqdm transformers treescope trimesh
typeguard typer typing-extensions tyro ujson unxt urllib3 uvicorn vector wandb werkzeug wrapt xarray xgboost xxhash
yarl zarr zipp zstandard
"""
"""Packages that bring the module of their name, but for case, `_` and `-`."""
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


def of_import(module: str) -> str | None:
    """Return the package that is known to bring a module, by its dotted name; None if none is."""
    parts = module.split(".")
    known = (NAMES.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    if package := next(filter(None, known), None):
        return package
    if normalized(parts[0]) in _OF_ITS_NAME.split():
        return normalized(parts[0])
    installed = {normalized(name) for name in metadata.packages_distributions().get(parts[0], ())}
    # If it was installed from a folder or an address, the package with this name on an index may be another one.
    named = [name for name in installed if not metadata.distribution(name).read_text("direct_url.json")]
    return named[0] if len(installed) == len(named) == 1 else None


def provided(package: str, text: str) -> bool:
    """Return whether a file of requirements or a lock has a package, or another that brings the same module."""
    names = {normalized(name) for name in re.findall(r"^([A-Za-z0-9][\w.-]*)", text, re.MULTILINE)}
    return not names.isdisjoint((package, *_SAME.get(package, ())))
