"""Write a model repository for Triton: a folder for each model; Triton's Python backend runs it from the bundle.

Source: https://github.com/triton-inference-server/python_backend. The bundle is in the folder of each model, because
Triton may fetch them one by one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from stagec.serving import messages
from stagec.serving.model import Arrays, Model
from stagec.serving.refusal import RequestError

_BUNDLE = "bundle.aot"
_CODE = '''"""{name} of a bundle, for Triton's Python backend. `stagec triton` writes this file."""

from stagec.serving.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write(bundle: str, models: Mapping[str, Model], folder: Path, delay: float) -> dict[str, str]:
    """Write the repository; return why models are not in it. delay: seconds that a request waits for others.

    folder: not there yet, or empty. Copies of the bundle are hard links to one file, if the file system can. Raises
    OSError.
    """
    left_out: dict[str, str] = {}
    first = None
    for name, model in models.items():
        if model.states:
            left_out[name] = f"{model.alone}, and only `stagec serve` has sequences"
            continue
        narrow = [t.name for t in (*model.interface.inputs, *model.interface.outputs) if t.datatype == "BF16"]
        if narrow:
            left_out[name] = f"{narrow[0]} is BF16, which Triton's Python backend cannot give to NumPy"
            continue
        place = folder / name / "1"
        place.mkdir(parents=True)
        config = messages.classes()["ModelConfig"](**{**model.config(delay, 0), "platform": "", "backend": "python"})
        (folder / name / "config.pbtxt").write_text(text_format.MessageToString(config), "utf-8")
        (place / "model.py").write_text(_CODE.format(name=name), "utf-8")
        if first is None:
            first = Path(shutil.copyfile(bundle, place / _BUNDLE))
        else:
            try:
                os.link(first, place / _BUNDLE)
            except OSError:
                shutil.copyfile(bundle, place / _BUNDLE)
    return left_out


class TritonPythonModel:
    """A model as Triton's Python backend calls it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model. args: Triton's: the model's folder and name, and the version to load."""
        from stagec.loader.serving import load  # the model's code, and not that of who writes a repository

        name = args["model_name"]
        self._bundle = load(Path(args["model_repository"]) / args["model_version"] / _BUNDLE, policy="executable_only")
        functions = {v.name: v for f in self._bundle.values() for v in (*f.variants.values(), f)}
        self._model = Model(functions[name], self._bundle.version, "batch")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request, or its error. Compatible requests run together."""
        import triton_python_backend_utils as utils  # only Triton has it

        answers: list[Any] = [None] * len(requests)
        groups: list[list[tuple[int, Arrays]]] = []
        for place, request in enumerate(requests):
            try:
                self._add(groups, place, self._arrays(utils, request))
            except RequestError as error:
                answers[place] = utils.InferenceResponse(error=utils.TritonError(str(error)))
        for group in groups:
            _, results = self._model.run([arrays for _, arrays in group])
            for (place, _), outputs in zip(group, results, strict=True):
                wanted = requests[place].requested_output_names()
                tensors = [
                    utils.Tensor(tensor.name, array)
                    for tensor, array in zip(self._model.interface.outputs, outputs, strict=True)
                    if tensor.name in wanted
                ]
                answers[place] = utils.InferenceResponse(tensors)
        return answers

    def finalize(self) -> None:
        """Unload the bundle."""
        self._bundle.close()

    def _arrays(self, utils: Any, request: Any) -> Arrays:
        arrays = []
        for tensor in self._model.interface.inputs:
            given = utils.get_input_tensor_by_name(request, tensor.name)
            if given is None:
                raise RequestError("request", f"{tensor.name} is missing")
            array = given.as_numpy()
            tensor.checked_shape(array.shape, tensor.datatype if array.dtype == tensor.dtype else str(array.dtype))
            arrays.append(array)
        self._model.fit(arrays)
        return arrays

    def _add(self, groups: list[list[tuple[int, Arrays]]], place: int, arrays: Arrays) -> None:
        """Add a request to the last group if they are compatible, or begin another group."""
        model = self._model
        if model.rows and groups:
            last = groups[-1]
            count = sum(model.count(others) for _, others in last) + model.count(arrays)
            same = [a.shape[1:] for a in last[0][1]] == [a.shape[1:] for a in arrays]
            if same and count <= model.largest:
                last.append((place, arrays))
                return
        groups.append([(place, arrays)])
