"""A model repository for Triton, run with a stand-in for `triton_python_backend_utils`: Triton itself is not here.

Modules: `cli/triton.py`, `serving/triton.py`.
"""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import stagec
from stagec.cli import main
from stagec.serving.model import Model
from tests.serving.processes import X
from tests.serving.test_server import expected


def written(bundle: Path, folder: Path) -> tuple[int, str, str]:
    """Run `stagec triton`; return its status and what it prints and says."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = main(["triton", str(bundle), str(folder)])
    return status, printed.getvalue(), said.getvalue()


@pytest.fixture(scope="module")
def repository(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton") / "repository"
    status, told, _ = written(served, folder)
    assert status == 0
    assert "predict\n" in told
    assert "turned: left out: z is c64[4], and the Open Inference Protocol has no such datatype\n" in told
    assert "narrow: left out: brain is BF16, which Triton's Python backend cannot give to NumPy\n" in told
    return folder


def test_configurations_are_tritons(repository: Path, models: dict[str, Model]) -> None:
    assert {path.name for path in repository.iterdir()} == {
        name for name, model in models.items() if name != "narrow" and not model.states
    }
    for folder in repository.iterdir():
        config = text_format.Parse((folder / "config.pbtxt").read_text("utf-8"), model_config_pb2.ModelConfig())
        assert (config.name, config.backend, config.platform) == (folder.name, "python", "")
        model = models[folder.name]
        assert config.max_batch_size == (model.largest if model.rows else 0)
        assert [tensor.name for tensor in config.input] == [tensor.name for tensor in model.interface.inputs]
    assert [*config.dynamic_batching.preferred_batch_size] or not models[config.name].rows
    inodes = {(folder / "1" / "bundle.aot").stat().st_ino for folder in repository.iterdir()}
    assert len(inodes) == 1  # a bundle for all


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array = name, array

    def as_numpy(self) -> Any:
        return self.array


class Request:
    def __init__(self, wanted: list[str], **arrays: Any) -> None:
        self.wanted, self.arrays = wanted, arrays

    def requested_output_names(self) -> list[str]:
        return self.wanted


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of Triton's module that a model uses."""
    module = ModuleType("triton_python_backend_utils")
    parts = {
        "Tensor": Tensor,
        "TritonError": str,
        "InferenceResponse": lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
        "get_input_tensor_by_name": lambda request, name: (
            Tensor(name, request.arrays[name]) if name in request.arrays else None
        ),
    }
    for name, part in parts.items():
        setattr(module, name, part)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def loaded(repository: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location("model", repository / name / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_repository": str(repository / name), "model_version": "1", "model_name": name})
    return model


@pytest.mark.usefixtures("utils")
def test_requests_of_triton(repository: Path, bundle: stagec.Bundle) -> None:
    """Those that fit run together; an error is the response of its request alone."""
    model = loaded(repository, "predict")
    wanted = ["result['logits']"]
    big = np.repeat(X, 10, axis=0)
    requests = [
        Request(wanted, x=X),
        Request(wanted, x=big[:29]),
        Request(wanted, x=X[:, :3]),
        Request(wanted, x=X.astype(np.float64)),
        Request(wanted),
        Request(["result['label']", *wanted], x=X),
    ]
    answers = model.execute(requests)
    (logits,) = answers[0].tensors
    assert logits.as_numpy().tobytes() == expected(bundle, X, 32).tobytes()  # 32 rows: beside the second
    assert answers[1].tensors[0].as_numpy().shape == (29, 5)
    assert [tensor.name for tensor in answers[5].tensors] == ["result['label']", "result['logits']"]
    assert answers[5].tensors[1].as_numpy().tobytes() == expected(bundle, X, 8).tobytes()
    assert [answer.error for answer in answers] == [
        None,
        None,
        "x: shape is [3, 3]; expected f32[batch,16]",
        "x: datatype is 'float64'; expected FP32",
        "x is missing",
        None,
    ]
    model.finalize()


@pytest.mark.usefixtures("utils")
def test_a_variant_runs_each_request_alone(repository: Path) -> None:
    model = loaded(repository, "raised-cube")
    answers = model.execute([Request(["result"], x=np.full(3, n, np.float32)) for n in (1, 2)])
    assert [answer.tensors[0].as_numpy().tolist() for answer in answers] == [[1, 1, 1], [8, 8, 8]]


def test_a_folder_that_is_not_empty(served: Path, repository: Path) -> None:
    assert written(served, repository) == (2, "", f"{repository}: the folder is not empty\n  give another one\n")
